"""Reads a module into its index: with compiled code, else with protobuf.

Both readers must agree. So the compiled one leaves everything unusual to protobuf, which checks
every field of every instruction. What protobuf refuses is read by ergmeter.hlo.wire, which names
the damage and its offset.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from ergmeter.errors import PluginError, UsageError
from ergmeter.hlo import compiled, proto
from ergmeter.hlo.module import Computation, Computations, Module, module_fields
from ergmeter.hlo.wire import (
    Buffer,
    Malformed,
    Span,
    encoded,
    field,
    integer,
    integers,
    message,
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
        ),
        reader="protobuf",
        fields=fields,
    )


def _computation(data: Buffer, where: Span) -> Computation:
    parsed = _parsed(data, where)
    instructions = parsed.instructions
    opcodes = [instruction.opcode for instruction in instructions]
    is_quiet = proto.QUIET_OPCODES.issuperset(opcodes)
    ids = None if is_quiet else [instruction.id for instruction in instructions]
    places = _Places(data, where, ids)
    computation = Computation(
        id=parsed.id,
        name=parsed.name.decode(errors="replace"),
        root_id=parsed.root_id,
        places=places,
        instructions=len(opcodes),
    )
    if is_quiet:
        return computation
    for index, opcode in enumerate(opcodes):
        if opcode in proto.QUIET_OPCODES:
            continue
        kind = proto.KINDS.get(opcode, proto.OTHER)
        if kind == proto.DOT:
            _add_dot(computation, index, instructions, places)
        else:
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


def _parsed(data: Buffer, where: Span) -> Any:  # noqa: ANN401  built by _schema
    """The computation at `where`; Malformed if it is damaged."""
    make, _, refusal = _schema()
    if where[1] - where[0] < _AT_ONCE_BYTES:
        try:
            return make.FromString(data[where[0] : where[1]])
        except refusal:
            pass  # the next lines find out where it is damaged
    fields = message(data, *where)
    return make(
        id=integer(fields, proto.COMPUTATION_ID),
        name=encoded(data, fields, proto.COMPUTATION_NAME),
        root_id=integer(fields, proto.COMPUTATION_ROOT_ID),
        instructions=[
            _instruction(data, extent) for extent in spans(fields, proto.COMPUTATION_INSTRUCTION)
        ],
    )


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
    fields = file.message_type.add(name="Computation").field
    fields.add(name="id", number=proto.COMPUTATION_ID, type=kind.TYPE_INT64)
    fields.add(name="root_id", number=proto.COMPUTATION_ROOT_ID, type=kind.TYPE_INT64)
    fields.add(name="name", number=proto.COMPUTATION_NAME, type=kind.TYPE_BYTES)
    fields.add(
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
    """Instruction spans by id and index, looked for as far as they are asked for."""

    def __init__(self, data: Buffer, where: Span, ids: list[int] | None) -> None:
        self._data, self._where, self._ids = data, where, ids
        self._at = where[0]
        self._extents: list[Span] = []

    def by_index(self, index: int) -> Span:
        while len(self._extents) <= index:
            number, value, self._at = field(self._data, self._at)
            if number == proto.COMPUTATION_INSTRUCTION and isinstance(value, tuple):
                self._extents.append(value)
        return self._extents[index]

    def by_id(self, member: int) -> Span | None:
        index = self.numbers.get(member)
        return None if index is None else self.by_index(index)

    @cached_property
    def numbers(self) -> dict[int, int]:
        """The index of each id; not of 0 if several have it, which are those without an id."""
        ids = self._ids
        if ids is None:
            ids = [instruction.id for instruction in _parsed(self._data, self._where).instructions]
        numbers = dict(zip(ids, range(len(ids)), strict=True))
        if len(numbers) != len(ids):
            numbers.pop(0, None)
            if len(numbers) + ids.count(0) != len(ids):
                raise Malformed("two instructions of one id in a computation", self._where[0])
        return numbers
