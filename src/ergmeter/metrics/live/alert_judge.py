"""Judges alert rules on the rows of a run, live or afterwards.

The result does not depend on how rows are batched: rates are over stretches of 10 s or more, cut
by the times in the rows, and an alert's time is when its condition began. An alert is raised once,
and again only after it has ended, which needs a value well within the limit. Cost is proportional
to the new rows; memory is bounded.

Budgets of energy, time and money count from the run's first reading. The warm-up is part of them,
as it costs money too, although reported metrics leave it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ergmeter.metrics.live.rows import (
    TRAIN,
    Elapsed,
    EnergyTotal,
    LiveRows,
    LiveTotals,
    real_tokens,
)
from ergmeter.records import PHASES, THROTTLE_BRAKE, THROTTLE_HEAT, Device
from ergmeter.runlog.settings import Settings
from ergmeter.units import J_PER_KWH, NS_PER_S, duration, scaled, significant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ergmeter.metrics.live.alert_rules import AlertRule

# Time, value, threshold, text, device or writer, and whether the alert ended (True) or began.
AlertEvent: TypeAlias = "tuple[int, float, float, str, str, bool]"

# A rule and its state: `feed` yields the alerts that began or ended; `lacks` is the data that is
# missing to judge the rule, "" if none.
AlertState: TypeAlias = "Speed | NotANumber | Silence | ThrottledState | Growth | BudgetState"

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
        """The rule and the detail, such as "loss is nan: loss nan at step 12"."""
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
        """`devices`: of the run, which may grow; `settings`: for prices; `start_ns`: of the run."""
        self.rules = tuple(rules)
        devices = {} if devices is None else devices
        self.totals = LiveTotals(devices, start_ns=start_ns)
        budget = partial(
            BudgetState, totals=self.totals, devices=devices, settings=settings or Settings()
        )
        made: dict[str, Callable[[AlertRule], AlertState]] = {
            "throttled": partial(ThrottledState, devices=devices),
            "memory": partial(Growth, devices=devices),
            "loss": NotANumber,
            "grad_norm": NotANumber,
            "stalled": Silence,
            **dict.fromkeys(("energy", "time", "cost"), budget),
        }
        self._states: list[AlertState] = [made.get(r.subject, Speed)(r) for r in self.rules]
        self._onsets: dict[tuple[str, str], int] = {}

    def feed(self, rows: LiveRows) -> list[Alert]:
        """Judge more rows. Return the alerts that began or ended, in order of time."""
        self.totals.feed(rows)
        alerts = [Alert(s.rule, *event) for s in self._states for event in s.feed(rows)]
        alerts.sort(key=lambda alert: alert.t_ns)
        return [alert for alert in alerts if self._is_told(alert)]

    @property
    def unjudged(self) -> dict[str, str]:
        """Rules that could not be judged yet, and the data that each needs."""
        needs = ((state.rule.text, state.lacks) for state in self._states)
        return {text: lacks for text, lacks in needs if lacks}

    @property
    def untold(self) -> dict[str, str]:
        """The unjudged rules whose values no row has, without those that only need more time."""
        early = {s.rule.text for s in self._states if isinstance(s, Speed) and s.is_told}
        return {text: lacks for text, lacks in self.unjudged.items() if text not in early}

    @property
    def hopeless(self) -> dict[str, str]:
        """The unjudged rules on energy, if no device of the run can measure it."""
        of_energy = {rule.text for rule in self.rules if rule.subject == "energy"}
        if not of_energy or not self.totals.energy.is_hopeless:
            return {}
        return {text: lacks for text, lacks in self.unjudged.items() if text in of_energy}

    def _is_told(self, alert: Alert) -> bool:
        key = (alert.rule.text, alert.about)
        if not alert.is_over:
            self._onsets[key] = self._onsets.get(key, 0) + 1
        return self._onsets.get(key, 0) <= MAX_ONSETS


# States of rules, kept between batches of rows. Each has hysteresis: it begins only after a while
# (two stretches, some seconds, five rises) and ends only well beyond the limit. A value that
# oscillates around the limit raises one alert.

# A rate is a mean over at least this long: single steps vary, and a waiting rank is not slow.
STRETCH_NS = 10 * NS_PER_S
ENOUGH = 5  # stretches before the median is used
IN_A_ROW = 2  # slow stretches before it is an alert
_MAX_RATES = 4096  # rates for the median; beyond, every other one is dropped
_BACK = 0.5  # an alert ends this share of the way from the limit back to the median
_BACK_ABSOLUTE = 0.05

_AWAY = (PHASES.index("eval"), PHASES.index("checkpoint"))

# The power cap is no reason for an alert: a busy GPU is at its cap.
THROTTLED_NS = 2 * NS_PER_S
FREE_NS = 10 * NS_PER_S

RISES = 5
_GONE_NS = 60 * NS_PER_S  # after this long without steps, another writer's steps are counted


class _Lane:
    """The steps of one writer in an incomplete stretch, and the rates of earlier ones."""

    def __init__(self) -> None:
        self.start_ns: int | None = None
        self.ends = np.empty(0, np.int64)
        self.amounts = np.empty(0)
        self.away: list[tuple[int, int]] = []
        self.rates: list[float] = []
        self.stride, self.seen, self.slow = 1, 0, 0
        self.is_raised = False

    def keep(self, rate: float) -> None:
        if self.seen % self.stride == 0:
            self.rates.append(rate)
        self.seen += 1
        if len(self.rates) > _MAX_RATES:
            self.rates, self.stride = self.rates[::2], self.stride * 2

    def away_ns(self, start_ns: int, end_ns: int) -> int:
        """Nanoseconds of evaluation and checkpoints between two times."""
        inside, reached_ns = 0, start_ns
        for a, b in sorted(self.away):  # a checkpoint within an evaluation counts once
            inside += max(0, min(b, end_ns) - max(a, reached_ns))
            reached_ns = max(reached_ns, b)
        self.away = [span for span in self.away if span[1] > end_ns]
        return inside


class Speed:
    """A rule on tokens, samples or steps per second, or on the step time, over stretches."""

    def __init__(self, rule: AlertRule) -> None:
        self.rule = rule
        self._lanes: dict[str, _Lane] = {}
        self.is_told = False  # steps have the value; the rest takes time
        self._is_judged = False

    @property
    def lacks(self) -> str:
        """What is missing to judge it."""
        if self._is_judged:
            return ""
        if not self.is_told:
            is_of_steps = self.rule.subject in ("steps_per_s", "step_s")
            what = self.rule.subject.split("_")[0]
            return "no step was seen" if is_of_steps else f"no step reports {what}"
        stretch = duration(STRETCH_NS / NS_PER_S)
        if not self.rule.is_relative:
            return f"no stretch of {stretch} has ended yet"
        stretches = max(lane.seen for lane in self._lanes.values())
        return (
            f"the run's median needs {ENOUGH} stretches of {stretch}, and one more;"
            f" {stretches} seen"
        )

    def feed(self, rows: LiveRows) -> Iterator[AlertEvent]:
        """Judge the rate of each stretch that ended in these rows."""
        for writer, steps in rows.steps.items():
            lane = self._lanes.setdefault(writer, _Lane())
            self._add(lane, steps)
            yield from self._stretches(lane, writer if len(self._lanes) > 1 else "")

    def _add(self, lane: _Lane, steps: dict[str, Any]) -> None:
        away = np.isin(steps["phase"], _AWAY)
        starts, ends = (steps[edge][away].tolist() for edge in ("start_ns", "end_ns"))
        lane.away += zip(starts, ends, strict=True)
        train = steps["phase"] == TRAIN
        amounts = self._amounts(steps)[train]
        is_counted = ~np.isnan(amounts)
        if not is_counted.any():
            return
        self.is_told = True
        if lane.start_ns is None:
            lane.start_ns = int(steps["start_ns"][train][is_counted][0])
        lane.ends = np.concatenate([lane.ends, steps["end_ns"][train][is_counted]])
        lane.amounts = np.concatenate([lane.amounts, amounts[is_counted]])

    def _amounts(self, steps: dict[str, Any]) -> Any:  # noqa: ANN401  an array
        if self.rule.subject == "tokens_per_s":
            return real_tokens(steps)
        return steps["samples" if self.rule.subject == "samples_per_s" else "steps"]

    def _stretches(self, lane: _Lane, about: str) -> Iterator[AlertEvent]:
        first = 0
        totals = np.concatenate([[0.0], np.cumsum(lane.amounts)])
        while lane.start_ns is not None:
            last = int(np.searchsorted(lane.ends, lane.start_ns + STRETCH_NS, side="left"))
            if last >= len(lane.ends):
                break
            end_ns = int(lane.ends[last])
            span_ns = end_ns - lane.start_ns - lane.away_ns(lane.start_ns, end_ns)
            amount = float(totals[last + 1] - totals[first])
            if span_ns > 0 and amount > 0:
                per_s = amount * NS_PER_S / span_ns
                value = 1 / per_s if self.rule.subject == "step_s" else per_s
                yield from self._judged(lane, value, end_ns, about)
            first, lane.start_ns = last + 1, end_ns
        lane.ends, lane.amounts = lane.ends[first:], lane.amounts[first:]

    def _judged(self, lane: _Lane, value: float, t_ns: int, about: str) -> Iterator[AlertEvent]:
        lane.keep(value)
        rule, usual = self.rule, float(np.median(lane.rates))
        if rule.is_relative and lane.seen <= ENOUGH:
            return
        self._is_judged = True
        limit = usual * (1 + rule.limit) if rule.is_relative else rule.limit
        way = 1 if rule.subject == "step_s" else -1  # the sign of worse
        room = abs(limit - usual) * _BACK if rule.is_relative else limit * _BACK_ABSOLUTE
        lane.slow = lane.slow + 1 if way * (value - limit) > 0 else 0
        text = self._text(value, usual)
        if not lane.is_raised and lane.slow >= IN_A_ROW:
            lane.is_raised = True
            yield t_ns, value, limit, text, about, False
        elif lane.is_raised and way * (value - limit) < -room:
            lane.is_raised = False
            yield t_ns, value, limit, text, about, True

    def _text(self, value: float, usual: float) -> str:
        rule = self.rule
        if not rule.is_relative:
            return rule.limit_said(value)
        share = abs(value / usual - 1) * 100
        way = "above" if value > usual else "below"
        return (
            f"{rule.limit_said(value)}, {significant(share, 2)} % {way} the run's median of"
            f" {rule.limit_said(usual)}"
        )


class NotANumber:
    """A rule on a NaN or infinite loss or gradient norm, from steps or else from printed lines.

    Printed lines count only until the first step with a value, compared by time, not by batch.
    """

    def __init__(self, rule: AlertRule) -> None:
        self.rule = rule
        self.lacks = f"no step reports {rule.subject.replace('_', ' ')}, and no printed line has it"
        self._raised: dict[str, bool] = {}
        self._by_steps_ns: int | None = None  # the end of the first step with a value

    def feed(self, rows: LiveRows) -> Iterator[AlertEvent]:
        """Yield an alert where values become NaN or infinite, and its end where they are finite."""
        by_writer = {w: self._with_value(s) for w, s in rows.steps.items() if w not in rows.printed}
        first = [int(steps["end_ns"][0]) for steps in by_writer.values() if len(steps["end_ns"])]
        if self._by_steps_ns is None and first:
            self._by_steps_ns = min(first)
        for writer, steps in by_writer.items():
            yield from self._turns(writer, steps)
        for writer, lines in rows.printed.items():
            told_lines = self._with_value(lines)
            if self._by_steps_ns is not None:
                early = told_lines["end_ns"] < self._by_steps_ns
                told_lines = {name: column[early] for name, column in told_lines.items()}
            yield from self._turns(writer, told_lines, how=", as printed")

    def _with_value(self, steps: dict[str, Any]) -> dict[str, Any]:
        """Value, end and index of the training steps that have a value."""
        has_value = steps[f"{self.rule.subject}_told"] & (steps["phase"] == TRAIN)
        return {name: steps[name][has_value] for name in (self.rule.subject, "end_ns", "index")}

    def _turns(
        self, writer: str, columns: dict[str, Any], *, how: str = ""
    ) -> Iterator[AlertEvent]:
        values, ends, numbers = columns[self.rule.subject], columns["end_ns"], columns["index"]
        if not len(values):
            return
        self.lacks = ""
        bad = ~np.isfinite(values)
        before = np.concatenate([[self._raised.get(writer, False)], bad[:-1]])
        for at in np.flatnonzero(bad != before).tolist():
            step = "" if np.isnan(numbers[at]) else f" at step {numbers[at]:.0f}"
            what = f"{self.rule.subject} {values[at]:g}{step}{how}"
            yield int(ends[at]), float(values[at]), np.nan, what, writer, not bad[at]
        self._raised[writer] = bool(bad[-1])


class Silence:
    """A rule on the time since a step or phase last ended; it starts with the first one."""

    def __init__(self, rule: AlertRule) -> None:
        self.rule = rule
        self.lacks = "no step was seen"
        self._last_ns: int | None = None
        self._is_raised = False

    def feed(self, rows: LiveRows) -> Iterator[AlertEvent]:
        """Yield an alert where steps stopped, and its end where they resumed."""
        ends = [steps["end_ns"] for steps in rows.steps.values()]
        limit_ns = round(self.rule.limit * NS_PER_S)
        ends_ns = np.sort(np.concatenate(ends)) if ends else np.empty(0, np.int64)
        if self._is_steady(ends_ns, limit_ns):
            self._last_ns, ends_ns = max(int(ends_ns[-1]), self._last_ns or 0), ends_ns[:0]
            self.lacks = ""
        for end_ns in ends_ns.tolist():
            yield from self._quiet_until(end_ns, limit_ns)
            if self._is_raised:
                self._is_raised = False
                quiet_s = (end_ns - (self._last_ns or end_ns)) / NS_PER_S
                text = f"a step ended, the first in {duration(quiet_s)}"
                yield end_ns, quiet_s, self.rule.limit, text, "", True
            self._last_ns = max(end_ns, self._last_ns or 0)
            self.lacks = ""
        yield from self._quiet_until(rows.until_ns, limit_ns)

    def _is_steady(self, ends: Any, limit_ns: int) -> bool:  # noqa: ANN401  an array
        """True if no gap between steps exceeds the limit; then no loop over steps is needed."""
        if self._is_raised or not len(ends):
            return False
        before_ns = ends[0] if self._last_ns is None else self._last_ns
        return bool(np.diff(ends, prepend=before_ns).max() <= limit_ns)

    def _quiet_until(self, t_ns: int, limit_ns: int) -> Iterator[AlertEvent]:
        if self._last_ns is None or self._is_raised or t_ns - self._last_ns <= limit_ns:
            return
        self._is_raised = True
        text = f"no step for {duration(self.rule.limit)}"
        yield self._last_ns + limit_ns, self.rule.limit, self.rule.limit, text, "", False


class ThrottledState:
    """A rule on a device that is throttled by heat or a power brake for 2 s or more."""

    lacks = "no device reports why it is throttled"

    def __init__(self, rule: AlertRule, devices: Mapping[str, Device]) -> None:
        self.rule = rule
        self._devices = devices
        # By device: throttled or not, since when, for which reasons.
        self._since: dict[str, tuple[bool, int, int]] = {}
        self._raised: set[str] = set()

    def feed(self, rows: LiveRows) -> Iterator[AlertEvent]:
        """Judge the throttle reasons of each device."""
        for device, (t_ns, values) in rows.samples.get("throttled", {}).items():
            self.lacks = ""
            bits = values.astype(np.int64)
            is_throttled = (bits & (THROTTLE_HEAT | THROTTLE_BRAKE)) != 0
            was, since_ns, why = self._since.get(device, (bool(is_throttled[0]), int(t_ns[0]), 0))
            # Up to each change, and up to the last reading.
            before = np.concatenate([[was], is_throttled[:-1]])
            first = 0
            for at in np.flatnonzero(is_throttled != before).tolist():
                why |= _reasons(bits[first:at], t_ns[first:at], since_ns + THROTTLED_NS)
                yield from self._lasted(device, was, since_ns, int(t_ns[at]), why)
                was, since_ns, why, first = bool(is_throttled[at]), int(t_ns[at]), 0, at
            why |= _reasons(bits[first:], t_ns[first:], since_ns + THROTTLED_NS)
            yield from self._lasted(device, was, since_ns, int(t_ns[-1]), why)
            self._since[device] = (was, since_ns, why)

    def _lasted(
        self, device: str, is_throttled: bool, since_ns: int, until_ns: int, bits: int
    ) -> Iterator[AlertEvent]:
        if is_throttled and device not in self._raised and until_ns - since_ns >= THROTTLED_NS:
            self._raised.add(device)
            why = "heat" if bits & THROTTLE_HEAT else "a hardware slowdown or power brake"
            text = f"{_name(self._devices, device)} is throttled by {why}"
            yield since_ns + THROTTLED_NS, float(bits), 0.0, text, device, False
        if not is_throttled and device in self._raised and until_ns - since_ns >= FREE_NS:
            self._raised.discard(device)
            text = f"{_name(self._devices, device)} is no longer throttled"
            yield since_ns + FREE_NS, 0.0, 0.0, text, device, True


def _reasons(bits: Any, t_ns: Any, until_ns: int) -> int:  # noqa: ANN401  arrays
    """The throttle reasons of the readings up to `until_ns`, whatever the batches of rows."""
    return int(np.bitwise_or.reduce(bits[t_ns <= until_ns], initial=0))


# Memory columns by kind of device; the first one with readings is used.
_MEMORY = {
    "process": ("memory_bytes",),
    "gpu": ("process_bytes", "memory_bytes"),
    "allocator": ("allocated_bytes",),
}


class Growth:
    """A rule on memory growth: the minimum of each stretch of steps rises five times in a row.

    The minimum, because memory varies within a step. Growth counts from the first step on, because
    loading a model also fills memory.
    """

    lacks = "no memory reading after a first step"

    def __init__(self, rule: AlertRule, devices: Mapping[str, Device]) -> None:
        self.rule = rule
        self._devices = devices
        self._steps_each = max(1, rule.over_steps // RISES)
        self._lane = ""  # the writer whose steps are counted
        self._lane_ns = 0  # the end of its last step
        self._steps = 0.0
        self._begin_ns: int | None = None  # the end of the first step
        self._column: dict[str, str] = {}
        self._least: dict[str, float] = {}  # of the stretch that has not ended yet
        self._streaks: dict[str, list[float]] = {}
        self._raised: set[str] = set()

    def feed(self, rows: LiveRows) -> Iterator[AlertEvent]:
        """Add memory readings and judge the stretches of steps that ended in these rows."""
        edges = list(self._edges(rows))
        if self._begin_ns is None:
            return
        new = self._memory(rows, self._begin_ns)
        for device in dict.fromkeys((*self._least, *new)):
            t_ns, values = new.get(device, (np.empty(0, np.int64), np.empty(0)))
            *ended, rest = np.split(values, np.searchsorted(t_ns, edges, side="right"))
            for edge, part in zip(edges, ended, strict=True):
                least = min(self._least.pop(device, np.inf), part.min(initial=np.inf))
                if least < np.inf:
                    yield from self._rose(device, float(least), edge)
            self._least[device] = min(self._least.get(device, np.inf), rest.min(initial=np.inf))

    def _memory(self, rows: LiveRows, since_ns: int) -> dict[str, tuple[Any, Any]]:
        """Each device's new memory readings after `since_ns`, always from the same column."""
        new = {}
        for kind, columns in _MEMORY.items():
            for column in columns:
                for device, (t_ns, values) in rows.samples.get(column, {}).items():
                    device_info = self._devices.get(device)
                    is_own = device_info is not None and device_info.kind == kind
                    if is_own and self._column.setdefault(device, column) == column:
                        later = t_ns > since_ns
                        new[device] = (t_ns[later], values[later])
        return new

    def _edges(self, rows: LiveRows) -> Iterator[int]:
        """Yield the times at which stretches of steps ended in these rows."""
        trained = [(s["end_ns"][s["phase"] == TRAIN], w) for w, s in rows.steps.items()]
        for _, writer in sorted((int(e[0]), w) for e, w in trained if len(e)):
            steps = rows.steps[writer]
            train = steps["phase"] == TRAIN
            if writer != self._lane and self._lane:
                train &= steps["end_ns"] > self._lane_ns + _GONE_NS
            if not train.any():
                continue
            ends = steps["end_ns"][train]
            if self._begin_ns is None:
                self._begin_ns = int(ends[0])
            self._lane, self._lane_ns = writer, int(ends[-1])
            totals = self._steps + np.cumsum(np.nan_to_num(steps["steps"][train], nan=1.0))
            stretch = np.floor(np.append(self._steps, totals) / self._steps_each)
            self._steps = float(totals[-1])
            yield from ends[np.diff(stretch) > 0].tolist()

    def _rose(self, device: str, least: float, t_ns: int) -> Iterator[AlertEvent]:
        self.lacks = ""
        streak = self._streaks.setdefault(device, [])
        if streak and least <= streak[-1]:
            was, streak = streak[0], [least]
            if device in self._raised:
                self._raised.discard(device)
                text = f"{_name(self._devices, device)} stopped growing ({scaled(least, 'B')})"
                yield t_ns, least, was * (1 + self.rule.limit), text, device, True
        else:
            streak = (
                [*streak[:1], *streak[-RISES:], least] if len(streak) > RISES else [*streak, least]
            )
        self._streaks[device] = streak
        limit = streak[0] * (1 + self.rule.limit)
        if device not in self._raised and len(streak) > RISES and least >= limit:
            self._raised.add(device)
            grown = significant((least / streak[0] - 1) * 100, 3)
            text = (
                f"{_name(self._devices, device)} grew by {grown} % without a fall,"
                f" {scaled(streak[0], 'B')} to {scaled(least, 'B')}"
            )
            yield t_ns, least, limit, text, device, False


def _name(devices: Mapping[str, Device], device: str) -> str:
    device_info = devices.get(device)
    return device if device_info is None or device_info.kind == "gpu" else device_info.name


class BudgetState:
    """A limit on energy, time or cost. Its alert is raised once and never ends.

    The two parts of a cost, rent and energy, are judged separately, not added.
    """

    def __init__(
        self, rule: AlertRule, totals: LiveTotals, devices: Mapping[str, Device], settings: Settings
    ) -> None:
        self.rule = rule
        self._totals, self._devices, self._settings = totals, devices, settings
        self._is_raised = False

    @property
    def lacks(self) -> str:
        """What is missing to judge it."""
        if self.rule.subject == "time":
            return ""
        is_rented = self.rule.subject == "cost" and self._settings.price_per_gpu_hour is not None
        if self.rule.subject == "cost" and not is_rented and self._settings.price_per_kwh is None:
            return "no price was given: --price-per-gpu-hour or --price-per-kwh"
        if is_rented:
            return "" if self._rented_devices else "no device is known to be rented"
        return self._totals.energy.lacks

    @property
    def _rented_devices(self) -> int:
        gpus = sum(device.kind == "gpu" for device in self._devices.values())
        return self._settings.num_devices or gpus

    def _parts(self) -> list[tuple[str, EnergyTotal | Elapsed, float]]:
        """The totals that are judged, each alone: name, total, and price of a joule or second."""
        energy, elapsed = self._totals.energy, self._totals.elapsed
        if self.rule.subject != "cost":
            return [("", energy if self.rule.subject == "energy" else elapsed, 1.0)]
        settings = self._settings
        per_s = (settings.price_per_gpu_hour or 0.0) / 3600.0 * self._rented_devices
        per_j = (settings.price_per_kwh or 0.0) * (settings.pue or 1.0) / J_PER_KWH
        return [("rent", elapsed, per_s), ("bill for energy", energy, per_j)]

    def feed(self, _rows: LiveRows) -> Iterator[AlertEvent]:
        """Yield one alert when the budget is used up."""
        for name, total, price in self._parts():
            at = total.reached(self.rule.limit / price) if price and not self._is_raised else None
            if at is not None:
                self._is_raised = True
                t_ns, value = at[0], at[1] * price
                currency = self._settings.currency or "price units"
                text = f"{self.rule.limit_said(value)} used"
                if name:
                    text = f"{significant(value)} {currency} of {name}"
                yield t_ns, value, self.rule.limit, text, "", False
