"""The texts of readings, reasons and statuses that all views use."""

from __future__ import annotations

import re

from ergmeter.records import Reading, Result, spread_frac, value_text
from ergmeter.runlog.reader import Run


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
