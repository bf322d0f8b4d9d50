"""What was achieved, and what of the arithmetic was done twice, for padding, or not at all.

The trap: taking frozen weights for a loss. Under LoRA the backward pass computes no gradients of
the weights that are frozen, so a token needs about 4 FLOPs a weight where it would need 6; at the
same tokens/s MFU is a third lower, and nothing has become slower. That is a remark here and no
block: work that was not done has taken no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.definitions.compute import (
    FLOPS_PER_S,
    HFU,
    MFU,
    flops_per_token,
    need_possible,
    run_results,
)
from ergmeter.metrics.definitions.tokens import padding_frac, positions_per_token
from ergmeter.records import Missing, Reading

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Flops

# The convention that is by its definition two thirds of what training every weight needs, with
# causal attention as `exact` counts it; it is counted only for runs with adapters.
_OF_ADAPTERS, _ITS_PART = "automodel-lora", 2 / 3
_EXACT = "exact"
_NO_RECOMPUTATION = "no recomputation"
NO_PADDING = "padding is not counted apart from tokens: pass tokens_real= to meter.step"


@dataclass(frozen=True)
class Achieved:
    """MFU, with what was computed beyond it, as shares of the peak. None: nobody said."""

    mfu: Reading
    recomputed_frac: float | None
    padding_frac: float | None
    is_recomputation_assumed: bool
    why_no_padding: str = ""
    padded_frac: float = 0.0  # of the positions that are computed
    is_printed: bool = False  # the program's own word

    @property
    def hardware_frac(self) -> float:
        """All of the FLOPs that are known of."""
        return self.mfu.value + (self.recomputed_frac or 0.0) + (self.padding_frac or 0.0)


@dataclass(frozen=True)
class Frozen:
    """FLOPs of a token as they are, and if every weight were trained."""

    flops_per_token: float
    trained_flops_per_token: float
    mfu_if_trained_frac: float

    @property
    def ratio(self) -> float:
        """What is left of them."""
        return self.flops_per_token / self.trained_flops_per_token


def achieved(evidence: Evidence) -> Achieved:
    """MFU and what lies between it and the hardware's FLOPs. NotMeasurable says what is wanting."""
    try:
        found = run_results(evidence)[MFU]
    except NotMeasurable as error:
        found = Missing(str(error))
    else:
        need_possible(evidence, MFU, HFU)
    if isinstance(found, Missing):
        return Achieved(_printed(evidence, found.reason), None, None, False, is_printed=True)
    chosen = evidence.flops[0]
    is_assumed = any(one.startswith(_NO_RECOMPUTATION) for one in chosen.assumptions)
    again = None
    if chosen.hardware_per_step is not None:
        again = found.value * (chosen.hardware_per_step / chosen.model_per_step - 1)
    padding, why = _padding(evidence, chosen, found.value)
    padded = 1 - 1 / positions_per_token(evidence)
    return Achieved(found, again, padding, is_assumed, why, padded)


def peak_said(note: str) -> str:
    """What an MFU is a share of, out of its note: the figure and, in brackets, who says so."""
    _, has, rest = note.partition("; of ")
    depth = 0
    for place, letter in enumerate(rest if has else ""):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if (letter == ")" and not depth) or (letter == ";" and not depth):
            return rest[: place + (letter == ")")]
    return rest if has else ""


def _printed(evidence: Evidence, why: str) -> Reading:
    """What the program printed as its MFU, mean over the lines of the window."""
    span = evidence.span
    told = [
        one.value
        for one in evidence.run.reported()
        if (one.name, one.unit) == ("mfu", "frac") and span.contains(np.array([one.t_ns]))[0]
    ]
    if not told or not sum(told) > 0:
        raise NotMeasurable(why)
    note = f"as printed, mean of {len(told)} lines; of the peak that the program took"
    mean = Reading(sum(told) / len(told), "frac", "reported", min(told), max(told), note)
    metric = catalogue()[MFU]
    return metric.usable(metric.checked(mean))


def _padding(evidence: Evidence, chosen: Flops, mfu_frac: float) -> tuple[float | None, str]:
    beside = positions_per_token(evidence) - 1
    if not beside:
        return (0.0, "") if _is_padding_known(evidence) else (None, NO_PADDING)
    if chosen.hardware_per_padding is None:
        return None, "the FLOP count has no cost of a padding position (hardware_per_padding)"
    return mfu_frac * beside * chosen.hardware_per_padding / flops_per_token(chosen), ""


def _is_padding_known(evidence: Evidence) -> bool:
    try:
        padding_frac(evidence)
    except NotMeasurable:
        return False
    return True


def frozen(evidence: Evidence) -> Frozen | None:
    """Of a run with adapters: what training every weight would need. None where it is no such run,
    or where nobody counted the other."""
    by_name = {one.convention: one for one in evidence.flops}
    if _OF_ADAPTERS not in by_name or _EXACT not in by_name:
        return None
    results = run_results(evidence)
    mfu, each = results[MFU], results[FLOPS_PER_S]
    if not isinstance(mfu, Reading) or not isinstance(each, Reading):
        return None
    own = flops_per_token(by_name[_EXACT])
    trained = flops_per_token(by_name[_OF_ADAPTERS]) / _ITS_PART
    chosen = flops_per_token(evidence.flops[0])
    return Frozen(own, trained, mfu.value * trained / chosen) if own < trained else None
