"""Reads an HLO module into an index: with compiled code if possible, else with protobuf.

Both readers must give the same result. So the compiled one leaves unusual files to protobuf, which
checks every field of every instruction. If protobuf can't parse a file, ergmeter.hlo.wire reads it
to report the damage and its offset.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

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
_OWN_NUMBERS = {"id": proto.COMPUTATION_ID, "root_id": proto.COMPUTATION_ROOT_ID}
_INSTRUCTION_TAG = proto.COMPUTATION_INSTRUCTION << 3 | 2
_UNUSED = {"name": proto.NAME, "metadata": 7, "dimensions": 14, "attributes": 68, "statistics": 82}


def read(data: Buffer, *, reader: str | None = None) -> Module:
    """Return the index of the module in `data`: an HloModuleProto, or an HloProto with one."""
    if reader is not None and reader not in READERS:
        raise UsageError(f"no HLO reader {reader!r}: pass {' or '.join(READERS)}, or leave it out")
    library = None if reader == "protobuf" else _library()
    if reader == "compiled" and not library:
        needs = "a C compiler (cc) and ERGMETER_COMPILED not set to 0"
        raise PluginError(f"no compiled HLO reader: it needs {needs}")
    return (library and library.module(data)) or _read(data)


def reader_name() -> str:
    """Return the name of this machine's default reader: "compiled" or "protobuf"."""
    return "compiled" if _library() else "protobuf"


def _library() -> compiled.Library | None:
    return None if os.environ.get("ERGMETER_COMPILED") == "0" else compiled.library()


def _read(data: Buffer) -> Module:
    """Read a module with protobuf. Raises Malformed if it is damaged."""
    fields, start = module_fields(data)
    extents = spans(fields, proto.MODULE_COMPUTATION)
    if not extents:
        raise Malformed("no computations", start)
    ids: list[int] = []
    idle: set[int] = set()
    working: dict[int, Computation] = {}  # by their number
    instructions = 0
    for number, (where, merged) in enumerate(
        zip(extents, _merged(data, start, extents), strict=True)
    ):
        if merged is not None and _is_quiet(merged.instructions):
            ids.append(merged.id)
            idle.add(merged.id)
            instructions += len(merged.instructions.opcode)
            continue
        computation = _computation(data, where, merged and merged.instructions)
        ids.append(computation.id)
        instructions += computation.instructions
        if computation.is_idle:
            idle.add(computation.id)
        else:
            working[number] = computation
    return Module(
        data=data,
        name=text(data, fields, proto.MODULE_NAME),
        entry_id=integer(fields, proto.MODULE_ENTRY_ID),
        entry_name=text(data, fields, proto.MODULE_ENTRY_NAME),
        payloads=spans(fields, proto.MODULE_PAYLOAD),
        computations=Computations(
            ids,
            lambda number: working.get(number) or _computation(data, extents[number]),
            idle=idle,
            instructions=instructions,
        ),
        reader="protobuf",
        fields=fields,
    )


def _merged(data: Buffer, start: int, extents: list[Span]) -> Iterator[Any]:
    """Yield each computation parsed with its instructions merged into one message, for speed.

    Then all opcodes are one list, which is enough for most computations: a sum or a comparison.
    None for large and damaged computations.
    """
    schema = _schema()
    first = 0
    while first < len(extents):
        last = first + 1
        while last < len(extents) and extents[last][1] - start < _AT_ONCE_BYTES:
            last += 1
        computations: Sequence[Any] = ()
        end = extents[last - 1][1]
        if end - start < _AT_ONCE_BYTES:
            with suppress(schema.refusal):
                computations = schema.module.FromString(data[start:end]).computations
        found = len(computations) == last - first
        yield from computations if found else [None] * (last - first)
        first, start = last, end


def _is_quiet(merged: Any) -> bool:  # noqa: ANN401  built by _schema
    """True if merged instructions neither multiply nor call, and none lacks its opcode."""
    opcodes = merged.opcode
    return (
        proto.QUIET_OPCODES.issuperset(opcodes)
        and len(opcodes) == len(merged.id) == len(merged.name)
        and not merged.called_ids
    )


def _computation(data: Buffer, where: Span, merged: Any = None) -> Computation:  # noqa: ANN401
    """Return the computation at `where`, using the opcodes of its merged instructions if given.

    The merged list is misaligned if one instruction has two opcodes and another none. So each
    instruction that matters is checked against it; on a difference all are read one by one.
    """
    parsed = _parsed(data, where)
    instructions = parsed.instructions
    if merged is not None and len(merged.opcode) == len(merged.id) == len(instructions):
        opcodes, ids, called = merged.opcode[:], merged.id[:], len(merged.called_ids)
    else:
        merged, called = None, 0
        opcodes = [instruction.opcode for instruction in instructions]
        ids = [instruction.id for instruction in instructions]
    places = _Places(data, where, ids, exact=merged is None)
    computation = Computation(
        id=parsed.id,
        name=parsed.name.decode(errors="replace"),
        root_id=parsed.root_id,
        places=places,
        instructions=len(instructions),
    )
    quiet, kinds = proto.QUIET_OPCODES, proto.KINDS
    for index in [index for index, opcode in enumerate(opcodes) if opcode not in quiet]:
        instruction, opcode = instructions[index], opcodes[index]
        if instruction.opcode != opcode:
            return _computation(data, where)
        kind = kinds.get(opcode, proto.OTHER)
        if kind == proto.DOT:
            if not _add_dot(computation, index, instructions, places):
                return _computation(data, where)
            continue
        callees = instruction.called_ids
        called -= len(callees)
        if kind == proto.SPECIAL:
            computation.special.append(index)
        elif kind == proto.APPLYING:
            computation.applied += callees
        else:
            for callee in callees:
                computation.calls += (callee, index)
    return computation if merged is None or not called else _computation(data, where)


def _add_dot(
    computation: Computation, index: int, instructions: Sequence[Any], places: _Places
) -> bool:
    """Count a dot with the others of its shapes; as special if its left operand is missing.

    Returns False if the instruction found for the operand has another id.
    """
    dot = instructions[index]
    operands = dot.operand_ids
    left = places.numbers.get(operands[0]) if operands else None
    if left is None:
        computation.special.append(index)
        return True
    operand = instructions[left]
    key = (dot.shape, operand.shape, dot.dot_dimensions)
    computation.dots.setdefault(key, [0, index])[0] += 1
    return bool(operand.id == operands[0])


def _parsed(data: Buffer, where: Span) -> Any:  # noqa: ANN401  built by _schema
    """Parse the computation at `where`. Raises Malformed if it is damaged."""
    schema = _schema()
    if where[1] - where[0] < _AT_ONCE_BYTES:
        try:
            return schema.computation.FromString(data[where[0] : where[1]])
        except schema.refusal:
            pass  # the next lines find out where it is damaged
    fields = message(data, *where)
    return schema.computation(
        id=integer(fields, proto.COMPUTATION_ID),
        name=encoded(data, fields, proto.COMPUTATION_NAME),
        root_id=integer(fields, proto.COMPUTATION_ROOT_ID),
        instructions=[
            _instruction(data, extent) for extent in spans(fields, proto.COMPUTATION_INSTRUCTION)
        ],
    )


def _instruction(data: Buffer, extent: Span) -> Any:  # noqa: ANN401  built by _schema
    """Parse the instruction at `extent` into a message of `_schema`."""
    schema = _schema()
    if extent[1] - extent[0] < _LARGE_BYTES:
        try:
            return schema.instruction.FromString(data[extent[0] : extent[1]])
        except schema.refusal:
            pass  # the next lines find out where it is damaged
    fields = message(data, *extent)
    values: dict[str, Any] = {name: integer(fields, number) for name, number in _NUMBERS.items()}
    values |= {name: integers(data, fields, number) for name, number in _LISTS.items()}
    values |= {name: encoded(data, fields, number) for name, number in _ENCODED.items()}
    return schema.instruction(**values)


class _Schema(NamedTuple):
    """The protobuf classes of an index, and the exception (`refusal`) for damaged bytes."""

    computation: Any
    instruction: Any
    module: Any  # of computations whose instructions are merged into one
    refusal: type[Exception]


@lru_cache(maxsize=1)
def _schema() -> _Schema:
    """Return classes for the parts of hlo.proto that an index needs.

    They are in a descriptor pool of their own: tensorflow and torch-neuronx load hlo.proto itself.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # noqa: PLC0415
    from google.protobuf.message import DecodeError  # noqa: PLC0415

    file = descriptor_pb2.FileDescriptorProto(name="ergmeter", syntax="proto3")
    kind = descriptor_pb2.FieldDescriptorProto
    once, many = kind.LABEL_OPTIONAL, kind.LABEL_REPEATED

    def add(message: str, numbers: dict[str, int], label: int, what: int | str) -> None:
        """Add fields to a message. `what`: protobuf's number of their type, or a message's name."""
        every = {member.name: member for member in file.message_type}
        fields = (every.get(message) or file.message_type.add(name=message)).field
        for name, number in numbers.items():
            made = fields.add(name=name, number=number, label=label)
            if isinstance(what, int):
                made.type = what
            else:
                made.type, made.type_name = kind.TYPE_MESSAGE, what

    add("Instruction", _NUMBERS, once, kind.TYPE_INT64)
    add("Instruction", _LISTS, many, kind.TYPE_INT64)
    add("Instruction", _ENCODED | _UNUSED, once, kind.TYPE_BYTES)
    add("Merged", _NUMBERS | _LISTS, many, kind.TYPE_INT64)
    add("Merged", {"opcode": proto.OPCODE, "name": proto.NAME}, many, kind.TYPE_BYTES)
    merged = {"name", "opcode"}
    unused = {name: number for name, number in (_ENCODED | _UNUSED).items() if name not in merged}
    add("Merged", unused, once, kind.TYPE_BYTES)
    instructions = {"instructions": proto.COMPUTATION_INSTRUCTION}
    for name, label, what in (("Computation", many, "Instruction"), ("Idle", once, "Merged")):
        add(name, _OWN_NUMBERS, once, kind.TYPE_INT64)
        add(name, {"name": proto.COMPUTATION_NAME}, once, kind.TYPE_BYTES)
        add(name, instructions, label, what)
    add("Module", {"computations": proto.MODULE_COMPUTATION}, many, "Idle")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    computation, instruction, module = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
        for name in ("Computation", "Instruction", "Module")
    )
    return _Schema(computation, instruction, module, DecodeError)


class _Places:
    """Spans of a computation's instructions by id and index, searched only as far as needed."""

    def __init__(self, data: Buffer, where: Span, ids: list[int], *, exact: bool) -> None:
        self._data, self._where, self._ids = data, where, ids
        self._is_exact = exact  # else the ids may be out of step
        self._at = where[0]
        self._extents: list[Span] = []

    def by_index(self, index: int) -> Span:
        data, at, extents = self._data, self._at, self._extents
        while len(extents) <= index:
            tag, size = data[at], data[at + 1]
            if tag == _INSTRUCTION_TAG and size < 0x80:  # most instructions
                begin = at + 2
                at = begin + size
                extents.append((begin, at))
                continue
            number, value, at = field(data, at)
            if number == proto.COMPUTATION_INSTRUCTION and isinstance(value, tuple):
                extents.append(value)
        self._at = at
        return extents[index]

    def by_id(self, member: int) -> Span | None:
        index = self.numbers.get(member)
        extent = None if index is None else self.by_index(index)
        if self._is_exact:
            return extent
        if extent and integer(message(self._data, *extent), proto.ID) == member:
            return extent
        self._read_ids()
        del self.numbers
        return self.by_id(member)

    def _read_ids(self) -> None:
        """Read the id of each instruction."""
        parsed = _parsed(self._data, self._where)
        self._ids = [instruction.id for instruction in parsed.instructions]
        self._is_exact = True

    @cached_property
    def numbers(self) -> dict[int, int]:
        """The index of each id. Id 0 is left out if several have it: they have no id."""
        numbers = {member: index for index, member in enumerate(self._ids)}
        if len(numbers) != len(self._ids) and not self._is_exact:
            self._read_ids()
            return self.numbers
        if len(numbers) != len(self._ids):
            numbers.pop(0, None)
            if len(numbers) + self._ids.count(0) != len(self._ids):
                raise Malformed("two instructions with one id in a computation", self._where[0])
        return numbers
