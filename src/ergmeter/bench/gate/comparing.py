"""How do the cells of NEW stand against those of REF, each figure with what noise allows to say?

The trap: a ratio of two single runs, read as a result. Where both sides were repeated, the interval
is Welch's; where one was, its scatter stands for both; where neither was, somebody has to say what
the noise is, or there is no interval and the figure says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from ergmeter.bench.gate.padding_check import paradox
from ergmeter.bench.gate.pairing import CellPair, Paired, paired
from ergmeter.bench.gate.rules import METRICS, metric_named
from ergmeter.bench.gate.window_kinds import of_one_window
from ergmeter.errors import NotMeasurable
from ergmeter.stats.ratio import contrast, mean
from ergmeter.stats.student_t import cdf, factor
from ergmeter.units import duration, scaled, significant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from ergmeter.stats.ratio import Contrast, Scale

Way: TypeAlias = Literal["fall", "rise", "change"]
SHOWN = ("tokens_per_s", "samples_per_s", "runtime", "peak_memory", "loss")
TOGETHER = "all cells together"
_FEWEST_TOGETHER = 3
_KNOWN = 1e6  # degrees of freedom of a noise that is given and not estimated


@dataclass(frozen=True, slots=True)
class BenchCompareOptions:
    """How to compare. `noise`: of one run, as a share, by metric; under "" for all of them."""

    confidence: float = 0.95
    noise: Mapping[str, float] = field(default_factory=dict)
    by: tuple[str, ...] = ()
    new_where: Mapping[str, str] = field(default_factory=dict)
    ref_where: Mapping[str, str] = field(default_factory=dict)

    def noise_of(self, metric: str) -> float | None:
        """The noise that was given for a metric."""
        return self.noise.get(metric, self.noise.get(""))


@dataclass(frozen=True, slots=True)
class CellChange:
    """NEW over REF, or NEW minus REF: `error` is the standard error on the scale's axis."""

    column: str
    new: float
    ref: float
    value: float
    scale: Scale
    repeats: tuple[int, int]
    low: float | None = None
    high: float | None = None
    error: float | None = None
    freedom: float | None = None
    noise: float | None = None
    basis: str = ""  # where the noise is from; why there is none

    @property
    def neutral(self) -> float:
        """The value of no change."""
        return 1.0 if self.scale == "ratio" else 0.0

    def chance(self, *, of: Way) -> float | None:
        """How often chance alone brings so much this way, where nothing changed (a p-value)."""
        if self.error is None or self.freedom is None:
            return None
        shift = _axis(self.value, self.scale)
        if self.error == 0.0:
            t = math.copysign(math.inf, shift) if shift else 0.0
        else:
            t = shift / self.error
        if of == "change":
            return min(1.0, 2.0 * _below(-abs(t), self.freedom))
        return _below(t if of == "fall" else -t, self.freedom)


@dataclass(frozen=True, slots=True)
class Compared:
    """One configuration: its figures, by metric, and what is odd about them."""

    pair: CellPair
    figures: Mapping[str, CellChange]
    paradox: str = ""


@dataclass(frozen=True, slots=True)
class BenchComparison:
    """Everything that a comparison of two tables found."""

    paired: Paired
    cells: tuple[Compared, ...]
    together: Mapping[str, CellChange]
    metrics: tuple[str, ...]
    options: BenchCompareOptions


def compare(
    new: pa.Table,
    ref: pa.Table,
    *,
    metrics: Sequence[str] = SHOWN,
    options: BenchCompareOptions | None = None,
) -> BenchComparison:
    """Hold NEW against REF, configuration by configuration, and over all of them."""
    asked = options or BenchCompareOptions()
    names = tuple(dict.fromkeys(metric_named(name) for name in metrics))
    found = matched(new, ref, asked)
    cells = []
    by_metric: dict[str, list[CellChange]] = {name: [] for name in names}
    for pair in found.both:
        figures = {}
        for name in names:
            one = figure(pair, name, "ratio", asked)
            if one is not None:
                figures[name] = one
                by_metric[name].append(one)
        cells.append(Compared(pair, figures, paradox(pair)))
    over_all = {n: whole for n, ones in by_metric.items() if (whole := together(ones, asked))}
    return BenchComparison(found, tuple(cells), over_all, names, asked)


def matched(new: pa.Table, ref: pa.Table, options: BenchCompareOptions) -> Paired:
    """The cells of both, by configuration. Raises UsageError for windows of different kinds."""
    new, ref = of_one_window(new, ref)
    return paired(new, ref, by=options.by, new_where=options.new_where, ref_where=options.ref_where)


def figure(
    pair: CellPair, metric: str, scale: Scale, options: BenchCompareOptions
) -> CellChange | None:
    """One metric of one configuration; None where a side lacks it, or it has no such scale."""
    column = pair.column(METRICS[metric])
    if column is None:
        return None
    new, ref = pair.new.values(column), pair.ref.values(column)
    try:
        found = contrast(new, ref, scale=scale, confidence=options.confidence)
        means = mean(new, scale=scale).value, mean(ref, scale=scale).value
    except NotMeasurable:
        return None
    if found.low is not None:
        return _measured(column, means, found)
    return _single(column, means, found, (new, ref), options.noise_of(metric))


def amount(found: CellChange, value: float) -> str:
    """A side's own figure in words, in the unit of its column."""
    if found.column.endswith("_bytes"):
        return scaled(value, "B")
    if found.column.endswith("_s") and "_per_" not in found.column:
        return duration(value)
    return significant(value)


def together(figures: Sequence[CellChange], options: BenchCompareOptions) -> CellChange | None:
    """All configurations as one: the mean change, with its interval from how the cells scatter."""
    if len(figures) < _FEWEST_TOGETHER:
        return None
    scale = figures[0].scale
    found = contrast(
        [one.new for one in figures],
        [one.ref for one in figures],
        scale=scale,
        is_paired=True,
        confidence=options.confidence,
    )
    means = (
        mean([one.new for one in figures], scale=scale),
        mean([one.ref for one in figures], scale=scale),
    )
    columns = sorted({one.column for one in figures})
    return _measured(", ".join(columns), (means[0].value, means[1].value), found)


def _measured(column: str, means: tuple[float, float], found: Contrast) -> CellChange:
    assert found.low is not None
    assert found.high is not None
    assert found.freedom is not None
    width = _axis(found.high, found.scale) - _axis(found.low, found.scale)
    return CellChange(
        column,
        *means,
        found.value,
        found.scale,
        found.repeats,
        found.low,
        found.high,
        error=width / 2.0 / factor(found.confidence, found.freedom),
        freedom=found.freedom,
        noise=found.noise,
        basis=found.method,
    )


def _single(
    column: str,
    means: tuple[float, float],
    found: Contrast,
    sides: tuple[Sequence[float], Sequence[float]],
    given: float | None,
) -> CellChange:
    """Where a side has one run: the noise that was given, or that of the side with repeats."""
    scale = found.scale
    plain = CellChange(column, *means, found.value, scale, found.repeats, basis=found.why)
    repeated = max(sides, key=len)
    if given is not None:
        noise = math.log1p(given) if scale == "ratio" else given * abs(means[1])
        freedom, basis = _KNOWN, f"noise as given, {given * 100:g} % a run"
    elif len(repeated) > 1:
        noise = mean(repeated, scale=scale).noise or 0.0
        side = "NEW" if len(sides[0]) > 1 else "REF"
        freedom, basis = len(repeated) - 1.0, f"the noise of {side}'s repeats, for both sides"
    else:
        return plain
    error = noise * math.sqrt(sum(1.0 / len(side) for side in sides))
    middle = _axis(found.value, scale)
    margin = factor(found.confidence, freedom) * error
    back = math.exp if scale == "ratio" else float
    return CellChange(
        column,
        *means,
        found.value,
        scale,
        found.repeats,
        back(middle - margin),
        back(middle + margin),
        error,
        freedom,
        noise,
        basis,
    )


def _axis(value: float, scale: Scale) -> float:
    return math.log(value) if scale == "ratio" else value


def _below(t: float, freedom: float) -> float:
    return float(t > 0) if math.isinf(t) else cdf(t, freedom)
