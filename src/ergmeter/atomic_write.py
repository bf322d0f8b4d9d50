"""Replaces a file as a whole: a reader sees the old file or the new one, never a part of it."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path in the same folder to write to; it replaces `path` if nothing was raised.

    OSError where the folder can't be written to. What was written is removed if anything failed.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file by this text in UTF-8."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")
