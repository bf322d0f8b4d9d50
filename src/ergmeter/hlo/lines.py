"""Which instructions of a computation matter? The index, made from what a parser gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ergmeter.hlo.module import APPLYING, CONSTANT, DOT, ID, KINDS, OTHER, SPECIAL, Computation
from ergmeter.hlo.plain import PlainParser, frames
from ergmeter.hlo.wire import Buffer, Malformed, Span, Unparsed, integer, message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.hlo.plain import Line, Parsed


class Index(NamedTuple):
    """A computation as it is listed; the rest is made if it is not idle or if somebody asks."""

    id: int
    instructions: int
    literal_bytes: int
    computation: Computation | None


def index(data: Buffer, place: Span, parsed: Parsed) -> Index:
    """Index the computation that lies there."""
    if not parsed.noted:
        return Index(parsed.id, parsed.instructions, 0, None)
    places = _Places(data, place, parsed)
    found = _computation(parsed, places)
    literal_bytes = _add_noted(found, parsed, places)
    return Index(parsed.id, parsed.instructions, literal_bytes, None if found.idle else found)


def idle_computation(data: Buffer, place: Span) -> Computation:
    """A computation that neither multiplies nor calls; a loop's condition is one."""
    (parsed,) = PlainParser().parsed(data, [place])
    return _computation(parsed, _Places(data, place, parsed))


def _computation(parsed: Parsed, places: _Places) -> Computation:
    name = parsed.name.decode(errors="replace")
    return Computation(id=parsed.id, name=name, root_id=parsed.root_id, places=places)


class _Places:
    """Places by id and index; frames and ids are gathered when the first one is asked for."""

    __slots__ = ("_data", "_framed", "_ids", "_place", "_sure")

    def __init__(self, data: Buffer, place: Span, parsed: Parsed) -> None:
        self._data, self._place, self._framed = data, place, parsed.frames
        self._sure = parsed.sure
        self._ids: dict[int, int] | None = None

    def by_id(self, member: int) -> Span | None:
        if self._ids is None:
            (parsed,) = PlainParser().parsed(self._data, [self._place])
            self._sure = True
            self.number(parsed.ids)
        index = (self._ids or {}).get(member)
        place = None if index is None else self.by_index(index)
        if not self._sure and (not place or not member or self._id(place) != member):
            raise Unparsed
        return place

    def by_index(self, index: int) -> Span:
        if self._framed is None:
            self._framed = frames(self._data, *self._place)
        return self._framed.starts[index], self._framed.ends[index]

    def number(self, ids: Sequence[int]) -> dict[int, int]:
        """Note the index of each id; not of 0 if several have it, which are those without an id."""
        numbers = self._ids = dict(zip(ids, range(len(ids)), strict=True))
        if len(numbers) != len(ids):
            if not self._sure:
                raise Unparsed
            without = ids.count(0)
            numbers.pop(0, None)
            if len(numbers) + without != len(ids):
                raise Malformed("two instructions of one id in a computation", self._place[0])
        return numbers

    def _id(self, place: Span) -> int:
        return integer(message(self._data, *place), ID)


def _add_noted(found: Computation, parsed: Parsed, places: _Places) -> int:
    """Note the instructions that matter; the bytes of literals."""
    literal_bytes = 0
    dots = []
    for number, opcode, line in parsed.noted:
        kind = KINDS.get(opcode, OTHER)
        if kind == DOT:
            dots.append((number, line))
        elif kind == CONSTANT:
            literal_bytes += len(line.literal)
        elif kind == SPECIAL:
            found.special.append(number)
        elif kind == APPLYING:
            found.applied += line.called_computation_ids
        else:
            for callee in line.called_computation_ids:
                found.calls += (callee, number)
    if dots:
        _add_dots(found, dots, parsed, places.number(parsed.ids))
    return literal_bytes


def _add_dots(
    found: Computation, dots: list[tuple[int, Line]], parsed: Parsed, numbers: dict[int, int]
) -> None:
    """Note dots, those of the same shapes together; one without its operand is a special case."""
    for number, line in dots:
        operands = line.operand_ids
        operand = numbers.get(operands[0]) if operands else None
        if operand is None:
            found.special.append(number)
            continue
        shapes = (line.shape, parsed.shape(operand, operands[0]), line.dot_dimension_numbers)
        known = found.dots.get(shapes)
        if known:
            known[0] += 1
        else:
            found.dots[shapes] = [1, number]
