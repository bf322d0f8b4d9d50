"""Are the hosts of a run on one clock? By the time of day where somebody sets it, else by steps.

Each host's monotonic clock is put on the run's by the time of day at which its writers began, which
NTP keeps within some milliseconds, and the kernel says how far it may be off. Ranks of one training
end each step together, so that the ends of a step on two hosts are one instant, seen on two clocks.

The trap: believing steps more than clocks. Stages of a pipeline end a step one after the other, a
rank that writes a checkpoint ends later than the rest, and a host that numbers its steps from 1
seems a whole step late: none of their clocks is wrong. So steps move a clock only if its host can't
say how good it is, by ranks of one stage whose numbers agree; where they contradict a clock that
its host vouches for, that is said and nothing is moved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ergmeter.errors import UsageError
from ergmeter.metrics.evidence.token_ranks import told_at, world_of
from ergmeter.runlog.settings import ParallelLayout
from ergmeter.units import NS_PER_S, duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.records import FloatArray, TimeArray
    from ergmeter.runlog.reader import Run

# What a time of day may be off where its host did not say: NTP over a bad network.
UNKNOWN_ERROR_S = 0.1
_FEW_STEPS = 10
_STEADY_FRAC = 0.1  # of a step, that its ends on two hosts may scatter
_ALIKE_FRAC = 0.9  # of the steps, that both have: else one of them has numbers of its own

_Ends: TypeAlias = "tuple[FloatArray, TimeArray]"  # numbers of steps, and when they ended
_Stages: TypeAlias = "Callable[[int], int]"


@dataclass(frozen=True, slots=True)
class HostClock:
    """How far a host's time of day is from the first host's, by the steps both made."""

    host: str
    ahead_s: float
    within_s: float
    claimed_s: float  # how far off it may be by the hosts' own word
    is_vouched_for: bool  # whether both hosts gave theirs
    step_s: float
    skipped: int  # steps that one of both has and the other has not

    @property
    def is_contradicted(self) -> bool:
        """Whether the steps contradict the time of day, and agree among themselves."""
        is_steady = self.within_s < _STEADY_FRAC * self.step_s
        return is_steady and abs(self.ahead_s) > self.claimed_s + 3 * self.within_s

    @property
    def is_wrong(self) -> bool:
        """Whether the clock is off: contradicted, by its host not vouched for, and not just by so
        many whole steps as one host may have begun to count later."""
        steps_off = round(self.ahead_s / self.step_s)
        rest_s = abs(self.ahead_s - steps_off * self.step_s)
        is_whole = 1 <= abs(steps_off) <= max(1, self.skipped) and rest_s <= self.claimed_s
        return self.is_contradicted and not self.is_vouched_for and not is_whole


def aligned(run: Run, layout: str | None = None) -> tuple[Run, tuple[HostClock, ...]]:
    """The run on one clock, and how the hosts' clocks compare. `layout`: as it was declared."""
    hosts: dict[str, list[int]] = {}
    for number, writer in enumerate(run.writers):
        hosts.setdefault(writer.clock_of, []).append(number)
    if len(hosts) < 2:
        return run, ()
    first, *others = hosts.values()
    declared = _declared_stages(run, layout)
    stages = _by_stage(run, first, declared)
    clocks: list[HostClock] = []
    writers = list(run.writers)
    for numbers in others if stages else ():
        clock = _compared(run, stages, first[0], numbers, declared)
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
    """What to tell of clocks that were wrong, or seem to be."""
    said = []
    wrong = [clock for clock in clocks if clock.is_wrong]
    if wrong:
        worst, more = _worst(wrong)
        way = "ahead of" if worst.ahead_s > 0 else "behind"
        said.append(
            f"the clock of {worst.host} is {duration(abs(worst.ahead_s))} {way} the first host's,"
            f" by the ends of the steps they made together (± {duration(worst.within_s)}): it and"
            f" its devices{more} were put on one clock by these"
        )
    unclear = [clock for clock in clocks if clock.is_contradicted and not clock.is_wrong]
    if unclear:
        worst, more = _worst(unclear)
        way = "later" if worst.ahead_s > 0 else "earlier"
        said.append(
            f"steps on {worst.host}{more} end {duration(abs(worst.ahead_s))} {way} than on the"
            f" first host, whose clocks may be {duration(worst.claimed_s)} apart: stages of a"
            " pipeline, steps that are numbered otherwise, or a clock that is wrong; they are left"
            " as they are"
        )
    return said


def _worst(clocks: list[HostClock]) -> tuple[HostClock, str]:
    more = f" and {len(clocks) - 1} more hosts" if len(clocks) > 1 else ""
    return max(clocks, key=lambda clock: abs(clock.ahead_s)), more


def _by_stage(run: Run, numbers: list[int], declared: _Stages | None) -> dict[int, _Ends]:
    """By pipeline stage the training steps of a host's first writer that has enough."""
    found: dict[int, _Ends] = {}
    for number in numbers:
        at = told_at(run.writers[number].header).get("pp")
        stage = int(at[0]) if at else 0
        if declared is None and stage in found:
            continue
        steps = run.steps_by(number)
        known = ~np.isnan(steps["index"])
        index, place = np.unique(steps["index"][known], return_index=True)
        if len(index) < _FEW_STEPS:
            continue
        if declared is not None:
            stage = declared(int(steps["rank"][0]))
        ends_ns = np.asarray(steps["end_ns"][known][place], dtype=np.int64)
        found.setdefault(stage, (np.asarray(index, dtype=np.float64), ends_ns))
    return found


def _declared_stages(run: Run, layout: str | None) -> _Stages | None:
    """Which stage a rank is in, where a pipeline was declared."""
    if layout is None:
        return None
    world = max(world_of(writer.header) for writer in run.writers)
    try:
        parsed = ParallelLayout.parsed(layout)
        parsed.check(world)
    except UsageError:  # tokens say what is wrong with it
        return None
    if parsed.sizes.get("pp", 1) == 1:
        return None
    return lambda rank: parsed.at(rank, world)["pp"]


def _compared(
    run: Run, stages: dict[int, _Ends], first: int, numbers: list[int], declared: _Stages | None
) -> HostClock | None:
    own = _by_stage(run, numbers, declared)
    stage = next((one for one in own if one in stages), None)
    if stage is None:
        return None
    (our_numbers, our_ends), (numbered, ended) = stages[stage], own[stage]
    _, ours, theirs = np.intersect1d(our_numbers, numbered, assume_unique=True, return_indices=True)
    longest = max(len(our_numbers), len(numbered))
    if len(ours) < max(_FEW_STEPS, _ALIKE_FRAC * longest) or our_numbers[0] != numbered[0]:
        return None
    apart_s = (ended[theirs] - our_ends[ours]) / NS_PER_S
    ahead_s = float(np.median(apart_s))
    headers = (run.writers[first].header, run.writers[numbers[0]].header)
    errors = [header["clock"].get("error_s") for header in headers]
    return HostClock(
        str(headers[1].get("host")),
        ahead_s,
        float(np.median(np.abs(apart_s - ahead_s))) * 1.4826,  # of a normal scatter, its deviation
        sum(UNKNOWN_ERROR_S if error is None else float(error) for error in errors),
        None not in errors,
        float(np.median(np.diff(np.sort(our_ends)))) / NS_PER_S,
        longest - len(ours),
    )
