"""HLO modules for tests, written byte by byte: just the fields that a count needs.

Field numbers are those of XLA's hlo.proto. Sizes are chosen so that a test can multiply by hand.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path

KERNEL = "AwsNeuronCustomNativeKernel"


def varint(value: int) -> bytes:
    out = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        out.append(low | (0x80 if value else 0))
        if not value:
            return bytes(out)


def number(field_number: int, value: int) -> bytes:
    return varint(field_number << 3) + varint(value)


def piece(field_number: int, content: bytes | str) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    return varint(field_number << 3 | 2) + varint(len(data)) + data


def packed(field_number: int, values: tuple[int, ...]) -> bytes:
    return piece(field_number, b"".join(map(varint, values))) if values else b""


def shape(*dimensions: int) -> bytes:
    return number(2, 11) + packed(3, dimensions)  # F32


def config(mac_count: int | None = None, *, name: str = "flash_fwd") -> bytes:
    """What NKI writes: JSON in base64, with its multiply-adds or without."""
    fields: dict[str, object] = {"func_name": name}
    if mac_count is not None:
        fields["mac_count"] = mac_count
    return base64.b64encode(json.dumps(fields).encode())


@dataclass
class Computation:
    """Instructions with ids from 1; each method adds one and returns its id."""

    id: int
    name: str = "main"
    first: int = 1
    parts: list[bytes] = field(default_factory=list)

    def add(self, opcode: str, dimensions: bytes, *more: bytes) -> int:
        own = self.first + len(self.parts)
        parts = (piece(1, f"{opcode}.{own}"), piece(2, opcode), piece(3, dimensions), *more)
        self.parts.append(b"".join((*parts, number(35, own))))
        return own

    def parameter(self, *dimensions: int) -> int:
        return self.add("parameter", shape(*dimensions), number(9, len(self.parts)))

    def dot(self, left: int, right: int, m: int, n: int) -> int:
        """(m, k) x (k, n)."""
        numbers = packed(1, (1,)) + packed(2, (0,))
        return self.add("dot", shape(m, n), piece(30, numbers), packed(36, (left, right)))

    def kernel(self, settings: bytes, *operands: int, target: str = KERNEL) -> int:
        return self.add(
            "custom-call", shape(1), piece(28, target), packed(36, operands), piece(43, settings)
        )

    def call(self, computation: int, *operands: int) -> int:
        return self.add("call", shape(1), packed(36, operands), packed(38, (computation,)))

    def encoded(self) -> bytes:
        instructions = b"".join(piece(2, part) for part in self.parts)
        root = self.first + len(self.parts) - 1
        return piece(1, self.name) + instructions + number(5, self.id) + number(6, root)


def module(*computations: Computation, name: str = "graph") -> bytes:
    """A module; its first computation is the entry."""
    entry = computations[0]
    head = piece(1, name) + piece(2, entry.name)
    return head + b"".join(piece(3, c.encoded()) for c in computations) + number(6, entry.id)


def one_dot(m: int, k: int, n: int, *kernels: bytes) -> bytes:
    """A graph of one product, m x k x n multiply-adds, and calls of kernels."""
    main = Computation(1)
    left, right = main.parameter(m, k), main.parameter(k, n)
    main.dot(left, right, m, n)
    for settings in kernels:
        main.kernel(settings, left)
    return module(main)


def write(folder: Path, content: bytes, *, name: str = "model.hlo_module.pb") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(content)
    return path
