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
    from ergmeter.importers.log import LogRun, ParsedLog
    from ergmeter.neuron.pace import Throughput
    from ergmeter.records import FloatArray


def log_document(log: ParsedLog, pace: Throughput) -> dict[str, Any]:
    """`log_metrics`: the last run of the log; rates and times after its warm-up."""
    run = log.last
    steady = run.steady()
    rows = slice(steady.first, steady.last)
    printed = printed_rates(run)
    rates = _statistics(np.full(0, np.nan) if printed is None else printed[rows])
    if pace.is_from_log:
        rates |= {"used": pace.seq_per_s, "used_is": pace.said}
    losses = run.loss[np.isfinite(run.loss)]
    return {
        "log_file": log.path,
        "timestamps": {
            "first": _stamp(log.first_stamp),
            "last": _stamp(log.last_stamp),
            "file_modification": _modified(log.path),
        },
        "steps": _steps(run),
        "step_times": _statistics(run.step_time_s[rows]),
        "throughput": rates,
        "losses": _statistics(losses)
        | {
            "first": float(losses[0]) if len(losses) else None,
            "last": float(losses[-1]) if len(losses) else None,
            "not_finite": len(run.loss) - len(losses),
        },
        "format": log.format,
        "runs_in_log": len(log.runs),
        "steady_state": {"first_row": steady.first, "last_row": steady.last, "rule": steady.rule},
        "notes": list(log.notes),
    }


def printed_rates(run: LogRun) -> FloatArray | None:
    """Sequences per second as the program printed them, row by row."""
    return run.rates.get("sequences/s", run.rates.get("samples/s"))


def _modified(path: str) -> str | None:
    """When the file was last written; standard input has no such time."""
    file = Path(path)
    return _stamp(datetime.fromtimestamp(file.stat().st_mtime)) if file.is_file() else None


def _steps(run: LogRun) -> dict[str, Any]:
    steps = run.step[~np.isnan(run.step)]
    return {
        "count": len(np.unique(steps)),
        "first": int(steps.min()) if len(steps) else None,
        "last": int(steps.max()) if len(steps) else None,
    }


def _statistics(values: FloatArray) -> dict[str, Any]:
    kept = values[np.isfinite(values)]
    if not len(kept):
        return {"average": None, "min": None, "max": None, "count": 0}
    return {
        "average": float(kept.mean()),
        "min": float(kept.min()),
        "max": float(kept.max()),
        "count": len(kept),
    }


def _stamp(moment: datetime | None) -> str | None:
    return None if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S")
