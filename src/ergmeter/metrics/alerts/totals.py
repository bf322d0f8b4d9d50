"""What a run has used up, against what it may: energy, time and money, from its first reading on.

The trap: a budget that forgets the start. The figures of the report are of a window after the
warm-up; whoever pays, pays for all of it, so that a budget is of everything that was watched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ergmeter.units import J_PER_KWH, NS_PER_S, significant

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ergmeter.metrics.alerts.judge import AlertRows
    from ergmeter.metrics.alerts.rules import AlertRule
    from ergmeter.metrics.alerts.states import Told
    from ergmeter.records import Device, FloatArray, TimeArray
    from ergmeter.runlog.settings import Settings

# As in `metrics.energy`: across a longer gap a line between two readings of power invents joules.
_MAX_GAP_NS = 2 * NS_PER_S


class EnergyTotal:
    """Joules of the boards, or of CPU and memory where there is none, added up as they come."""

    def __init__(self, devices: Mapping[str, Device]) -> None:
        self._devices = devices
        self._last: dict[str, tuple[int, float]] = {}  # of the counter, or of the power
        self._counted_ns: dict[str, int] = {}  # since when there is a counter
        self.joules = 0.0
        self.is_known = False  # once there was an interval to add up, not with the first reading
        self._apart_ns = 0  # of readings of power too far from each other, the nearest
        self.new = (
            np.empty(0, np.int64),
            np.empty(0),
        )  # of the last batch: when, and drawn by then

    def feed(self, rows: AlertRows) -> None:
        """More readings of counters and of power."""
        wanted = self._boundary()
        times, joules = [], []
        for column in ("energy_j", "power_w"):
            for device, (t_ns, values) in rows.samples.get(column, {}).items():
                if device not in wanted:
                    continue
                if column == "energy_j":
                    self._counted_ns.setdefault(device, int(t_ns[0]))
                when, drawn = self._increments(device, column, t_ns, values)
                if column == "power_w" and device in self._counted_ns:
                    drawn = np.where(when <= self._counted_ns[device], drawn, 0.0)
                times.append(when)
                joules.append(drawn)
        if not times:
            self.new = (np.empty(0, np.int64), np.empty(0))
            return
        when, drawn = np.concatenate(times), np.concatenate(joules)
        order = np.argsort(when, kind="stable")
        curve = self.joules + np.cumsum(drawn[order])
        self.new = (when[order], curve)
        self.joules = float(curve[-1]) if len(curve) else self.joules

    def limit(self, rule: AlertRule) -> Limit:
        """A rule about the joules."""
        return Limit(rule, self)

    @property
    def is_hopeless(self) -> bool:
        """Whether none of the devices there are is one that could tell."""
        return bool(self._devices) and not self._boundary()

    @property
    def lacks(self) -> str:
        """Why nothing is known."""
        if self.is_known:
            return ""
        if self._apart_ns:
            apart, limit = (significant(ns / NS_PER_S) for ns in (self._apart_ns, _MAX_GAP_NS))
            return f"power is read {apart} s apart (limit {limit} s)"
        return "no device tells its energy"

    def _boundary(self) -> set[str]:
        kinds = {one.kind for one in self._devices.values()}
        wanted = ("gpu",) if "gpu" in kinds else ("cpu", "dram")
        ids = {one.id for one in self._devices.values() if one.kind in wanted}
        twice = {i for i in ids if self._devices[i].facts.get("energy_counted_in") in ids}
        return ids - twice

    def _increments(
        self,
        device: str,
        column: str,
        t_ns: TimeArray,
        values: FloatArray,
    ) -> tuple[Any, Any]:
        """When and how much, since the reading before it."""
        key = f"{device} {column}"
        before_ns, before = self._last.get(key, (int(t_ns[0]), float(values[0])))
        self._last[key] = (int(t_ns[-1]), float(values[-1]))
        all_ns = np.concatenate([[before_ns], t_ns])
        readings = np.concatenate([[before], values])
        gaps_ns = np.diff(all_ns)
        if column == "energy_j":
            self.is_known |= bool((gaps_ns > 0).any())
            return t_ns, np.maximum(0.0, np.diff(readings))
        self.is_known |= bool(((gaps_ns > 0) & (gaps_ns <= _MAX_GAP_NS)).any())
        apart = gaps_ns[gaps_ns > _MAX_GAP_NS]
        if len(apart):
            self._apart_ns = min(int(apart.min()), self._apart_ns or int(apart.min()))
        drawn = (readings[1:] + readings[:-1]) / 2 * gaps_ns / NS_PER_S
        return t_ns, np.where(gaps_ns > _MAX_GAP_NS, 0.0, drawn)


class Elapsed:
    """Seconds since the run began."""

    lacks = ""

    def __init__(self, start_ns: int | None) -> None:
        self.start_ns = start_ns
        self.until_ns = 0

    def feed(self, rows: AlertRows) -> None:
        """How far the rows go."""
        starts = [
            int(steps["start_ns"].min()) for steps in rows.steps.values() if len(steps["start_ns"])
        ]
        starts += [int(t[0]) for by in rows.samples.values() for t, _ in by.values()]
        if self.start_ns is None and starts:
            self.start_ns = min(starts)
        self.until_ns = max(self.until_ns, rows.until_ns)

    def limit(self, rule: AlertRule) -> Limit:
        """A rule about the time."""
        return Limit(rule, self)


class Limit:
    """So much and no more. It is told once, and is never over."""

    def __init__(self, rule: AlertRule, total: EnergyTotal | Elapsed) -> None:
        self.rule = rule
        self._total = total
        self._is_raised = False

    @property
    def lacks(self) -> str:
        """What is needed to judge it."""
        return self._total.lacks

    def feed(self, _rows: AlertRows) -> Iterator[Told]:
        """The instant at which it was used up."""
        at = None if self._is_raised else used_up(self._total, self.rule.limit)
        if at is not None:
            self._is_raised = True
            t_ns, value = at
            said = f"{self.rule.limit_said(value)} used"
            yield t_ns, value, self.rule.limit, said, "", False


class CostTotal:
    """Rent of the devices, or the bill for their energy: each by itself, never added up."""

    def __init__(
        self,
        rule: AlertRule,
        drawn: EnergyTotal,
        elapsed: Elapsed,
        devices: Mapping[str, Device],
        settings: Settings | None,
    ) -> None:
        self.rule = rule
        self._drawn, self._elapsed, self._devices = drawn, elapsed, devices
        self._per_hour = settings.price_per_gpu_hour if settings else None
        per_kwh = settings.price_per_kwh if settings else None
        self._per_j = None if per_kwh is None else per_kwh * (settings.pue or 1.0) / J_PER_KWH  # type: ignore[union-attr]
        self._given = settings.num_devices if settings else None
        self._currency = (settings.currency if settings else None) or "price units"
        self._is_raised = False

    @property
    def lacks(self) -> str:
        """What is needed to judge it."""
        if self._per_hour is None and self._per_j is None:
            return "no price was given: --price-per-gpu-hour or --price-per-kwh"
        if self._per_hour is None and not self._drawn.is_known:
            return self._drawn.lacks
        return "" if self._per_hour is None or self._held else "no device is known to be rented"

    @property
    def _held(self) -> int:
        return self._given or sum(one.kind == "gpu" for one in self._devices.values())

    def feed(self, _rows: AlertRows) -> Iterator[Told]:
        """The instant at which one of them was used up."""
        rent_per_s = (self._per_hour or 0.0) / 3600.0 * self._held
        ways = (
            ("rent", self._elapsed, rent_per_s),
            ("bill for energy", self._drawn, self._per_j or 0.0),
        )
        for name, total, price in ways:
            at = used_up(total, self.rule.limit / price) if price and not self._is_raised else None
            if at is not None:
                self._is_raised = True
                t_ns, amount = at
                said = f"{significant(amount * price)} {self._currency} of {name}"
                yield t_ns, amount * price, self.rule.limit, said, "", False


def used_up(total: EnergyTotal | Elapsed, limit: float) -> tuple[int, float] | None:
    """When a total reached a limit, and what it was; None if it has not."""
    if isinstance(total, Elapsed):
        if total.start_ns is None:
            return None
        at_ns = total.start_ns + round(limit * NS_PER_S)
        return (at_ns, limit) if total.until_ns >= at_ns else None
    times, curve = total.new
    reached = np.flatnonzero(curve >= limit)
    return (int(times[reached[0]]), float(curve[reached[0]])) if len(reached) else None
