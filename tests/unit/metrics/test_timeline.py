"""Long columns in few points: nothing beyond the drawn ones was left out."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.metrics.summarize import evidence_of
from ergmeter.metrics.timeline import (
    bounded_series,
    energy_line,
    line_of,
    phase_spans,
    rate,
    step_line,
)
from ergmeter.records import Device, Mark, Sample, Step
from ergmeter.runlog.segments import Series
from tests.runs import GPU, run_of

S = 10**9


def series(values: object, *, every_ns: int = 10**8) -> Series:
    column = np.asarray(values, dtype=np.float64)
    return Series(np.arange(len(column), dtype=np.int64) * every_ns, column)


def test_a_spike_of_one_reading_among_ten_million_is_drawn_at_its_time() -> None:
    values = np.full(10_000_000, 300.0)
    values[6_543_210], values[1_234_567] = 701.5, 12.25
    line = bounded_series(series(values, every_ns=1_000_000), zero_ns=0, points=1000)
    assert line.highest == pytest.approx((701.5, 6543.210))
    assert line.lowest == pytest.approx((12.25, 1234.567))
    assert len(line.t_s) <= 1000
    assert line.readings == 10_000_000
    assert line.is_bounded


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(8, 60))
def test_what_is_drawn_are_readings_with_the_first_the_last_and_the_extremes(
    values: list[float], points: int
) -> None:
    line = bounded_series(series(values), zero_ns=0, points=points)
    assert set(line.values) <= set(values)
    assert (line.values.min(), line.values.max()) == (min(values), max(values))
    assert (line.values[0], line.values[-1]) == (values[0], values[-1])
    assert (np.diff(line.t_s) > 0).all()
    assert len(line.t_s) <= max(points, 2)


def test_few_readings_are_all_drawn_as_they_are() -> None:
    line = bounded_series(series([1.0, 5.0, 2.0]), zero_ns=-(10**9))
    assert line.t_s.tolist() == [1.0, 1.1, 1.2]
    assert line.values.tolist() == [1.0, 5.0, 2.0]
    assert not line.is_bounded


def test_a_while_without_readings_is_a_break_and_not_a_line() -> None:
    t_ns = np.array([0, 1, 2, 3, 33, 34], dtype=np.int64) * 10**8
    line = bounded_series(Series(t_ns, np.array([5.0, 5, 5, 5, 9, 9])), zero_ns=0)
    assert np.isnan(line.values).tolist() == [False] * 4 + [True] + [False] * 2
    assert line.t_s[4] == pytest.approx(1.8)  # between 0.3 and 3.3 s
    assert line.lowest[0] == 5.0


def test_a_break_is_kept_where_the_column_is_long() -> None:
    t_ns = np.arange(20_000, dtype=np.int64) * 10**7
    t_ns[10_000:] += 5 * 10**9
    line = bounded_series(Series(t_ns, np.ones(20_000)), zero_ns=0, points=100)
    (place,) = np.flatnonzero(np.isnan(line.values))
    assert line.t_s[place - 1] == pytest.approx(99.99)
    assert line.t_s[place + 1] == pytest.approx(105.0)


def test_points_stay_bounded_where_a_column_is_full_of_gaps() -> None:
    t_ns = np.arange(50_000, dtype=np.int64) * 10**7
    t_ns += np.arange(50_000, dtype=np.int64) // 50 * 5 * 10**9
    line = bounded_series(Series(t_ns, np.sin(np.arange(50_000.0))), zero_ns=0, points=400)
    assert len(line.t_s) <= 400
    assert np.isnan(line.values).sum() == 50
    assert (np.diff(line.t_s) > 0).all()


def test_a_counter_is_drawn_by_what_it_grew_and_a_reset_says_nothing() -> None:
    counter = Series(np.array([0, 1, 3, 4], dtype=np.int64) * 10**9, np.array([10.0, 30, 50, 5]))
    grown = rate(counter)
    assert grown.t_ns.tolist() == [10**9, 3 * 10**9]
    assert grown.values.tolist() == [20.0, 10.0]


def test_the_rate_of_a_counter_holds_from_where_it_was_first_read(tmp_path: Path) -> None:
    zero_ns = time.monotonic_ns()
    node = Device("node:a", "node", "a", "node")
    read = [(1, 100), (4, 700), (5, 1000)]
    samples = [Sample(zero_ns + t * S, "node:a", disk_read_bytes=b) for t, b in read]
    clock = {"clock": {"monotonic_ns": zero_ns, "wall_ns": time.time_ns()}}
    run = run_of(tmp_path / "run", samples=samples, devices=[node], header=clock)
    line = line_of(evidence_of(run), node, "disk_read_bytes", is_counter=True)
    assert line is not None
    assert line.t_s.tolist() == [1.0, 4.0, 5.0]
    assert line.values.tolist() == [200.0, 200.0, 300.0]


@pytest.mark.parametrize(("before", "drawn_s"), [([0], [0, 3, 6]), ([0, 1], [3, 6]), ([], [3, 6])])
def test_a_share_holds_from_the_reading_before_where_there_was_just_one(
    tmp_path: Path, before: list[int], drawn_s: list[int]
) -> None:
    zero_ns = time.monotonic_ns()
    node = Device("node:a", "node", "a", "node")
    samples = [Sample(zero_ns + t * S, "node:a", disk_read_bytes=1) for t in before]
    samples += [
        Sample(zero_ns + t * S, "node:a", busy_frac=t / 10, disk_read_bytes=1) for t in (3, 6)
    ]
    clock = {"clock": {"monotonic_ns": zero_ns, "wall_ns": time.time_ns()}}
    run = run_of(tmp_path / "run", samples=samples, devices=[node], header=clock)
    line = line_of(evidence_of(run), node, "busy_frac", is_counter=False, since="disk_read_bytes")
    assert line is not None
    assert line.t_s.tolist() == drawn_s
    assert line.values.tolist() == [0.3, 0.3, 0.6][-len(drawn_s) :]


def test_joules_are_those_of_the_counter_since_its_first_reading(tmp_path: Path) -> None:
    zero_ns = time.monotonic_ns()
    samples = [
        Sample(zero_ns + i * S // 10, "GPU-0", power_w=200.0, energy_j=1000 + 20.0 * i)
        for i in range(81)
    ]
    steps = [Step(zero_ns + i * S, zero_ns + (i + 1) * S) for i in range(8)]
    clock = {"clock": {"monotonic_ns": zero_ns, "wall_ns": time.time_ns()}}
    run = run_of(tmp_path / "run", steps=steps, samples=samples, devices=[GPU], header=clock)
    line = energy_line(evidence_of(run), GPU)
    assert line.values[0] == 0.0
    took_s = line.t_s[-1] - line.t_s[0]
    assert took_s > 7.5
    assert line.values[-1] == pytest.approx(200.0 * took_s)


def test_steps_closer_than_a_point_are_one_span_that_says_how_many_they_are(tmp_path: Path) -> None:
    zero_ns = time.monotonic_ns()
    times = [(zero_ns + i * S // 100, zero_ns + i * S // 100 + 9 * S // 1000) for i in range(4000)]
    steps = [Step(a, b) for a, b in times]
    steps.append(Step(zero_ns + 41 * S, zero_ns + 43 * S, phase="eval"))
    run = run_of(
        tmp_path / "run",
        steps=steps,
        marks=[Mark(zero_ns + 45 * S, "ended", "finished")],
        header={"clock": {"monotonic_ns": zero_ns, "wall_ns": time.time_ns()}},
        closed=False,
    )
    train, evaluation = phase_spans(evidence_of(run))
    assert (train.phase, evaluation.phase) == ("train", "eval")
    assert train.counts.sum() == 4000
    assert len(train.counts) == 1  # they are 1 ms apart, and a point is 45 ms
    assert (train.start_s[0], train.end_s[0]) == (0.0, pytest.approx(39.999))
    assert (evaluation.start_s.tolist(), evaluation.end_s.tolist()) == ([41.0], [43.0])


def test_the_line_of_step_times_has_the_one_slow_step(tmp_path: Path) -> None:
    ends = np.cumsum([0.1] * 5000)
    ends[2500:] += 3.0
    edges = [0, *(ends * 1e9).round().astype(int).tolist()]
    steps = [Step(a, b, index=i) for i, (a, b) in enumerate(itertools.pairwise(edges))]
    line = step_line(evidence_of(run_of(tmp_path / "run", steps=steps)), points=200)
    assert line.highest[0] == pytest.approx(3.1)
    assert line.highest[1] == pytest.approx(253.1)
    assert len(line.t_s) <= 200


def test_gaps_that_are_too_many_to_be_drawn_are_counted() -> None:
    """Bursts of 20 readings a millisecond apart, 2 s between them: 199 gaps, of which 125 break."""
    t_ns = np.concatenate([np.arange(20) * 10**6 + burst * 2 * 10**9 for burst in range(200)])
    line = bounded_series(Series(t_ns, np.ones(len(t_ns))), zero_ns=0)
    assert int(np.isnan(line.values).sum()) == 125
    assert line.unbroken == 199 - 125
    assert bounded_series(Series(t_ns[:400], np.ones(400)), zero_ns=0).unbroken == 0
