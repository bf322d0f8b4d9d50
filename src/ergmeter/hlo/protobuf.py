"""Instructions read by protobuf's C parser, with a schema of the few fields that an index needs.

The schema is built at run time under a package name of ours: there is no generated code that pins
a protobuf version, and no clash with the copy of hlo.proto that tensorflow or torch-neuronx loads.

Two traps: protobuf keeps a copy of what it does not know, so instructions that hold a literal are
not given to it; and where it runs without its C parser (3.20 on Python 3.11) it is ten times
slower than our own, so that it is not used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from ergmeter.hlo.lines import Line, Parsed, frames, from_frames, plain_line
from ergmeter.hlo.module import (
    CALLED_IDS,
    COMPUTATION_ID,
    COMPUTATION_INSTRUCTION,
    COMPUTATION_NAME,
    COMPUTATION_ROOT_ID,
    DOT_DIMENSIONS,
    ID,
    LITERAL,
    NAME,
    OPCODE,
    OPERAND_IDS,
    SHAPE,
)
from ergmeter.hlo.wire import Unparsed

if TYPE_CHECKING:
    from ergmeter.hlo.lines import Frames, Parser
    from ergmeter.hlo.wire import Buffer, Span

_CHUNK_BYTES = 4 << 20  # parsed at once; protobuf takes about three times that in memory
_LARGE_BYTES = 1 << 14  # an instruction of that size holds a literal


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


class _Chunks(Sequence[Line]):
    """Several lists as one; the lines themselves would be thrice the size of the file."""

    def __init__(self) -> None:
        self._parts: list[Sequence[Line]] = []
        self._firsts: list[int] = []
        self._count = 0

    def add(self, part: Sequence[Line]) -> None:
        """Append a list."""
        self._parts.append(part)
        self._firsts.append(self._count)
        self._count += len(part)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Line]:
        return chain.from_iterable(self._parts)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401  a slice is not asked for
        number = bisect_right(self._firsts, index) - 1
        return self._parts[number][index - self._firsts[number]]


class _ProtobufParser:
    def __init__(self) -> None:
        from google.protobuf.message import DecodeError  # noqa: PLC0415

        self._chunk = _chunk_class()
        self._refusal: type[Exception] = DecodeError

    def parsed(self, data: Buffer, place: Span) -> Parsed:
        """The computation that lies there; a large one a chunk at a time."""
        if place[1] - place[0] > _CHUNK_BYTES:
            framed = frames(data, *place)
            return from_frames(data, framed, self._lines(data, place[0], framed))
        chunk = self._parsed(data, *place)
        return Parsed(chunk.id, chunk.name, chunk.root_id, chunk.instructions, None)

    def _lines(self, data: Buffer, begin: int, framed: Frames) -> Sequence[Line]:
        starts, ends, _ = framed
        sizes = map(int.__sub__, ends, starts)
        large = [index for index, size in enumerate(sizes) if size > _LARGE_BYTES]
        lines = _Chunks()
        first = 0
        for stop in [*large, len(starts)]:
            while first < stop:
                begin = ends[first - 1] if first else begin
                last = max(first + 1, bisect_right(ends, begin + _CHUNK_BYTES, first, stop))
                part = self._parsed(data, begin, ends[last - 1]).instructions
                if len(part) != last - first:
                    raise Unparsed
                lines.add(part)
                first = last
            if stop < len(starts):
                lines.add([plain_line(data, starts[stop], ends[stop])])
                first = stop + 1
        return lines

    def _parsed(self, data: Buffer, start: int, end: int) -> Any:  # noqa: ANN401  made at run time
        try:
            return self._chunk.FromString(data[start:end])
        except self._refusal:
            raise Unparsed from None


def _chunk_class() -> Any:  # noqa: ANN401
    """The message class of a computation, or of a part of one."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # noqa: PLC0415

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="ergmeter/hlo.proto", package="ergmeter.hlo", syntax="proto2"
    )
    for message, fields in {
        "Line": (
            ("opcode", OPCODE, field.TYPE_BYTES, field.LABEL_OPTIONAL),
            ("shape", SHAPE, field.TYPE_BYTES, field.LABEL_OPTIONAL),
            ("literal", LITERAL, field.TYPE_BYTES, field.LABEL_OPTIONAL),
            ("dot_dimension_numbers", DOT_DIMENSIONS, field.TYPE_BYTES, field.LABEL_OPTIONAL),
            ("id", ID, field.TYPE_INT64, field.LABEL_OPTIONAL),
            ("operand_ids", OPERAND_IDS, field.TYPE_INT64, field.LABEL_REPEATED),
            ("called_computation_ids", CALLED_IDS, field.TYPE_INT64, field.LABEL_REPEATED),
            # Nobody asks for these, but every instruction has them, and what is in no schema
            # takes protobuf longer.
            ("name", NAME, field.TYPE_BYTES, field.LABEL_OPTIONAL),
            ("metadata", 7, field.TYPE_BYTES, field.LABEL_OPTIONAL),
            ("frontend_attributes", 68, field.TYPE_BYTES, field.LABEL_OPTIONAL),
            ("statistics", 82, field.TYPE_BYTES, field.LABEL_OPTIONAL),
        ),
        "Chunk": (
            ("name", COMPUTATION_NAME, field.TYPE_BYTES, field.LABEL_OPTIONAL),
            ("id", COMPUTATION_ID, field.TYPE_INT64, field.LABEL_OPTIONAL),
            ("root_id", COMPUTATION_ROOT_ID, field.TYPE_INT64, field.LABEL_OPTIONAL),
            ("instructions", COMPUTATION_INSTRUCTION, field.TYPE_MESSAGE, field.LABEL_REPEATED),
        ),
    }.items():
        made = file.message_type.add(name=message)
        for name, number, kind, label in fields:
            nested = ".ergmeter.hlo.Line" if kind == field.TYPE_MESSAGE else None
            made.field.add(name=name, number=number, type=kind, label=label, type_name=nested)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("ergmeter.hlo.Chunk"))
