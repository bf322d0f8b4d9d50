"""Lines that are laid out alike are read by one match, and mean what a full reading finds."""

from __future__ import annotations

import pytest

from ergmeter.importers.engine.step_lines import Dialect
from ergmeter.importers.keyvalue import KeyValueImporter, Layouts

LEARNT = "2026-11-15 10:00:00,123 step: 7 loss: 2.31 tokens=4096 dt: 12ms mfu: 31.5% run_3"


def learnt(text: str) -> Layouts:
    layouts = Layouts()
    layouts.learn(text, *Dialect().read(text))
    return layouts


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-15 10:00:09,456 step: 1234567 loss: 1e-05 tokens=1 dt: 7.5ms mfu: 5% run_3",
        "2027-01-01 00:00:00,000 step: 8 loss: 3 tokens=123456789 dt: 1.25e3ms mfu: 100.0% run_3",
    ],
)
def test_other_figures_are_read_as_in_full(text: str) -> None:
    assert learnt(LEARNT).read(text) == Dialect().read(text)


@pytest.mark.parametrize(
    "text",
    [
        LEARNT.replace("loss: 2.31", "loss: nan"),
        LEARNT.replace("tokens=4096", "tokens=4,096"),
        LEARNT.replace("tokens=4096", "tokens=4.1k"),
        LEARNT.replace("step: 7", "step: 7.5"),
        LEARNT.replace("run_3", "run_4"),
        LEARNT.replace("loss", "eval_loss"),
    ],
)
def test_what_is_not_alike_is_left_to_the_full_reading(text: str) -> None:
    assert learnt(LEARNT).read(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "step=1234,567 loss=2.5",
        "step=7 tokens=2.5 loss=2.5",
        "step=7 loss=nan",
        "58%|#####     | 7/12 [00:01<00:02, loss=2.5]",
    ],
)
def test_a_line_whose_digits_may_mean_something_else_is_not_learnt(text: str) -> None:
    assert learnt(text).read(text) is None


def test_a_loop_is_read_by_the_layout_of_its_first_line() -> None:
    dialect = KeyValueImporter().dialect()
    assert dialect.read("step=1 loss=2.5") == Dialect().read("step=1 loss=2.5")
    assert dialect.read("step=20 loss=1.25") == Dialect().read("step=20 loss=1.25")
