"""The document of a run: its cards, and the sections of its page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ergmeter.records import Reading, Summary
from ergmeter.runlog.reader import Run
from ergmeter.views.document import Document, Paragraph, Part, Section, Table, TableColumn
from ergmeter.views.reading_text import interval, value
from ergmeter.views.run.long_card import OF_A_LOG, accelerators, is_of_a_log, long_card

_MOST_HOSTS = 4


def document(
    cards: Sequence[tuple[Run, Summary]],
    *,
    sections: Sequence[Section] = (),
    show_all: bool = False,
    data: Any = None,  # noqa: ANN401  whatever JSON can hold
) -> Document:
    """Return the report of a run: a card for each of its trainings, and the page's sections."""
    run, summary = cards[0]
    parts: list[Part] = []
    for training, its_summary in cards:
        parts.append(long_card(training, its_summary))
        parts.append(_every_metric(its_summary) if show_all else _how_to_see_more(training))
    return Document(run.name, (*parts, *sections), data, _about(run, summary))


def _every_metric(summary: Summary) -> Table:
    """Return every metric with interval and note; a reason that several share, once."""
    rows: list[tuple[str, str, str, str]] = []
    named_reasons: dict[str, str] = {}
    for key, result in summary.readings.items():
        if isinstance(result, Reading):
            texts = (result.impossible, interval(result), result.note)
            rows.append((key, value(result), result.basis, "; ".join(filter(None, texts))))
        else:
            first = named_reasons.setdefault(result.reason, key)
            rows.append((key, "-", "", result.reason if first == key else f"as {first}"))
    columns = (
        TableColumn("metric", style="strong"),
        "value",
        TableColumn("basis", "basis"),
        TableColumn("note", "below", indent=4),
    )
    return Table(columns, tuple(rows))


def _how_to_see_more(run: Run) -> Section:
    """Return the next command, on a line that is not wrapped, so that it can be copied."""
    here = Path.cwd()
    path = run.path.relative_to(here) if run.path.is_relative_to(here) else run.path
    command = Paragraph(f"erg report {shlex.quote(str(path))} --all", is_to_copy=True)
    title = "every metric, with its window and its note:"
    return Section("more", title, (command,), media=("terminal",))


def _about(run: Run, summary: Summary) -> str:
    hosts = list(dict.fromkeys(str(writer.header.get("host")) for writer in run.writers))
    where = f"{accelerators(run, summary) or 'no accelerator'} on {', '.join(hosts[:_MOST_HOSTS])}"
    if is_of_a_log(run, summary):
        where = OF_A_LOG
    about = [summary.status, where, f"began {_when(run.header.get('created'))}"]
    if (directory := run.path.resolve().name) != summary.run:
        about.append(f"directory {directory}")
    return " · ".join(about)


def _when(created: object) -> str:
    """Return the start time to the minute, or the header's text if it is no UTC time."""
    when = str(created or "at a time not recorded")
    is_utc = when.endswith("+00:00") and when[10:11] == "T"
    return f"{when[:10]} {when[11:16]} UTC" if is_utc else when
