"""Is something wrong with this run? One judge, for a run that is going and for one that is over.

The trap: two answers. What watches a run live sees rows in small batches, some seconds late; what
reads an old run has all of them. Both feed the same judge here, in any batches, and it says the
same: stretches are cut by the times in the rows and never by when they came, and an alert has the
time at which it began. Each is told once when it sets in, and may set in again only after it was
over, which takes more than coming back to the limit.

It costs as much as there are new rows, and holds a bounded amount.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ergmeter.metrics.alerts.states import Growth, NotANumber, Silence, Speed, ThrottledState
from ergmeter.metrics.alerts.totals import CostTotal, Elapsed, EnergyTotal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from typing import Protocol

    from ergmeter.metrics.alerts.rules import AlertRule
    from ergmeter.metrics.alerts.states import Told
    from ergmeter.records import Device
    from ergmeter.runlog.settings import Settings

    class AlertState(Protocol):
        """A rule, and what it remembers."""

        rule: AlertRule

        @property
        def lacks(self) -> str:
            """What is needed to judge it."""

        def feed(self, rows: AlertRows) -> Iterable[Told]:
            """What set in or ended."""


# Of one rule, about one thing. A run that goes up and down all night fills no page with it.
MAX_ONSETS = 20


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule that began to hold at an instant, or, where it `is_over`, no longer holds."""

    rule: AlertRule
    t_ns: int
    value: float
    threshold: float
    said: str  # the value beside the threshold, in words
    about: str = ""  # a device, or a writer of several
    is_over: bool = False

    @property
    def text(self) -> str:
        """The rule and what was seen."""
        return f"{self.rule.text}: {self.said}"

    def as_json(self) -> dict[str, Any]:
        """For another program. What is no number (a loss) is null: JSON has no NaN."""
        numbers = {"value": self.value, "threshold": self.threshold}
        finite = {name: n if np.isfinite(n) else None for name, n in numbers.items()}
        what = {"rule": self.rule.text, "kind": self.rule.kind, "text": self.text}
        return {**what, **finite, "unit": self.rule.unit, "about": self.about, "t_ns": self.t_ns}


@dataclass
class AlertRows:
    """New rows of a run, on its clock. Nothing older than `until_ns` is still to come.

    `steps` has by writer the columns of its steps in order of their end, absent numbers NaN, and
    `loss_told`, `grad_norm_told`: whether a NaN there is one that was told. `samples` has by column
    and device the times and values, in order. `printed` has the columns of all printed lines, also
    where a Meter tells the same steps: these often tell no loss, and the lines do.
    """

    until_ns: int
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: dict[str, dict[str, tuple[Any, Any]]] = field(default_factory=dict)
    printed: dict[str, dict[str, Any]] = field(default_factory=dict)

    def without(self, writers: Collection[str]) -> AlertRows:
        """The same less the steps of these writers; what was sampled is for all."""
        if not writers:
            return self
        steps, printed = (
            {writer: columns for writer, columns in rows.items() if writer not in writers}
            for rows in (self.steps, self.printed)
        )
        return AlertRows(self.until_ns, steps, self.samples, printed)


class Judge:
    """Holds some rules against the rows of one run. `feed` gives what set in or ended."""

    def __init__(
        self,
        rules: Iterable[AlertRule],
        *,
        devices: Mapping[str, Device] | None = None,
        settings: Settings | None = None,
        start_ns: int | None = None,
    ) -> None:
        """`devices` are those of the run, and may grow; `settings` hold the prices; `start_ns` is
        when the run began, where that is known."""
        self.rules = tuple(rules)
        devices = {} if devices is None else devices
        self._drawn = EnergyTotal(devices)
        elapsed = Elapsed(start_ns)
        self._elapsed = elapsed
        made: dict[str, Callable[[AlertRule], AlertState]] = {
            "throttled": lambda rule: ThrottledState(rule, devices),
            "memory": lambda rule: Growth(rule, devices),
            "loss": NotANumber,
            "grad_norm": NotANumber,
            "stalled": Silence,
            "energy": lambda rule: self._drawn.limit(rule),
            "time": lambda rule: elapsed.limit(rule),
            "cost": lambda rule: CostTotal(rule, self._drawn, elapsed, devices, settings),
        }
        self._states: list[AlertState] = [made.get(r.subject, Speed)(r) for r in self.rules]
        self._onsets: dict[tuple[str, str], int] = {}

    def feed(self, rows: AlertRows) -> list[Alert]:
        """Judge some more rows. The alerts, in order of time."""
        self._elapsed.feed(rows)
        self._drawn.feed(rows)
        found = [Alert(s.rule, *told) for s in self._states for told in s.feed(rows)]
        return [one for one in sorted(found, key=lambda one: one.t_ns) if self._is_told(one)]

    @property
    def energy_j(self) -> float | None:
        """What the devices drew so far; None where none says."""
        return self._drawn.joules if self._drawn.is_known else None

    @property
    def unjudged(self) -> dict[str, str]:
        """The rules that nothing has been seen for yet, and what they would need."""
        said = ((state.rule.text, state.lacks) for state in self._states)
        return {text: lacks for text, lacks in said if lacks}

    @property
    def untold(self) -> dict[str, str]:
        """Of those, the rules that need more than time."""
        early = {s.rule.text for s in self._states if isinstance(s, Speed) and s.is_told}
        return {text: lacks for text, lacks in self.unjudged.items() if text not in early}

    @property
    def hopeless(self) -> dict[str, str]:
        """Of those, the rules that no device of the run can tell anything for."""
        of_energy = {rule.text for rule in self.rules if rule.subject == "energy"}
        if not of_energy or not self._drawn.is_hopeless:
            return {}
        return {text: lacks for text, lacks in self.unjudged.items() if text in of_energy}

    def _is_told(self, alert: Alert) -> bool:
        key = (alert.rule.text, alert.about)
        if not alert.is_over:
            self._onsets[key] = self._onsets.get(key, 0) + 1
        return self._onsets.get(key, 0) <= MAX_ONSETS


def onsets(alerts: Sequence[Alert]) -> list[Alert]:
    """Those that set in."""
    return [one for one in alerts if not one.is_over]
