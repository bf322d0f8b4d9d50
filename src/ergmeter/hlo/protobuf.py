"""Parses computations with protobuf's C parser and a schema of the few fields an index needs.

Asking each instruction for its opcode takes Python three times as long as parsing takes protobuf.
So everything is parsed twice. As columns: a computation's instructions are declared as a single
message, which protobuf merges, with opcodes and ids as repeated fields that come out as lists. As
rows: the instructions are declared as bytes, so that only those that matter are parsed.

protobuf copies unknown fields, so instructions that hold a literal are not passed to it. Without
its C parser (3.20 on Python 3.11) it is ten times slower than the plain reader, and is not used.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

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
    MODULE_COMPUTATION,
    NAME,
    OPCODE,
    OPERAND_IDS,
    OTHER,
    PARAMETER_NUMBER,
    QUIET_OPCODES,
    SHAPE,
    SPECIAL,
)
from ergmeter.hlo.plain import (
    Index,
    NotedInstructions,
    Parsed,
    PlainParser,
    frames,
    own_fields,
    plain_line,
)
from ergmeter.hlo.wire import Unparsed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ergmeter.hlo.plain import Dot, Frames, Parser
    from ergmeter.hlo.wire import Buffer, Span

# The fields of a module that protobuf is asked for, as rows and as columns.
#
# The classes are built at run time under a package name of ours. So no generated code pins a
# protobuf version or clashes with the hlo.proto that tensorflow or torch-neuronx loads.


# Field by field: name, number, kind (bytes, int64 or a message of this schema), and how often.
Schema: TypeAlias = dict[str, tuple[tuple[str, int, str, str], ...]]

_REPEATED, _OPTIONAL = "repeated", "optional"
_SKIPPED = (
    # Nobody asks for these, but all or many instructions have them, and what is in no schema
    # takes protobuf longer.
    ("name", NAME, "bytes", _OPTIONAL),
    ("metadata", 7, "bytes", _OPTIONAL),
    ("parameter_number", PARAMETER_NUMBER, "int64", _OPTIONAL),
    ("dimensions", 14, "bytes", _OPTIONAL),
    ("slice_dimensions", 17, "bytes", _OPTIONAL),
    ("precision_config", 51, "bytes", _OPTIONAL),
    ("frontend_attributes", 68, "bytes", _OPTIONAL),
    ("statistics", 82, "bytes", _OPTIONAL),
)
ROWS: Schema = {
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
        ("instructions", COMPUTATION_INSTRUCTION, "bytes", _REPEATED),
    ),
    "Module": (("computations", MODULE_COMPUTATION, "Computation", _REPEATED),),
}
COLUMNS: Schema = {
    "Lines": (  # all of a computation's: of most just the opcode and the id are asked for
        ("opcode", OPCODE, "bytes", _REPEATED),
        ("id", ID, "int64", _REPEATED),
        ("shape", SHAPE, "bytes", _OPTIONAL),
        ("literal", LITERAL, "bytes", _OPTIONAL),
        ("dot_dimension_numbers", DOT_DIMENSIONS, "bytes", _OPTIONAL),
        ("operand_ids", OPERAND_IDS, "int64", _REPEATED),  # so that damage is found
        ("called_computation_ids", CALLED_IDS, "int64", _REPEATED),
        *_SKIPPED,
    ),
    "Picked": (
        ("opcode", OPCODE, "bytes", _REPEATED),
        ("id", ID, "int64", _REPEATED),
        ("shape", SHAPE, "bytes", _REPEATED),
        ("literal", LITERAL, "bytes", _REPEATED),
        ("dot_dimension_numbers", DOT_DIMENSIONS, "bytes", _REPEATED),
        ("operand_ids", OPERAND_IDS, "int64", _REPEATED),
        ("called_computation_ids", CALLED_IDS, "int64", _REPEATED),
        *_SKIPPED,
    ),
    "Computation": (("instructions", COMPUTATION_INSTRUCTION, "Lines", _OPTIONAL),),
    "Module": (("computations", MODULE_COMPUTATION, "Computation", _REPEATED),),
}


def classes(schema: Schema) -> dict[str, Any]:
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


# An instruction without an opcode and another with two would shift the columns unnoticed. So the
# rows that the columns point to become columns once more, with a mark behind each. If every other
# opcode is a mark, each row has one opcode, and it must be the one in the columns. An instruction
# without an opcode matters if it calls, so the callees of those rows must be all there are. An id
# that is asked for must be that of its row.


# The two name a computation, which nothing is to be done with; but here all callees are counted.
_CALLING_NOTHING = QUIET_OPCODES - {b"async-update", b"async-done"}
_MARK, _MARK_ID = b"\xff", -1  # a file that has one of them is read another way

_Value = TypeVar("_Value", bytes, int)


class Lines(NamedTuple):
    """Instructions that follow each other: their columns, their indices, and each one's bytes."""

    merged: Any  # a message made at run time
    opcodes: list[bytes]
    numbers: range
    row: Callable[[int], bytes]


class ColumnReader:
    """Makes columns of rows."""

    def __init__(self, message: Any) -> None:  # noqa: ANN401  made at run time
        self._message = message
        self._mark: bytes = message(
            opcode=[_MARK],
            id=[_MARK_ID],
            shape=[_MARK],
            literal=[_MARK],
            dot_dimension_numbers=[_MARK],
            operand_ids=[_MARK_ID],
            called_computation_ids=[_MARK_ID],
        ).SerializeToString()

    def noted(self, lines: Lines) -> NotedInstructions:
        """The instructions that matter. Raises Unparsed if the columns are not aligned."""
        if not len(lines.opcodes) == len(lines.merged.id) == len(lines.numbers):
            raise Unparsed
        callees = len(lines.merged.called_computation_ids)
        noted = NotedInstructions()
        for kind, members in enumerate(_by_kind(lines)):
            if not members:
                continue
            numbers, opcodes = zip(*members, strict=True)
            picked = self._picked(lines.row, numbers)
            called = picked.called_computation_ids[:]
            in_step = _one_each(picked.opcode[:], _MARK) == [*opcodes]
            if not in_step or called.count(_MARK_ID) != len(numbers):
                raise Unparsed
            callees -= len(called) - len(numbers)
            _note(noted, kind, numbers, picked)
        if callees:
            raise Unparsed
        return noted

    def shapes(
        self, row: Callable[[int], bytes], numbers: list[int], ids: list[int]
    ) -> list[bytes]:
        """Shapes of these rows. Raises Unparsed unless they have these ids."""
        picked = self._picked(row, numbers)
        shapes = _one_each(picked.shape[:], _MARK)
        if 0 in ids or _one_each(picked.id[:], _MARK_ID) != ids or len(shapes) != len(ids):
            raise Unparsed
        return shapes

    def _picked(self, row: Callable[[int], bytes], numbers: Sequence[int]) -> Any:  # noqa: ANN401
        return self._message.FromString(self._mark.join([*map(row, numbers), b""]))


def _by_kind(lines: Lines) -> list[list[tuple[int, bytes]]]:
    kinds: list[list[tuple[int, bytes]]] = [[] for _ in range(OTHER + 1)]
    for line in zip(lines.numbers, lines.opcodes, strict=True):
        if line[1] not in _CALLING_NOTHING:
            kinds[KINDS.get(line[1], OTHER)].append(line)
    return kinds


def _note(noted: NotedInstructions, kind: int, numbers: Sequence[int], picked: Any) -> None:  # noqa: ANN401
    if kind == DOT:
        noted.dots = _dots(numbers, picked)
    elif kind == CONSTANT:
        literals = _one_each(picked.literal[:], _MARK)
        if len(literals) != len(numbers):
            raise Unparsed
        noted.literal_bytes = sum(map(len, literals))
    elif kind == SPECIAL:
        noted.special = [*numbers]
    elif kind == APPLYING:
        noted.applied = [callee for callee in picked.called_computation_ids if callee != _MARK_ID]
    elif kind == OTHER:
        noted.calls = _calls(numbers, picked.called_computation_ids)


def _one_each(values: list[_Value], mark: _Value) -> list[_Value]:
    """The value before each mark; Unparsed where that is none, or several.

    A row may hold a mark of its own: so there have to be as many values as rows.
    """
    own = values[::2]
    if mark in own or values[1::2] != [mark] * len(own):
        raise Unparsed
    return own


def _dots(numbers: Sequence[int], picked: Any) -> list[Dot]:  # noqa: ANN401
    count = len(numbers)
    operands = picked.operand_ids[:]  # left, right, mark; left, right, mark; ...
    if operands[2::3] != [_MARK_ID] * count or operands.count(_MARK_ID) != count:
        raise Unparsed
    columns = (
        numbers,
        operands[::3],
        _one_each(picked.shape[:], _MARK),
        _one_each(picked.dot_dimension_numbers[:], _MARK),
    )
    if any(len(column) != count for column in columns):
        raise Unparsed
    return [*zip(*columns, strict=True)]


def _calls(numbers: Sequence[int], called: Sequence[int]) -> list[int]:
    calls: list[int] = []
    callers = iter(numbers)
    caller = next(callers)
    for callee in called:
        if callee == _MARK_ID:
            caller = next(callers, 0)
        else:
            calls += (callee, caller)
    return calls


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
        self._columns = ColumnReader(self._merged["Picked"])
        self._refusal: type[Exception] = DecodeError
        self._plain = PlainParser()

    def parsed(self, data: Buffer, places: list[Span]) -> Iterator[Parsed | Index]:
        """Parses the computations at these spans, by the plain parser if protobuf refuses."""
        computations: Iterable[Parsed | Index]
        for chunk in _chunks(places):
            try:
                many = len(chunk) > 1 or chunk[0][1] - chunk[0][0] <= _CHUNK_BYTES
                computations = (
                    self._together(data, chunk) if many else [self._large(data, chunk[0])]
                )
            except (Unparsed, self._refusal):
                computations = self._plain.parsed(data, chunk)
            yield from computations

    def _together(self, data: Buffer, places: list[Span]) -> Iterable[Parsed | Index]:
        encoded = data[_begin(data, places[0]) : places[-1][1]]
        rows = self._rows["Module"].FromString(encoded).computations
        merged = self._merged["Module"].FromString(encoded).computations
        if len(rows) != len(places):
            raise Unparsed
        return [
            self._indexed(row, columns.instructions)
            for row, columns in zip(rows, merged, strict=True)
        ]

    def _indexed(self, computation: Any, merged: Any) -> Parsed | Index:  # noqa: ANN401
        rows, opcodes = computation.instructions, merged.opcode[:]
        if QUIET_OPCODES.issuperset(opcodes) and not merged.called_computation_ids:
            return Index(computation.id, len(rows), 0, None)  # as most: there is less to ask for
        noted = NotedInstructions()
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

    def _large(self, data: Buffer, where: Span) -> Parsed:
        """A computation that is parsed a part at a time, without its large instructions."""
        framed = frames(data, *where)
        noted = NotedInstructions()
        ids: list[int] = []
        sure = True
        for part in _parts(where[0], framed):
            if part.large:
                line = plain_line(data, framed.starts[part.first], framed.ends[part.first])
                noted.add(part.first, line.opcode, line)
                ids.append(line.id)
                continue
            encoded = data[part.begin : framed.ends[part.last - 1]]
            merged = self._merged["Computation"].FromString(encoded).instructions
            numbers, row = range(part.first, part.last), partial(framed.row, data)
            new_ids, is_checked = self._note(noted, Lines(merged, merged.opcode[:], numbers, row))
            ids += new_ids
            sure = sure and is_checked

        def shapes(numbers: list[int], members: list[int]) -> list[bytes]:
            lines = [framed.line(data, number) for number in numbers]
            if not sure and (0 in members or [line.id for line in lines] != members):
                raise Unparsed
            return [line.shape for line in lines]

        own = *own_fields(data, framed), len(ids)
        return Parsed(*own, noted, ids, sure, shapes, frames=framed)

    def _note(self, noted: NotedInstructions, lines: Lines) -> tuple[Sequence[int], bool]:
        """Note what matters by the columns; row by row where these are not in step.

        Gives the ids, and whether each is known to be that of its row.
        """
        try:
            noted.extend(self._columns.noted(lines))
        except Unparsed:
            return self._note_rows(noted, lines), True
        return lines.merged.id[:], False

    def _note_rows(self, noted: NotedInstructions, lines: Lines) -> list[int]:
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
    for where in places:
        if chunk and (
            where[1] - chunk[0][0] > _CHUNK_BYTES or where[0] - chunk[-1][1] > _MAX_HEAD_BYTES
        ):
            yield chunk
            chunk = []
        chunk.append(where)
    if chunk:
        yield chunk


def _begin(data: Buffer, where: Span) -> int:
    """Where the head of a computation begins, if it is written as usual."""
    size = where[1] - where[0]
    begin = where[0] - max(1, -(-size.bit_length() // 7)) - 1
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
