"""Damaged modules by the thousand: `python -m tests.unit.hlo.hostile FILES [SEED]`.

A process of its own, because its memory is limited: what asks for more than a fixed amount beyond
what the readers need fails here. For each file the three readers must say the same: one count, or
that the file is damaged. CPU time is held against what the whole module takes, so that the
machine's pace and its other jobs do not matter.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ergmeter.errors import FormatError
from tests.unit.hlo import wire
from tests.unit.hlo.readers import READERS, count, same

DATA = Path(__file__).parents[2] / "data" / "hlo"
LARGEST_BYTES = 60_000
SPARE_BYTES = 256 << 20
TIMES_A_WHOLE_MODULE = 20
FLOOR_S = 0.005  # below it a module's own time is the clock's
SEED = 20261115


def bases() -> dict[str, bytes]:
    files = sorted(DATA.glob("*.pb"))
    return {f.name: f.read_bytes() for f in files if f.stat().st_size <= LARGEST_BYTES}


def cut(data: bytes, dice: random.Random) -> bytes:
    return data[: dice.randrange(len(data))]


def flipped(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 5, 20))):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def overwritten(data: bytes, dice: random.Random) -> bytes:
    at, length = dice.randrange(len(data)), dice.choice((1, 2, 4, 9, 30))
    filler = dice.choice((b"\xff", b"\0", b"\x80", b"\x7f"))
    return data[:at] + filler * length + data[at + length :]


def removed(data: bytes, dice: random.Random) -> bytes:
    at, length = dice.randrange(len(data)), dice.randrange(1, 60)
    return data[:at] + data[at + length :]


def repeated(data: bytes, dice: random.Random) -> bytes:
    at, length = dice.randrange(len(data)), dice.randrange(1, 400)
    return data[: at + length] + data[at : at + length] + data[at + length :]


def lengthened(data: bytes, dice: random.Random) -> bytes:
    """A length that says far too much, or nearly the right thing."""
    at = dice.randrange(len(data))
    length = wire.varint(dice.choice((2**63, 2**64 - 1, 2**31, 2**32 + 5, len(data), 300)))
    return data[:at] + length + data[at + 1 :]


def noise(data: bytes, dice: random.Random) -> bytes:
    return dice.randbytes(dice.choice((0, 1, 2, 7, 100, 5000)))


def renumbered(data: bytes, dice: random.Random) -> bytes:
    """An id, operand or callee of another instruction: calls in a circle, operands that lack."""
    changed = bytearray(data)
    tags = (b"\x98\x02", b"\xa2\x02", b"\xb2\x02")  # id, operand ids, called ids
    for _ in range(dice.choice((1, 3, 10))):
        at = changed.find(dice.choice(tags), dice.randrange(len(changed)))
        if 0 <= at < len(changed) - 4:
            changed[at + 2 + dice.randrange(2)] = dice.randrange(128)
    return bytes(changed)


def fields(data: bytes) -> list[tuple[int, int | bytes]]:
    """A message as (number, value); what has a length is bytes."""
    found: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(data):
        tag, at = number_at(data, at)
        value, at = number_at(data, at)
        if tag & 7 == 2:
            found.append((tag >> 3, data[at : at + value]))
            at += value
        elif tag & 7 == 0:
            found.append((tag >> 3, value))
        else:
            raise ValueError(f"wire type {tag & 7}")
    return found


def number_at(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


ODD = (0, 1, 2, 3, 4, 5, 127, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


# Computations, instructions, and of these shape, literal, window and dimension numbers.
INSIDE = ((3,), (2,), (3, 8, 15, 16, 30), ())


def reshaped(data: bytes, dice: random.Random, depth: int = 0) -> bytes:
    """Whole messages with an odd part: missing, twice, moved, another number or kind."""
    parts = fields(data)
    index = dice.randrange(len(parts)) if parts else 0
    inner = [
        place
        for place, (number, value) in enumerate(parts)
        if isinstance(value, bytes) and number in INSIDE[depth]
    ]
    if inner and dice.random() < (1, 0.95, 0.5, 0)[depth]:
        index = dice.choice(inner)
        number, value = parts[index]
        assert isinstance(value, bytes)
        parts[index] = (number, reshaped(value, dice, depth + 1))
    elif parts:
        number, value = parts[index]
        odd: int | bytes = dice.choice(ODD)
        if isinstance(value, bytes):
            packed = b"".join(wire.varint(dice.choice(ODD)) for _ in range(dice.randrange(4)))
            opcode = dice.choice(OPCODES)
            odd = dice.choice((odd, packed, opcode, opcode, value[: len(value) // 2], b""))
        replaced = dice.choice(
            ([], [(number, value)] * 2, [(number, odd)], [(number, odd)], [(number + 1, value)])
        )
        parts[index : index + 1] = replaced
    if dice.random() < 0.1:
        dice.shuffle(parts)
    return b"".join(wire.field(number, value) for number, value in parts)


OPCODES = (
    b"while dot call fusion conditional convolution constant custom-call tuple add map".split()
)
KINDS = (
    *(cut, flipped, flipped, overwritten, removed, repeated, lengthened, noise, renumbered),
    *(reshaped,) * 6,
)


def damaged(number: int, seed: int) -> Iterator[tuple[str, str, bytes]]:
    """(what was done, the whole module's name, the file)."""
    dice = random.Random(seed)
    whole = bases()
    names = list(whole)
    for index in range(number):
        kind, name = KINDS[index % len(KINDS)], dice.choice(names)
        yield f"{index} {kind.__name__}", name, kind(whole[name], dice)


def verdict(data: bytes, reader: str) -> Any:
    """The count as plain data, or "damaged" with the reason."""
    try:
        return same(count(data, reader))
    except FormatError as error:
        return f"damaged: {error}"


def cpu_s(data: bytes, reader: str) -> float:
    before = time.process_time()
    verdict(data, reader)
    return time.process_time() - before


def limit_memory() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + SPARE_BYTES, size + SPARE_BYTES))


def examined(number: int, seed: int = SEED) -> dict[str, Any]:
    """What was said of so many files, and what should not have been."""
    whole = bases()
    healthy_s = {
        (name, reader): max(FLOOR_S, *(cpu_s(data, reader) for _ in range(3)))
        for name, data in whole.items()
        for reader in READERS
    }
    limit_memory()
    said: Counter[str] = Counter()
    faults: list[str] = []
    for what, name, data in damaged(number, seed):
        verdicts = {}
        for reader in READERS:
            allowed_s = TIMES_A_WHOLE_MODULE * healthy_s[name, reader]
            before = time.process_time()
            try:
                verdicts[reader] = verdict(data, reader)
            except Exception as error:  # noqa: BLE001  the point: nothing but FormatError
                faults.append(f"{what} of {name}, {reader}: {error!r}")
            took_s = time.process_time() - before
            if took_s > allowed_s and min(cpu_s(data, reader) for _ in range(2)) > allowed_s:
                faults.append(f"{what} of {name}, {reader}: {took_s:.2f} s")
        if any(one != verdicts[READERS[0]] for one in verdicts.values()):
            faults.append(f"{what} of {name}: {verdicts}")
        first = next(iter(verdicts.values()), "")
        said["damaged" if isinstance(first, str) else "counted"] += 1
    return {"said": said, "faults": faults}


if __name__ == "__main__":
    print(json.dumps(examined(*map(int, sys.argv[1:])), indent=1))
