"""The FLOP count against the tensor cores of a recorded H200, right and wrong on purpose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.checks import (
    EXPLAINED,
    TensorCoreRatio,
    check_flop_count,
    fitness,
    tensor_core_ratio,
)
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.explain.waterfall import explain
from ergmeter.metrics.summarize import evidence_of, summary_of
from ergmeter.probes.replay import recorded_device, recorded_samples, recorded_steps
from ergmeter.records import Flops
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.runs import add_writer, even_steps, make_run, run_of
from tests.unit.metrics.test_h200 import DATA, replayed
from tests.unit.metrics.test_h200_run import unpacked


@pytest.fixture
def full(tmp_path: Path) -> tuple[Flops, ...]:
    """The FLOPs of the recorded 1.26 B model, counted when it was trained in full."""
    return unpacked("mfu_full", tmp_path / "full_flops").flops


def recorded(tmp_path: Path, flops: tuple[Flops, ...], *, times: float = 1.0) -> Evidence:
    """The recording of that training, with its FLOPs scaled."""
    scaled = tuple(
        replace(
            one,
            model_per_step=one.model_per_step * times,
            hardware_per_step=None
            if one.hardware_per_step is None
            else one.hardware_per_step * times,
        )
        for one in flops
    )
    settings = Settings.declared(None, {"dtype": "bf16", "warmup_steps": 2})
    return evidence_of(replayed(tmp_path / "run", "full_bf16_1b"), settings, flops=scaled)


def test_a_right_count_agrees_with_the_tensor_cores(
    tmp_path: Path, full: tuple[Flops, ...]
) -> None:
    """Tensor cores active 42.0 % at 1803 of the peak's 1830 MHz; 36.9 % counted, causal."""
    evidence = recorded(tmp_path, full)
    ratio = tensor_core_ratio(evidence)
    assert ratio.active_frac == pytest.approx(0.4202 * 1803.4 / 1830.1, rel=0.01)
    assert ratio.value == pytest.approx(ratio.active_frac / ratio.counted_frac)
    assert 1.0 < ratio.value < 1.25
    assert ratio.low <= ratio.value <= ratio.high
    assert check_flop_count(evidence) == []
    assert "flop_count" in fitness(evidence).passed


def test_a_head_that_was_not_counted_is_found(tmp_path: Path, full: tuple[Flops, ...]) -> None:
    """As nanoGPT once was: 0.69 of the true FLOPs."""
    evidence = recorded(tmp_path, full, times=0.69)
    (finding,) = check_flop_count(evidence)
    assert finding.weight == "serious"
    ratio = tensor_core_ratio(evidence)
    assert ratio.value >= 1.4
    assert f"{ratio.value:.2f} times" in finding.seen
    assert finding.effect.startswith("MFU may be too low")
    assert any("MFU may be too low" in note for note in summary_of(evidence).notes)
    assert any("MFU may be too low" in remark for remark in explain(evidence).remarks)


def test_a_count_of_more_than_the_tensor_cores_did_is_found(
    tmp_path: Path, full: tuple[Flops, ...]
) -> None:
    evidence = recorded(tmp_path, full, times=1.5)
    (finding,) = check_flop_count(evidence)
    assert finding.effect.startswith("MFU is too high")


@pytest.mark.parametrize(
    ("value", "low", "high", "is_uncounted", "is_overcounted"),
    [
        (1.10, 1.09, 1.11, False, False),
        (1.40, 1.35, 1.45, True, False),
        (1.40, 1.12, 1.70, True, False),
        (1.40, 1.05, 1.80, False, False),  # the interval reaches what masks and kernels explain
        (1.68, 1.60, 1.76, True, False),  # nanoGPT without its head
        (0.71, 0.40, 1.07, False, False),  # an activity of 23 % +- 51 % beside an MFU of 32.7 %
        (0.71, 0.68, 0.75, False, True),
        (0.95, 0.94, 0.96, False, False),
    ],
)
def test_the_verdict_is_by_the_interval(
    value: float, low: float, high: float, is_uncounted: bool, is_overcounted: bool
) -> None:
    ratio = TensorCoreRatio(value, low, high, counted_frac=0.3, active_frac=0.3 * value)
    assert ratio.is_uncounted_work is is_uncounted
    assert ratio.is_overcounted is is_overcounted
    assert EXPLAINED == 1.1


def test_a_short_window_accuses_nobody(tmp_path: Path, full: tuple[Flops, ...]) -> None:
    """2.5 s of counters, as a Lightning training was once falsely accused by."""
    steps = [step for name, step in recorded_steps(DATA) if name == "full_bf16_1b"]
    first_ns = steps[2].start_ns
    few = [step for step in steps if first_ns <= step.start_ns < first_ns + 2_500_000_000]
    run = make_run(tmp_path / "run")
    device = recorded_device(DATA)
    add_writer(run, steps=few, samples=recorded_samples(DATA), devices=[device])
    settings = Settings.declared(None, {"dtype": "bf16"})
    with pytest.raises(NotMeasurable, match="too coarse to check the FLOP count"):
        check_flop_count(evidence_of(Run.open(run), settings, flops=full))


def test_without_counters_it_is_not_checked(tmp_path: Path, full: tuple[Flops, ...]) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(40, tokens_computed=10))
    settings = Settings.declared(None, {"dtype": "bf16", "device": "h200-sxm"})
    found = fitness(evidence_of(run, settings, flops=full))
    assert "no accelerator" in found.unchecked["flop_count"]
