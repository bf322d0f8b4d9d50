"""Which step a Trainer's dict is about, where its bar comes early or late: runs of known truth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import pytest

from ergmeter.records import Record
from tests.unit.importers.captured import steps
from tests.unit.importers.trained import BAR, live, printed

PER_EPOCH, TOTAL, TOKENS = 50, 30, 512
LATE, PROMPT, EARLY = "late", "prompt", "early"


def trained(
    numbers: Sequence[int],
    races: dict[int, str],
    *,
    total: int = TOTAL,
    per_epoch: float = PER_EPOCH,
    digits: int = 4,
    every: int = 1,
) -> list[Record]:
    """What is made of a training that logs at these steps and redraws its bar every so many.

    The bar is drawn again with each log. A late one is seen after the one before it is, an early
    one before its log: the two are not of one stream.
    """
    lines: list[tuple[float, str]] = [(0, BAR.format(f"0/{total}"))]
    drawn = 0
    for n in range(1, total + 1):
        bar = BAR.format(f"{n}/{total}")
        if n in numbers:
            epoch = float(f"{n / per_epoch:.4g}") if digits == 4 else round(n / per_epoch, digits)
            log = printed(epoch, num_input_tokens_seen=n * TOKENS)
            old = BAR.format(f"{drawn}/{total}")
            race = races.get(n, PROMPT)
            order = {LATE: [log, old, bar], PROMPT: [log, bar], EARLY: [bar, log]}[race]
            lines += [(n + i / 1000, text) for i, text in enumerate(order)]
            drawn = n
        elif n % every == 0:
            lines.append((n, bar))
            drawn = n
    return live(*lines)


def numbered(records: list[Record]) -> list[tuple[int | None, int | None]]:
    return [(s.index, s.steps) for s in steps(records)]


def truth(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return [(later, later - earlier) for earlier, later in pairwise(numbers)]


FIVES = range(5, 31, 5)


def test_a_bar_one_redraw_behind_makes_no_29_steps_of_30() -> None:
    records = trained(FIVES, {20: LATE})
    assert numbered(records) == truth(FIVES)
    assert {s.tokens_computed for s in steps(records)} == {5 * TOKENS}


# The first three, by which all others are judged: two may be late, or one early. A bar is seen only
# when it is drawn over, and a log is rarely later than that.
RACES = [
    races
    for races in product((LATE, PROMPT, EARLY), repeat=4)
    if PROMPT in races[:3] and (EARLY not in races[:3] or races[:3].count(PROMPT) == 2)
]


@pytest.mark.parametrize("races", RACES)
@pytest.mark.parametrize("every", [1, 2, 4])
def test_whichever_bars_are_late_or_early_the_steps_are_those_of_the_epochs(
    races: tuple[str, ...], every: int
) -> None:
    found = trained(FIVES, dict(zip((5, 10, 15, 25), races, strict=True)), every=every)
    assert numbered(found) == truth(FIVES)


@pytest.mark.parametrize("race", [LATE, EARLY])
@pytest.mark.parametrize("raced", [5, 10, 15, 20, 25, 28])
def test_a_last_log_after_fewer_steps_has_those(race: str, raced: int) -> None:
    numbers = [*range(5, 26, 5), 28]
    assert numbered(trained(numbers, {raced: race}, total=28)) == truth(numbers)


@pytest.mark.parametrize("race", [LATE, EARLY])
def test_a_log_of_the_first_step_is_one_step_and_four_follow(race: str) -> None:
    numbers = [1, *FIVES]
    assert numbered(trained(numbers, {15: race})) == truth(numbers)


@pytest.mark.parametrize("race", [LATE, EARLY])
@pytest.mark.parametrize("raced", [50, 100, 150, 400, 550])
@pytest.mark.parametrize("digits", [2, 4])
def test_epochs_too_rounded_to_tell_one_step_from_the_next_leave_it_to_the_stride(
    race: str, raced: int, digits: int
) -> None:
    numbers = range(50, 601, 50)
    found = trained(numbers, {raced: race}, total=600, per_epoch=2000, digits=digits)
    assert numbered(found) == truth(numbers)


@pytest.mark.parametrize("race", [LATE, EARLY])
@pytest.mark.parametrize("raced", [20, 50, 60, 130])
def test_the_turn_of_an_epoch_changes_nothing(race: str, raced: int) -> None:
    numbers = range(10, 151, 10)
    assert numbered(trained(numbers, {raced: race}, total=150)) == truth(numbers)


def test_the_short_last_step_of_an_epoch_is_a_step_too() -> None:
    # Ten micro-batches, four to a step: the third step of each epoch has the two that are left.
    epochs = [round(e + part, 4) for e in range(4) for part in (0.4, 0.8, 1.0)]
    lines = [
        (n, text)
        for n, epoch in enumerate(epochs, 1)
        for text in (printed(epoch), BAR.format(f"{n}/12"))
    ]
    assert numbered(live(*lines)) == truth(range(1, 13))


@pytest.mark.parametrize(("total", "per_epoch"), [(100, 100), (300, 100), (100, 50)])
def test_bars_that_are_not_drawn_again_after_a_log_are_those_before_it(
    total: int, per_epoch: int
) -> None:
    lines = []
    for n in range(1, total + 1):
        lines.append((n, BAR.format(f"{n}/{total}")))
        if n % 10 == 0:
            lines.append((n, printed(round(n / per_epoch, 2))))
    assert numbered(live(*lines)) == truth(range(10, total + 1, 10))
