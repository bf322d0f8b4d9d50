"""Ranks that print into one output: the lines of one are read."""

from __future__ import annotations

import pytest

from ergmeter.importers.keyvalue import KeyValueImporter
from tests.unit.importers.captured import marks, steps
from tests.unit.importers.programs import live

LABELS = ("{0}: ", "[rank{0}]: ", "[default{0}]:", "[1,{0}]<stdout>: ", " {0}: [INFO] ")


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_label_before_the_line_tells_the_rank(label: str, order: tuple[int, ...]) -> None:
    lines = [
        (n + k / 100, f"{label.format(rank)}step={n} loss=2.{rank} tokens_per_step=64")
        for n in range(10, 20)
        for k, rank in enumerate(order)
    ]
    records = live(KeyValueImporter(), *lines)
    assert [(s.index, s.loss, s.tokens_computed) for s in steps(records)] == [
        (n, 2 + order[0] / 10, 64) for n in range(11, 20)
    ]
    assert marks(records, "several_programs") == []
    assert f"only those of rank {order[0]}" in marks(records, "assumed")[-1]


def test_a_number_before_the_line_that_is_an_epochs_or_the_steps_own_is_no_rank() -> None:
    epochs = [(e * 50 + n, f"{e}: step={n} loss=2") for e in range(3) for n in range(50)]
    records = live(KeyValueImporter(), *epochs)
    assert sum(s.steps or 0 for s in steps(records)) == 149
    own = [(n, f"{n}: step={n} loss=2") for n in range(1, 30)]
    assert sum(s.steps or 0 for s in steps(live(KeyValueImporter(), *own))) == 28


def test_a_rank_whose_number_is_its_steps_too_is_no_line_that_came_twice() -> None:
    lines = [
        (n, f"{rank}: step={n} loss={5 - n} tokens=64") for n in (1, 2, 3) for rank in range(4)
    ]
    records = live(KeyValueImporter(), *lines)
    assert [s.index for s in steps(records)] == [2, 3]
    said = marks(records, "assumed")
    assert sum("only those of rank 0 are read: tokens are of one rank" in one for one in said) == 1
    assert not any("came again" in one for one in said)
