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
from typing import NamedTuple

from ergmeter.hlo import proto
from ergmeter.hlo.module import Instruction
from ergmeter.hlo.wire import Buffer, Malformed, Span, integers, message, span, spans
from ergmeter.neuron.throughput import (
    LogSummary,
    LogTimes,
    LossStatistics,
    Statistics,
    StepNumbers,
)

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

    def add(self, text: str) -> None:
        """The next value, if the text is one."""
        value = _number(text)
        if value is None or (self.once and self.count and value == self.last):
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

    @property
    def statistics(self) -> tuple[float | None, float | None, float | None, int]:
        """Average, least, most and count."""
        return self.average, self.least, self.most, self.count


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
            self.step_times.add(timed[1])
        if _MARK in line:
            self._read_metrics(line)

    def _read_metrics(self, line: str) -> None:
        bar = _BAR.search(line)
        if bar:
            values: dict[str, str] = dict(zip(_NAMES, bar.groups()[1:], strict=True))
        else:
            singles = {name: pattern.search(line) for name, pattern in _SINGLE.items()}
            values = {name: match[1] for name, match in singles.items() if match}
        self.losses.add(values.get(_LOSS, ""))
        self.throughput.add(values.get(_RATE, ""))
        step = _number(values.get(_STEP, ""))
        self.steps |= set() if step is None else {int(step)}

    def summary(self) -> LogSummary:
        """Its statistics, warm-up included."""
        first, last = min(self.steps, default=None), max(self.steps, default=None)
        losses = self.losses
        return LogSummary(
            self.path,
            LogTimes(self.first_stamp, self.last_stamp, self.modified),
            StepNumbers(len(self.steps), first, last),
            Statistics(*self.step_times.statistics),
            Statistics(*self.throughput.statistics),
            LossStatistics(*losses.statistics, first=losses.first, last=losses.last),
        )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


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
_BATCHED_RIGHT, _CONTRACTED_RIGHT = 4, 2  # dimension numbers of a dot's right operand


class OriginalCount(NamedTuple):
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
        name = span(module, proto.MODULE_NAME)
        if name is not None:
            data[name[0] : name[1]].decode()  # protobuf refuses a name that is not UTF-8
        counts = [_computation(data, where) for where in spans(module, proto.MODULE_COMPUTATION)]
    except (Malformed, UnicodeDecodeError) as error:
        raise ValueError(f"not an HloModuleProto: {error}") from error
    finally:
        data.close()
    return OriginalCount(*map(sum, zip(*counts, strict=True))) if counts else OriginalCount(0, 0, 0)


def _computation(data: Buffer, where: Span) -> OriginalCount:
    extents = spans(message(data, *where), proto.COMPUTATION_INSTRUCTION)
    instructions = [Instruction(data, message(data, *extent), extent) for extent in extents]
    by_id = {instruction.integer(proto.ID): instruction for instruction in instructions}
    macs = nki = unreadable = 0
    for instruction in instructions:
        if instruction.opcode == "dot":
            macs += _dot(instruction, by_id)
        elif instruction.opcode == "custom-call" and _is_kernel(instruction):
            stated = _stated(instruction)
            unreadable += stated is None
            macs += stated or 0
            nki += stated or 0
    return OriginalCount(macs, nki, unreadable)


def _is_kernel(call: Instruction) -> bool:
    return call.text(proto.CUSTOM_CALL_TARGET) == _KERNEL


def _dot(dot: Instruction, by_id: dict[int, Instruction]) -> int:
    """Batch x free left x contracted x free right, from the operands' shapes."""
    operands = dot.operand_ids
    if len(operands) != 2 or any(operand not in by_id for operand in operands):
        raise ValueError(f"a dot whose operands {operands} are not in its computation")
    left, right = (by_id[operand].shape.dimensions for operand in operands)
    numbers = dot.part(proto.DOT_DIMENSIONS)
    taken = {
        *integers(dot.data, numbers, _CONTRACTED_RIGHT),
        *integers(dot.data, numbers, _BATCHED_RIGHT),
    }
    free_right = math.prod(size for axis, size in enumerate(right) if axis not in taken)
    return math.prod(left) * free_right


def _stated(call: Instruction) -> int | None:
    """The kernel's own `mac_count`, 0 without one; None where its configuration can't be read."""
    try:
        config = base64.b64decode(call.encoded(proto.BACKEND_CONFIG))
        return int(json.loads(config).get("mac_count", 0))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
