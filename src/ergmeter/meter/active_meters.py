"""The Meters that measure in this process: closed when it ends, set aside in a forked child.

They are referenced here until they are closed: their threads go on, and a Meter without a reference
would never be closed. One hook of each kind serves all Meters, because hooks can't be removed.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from traceback import walk_stack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.meter.meter import Meter

_meters: set[Meter] = set()
_makes_way: list[Callable[[], None]] = []
_resting: dict[Meter, Callable[[], None]] = {}
_hooked: set[str] = set()
_IMPORTS_S = 2.0  # the longest that a fork waits: the import may wait for the forking thread


def add(meter: Meter) -> None:
    """Registers a Meter until it is closed."""
    _meters.add(meter)
    hook()


def discard(meter: Meter) -> None:
    """Removes a Meter that is closed."""
    _meters.discard(meter)
    _resting.pop(meter, None)


def meters() -> tuple[Meter, ...]:
    """The Meters that measure now."""
    return tuple(_meters)


def rests(meter: Meter, end: Callable[[], None]) -> None:
    """Marks a Meter whose training has made its last step; it stays open for a last evaluation.

    `end` closes it, when another training begins in this process.
    """
    _resting[meter] = end


def is_training() -> bool:
    """True if a Meter measures a training that is not over."""
    return any(meter not in _resting for meter in _meters)


def end_resting() -> None:
    """Closes the resting Meters when another training begins."""
    for end in tuple(_resting.values()):
        end()


def gives_way(end: Callable[[], None]) -> None:
    """Registers a function to call when the user's own Meter starts: it ends an automatic one."""
    _makes_way.append(end)


def keeps_way(end: Callable[[], None]) -> None:
    """Removes a function that `gives_way` registered: the automatic Meter has ended."""
    if end in _makes_way:
        _makes_way.remove(end)


def make_way() -> None:
    """Ends the automatic Meters, because the user's own Meter starts."""
    for end in tuple(_makes_way):
        end()


def hook() -> None:
    """Installs the hooks for forks and for the process's end, once."""
    if "process" not in _hooked:
        _hooked.add("process")
        # A later import of ours may import logging (pyarrow does, with cloudpickle), which has
        # hooks for forks too: registered while a fork waits for us, only half of them would run.
        import logging  # noqa: F401, PLC0415

        atexit.register(_close_all)
        if hasattr(os, "register_at_fork"):  # Windows does not fork
            os.register_at_fork(
                before=_before_fork, after_in_parent=_after_fork, after_in_child=_forked
            )
    if "finalizer" not in _hooked and "multiprocessing.util" in sys.modules:
        # Its children leave by os._exit: atexit never runs there, finalizers do.
        _hooked.add("finalizer")
        sys.modules["multiprocessing.util"].Finalize(None, _close_all, exitpriority=10)


def _close_all() -> None:
    for meter in meters():
        meter.close()
    restore_interrupt()


def restore_interrupt() -> None:
    """Restore the exit code 130 of a program that Ctrl-C ended. Call it last in an exit handler.

    Python clears its flag for an unhandled KeyboardInterrupt when code is executed from a string,
    as a namedtuple does in a module that we import at exit. It sets the flag when such code raises.
    """
    if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt) and not sys.flags.inspect:
        with suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def _before_fork() -> None:
    # A child that is forked while a thread of ours imports a module can't ever import it.
    until_s = time.monotonic() + _IMPORTS_S
    while _is_importing() and time.monotonic() < until_s:
        time.sleep(0.001)
    for meter in meters():
        if meter._handover is not None:
            meter._handover.pause()


def _is_importing() -> bool:
    here = threading.get_ident()
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith("ergmeter")}
    newest = [frame for ident, frame in sys._current_frames().items() if ident in ours - {here}]
    frames = (caller for frame in newest for caller, _ in walk_stack(frame))
    return any(frame.f_code.co_filename.startswith("<frozen importlib") for frame in frames)


def _after_fork() -> None:
    for meter in meters():
        if meter._handover is not None:
            meter._handover.resume()


def _forked() -> None:
    _resting.clear()
    _hooked.discard("finalizer")  # a multiprocessing child starts without its parent's finalizers
    for meter in meters():
        _meters.discard(meter)
        meter._forked()
