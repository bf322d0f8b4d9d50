"""Lines that differ only in their numbers are read by one format, as a full reading does."""

from __future__ import annotations

import pytest

from ergmeter.importers.engine.step_lines import Dialect
from ergmeter.importers.keyvalue import KeyValueImporter

FIRST = "2026-11-15 10:00:00,123 step: 7 loss: 2.31 tokens=4096 dt: 12ms mfu: 31.5% run_3"


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-15 10:00:09,456 step: 1234567 loss: 1e-05 tokens=1 dt: 7.5ms mfu: 5% run_3",
        "2027-01-01 00:00:00,000 step: 8 loss: 3 tokens=123456789 dt: 1.25e3ms mfu: 100.0% run_3",
        FIRST.replace("loss: 2.31", "loss: -2.31"),
        FIRST.replace("tokens=4096", "tokens=4,096"),
        FIRST.replace("tokens=4096", "tokens=4.1k"),
        FIRST.replace("tokens=4096", "tokens=4.5"),
        FIRST.replace("step: 7", "step: 7.5"),
        FIRST.replace("run_3", "run_4"),
        FIRST.replace("loss", "eval_loss"),
    ],
)
def test_a_line_is_read_as_in_full_whatever_came_before(text: str) -> None:
    dialect = KeyValueImporter().dialect()
    assert dialect.read(FIRST) == Dialect().read(FIRST)
    assert dialect.read(text) == Dialect().read(text)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("step=1234,56 loss=2.5", "step=1234,567 loss=2.5"),
        ("step=1,23 loss=2.5", "step=1,234 loss=2.5"),
        ("step=7 tokens=2.5 loss=2.5", "step=7 tokens=2 loss=2.5"),
        (
            "58%|#####     | 7/12 [00:01<00:02, loss=2.5]",
            "66%|#####     | 8/12 [00:01<00:02, loss=2]",
        ),
        ('{"step": 7, "loss": 2.5}', '{"step": 8, "loss": 2.25}'),
        ("1.5: step=7 loss=2.5", "1.25: step=8 loss=2.25"),
    ],
)
def test_numbers_that_are_no_plain_figures_are_read_in_full(first: str, second: str) -> None:
    dialect = KeyValueImporter().dialect()
    assert dialect.read(first) == Dialect().read(first)
    assert dialect.read(second) == Dialect().read(second)


def test_a_line_of_a_known_format_is_not_read_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    dialect = KeyValueImporter().dialect()
    dialect.read(FIRST)
    expected = Dialect().read(FIRST.replace("2.31", "2.5"))
    monkeypatch.setattr(Dialect, "read", None)
    assert dialect.read(FIRST.replace("2.31", "2.5")) == expected
