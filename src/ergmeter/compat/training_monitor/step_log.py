"""Token sums of one logged step, and where its metrics go: training_log.json, W&B.

The mask of a logged step is that of this rank's last micro-batch. Every micro-batch and every rank
is assumed to have as many tokens; this is exact where there is one of each.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import deque
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from ergmeter.atomic_write import replacing
from ergmeter.integrations.batches import Counts
from ergmeter.integrations.guard import Guarded, guarded, reason_of, warn_once
from ergmeter.integrations.unsettled_steps import Fetch, device_events

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# -- rows in W&B -----------------------------------------------------------------------------------
# A missing value is left out of the row: 0 would lower every mean.

_AXIS = "step"
_PROJECT = "qwen_classification"  # the original's, where the configuration names none


class WandbRows(Guarded):
    """Sends rows to the script's W&B run where it has one, else to a new one."""

    def __init__(self, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._run: Any = None
        self._is_own = False
        if settings.get("enabled", False):
            self._open(settings, config)

    @guarded
    def _open(self, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        import wandb  # noqa: PLC0415  only for those who ask

        self._is_own = wandb.run is None
        self._run = wandb.run or wandb.init(
            project=settings.get("project", _PROJECT),
            name=settings.get("run_name"),
            tags=list(settings.get("tags") or []),
            notes=settings.get("notes"),
            config=dict(config),
            resume="allow",
        )
        self._run.define_metric(_AXIS)
        for group in ("training/*", "perf/*", "eval/*"):
            self._run.define_metric(group, step_metric=_AXIS)

    @property
    def is_open(self) -> bool:
        """True while rows are sent."""
        return self._run is not None

    @guarded
    def log(self, values: Mapping[str, Any], *, step: int | None = None) -> None:
        """Add to the row of a step. None values are left out."""
        if self._run is None:
            return
        present = {name: value for name, value in values.items() if value is not None}
        if step is None:
            self._run.log(present)
        else:
            self._run.log({**present, _AXIS: int(step)}, step=int(step))

    @guarded
    def finish(self) -> None:
        """End the run, if it was made here."""
        run, self._run = self._run, None
        if run is not None and self._is_own:
            run.finish()

    def fail(self, error: Exception) -> None:
        """An error of wandb ends the rows, and nothing else."""
        self._run = None
        warn_once(f"no rows to W&B: {reason_of(error)}")


# -- training_log.json -----------------------------------------------------------------------------
# The file is complete and valid at any time. Steps are appended, one a line, to
# `training_log.steps.jsonl`; the document is rebuilt from it under another name and renamed. That
# happens only when it has grown by a tenth, so all rebuilds together write about eleven times its
# size. Only the newest steps stay in memory.

RECENT_STEPS = 1000  # of the newest steps, in memory
_GROWN_FRAC = 0.1
_FLUSH_S = 1.0  # what a program that is killed may lose of the steps


class TrainingLog(Guarded):
    """Owns both files, from the first step. Files of an earlier training are moved aside.

    A disk that fails ends it, with one line, and nothing else.
    """

    def __init__(self, path: Path, *, save_every: int) -> None:
        self.path = path
        self.steps_path = path.with_name(f"{path.stem}.steps.jsonl")
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_STEPS)
        self.epochs: list[dict[str, Any]] = []
        self._save_every = save_every
        self._steps: IO[str] | None = None
        self._count = 0
        self._saved = 0
        self._flushed_s = 0.0

    @guarded
    def append(self, entry: dict[str, Any]) -> None:
        """Add a step."""
        if self._steps is None:
            self._steps = self._opened()
        self.recent.append(entry)
        self._steps.write(_line(entry))
        self._count += 1
        if time.monotonic() - self._flushed_s > _FLUSH_S:
            self._flush()

    @guarded
    def save_if_due(self, total_s: float) -> None:
        """Rebuild the document if it has grown enough."""
        grown = self._count - self._saved
        if grown >= max(self._save_every, _GROWN_FRAC * self._saved):
            self.save(total_s)

    @guarded
    def save(self, total_s: float) -> None:
        """Rebuild the document: every step and epoch, and the elapsed time."""
        if self._steps is None:
            self._steps = self._opened()
        self._flush()
        with replacing(self.path) as part, part.open("w", encoding="utf-8") as out:
            out.write('{\n"step_logs": [')
            with self.steps_path.open(encoding="utf-8") as lines:
                first = lines.readline()
                out.write(f"\n{first.rstrip()}" if first else "")
                for line in lines:
                    out.write(f",\n{line.rstrip()}")
            epochs = ",\n".join(_line(epoch).rstrip() for epoch in self.epochs)
            out.write(
                f'\n],\n"epoch_logs": [\n{epochs}\n],\n"total_training_time": {total_s}\n}}\n'
            )
        self._saved = self._count

    @guarded
    def close(self) -> None:
        """Close the file."""
        if self._steps is not None:
            self._steps.close()

    def _opened(self) -> IO[str]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for path in (self.path, self.steps_path):
            if path.exists():
                shutil.move(path, _free_name(path))
        return self.steps_path.open("w", encoding="utf-8")

    def _flush(self) -> None:
        if self._steps is not None:
            self._steps.flush()
        self._flushed_s = time.monotonic()


def _free_name(path: Path) -> Path:
    numbers = (path.with_name(f"{path.name}.{number}") for number in range(1, 1_000_000))
    return next(name for name in numbers if not name.exists())


def _line(entry: dict[str, Any]) -> str:
    """An entry as JSON: non-finite values are null, and named beside."""
    odd = {n: str(v) for n, v in entry.items() if isinstance(v, float) and not math.isfinite(v)}
    if odd:
        entry = {**entry, **dict.fromkeys(odd), "not_finite": odd}
    return json.dumps(entry, ensure_ascii=False) + "\n"


# -- tokens of a step ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Masked:
    """Token sums of a mask, which may still be on a device."""

    rows: int
    computed: int
    real: Any
    squares: Any  # sum over rows of their length squared: what attention pays for
    fetch: Fetch | None

    @classmethod
    def of(cls, mask: Any, *, fetched: bool) -> Masked | None:  # noqa: ANN401  a tensor or an array
        """The sums of a mask; None if it is no mask of token rows. `fetched`: they will be read."""
        shape = tuple(getattr(mask, "shape", ()))
        if not 1 <= len(shape) <= 2 or 0 in shape:
            return None
        rows, length = (1, int(shape[0])) if len(shape) == 1 else (int(shape[0]), int(shape[1]))
        lengths = (mask != 0).sum(-1)
        real, squares = lengths.sum(), (lengths * lengths).sum()
        if getattr(getattr(mask, "device", None), "type", "cpu") == "cpu":
            return cls(rows, rows * length, int(real), int(squares), None)
        fetch = Fetch([real, squares], device_events([real])).start() if fetched else None
        return cls(rows, rows * length, real, squares, fetch)

    def counts(self, micro_steps: int) -> Counts:
        """The counts, as a Training takes them."""
        each = (self.computed, self.rows, self.real, self.squares)
        computed, rows, real, squares = (micro_steps * amount for amount in each)
        return Counts(computed, samples=rows, real=real, loss=None, squares=squares)

    @property
    def is_here(self) -> bool:
        """True if the sums can be read without waiting."""
        return self.fetch is None or self.fetch.is_here

    def sums(self) -> tuple[int, int]:
        """Real tokens, and the sum of squared lengths."""
        if self.fetch is None:
            return self.real, self.squares
        real, squares = self.fetch.values()
        return int(real), int(squares)
