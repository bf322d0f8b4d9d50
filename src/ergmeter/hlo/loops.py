"""The trip count of a while loop: as the compiler states it, or derived from the loop.

The compiler states it in optimised modules only. Otherwise it follows from the condition, the
initial value and the body: both sides of the comparison must change by a constant per iteration. A
count that depends on data is None.

Values are traced through tuples, copies, conversions, calls and fusions, and from a computation to
its call sites if all pass the same value. A budget limits the search.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ergmeter.hlo import proto
from ergmeter.hlo.calls import backend_config, known_trip_count
from ergmeter.hlo.wire import Span, integers, span

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.hlo.module import Computation, Instruction, Module

_BUDGET = 20_000  # instructions read for all loops of a module together
_BUDGET_PER_LOOP = 200  # more for each loop; a scan's needs about 20
_MAX_DEPTH = 60
_INTEGER_TYPES = range(2, 10)  # S8 to U64 in XLA's PrimitiveType
_PASSING = frozenset(["copy", "bitcast", "reshape", "opt-barrier", "optimization-barrier"])
_CALLING = frozenset(["call", "fusion", "async-start"])
_MAX_LITERAL_BYTES = 256

Path = tuple[int, ...]


class NotConstant(Exception):  # noqa: N818  not an error: the loop's count is unknown
    """The value depends on data, or on operations that are not traced."""


@dataclass(slots=True)
class CallFrame:
    """A computation and, if it was entered by a call, the call and the caller's frame."""

    computation: Computation
    call: Instruction | None = None
    caller: CallFrame | None = None


class LinearTerm(NamedTuple):
    """A value: `constant`, plus the part `path` of a parameter if `parameter` is set."""

    parameter: int | None
    path: Path
    constant: int


class CallSite(NamedTuple):
    """A call of a computation; `position` is its place among the computations that it calls."""

    caller: Computation
    call_span: Span
    position: int


@dataclass(slots=True)
class Loops:
    """Computes trip counts of a module's loops."""

    module: Module
    sites: Callable[[int], list[CallSite]]
    _budget: int = _BUDGET
    _open: set[tuple[int, int, Path]] = field(default_factory=set)
    _cached: dict[tuple[int, int, Path], LinearTerm | None] = field(default_factory=dict)

    def trip_count(self, computation: Computation, loop: Instruction) -> int | None:
        """Return how often the loop's body runs; None if it depends on data or can't be derived."""
        stated = known_trip_count(backend_config(self.module, loop))
        if stated is not None:
            return stated
        self._budget = max(self._budget, 0) + _BUDGET_PER_LOOP
        self._open.clear()
        try:
            return self._inferred(computation, loop)
        except NotConstant:
            return None

    def _inferred(self, computation: Computation, loop: Instruction) -> int:
        body, condition = (self._callee(loop, number) for number in (0, 1))
        frame, compare, path = self._traced(CallFrame(condition), condition.root_id, ())
        if compare.opcode != "compare" or path:
            raise NotConstant
        sides = []
        for operand in compare.operand_ids[:2]:
            value = self._linear(frame, operand, ())
            start = step = 0
            if value.parameter is not None and loop.operand_ids:
                step = self._step(body, value.path)
                start = self._outside(computation, loop.operand_ids[0], value.path)
            sides.append((start + value.constant, step))
        if len(sides) != 2:
            raise NotConstant
        (left, left_step), (right, right_step) = sides
        count = rounds(
            compare.text(proto.COMPARISON_DIRECTION), left - right, left_step - right_step
        )
        representable = _values(self._member(frame, compare.operand_ids[0]).shape.type)
        if any(start + count * step not in representable for start, step in sides):
            raise NotConstant  # the integer would overflow
        return count

    def _step(self, body: Computation, path: Path) -> int:
        """Return by how much the part `path` of a loop's state grows per iteration."""
        after = self._linear(CallFrame(body), body.root_id, path)
        if after.parameter is None or after.path != path:
            raise NotConstant
        return after.constant

    def _outside(self, computation: Computation, member: int, path: Path) -> int:
        """Return the constant value of an instruction, traced to the call sites if necessary."""
        value = self._linear(CallFrame(computation), member, path)
        if value.parameter is None:
            return value.constant
        return value.constant + self._argument(computation, value.parameter, value.path)

    def _argument(self, computation: Computation, number: int, path: Path) -> int:
        """Return the value that all callers pass for a part of a parameter."""
        key = (computation.id, number, path)
        sites = self.sites(computation.id)
        if key in self._open or len(self._open) > _MAX_DEPTH or not sites:
            raise NotConstant
        self._open.add(key)
        values = {self._passed(site, number, path) for site in sites}
        self._open.discard(key)
        if len(values) != 1:
            raise NotConstant
        return values.pop()

    def _passed(self, site: CallSite, number: int, path: Path) -> int:
        self._spend()
        call = self.module.instruction(site.call_span)
        opcode, operands = call.opcode, call.operand_ids
        if opcode == "while":
            if self._step(self._callee(call, 0), path):
                raise NotConstant
        elif opcode == "conditional":
            number = site.position + 1
        elif opcode not in _CALLING:
            raise NotConstant
        if not 0 <= number < len(operands):
            raise NotConstant
        return self._outside(site.caller, operands[number], path)

    def _linear(self, frame: CallFrame, member: int, path: Path, depth: int = 0) -> LinearTerm:
        """Return a value as a constant, or as a parameter's part plus a constant."""
        if depth > _MAX_DEPTH:
            raise NotConstant
        if frame.caller:
            return self._worked_out(frame, member, path, depth)
        key = (frame.computation.id, member, path)
        if key not in self._cached:
            self._cached[key] = None  # a value that depends on itself is not constant
            self._cached[key] = self._worked_out(frame, member, path, depth)
        cached = self._cached[key]
        if cached is None:
            raise NotConstant
        return cached

    def _worked_out(self, frame: CallFrame, member: int, path: Path, depth: int) -> LinearTerm:
        frame, instruction, path = self._traced(frame, member, path)
        opcode, operands = instruction.opcode, instruction.operand_ids
        if opcode == "parameter":
            return LinearTerm(instruction.integer(proto.PARAMETER_NUMBER), path, 0)
        if opcode == "while" and operands:
            if self._step(self._callee(instruction, 0), path):
                raise NotConstant
            return self._linear(frame, operands[0], path, depth + 1)
        if opcode == "constant" and not path:
            return LinearTerm(None, (), _scalar(instruction))
        if opcode not in ("add", "subtract") or len(operands) != 2 or path:
            raise NotConstant
        left, right = (self._linear(frame, operand, (), depth + 1) for operand in operands)
        return _sum(left, right if opcode == "add" else _negative(right))

    def _traced(
        self, frame: CallFrame, member: int, path: Path
    ) -> tuple[CallFrame, Instruction, Path]:
        """Trace a value to the instruction that computes it, through copies, tuples and calls."""
        while True:
            instruction = self._member(frame, member)
            opcode = instruction.opcode
            operands = instruction.operand_ids
            if opcode == "parameter" and frame.call and frame.caller:
                passed, number = frame.call.operand_ids, instruction.integer(proto.PARAMETER_NUMBER)
                if not 0 <= number < len(passed):
                    raise NotConstant
                frame, member = frame.caller, passed[number]
            elif opcode in _CALLING:
                callee = self._callee(instruction, 0)
                frame, member = CallFrame(callee, instruction, frame), callee.root_id
            elif opcode == "get-tuple-element" and operands:
                member, path = operands[0], (instruction.integer(proto.TUPLE_INDEX), *path)
            elif opcode == "tuple" and path and 0 <= path[0] < len(operands):
                member, path = operands[path[0]], path[1:]
            elif operands and _passes(instruction):
                member = operands[0]
            else:
                return frame, instruction, path

    def _callee(self, call: Instruction, number: int) -> Computation:
        ids = call.called_ids
        callee = self.module.computations.find(ids[number]) if number < len(ids) else None
        if callee is None:
            raise NotConstant
        return callee

    def _member(self, frame: CallFrame, member: int) -> Instruction:
        self._spend()
        where = frame.computation.places.by_id(member)
        if where is None:
            raise NotConstant
        return self.module.instruction(where)

    def _spend(self) -> None:
        self._budget -= 1
        if self._budget < 0:
            raise NotConstant


def _passes(instruction: Instruction) -> bool:
    """True if an instruction's value is that of its first operand."""
    converts = instruction.opcode == "convert" and instruction.shape.type in _INTEGER_TYPES
    return converts or instruction.opcode in _PASSING


def _negative(value: LinearTerm) -> LinearTerm:
    if value.parameter is not None:
        raise NotConstant
    return value._replace(constant=-value.constant)


def _sum(left: LinearTerm, right: LinearTerm) -> LinearTerm:
    if left.parameter is not None and right.parameter is not None:
        raise NotConstant
    moving, still = (left, right) if left.parameter is not None else (right, left)
    return moving._replace(constant=moving.constant + still.constant)


def rounds(direction: str, gap: int, step: int) -> int:
    """Return how many times in a row a comparison holds, if left - right is gap, gap + step, ...

    >>> rounds("LT", -10, 3), rounds("GE", 10, -5), rounds("NE", -6, 2)
    (4, 3, 3)
    """
    if direction in ("GT", "GE"):
        mirrored = {"GT": "LT", "GE": "LE"}
        direction, gap, step = mirrored[direction], -gap, -step
    if direction == "LE":
        direction, gap = "LT", gap - 1
    if direction == "EQ":
        if gap == 0 == step:
            raise NotConstant
        return int(gap == 0)
    if direction == "NE":
        if gap and (step == 0 or gap % step or gap // step > 0):
            raise NotConstant
        return -gap // step if gap else 0
    if direction != "LT" or (gap < 0 and step <= 0):
        raise NotConstant
    return max(0, -(gap // step)) if gap < 0 else 0


def _values(type_number: int) -> range:
    """Return the range of an integer type; XLA numbers S8, S16, S32, S64 and then U8 to U64."""
    if type_number not in _INTEGER_TYPES:
        raise NotConstant
    bits = 8 << (type_number - 2) % 4
    return range(1 << bits) if type_number >= 6 else range(-1 << bits - 1, 1 << bits - 1)


def _scalar(constant: Instruction) -> int:
    """Return the value of an integer constant, whose field in the literal depends on its type."""
    where = span(constant.fields, proto.LITERAL)
    if where is None or where[1] - where[0] > _MAX_LITERAL_BYTES or constant.shape.dimensions:
        raise NotConstant
    literal = constant.part(proto.LITERAL)
    for number in (4, 5, 6, 7):  # s32s, s64s, u32s, u64s
        values = integers(constant.data, literal, number)
        if len(values) == 1:
            return values[0] % (1 << 64) if number == 7 else values[0]
    for number, is_signed in ((3, False), (15, True), (16, False), (17, True)):
        stored = span(literal, number)  # u8s, s8s, u16s and s16s are bytes
        if stored and stored[1] > stored[0]:
            return int.from_bytes(constant.data[stored[0] : stored[1]], "little", signed=is_signed)
    raise NotConstant
