"""Published models: what we reckon against what transformers' code computes.

All are built at their real size, and their parameters compared. What is run has their real widths
and a few of their layers: enough for each kind that they have, since a layer costs what it costs.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ergmeter.flops.analytic import PartFlops, step_flops, total
from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.counted.built_model import count_config
from ergmeter.flops.counted.op_totals import CountedStep, agreement, part_of
from ergmeter.flops.source import model_graph
from tests.unit.flops.architectures import DATA, PUBLISHED, fields, graph

pytestmark = pytest.mark.frameworks

# Their reference code walks a recurrence step by step, so a short sequence is a kindness; and it
# multiplies states by matrices, in whole chunks, where a scan would not.
SCANNED = ("bamba-9b", "jamba-v0.1", "mamba-2.8b")
SCANS = frozenset({"scan"})
AUTO: Any = transformers.AutoModelForCausalLM

# The same layers as another that is run, in other numbers: built, and not run.
ALIKE = {
    *("falcon-mamba-7b", "gpt-oss-120b", "kimi-k2", "llama-2-7b", "llama-3.1-405b"),
    *("llama-4-scout-text", "mamba2-2.7b", "mistral-nemo-12b", "mixtral-8x22b", "phi-4"),
    *("qwen2.5-32b", "qwen3-235b-a22b", "qwen3-32b", "smollm3-3b", "stablelm-3b"),
}
# How many layers have one of each kind: experts after dense ones, windows, states and attention.
DEPTHS = {
    "bamba-9b": 11,
    "deepseek-v2-lite": 3,
    "deepseek-v3": 5,
    "gemma-3-27b-text": 7,
    "jamba-v0.1": 8,
    "qwen3-next-80b-a3b": 5,
}


def shallow(name: str) -> dict[str, Any]:
    """Its configuration, with fewer layers."""
    config, depth = fields(name), DEPTHS.get(name, 3)
    (key,) = {"num_hidden_layers", "n_layer", "n_layers"} & config.keys()
    assert depth < config[key]
    config[key] = depth
    if "layer_types" in config:
        kinds = set(config["layer_types"])
        config["layer_types"] = config["layer_types"][:depth]
        assert set(config["layer_types"]) == kinds
    return config


def both(
    name: str, *, seq_len: int = 32, config: dict[str, Any] | None = None, **changed: Any
) -> tuple[dict[str, PartFlops], CountedStep]:
    config = (config or fields(name)) | changed
    model = model_graph(ModelConfig(config, where=name))
    parts = step_flops(model, Batch.of(2, seq_len), pairs="computed")
    return parts, count_config(config, batch_size=2, seq_len=seq_len)


def test_every_configuration_has_a_published_size() -> None:
    assert {path.stem for path in DATA.glob("*.json")} == set(PUBLISHED)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_transformers_own(name: str) -> None:
    config = fields(name)
    with torch.device("meta"):
        made = CONFIG_MAPPING[config.pop("model_type")](**config)
        model = AUTO.from_config(made)
    held = sum(parameter.numel() for parameter in model.parameters())
    assert graph(name).params == held
    assert held / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", sorted(set(PUBLISHED) - ALIKE))
def test_reckoned_and_counted_agree_at_real_width(name: str) -> None:
    config = shallow(name)
    parts, counted = both(name, seq_len=2 if name in SCANNED else 32, config=config)
    reckoned = model_graph(ModelConfig(config, where=name))
    assert counted.params == counted.params_trained == reckoned.params
    assert not counted.not_counted
    compared = agreement(parts, counted)
    has_states = name in SCANNED or name == "qwen3-next-80b-a3b"
    # A convolution's padding, which is computed and cut off, is all that is left.
    tolerance = 0.01 if has_states else 1e-9
    assert abs(compared.relative(without=SCANS)) < tolerance
    ours, theirs = compared.totals(without=SCANS)
    assert ours.forward == pytest.approx(theirs.forward, rel=tolerance)
    if not has_states:
        assert total(parts).model == counted.total.model
        assert not compared.differing


@pytest.mark.parametrize("name", ["gemma-2b", "olmoe-1b-7b"])
def test_they_agree_where_attention_matters(name: str) -> None:
    parts, counted = both(name, seq_len=2048, num_hidden_layers=6)
    assert total(parts).model == counted.total.model
    assert parts["attention scores"].model > 0.02 * counted.total.model


def test_no_memory_is_taken_for_weights() -> None:
    count_config(fields("gemma-2b"), batch_size=1, seq_len=16)  # what torch itself loads
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # As large in a few wide layers as in its 126.
    wide: dict[str, Any] = {
        "num_hidden_layers": 8,
        "hidden_size": 65536,
        "intermediate_size": 212992,
    }
    parts, counted = both("llama-3.1-405b", **wide)
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert counted.params > 4e11
    assert total(parts).model == counted.total.model
    assert (after_kib - before_kib) * 1024 < 3e8


# Of four layers. Without the embeddings nothing is saved, the first layer's norm being trained;
# without the layers below the third nothing is walked back there.
FROZEN: dict[str, Callable[[str], bool]] = {
    "embeddings": lambda name: "embed_tokens" not in name,
    "lowest": lambda name: any(f"layers.{n}." in name for n in (2, 3)) or "head" in name,
}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("name", ["olmoe-1b-7b"])
def test_they_agree_on_what_is_frozen(name: str, frozen: str) -> None:
    trains = FROZEN[frozen]
    config = fields(name) | {"num_hidden_layers": 4}
    # A node of the graph is named as its module is; its parameters' names go on from there.
    parts = step_flops(
        model_graph(ModelConfig(config, where=name)),
        Batch.of(2, 32),
        trainable=lambda node: trains(f"{node.name}."),
        pairs="computed",
    )
    counted = count_config(config, batch_size=2, seq_len=32, trainable=trains)
    assert counted.params_trained < counted.params
    assert total(parts).model == counted.total.model
    assert total(parts).backward == counted.total.backward
    assert (counted.total.backward < 2 * counted.total.forward) == (frozen == "lowest")


@pytest.mark.parametrize("name", ["gemma-2b", "olmoe-1b-7b", "qwen2.5-7b"])
def test_they_agree_on_what_is_computed_again(name: str) -> None:
    config = fields(name) | {"num_hidden_layers": 8}
    parts = step_flops(
        model_graph(ModelConfig(config, where=name)),
        Batch.of(2, 32),
        checkpointing="full",
        pairs="computed",
    )
    counted = count_config(config, batch_size=2, seq_len=32, checkpointing=True, attention="eager")
    assert total(parts).model == counted.total.model
    assert total(parts).recomputed == counted.total.recomputed
    assert 0.4 * counted.total.forward < counted.total.recomputed < counted.total.forward


def test_padding_is_computed_like_everything_else() -> None:
    padded = Batch.of(3, 48, lengths=[48, 20, 7])
    config = fields("gemma-2b") | {"num_hidden_layers": 2}
    model = model_graph(ModelConfig(config, where="gemma-2b"))
    counted = count_config(config, batch_size=3, seq_len=48)
    computed = step_flops(model, padded.grid(), pairs="computed")
    useful = step_flops(model, padded, pairs="computed")
    assert total(computed).model == counted.total.model
    assert total(useful).model < 0.6 * counted.total.model


def test_packed_documents_cost_what_they_cost_one_by_one() -> None:
    lengths = [40, 16, 8]
    packed = Batch.of(1, 64, lengths=lengths)
    config = fields("gemma-2b") | {"num_hidden_layers": 2}
    alone = [count_config(config, batch_size=1, seq_len=length).total.model for length in lengths]
    model = model_graph(ModelConfig(config, where="gemma-2b"))
    parts = step_flops(model, packed, pairs="computed")
    assert total(parts).model == sum(alone)


def test_llama_4_computes_every_expert_and_we_say_so() -> None:
    parts, counted = both("llama-4-scout-text", num_hidden_layers=4)
    compared = agreement(parts, counted)
    assert compared.differing == ["experts"]
    assert compared.parts["experts"][1].model == 16 * compared.parts["experts"][0].model
    assert compared.relative(without=frozenset({"experts"})) == 0
    assert "below counted" in compared.sentence
    assert "they differ in: experts" in compared.sentence


def test_a_scan_padded_to_whole_chunks_is_named() -> None:
    parts, counted = both("mamba2-2.7b", seq_len=4, num_hidden_layers=2)
    compared = agreement(parts, counted)
    assert compared.differing == ["scan"]
    assert compared.sentence.endswith(f"scan 0 against {compared.parts['scan'][1].model:.4g}")


@pytest.mark.parametrize(
    ("module", "operator", "part"),
    [
        ("model.layers.3.self_attn", "aten::bmm", "attention"),
        ("model.layers.3.self_attn.q_proj", "aten::mm", "attention qkv"),
        ("model.layers.3.self_attn.o_proj", "aten::mm", "attention output"),
        ("base_model.model.model.layers.3.self_attn.o_proj.base_layer", "", "attention output"),
        ("base_model.model.model.layers.3.self_attn.o_proj.lora_A.default", "aten::mm", "lora"),
        ("transformer.h.0.attn.c_proj", "aten::addmm", "attention output"),
        ("transformer.h.0.mlp.c_proj", "aten::addmm", "mlp"),
        ("model.layers.0.mlp.gate", "aten::mm", "router"),
        ("model.layers.0.mlp.gate_proj", "aten::mm", "mlp"),
        ("model.layers.0.mlp.experts", "aten::_grouped_mm", "experts"),
        ("model.layers.0.mlp.shared_experts.up_proj", "aten::mm", "shared expert"),
        ("backbone.layers.0.mixer", "aten::bmm", "scan"),
        ("backbone.layers.0.mixer", "aten::convolution_backward", "convolution"),
        ("backbone.layers.0.mixer.in_proj", "aten::mm", "mamba"),
        ("lm_head", "aten::mm", "head"),
        ("", "aten::mm", "other"),
    ],
)
def test_a_module_is_a_part_by_its_name(module: str, operator: str, part: str) -> None:
    assert part_of(module, operator) == part


def test_equal_counts_agree_in_words() -> None:
    counted = CountedStep({("lm_head", "aten::mm"): PartFlops(100, 200)})
    assert agreement({"head": PartFlops(100, 200)}, counted).sentence.startswith(
        "analytic and counted FLOPs agree"
    )
    far = agreement({"head": PartFlops(100, 230)}, counted)
    assert far.relative() == pytest.approx(0.1)
    assert far.sentence == (
        "analytic is 10.0 % above counted (330 against 300 FLOPs);"
        " they differ in: head 330 against 300"
    )
