"""Reads a module into its index: with compiled code, else in Python.

Both readers must agree. So the compiled one leaves everything unusual to the Python one, which
checks every field of every instruction and alone reports damage, with its offset.
"""

from __future__ import annotations

import os

from ergmeter.errors import PluginError, UsageError
from ergmeter.hlo import compiled, proto
from ergmeter.hlo.module import Computation, Computations, Instruction, Module, module_fields
from ergmeter.hlo.wire import Buffer, Malformed, Span, integer, message, span, spans, text

READERS = ("compiled", "python")


def read(data: Buffer, *, reader: str | None = None) -> Module:
    """Index the module in `data`, an HloModuleProto or an HloProto around one."""
    if reader is not None and reader not in READERS:
        raise UsageError(f"no HLO reader {reader!r}: pass {' or '.join(READERS)}, or leave it out")
    library = None if reader == "python" else _library()
    if reader == "compiled" and not library:
        needs = "a C compiler (cc) and ERGMETER_COMPILED not set to 0"
        raise PluginError(f"no compiled HLO reader here: it needs {needs}")
    return (library and library.module(data)) or _read(data)


def reader_name() -> str:
    """The default reader on this machine."""
    return "compiled" if _library() else "python"


def _library() -> compiled.Library | None:
    return None if os.environ.get("ERGMETER_COMPILED") == "0" else compiled.library()


def _read(data: Buffer) -> Module:
    """The module, read in Python. Raises Malformed if it is damaged."""
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
        reader="python",
        fields=fields,
    )


def _computation(data: Buffer, where: Span) -> Computation:
    fields = message(data, *where)
    extents = spans(fields, proto.COMPUTATION_INSTRUCTION)
    ids: list[int] = []
    shapes: list[bytes] = []
    relevant: list[tuple[int, int, Instruction]] = []
    for index, extent in enumerate(extents):
        instruction = Instruction(data, message(data, *extent), extent)
        _ = instruction.operand_ids, instruction.called_ids  # Malformed where they are damaged
        ids.append(instruction.integer(proto.ID))
        shapes.append(instruction.encoded(proto.SHAPE))
        kind = proto.KINDS.get(instruction.encoded(proto.OPCODE), proto.OTHER)
        if kind != proto.QUIET:
            relevant.append((index, kind, instruction))
    places = _Places(extents, ids, where[0])
    computation = Computation(
        id=integer(fields, proto.COMPUTATION_ID),
        name=text(data, fields, proto.COMPUTATION_NAME),
        root_id=integer(fields, proto.COMPUTATION_ROOT_ID),
        places=places,
        instructions=len(ids),
    )
    for index, kind, instruction in relevant:
        if kind == proto.DOT:
            _add_dot(computation, index, instruction, places, shapes)
        else:
            _add(computation, index, instruction, kind)
    return computation


def _add(computation: Computation, index: int, instruction: Instruction, kind: int) -> None:
    if kind == proto.CONSTANT:
        start, end = span(instruction.fields, proto.LITERAL) or (0, 0)
        computation.literal_bytes += end - start
    elif kind == proto.SPECIAL:
        computation.special.append(index)
    elif kind == proto.APPLYING:
        computation.applied += instruction.called_ids
    else:
        for callee in instruction.called_ids:
            computation.calls += (callee, index)


def _add_dot(
    computation: Computation, index: int, dot: Instruction, places: _Places, shapes: list[bytes]
) -> None:
    """Note a dot with those of the same shapes; one without its operand is a special case."""
    operands = dot.operand_ids
    left = places.numbers.get(operands[0]) if operands else None
    if left is None:
        computation.special.append(index)
        return
    key = (shapes[index], shapes[left], dot.encoded(proto.DOT_DIMENSIONS))
    computation.dots.setdefault(key, [0, index])[0] += 1


class _Places:
    """Instruction spans by id and index; ids are looked at when one is asked for."""

    __slots__ = ("_extents", "_ids", "_numbers", "_start")

    def __init__(self, extents: list[Span], ids: list[int], start: int) -> None:
        self._extents, self._ids, self._start = extents, ids, start
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
            numbers = dict(zip(ids, range(len(ids)), strict=True))
            if len(numbers) != len(ids):
                without = ids.count(0)
                numbers.pop(0, None)
                if len(numbers) + without != len(ids):
                    raise Malformed("two instructions of one id in a computation", self._start)
            self._numbers = numbers
        return self._numbers
