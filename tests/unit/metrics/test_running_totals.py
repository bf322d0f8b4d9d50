"""Totals that are kept while a run is written: the same as of the whole run, wherever it is cut."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.live.totals import RunningTotals, Totals
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Device, Missing, Reading, Sample, Step
from ergmeter.runlog.identity import writer_header
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from ergmeter.runlog.writer import Writer
from tests.runs import GPU, make_run

S = 10**9
OTHER = Device("GPU-1", "gpu", "Test GPU", "nvml", {"power_field": "instant"})


class Growing:
    """A run that is written piece by piece, as by a process that is alive."""

    def __init__(self, path: Path, *devices: Device) -> None:
        self.path = path if path.exists() else make_run(path)
        clock = {"monotonic_ns": 0, "wall_ns": round((time.time() - 10_000) * S)}
        header = {**writer_header("meter"), "clock": clock, "settings": {}, "unavailable": {}}
        self.writer = Writer(self.path, header=header, devices=list(devices))

    def add(self, steps: Sequence[Step] = (), samples: Sequence[Sample] = ()) -> Run:
        self.writer.write("samples", list(samples), stream="nvml")
        self.writer.write("steps", list(steps))
        return Run.open(self.path)


BEGIN_S = 20  # a run does not begin when its clock does


@cache
def curves(until_s: int, *, counter_every_s: float) -> tuple[Sample, ...]:
    """What NVML would say: power ten times a second, the counter and the gauges more seldom."""
    fine = np.arange(BEGIN_S - 2, until_s + 2, 0.01)
    power_w = 300 + 150 * np.sin(fine / 3) + 80 * (fine % 7 > 5)
    drawn_j = 1000 + np.append(0.0, np.cumsum(power_w * 0.01))
    found = []
    for number, at in enumerate(range(0, len(fine), 10)):
        t_s, slow = float(fine[at]), {}
        if number % 10 == 0:
            slow = {"memory_bytes": int(4e9 + 1e8 * t_s), "busy_frac": 0.5 + 0.4 * np.sin(t_s)}
        found.append(Sample(round(t_s * S), GPU.id, power_w=float(power_w[at]), **slow))
        if number % round(counter_every_s * 10) == 0:
            found.append(Sample(round(t_s * S) + 1, GPU.id, energy_j=float(drawn_j[at])))
    return tuple(found)


def irregular_steps(count: int) -> list[Step]:
    starts = BEGIN_S + np.cumsum(0.3 + 0.25 * np.abs(np.sin(np.arange(count))))
    lengths = 0.2 + 0.1 * np.abs(np.cos(np.arange(count)))
    return [
        Step(round(a * S), round((a + b) * S), index=i, tokens_computed=100 + i % 7, samples=3)
        for i, (a, b) in enumerate(zip(starts, lengths, strict=True))
    ]


def number(amount: object) -> float:
    assert isinstance(amount, float), amount
    return amount


def assert_same(totals: Totals, run: Run) -> None:
    found = summarize(run, Settings()).readings  # of all that is asked below, once

    def value(key: str) -> float:
        reading = found[key]
        assert isinstance(reading, Reading), reading
        return reading.value

    seconds = value("time.window_s")
    assert totals.window_s == pytest.approx(seconds, abs=1e-9)
    assert totals.steps == value("steps.count")
    assert totals.tokens == value("tokens.total")
    assert number(totals.samples) / seconds == pytest.approx(value("throughput.samples_per_s"))
    assert totals.in_steps_s / totals.steps == pytest.approx(value("time.in_step_s"))
    assert totals.energy_j == pytest.approx(value("energy.run_j"), rel=1e-6)
    mean_bytes = number(totals.memory_byte_s) / totals.window_s
    assert mean_bytes == pytest.approx(value("memory.device_mean_bytes"), rel=1e-6)
    busy_frac = number(totals.busy_s) / totals.window_s
    assert busy_frac == pytest.approx(value("utilization.busy_frac"), rel=1e-6)


STEPS = irregular_steps(200)  # 92 s


@settings(max_examples=15)
@given(
    cuts=st.lists(st.integers(1, 199), unique=True, max_size=12),
    counter_every_s=st.sampled_from([0.2, 1.0, 4.0]),
)
def test_they_are_those_of_the_whole_run_wherever_it_is_cut(
    cuts: list[int], counter_every_s: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    growing = Growing(tmp_path_factory.mktemp("growing") / "run", GPU)
    running = RunningTotals(growing.writer.id)
    samples = curves(120, counter_every_s=counter_every_s)
    first = 0
    for cut in [*sorted(cuts), len(STEPS)]:
        # What is handed over reaches a little further than the last step, never much.
        now_ns = STEPS[cut - 1].end_ns + S // 20
        seen = [one for one in samples if one.t_ns <= now_ns]
        samples = samples[len(seen) :]
        totals = running.totals(growing.add(STEPS[first:cut], seen))
        assert totals.steps >= cut - 1
        first = cut
    totals = running.totals(growing.add(samples=samples))  # now every step's samples are there
    assert_same(totals, Run.open(growing.path))


def test_they_are_not_worse_for_being_asked_for_after_every_step(tmp_path: Path) -> None:
    growing = Growing(tmp_path / "run", GPU)
    running = RunningTotals(growing.writer.id)
    samples = curves(120, counter_every_s=4.0)
    at = 0
    for step in STEPS:
        until = next(i for i in range(at, len(samples)) if samples[i].t_ns > step.end_ns + S // 20)
        running.totals(growing.add([step], samples[at:until]))
        at = until
    assert_same(running.totals(growing.add(samples=samples[at:])), Run.open(growing.path))


def test_a_rank_has_its_own_steps_and_its_own_device(tmp_path: Path) -> None:
    first = Growing(tmp_path / "run", GPU, OTHER)
    second = Growing(tmp_path / "run")
    idle = [Sample(round(t * S), OTHER.id, power_w=50.0) for t in np.arange(18, 120, 0.1)]
    first.add(STEPS, [*curves(120, counter_every_s=1.0), *idle])
    run = second.add(
        [Step(20 * S, 80 * S, tokens_computed=5), Step(80 * S, 110 * S, tokens_computed=6)]
    )
    totals = RunningTotals(second.writer.id).totals(run, gpus={OTHER.id})
    assert totals.steps == 2
    assert totals.tokens == 11
    assert totals.window_s == 90
    assert totals.energy_j == pytest.approx(50.0 * 90)
    assert isinstance(totals.samples, Missing)
    both = RunningTotals(first.writer.id).totals(run)
    assert number(both.energy_j) > 50.0 * both.window_s * 4  # without a word on whose, all devices


def test_what_comes_before_since_is_not_in_them(tmp_path: Path) -> None:
    growing = Growing(tmp_path / "run", GPU)
    run = growing.add(STEPS, curves(120, counter_every_s=1.0))
    since_ns = STEPS[49].end_ns
    totals = RunningTotals(growing.writer.id, since_ns=since_ns).totals(run)
    assert totals.steps == 150
    assert totals.start_ns == since_ns
    assert totals.tokens == sum(step.tokens_computed or 0 for step in STEPS[50:])


def test_a_probe_that_dies_costs_its_figures_and_no_others(tmp_path: Path) -> None:
    growing = Growing(tmp_path / "run", GPU)
    running = RunningTotals(growing.writer.id)
    alive = [one for one in curves(50, counter_every_s=1.0) if one.t_ns < 50 * S]
    halves = STEPS[:100], STEPS[100:]
    running.totals(growing.add(halves[0], alive))
    totals = running.totals(growing.add(halves[1]))
    assert totals.steps == 200
    assert totals.tokens == sum(step.tokens_computed or 0 for step in STEPS)
    assert isinstance(totals.energy_j, Missing)
    assert "readings end" in totals.energy_j.reason


def test_without_a_step_there_are_none(tmp_path: Path) -> None:
    growing = Growing(tmp_path / "run", GPU)
    with pytest.raises(NotMeasurable):
        RunningTotals(growing.writer.id).totals(
            growing.add(samples=curves(25, counter_every_s=1.0))
        )
