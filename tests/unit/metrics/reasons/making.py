"""Cases of runs that a maker of another test makes, and of what is no metric of the summary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.evidence import Evidence
from ergmeter.metrics.explain import explain
from ergmeter.metrics.fitness import fitness
from ergmeter.metrics.summarize import evidence_of
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.unit.metrics.reasons.case import Case, reason_for

Maker = Callable[[Path], Run]


def lacks(fact: str, key: str, expected: str, make: Maker, **settings: Any) -> Case:
    """A metric that the run lacks, and the reason."""
    return Case(fact, lambda folder: reason_for(key, make(folder / "run"), **settings), expected)


def checks(fact: str, expected: str, make: Maker, **settings: Any) -> Case:
    """A finding of `erg check`, a check that could not be made, or the verdict."""

    def texts(folder: Path) -> list[str]:
        found = fitness(evidence_of(make(folder / "run"), Settings(**settings)))
        findings = [f"{one.check}: {one.seen}: {one.effect}" for one in found.findings]
        unchecked = [f"{name}: {why}" for name, why in found.unchecked.items()]
        return [*findings, *unchecked, found.said]

    return Case(fact, texts, expected)


def explains(fact: str, expected: str, make: Maker, **settings: Any) -> Case:
    """What `erg explain` could not separate, and why."""

    def texts(folder: Path) -> list[str]:
        missing = explain(evidence_of(make(folder / "run"), Settings(**settings))).missing
        return [f"{name}: {why}" for name, why in missing.items()]

    return Case(fact, texts, expected)


def refuses(fact: str, expected: str, make: Maker, compute: Callable[[Evidence], object]) -> Case:
    """What a function that is no metric raises."""

    def texts(folder: Path) -> list[str]:
        with pytest.raises(NotMeasurable) as raised:
            compute(evidence_of(make(folder / "run")))
        return [str(raised.value)]

    return Case(fact, texts, expected)
