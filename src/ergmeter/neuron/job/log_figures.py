"""What a log shows, under the original's names: of its last run, rates and times after the warm-up.

The trap: statistics of everything. The first lines of a training on Trainium hold a compilation of
minutes, and a log may hold several runs; a mean over all of it describes none of them.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ergmeter.importers.engine.columns import Printed
    from ergmeter.importers.log import LogRun, ParsedLog
    from ergmeter.neuron.job.pace import Throughput

_NONE: dict[str, Any] = {"average": None, "min": None, "max": None, "count": 0}


def log_document(log: ParsedLog, pace: Throughput) -> dict[str, Any]:
    """`log_metrics`: the last run of the log; rates and times after its warm-up."""
    run = log.last
    steady = run.steady()
    unit = rate_unit(run)
    rates = _statistics(run.printed[unit].after(steady.first)) if unit else dict(_NONE)
    if pace.is_from_log:
        rates |= {"used": pace.seq_per_s, "used_is": pace.said}
    return {
        "log_file": log.path,
        "timestamps": {
            "first": _stamp(run.first_stamp),
            "last": _stamp(run.last_stamp),
            "file_modification": _modified(log.path),
        },
        "steps": _steps(run),
        "step_times": _statistics(run.printed["step_time_s"].after(steady.first)),
        "throughput": rates,
        "losses": _losses(run),
        "format": log.format,
        "runs_in_log": len(log.runs),
        "steady_state": {
            "first_row": int(run.lines[: steady.first].sum()),
            "last_row": int(run.lines[: steady.last].sum()),
            "rule": steady.rule,
        },
        "notes": list(log.notes),
    }


def _losses(run: LogRun) -> dict[str, Any]:
    """Printed losses. One that is `nan` or `inf` is counted; a line without one is another case."""
    tally = run.tally
    return _statistics(run.printed["loss"]) | {
        "first": tally.first_loss,
        "last": tally.last_loss,
        "not_finite": tally.losses_not_finite,
        "first_not_finite_step": tally.first_not_finite_step,
        "not_printed": tally.losses_not_printed,
    }


def rate_unit(run: LogRun) -> str | None:
    """The unit of the sequences per second that the program printed."""
    return next((unit for unit in ("sequences/s", "samples/s") if unit in run.rates), None)


def _modified(path: str) -> str | None:
    """When the file was last written; standard input has no such time."""
    file = Path(path)
    return _stamp(datetime.fromtimestamp(file.stat().st_mtime)) if file.is_file() else None


def _steps(run: LogRun) -> dict[str, Any]:
    tally = run.tally
    return {"count": tally.steps, "first": tally.first_step, "last": tally.last_step}


def _statistics(printed: Printed) -> dict[str, Any]:
    if not printed.count:
        return dict(_NONE)
    return {
        "average": printed.mean,
        "min": float(np.nanmin(printed.low)),
        "max": float(np.nanmax(printed.high)),
        "count": printed.count,
    }


def _stamp(moment: datetime | None) -> str | None:
    return None if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S")
