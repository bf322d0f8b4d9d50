"""What a comparison came to, in words that say no more than was shown.

The trap: "1.31x" without a word on how sure it is, and a speed-up formula that is upside down
(SFT-Play's guide divides bnb by unsloth and calls it unsloth's). The direction is the catalogue's,
the sentence names who is better, and what was not shown is told with what would show it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from ergmeter.compare.entry import EVAL_LOSS
from ergmeter.compare.time_to_loss import ENERGY, TIME
from ergmeter.errors import UsageError
from ergmeter.metrics.catalog import catalogue, find
from ergmeter.stats.power_analysis import Needed, needed, relative, shows
from ergmeter.stats.ratio import PAIRED
from ergmeter.units import ratio_text, significant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ergmeter.records import Direction
    from ergmeter.stats.ratio import Contrast, Scale

State: TypeAlias = Literal["better", "worse", "differs", "not shown", "no interval", "absent"]

RATE, JOULES, MFU = (
    "throughput.tokens_per_s",
    "energy.joules_per_token",
    "utilization.mfu_frac",
)
WHOLE_RATE, WHOLE_JOULES, WHOLE_MFU = (
    "throughput.whole_run_tokens_per_s",
    "energy.whole_run_joules_per_token",
    "utilization.whole_run_mfu_frac",
)
OF_WHOLE_RUN = ".whole_run_"  # in the keys of metrics over the whole run
DEVICE_MEMORY, HOST_MEMORY = "memory.device_peak_bytes", "memory.process_peak_bytes"
LOSS = "training.loss"
_EXTRA: dict[str, tuple[str, str, Direction]] = {
    EVAL_LOSS: ("evaluation loss", "1", "lower"),
    TIME: ("time to the target loss", "s", "lower"),
    ENERGY: ("energy to the target loss", "J", "lower"),
}
_NAMES = {"eval_loss": EVAL_LOSS, "train_loss": LOSS}
_NOUNS = {
    RATE: "speed",
    WHOLE_RATE: "speed over the whole run",
    JOULES: "energy per token",
    WHOLE_JOULES: "energy per token over the whole run",
    WHOLE_MFU: "MFU over the whole run",
    DEVICE_MEMORY: "peak memory",
    HOST_MEMORY: "host memory",
    LOSS: "training loss",
}

_MUCH = 2.0  # from here on a factor says more than a percentage
_LITTLE = 0.02


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure that is compared."""

    key: str
    title: str
    unit: str
    direction: Direction
    scale: Scale

    @property
    def noun(self) -> str:
        """What the sentence calls it."""
        return _NOUNS.get(self.key, self.title)

    @property
    def is_quality(self) -> bool:
        """Whether it is what was learned, and not what it cost."""
        return self.scale == "difference"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of one figure of one group against the baseline."""

    measure: Measure
    state: State
    words: str
    contrast: Contrast | None = None
    needed: Needed | None = None


def measure(name: str) -> Measure:
    """A figure by its key or by another name of it."""
    key = _NAMES.get(name.lower(), name)
    if key in _EXTRA and key not in catalogue():
        title, unit, direction = _EXTRA[key]
        return Measure(key, title, unit, direction, "difference" if key == EVAL_LOSS else "ratio")
    metric, _ = find(key)
    scale: Scale = "difference" if metric.key in (LOSS, EVAL_LOSS) else "ratio"
    if metric.unit == "C":
        raise UsageError(f"a ratio of temperatures ({metric.key}) means nothing")
    return Measure(metric.key, metric.title, metric.unit, metric.direction, scale)


def verdict(
    name: str, measured: Measure, found: Contrast, *, effect: float, repeats: Sequence[int]
) -> Verdict:
    """What a contrast of a group with the baseline says. `effect`: the share worth showing."""
    if found.low is None or found.high is None:
        size = _size(measured, found) if found.value != found.neutral else f"same {measured.noun}"
        return Verdict(measured, "no interval", f"{name} {size}; {found.why}", found)
    if found.is_shown:
        words = f"{name} {_size(measured, found)}"
        return Verdict(measured, _state(measured, found), words, found)
    if found.is_exact:
        return Verdict(measured, "not shown", f"the same {measured.noun} in every run", found)
    write = _plains if measured.is_quality else _span
    span = write(found.low, found.high)
    words = f"no difference in {measured.noun} shown ({span})"
    further, wanted = _further(measured, found, effect, min(repeats))
    return Verdict(measured, "not shown", f"{words}; {further}", found, wanted)


def absent(measured: Measure, why: str) -> Verdict:
    """Nothing to compare."""
    return Verdict(measured, "absent", f"{measured.noun}: {why}")


def _state(measured: Measure, found: Contrast) -> State:
    if measured.direction == "neither":
        return "differs"
    is_more = found.value > found.neutral
    return "better" if is_more == (measured.direction == "higher") else "worse"


def _size(measured: Measure, found: Contrast) -> str:
    """How much more or less, with the interval; what is named is always more than nothing."""
    is_more = found.value > found.neutral
    if measured.scale == "difference":
        way = "higher" if is_more else "lower"
        turned = found if is_more else found.inverse
        return f"{measured.noun} {_plain(turned.value)} {way}{_interval(turned, _plains)}"
    if measured.direction != "lower" or found.value > _MUCH:
        turned = found if is_more else found.inverse
        said = _factor(measured, is_more=is_more, times=f"{_times(turned.value)}x")
        return said + _interval(turned, _span)
    share = replace(
        found,
        value=abs(found.value - 1.0),
        low=_share(found.low if is_more else found.high),
        high=_share(found.high if is_more else found.low),
    )
    way = "more" if is_more else "less"
    return f"{_percent(share.value)} % {way} {measured.noun}{_interval(share, _percents, ' %')}"


def _share(ratio: float | None) -> float | None:
    return None if ratio is None else abs(ratio - 1.0)


def _factor(measured: Measure, *, is_more: bool, times: str) -> str:
    if measured.key == RATE:
        return f"{times} {'faster' if is_more else 'slower'}"
    if measured.direction == "lower":
        return f"{times} the {measured.noun}"
    return f"{measured.noun} {times} {'higher' if is_more else 'lower'}"


def _interval(found: Contrast, write: Callable[[float, float], str], unit: str = "") -> str:
    if found.low is None or found.high is None:
        return ""
    if found.is_exact:
        return ", the same in every repeat"
    return f", {found.confidence * 100:g} % interval {write(found.low, found.high)}{unit}"


def _span(low: float, high: float) -> str:
    """Two ratios, with as many digits as the one nearer to 1 needs to be told from it."""
    decimals = 3 if min(abs(low - 1.0), abs(high - 1.0)) < _LITTLE else 2
    return f"{ratio_text(low, decimals=decimals)} to {ratio_text(high, decimals=decimals)}"


def _times(ratio: float) -> str:
    return ratio_text(ratio, decimals=3 if abs(ratio - 1.0) < _LITTLE else 2)


def _percents(low: float, high: float) -> str:
    digits = 1 if low < 0.1 else 0
    return f"{low * 100:.{digits}f} to {high * 100:.{digits}f}"


def _percent(share: float) -> str:
    if share < 0.001:
        return significant(share * 100, 2)
    return f"{share * 100:.1f}" if share < 0.1 else f"{share * 100:.0f}"


def _plains(low: float, high: float) -> str:
    return f"{_plain(low)} to {_plain(high)}"


def _plain(value: float) -> str:
    return significant(value, 3)


def _further(
    measured: Measure, found: Contrast, effect: float, repeats: int
) -> tuple[str, Needed | None]:
    """What would show a difference of the size that is worth showing."""
    if found.why or found.noise is None or found.freedom is None:
        return found.why, None
    size = effect if measured.is_quality else relative(effect)
    what = f"{effect:g}" if measured.is_quality else f"{effect * 100:g} %"
    is_paired = found.method == PAIRED
    confidence = found.confidence
    if shows(size, found.noise, repeats, is_paired=is_paired, confidence=confidence):
        return f"one of {what} would have shown", None
    wanted = needed(
        size, found.noise, freedom=found.freedom, is_paired=is_paired, confidence=confidence
    )
    if wanted.repeats is None:
        return f"more than 1000 repeats would be needed to show {what}", wanted
    most = wanted.most if wanted.most is not None else "over 1000"
    return (
        f"about {wanted.repeats} repeats of each would show {what} ({wanted.fewest} to {most}, as"
        " the scatter is known from few)",
        wanted,
    )
