"""How long will a plan take, as far as earlier results tell?

From the same configuration where it has run, else from others of its scenario, else from what the
caller says of a cell; a cell of which nothing is known is counted as such, and no time is made up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean

from ergmeter.bench.plan.cells import BenchPlan, Cell


@dataclass(frozen=True, slots=True)
class KnownDurations:
    """Seconds that cells took, by configuration and by scenario."""

    by_group: Mapping[str, float]
    by_scenario: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds for a plan's cells one after the other, and of how many cells they are known."""

    total_s: float
    measured: int  # cells whose configuration has run before
    alike: int  # cells of whose scenario another one has
    given: int  # cells that take what the caller says
    unknown: int
    skipped: int


def estimate(
    plan: BenchPlan, known: KnownDurations | None = None, *, seconds_a_cell: float | None = None
) -> Estimate:
    """The time of all cells that are not skipped, by what is known."""
    known = known or KnownDurations({}, {})
    counts = dict.fromkeys(("measured", "alike", "given", "unknown", "skipped"), 0)
    total_s = 0.0
    for cell in plan.cells:
        kind, seconds = _of(cell, known, seconds_a_cell)
        counts[kind] += 1
        total_s += seconds
    return Estimate(total_s, **counts)


def _of(cell: Cell, known: KnownDurations, seconds_a_cell: float | None) -> tuple[str, float]:
    if cell.skip:
        return "skipped", 0.0
    if known.by_group and cell.group in known.by_group:  # its digest takes longer than the rest
        return "measured", known.by_group[cell.group]
    if cell.scenario in known.by_scenario:
        return "alike", known.by_scenario[cell.scenario]
    return ("unknown", 0.0) if seconds_a_cell is None else ("given", seconds_a_cell)


def known_durations(directory: Path) -> KnownDurations:
    """What a directory of results tells. Cells that did not end well say nothing of the others."""
    groups: dict[str, list[float]] = {}
    scenarios: dict[str, list[float]] = {}
    for status in sorted(directory.glob("exp_*/status.json")):
        took_s = _took_s(status)
        if took_s is None:
            continue
        try:
            cell = Cell.from_json(json.loads((status.parent / "cell.json").read_text("utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            continue
        groups.setdefault(cell.group, []).append(took_s)
        scenarios.setdefault(cell.scenario, []).append(took_s)
    return KnownDurations(
        {name: fmean(taken) for name, taken in groups.items()},
        {name: fmean(taken) for name, taken in scenarios.items()},
    )


def _took_s(path: Path) -> float | None:
    try:
        last = json.loads(path.read_text("utf-8"))
        if last["status"] != "ok":
            return None
        attempt = last["attempts"][-1]
        began, ended = (datetime.fromisoformat(attempt[key]) for key in ("started", "ended"))
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    return max(0.0, (ended - began).total_seconds())
