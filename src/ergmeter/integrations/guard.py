"""The promise of a drop-in: what goes wrong in it ends its own telling, never the training.

A drop-in is called from code that was written for another module and catches nothing.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ergmeter.errors import ErgmeterError

if TYPE_CHECKING:
    from collections.abc import Callable

_Called = TypeVar("_Called", bound="Callable[..., Any]")
_warned: set[str] = set()


class Guarded:
    """Something whose guarded methods do nothing once one of them has failed, or if it is off."""

    enabled = True
    failed = ""  # why, once it has


def guarded(method: _Called) -> _Called:
    """Wrap a method of a `Guarded`: its failure is one line on stderr, and None is returned."""

    @wraps(method)
    def call(self: Guarded, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        if not self.enabled or self.failed:
            return None
        try:
            return method(self, *arguments, **options)
        except Exception as error:  # noqa: BLE001  never break training
            self.failed = reason_of(error)
            warn_once(f"{type(self).__name__} stopped: {self.failed}")
            return None

    return cast("_Called", call)


def reason_of(error: Exception) -> str:
    """What went wrong, in one line; ours speak for themselves."""
    said = str(error) if isinstance(error, ErgmeterError) else f"{type(error).__name__}: {error}"
    return " ".join(said.split())[:500]


def warn_once(said: str) -> None:
    """One line on stderr, the first time."""
    if said not in _warned:
        _warned.add(said)
        sys.stderr.write(f"ergmeter: {said}\n")


def say(text: str) -> None:
    """Whole lines on stdout in one piece: ranks share a terminal."""
    sys.stdout.write(text)
    sys.stdout.flush()
