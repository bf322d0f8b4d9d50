"""Which figures of an update go out? Those that have a value, of the metrics that were asked for.

The trap: a figure that is missing and goes out as 0, or stays on a dashboard at its last value as
if it were today's. What is `Missing` is left out of what is sent, here, once for all sinks; so is
what is no finite number, which no tool draws and JSON cannot say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from ergmeter.metrics.catalog import catalogue, find
from ergmeter.records import Missing, Reading
from ergmeter.units import duration, scaled, significant

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ergmeter.ports import Update
    from ergmeter.records import Result


@dataclass(frozen=True, slots=True)
class SinkValue:
    """A reading by its key: of the run, or of one device."""

    key: str
    reading: Reading
    device: str | None = None

    @property
    def value(self) -> float:
        """The bare number."""
        return float(self.reading.value)


class Selection:
    """The metrics that a sink sends: all of them, or those named by key or alias."""

    def __init__(self, metrics: Iterable[str] | str | None = None, *, devices: bool = True) -> None:
        if isinstance(metrics, str):
            metrics = metrics.replace(",", " ").split()
        self.keys = None if metrics is None else tuple(find(name)[0].key for name in metrics)
        self._devices = devices

    def columns(self) -> tuple[str, ...]:
        """The keys of a table, whose columns are fixed before anything is known."""
        return tuple(catalogue()) if self.keys is None else self.keys

    def figures(self, update: Update) -> list[SinkValue]:
        """What to send of an update: of the run first, then device by device."""
        summary = update.summary
        found = [SinkValue(key, r) for key, r in self._chosen(summary.readings) if _is_known(r)]
        for device, results in summary.devices.items() if self._devices else ():
            found += [SinkValue(k, r, device) for k, r in self._chosen(results) if _is_known(r)]
        return found

    def missing(self, update: Update) -> dict[str, str]:
        """Why a chosen metric has no value, by key."""
        return {
            key: result.reason if isinstance(result, Missing) else f"the value is {result.value}"
            for key, result in self._chosen(update.summary.readings)
            if not _is_known(result)
        }

    def _chosen(self, results: Mapping[str, Result]) -> Iterator[tuple[str, Result]]:
        keys = results if self.keys is None else (key for key in self.keys if key in results)
        return ((key, results[key]) for key in keys)


def in_words(reading: Reading) -> str:
    """A value in the unit a person would say it in, marked if it is impossible."""
    return _number(reading.value, reading.unit) + reading.mark


def _number(number: float, unit: str) -> str:
    if unit == "s":
        return duration(number)
    if unit == "frac":
        return f"{significant(number * 100, 3)} %"
    if unit == "1":  # a loss is a bare number
        return significant(number)
    if unit in ("B", "B/s", "B/h", "Hz", "J", "g", "FLOP/s", "FLOP/token"):
        return scaled(number, unit)
    return f"{number:,.0f} {unit}" if abs(number) >= 10_000 else f"{significant(number)} {unit}"


def _is_known(result: Result) -> TypeGuard[Reading]:
    return isinstance(result, Reading) and math.isfinite(result.value)
