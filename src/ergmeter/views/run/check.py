"""The documents of `erg check` and `erg job`."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.checks import CHECKS, DECISIVE, Fitness
from ergmeter.records import Missing, Result
from ergmeter.units import duration, grouped, number_of
from ergmeter.views import documents
from ergmeter.views.document import (
    Document,
    HeadlinePart,
    Note,
    Part,
    State,
    Table,
    TableColumn,
    columns_of,
)
from ergmeter.views.run import card

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


def job_document(name: str, parts: Sequence[JobRun], results: dict[str, Result]) -> Document:
    """Return the runs in order, then their totals."""
    columns = (*columns_of("run", "began", "lasted", "steps"), TableColumn("status"))
    titles = ("metric", TableColumn("value", "number"), TableColumn("over", style="dim"))
    return Document(
        f"job {name}",
        (
            HeadlinePart(f"job {name}"),
            Table(columns, tuple(map(_job_row, parts))),
            Table(titles, tuple(_total(*item) for item in results.items()), has_head=False),
        ),
        _job_data(name, parts, results),
    )


def _job_row(part: JobRun) -> tuple[str, ...]:
    began = datetime.fromtimestamp(part.start_s, timezone.utc).astimezone()
    return (
        part.run.path.name,
        began.strftime("%m-%d %H:%M"),
        duration(part.end_s - part.start_s),
        _numbers(part),
        card.short_status(part.run.status),
    )


def _total(key: str, result: Result) -> tuple[str, str, str]:
    if isinstance(result, Missing):
        return _TITLES[key], "-", result.reason
    return _TITLES[key], card.value(result), result.note


def _job_data(name: str, parts: Sequence[JobRun], results: dict[str, Result]) -> dict[str, Any]:
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


# `erg check`.


_STATES: dict[str, State] = {"fit": "good", "not fit": "bad", "not known": "unsure"}


def check_document(checks: Sequence[tuple[Run, Fitness]]) -> Document:
    """Return each run's verdict, the findings against it, and the checks not made.

    Several runs are named by directory: runs of one script share a name.
    """
    is_alone = len(checks) == 1
    parts: list[Part] = []
    for run, fitness in checks:
        name = run.name if is_alone else run.path.resolve().name
        state = _STATES[fitness.verdict]
        parts += [HeadlinePart(name, fitness.text, fitness.window, state), *finding_notes(fitness)]
    subject = checks[0][0].name if is_alone else number_of(len(checks), "run")
    title = f"{subject}: fit to be compared?"
    return Document(title, tuple(parts), [check_data(*check) for check in checks])


def finding_notes(fitness: Fitness, run: Run | None = None) -> Iterator[Note]:
    """Yield the findings, the checks that were passed, and those that could not be made.

    With `run`, reasons are without what its probes said.
    """
    for finding in fitness.findings:
        yield Note(finding.weight, finding.seen, finding.effect)
    if fitness.passed:
        yield Note("ok", ", ".join(name.replace("_", " ") for name in fitness.passed))
    unchecked = ((why, name.replace("_", " ")) for name, why in fitness.unchecked.items())
    for reason, names in grouped(unchecked).items():
        why = card.short_reason(reason, run) if run is not None else reason
        yield Note("absent", f"{', '.join(names)} not checked: {why}")


def check_data(run: Run, fitness: Fitness) -> dict[str, Any]:
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
