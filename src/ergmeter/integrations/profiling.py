"""A few steps under torch's profiler, on request: where their time goes.

    with Meter() as meter, Profile(meter, steps=3) as profile:
        for batch in loader:
            with meter.step(tokens=batch.numel()):
                train(batch)
            profile.step()

Off unless asked for, because a profiled step takes longer: by how much is in the run, beside what
it found. The trace itself lies in the run's folder, for https://ui.perfetto.dev.
"""

from __future__ import annotations

import gzip
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ergmeter.errors import UsageError
from ergmeter.importers.torch_trace import events_of, split
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from types import TracebackType

    from ergmeter.meter import Meter

AFTER = 10  # steps, so that what is compiled and tuned at the start is not what is seen
_WARMUP = 1  # the profiler's own: its first step is the slowest


class Profile:
    """Of `steps` steps after the first `after`; `step` is called at the end of each step."""

    def __init__(self, meter: Meter, *, steps: int, after: int = AFTER) -> None:
        if steps < 1 or after < 0:
            raise UsageError(f"a profile of {steps} steps after {after}: 1 or more after 0 or more")
        self._meter = meter
        self._steps = steps
        self._first = after + _WARMUP
        self._profiler = profile(
            activities=_activities(),
            schedule=schedule(wait=after, warmup=_WARMUP, active=steps, repeat=1),
            on_trace_ready=self._take,
        )
        self._count = 0
        self._start_ns = self._end_ns = 0  # of the steps that are profiled
        self._is_on = False

    def __enter__(self) -> Profile:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Before the first step."""
        self._profiler.__enter__()  # type: ignore[no-untyped-call]
        self._is_on = True

    def step(self) -> None:
        """A step is over. Costs next to nothing but for the steps that are profiled."""
        if not self._is_on:
            return
        self._count += 1
        if self._count == self._first:
            self._start_ns = time.monotonic_ns()
        self._end_ns = time.monotonic_ns()
        self._profiler.step()
        if self._count >= self._first + self._steps:
            self.stop()

    def stop(self) -> None:
        """After the last step; by itself, once it has seen what it was to see."""
        if not self._is_on:
            return
        self._is_on = False
        self._profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._count < self._first + self._steps:
            said = f"{self._count} steps were made, and profiling begins after {self._first}"
            self._meter.mark("not_profiled", said)

    def _take(self, profiler: Any) -> None:  # noqa: ANN401
        """The profiler has seen its steps."""
        if self._count < self._first + self._steps:  # it was ended before
            return
        path = self._meter.path / "profile" / f"rank{self._rank}.json.gz"
        path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(path))
        with gzip.open(path, "rt") as packed:
            found = split(events_of(packed.read()))
        trace = str(Path("profile") / path.name)
        lasted_s = (self._end_ns - self._start_ns) / NS_PER_S
        self._meter.record(found.mark(self._end_ns, lasted_s=lasted_s, trace=trace))

    @property
    def _rank(self) -> int:
        handover = self._meter._handover
        return handover.rank if handover is not None else 0


def _activities() -> list[ProfilerActivity]:
    found = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        found.append(ProfilerActivity.CUDA)
    return found
