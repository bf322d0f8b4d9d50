"""What the parts of a GPU did, by its hardware counters: the ladder from "GPU util" to MFU.

The trap: a GPU that is 100 % busy and does nothing worth its power. Each rung says less than the
one above it seems to:

    any kernel on it          one small kernel on one multiprocessor is enough
    multiprocessors at work   a warp that waits for memory is at work
    tensor pipes at work      also on what was computed before, or is padding
    MFU                       what the model needs, at the peak of the datasheet

The last two are two measurements of nearly the same, by the hardware and by the model's formula:
where MFU is above the tensor pipes' activity in a program that multiplies on them, an input of the
MFU is wrong. How far it may be below: by recomputation, by products that do not fill a tile, and by
the clock, since a pipe is at work per cycle and a peak is per second at the highest clock.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric
from ergmeter.metrics.evidence.device_cache import cached_per_device
from ergmeter.metrics.evidence.gauges import mean_activity, sampled
from ergmeter.records import Reading

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Device, Direction

_HOW = "by hardware counters"
_EDGES = "interval from the readings at both ends"


@cached_per_device
def _failures(evidence: Evidence) -> list[str]:
    return [mark.detail for mark in evidence.run.marks if mark.name == "activity_failed"]


def _failed(evidence: Evidence, device: Device) -> str:
    """What became of the counters during the run, where they stopped."""
    marks = _failures(evidence)
    said = [detail.removeprefix(f"{device.id}: ") for detail in marks if device.id in detail]
    return f" ({'; '.join(said)})" if said else ""


def _of_one(evidence: Evidence, device: Device, column: str) -> tuple[float, float, float]:
    most = 1.0 if column.endswith("_frac") else math.inf
    try:
        return mean_activity(evidence, column, device, most=most)
    except NotMeasurable as reason:
        raise NotMeasurable(f"{reason}{_failed(evidence, device)}") from None


def _over_devices(column: str, unit: str, says: str) -> Callable[[Evidence], Reading]:
    def compute(evidence: Evidence) -> Reading:
        found = [_of_one(evidence, device, column) for device in sampled(evidence, "gpu")]
        each = f"mean over {len(found)} devices; " if len(found) > 1 else ""
        value, low, high = (sum(parts) / len(found) for parts in zip(*found, strict=True))
        note = f"{says}; {_HOW}; {_EDGES}; {each}{evidence.window_note}"
        return Reading(value, unit, "measured", low, high, note)

    return compute


def _of_device(column: str, unit: str, says: str) -> Callable[[Evidence, Device], Reading]:
    def compute(evidence: Evidence, device: Device) -> Reading:
        note = f"{says}; {_HOW}; {_EDGES}; {evidence.window_note}"
        value, low, high = _of_one(evidence, device, column)
        return Reading(value, unit, "measured", low, high, note)

    return compute


# Column, title, direction, what it says. A rate is of each device, not of all together.
_ROWS: list[tuple[str, str, Direction, str]] = [
    (
        "graphics_frac",
        "time with any kernel",
        "higher",
        "share of time with any kernel resident",
    ),
    (
        "sm_frac",
        "multiprocessors at work",
        "higher",
        "share of multiprocessors with a warp, also one that waits, mean over time",
    ),
    (
        "occupancy_frac",
        "occupancy",
        "neither",
        "warps that are resident, of those there is room for, mean over time",
    ),
    (
        "tensor_frac",
        "tensor pipes at work",
        "higher",
        "share of cycles in which the tensor pipes worked, on whatever",
    ),
    (
        "tensor_half_frac",
        "tensor pipes, 16 bits (HMMA)",
        "neither",
        "share of cycles in which the tensor pipes worked on HMMA",
    ),
    (
        "tensor_int_frac",
        "tensor pipes, integers (IMMA)",
        "neither",
        "share of cycles in which the tensor pipes worked on IMMA",
    ),
    (
        "tensor_double_frac",
        "tensor pipes, doubles (DFMA)",
        "neither",
        "share of cycles in which the tensor pipes worked on DFMA",
    ),
    (
        "dram_frac",
        "device memory bandwidth",
        "neither",
        "bytes moved to and from device memory, of its peak bandwidth",
    ),
    ("pcie_sent_bytes_per_s", "PCIe, sent", "neither", "from each device over PCIe"),
    ("pcie_received_bytes_per_s", "PCIe, received", "neither", "to each device over PCIe"),
    ("nvlink_sent_bytes_per_s", "NVLink, sent", "neither", "from each device over all its links"),
    ("nvlink_received_bytes_per_s", "NVLink, received", "neither", "to each device, all its links"),
]


def _metric(column: str, title: str, direction: Direction, says: str) -> Metric:
    unit = "frac" if column.endswith("_frac") else "B/s"
    return Metric(
        f"activity.{column}",
        title,
        unit,
        direction,
        f"{says}; mean over the window, each reading weighted with its span, mean over devices",
        ("hardware counters: NVML's on Hopper and newer, or the dcgm probe",),
        _over_devices(column, unit, says),
        per_device=_of_device(column, unit, says),
        kinds=("gpu",),
        upper_bound=1.0 if unit == "frac" else None,
        above_bound="a reading of the hardware counters is wrong",
    )


METRICS = [_metric(*row) for row in _ROWS]
