"""The two readers, by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ergmeter.hlo import ModuleCount, count_bytes

READERS = ("compiled", "protobuf")


def count(source: Path | bytes, reader: str) -> ModuleCount:
    data = source.read_bytes() if isinstance(source, Path) else source
    return count_bytes(data, reader=reader)


def flags(made: ModuleCount) -> dict[str, int]:
    """How many things a count admits not to know, and what it left out."""
    return {
        "unknown_loops": len(made.unknown_loops),
        "uneven_branches": len(made.uneven_branches),
        "unknown_calls": sum(made.unknown_calls.values()),
        "unreachable": made.unreachable,
    }


def same(made: ModuleCount) -> dict[str, object]:
    """A count as plain data, without the reader's name."""
    return {name: value for name, value in dataclasses.asdict(made).items() if name != "reader"}
