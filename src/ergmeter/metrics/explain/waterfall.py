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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ergmeter.metrics.checks import flop_count_contradictions
from ergmeter.metrics.definitions.achievable import achievable_of_peak_frac
from ergmeter.metrics.definitions.compute import flops_per_token
from ergmeter.metrics.definitions.energy import run_j
from ergmeter.metrics.definitions.energy_breakdown import energy_of
from ergmeter.metrics.definitions.profile import profiles
from ergmeter.metrics.definitions.timing import STRAGGLING_FRAC, pace_of_ranks
from ergmeter.metrics.definitions.utilization import other_programs
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.explain.device import DeviceActivity, device_activity, kernel_blocks
from ergmeter.metrics.explain.flops import NO_PADDING, Achieved, achieved, peak_text
from ergmeter.metrics.explain.time import (
    IDLE,
    KERNELS,
    MERGED_WAITS,
    NAMED,
    WAITS,
    LossBlock,
    TimeSplit,
    time_split,
    wait_blocks,
)
from ergmeter.metrics.phases import joined
from ergmeter.records import FloatArray, Missing, Reading, or_missing, or_none, or_noted
from ergmeter.units import NS_PER_S, percent, scaled


@dataclass(frozen=True)
class Change:
    """A change to try. `gain_frac`: the largest possible speed-up."""

    block: str
    advice: str
    share_frac: float
    gain_frac: float
    is_bound: bool  # only part of the block can be removed: the gain is an upper bound
    why: str


@dataclass(frozen=True)
class Explanation:
    """The waterfall. `of`: names the peak; `missing`: the reason for each missing part."""

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
    """A block of the waterfall with its start and end as shares of the peak."""

    block: LossBlock
    from_frac: float
    to_frac: float


def levels(explanation: Explanation) -> tuple[WaterfallLevel, ...]:
    """The blocks stacked from the peak down, then the achieved share, which ends at 0."""
    placed, above = [], 1.0
    for block in explanation.blocks:
        placed.append(WaterfallLevel(block, above, above - block.share_frac))
        above = placed[-1].to_frac
    if explanation.achieved is not None:
        placed.append(WaterfallLevel(explanation.achieved, explanation.achieved.share_frac, 0.0))
    return tuple(placed)


def explain(evidence: Evidence) -> Explanation:
    """Return the waterfall of a run."""
    missing: dict[str, str] = {}
    split = or_noted(missing, "steps", time_split, evidence)
    activity = device_activity(evidence, split)
    got = or_noted(missing, "mfu", achieved, evidence)
    if got is not None and got.why_no_padding:
        missing["padding"] = got.why_no_padding
    if got is not None and got.is_printed:
        why = "the program printed an MFU but not its peak"
        absent = activity.absent | {"peak_clock_hz": why}
        activity = replace(activity, peak_clock_hz=None, absent=absent)
    waits, level = wait_blocks(split, activity)
    inside, reached = kernel_blocks(evidence, activity, got, level)
    missing |= _not_asked(evidence, got)
    missing |= {name: why for name, why in activity.absent.items() if name not in missing}
    if split is not None:
        missing |= split.absent
    blocks = (*waits, *inside)
    energy, blocks, reached = _with_joules(evidence, split, blocks, reached)
    is_known = bool(blocks) or got is not None or activity.busy_frac is not None
    return Explanation(
        _of(got),
        reached if is_known else None,
        blocks,
        energy,
        _remarks(evidence, activity, got, blocks),
        _changes(evidence, blocks, reached, activity, level),
        missing,
        _record_next(evidence, missing, activity, got),
        evidence.window_or_reason,
    )


# Measured by ergmeter's authors on one such device, 2026-11-15: a hint, not used in any metric.
_ELSEWHERE = {
    "NVIDIA H200": "; another H200 held about 80 % of its bf16 peak in products of 8192^3"
}


def _not_asked(evidence: Evidence, got: Achieved | None) -> dict[str, str]:
    """Reasons why there is no matmul ceiling and no communication block."""
    reasons: dict[str, str] = {}
    gpus = evidence.devices("gpu")
    if got is not None and not got.is_printed and gpus:
        or_noted(reasons, "matmul_ceiling", achievable_of_peak_frac, evidence)
    if "matmul_ceiling" in reasons:
        hints = (_ELSEWHERE.get(name, "") for name in {gpu.name for gpu in gpus})
        reasons["matmul_ceiling"] += "".join(hints)
    if len(gpus) > 1:
        or_noted(reasons, "communication", profiles, evidence.run)
    return reasons


def _of(got: Achieved | None) -> str:
    if got is None:
        return "the devices' time at their peak; there is no MFU to place in it (see `mfu` below)"
    if got.is_printed:
        return "the peak that the program used, which it did not print"
    return peak_text(got.mfu.note) or "the peak"


# Energy of the blocks.

_RESOLVED_S = 0.2  # two refreshes of a sensor: it does not resolve a shorter span


def _joules(evidence: Evidence, split: TimeSplit | None) -> tuple[Reading, dict[str, float]]:
    """Return the window's energy, and the joules of each part that is long enough to measure."""
    energy = run_j(evidence)
    if split is None or evidence.from_output:
        return energy, {}
    parts = [*_of_named(evidence, split), *_of_extra(evidence, split), *_of_gaps(evidence, split)]
    parts_j = {name: value for name, value in parts if np.isfinite(value)}
    return energy, parts_j if energy.value - sum(parts_j.values()) >= 0 else {}


def _is_resolved(split: TimeSplit, part: str) -> bool:
    return split.longest_s.get(part, 0.0) >= _RESOLVED_S


def _of_named(evidence: Evidence, split: TimeSplit) -> Iterator[tuple[str, float]]:
    """Yield the joules of each named phase in the window, such as checkpoints."""
    first_ns, last_ns = int(split.edges_ns[0]), int(split.edges_ns[-1])
    for phase in NAMED:
        if phase not in split.parts_s or not _is_resolved(split, phase):
            continue
        starts, ends = (np.clip(edges, first_ns, last_ns) for edges in split.spans[phase])
        inside = ends > starts
        if not inside.any():  # in a whole run: before the first step or after the last
            continue
        each = energy_of(evidence, starts[inside], ends[inside]).joules
        spans_s = float((ends - starts)[inside].sum()) / NS_PER_S
        # A span within another one of higher precedence counts only for its own part.
        yield phase, float(each.sum()) * min(1.0, split.parts_s[phase] / spans_s)


def _of_gaps(evidence: Evidence, split: TimeSplit) -> Iterator[tuple[str, float]]:
    """Yield the joules of the gaps between steps, if gaps are long and no step stalled."""
    is_extra = any(each.any() for each in split.extra_s.values())
    if "gaps" not in split.parts_s or is_extra or not _is_resolved(split, "gaps"):
        return
    lane = evidence.counted.longest
    spans = [(lane.columns["start_ns"], lane.columns["end_ns"]), *split.spans.values()]
    starts, ends = joined(spans)
    begins, until = evidence.window.clipped(ends[:-1], starts[1:])
    yield "gaps", float(energy_of(evidence, begins, until).joules.sum())


def _of_extra(evidence: Evidence, split: TimeSplit) -> Iterator[tuple[str, float]]:
    """Yield the extra joules of stalls and slow first steps, beyond those of ordinary steps."""
    wanted = [n for n in split.extra_s if n in split.parts_s and _is_resolved(split, n)]
    if not wanted:
        return
    each_j = energy_of(evidence, split.edges_ns[:-1], split.edges_ns[1:]).joules
    if np.isnan(each_j).any():  # readings do not cover all of them: divided by shares instead
        return
    extra_s: FloatArray = np.sum(list(split.extra_s.values()), axis=0)
    is_plain = (extra_s == 0) & np.isclose(split.left_s, np.diff(split.edges_ns) / NS_PER_S)
    if not is_plain.any():
        return
    usual_w = float(each_j[is_plain].sum() / split.left_s[is_plain].sum())
    named_s = np.diff(split.edges_ns) / NS_PER_S - split.left_s
    for name in wanted:
        own = split.extra_s[name]
        rows = (own > 0) & (named_s < 1e-9)
        beyond_j = each_j[rows] - usual_w * (split.left_s - own)[rows]
        if rows.sum() == (own > 0).sum() and float(beyond_j.sum()) > 0:
            yield name, float(beyond_j.sum())


def _with_joules(
    evidence: Evidence, split: TimeSplit | None, blocks: tuple[LossBlock, ...], reached: LossBlock
) -> tuple[Reading | Missing, tuple[LossBlock, ...], LossBlock]:
    """Return the window's energy, and the blocks with their joules.

    Joules of waits are measured. The other blocks divide the rest by their shares; a block below 0
    gets none.
    """
    joules = or_missing(_joules, evidence, split)
    if isinstance(joules, Missing):
        return joules, blocks, reached
    energy, parts_j = joules
    measured: dict[str, float] = {}
    for block in blocks:
        names = [block.key]
        if split is not None and block.key == MERGED_WAITS:  # without gaps: they are reduced first
            names = [name for name in WAITS if name != "gaps" and name in split.parts_s]
        if split is not None and all(name in parts_j for name in names):
            drawn_j = sum(parts_j[name] for name in names)
            # A wait that the device worked through in part counts for its block's share.
            measured[block.key] = drawn_j * block.share_frac / sum(map(split.frac, names))
    rest_j = energy.value - sum(measured.values())
    rest = [
        block for block in (*blocks, reached) if block.key not in measured and block.share_frac > 0
    ]
    rest_frac = sum(block.share_frac for block in rest)
    per_frac = rest_j / rest_frac if rest_frac else 0.0

    def with_joules(block: LossBlock) -> LossBlock:
        if block.key in measured:
            return replace(block, joules=measured[block.key], joules_basis=energy.basis)
        return replace(block, joules=max(0.0, block.share_frac) * per_frac, joules_basis="derived")

    return energy, tuple(map(with_joules, blocks)), with_joules(reached)


# Remarks, and the two or three most promising changes.
#
# A gain is an upper bound: a block of 24 % of the time makes a run at most 1 / (1 - 0.24) = 1.32
# times as fast. A share of the peak is not a share of the time: padding of 5 % of the peak beside
# an MFU of 15 % is a quarter of what is computed, and of that time.


def _remarks(
    evidence: Evidence, activity: DeviceActivity, got: Achieved | None, blocks: Sequence[LossBlock]
) -> tuple[str, ...]:
    """Remarks on low MFU and on contradictions, the most important first."""
    lines = [] if got is None or got.is_printed else _frozen(evidence, activity, got)
    idle = next((block for block in blocks if block.key == IDLE), None)
    if idle is not None and idle.title.startswith("launch-bound"):
        lines.append(
            f"launch-bound: in {percent(idle.share_frac)} of the time the device waited inside a"
            " step for the host to launch the next kernel; a faster device would not help (a step"
            " that synchronises or copies looks alike: a profile separates them)"
        )
    if got is not None and got.is_recomputation_assumed and not got.recomputed_frac:
        lines.append(
            "no recomputation is assumed: if activations are checkpointed, pass --checkpointing,"
            " and its share leaves the blocks above it"
        )
    straggler = or_none(lambda: pace_of_ranks(evidence).straggler())
    if straggler is not None and straggler.by_frac > STRAGGLING_FRAC:
        lines.append(
            f"{straggler.text}: up to {percent(straggler.by_frac)} of each step; it is part of the"
            " blocks above, which do not separate it"
        )
    lines += flop_count_contradictions(evidence)
    if any(block.share_frac < 0 and block.key != "clock" for block in blocks):
        lines.append(
            "a block below 0: more was achieved than its time allows; tokens, FLOPs, the peak or"
            " the times are wrong"
        )
    return tuple(lines)


def _frozen(evidence: Evidence, activity: DeviceActivity, got: Achieved) -> list[str]:
    """For a run with adapters, a remark: the MFU that training every weight would have."""
    counts = {flops.convention: flops for flops in evidence.flops}
    if _OF_ADAPTERS not in counts or _EXACT not in counts:
        return []
    own = flops_per_token(counts[_EXACT])
    trained = flops_per_token(counts[_OF_ADAPTERS]) / _ITS_PART
    if own >= trained:
        return []
    if_trained_frac = got.mfu.value * trained / flops_per_token(evidence.flops[0])
    message = (
        "frozen weights: the backward pass computes no gradients of them, so a token needs"
        f" {scaled(own, 'FLOP')} instead of {scaled(trained, 'FLOP')}"
        f" ({percent(own / trained)}; about 4 a weight instead of 6). MFU counts what is computed:"
        f" {percent(got.mfu.value)}, where training every weight at these tokens/s would read"
        f" {percent(if_trained_frac)}. That is less work and no loss"
    )
    if activity.sm_frac is None or activity.tensor_frac is None:
        return [f"{message}; hardware counters would show where the time goes instead"]
    return [
        f"{message}. Where tokens/s are hardly higher than with every weight trained, the time goes"
        f" elsewhere: SMs were active {percent(activity.sm_frac)} of the time and tensor cores"
        f" {percent(activity.tensor_frac)}, so non-matmul kernels set the pace; a profile of a few"
        " steps names them"
    ]


# Frozen weights are a remark and no block. Under LoRA the backward pass computes no gradients of
# frozen weights, so a token needs about 4 FLOPs a weight instead of 6. At the same tokens/s MFU is
# a third lower, but no time is lost. This convention is two thirds of the FLOPs of training every
# weight, with causal attention as in `exact`. It is counted only for runs with adapters.
_OF_ADAPTERS, _ITS_PART = "automodel-lora", 2 / 3
_EXACT = "exact"

_MOST = 3
_LEAST_FRAC = 0.01
_WORTH_FRAC = 0.05
_BOUND_WORTH = 0.5  # weight of an upper bound, relative to a gain that is fully attainable
_BOUND_BY_MEMORY = 0.6  # of the bandwidth: above it, moving fewer bytes helps

_ADVICE = {
    "checkpoint": "write checkpoints less often, or in the background",
    "eval": "evaluate less often, or on fewer samples",
    "data": "load data ahead: more workers, pinned memory, tokenise beforehand",
    "stalls": "find what stops the steps: data, checkpoints, logging, garbage collection",
    "gaps": "do less between steps: log and synchronise seldom, keep .item() out of the loop",
    MERGED_WAITS: "name the waits with meter.phase, then shorten the longest",
    "empty_sms": "larger kernels: a larger batch, fused layers (torch.compile)",
    "communication": "overlap communication with computation, or shard less",
    "copies": "pin memory and copy ahead (non_blocking=True)",
    "uncounted": "sizes that fill tiles (multiples of 128), attention that skips what is masked",
    "recomputed": "checkpoint fewer layers, as far as memory allows",
    "padding": "pack sequences, or batch those of a length",
    "not_multiplying": "fuse element-wise work (torch.compile, fused norms, loss and optimizer)",
    "clock": "cool the device or raise its power limit, if they are yours to set",
}
_LAUNCH = (
    "give each launch more to do: a larger batch, CUDA graphs, torch.compile(mode="
    "'reduce-overhead'), a fused optimizer"
)
_SYNCHRONISED = "keep the device fed: no .item() or print of tensors inside a step, copies ahead"
# Blocks that can be removed completely; a part of the others is inherent.
_REMOVABLE = ("data", "stalls", "gaps", MERGED_WAITS, "padding", "copies", IDLE)
_TILES = ("recomputed", "padding", "uncounted", "ceiling")


def _changes(
    evidence: Evidence,
    blocks: Sequence[LossBlock],
    reached: LossBlock,
    activity: DeviceActivity,
    working_frac: float,
) -> tuple[Change, ...]:
    """The most promising changes, best first.

    `working_frac`: share of the window with a kernel, or else within steps.
    """
    others = or_none(other_programs, evidence)  # that steps may have waited for
    candidates = []
    for block in blocks:
        advice = _advice(block, activity)
        if block.key == "stalls" and others:
            advice = f"measure on a quiet machine: {others}"
        saved = _saved(block, blocks, reached, activity, working_frac=working_frac)
        least = _WORTH_FRAC if block.key == "uncounted" else _LEAST_FRAC
        if not advice or block.share_frac < least or not _LEAST_FRAC <= saved < 1:
            continue
        why = "; ".join(f"{fact.key}: {fact.said}" for fact in block.facts) or block.why
        gain = 1 / (1 - saved) - 1
        candidates.append(
            Change(block.key, advice, block.share_frac, gain, block.key not in _REMOVABLE, why)
        )
    return tuple(sorted(candidates, key=_rank)[:_MOST])


def _rank(change: Change) -> float:
    """Sort key: the largest gain first; an upper bound counts half."""
    return -change.gain_frac * (_BOUND_WORTH if change.is_bound else 1.0)


def _advice(block: LossBlock, activity: DeviceActivity) -> str:
    if block.key == IDLE:
        return _LAUNCH if block.title.startswith("launch-bound") else _SYNCHRONISED
    if block.key == "clock" and not (
        activity.capped_frac or activity.heat_frac or activity.brake_frac
    ):
        return ""
    if block.key == "not_multiplying" and (activity.dram_frac or 0.0) > _BOUND_BY_MEMORY:
        return "move fewer bytes: fuse kernels, keep activations in fewer bits"
    return _ADVICE.get(block.key, "")


def _saved(
    block: LossBlock,
    blocks: Sequence[LossBlock],
    reached: LossBlock,
    activity: DeviceActivity,
    *,
    working_frac: float,
) -> float:
    """The largest share of the window's time that removing the block could save."""
    if block.share_frac <= 0:
        return 0.0
    if block.key not in _TILES:
        # Blocks below the clock: at a higher clock, 1 % of the peak is less than 1 % of the time.
        inside = (KERNELS, "not_multiplying", "empty_sms", "communication", "copies")
        scale = (activity.clock_ratio or 1.0) if block.key in inside else 1.0
        return block.share_frac / scale
    # Useless computation takes its share of the working time, including other kernels.
    counted = reached.share_frac + sum(b.share_frac for b in blocks if b.key in _TILES)
    return working_frac * block.share_frac / counted


def _record_next(
    evidence: Evidence, missing: dict[str, str], activity: DeviceActivity, got: Achieved | None
) -> tuple[str, ...]:
    """What to record so that the missing parts can be separated, as commands."""
    commands, gpus = [], evidence.devices("gpu")
    if evidence.is_imported:
        commands.append(
            "measure with `erg record -- COMMAND` or a Meter: a log has no readings of devices, and"
            " no times between steps"
        )
    elif not len(evidence.all_steps):
        commands.append("steps: an integration, `with meter.step(...)`, or print step=.. tokens=..")
    elif evidence.from_output:
        commands.append(
            "when steps begin: an integration or a Meter; a printed line says when they end"
        )
    if got is None and not evidence.flops:
        commands.append("FLOPs and peak: --model-config config.json --seq-len N --dtype bf16")
    if activity.tensor_frac is None and any(gpu.probe == "nvml" for gpu in gpus):
        commands.append(
            "hardware counters: let the run last longer, they are read about once a second"
            if evidence.series("tensor_frac")
            else "hardware counters: NVML has them on Hopper and newer, the dcgm probe elsewhere"
        )
    if gpus and not any("calibration" in gpu.facts for gpu in gpus):
        commands.append("`erg calibrate` once on its machine, for the matmul ceiling")
    if missing.get("padding") == NO_PADDING and evidence.trains:
        commands.append("padding: pass tokens_real= to meter.step, or use an integration")
    if len(gpus) > 1 and not evidence.marked("profiled"):
        commands.append("communication: profile_steps=3 of a callback, or a torch trace")
    return tuple(commands)
