"""How fast is some work, repeated without a pause? Timed in blocks, after a warm-up.

Two traps. A GPU only queues what it is asked for, so the host's clock times the asking: there the
device's own events stand between the blocks, and the host waits once, at the end. And the first
second is too good: the chip is cool and its power not yet limited. So the rate is that of a window
after a warm-up, all its work over all its time; the best short block is kept beside it, as a burst.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from ergmeter.hardware.calibration import CalibratedRate

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.workloads.calibrate.sensors import Watch

Work: TypeAlias = "Callable[[], object]"


@dataclass(frozen=True, slots=True)
class TrialDurations:
    """How long to try what. The window is that of the figure that is kept."""

    burst_s: float = 0.02  # a block of the sweep: shorter than a power limit takes to act
    bursts: int = 5
    finalists: int = 2  # of the sweep, which are held for a whole window
    warmup_s: float = 0.8
    window_s: float = 1.2
    block_s: float = 0.05
    stream_warmup_s: float = 0.2
    stream_window_s: float = 1.0
    settle_s: float = 1.0
    idle_s: float = 2.0
    refresh_s: float = 1.2
    is_quick: bool = False


FULL = TrialDurations()
QUICK = TrialDurations(
    bursts=3,
    finalists=1,
    warmup_s=0.2,
    window_s=0.5,
    block_s=0.02,
    stream_warmup_s=0.05,
    stream_window_s=0.15,
    settle_s=0.3,
    idle_s=1.0,
    refresh_s=0.8,
    is_quick=True,
)


@dataclass(frozen=True, slots=True)
class RepeatedWork:
    """Something to repeat: how to do it once, and how much that is."""

    work: Work
    amount: float
    unit: str
    of: str


def spans_s(work: Work, device: torch.device, *, repeats: int, blocks: int) -> list[float]:
    """Seconds of each of so many blocks, one right after the other."""
    return (_by_events if device.type == "cuda" else _by_clock)(work, repeats, blocks)


def _by_clock(work: Work, repeats: int, blocks: int) -> list[float]:
    edges = [time.perf_counter()]
    for _ in range(blocks):
        for _ in range(repeats):
            work()
        edges.append(time.perf_counter())
    return [float(span) for span in np.diff(edges)]


def _by_events(work: Work, repeats: int, blocks: int) -> list[float]:
    event = partial(torch.cuda.Event, enable_timing=True)
    edges = [event() for _ in range(blocks + 1)]
    edges[0].record()
    for edge in edges[1:]:
        for _ in range(repeats):
            work()
        edge.record()
    edges[-1].synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(edges)]


def one_s(work: Work, device: torch.device) -> float:
    """About how long it takes once, after a first time that loads what it needs."""
    work()
    return spans_s(work, device, repeats=1, blocks=1)[0]


def bursts(task: RepeatedWork, device: torch.device, pace: TrialDurations) -> list[float]:
    """Rates of a few short blocks."""
    repeats = max(1, math.ceil(pace.burst_s / one_s(task.work, device)))
    spans = spans_s(task.work, device, repeats=repeats, blocks=pace.bursts)
    return [task.amount * repeats / span for span in spans]


def _blocks_for(
    seconds: float, work: Work, device: torch.device, *, repeats: int, at_least: int
) -> list[float]:
    """Blocks that take so long together, or a little longer.

    All are queued at once as far as one can tell how many it takes: a GPU that waits for the host
    between them would cool.
    """
    spans = spans_s(work, device, repeats=repeats, blocks=at_least)
    while (left_s := seconds - sum(spans)) > 0:
        more = math.ceil(left_s / min(spans))
        spans += spans_s(work, device, repeats=repeats, blocks=more)
    return spans


def sustained(
    task: RepeatedWork,
    device: torch.device,
    *,
    warmup_s: float,
    window_s: float,
    block_s: float,
    watch: Watch | None,
) -> CalibratedRate:
    """The rate over a window after a warm-up, without a burst of its own."""
    repeats = max(1, round(block_s / one_s(task.work, device)))
    warm = _blocks_for(warmup_s, task.work, device, repeats=repeats, at_least=1)
    start_ns = time.monotonic_ns()
    spans = np.array(_blocks_for(window_s, task.work, device, repeats=repeats, at_least=4))
    end_ns = time.monotonic_ns()
    blocks = len(spans)
    rates = task.amount * repeats / spans
    half = blocks // 2
    low, median, high = (float(edge) for edge in np.percentile(rates, [5, 50, 95]))
    best = float(rates.max())
    seen = watch.between(start_ns, end_ns) if watch else {}
    return CalibratedRate(
        value=task.amount * repeats * blocks / float(spans.sum()),
        unit=task.unit,
        median=median,
        low=low,
        high=high,
        blocks=blocks,
        window_s=float(spans.sum()),
        warmup_s=float(sum(warm)),
        drift_frac=float(spans[:half].mean() / spans[half:].mean() - 1),
        of=task.of,
        burst=best,
        burst_s=float(spans[rates.argmax()]),
        burst_of=task.of,
        **seen,
    )
