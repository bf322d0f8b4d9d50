"""Do the ranks keep pace with each other, and who holds the others up?

The trap: looking for the rank with the longest steps. Where ranks wait for each other at the end of
each step, all of them end together, and whoever came late has the shortest step: the others wait
for it inside theirs. So both are looked at: the time in a step, which differs where ranks do not
wait, and the time between steps, which is longest for the one that is waited for. Work that is slow
inside a step that ends with a collective is nobody's in particular on the host's clock; devices'
clocks, power and activity tell there (`erg check` names a GPU that is held down).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric
from ergmeter.metrics.evidence.device_cache import cached_per_device
from ergmeter.records import Reading
from ergmeter.units import NS_PER_S, duration

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.evidence.steps import Steps
    from ergmeter.records import FloatArray

STRAGGLING_FRAC = 0.05  # of the step, that a rank is apart from the median rank
_FEW_STEPS = 5


@dataclass(frozen=True, slots=True)
class RankPace:
    """The ranks' medians of the time in a step and between steps."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    in_step_s: FloatArray
    between_s: FloatArray
    step_s: float  # from one step's start to the next one's, of the median rank

    def straggler(self) -> Straggler:
        """The rank that is furthest from the median rank, where being slow would put it."""
        slow_s = self.in_step_s - np.median(self.in_step_s)
        late_s = self.between_s - np.median(self.between_s)
        slow, late = int(np.argmax(slow_s)), int(np.argmax(late_s))
        # Who is late has a short step: the longest of the others is then no longer than the usual.
        if late_s[late] >= slow_s[slow]:
            return self._named(late, "late", float(late_s[late]))
        return self._named(slow, "slow", float(slow_s[slow]))

    def _named(self, at: int, how: Literal["late", "slow"], by_s: float) -> Straggler:
        return Straggler(self.ranks[at], self.hosts[at], how, by_s, by_s / self.step_s)


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank, and by how much it is behind the median rank in every step."""

    rank: int
    host: str
    how: Literal["late", "slow"]
    by_s: float
    by_frac: float

    @property
    def said(self) -> str:
        """In words."""
        way = {
            "late": "comes {} later to each step than the median rank, which waits for it",
            "slow": "takes {} longer for each step than the median rank",
        }
        return f"rank {self.rank} on {self.host} {way[self.how].format(duration(self.by_s))}"


@cached_per_device
def pace_of_ranks(evidence: Evidence) -> RankPace:
    """How long each rank is in its steps and between them."""
    lanes = evidence.counted.lanes
    if not evidence.trains:
        raise NotMeasurable("no training steps: requests differ in length")
    if evidence.from_output:
        raise NotMeasurable("printed lines are of one rank: use a Meter in each rank")
    if len(lanes) < 2:
        raise NotMeasurable("one rank: there is no other to compare it with")
    found = [_medians(lane) for lane in lanes if len(lane) >= _FEW_STEPS]
    if len(found) < 2:
        raise NotMeasurable(f"fewer than two ranks have made {_FEW_STEPS} steps")
    ranks, writers, inside, between, whole = zip(*found, strict=True)
    hosts = (evidence.run.writers[writer].header.get("host") for writer in writers)
    return RankPace(
        ranks,
        tuple(map(str, hosts)),
        np.array(inside),
        np.array(between),
        float(np.median(whole)),
    )


def _medians(lane: Steps) -> tuple[int, int, float, float, float]:
    """A rank, its writer, and its medians: of the time in a step, between two steps, and from one's
    start to the next one's."""
    steps = np.maximum(np.nan_to_num(lane["steps"], nan=1.0), 1.0)  # a row may be of several
    inside = lane.duration_s / steps
    whole = np.diff(lane["start_ns"]) / NS_PER_S / steps[:-1]
    medians = (float(np.median(one)) for one in (inside, whole - inside[:-1], whole))
    return int(lane["rank"][0]), int(lane["writer"][0]), *medians  # type: ignore[return-value]


def spread_frac(evidence: Evidence) -> Reading:
    """How far the rank that is furthest behind is from the median rank, of a step."""
    pace = pace_of_ranks(evidence)
    worst = pace.straggler()
    fastest, slowest = float(pace.in_step_s.min()), float(pace.in_step_s.max())
    note = (
        f"{worst.said}; median time in a step by rank {duration(fastest)} to {duration(slowest)},"
        f" {len(pace.ranks)} ranks; {evidence.window_note}"
    )
    return Reading(worst.by_frac, "frac", "measured", note=note)


def slowest_step_s(evidence: Evidence) -> Reading:
    """The median time in a step, of the rank with the longest."""
    pace = pace_of_ranks(evidence)
    at = int(np.argmax(pace.in_step_s))
    note = f"rank {pace.ranks[at]} on {pace.hosts[at]}, median of its steps; {evidence.window_note}"
    return Reading(float(pace.in_step_s[at]), "s", "measured", note=note)


def fastest_step_s(evidence: Evidence) -> Reading:
    """The median time in a step, of the rank with the shortest."""
    pace = pace_of_ranks(evidence)
    at = int(np.argmin(pace.in_step_s))
    note = f"rank {pace.ranks[at]} on {pace.hosts[at]}, median of its steps; {evidence.window_note}"
    return Reading(float(pace.in_step_s[at]), "s", "measured", note=note)


METRICS = [
    Metric(
        "ranks.spread_frac",
        "straggling",
        "frac",
        "lower",
        "how much later or slower than the median rank the furthest rank is in every step, by"
        " medians over steps / step time",
        ("steps of several ranks",),
        spread_frac,
    ),
    Metric(
        "ranks.slowest_step_s",
        "slowest rank's step",
        "s",
        "lower",
        "highest of the ranks' median times in a step",
        ("steps of several ranks",),
        slowest_step_s,
    ),
    Metric(
        "ranks.fastest_step_s",
        "fastest rank's step",
        "s",
        "neither",
        "lowest of the ranks' median times in a step",
        ("steps of several ranks",),
        fastest_step_s,
    ),
]
