"""Reads a module into its index: with compiled code, else with protobuf.

Both readers must agree. So the compiled one leaves everything unusual to protobuf, which checks
every field of every instruction. What protobuf refuses is read by ergmeter.hlo.wire, which names
the damage and its offset.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ergmeter.errors import PluginError, UsageError
from ergmeter.hlo import compiled, proto
from ergmeter.hlo.module import Computation, Computations, Module, module_fields
from ergmeter.hlo.wire import (
    Buffer,
    Malformed,
    Span,
    encoded,
    integer,
    integers,
    message,
    span,
    spans,
    text,
)

READERS = ("compiled", "protobuf")
_AT_ONCE_BYTES = 16 << 20  # of a computation; protobuf takes a multiple of that in memory
_LARGE_BYTES = 1 << 14  # an instruction of this size holds a literal, which protobuf would copy
# The fields of an instruction that an index needs, and the others that most instructions have:
# protobuf takes longer for a field that it does not know.
_NUMBERS = {"id": proto.ID}
_LISTS = {"operand_ids": proto.OPERAND_IDS, "called_ids": proto.CALLED_IDS}
_ENCODED = {"opcode": proto.OPCODE, "shape": proto.SHAPE, "dot_dimensions": proto.DOT_DIMENSIONS}
_UNUSED = {"name": proto.NAME, "metadata": 7, "dimensions": 14, "attributes": 68, "statistics": 82}


def read(data: Buffer, *, reader: str | None = None) -> Module:
    """Index the module in `data`, an HloModuleProto or an HloProto around one."""
    if reader is not None and reader not in READERS:
        raise UsageError(f"no HLO reader {reader!r}: pass {' or '.join(READERS)}, or leave it out")
    library = None if reader == "protobuf" else _library()
    if reader == "compiled" and not library:
        needs = "a C compiler (cc) and ERGMETER_COMPILED not set to 0"
        raise PluginError(f"no compiled HLO reader here: it needs {needs}")
    return (library and library.module(data)) or _read(data)


def reader_name() -> str:
    """The default reader on this machine."""
    return "compiled" if _library() else "protobuf"


def _library() -> compiled.Library | None:
    return None if os.environ.get("ERGMETER_COMPILED") == "0" else compiled.library()


def _read(data: Buffer) -> Module:
    """The module, read by protobuf. Raises Malformed if it is damaged."""
    fields, start = module_fields(data)
    every = [_computation(data, where) for where in spans(fields, proto.MODULE_COMPUTATION)]
    if not every:
        raise Malformed("it has no computations", start)
    return Module(
        data=data,
        name=text(data, fields, proto.MODULE_NAME),
        entry_id=integer(fields, proto.MODULE_ENTRY_ID),
        entry_name=text(data, fields, proto.MODULE_ENTRY_NAME),
        payloads=spans(fields, proto.MODULE_PAYLOAD),
        computations=Computations(
            [computation.id for computation in every],
            every.__getitem__,
            idle={computation.id for computation in every if computation.is_idle},
            instructions=sum(computation.instructions for computation in every),
            literal_bytes=sum(computation.literal_bytes for computation in every),
        ),
        reader="protobuf",
        fields=fields,
    )


def _computation(data: Buffer, where: Span) -> Computation:
    fields = message(data, *where)
    extents = spans(fields, proto.COMPUTATION_INSTRUCTION)
    instructions = _instructions(data, where, extents)
    kinds = [proto.KINDS.get(instruction.opcode, proto.OTHER) for instruction in instructions]
    is_quiet = kinds.count(proto.QUIET) == len(kinds)
    ids = None if is_quiet else [instruction.id for instruction in instructions]
    places = _Places(data, extents, ids, where[0])
    computation = Computation(
        id=integer(fields, proto.COMPUTATION_ID),
        name=text(data, fields, proto.COMPUTATION_NAME),
        root_id=integer(fields, proto.COMPUTATION_ROOT_ID),
        places=places,
        instructions=len(kinds),
    )
    if is_quiet:
        return computation
    for index, kind in enumerate(kinds):
        if kind == proto.CONSTANT:
            computation.literal_bytes += _literal_bytes(data, extents[index])
        elif kind == proto.DOT:
            _add_dot(computation, index, instructions, places)
        elif kind != proto.QUIET:
            _add(computation, index, instructions[index], kind)
    return computation


def _add(computation: Computation, index: int, instruction: Any, kind: int) -> None:  # noqa: ANN401
    if kind == proto.SPECIAL:
        computation.special.append(index)
    elif kind == proto.APPLYING:
        computation.applied += instruction.called_ids
    else:
        for callee in instruction.called_ids:
            computation.calls += (callee, index)


def _add_dot(
    computation: Computation, index: int, instructions: Sequence[Any], places: _Places
) -> None:
    """Note a dot with those of the same shapes; one without its operand is a special case."""
    dot = instructions[index]
    left = places.numbers.get(dot.operand_ids[0]) if dot.operand_ids else None
    if left is None:
        computation.special.append(index)
        return
    key = (dot.shape, instructions[left].shape, dot.dot_dimensions)
    computation.dots.setdefault(key, [0, index])[0] += 1


def _instructions(data: Buffer, where: Span, extents: list[Span]) -> Sequence[Any]:
    """The instructions of a computation, as messages of `_schema`."""
    computation, _, refusal = _schema()
    if where[1] - where[0] < _AT_ONCE_BYTES:
        try:
            return computation.FromString(data[where[0] : where[1]]).instructions  # type: ignore[no-any-return]
        except refusal:
            pass  # the next line finds out where it is damaged
    return [_instruction(data, extent) for extent in extents]


def _instruction(data: Buffer, extent: Span) -> Any:  # noqa: ANN401  built by _schema
    """The instruction at `extent`, as a message of `_schema`."""
    _, make, refusal = _schema()
    if extent[1] - extent[0] < _LARGE_BYTES:
        try:
            return make.FromString(data[extent[0] : extent[1]])
        except refusal:
            pass  # the next lines find out where it is damaged
    fields = message(data, *extent)
    values: dict[str, Any] = {name: integer(fields, number) for name, number in _NUMBERS.items()}
    values |= {name: integers(data, fields, number) for name, number in _LISTS.items()}
    values |= {name: encoded(data, fields, number) for name, number in _ENCODED.items()}
    return make(**values)


def _literal_bytes(data: Buffer, extent: Span) -> int:
    start, end = span(message(data, *extent), proto.LITERAL) or (0, 0)
    return end - start


@lru_cache(maxsize=1)
def _schema() -> tuple[Any, Any, type[Exception]]:
    """The message classes of a computation and an instruction, and what damaged bytes raise.

    It is in a pool of its own, since tensorflow and torch-neuronx load hlo.proto itself.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # noqa: PLC0415
    from google.protobuf.message import DecodeError  # noqa: PLC0415

    file = descriptor_pb2.FileDescriptorProto(name="ergmeter", syntax="proto3")
    fields = file.message_type.add(name="Instruction").field
    kind = descriptor_pb2.FieldDescriptorProto
    for numbers, type_, label in (
        (_NUMBERS, kind.TYPE_INT64, kind.LABEL_OPTIONAL),
        (_LISTS, kind.TYPE_INT64, kind.LABEL_REPEATED),
        (_ENCODED | _UNUSED, kind.TYPE_BYTES, kind.LABEL_OPTIONAL),
    ):
        for name, number in numbers.items():
            fields.add(name=name, number=number, type=type_, label=label)
    file.message_type.add(name="Computation").field.add(
        name="instructions", number=proto.COMPUTATION_INSTRUCTION, type=kind.TYPE_MESSAGE,
        type_name="Instruction", label=kind.LABEL_REPEATED,
    )  # fmt: skip
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    computation, instruction = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
        for name in ("Computation", "Instruction")
    )
    return computation, instruction, DecodeError


class _Places:
    """Instruction spans by id and index; ids are looked at when one is asked for."""

    __slots__ = ("_data", "_extents", "_ids", "_numbers", "_start")

    def __init__(
        self, data: Buffer, extents: list[Span], ids: list[int] | None, start: int
    ) -> None:
        self._data, self._extents, self._ids, self._start = data, extents, ids, start
        self._numbers: dict[int, int] | None = None

    def by_id(self, member: int) -> Span | None:
        index = self.numbers.get(member)
        return None if index is None else self._extents[index]

    def by_index(self, index: int) -> Span:
        return self._extents[index]

    @property
    def numbers(self) -> dict[int, int]:
        """The index of each id; not of 0 if several have it, which are those without an id."""
        if self._numbers is None:
            ids = self._ids
            if ids is None:
                ids = [_instruction(self._data, extent).id for extent in self._extents]
            numbers = dict(zip(ids, range(len(ids)), strict=True))
            if len(numbers) != len(ids):
                without = ids.count(0)
                numbers.pop(0, None)
                if len(numbers) + without != len(ids):
                    raise Malformed("two instructions of one id in a computation", self._start)
            self._numbers = numbers
        return self._numbers
