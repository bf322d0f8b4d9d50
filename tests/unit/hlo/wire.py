"""Modules made by hand, field by field, for what no compiler at hand makes.

The encoder is our own and knows nothing of the reader under test. `zoo` has XLA read what it makes,
so that a module here is one to XLA too.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

PRED, S32, F32, TUPLE = 1, 4, 11, 13
# A shape is its dimensions (of f32), or (element type, dimensions), or a list for a tuple.
Shape = Any

# openxla/xla xla/service/hlo.proto, HloInstructionProto
NUMBERS = {
    "parameter_number": 9,
    "fusion_kind": 11,
    "tuple_index": 13,
    "custom_call_target": 28,
    "dot_dimension_numbers": 30,
    "backend_config": 43,
    "comparison_direction": 63,
    "backend_config_payload": 99,
    "literal": 8,
    "window": 15,
    "convolution_dimension_numbers": 16,
    "feature_group_count": 50,
    "batch_group_count": 58,
}


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def integers(number: int, values: Iterable[int], *, packed: bool = True) -> bytes:
    if packed:
        return field(number, b"".join(map(varint, values)))
    return b"".join(field(number, value) for value in values)


def shape(of: Shape, *, packed: bool = True) -> bytes:
    if isinstance(of, list):
        return field(2, TUPLE) + b"".join(field(4, shape(part, packed=packed)) for part in of)
    element, dims = of if of and isinstance(of[-1], tuple) else (F32, of)
    layout = integers(1, reversed(range(len(dims))))
    return field(2, element) + integers(3, dims, packed=packed) + field(5, layout)


INTEGER: Shape = (S32, ())
TRUTH: Shape = (PRED, ())


def number(value: int) -> bytes:
    """The literal of an s32."""
    return field(1, shape(INTEGER)) + integers(4, [value])


def config(**keys: Any) -> bytes:
    """An NKI kernel's configuration."""
    return base64.b64encode(json.dumps(keys).encode())


class Computation:
    """Instructions in the order they were added; the last is the root."""

    def __init__(self, name: str, identity: int, *, packed: bool = True) -> None:
        self.name, self.id, self.packed = name, identity, packed
        self.rows: list[bytes] = []
        self.shapes: dict[int, Shape] = {}
        self.parameters: list[Shape] = []
        self.last = 0

    def add(
        self,
        opcode: str,
        of: Shape,
        operands: Sequence[int] = (),
        calls: Sequence[Computation] = (),
        identity: int | None = None,
        **more: Any,
    ) -> int:
        """Add an instruction; gives its id, which is unlike its place on purpose."""
        if opcode == "fusion":
            more = {"fusion_kind": "kLoop", **more}
        self.last = identity or self.id * 1000 + 7 * len(self.rows) + 3
        row = field(1, f"{opcode}.{self.last}") + field(2, opcode)
        row += field(3, shape(of, packed=self.packed))
        row += b"".join(field(NUMBERS[name], value) for name, value in more.items())
        row += field(35, self.last) + integers(36, operands, packed=self.packed)
        row += integers(38, [called.id for called in calls], packed=self.packed)
        self.rows.append(row)
        self.shapes[self.last] = of
        return self.last

    def parameter(self, of: Shape) -> int:
        self.parameters.append(of)
        return self.add("parameter", of, parameter_number=len(self.parameters) - 1)

    def constant(self, value: int) -> int:
        return self.add("constant", INTEGER, literal=number(value))

    def part(self, whole: int, index: int) -> int:
        return self.add("get-tuple-element", self.shapes[whole][index], [whole], tuple_index=index)

    def dot(self, lhs: int, rhs: int) -> int:
        """The product of two matrices."""
        (rows, _), (_, columns) = self.shapes[lhs], self.shapes[rhs]
        sides = integers(1, [1], packed=self.packed) + integers(2, [0], packed=self.packed)
        return self.add("dot", (rows, columns), [lhs, rhs], dot_dimension_numbers=sides)

    def tuple(self, *parts: int) -> int:
        return self.add("tuple", [self.shapes[part] for part in parts], parts)

    def program_shape(self) -> bytes:
        names = (f"p{index}" for index in range(len(self.parameters)))
        parts = [field(1, shape(of)) for of in self.parameters]
        parts += [field(2, shape(self.shapes[self.last])), *(field(3, name) for name in names)]
        return b"".join(parts)

    def encoded(self) -> bytes:
        rows = b"".join(field(2, row) for row in self.rows)
        shapes = field(4, self.program_shape())
        return field(1, self.name) + rows + shapes + field(5, self.id) + field(6, self.last)


class Module:
    """Computations in the order they were begun, so that a callee may stand after its caller."""

    def __init__(self, *, packed: bool = True) -> None:
        self.packed = packed
        self.computations: list[Computation] = []
        self._ids = itertools.count(5, 3)

    def computation(self, name: str, *, identity: int | None = None) -> Computation:
        made = Computation(name, identity or next(self._ids), packed=self.packed)
        self.computations.append(made)
        return made

    def encoded(self, entry: Computation, extra: bytes = b"") -> bytes:
        head = field(1, "made") + field(2, entry.name)
        rows = b"".join(field(3, made.encoded()) for made in self.computations)
        return head + rows + field(4, entry.program_shape()) + field(6, entry.id) + extra


SQUARE: Shape = (4, 4)
SQUARE_MACS = 4 * 4 * 4


def product(module: Module, name: str = "product", *, dots: int = 1) -> Computation:
    """A computation of one 4x4 parameter: so many products of it by itself, one after another."""
    made = module.computation(name)
    x = made.parameter(SQUARE)
    value = x
    for _ in range(dots):
        value = made.dot(value, x)
    if not dots:
        made.add("negate", SQUARE, [x])
    return made


def unary(module: Module, name: str, opcode: str, called: Computation, times: int) -> Computation:
    """A computation of one 4x4 parameter that calls another so often, one after another."""
    made = module.computation(name)
    value = made.parameter(SQUARE)
    for _ in range(times):
        value = made.add(opcode, SQUARE, [value], [called])
    return made


class Loop:
    """A while over (counter, bound, value): the pieces can be exchanged one by one."""

    def __init__(
        self,
        module: Module,
        inside: Computation,
        *,
        direction: str = "LT",
        step: int = 1,
        bound: int | None = None,
        stepping: str = "add",
        swapped: bool = False,
    ) -> None:
        state: Shape = [INTEGER, INTEGER, SQUARE]
        self.condition = module.computation(f"condition_{inside.name}_{len(module.computations)}")
        whole = self.condition.parameter(state)
        counter = self.condition.part(whole, 0)
        against = self.condition.part(whole, 1) if bound is None else self.condition.constant(bound)
        sides = [against, counter] if swapped else [counter, against]
        self.condition.add("compare", TRUTH, sides, comparison_direction=direction)
        self.body = module.computation(f"body_{inside.name}_{len(module.computations)}")
        whole = self.body.parameter(state)
        counter = self.body.part(whole, 0)
        self.stepped = self.body.add(stepping, INTEGER, [counter, self.body.constant(step)])
        self.value = self.body.add("call", SQUARE, [self.body.part(whole, 2)], [inside])
        self.bound = self.body.part(whole, 1)
        self.body.tuple(self.stepped, self.bound, self.value)

    def enter(
        self, into: Computation, value: int, *, start: int | None, bound: int | None, **more: Any
    ) -> int:
        """The loop as an instruction, from start (None: run-time data); gives its value."""
        known = [
            into.add("bitcast", INTEGER, [value]) if given is None else into.constant(given)
            for given in (start, bound)
        ]
        state = into.tuple(*known, value)
        made = into.add(
            "while", [INTEGER, INTEGER, SQUARE], [state], [self.body, self.condition], **more
        )
        return into.part(made, 2)


def looped(
    inside: int = 1,
    *,
    start: int | None,
    bound: int | None,
    carried: bool = False,
    more: dict[str, bytes] | None = None,
    **loop: Any,
) -> bytes:
    """A module whose entry is one loop around so many products."""
    module = Module()
    body = product(module, dots=inside)
    made = Loop(module, body, bound=None if carried else bound, **loop)
    entry = module.computation("main")
    made.enter(entry, entry.parameter(SQUARE), start=start, bound=bound, **(more or {}))
    return module.encoded(entry)
