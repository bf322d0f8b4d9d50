"""When a step began and ended, on the clock of the device that computed it.

A loop does not wait for its GPU: the host may have queued three steps before the first is done, so
host times say when work was queued. Waiting would change what is measured. So where torch uses a
GPU, an event goes into its queue with each timestamp, and a thread of ours reads the events later.

An event has only the device's time. Now and then one is put into an empty queue between two reads
of the host's clock, which maps all others to that clock.

Nothing is imported: a framework that is not loaded computes nothing.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from time import monotonic_ns
from typing import Any

from ergmeter.meter.pending_steps import step_values
from ergmeter.records import Mark, Step, StepValues
from ergmeter.units import NS_PER_S

# What is computed. Waiting for data and writing a checkpoint are the host's own.
ON_DEVICE = ("train", "eval")

_NS_PER_MS = 1e6
_ATTEMPTS = 8  # to time an anchor event; the attempt with the narrowest interval is used
_NARROW_NS = 30_000  # an interval that is narrow enough
_PATIENCE_NS = 2_000_000  # for one attempt: another thread may have the interpreter meanwhile
_LOOK_S = 0.002
_DRIVER = "libcuda.so.1"
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


_streams: dict[Any, Any] = {}
_NOT_ASKED = -1
_in_use: dict[int, int | None] = {}  # by the current device; cleared at each hand-over


class Moment(int):
    """The host's time in nanoseconds, with a CUDA event that was queued at that time."""

    event: Any
    queue: Any


def moment() -> int:
    """The time now; where torch uses a GPU, with an event for the device's time. Never waits."""
    now_ns = monotonic_ns()
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return now_ns
    cuda = getattr(torch, "cuda", None)
    try:
        # What is recorded in a CUDA graph happens when that is replayed, and not now.
        if cuda is None or not cuda.is_initialized() or cuda.is_current_stream_capturing():
            return now_ns
        queue = _queue(torch)
        if queue is None:
            return now_ns
        event = cuda.Event(enable_timing=True)
        event.record(_streams[queue])
    except (RuntimeError, AttributeError, AssertionError):  # the training will get the same error
        return now_ns
    with_event = Moment(now_ns)
    with_event.event, with_event.queue = event, queue
    return with_event


def _queue(torch: Any) -> Any:  # noqa: ANN401
    """The CUDA stream (queue) that this thread fills; None where that is not certain.

    Torch makes a new stream object at each call, which takes longer than all else here; so they are
    cached. The device is the current one, if it is in use. A program that uses "cuda:1" everywhere
    and never calls `set_device` has 0 as its current device; an event there would not follow its
    work and, worse, would open a context on device 0.
    """
    current = torch._C._cuda_getDevice()
    device = _in_use.get(current, _NOT_ASKED)
    if device == _NOT_ASKED:
        device = _in_use[current] = _device(torch, current)
    if device is None:
        return None
    queue = torch._C._cuda_getCurrentStream(device)
    if queue not in _streams:
        _streams[queue] = torch.cuda.current_stream(device)
    return queue


def _device(torch: Any, current: int) -> int | None:  # noqa: ANN401
    """The device that this process computes on; None if that is not clear among several.

    None too if JAX has a GPU: an event in torch's queue does not follow JAX's work.
    """
    jax = sys.modules.get("jax._src.xla_bridge")
    if any(name != "cpu" for name in getattr(jax, "_backends", ())):
        return None
    has_context = torch._C._cuda_hasPrimaryContext
    used = [index for index in range(torch.cuda.device_count()) if has_context(index)]
    if current in used and (current or len(used) == 1):  # not 0: the program has chosen it
        return current
    return used[0] if len(used) == 1 else None


def catch_up(at_most_s: float) -> None:
    """Wait until the device has done the work that this thread has queued so far."""
    now = moment()
    until_s = time.monotonic() + at_most_s
    with apart_from_captures(), suppress(RuntimeError):  # of a device that has failed
        while isinstance(now, Moment) and not now.event.query() and time.monotonic() < until_s:
            time.sleep(_LOOK_S)


class Timeline:
    """Steps in order, which wait until the device has finished them, to be timed by it."""

    def __init__(self, mark: Callable[[Mark], None]) -> None:
        self._mark = mark
        self._waiting: deque[Step] = deque()
        self._streams: dict[Any, Any] = {}  # by device: an empty stream of our own
        self._failed = self._is_noted = False
        self._last_ns: dict[Any, int] = {}  # by queue

    def passed(self, rows: list[StepValues]) -> list[StepValues]:
        """Add rows; return all steps that the device has finished, with the device's times.

        The host's start and end are stored beside them; None if the times are the host's already.
        """
        _in_use.clear()
        if not self._waiting and _have_no_event(rows):
            return rows  # quick, where rows are many
        self._waiting.extend(Step(*row) for row in rows)
        done: list[StepValues] = []
        if any(_events(row) for row in self._waiting):
            try:
                with apart_from_captures():
                    self._by_device(done)
            except RuntimeError as error:  # the training will get the same error
                self._failed = True
                message = f"steps are timed by the host from here on: {error}"
                self._say("step_clock_failed", message)
        if self._failed or not any(_events(row) for row in self._waiting):
            done += self._by_host()
        return done

    def give_up(self) -> list[StepValues]:
        """The remaining steps by the host's times: the device does not answer."""
        if self._waiting:
            self._say("step_clock_failed", f"the device has not ended {len(self._waiting)} steps")
        return self._by_host()

    def _by_host(self) -> list[StepValues]:
        rows = [step_values(_by_host(row)) for row in self._waiting]
        self._waiting.clear()
        return rows

    def _by_device(self, done: list[StepValues]) -> None:
        anchors: dict[Any, tuple[Any, int]] = {}
        while self._waiting and not self._failed:
            row = self._waiting[0]
            if not all(event.query() for event in _events(row)):
                return
            timed = _by_host(row)
            if _events(row):
                edges = (row.start_ns, row.end_ns)
                start_ns, end_ns = (self._device_ns(moment_ns, anchors) for moment_ns in edges)
                # Two anchors differ by a few microseconds, and steps of one queue do not overlap.
                queue = getattr(row.end_ns, "queue", None)
                last_ns = self._last_ns.get(queue, 0)
                if last_ns - _PATIENCE_NS < start_ns < last_ns:
                    start_ns = min(last_ns, end_ns - 1)
                self._last_ns[queue] = end_ns
                timed = replace(
                    timed,
                    start_ns=start_ns,
                    end_ns=end_ns,
                    host_start_ns=timed.start_ns,
                    host_end_ns=timed.end_ns,
                )
            done.append(step_values(timed))
            self._waiting.popleft()

    def _device_ns(self, moment_ns: int, anchors: dict[Any, tuple[Any, int]]) -> int:
        if not isinstance(moment_ns, Moment):
            return moment_ns
        device = moment_ns.event.device
        if device not in anchors:
            anchors[device] = self._anchor(device)
        anchor, at_ns = anchors[device]
        since_ms: float = anchor.elapsed_time(moment_ns.event)
        return at_ns + round(since_ms * _NS_PER_MS)

    def _anchor(self, device: Any) -> tuple[Any, int]:  # noqa: ANN401
        """An event in an empty queue, with the host's time at which it happened."""
        cuda: Any = sys.modules["torch"].cuda
        if device not in self._streams:
            self._streams[device] = cuda.Stream(device)
        best: tuple[int, Any, int] | None = None
        for _ in range(_ATTEMPTS):
            event = cuda.Event(enable_timing=True)
            before_ns = monotonic_ns()
            event.record(self._streams[device])
            while not event.query() and monotonic_ns() < before_ns + _PATIENCE_NS:
                pass
            event.synchronize()
            width_ns = monotonic_ns() - before_ns
            if best is None or width_ns < best[0]:
                best = (width_ns, event, before_ns + width_ns // 2)
            if width_ns < _NARROW_NS:
                break
        assert best is not None
        width_ns, event, at_ns = best
        if not self._is_noted:
            self._is_noted = True
            within = f"{width_ns / 2 / NS_PER_S * 1e6:.0f} us"
            self._mark(
                Mark(at_ns, "step_clock", f"CUDA events, within {within} of the host's clock")
            )
        return event, at_ns

    def _say(self, name: str, what: str) -> None:
        self._mark(Mark(monotonic_ns(), name, " ".join(what.split())[:500]))


def _by_host(row: Step) -> Step:
    """The step with the host's times, as plain numbers without events."""
    return replace(row, start_ns=int(row.start_ns), end_ns=int(row.end_ns))


def _have_no_event(rows: list[StepValues]) -> bool:
    return {type(moment_ns) for row in rows for moment_ns in row[:2]} <= {int}


def _events(row: Step) -> list[Any]:
    edges = (row.start_ns, row.end_ns)
    return [moment.event for moment in edges if isinstance(moment, Moment)]


@contextmanager
def apart_from_captures() -> Iterator[None]:
    """Make CUDA calls on this thread harmless to CUDA graphs that other threads capture.

    Without it an allocation or a query on this thread invalidates another thread's capture.
    """
    exchange = _mode_exchange()
    mode = ctypes.c_int(_THREAD_LOCAL)
    if exchange is not None:
        exchange(ctypes.byref(mode))  # `mode` is the previous mode now
    try:
        yield
    finally:
        if exchange is not None:
            exchange(ctypes.byref(mode))


@cache
def _mode_exchange() -> Any:  # noqa: ANN401  a function of the driver
    try:
        return ctypes.CDLL(_DRIVER).cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # not NVIDIA's: a device that is "cuda" by name
        return None
