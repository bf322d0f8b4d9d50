"""Steps that are merged keep their sums; what is dropped is counted."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from ergmeter.meter import pending_steps
from ergmeter.meter.pending_steps import PendingSteps, step_values
from ergmeter.records import Step

if TYPE_CHECKING:
    from ergmeter.records import Mark, StepValues

LIMIT = 100  # rows


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_steps, "MAX_ROWS", LIMIT)
    monkeypatch.setattr(pending_steps, "MERGED_ROWS", 10)


def row(*times_ns: Any, **given: Any) -> StepValues:
    return step_values(Step(*times_ns, **given))


def queue() -> tuple[PendingSteps, list[Mark]]:
    marks: list[Mark] = []
    return PendingSteps(marks.append), marks


def added(rows: list[StepValues]) -> tuple[PendingSteps, dict[str, Any]]:
    pending, _ = queue()
    pending.add(rows, waiting=len(rows))
    return pending, pending.take(10**9)


def test_up_to_the_limit_every_step_is_a_row_of_its_own() -> None:
    pending, columns = added([row(10 * i, 10 * i + 7, index=i) for i in range(LIMIT)])
    assert columns["start_ns"] == tuple(range(0, 10 * LIMIT, 10))
    assert set(columns["steps"]) == {1}
    assert pending.merged == ""


def test_steps_beyond_it_are_merged_and_their_sums_are_exact() -> None:
    # 300 rows into about 10: thirty steps each. A step takes 7 ns, and 3 ns lie between two.
    made = [
        row(10 * i, 10 * i + 7, index=i, tokens_computed=i, samples=2, micro_steps=4, loss=float(i))
        for i in range(300)
    ]
    pending, columns = added(made)
    assert columns["steps"] == (30,) * 10
    assert sum(columns["tokens_computed"]) == 300 * 299 // 2
    assert (sum(columns["samples"]), sum(columns["micro_steps"])) == (600, 1200)
    assert columns["tokens_real"] == (None,) * 10
    assert columns["index"] == tuple(range(29, 300, 30))
    assert columns["loss"] == tuple(float(i) for i in range(29, 300, 30))
    assert columns["end_ns"] == tuple(10 * i + 7 for i in range(29, 300, 30))
    lasted = [e - s for s, e in zip(columns["start_ns"], columns["end_ns"], strict=True)]
    assert lasted == [30 * 7] * 10
    assert pending.merged.startswith("300 steps and other spans are in 10 rows, up to 30 to a row")
    assert (pending.train_steps, pending.tokens) == (300, 300 * 299 // 2)


def test_a_number_of_rows_that_does_not_divide() -> None:
    _, columns = added([row(10 * i, 10 * i + 7, index=i, tokens_computed=1) for i in range(307)])
    assert columns["steps"] == (31,) * 9 + (28,)
    assert (columns["index"][-1], columns["end_ns"][-1]) == (306, 3067)


def test_a_loss_that_is_no_number_is_not_merged_away() -> None:
    made = [row(10 * i, 10 * i + 7, loss=math.nan if i == 40 else 1.0) for i in range(300)]
    _, columns = added(made)
    assert [math.isnan(loss) for loss in columns["loss"]] == [i == 1 for i in range(10)]


def test_phases_are_merged_each_for_itself_and_keep_their_time() -> None:
    made = []
    for i in range(150):  # 2 ns of data, 5 ns of training, 3 ns of neither
        made.append(row(10 * i, 10 * i + 2, phase="data"))
        made.append(row(10 * i + 2, 10 * i + 7, tokens_computed=8))
    _, columns = added(made)
    spans = list(zip(columns["start_ns"], columns["end_ns"], columns["phase"], strict=True))
    assert len(spans) == 10
    for phase, each_ns in (("data", 2), ("train", 5)):
        assert sum(e - s for s, e, own in spans if own == phase) == 150 * each_ns
    assert all(end <= start for (_, end, _), (start, _, _) in pairwise(spans))
    assert spans[0][0] >= 0
    assert spans[-1][1:] == (1497, "train")
    assert sum(filter(None, columns["tokens_computed"])) == 150 * 8


def test_a_wait_inside_a_step_stays_inside_it() -> None:
    made = []
    for i in range(150):
        made.append(row(10 * i + 1, 10 * i + 3, phase="data"))
        made.append(row(10 * i, 10 * i + 7))
    _, columns = added(made)
    spans = list(zip(columns["start_ns"], columns["end_ns"], columns["phase"], strict=True))
    data, train = ([one for one in spans if one[2] == phase] for phase in ("data", "train"))
    for (start, end, _), (outer_start, outer_end, _) in zip(data, train, strict=True):
        assert outer_start <= start < end <= outer_end


def test_steps_of_several_threads_are_one_span() -> None:
    made = [row(i, i + 100) for i in range(300)]
    _, columns = added(made)
    assert columns["start_ns"] == tuple(range(0, 300, 30))
    assert columns["end_ns"] == tuple(range(129, 429, 30))


def test_steps_with_and_without_tokens_do_not_share_a_row() -> None:
    made = [row(10 * i, 10 * i + 7, tokens_computed=5 if i % 3 else None) for i in range(300)]
    _, columns = added(made)
    by_known = dict.fromkeys((True, False), 0)
    for steps, tokens in zip(columns["steps"], columns["tokens_computed"], strict=True):
        by_known[tokens is not None] += steps
        assert tokens is None or tokens == 5 * steps
    assert by_known == {True: 200, False: 100}


def test_rows_that_pile_up_are_merged_again() -> None:
    pending, _ = queue()
    for start in range(0, 10_000, 50):
        rows = [row(10 * i, 10 * i + 7, tokens_computed=3) for i in range(start, start + 50)]
        pending.add(rows, waiting=50 + len(pending))
        assert len(pending) <= LIMIT
    columns = pending.take(10**9)
    assert (sum(columns["steps"]), sum(columns["tokens_computed"])) == (10_000, 30_000)
    assert pending.take_dropped() is None


def test_requests_are_never_merged_and_are_dropped_with_a_count() -> None:
    pending, _ = queue()
    made = [row(10 * i, 10 * i + 7, phase="decode", tokens_computed=3) for i in range(1000)]
    for start in range(0, 1000, 50):
        pending.add(made[start : start + 50], waiting=50 + len(pending))
    columns = pending.take(10**9)
    dropped = pending.take_dropped()
    assert dropped is not None
    assert set(columns["steps"]) == {1}
    assert LIMIT <= len(columns["steps"]) <= 2 * LIMIT
    assert (dropped.steps, dropped.spans) == (0, 1000 - len(columns["steps"]))
    assert (dropped.start_ns, dropped.end_ns) == (0, 10 * dropped.spans - 3)
    assert columns["start_ns"][-1] == 9990  # the newest are there
    assert pending.take_dropped() is None


def test_a_sum_beyond_64_bits_is_unknown() -> None:
    _, columns = added([row(10 * i, 10 * i + 7, tokens_computed=2**60) for i in range(300)])
    assert columns["tokens_computed"] == (None,) * 10
    assert sum(columns["steps"]) == 300
