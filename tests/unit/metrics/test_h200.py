"""The recorded H200: our joules against what its own counter says, phase by phase and step by step.

The reference is computed here from the recording by other means: the counter's values at the first
reading after each of its refreshes, every 100 ms, and a straight line between two at an edge. The
staircase of raw readings is no reference at 1 %: a refresh at 600 W is 60 J of 6 900.
"""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.device_energy import EnergyCurve, counter_curve
from ergmeter.metrics.summarize import summarize
from ergmeter.probes.replay import recorded_device, recorded_samples, recorded_steps
from ergmeter.records import Reading, Sample, Step, Window
from ergmeter.runlog.reader import Run
from tests.runs import add_writer, make_run

DATA = Path(__file__).parents[2] / "data" / "h200"
TRACE = json.loads((DATA / "h200_trace.json").read_text())
PHASES = {phase["name"]: phase for phase in TRACE["phases"]}


@cache
def samples(hide: tuple[str, ...] = ()) -> tuple[Sample, ...]:
    """Of the whole recording, without the columns that are hidden; read once."""
    nothing: dict[str, Any] = dict.fromkeys(hide)
    left = (replace(sample, **nothing) for sample in recorded_samples(DATA))
    return tuple(sample for sample in left if sample != Sample(sample.t_ns, sample.device))


@cache
def steps_of(phase: str) -> tuple[Step, ...]:
    return tuple(step for name, step in recorded_steps(DATA) if name == phase)


@cache
def counter_readings() -> tuple[np.ndarray, np.ndarray]:
    with gzip.open(DATA / "h200_samples.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    middle = [(int(r["energy_read_start_ns"]) + int(r["energy_read_end_ns"])) / 2 for r in rows]
    return np.array(middle), np.array([int(r["energy_counter_mj"]) / 1e3 for r in rows])


def by_the_counter(start_ns: int, end_ns: int) -> float:
    t_ns, joules = counter_readings()
    fresh = np.append(True, joules[1:] > joules[:-1])
    start_j, end_j = np.interp([start_ns, end_ns], t_ns[fresh], joules[fresh])
    return float(end_j - start_j)


def replayed(path: Path, phase: str, *, hide: tuple[str, ...] = ()) -> Run:
    """A run of one phase: its steps, and the samples of the whole recording."""
    device = recorded_device(DATA)
    run = make_run(path)
    add_writer(run, steps=steps_of(phase), samples=samples(hide), devices=[device])
    return Run.open(run)


@cache
def whole_curve() -> EnergyCurve:
    counted = [one for one in samples() if one.energy_j is not None]
    return counter_curve(
        np.array([one.t_ns for one in counted]),
        np.array([float(one.energy_j or 0) for one in counted]),
    )


def window_of(run: Run) -> tuple[int, int]:
    """From the end of a first step that is slow (or the start of the first) to the last's end."""
    steps = run.steps()
    lasted = steps["end_ns"] - steps["start_ns"]
    is_slow = lasted[0] > 1.5 * np.median(lasted)
    start_ns = steps["end_ns"][0] if is_slow else steps["start_ns"][0]
    return int(start_ns), int(steps["end_ns"][-1])


def reading(run: Run, key: str) -> Reading:
    found = summarize(run).readings[key]
    assert isinstance(found, Reading), found
    return found


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_is_within_one_percent_of_the_counter(tmp_path: Path, phase: str) -> None:
    run = replayed(tmp_path / "run", phase)
    truth_j = by_the_counter(*window_of(run))
    energy = reading(run, "energy.run_j")
    assert energy.value == pytest.approx(truth_j, rel=0.01)
    assert energy.basis == "measured"
    assert "energy counter" in energy.note
    assert energy.low is not None
    assert energy.high is not None
    assert energy.low <= energy.value <= energy.high


@pytest.mark.parametrize("phase", PHASES)
def test_instant_power_alone_is_within_one_percent_of_the_counter(
    tmp_path: Path, phase: str
) -> None:
    run = replayed(tmp_path / "run", phase, hide=("energy_j",))
    truth_j = by_the_counter(*window_of(run))
    energy = reading(run, "energy.run_j")
    assert energy.value == pytest.approx(truth_j, rel=0.01)
    assert energy.basis == "derived"
    assert "instant power, integrated" in energy.note


@pytest.mark.parametrize("every_s", [0.5, 2.0])
@pytest.mark.parametrize("phase", PHASES)
def test_a_counter_read_seldom_is_within_one_percent_too(
    tmp_path: Path, phase: str, every_s: float
) -> None:
    """Where a reading is dear the counter is read twice a second or less, and power fills in."""
    due_ns = 0.0
    seldom = []
    for sample in samples():
        if sample.energy_j is None:
            seldom.append(sample)
        elif sample.t_ns >= due_ns:
            seldom.append(sample)
            due_ns = sample.t_ns + every_s * 1e9
    run = make_run(tmp_path / "run")
    add_writer(run, steps=steps_of(phase), samples=seldom, devices=[recorded_device(DATA)])
    truth_j = by_the_counter(*window_of(Run.open(run)))
    energy = reading(Run.open(run), "energy.run_j")
    assert energy.value == pytest.approx(truth_j, rel=0.01)
    assert energy.basis == "measured"
    assert energy.low is not None
    assert energy.high is not None
    assert energy.low <= truth_j <= energy.high


def test_without_counter_and_instant_power_there_is_no_energy_and_the_reason_is_told(
    tmp_path: Path,
) -> None:
    run = replayed(tmp_path / "run", "tiny_20ms", hide=("energy_j", "power_w"))
    summary = summarize(run)
    found = summary.readings["energy.run_j"]
    assert not isinstance(found, Reading)
    assert "no power reading" in found.reason


def test_tokens_time_and_energy_are_of_one_window(tmp_path: Path) -> None:
    run = replayed(tmp_path / "run", "lora_bf16_1b")
    tokens_per_s, watts, per_token = (
        reading(run, key).value
        for key in ("throughput.tokens_per_s", "energy.mean_w", "energy.joules_per_token")
    )
    assert watts / tokens_per_s == pytest.approx(per_token, rel=1e-9)
    steps = run.steps()
    window_s = (steps["end_ns"][-1] - steps["start_ns"][0]) / 1e9
    assert tokens_per_s == pytest.approx(39 * 16384 / window_s, rel=1e-9)


def test_no_step_of_16_ms_reads_zero_and_steps_and_gaps_add_up_to_the_phase() -> None:
    curve = whole_curve()
    steps = steps_of("tiny_20ms")
    assert len(steps) == 479
    starts = np.array([step.start_ns for step in steps])
    ends = np.array([step.end_ns for step in steps])
    each_j = curve.at(ends) - curve.at(starts)
    gaps_j = curve.at(starts[1:]) - curve.at(ends[:-1])
    assert each_j.min() > 0.5  # about 130 W for 16 ms is 2 J
    phase = PHASES["tiny_20ms"]
    whole_j = by_the_counter(phase["start_ns"], phase["end_ns"])
    edges_j = curve.over(Window(phase["start_ns"], steps[0].start_ns)).joules + (
        curve.over(Window(steps[-1].end_ns, phase["end_ns"])).joules
    )
    assert each_j.sum() + gaps_j.sum() + edges_j == pytest.approx(whole_j, rel=0.005)


def test_peak_memory_is_what_the_device_had_in_use(tmp_path: Path) -> None:
    run = replayed(tmp_path / "run", "full_bf16_1b")
    with gzip.open(DATA / "h200_samples.csv.gz", "rt") as file:
        most = max(int(row["memory_used_bytes"]) for row in csv.DictReader(file))
    assert reading(run, "memory.device_peak_bytes").value == most


def test_a_window_outside_the_recording_is_refused() -> None:
    curve = whole_curve()
    with pytest.raises(NotMeasurable, match="before the window does"):
        curve.over(Window(150 * 10**9, 160 * 10**9))
