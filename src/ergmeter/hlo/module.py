"""An HLO module: its computations, their calls, and the position of each instruction in the file.

Of a hundred thousand instructions a few thousand multiply or call. A reader returns those. Any
other instruction is a span of the file, which is parsed when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ergmeter.hlo import proto
from ergmeter.hlo.wire import (
    Buffer,
    Fields,
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


class InstructionSpans(Protocol):
    """The positions of a computation's instructions in the file."""

    def by_id(self, member: int) -> Span | None:
        """Return the span of the instruction with this id, or None."""

    def by_index(self, index: int) -> Span:
        """Return the span of the computation's instruction number `index`, from 0."""


@dataclass(slots=True)
class Computation:
    """One computation, as a reader returns it. Instructions are referred to by index."""

    id: int
    name: str
    root_id: int
    places: InstructionSpans
    instructions: int
    calls: list[int] = field(default_factory=list)  # callee, instruction; callee, instruction; ...
    applied: list[int] = field(default_factory=list)  # computations applied to elements
    special: list[int] = field(default_factory=list)
    # Dots by (result, left operand, dimension numbers), encoded: number, index of the first. Layers
    # repeat, so there are few keys. `dot_macs`: MACs of dots that the reader counted itself.
    dots: dict[tuple[bytes, bytes, bytes], list[int]] = field(default_factory=dict)
    dot_macs: int = 0

    @property
    def is_idle(self) -> bool:
        """True if it neither multiplies nor calls; most are a sum or a comparison."""
        return not (self.dots or self.dot_macs or self.special or self.calls or self.applied)


@dataclass(slots=True)
class Computations:
    """A module's computations by id; each is read at first use."""

    ids: list[int]
    make: Callable[[int], Computation]  # takes the index in `ids`
    idle: set[int]  # ids of those that neither multiply nor call
    instructions: int
    numbers: dict[int, int] = field(init=False)
    _made: dict[int, Computation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises Malformed where an id occurs twice."""
        self.numbers = {member: number for number, member in enumerate(self.ids)}
        if len(self.numbers) != len(self.ids):
            raise Malformed("two computations with one id", 0)

    def __len__(self) -> int:
        return len(self.numbers)

    def find(self, member: int) -> Computation | None:
        """Return the computation with this id, or None."""
        computation = self._made.get(member)
        if computation is None and member in self.numbers:
            computation = self._made[member] = self.make(self.numbers[member])
        return computation

    def named(self, name: str) -> Computation | None:
        """Return the first computation with this name, or None."""
        every = (self.make(number) for number in range(len(self.numbers)))
        return next((computation for computation in every if computation.name == name), None)


@dataclass(slots=True)
class Module:
    """The index of an HLO module, with the bytes that it was read from."""

    data: Buffer
    name: str
    entry_id: int
    entry_name: str
    payloads: list[Span]
    computations: Computations
    reader: str
    fields: Fields  # of the module itself

    def instruction(self, where: Span) -> Instruction:
        """Return the instruction at this span."""
        return Instruction(self.data, message(self.data, *where), where)

    def operand(self, computation: Computation, user: Instruction, number: int) -> Instruction:
        """Return an operand of an instruction. Raises Malformed if there is none."""
        ids = user.operand_ids
        if number >= len(ids):
            raise Malformed(f"{user.name} has no operand {number}", user.offset)
        where = computation.places.by_id(ids[number])
        if where is None:
            what = f"names the instruction {ids[number]}, which {computation.name} lacks"
            raise Malformed(f"{user.name} {what}", user.offset)
        return self.instruction(where)


def module_fields(data: Buffer) -> tuple[Fields, int]:
    """Return a module's fields and its offset, for an HloModuleProto or an HloProto.

    Field 1 is the name in the first and the module in the second. A name is printable; a module
    begins with a byte below 0x20.
    """
    fields = message(data, 0, len(data))
    inner = span(fields, proto.MODULE_NAME)
    if inner and inner[1] > inner[0] and data[inner[0]] < 0x20:
        return message(data, *inner), inner[0]
    return fields, 0


class Instruction:
    """One instruction at `extent` of the module's data; its fields are parsed when needed."""

    __slots__ = ("data", "extent", "fields")

    def __init__(self, data: Buffer, fields: Fields, extent: Span) -> None:
        self.data, self.fields, self.extent = data, fields, extent

    @property
    def offset(self) -> int:
        """The offset of the instruction in the module's data."""
        return self.extent[0]

    @property
    def name(self) -> str:
        """The instruction's name as in HLO text, without the %."""
        return text(self.data, self.fields, proto.NAME)

    @property
    def opcode(self) -> str:
        """The opcode as in HLO text: "dot", "custom-call", ..."""
        return text(self.data, self.fields, proto.OPCODE)

    @property
    def operand_ids(self) -> list[int]:
        """Ids of the operands, which are in the same computation."""
        return integers(self.data, self.fields, proto.OPERAND_IDS)

    @property
    def called_ids(self) -> list[int]:
        """Ids of the called computations; for a while: body, condition."""
        return integers(self.data, self.fields, proto.CALLED_IDS)

    @property
    def shape(self) -> Shape:
        """The shape of the result."""
        return Shape.parse(self.data, span(self.fields, proto.SHAPE))

    def integer(self, number: int) -> int:
        """Return the integer field `number`."""
        return integer(self.fields, number)

    def text(self, number: int) -> str:
        """Return the string field `number`."""
        return text(self.data, self.fields, number)

    def encoded(self, number: int) -> bytes:
        """Return the bytes of the message field `number`."""
        return encoded(self.data, self.fields, number)

    def part(self, number: int) -> Fields:
        """Return the fields of the message in field `number`; {} if it is absent."""
        where = span(self.fields, number)
        return message(self.data, *where) if where else {}


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of an array, or the shapes of a tuple's parts."""

    type: int
    dimensions: tuple[int, ...]
    parts: tuple[Span, ...]

    @classmethod
    def parse(cls, data: Buffer, where: Span | None) -> Shape:
        """Read a ShapeProto."""
        fields = message(data, *where) if where else {}
        dimensions = tuple(integers(data, fields, proto.SHAPE_DIMENSIONS))
        parts = tuple(spans(fields, proto.SHAPE_PARTS))
        return cls(integer(fields, proto.SHAPE_TYPE), dimensions, parts)

    def first(self, data: Buffer) -> Shape:
        """Return a tuple's first part, else the shape: library calls also return scratch space."""
        return Shape.parse(data, self.parts[0]) if self.parts else self
