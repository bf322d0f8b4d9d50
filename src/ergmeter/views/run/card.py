"""The document of a run with its summary card, and the texts of readings that all views use.

The card fits 80 columns.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ergmeter.errors import FormatError
from ergmeter.metrics.catalog import catalogue, every_metric, expected_in, in_view
from ergmeter.metrics.evidence.window import BY_NUMBER
from ergmeter.records import Missing, Reading, Result, Summary, spread_frac
from ergmeter.runlog.manage.labels import labels_of
from ergmeter.runlog.reader import FINISHED, IMPORTED, RUNNING, Run
from ergmeter.units import (
    NO_UNIT,
    duration,
    grouped,
    number_of,
    printable,
    scaled,
    significant,
    sparkline,
    tallied,
)
from ergmeter.views.document import (
    Document,
    Frame,
    Note,
    Paragraph,
    Part,
    Section,
    State,
    Table,
    TableColumn,
)

OF_A_LOG = "from a log, which holds no readings of energy, devices or host memory"
_MOST_HOSTS = 4
_CELLS = 46  # bars, so that both ends of the curve fit beside them in 80 columns
_TITLE_CHARACTERS = 27  # of a title; longer ones wrap
# In a short recording most of the overhead is Python's start, so it is not representative.
_OWN_COST_FROM_S = 30.0
_STATES: dict[str, State] = {FINISHED: "good", IMPORTED: "good", RUNNING: "unsure"}


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
        parts.append(card(training, its_summary))
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


def card(run: Run, summary: Summary) -> Frame:
    """Return the card: run, metrics with their basis, notes."""
    return Frame(
        summary.run,
        summary.status,
        (
            *_what_ran(run, summary),
            *_figures(run, summary),
            *_absent(run, summary),
            *_loss_curve(run, summary),
            *(Note("minor", note) for note in reader_notes(summary)),
        ),
        _STATES.get(summary.status, "bad"),
    )


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


def value(reading: Reading) -> str:
    """Format a value in a readable unit, marked if it is impossible."""
    return _in_words(reading.value, reading.unit, beside=reading.value) + reading.mark


def _in_words(number: float, unit: str, *, beside: float) -> str:
    """Format a number of a reading, with the prefix of its value."""
    if unit == "s":
        return duration(number)
    if unit == "frac":
        return f"{significant(number * 100, 3)} %"
    if unit in ("B", "B/s", "B/h", "Hz", "J", "g", "FLOP/s", "FLOP/token"):
        return scaled(number, unit, beside=beside)
    if unit == "cores":
        return f"{significant(number, 3)} of a core" if number < 1 else f"{number:.2f} cores"
    if unit in ("tokens", "steps"):
        return f"{number:,.0f} {unit}"
    text = f"{number:,.0f}" if abs(number) >= 10_000 else significant(number)
    return text if unit == NO_UNIT else f"{text} {unit}"


def interval(reading: Reading) -> str:
    """Format an interval, with the unit once if both ends share it."""
    if reading.low is None or reading.high is None:
        return ""
    # Around 0 the prefix is that of the larger end.
    beside = reading.value or max(reading.low, reading.high, key=abs)
    low, high = (_in_words(end, reading.unit, beside=beside) for end in (reading.low, reading.high))
    number, _, unit = low.partition(" ")
    has_same = " " not in unit and high.endswith(f" {unit}") and high.count(" ") == 1
    return f"{number if has_same else low} to {high}"


def _spread(reading: Reading) -> str:
    """Return half the interval in percent, in at most seven characters."""
    half_frac = spread_frac(reading)
    if half_frac is None:
        return ""
    half = half_frac * 100
    if half < 0.1:
        return "< 0.1 %"
    if half > 100:
        return "> 100 %"
    return f"± {half:.1f} %" if half < 9.95 else f"± {half:.0f} %"


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
                cells = (value(reading), _spread(reading), reading.basis)
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
        return reading is not None and key in _expected(run, summary)
    if key == "overhead.cpu_frac":
        run_s = summary.readings["time.run_s"]
        return isinstance(run_s, Reading) and run_s.value >= _OWN_COST_FROM_S
    return not _is_nothing(key, reading)


def _expected(run: Run, summary: Summary) -> list[str]:
    """Metrics that keep their row when absent, with the reason below: those of this kind of run."""
    expected = expected_in("card")
    if is_of_a_log(run, summary):
        expected = [key for key in expected if not key.startswith(("energy.", "memory."))]
    if isinstance(summary.readings["latency.ttft_median_s"], Reading):  # inference has no steps
        expected = [key for key in expected if key != "time.step_s"]
    return expected


def _absent(run: Run, summary: Summary) -> Iterator[Note]:
    by_reason = grouped(
        (result.reason, catalogue()[key].title)
        for key in _expected(run, summary)
        if isinstance(result := summary.readings.get(key), Missing)
    )
    for reason, titles in by_reason.items():
        yield Note("absent", f"no {', '.join(titles)}", short_reason(reason, run))


def short_reason(reason: str, run: Run) -> str:
    """Return a reason without the probes' messages, which `--all` and `erg doctor` show."""
    reasons = [f"{name}: {why}" for name, why in run.unavailable.items()]
    reasons = [text for text in reasons if text in reason]
    return reason.replace(f" ({'; '.join(reasons)})", "") if reasons else reason


def _loss_curve(run: Run, summary: Summary) -> Iterator[Table]:
    """Yield the loss over the run as bars, each the mean of equally many steps."""
    from ergmeter.metrics.definitions.training import divergence  # noqa: PLC0415  numpy
    from ergmeter.metrics.summarize import evidence_of  # noqa: PLC0415  numpy
    from ergmeter.metrics.timeline import losses  # noqa: PLC0415  numpy

    values, is_printed = losses(evidence_of(run))
    if len(values) < 3:
        return
    label = "loss, as printed" if is_printed else "loss"
    after = ", then no number" if divergence(summary.readings) else ""
    bars = sparkline(values, _CELLS + len("loss") - len(label) - len(after))
    ends = f"{significant(values[0])} to {significant(values[-1])}"
    yield Table(("", "curve"), ((label, f"{bars} {ends}{after}"),), has_head=False)


def short_status(status: str) -> str:
    """Return a status in one word: `failed (2)`, `failed (ValueError)`, `SIGKILL`."""
    status = re.sub(r"\(exit code (\d+)\)", r"(\1)", status).removeprefix("killed by ")
    return re.sub(r"\((\w+): .*\)$", r"(\1)", status, flags=re.DOTALL)


def column_text(result: Result) -> str:
    """Format a result for a column whose title has the unit; durations keep theirs."""
    if not isinstance(result, Reading):
        return "-"
    return value(result).removesuffix(f" {result.unit}") if result.unit != "s" else value(result)
