"""Output of `erg check` and `erg job`, on the terminal and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.checks import CHECKS, DECISIVE, Fitness
from ergmeter.records import Missing, Result
from ergmeter.units import duration, grouped
from ergmeter.views import documents
from ergmeter.views.run import card

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.compare.jobs import JobRun
    from ergmeter.runlog.reader import Run

# `erg job`.


_TITLES = {
    "job.wall_s": "time, first start to last end",
    "job.down_s": "between the runs",
    "job.goodput_frac": "goodput",
    "job.steps": "steps kept",
    "job.lost_steps": "steps made again",
    "job.tokens": "tokens kept",
    "job.energy_j": "energy, all runs",
}


def job_page(name: str, parts: Sequence[JobRun], results: dict[str, Result]) -> RenderableType:
    """Render the runs in order, then their totals."""
    runs = Table(box=None, pad_edge=False)
    for title in ("run", "began", "lasted", "steps", "status"):
        runs.add_column(title, justify="left" if title in ("run", "status") else "right")
    for part in parts:
        began = datetime.fromtimestamp(part.start_s, timezone.utc).astimezone()
        runs.add_row(
            part.run.path.name,
            began.strftime("%m-%d %H:%M"),
            duration(part.end_s - part.start_s),
            _numbers(part),
            card.short_status(part.run.status),
        )
    figures = Table(box=None, show_header=False, pad_edge=False)
    figures.add_column()
    figures.add_column(justify="right")
    figures.add_column(style="dim")
    for key, result in results.items():
        if isinstance(result, Missing):
            figures.add_row(_TITLES[key], "-", result.reason)
        else:
            figures.add_row(_TITLES[key], card.value(result), result.note)
    return Group(Text.assemble((f"job {name}", "bold")), runs, Text(), figures)


def job_document(name: str, parts: Sequence[JobRun], results: dict[str, Result]) -> dict[str, Any]:
    """Return the job as JSON."""
    return {
        "job": name,
        "runs": [
            {
                "run": str(part.run.path),
                "status": part.run.status,
                "start_s": part.start_s,
                "end_s": part.end_s,
            }
            for part in parts
        ],
        "readings": {key: documents.result(result) for key, result in results.items()},
    }


def _numbers(part: JobRun) -> str:
    """Return the first and last step number, counted from 1."""
    try:
        first = part.first_step()
        return f"{first + 1} to {first + part.kept_steps(None)[0]}"
    except NotMeasurable:
        return "-"


_SIGNS = {"serious": ("!!", "red"), "minor": ("! ", "yellow")}
_COLOURS = {"fit": "green", "not fit": "red", "not known": "yellow"}


def check_page(run: Run, fitness: Fitness, *, is_alone: bool = True) -> RenderableType:
    """Render the verdict, the findings against it, and the checks not made.

    Several runs are named by directory: runs of one script share a name.
    """
    name = run.name if is_alone else run.path.resolve().name
    verdict = (fitness.text, _COLOURS[fitness.verdict])
    parts: list[RenderableType] = [
        Text.assemble((name, "bold"), ": ", verdict, (f"  {fitness.window}", "dim"))
    ]
    for finding in fitness.findings:
        parts.append(
            Padding(Text.assemble(_SIGNS[finding.weight], " ", finding.seen), (0, 0, 0, 2))
        )
        parts.append(Padding(Text(finding.effect, "dim"), (0, 0, 0, 5)))
    if fitness.passed:
        words = ", ".join(name.replace("_", " ") for name in fitness.passed)
        parts.append(Padding(Text.assemble(("ok ", "green"), words), (0, 0, 0, 2)))
    unchecked = ((why, name.replace("_", " ")) for name, why in fitness.unchecked.items())
    for reason, names in grouped(unchecked).items():
        line = Text.assemble((f"-  {', '.join(names)} not checked: ", "dim"), reason)
        parts.append(Padding(line, (0, 0, 0, 2)))
    return Group(*parts)


def check_document(run: Run, fitness: Fitness) -> dict[str, Any]:
    """Return the check as JSON."""
    return {
        "run": str(run.path),
        "is_fit": fitness.is_fit,
        "verdict": fitness.verdict,
        "said": fitness.text,
        "checks": {
            "all": len(CHECKS),
            "made": len(CHECKS) - len(fitness.unchecked),
            "decisive": list(DECISIVE),
            "undecided": list(fitness.undecided),
        },
        "window": fitness.window,
        "findings": [asdict(finding) for finding in fitness.findings],
        "unchecked": fitness.unchecked,
        "passed": list(fitness.passed),
    }
