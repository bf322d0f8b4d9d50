"""How far a command is that reads many things: a line on a terminal, once it has taken a second.

The trap: a line that stays. It goes to standard error, to a terminal alone, and is wiped before
anything else is said.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_QUIET_S = 1.0
_BETWEEN_S = 0.1
_WIPE = "\r\x1b[K"


@contextmanager
def reading(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function to be told how many of how many have been read."""
    is_terminal = sys.stderr.isatty()
    due_s = time.monotonic() + _QUIET_S
    is_shown = False

    def tell(done: int, of: int) -> None:
        nonlocal due_s, is_shown
        if not is_terminal or time.monotonic() < due_s:
            return
        sys.stderr.write(f"{_WIPE}reading {what}: {done:,} of {of:,}")
        sys.stderr.flush()
        due_s, is_shown = time.monotonic() + _BETWEEN_S, True

    try:
        yield tell
    finally:
        if is_shown:
            sys.stderr.write(_WIPE)
            sys.stderr.flush()
