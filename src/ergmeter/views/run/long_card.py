"""The full card of a run, which fits 80 columns (`erg report --long`)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from ergmeter.metrics.catalog import every_metric, in_view
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.window import BY_NUMBER
from ergmeter.records import Reading, Summary, value_text
from ergmeter.runlog.reader import Run
from ergmeter.units import grouped, number_of, significant, sparkline
from ergmeter.views import reading_text
from ergmeter.views.document import Frame, Note, Paragraph, Table, TableColumn

_CELLS = 46  # bars, so that both ends of the curve fit beside them in 80 columns
_TITLE_CHARACTERS = 27  # of a title; longer ones wrap
# In a short recording most of the overhead is Python's start, so it is not representative.
_OWN_COST_FROM_S = 30.0


def long_card(evidence: Evidence, summary: Summary) -> Frame:
    """Return the card: run, metrics with their basis, notes."""
    run = evidence.run
    return Frame(
        summary.run,
        summary.status,
        (
            *_what_ran(run, summary),
            *_figures(run, summary),
            *(
                Note("absent", f"no {titles}", reason)
                for titles, reason in reading_text.absences(run, summary, "card")
            ),
            *_loss_curve(evidence, summary),
            *(Note("minor", note) for note in reading_text.reader_notes(summary)),
        ),
        reading_text.status_state(summary.status),
    )


def _is_nothing(key: str, reading: Reading) -> bool:
    """True for a trend whose interval contains 0, and for an HFU equal to the MFU."""
    if key == "utilization.hfu_frac":
        return reading.note.startswith("nothing is computed twice")
    if reading.low is None or reading.high is None:
        return False
    return "growth" in key and reading.low <= 0 <= reading.high


def _what_ran(run: Run, summary: Summary) -> Iterator[Paragraph]:
    words = [str(word) for word in run.header.get("command") or []]
    if words:
        command = " ".join(shlex.join([Path(words[0]).name, *words[1:]]).split())
        yield Paragraph(command, style="dim", is_one_line=True)
    host = next((str(w.header.get("host")) for w in run.writers), "")
    where = f"{reading_text.accelerators(run, summary) or 'no accelerator'} on {host}"
    yield Paragraph(
        reading_text.OF_A_LOG if reading_text.is_of_a_log(run, summary) else where, style="dim"
    )
    over, _, more = window_text(summary).partition("; ")
    for line in (f"{over}{_rule(summary)}", more):
        if line:
            yield Paragraph(line, style="dim")
    for name, text in reading_text.label_lines(run):
        yield Paragraph(f"{name}: {text}")


def window_text(summary: Summary) -> str:
    """Return the window that a summary covers, or why there is none."""
    window = summary.readings["time.window_s"]
    return window.note if isinstance(window, Reading) else window.reason


def _rule(summary: Summary) -> str:
    """Return how the warm-up was chosen, unless the step count already says so."""
    left_out = summary.readings["time.warmup_steps"]
    if not isinstance(left_out, Reading) or not left_out.value:
        return ""
    rule = left_out.note.removeprefix("rule: ")
    if rule == BY_NUMBER:
        return ""
    return "" if rule == number_of(round(left_out.value), "step") else f" (warm-up: {rule})"


def _figures(run: Run, summary: Summary) -> Iterator[Table]:
    rows = []
    groups = grouped((at.group, key) for key, at in in_view("card").items())
    for group, members in groups.items():
        label = group
        for key in [key for key in members if _has_place(run, summary, key)]:
            reading = summary.readings[key]
            cells = ("-", "", "")
            if isinstance(reading, Reading):
                cells = (value_text(reading), reading_text.spread(reading), reading.basis)
            rows.append((label, every_metric()[key].title, *cells))
            label = ""
    columns = (
        TableColumn("group", style="dim", no_wrap=True),
        TableColumn("metric", most_characters=_TITLE_CHARACTERS),
        TableColumn("value", "number", "strong"),
        TableColumn("spread", style="dim", no_wrap=True),
        TableColumn("basis", "basis"),
    )
    if rows:
        yield Table(columns, tuple(rows), has_head=False, is_grouped=True)


def _has_place(run: Run, summary: Summary, key: str) -> bool:
    """True if a metric is on the card; expected ones stay there when absent."""
    reading = summary.readings.get(key)
    if not isinstance(reading, Reading):
        return reading is not None and key in reading_text.expected_metrics(run, summary, "card")
    if key == "overhead.cpu_frac":
        run_s = summary.readings["time.run_s"]
        return isinstance(run_s, Reading) and run_s.value >= _OWN_COST_FROM_S
    return not _is_nothing(key, reading)


def _loss_curve(evidence: Evidence, summary: Summary) -> Iterator[Table]:
    """Yield the loss over the run as bars, each the mean of equally many steps."""
    from ergmeter.metrics.definitions.training import divergence  # noqa: PLC0415  numpy
    from ergmeter.metrics.timeline import losses  # noqa: PLC0415  numpy

    values, is_printed = losses(evidence)
    if len(values) < 3:
        return
    label = "loss, as printed" if is_printed else "loss"
    after = ", then no number" if divergence(summary.readings) else ""
    bars = sparkline(values, _CELLS + len("loss") - len(label) - len(after))
    ends = f"{significant(values[0])} to {significant(values[-1])}"
    yield Table(("", "curve"), ((label, f"{bars} {ends}{after}"),), has_head=False)
