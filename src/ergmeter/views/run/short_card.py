"""The card that a terminal shows: at most 16 lines and 79 columns, the answer in the last ones.

A terminal scrolls, so what is printed last is what stays in view: tokens/s, MFU and J/token, what
was lost, the notes and the next commands. `erg report --long` shows more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import TypeAlias

from ergmeter.metrics.catalog import in_view, titles_in
from ergmeter.metrics.checks import Fitness, fitness
from ergmeter.metrics.definitions.compute import MFU
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.explain.flops import peak_text
from ergmeter.metrics.explain.waterfall import explain
from ergmeter.metrics.summarize import NOTED_CHECKS
from ergmeter.records import Missing, Reading, Summary
from ergmeter.units import grouped, percent, printable, scaled
from ergmeter.views.document import Frame, Paragraph, State, Table, TableColumn, Weight
from ergmeter.views.reading_text import column_text, short_reason, spread
from ergmeter.views.run.long_card import (
    accelerators,
    expected_metrics,
    is_of_a_log,
    label_lines,
    reader_notes,
    status_state,
)

_VIEW = "short card"
_WHOLE_RUN = "whole run"
_ABSENT = "absent"  # metrics that are named only where they are absent
_MOST_LINES, COLUMNS = 16, 75
_OTHER_LINES = 6  # the frame, the window and the next commands
_MOST_NOTES, _NOTE_LINES = 3, 2
_LABEL_COLUMNS, _GAP = 12, 2
_MOST_LOSSES, _LOSS_COLUMNS = 3, 52
_LEAST_LOSS_FRAC = 0.01
_VERDICTS: dict[str, tuple[str, State]] = {
    "fit": ("fit to compare", "good"),
    "not fit": ("caution", "unsure"),
    "not known": ("not checked", "unsure"),
}
_SIGNS: dict[Weight, str] = {"serious": "! ", "minor": "i ", "absent": "- ", "remark": ""}

_Line: TypeAlias = tuple[Weight, str, str]  # with a label and a text


def short_card(evidence: Evidence, summary: Summary) -> Frame:
    """Return the card of a run or of one of its trainings."""
    run, checked = evidence.run, fitness(evidence)
    rows = list(_metric_rows(evidence, summary))
    labels: list[_Line] = [("remark", *label) for label in label_lines(run)]
    lines = [*_losses(evidence), *labels, *_absent(evidence, summary), *_notes(checked, summary)]
    left = _MOST_LINES - _OTHER_LINES - len(rows) - bool(rows)
    is_log = is_of_a_log(run, summary)
    verdict, state = _VERDICTS[checked.verdict]
    return Frame(
        summary.run,
        f"{summary.status} · {verdict}",
        (
            Paragraph(_window(summary), is_one_line=True),
            *([_metric_table(rows, evidence)] if rows else []),
            _line_table(_fitting(lines, left)),
        ),
        status_state(summary.status) if state == "good" else state,
        "from a log" if is_log else accelerators(run, summary),
        is_dense=True,
    )


def _window(summary: Summary) -> str:
    """Return what the metrics are over, on one line; a reason that is also below, not twice."""
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
    """Return what a value is of: the peak of an MFU, the memory of a device."""
    if key == MFU and not reading.impossible:
        peak = " ".join(peak_text(reading.note).split()[:2])
        return ", of ".join(filter(None, (reading.note.partition("; ")[0], peak)))
    if key == "memory.process_peak_bytes":
        return "of the host"
    sizes = [gpu.facts.get("memory_total_bytes") for gpu in evidence.devices("gpu")]
    is_memory = key == "memory.device_peak_bytes" and sizes and all(sizes)
    return f"of {scaled(min(map(float, filter(None, sizes))), 'B')}" if is_memory else ""


def _metric_table(rows: Sequence[tuple[str, ...]], evidence: Evidence) -> Table:
    columns = (
        TableColumn("", style="dim", no_wrap=True),
        TableColumn("training" if evidence.trains else "requests", "number", "strong"),
        TableColumn("", style="dim", no_wrap=True),
        TableColumn("whole run", "number"),
        TableColumn("", style="dim", is_one_line=True),
    )
    return Table(columns, tuple(rows), has_rule=False)


def _losses(evidence: Evidence) -> Iterator[_Line]:
    """Yield the largest losses as shares of the peak, or of the time where there is no MFU."""
    blocks = sorted(explain(evidence).blocks, key=lambda block: -block.share_frac)
    largest = [block for block in blocks[:_MOST_LOSSES] if block.share_frac >= _LEAST_LOSS_FRAC]
    if largest:
        texts = [f"{block.title} {percent(block.share_frac)}" for block in largest]
        while sum(map(len, texts)) > _LOSS_COLUMNS:
            texts.pop()
        yield "remark", "lost to", " · ".join(texts)


def _absent(evidence: Evidence, summary: Summary) -> Iterator[_Line]:
    """Yield the metrics that are absent, with the reason that they share."""
    labels = titles_in(_VIEW)
    by_reason = grouped(
        (short_reason(result.reason, evidence.run), labels[key])
        for key in expected_metrics(evidence.run, summary, _VIEW)
        if isinstance(result := summary.readings.get(key), Missing)
    )
    for reason, titles in by_reason.items():
        yield "absent", ", ".join(titles), reason


def _notes(checked: Fitness, summary: Summary) -> Iterator[_Line]:
    """Yield what to know before quoting, the most serious first."""
    findings = {finding.seen: finding for finding in checked.findings}
    texts = [note for note in reader_notes(summary) if not note.startswith("MFU: ")]
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
    """Return the first lines that fit, as label and wrapped text, with at most three notes."""
    before = [line for line in lines if line[0] in ("remark", "absent")]
    labelled = [
        (f"{_SIGNS[weight]}{label.replace('_', ' ')}", text)
        for weight, label, text in lines[: len(before) + _MOST_NOTES]
    ]
    width = COLUMNS - _GAP - max((len(label) for label, _ in labelled), default=0)
    rows = []
    for label, text in labelled:
        wrapped = wrap(
            printable(text),
            width,
            break_on_hyphens=False,
            max_lines=_NOTE_LINES,
            placeholder=" ...",
        )
        most -= len(wrapped)
        if most < 0:
            break
        rows.append((label, "\n".join(wrapped)))
    return rows


def _line_table(rows: Sequence[tuple[str, str]]) -> Table:
    columns = (TableColumn("", no_wrap=True), TableColumn(""))
    return Table(columns, tuple(rows), has_head=False)
