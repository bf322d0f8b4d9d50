"""What the key=value importer makes of a training loop's lines, as one would check it by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.importers.keyvalue import KeyValueImporter
from ergmeter.ports import Importer, Line
from ergmeter.records import Record, Reported, Step
from tests.unit.importers.captured import marks, reported, steps
from tests.unit.importers.printed import S, from_file, live


def test_it_is_an_importer() -> None:
    assert isinstance(KeyValueImporter(), Importer)


def test_a_log_of_known_times_and_tokens_gives_exactly_those() -> None:
    times_ms = [0, 137, 300, 471, 1890, 2001]
    tokens = [1024, 1000, 512, 2048, 7, 900]
    log = [
        (ms / 1000, f"step={i} loss=2.5 tokens={n}")
        for i, (ms, n) in enumerate(zip(times_ms, tokens, strict=True))
    ]
    found = steps(live(*log))
    total = sum(step.tokens_computed or 0 for step in found)
    span_ns = found[-1].end_ns - found[0].start_ns
    assert [step.tokens_computed for step in found] == tokens[1:]
    assert Fraction(total * S, span_ns) == Fraction(sum(tokens[1:]) * 1000, 2001)


def test_the_first_line_only_opens_the_window_and_its_loss_is_reported() -> None:
    records = live((5, "step=7 loss=2.5 batch_tokens=64"), (6, "step=8 loss=2.0 batch_tokens=64"))
    assert [(s.start_ns, s.end_ns, s.index) for s in steps(records)] == [(5 * S, 6 * S, 8)]
    assert reported(records) == [Reported(5 * S, "loss", 2.5, "")]


@pytest.mark.parametrize(
    "said",
    ["step_time=0.25", "step_time_ms=250", "dt: 250ms", "elapsed_ms=250", "time/step=0.25",
     "time per step: 0.25"],
)  # fmt: skip
def test_a_step_that_gives_its_own_time_starts_that_long_before_its_first_line(said: str) -> None:
    (first, second) = steps(live((10, f"step=1 loss=2 {said}"), (12, f"step=2 loss=2 {said}")))
    assert (first.start_ns, first.end_ns) == (round(9.75 * S), 10 * S)
    assert (second.start_ns, second.end_ns) == (10 * S, 12 * S)  # seen times again


def test_a_second_line_about_a_step_adds_what_was_missing_and_no_step() -> None:
    records = live(
        (1, "step=1 loss=3 batch_tokens=10"),
        (2, "step=2 loss=2"),
        (2.01, "step=2 loss=9 batch_tokens=10"),
        (2.5, "step=2 eval_loss=4"),
        (3, "step=3 loss=1 batch_tokens=10"),
    )
    assert [(s.index, s.loss, s.tokens_computed) for s in steps(records)] == [
        (2, 2, 10),
        (3, 1, 10),
    ]
    assert Reported(round(2.5 * S), "eval_loss", 4.0, "") in records


def test_a_first_line_with_its_own_time_and_a_total_is_a_step_only_at_the_start() -> None:
    (fresh,) = steps(live((5, "step=1 total_tokens=100 step_time=2")))
    assert (fresh.start_ns, fresh.tokens_computed) == (3 * S, 100)
    assert steps(live((5, "step=7 total_tokens=700 step_time=2"))) == []


def test_a_line_without_a_number_but_with_tokens_and_loss_is_a_step_of_unknown_count() -> None:
    (step,) = steps(live((1, "loss=2 batch_tokens=10"), (2, "loss=2 batch_tokens=10")))
    assert (step.steps, step.index, step.tokens_computed) == (None, None, 10)


def test_a_file_with_timestamps_has_their_times() -> None:
    records = from_file(
        "[2026-11-15 23:59:59,500 INFO] step=1 loss=2 batch_tokens=64",
        "[2026-11-16 00:00:01,750 INFO] step=2 loss=2 batch_tokens=64",
    )
    (step,) = steps(records)
    assert step.window.duration_s == 2.25
    assert marks(records, "assumed") == ["times are the log's own timestamps"]


def test_a_file_with_step_times_only_has_their_sum() -> None:
    log = (f"step={i} loss=2 batch_tokens=64 step_time_ms={ms}" for i, ms in [(1, 500), (2, 125)])
    records = from_file(*log)
    assert [(s.start_ns, s.end_ns) for s in steps(records)] == [(0, S // 2), (S // 2, 5 * S // 8)]
    assert "added up" in marks(records, "assumed")[0]


def test_a_file_without_any_time_gives_figures_and_no_steps() -> None:
    records = from_file("step=1 loss=2 tokens=64 tok/s=9", "step=2 loss=1 tokens=64 tok/s=8")
    assert [(r.name, r.value) for r in reported(records)] == [
        ("tok/s", 9), ("loss", 2), ("tok/s", 8), ("loss", 1),
    ]  # fmt: skip
    assert len(records) == 4


def test_a_step_is_handed_on_when_time_goes_on_without_another_step_line() -> None:
    def stream() -> list[Line]:
        return [Line("step=1 batch_tokens=4", 1 * S), Line("step=2 batch_tokens=4", 2 * S)]

    seen: list[Record] = []
    lines = iter([*stream(), Line("saving", 3 * S), Line("end of what was read", 4 * S)])
    reading = KeyValueImporter().records(line for line in lines)
    seen.append(next(reading))
    assert isinstance(seen[0], Step)
    assert next(lines).text == "end of what was read"


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 3)), min_size=2, max_size=30),
    st.booleans(),
)
def test_tokens_and_time_of_all_steps_add_up_to_those_of_the_log(
    log: list[tuple[int, int]], total: bool
) -> None:
    lines, t_ns, seen = [], S, 0
    log = [*log, (1, 1)]  # a block that came last of all would have no time
    for i, (tokens, wait) in enumerate(log):
        t_ns += wait * S
        seen += tokens
        said = f"total_tokens={seen}" if total else f"batch_tokens={tokens}"
        lines.append(Line(f"step={i} loss=1 {said}", t_ns))
    opening = [i for i, line in enumerate(lines) if line.t_ns == lines[0].t_ns][-1]
    found = steps(list(KeyValueImporter().records(lines)))
    assert sum(s.tokens_computed or 0 for s in found) == sum(n for n, _ in log[opening + 1 :])
    assert sum(s.end_ns - s.start_ns for s in found) == t_ns - (lines[0].t_ns or 0)
    assert sum(s.steps or 0 for s in found) == len(log) - opening - 1
