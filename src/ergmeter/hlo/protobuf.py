"""Computations read by protobuf's C parser, with a schema of the few fields that an index needs.

To ask each instruction for its opcode takes Python three times as long as parsing takes protobuf.
So all is parsed twice. Once as columns: a computation's instructions are declared to be a single
message, which protobuf merges from all of them, and its opcodes and ids a repeated field each, so
that they come out as lists. And once as rows, which are declared to be bytes, so that they stay
unparsed but for those that matter.

Two traps: protobuf keeps a copy of what it does not know, so instructions that hold a literal are
not given to it; and where it runs without its C parser (3.20 on Python 3.11) it is ten times
slower than our own, so that it is not used.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ergmeter.hlo.columns import Columns, Lines
from ergmeter.hlo.module import MODULE_COMPUTATION, QUIET_OPCODES
from ergmeter.hlo.plain import Index, Noted, Parsed, PlainParser, frames, own_fields, plain_line
from ergmeter.hlo.schema import COLUMNS, ROWS, classes
from ergmeter.hlo.wire import Unparsed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ergmeter.hlo.plain import Frames, Parser
    from ergmeter.hlo.wire import Buffer, Span

_CHUNK_BYTES = 16 << 20  # parsed at once; protobuf takes about six times that in memory
_LARGE_BYTES = 1 << 14  # an instruction of that size holds a literal
_MAX_HEAD_BYTES = 6  # of a computation: a tag and a length
_COMPUTATION_TAG = MODULE_COMPUTATION << 3 | 2


@lru_cache(maxsize=1)
def parser() -> Parser | None:
    """The parser, or None where protobuf is missing or has no C parser."""
    try:
        from google.protobuf.internal import api_implementation  # noqa: PLC0415

        if api_implementation.Type() == "python":
            return None
        return _ProtobufParser()
    except (ImportError, AttributeError, TypeError):
        return None


class _Part(NamedTuple):
    """Instructions of a computation that are parsed at once, or a large one."""

    begin: int
    first: int
    last: int
    large: bool


class _ProtobufParser:
    def __init__(self) -> None:
        from google.protobuf.message import DecodeError  # noqa: PLC0415

        self._rows, self._merged = classes(ROWS), classes(COLUMNS)
        self._columns = Columns(self._merged["Picked"])
        self._refusal: type[Exception] = DecodeError
        self._plain = PlainParser()

    def parsed(self, data: Buffer, places: list[Span]) -> Iterator[Parsed | Index]:
        """The computations that lie there; what protobuf can't read is read by ourselves."""
        found: Iterable[Parsed | Index]
        for chunk in _chunks(places):
            try:
                many = len(chunk) > 1 or chunk[0][1] - chunk[0][0] <= _CHUNK_BYTES
                found = self._together(data, chunk) if many else [self._large(data, chunk[0])]
            except (Unparsed, self._refusal):
                found = self._plain.parsed(data, chunk)
            yield from found

    def _together(self, data: Buffer, places: list[Span]) -> Iterable[Parsed | Index]:
        encoded = data[_begin(data, places[0]) : places[-1][1]]
        rows = self._rows["Module"].FromString(encoded).computations
        merged = self._merged["Module"].FromString(encoded).computations
        if len(rows) != len(places):
            raise Unparsed
        return [self._indexed(row, one.instructions) for row, one in zip(rows, merged, strict=True)]

    def _indexed(self, computation: Any, merged: Any) -> Parsed | Index:  # noqa: ANN401
        rows, opcodes = computation.instructions, merged.opcode[:]
        if QUIET_OPCODES.issuperset(opcodes) and not merged.called_computation_ids:
            return Index(computation.id, len(rows), 0, None)  # as most: there is less to ask for
        noted = Noted()
        ids, sure = self._note(noted, Lines(merged, opcodes, range(len(rows)), rows.__getitem__))
        shapes = self._by_row if sure else self._columns.shapes
        return Parsed(
            id=computation.id,
            name=computation.name,
            root_id=computation.root_id,
            instructions=len(rows),
            noted=noted,
            ids=ids,
            sure=sure,
            shapes=partial(shapes, rows.__getitem__),
            row=rows.__getitem__,
        )

    def _large(self, data: Buffer, place: Span) -> Parsed:
        """A computation that is parsed a part at a time, without its large instructions."""
        framed = frames(data, *place)
        noted = Noted()
        ids: list[int] = []
        sure = True
        for part in _parts(place[0], framed):
            if part.large:
                line = plain_line(data, framed.starts[part.first], framed.ends[part.first])
                noted.add(part.first, line.opcode, line)
                ids.append(line.id)
                continue
            encoded = data[part.begin : framed.ends[part.last - 1]]
            merged = self._merged["Computation"].FromString(encoded).instructions
            numbers, row = range(part.first, part.last), partial(framed.row, data)
            found, known = self._note(noted, Lines(merged, merged.opcode[:], numbers, row))
            ids += found
            sure = sure and known

        def shapes(numbers: list[int], members: list[int]) -> list[bytes]:
            lines = [framed.line(data, number) for number in numbers]
            if not sure and (0 in members or [line.id for line in lines] != members):
                raise Unparsed
            return [line.shape for line in lines]

        own = *own_fields(data, framed), len(ids)
        return Parsed(*own, noted, ids, sure, shapes, frames=framed)

    def _note(self, noted: Noted, lines: Lines) -> tuple[Sequence[int], bool]:
        """Note what matters by the columns; row by row where these are not in step.

        Gives the ids, and whether each is known to be that of its row.
        """
        try:
            noted.extend(self._columns.noted(lines))
        except Unparsed:
            return self._note_rows(noted, lines), True
        return lines.merged.id[:], False

    def _note_rows(self, noted: Noted, lines: Lines) -> list[int]:
        ids = []
        for number in lines.numbers:
            line = self._rows["Line"].FromString(lines.row(number))
            if line.opcode not in QUIET_OPCODES:
                noted.add(number, line.opcode, line)
            ids.append(line.id)
        return ids

    def _by_row(self, row: Callable[[int], bytes], numbers: list[int], _: list[int]) -> list[bytes]:
        return [self._rows["Line"].FromString(row(number)).shape for number in numbers]


def _chunks(places: list[Span]) -> Iterator[list[Span]]:
    """Computations that follow each other, as many as are parsed at once; a large one alone."""
    chunk: list[Span] = []
    for place in places:
        if chunk and (
            place[1] - chunk[0][0] > _CHUNK_BYTES or place[0] - chunk[-1][1] > _MAX_HEAD_BYTES
        ):
            yield chunk
            chunk = []
        chunk.append(place)
    if chunk:
        yield chunk


def _begin(data: Buffer, place: Span) -> int:
    """Where the head of a computation begins, if it is written as usual."""
    size = place[1] - place[0]
    begin = place[0] - max(1, -(-size.bit_length() // 7)) - 1
    if data[begin] != _COMPUTATION_TAG:  # a length that is longer than need be
        raise Unparsed
    return begin


def _parts(begin: int, framed: Frames) -> Iterator[_Part]:
    starts, ends, _ = framed
    sizes = map(int.__sub__, ends, starts)
    large = [index for index, size in enumerate(sizes) if size > _LARGE_BYTES]
    first = 0
    for stop in [*large, len(starts)]:
        while first < stop:
            last = max(first + 1, bisect_right(ends, begin + _CHUNK_BYTES, first, stop))
            yield _Part(begin, first, last, large=False)
            first, begin = last, ends[last - 1]
        if stop < len(starts):
            yield _Part(begin, stop, stop + 1, large=True)
            first, begin = stop + 1, ends[stop]
