"""What a printed count of tokens is taken for, and what is said of it."""

from __future__ import annotations

import pytest

from ergmeter.errors import UsageError
from ergmeter.importers.engine.parsed_line import Mode
from ergmeter.importers.keyvalue import KeyValueImporter
from tests.unit.importers.captured import marks, steps
from tests.unit.importers.printed import S, live


def test_a_total_is_told_from_tokens_per_step_by_its_values_and_the_guess_is_marked() -> None:
    total = live(*[(i, f"step={i} loss=1 tokens={i * 2048}") for i in range(1, 8)])
    each = live(*[(i, f"step={i} loss=1 tokens=2048") for i in range(1, 8)])
    assert (
        [s.tokens_computed for s in steps(total)]
        == [2048] * 6
        == [s.tokens_computed for s in steps(each)]
    )
    (said_total,), (said_each,) = marks(total, "assumed"), marks(each, "assumed")
    assert "tokens= read as a running total" in said_total
    assert "--tokens-are step or line" in said_total
    assert "tokens= read as the count of one step" in said_each


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1500, 3900, 4700, 6000, 7900], [2400, 800, 1300, 1900]),
        ([10_002_048, 10_004_096, 10_006_144], [2048, 2048]),
        ([1000, 1010, 1025, 1031, 1070], [1010, 1025, 1031, 1070]),
        ([1500, 900, 1800], [900, 1800]),
    ],
    ids=["uneven total", "resumed total", "lengths that happen to grow", "lengths"],
)
def test_bare_tokens_are_read_from_their_first_five_values(
    values: list[int], expected: list[int]
) -> None:
    log = [(i, f"step={i} loss=1 tokens={value}") for i, value in enumerate(values)]
    assert [s.tokens_computed for s in steps(live(*log))] == expected


@pytest.mark.parametrize(
    "values",
    [[100, 120, 140, 90, 130, 100], [480, 500, 510, 470, 490], [100, 120, 140, 160, 180, 90]],
)
def test_batches_that_happen_to_grow_at_first_are_no_total(values: list[int]) -> None:
    records = live(*[(i, f"step={i} loss=1 tokens={value}") for i, value in enumerate(values)])
    assert [s.tokens_computed for s in steps(records)] == values[1:]
    assert marks(records, "restarted") == []


def test_a_total_seen_from_its_middle_on_agrees_with_its_step_number() -> None:
    log = [(i, f"step={i} loss=1 tokens={i * 512}") for i in range(40, 46)]
    assert [s.tokens_computed for s in steps(live(*log))] == [512] * 5


def test_a_total_that_falls_while_the_steps_go_on_is_taken_back_and_said_so() -> None:
    values = [100, 180, 300, 410, 500, 350, 420, 210, 330]
    records = live(*[(i, f"step={i} loss=1 tokens={value}") for i, value in enumerate(values)])
    assert [s.tokens_computed for s in steps(records)] == [80, 120, 110, 90, 350, 420, 210, 330]
    _, said = marks(records, "assumed")
    assert "tokens= fell from 500 to 350" in said
    assert "earlier lines are wrong" in said
    assert marks(records, "restarted") == []


def test_a_bare_total_that_begins_again_each_epoch_stays_a_total() -> None:
    log = [(i, f"step={i} loss=1 tokens={100 * (i % 5 + 1)}") for i in range(15)]
    records = live(*log)
    assert {s.tokens_computed for s in steps(records)} == {100}
    assert len(marks(records, "restarted")) == 2


def test_a_bar_drawn_twice_is_no_evidence_against_a_total() -> None:
    drawn = "5%|4  | {0}/99 [00:01<00:09, 9.9it/s, loss=1, tokens={0}00]"
    log = [(i / 2, drawn.format(i // 2)) for i in range(2, 12)]
    assert [s.tokens_computed for s in steps(live(*log))] == [100] * 4


@pytest.mark.parametrize(
    ("tokens_are", "expected"), [("step", [200, 300]), ("line", [20, 30]), ("total", [10, 10])]
)
def test_the_caller_can_say_what_tokens_are(tokens_are: Mode, expected: list[int]) -> None:
    log = [(i, f"step={i * 10} loss=1 tokens={i * 10}") for i in (1, 2, 3)]
    records = live(*log, tokens_are=tokens_are)
    assert [s.tokens_computed for s in steps(records)] == expected
    assert marks(records, "assumed") == []


def test_an_unknown_meaning_of_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="'steps'"):
        KeyValueImporter(tokens_are="steps")  # type: ignore[arg-type]


def test_a_line_every_ten_steps_covers_ten_and_says_that_it_multiplied() -> None:
    records = live(*[(i, f"step={i * 10} loss=1 tokens_per_step=64") for i in range(4)])
    assert [(s.steps, s.tokens_computed) for s in steps(records)] == [(10, 640)] * 3
    assert len(marks(records, "assumed")) == 1
    assert "tokens_per_step= multiplied by the steps" in marks(records, "assumed")[0]


def test_a_rounded_total_makes_no_step_of_no_tokens() -> None:
    totals = ["1.2M", "1.2M", "1.2M", "1.3M", "1.4M"]
    log = [(i, f"step={i} loss=1 total_tokens={total}") for i, total in enumerate(totals)]
    first, second = steps(live(*log))
    assert (first.start_ns, first.end_ns, first.steps) == (0, 3 * S, 3)
    assert first.tokens_computed == second.tokens_computed == 100_000


def test_a_total_in_the_middle_of_a_block_is_not_taken_for_the_whole_block() -> None:
    log = [(1, "step=1 total_tokens=10"), (3, "step=2 total_tokens=20"), (3, "step=3 loss=1")]
    (block,) = steps(live(*log))
    assert (block.steps, block.tokens_computed) == (2, None)


def test_a_total_that_some_lines_lack_is_never_spread_over_the_wrong_time() -> None:
    log = [(1, "step=1 total_tokens=10"), (2, "step=2 loss=1"), (3, "step=3 total_tokens=30")]
    assert [s.tokens_computed for s in steps(live(*log))] == [None, None]


def test_padded_real_and_loss_tokens_are_three_counts() -> None:
    line = "step={} loss=1 tokens=4,096 real_tokens=3k loss_tokens=2000 batch_size=8"
    (first, second) = steps(live(*[(i, line.format(i)) for i in (1, 2, 3)]))
    assert first.tokens_computed == second.tokens_computed == 4096
    assert (first.tokens_real, first.tokens_loss, first.samples) == (3000, 2000, 8)


def test_a_total_that_went_back_unseen_in_a_block_makes_no_negative_count() -> None:
    log = [(1, "step=1 total_tokens=50"), (2, "step=2 loss=1"), (2, "step=3 total_tokens=20"),
           (3, "step=4 total_tokens=30")]  # fmt: skip
    records = live(*log)
    assert [s.tokens_computed for s in steps(records)] == [None, 10]
    assert marks(records, "restarted") == ["a running total went from 50 back to 20"]
