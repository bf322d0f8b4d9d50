"""Remarks on a waterfall, the two or three most promising changes, and what to record next.

A gain is an upper bound: a block of 24 % of the time makes a run at most 1 / (1 - 0.24) = 1.32
times as fast. A share of the peak is not a share of the time: padding of 5 % of the peak beside an
MFU of 15 % is a quarter of what is computed, and of that time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.metrics.definitions.timing import STRAGGLING_FRAC, Straggler
from ergmeter.metrics.explain.flops import NO_PADDING, Achieved, FrozenWeights
from ergmeter.metrics.explain.time import IDLE, KERNELS, MERGED_WAITS, LossBlock, percent
from ergmeter.units import scaled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.explain.device import DeviceActivity


def remarks(
    activity: DeviceActivity,
    got: Achieved | None,
    still: FrozenWeights | None,
    blocks: Sequence[LossBlock],
    *,
    straggler: Straggler | None = None,
    contradictions: Sequence[str] = (),
) -> tuple[str, ...]:
    """Remarks on low MFU and on contradictions, the most important first."""
    lines = []
    if still is not None and got is not None:
        lines.append(_frozen(activity, got, still))
    idle = next((block for block in blocks if block.key == IDLE), None)
    if idle is not None and idle.title.startswith("launch-bound"):
        lines.append(
            f"launch-bound: in {percent(idle.share_frac)} of the time the device waited inside a"
            " step for the host to launch the next kernel; a faster device would not help (a step"
            " that synchronises or copies looks alike: a profile tells them apart)"
        )
    if got is not None and got.is_recomputation_assumed and not got.recomputed_frac:
        lines.append(
            "no recomputation is assumed: if activations are checkpointed, pass --checkpointing,"
            " and its share leaves the blocks above it"
        )
    if straggler is not None and straggler.by_frac > STRAGGLING_FRAC:
        lines.append(
            f"{straggler.text}: up to {percent(straggler.by_frac)} of each step; it is part of the"
            " blocks above, which do not tell it apart"
        )
    lines += contradictions
    if any(block.share_frac < 0 and block.key != "clock" for block in blocks):
        lines.append(
            "a block below 0: more was achieved than its time allows; tokens, FLOPs, the peak or"
            " the times are wrong"
        )
    return tuple(lines)


def _frozen(activity: DeviceActivity, got: Achieved, still: FrozenWeights) -> str:
    message = (
        "frozen weights: the backward pass computes no gradients of them, so a token needs"
        f" {scaled(still.flops_per_token, 'FLOP')} instead of"
        f" {scaled(still.trained_flops_per_token, 'FLOP')} ({percent(still.ratio)}; about 4 a"
        " weight instead of 6). MFU counts what is computed:"
        f" {percent(got.mfu.value)}, where training every weight at these tokens/s would read"
        f" {percent(still.mfu_if_trained_frac)}. That is less work and no loss"
    )
    if activity.sm_frac is None or activity.tensor_frac is None:
        return f"{message}; where the time goes instead, hardware counters would tell"
    return (
        f"{message}. Where tokens/s are hardly higher than with every weight trained, the time goes"
        f" elsewhere: SMs were active {percent(activity.sm_frac)} of the time and tensor cores"
        f" {percent(activity.tensor_frac)}, so non-matmul kernels set the pace; a profile of a few"
        " steps names them"
    )


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


@dataclass(frozen=True)
class Change:
    """A change to try. `gain_frac`: the largest possible speed-up."""

    block: str
    advice: str
    share_frac: float
    gain_frac: float
    is_bound: bool  # only part of the block can be removed: the gain is an upper bound
    why: str


def changes(
    blocks: Sequence[LossBlock],
    reached: LossBlock,
    activity: DeviceActivity,
    *,
    working_frac: float,
    others: str = "",
) -> tuple[Change, ...]:
    """The most promising changes, best first.

    `working_frac`: share of the window with a kernel, or else within steps. `others`: what other
    programs did that steps may have waited for.
    """
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
        return (
            block.share_frac / (activity.clock_ratio or 1.0)
            if block.key in inside
            else block.share_frac
        )
    # Useless computation takes its share of the working time, including other kernels.
    counted = reached.share_frac + sum(b.share_frac for b in blocks if b.key in _TILES)
    return working_frac * block.share_frac / counted


def record_next(
    evidence: Evidence, missing: dict[str, str], activity: DeviceActivity, got: Achieved | None
) -> tuple[str, ...]:
    """What to record so that the missing parts can be separated, as commands."""
    commands = []
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
    if activity.tensor_frac is None and any(
        device.probe == "nvml" for device in evidence.devices("gpu")
    ):
        commands.append(
            "hardware counters: NVML has them on Hopper and newer, the dcgm probe elsewhere"
        )
    if evidence.devices("gpu") and not any(
        "calibration" in device.facts for device in evidence.devices("gpu")
    ):
        commands.append("`erg calibrate` once on its machine, for the matmul ceiling")
    if missing.get("padding") == NO_PADDING and evidence.trains:
        commands.append("padding: pass tokens_real= to meter.step, or use an integration")
    if len(evidence.devices("gpu")) > 1 and not evidence.marked("profiled"):
        commands.append("communication: profile_steps=3 of a callback, or a torch trace")
    return tuple(commands)
