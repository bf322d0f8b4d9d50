"""Computations read by protobuf's C parser, with a schema of the few fields that an index needs.

The schema is built at run time under a package name of ours: there is no generated code that pins
a protobuf version, and no clash with the copy of hlo.proto that tensorflow or torch-neuronx loads.

To ask each instruction for its opcode takes Python three times as long as parsing takes protobuf.
So all is parsed twice. Once as rows, of which just those that matter are looked at. And once as
columns: a computation's instructions are declared to be a single message, which protobuf merges
from all of them, and its opcodes and ids a repeated field each, so that they come out as lists.

An instruction without an opcode and another with two, which no compiler writes, would put the
columns out of step unseen. So each row that the columns point to has to have the opcode that they
say: as the columns hold every opcode, none that matters can then be elsewhere. An instruction
without one matters if it calls, hence the callees of those rows have to be all there are. And an
id that is asked for has to be that of the row it leads to.

Two traps: protobuf keeps a copy of what it does not know, so instructions that hold a literal are
not given to it; and where it runs without its C parser (3.20 on Python 3.11) it is ten times
slower than our own, so that it is not used.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ergmeter.hlo.module import (
    CALLED_IDS,
    COMPUTATION_ID,
    COMPUTATION_INSTRUCTION,
    COMPUTATION_NAME,
    COMPUTATION_ROOT_ID,
    DOT_DIMENSIONS,
    ID,
    LITERAL,
    MODULE_COMPUTATION,
    NAME,
    OPCODE,
    OPERAND_IDS,
    QUIET_OPCODES,
    SHAPE,
)
from ergmeter.hlo.plain import Parsed, PlainParser, frames, own_fields, plain_line
from ergmeter.hlo.wire import Unparsed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ergmeter.hlo.plain import Frames, Line, Parser
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


class _Lines(NamedTuple):
    """The instructions of a computation, or of a part of one."""

    rows: Any  # by index
    noted: list[tuple[int, bytes, Line]]
    ids: Sequence[int]
    sure: bool


class _Part(NamedTuple):
    """Instructions of a computation that are parsed at once, or a large one."""

    begin: int
    first: int
    last: int
    large: bool


class _Chunks:
    """The rows of all parts."""

    def __init__(self) -> None:
        self._parts: list[Sequence[Any]] = []
        self._firsts: list[int] = []

    def add(self, first: int, part: Sequence[Any]) -> None:
        """Append rows, of which the first has this index."""
        self._parts.append(part)
        self._firsts.append(first)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        number = bisect_right(self._firsts, index) - 1
        return self._parts[number][index - self._firsts[number]]


class _ProtobufParser:
    def __init__(self) -> None:
        from google.protobuf.message import DecodeError  # noqa: PLC0415

        self._kinds = _classes(_ROWS), _classes(_COLUMNS)
        self._refusal: type[Exception] = DecodeError
        self._plain = PlainParser()

    def parsed(self, data: Buffer, places: list[Span]) -> Iterator[Parsed]:
        """The computations that lie there; what protobuf can't read is read by ourselves."""
        for chunk in _chunks(places):
            try:
                many = len(chunk) > 1 or chunk[0][1] - chunk[0][0] <= _CHUNK_BYTES
                found = self._together(data, chunk) if many else [self._large(data, chunk[0])]
            except Unparsed:
                found = self._plain.parsed(data, chunk)
            yield from found

    def _together(self, data: Buffer, places: list[Span]) -> Iterable[Parsed]:
        encoded = data[_begin(data, places[0]) : places[-1][1]]
        rows, columns = self._both(encoded, "Module")
        if len(rows.computations) != len(places):
            raise Unparsed
        return [
            _idle(row, column.instructions) or _parsed(row, _lines(row, column))
            for row, column in zip(rows.computations, columns.computations, strict=True)
        ]

    def _large(self, data: Buffer, place: Span) -> Parsed:
        """A computation that is parsed a part at a time, without its large instructions."""
        framed = frames(data, *place)
        rows = _Chunks()
        noted: list[tuple[int, bytes, Line]] = []
        ids: list[int] = []
        sure = True
        for part in _parts(place[0], framed):
            lines = self._part(data, part, framed)
            rows.add(part.first, lines.rows)
            noted += [(part.first + number, opcode, line) for number, opcode, line in lines.noted]
            ids += lines.ids
            sure = sure and lines.sure
        shape = _shape_in(_Lines(rows, noted, ids, sure=sure))
        return Parsed(*own_fields(data, framed), len(ids), noted, ids, sure, shape, framed)

    def _part(self, data: Buffer, part: _Part, framed: Frames) -> _Lines:
        if part.large:
            line = plain_line(data, framed.starts[part.first], framed.ends[part.first])
            return _Lines([line], [(0, line.opcode, line)], [line.id], sure=True)
        encoded = data[part.begin : framed.ends[part.last - 1]]
        rows, columns = self._both(encoded, "Computation")
        if len(rows.instructions) != part.last - part.first:
            raise Unparsed
        return _lines(rows, columns)

    def _both(self, encoded: bytes, message: str) -> tuple[Any, Any]:
        try:
            rows, columns = (kind[message].FromString(encoded) for kind in self._kinds)
        except self._refusal:
            raise Unparsed from None
        return rows, columns


def _lines(rows: Any, columns: Any) -> _Lines:  # noqa: ANN401  made at run time
    """What matters, by the columns; row by row where these are not in step."""
    lines, merged = rows.instructions, columns.instructions
    opcodes, ids = merged.opcode[:], merged.id[:]
    if len(lines) == len(opcodes) == len(ids):
        noted = [
            (number, opcode, lines[number])
            for number, opcode in enumerate(opcodes)
            if opcode not in QUIET_OPCODES
        ]
        if _in_step(noted, len(merged.called_computation_ids)):
            return _Lines(lines, noted, ids, sure=False)
    every = [(number, line.opcode, line) for number, line in enumerate(lines)]
    noted = [one for one in every if one[1] not in QUIET_OPCODES]
    return _Lines(lines, noted, [line.id for line in lines], sure=True)


def _in_step(noted: list[tuple[int, bytes, Any]], callees: int) -> bool:
    for _, opcode, line in noted:
        if not opcode or line.opcode != opcode:
            return False
        callees -= len(line.called_computation_ids)
    return callees == 0


def _idle(row: Any, merged: Any) -> Parsed | None:  # noqa: ANN401
    """A computation that neither multiplies nor calls, which most are: there is less to ask for."""
    if merged.called_computation_ids or not QUIET_OPCODES.issuperset(merged.opcode):
        return None
    return Parsed(row.id, b"", 0, len(row.instructions), [], (), False, _no_shape, None)


def _no_shape(*_: int) -> bytes:
    raise Unparsed


def _parsed(row: Any, lines: _Lines) -> Parsed:  # noqa: ANN401
    own = row.id, row.name, row.root_id, len(lines.ids)
    return Parsed(*own, lines.noted, lines.ids, lines.sure, _shape_in(lines), None)


def _shape_in(lines: _Lines) -> Callable[[int, int], bytes]:
    rows, sure = lines.rows, lines.sure

    def shape(number: int, member: int) -> bytes:
        line = rows[number]
        if not sure and (line.id != member or not member):
            raise Unparsed
        found: bytes = line.shape
        return found

    return shape


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


# Field by field: name, number, kind (bytes, int64 or a message of this schema), and how often.
_REPEATED, _OPTIONAL = "repeated", "optional"
_SKIPPED = (
    # Nobody asks for these, but every instruction has them, and what is in no schema takes
    # protobuf longer.
    ("name", NAME, "bytes", _OPTIONAL),
    ("metadata", 7, "bytes", _OPTIONAL),
    ("frontend_attributes", 68, "bytes", _OPTIONAL),
    ("statistics", 82, "bytes", _OPTIONAL),
)
_ROWS = {
    "Line": (
        ("opcode", OPCODE, "bytes", _OPTIONAL),
        ("id", ID, "int64", _OPTIONAL),
        ("shape", SHAPE, "bytes", _OPTIONAL),
        ("literal", LITERAL, "bytes", _OPTIONAL),
        ("dot_dimension_numbers", DOT_DIMENSIONS, "bytes", _OPTIONAL),
        ("operand_ids", OPERAND_IDS, "int64", _REPEATED),
        ("called_computation_ids", CALLED_IDS, "int64", _REPEATED),
        *_SKIPPED,
    ),
    "Computation": (
        ("name", COMPUTATION_NAME, "bytes", _OPTIONAL),
        ("id", COMPUTATION_ID, "int64", _OPTIONAL),
        ("root_id", COMPUTATION_ROOT_ID, "int64", _OPTIONAL),
        ("instructions", COMPUTATION_INSTRUCTION, "Line", _REPEATED),
    ),
    "Module": (("computations", MODULE_COMPUTATION, "Computation", _REPEATED),),
}
_COLUMNS = {
    "Lines": (
        ("opcode", OPCODE, "bytes", _REPEATED),
        ("id", ID, "int64", _REPEATED),
        ("shape", SHAPE, "bytes", _OPTIONAL),
        ("called_computation_ids", CALLED_IDS, "int64", _REPEATED),
        ("operand_ids", OPERAND_IDS, "bytes", _OPTIONAL),
        ("dimensions", 14, "bytes", _OPTIONAL),
        *_SKIPPED,
    ),
    "Computation": (("instructions", COMPUTATION_INSTRUCTION, "Lines", _OPTIONAL),),
    "Module": (("computations", MODULE_COMPUTATION, "Computation", _REPEATED),),
}


def _classes(schema: dict[str, tuple[tuple[str, int, str, str], ...]]) -> dict[str, Any]:
    """The message classes of a schema."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # noqa: PLC0415

    field = descriptor_pb2.FieldDescriptorProto
    kinds = {"bytes": field.TYPE_BYTES, "int64": field.TYPE_INT64}
    labels = {_REPEATED: field.LABEL_REPEATED, _OPTIONAL: field.LABEL_OPTIONAL}
    file = descriptor_pb2.FileDescriptorProto(
        name="ergmeter/hlo.proto", package="ergmeter.hlo", syntax="proto2"
    )
    for message, fields in schema.items():
        made = file.message_type.add(name=message)
        for name, number, kind, often in fields:
            added = made.field.add(name=name, number=number, label=labels[often])
            added.type = kinds.get(kind, field.TYPE_MESSAGE)
            if kind not in kinds:
                added.type_name = f".ergmeter.hlo.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ergmeter.hlo.{name}"))
        for name in schema
    }
