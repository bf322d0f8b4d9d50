"""The stored outputs, and how a new output differs from them."""

from __future__ import annotations

import difflib
from pathlib import Path

FOLDER = Path(__file__).with_name("expected")
_MOST_LINES = 200


def path_of(name: str) -> Path:
    """Where the output of a case is stored."""
    return FOLDER / f"{name}.txt"


def stored(name: str) -> str | None:
    """The stored output of a case; None if there is none."""
    path = path_of(name)
    return path.read_bytes().decode() if path.exists() else None


def difference(name: str, found: str) -> str:
    """A unified diff from the stored output to this one; empty if they are the same."""
    expected = stored(name)
    if expected == found:
        return ""
    if expected is None:
        return f"{path_of(name).name} is not stored: python -m tests.golden --update\n"
    lines = list(
        difflib.unified_diff(
            expected.splitlines(keepends=True), found.splitlines(keepends=True),
            f"expected/{name}.txt", "now",
        )
    )  # fmt: skip
    left_out = len(lines) - _MOST_LINES
    more = [f"... {left_out} more lines\n"] if left_out > 0 else []
    return "".join([*lines[:_MOST_LINES], *more]) or "they differ in line ends\n"
