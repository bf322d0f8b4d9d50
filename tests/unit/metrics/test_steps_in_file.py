"""Steps that lie in a file: the same rows, the same figures, and nothing left behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ergmeter.metrics.evidence import steps
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.steps import (
    Spool,
    Steps,
    Timed,
    read_steps,
    with_lanes,
)
from ergmeter.metrics.evidence.window import TrainingWindow
from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.records import Mark, Sample, Step
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from ergmeter.stats.intervals import ratio_interval
from tests.runs import GPU, add_writer, even_steps, make_run

S = 10**9
FDS = Path("/proc/self/fd")


@pytest.fixture
def low(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has nearly nothing kept in memory from then on."""

    def lowered() -> None:
        monkeypatch.setattr(steps, "MAX_ROWS", 10)

    return lowered


def many(path: Path) -> Run:
    """Five ranks: one goes on in a second writer, one tells rows out of order, one ended early,
    one twice calls itself rank 0; evaluation, checkpoints and waits for data; ends that tie."""
    run = make_run(path)
    dice = np.random.default_rng(3)
    for rank in (0, 1, 2, 3, 0):
        rows = [
            Step(
                round((i + 0.05 * rank) * S), (i + 1) * S, index=i, rank=rank,
                tokens_computed=100 + i, tokens_real=90 + rank, samples=2,
                loss=float(dice.normal(3, 0.1)),
            )
            for i in range(5, 45 if rank != 3 else 30)
        ]  # fmt: skip
        rows += [Step((50 + i) * S, (51 + i) * S, phase="eval", rank=rank) for i in range(rank + 1)]
        rows += [Step(60 * S, 61 * S, phase="checkpoint", rank=rank)] if rank == 0 else []
        rows += [Step(10 * S + 1, 10 * S + S // 10, phase="data", rank=rank)]
        rows.sort(key=lambda row: row.start_ns, reverse=rank == 2)
        first, second = (rows[:20], rows[20:]) if rank == 1 else (rows, [])
        readings = [Sample(t * S // 10, GPU.id, power_w=200.0 + t % 7) for t in range(700)]
        add_writer(
            run, steps=first, samples=[] if rank else readings, devices=[] if rank else [GPU],
            marks=[Mark(8 * S, "device_used", GPU.id)] if rank == 0 else [],
            header={"world": 4},
        )  # fmt: skip
        if second:
            add_writer(run, steps=second, header={"world": 4})
    return Run.open(run)


def rows_of(found: Steps) -> list[list[tuple[str, list[float]]]]:
    return [
        [(name, np.nan_to_num(lane[name], nan=-1.0).tolist()) for name in sorted(lane.columns)]
        for lane in found.lanes
    ]


def test_lanes_from_a_file_are_those_in_memory(tmp_path: Path, low: Callable[[], None]) -> None:
    run = many(tmp_path / "run")
    held = read_steps(run)
    assert not held.spooled_lanes
    low()
    found = read_steps(run)
    assert found.spooled_lanes
    assert len(found) == len(held) == 4 * 40 + 25 + (1 + 2 + 3 + 4 + 1) + 2 + 5
    assert len(found.lanes) == 5
    assert rows_of(found) == rows_of(held)
    for name in held.columns:
        assert np.array_equal(found[name], held[name], equal_nan=True), name
    assert found.lowest("start_ns") == held.lowest("start_ns") == 5 * S
    assert found.highest("end_ns") == held.highest("end_ns") == 61 * S
    assert int(found.longest["rank"][0]) == int(held.longest["rank"][0]) == 2


def test_a_choice_of_a_choice_of_rows(tmp_path: Path, low: Callable[[], None]) -> None:
    run = many(tmp_path / "run")
    held = read_steps(run)
    low()
    found = read_steps(run)
    for rows in (held, found):
        train = rows.where_each(lambda lane: lane["phase"] == 0)
        late = train.where(train["index"] >= 35)  # which the rank that ended early has none of
        odd = late.where_each(lambda lane: lane["index"] % 2 == 1)
        assert [lane["index"].tolist() for lane in odd.lanes] == [[35, 37, 39, 41, 43]] * 4
        assert len(odd) == 20
        none = odd.where_each(lambda lane: lane["index"] < 0)
        assert (len(none), len(none.lanes), len(none["loss"])) == (0, 0, 0)
        assert odd.where(np.array([3, 0]))["index"].tolist() == [41, 35]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"warmup_steps": 3},
        {"warmup_s": 7.5},
        {"warmup": "auto"},
        {"layout": "tp=2"},
        {"tokens_per_step": 777.0, "samples_per_step": 3.0},
    ],
)
def test_the_summary_from_a_file_is_the_one_in_memory(
    settings: dict[str, Any], tmp_path: Path, low: Callable[[], None]
) -> None:
    many(tmp_path / "run")
    declared = Settings(**settings)
    in_memory = summarize(Run.open(tmp_path / "run"), declared)
    low()
    assert evidence_of(Run.open(tmp_path / "run"), declared).all_steps.spooled_lanes
    assert summarize(Run.open(tmp_path / "run"), declared) == in_memory


def test_requests_from_a_file_are_those_in_memory(tmp_path: Path, low: Callable[[], None]) -> None:
    run = make_run(tmp_path / "run")
    for rank in range(2):
        rows = [
            one
            for i in range(20)
            for one in (
                Step(i * S, i * S + S // 4, phase="prefill", index=i, rank=rank, tokens_real=50),
                Step(
                    i * S + S // 4,
                    i * S + S // 2,
                    phase="decode",
                    index=i,
                    rank=rank,
                    tokens_real=8,
                ),
            )
        ]
        add_writer(run, steps=rows)
    in_memory = summarize(Run.open(run))
    low()
    assert summarize(Run.open(run)) == in_memory


def test_blocks_in_order_of_time_are_those_of_all_rows_sorted(
    tmp_path: Path, low: Callable[[], None]
) -> None:
    """Ranks end together, so that nearly every cut goes through rows that tie."""
    run = many(tmp_path / "run")
    low()
    rows = read_steps(run).where_each(lambda lane: lane["phase"] == 0)
    amounts = rows["tokens_computed"]
    order = np.argsort(rows["end_ns"], kind="stable")
    apart_s = np.diff(np.append(5.0 * S, rows["end_ns"][order])) / 1e9
    truth = ratio_interval(amounts[order], apart_s)
    window = TrainingWindow.single("training", 5 * S, rows.highest("end_ns"))
    found = Timed(rows, window).interval(amounts)
    assert truth is not None
    assert found == pytest.approx(truth, rel=1e-12)


@pytest.mark.skipif(not FDS.exists(), reason="asks the kernel what is open")
def test_the_file_has_no_name_and_is_closed_when_nobody_needs_it(
    tmp_path: Path, low: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    run = many(tmp_path / "run")
    low()
    gc.collect()
    before = len(list(FDS.iterdir()))
    evidence: Evidence | None = evidence_of(run)
    assert evidence is not None
    assert len(evidence.counted) == 4 * 40 + 25
    assert len(list(FDS.iterdir())) == before + 1
    assert not list((tmp_path / "temporary").iterdir())
    evidence = None
    gc.collect()
    assert len(list(FDS.iterdir())) == before
    summarize(run)
    gc.collect()
    assert len(list(FDS.iterdir())) == before


def test_a_disk_that_is_full_leaves_the_rows_in_memory(
    tmp_path: Path, low: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = many(tmp_path / "run")
    in_memory = summarize(run)
    low()
    room = [3]

    def full(*_: Any) -> int:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(28, "No space left on device")
        return pwrite(*_)

    pwrite = os.pwrite
    monkeypatch.setattr("os.pwrite", full)
    assert summarize(Run.open(run.path)) == in_memory
    assert room[0] < 0


def test_a_place_to_write_that_is_not_there_leaves_the_rows_in_memory(
    tmp_path: Path, low: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = many(tmp_path / "run")
    low()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    found = read_steps(run)
    assert not found.spooled_lanes
    assert len(found.lanes) == 5


def test_a_spool_gives_back_what_was_put_in_it() -> None:
    spool = Spool()
    put = [
        {"a": np.arange(5) * n, "b": np.full(5, np.nan), "c": np.broadcast_to(np.int64(n), 5)}
        for n in range(3)
    ]
    stored = [spool.put(one) for one in put]
    for one, found in zip(put, stored, strict=True):
        assert list(found) == ["a", "b", "c"]
        for name, column in one.items():
            assert np.array_equal(found[name], column, equal_nan=True)
            assert found[name].dtype == column.dtype
    assert stored[2]["c"].strides == (0,)  # one number stays one
    spool.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        stored[0]["a"]


def test_of_ranks_that_told_as_much_the_lowest_is_the_longest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for number, (rank, count) in enumerate([(3, 4), (1, 5), (0, 2), (2, 5)]):
        rows = [replace(one, rank=rank) for one in even_steps(count)]
        clock = {"monotonic_ns": 0, "wall_ns": 1_800_000_000 * S + number}
        add_writer(run, steps=rows, header={"clock": clock, "host": "one"})
    found = with_lanes(Steps(Run.open(run).steps()))
    assert [int(lane["rank"][0]) for lane in found.lanes] == [3, 1, 0, 2]
    assert int(found.longest["rank"][0]) == 1
