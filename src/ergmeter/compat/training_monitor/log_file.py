"""training_log.json of a TrainingMonitor: whole and valid whenever somebody looks at it.

The trap: one JSON document that is written again at every save. After a million steps each save
writes them all, and a program that is killed while it writes leaves half a document. So steps are
appended, one a line, to a file beside it (`training_log.steps.jsonl`); the document is made anew
from that file, under another name that then takes its place, and only when it has grown by a tenth:
all its makings together write about eleven times its size. In memory stay the newest steps alone.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import deque
from typing import IO, TYPE_CHECKING, Any

from ergmeter.integrations.guard import Guarded, guarded

if TYPE_CHECKING:
    from pathlib import Path

KEPT = 1000  # of the newest steps, in memory
_GROWN_FRAC = 0.1
_FLUSH_S = 1.0  # what a program that is killed may lose of the steps


class TrainingLog(Guarded):
    """Owns both files, from the first step on. What an earlier training left is set aside.

    A disk that fails ends it, with one line, and nothing else.
    """

    def __init__(self, path: Path, *, save_every: int) -> None:
        self.path = path
        self.steps_path = path.with_name(f"{path.stem}.steps.jsonl")
        self.recent: deque[dict[str, Any]] = deque(maxlen=KEPT)
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
        """Make the document anew if it has grown enough."""
        grown = self._count - self._saved
        if grown >= max(self._save_every, _GROWN_FRAC * self._saved):
            self.save(total_s)

    @guarded
    def save(self, total_s: float) -> None:
        """Make the document anew: every step and epoch, and how long it has been."""
        if self._steps is None:
            self._steps = self._opened()
        self._flush()
        whole = self.path.with_name(f".{self.path.name}.whole")
        with whole.open("w", encoding="utf-8") as out:
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
        whole.replace(self.path)
        self._saved = self._count

    @guarded
    def close(self) -> None:
        """Let go of the file."""
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
    """As JSON has it: it knows no nan, so what is not finite is null and named beside."""
    odd = {n: str(v) for n, v in entry.items() if isinstance(v, float) and not math.isfinite(v)}
    if odd:
        entry = {**entry, **dict.fromkeys(odd), "not_finite": odd}
    return json.dumps(entry, ensure_ascii=False) + "\n"
