"""What the framework's allocator held of a device: tensors, what it took for them, and the rest.

The trap: "out of memory" on a device whose tensors would fit. An allocator takes memory in blocks
and keeps them; what it has taken and not given to tensors is of no use to others, and the free
parts of blocks in use, its fragments, are often of no use to itself. Its own high-water marks are
read, which nothing between two readings escapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric
from ergmeter.metrics.definitions.memory import highest, mean_bytes
from ergmeter.metrics.evidence.device_cache import ask_each
from ergmeter.metrics.evidence.gauges import highest_of, mean, sampled
from ergmeter.records import Reading
from ergmeter.units import scaled

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Device

_NEEDS = ("a Meter in a torch program on CUDA",)


def allocators(evidence: Evidence) -> list[Device]:
    """Those that took memory. A rank sees every GPU of its node and puts tensors on its own."""
    devices = sampled(evidence, "allocator")
    return [device for device in devices if _took(evidence, device)] or devices


def _took(evidence: Evidence, device: Device) -> bool:
    try:
        return highest_of(evidence, "reserved_bytes", device) > 0
    except NotMeasurable:
        return False


def allocator_mean_bytes(evidence: Evidence) -> Reading:
    """Mean over time of what tensors held."""
    return mean_bytes(evidence, "allocated_bytes", allocators(evidence), "tensors of this program")


def allocator_peak_bytes(evidence: Evidence) -> Reading:
    """The most that tensors held, by the allocator's own high-water mark."""
    note = "tensors of this program, the allocator's own peak"
    return highest(evidence, "allocated_peak_bytes", allocators(evidence), note)


def allocator_reserved_bytes(evidence: Evidence) -> Reading:
    """The most that the allocator took from the device."""
    return highest(evidence, "reserved_bytes", allocators(evidence), "taken from the device")


def allocator_unused_frac(evidence: Evidence) -> Reading:
    """Of what the allocator took, what it did not need even when it held most."""
    worst: tuple[float, str] | None = None
    for device in allocators(evidence):
        taken = highest_of(evidence, "reserved_bytes", device)
        needed = highest_of(evidence, "allocated_peak_bytes", device)
        said = f"{scaled(needed, 'B')} needed of {scaled(taken, 'B')} taken"
        found = (1 - needed / taken, f"{said}, each at its own peak; {device.id}; whole run")
        worst = max(worst, found) if worst else found
    assert worst is not None
    return Reading(worst[0], "frac", "measured", note=worst[1])


def allocator_split_bytes(evidence: Evidence) -> Reading:
    """The most that lay free in blocks partly in use."""
    note = "free parts of blocks that are in use, which nobody else can have; the allocator's peak"
    return highest(evidence, "split_bytes", allocators(evidence), note)


_HIGHEST = ("reserved_bytes", "allocated_peak_bytes", "split_bytes")
ask_each(mean, "allocated_bytes", of=("allocator",))
ask_each(highest_of, *_HIGHEST, of=("allocator",))

METRICS = [
    Metric(
        "memory.allocator_peak_bytes",
        "allocator, peak",
        "B",
        "lower",
        "the allocator's high-water mark of tensor memory",
        _NEEDS,
        allocator_peak_bytes,
    ),
    Metric(
        "memory.allocator_mean_bytes",
        "allocator, mean",
        "B",
        "lower",
        "mean over time of tensor memory, mean over devices",
        _NEEDS,
        allocator_mean_bytes,
    ),
    Metric(
        "memory.allocator_reserved_bytes",
        "allocator, reserved",
        "B",
        "lower",
        "highest memory the allocator took from the device",
        _NEEDS,
        allocator_reserved_bytes,
    ),
    Metric(
        "memory.allocator_unused_frac",
        "allocator, reserved in vain",
        "frac",
        "lower",
        "1 - the allocator's peak of tensor memory / its peak of memory taken from the device;"
        " of the allocator where it is most",
        _NEEDS,
        allocator_unused_frac,
        upper_bound=1.0,
    ),
    Metric(
        "memory.allocator_split_bytes",
        "allocator, fragments",
        "B",
        "lower",
        "the allocator's peak of inactive split blocks: free parts of blocks in use",
        _NEEDS,
        allocator_split_bytes,
    ),
]
