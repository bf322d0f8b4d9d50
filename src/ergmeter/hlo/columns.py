"""Which instructions matter, by the columns that protobuf makes of a computation?

An instruction without an opcode and another with two, which no compiler writes, would put the
columns out of step unseen. So the rows that the columns point to are made columns once more, with
a mark behind each: where just every other opcode is a mark, each row has one. It has to be the one
that the columns say: as they hold every opcode, none that matters can then be elsewhere. An
instruction without one matters if it calls, hence the callees of those rows have to be all there
are. And an id that is asked for has to be that of the row it leads to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ergmeter.hlo.module import (
    APPLYING,
    CONSTANT,
    DOT,
    KINDS,
    OTHER,
    QUIET_OPCODES,
    SPECIAL,
)
from ergmeter.hlo.plain import Noted
from ergmeter.hlo.wire import Unparsed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ergmeter.hlo.plain import Dot

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


class Columns:
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

    def noted(self, lines: Lines) -> Noted:
        """What matters; Unparsed where the columns are not in step."""
        if not len(lines.opcodes) == len(lines.merged.id) == len(lines.numbers):
            raise Unparsed
        callees = len(lines.merged.called_computation_ids)
        found = Noted()
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
            _note(found, kind, numbers, picked)
        if callees:
            raise Unparsed
        return found

    def shapes(
        self, row: Callable[[int], bytes], numbers: list[int], ids: list[int]
    ) -> list[bytes]:
        """Of the rows of these indices; Unparsed unless these are their ids."""
        picked = self._picked(row, numbers)
        shapes = _one_each(picked.shape[:], _MARK)
        if 0 in ids or _one_each(picked.id[:], _MARK_ID) != ids or len(shapes) != len(ids):
            raise Unparsed
        return shapes

    def _picked(self, row: Callable[[int], bytes], numbers: Sequence[int]) -> Any:  # noqa: ANN401
        return self._message.FromString(self._mark.join([*map(row, numbers), b""]))


def _by_kind(lines: Lines) -> list[list[tuple[int, bytes]]]:
    kinds: list[list[tuple[int, bytes]]] = [[] for _ in range(OTHER + 1)]
    for one in zip(lines.numbers, lines.opcodes, strict=True):
        if one[1] not in _CALLING_NOTHING:
            kinds[KINDS.get(one[1], OTHER)].append(one)
    return kinds


def _note(found: Noted, kind: int, numbers: Sequence[int], picked: Any) -> None:  # noqa: ANN401
    if kind == DOT:
        found.dots = _dots(numbers, picked)
    elif kind == CONSTANT:
        literals = _one_each(picked.literal[:], _MARK)
        if len(literals) != len(numbers):
            raise Unparsed
        found.literal_bytes = sum(map(len, literals))
    elif kind == SPECIAL:
        found.special = [*numbers]
    elif kind == APPLYING:
        found.applied = [one for one in picked.called_computation_ids if one != _MARK_ID]
    elif kind == OTHER:
        found.calls = _calls(numbers, picked.called_computation_ids)


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
