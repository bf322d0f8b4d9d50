"""What a nested configuration means by leaving a field out.

Published vision-language models keep of their parts only what differs from the part's own class in
transformers: LLaVA 1.5 does not say how wide its language model is. Such a field is read from here
and recorded as an assumption. Each table holds what a reader would otherwise refuse to go without;
a test compares every entry with the class it comes from.
"""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_QWEN2: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
_QWEN2_VL: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
}
_VIT: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
}
_IDEFICS3: dict[str, Any] = {
    **_VIT,
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "patch_size": 32,
}
_QWEN_PATCHES: dict[str, Any] = {
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_heads": 16,
}
_QWEN3_VISION: dict[str, Any] = {
    **_QWEN_PATCHES,
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 3584,
    "patch_size": 16,
    "num_position_embeddings": 2304,
}
_QWEN3_VL_VISION: dict[str, Any] = {**_QWEN3_VISION, "deepstack_visual_indexes": [8, 16, 24]}

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "gemma": {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
    },
    "gemma2": {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128},
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": {**_QWEN2, "head_dim": 128},
    "clip_vision_model": {**_VIT, "patch_size": 32},
    "siglip_vision_model": {**_VIT, "patch_size": 16},
    "pixtral": {
        **_VIT,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 1024,
        "patch_size": 16,
    },
    "idefics3_vision": _IDEFICS3,
    "smolvlm_vision": _IDEFICS3,
    "internvl_vision": {
        **_VIT,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": [448, 448],
        "patch_size": [14, 14],
    },
    "qwen2_vl_vision": {
        **_QWEN_PATCHES,
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "mlp_ratio": 4,
    },
    "qwen2_5_vl_vision": {
        **_QWEN_PATCHES,
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "out_hidden_size": 3584,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "qwen3_vl_vision": _QWEN3_VL_VISION,
    "qwen3_vl_moe_vision": _QWEN3_VL_VISION,
    "qwen3_5_vision": _QWEN3_VISION,
    "qwen3_5_moe_vision": _QWEN3_VISION,
}
