"""Blocks of runs that were made for them: every share is worked out by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.metrics.explain.device import DeviceActivity
from ergmeter.metrics.explain.time import TimeSplit, time_split, wait_blocks
from ergmeter.metrics.explain.waterfall import Explanation, explain, levels
from ergmeter.metrics.summarize import evidence_of
from ergmeter.records import Device, Flops, Mark, Reading, Sample, Step
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.runs import even_steps, run_of
from tests.unit.metrics.test_achievable import RATE, calibrated

S = 10**9
H200 = Device("GPU-0", "gpu", "NVIDIA H200", "nvml", {"power_field": "instant"})
PEAK = 989.5e12
PEAK_HZ = PEAK / (132 * 4096)
CLOCK = 0.9  # of it
# Ten seconds of steps of a quarter of one at 40 % of the peak, a twentieth of it computed twice.
STEP = Flops(
    0.4 * PEAK * 0.25,
    "exact",
    "analytic",
    hardware_per_step=0.42 * PEAK * 0.25,
    hardware_per_padding=0.4 * PEAK * 0.25 / 100,
    tokens_per_step=100,
)
COUNTERS = {"graphics_frac": 0.9, "sm_frac": 0.8, "tensor_frac": 0.5, "dram_frac": 0.3}
FAST: dict[str, Any] = {**COUNTERS, "clock_hz": 1.1 * PEAK_HZ}


def read(seconds: float, every_s: float = 0.1, **values: Any) -> list[Sample]:
    """Readings, of which some values may be functions of the time."""
    samples = []
    for number in range(round((seconds + 2.0) / every_s)):
        t_s = number * every_s - 1.0
        found = {name: value(t_s) if callable(value) else value for name, value in values.items()}
        samples.append(
            Sample(
                round(t_s * S),
                H200.id,
                power_w=500.0,
                energy_j=1e4 + 500.0 * t_s,
                activity_s=every_s,
                **{"throttled": 0x4, "clock_hz": CLOCK * PEAK_HZ, **found},
            )
        )
    return samples


def made(
    path: Path,
    steps: list[Step] | None = None,
    *,
    flops: Flops | None = STEP,
    device: Device = H200,
    marks: tuple[Mark, ...] = (),
    **values: Any,
) -> Run:
    steps = even_steps(40, seconds=0.25, tokens_computed=100) if steps is None else steps
    seconds = max(step.end_ns for step in steps) / S
    samples = read(seconds, **(values or COUNTERS))
    return run_of(
        path,
        steps=steps,
        samples=[replace(one, device=device.id) for one in samples],
        devices=[device],
        marks=[Mark(0, "device_used", device.id), *marks],
        settings={"dtype": "bf16"},
        header={"flops": [asdict(flops)]} if flops else {},
    )


def explained(run: Run) -> Explanation:
    found = explain(evidence_of(run))
    assert found.achieved is not None
    shares = [one.share_frac for one in (*found.blocks, found.achieved)]
    assert sum(shares) == pytest.approx(1.0, abs=1e-12)
    return found


def shares(found: Explanation) -> dict[str, float]:
    return {one.key: one.share_frac for one in found.blocks}


def test_every_rung_of_an_even_run(tmp_path: Path) -> None:
    found = explained(made(tmp_path / "run"))
    assert shares(found) == pytest.approx(
        {
            "idle_in_steps": 0.1,
            "clock": 0.9 * (1 - CLOCK),
            "empty_sms": (0.9 - 0.8) * CLOCK,
            "not_multiplying": (0.8 - 0.5) * CLOCK,
            "uncounted": 0.5 * CLOCK - 0.42,
            "recomputed": 0.02,
        },
        abs=1e-9,
    )
    assert found.achieved is not None
    assert found.achieved.share_frac == pytest.approx(0.4)
    assert found.achieved.joules == pytest.approx(0.4 * 5000)  # 500 W for 10 s, by share


def test_blocks_lie_below_each_other_from_the_peak_down(tmp_path: Path) -> None:
    found = explained(made(tmp_path / "run"))
    edges = [1.0, 0.9, 0.81, 0.72, 0.45, 0.42, 0.4]
    lowest = [*pairwise(edges), (0.4, 0.0)]
    placed = [(one.from_frac, one.to_frac) for one in levels(found)]
    assert np.asarray(placed) == pytest.approx(np.asarray(lowest), abs=1e-9)
    assert levels(found)[-1].block is found.achieved


def test_a_gain_goes_up(tmp_path: Path) -> None:
    found = explained(made(tmp_path / "run", **FAST))
    (clock,) = [one for one in levels(found) if one.block.key == "clock"]
    assert (clock.from_frac, clock.to_frac) == pytest.approx((0.9, 0.99))


@pytest.mark.parametrize("where", ["in the step", "between steps"])
def test_a_stall_is_what_a_step_took_beyond_the_median(tmp_path: Path, where: str) -> None:
    steps, at = [], 0
    for number in range(40):
        late = S // 2 if number % 10 == 5 else 0
        length = S // 4 + (late if where == "in the step" else 0)
        steps.append(Step(at, at + length, index=number, tokens_computed=100))
        at += S // 4 + late
    found = explained(made(tmp_path / "run", steps, graphics_frac=0.8))
    assert shares(found)["stalls"] == pytest.approx(4 * 0.5 / 12.0, rel=1e-9)
    # 500 W throughout: what the stalls drew is known by itself.
    (stalls,) = [one for one in found.blocks if one.key == "stalls"]
    assert stalls.joules == pytest.approx(4 * 0.5 * 500, rel=1e-3)
    assert stalls.joules_basis == "measured"


def waiting(phase: str) -> list[Step]:
    """Before every tenth step half a second of something that has a name."""
    steps, at = [], 0
    for number in range(40):
        steps.append(Step(at, at + S // 4, index=number, tokens_computed=100))
        at += S // 4
        if number % 10 == 5:
            steps.append(Step(at, at + S // 2, phase=phase))
            at += S // 2
    return steps


@pytest.mark.parametrize("phase", ["data", "checkpoint", "eval"])
def test_a_wait_that_has_a_name_is_no_stall(tmp_path: Path, phase: str) -> None:
    found = explained(made(tmp_path / "run", waiting(phase), graphics_frac=0.8))
    assert shares(found)[phase] == pytest.approx(4 * 0.5 / 12.0, rel=1e-9)
    assert "stalls" not in shares(found)


def test_evaluation_is_left_out_of_what_the_device_did_in_steps(tmp_path: Path) -> None:
    """The device is busy all the time, in evaluation as well."""
    found = explained(made(tmp_path / "run", waiting("eval"), graphics_frac=1.0))
    assert shares(found)["eval"] == pytest.approx(2.0 / 12.0, rel=1e-9)
    assert shares(found).get("idle_in_steps", 0.0) == pytest.approx(0.0, abs=1e-9)


def test_what_a_reading_counted_beside_a_checkpoint_is_of_the_rest_of_its_seconds(
    tmp_path: Path,
) -> None:
    """A reading a second; each kernel ran outside the checkpoints, half a second of every third."""
    checkpoints = [one for one in waiting("checkpoint") if one.phase == "checkpoint"]
    held_s = [(one.start_ns / S, one.end_ns / S) for one in checkpoints]

    def counted(t_s: float) -> float:
        return 1.0 - sum(max(0.0, min(t_s, b) - max(t_s - 1.0, a)) for a, b in held_s)

    found = explained(
        made(tmp_path / "run", waiting("checkpoint"), graphics_frac=counted, every_s=1.0)
    )
    assert shares(found)["checkpoint"] == pytest.approx(2.0 / 12.0, rel=1e-9)
    assert shares(found).get("idle_in_steps", 0.0) == pytest.approx(0.0, abs=1e-9)


def test_a_wait_that_the_device_worked_through_costs_no_more_than_its_idle_time(
    tmp_path: Path,
) -> None:
    found = explained(made(tmp_path / "run", waiting("data"), graphics_frac=0.95))
    assert shares(found)["data"] == pytest.approx(0.05, abs=1e-9)
    (data,) = [one for one in found.blocks if one.key == "data"]
    assert "worked on" in data.why
    assert data.basis == "derived"


def test_waits_that_can_not_be_told_apart_are_one_block(tmp_path: Path) -> None:
    """Waits for data and stalls of 2 s together, and a device that was idle for 0.6 s of them."""
    steps = waiting("data")
    nameless = [one for one in steps if one.phase == "data"][2:]
    steps = [one for one in steps if one not in nameless]
    found = explained(made(tmp_path / "run", steps, graphics_frac=0.95))
    assert shares(found)["waits"] == pytest.approx(0.05, abs=1e-9)
    (both,) = [one for one in found.blocks if one.key == "waits"]
    assert "data" in both.title
    assert "stalls" in both.title
    assert [one.key for one in found.blocks if one.is_merged] == ["waits", "kernels"]
    # 500 W all the time, so that joules are as the time: what the device worked through is not it.
    assert isinstance(found.energy, Reading)
    assert both.joules_basis == found.energy.basis
    assert both.joules == pytest.approx(0.05 * found.energy.value, rel=0.01)


@pytest.mark.parametrize(
    ("bits", "why", "fact"),
    [
        (lambda t_s: 0x80 if t_s > 2 else 0x4, "by a hardware slowdown or power brake", "braked"),
        (lambda t_s: 0x20 if t_s > 2 else 0x80, "by heat", "by heat"),
        (lambda t_s: 0x20 if t_s < 2 else 0x8, "by a hardware slowdown or power brake", "by heat"),
        (lambda t_s: 0x4, "by the power limit", "power limit"),
    ],
)
def test_what_held_the_clock_down_is_what_most_readings_say(
    tmp_path: Path, bits: Any, why: str, fact: str
) -> None:
    values: dict[str, Any] = {**COUNTERS, "throttled": bits}
    found = explained(made(tmp_path / "run", **values))
    (clock,) = [one for one in found.blocks if one.key == "clock"]
    assert clock.why == why
    assert any(fact in one.said for one in clock.facts)


def test_padding_is_what_positions_without_a_token_cost(tmp_path: Path) -> None:
    """100 positions, of which 80 hold a token; the peak's share of a real token stays."""
    steps = even_steps(40, seconds=0.25, tokens_computed=100, tokens_real=80)
    found = explained(made(tmp_path / "run", steps))
    assert found.achieved is not None
    assert found.achieved.share_frac == pytest.approx(0.4 * 0.8)
    assert shares(found)["padding"] == pytest.approx(0.4 * 0.2)
    assert shares(found)["recomputed"] == pytest.approx(0.02 * 0.8)
    (block,) = [one for one in found.blocks if one.key == "padding"]
    assert block.facts[0].said == "20.0 % of positions hold no token"
    assert any("pack" in one.advice for one in found.changes)


def test_no_padding_is_no_reason(tmp_path: Path) -> None:
    steps = even_steps(40, seconds=0.25, tokens_computed=100, tokens_real=100)
    assert "padding" not in explained(made(tmp_path / "run", steps)).missing


@pytest.mark.parametrize("busy_frac", [1.0, 0.999])
def test_a_device_that_never_rests_beside_an_evaluation_has_no_waits(
    tmp_path: Path, busy_frac: float
) -> None:
    """What clocks and counters differ by in the last digit is no reason to charge all of a wait."""
    steps = [
        replace(one, phase="data") if one.phase == "eval" and number > 20 else one
        for number, one in enumerate(waiting("eval"))
    ]
    found = shares(explained(made(tmp_path / "run", steps, graphics_frac=busy_frac)))
    assert found["eval"] == pytest.approx(1.0 / 12.0, rel=1e-9)
    assert found.get("data", 0.0) == pytest.approx((1 - busy_frac) * 11 / 12, abs=1e-6)


def test_a_run_that_is_all_warm_up_is_explained_as_far_as_it_goes(tmp_path: Path) -> None:
    run = made(tmp_path / "run", busy_frac=0.9)
    found = explain(evidence_of(run, Settings(warmup_steps=1000)))
    assert found.achieved is None
    assert "the run is shorter than its warm-up" in found.missing["busy_frac"]


def test_the_clock_of_a_peak_of_32_bits_is_not_that_of_16(tmp_path: Path) -> None:
    run = made(tmp_path / "run", **FAST)
    assert "clock" in shares(explain(evidence_of(run)))
    found = explain(evidence_of(run, Settings(dtype="fp32")))
    assert "clock" not in shares(found)
    assert found.missing["peak_clock_hz"].startswith("the peak of fp32 is at another clock")


def test_a_step_is_short_whatever_the_evaluations_between_steps_took(tmp_path: Path) -> None:
    """Steps of 50 ms, and as much evaluation as steps: the host sets the pace of the steps."""
    steps, at = [], 0
    for number in range(100):
        steps.append(Step(at, at + S // 20, index=number, tokens_computed=100))
        at += S // 20
        if number % 10 == 5:
            steps.append(Step(at, at + S, phase="eval"))
            at += S
    found = explained(made(tmp_path / "run", steps, graphics_frac=0.3))
    (idle,) = [one for one in found.blocks if one.key == "idle_in_steps"]
    assert idle.title.startswith("launch-bound")
    assert any(one.said == "50 ms a step" for one in idle.facts)


def gains(found: Explanation) -> dict[str, float]:
    return {one.block: one.gain_frac for one in found.changes}


def test_a_gain_is_one_of_time_and_no_share_of_the_peak(tmp_path: Path) -> None:
    """32 % of the peak for tokens, 8 for padding, 1.6 again: 41.6 in all, in steps throughout."""
    steps = even_steps(40, seconds=0.25, tokens_computed=100, tokens_real=80)
    uncounted = gains(explained(made(tmp_path / "run", steps, temperature_c=40.0)))
    assert uncounted["padding"] == pytest.approx(1 / (1 - 8 / 41.6) - 1)
    assert uncounted["recomputed"] == pytest.approx(1 / (1 - 1.6 / 41.6) - 1)


def test_a_gain_below_the_clock_is_of_the_time_at_that_clock(tmp_path: Path) -> None:
    """30 % of the time does not multiply, at 0.9 of the clock: 27 % of the peak."""
    found = gains(explained(made(tmp_path / "run")))
    assert found["not_multiplying"] == pytest.approx(1 / (1 - 0.3) - 1)


def test_communication_of_profiled_steps_is_a_block_of_its_own(tmp_path: Path) -> None:
    profile = {
        "steps": 2, "on": "gpu", "window_s": 1.0, "compute_s": 0.7, "communication_s": 0.4,
        "communication_alone_s": 0.18, "copy_s": 0.0, "copy_alone_s": 0.02, "idle_s": 0.1,
    }  # fmt: skip
    mark = Mark(5 * S, "profiled", json.dumps(profile))
    found = shares(explained(made(tmp_path / "run", marks=(mark,))))
    assert found["communication"] == pytest.approx(0.18 / 0.9 * 0.9 * CLOCK)
    assert found["copies"] == pytest.approx(0.02 / 0.9 * 0.9 * CLOCK)
    assert found["not_multiplying"] == pytest.approx((0.9 - 0.5 - 0.18 - 0.02) * CLOCK)
    assert "empty_sms" not in found  # a collective fills few multiprocessors


def test_the_matmul_ceiling_is_what_the_same_products_lose_at_their_best(tmp_path: Path) -> None:
    """Held 80 % of the peak at 0.85 of its clock: 94 % of what a clock allows."""
    rate = replace(RATE, value=0.8 * PEAK, clock_hz=0.85 * PEAK_HZ)
    device = calibrated("GPU-0", matmul={"bf16": rate})
    found = explained(made(tmp_path / "run", device=device))
    needed = 0.42 / (0.8 / 0.85)
    assert shares(found)["ceiling"] == pytest.approx(needed - 0.42)
    assert shares(found)["uncounted"] == pytest.approx(0.5 * CLOCK - needed)
    assert "matmul_ceiling" not in found.missing


def test_tensor_pipes_that_worked_less_than_the_flops_are_a_contradiction(tmp_path: Path) -> None:
    values: dict[str, Any] = {**COUNTERS, "tensor_frac": 0.3}
    found = explained(made(tmp_path / "run", **values))
    assert "not_multiplying" not in shares(found)
    assert shares(found)["kernels"] == pytest.approx(0.8 * CLOCK - 0.42)
    assert any("the tensor cores did 0.64 times" in one for one in found.remarks)


def test_without_flops_the_waterfall_ends_at_the_tensor_pipes(tmp_path: Path) -> None:
    found = explained(made(tmp_path / "run", flops=None))
    assert found.achieved is not None
    assert found.achieved.title == "tensor cores active"
    assert found.achieved.share_frac == pytest.approx(0.5 * CLOCK)
    assert "FLOPs" in found.missing["mfu"]


def test_a_slow_beginning_is_neither_a_stall_nor_usual(tmp_path: Path) -> None:
    steps = [Step(0, 2 * S, index=0, tokens_computed=100)]
    steps += [
        replace(one, start_ns=one.start_ns + 2 * S, end_ns=one.end_ns + 2 * S)
        for one in even_steps(32, seconds=0.25, tokens_computed=100)
    ]
    run = made(tmp_path / "run", steps)
    split = time_split(evidence_of(run, Settings(warmup_steps=0)))
    assert split.parts_s == pytest.approx({"slow_start": 1.75})
    assert time_split(evidence_of(run)).parts_s == {}  # by the rule it is warm-up


def test_long_gaps_between_steps_have_the_joules_that_were_drawn_in_them(tmp_path: Path) -> None:
    """Steps of half a second at 700 W, and as long again at 100 W."""
    steps = even_steps(20, seconds=0.5, gap_s=0.5, tokens_computed=100)
    grid = np.arange(-1.0, 22.0, 0.1)
    watts = np.where((grid >= 0) & ((grid + 1e-6) % 1.0 < 0.5), 700.0, 100.0)
    energy = 1e4 + np.append(0.0, np.cumsum(watts[:-1] * 0.1))
    samples = [
        Sample(round(t * S), H200.id, power_w=float(w), energy_j=float(j), activity_s=0.1)
        for t, w, j in zip(grid, watts, energy, strict=True)
    ]
    samples = [replace(one, graphics_frac=0.5) for one in samples]
    run = run_of(tmp_path / "run", steps=steps, samples=samples, devices=[H200])
    (gaps,) = [one for one in explained(run).blocks if one.key == "gaps"]
    assert gaps.share_frac == pytest.approx(9.5 / 19.5)
    assert gaps.joules_basis == "measured"
    assert gaps.joules == pytest.approx(19 * 0.5 * 100, rel=0.15)


fracs = st.floats(0, 0.3)


@given(
    parts=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("checkpoint", "eval", "data", "stalls", "gaps"), fracs)
    ),
    busy=st.none() | st.floats(0, 1),
)
def test_waits_and_what_is_left_are_the_whole_window(
    parts: dict[str, float], busy: float | None
) -> None:
    whole = max(1.0, sum(parts.values()))
    split = TimeSplit(
        whole,
        {name: share for name, share in parts.items() if share > 0},
        dict.fromkeys(parts, 3),
        dict.fromkeys(parts, 0.1),
        {},
        np.array([0, S]),
        np.array([1.0]),
        {},
        {},
        "measured",
        steps=1.0,
    )
    blocks, level = wait_blocks(
        split, DeviceActivity(busy_frac=busy, busy_key="activity.graphics_frac")
    )
    assert sum(one.share_frac for one in blocks) + level == pytest.approx(1.0, abs=1e-9)
    assert all(one.share_frac >= 0 for one in blocks)
