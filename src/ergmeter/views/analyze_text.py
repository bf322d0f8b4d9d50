"""Sentences and headings on the console of `erg analyze`."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_COLUMNS = 80


def wrapped(text: str, lead: str = "") -> Iterator[str]:
    """A sentence in lines of a terminal's width; paths and names stay whole."""
    yield from textwrap.wrap(
        text,
        _COLUMNS,
        initial_indent=lead,
        subsequent_indent=" " * max(2, len(lead)),
        break_long_words=False,
        break_on_hyphens=False,
    )


def heading(title: str, width: int) -> Iterator[str]:
    """A title between two rules."""
    yield "=" * width
    yield title
    yield "=" * width
