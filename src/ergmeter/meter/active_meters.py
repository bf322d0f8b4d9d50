"""The Meters that measure in this process: closed when it ends, set aside in a forked child.

They are held here until they are closed, whoever else has let them go: their threads go on, and a
Meter that was forgotten would never be closed. One hook of each kind serves them all, because
neither can be undone.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from ergmeter.meter.meter import Meter

_meters: set[Meter] = set()
_makes_way: list[Callable[[], None]] = []
_resting: dict[Meter, Callable[[], None]] = {}
_hooked: set[str] = set()
_IMPORTS_S = 2.0  # that a fork waits at most: what is imported may itself wait for who forks


def add(meter: Meter) -> None:
    """Keep this Meter until it is closed."""
    _meters.add(meter)
    hook()


def discard(meter: Meter) -> None:
    """Let go of a Meter that is closed."""
    _meters.discard(meter)
    _resting.pop(meter, None)


def meters() -> tuple[Meter, ...]:
    """Those that measure now."""
    return tuple(_meters)


def rests(meter: Meter, end: Callable[[], None]) -> None:
    """Its training has made its last step; it stays open for a last evaluation or save.

    `end` closes it, when another training begins in this process.
    """
    _resting[meter] = end


def is_training() -> bool:
    """Whether a Meter measures whose training is not over."""
    return any(meter not in _resting for meter in _meters)


def end_resting() -> None:
    """Another training begins: close those that rest."""
    for end in tuple(_resting.values()):
        end()


def gives_way(end: Callable[[], None]) -> None:
    """Call this when somebody comes to measure by their own will: nobody asked for what it ends."""
    _makes_way.append(end)


def keeps_way(end: Callable[[], None]) -> None:
    """It has ended already."""
    if end in _makes_way:
        _makes_way.remove(end)


def make_way() -> None:
    """Somebody comes to measure: whoever looks on unasked ends now."""
    for end in tuple(_makes_way):
        end()


def hook() -> None:
    """See to it that forks and the end of the process are known. Once is enough."""
    if "process" not in _hooked:
        _hooked.add("process")
        # What we load later may load it (pyarrow does, where there is cloudpickle), and it has
        # hooks for forks too: registered while a fork waits for us, one half of them would run.
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


def _before_fork() -> None:
    _wait_for_imports()
    for meter in meters():
        if meter._handover is not None:
            meter._handover.pause()


def _wait_for_imports() -> None:
    """A child that is forked while a thread of ours imports a module can't ever import it."""
    until_s = time.monotonic() + _IMPORTS_S
    while _is_importing() and time.monotonic() < until_s:
        time.sleep(0.001)


def _is_importing() -> bool:
    here = threading.get_ident()
    ours = {one.ident for one in threading.enumerate() if one.name.startswith("ergmeter")}
    frames = [one for ident, one in sys._current_frames().items() if ident in ours - {here}]
    return any(_is_in_import(frame) for frame in frames)


def _is_in_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _after_fork() -> None:
    for meter in meters():
        if meter._handover is not None:
            meter._handover.resume()


def _forked() -> None:
    _resting.clear()
    _hooked.discard("finalizer")  # such a child begins without those of its parent
    for meter in meters():
        _meters.discard(meter)
        meter._forked()
