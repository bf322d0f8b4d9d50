"""The waterfall from the peak to the achieved MFU, with the energy of each block (`erg explain`).

Blocks are shares of what the devices could have computed in the window; together with MFU they add
up to 1. First come times without an ordinary step (checkpoints, evaluation, waits, stalls, gaps),
then device idle time, then kernels below the peak, then recomputation and padding. A block is what
is lost beyond the blocks before it, so shares depend on the order and their sum does not. Causes
that the evidence does not separate are one block; `missing` lists what would separate them.

Joules of waits are measured. Within a step no sensor separates a matmul from a wait, so joules
there are divided by shares of the peak and marked derived. All add up to the window's energy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.metrics.checks import flop_count_contradictions
from ergmeter.metrics.definitions.energy import run_j
from ergmeter.metrics.definitions.energy_breakdown import energy_of
from ergmeter.metrics.definitions.profile import profiles
from ergmeter.metrics.definitions.timing import pace_of_ranks
from ergmeter.metrics.definitions.utilization import other_programs
from ergmeter.metrics.evidence.samples import or_missing, or_none, or_noted
from ergmeter.metrics.explain.advice import Change, changes, record_next, remarks
from ergmeter.metrics.explain.device import device_activity, why_no_ceiling
from ergmeter.metrics.explain.flops import Achieved, achieved, frozen_weights, peak_text
from ergmeter.metrics.explain.kernels import kernel_blocks
from ergmeter.metrics.explain.time import (
    MERGED_WAITS,
    NAMED,
    WAITS,
    TimeSplit,
    time_split,
    wait_blocks,
)
from ergmeter.metrics.phases import joined
from ergmeter.records import FloatArray, Missing, Reading
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.explain.time import LossBlock

_RESOLVED_S = 0.2  # two refreshes of a sensor: it does not resolve a shorter span


@dataclass(frozen=True)
class Joules:
    """The energy of the window, and of the parts of its time that a sensor resolves."""

    window_energy: Reading
    parts_j: dict[str, float]

    @property
    def rest_j(self) -> float:
        """The energy of all other blocks."""
        return self.window_energy.value - sum(self.parts_j.values())


def joules_of(evidence: Evidence, split: TimeSplit | None) -> Joules:
    """The energy of the window and of the parts of its time."""
    window_j = run_j(evidence)
    if split is None or evidence.from_output:
        return Joules(window_j, {})
    parts = {
        **_of_named(evidence, split),
        **_of_extra(evidence, split),
        **_of_gaps(evidence, split),
    }
    joules = Joules(window_j, {name: value for name, value in parts.items() if np.isfinite(value)})
    return joules if joules.rest_j >= 0 else Joules(window_j, {})


def _is_resolved(split: TimeSplit, part: str) -> bool:
    return split.longest_s.get(part, 0.0) >= _RESOLVED_S


def _of_named(evidence: Evidence, split: TimeSplit) -> dict[str, float]:
    """Energy of named spans in the window."""
    parts_j = {}
    first_ns, last_ns = int(split.edges_ns[0]), int(split.edges_ns[-1])
    for phase in NAMED:
        if phase not in split.parts_s or not _is_resolved(split, phase):
            continue
        starts, ends = (np.clip(edges, first_ns, last_ns) for edges in split.spans[phase])
        inside = ends > starts
        each = energy_of(evidence, starts[inside], ends[inside]).joules
        spans_s = float((ends - starts)[inside].sum()) / NS_PER_S
        # A span within another one of higher precedence counts only for its own part.
        parts_j[phase] = float(each.sum()) * min(1.0, split.parts_s[phase] / spans_s)
    return parts_j


def _of_gaps(evidence: Evidence, split: TimeSplit) -> dict[str, float]:
    """Energy between steps, if gaps are long and contain no stall."""
    is_extra = any(each.any() for each in split.extra_s.values())
    if "gaps" not in split.parts_s or is_extra or not _is_resolved(split, "gaps"):
        return {}
    lane = evidence.counted.longest
    spans = [(lane.columns["start_ns"], lane.columns["end_ns"]), *split.spans.values()]
    starts, ends = joined(spans)
    begins, until = evidence.window.clipped(ends[:-1], starts[1:])
    return {"gaps": float(energy_of(evidence, begins, until).joules.sum())}


def _of_extra(evidence: Evidence, split: TimeSplit) -> dict[str, float]:
    """Energy of slow steps beyond that of median steps."""
    wanted = [n for n in split.extra_s if n in split.parts_s and _is_resolved(split, n)]
    if not wanted:
        return {}
    each_j = energy_of(evidence, split.edges_ns[:-1], split.edges_ns[1:]).joules
    if np.isnan(each_j).any():  # readings do not cover all of them: divided by shares instead
        return {}
    extra_s: FloatArray = np.sum(list(split.extra_s.values()), axis=0)
    is_plain = (extra_s == 0) & np.isclose(split.left_s, np.diff(split.edges_ns) / NS_PER_S)
    if not is_plain.any():
        return {}
    usual_w = float(each_j[is_plain].sum() / split.left_s[is_plain].sum())
    named_s = np.diff(split.edges_ns) / NS_PER_S - split.left_s
    parts_j = {}
    for name in wanted:
        own = split.extra_s[name]
        rows = (own > 0) & (named_s < 1e-9)
        beyond_j = each_j[rows] - usual_w * (split.left_s - own)[rows]
        if rows.sum() == (own > 0).sum() and float(beyond_j.sum()) > 0:
            parts_j[name] = float(beyond_j.sum())
    return parts_j


@dataclass(frozen=True)
class Explanation:
    """The waterfall. `of`: the peak it is relative to; `missing`: reasons by missing part."""

    of: str
    achieved: LossBlock | None  # None if unknown
    blocks: tuple[LossBlock, ...]
    energy: Reading | Missing
    remarks: tuple[str, ...]
    changes: tuple[Change, ...]
    missing: dict[str, str]
    record_next: tuple[str, ...]
    window: str


@dataclass(frozen=True, slots=True)
class WaterfallLevel:
    """A block with its start and end as shares of the peak; a gain goes up."""

    block: LossBlock
    from_frac: float
    to_frac: float


def levels(explanation: Explanation) -> tuple[WaterfallLevel, ...]:
    """The blocks from the peak down, and last the achieved share down to 0."""
    placed, above = [], 1.0
    for block in explanation.blocks:
        placed.append(WaterfallLevel(block, above, above - block.share_frac))
        above = placed[-1].to_frac
    if explanation.achieved is not None:
        placed.append(WaterfallLevel(explanation.achieved, explanation.achieved.share_frac, 0.0))
    return tuple(placed)


def explain(evidence: Evidence) -> Explanation:
    """The waterfall of a run."""
    missing: dict[str, str] = {}
    split = or_noted(missing, "steps", time_split, evidence)
    activity = device_activity(evidence, split)
    got = or_noted(missing, "mfu", achieved, evidence)
    if got is not None and got.why_no_padding:
        missing["padding"] = got.why_no_padding
    if got is not None and got.is_printed:
        activity = activity.without_peak("the program printed an MFU, and not which peak it is of")
    waits, level = wait_blocks(split, activity)
    inside, reached = kernel_blocks(evidence, activity, got, level)
    missing |= _not_asked(evidence, got)
    missing |= {name: why for name, why in activity.absent.items() if name not in missing}
    if split is not None:
        missing |= split.absent
    blocks = (*waits, *inside)
    energy, blocks, reached = _with_joules(evidence, split, blocks, reached)
    is_known = bool(blocks) or got is not None or activity.busy_frac is not None
    still = frozen_weights(evidence) if got and not got.is_printed else None
    lines = remarks(
        activity,
        got,
        still,
        blocks,
        straggler=or_none(lambda: pace_of_ranks(evidence).straggler()),
        contradictions=flop_count_contradictions(evidence),
    )
    return Explanation(
        _of(got),
        reached if is_known else None,
        blocks,
        energy,
        lines,
        changes(
            blocks,
            reached,
            activity,
            working_frac=level,
            others=or_none(other_programs, evidence) or "",
        ),
        missing,
        record_next(evidence, missing, activity, got),
        evidence.window_or_reason,
    )


def _not_asked(evidence: Evidence, got: Achieved | None) -> dict[str, str]:
    """Reasons why there is no matmul ceiling and no communication block."""
    reasons: dict[str, str] = {}
    if got is not None and not got.is_printed and evidence.devices("gpu"):
        why = why_no_ceiling(evidence)
        reasons = {"matmul_ceiling": why} if why else {}
    if len(evidence.devices("gpu")) > 1:
        or_noted(reasons, "communication", profiles, evidence)
    return reasons


def _of(got: Achieved | None) -> str:
    if got is None:
        return "the devices' time at their peak; there is no MFU to place in it (see `mfu` below)"
    if got.is_printed:
        return "the peak that the program itself took, which it does not say"
    return peak_text(got.mfu.note) or "the peak"


def _with_joules(
    evidence: Evidence, split: TimeSplit | None, blocks: tuple[LossBlock, ...], reached: LossBlock
) -> tuple[Reading | Missing, tuple[LossBlock, ...], LossBlock]:
    """The window's energy, and the blocks with joules: measured for waits, else by share."""
    joules = or_missing(joules_of, evidence, split)
    if isinstance(joules, Missing):
        return joules, blocks, reached
    # A wait that the device worked through in part counts for its block's share.
    measured = {
        block.key: joules.parts_j[block.key] * block.share_frac / split.frac(block.key)
        for block in blocks
        if split is not None and block.key in joules.parts_j
    }
    merged = [block for block in blocks if block.key == MERGED_WAITS]
    if merged:  # several parts of the time in one
        measured |= _of_merged(joules, split, merged[0])
    return joules.window_energy, *_shared(joules, measured, blocks, reached)


def _of_merged(joules: Joules, split: TimeSplit | None, block: LossBlock) -> dict[str, float]:
    """Energy of a block of several waits; empty if one of them is unknown.

    Gaps are never among them: they are reduced first.
    """
    names = [name for name in WAITS if name != "gaps" and split and name in split.parts_s]
    if split is None or not all(name in joules.parts_j for name in names):
        return {}
    drawn_j = sum(joules.parts_j[name] for name in names)
    return {block.key: drawn_j * block.share_frac / sum(map(split.frac, names))}


def _shared(
    joules: Joules, measured: dict[str, float], blocks: tuple[LossBlock, ...], reached: LossBlock
) -> tuple[tuple[LossBlock, ...], LossBlock]:
    """The blocks with joules; unmeasured blocks share the rest, and a gain has none."""
    rest_j = joules.window_energy.value - sum(measured.values())
    rest = [
        block for block in (*blocks, reached) if block.key not in measured and block.share_frac > 0
    ]
    rest_frac = sum(block.share_frac for block in rest)
    per_frac = rest_j / rest_frac if rest_frac else 0.0

    def with_joules(block: LossBlock) -> LossBlock:
        if block.key in measured:
            return replace(
                block, joules=measured[block.key], joules_basis=joules.window_energy.basis
            )
        return replace(block, joules=max(0.0, block.share_frac) * per_frac, joules_basis="derived")

    return tuple(map(with_joules, blocks)), with_joules(reached)
