"""Sentences, headings and figures on the console of `erg analyze`."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from ergmeter.neuron.kernels import decimals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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


def ratio(value: float | None) -> str:
    """A share, or a dash where it is not known."""
    return "-" if value is None else decimals(value, 4)


def fixed(value: float | None, digits: int) -> str:
    """So many decimals; a whole number with commas."""
    return (
        "-" if value is None else f"{value:,.{digits}f}" if digits == 0 else f"{value:.{digits}f}"
    )


def bound(figures: Mapping[str, Any]) -> str:
    """What is said behind a ratio, and what is made of it, where it is not known whole."""
    if figures.get("is_uncertain"):
        return " (not certain)"
    return " (a lower bound)" if figures.get("is_lower_bound") else ""


def mark(document: Mapping[str, Any], key: str) -> str:
    """What stands right behind a value of a document that cannot be right."""
    return " (impossible)" if document.get("impossible", {}).get(key) else ""


def counted(count: int, what: str) -> str:
    """`2 loops whose ...`, `1 loop whose ...`."""
    noun, _, rest = what.partition(" ")
    if count == 1:
        noun = noun.removesuffix("es") if noun.endswith("ches") else noun.removesuffix("s")
    return f"{count:,} {noun} {rest}"
