"""What a cell's end is judged by: the last of its output, the Trainer's figures, its losses.

The trap: a loss that became nan and is not seen. transformers leaves losses that are nan out of
the mean it logs, and so logs 0 where all are; our columns have nan also where no loss was told.
"""

from __future__ import annotations

import math
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow as pa

from ergmeter.bench.execute.outcome import KILLED
from ergmeter.errors import ErgmeterError
from ergmeter.importers.hf_trainer import items_of, kind_of
from ergmeter.runlog.reader import Run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

# Of a command's output, what is read to judge its end: a rank's message may have much behind it.
TAIL_BYTES = 4 << 20
_ROWS = 100_000


def tail(path: Path) -> str:
    """The last of a file; nothing where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def trainer_figures(*texts: str) -> dict[str, float]:
    """What transformers' Trainer printed at its end, the last of it; nan and inf are numbers."""
    found: dict[str, float] = {}
    for line in (line for text in texts for line in text.splitlines() if "train_runtime" in line):
        items = items_of(line.replace('"', "'"))
        if kind_of(items) == "final":
            found = dict(_numbers(items))
    return found


def _numbers(items: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    for name, text in items.items():
        with suppress(ValueError):
            yield name, float(text)


def opened(path: Path) -> Run | None:
    """The run there, if there is one."""
    try:
        return Run.open(path)
    except (ErgmeterError, OSError):
        return None


def killed_by(run: Run | None, exit_code: int | None) -> int | None:
    """SIGKILL, if `erg record` saw its command end by it and then ended with exit code 137."""
    is_killed = run is not None and run.status == f"killed by {signal.SIGKILL.name}"
    return signal.SIGKILL if is_killed and exit_code == KILLED else None


def last_loss(run: Run | None, trainer: Mapping[str, float]) -> float | None:
    """The loss that was told last, of any rank: one that became nan stays so."""
    found = [trainer["train_loss"]] if "train_loss" in trainer else []
    if run is not None:
        with suppress(ErgmeterError, OSError):
            found += _last_losses(run)
    broken = [loss for loss in found if not math.isfinite(loss)]
    return next(iter(broken or found), None)


def _last_losses(run: Run) -> list[float]:
    """Of each writer. Not by `Run.steps`, in which nan also stands for a loss that is absent.

    transformers leaves losses that are nan out of the mean it logs, and so logs 0 where all are;
    the norm of the gradient it logs as it is.
    """
    steps = run.table("steps")
    if not {"loss", "writer"} <= set(steps.column_names):
        return []
    if "grad_norm" not in steps.column_names:
        steps = steps.append_column("grad_norm", pa.nulls(steps.num_rows))
    last: dict[str, float] = {}
    for start in range(0, steps.num_rows, _ROWS):
        rows = steps.slice(start, _ROWS)
        columns = (rows[name].to_pylist() for name in ("writer", "loss", "grad_norm"))
        for writer, loss, norm in zip(*columns, strict=True):
            if loss is not None:
                is_hidden = loss == 0.0 and norm is not None and not math.isfinite(norm)
                last[writer] = math.nan if is_hidden else loss
    return list(last.values())


def plain(value: object) -> object:
    """JSON has no nan and no inf: as text."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
