"""Every family against transformers' own model: its parameters, and torch's count of its FLOPs.

Models are built without values where they can be; where the code asks for values (which tokens
are an image, which expert was picked) they are small and real. Torch counts what eager attention
computes: the whole rectangle, whatever the mask.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from ergmeter.flops.analytic import step_flops, total
from ergmeter.flops.batch import Batch
from ergmeter.flops.config import Config
from ergmeter.flops.encoders import ENCODERS
from ergmeter.flops.families import DECODERS
from ergmeter.flops.graph import Attention
from ergmeter.flops.models import known_families, model_graph
from ergmeter.flops.seq2seq import SEQ2SEQ
from ergmeter.flops.vision import VISION

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.flops.graph import Graph, Node

pytestmark = pytest.mark.filterwarnings("ignore")
torch = pytest.importorskip("torch")
flop_counter = pytest.importorskip("torch.utils.flop_counter")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

SEQ_LEN, SOURCE_LEN, BATCH = 64, 96, 2


@dataclass(frozen=True)
class Case:
    """A family as it is compared."""

    changes: dict[str, Any] = field(default_factory=dict)  # of the class's own defaults
    family: str = ""  # where it is not the case's name
    is_real: bool = False  # needs values
    linear_only: str = ""  # why only matrix products with weights are compared
    image_size: tuple[int, int] | None = None


_SCAN = (
    "the reference code scans in chunks, by products of its own; torch miscounts its convolution"
)
_DENSE = "transformers runs every expert on every token"
_TWO: dict[str, Any] = {"num_hidden_layers": 2}
_FOUR: dict[str, Any] = {"num_hidden_layers": 4}

_TEXT: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_SMALL = Case({k: v for k, v in _TEXT.items() if k != "num_key_value_heads"}, is_real=True)

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
    "ministral": Case({**_TWO, "head_dim": 128}),
    "qwen3_moe": Case({**_TWO, "head_dim": 128}),
    "glm4_moe": Case({**_TWO, "head_dim": 128, "use_qk_norm": True}),
    "nemotron": Case({**_TWO, "num_key_value_heads": 8}),
    "hunyuan_v1_dense": Case({**_TWO, "head_dim": 128, "num_key_value_heads": 8}),
    "kimi_k2": Case({**_FOUR, "first_k_dense_replace": 1}, family="deepseek_v3"),
    "deepseek_v2": Case({**_FOUR, "first_k_dense_replace": 1, "num_experts_per_tok": 6}),
    "deepseek_v3": Case({**_FOUR, "first_k_dense_replace": 1}),
    "llama4_text": Case(_FOUR, linear_only=_DENSE),
    "mamba": Case(_TWO, linear_only=_SCAN),
    "falcon_mamba": Case(_TWO, linear_only=_SCAN),
    "mamba2": Case(_TWO, linear_only=_SCAN),
    "jamba": Case({"num_hidden_layers": 8}, linear_only=_SCAN),
    "bamba": Case({**_FOUR, "attn_layer_indices": [1]}, linear_only=_SCAN),
    "falcon_h1": Case(_TWO, linear_only=_SCAN),
    "granitemoehybrid": Case(
        {**_FOUR, "layer_types": ["mamba", "attention"] * 2}, linear_only=_SCAN
    ),
    "qwen3_next": Case(_FOUR, linear_only=_SCAN),
    "qwen3_5_text": Case(_FOUR, linear_only=_SCAN),
    "qwen3_5_moe_text": Case(_FOUR, linear_only=_SCAN),
    "nemotron_h": Case({}, linear_only=_SCAN),
    "distilbert": Case({"n_layers": 2}),
    "modernbert": Case({**_SMALL.changes, "pad_token_id": 0}, is_real=True),
    "deberta with relative positions": Case(
        {
            **_TWO,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "position_buckets": 32,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
        },
        family="deberta-v2",
    ),
    "deberta with a convolution": Case(
        {
            **_TWO,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "max_relative_positions": 40,
            "conv_kernel_size": 3,
        },
        family="deberta-v2",
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
        "text_config": {**_TEXT, "model_type": text, **(text_changes or {})},
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
    part = {**_TEXT, "model_type": text, "rope_parameters": _ROPE, **more}
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
        "qwen3_5_text", {"num_position_embeddings": 16}, (28, 56), linear_only=_SCAN, **_LINEAR
    ),
    "qwen3_5_moe": _qwen(
        "qwen3_5_moe_text",
        {"num_position_embeddings": 16},
        (28, 56),
        linear_only=_SCAN,
        num_experts=8,
        shared_expert_intermediate_size=40,
        **_LINEAR,
        **_EXPERTS,
    ),
}
NAMES = sorted({*known_families(), *CASES})


@dataclass
class Built:
    """A family's graph beside transformers' model and what both are given."""

    graph: Graph
    model: Any
    batch: Batch
    inputs: dict[str, Any]


def _auto(kind: str) -> Any:
    if kind in VISION:
        return transformers.AutoModelForImageTextToText
    if kind == "whisper":
        return transformers.AutoModelForSpeechSeq2Seq
    if kind in SEQ2SEQ:
        return transformers.AutoModelForSeq2SeqLM
    if kind in ENCODERS:
        return transformers.AutoModelForMaskedLM
    return transformers.AutoModelForCausalLM


def _mode(case: Case) -> Any:
    if case.is_real:
        return nullcontext()
    return torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)


def _built(name: str, case: Case) -> Built:
    kind = case.family or name
    changes = case.changes or ({} if kind in CASES else _TWO)
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind](**changes)
    graph = model_graph(Config(config.to_dict(), where=name), image_size=case.image_size)
    if graph.params != graph.params_active:  # torch does not count grouped products
        getattr(config, "text_config", config)._experts_implementation = "batched_mm"
    model = _auto(kind).from_config(config, attn_implementation="eager").eval()
    model.requires_grad_(requires_grad=True)  # fixed sines are parameters too
    batch, inputs = _inputs(kind, graph, case)
    return Built(graph, model, batch, inputs)


def _inputs(kind: str, graph: Graph, case: Case) -> tuple[Batch, dict[str, Any]]:
    if kind in VISION:
        return _image_inputs(kind, graph, case)
    rows = torch.randint(1, 100, (BATCH, SEQ_LEN))
    facts = graph.facts
    if kind in ENCODERS:
        return Batch.of(BATCH, SEQ_LEN, facts=facts), {"input_ids": rows}
    if kind == "whisper":
        audio = torch.randn(BATCH, 80, 2 * facts["source_len"])
        return Batch.of(BATCH, SEQ_LEN, facts=facts), {
            "input_features": audio,
            "decoder_input_ids": rows,
        }
    if kind in SEQ2SEQ:
        source = torch.randint(1, 100, (BATCH, SOURCE_LEN))
        batch = Batch.of(BATCH, SEQ_LEN, source_len=SOURCE_LEN, facts=facts)
        return batch, {"input_ids": source, "decoder_input_ids": rows}
    return Batch.of(BATCH, SEQ_LEN, facts=facts), {"input_ids": rows, "use_cache": False}


def _image_inputs(kind: str, graph: Graph, case: Case) -> tuple[Batch, dict[str, Any]]:
    """One image at the start of one sequence."""
    facts = graph.facts
    tokens = facts["tokens_per_image"]
    rows = torch.randint(1, 100, (1, tokens + 16))
    rows[0, 4 : 4 + tokens] = 199
    is_image = rows == 199
    high, wide = 7 * facts["grid_rows"], 7 * facts["grid_columns"]
    inputs: dict[str, Any] = {"input_ids": rows, "use_cache": False}
    inputs["pixel_values"] = torch.randn(1, 3, high, wide)
    if kind.startswith("qwen"):
        rows[0, 3] = 198
        inputs["pixel_values"] = torch.randn(high * wide // 49, 2 * 3 * 49)
        inputs["image_grid_thw"] = torch.tensor([[1, high // 7, wide // 7]])
        inputs["mm_token_type_ids"] = is_image.int()
    elif kind == "llava_next":
        inputs["pixel_values"] = torch.randn(1, facts["views_per_image"], 3, high, wide)
        inputs["image_sizes"] = torch.tensor([case.image_size])
    elif kind in ("idefics3", "smolvlm"):
        inputs["pixel_values"] = torch.randn(1, 1, 3, high, wide)
    elif kind == "mistral3" or case.image_size is not None:
        inputs["image_sizes"] = torch.tensor([[high, wide]])
    if kind in ("paligemma", "gemma3"):
        inputs["token_type_ids"] = is_image.long()
    return Batch.of(1, tokens + 16, images=1, facts=facts), inputs


def _counted(built: Built, *, linear_only: bool = False) -> tuple[float, float]:
    """Forward FLOPs and those of the whole step, as torch counts them."""
    with flop_counter.FlopCounterMode(display=False) as counter:
        logits = built.model(**built.inputs).logits
        forward = dict(counter.get_flop_counts()["Global"])
        logits.float().sum().backward()
    step = counter.get_flop_counts()["Global"]
    aten = torch.ops.aten

    def of(counts: dict[Any, int]) -> float:
        return sum(n for op, n in counts.items() if not linear_only or op in (aten.mm, aten.addmm))

    return of(forward), of(step)


def _reckoned(
    built: Built,
    *,
    linear_only: bool = False,
    trainable: Callable[[Node], bool] = lambda _node: True,
) -> tuple[float, float]:
    parts = step_flops(built.graph, built.batch, trainable=trainable, pairs="computed", scans=False)
    if linear_only:
        others = ("attention scores", "attention values", "convolution", "experts", "patches")
        parts = {part: cost for part, cost in parts.items() if not part.endswith(others)}
    return total(parts).forward, total(parts).model


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_flops_are_those_of_transformers(name: str) -> None:
    case = CASES.get(name, Case())
    linear_only = bool(case.linear_only)
    with _mode(case):
        built = _built(name, case)
        held = sum(weight.numel() for weight in built.model.parameters())
        assert built.graph.params == held
        counted = _counted(built, linear_only=linear_only)
    assert _reckoned(built, linear_only=linear_only) == pytest.approx(counted, rel=1e-3)


_TOWER = ("vision_tower", "vision_model", "visual.blocks", "visual.patch", "visual.pos")


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if "vision_config" in case.changes]
)
def test_a_frozen_tower_has_no_way_back_and_the_projector_above_it_has(name: str) -> None:
    linear_only = bool(CASES[name].linear_only)
    built = _built(name, CASES[name])
    for key, weight in built.model.named_parameters():
        weight.requires_grad_(not any(word in key for word in _TOWER))
    tower = (*_TOWER, "visual.embeddings")

    def trainable(node: Node) -> bool:
        return not any(word in node.name for word in tower)

    reckoned = _reckoned(built, linear_only=linear_only, trainable=trainable)
    assert reckoned == pytest.approx(_counted(built, linear_only=linear_only), rel=1e-6)
    parts = step_flops(built.graph, built.batch, trainable=trainable)
    assert parts["vision mlp"].backward == 0 < parts["vision mlp"].forward
    assert parts["projector"].backward >= parts["projector"].forward > 0


_CLIP_336: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
    "vision_use_head": False,
}
_QWEN_7B: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
PUBLISHED: dict[str, tuple[int, int, dict[str, Any]]] = {
    # Parameters in the model's files, tokens an image takes, the configuration with its gaps.
    "LLaVA 1.5 7B": (
        7_063_427_072,
        576,
        {
            "model_type": "llava",
            "text_config": {"model_type": "llama", "vocab_size": 32064},
            "vision_config": _CLIP_336,
        },
    ),
    "PaliGemma 3B 224": (
        2_923_466_480,
        256,
        {
            "model_type": "paligemma",
            "text_config": {
                "model_type": "gemma",
                "hidden_size": 2048,
                "intermediate_size": 16384,
                "num_attention_heads": 8,
                "num_hidden_layers": 18,
                "num_key_value_heads": 1,
                "vocab_size": 257216,
            },
            "vision_config": {**_SIGLIP, "image_size": 224},
        },
    ),
    "Gemma 3 4B": (
        4_300_079_472,
        256,
        {
            "model_type": "gemma3",
            "mm_tokens_per_image": 256,
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
            "vision_config": {**_SIGLIP, "image_size": 896},
        },
    ),
    "Qwen2-VL 7B": (
        8_291_375_616,
        256,
        {
            **_QWEN_7B,
            "model_type": "qwen2_vl",
            "vision_config": {
                "depth": 32,
                "embed_dim": 1280,
                "mlp_ratio": 4,
                "num_heads": 16,
                "in_chans": 3,
                "hidden_size": 3584,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
        },
    ),
    "Qwen2.5-VL 7B": (
        8_292_166_656,
        256,
        {
            **_QWEN_7B,
            "model_type": "qwen2_5_vl",
            "vision_config": {
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "in_chans": 3,
                "out_hidden_size": 3584,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31],
                "temporal_patch_size": 2,
            },
        },
    ),
    "Mistral Small 3.1": (
        24_011_361_280,
        256,
        {
            "model_type": "mistral3",
            "multimodal_projector_bias": False,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "text_config": {
                "model_type": "mistral",
                "head_dim": 128,
                "hidden_size": 5120,
                "intermediate_size": 32768,
                "num_attention_heads": 32,
                "num_hidden_layers": 40,
                "num_key_value_heads": 8,
                "sliding_window": None,
                "vocab_size": 131072,
            },
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_attention_heads": 16,
                "num_hidden_layers": 24,
                "image_size": 1540,
                "patch_size": 14,
            },
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_with_its_gaps_is_the_published_model(name: str) -> None:
    params, tokens, fields = PUBLISHED[name]
    graph = model_graph(Config(fields, where=name))
    assert graph.params == params
    assert graph.facts["tokens_per_image"] == tokens


def test_every_family_of_the_readers_is_known() -> None:
    assert set(known_families()) == {*DECODERS, *ENCODERS, *SEQ2SEQ, *VISION}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe"])
def test_the_windows_of_qwen_are_those_of_transformers(kind: str) -> None:
    fields = {**_TEXT, "num_hidden_layers": 32, "head_dim": 16, "use_sliding_window": True}
    theirs = transformers.AutoConfig.for_model(kind, **fields, sliding_window=32).to_dict()
    # The mixture of Qwen 3 lists no layers: its window is every layer's.
    kinds = theirs.get("layer_types") or ["sliding_attention"] * 32
    graph = model_graph(Config({**theirs, "layer_types": None}, where=kind))
    ours = [node.work.window for node in graph.nodes if isinstance(node.work, Attention)]
    assert ours == [32 if each == "sliding_attention" else None for each in kinds]
    assert 32 in ours
