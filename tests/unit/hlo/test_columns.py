"""Fields that are missing here and given twice there: the last one counts, in every reader.

A reader that takes opcodes and ids as lists of a computation is put out of step by such fields
without a change of their length. One that tells the rows of a list apart by marks (an opcode or a
shape of one byte 255, an id of -1) is misled by a file that holds them.
"""

from __future__ import annotations

import pytest

from tests.unit.hlo.readers import READERS, count
from tests.unit.hlo.wire import field, integers, shape

MACS = 8 * 32 * 16
LEFT, RIGHT = (8, 32), (32, 16)


def row(
    opcodes: list[str] | list[bytes],
    ids: list[int],
    size: tuple[int, ...] = (8, 16),
    rest: bytes = b"",
) -> bytes:
    body = field(1, "x") + b"".join(field(2, opcode) for opcode in opcodes) + field(3, shape(size))
    return field(2, body + b"".join(field(35, one) for one in ids) + rest)


X, W = row(["parameter"], [1], LEFT), row(["parameter"], [2], RIGHT)
NUMBERS = field(30, integers(1, [1]) + integers(2, [0])) + integers(36, [1, 2])
DOT = row(["dot"], [3], rest=NUMBERS)
ROWS = {
    "as usual": (X + W + DOT, MACS),
    "an opcode that is overruled, after one that lacks": (
        X + W + row([], [5]) + row(["add", "dot"], [3], rest=NUMBERS),
        MACS,
    ),
    "a dot that is overruled, before an opcode that lacks": (
        X + W + row(["dot", "add"], [3], rest=NUMBERS) + row([], [5]),
        0,
    ),
    "a dot behind an opcode that is overruled": (
        row(["add", "add"], [4]) + X + W + DOT + row([], [5]),
        MACS,
    ),
    "an id that is overruled, and one that lacks": (
        row(["parameter"], [9, 1], LEFT) + W + DOT + row(["add"], []),
        MACS,
    ),
    "an id given twice, and one that lacks": (
        X + row(["parameter"], [2, 2], RIGHT) + DOT + row(["add"], []),
        MACS,
    ),
    "two without an id, which nobody names": (X + W + DOT + row(["add"], []) * 2, MACS),
    "two without an id, and two with two": (
        X + row(["parameter"], [7, 2], RIGHT) + DOT + row(["add"], [8, 4]) + row(["add"], []) * 2,
        MACS,
    ),
    "an opcode that is a mark": (X + W + row([b"\xff"], [5]) + DOT, MACS),
    "a dot of an opcode that is a mark and is overruled": (
        X + W + row([b"\xff", b"dot"], [3], rest=NUMBERS),
        MACS,
    ),
    "a shape that is overruled": (
        X + W + row(["dot"], [3], (9, 9), field(3, shape((8, 16))) + NUMBERS),
        MACS,
    ),
    "a shape that is a mark and is overruled": (
        field(
            2,
            field(1, "x")
            + field(2, "parameter")
            + field(3, b"\xff")
            + field(35, 1)
            + field(3, shape(LEFT)),
        )
        + W
        + DOT,
        MACS,
    ),
    "an id that is a mark": (
        row(["parameter"], [-1], LEFT)
        + W
        + row(
            ["dot"],
            [3],
            rest=field(30, integers(1, [1]) + integers(2, [0])) + integers(36, [-1, 2]),
        ),
        MACS,
    ),
    "an operand too many that is a mark": (
        X + W + row(["dot"], [3], rest=NUMBERS + integers(36, [-1])),
        MACS,
    ),
    "a constant without a literal": (X + W + row(["constant"], [5]) + DOT, MACS),
}
CALLERS = {
    "a caller without an opcode": row([], [1], rest=integers(38, [7])),
    "a caller without an opcode, and two opcodes elsewhere": (
        row([], [1], rest=integers(38, [7])) + row(["add", "add"], [2])
    ),
    "a caller by its second opcode": (
        row([], [2]) + row(["add", "call"], [1], rest=integers(38, [7]))
    ),
}


def computation(rows: bytes, number: int) -> bytes:
    return field(3, field(1, f"c{number}") + rows + field(5, number) + field(6, 3))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ROWS)
def test_columns_out_of_step_do_not_mislead(name: str, reader: str) -> None:
    rows, macs = ROWS[name]
    module = field(1, "m") + field(6, 7) + computation(rows, 7)
    assert count(module, reader).macs == macs


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", CALLERS)
def test_a_call_is_seen_whatever_the_opcodes(name: str, reader: str) -> None:
    module = field(1, "m") + field(6, 8) + computation(X + W + DOT, 7)
    assert count(module + computation(CALLERS[name], 8), reader).macs == MACS
