"""Utilization of accelerators, CPU, disk and network, and the CPU cost of ergmeter itself.

"GPU utilization" is the share of time with any kernel resident. A kernel that waits for memory
counts as busy: 100 % only means that the device was never idle.
"""

from __future__ import annotations

import math
from functools import partial

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric, efficientllm
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.samples import (
    cached_for_kinds,
    cached_result,
    mean,
    mean_activity,
    mean_over,
    prefetch,
    rate,
    sampled,
    throttled_share,
    window_values,
)
from ergmeter.records import Device, Direction, Reading
from ergmeter.runlog.reader import RUNNING

# Hardware counters, from "GPU util" to MFU. Each of these shows less than the one above suggests:
#
#     any kernel resident    one small kernel on one SM is enough
#     SMs active             a warp that waits for memory is active
#     tensor cores active    also on recomputation and padding
#     MFU                    what the model needs, at the peak of the datasheet
#
# The last two measure nearly the same, by hardware and by the model's formula. If MFU is above the
# tensor cores' activity, an input of the MFU is wrong. MFU is lower because of recomputation,
# matmuls that do not fill a tile, and the clock: activity is per cycle, a peak per second at the
# highest clock.

_HOW = "by hardware counters"
_EDGES = "interval from the readings at both ends"


def _failed(evidence: Evidence, device: Device) -> str:
    """Why a device's hardware counters stopped during the run, in brackets; "" if they did not."""
    marks = evidence.marked("activity_failed")
    details = [detail.removeprefix(f"{device.id}: ") for detail in marks if device.id in detail]
    return f" ({'; '.join(details)})" if details else ""


def _of_one(evidence: Evidence, device: Device, column: str) -> tuple[float, float, float]:
    most = 1.0 if column.endswith("_frac") else math.inf
    try:
        return mean_activity(evidence, column, device, most=most)
    except NotMeasurable as reason:
        raise NotMeasurable(f"{reason}{_failed(evidence, device)}") from None


def _active(
    evidence: Evidence, device: Device | None = None, *, column: str, unit: str, what: str
) -> Reading:
    """Mean of a hardware counter over all accelerators, or of `device`."""
    devices = sampled(evidence, "gpu") if device is None else [device]
    means = [_of_one(evidence, device, column) for device in devices]
    (value, each), (low, _), (high, _) = map(mean_over, zip(*means, strict=True))
    note = f"{what}; {_HOW}; {_EDGES}; {each}{evidence.window_note}"
    return Reading(value, unit, "measured", low, high, note)


def _activity(column: str, title: str, direction: Direction, what: str, views: str = "") -> Metric:
    """Return the metric of a hardware counter: a mean over devices, also for rates."""
    unit = "frac" if column.endswith("_frac") else "B/s"
    compute = partial(_active, column=column, unit=unit, what=what)
    return Metric(
        f"activity.{column}",
        title,
        unit,
        direction,
        f"{what}; mean over the window, each reading weighted with its span, mean over devices",
        ("hardware counters: NVML's on Hopper and newer, or the dcgm probe",),
        compute,
        per_device=compute,
        upper_bound=1.0 if unit == "frac" else None,
        above_bound="a reading of the hardware counters is wrong",
        views=views,
    )


_KERNEL = "share of time with any kernel resident"
_SMS = "share of SMs with a warp, also one that waits, mean over time"
_WARPS = "warps that are resident, of those there is room for, mean over time"
_TENSOR = "share of cycles in which the tensor cores were active"
_DRAM = "bytes moved to and from device memory, of its peak bandwidth"
_FROM_LINKS, _TO_LINKS = "from each device over all its links", "to each device, all its links"
ACTIVITY_METRICS = [
    _activity("graphics_frac", "time with any kernel", "higher", _KERNEL, "ladder 20"),
    _activity(
        *("sm_frac", "SMs active", "higher", _SMS),
        views="card 410 in activity; ladder 30",
    ),
    _activity("occupancy_frac", "occupancy", "neither", _WARPS),
    _activity(
        *("tensor_frac", "tensor cores active", "higher", f"{_TENSOR}, on whatever"),
        views="card 420 in activity; ladder 40",
    ),
    _activity("tensor_half_frac", "tensor cores, 16 bits (HMMA)", "neither", f"{_TENSOR} on HMMA"),
    _activity("tensor_int_frac", "tensor cores, integers (IMMA)", "neither", f"{_TENSOR} on IMMA"),
    _activity(
        "tensor_double_frac", "tensor cores, doubles (DFMA)", "neither", f"{_TENSOR} on DFMA"
    ),
    _activity("dram_frac", "device memory bandwidth", "neither", _DRAM, "card 430 in activity"),
    _activity("pcie_sent_bytes_per_s", "PCIe, sent", "neither", "from each device over PCIe"),
    _activity("pcie_received_bytes_per_s", "PCIe, received", "neither", "to each device over PCIe"),
    _activity("nvlink_sent_bytes_per_s", "NVLink, sent", "neither", _FROM_LINKS),
    _activity("nvlink_received_bytes_per_s", "NVLink, received", "neither", _TO_LINKS),
]


# Gauges and counters of devices, the node and the program.

# NVML's clocks-event reasons that are not a limit on a working chip: idle (1) and clocks set by an
# application (2).
_NOT_A_LIMIT = 0x1 | 0x2
# What the node probe counts.
_DISKS = "of disks, not of their partitions and volumes"
_ABOVE = "a reading of the driver or the kernel is wrong"
_CARDS = "of network cards; where there is none to be seen, of every interface but the loopback"


def _mean_gauge(
    evidence: Evidence, device: Device | None = None, *, column: str, kind: str, note: str
) -> Reading:
    """Mean of a gauge over all devices of a kind, or of `device`."""
    devices = sampled(evidence, kind) if device is None else [device]
    value, each = mean_over([mean(evidence, column, device) for device in devices])
    unit = "frac" if column.endswith("_frac") else "Hz"
    return Reading(value, unit, "measured", note=f"{note}; {each}{evidence.window_note}")


_BUSY = "share of time with any kernel resident, which is not the share of its peak"
_ALL_CORES = "all cores, all programs"
busy_frac = partial(_mean_gauge, column="busy_frac", kind="gpu", note=_BUSY)
clock_hz = partial(_mean_gauge, column="clock_hz", kind="gpu", note="SM clock")
node_cpu_frac = partial(_mean_gauge, column="busy_frac", kind="node", note=_ALL_CORES)


def temperature_max_c(evidence: Evidence) -> Reading:
    """The hottest reading of any accelerator in the window."""
    hottest = [_hottest_c(evidence, device) for device in sampled(evidence, "gpu")]
    return Reading(max(hottest), "C", "measured", note=evidence.window_note)


@cached_for_kinds("gpu")
def _hottest_c(evidence: Evidence, device: Device) -> float:
    return float(window_values(evidence, "temperature_c", device).max())


def throttled_frac(evidence: Evidence) -> Reading:
    """Share of readings in which an accelerator was throttled."""
    shares = [_throttled_frac(evidence, device) for device in sampled(evidence, "gpu")]
    note = f"by power cap, heat or another reason the driver gives; {evidence.window_note}"
    return Reading(sum(shares) / len(shares), "frac", "measured", note=note)


@cached_for_kinds("gpu")
def _throttled_frac(evidence: Evidence, device: Device) -> float:
    return throttled_share(evidence, device, ~_NOT_A_LIMIT)


prefetch(mean, "busy_frac", of=("gpu", "node"))
prefetch(mean, "clock_hz", of=("gpu",))
prefetch(mean, "iowait_frac", of=("node",))
prefetch(rate, "cpu_s", of=("process",))


def _rate(evidence: Evidence, column: str, kind: str) -> float:
    """The growth of a counter per second of the window, summed over all devices of a kind."""
    return sum(rate(evidence, column, device) for device in sampled(evidence, kind))


def process_cores(evidence: Evidence) -> Reading:
    """CPU time of the program and its children over the window: cores kept busy."""
    value = _rate(evidence, "cpu_s", "process")
    return Reading(value, "cores", "measured", note=f"children included; {evidence.window_note}")


_FULL_FRAC = 0.9  # of the cores busy: a program may have to wait for a core
_OTHERS_FRAC = 0.2


def other_programs(evidence: Evidence) -> str:
    """The cores that other programs kept busy, as text; "" if enough cores were free."""
    cores = sum(float(device.facts.get("cores") or 0) for device in sampled(evidence, "node"))
    load_frac = node_cpu_frac(evidence).value
    others = load_frac * cores - process_cores(evidence).value
    if load_frac < _FULL_FRAC or others < _OTHERS_FRAC * cores:
        return ""
    return f"other programs kept {others:.1f} of {cores:.0f} cores busy"


def _traffic(evidence: Evidence, column: str) -> Reading:
    value = _rate(evidence, column, "node")
    return Reading(value, "B/s", "measured", note=f"all programs; {evidence.window_note}")


# What is counted as a writer's CPU cost: ergmeter's threads in the user's program, or processes
# that only measure.
_COUNTED = {
    "threads": "the threads that read and write, loading pyarrow included",  # of older runs
    "all threads": "the threads that read and write, that judge alerts and that make figures for"
    " sinks, loading pyarrow included",
    "processes": "the recorder and its relay as whole processes, starting Python included",
}


def own_cpu_frac(evidence: Evidence) -> Reading:
    """CPU time of all of ergmeter's threads and processes / duration of the run."""
    devices = evidence.devices("self")
    measured = [device for device in devices if _own_cpu_s(evidence, device)]
    if not measured:
        raise NotMeasurable(_why_no_cost(evidence))
    note = f"of one core, whole run: {'; '.join(dict.fromkeys(map(_counted, measured)))}"
    note += f"; {len(measured)} writers together" if len(measured) > 1 else ""
    early = len(devices) - len(measured)
    note += f"; {early} more ended before their cost was recorded" if early else ""
    return _own_share(evidence, measured, note)


def device_own_cpu_frac(evidence: Evidence, device: Device) -> Reading:
    """CPU time of one writer's threads and processes / duration of the run; writers add up."""
    if not _own_cpu_s(evidence, device):
        raise NotMeasurable(_why_no_cost(evidence))
    note = f"of one core, over the life of the whole run: {_counted(device)}"
    return _own_share(evidence, [device], note)


def _own_share(evidence: Evidence, writers: list[Device], note: str) -> Reading:
    cpu_s = sum(_own_cpu_s(evidence, device) for device in writers)
    value = cpu_s / evidence.watched.duration_s
    return Reading(value, "frac", "measured", note=note + _folded(evidence))


def _why_no_cost(evidence: Evidence) -> str:
    if evidence.is_imported:
        return "a log does not hold ergmeter's CPU time"
    if evidence.run.status == RUNNING:
        return "ergmeter's CPU time is not recorded yet: it is written every few seconds"
    return "the writer ended before ergmeter's CPU time was recorded"


@cached_for_kinds("self")
def _own_cpu_s(evidence: Evidence, device: Device) -> float:
    series = evidence.series("cpu_s").get(device.id)
    return 0.0 if series is None else float(series.values.max())


def _counted(device: Device) -> str:
    return _COUNTED.get(str(device.facts.get("counted")), _COUNTED["threads"])


@cached_result
def _folded(evidence: Evidence) -> str:
    """For a note: in older runs all writers share a device, so only the highest cost is known."""
    ids = [d.id for writer in evidence.run.writers for d in writer.devices if d.kind == "self"]
    folded = len(ids) - len(set(ids)) + 1
    return f"; only of the most expensive of {folded} writers" if folded > 1 else ""


_of_gpu = partial(Metric, needs=("an accelerator",))
_share = partial(Metric, unit="frac", upper_bound=1.0, above_bound=_ABOVE)

METRICS = [
    _share(
        "utilization.busy_frac",
        "accelerator busy",
        direction="higher",
        formula="mean over time of the driver's utilisation, mean over devices",
        needs=("an accelerator",),
        compute=busy_frac,
        per_device=busy_frac,
        aliases=efficientllm(
            "PCU",
            "frac",
            "called peak compute utilization; is the driver's utilisation, the share of time with"
            " any kernel resident",
        ),
        views="card 400 in activity; ladder 10; otel 10 as hw.gpu.utilization",
    ),
    _of_gpu(
        "utilization.clock_hz",
        "accelerator clock",
        "Hz",
        "higher",
        "mean over time and devices",
        compute=clock_hz,
    ),
    _of_gpu(
        "utilization.temperature_max_c",
        "accelerator temperature",
        "C",
        "lower",
        "highest reading in the window",
        compute=temperature_max_c,
    ),
    _of_gpu(
        "utilization.throttled_frac",
        "throttled or power-limited",
        "frac",
        "lower",
        "readings with a clock limit other than idle / readings",
        compute=throttled_frac,
        upper_bound=1.0,
        views="card 900 in load",
    ),
    Metric(
        "utilization.process_cores",
        "CPU cores used",
        "cores",
        "neither",
        "CPU seconds of the process tree / window",
        ("the process probe",),
        process_cores,
        views="card 910 in load",
    ),
    _share(
        "utilization.node_cpu_frac",
        "node CPU busy",
        direction="neither",
        formula="mean over time of the load of all cores",
        needs=("the node probe",),
        compute=node_cpu_frac,
    ),
    _share(
        "utilization.iowait_frac",
        "waiting for storage",
        direction="lower",
        formula="mean over time of the share of CPU time in iowait",
        needs=("the node probe",),
        compute=partial(_mean_gauge, column="iowait_frac", kind="node", note=_ALL_CORES),
        views="card 920 in load",
    ),
    *(
        Metric(
            f"traffic.{column}_per_s",
            title,
            "B/s",
            "neither",
            f"increase of {column} / window; {of}",
            ("the node probe",),
            partial(_traffic, column=column),
        )
        for column, title, of in (
            ("disk_read_bytes", "disk read", _DISKS),
            ("disk_written_bytes", "disk written", _DISKS),
            ("net_received_bytes", "network received", _CARDS),
            ("net_sent_bytes", "network sent", _CARDS),
        )
    ),
    Metric(
        "overhead.cpu_frac",
        "ergmeter's own CPU, of one core with start-up",
        "frac",
        "lower",
        "CPU seconds of ergmeter's own threads, of all writers together (under `erg record` of the"
        " recorder and its relay too) / life of the run; 1 is one core",
        (),
        own_cpu_frac,
        per_device=device_own_cpu_frac,
        kinds=("self",),
        views="card 930 in load",
    ),
]
