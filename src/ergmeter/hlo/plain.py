"""Our own parser of computations, in plain Python; and what any parser has to give.

The trap: an object for each instruction takes longer than parsing it. So a parser gives columns,
the opcodes and the ids of a computation, and the few instructions that matter one by one.

Every field of every instruction is gone through, so that damage is found wherever it is. What is
out of the ordinary is left to `message`, which says where the damage lies.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ergmeter.hlo.module import (
    CALLED_IDS,
    COMPUTATION_ID,
    COMPUTATION_INSTRUCTION,
    COMPUTATION_NAME,
    COMPUTATION_ROOT_ID,
    DOT_DIMENSIONS,
    ID,
    LITERAL,
    OPCODE,
    OPERAND_IDS,
    QUIET_OPCODES,
    SHAPE,
)
from ergmeter.hlo.wire import (
    SIZE_BITS,
    Buffer,
    Fields,
    Malformed,
    Span,
    field,
    integer,
    integers,
    message,
    short,
    span,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_INSTRUCTION_TAG, _OPCODE_TAG, _SHAPE_TAG = (
    number << 3 | 2 for number in (COMPUTATION_INSTRUCTION, OPCODE, SHAPE)
)
_SHORT_TAGS = frozenset(number << 3 | 2 for number in range(1, 16))
_COLUMNS = frozenset([OPCODE, SHAPE, ID, OPERAND_IDS, CALLED_IDS])


def _lists() -> bytes:
    """A pattern for a packed list of up to 35 bytes, which is five ids of an optimised module.

    The last byte ends a number; none has more than ten bytes.
    """
    kinds = [rb"\x00"]
    for size in range(1, 36):
        no_longer = rb"(?!.{0,%d}[\x80-\xff]{10})" % (size - 10) if size > 10 else b""
        kinds.append(rb"\x%02x%s.{%d}[\x00-\x7f]" % (size, no_longer, size - 1))
    return rb"(?:" + rb"|".join(kinds) + rb")"


@lru_cache(maxsize=1)
def _end() -> re.Pattern[bytes]:
    """How nearly every instruction ends.

    With its id, the ids of operands and callees, and two empty messages (frontend attributes and
    statistics). Compiled when it is first needed, since that takes as long as a file.
    """
    parts = (
        rb"\x98\x02([\x80-\xff]{0,8}[\x00-\x7f])",
        rb"(?:\xa2\x02%s)?" % _lists(),
        rb"(?:\xb2\x02%s)?" % _lists(),
        rb"(?:\xa2\x04\x00)?(?:\x92\x05\x00)?",
    )
    return re.compile(b"".join(parts), re.DOTALL)


class Line(Protocol):
    """The few fields of an instruction that the index is made from."""

    @property
    def opcode(self) -> bytes: ...  # noqa: D102
    @property
    def id(self) -> int: ...  # noqa: D102
    @property
    def shape(self) -> bytes: ...  # noqa: D102
    @property
    def operand_ids(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def called_computation_ids(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def dot_dimension_numbers(self) -> bytes: ...  # noqa: D102
    @property
    def literal(self) -> bytes | range: ...  # noqa: D102  just its length is asked for


class Frames(NamedTuple):
    """Where the instructions of a computation lie, and its other fields."""

    starts: list[int]
    ends: list[int]
    others: Fields


class Parsed(NamedTuple):
    """A computation taken apart; the frames where the parser has needed them."""

    id: int
    name: bytes
    root_id: int
    instructions: int
    noted: list[tuple[int, bytes, Line]]  # index, opcode and line of those that are not quiet
    ids: Sequence[int]  # of all instructions, if any is noted
    sure: bool  # whether each id is known to be that of the instruction with its index
    shape: Callable[[int, int], bytes]  # of the instruction of this index and this id
    frames: Frames | None


class Parser(Protocol):
    """Takes computations apart."""

    def parsed(self, data: Buffer, places: list[Span]) -> Iterable[Parsed]:
        """The computations that lie there, in order; Malformed where one is damaged."""


class PlainLine:
    """A line that we read ourselves; its parts when they are asked for."""

    __slots__ = ("_data", "_fields")

    def __init__(self, data: Buffer, start: int, end: int) -> None:
        self._data, self._fields = data, message(data, start, end)

    @property
    def opcode(self) -> bytes:  # noqa: D102
        return _bytes(self._data, self._fields, OPCODE)

    @property
    def id(self) -> int:  # noqa: D102
        return integer(self._fields, ID)

    @property
    def shape(self) -> bytes:  # noqa: D102
        return _bytes(self._data, self._fields, SHAPE)

    @property
    def operand_ids(self) -> list[int]:  # noqa: D102
        return integers(self._data, self._fields, OPERAND_IDS)

    @property
    def called_computation_ids(self) -> list[int]:  # noqa: D102
        return integers(self._data, self._fields, CALLED_IDS)

    @property
    def dot_dimension_numbers(self) -> bytes:  # noqa: D102
        return _bytes(self._data, self._fields, DOT_DIMENSIONS)

    @property
    def literal(self) -> range:  # noqa: D102
        return range(*(span(self._fields, LITERAL) or (0, 0)))


class PlainParser:
    """Ours."""

    def parsed(self, data: Buffer, places: list[Span]) -> Iterator[Parsed]:
        """The computations that lie there."""
        for place in places:
            framed = frames(data, *place)
            opcodes, ids, shapes = _columns(data, framed)
            noted: list[tuple[int, bytes, Line]] = [
                (number, opcode, PlainLine(data, framed.starts[number], framed.ends[number]))
                for number, opcode in enumerate(opcodes)
                if opcode not in QUIET_OPCODES
            ]
            shape = _shape_in(shapes)
            yield Parsed(*own_fields(data, framed), len(ids), noted, ids, True, shape, framed)


def _shape_in(shapes: list[bytes]) -> Callable[[int, int], bytes]:
    return lambda number, _: shapes[number]


def plain_line(data: Buffer, start: int, end: int) -> PlainLine:
    """An instruction's line, for which nobody has vouched: Malformed where it is damaged."""
    line = PlainLine(data, start, end)
    _ = line.operand_ids, line.called_computation_ids
    return line


def own_fields(data: Buffer, framed: Frames) -> tuple[int, bytes, int]:
    """A computation's id, name and root."""
    others = framed.others
    return (
        integer(others, COMPUTATION_ID),
        _bytes(data, others, COMPUTATION_NAME),
        integer(others, COMPUTATION_ROOT_ID),
    )


def _bytes(data: Buffer, fields: Fields, number: int) -> bytes:
    place = span(fields, number)
    return data[place[0] : place[1]] if place else b""


def frames(data: Buffer, start: int, end: int) -> Frames:
    """Go from instruction to instruction by their lengths."""
    starts: list[int] = []
    ends: list[int] = []
    others: Fields = {}
    at = last = start
    try:
        while at < end:
            last = at
            if data[at] == _INSTRUCTION_TAG:
                size = data[at + 1]
                at += 2
                if size > 0x7F:
                    size, at = short(data, at - 1, bits=SIZE_BITS)
                starts.append(at)
                at += size
                ends.append(at)
                continue
            number, value, at = field(data, at)
            if number == COMPUTATION_INSTRUCTION and isinstance(value, tuple):
                starts.append(value[0])
                ends.append(at)
            elif value is not None:
                others.setdefault(number, []).append(value)
    except IndexError:
        raise Malformed("cut short", last) from None
    if at != end:
        raise Malformed("a field longer than what holds it", last)
    return Frames(starts, ends, others)


def _columns(data: Buffer, framed: Frames) -> tuple[list[bytes], list[int], list[bytes]]:
    """The opcode, the id and the shape of each instruction."""
    opcodes: list[bytes] = []
    ids: list[int] = []
    shapes: list[bytes] = []
    high, ended, short_tags = _High(), _end().match, _SHORT_TAGS
    for start, end in zip(framed.starts, framed.ends, strict=True):
        at, member = start, 0
        opcode = shape = b""
        try:
            while at < end:
                tag, size = data[at], data[at + 1]
                if tag in short_tags and size < 0x80:
                    at += 2
                    if tag == _OPCODE_TAG:
                        opcode = data[at : at + size]
                    elif tag == _SHAPE_TAG:
                        shape = data[at : at + size]
                    at += size
                elif found := ended(data, at, end):
                    at = found.end()
                    raw = int.from_bytes(found[1], "little")
                    member = (raw & 0x7F | raw >> 1 & 0x3F80) + high[raw >> 16]
                else:
                    at = _past_other(data, at)
        except IndexError:
            at = -1
        if at != end:
            line = plain_line(data, start, end)
            opcode, member, shape = line.opcode, line.id, line.shape
        opcodes.append(opcode)
        ids.append(member)
        shapes.append(shape)
    return opcodes, ids, shapes


def _past_other(data: Buffer, at: int) -> int:
    """Where a field ends that is in no column; of one that is, beyond every end."""
    number, _, after = field(data, at)
    return sys.maxsize if number in _COLUMNS else after


class _High(dict[int, int]):
    """What the bytes of a varint from the third one on stand for; most ids share them."""

    def __missing__(self, raw: int) -> int:
        value, shift, rest = 0, 14, raw
        while rest:
            value |= (rest & 0x7F) << shift
            rest, shift = rest >> 8, shift + 7
        self[raw] = value
        return value
