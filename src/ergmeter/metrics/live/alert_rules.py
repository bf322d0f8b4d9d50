"""Alert rules such as `tokens_per_s < -20%` or `energy > 2 kWh`, and alerts for display.

A rule that can't be parsed is a UsageError before the run starts, with the closest valid rule.

Each rank raises alerts on its own rows, and a viewer judges the rules once more, so one event may
have several alerts. Alerts of the same rule within 30 s are merged, unless they concern different
devices, or one rank that recovered in between.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from ergmeter.errors import UsageError, suggestion
from ergmeter.units import J_PER_KWH, J_PER_WH, NS_PER_S, duration, significant

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ergmeter.runlog.reader import Run
    from ergmeter.runlog.settings import Settings

# Classes of rules, as in `--stop-on`.
CLASSES = ("budget", "nan", "throughput", "memory", "throttled", "stalled")
BUDGET, NAN, SPEED, MEMORY, THROTTLED, STALLED = CLASSES

_SPEEDS = {
    "tokens_per_s": "tokens/s",
    "samples_per_s": "samples/s",
    "steps_per_s": "steps/s",
    "step_s": "s",
}
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
JOULES = {"J": 1.0, "kJ": 1e3, "MJ": 1e6, "GJ": 1e9}
JOULES |= {"Wh": J_PER_WH, "kWh": J_PER_KWH, "MWh": 1e3 * J_PER_KWH}
_UNITS = {"energy": JOULES, "time": SECONDS, "stalled": SECONDS}
_OVER_STEPS = 100

EXAMPLES = (
    *("tokens_per_s < -20%", "samples_per_s < -20%", "steps_per_s < -20%", "step_s > +50%"),
    *("loss nan", "grad_norm nan", "throttled", "memory +10%", "memory +10% over 100 steps"),
    *("energy > 2 kWh", "cost > 50", "time > 8 h", "stalled > 5 min"),
)
# The rules of a run without rules of its own.
DEFAULT = (
    *("loss nan", "grad_norm nan", "throttled", "tokens_per_s < -20%", "memory +10%"),
    "stalled > 10 min",
)

_WORDS = re.compile(r"(loss|grad_norm)\s+(?:nan|inf)", re.IGNORECASE)
_GROWTH = re.compile(r"memory\s*\+\s*([\d.]+)\s*%(?:\s+over\s+(\d+)\s+steps)?")
_LIMIT = re.compile(r"(\w+)\s*([<>])\s*([+-]?[\d.]+(?:e[+-]?\d+)?)\s*(%|[A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class AlertRule:
    """An alert rule. `limit` is in base units, or a share if it is relative."""

    text: str
    subject: str  # tokens_per_s, loss, throttled, memory, energy, cost, time, stalled, ...
    kind: str  # one of CLASSES
    limit: float = math.nan
    is_relative: bool = False  # to the median of the run itself
    over_steps: int = 0

    @property
    def unit(self) -> str:
        """The unit of the rule's values, such as "tokens/s"."""
        units = {"energy": "J", "time": "s", "stalled": "s", "memory": "B"}
        return units.get(self.subject, _SPEEDS.get(self.subject, ""))

    @property
    def is_of_all_ranks(self) -> bool:
        """True if all ranks raise the alert together: rules on speed, silence and time."""
        return self.kind in (SPEED, STALLED) or self.subject == "time"

    def limit_said(self, limit: float) -> str:
        """A value as text, in this rule's unit."""
        if self.subject in ("time", "stalled", "step_s"):
            return duration(limit)
        if self.subject == "energy":  # in the unit of the rule
            typed = _LIMIT.fullmatch(self.text)
            unit = typed[4] if typed else "kWh"
            return f"{significant(limit / JOULES[unit])} {unit}"
        return f"{significant(limit)} {self.unit}".rstrip()


def parse_rule(text: str) -> AlertRule:
    """Parse a rule. Raises UsageError with the closest valid rule."""
    typed = " ".join(text.split())
    if typed == "throttled":
        return AlertRule(typed, typed, THROTTLED)
    if match := _WORDS.fullmatch(typed):
        return AlertRule(typed.lower(), match[1].lower(), NAN)
    if match := _GROWTH.fullmatch(typed):
        share = _share(typed, f"+{match[1]}")
        return AlertRule(typed, "memory", MEMORY, share, True, int(match[2] or _OVER_STEPS))
    match = _LIMIT.fullmatch(typed)
    if match and match[1] in _SPEEDS:
        return _speed(typed, *match.groups())
    if match and match[1] in ("energy", "time", "stalled", "cost") and match[2] == ">":
        return _budget(typed, match[1], _number(typed, match[3]), match[4])
    raise _unreadable(typed)


def parse_rules(texts: str | Iterable[str]) -> tuple[AlertRule, ...]:
    """Parse several rules; duplicates are dropped."""
    if isinstance(texts, str):
        raise UsageError(f"alerts is a list; got {texts!r}: give alerts=[{texts!r}]")
    return tuple({rule.text: rule for rule in map(parse_rule, texts)}.values())


def parse_stop_classes(words: str | Iterable[str]) -> tuple[str, ...]:
    """Parse the classes of `--stop-on`, such as `budget,nan`. UsageError for an unknown class."""
    chosen = words.split(",") if isinstance(words, str) else list(words)
    chosen = [word.strip() for word in chosen if word.strip()]
    for word in chosen:
        if word not in CLASSES:
            hint = suggestion(word, CLASSES, "; did you mean {!r}?", cutoff=0.4)
            raise UsageError(f"can't stop on {word!r}{hint} (one of {', '.join(CLASSES)})")
    return tuple(dict.fromkeys(chosen))


def _speed(typed: str, subject: str, sign: str, number: str, unit: str) -> AlertRule:
    if (subject == "step_s") != (sign == ">") or unit not in ("", "%", *SECONDS):
        raise _unreadable(typed)
    if unit != "%":
        scale = SECONDS[unit] if unit else 1.0
        if unit and subject != "step_s":
            raise _unreadable(typed)
        if not unit and number.startswith(("+", "-")):
            raise UsageError(
                f"alert {typed!r}: a limit of {subject} has no sign; for one relative to the run's"
                f" median, write {subject} {sign} {number}%"
            )
        return AlertRule(typed, subject, SPEED, _number(typed, number) * scale)
    share = _share(typed, number)
    if (share > 0) != (sign == ">"):
        way = "+50%" if sign == ">" else "-20%"
        raise UsageError(
            f"alert {typed!r}: for a limit relative to the median, write {subject} {sign} {way}"
        )
    return AlertRule(typed, subject, SPEED, share, True)


def _budget(typed: str, subject: str, number: float, unit: str) -> AlertRule:
    kind = STALLED if subject == "stalled" else BUDGET
    if subject == "cost":  # in the currency of the prices; a unit here is ignored
        if unit == "%":
            raise _unreadable(typed)
        return AlertRule(typed, subject, kind, number)
    units = _UNITS[subject]
    if unit not in units:
        raise UsageError(f"alert {typed!r}: a limit of {subject} has a unit: {', '.join(units)}")
    return AlertRule(typed, subject, kind, number * units[unit])


def _number(typed: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise _unreadable(typed) from None
    if not number > 0:
        raise UsageError(f"alert {typed!r}: a limit must be above 0; got {text}")
    return number


def _share(typed: str, text: str) -> float:
    try:
        share = float(text) / 100
    except ValueError:
        raise _unreadable(typed) from None
    if not text.startswith(("+", "-")) or share == 0 or share <= -1:
        raise UsageError(f"alert {typed!r}: write a share as -20% or +50%; got {text}%")
    return share


def _unreadable(typed: str) -> UsageError:
    hint = suggestion(typed, EXAMPLES, "did you mean {!r}? ", cutoff=0.3)
    return UsageError(f"{typed!r} is not an alert rule; {hint}examples: {', '.join(EXAMPLES)}")


def check_prices(rules: tuple[AlertRule, ...], settings: Settings) -> None:
    """Raise UsageError for a cost rule if no price is set."""
    prices = (settings.price_per_gpu_hour, settings.price_per_kwh)
    for rule in rules:
        if rule.subject == "cost" and all(price is None for price in prices):
            raise UsageError(
                f"alert {rule.text!r} needs a price: --price-per-gpu-hour or --price-per-kwh"
            )


_SAME_NS = 30 * NS_PER_S  # alerts closer than this may be one event
_FEW = 8  # ranks that are listed


@dataclass(frozen=True, slots=True)
class NotedAlert:
    """An alert for display: recorded by the run itself (`was_told`), or raised by a viewer.

    `ranks`: the ranks whose loss raised it; empty if the run has one rank.
    """

    t_ns: int
    text: str
    was_told: bool
    ranks: tuple[int, ...] = field(default=(), compare=False)

    @property
    def with_ranks(self) -> str:
        """The text, followed by the ranks in brackets."""
        if not self.ranks:
            return self.text
        some = ", ".join(map(str, self.ranks[:_FEW])) + (", ..." if len(self.ranks) > _FEW else "")
        word = "rank" if len(self.ranks) == 1 else f"{len(self.ranks)} ranks:"
        return f"{self.text} ({word} {some})"

    @property
    def rule(self) -> AlertRule | None:
        """The rule; None if this version can't parse it."""
        return rule_of(self.text.partition(": ")[0])


def rule_of(text: str) -> AlertRule | None:
    """A rule, or None if this version can't parse it: a run may be from another version."""
    try:
        return parse_rule(text)
    except UsageError:
        return None


def noted_alerts(run: Run, ranks: Mapping[str, int]) -> list[NotedAlert]:
    """The recorded alerts of a run, merged. `ranks`: the rank of each writer with steps."""
    marked = (
        NotedAlert(
            mark.t_ns + writer.offset_ns,
            mark.detail,
            was_told=True,
            ranks=ranks_of(mark.detail.partition(": ")[0], writer.directory.name, ranks),
        )
        for writer in run.writers
        for mark in writer.marks
        if mark.name == "alert"
    )
    return merge_events(marked)


def ranks_of(rule: str, writer: str, ranks: Mapping[str, int]) -> tuple[int, ...]:
    """The rank whose loss raised an alert, if the run has several ranks; else empty."""
    parsed_rule = rule_of(rule)
    is_of_rank = parsed_rule is not None and parsed_rule.kind == NAN and writer in ranks
    return (ranks[writer],) if is_of_rank and len(set(ranks.values())) > 1 else ()


def merge_alerts(marked: list[NotedAlert], judged: Iterable[NotedAlert]) -> list[NotedAlert]:
    """Merge alerts recorded by the run (`marked`) with those of a viewer (`judged`), by time."""
    merged, only = list(marked), []
    for alert in judged:
        at = next((at for at, other in enumerate(merged) if is_same(alert, other)), None)
        if at is None:
            only.append(alert)
        else:
            merged[at] = _joined(merged[at], alert)
    return sorted([*merged, *merge_events(only)], key=lambda alert: alert.t_ns)


def merge_events(alerts: Iterable[NotedAlert]) -> list[NotedAlert]:
    """Alerts in order of time, with those of one event merged."""
    merged: list[NotedAlert] = []
    for alert in sorted(alerts, key=lambda alert: alert.t_ns):
        near = takewhile(
            lambda at, alert=alert: alert.t_ns - merged[at].t_ns < _SAME_NS,  # type: ignore[misc]
            reversed(range(len(merged))),
        )
        at = next((at for at in near if _is_one_event(alert, merged[at])), None)
        if at is None:
            merged.append(alert)
        else:
            merged[at] = _joined(merged[at], alert)
    return merged


def is_same(first: NotedAlert, other: NotedAlert) -> bool:
    """True if two alerts have the same rule, are close in time and do not concern two devices."""
    rules = [noted.text.partition(": ")[0] for noted in (first, other)]
    if rules[0] != rules[1] or abs(first.t_ns - other.t_ns) >= _SAME_NS:
        return False
    rule = first.rule
    of_devices = rule is not None and rule.kind in (MEMORY, THROTTLED)
    return first.text == other.text or not of_devices


def _is_one_event(first: NotedAlert, other: NotedAlert) -> bool:
    """True if two alerts, both recorded by the run or both raised by a viewer, are one event."""
    rule = first.rule
    if rule is None or not is_same(first, other):
        return False
    if rule.is_of_all_ranks:
        return True
    if rule.kind != NAN:
        return False
    if not first.ranks or not other.ranks:  # without ranks, the same text is the same step
        return first.text == other.text
    return not set(first.ranks) & set(other.ranks)


def _joined(first: NotedAlert, other: NotedAlert) -> NotedAlert:
    return replace(first, ranks=tuple(sorted({*first.ranks, *other.ranks})))
