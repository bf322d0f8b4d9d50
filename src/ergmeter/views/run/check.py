"""The documents of `erg check`, `erg job` and `erg list`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ergmeter.compare.jobs import JobRun
from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import every_metric, titles_in
from ergmeter.metrics.checks import CHECKS, DECISIVE, Fitness
from ergmeter.records import Missing, Result, Summary, value_text
from ergmeter.runlog.manage.labels import Labels
from ergmeter.runlog.reader import Run
from ergmeter.units import duration, grouped, number_of, printable
from ergmeter.views import documents, reading_text
from ergmeter.views.document import (
    Document,
    HeadlinePart,
    Note,
    Paragraph,
    Part,
    State,
    Table,
    TableColumn,
    columns_of,
)

# `erg list`.


_STATUS_CHARACTERS = 10  # the column is not narrower


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run in a list."""

    run: Run
    summary: Summary
    labels: Labels


def list_document(directory: Path, runs: Sequence[ListedRun]) -> Document:
    """Return the runs of a directory with their newest notes."""
    name = directory.name or str(directory)
    titles = titles_in("list")
    data = [_listed_data(listed, titles) for listed in runs]
    if not runs:
        none = f"no run in {directory}; `erg record -- COMMAND` makes one"
        return Document(f"runs in {name}/", (Paragraph(none),), data)
    has_tags = any(listed.labels.tags for listed in runs)
    columns = (
        TableColumn(f"run in {name}/", no_wrap=True),
        TableColumn("made", no_wrap=True),
        TableColumn(f"{'status':<{_STATUS_CHARACTERS}}", no_wrap=True),
        *(TableColumn(title, "number") for title in titles.values()),
        *([TableColumn("tags", no_wrap=True)] if has_tags else []),
    )
    rows = (
        (
            *(printable(listed.run.path.name), _made(listed.run)),
            reading_text.short_status(listed.summary.status),
            *(reading_text.column_text(listed.summary.readings[key]) for key in titles),
            *([", ".join(map(printable, listed.labels.tags))] if has_tags else []),
        )
        for listed in runs
    )
    table = Table(columns, tuple(rows), row_titles=1, has_rule=False)
    notes = (_newest_note(listed) for listed in runs if listed.labels.notes)
    return Document(f"runs in {name}/", (table, *notes), data)


def _listed_data(listed: ListedRun, keys: Iterable[str]) -> dict[str, Any]:
    readings = listed.summary.readings
    return {
        "path": str(listed.run.path),
        "name": listed.run.name,
        "created": listed.run.header.get("created"),
        "status": listed.summary.status,
        **listed.labels.as_json(),
        "readings": {key: documents.result(readings[key]) for key in keys},
    }


def _newest_note(listed: ListedRun) -> Paragraph:
    """Return the newest note on a run, and how many there are if there are more."""
    notes = listed.labels.notes
    more = f" (the last of {len(notes)})" if len(notes) > 1 else ""
    text = printable(f"note on {listed.run.path.name}{more}: {notes[-1][1]}")
    return Paragraph(text, style="dim", is_one_line=True)


def _made(run: Run) -> str:
    """Return the local start time; only the time of day if the run's name begins with the day."""
    try:
        created = datetime.fromisoformat(str(run.header.get("created"))).astimezone()
    except ValueError:
        return ""
    day, _, time_of_day = created.isoformat()[:16].partition("T")
    return time_of_day if run.path.name.startswith(day) else f"{day[5:]} {time_of_day}"


# `erg job`.


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
        reading_text.short_status(part.run.status),
    )


def _total(key: str, result: Result) -> tuple[str, str, str]:
    title = every_metric()[key].title
    if isinstance(result, Missing):
        return title, "-", result.reason
    return title, value_text(result), result.note


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
        return f"{part.first_step() + 1} to {part.last_step() + 1}"
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

    With `run`, the messages of its probes are removed from reasons.
    """
    for finding in fitness.findings:
        yield Note(finding.weight, finding.seen, finding.effect)
    if fitness.passed:
        yield Note("ok", ", ".join(name.replace("_", " ") for name in fitness.passed))
    unchecked = ((why, name.replace("_", " ")) for name, why in fitness.unchecked.items())
    for reason, names in grouped(unchecked).items():
        why = reading_text.short_reason(reason, run) if run is not None else reason
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
