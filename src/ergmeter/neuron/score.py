"""Keys and JSON names of the metrics of `erg analyze`, and the training score of nki-llama.

Score = MFU/base x throughput/base x loss x convergence x (offset + NKI ratio). The offset is 1 in
the guide and in the version of June 2025, 0.1 in later ones; the offset used is recorded.

The score counts one gain twice: for a fixed model, sequence length and hardware, MFU is throughput
times a constant, so a run that is 20 % faster scores 44 % more. The formula is kept so that scores
stay comparable, and a remark in the output says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ergmeter.metrics.catalog import every_metric, in_view, titles_in
from ergmeter.records import Reading, Result, mapped

THROUGHPUT = "throughput.samples_per_s"
TFLOP = "analysis.tflop_per_sequence"
TFLOP_PER_S = "analysis.tflop_per_s"
NKI = "analysis.nki_frac"
SCORE = "analysis.score"


def with_rate(readings: dict[str, Result], unit: str, each: float, size: str) -> dict[str, Result]:
    """Return the metrics with a rate in `unit`/s: sequences per second x `each` per sequence."""
    rate = readings[THROUGHPUT]
    if isinstance(rate, Reading):
        note = "; ".join(filter(None, (size, rate.note)))
        rate = mapped(rate, lambda per_s: per_s * each, unit=f"{unit}/s", note=note)
    return {**readings, f"throughput.{unit}_per_s": rate}


class JsonName(NamedTuple):
    """A metric's name and unit in the JSON, and the factor from our unit to that unit."""

    name: str
    unit: str
    scale: float


JSON_NAMES = {
    key: JsonName(at.label, at.group, 100.0 if at.group == "%" else 1.0)
    for key, at in in_view("analyze json").items()
}
UNITS = {key: every_metric()[key].unit for key in JSON_NAMES}
FORMULAS = {key: every_metric()[key].formula for key in JSON_NAMES}
TITLES = titles_in("analyze")
COMPARED = tuple(in_view("analyze compare"))

REMARK = (
    "at a fixed model, sequence length and hardware, MFU and throughput are the same gain, so this"
    " product counts it twice"
)


@dataclass(frozen=True, slots=True)
class Baseline:
    """The score's baseline, and the user's loss and convergence factors."""

    mfu_percent: float = 50.0
    throughput_seq_per_s: float = 100.0
    loss_improvement: float = 1.0
    convergence_rate: float = 1.0
    offset: float = 1.0


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a run relative to a baseline; None if one of the factors is unknown."""

    baseline: Baseline
    mfu_percent: float | None
    seq_per_s: float | None
    nki_ratio: float | None
    is_mfu_impossible: bool = False
    impossible: str = ""  # why the score is impossible; only the original computes it nevertheless
    mark: str = ""  # of an NKI ratio that is not exact, as in `kernels.LEGEND`

    @property
    def mfu_improvement(self) -> float | None:
        """MFU over the baseline's; None if unknown or, outside compatibility mode, impossible."""
        mfu = None if self.is_mfu_impossible and not self.impossible else self.mfu_percent
        return _over(mfu, self.baseline.mfu_percent)

    @property
    def throughput_improvement(self) -> float | None:
        """Throughput over the baseline's."""
        return _over(self.seq_per_s, self.baseline.throughput_seq_per_s)

    @property
    def without_nki(self) -> float | None:
        """The product of the factors that do not need the compiled graphs."""
        mfu, rate, base = self.mfu_improvement, self.throughput_improvement, self.baseline
        if mfu is None or rate is None:
            return None
        return math.prod((mfu, rate, base.loss_improvement, base.convergence_rate))

    @property
    def nki_factor(self) -> float | None:
        """The offset plus the NKI ratio."""
        return None if self.nki_ratio is None else self.baseline.offset + self.nki_ratio

    @property
    def value(self) -> float | None:
        """The score; None if a factor is unknown."""
        factor, others = self.nki_factor, self.without_nki
        return None if factor is None or others is None else others * factor

    def factors(self) -> Iterator[Factor]:
        """The five factors in the order of the product."""
        base = self.baseline
        rows = (
            Factor(
                "MFU", self.mfu_percent, base.mfu_percent, "%", self.mfu_improvement,
                is_impossible=self.is_mfu_impossible,
            ),
            Factor(
                "throughput", self.seq_per_s, base.throughput_seq_per_s, "sequences/s",
                self.throughput_improvement,
            ),
            Factor("loss", ratio=base.loss_improvement, is_given=True),
            Factor("convergence", ratio=base.convergence_rate, is_given=True),
            Factor("NKI share", self.nki_ratio, base.offset, "", self.nki_factor, mark=self.mark),
        )  # fmt: skip
        product = None if self.impossible else 1.0  # nothing more is computed from it
        for factor in rows:
            product = None if product is None or factor.ratio is None else product * factor.ratio
            yield replace(factor, product=product)


def _over(value: float | None, base: float) -> float | None:
    """Return value / base; 1 for a base of 0 or less, as in the original script."""
    if value is None:
        return None
    return value / base if base > 0 else 1.0


# Charts show a factor by its logarithm to base 2, since logarithms add up to that of the score.


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of the score, with the product up to it. None: unknown."""

    name: str
    reached: float | None = None  # None also if only the ratio was given
    base: float | None = None
    unit: str = ""
    ratio: float | None = None
    product: float | None = None  # of this factor and those before it
    is_given: bool = False  # on the command line
    mark: str = ""  # of a ratio that is not exact, as in `kernels.LEGEND`
    is_impossible: bool = False  # `reached` is not possible

    @property
    def doublings(self) -> float | None:
        """The base-2 logarithm of the ratio: 1 for a factor of 2, -1 for 1/2."""
        if self.ratio is None or self.ratio <= 0 or self.is_impossible:
            return None
        return math.log2(self.ratio)
