"""Judges alert rules on the rows of a run, live or afterwards.

The result does not depend on how rows are batched: stretches are cut by the times in the rows, and
an alert has the time at which its condition began. An alert is raised once, and again only after it
has ended, which takes more than returning to the limit. Cost is proportional to the new rows;
memory is bounded.

Budgets of energy, time and money count from the run's first reading. Reported metrics are of a
window after the warm-up, but the warm-up is paid for too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ergmeter.metrics.live.alert_states import Growth, NotANumber, Silence, Speed, ThrottledState
from ergmeter.metrics.live.rows import Elapsed, EnergyTotal, LiveRows, LiveTotals
from ergmeter.units import J_PER_KWH, significant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

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

        def feed(self, rows: LiveRows) -> Iterable[AlertEvent]:
            """The alerts that began or ended."""


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
        self.totals = LiveTotals(devices, start_ns=start_ns)
        energy, elapsed = self.totals.energy, self.totals.elapsed
        made: dict[str, Callable[[AlertRule], AlertState]] = {
            "throttled": lambda rule: ThrottledState(rule, devices),
            "memory": lambda rule: Growth(rule, devices),
            "loss": NotANumber,
            "grad_norm": NotANumber,
            "stalled": Silence,
            "energy": lambda rule: Limit(rule, energy),
            "time": lambda rule: Limit(rule, elapsed),
            "cost": lambda rule: CostTotal(rule, self.totals, devices, settings),
        }
        self._states: list[AlertState] = [made.get(r.subject, Speed)(r) for r in self.rules]
        self._onsets: dict[tuple[str, str], int] = {}

    def feed(self, rows: LiveRows) -> list[Alert]:
        """Judge more rows. Returns alerts in order of time."""
        self.totals.feed(rows)
        alerts = [Alert(s.rule, *event) for s in self._states for event in s.feed(rows)]
        return [
            alert for alert in sorted(alerts, key=lambda alert: alert.t_ns) if self._is_told(alert)
        ]

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
        if not of_energy or not self.totals.energy.is_hopeless:
            return {}
        return {text: lacks for text, lacks in self.unjudged.items() if text in of_energy}

    def _is_told(self, alert: Alert) -> bool:
        key = (alert.rule.text, alert.about)
        if not alert.is_over:
            self._onsets[key] = self._onsets.get(key, 0) + 1
        return self._onsets.get(key, 0) <= MAX_ONSETS


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

    def feed(self, _rows: LiveRows) -> Iterator[AlertEvent]:
        """The alert when the budget is used up."""
        at = None if self._is_raised else self._total.reached(self.rule.limit)
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
        totals: LiveTotals,
        devices: Mapping[str, Device],
        settings: Settings | None,
    ) -> None:
        self.rule = rule
        self._energy, self._elapsed, self._devices = totals.energy, totals.elapsed, devices
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

    def feed(self, _rows: LiveRows) -> Iterator[AlertEvent]:
        """The alert when one of them has used up the budget."""
        rent_per_s = (self._per_hour or 0.0) / 3600.0 * self._rented_devices
        ways: tuple[tuple[str, EnergyTotal | Elapsed, float], ...] = (
            ("rent", self._elapsed, rent_per_s),
            ("bill for energy", self._energy, self._per_j or 0.0),
        )
        for name, total, price in ways:
            at = total.reached(self.rule.limit / price) if price and not self._is_raised else None
            if at is not None:
                self._is_raised = True
                t_ns, amount = at
                text = f"{significant(amount * price)} {self._currency} of {name}"
                yield t_ns, amount * price, self.rule.limit, text, "", False
