"""Which values does a key take? Readers that give the value, or say what it should have been.

The trap: YAML's own ideas. `2e-4` without a dot is text to it, `no` is False and `yes` is True;
so a number may be written as text, and a choice that has "no" takes False for it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias


class NotTaken(Exception):  # noqa: N818  what it is, rather than that it went wrong
    """The value is none of those that the key takes. The text is what it takes."""


Kind: TypeAlias = Callable[[Any], Any]


def flag(value: object) -> bool:
    """True or false."""
    if isinstance(value, bool):
        return value
    raise NotTaken("must be true or false")


def word(value: object) -> str:
    """Some text."""
    if isinstance(value, str) and value.strip():
        return value
    raise NotTaken("must be text")


def file(value: object) -> Path:
    """A path, from the working directory."""
    if isinstance(value, str) and value.strip():
        return Path(value).expanduser()
    raise NotTaken("must be a path")


def whole_number(least: int) -> Kind:
    """A whole number, so large or larger."""

    def read(value: object) -> int:
        if value == "auto":
            raise NotTaken(
                "must be a number: `auto` lets each side of a comparison run with another one"
            )
        number = _number(value)
        if number is None or not number.is_integer() or number < least:
            raise NotTaken(f"must be a whole number of {least} or more")
        return int(number)

    return read


def number(least: float, *, below: float = math.inf, above: bool = False) -> Kind:
    """A number from `least` on (`above`: past it) and `below` a limit."""
    wanted = f"above {least:g}" if above else f"of {least:g} or more"
    if below < math.inf:
        wanted += f" and below {below:g}"

    def read(value: object) -> float:
        found = _number(value)
        if found is None or not least <= found < below or (above and found == least):
            raise NotTaken(f"must be a number {wanted}")
        return found

    return read


def choice(*allowed: str | int) -> Kind:
    """One of these."""
    names = ", ".join(map(str, allowed))

    def read(value: object) -> str | int:
        if value is False and "no" in allowed:
            return "no"
        if isinstance(value, str | int) and not isinstance(value, bool) and value in allowed:
            return value
        near = nearest(str(value), [str(one) for one in allowed])
        raise NotTaken(f"must be one of {names}" + (f"; did you mean {near}?" if near else ""))

    return read


def modules(value: object) -> tuple[str, ...] | None:
    """Names of layers; `auto` leaves the choice to the training."""
    if value == "auto":
        return None
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return tuple(value)
    raise NotTaken("must be a list of layers' names, or auto")


def nearest(name: str, names: Sequence[str]) -> str | None:
    """The one that was probably meant."""
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return found[0] if found else None


def is_mapping(value: object) -> bool:
    """Whether it has keys and values."""
    return isinstance(value, Mapping)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None
