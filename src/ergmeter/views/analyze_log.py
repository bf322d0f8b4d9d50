"""What a log holds, on the console of `erg analyze`, under the original's labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.views.analyze_text import heading, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Document = Mapping[str, Any]

_WIDE = 60


def log_section(log: Document) -> Iterator[str]:
    """What the log holds."""
    yield ""
    yield from heading("LOG FILE METRICS SUMMARY", _WIDE)
    yield f"Log file: {log['log_file']}"
    stamps, steps = log["timestamps"], log["steps"]
    if stamps["first"]:
        yield "\nTraining Timeline:"
        yield f"  First timestamp: {stamps['first']}"
        yield f"  Last timestamp: {stamps['last']}"
    elif stamps["file_modification"]:
        yield f"\nFile modified: {stamps['file_modification']} (the lines have no time)"
    if steps["count"]:
        yield "\nTraining Steps:"
        yield f"  Total steps recorded: {steps['count']}"
        yield f"  First step: {steps['first']}"
        yield f"  Last step: {steps['last']}"
    yield from _statistics("Step Time Statistics", log["step_times"], "seconds", 3)
    yield from _statistics("Throughput Statistics", log["throughput"], "seq/s", 3)
    yield from _statistics("Loss Statistics", log["losses"], "", 4)
    yield from _without_a_loss(log["losses"])
    if "steady_state" in log:
        if log["runs_in_log"] > 1:
            yield f"\n{log['runs_in_log']} runs in this log: the last one is shown"
        yield ""
        yield from wrapped(f"Steady state: {log['steady_state']['rule']}")
        for note in log["notes"]:
            yield from wrapped(note, "  - ")


def _without_a_loss(losses: Document) -> Iterator[str]:
    """What the original does not tell apart: a loss that is no number, and none."""
    broken, silent = losses.get("not_finite", 0), losses.get("not_printed", 0)
    printed = broken + losses["count"]
    if broken and not losses["count"]:
        yield "\nLoss Statistics:"
    if broken:
        step = losses["first_not_finite_step"]
        first = "" if step is None else f", first at step {step}"
        yield f"  Not a number (nan or inf): {broken} of {printed} printed{first}"
    if silent and printed:
        yield f"  Not printed: {silent} of {printed + silent} lines"


def _statistics(title: str, of: Document, unit: str, digits: int) -> Iterator[str]:
    if of["average"] is None:
        return
    yield f"\n{title}:"
    names = {
        "average": "Average", "min": "Min", "max": "Max",
        "first": f"First {title.split()[0].lower()}", "last": f"Last {title.split()[0].lower()}",
    }  # fmt: skip
    for key, name in names.items():
        if of.get(key) is not None:
            yield f"  {name}: {of[key]:.{digits}f} {unit}".rstrip()
    yield f"  Number of measurements: {of['count']}"
