"""Fields stand in any order, so a file may end with anything: with a computation, say."""

from __future__ import annotations

import pytest

from tests.unit.hlo.readers import READERS, count
from tests.unit.hlo.wire import field, integers, shape


def instruction(name: str, opcode: str, dimensions: tuple[int, ...], number: int) -> bytes:
    head = field(1, name) + field(2, opcode) + field(3, shape(dimensions))
    return head + field(35, number)


def module_that_ends_with(last: bytes, *, padding: int) -> bytes:
    """8 x 32 by 32 x 16; `padding` lengthens the name of the last instruction."""
    dot = instruction("d" * padding, "dot", (8, 16), 3)
    dot += field(30, integers(1, [1]) + integers(2, [0])) + integers(36, [1, 2])
    operands = (
        instruction("x", "parameter", (8, 32), 1),
        instruction("w", "parameter", (32, 16), 2),
    )
    rows = b"".join(field(2, row) for row in (*operands, dot))
    computation = field(1, "main") + field(5, 7) + field(6, 3)
    body = computation + rows if last == b"instruction" else rows + computation
    return field(1, "m") + field(2, "main") + field(6, 7) + field(3, body)


@pytest.mark.parametrize("padding", [1, 90, 20_000])  # a length of one, two and three bytes
@pytest.mark.parametrize("last", [b"instruction", b"root"])
@pytest.mark.parametrize("reader", READERS)
def test_a_file_is_read_to_its_very_last_byte(reader: str, last: bytes, padding: int) -> None:
    whole = module_that_ends_with(last, padding=padding)
    assert count(whole, reader).macs == 8 * 32 * 16
