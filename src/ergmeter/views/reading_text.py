"""The texts of readings, reasons, statuses, devices and labels that all views use."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ergmeter.errors import FormatError
from ergmeter.metrics.catalog import expected_in, titles_in
from ergmeter.records import Missing, Reading, Result, Summary, spread_frac, value_text
from ergmeter.runlog.manage.labels import labels_of
from ergmeter.runlog.reader import FINISHED, IMPORTED, RUNNING, Run
from ergmeter.units import grouped, printable, tallied
from ergmeter.views.document import State

OF_A_LOG = "from a log, which holds no readings of energy, devices or host memory"
_STATES: dict[str, State] = {FINISHED: "good", IMPORTED: "good", RUNNING: "unsure"}


def spread(reading: Reading) -> str:
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


def short_reason(reason: str, run: Run) -> str:
    """Return a reason without the probes' messages, which `--all` and `erg doctor` show."""
    reasons = [f"{name}: {why}" for name, why in run.unavailable.items()]
    reasons = [text for text in reasons if text in reason]
    return reason.replace(f" ({'; '.join(reasons)})", "") if reasons else reason


def short_status(status: str) -> str:
    """Return a status in one word: `failed (2)`, `failed (ValueError)`, `SIGKILL`."""
    status = re.sub(r"\(exit code (\d+)\)", r"(\1)", status).removeprefix("killed by ")
    return re.sub(r"\((\w+): .*\)$", r"(\1)", status, flags=re.DOTALL)


def column_text(result: Result) -> str:
    """Format a result for a column whose title has the unit; durations keep theirs."""
    if not isinstance(result, Reading):
        return "-"
    text = value_text(result)
    return text if result.unit == "s" else text.removesuffix(f" {result.unit}")


def status_state(status: str) -> State:
    """Return the state of a status: good, unsure or bad."""
    return _STATES.get(status, "bad")


def is_of_a_log(run: Run, summary: Summary) -> bool:
    """True if the run was imported from a log, without readings of devices."""
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


def expected_metrics(run: Run, summary: Summary, view: str) -> list[str]:
    """Return the metrics of this kind of run that are shown with a reason if absent."""
    expected = expected_in(view)
    if is_of_a_log(run, summary):
        expected = [key for key in expected if not key.startswith(("energy.", "memory."))]
    if isinstance(summary.readings["latency.ttft_median_s"], Reading):  # inference has no steps
        expected = [key for key in expected if key != "time.step_s"]
    return expected


def absences(run: Run, summary: Summary, view: str) -> Iterator[tuple[str, str]]:
    """Yield the titles of absent metrics that share a reason, and the reason."""
    titles = titles_in(view)
    by_reason = grouped(
        (short_reason(result.reason, run), titles[key])
        for key in expected_metrics(run, summary, view)
        if isinstance(result := summary.readings.get(key), Missing)
    )
    for reason, names in by_reason.items():
        yield ", ".join(names), reason
