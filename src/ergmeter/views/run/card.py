"""The document of a run, with the card of a terminal: at most 16 lines and 79 columns."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, TypeAlias

from ergmeter.metrics.catalog import in_view, titles_in
from ergmeter.metrics.checks import Fitness, fitness
from ergmeter.metrics.definitions.compute import MFU
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.explain.flops import peak_text
from ergmeter.metrics.explain.waterfall import explain
from ergmeter.metrics.summarize import NOTED_CHECKS
from ergmeter.records import Missing, Reading, Summary, interval_text, value_text
from ergmeter.runlog.reader import Run
from ergmeter.units import grouped, percent, printable, scaled
from ergmeter.views import reading_text
from ergmeter.views.document import (
    Document,
    Frame,
    Paragraph,
    Part,
    Section,
    State,
    Table,
    TableColumn,
    Weight,
)
from ergmeter.views.reading_text import column_text, spread
from ergmeter.views.run.long_card import long_card

_MOST_HOSTS = 4
_VIEW = "short card"
_WHOLE_RUN = "whole run"
_ABSENT = "absent"  # metrics that are named only where they are absent
_MOST_LINES, _COLUMNS, _TERMINAL_COLUMNS = 16, 75, 79
_OTHER_LINES = 6  # the frame, the window and the next commands
_MOST_NOTES = 3
_LABEL_COLUMNS, _GAP = 12, 2
_MOST_LOSSES, _LOSS_COLUMNS = 3, 52
_LEAST_LOSS_FRAC = 0.01
_VERDICTS: dict[str, tuple[str, State]] = {
    "fit": ("fit to compare", "good"),
    "not fit": ("caution", "unsure"),
    "not known": ("fitness unknown", "unsure"),
}
_SIGNS: dict[Weight, str] = {"serious": "! ", "minor": "i ", "absent": "- ", "remark": ""}

_Line: TypeAlias = tuple[Weight, str, str]  # with a label and a text


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
    texts = lines if max(map(len, lines)) <= _TERMINAL_COLUMNS else commands
    return Section(
        "next", "", tuple(Paragraph(text, is_to_copy=True) for text in texts), media=("terminal",)
    )


def _about(run: Run, summary: Summary) -> str:
    hosts = list(dict.fromkeys(str(writer.header.get("host")) for writer in run.writers))
    devices = reading_text.accelerators(run, summary) or "no accelerator"
    where = f"{devices} on {', '.join(hosts[:_MOST_HOSTS])}"
    if reading_text.is_of_a_log(run, summary):
        where = reading_text.OF_A_LOG
    about = [summary.status, where, f"began {_when(run.header.get('created'))}"]
    if (directory := run.path.resolve().name) != summary.run:
        about.append(f"directory {directory}")
    return " · ".join(about)


def _when(created: object) -> str:
    """Return the start time to the minute, or the header's text if it is no UTC time."""
    when = str(created or "at a time not recorded")
    is_utc = when.endswith("+00:00") and when[10:11] == "T"
    return f"{when[:10]} {when[11:16]} UTC" if is_utc else when


# The card of a terminal. It scrolls, so what is printed last stays in view: tokens/s, MFU and
# J/token, what was lost, the notes and the next commands. `erg report --long` shows more.


def short_card(evidence: Evidence, summary: Summary) -> Frame:
    """Return the card of a run or of one of its trainings."""
    run, checked = evidence.run, fitness(evidence)
    rows = list(_metric_rows(evidence, summary))
    labels: list[_Line] = [("remark", *label) for label in reading_text.label_lines(run)]
    notes = sorted(_notes(checked, summary), key=lambda note: note[0] != "serious")
    warnings = [note for note in notes[:_MOST_NOTES] if note[0] == "serious"]
    absent = reading_text.absences(run, summary, _VIEW)
    lines = [*_losses(evidence, summary), *warnings]
    lines += [*(("absent", titles, reason) for titles, reason in absent), *labels]
    lines += notes[len(warnings) : _MOST_NOTES]
    left = _MOST_LINES - _OTHER_LINES - len(rows) - bool(rows)
    fitting = _fitting(lines, left)
    omitted = len(lines) + max(0, len(notes) - _MOST_NOTES) - len(fitting)
    is_log = reading_text.is_of_a_log(run, summary)
    verdict, state = _VERDICTS[checked.verdict]
    status = re.sub(r": .*\)$", ")", summary.status, flags=re.DOTALL)  # without an error's text
    return Frame(
        summary.run,
        f"{status} · {verdict}",
        (
            Paragraph(_window(summary), is_one_line=True),
            *([_metric_table(rows, evidence)] if rows else []),
            _line_table(fitting),
        ),
        reading_text.status_state(summary.status) if state == "good" else state,
        "from a log" if is_log else reading_text.accelerators(run, summary),
        f"{omitted} more: erg report --long" if omitted else "",
        is_dense=True,
    )


def _window(summary: Summary) -> str:
    """Return the steps and the time that the metrics cover, on one line."""
    window = summary.readings["time.window_s"]
    if isinstance(window, Missing):
        return window.reason
    return re.split("; |: |, without ", window.note)[0].removeprefix("over ")


def _metric_rows(evidence: Evidence, summary: Summary) -> Iterator[tuple[str, ...]]:
    """Yield label, value, half interval and whole-run value of each metric, and a remark."""
    labels = titles_in(_VIEW)
    keys_shown = (key for key, at in in_view(_VIEW).items() if at.group != _ABSENT)
    for label, keys in grouped((labels[key], key) for key in keys_shown).items():
        cells = {"": ("", ""), _WHOLE_RUN: ("", "")}
        remark = ""
        for key in keys:
            reading = summary.readings.get(key)
            if not isinstance(reading, Reading):
                continue
            cells[in_view(_VIEW)[key].group] = (column_text(reading), spread(reading))
            remark = _remark(key, reading, evidence) or remark
        if any(text for text, _ in cells.values()):
            yield label, *cells[""], cells[_WHOLE_RUN][0], remark


def _remark(key: str, reading: Reading, evidence: Evidence) -> str:
    """Return the limit beside a value: the peak of an MFU, the memory size of a device."""
    if key == MFU and not reading.impossible:
        peak = " ".join(peak_text(reading.note).split()[:2])
        return ", of ".join(filter(None, (re.split(r"; | \(", reading.note)[0], peak)))
    if key == "memory.process_peak_bytes":
        return "of the host"
    sizes = {gpu.facts.get("memory_total_bytes") for gpu in evidence.devices("gpu")}
    size = sizes.pop() if len(sizes) == 1 else None  # devices differ
    return f"of {scaled(size, 'B')}" if key == "memory.device_peak_bytes" and size else ""


def _metric_table(rows: Sequence[tuple[str, ...]], evidence: Evidence) -> Table:
    columns = (
        TableColumn("", style="dim", no_wrap=True),
        TableColumn("training" if evidence.trains else "requests", "number", "strong"),
        TableColumn("", style="dim", no_wrap=True),
        TableColumn("whole run", "number"),
        TableColumn("", style="dim", is_one_line=True),
    )
    return Table(columns, tuple(rows), has_rule=False)


def _losses(evidence: Evidence, summary: Summary) -> Iterator[_Line]:
    """Yield the largest losses between the peak and the MFU."""
    if not isinstance(summary.readings[MFU], Reading):
        return
    blocks = sorted(explain(evidence).blocks, key=lambda block: -block.share_frac)
    largest = [block for block in blocks[:_MOST_LOSSES] if block.share_frac >= _LEAST_LOSS_FRAC]
    texts = [f"{block.title.partition(':')[0]} {percent(block.share_frac)}" for block in largest]
    if texts:
        while sum(map(len, texts)) > _LOSS_COLUMNS:
            texts.pop()
        yield "remark", "lost to", " · ".join(texts)


def _notes(checked: Fitness, summary: Summary) -> Iterator[_Line]:
    """Yield warnings and remarks about the run's numbers."""
    findings = {finding.seen: finding for finding in checked.findings}
    texts = [note for note in reading_text.reader_notes(summary) if not note.startswith("MFU: ")]
    for text in texts:
        seen = next((seen for seen in findings if text.startswith(seen)), "")
        if finding := findings.pop(seen, None):
            yield finding.weight, finding.check, finding.seen
        else:
            label, colon, rest = text.partition(": ")
            is_label = bool(colon) and len(label) <= _LABEL_COLUMNS
            yield "serious", *((label, rest) if is_label else ("note", text))
    for finding in findings.values():
        if finding.check not in NOTED_CHECKS:
            yield finding.weight, finding.check, finding.seen


def _fitting(lines: Sequence[_Line], most: int) -> list[tuple[str, str]]:
    """Return labels and texts: up to two lines for each if all fit, else one."""
    labelled = [
        (f"{_SIGNS[weight]}{label.replace('_', ' ')}", text) for weight, label, text in lines
    ]
    width = _COLUMNS - _GAP - max((len(label) for label, _ in labelled), default=0)
    for limit in (2, 1):
        rows = [(label, _wrapped(printable(text), width, limit)) for label, text in labelled]
        if sum(len(wrapped) for _, wrapped in rows) <= most:
            break
    return [(label, "\n".join(wrapped)) for label, wrapped in rows[:most]]


def _wrapped(text: str, width: int, most: int) -> list[str]:
    return wrap(text, width, break_on_hyphens=False, max_lines=most, placeholder=" ...")


def _line_table(rows: Sequence[tuple[str, str]]) -> Table:
    columns = (TableColumn("", no_wrap=True), TableColumn(""))
    return Table(columns, tuple(rows), has_head=False)
