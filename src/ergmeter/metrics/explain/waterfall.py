"""Where did the rest of the peak go? A waterfall from the peak to what was achieved.

Blocks are shares of what the devices could have computed in the window; with what was achieved they
add up to all of it. First comes time in which no ordinary step ran (checkpoints, evaluation, waits,
stalls, gaps), then time in which the device had no kernel, then what its kernels did below the
peak, then what was computed and is not the model's own. Each block is what is lost beyond the ones
before it: in another order the shares would be others, and the sum the same.

The trap: a split nobody measured. Where the evidence does not tell two causes apart they are one
block, and the list of what is absent says what would tell them apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.check.flop_count import flop_count_contradictions
from ergmeter.metrics.definitions.profile import profiles
from ergmeter.metrics.definitions.stragglers import pace_of_ranks
from ergmeter.metrics.explain import block as blocks
from ergmeter.metrics.explain.advice import Change, changes, record_next, remarks
from ergmeter.metrics.explain.device import Rungs, rungs, why_no_ceiling
from ergmeter.metrics.explain.energy import joules_of
from ergmeter.metrics.explain.flops import achieved, frozen, peak_said
from ergmeter.metrics.explain.kernels import kernel_blocks
from ergmeter.metrics.explain.time import WAITS, TimeSplit, time_split
from ergmeter.metrics.explain.waits import wait_blocks
from ergmeter.records import Missing, Reading

if TYPE_CHECKING:
    from ergmeter.metrics.definitions.stragglers import Straggler
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.explain.block import LossBlock
    from ergmeter.metrics.explain.energy import Joules
    from ergmeter.metrics.explain.flops import Achieved


@dataclass(frozen=True)
class Explanation:
    """The waterfall. `of`: what 1 is a share of; `missing`: by name, why it is not told apart."""

    of: str
    achieved: LossBlock | None  # None where nothing is known of it
    blocks: tuple[LossBlock, ...]
    energy: Reading | Missing
    remarks: tuple[str, ...]
    changes: tuple[Change, ...]
    missing: dict[str, str]
    record_next: tuple[str, ...]
    window: str


@dataclass(frozen=True, slots=True)
class WaterfallLevel:
    """A block in its place: it goes down from one share of the peak to another; a gain goes up."""

    block: LossBlock
    from_frac: float
    to_frac: float


def levels(found: Explanation) -> tuple[WaterfallLevel, ...]:
    """The blocks from the peak down, and at last what was achieved, from there to nothing."""
    placed, above = [], 1.0
    for one in found.blocks:
        placed.append(WaterfallLevel(one, above, above - one.share_frac))
        above = placed[-1].to_frac
    if found.achieved is not None:
        placed.append(WaterfallLevel(found.achieved, found.achieved.share_frac, 0.0))
    return tuple(placed)


def explain(evidence: Evidence) -> Explanation:
    """All that the run's evidence can tell apart."""
    missing: dict[str, str] = {}
    split = _split(evidence, missing)
    seen = rungs(evidence, split)
    got = _achieved(evidence, missing)
    if got is not None and got.is_printed:
        seen = seen.without_peak("the program printed an MFU, and not which peak it is of")
    waits, level = wait_blocks(split, seen)
    inside, reached = kernel_blocks(evidence, seen, got, level)
    missing |= _not_asked(evidence, got)
    missing |= {name: why for name, why in seen.absent.items() if name not in missing}
    if split is not None:
        missing |= split.absent
    whole = (*waits, *inside)
    energy, whole, reached = _with_joules(evidence, split, whole, reached)
    is_known = bool(whole) or got is not None or seen.busy_frac is not None
    still = frozen(evidence) if got and not got.is_printed else None
    said = remarks(
        seen,
        got,
        still,
        whole,
        straggler=_straggler(evidence),
        contradictions=flop_count_contradictions(evidence),
    )
    return Explanation(
        _of(got),
        reached if is_known else None,
        whole,
        energy,
        said,
        changes(whole, reached, seen, working_frac=level),
        missing,
        record_next(evidence, missing, seen, got),
        _window(evidence),
    )


def _not_asked(evidence: Evidence, got: Achieved | None) -> dict[str, str]:
    """What a calibration and a profile would have told."""
    found = {}
    if got is not None and not got.is_printed and evidence.devices("gpu"):
        why = why_no_ceiling(evidence)
        found = {"matmul_ceiling": why} if why else {}
    if len(evidence.devices("gpu")) > 1:
        try:
            profiles(evidence)
        except NotMeasurable as error:
            found["communication"] = str(error)
    return found


def _straggler(evidence: Evidence) -> Straggler | None:
    try:
        return pace_of_ranks(evidence).straggler()
    except NotMeasurable:
        return None


def _window(evidence: Evidence) -> str:
    try:
        return evidence.window_note
    except NotMeasurable as error:
        return str(error)


def _split(evidence: Evidence, missing: dict[str, str]) -> TimeSplit | None:
    try:
        return time_split(evidence)
    except NotMeasurable as error:
        missing["steps"] = str(error)
        return None


def _achieved(evidence: Evidence, missing: dict[str, str]) -> Achieved | None:
    try:
        found = achieved(evidence)
    except NotMeasurable as error:
        missing["mfu"] = str(error)
        return None
    if found.why_no_padding:
        missing["padding"] = found.why_no_padding
    return found


def _of(got: Achieved | None) -> str:
    if got is None:
        return "the devices' time at their peak; there is no MFU to place in it (see `mfu` below)"
    if got.is_printed:
        return "the peak that the program itself took, which it does not say"
    return peak_said(got.mfu.note) or "the peak"


def _with_joules(
    evidence: Evidence, split: TimeSplit | None, whole: tuple[LossBlock, ...], reached: LossBlock
) -> tuple[Reading | Missing, tuple[LossBlock, ...], LossBlock]:
    """The same blocks with their joules: those of the time as drawn, the rest by their share."""
    try:
        found = joules_of(evidence, split)
    except NotMeasurable as error:
        return Missing(str(error)), whole, reached
    # Of a wait that the device worked through in part, the part that it cost.
    measured = {
        one.key: found.parts_j[one.key] * one.share_frac / split.frac(one.key)
        for one in whole
        if split is not None and one.key in found.parts_j
    }
    merged = [one for one in whole if one.key == blocks.WAITS]
    if merged:  # several parts of the time in one
        measured |= _of_merged(found, split, merged[0])
    return found.whole, *_shared(found, measured, whole, reached)


def _of_merged(found: Joules, split: TimeSplit | None, block: LossBlock) -> dict[str, float]:
    """What several waits in one block drew, as far as they cost; nothing where one is not known.

    Gaps are never among them: they give way first."""
    names = [name for name in WAITS if name != "gaps" and split and name in split.parts_s]
    if split is None or not all(name in found.parts_j for name in names):
        return {}
    drawn_j = sum(found.parts_j[name] for name in names)
    return {block.key: drawn_j * block.share_frac / sum(map(split.frac, names))}


def _shared(
    found: Joules, measured: dict[str, float], whole: tuple[LossBlock, ...], reached: LossBlock
) -> tuple[tuple[LossBlock, ...], LossBlock]:
    """What is not measured by itself is divided by shares; a gain has drawn nothing."""
    rest_j = found.whole.value - sum(measured.values())
    rest = [one for one in (*whole, reached) if one.key not in measured and one.share_frac > 0]
    rest_frac = sum(one.share_frac for one in rest)
    per_frac = rest_j / rest_frac if rest_frac else 0.0

    def drawn(one: LossBlock) -> LossBlock:
        if one.key in measured:
            return replace(one, joules=measured[one.key], joules_basis=found.whole.basis)
        return replace(one, joules=max(0.0, one.share_frac) * per_frac, joules_basis="derived")

    return tuple(map(drawn, whole)), drawn(reached)


__all__ = ["Change", "Explanation", "Rungs", "WaterfallLevel", "explain", "levels"]
