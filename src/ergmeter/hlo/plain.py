"""The plain-Python parser of computations, and the types that every parser returns.

An object for each instruction takes longer than parsing it. So a parser returns columns (opcodes
and ids of a computation) and only the instructions that matter one by one.

Every field of every instruction is checked, so that damage is found wherever it is. Unusual
instructions are left to `message`, which reports the offset of the damage.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from ergmeter.hlo.module import (
    APPLYING,
    CALLED_IDS,
    COMPUTATION_ID,
    COMPUTATION_INSTRUCTION,
    COMPUTATION_NAME,
    COMPUTATION_ROOT_ID,
    CONSTANT,
    DOT,
    DOT_DIMENSIONS,
    ID,
    KINDS,
    LITERAL,
    OPCODE,
    OPERAND_IDS,
    OTHER,
    QUIET_OPCODES,
    SHAPE,
    SPECIAL,
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

    from ergmeter.hlo.module import Computation

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
    """A pattern of the end of nearly every instruction.

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


class InstructionLine(Protocol):
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

    def line(self, data: Buffer, number: int) -> PlainLine:
        """The line of this index."""
        return PlainLine(data, self.starts[number], self.ends[number])

    def row(self, data: Buffer, number: int) -> bytes:
        """The bytes of the instruction of this index."""
        return data[self.starts[number] : self.ends[number]]


# The index, the id of the left operand if there is one, shape and dimension numbers.
Dot: TypeAlias = "tuple[int, int | None, bytes, bytes]"


class NotedInstructions:
    """The instructions of a computation that matter, most of them by their index."""

    __slots__ = ("applied", "calls", "dots", "literal_bytes", "special")

    def __init__(self) -> None:
        self.dots: list[Dot] = []
        self.special: list[int] = []
        self.calls: list[int] = []  # callee, instruction; callee, instruction; ...
        self.applied: list[int] = []
        self.literal_bytes = 0

    @property
    def matters(self) -> bool:
        """Whether the computation multiplies or calls: most are a sum or a comparison."""
        return bool(self.dots or self.special or self.calls or self.applied)

    def add(self, number: int, opcode: bytes, line: InstructionLine) -> None:
        """Note an instruction."""
        kind = KINDS.get(opcode, OTHER)
        if kind == DOT:
            left = next(iter(line.operand_ids), None)
            self.dots.append((number, left, line.shape, line.dot_dimension_numbers))
        elif kind == CONSTANT:
            self.literal_bytes += len(line.literal)
        elif kind == SPECIAL:
            self.special.append(number)
        elif kind == APPLYING:
            self.applied += line.called_computation_ids
        else:
            for callee in line.called_computation_ids:
                self.calls += (callee, number)

    def extend(self, later: NotedInstructions) -> None:
        """Appends the notes of later instructions."""
        self.dots += later.dots
        self.special += later.special
        self.calls += later.calls
        self.applied += later.applied
        self.literal_bytes += later.literal_bytes


class Parsed(NamedTuple):
    """A computation taken apart."""

    id: int
    name: bytes
    root_id: int
    instructions: int
    noted: NotedInstructions
    ids: Sequence[int]  # of all instructions
    sure: bool  # whether each id is known to be that of the instruction with its index
    shapes: Callable[[list[int], list[int]], list[bytes]]  # by indices and ids
    frames: Frames | None = None  # where the parser has needed them; else
    row: Callable[[int], bytes] | None = None  # an instruction's bytes


class Index(NamedTuple):
    """The summary of a computation; `computation` is None if it is idle."""

    id: int
    instructions: int
    literal_bytes: int
    computation: Computation | None


class Parser(Protocol):
    """Takes computations apart."""

    def parsed(self, data: Buffer, places: list[Span]) -> Iterable[Parsed | Index]:
        """Parses the computations at these spans, in order. Raises Malformed if one is damaged.

        One that is seen to be idle at once may come as it is listed.
        """


class PlainLine:
    """An instruction read by the plain parser; its parts are parsed at access."""

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
    """The plain-Python parser."""

    def parsed(self, data: Buffer, places: list[Span]) -> Iterator[Parsed]:
        """Parses the computations at these spans."""
        for where in places:
            framed = frames(data, *where)
            opcodes, ids, shapes = _columns(data, framed)
            noted = NotedInstructions()
            for number, opcode in enumerate(opcodes):
                if opcode not in QUIET_OPCODES:
                    noted.add(number, opcode, framed.line(data, number))
            own = *own_fields(data, framed), len(ids)
            yield Parsed(*own, noted, ids, True, partial(_by_number, shapes), framed)


def _by_number(shapes: list[bytes], numbers: list[int], _: list[int]) -> list[bytes]:
    return [shapes[number] for number in numbers]


def plain_line(data: Buffer, start: int, end: int) -> PlainLine:
    """Parses and checks an instruction. Raises Malformed if it is damaged."""
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
    where = span(fields, number)
    return data[where[0] : where[1]] if where else b""


def frames(data: Buffer, start: int, end: int) -> Frames:
    """Finds the instructions of a computation by their lengths."""
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
                elif match := ended(data, at, end):
                    at = match.end()
                    raw = int.from_bytes(match[1], "little")
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
    """The end of a field that is in no column; sys.maxsize for one that is."""
    number, _, after = field(data, at)
    return sys.maxsize if number in _COLUMNS else after


class _High(dict[int, int]):
    """Caches the value of a varint's bytes from the third on; most ids share them."""

    def __missing__(self, raw: int) -> int:
        value, shift, rest = 0, 14, raw
        while rest:
            value |= (rest & 0x7F) << shift
            rest, shift = rest >> 8, shift + 7
        self[raw] = value
        return value
