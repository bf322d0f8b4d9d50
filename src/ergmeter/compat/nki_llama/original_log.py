"""The original's reading of a log, in its second version: progress-bar lines of one trainer.

What it understands and what it misreads is kept: numbers end at an `e`, the documented form
`throughput: 150.5` is not seen at all, consecutive equal values count once, and the last time stamp
is the last one that had not been seen before. The true reading is `ergmeter.importers.log`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

_NUMBER = r"([\d.]+)"
_STAMP = re.compile(r"\[(\d{4}-\d{2}-\d{2}\s+\d{2}:\d{2}:\d{2})[.,]\d+[:\]]")
_STEP_TIME = re.compile(rf"step_time[:\s]+{_NUMBER}")
_NAMES = (
    "reduced_train_loss", "lr", "global_step", "consumed_samples", "throughput",
    "throughput_peak", "gradient_norm",
)  # fmt: skip
_BAR = re.compile(
    r"Epoch\s+(\d+):\s*\d+%\|[█▌\s]+\|\s*\d+/\d+" + "".join(rf".*?{n}={_NUMBER}" for n in _NAMES)
)
_LOSS, _STEP, _RATE = "reduced_train_loss", "global_step", "throughput"  # what it writes out
_SINGLE = {name: re.compile(f"{name}={_NUMBER}") for name in (_LOSS, _STEP, _RATE)}
_MARK = f"{_LOSS}="


@dataclass
class Values:
    """What is left of a column in one pass: consecutive equal values count once."""

    once: bool = True
    count: int = 0
    total: float = 0.0
    least: float | None = None
    most: float | None = None
    first: float | None = None
    last: float | None = None

    def add(self, value: float) -> None:
        """The next value."""
        if self.once and self.count and value == self.last:
            return
        self.count += 1
        self.total += value
        self.first = value if self.first is None else self.first
        self.last = value
        self.least = value if self.least is None else min(self.least, value)
        self.most = value if self.most is None else max(self.most, value)

    @property
    def average(self) -> float | None:
        """The plain mean."""
        return self.total / self.count if self.count else None

    def document(self, *names: str) -> dict[str, Any]:
        """These of its figures, and how many values there were."""
        every = {
            "average": self.average, "min": self.least, "max": self.most,
            "first": self.first, "last": self.last, "count": self.count,
        }  # fmt: skip
        return {name: every[name] for name in (*names, "count")}


@dataclass
class OriginalLog:
    """What the original keeps of a log."""

    path: str
    steps: set[int] = field(default_factory=set)
    stamps: set[str] = field(default_factory=set)
    first_stamp: str | None = None
    last_stamp: str | None = None
    modified: str | None = None
    step_times: Values = field(default_factory=lambda: Values(once=False))
    throughput: Values = field(default_factory=Values)
    losses: Values = field(default_factory=Values)

    def read(self, line: str) -> None:
        """The next line."""
        stamp = _STAMP.search(line)
        if stamp and stamp[1] not in self.stamps:
            self.stamps.add(stamp[1])
            self.first_stamp = self.first_stamp or stamp[1]
            self.last_stamp = stamp[1]
        if "step_time" in line and (timed := _STEP_TIME.search(line)):
            _add(self.step_times, timed[1])
        if _MARK in line:
            self._read_metrics(line)

    def _read_metrics(self, line: str) -> None:
        bar = _BAR.search(line)
        if bar:
            found: dict[str, str] = dict(zip(_NAMES, bar.groups()[1:], strict=True))
        else:
            singles = {name: pattern.search(line) for name, pattern in _SINGLE.items()}
            found = {name: match[1] for name, match in singles.items() if match}
        _add(self.losses, found.get(_LOSS, ""))
        _add(self.throughput, found.get(_RATE, ""))
        self.steps.update(int(value) for value in _numbers(found.get(_STEP, "")))

    def document(self) -> dict[str, Any]:
        """Its `log_metrics`."""
        return {
            "log_file": self.path,
            "timestamps": {
                "first": self.first_stamp,
                "last": self.last_stamp,
                "file_modification": self.modified,
            },
            "steps": {
                "count": len(self.steps),
                "first": min(self.steps, default=None),
                "last": max(self.steps, default=None),
            },
            "step_times": self.step_times.document("average", "min", "max"),
            "throughput": self.throughput.document("average", "min", "max"),
            "losses": self.losses.document("average", "min", "max", "first", "last"),
        }


def _add(values: Values, text: str) -> None:
    for value in _numbers(text):
        values.add(value)


def _numbers(text: str) -> list[float]:
    """The number; none where there is none, or dots alone, at which the original stops."""
    try:
        return [float(text)]
    except ValueError:
        return []


def read_original_log(path: str) -> OriginalLog:
    """Read a log as the original does, line by line."""
    log = OriginalLog(path)
    with Path(path).open(encoding="utf-8", errors="replace") as stream:  # a bare \r ends a line too
        for line in stream:
            log.read(line)
    if log.first_stamp is None:
        written = datetime.fromtimestamp(Path(path).stat().st_mtime)
        log.modified = written.strftime("%Y-%m-%d %H:%M:%S")
    return log
