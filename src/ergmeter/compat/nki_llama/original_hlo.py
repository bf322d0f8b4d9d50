"""The original's multiply-adds of one file: every dot of every computation, once each.

No call, loop or branch is followed; a kernel counts what its configuration says, else 0. The true
count is `ergmeter.hlo`; this one is for comparing with figures of the original.
"""

from __future__ import annotations

import base64
import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ergmeter.hlo.wire import Malformed, integer, integers, message, span, spans, text

if TYPE_CHECKING:
    from ergmeter.hlo.wire import Buffer, Fields, Span

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
        counts = [_computation(data, place) for place in spans(module, _COMPUTATIONS)]
    except (Malformed, UnicodeDecodeError) as error:
        raise ValueError(f"not an HloModuleProto: {error}") from error
    finally:
        data.close()
    return OriginalCount(
        sum(one.macs for one in counts),
        sum(one.nki_macs for one in counts),
        sum(one.unreadable for one in counts),
    )


def _computation(data: Buffer, place: Span) -> OriginalCount:
    fields = message(data, *place)
    instructions = [message(data, *inner) for inner in spans(fields, _INSTRUCTIONS)]
    by_id = {integer(one, _ID): one for one in instructions}
    macs = nki = unreadable = 0
    for one in instructions:
        opcode = text(data, one, _OPCODE)
        if opcode == "dot":
            macs += _dot(data, one, by_id)
        elif opcode == "custom-call" and text(data, one, _TARGET) == _KERNEL:
            stated = _stated(data, one)
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
    place = span(dot, _DOT)
    numbers = message(data, *place) if place else {}
    contracted = [integers(data, numbers, field) for field in _CONTRACTED]
    batched = [integers(data, numbers, field) for field in _BATCHED]
    taken = {*contracted[1], *batched[1]}
    free_right = math.prod(size for axis, size in enumerate(right) if axis not in taken)
    return math.prod(left) * free_right


def _dimensions(data: Buffer, instruction: Fields) -> list[int]:
    place = span(instruction, _SHAPE)
    return integers(data, message(data, *place), _DIMENSIONS) if place else []


def _stated(data: Buffer, call: Fields) -> int | None:
    """The kernel's own `mac_count`, 0 without one; None where its configuration can't be read."""
    place = span(call, _CONFIG)
    config = data[place[0] : place[1]] if place else b""
    try:
        return int(json.loads(base64.b64decode(config)).get("mac_count", 0))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
