"""What weights are kept in: by hand, and to the byte of checkpoints that others have published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ergmeter.errors import FormatError, UsageError
from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.estimate.storage import STORED_TYPES, Storage, storage_of, stored_type
from ergmeter.flops.graph.adapters import Lora, with_adapters
from ergmeter.flops.graph.graph import Graph, Linear
from ergmeter.flops.source import model_graph
from ergmeter.flops.work import forward_traffic

CONFIGS = Path(__file__).parents[2] / "data" / "configs"

# As they stand in the checkpoints' own config.json.
GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
AWQ = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
LLAMA_LAYERS = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)  # its matrices' weights
LLAMA_REST = 2 * 128256 * 4096 + 65 * 4096  # head, table, norms


def read(name: str, quantised: object = None, **more: Any) -> ModelConfig:
    fields = json.loads((CONFIGS / f"{name}.json").read_text())
    given = {"quantization_config": quantised} if quantised is not None else {}
    return ModelConfig({**fields, **given, **more}, where="config.json")


def both(config: ModelConfig, **asked: str) -> tuple[Graph, Storage]:
    return model_graph(config), storage_of(config, **asked)


@pytest.mark.parametrize(
    ("name", "total_size"), [("gpt-oss-20b", 13_761_264_768), ("gpt-oss-120b", 65_248_815_744)]
)
def test_gpt_oss_is_kept_in_what_its_own_index_says(name: str, total_size: int) -> None:
    # "total_size" of model.safetensors.index.json on the hub; 12.8 and 60.8 GiB in the model card.
    model, storage = both(read(name, GPT_OSS))
    assert storage.total_bytes(model) == total_size
    # Without the list: it is experts alone that transformers converts.
    assert both(read(name, {"quant_method": "mxfp4"}))[1].total_bytes(model) == total_size
    # Asked for, it goes where the method puts it; and so with the list of the config beside it.
    for config in (read(name, GPT_OSS), read(name)):
        asked = storage_of(config, weights="mxfp4")
        assert asked.total_bytes(model) == total_size
        assert asked.notes[0].startswith("experts in mxfp4, 4.25 bits: 4, and 8 bits of scaling")


def test_a_model_without_experts_has_its_layers_in_mxfp4() -> None:
    model, storage = both(read("llama-3.1-8b"), weights="mxfp4")
    rest = 2 * 128256 * 4096 + 65 * 4096
    assert storage.total_bytes(model) == LLAMA_LAYERS * 4.25 / 8 + rest * 2


def test_a_tied_head_with_a_bias_is_kept_once() -> None:
    fields = {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
    }
    # transformers' own count for BertForMaskedLM of bert-base-uncased.
    model, storage = both(ModelConfig(fields, where="config.json"), weights="fp32")
    assert storage.total_bytes(model) == 4 * 109_514_298


def test_awq_by_hand() -> None:
    model, storage = both(read("qwen2.5-7b", AWQ, torch_dtype="float16"))
    # 28 layers of 233,046,016 weights in 4 bits, and for each 128 a scale in 16 and a zero in 4;
    # table and head of 152064 x 3584, norms and biases in 16 bits.
    matrices = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    rest = 2 * 152064 * 3584 + 57 * 3584 + 28 * (3584 + 2 * 512)
    assert storage.total_bytes(model) == matrices * (4 + 20 / 128) / 8 + rest * 2
    assert storage.total_bytes(model) / 1e9 == pytest.approx(5.571, abs=0.0005)
    assert storage.notes == (
        "matrices in int4, 4.156 bits: 4, and 20 bits of scaling data for each 128 weights (the"
        " config's quantization_config)",
        "head, embeddings, norms and modules not converted in fp16 (the config's torch_dtype)",
        "cache in fp16 (the type of weights that are not quantised)",
    )


@pytest.mark.parametrize(
    ("kept", "bits"),
    [
        ("nf4", 4 + 32 / 64),
        ("nf4-double", 4 + 8 / 64 + 32 / (64 * 256)),
        ("int4", 4 + (16 + 4) / 128),
        ("mxfp4", 4 + 8 / 32),
        ("nvfp4", 4 + 8 / 16),
        ("fp8", 8),
    ],
)
def test_scales_are_part_of_a_weight(kept: str, bits: float) -> None:
    model, storage = both(read("llama-3.1-8b"), weights=kept)
    assert storage.total_bytes(model) == pytest.approx(
        LLAMA_LAYERS * bits / 8 + LLAMA_REST * 2, rel=1e-12
    )


def test_nf4_as_bitsandbytes_saves_it() -> None:
    # Layers of 6,979,321,856 weights in 4 + 8/64 + 32/(64 x 256) bits, the rest in 16.
    config = read(
        "llama-3.1-8b",
        {
            "quant_method": "bitsandbytes",
            "_load_in_4bit": True,
            "_load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "llm_int8_skip_modules": None,
            "load_in_4bit": True,
            "load_in_8bit": False,
        },
    )
    model, storage = both(config)
    assert storage.total_bytes(model) / 1e9 == pytest.approx(5.70, abs=0.005)


def test_a_scale_for_each_output_is_by_outputs() -> None:
    model, storage = both(
        read("llama-3.1-8b", {"quant_method": "bitsandbytes", "load_in_8bit": True})
    )
    outputs = 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)
    assert storage.total_bytes(model) == pytest.approx(
        LLAMA_LAYERS + 4 * outputs + LLAMA_REST * 2, rel=1e-12
    )


def test_a_type_of_16_bits_or_more_is_for_all_of_the_model() -> None:
    model, storage = both(read("llama-3.1-8b", AWQ), weights="float32")
    assert storage.total_bytes(model) == 4 * model.params
    assert storage.cache.name == "fp32"


@pytest.mark.parametrize(
    ("said", "name", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4", 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8", 8 + 24 / 4096),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "int4", 4 + 20 / 64),
        ({"quant_method": "fp8"}, "fp8", 8),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
            "fp8",
            8 + 32 / 128**2,
        ),
        ({"quant_method": "fbgemm_fp8"}, "fp8", 8 + 32 / 4096),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 4.5),
        ({"load_in_4bit": True}, "nf4", 4.5),
    ],
)
def test_what_a_config_says_its_weights_are_kept_in(
    said: dict[str, Any], name: str, bits: float
) -> None:
    kept = storage_of(read("llama-3.1-8b", said)).matrices
    assert kept.name == name
    assert kept.bits_in(Linear(4096, 1024)) == bits


def _compressed(targets: tuple[str, ...] = ("Linear",), **weights: Any) -> dict[str, Any]:
    group = {"targets": list(targets), "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("weights", "bits"),
    [
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, 8 + 16 / 4096),
        ({"num_bits": 8, "type": "float", "strategy": "tensor"}, 8),
        ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, 4 + 16 / 128),
        (
            {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 32,
                "symmetric": False,
            },
            4 + 20 / 32,
        ),
        ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, 4.5),
    ],
)
def test_compressed_tensors_by_strategy(weights: dict[str, Any], bits: float) -> None:
    kept = storage_of(read("llama-3.1-8b", _compressed(**weights))).matrices
    assert kept.bits_in(Linear(4096, 1024)) == bits


def test_packed_mxfp4_has_scales_of_8_bits_and_is_not_for_experts_alone() -> None:
    said = _compressed(num_bits=4, type="float", strategy="group", group_size=32)
    storage = storage_of(read("mixtral-8x7b", said | {"format": "mxfp4-pack-quantized"}))
    assert storage.matrices.bits_in(Linear(4096, 1024)) == 4 + 8 / 32
    assert storage.parts == ()


def test_zeros_that_are_stored_change_nothing() -> None:
    said = _compressed(num_bits=8, type="float", strategy="tensor")
    dense = said | {"sparsity_config": {"format": "dense", "sparsity_structure": "2:4"}}
    assert storage_of(read("llama-3.1-8b", dense)) == storage_of(read("llama-3.1-8b", said))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": False, "dynamic": {}}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "data_type": "int"}
EIGHT = _compressed(num_bits=8, type="float", strategy="tensor")


@pytest.mark.parametrize(
    ("whole", "more", "field"),
    [
        (EIGHT, _compressed(("re:.*down_proj",), num_bits=8, strategy="tensor"), "targets"),
        (EIGHT, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (
            GPTQ,
            {"modules_in_block_to_quantize": [["mlp.down_proj"]]},
            "modules_in_block_to_quantize",
        ),
        (GPTQ, {"dynamic": {"-:.*mlp": {}}}, "dynamic"),
        (GPTQ, {"lm_head": True}, "lm_head"),
        (AUTO_ROUND, {"extra_config": {"model.layers.0.mlp": {"bits": 16}}}, "extra_config"),
        (AUTO_ROUND, {"data_type": "mx_fp"}, "data_type"),
    ],
)
def test_what_covers_a_part_of_the_model_is_asked_for(
    whole: dict[str, Any], more: dict[str, Any], field: str
) -> None:
    assert storage_of(read("llama-3.1-8b", whole)).matrices.bits <= 8
    config = read("llama-3.1-8b", whole | more)
    with pytest.raises(FormatError, match=rf": {field} .* does not show .*pass --weights-dtype"):
        storage_of(config)
    assert storage_of(config, weights="int4").matrices == STORED_TYPES["int4"]


def test_modules_that_are_left_alone_stay_as_the_model_is() -> None:
    said = _compressed(num_bits=8, type="float", strategy="tensor")
    whole, without = (
        storage_of(read("llama-3.1-8b", said | more)).total_bytes(graph)
        for graph in [model_graph(read("llama-3.1-8b"))]
        for more in ({}, {"ignore": ["lm_head", "re:.*down_proj$", "model.layers.0.self_attn"]})
    )
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    assert without - whole == 32 * 4096 * 14336 + attention  # a byte more each


def test_routers_and_adapters_stay_as_the_model_is() -> None:
    model, storage = both(read("mixtral-8x7b"), weights="nf4")
    adapted, _ = with_adapters(model, Lora(8, ("q_proj",)))
    experts = 32 * 8 * 3 * 4096 * 14336
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    rest = 32 * 8 * 4096 + 65 * 4096 + 2 * 32000 * 4096
    packed = (experts + attention) * 4.5 / 8 + rest * 2
    assert storage.total_bytes(model) == packed
    assert storage.total_bytes(adapted) == packed + 32 * 8 * (4096 + 4096) * 2


def test_a_cache_is_as_the_model_unless_somebody_says_otherwise() -> None:
    model = model_graph(read("llama-3.1-8b"))
    batch = Batch.of(8, 1, past=4096)
    position = 32 * 2 * 8 * 128
    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    tensor = _compressed(num_bits=8, type="float", strategy="tensor")
    for storage, each in (
        (storage_of(read("llama-3.1-8b"), weights="nf4"), 2),
        (storage_of(read("llama-3.1-8b"), weights="nf4", cache="fp8"), 1),
        (storage_of(read("llama-3.1-8b", tensor | scheme)), 1),
        (storage_of(read("llama-3.1-8b", dtype="float32")), 4),
    ):
        moved = forward_traffic(model, batch, storage)
        assert moved.cache_read_bytes == each * 8 * 4096 * position


def test_what_is_read_of_quantised_weights_in_a_decoding_step() -> None:
    model, storage = both(read("llama-3.1-8b"), weights="nf4")
    moved = forward_traffic(model, Batch.of(1, 1, past=10), storage)
    head_and_norms = 128256 * 4096 + 65 * 4096
    assert moved.weights_bytes == LLAMA_LAYERS * 4.5 / 8 + head_and_norms * 2


def test_who_says_so_is_said() -> None:
    assert storage_of(read("llama-3.1-8b")).notes == (
        "weights in bf16, 16 bits (assumed, the config names no type)",
        "cache in bf16 (the type of weights that are not quantised)",
    )
    seeing = ModelConfig(
        {"model_type": "llava", "text_config": {"torch_dtype": "float16"}}, where="config.json"
    )
    assert storage_of(seeing).notes[0] == "weights in fp16, 16 bits (the config's torch_dtype)"
    odd = read("llama-3.1-8b", torch_dtype="float8_e4m3fn")
    assert "assumed" in storage_of(odd).notes[0]


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        ({"quant_method": "aqlm"}, FormatError, "'aqlm' is not known; pass --weights-dtype"),
        ({"a": 1}, FormatError, "'' is not known"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, FormatError, "'W4A8' is not known"),
        ({"quant_method": "awq"}, FormatError, "bits (or w_bit) is missing"),
        ({"quant_method": "awq", "bits": "4"}, FormatError, "bits must be a whole number"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, FormatError, "two sizes"),
        ({"quant_method": 4}, FormatError, "quant_method must be a word"),
        ([1], FormatError, "quantization_config must be an object"),
        ({"quant_method": "fp8", "ignore": 3}, FormatError, "ignore must be a list of words"),
    ],
)
def test_what_is_not_understood_is_one_line(said: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        storage_of(read("llama-3.1-8b", said))
    assert words in str(caught.value)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


def test_a_type_by_its_name_or_torchs() -> None:
    assert stored_type("bfloat16") is stored_type("BF16") is STORED_TYPES["bf16"]
    with pytest.raises(UsageError, match="no type 'banana' for stored numbers"):
        stored_type("banana")
