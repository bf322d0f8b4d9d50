"""Each reason and caution, with a run in which it is true."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from pathlib import Path

import pytest

import tests.unit.metrics.reasons as here
from tests.runs import even_steps, run_of
from tests.unit.metrics.reasons.case import Case, reason_for
from tests.unit.metrics.reasons.sources import templates

CASES: Sequence[Case] = [
    case
    for module in pkgutil.iter_modules(here.__path__)
    if module.name.startswith("cases_")
    for case in importlib.import_module(f"{here.__name__}.{module.name}").CASES
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By case, the texts that contain what the case expects."""
    found = {}
    for number, case in enumerate(CASES):
        folder: Path = tmp_path_factory.mktemp(f"case{number}")
        found[case.fact] = [text for text in case.texts(folder) if case.expected in text]
    return found


def test_no_two_cases_are_the_same() -> None:
    facts = [case.fact for case in CASES]
    assert sorted(facts) == sorted(set(facts))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fact)
def test_the_reason_is_given_where_it_is_true(case: Case, texts: dict[str, list[str]]) -> None:
    assert texts[case.fact], f"no text has {case.expected!r}"


def test_every_reason_has_a_run_in_which_it_is_true(texts: dict[str, list[str]]) -> None:
    given = [text for several in texts.values() for text in several]
    without = [
        f"{template.place}: {template.text}"
        for template in templates()
        if not any(template.matches(text) for text in given)
    ]
    assert not without, "\n".join([f"{len(without)} have none:", *without])


@pytest.mark.parametrize("amount", ["tokens", "samples"])
def test_printed_rates_are_no_reason_where_none_was_printed(tmp_path: Path, amount: str) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(10))
    (reason,) = reason_for(f"throughput.whole_run_{amount}_per_s", run)
    assert "printed" not in reason
