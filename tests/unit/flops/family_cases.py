"""How each family is compared with transformers' own model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """A family as it is compared."""

    changes: dict[str, Any] = field(default_factory=dict)  # of the class's own defaults
    family: str = ""  # where it is not the case's name
    is_real: bool = False  # needs values
    linear_only: str = ""  # why only matrix products with weights are compared
    image_size: tuple[int, int] | None = None


SCAN = "the reference code scans in chunks, by products of its own; torch miscounts its convolution"
_DENSE = "transformers runs every expert on every token"
TWO: dict[str, Any] = {"num_hidden_layers": 2}
_FOUR: dict[str, Any] = {"num_hidden_layers": 4}

TEXT: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_SMALL = Case({k: v for k, v in TEXT.items() if k != "num_key_value_heads"}, is_real=True)

_GEMMA4 = {
    **TEXT,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 200,
    "hidden_size_per_layer_input": 8,
}
_MASKED = {"mask_token_id": 32, "pad_token_id": 1}

CASES: dict[str, Case] = {
    "gpt2": Case({"n_layer": 2}),
    "gpt_bigcode": Case({"n_layer": 2}),
    "gptj": Case({"n_layer": 2}),
    "gpt_neo": Case({"num_layers": 4, "attention_types": [[["global", "local"], 2]]}),
    "bloom": Case({"n_layer": 2}),
    "mpt": Case({"n_layers": 2}),
    "opt": Case({**_SMALL.changes, "ffn_dim": 96, "word_embed_proj_dim": 64}, is_real=True),
    "dbrx": Case(
        {
            "vocab_size": 200,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        },
        is_real=True,
    ),
    "ministral": Case({**TWO, "head_dim": 128}),
    "qwen3_moe": Case({**TWO, "head_dim": 128}),
    "glm4_moe": Case({**TWO, "head_dim": 128, "use_qk_norm": True}),
    "nemotron": Case({**TWO, "num_key_value_heads": 8}),
    "hunyuan_v1_dense": Case({**TWO, "head_dim": 128, "num_key_value_heads": 8}),
    "kimi_k2": Case({**_FOUR, "first_k_dense_replace": 1}, family="deepseek_v3"),
    "deepseek_v2": Case({**_FOUR, "first_k_dense_replace": 1, "num_experts_per_tok": 6}),
    "deepseek_v3": Case({**_FOUR, "first_k_dense_replace": 1}),
    "dots1": Case(
        {
            **_FOUR,
            "head_dim": 128,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "max_window_layers": 2,
        }
    ),
    "hunyuan_v1_moe": Case(
        {**TWO, "head_dim": 128, "num_key_value_heads": 8, "num_experts": 4, "moe_topk": 2}
    ),
    "granitemoeshared": Case({**TWO, "shared_intermediate_size": 512}),
    "gpt-sw3": Case({"n_layer": 2}),
    "llama4_text": Case(_FOUR, linear_only=_DENSE),
    "mamba": Case(TWO, linear_only=SCAN),
    "falcon_mamba": Case(TWO, linear_only=SCAN),
    "mamba2": Case(TWO, linear_only=SCAN),
    "jamba": Case({"num_hidden_layers": 8}, linear_only=SCAN),
    "bamba": Case({**_FOUR, "attn_layer_indices": [1]}, linear_only=SCAN),
    "falcon_h1": Case(TWO, linear_only=SCAN),
    "granitemoehybrid": Case(
        {**_FOUR, "layer_types": ["mamba", "attention"] * 2}, linear_only=SCAN
    ),
    "qwen3_next": Case(_FOUR, linear_only=SCAN),
    "qwen3_5_text": Case(_FOUR, linear_only=SCAN),
    "qwen3_5_moe_text": Case(_FOUR, linear_only=SCAN),
    "nemotron_h": Case({}, linear_only=SCAN),
    "lfm2": Case({**_FOUR, "full_attn_idxs": [1, 3]}, linear_only=SCAN),
    "lfm2_moe": Case({**_FOUR, "layer_types": ["conv", "full_attention"] * 2}, linear_only=SCAN),
    "minimax": Case(_FOUR, linear_only=SCAN),
    "recurrent_gemma": Case({"num_hidden_layers": 3}, linear_only=SCAN),
    "kimi_linear": Case(
        {**TWO, "layer_types": ["linear_attention", "full_attention"]}, linear_only=SCAN
    ),
    "albert": _SMALL,
    "albert in groups": Case(
        {**_SMALL.changes, **_FOUR, "num_hidden_groups": 2, "inner_group_num": 2},
        family="albert",
        is_real=True,
    ),
    "esm": Case({**_SMALL.changes, **_MASKED}, is_real=True),
    "esm with rotary positions": Case(
        {
            **_SMALL.changes,
            **_MASKED,
            "position_embedding_type": "rotary",
            "emb_layer_norm_before": True,
        },
        family="esm",
        is_real=True,
    ),
    "ernie with tasks": Case({**TWO, "use_task_id": True}, family="ernie"),
    "gemma3n_text": Case(
        {
            **TEXT,
            "num_hidden_layers": 10,
            "num_kv_shared_layers": 4,
            "head_dim": 16,
            "laurel_rank": 8,
            "vocab_size_per_layer_input": 200,
            "hidden_size_per_layer_input": 8,
        },
        is_real=True,
    ),
    "gemma4_text": Case({**_GEMMA4}, is_real=True),
    "gemma4 that shares keys": Case(
        {
            **_GEMMA4,
            "num_hidden_layers": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        family="gemma4_text",
        is_real=True,
    ),
    "gemma4 with experts": Case(
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
        family="gemma4_text",
        is_real=True,
    ),
    "distilbert": Case({"n_layers": 2}),
    "modernbert": Case({**_SMALL.changes, "pad_token_id": 0}, is_real=True),
    "deberta-v2": _SMALL,
    "deberta with relative positions": Case(
        {
            **_SMALL.changes,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "position_buckets": 32,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
        },
        family="deberta-v2",
        is_real=True,
    ),
    "deberta with a convolution": Case(
        {
            **_SMALL.changes,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "max_relative_positions": 40,
            "conv_kernel_size": 3,
        },
        family="deberta-v2",
        is_real=True,
    ),
    "t5": Case({"num_layers": 2}),
    "t5 gated and not tied": Case(
        {"num_layers": 2, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        family="t5",
    ),
    "mt5": Case({"num_layers": 2}),
    "umt5": Case({"num_layers": 3, "num_decoder_layers": 2}),
    "whisper": Case({"max_source_positions": 100}),
}
_HALVES: dict[str, Any] = {"encoder_layers": 3, "decoder_layers": 2}
CASES |= {name: Case(_HALVES) for name in ("bart", "mbart", "pegasus", "m2m_100", "marian")}

_VIT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
}
_READER: dict[str, Any] = {**_SMALL.changes, "max_position_embeddings": 77}
_BOTH = {"text_config": _READER, "vision_config": _VIT}
CASES |= {
    "vit": Case(_VIT, is_real=True),
    "dinov2": Case(_VIT, is_real=True),
    "dinov2 with a gate": Case({**_VIT, "use_swiglu_ffn": True}, family="dinov2", is_real=True),
    "clip": Case({**_BOTH, "projection_dim": 48}, is_real=True),
    "clip_text_model": Case(_READER, is_real=True),
    "clip_vision_model": Case(_VIT, is_real=True),
    "siglip": Case({**_BOTH, "text_config": {**_READER, "projection_size": 32}}, is_real=True),
    "siglip_vision_model": Case(_VIT, is_real=True),
}
_QWEN_IDS = {
    "image_token_id": 199,
    "vision_start_token_id": 198,
    "vision_end_token_id": 197,
    "video_token_id": 196,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_QWEN_VIT = {"depth": 3, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 40}
_QWEN_VIT |= {"num_heads": 4, "patch_size": 7}


def _sees(
    text: str,
    vision: str,
    *,
    text_changes: dict[str, Any] | None = None,
    vision_changes: dict[str, Any] | None = None,
    family: str = "",
    image_size: tuple[int, int] | None = None,
    **changes: object,
) -> Case:
    parts = {
        "text_config": {**TEXT, "model_type": text, **(text_changes or {})},
        "vision_config": {**_VIT, "model_type": vision, **(vision_changes or {})},
    }
    fields = {**parts, "image_token_index": 199, **changes}
    return Case(fields, family=family, is_real=True, image_size=image_size)


def _qwen(
    text: str,
    vision: dict[str, Any],
    image_size: tuple[int, int],
    *,
    linear_only: str = "",
    **more: object,
) -> Case:
    part = {**TEXT, "model_type": text, "rope_parameters": _ROPE, **more}
    fields = {"text_config": part, "vision_config": {**_QWEN_VIT, **vision}, **_QWEN_IDS}
    return Case(fields, is_real=True, image_size=image_size, linear_only=linear_only)


_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_TAPS = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


CASES |= {
    "llava": _sees("llama", "clip_vision_model"),
    "llava of two layers' features": _sees(
        "mistral",
        "siglip_vision_model",
        family="llava",
        vision_feature_layer=[-2, 1],
        vision_feature_select_strategy="full",
    ),
    "llava with pixtral": _sees(
        "mistral",
        "pixtral",
        family="llava",
        image_size=(28, 42),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    "llava_next": _sees(
        "mistral",
        "clip_vision_model",
        image_size=(30, 50),
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
    ),
    "paligemma": _sees(
        "gemma",
        "siglip_vision_model",
        text_changes={"head_dim": 16},
        vision_changes={"vision_use_head": False, "projection_dim": 64},
        projection_dim=64,
    ),
    "gemma3": _sees(
        "gemma3_text", "siglip_vision_model", text_changes={"head_dim": 16}, mm_tokens_per_image=4
    ),
    "mistral3": _sees(
        "mistral",
        "pixtral",
        text_changes={"head_dim": 16},
        vision_changes={"image_size": 56},
        image_size=(28, 56),
        vision_feature_layer=-1,
    ),
    "idefics3": _sees("llama", "idefics3_vision", image_token_id=199, pad_token_id=0),
    "smolvlm": _sees("llama", "smolvlm_vision", image_token_id=199, pad_token_id=0),
    "internvl": _sees(
        "qwen2",
        "internvl_vision",
        vision_changes={"image_size": [28, 28], "patch_size": [7, 7]},
        image_token_id=199,
    ),
    "qwen2_vl": _qwen("qwen2_vl_text", {"embed_dim": 32, "hidden_size": 64}, (28, 56)),
    "qwen2_5_vl": _qwen(
        "qwen2_5_vl_text", {"window_size": 28, "fullatt_block_indexes": [1]}, (42, 70)
    ),
    "qwen3_vl": _qwen("qwen3_vl_text", _TAPS, (28, 56), head_dim=16),
    "qwen3_vl_moe": _qwen(
        "qwen3_vl_moe_text", _TAPS, (28, 56), head_dim=16, num_experts=8, **_EXPERTS
    ),
    "qwen3_5": _qwen(
        "qwen3_5_text", {"num_position_embeddings": 16}, (28, 56), linear_only=SCAN, **_LINEAR
    ),
    "qwen3_5_moe": _qwen(
        "qwen3_5_moe_text",
        {"num_position_embeddings": 16},
        (28, 56),
        linear_only=SCAN,
        num_experts=8,
        shared_expert_intermediate_size=40,
        **_LINEAR,
        **_EXPERTS,
    ),
}
