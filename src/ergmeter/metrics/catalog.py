"""The catalogue: every metric once, with its unit, direction, formula, needs and other names.

Every spelling elsewhere (the card, the JSON, a sink's tag, the reference page) derives from it.
A plugin adds metrics by naming a list of `Metric` under the entry point `ergmeter.metrics`.
"""

from __future__ import annotations

import difflib
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from ergmeter import registry
from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.records import Device, Direction, Reading, Result, is_above
from ergmeter.units import significant

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.metrics.evidence.evidence import Evidence


LEDGER_SYSTEM = "SFT-Play"  # whose names of metrics are the columns of an energy ledger
IMPOSSIBLE = "is impossible"  # in the reason of what is not computed from such a reading


@dataclass(frozen=True, slots=True)
class Alias:
    """Another system's name for a metric. `scale` converts our value to its unit."""

    name: str
    system: str
    definition: str
    unit: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the catalogue. `compute` raises NotMeasurable with the reason.

    A value above `upper_bound` is impossible; `above_bound` is what it means. Read a metric with
    `reading` and `device_reading`, which set the mark.
    """

    key: str
    title: str
    unit: str
    direction: Direction
    formula: str
    needs: tuple[str, ...]
    compute: Callable[[Evidence], Reading]
    per_device: Callable[[Evidence, Device], Reading] | None = None
    kinds: tuple[str, ...] = ()  # the kinds of device that per_device speaks of
    aliases: tuple[Alias, ...] = ()
    upper_bound: float | None = None
    above_bound: str = "an input is wrong"

    def reading(self, evidence: Evidence) -> Reading:
        """The metric of a run, marked if it is impossible."""
        return self.checked(self.compute(evidence))

    def device_reading(self, evidence: Evidence, device: Device) -> Reading:
        """The metric of one device, marked if it is impossible."""
        assert self.per_device is not None
        return self.checked(self.per_device(evidence, device))

    def checked(self, reading: Reading) -> Reading:
        """The reading, marked as impossible if it is above the metric's bound."""
        if self.upper_bound is None or not is_above(reading, self.upper_bound):
            return reading
        bound = _in_words(self.upper_bound, self.unit)
        return replace(reading, impossible=f"above {bound}: {self.above_bound}")

    def usable(self, reading: Reading) -> Reading:
        """The reading, for use in another metric. Raises NotMeasurable if it is impossible."""
        if reading.impossible:
            raise NotMeasurable(f"{self.title} {refusal(reading)}")
        return reading


def refusal(reading: Reading) -> str:
    """Why nothing is computed from an impossible reading: its value and the reason."""
    return f"{_in_words(reading.value, reading.unit)} {IMPOSSIBLE}: {reading.impossible}"


def _in_words(value: float, unit: str) -> str:
    return f"{significant(value * 100, 3)} %" if unit == "frac" else f"{significant(value)} {unit}"


def checked(key: str, result: Result) -> Result:
    """A result of a metric of the catalogue, marked if it is impossible."""
    return catalogue()[key].checked(result) if isinstance(result, Reading) else result


def over_whole_run(metrics: list[Metric], *keys: str, title: str = "") -> list[Metric]:
    """The same metrics over the whole run, to stand beside those over the training window."""
    by_key = {metric.key: metric for metric in metrics}
    return [_over_whole_run(by_key[key], title) for key in keys]


def _over_whole_run(metric: Metric, title: str) -> Metric:
    family, _, name = metric.key.partition(".")
    return replace(
        metric,
        key=f"{family}.whole_run_{name.removeprefix('run_')}",
        title=f"{title or metric.title}, whole run",
        formula=f"as {metric.key}, from the start of the command or the Meter to the end of the"
        " run, with all training steps",
        compute=lambda evidence: metric.compute(evidence.whole_run),
        per_device=None,
        kinds=(),
        aliases=(),
    )


@cache
def catalogue() -> dict[str, Metric]:
    """All metrics by key: ours first, in the order a reader wants them, then the plugins'."""
    first = (
        *("throughput", "tokens", "time", "energy", "step_energy", "idle", "memory", "allocator"),
        *("memory_phases", "utilization", "activity", "compute", "achievable", "carbon", "cost"),
        *("inference", "training"),
    )
    names = sorted(
        registry.names("metrics"),
        key=lambda name: (first.index(name) if name in first else len(first), name),
    )
    metrics = [metric for name in names for metric in registry.load("metrics", name)]
    return {metric.key: metric for metric in metrics}


def find(name: str) -> tuple[Metric, Alias | None]:
    """A metric by its key, an alias, or the last part of its key where that is no other's.

    Raises UsageError with the nearest names.
    """
    by_name: dict[str, tuple[Metric, Alias | None]] = {}
    last_parts = Counter(key.rpartition(".")[2] for key in catalogue())
    for metric in catalogue().values():
        by_name[metric.key.lower()] = (metric, None)
        last = metric.key.rpartition(".")[2]
        if last_parts[last] == 1:
            by_name.setdefault(last, (metric, None))
        for alias in metric.aliases:
            by_name[alias.name.lower()] = (metric, alias)
    if name.lower() in by_name:
        return by_name[name.lower()]
    near = difflib.get_close_matches(name.lower(), by_name, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(f"no metric {name!r}; {hint}`erg metrics` lists them all")
