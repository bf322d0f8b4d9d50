"""Profiles a few steps with torch's profiler, on request.

    with Meter() as meter, Profile(meter, steps=3) as profile:
        for batch in loader:
            with meter.step(tokens=batch.numel()):
                train(batch)
            profile.step()

Off by default: a profiled step takes longer, and the profiler delays the training between steps.
The run stores that delay beside the result. A trace of 10 to 500 MB is parsed with the GIL held, so
it is read after the last step. It stays in the run's folder, for https://ui.perfetto.dev.

Torch has one profiler per process. If the program uses its own, ours stays off: it would take the
other's events, or end the training with "already enabled".
"""

from __future__ import annotations

import gzip
import importlib
import shutil
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile, schedule

from ergmeter.errors import UsageError
from ergmeter.importers.torch_trace import events_of, split
from ergmeter.integrations.guard import Guarded, guarded, reason_of
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from ergmeter.meter import Meter

AFTER = 10  # first steps that are not profiled: they include compilation and autotuning
_WARMUP = 1  # the profiler's own: its first step is the slowest
_ANOTHER = (
    "the program has a torch profiler of its own, and there can be one at a time: leave out either"
    " (one that was never closed counts: `with torch.profiler.profile(...)` closes it)"
)
_COUNTED_AS = "ProfilerStep"


class Profile(Guarded):
    """Profiles `steps` steps after the first `after`; call `step` at the end of each step."""

    reads_at_once = False  # the trace, right after the last profiled step

    def __init__(self, meter: Meter, *, steps: int, after: int = AFTER) -> None:
        if steps < 1 or after < 0:
            raise UsageError(f"steps must be 1 or more, after 0 or more; got {steps} and {after}")
        self._meter = meter
        self._steps = steps
        self._after = after
        self._first = after + _WARMUP
        self._count = 0
        self._is_on = False
        self._profiler: Any = None  # from the warm-up to the last profiled step
        self._thread = 0  # the one that must end it
        self._start_ns = self._end_ns = 0  # of the steps that are profiled
        self._ready_ns = self._held_ns = 0  # the profiler's own time at the start, between steps
        self._unread: Path | None = None

    def __enter__(self) -> Profile:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    @guarded
    def start(self) -> None:
        """Prepare to profile. Call it before the first step."""
        began_ns = time.monotonic_ns()
        self._is_on = True
        self._meter.mark("no_profile_yet", f"steps are profiled after the first {self._first}")
        # The profiler imports it when it starts, which takes 1 to 3 s: not during the training.
        with suppress(ImportError, RuntimeError, OSError):
            importlib.import_module("torch._inductor.config")
        if self._after == 0:
            self._begin()
        self._ready_ns = time.monotonic_ns() - began_ns

    @guarded
    def step(self) -> None:
        """Call it at the end of each step. It is cheap, except around profiled steps."""
        if not self._is_on:
            return
        self._count += 1
        if self._count < self._after:
            return
        self._end_ns = time.monotonic_ns()
        if self._count == self._after:
            self._begin()
        else:
            self._advance()
        self._held_ns += time.monotonic_ns() - self._end_ns

    def stop(self) -> None:
        """Stop profiling, after the training's last step, and read the trace."""
        to_see = f"{self._steps} are" if self._steps > 1 else "1 is"
        reason = (
            f"{self._count} steps were run, and {to_see} profiled after the first {self._first}"
        )
        self.let_go(reason)
        self.read()

    def let_go(self, why: str) -> None:
        """Stop profiling. A complete trace can still be read.

        Torch's profiler belongs to the thread that began it: from another, this does nothing.
        """
        if self._is_on and (self._profiler is None or self._thread == get_ident()):
            self._give_up(why)

    @guarded
    def read(self) -> None:
        """Read the trace into the run, if there is one. Takes seconds."""
        path, self._unread = self._unread, None
        if path is None:
            return
        trace = split(events_of(path.read_text(encoding="utf-8", errors="replace")))
        if self.reads_at_once:
            self._held_ns += time.monotonic_ns() - self._end_ns
        mark = trace.mark(
            self._end_ns,
            lasted_s=(self._end_ns - self._start_ns) / NS_PER_S,
            held_s=self._held_ns / NS_PER_S,
            ready_s=self._ready_ns / NS_PER_S,
            trace=str(Path(path.parent.name) / _packed(path).name),
        )
        self._meter.record(mark)

    def _begin(self) -> None:
        if _is_another():
            self._give_up(_ANOTHER)
            return
        self._thread = get_ident()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=_WARMUP, active=self._steps, repeat=1),
        )
        self._profiler.__enter__()

    def _advance(self) -> None:
        if self._count == self._first:
            self._start_ns = self._end_ns
        self._profiler.step()
        if self._count == self._first + self._steps:
            self._export()

    def _export(self) -> None:
        """Write the trace. Not compressed here: that takes six times as long."""
        handover = self._meter._handover
        rank = handover.rank if handover is not None else 0
        path = self._meter.path / "profile" / f"rank{rank}.json"
        path.parent.mkdir(exist_ok=True)
        self._profiler.export_chrome_trace(str(path))
        self._is_on = False
        self._end()
        self._unread = path
        message = (
            f"profile/{path.name} is read when the training ends; until then: erg import {path}"
        )
        if self.reads_at_once:
            self.read()
        self._meter.mark("profile_unread", message)

    def is_over(self) -> bool:
        """False: a failed profile can still be stopped and read."""
        return False

    def fail(self, error: Exception) -> None:
        """An error becomes a mark and ends the profile, never the training."""
        self._give_up(reason_of(error))

    def _give_up(self, why: str) -> None:
        self._is_on = False
        self._end()
        self._meter.mark("not_profiled", why)

    def _end(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            with suppress(Exception), ExitStack() as ending:  # in the training: torch may fail
                # The profiler does this itself at its end, unless it fails.
                ending.callback(autograd_profiler.KinetoStepTracker.erase_step_count, _COUNTED_AS)
                profiler.__exit__(None, None, None)


def _packed(path: Path) -> Path:
    """Compress the trace and return its path; the original's if there is no space for that."""
    packed = path.with_name(f"{path.name}.gz")
    try:
        with path.open("rb") as plain, gzip.open(packed, "wb") as out:
            shutil.copyfileobj(plain, out)
    except OSError:
        packed.unlink(missing_ok=True)
        return path
    path.unlink()
    return packed


def _is_another() -> bool:
    """True if another profiler is on, or made and not yet closed.

    A profiler in its wait or warm-up phase is not "enabled". But torch's step tracker lists each
    one from its creation to its end.
    """
    made = autograd_profiler.KinetoStepTracker._step_dict
    is_on = autograd_profiler._is_profiler_enabled  # of any thread
    return _COUNTED_AS in made or is_on or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
