"""Handles signals for as long as a block of code runs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handled(
    handler: Callable[[int, FrameType | None], object],
    numbers: Iterable[int] = (signal.SIGINT, signal.SIGTERM),
) -> Iterator[None]:
    """Call the handler on these signals within the block; restore the old handlers after it.

    Signals that are ignored (nohup, a shell's background job) stay ignored. Outside of the main
    thread nothing changes: the calling program handles its signals.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, previous in before.items():
            if previous is not signal.SIG_IGN:
                signal.signal(number, handler)
    except ValueError:  # not the main thread
        before = {}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
