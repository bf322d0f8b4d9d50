"""The document of a run: its cards, and the sections of its page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.records import Reading, Summary, interval_text, value_text
from ergmeter.runlog.reader import Run
from ergmeter.views.document import Document, Paragraph, Part, Section, Table, TableColumn
from ergmeter.views.run.long_card import OF_A_LOG, accelerators, is_of_a_log, long_card
from ergmeter.views.run.short_card import COLUMNS, short_card

_MOST_HOSTS = 4


def document(
    cards: Sequence[tuple[Evidence, Summary]],
    *,
    sections: Sequence[Section] = (),
    is_long: bool = False,
    show_all: bool = False,
    data: Any = None,  # noqa: ANN401  whatever JSON can hold
) -> Document:
    """Return the report of a run: a card for each of its trainings, and the page's sections."""
    run = cards[0][0].run
    parts: list[Part] = []
    for evidence, summary in cards:
        parts.append((long_card if is_long or show_all else short_card)(evidence, summary))
        parts += [_every_metric(summary)] if show_all else []
    return Document(
        run.name, (*parts, next_commands(run.path), *sections), data, _about(run, cards[0][1])
    )


def _every_metric(summary: Summary) -> Table:
    """Return every metric with interval and note; a reason that several share, once."""
    rows: list[tuple[str, str, str, str]] = []
    named_reasons: dict[str, str] = {}
    for key, result in summary.readings.items():
        if isinstance(result, Reading):
            texts = (result.impossible, interval_text(result), result.note)
            rows.append((key, value_text(result), result.basis, "; ".join(filter(None, texts))))
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


def next_commands(path: Path) -> Section:
    """Return what to do next, on lines that are not wrapped, so that they can be copied."""
    here = Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    quoted, directory = shlex.quote(str(shown)), shlex.quote(str(shown.parent))
    served = "" if directory == "runs" else f" {directory}"
    commands = {
        f"erg compare {quoted} OTHER": "against another run",
        f"erg explain {quoted}": "where the rest of the peak went",
        f"erg serve{served} --open": "this run in the browser",
    }
    width = max(map(len, commands))
    lines = [f"{command:<{width}}  {what}" for command, what in commands.items()]
    texts = lines if max(map(len, lines)) <= COLUMNS else commands
    return Section(
        "next", "", tuple(Paragraph(text, is_to_copy=True) for text in texts), media=("terminal",)
    )


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
