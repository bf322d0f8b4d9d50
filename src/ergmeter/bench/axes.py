"""Which combinations does a scenario have, and how is a batch shared out among devices?

The order is that of the system this follows: a scenario's models, its frameworks, then the axes of
the whole bench, the last of them changing first. So cell 7 there is cell 7 here.

The trap: a batch that does not divide. 4 examples on 3 devices were rounded down there to 1 each,
and the cell that said 4 ran 3. Here it is an error, or a constraint's reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# What benchmark.py takes where its flags say nothing.
FMS_AXES: dict[str, tuple[Any, ...]] = {
    "effective_batch_size": (4, 8),
    "num_gpus": (1, 2),
    "packing": (True,),
    "max_seq_len": (4096,),
}
WHOLE = ("effective_batch_size", "num_gpus", "max_seq_len", "nodes")

BATCH = "per_device_train_batch_size"
ACCUMULATION = "gradient_accumulation_steps"
EFFECTIVE = "effective_batch_size"


class UnevenBatch(Exception):  # noqa: N818  the text says what does not divide
    """The effective batch can't be had on so many devices."""


def products(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination; the last axis changes first."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def size(axes: Mapping[str, Sequence[Any]]) -> int:
    """How many combinations there are."""
    number = 1
    for values in axes.values():
        number *= len(values)
    return number


def shared(arguments: Mapping[str, Any], *, effective: int | None, devices: int) -> dict[str, int]:
    """What is to be added to the arguments, so that the effective batch is had.

    The original's rule: with the accumulation given, the batch of a device is effective / devices
    (the accumulation is left out of it, for compatibility); with the batch given, the accumulation
    is effective / devices / batch; not both. Neither given is an error there; here it is as if the
    accumulation were 1.
    """
    batch, accumulation = arguments.get(BATCH), arguments.get(ACCUMULATION)
    if effective is None:
        return {}
    if batch is not None and accumulation is not None:
        raise UnevenBatch(
            f"{BATCH} and {ACCUMULATION} are both given, so that {EFFECTIVE} {effective} has no"
            f" say; remove one of the three (null removes a default)"
        )
    each = _divided(effective, devices, f"{EFFECTIVE} {effective} on {devices} devices")
    if batch is None:
        return {BATCH: each} if accumulation is not None else {BATCH: each, ACCUMULATION: 1}
    return {
        ACCUMULATION: _divided(
            each, int(batch), f"{EFFECTIVE} {effective} on {devices} devices in batches of {batch}"
        )
    }


def _divided(number: int, by: int, what: str) -> int:
    if by < 1 or number % by or number < by:
        raise UnevenBatch(
            f"{what} does not divide evenly; `exclude` leaves such cells out, a constraint"
            f" ({EFFECTIVE} % num_gpus == 0) skips them"
        )
    return number // by
