"""What to be alarmed by, in a line that one would say: `tokens_per_s < -20%`, `energy > 2 kWh`.

The trap: a rule that is mistyped and never fires. What can't be read as a rule is refused before
anything is started, with the nearest one there is; a limit has the unit it is given in or none.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.errors import UsageError
from ergmeter.units import J_PER_KWH, J_PER_WH, duration, significant

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ergmeter.runlog.settings import Settings

# What a rule may be told to stop the run for, by the word for `--stop-on`.
BUDGET, NAN, SPEED, MEMORY, THROTTLED, STALLED = (
    *("budget", "nan", "throughput", "memory"),
    *("throttled", "stalled"),
)
CLASSES = (BUDGET, NAN, SPEED, MEMORY, THROTTLED, STALLED)

_SPEEDS = {
    "tokens_per_s": "tokens/s",
    "samples_per_s": "samples/s",
    "steps_per_s": "steps/s",
    "step_s": "s",
}
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
JOULES = {
    "J": 1.0,
    "kJ": 1e3,
    "MJ": 1e6,
    "GJ": 1e9,
    "Wh": J_PER_WH,
    "kWh": J_PER_KWH,
    "MWh": 1e3 * J_PER_KWH,
}
_UNITS = {"energy": JOULES, "time": SECONDS, "stalled": SECONDS}
_OVER_STEPS = 100

EXAMPLES = (
    *("tokens_per_s < -20%", "samples_per_s < -20%", "steps_per_s < -20%", "step_s > +50%"),
    *("loss nan", "grad_norm nan", "throttled", "memory +10%", "memory +10% over 100 steps"),
    *("energy > 2 kWh", "cost > 50", "time > 8 h", "stalled > 5 min"),
)
# Of a run whose user asked for none.
DEFAULT = (
    *("loss nan", "grad_norm nan", "throttled", "tokens_per_s < -20%", "memory +10%"),
    "stalled > 10 min",
)

_WORDS = re.compile(r"(loss|grad_norm)\s+(?:nan|inf)", re.IGNORECASE)
_GROWTH = re.compile(r"memory\s*\+\s*([\d.]+)\s*%(?:\s+over\s+(\d+)\s+steps)?")
_LIMIT = re.compile(r"(\w+)\s*([<>])\s*([+-]?[\d.]+(?:e[+-]?\d+)?)\s*(%|[A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class AlertRule:
    """One thing to be alarmed by. `limit` is in base units, or a share where it is relative."""

    text: str
    subject: str  # tokens_per_s, loss, throttled, memory, energy, cost, time, stalled, ...
    kind: str  # one of CLASSES
    limit: float = math.nan
    is_relative: bool = False  # to the median of the run itself
    over_steps: int = 0

    @property
    def unit(self) -> str:
        """What its values are in."""
        units = {"energy": "J", "time": "s", "stalled": "s", "memory": "B"}
        return units.get(self.subject, _SPEEDS.get(self.subject, ""))

    @property
    def is_of_all_ranks(self) -> bool:
        """Whether every rank sees the same: their pace, their silence, the clock."""
        return self.kind in (SPEED, STALLED) or self.subject == "time"

    def limit_said(self, limit: float) -> str:
        """A limit of this rule in words."""
        if self.subject in ("time", "stalled", "step_s"):
            return duration(limit)
        if self.subject == "energy":  # in the unit that was asked for
            typed = _LIMIT.fullmatch(self.text)
            unit = typed[4] if typed else "kWh"
            return f"{significant(limit / JOULES[unit])} {unit}"
        return f"{significant(limit)} {self.unit}".rstrip()


def parsed(text: str) -> AlertRule:
    """A rule as it was typed. UsageError with the nearest one there is."""
    said = " ".join(text.split())
    if said == "throttled":
        return AlertRule(said, said, THROTTLED)
    if match := _WORDS.fullmatch(said):
        return AlertRule(said.lower(), match[1].lower(), NAN)
    if match := _GROWTH.fullmatch(said):
        share = _share(said, f"+{match[1]}")
        return AlertRule(said, "memory", MEMORY, share, True, int(match[2] or _OVER_STEPS))
    match = _LIMIT.fullmatch(said)
    if match and match[1] in _SPEEDS:
        return _speed(said, *match.groups())
    if match and match[1] in ("energy", "time", "stalled", "cost") and match[2] == ">":
        return _budget(said, match[1], _number(said, match[3]), match[4])
    raise _unreadable(said)


def all_parsed(texts: str | Iterable[str]) -> tuple[AlertRule, ...]:
    """Several rules, each once."""
    if isinstance(texts, str):
        raise UsageError(f"alerts is a list; got {texts!r}: give alerts=[{texts!r}]")
    return tuple({rule.text: rule for rule in map(parsed, texts)}.values())


def classes_parsed(words: str | Iterable[str]) -> tuple[str, ...]:
    """What to stop for: `budget,nan`. UsageError for a word there isn't."""
    found = words.split(",") if isinstance(words, str) else list(words)
    found = [word.strip() for word in found if word.strip()]
    for word in found:
        if word not in CLASSES:
            near = difflib.get_close_matches(word, CLASSES, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"no alert to stop on {word!r}{hint} (one of {', '.join(CLASSES)})")
    return tuple(dict.fromkeys(found))


def _speed(said: str, subject: str, sign: str, number: str, unit: str) -> AlertRule:
    if (subject == "step_s") != (sign == ">") or unit not in ("", "%", *SECONDS):
        raise _unreadable(said)
    if unit != "%":
        scale = SECONDS[unit] if unit else 1.0
        if unit and subject != "step_s":
            raise _unreadable(said)
        if not unit and number.startswith(("+", "-")):
            raise UsageError(
                f"alert {said!r}: a limit of {subject} has no sign; relative to the run's median it"
                f" is {subject} {sign} {number}%"
            )
        return AlertRule(said, subject, SPEED, _number(said, number) * scale)
    share = _share(said, number)
    if (share > 0) != (sign == ">"):
        way = "+50%" if sign == ">" else "-20%"
        raise UsageError(
            f"alert {said!r}: relative to the run's median it is {subject} {sign} {way}"
        )
    return AlertRule(said, subject, SPEED, share, True)


def _budget(said: str, subject: str, number: float, unit: str) -> AlertRule:
    kind = STALLED if subject == "stalled" else BUDGET
    if subject == "cost":  # in whatever the prices are in: a currency here is just read over
        if unit == "%":
            raise _unreadable(said)
        return AlertRule(said, subject, kind, number)
    units = _UNITS[subject]
    if unit not in units:
        raise UsageError(f"alert {said!r}: a limit of {subject} is in {', '.join(units)}")
    return AlertRule(said, subject, kind, number * units[unit])


def _number(said: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise _unreadable(said) from None
    if not number > 0:
        raise UsageError(f"alert {said!r}: a limit must be above 0; got {text}")
    return number


def _share(said: str, text: str) -> float:
    try:
        share = float(text) / 100
    except ValueError:
        raise _unreadable(said) from None
    if not text.startswith(("+", "-")) or share == 0 or share <= -1:
        raise UsageError(f"alert {said!r}: a share is given as -20% or +50%; got {text}%")
    return share


def _unreadable(said: str) -> UsageError:
    near = difflib.get_close_matches(said, EXAMPLES, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(f"no alert {said!r}; {hint}they are like {', '.join(EXAMPLES)}")


def check_prices(rules: tuple[AlertRule, ...], settings: Settings) -> None:
    """Refuse a budget of money that nothing is known to cost. UsageError."""
    prices = (settings.price_per_gpu_hour, settings.price_per_kwh)
    for rule in rules:
        if rule.subject == "cost" and all(price is None for price in prices):
            raise UsageError(
                f"alert {rule.text!r} needs a price: --price-per-gpu-hour or --price-per-kwh"
            )
