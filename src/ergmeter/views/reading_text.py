"""The texts of readings, reasons and statuses that all views use."""

from __future__ import annotations

import re

from ergmeter.records import Reading, Result, spread_frac
from ergmeter.runlog.reader import Run
from ergmeter.units import NO_UNIT, duration, scaled, significant


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
    return value(result).removesuffix(f" {result.unit}") if result.unit != "s" else value(result)
