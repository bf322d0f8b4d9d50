"""Published configurations of vision-language models, gaps and all, are the published models."""

from __future__ import annotations

from typing import Any

import pytest

from ergmeter.flops.config import ModelConfig
from ergmeter.flops.source import model_graph

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
    graph = model_graph(ModelConfig(fields, where=name))
    assert graph.params == params
    assert graph.facts["tokens_per_image"] == tokens
