"""Compares the cells of NEW with those of REF: each metric's change with its interval.

Where both sides were repeated, the interval is Welch's. Where one was, its scatter stands for both.
Where neither was, the noise must be stated, or the change has no interval and says so.

Also here: the metrics and rules of the gate (`tokens_per_s -3%`), the check for padding, and the
window that rates are over. transformers counts padding in tokens/s, so padding-free training can
be faster in samples/s and slower in tokens/s; tokens per sample tell the two apart. Rates over
different windows are computed again from the cells' directories before they are compared.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ergmeter.bench.pairing import CellPair, Paired, paired
from ergmeter.bench.results import FROM_RUN, collect
from ergmeter.bench.tables import as_table
from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.metrics.evidence.window import TRAINING, UNBROKEN
from ergmeter.stats.intervals import cdf, factor
from ergmeter.stats.ratio import Contrast, Scale, contrast, mean
from ergmeter.units import duration, scaled, significant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa


def same_window(new: pa.Table, ref: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Both tables as they are, or with their rows over the training window where kinds differ."""
    kinds = _kinds(new), _kinds(ref)
    if not all(kinds) or len(set.union(*kinds)) == 1:
        return new, ref
    return _anew(new, "NEW", *kinds), _anew(ref, "REF", *kinds)


def _kinds(table: pa.Table) -> set[str]:
    columns = table.select(["rates_from", "window"]).to_pylist()
    return {_kind(row) for row in columns if row["rates_from"] == FROM_RUN}


def _kind(row: Mapping[str, Any]) -> str:
    return row["window"] or UNBROKEN


def _anew(table: pa.Table, name: str, new: set[str], ref: set[str]) -> pa.Table:
    rows = table.to_pylist()
    for at, row in enumerate(rows):
        if row["rates_from"] != FROM_RUN or _kind(row) == TRAINING:
            continue
        cell = Path(row["path"] or "")
        if not row["path"] or not (cell / "run").is_dir():
            raise UsageError(
                f"NEW's rates are over the window {'/'.join(sorted(new))}, REF's over"
                f" {'/'.join(sorted(ref))}: not comparable, and {name}'s {row['id'] or 'row'} can't"
                f" be computed anew ({row['path'] or 'its directory'} is gone); measure it again"
            )
        rows[at] = collect(cell, keep=False)
    return as_table(rows)


_TOKENS, _SAMPLES, _TIME = "computed_tokens_per_s", "samples_per_s", "runtime_s"
# Packing a batch differently moves tokens a sample by a little; padding moves it by much.
_ALIKE = 0.01


def padding_remark(pair: CellPair) -> str:
    """What to make of samples/s and tokens/s that go different ways; empty if they don't."""
    new, ref = ((side.mean(_TOKENS), side.mean(_SAMPLES)) for side in (pair.new, pair.ref))
    if not all((*new, *ref)) or not counts_differ(pair):
        return ""
    (new_tokens, new_samples), (ref_tokens, ref_samples) = new, ref
    assert new_tokens and new_samples and ref_tokens and ref_samples  # noqa: PT018  one thing
    rate, pace = new_tokens / ref_tokens, new_samples / ref_samples
    if (rate - 1.0) * (pace - 1.0) >= 0.0:
        return ""
    each = ref_tokens / ref_samples, new_tokens / new_samples
    fewer, more = sorted(each)
    who = "REF" if each[0] > each[1] else "NEW"
    way, other = ("faster", "slower") if pace > 1.0 else ("slower", "faster")
    return (
        f"{way} by samples/s ({_percent(pace)}{_times(pair)}), yet {other} by tokens/s"
        f" ({_percent(rate)}): tokens/s counts padding. A sample was {significant(each[0], 3)}"
        f" tokens in REF and is {significant(each[1], 3)} in NEW; if the data is the same, at least"
        f" {(1.0 - fewer / more) * 100:.0f} % of what {who} counted was padding. Judge by time,"
        " samples/s or real tokens/s"
    )


def tells_both(pair: CellPair) -> bool:
    """Whether both sides have samples/s and tokens/s, so that they could go different ways."""
    return all(side.mean(_TOKENS) and side.mean(_SAMPLES) for side in (pair.new, pair.ref))


def counts_differ(pair: CellPair) -> bool:
    """Whether a sample is of other tokens on the two sides: their tokens/s are not alike."""
    each = []
    for side in (pair.new, pair.ref):
        tokens, samples = side.mean(_TOKENS), side.mean(_SAMPLES)
        if not tokens or not samples:
            return False
        each.append(tokens / samples)
    return abs(each[0] / each[1] - 1.0) > _ALIKE


def _percent(ratio: float) -> str:
    return f"{(ratio - 1.0) * 100:+.0f} %"


def _times(pair: CellPair) -> str:
    ref, new = pair.ref.mean(_TIME), pair.new.mean(_TIME)
    if not ref or not new:
        return ""
    return f", {duration(ref)} to {duration(new)}"


# Names to columns: the first that both sides have, so that like is held against like.
METRICS: dict[str, tuple[str, ...]] = {
    "tokens_per_s": ("real_tokens_per_s", "computed_tokens_per_s"),
    "tokens_per_s_per_device": (
        "real_tokens_per_s_per_device",
        "computed_tokens_per_s_per_device",
    ),
    "real_tokens_per_s": ("real_tokens_per_s",),
    "computed_tokens_per_s": ("computed_tokens_per_s",),
    "samples_per_s": ("samples_per_s",),
    "steps_per_s": ("steps_per_s",),
    "step_time": ("step_median_s",),
    "runtime": ("runtime_s",),
    "loss": ("loss",),
    "eval_loss": ("eval_loss",),
    "peak_memory": (
        *("memory_hf_peak_bytes", "memory_allocator_peak_bytes", "memory_nvidia_peak_bytes"),
        *("memory_nvidia_mean_bytes", "memory_hf_seed_bytes", "memory_device_peak_bytes"),
        "memory_process_peak_bytes",
    ),
    "nvidia_memory": ("memory_nvidia_mean_bytes",),
    "hf_memory": ("memory_hf_peak_bytes",),
    "mfu": ("mfu_frac",),
    "whole_run_tokens_per_s": ("whole_run_tokens_per_s",),
    "whole_run_mfu": ("whole_run_mfu_frac",),
    "whole_run_joules_per_token": ("whole_run_joules_per_token",),
    "joules_per_token": ("joules_per_token",),
    "energy": ("energy_j",),
}
_ALIASES = {
    "train_tokens_per_second": "tokens_per_s_per_device",
    "train_loss": "loss",
    "train_runtime": "runtime",
    "train_samples_per_second": "samples_per_s",
    "tok_per_s": "tokens_per_s",
    "mem_peak_torch_mem_alloc_in_bytes": "hf_memory",
    "mem_nvidia_mem_reserved": "nvidia_memory",
}
_WRITTEN = re.compile(r"\s*([\w.]+)\s+(\+-|-\+|±|\+|-)\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(%?)\s*")


@dataclass(frozen=True, slots=True)
class GateRule:
    """How far a figure may fall and rise: as a share of the reference's, or in its own unit."""

    metric: str
    fall: float | None
    rise: float | None
    scale: Scale

    @property
    def columns(self) -> tuple[str, ...]:
        """Where the figure may be found, the best first."""
        return METRICS[self.metric]

    @property
    def low(self) -> float | None:
        """The lowest new value that is allowed, as a ratio or a difference."""
        if self.fall is None:
            return None
        return 1.0 - self.fall if self.scale == "ratio" else -self.fall

    @property
    def high(self) -> float | None:
        """The highest."""
        if self.rise is None:
            return None
        return 1.0 + self.rise if self.scale == "ratio" else self.rise

    @property
    def is_two_sided(self) -> bool:
        """Whether both ways are limited."""
        return self.fall is not None and self.rise is not None

    def __str__(self) -> str:
        size = self.fall if self.fall is not None else self.rise
        sign = "+-" if self.is_two_sided else "-" if self.rise is None else "+"
        percent = self.scale == "ratio"
        return f"{self.metric} {sign}{(size or 0.0) * (100 if percent else 1):g}{'%' * percent}"


DEFAULT_RULES = ("tokens_per_s -3%", "peak_memory +2%", "loss +-1%")


def parse_rule(text: str) -> GateRule:
    """A rule as it is written. Raises UsageError with what was meant, as far as can be guessed."""
    match = _WRITTEN.fullmatch(text)
    if not match:
        raise UsageError(
            f"no rule: {text!r}; one is a metric, a sign and a size: 'tokens_per_s -3%',"
            " 'peak_memory +2%', 'loss +-0.01'"
        )
    name, sign, size, percent = match.groups()
    value = float(size) / 100.0 if percent else float(size)
    if percent and value >= 1.0 and sign != "+":
        raise UsageError(f"{text!r} lets the figure fall by all of it: give less than 100 %")
    return GateRule(
        metric_named(name),
        fall=None if sign == "+" else value,
        rise=None if sign == "-" else value,
        scale="ratio" if percent else "difference",
    )


def metric_named(name: str) -> str:
    """A metric of rules and comparisons, by any name it has. UsageError with the nearest else."""
    metric = _ALIASES.get(name, name)
    if metric in METRICS:
        return metric
    near = difflib.get_close_matches(name, [*METRICS, *_ALIASES], n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(METRICS)}"
    raise UsageError(f"no metric {name!r}; {hint}")


def parse_share(text: str) -> float:
    """A share as people write it: 1%, 0.01."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(%?)\s*", text)
    if not match:
        raise UsageError(f"no share: {text!r}; write it as 1% or 0.01")
    return float(match[1]) / (100.0 if match[2] else 1.0)


def parse_noise(texts: Sequence[str]) -> dict[str, float]:
    """Parse the stated noise of one run: by metric, and under "" for all metrics."""
    noise_by_metric: dict[str, float] = {}
    for text in texts:
        name, is_named, size = text.rpartition("=")
        value = parse_share(size)
        if value <= 0.0:
            raise UsageError(f"noise is a share above 0, such as 1%; got {text!r}")
        noise_by_metric[metric_named(name.strip()) if is_named else ""] = value
    return noise_by_metric


Way: TypeAlias = Literal["fall", "rise", "change"]
DEFAULT_METRICS = ("tokens_per_s", "samples_per_s", "runtime", "peak_memory", "loss")
TOGETHER = "all cells together"
_FEWEST_TOGETHER = 3
_STATED_NOISE_DOF = 1e6  # degrees of freedom of a noise that is given and not estimated


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
    metrics: Sequence[str] = DEFAULT_METRICS,
    options: BenchCompareOptions | None = None,
) -> BenchComparison:
    """Hold NEW against REF, configuration by configuration, and over all of them."""
    asked = options or BenchCompareOptions()
    names = tuple(dict.fromkeys(metric_named(name) for name in metrics))
    pairs = matched(new, ref, asked)
    cells = []
    by_metric: dict[str, list[CellChange]] = {name: [] for name in names}
    for pair in pairs.both:
        figures = {}
        for name in names:
            cell_change = figure(pair, name, "ratio", asked)
            if cell_change is not None:
                figures[name] = cell_change
                by_metric[name].append(cell_change)
        cells.append(Compared(pair, figures, padding_remark(pair)))
    over_all = {n: change for n, ones in by_metric.items() if (change := together(ones, asked))}
    return BenchComparison(pairs, tuple(cells), over_all, names, asked)


def matched(new: pa.Table, ref: pa.Table, options: BenchCompareOptions) -> Paired:
    """The cells of both, by configuration. Raises UsageError for windows of different kinds."""
    new, ref = same_window(new, ref)
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
        difference = contrast(new, ref, scale=scale, confidence=options.confidence)
        means = mean(new, scale=scale).value, mean(ref, scale=scale).value
    except NotMeasurable:
        return None
    if difference.low is not None:
        return _measured(column, means, difference)
    return _single(column, means, difference, (new, ref), options.noise_of(metric))


def amount(change: CellChange, value: float) -> str:
    """A side's own figure in words, in the unit of its column."""
    if change.column.endswith("_bytes"):
        return scaled(value, "B")
    if change.column.endswith("_s") and "_per_" not in change.column:
        return duration(value)
    return significant(value)


def together(figures: Sequence[CellChange], options: BenchCompareOptions) -> CellChange | None:
    """All configurations as one: the mean change, with its interval from how the cells scatter."""
    if len(figures) < _FEWEST_TOGETHER:
        return None
    scale = figures[0].scale
    difference = contrast(
        [figure.new for figure in figures],
        [figure.ref for figure in figures],
        scale=scale,
        is_paired=True,
        confidence=options.confidence,
    )
    means = (
        mean([figure.new for figure in figures], scale=scale),
        mean([figure.ref for figure in figures], scale=scale),
    )
    columns = sorted({figure.column for figure in figures})
    return _measured(", ".join(columns), (means[0].value, means[1].value), difference)


def _measured(column: str, means: tuple[float, float], difference: Contrast) -> CellChange:
    assert difference.low is not None
    assert difference.high is not None
    assert difference.freedom is not None
    width = _axis(difference.high, difference.scale) - _axis(difference.low, difference.scale)
    return CellChange(
        column,
        *means,
        difference.value,
        difference.scale,
        difference.repeats,
        difference.low,
        difference.high,
        error=width / 2.0 / factor(difference.confidence, difference.freedom),
        freedom=difference.freedom,
        noise=difference.noise,
        basis=difference.method,
    )


def _single(
    column: str,
    means: tuple[float, float],
    difference: Contrast,
    sides: tuple[Sequence[float], Sequence[float]],
    stated_noise: float | None,
) -> CellChange:
    """Where a side has one run: the noise that was given, or that of the side with repeats."""
    scale = difference.scale
    plain = CellChange(
        column, *means, difference.value, scale, difference.repeats, basis=difference.why
    )
    repeated = max(sides, key=len)
    if stated_noise is not None:
        noise = math.log1p(stated_noise) if scale == "ratio" else stated_noise * abs(means[1])
        freedom, basis = _STATED_NOISE_DOF, f"noise as given, {stated_noise * 100:g} % a run"
    elif len(repeated) > 1:
        noise = mean(repeated, scale=scale).noise or 0.0
        side = "NEW" if len(sides[0]) > 1 else "REF"
        freedom, basis = len(repeated) - 1.0, f"the noise of {side}'s repeats, for both sides"
    else:
        return plain
    error = noise * math.sqrt(sum(1.0 / len(side) for side in sides))
    middle = _axis(difference.value, scale)
    margin = factor(difference.confidence, freedom) * error
    back = math.exp if scale == "ratio" else float
    return CellChange(
        column,
        *means,
        difference.value,
        scale,
        difference.repeats,
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
