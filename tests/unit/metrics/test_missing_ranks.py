"""Ranks of a training that told no steps: what is known without them, and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ergmeter.metrics.checks import fitness
from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.records import Device, Flops, Mark, Missing, Sample, Step
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.runs import add_writer, make_run, reading, reason

S = 10**9
STEPS = 20
GPUS = [Device(f"GPU-{i}", "gpu", "H200", "nvml", {"power_field": "instant"}) for i in range(4)]
FLOPS = [Flops(1e12, "6N", "analytic", tokens_per_step=100)]
MIXED = (
    "energy.joules_per_token",
    "energy.joules_per_10k_tokens",
    "throughput.tokens_per_s_per_device",
    "throughput.tokens_per_parameter_per_s",
    "throughput.samples_per_parameter_per_s",
    "utilization.mfu_frac",
    "compute.model_flops_per_s_per_device",
)


def run_of(
    path: Path,
    ranks: range | tuple[int, ...],
    *,
    world: int | None = 4,
    gpus: int = 4,
    headers: dict[int, Any] | None = None,
) -> Run:
    """Steps of a second with 100 tokens and 2 samples a rank; the GPUs of the node draw 500 W."""
    run = make_run(path)
    for number, rank in enumerate(ranks):
        devices = [] if number else GPUS[:gpus]
        header = {"host": "h", **({} if world is None else {"world": world})}
        add_writer(
            run,
            steps=[
                Step(i * S, (i + 1) * S, index=i, rank=rank, tokens_computed=100, samples=2)
                for i in range(STEPS)
            ],
            devices=devices,
            samples=[
                Sample(t * S // 10, gpu.id, power_w=500.0)
                for gpu in devices
                for t in range(-10, 10 * STEPS + 20)
            ],
            marks=[Mark(S, "device_used", gpu.id) for gpu in devices],
            header={**header, **(headers or {}).get(rank, {})},
        )
    return Run.open(run)


def results(run: Run, **settings: Any) -> dict[str, Any]:
    given = Settings(warmup_steps=0, peak_flops_per_s=1e15, parameters=10**9, **settings)
    return summarize(run, given, flops=FLOPS).readings


def test_all_devices_over_the_tokens_of_one_rank_is_no_figure(tmp_path: Path) -> None:
    """4 GPUs of 500 W and 400 tokens/s are 5 J/token; rank 0's tokens alone would make it 20."""
    found = results(run_of(tmp_path / "one", (0,)))
    for key in MIXED:
        assert isinstance(found[key], Missing), key
        assert "3 of the 4 ranks recorded no steps" in found[key].reason
    whole = results(run_of(tmp_path / "all", range(4)))
    assert whole["energy.joules_per_token"].value == pytest.approx(5.0)
    assert whole["throughput.tokens_per_s_per_device"].value == pytest.approx(100)
    assert whole["utilization.mfu_frac"].value == pytest.approx(400 * 1e10 / 4e15)


def test_what_one_rank_did_is_said_to_be_that(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", (0, 2))
    for key, value in (
        ("tokens.total", 200 * STEPS),
        ("tokens.per_step", 200),
        ("throughput.tokens_per_s", 200),
        ("throughput.computed_tokens_per_s", 200),
        ("throughput.samples_per_s", 4),
    ):
        found = reading(run, key, warmup_steps=0)
        assert found.value == pytest.approx(value)
        assert "2 of 4 ranks" in found.note, key
        assert "all" not in found.note
    assert reading(run, "energy.joules_per_step", warmup_steps=0).value == pytest.approx(2000)
    assert reading(run, "steps.count", warmup_steps=0).value == STEPS


def test_a_model_cut_over_all_ranks_needs_one_of_them(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", (0,))
    assert results(run, layout="tp=4")["energy.joules_per_token"].value == pytest.approx(20.0)
    assert results(run, layout="tp=2,pp=2")["energy.joules_per_token"].value == pytest.approx(20.0)
    for layout in ("tp=2", "cp=4"):
        assert isinstance(results(run, layout=layout)["energy.joules_per_token"], Missing), layout
    of_each_pair = results(run_of(tmp_path / "two", (0, 3)), layout="tp=2")
    assert of_each_pair["energy.joules_per_token"].value == pytest.approx(10.0)
    assert "all" not in of_each_pair["tokens.total"].note


def test_a_frameworks_word_is_as_good_as_the_users(tmp_path: Path) -> None:
    at = {"at": {"tp": [0, 2], "dp": [0, 2]}, "from": "mesh"}
    one = results(run_of(tmp_path / "one", (0,), headers={0: {"layout": at}}))
    assert "1 of 2 groups of ranks" in one["energy.joules_per_token"].reason
    other = {"at": {"tp": [1, 2], "dp": [1, 2]}, "from": "mesh"}
    headers = {0: {"layout": at}, 3: {"layout": other}}
    two = results(run_of(tmp_path / "two", (0, 3), headers=headers))
    assert two["energy.joules_per_token"].value == pytest.approx(10.0)


def test_devices_that_nobody_read_are_missed_too(tmp_path: Path) -> None:
    """A model over two nodes, of which rank 0 has read its own."""
    found = results(run_of(tmp_path / "run", (0,), gpus=2), layout="tp=4")
    for key in ("energy.joules_per_token", "throughput.tokens_per_s_per_device"):
        assert "2 GPUs sampled for 4 ranks" in found[key].reason
    assert "2 GPUs sampled" in found["energy.joules_per_step"].reason
    assert "2 GPUs sampled" in found["utilization.mfu_frac"].reason
    declared = results(run_of(tmp_path / "said", (0,), gpus=2), layout="tp=4", num_devices=4)
    assert declared["utilization.mfu_frac"].value == pytest.approx(100 * 1e10 / 4e15)


def test_tokens_that_are_declared_are_of_all_ranks(tmp_path: Path) -> None:
    found = results(run_of(tmp_path / "run", (0,)), tokens_per_step=400)
    assert found["energy.joules_per_token"].value == pytest.approx(5.0)
    assert found["energy.joules_per_token"].basis == "assumed"


@pytest.mark.parametrize("world", [None, 1])
def test_one_process_with_all_gpus_is_whole(tmp_path: Path, world: int | None) -> None:
    run = run_of(tmp_path / "run", (0,), world=world)
    assert results(run)["energy.joules_per_token"].value == pytest.approx(20.0)
    assert not summarize(run).notes or not any("told no" in n for n in summarize(run).notes)


def test_a_rank_that_ended_early_was_seen(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank, steps in enumerate((20, 3)):
        rows = [
            Step(i * S, (i + 1) * S, index=i, rank=rank, tokens_computed=1) for i in range(steps)
        ]
        add_writer(run, steps=rows, header={"world": 2})
    found = reading(Run.open(run), "tokens.total", warmup_steps=0)
    assert found.value == 23
    assert "all 2 ranks" in found.note


def test_it_is_a_serious_finding_and_stands_on_the_card(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", (0,))
    (one,) = [f for f in fitness(evidence_of(run)).findings if f.check == "ranks"]
    assert one.weight == "serious"
    assert "3 of the 4 ranks recorded no steps (1, 2, 3)" in one.seen
    assert any("3 of the 4 ranks recorded no steps" in note for note in summarize(run).notes)
    whole = run_of(tmp_path / "whole", range(4))
    assert not [f for f in fitness(evidence_of(whole)).findings if f.check == "ranks"]
    assert "3 of the 4" in reason(run, "energy.joules_per_token", warmup_steps=0)
