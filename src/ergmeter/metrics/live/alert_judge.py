"""Judges alert rules on the rows of a run, live or afterwards.

The result does not depend on how rows are batched: stretches are cut by the times in the rows, and
an alert has the time at which its condition began. An alert is raised once, and again only after it
has ended, which takes more than returning to the limit. Cost is proportional to the new rows;
memory is bounded.

Budgets of energy, time and money count from the run's first reading. Reported metrics are of a
window after the warm-up, but the warm-up is paid for too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ergmeter.metrics.live.alert_states import Growth, NotANumber, Silence, Speed, ThrottledState
from ergmeter.units import J_PER_KWH, NS_PER_S, significant

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from typing import Protocol

    from ergmeter.metrics.live.alert_rules import AlertRule
    from ergmeter.metrics.live.alert_states import AlertEvent
    from ergmeter.records import Device
    from ergmeter.runlog.settings import Settings

    class AlertState(Protocol):
        """A rule and its state."""

        rule: AlertRule

        @property
        def lacks(self) -> str:
            """What is missing to judge it; empty if nothing."""

        def feed(self, rows: AlertRows) -> Iterable[AlertEvent]:
            """The alerts that began or ended."""

    from collections.abc import Iterator

    from ergmeter.records import FloatArray, TimeArray

MAX_ONSETS = 20  # of one rule about one device or writer


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule whose condition began at `t_ns`, or ended if `is_over`."""

    rule: AlertRule
    t_ns: int
    value: float
    threshold: float
    detail: str  # the value and what it is compared with, as text
    about: str = ""  # a device, or a writer of several
    is_over: bool = False

    @property
    def text(self) -> str:
        """The rule and the detail."""
        return f"{self.rule.text}: {self.detail}"

    def as_json(self) -> dict[str, Any]:
        """The alert as JSON. NaN and infinity are null."""
        numbers = {"value": self.value, "threshold": self.threshold}
        finite = {name: n if np.isfinite(n) else None for name, n in numbers.items()}
        what = {"rule": self.rule.text, "kind": self.rule.kind, "text": self.text}
        return {**what, **finite, "unit": self.rule.unit, "about": self.about, "t_ns": self.t_ns}


@dataclass
class AlertRows:
    """New rows of a run, on its clock. No row before `until_ns` is still to come.

    `steps`: columns by writer, ordered by end, absent numbers NaN. `loss_told` and `grad_norm_told`
    separate a recorded NaN from an absent value. `samples`: times and values by column and device.
    `printed`: columns of all printed lines, also where a Meter records the same steps. Those steps
    often have no loss while the lines do.
    """

    until_ns: int
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: dict[str, dict[str, tuple[Any, Any]]] = field(default_factory=dict)
    printed: dict[str, dict[str, Any]] = field(default_factory=dict)

    def without(self, writers: Collection[str]) -> AlertRows:
        """A copy without the steps of these writers; samples stay."""
        if not writers:
            return self
        steps, printed = (
            {writer: columns for writer, columns in rows.items() if writer not in writers}
            for rows in (self.steps, self.printed)
        )
        return AlertRows(self.until_ns, steps, self.samples, printed)


class Judge:
    """Judges rules on the rows of one run. `feed` returns alerts that began or ended."""

    def __init__(
        self,
        rules: Iterable[AlertRule],
        *,
        devices: Mapping[str, Device] | None = None,
        settings: Settings | None = None,
        start_ns: int | None = None,
    ) -> None:
        """`devices`: of the run, may grow; `settings`: prices; `start_ns`: the run's start."""
        self.rules = tuple(rules)
        devices = {} if devices is None else devices
        self._energy = EnergyTotal(devices)
        self._elapsed = Elapsed(start_ns)
        made: dict[str, Callable[[AlertRule], AlertState]] = {
            "throttled": lambda rule: ThrottledState(rule, devices),
            "memory": lambda rule: Growth(rule, devices),
            "loss": NotANumber,
            "grad_norm": NotANumber,
            "stalled": Silence,
            "energy": lambda rule: Limit(rule, self._energy),
            "time": lambda rule: Limit(rule, self._elapsed),
            "cost": lambda rule: CostTotal(rule, self._energy, self._elapsed, devices, settings),
        }
        self._states: list[AlertState] = [made.get(r.subject, Speed)(r) for r in self.rules]
        self._onsets: dict[tuple[str, str], int] = {}

    def feed(self, rows: AlertRows) -> list[Alert]:
        """Judge more rows. Returns alerts in order of time."""
        self._elapsed.feed(rows)
        self._energy.feed(rows)
        alerts = [Alert(s.rule, *event) for s in self._states for event in s.feed(rows)]
        return [
            alert for alert in sorted(alerts, key=lambda alert: alert.t_ns) if self._is_told(alert)
        ]

    @property
    def energy_j(self) -> float | None:
        """Energy of the devices so far; None if unknown."""
        return self._energy.joules if self._energy.is_known else None

    @property
    def unjudged(self) -> dict[str, str]:
        """Rules without data yet, and what they need."""
        needs = ((state.rule.text, state.lacks) for state in self._states)
        return {text: lacks for text, lacks in needs if lacks}

    @property
    def untold(self) -> dict[str, str]:
        """Rules without data that need more than time."""
        early = {s.rule.text for s in self._states if isinstance(s, Speed) and s.is_told}
        return {text: lacks for text, lacks in self.unjudged.items() if text not in early}

    @property
    def hopeless(self) -> dict[str, str]:
        """Rules without data that no device of the run can provide."""
        of_energy = {rule.text for rule in self.rules if rule.subject == "energy"}
        if not of_energy or not self._energy.is_hopeless:
            return {}
        return {text: lacks for text, lacks in self.unjudged.items() if text in of_energy}

    def _is_told(self, alert: Alert) -> bool:
        key = (alert.rule.text, alert.about)
        if not alert.is_over:
            self._onsets[key] = self._onsets.get(key, 0) + 1
        return self._onsets.get(key, 0) <= MAX_ONSETS


# As in `metrics.energy`: power is not interpolated across a longer gap.
_MAX_GAP_NS = 2 * NS_PER_S


class EnergyTotal:
    """Running total of joules of the GPUs, or of CPU and memory if there is none."""

    def __init__(self, devices: Mapping[str, Device]) -> None:
        self._devices = devices
        self._last: dict[str, tuple[int, float]] = {}  # last reading by device and column
        self._counted_ns: dict[str, int] = {}  # first reading of a device's energy counter
        self.joules = 0.0
        self.is_known = False  # True after the first interval
        self._apart_ns = 0  # shortest gap between power readings that is too long
        # Times of the last batch, and the total at each of them.
        self.new = (np.empty(0, np.int64), np.empty(0))

    def feed(self, rows: AlertRows) -> None:
        """Add readings of energy counters and of power."""
        wanted = self._boundary()
        times, joules = [], []
        for column in ("energy_j", "power_w"):
            for device, (t_ns, values) in rows.samples.get(column, {}).items():
                if device not in wanted:
                    continue
                if column == "energy_j":
                    self._counted_ns.setdefault(device, int(t_ns[0]))
                when, increments_j = self._increments(device, column, t_ns, values)
                if column == "power_w" and device in self._counted_ns:
                    increments_j = np.where(when <= self._counted_ns[device], increments_j, 0.0)
                times.append(when)
                joules.append(increments_j)
        if not times:
            self.new = (np.empty(0, np.int64), np.empty(0))
            return
        when, increments_j = np.concatenate(times), np.concatenate(joules)
        order = np.argsort(when, kind="stable")
        curve = self.joules + np.cumsum(increments_j[order])
        self.new = (when[order], curve)
        self.joules = float(curve[-1]) if len(curve) else self.joules

    @property
    def is_hopeless(self) -> bool:
        """True if no device can report energy."""
        return bool(self._devices) and not self._boundary()

    @property
    def lacks(self) -> str:
        """The reason why the total is unknown; empty if it is known."""
        if self.is_known:
            return ""
        if self._apart_ns:
            apart, limit = (significant(ns / NS_PER_S) for ns in (self._apart_ns, _MAX_GAP_NS))
            return f"power is read {apart} s apart (limit {limit} s)"
        return "no device tells its energy"

    def _boundary(self) -> set[str]:
        kinds = {device.kind for device in self._devices.values()}
        wanted = ("gpu",) if "gpu" in kinds else ("cpu", "dram")
        ids = {device.id for device in self._devices.values() if device.kind in wanted}
        twice = {i for i in ids if self._devices[i].facts.get("energy_counted_in") in ids}
        return ids - twice

    def _increments(
        self,
        device: str,
        column: str,
        t_ns: TimeArray,
        values: FloatArray,
    ) -> tuple[Any, Any]:
        """Times and joules since the previous reading."""
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
        increments_j = (readings[1:] + readings[:-1]) / 2 * gaps_ns / NS_PER_S
        return t_ns, np.where(gaps_ns > _MAX_GAP_NS, 0.0, increments_j)


class Elapsed:
    """Seconds since the run began."""

    lacks = ""

    def __init__(self, start_ns: int | None) -> None:
        self.start_ns = start_ns
        self.until_ns = 0

    def feed(self, rows: AlertRows) -> None:
        """Advance to the end of the rows."""
        starts = [
            int(steps["start_ns"].min()) for steps in rows.steps.values() if len(steps["start_ns"])
        ]
        starts += [int(t[0]) for by in rows.samples.values() for t, _ in by.values()]
        if self.start_ns is None and starts:
            self.start_ns = min(starts)
        self.until_ns = max(self.until_ns, rows.until_ns)


class Limit:
    """A budget. Its alert is raised once and never ends."""

    def __init__(self, rule: AlertRule, total: EnergyTotal | Elapsed) -> None:
        self.rule = rule
        self._total = total
        self._is_raised = False

    @property
    def lacks(self) -> str:
        """What is missing to judge it."""
        return self._total.lacks

    def feed(self, _rows: AlertRows) -> Iterator[AlertEvent]:
        """The alert when the budget is used up."""
        at = None if self._is_raised else used_up(self._total, self.rule.limit)
        if at is not None:
            self._is_raised = True
            t_ns, value = at
            text = f"{self.rule.limit_said(value)} used"
            yield t_ns, value, self.rule.limit, text, "", False


class CostTotal:
    """A budget for rent or for energy cost; the two are judged separately, not added."""

    def __init__(
        self,
        rule: AlertRule,
        energy: EnergyTotal,
        elapsed: Elapsed,
        devices: Mapping[str, Device],
        settings: Settings | None,
    ) -> None:
        self.rule = rule
        self._energy, self._elapsed, self._devices = energy, elapsed, devices
        self._per_hour = settings.price_per_gpu_hour if settings else None
        per_kwh = settings.price_per_kwh if settings else None
        self._per_j = None if per_kwh is None else per_kwh * (settings.pue or 1.0) / J_PER_KWH  # type: ignore[union-attr]
        self._declared_devices = settings.num_devices if settings else None
        self._currency = (settings.currency if settings else None) or "price units"
        self._is_raised = False

    @property
    def lacks(self) -> str:
        """What is missing to judge it."""
        if self._per_hour is None and self._per_j is None:
            return "no price was given: --price-per-gpu-hour or --price-per-kwh"
        if self._per_hour is None and not self._energy.is_known:
            return self._energy.lacks
        return (
            ""
            if self._per_hour is None or self._rented_devices
            else "no device is known to be rented"
        )

    @property
    def _rented_devices(self) -> int:
        return self._declared_devices or sum(
            device.kind == "gpu" for device in self._devices.values()
        )

    def feed(self, _rows: AlertRows) -> Iterator[AlertEvent]:
        """The alert when one of them has used up the budget."""
        rent_per_s = (self._per_hour or 0.0) / 3600.0 * self._rented_devices
        ways = (
            ("rent", self._elapsed, rent_per_s),
            ("bill for energy", self._energy, self._per_j or 0.0),
        )
        for name, total, price in ways:
            at = used_up(total, self.rule.limit / price) if price and not self._is_raised else None
            if at is not None:
                self._is_raised = True
                t_ns, amount = at
                text = f"{significant(amount * price)} {self._currency} of {name}"
                yield t_ns, amount * price, self.rule.limit, text, "", False


def used_up(total: EnergyTotal | Elapsed, limit: float) -> tuple[int, float] | None:
    """The time at which a total reached a limit, and its value; None if it has not."""
    if isinstance(total, Elapsed):
        if total.start_ns is None:
            return None
        at_ns = total.start_ns + round(limit * NS_PER_S)
        return (at_ns, limit) if total.until_ns >= at_ns else None
    times, curve = total.new
    reached = np.flatnonzero(curve >= limit)
    return (int(times[reached[0]]), float(curve[reached[0]])) if len(reached) else None
