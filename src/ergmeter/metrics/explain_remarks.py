"""What a reader asks of a waterfall: why is MFU low though nothing is slow, and what is odd?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.metrics.explain_blocks import IDLE, percent
from ergmeter.metrics.stragglers import STRAGGLING_FRAC
from ergmeter.units import scaled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.metrics.explain_blocks import Block
    from ergmeter.metrics.explain_device import Rungs
    from ergmeter.metrics.explain_flops import Achieved, Frozen
    from ergmeter.metrics.stragglers import Straggler


def remarks(
    seen: Rungs,
    got: Achieved | None,
    still: Frozen | None,
    blocks: Sequence[Block],
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
