"""The full card of a run, which fits 80 columns (`erg report --long`)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from ergmeter.errors import FormatError
from ergmeter.metrics.catalog import catalogue, every_metric, expected_in, in_view
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.window import BY_NUMBER
from ergmeter.records import Missing, Reading, Summary, value_text
from ergmeter.runlog.manage.labels import labels_of
from ergmeter.runlog.reader import FINISHED, IMPORTED, RUNNING, Run
from ergmeter.units import (
    grouped,
    number_of,
    printable,
    significant,
    sparkline,
    tallied,
)
from ergmeter.views.document import (
    Frame,
    Note,
    Paragraph,
    State,
    Table,
    TableColumn,
)
from ergmeter.views.reading_text import short_reason, spread

OF_A_LOG = "from a log, which holds no readings of energy, devices or host memory"
_CELLS = 46  # bars, so that both ends of the curve fit beside them in 80 columns
_TITLE_CHARACTERS = 27  # of a title; longer ones wrap
# In a short recording most of the overhead is Python's start, so it is not representative.
_OWN_COST_FROM_S = 30.0
_STATES: dict[str, State] = {FINISHED: "good", IMPORTED: "good", RUNNING: "unsure"}


def long_card(evidence: Evidence, summary: Summary) -> Frame:
    """Return the card: run, metrics with their basis, notes."""
    run = evidence.run
    return Frame(
        summary.run,
        summary.status,
        (
            *_what_ran(run, summary),
            *_figures(run, summary),
            *_absent(run, summary),
            *_loss_curve(evidence, summary),
            *(Note("minor", note) for note in reader_notes(summary)),
        ),
        status_state(summary.status),
    )


def status_state(status: str) -> State:
    """Return the state of a status: good, unsure or bad."""
    return _STATES.get(status, "bad")


def is_of_a_log(run: Run, summary: Summary) -> bool:
    """True if the run was made of a log, without readings of devices."""
    return summary.status == IMPORTED and not run.devices


def accelerators(run: Run, summary: Summary) -> str:
    """Return the accelerators that the run used, each name once."""
    used = [run.devices[id_] for id_ in summary.devices if id_ in run.devices]
    return tallied(device.name for device in used if device.kind == "gpu")


def label_lines(run: Run) -> list[tuple[str, str]]:
    """Return tags in one line and each note in its own, as pairs of title and text."""
    try:
        labels = labels_of(run.path)
    except FormatError as error:
        return [("tags and notes", f"can't be read: {printable(str(error))}")]
    tags = [("tags", ", ".join(map(printable, labels.tags)))] if labels.tags else []
    return [
        *tags,
        *((f"note of {printable(at)[:10]}", printable(note)) for at, note in labels.notes),
    ]


def reader_notes(summary: Summary) -> tuple[str, ...]:
    """Return the notes, without those already given as a reason."""
    reasons = {
        reading.reason for reading in summary.readings.values() if isinstance(reading, Missing)
    }
    return tuple(note for note in summary.notes if note not in reasons)


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
    where = f"{accelerators(run, summary) or 'no accelerator'} on {host}"
    yield Paragraph(OF_A_LOG if is_of_a_log(run, summary) else where, style="dim")
    over, _, more = window_text(summary).partition("; ")
    for line in (f"{over}{_rule(summary)}", more):
        if line:
            yield Paragraph(line, style="dim")
    for name, text in label_lines(run):
        yield Paragraph(f"{name}: {text}")


def window_text(summary: Summary) -> str:
    """Return what a summary is over, or why there is no window."""
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
                cells = (value_text(reading), spread(reading), reading.basis)
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
        return reading is not None and key in expected_metrics(run, summary, "card")
    if key == "overhead.cpu_frac":
        run_s = summary.readings["time.run_s"]
        return isinstance(run_s, Reading) and run_s.value >= _OWN_COST_FROM_S
    return not _is_nothing(key, reading)


def expected_metrics(run: Run, summary: Summary, view: str) -> list[str]:
    """Metrics of this kind of run that are named with the reason where they are absent."""
    expected = expected_in(view)
    if is_of_a_log(run, summary):
        expected = [key for key in expected if not key.startswith(("energy.", "memory."))]
    if isinstance(summary.readings["latency.ttft_median_s"], Reading):  # inference has no steps
        expected = [key for key in expected if key != "time.step_s"]
    return expected


def _absent(run: Run, summary: Summary) -> Iterator[Note]:
    by_reason = grouped(
        (result.reason, catalogue()[key].title)
        for key in expected_metrics(run, summary, "card")
        if isinstance(result := summary.readings.get(key), Missing)
    )
    for reason, titles in by_reason.items():
        yield Note("absent", f"no {', '.join(titles)}", short_reason(reason, run))


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
