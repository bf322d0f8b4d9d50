"""Which two or three changes are most worth trying, and what could each win?

The trap: promising the whole block. A block of 24 % of the time that goes away makes a run 1 / (1 -
0.24) = 1.32 times as fast, and few go away: what is said is the most there is to win, and why.
And a share of the peak is not one of the time: padding that is 5 % of the peak beside an MFU of
15 % is a quarter of what is computed, and of the time in which it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.metrics.definitions.stragglers import STRAGGLING_FRAC
from ergmeter.metrics.explain.block import IDLE, KERNELS, WAITS, percent
from ergmeter.metrics.explain.flops import NO_PADDING
from ergmeter.units import scaled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.metrics.definitions.stragglers import Straggler
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.explain.block import LossBlock
    from ergmeter.metrics.explain.device import Rungs
    from ergmeter.metrics.explain.flops import Achieved, Frozen

# -- explain remarks -------------------------------------------------------------------------------
# What a reader asks of a waterfall: why is MFU low though nothing is slow, and what is odd?


def remarks(
    seen: Rungs,
    got: Achieved | None,
    still: Frozen | None,
    blocks: Sequence[LossBlock],
    *,
    straggler: Straggler | None = None,
    contradictions: Sequence[str] = (),
) -> tuple[str, ...]:
    """In the order in which they matter."""
    said = []
    if still is not None and got is not None:
        said.append(_frozen(seen, got, still))
    idle = next((one for one in blocks if one.key == IDLE), None)
    if idle is not None and idle.title.startswith("launch-bound"):
        said.append(
            f"launch-bound: in {percent(idle.share_frac)} of the time the device waited inside a"
            " step for the host to launch the next kernel; a faster device would not help (a step"
            " that synchronises or copies looks alike: a profile tells them apart)"
        )
    if got is not None and got.is_recomputation_assumed and not got.recomputed_frac:
        said.append(
            "no recomputation is assumed: if activations are checkpointed, pass --checkpointing,"
            " and its share leaves the blocks above it"
        )
    if straggler is not None and straggler.by_frac > STRAGGLING_FRAC:
        said.append(
            f"{straggler.said}: up to {percent(straggler.by_frac)} of each step; it is part of the"
            " blocks above, which do not tell it apart"
        )
    said += contradictions
    if any(one.share_frac < 0 and one.key != "clock" for one in blocks):
        said.append(
            "a block below 0: more was achieved than its time allows; tokens, FLOPs, the peak or"
            " the times are wrong"
        )
    return tuple(said)


def _frozen(seen: Rungs, got: Achieved, still: Frozen) -> str:
    told = (
        "frozen weights: the backward pass computes no gradients of them, so a token needs"
        f" {scaled(still.flops_per_token, 'FLOP')} instead of"
        f" {scaled(still.trained_flops_per_token, 'FLOP')} ({percent(still.ratio)}; about 4 a"
        " weight instead of 6). MFU counts what is computed:"
        f" {percent(got.mfu.value)}, where training every weight at these tokens/s would read"
        f" {percent(still.mfu_if_trained_frac)}. That is less work and no loss"
    )
    if seen.sm_frac is None or seen.tensor_frac is None:
        return f"{told}; where the time goes instead, hardware counters would tell"
    return (
        f"{told}. Where tokens/s are hardly higher than with every weight trained, the time goes"
        f" elsewhere: SMs were active {percent(seen.sm_frac)} of the time and tensor cores"
        f" {percent(seen.tensor_frac)}, so non-matmul kernels set the pace; a profile of a few"
        " steps names them"
    )


# -- explain changes -------------------------------------------------------------------------------


_MOST = 3
_LEAST_FRAC = 0.01
_WORTH_FRAC = 0.05
_BOUND_WORTH = 0.5  # of a gain of the same size that can be had as a whole
_BOUND_BY_MEMORY = 0.6  # of the bandwidth: from there on fewer bytes are what helps

_ADVICE = {
    "checkpoint": "write checkpoints less often, or in the background",
    "eval": "evaluate less often, or on fewer samples",
    "data": "load data ahead: more workers, pinned memory, tokenise beforehand",
    "stalls": "find what stops the steps: data, checkpoints, logging, garbage collection",
    "gaps": "do less between steps: log and synchronise seldom, keep .item() out of the loop",
    WAITS: "name the waits with meter.phase, then shorten the longest",
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
# What can go away as a whole; of the rest a part is the nature of the work.
_WHOLE = ("data", "stalls", "gaps", WAITS, "padding", "copies", IDLE)
_TILES = ("recomputed", "padding", "uncounted", "ceiling")


@dataclass(frozen=True)
class Change:
    """Something to try. `gain_frac`: how much faster it could get at the most."""

    block: str
    advice: str
    share_frac: float
    gain_frac: float
    is_bound: bool  # whether the block can't go away as a whole: there is less to win
    why: str


def changes(
    blocks: Sequence[LossBlock], reached: LossBlock, seen: Rungs, *, working_frac: float
) -> tuple[Change, ...]:
    """The most promising, best first.

    `working_frac`: of the window, the time with a kernel, or else with a step open."""
    found = []
    for one in blocks:
        advice = _advice(one, seen)
        saved = _saved(one, blocks, reached, seen, working_frac=working_frac)
        least = _WORTH_FRAC if one.key == "uncounted" else _LEAST_FRAC
        if not advice or one.share_frac < least or not _LEAST_FRAC <= saved < 1:
            continue
        why = "; ".join(f"{fact.key}: {fact.said}" for fact in one.facts) or one.why
        gain = 1 / (1 - saved) - 1
        found.append(Change(one.key, advice, one.share_frac, gain, one.key not in _WHOLE, why))
    return tuple(sorted(found, key=_rank)[:_MOST])


def _rank(one: Change) -> float:
    """The largest gain first. Of a bound a part is had at best, and nobody knows which: it comes
    before a gain that can be had as a whole only where it is twice as large."""
    return -one.gain_frac * (_BOUND_WORTH if one.is_bound else 1.0)


def _advice(one: LossBlock, seen: Rungs) -> str:
    if one.key == IDLE:
        return _LAUNCH if one.title.startswith("launch-bound") else _SYNCHRONISED
    if one.key == "clock" and not (seen.capped_frac or seen.heat_frac or seen.brake_frac):
        return ""
    if one.key == "not_multiplying" and (seen.dram_frac or 0.0) > _BOUND_BY_MEMORY:
        return "move fewer bytes: fuse kernels, keep activations in fewer bits"
    return _ADVICE.get(one.key, "")


def _saved(
    one: LossBlock,
    blocks: Sequence[LossBlock],
    reached: LossBlock,
    seen: Rungs,
    *,
    working_frac: float,
) -> float:
    """The share of the window's time that would go with the block, at the most."""
    if one.share_frac <= 0:
        return 0.0
    if one.key not in _TILES:
        # Of blocks below the clock: 1 % of the peak is less of the time at a higher clock.
        inside = (KERNELS, "not_multiplying", "empty_sms", "communication", "copies")
        return one.share_frac / (seen.clock_ratio or 1.0) if one.key in inside else one.share_frac
    # What is computed for nothing takes its part of the working time, with all that goes with it.
    counted = reached.share_frac + sum(b.share_frac for b in blocks if b.key in _TILES)
    return working_frac * one.share_frac / counted


def record_next(
    evidence: Evidence, missing: dict[str, str], seen: Rungs, got: Achieved | None
) -> tuple[str, ...]:
    """What would tell apart what this run's record does not, as commands."""
    said = []
    if evidence.is_imported:
        said.append(
            "measure with `erg record -- COMMAND` or a Meter: a log has no readings of devices, and"
            " no times between steps"
        )
    elif not len(evidence.all_steps):
        said.append("steps: an integration, `with meter.step(...)`, or print step=.. tokens=..")
    elif evidence.from_output:
        said.append(
            "when steps begin: an integration or a Meter; a printed line says when they end"
        )
    if got is None and not evidence.flops:
        said.append("FLOPs and peak: --model-config config.json --seq-len N --dtype bf16")
    if seen.tensor_frac is None and any(
        device.probe == "nvml" for device in evidence.devices("gpu")
    ):
        said.append(
            "hardware counters: NVML has them on Hopper and newer, the dcgm probe elsewhere"
        )
    if evidence.devices("gpu") and not any(
        "calibration" in device.facts for device in evidence.devices("gpu")
    ):
        said.append("`erg calibrate` once on its machine, for the matmul ceiling")
    if missing.get("padding") == NO_PADDING and evidence.trains:
        said.append("padding: pass tokens_real= to meter.step, or use an integration")
    if len(evidence.devices("gpu")) > 1 and not _is_profiled(evidence):
        said.append("communication: profile_steps=3 of a callback, or a torch trace")
    return tuple(said)


def _is_profiled(evidence: Evidence) -> bool:
    return any(mark.name == "profiled" for mark in evidence.run.marks)
