"""Are the hosts of a run on one clock? By the time of day first, by the steps they share if not.

Each host's monotonic clock is put on the run's by the time of day at which its writers began, which
NTP keeps within some milliseconds, and the kernel says how far it may be off. Ranks of one training
end each step together, so that the ends of a step on two hosts are one instant, seen on two clocks.

The trap: believing either alone. A clock that nobody sets can be off by minutes; and a rank that
writes a checkpoint ends its steps later than the others without a clock being wrong. So the steps
correct the time of day where they contradict it beyond what it claims for itself, and agree among
themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.units import NS_PER_S, duration

if TYPE_CHECKING:
    from ergmeter.records import FloatArray, TimeArray
    from ergmeter.runlog.reader import Run

# What a time of day may be off where its host did not say: NTP over a bad network.
UNKNOWN_ERROR_S = 0.1
_FEW_STEPS = 10
_STEADY_FRAC = 0.1  # of a step, that its ends on two hosts may scatter


@dataclass(frozen=True, slots=True)
class HostClock:
    """How far a host's time of day is from the first host's, by the steps both made."""

    host: str
    ahead_s: float
    within_s: float
    claimed_s: float  # how far off it may be by the hosts' own word
    step_s: float

    @property
    def is_wrong(self) -> bool:
        """Whether the steps contradict the time of day, and agree among themselves."""
        is_steady = self.within_s < _STEADY_FRAC * self.step_s
        return is_steady and abs(self.ahead_s) > self.claimed_s + 3 * self.within_s


def aligned(run: Run) -> tuple[Run, tuple[HostClock, ...]]:
    """The run on one clock, and how the hosts' clocks compare."""
    hosts: dict[str, list[int]] = {}
    for number, writer in enumerate(run.writers):
        hosts.setdefault(writer.clock_of, []).append(number)
    if len(hosts) < 2:
        return run, ()
    first, *others = hosts.values()
    ends = _ends(run, first)
    clocks: list[HostClock] = []
    writers = list(run.writers)
    for numbers in others if ends is not None else ():
        clock = _compared(run, ends, first[0], numbers)
        if clock is None:
            continue
        clocks.append(clock)
        if clock.is_wrong:
            by_ns = round(clock.ahead_s * NS_PER_S)
            for number in numbers:
                offset_ns = writers[number].offset_ns - by_ns
                writers[number] = replace(writers[number], offset_ns=offset_ns)
    return replace(run, writers=writers), tuple(clocks)


def in_words(clocks: tuple[HostClock, ...]) -> list[str]:
    """What to tell of clocks that were wrong."""
    wrong = [clock for clock in clocks if clock.is_wrong]
    if not wrong:
        return []
    worst = max(wrong, key=lambda clock: abs(clock.ahead_s))
    way = "ahead of" if worst.ahead_s > 0 else "behind"
    more = f" and {len(wrong) - 1} more hosts" if len(wrong) > 1 else ""
    return [
        f"the clock of {worst.host} is {duration(abs(worst.ahead_s))} {way} the first host's, by"
        f" the ends of the steps they made together (± {duration(worst.within_s)}): it and its"
        f" devices{more} were put on one clock by these"
    ]


def _ends(run: Run, numbers: list[int]) -> tuple[FloatArray, TimeArray] | None:
    """The numbers and ends of the training steps of a host's first writer that has enough."""
    for number in numbers:
        steps = run.steps_by(number)
        known = ~np.isnan(steps["index"])
        index, place = np.unique(steps["index"][known], return_index=True)
        if len(index) >= _FEW_STEPS:
            ends_ns = np.asarray(steps["end_ns"][known][place], dtype=np.int64)
            return np.asarray(index, dtype=np.float64), ends_ns
    return None


def _compared(
    run: Run, ends: tuple[FloatArray, TimeArray] | None, first: int, numbers: list[int]
) -> HostClock | None:
    own = _ends(run, numbers)
    if ends is None or own is None:
        return None
    _, ours, theirs = np.intersect1d(ends[0], own[0], assume_unique=True, return_indices=True)
    if len(ours) < _FEW_STEPS:
        return None
    apart_s = (own[1][theirs] - ends[1][ours]) / NS_PER_S
    ahead_s = float(np.median(apart_s))
    headers = (run.writers[first].header, run.writers[numbers[0]].header)
    claimed_s = sum(float(header["clock"].get("error_s", UNKNOWN_ERROR_S)) for header in headers)
    return HostClock(
        str(headers[1].get("host")),
        ahead_s,
        float(np.median(np.abs(apart_s - ahead_s))) * 1.4826,  # of a normal scatter, its deviation
        claimed_s,
        float(np.median(np.diff(np.sort(ends[1])))) / NS_PER_S,
    )
