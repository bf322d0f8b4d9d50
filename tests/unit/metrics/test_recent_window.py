"""A run that is being written, seen in parts: the parts add up, and no rank is short of tokens."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.live.recent_window import recent, whole_run_update
from ergmeter.records import Reading, Sample, Step, Window
from ergmeter.runlog.reader import Run
from tests import runs
from tests.runs import GPU, even_steps, make_run, reading

S = 10**9
BEGAN_S = 1_700_000_000  # before the files of the tests are written, as it is with a real run
CLOCK = {"clock": {"monotonic_ns": 0, "wall_ns": BEGAN_S * S}}


def add_writer(run: Path, **contents: Any) -> None:
    runs.add_writer(run, header=CLOCK, **contents)


def run_of(path: Path, **contents: Any) -> Run:
    return runs.run_of(path, header=CLOCK, **contents)


def value(found: object) -> float:
    assert isinstance(found, Reading), found
    return found.value


def test_an_update_is_over_the_steps_since_the_last_one_and_no_others(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(10, tokens_computed=100), closed=False)
    first = recent(run)
    assert first.step == 10
    assert value(first.summary.readings["throughput.tokens_per_s"]) == pytest.approx(100.0)
    assert first.window == Window(0, 10 * S)
    assert first.wall_s == pytest.approx(BEGAN_S + 10)
    keys = ("time.step_s", "throughput.tokens_per_s", "utilization.mfu_frac")
    some = recent(run, keys=keys)
    assert some.summary.readings == {key: first.summary.readings[key] for key in keys}
    assert (some.step, some.window) == (first.step, first.window)
    second = recent(run, since_ns=6 * S)
    assert second.window == Window(6 * S, 10 * S)
    assert value(second.summary.readings["tokens.total"]) == 400
    with pytest.raises(NotMeasurable):
        recent(run, since_ns=10 * S)


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(1, 29), unique=True, max_size=6))
def test_updates_tile_the_run(cuts: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    steps = even_steps(30, seconds=0.4, gap_s=0.1, tokens_computed=7)
    samples = [Sample(round(t * S), GPU.id, power_w=100.0 + t) for t in np.arange(-2, 18, 0.1)]
    run = make_run(tmp_path_factory.mktemp("tiled") / "run")
    add_writer(run, samples=samples, devices=[GPU])
    tokens = joules = seconds = 0.0
    since_ns = 0
    for start, end in pairwise([0, *sorted(cuts), 30]):
        add_writer(run, steps=steps[start:end])
        update = recent(Run.open(run), since_ns=since_ns)
        since_ns = update.window.end_ns
        found = update.summary.readings
        tokens += value(found["tokens.total"])
        joules += value(found["energy.run_j"])
        seconds += update.window.duration_s
        rate = value(found["throughput.tokens_per_s"])
        assert rate == pytest.approx(7 * (end - start) / update.window.duration_s)
    assert tokens == 210
    assert seconds == pytest.approx(30 * 0.5 - 0.1)  # what lies between steps is in one of them
    whole_run = Run.open(run)
    assert joules == pytest.approx(reading(whole_run, "energy.run_j").value, rel=1e-9)


def test_an_update_ends_where_the_slowest_rank_has_handed_over_to(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank, done in ((0, 10), (1, 8)):
        rows = even_steps(done, tokens_computed=100, rank=rank)
        add_writer(run, steps=rows, closed=False)
    update = recent(Run.open(run))
    assert update.window.end_ns == 8 * S
    assert value(update.summary.readings["throughput.tokens_per_s"]) == pytest.approx(200.0)


def test_a_rank_that_is_done_holds_nobody_up(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_writer(run, steps=even_steps(10, tokens_computed=100), closed=False)
    add_writer(run, steps=even_steps(3, tokens_computed=100, rank=1), closed=True)
    assert recent(Run.open(run)).window.end_ns == 10 * S


def test_the_warm_up_is_in_the_updates_and_not_in_the_whole(tmp_path: Path) -> None:
    rows = even_steps(10, tokens_computed=100)
    run = run_of(tmp_path / "run", steps=rows, settings={"warmup_steps": 4})
    assert value(recent(run).summary.readings["tokens.total"]) == 1000
    update = whole_run_update(run)
    assert update.is_final
    assert value(update.summary.readings["tokens.total"]) == 600
    assert update.step == 10


def test_the_axis_goes_on_after_a_resume(tmp_path: Path) -> None:
    rows = [Step(i * S, i * S + S, index=500 + i) for i in range(5)]
    assert recent(run_of(tmp_path / "run", steps=rows)).step == 505


def test_what_the_training_says_is_of_its_last_step_that_says_it(tmp_path: Path) -> None:
    rows = [Step(i * S, i * S + S, index=i, loss=4.0 - i if i < 3 else None) for i in range(5)]
    found = recent(run_of(tmp_path / "run", steps=rows)).summary.readings
    assert value(found["training.loss"]) == 2.0
    assert "of step 3, the last of 3 told" in found["training.loss"].note  # type: ignore[union-attr]
    assert "no step has a grad norm" in found["training.grad_norm"].reason  # type: ignore[union-attr]


def test_a_loss_that_is_only_printed_stands_beside_the_steps_that_a_meter_tells(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "run")
    add_writer(run, steps=even_steps(10))
    lines = [Step(i * S, i * S + 2 * S, index=i, loss=9.0 - i) for i in range(0, 14, 2)]
    add_writer(run, steps=lines, stream="output")
    found = whole_run_update(Run.open(run)).summary.readings["training.loss"]
    assert value(found) == 1.0  # of the line at 8 to 10 s; those after the last step are not its
    assert "as printed" in found.note  # type: ignore[union-attr]


def test_files_from_before_the_window_are_not_opened(tmp_path: Path) -> None:
    """A week-long run is followed at the price of its last minutes."""
    path = tmp_path / "run"
    run = run_of(path, steps=even_steps(10))
    [old] = path.glob("*/steps-*")
    old.write_bytes(b"not to be read")
    long_ago = BEGAN_S - 3600
    os.utime(old, (long_ago, long_ago))
    part = run.part(Window(5 * S, 9 * S))
    assert len(part.steps()["start_ns"]) == 0
    assert part.damage == []
    os.utime(old, (long_ago + 7200, long_ago + 7200))
    run.part(Window(5 * S, 9 * S)).steps()
    assert run.damage != []


def test_rows_out_of_order_are_cut_as_well_as_rows_in_order(tmp_path: Path) -> None:
    rows = even_steps(10, tokens_computed=1)
    shuffled = [rows[i] for i in (5, 0, 9, 1, 8, 2, 7, 3, 6, 4)]
    part = run_of(tmp_path / "run", steps=shuffled).part(Window(3 * S, 7 * S))
    assert sorted(part.steps()["index"].tolist()) == [3, 4, 5, 6]
