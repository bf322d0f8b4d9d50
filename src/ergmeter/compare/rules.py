"""Rules of a gate (`tokens_per_s -3%`), the stated noise of runs, and the metrics they name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.compare.verdicts import Measure, rule_measure
from ergmeter.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.stats.ratio import Scale, Way

DEFAULT_RULES = ("tokens_per_s -3%", "peak_memory +2%", "loss +-1%")
_WRITTEN = re.compile(r"\s*([\w.]+)\s+(\+-|-\+|±|\+|-|)\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(%?)\s*")
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(%?)\s*")
_UNWANTED = {"higher": "-", "lower": "+", "neither": "+-"}  # by the direction that is better


@dataclass(frozen=True, slots=True)
class GateRule:
    """How far a metric may fall and rise: as a share of REF's value, or in its own unit."""

    measure: Measure
    fall: float | None
    rise: float | None
    scale: Scale

    @property
    def metric(self) -> str:
        """The metric's name in rules."""
        return self.measure.label

    @property
    def low(self) -> float | None:
        """The lowest change that is allowed, as a ratio or a difference."""
        if self.fall is None:
            return None
        return 1.0 - self.fall if self.scale == "ratio" else -self.fall

    @property
    def high(self) -> float | None:
        """The highest change that is allowed."""
        if self.rise is None:
            return None
        return 1.0 + self.rise if self.scale == "ratio" else self.rise

    @property
    def is_two_sided(self) -> bool:
        """True if both ways are limited."""
        return self.fall is not None and self.rise is not None

    @property
    def way(self) -> Way:
        """The way that is not wanted."""
        if self.is_two_sided:
            return "change"
        return "fall" if self.rise is None else "rise"

    def is_beyond(self, value: float) -> bool:
        """True if a change is more than the rule allows."""
        below = self.low is not None and value < self.low
        return below or (self.high is not None and value > self.high)

    def __str__(self) -> str:
        size = self.fall if self.fall is not None else self.rise
        sign = "+-" if self.is_two_sided else "-" if self.rise is None else "+"
        percent = self.scale == "ratio"
        return f"{self.metric} {sign}{(size or 0.0) * (100 if percent else 1):g}{'%' * percent}"


def parse_rule(text: str) -> GateRule:
    """A rule as written. Without a sign, the catalogue's direction decides which way is unwanted.

    UsageError with the nearest name for an unknown metric.
    """
    match = _WRITTEN.fullmatch(text)
    if not match:
        raise UsageError(
            f"no rule: {text!r}; one is a metric, a sign and a size: 'tokens_per_s -3%',"
            " 'peak_memory +2%', 'loss +-0.01'"
        )
    name, sign, size, percent = match.groups()
    measure = rule_measure(name)
    sign = sign or _UNWANTED[measure.direction]
    value = float(size) / 100.0 if percent else float(size)
    if percent and value >= 1.0 and sign != "+":
        raise UsageError(f"{text!r} lets the figure fall by all of it: give less than 100 %")
    return GateRule(
        measure,
        fall=None if sign == "+" else value,
        rise=None if sign == "-" else value,
        scale="ratio" if percent else "difference",
    )


def parse_share(text: str) -> float:
    """A share as people write it: 1%, 0.01."""
    match = _SHARE.fullmatch(text)
    if not match:
        raise UsageError(f"no share: {text!r}; write it as 1% or 0.01")
    return float(match[1]) / (100.0 if match[2] else 1.0)


def parse_noise(texts: Sequence[str]) -> dict[str, float]:
    """The stated noise of one run: by the metric's name in rules, and under "" for all metrics."""
    noise_by_metric: dict[str, float] = {}
    for text in texts:
        name, is_named, size = text.rpartition("=")
        value = parse_share(size)
        if value <= 0.0:
            raise UsageError(f"noise is a share above 0, such as 1%; got {text!r}")
        noise_by_metric[rule_measure(name.strip()).label if is_named else ""] = value
    return noise_by_metric
