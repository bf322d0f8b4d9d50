"""What the case files share: cases of a run that is made, and of a call that refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.checks import fitness
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.explain.waterfall import explain
from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.records import Sample
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.runs import GPU, run_of
from tests.unit.metrics.reasons.case import Case, reason_for

S = 10**9
Maker = Callable[[Path], Run]


def noted_of_run(fact: str, expected: str, made: Maker, **settings: Any) -> Case:
    """A caution about a run which ``made`` makes."""
    return Case(
        fact, lambda folder: summarize(made(folder / "run"), Settings(**settings)).notes, expected
    )


def refused(
    fact: str,
    compute: Callable[[Evidence], object],
    expected: str,
    *,
    settings: dict[str, Any] | None = None,
    **contents: Any,
) -> Case:
    """What a function that is no metric says to a run with these contents."""

    def texts(folder: Path) -> Iterable[str]:
        run = run_of(folder / "run", **contents)
        return raised(lambda: compute(evidence_of(run, Settings(**(settings or {})))))

    return Case(fact, texts, expected)


def raised(compute: Callable[[], object]) -> list[str]:
    """Why a call has no answer."""
    try:
        found = compute()
    except NotMeasurable as error:
        return [str(error)]
    raise AssertionError(f"it has an answer: {found}")


def readings_of_gpu(since_s: float, until_s: float, **columns: float) -> list[Sample]:
    """The GPU ten times a second, with the same value each time; a counter grows by 100 W."""
    ticks = range(round(since_s * 10), round(until_s * 10) + 1)
    energy_j = columns.pop("energy_j", None)
    counters = ({} if energy_j is None else {"energy_j": energy_j + 10.0 * tick} for tick in ticks)
    return [
        Sample(tick * S // 10, GPU.id, **columns, **counter)  # type: ignore[arg-type]
        for tick, counter in zip(ticks, counters, strict=True)
    ]


def lacks(fact: str, key: str, expected: str, make: Maker, **settings: Any) -> Case:
    """A metric that the run lacks, and the reason."""
    return Case(fact, lambda folder: reason_for(key, make(folder / "run"), **settings), expected)


def checks(fact: str, expected: str, make: Maker, **settings: Any) -> Case:
    """A finding of `erg check`, a check that could not be made, or the verdict."""

    def texts(folder: Path) -> list[str]:
        found = fitness(evidence_of(make(folder / "run"), Settings(**settings)))
        findings = [f"{one.check}: {one.seen}: {one.effect}" for one in found.findings]
        unchecked = [f"{name}: {why}" for name, why in found.unchecked.items()]
        return [*findings, *unchecked, found.text]

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
        return raised(lambda: compute(evidence_of(make(folder / "run"))))

    return Case(fact, texts, expected)
