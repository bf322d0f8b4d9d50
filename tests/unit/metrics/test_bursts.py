"""Isolated bursts on a real H200, replayed at the pace at which ergmeter reads.

tests/data/h200_bursts (NVIDIA H200, driver 580.159, 2026-11-15): products of 8192 x 8192 for
50 ms, 200 ms and 1 s, with pauses of 0.6 to 1 s; instant power every 4 ms and the counter at each
of its refreshes, both read beside it. The truth is the counter over the whole sequence, less the
power of the pauses: what all bursts drew together.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from ergmeter.metrics.device_energy import counter_curve, power_curve, span_shape
from ergmeter.metrics.evidence.steps import Steps
from ergmeter.records import PHASES, Sample, Step
from ergmeter.runlog.segments import Series
from tests.runs import GPU, reading, run_of

DATA = Path(__file__).parents[2] / "data" / "h200_bursts"
S = 10**9
POWER_NS, COUNTER_NS = 100_000_000, 1_700_000_000  # as on an H200
PHASES_OF_TICKS = (0.0, 0.3, 0.7, 0.9)


@dataclass
class Recording:
    """One length of burst."""

    start_ns: int
    end_ns: int
    bursts: Any  # starts and ends
    power: Series
    counter: Series

    @cached_property
    def truth_j(self) -> float:
        is_rest = np.zeros(len(self.power.t_ns), dtype=bool)
        starts = np.append(self.bursts[1:, 0], self.end_ns)
        for pause_ns, next_ns in zip(self.bursts[:, 1], starts, strict=True):
            is_rest |= (self.power.t_ns > pause_ns + S // 4) & (self.power.t_ns < next_ns)
        floor_w = float(self.power.values[is_rest].mean())
        fresh = np.flatnonzero(np.diff(self.counter.values) != 0) + 1
        edges = (self.start_ns, self.end_ns)
        drawn = np.interp(edges, self.counter.t_ns[fresh], self.counter.values[fresh])
        rest_s = (self.end_ns - self.start_ns - (self.bursts[:, 1] - self.bursts[:, 0]).sum()) / S
        return float(drawn[1] - drawn[0] - floor_w * rest_s)

    def read(self, series: Series, every_ns: int, phase: float) -> Series:
        """What readings at this pace would have shown."""
        ticks = np.arange(self.start_ns - 2 * S, self.end_ns + 2 * S, every_ns)
        t_ns = ticks + round(phase * every_ns)
        held = np.searchsorted(series.t_ns, t_ns, side="right") - 1
        return Series(t_ns, series.values[held])


def recording(length: str) -> Recording:
    said = json.loads((DATA / "bursts.json").read_text())[length]
    columns = []
    for file, name in (("power", "power_w"), ("counter", "energy_j")):
        table = pyarrow.parquet.read_table(DATA / f"{file}.parquet")
        columns.append(Series(table["t_ns"].to_numpy(), table[name].to_numpy().astype(float)))
    bursts = np.array(said["bursts"], dtype=np.int64)
    return Recording(said["start_ns"], said["end_ns"], bursts, *columns)


def evidence_of(bursts: Any) -> Any:
    columns = {"start_ns": bursts[:, 0], "end_ns": bursts[:, 1]}
    columns |= dict.fromkeys(("phase", "writer", "rank"), np.zeros(len(bursts)))
    return SimpleNamespace(all_steps=Steps(columns), from_output=False)


@pytest.mark.parametrize(("length", "least_s"), [("0.05", 0.05), ("0.2", 0.2), ("1.0", 1.0)])
def test_bursts_one_by_one_add_up_to_what_the_counter_says_of_all(
    length: str, least_s: float
) -> None:
    recorded = recording(length)
    starts, ends = recorded.bursts.T
    for phase in PHASES_OF_TICKS:
        power = recorded.read(recorded.power, POWER_NS, phase)
        counter = recorded.read(recorded.counter, COUNTER_NS, phase)
        shape = span_shape(evidence_of(recorded.bursts), power, counter)
        assert shape is not None
        ours = counter_curve(counter.t_ns, counter.values, shape=shape, lag_s=0.0)
        joules, low_j, high_j = ours.over_each(starts, ends)
        assert joules.sum() == pytest.approx(recorded.truth_j, rel=0.01)
        assert (low_j <= joules).all()
        assert (joules <= high_j).all()
        # By the sensor's shape they lose as much to the pauses as it looks away or lags.
        sensed = counter_curve(
            counter.t_ns, counter.values, shape=power_curve(power.t_ns, power.values)
        )
        lost_j = recorded.truth_j - sensed.over_each(starts, ends)[0].sum()
        assert lost_j / len(starts) > 10
        assert least_s == pytest.approx(float(np.median(ends - starts)) / S, rel=0.1)


def test_a_run_of_bursts_gets_their_joules(tmp_path: Path) -> None:
    """Through the whole way: a run's samples and steps, and its metric."""
    recorded = recording("0.2")
    power = recorded.read(recorded.power, POWER_NS, 0.0)
    counter = recorded.read(recorded.counter, COUNTER_NS, 0.0)
    zero_ns = int(power.t_ns[0])
    samples = [
        *(Sample(int(t) - zero_ns, GPU.id, power_w=float(w))
          for t, w in zip(power.t_ns, power.values, strict=True)),
        *(Sample(int(t) - zero_ns, GPU.id, energy_j=float(j))
          for t, j in zip(counter.t_ns, counter.values, strict=True)),
    ]  # fmt: skip
    steps = [
        Step(int(start) - zero_ns, int(end) - zero_ns, index=number, tokens_computed=1)
        for number, (start, end) in enumerate(recorded.bursts)
    ]
    run = run_of(tmp_path / "run", steps=steps, samples=samples, devices=[GPU])
    one_j = recorded.truth_j / len(recorded.bursts)
    assert reading(run, "energy.step_median_j").value == pytest.approx(one_j, rel=0.03)
    whole = reading(run, "energy.train_j")
    assert whole.value == pytest.approx(recorded.truth_j, rel=0.01)


def steady(watts: Any, seconds: float) -> tuple[Series, Series]:
    t_ns = np.arange(0, round(seconds * S), S // 10)
    power = np.array([float(watts(t / S)) for t in t_ns])
    joules = np.append(0.0, np.cumsum(power[:-1] / 10))
    every = np.arange(0, len(t_ns), 17)
    return Series(t_ns, power), Series(t_ns[every], joules[every])


def spans(*edges_s: tuple[float, float]) -> Any:
    return np.array([[round(a * S), round(b * S)] for a, b in edges_s], dtype=np.int64)


def test_steps_without_pauses_say_nothing_that_the_sensor_does_not() -> None:
    power, counter = steady(lambda _: 600, 30)
    one_by_one = spans(*((n * 0.5, n * 0.5 + 0.499) for n in range(50)))
    assert span_shape(evidence_of(one_by_one), power, counter) is None


def test_pauses_that_draw_as_much_as_the_steps_are_no_floor() -> None:
    """As where the host's times are not the device's, and it works on in what look like pauses."""
    power, counter = steady(lambda _: 600, 30)
    apart = spans(*((n, n + 0.4) for n in range(1, 25)))
    assert span_shape(evidence_of(apart), power, counter) is None


def test_long_steps_have_levels_of_their_own() -> None:
    def watts(t_s: float) -> float:
        inside = t_s % 4 < 2 and 1 < t_s < 37
        return (300 if int(t_s // 4) % 2 else 600) if inside else 120

    power, counter = steady(watts, 40)
    long = spans(*((n * 4.0, n * 4.0 + 2.0) for n in range(1, 9)))
    shape = span_shape(evidence_of(long), power, counter)
    assert shape is not None
    joules, _, _ = counter_curve(
        counter.t_ns, counter.values, shape=shape, lag_s=0.0
    ).over_each(long[:, 0], long[:, 1])  # fmt: skip
    assert joules == pytest.approx([600 if n % 2 else 1200 for n in range(1, 9)], rel=0.05)


def test_rest_before_the_steps_is_not_what_their_pauses_draw() -> None:
    """A device that nobody uses yet: 25 W. Waiting for its next step: 110 W, too briefly to see."""

    def watts(t_s: float) -> float:
        if not 6 <= t_s < 22:
            return 25
        return 400 if (t_s - 6) % 0.16 < 0.05 else 110

    power, counter = steady(watts, 24)
    bursts = spans(*((6 + n * 0.16, 6.05 + n * 0.16) for n in range(100)))
    assert span_shape(evidence_of(bursts), power, counter) is None


def test_steps_that_would_draw_more_than_was_ever_read_are_the_hosts() -> None:
    """5 ms to ask for 100 ms of work: the device is never at rest once it has begun."""
    power, counter = steady(lambda t_s: 700 if 5 <= t_s < 25 else 120, 30)
    asked = spans(*((5 + n * 0.1, 5.005 + n * 0.1) for n in range(200)))
    assert span_shape(evidence_of(asked), power, counter) is None


def test_steps_without_pauses_end_where_they_end_and_not_where_the_sensor_sees_it() -> None:
    """It sees everything 0.1 s late."""
    power, counter = steady(lambda t_s: 700 if 5 <= t_s < 15 else 120, 20)
    late = Series(power.t_ns + S // 10, power.values)
    one_by_one = spans(*((5 + n * 0.5, 5.5 + n * 0.5) for n in range(20)))
    shape = span_shape(evidence_of(one_by_one), late, counter)
    assert shape is not None
    ours = counter_curve(counter.t_ns, counter.values, shape=shape, lag_s=0.0)
    joules, _, _ = ours.over_each(one_by_one[:, 0], one_by_one[:, 1])
    assert joules.sum() == pytest.approx(7000, rel=0.01)


def test_what_lies_within_a_step_is_left_to_the_sensor() -> None:
    power, counter = steady(lambda t_s: 700 if 5 <= t_s < 25 and t_s % 2 >= 1 else 120, 30)
    evidence = evidence_of(spans(*((5 + n * 2.0, 7 + n * 2.0) for n in range(10))))
    assert span_shape(evidence, power, counter) is not None
    waits = spans(*((6 + n * 2.0, 7 + n * 2.0) for n in range(10)))
    rows = {n: np.concatenate([c, np.zeros(10)]) for n, c in evidence.all_steps.columns.items()}
    rows["start_ns"][10:], rows["end_ns"][10:] = waits.T
    rows["phase"][10:] = PHASES.index("data")
    within = SimpleNamespace(all_steps=Steps(rows), from_output=False)
    assert span_shape(within, power, counter) is None  # type: ignore[arg-type]


def test_only_what_computes_is_a_load() -> None:
    power, counter = steady(lambda t_s: 600 if t_s % 1 < 0.4 else 120, 30)
    apart = spans(*((n, n + 0.4) for n in range(1, 25)))
    evidence = evidence_of(apart)
    evidence.all_steps.columns["phase"] = np.full(len(apart), PHASES.index("data"))
    assert span_shape(evidence, power, counter) is None
