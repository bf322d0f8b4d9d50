"""Configurations that a family can't have, each with an error that names the field."""

from __future__ import annotations

from typing import Any

import pytest

from ergmeter.errors import ErgmeterError
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.source import model_graph
from tests.unit.flops.family_cases import CASES

ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "rotary layers": (
        "smollm3",
        {"use_sliding_window": True, "no_rope_layers": [1, 0]},
        "no_rope_layers lists 2 layers",
    ),
    "kinds of layers": (
        "gpt_neo",
        {"attention_types": [["global"]], "attention_layers": None},
        "attention_types must be a list of pairs",
    ),
    "too few kinds": (
        "gpt_neo",
        {"attention_types": [[["global"], 2]], "attention_layers": None},
        "attention_types lists 2 layers",
    ),
    "OPT of 350M": ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is false"),
    "biased experts": ("ernie4_5_moe", {"use_bias": True}, "experts with biases"),
    "too many experts": ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more"),
    "experts of a layer": ("hunyuan_v1_moe", {"moe_topk": 99}, "moe_topk is more"),
    "experts by layer": ("hunyuan_v1_moe", {"num_experts": [2]}, "num_experts lists 1 layers"),
    "groups of heads": ("llama", {"num_key_value_heads": 5}, "num_key_value_heads 5"),
    "listed layers": ("gemma2", {"layer_types": ["full_attention"]}, "layer_types lists 1 layers"),
    "two embeddings": (
        "marian",
        {"share_encoder_decoder_embeddings": False},
        "share_encoder_decoder_embeddings is false",
    ),
    "letters": ("nemotron_h", {"hybrid_override_pattern": "MX"}, "of the letters M"),
    "fewer letters": (
        "nemotron_h",
        {"hybrid_override_pattern": "M*", "num_hidden_layers": 3, "layers_block_type": None},
        "hybrid_override_pattern lists 2 layers, and the model has 3",
    ),
    "kind of a layer": ("nemotron_h", {"layers_block_type": ["conv"]}, "of the kind 'conv'"),
    "width of a recurrence": ("recurrent_gemma", {"lru_width": 2561}, "lru_width 2561"),
    "both ways": (
        "gemma4_text",
        {"use_bidirectional_attention": "all"},
        "a Gemma with bidirectional",
    ),
    "own configurations": ("gemma4_text", {"per_layer_config": {"x": {}}}, "per_layer_config must"),
    "shared keys": (
        "gemma3n_text",
        {"num_kv_shared_layers": 35, "num_hidden_layers": 35},
        "lower num_kv_shared_layers",
    ),
    "kinds of LFM2": ("lfm2_moe", {"layer_types": None}, "layer_types is missing"),
    "folding": ("esm", {"is_folding_model": True}, "is_folding_model is true"),
    "heads of an encoder": (
        "bert",
        {"num_attention_heads": 7},
        "hidden_size 768 is no multiple of num_attention_heads 7$",
    ),
    "no square": ("vit", {"image_size": [224, 128]}, "image_size must be a square"),
    "large patches": ("vit", {"patch_size": 300}, "patch_size is larger"),
    "layer of a tower": ("llava", {"vision_feature_layer": 99}, "must be layers of a tower"),
    "pinpoints": ("llava_next", {"image_grid_pinpoints": [3]}, "must be a list of pairs"),
    "small pinpoints": ("llava_next", {"image_grid_pinpoints": [[1, 1]]}, "has sizes below"),
    "tower": ("llava", {"vision_config": {"model_type": "resnet"}}, "vision tower 'resnet'"),
    "text": ("llava", {"text_config": {"model_type": "resnet"}}, "architecture 'resnet'"),
    "shuffled patches": ("internvl", {"downsample_ratio": 1e-3}, "downsample_ratio is 0.001"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_wrong_field_is_named(name: str) -> None:
    kind, changes, message = ROWS[name]
    base = CASES[kind].changes if kind == "nemotron_h" and "conv" not in str(changes) else {}
    fields = {**base, "model_type": kind, **changes}
    with pytest.raises(ErgmeterError, match=message):
        model_graph(ModelConfig(fields, where="config.json"))
