"""The catalogue: every metric once, with its unit, direction, formula, needs and other names.

Every spelling elsewhere (the card, the JSON, a sink's tag, the reference page) derives from it.
A plugin adds metrics by naming a list of `Metric` under the entry point `ergmeter.metrics`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ergmeter import registry
from ergmeter.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.metrics.evidence import Evidence
    from ergmeter.records import Device, Direction, Reading


@dataclass(frozen=True, slots=True)
class Alias:
    """Another system's name for a metric. `scale` takes our value to the unit its name says."""

    name: str
    system: str
    definition: str
    unit: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the catalogue. `compute` raises NotMeasurable with the reason."""

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


@cache
def catalogue() -> dict[str, Metric]:
    """All metrics by key: ours first, in the order a reader wants them, then the plugins'."""
    first = (
        *(
            "throughput",
            "tokens",
            "time",
            "energy",
            "step_energy",
            "idle",
            "memory",
            "allocator",
            "memory_phases",
        ),
        *(
            "utilization",
            "activity",
            "compute",
            "achievable",
            "carbon",
            "cost",
            "inference",
            "training",
        ),
    )
    names = sorted(
        registry.names("metrics"),
        key=lambda name: (first.index(name) if name in first else len(first), name),
    )
    metrics = [metric for name in names for metric in registry.load("metrics", name)]
    return {metric.key: metric for metric in metrics}


def find(name: str) -> tuple[Metric, Alias | None]:
    """A metric by its key or by one of its aliases. Raises UsageError with the nearest names."""
    by_name: dict[str, tuple[Metric, Alias | None]] = {}
    for metric in catalogue().values():
        by_name[metric.key.lower()] = (metric, None)
        for alias in metric.aliases:
            by_name[alias.name.lower()] = (metric, alias)
    if name.lower() in by_name:
        return by_name[name.lower()]
    near = difflib.get_close_matches(name.lower(), by_name, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(f"no metric {name!r}; {hint}`erg metrics` lists them all")
