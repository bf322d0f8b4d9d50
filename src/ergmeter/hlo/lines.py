"""Which instructions of a computation matter? The index, made line by line.

A parser turns instructions into lines: the one of protobuf where there is one, else ours. What
either can't read is read again by ours, which says where the damage is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

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
    QUIET,
    SHAPE,
    SPECIAL,
    Computation,
)
from ergmeter.hlo.wire import (
    SIZE_BITS,
    Buffer,
    Fields,
    Malformed,
    Span,
    Unparsed,
    field,
    integer,
    integers,
    message,
    short,
    span,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_INSTRUCTION_TAG = COMPUTATION_INSTRUCTION << 3 | 2


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
    lines: Sequence[Line]
    frames: Frames | None


class Parser(Protocol):
    """Takes a computation apart, or raises Unparsed."""

    def parsed(self, data: Buffer, place: Span) -> Parsed:
        """The computation that lies there."""


class _PlainLine(NamedTuple):
    opcode: bytes
    id: int
    shape: bytes
    operand_ids: list[int]
    called_computation_ids: list[int]
    dot_dimension_numbers: bytes
    literal: range


class PlainParser:
    """Ours."""

    def parsed(self, data: Buffer, place: Span) -> Parsed:
        """The computation that lies there."""
        framed = frames(data, *place)
        places = zip(framed.starts, framed.ends, strict=True)
        return from_frames(data, framed, [plain_line(data, *one) for one in places])


def plain_line(data: Buffer, start: int, end: int) -> Line:
    """An instruction's line, read by ourselves."""
    fields = message(data, start, end)
    return _PlainLine(
        _bytes(data, fields, OPCODE),
        integer(fields, ID),
        _bytes(data, fields, SHAPE),
        integers(data, fields, OPERAND_IDS),
        integers(data, fields, CALLED_IDS),
        _bytes(data, fields, DOT_DIMENSIONS),
        range(*(span(fields, LITERAL) or (0, 0))),
    )


def from_frames(data: Buffer, framed: Frames, lines: Sequence[Line]) -> Parsed:
    """A computation whose own fields are read by ourselves."""
    others = framed.others
    return Parsed(
        integer(others, COMPUTATION_ID),
        _bytes(data, others, COMPUTATION_NAME),
        integer(others, COMPUTATION_ROOT_ID),
        lines,
        framed,
    )


def _bytes(data: Buffer, fields: Fields, number: int) -> bytes:
    place = span(fields, number)
    return data[place[0] : place[1]] if place else b""


class Index(NamedTuple):
    """A computation as it is listed; the rest is made if it is not idle or if somebody asks."""

    id: int
    instructions: int
    literal_bytes: int
    computation: Computation | None


def index(data: Buffer, place: Span, parser: Parser, plain: Parser) -> Index:
    """Index the computation that lies there."""
    try:
        parsed = parser.parsed(data, place)
    except Unparsed:
        parsed = plain.parsed(data, place)
    ids: list[int] = []
    noted: list[tuple[int, int, Line]] = []
    literal_bytes = 0
    for line in parsed.lines:
        kind = KINDS.get(line.opcode, OTHER)
        if kind == CONSTANT:
            literal_bytes += len(line.literal)
        elif kind != QUIET:
            noted.append((len(ids), kind, line))
        ids.append(line.id)
    found = None
    if noted:
        places = _Places(data, place, parsed.frames)
        found = _computation(parsed, places)
        dots = _add_calls(found, noted)
        if dots:
            _add_dots(found, dots, parsed.lines, places.number(ids))
    return Index(parsed.id, len(ids), literal_bytes, None if found and found.idle else found)


def idle_computation(data: Buffer, place: Span) -> Computation:
    """A computation that neither multiplies nor calls; a loop's condition is one."""
    parsed = PlainParser().parsed(data, place)
    return _computation(parsed, _Places(data, place, parsed.frames))


def _computation(parsed: Parsed, places: _Places) -> Computation:
    name = parsed.name.decode(errors="replace")
    return Computation(id=parsed.id, name=name, root_id=parsed.root_id, places=places)


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
                size, at = short(data, at + 1, bits=SIZE_BITS)
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


class _Places:
    """Places by id and index; frames and ids are gathered when the first one is asked for."""

    __slots__ = ("_data", "_framed", "_place", "ids")

    def __init__(self, data: Buffer, place: Span, framed: Frames | None) -> None:
        self._data, self._place, self._framed = data, place, framed
        self.ids: dict[int, int] | None = None

    def by_id(self, member: int) -> Span | None:
        if self.ids is None:
            lines = PlainParser().parsed(self._data, self._place).lines
            self.number([line.id for line in lines])
        index = (self.ids or {}).get(member)
        return None if index is None else self.by_index(index)

    def by_index(self, index: int) -> Span:
        if self._framed is None:
            self._framed = frames(self._data, *self._place)
        return self._framed.starts[index], self._framed.ends[index]

    def number(self, ids: list[int]) -> dict[int, int]:
        """Note the index of each id."""
        self.ids = dict(zip(ids, range(len(ids)), strict=True))
        if len(self.ids) != len(ids):
            raise Malformed("two instructions of one id in a computation", self._place[0])
        return self.ids


def _add_calls(found: Computation, noted: list[tuple[int, int, Line]]) -> list[tuple[int, Line]]:
    """Note the instructions that call or are special, and leave the dots."""
    dots = []
    for number, kind, line in noted:
        if kind == DOT:
            dots.append((number, line))
        elif kind == SPECIAL:
            found.special.append(number)
        elif kind == APPLYING:
            found.applied += line.called_computation_ids
        else:
            for callee in line.called_computation_ids:
                found.calls += (callee, number)
    return dots


def _add_dots(
    found: Computation,
    dots: list[tuple[int, Line]],
    lines: Sequence[Line],
    numbers: dict[int, int],
) -> None:
    """Note dots, those of the same shapes together; one without its operand is a special case."""
    for number, line in dots:
        operands = line.operand_ids
        operand = numbers.get(operands[0]) if operands else None
        if operand is None:
            found.special.append(number)
            continue
        shapes = (line.shape, lines[operand].shape, line.dot_dimension_numbers)
        known = found.dots.get(shapes)
        if known:
            known[0] += 1
        else:
            found.dots[shapes] = [1, number]
