"""A case: a fact about a run, and what the summary says because of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ergmeter.metrics.summarize import summarize
from ergmeter.records import Missing
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.runs import run_of


@dataclass(frozen=True)
class Case:
    """``texts`` makes a run of which ``fact`` is true; one of its texts contains ``expected``."""

    fact: str
    texts: Callable[[Path], Iterable[str]]
    expected: str


def reason_for(key: str, run: Run, **settings: Any) -> list[str]:
    """The reason why a metric of a run is absent."""
    result = summarize(run, Settings(**settings)).readings[key]
    assert isinstance(result, Missing), f"{key} is there: {result}"
    return [result.reason]


def absent(
    fact: str, key: str, expected: str, *, settings: dict[str, Any] | None = None, **contents: Any
) -> Case:
    """A metric that a run with these contents lacks, and the reason."""

    def texts(folder: Path) -> list[str]:
        return reason_for(key, run_of(folder / "run", **contents), **(settings or {}))

    return Case(fact, texts, expected)


def noted(
    fact: str, expected: str, *, settings: dict[str, Any] | None = None, **contents: Any
) -> Case:
    """A caution that the summary of a run with these contents carries."""

    def texts(folder: Path) -> list[str]:
        return list(
            summarize(run_of(folder / "run", **contents), Settings(**(settings or {}))).notes
        )

    return Case(fact, texts, expected)
