"""Reads logs and HLO files as the original does, for comparison with its numbers.

The correct readers are `ergmeter.importers.log` and `ergmeter.hlo`.
"""

from __future__ import annotations

import base64
import json
import math
import mmap
import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.hlo.wire import Malformed, integer, integers, message, span, spans, text

if TYPE_CHECKING:
    from ergmeter.hlo.wire import Buffer, Fields, Span

# A log as the original's second version reads it: progress-bar lines of one trainer. Its faults are
# kept: numbers end at an `e`, the documented form `throughput: 150.5` is not recognised,
# consecutive equal values count once, and the last time stamp is the last one that was new.


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
    """Statistics of a column; consecutive equal values count once."""

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
    """A log's values, as the original reads them."""

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
            values: dict[str, str] = dict(zip(_NAMES, bar.groups()[1:], strict=True))
        else:
            singles = {name: pattern.search(line) for name, pattern in _SINGLE.items()}
            values = {name: match[1] for name, match in singles.items() if match}
        _add(self.losses, values.get(_LOSS, ""))
        _add(self.throughput, values.get(_RATE, ""))
        self.steps.update(int(value) for value in _numbers(values.get(_STEP, "")))

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
    """The number in a list, or an empty list if there is none."""
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


# Multiply-adds as the original counts them: every dot of every computation once. Calls, loops and
# branches are not followed. A kernel counts what its configuration states, else 0.


_KERNEL = "AwsNeuronCustomNativeKernel"
# Field numbers of XLA's hlo.proto.
_COMPUTATIONS, _INSTRUCTIONS = 3, 2
_OPCODE, _SHAPE, _TARGET, _DOT, _ID, _OPERANDS, _CONFIG = 2, 3, 28, 30, 35, 36, 43
_DIMENSIONS = 3
_CONTRACTED, _BATCHED = (1, 2), (3, 4)  # of the left and of the right operand


@dataclass(frozen=True, slots=True)
class OriginalCount:
    """What it counts in a file, and how many kernel configurations it could not read."""

    macs: int
    nki_macs: int
    unreadable: int


def original_count(path: str) -> OriginalCount:
    """Count a file. ValueError with its one-line reason where the original fails."""
    with Path(path).open("rb") as stream:
        if not Path(path).stat().st_size:
            return OriginalCount(0, 0, 0)
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        module = message(data, 0, len(data))
        name = span(module, 1)
        if name is not None:
            data[name[0] : name[1]].decode()  # protobuf refuses a name that is not UTF-8
        counts = [_computation(data, where) for where in spans(module, _COMPUTATIONS)]
    except (Malformed, UnicodeDecodeError) as error:
        raise ValueError(f"not an HloModuleProto: {error}") from error
    finally:
        data.close()
    return OriginalCount(
        sum(count.macs for count in counts),
        sum(count.nki_macs for count in counts),
        sum(count.unreadable for count in counts),
    )


def _computation(data: Buffer, where: Span) -> OriginalCount:
    fields = message(data, *where)
    instructions = [message(data, *inner) for inner in spans(fields, _INSTRUCTIONS)]
    by_id = {integer(fields, _ID): fields for fields in instructions}
    macs = nki = unreadable = 0
    for instruction in instructions:
        opcode = text(data, instruction, _OPCODE)
        if opcode == "dot":
            macs += _dot(data, instruction, by_id)
        elif opcode == "custom-call" and text(data, instruction, _TARGET) == _KERNEL:
            stated = _stated(data, instruction)
            unreadable += stated is None
            macs += stated or 0
            nki += stated or 0
    return OriginalCount(macs, nki, unreadable)


def _dot(data: Buffer, dot: Fields, by_id: dict[int, Fields]) -> int:
    """Batch x free left x contracted x free right, from the operands' shapes."""
    operands = integers(data, dot, _OPERANDS)
    if len(operands) != 2 or any(operand not in by_id for operand in operands):
        raise ValueError(f"a dot whose operands {operands} are not in its computation")
    left, right = (_dimensions(data, by_id[operand]) for operand in operands)
    dot_span = span(dot, _DOT)
    numbers = message(data, *dot_span) if dot_span else {}
    contracted = [integers(data, numbers, field) for field in _CONTRACTED]
    batched = [integers(data, numbers, field) for field in _BATCHED]
    taken = {*contracted[1], *batched[1]}
    free_right = math.prod(size for axis, size in enumerate(right) if axis not in taken)
    return math.prod(left) * free_right


def _dimensions(data: Buffer, instruction: Fields) -> list[int]:
    shape_span = span(instruction, _SHAPE)
    return integers(data, message(data, *shape_span), _DIMENSIONS) if shape_span else []


def _stated(data: Buffer, call: Fields) -> int | None:
    """The kernel's own `mac_count`, 0 without one; None where its configuration can't be read."""
    config_span = span(call, _CONFIG)
    config = data[config_span[0] : config_span[1]] if config_span else b""
    try:
        return int(json.loads(base64.b64decode(config)).get("mac_count", 0))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
