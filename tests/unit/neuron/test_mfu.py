"""FLOPs, TFLOP/s and MFU of a job, against hand calculations and the known answer for an 8B model.

The small model: hidden 8, 1 layer, 2 heads of 4, 1 of keys and values, feed-forward 16, vocabulary
10, sequences of 4. Weights multiplied: q 64, k 32, v 32, o 64, feed-forward 384, head 80 = 656.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ergmeter.errors import UsageError
from ergmeter.flops.graph.adapters import Lora
from ergmeter.neuron.mfu import Figures, figures, machine
from ergmeter.neuron.score import TFLOP_PER_S
from ergmeter.neuron.training_job import NeuronJob
from ergmeter.neuron.training_log import Throughput
from ergmeter.records import Missing, Reading

LLAMA_8B = Path(__file__).parents[2] / "data" / "configs" / "llama-3.1-8b.json"
SMALL = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 10,
    "tie_word_embeddings": False,
}
TRAINED = 6 * 656 * 4  # forward and twice backward, 4 tokens
CORE = 10 * 2 * (4 + 4) * 6  # pairs i <= j of 4 tokens are 10


def job(seq_len: int, *, lora: Lora | None = None, **overrides: int) -> NeuronJob:
    return NeuronJob(
        batch_size=64, seq_len=seq_len, nodes=1, devices=32, devices_from="", dtype="bf16",
        lora=lora, checkpointing="none", overrides=overrides, replicas=1, pipeline_stages=1,
        micro_batches=None, cache=None, notes=(),
    )  # fmt: skip


def figures_of(
    model: Path, what: NeuronJob, *, seq_per_s: float | None = 2.1, convention: str = "exact"
) -> Figures:
    where = machine("trn1", nodes=1, devices=32, lnc=None, dtype="bf16", devices_from="")
    return figures(str(model), what, where, pace(seq_per_s), convention=convention)


def pace(seq_per_s: float | None) -> Throughput:
    if seq_per_s is None:
        return Throughput(Missing("nobody said"))
    return Throughput(Reading(seq_per_s, "samples/s", "reported", note="as given"))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return path


def test_the_known_answer_under_both_counts() -> None:
    found = figures_of(LLAMA_8B, job(4096))
    assert isinstance(found.mfu, Reading)
    assert found.flops.model_per_step == pytest.approx(197.63e12, rel=1e-4)
    assert found.mfu.value == pytest.approx(197.63 * 2.1 / 3040, rel=1e-4)
    work = found.readings(pace(2.1))[TFLOP_PER_S]
    assert isinstance(work, Reading)
    assert work.value == pytest.approx(197.63 * 2.1, rel=1e-4)
    assert (work.unit, work.basis) == ("TFLOP/s", "reported")
    assert found.mfu_by_convention["neuron"] == pytest.approx(0.15477, rel=1e-4)
    assert found.by_convention["neuron"] * 2.1 == pytest.approx(470.5e12, rel=1e-4)


def test_nodes_share_the_throughput(small: Path) -> None:
    where = machine("trn1", nodes=4, devices=2, lnc=None, dtype="bf16", devices_from="")
    found = figures(str(small), job(4), where, pace(8.0), convention="exact")
    assert isinstance(found.mfu, Reading)
    assert found.mfu.value == pytest.approx((TRAINED + CORE) * 8 / (4 * 2 * 95e12))


def test_a_sequence_is_counted_as_by_hand(small: Path) -> None:
    found = figures_of(small, job(4))
    assert found.flops.model_per_step == TRAINED + CORE
    assert found.by_convention["neuron"] == 6 * (656 + 80) * 4 + 16 * 16 * 6 + 18 * 2 * 16


def test_the_difference_to_the_original_is_the_sum_of_its_reasons(small: Path) -> None:
    found = figures_of(small, job(4))
    reasons = found.differences
    assert sorted(reasons.values()) == [18 * 2 * 16, (16 - 10) * 16 * 6, 6 * 80 * 4]
    assert sum(reasons.values()) == found.by_convention["neuron"] - found.flops.model_per_step


def test_lora_leaves_out_the_gradients_of_frozen_weights(small: Path) -> None:
    found = figures_of(small, job(4, lora=Lora(2, ("q_proj", "k_proj", "v_proj"))))
    # Frozen weights: forward, and backward to the inputs above the first layer's q, k and v, whose
    # own inputs are an embedding that nobody trains.
    frozen = 2 * 656 * 4 + 2 * (656 - 128) * 4
    # Adapters of rank 2: down 8 x 2 three times, forward and their own gradient; up 2 x 8, 2 x 4
    # and 2 x 4, forward, own gradient and that of their input.
    adapters = 2 * (3 * 16) * 4 * 2 + 2 * (16 + 8 + 8) * 4 * 3
    assert found.flops.model_per_step == frozen + adapters + CORE
    assert found.work.params_trained == 3 * 16 + 32
    reasons = found.differences
    assert sum(reasons.values()) == pytest.approx(
        found.by_convention["neuron"] - found.flops.model_per_step
    )
    assert "weights counted as trained that are frozen" in reasons


def test_layers_that_the_yaml_sets_are_the_ones_that_are_counted(small: Path) -> None:
    found = figures_of(small, job(4, num_hidden_layers=2))
    assert found.flops.model_per_step == 6 * (2 * 576 + 80) * 4 + 2 * CORE
    assert "num_hidden_layers is 2, as the YAML sets it" in found.notes[0]


def test_a_model_that_does_not_say_its_family_is_taken_for_a_llama(small: Path) -> None:
    small.write_text(json.dumps({key: SMALL[key] for key in SMALL if key != "model_type"}))
    found = figures_of(small, job(4))
    assert found.flops.model_per_step == TRAINED + CORE
    assert "llama is assumed" in found.notes[0]


def test_without_a_throughput_there_is_no_mfu_and_no_rate(small: Path) -> None:
    found = figures_of(small, job(4), seq_per_s=None)
    assert found.mfu == Missing("nobody said")
    assert found.readings(pace(None))[TFLOP_PER_S] == Missing("nobody said")
    assert found.mfu_by_convention == {}
    assert found.flops.model_per_step == TRAINED + CORE


def test_a_target_that_the_model_lacks_is_named_with_its_key(small: Path) -> None:
    with pytest.raises(UsageError, match=r"peft\.target_modules: no module .* 'w_pack'"):
        figures_of(small, job(4, lora=Lora(2, ("w_pack",))))
