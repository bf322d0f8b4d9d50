"""Decides the verdicts of a comparison (better, worse, not shown) and words them.

Which direction is better comes from the catalogue, and the sentence names the better group. A
difference that was not shown comes with the number of repeats that would show it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from ergmeter.stats.ratio import PAIRED, Contrast, Needed, needed, relative, shows
from ergmeter.units import ratio_text, significant

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.compare.gate import GateRule
    from ergmeter.metrics.catalog import Metric

# Of a comparison; and of a gate, which has "worse" and "absent" too.
State: TypeAlias = Literal[
    "better", "worse", "differs", "not shown", "no interval", "absent", "inconclusive", "pass"
]

OF_WHOLE_RUN = ".whole_run_"  # in the keys of metrics over the whole run
_SPEED = "speed"  # in sentences: faster and slower

_MUCH = 2.0  # larger ratios are printed as a factor instead of a percentage
_LITTLE = 0.02


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one metric of one group against the baseline, or by a gate's rule."""

    measure: Metric
    state: State
    words: str
    contrast: Contrast | None = None
    needed: Needed | None = None
    key: str = ""  # the metric that both sides have, if the measure has alternatives
    name: str = ""  # the configuration, in a gate
    rule: GateRule | None = None
    is_tested: bool = True  # False if its sides did not do or count the same


def verdict(
    name: str, measured: Metric, result: Contrast, *, effect: float, family: int = 1
) -> Verdict:
    """The verdict of a contrast with the baseline. `effect`: the smallest one of interest.

    `family`: over 1, the number of comparisons among which Holm's method did not reject this one.
    """
    if result.low is None or result.high is None:
        is_same = result.value == result.neutral
        size = f"same {measured.phrase}" if is_same else _size(measured, result)
        return Verdict(measured, "no interval", f"{name} {size}; {result.why}", result)
    if result.is_shown and family == 1:
        words = f"{name} {_size(measured, result)}"
        return Verdict(measured, _state(measured, result), words, result)
    if result.is_exact:
        return Verdict(measured, "not shown", f"the same {measured.phrase} in every run", result)
    write = _plains if measured.is_quality else _span
    span = write(result.low, result.high)
    words = f"no difference in {measured.phrase} shown ({span})"
    if result.is_shown:
        words += f"; the interval excludes 'no difference', but 1 of {family} groups may by chance"
        return Verdict(measured, "not shown", words, result)
    further, wanted = _further(measured, result, effect)
    return Verdict(measured, "not shown", f"{words}; {further}", result, wanted)


def absent_verdict(measured: Metric, why: str) -> Verdict:
    """The verdict if there is nothing to compare."""
    return Verdict(measured, "absent", f"{measured.phrase}: {why}")


def _state(measured: Metric, result: Contrast) -> State:
    if measured.direction == "neither":
        return "differs"
    is_more = result.value > result.neutral
    return "better" if is_more == (measured.direction == "higher") else "worse"


def _size(measured: Metric, result: Contrast) -> str:
    """The size of the difference with its interval, as a positive amount."""
    is_more = result.value > result.neutral
    if measured.scale == "difference":
        way = "higher" if is_more else "lower"
        turned = result if is_more else result.inverse
        return f"{measured.phrase} {significant(turned.value, 3)} {way}{_interval(turned, _plains)}"
    if measured.direction != "lower" or result.value > _MUCH:
        turned = result if is_more else result.inverse
        decimals = 3 if abs(turned.value - 1.0) < _LITTLE else 2
        times = f"{ratio_text(turned.value, decimals=decimals)}x"
        return _factor(measured, is_more=is_more, times=times) + _interval(turned, _span)
    share = replace(
        result,
        value=abs(result.value - 1.0),
        low=_share(result.low if is_more else result.high),
        high=_share(result.high if is_more else result.low),
    )
    way = "more" if is_more else "less"
    return f"{_percent(share.value)} % {way} {measured.phrase}{_interval(share, _percents)}"


def _share(ratio: float | None) -> float | None:
    return None if ratio is None else abs(ratio - 1.0)


def _factor(measured: Metric, *, is_more: bool, times: str) -> str:
    if measured.phrase == _SPEED:
        return f"{times} {'faster' if is_more else 'slower'}"
    if measured.direction == "lower":
        return f"{times} the {measured.phrase}"
    return f"{measured.phrase} {times} {'higher' if is_more else 'lower'}"


def _interval(result: Contrast, write: Callable[[float, float], str]) -> str:
    if result.low is None or result.high is None:
        return ""
    if result.is_exact:
        return ", the same in every repeat"
    return f", {result.confidence * 100:g} % interval {write(result.low, result.high)}"


def _span(low: float, high: float) -> str:
    """Two ratios, with enough digits to differ from 1."""
    decimals = 3 if min(abs(low - 1.0), abs(high - 1.0)) < _LITTLE else 2
    return f"{ratio_text(low, decimals=decimals)} to {ratio_text(high, decimals=decimals)}"


def _percents(low: float, high: float) -> str:
    digits = 1 if low < 0.1 else 0
    return f"{low * 100:.{digits}f} to {high * 100:.{digits}f} %"


def _percent(share: float) -> str:
    if share < 0.001:
        return significant(share * 100, 2)
    return f"{share * 100:.1f}" if share < 0.1 else f"{share * 100:.0f}"


def _plains(low: float, high: float) -> str:
    return f"{significant(low, 3)} to {significant(high, 3)}"


def _further(measured: Metric, result: Contrast, effect: float) -> tuple[str, Needed | None]:
    """The number of repeats that would show a difference of size `effect`, in words."""
    if result.why or result.noise is None or result.dof is None:
        return result.why, None
    size = effect if measured.is_quality else relative(effect)
    what = f"{effect:g}" if measured.is_quality else f"{effect * 100:g} %"
    is_paired = result.method == PAIRED
    confidence = result.confidence
    repeats = min(result.repeats)
    if shows(size, result.noise, repeats, is_paired=is_paired, confidence=confidence):
        return f"a difference of {what} would have shown", None
    wanted = needed(size, result.noise, dof=result.dof, is_paired=is_paired, confidence=confidence)
    if wanted.repeats is None:
        return f"more than 1000 repeats would be needed to show {what}", wanted
    most = wanted.most if wanted.most is not None else "over 1000"
    return (
        f"about {wanted.repeats} repeats of each would show {what} ({wanted.fewest} to {most}, as"
        " few repeats estimate the scatter)",
        wanted,
    )
