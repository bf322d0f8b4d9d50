"""How busy: accelerators, CPU, disk and network; and what the instrument itself cost.

The trap: "GPU utilisation" is the share of time in which some kernel was resident. A kernel that
waits for memory counts as busy; 100 % says that the device was not idle and nothing more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Alias, Metric
from ergmeter.metrics.evidence.device_cache import ask_each, asked_of, cached_per_device
from ergmeter.metrics.evidence.gauges import inside, mean, rate, readings, sampled
from ergmeter.records import Reading
from ergmeter.runlog.reader import RUNNING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Device

# NVML's clocks-event reasons that are not a limit on a working chip: idle (1) and clocks set by an
# application (2).
_NOT_A_LIMIT = 0x1 | 0x2
# What the node probe counts.
_DISKS = "of disks, not of their partitions and volumes"
_ABOVE = "a reading of the driver or the kernel is wrong"
_CARDS = "of network cards; where there is none to be seen, of every interface but the loopback"


def _mean_gauge(evidence: Evidence, column: str, kind: str, unit: str, note: str) -> Reading:
    values = [mean(evidence, column, device) for device in sampled(evidence, kind)]
    each = f"mean over {len(values)} devices; " if len(values) > 1 else ""
    together = f"{note}; {each}{evidence.window_note}"
    return Reading(sum(values) / len(values), unit, "measured", note=together)


_BUSY = "share of time with any kernel resident, which is not the share of its peak"


def busy_frac(evidence: Evidence) -> Reading:
    """Mean busy share of the accelerators."""
    return _mean_gauge(evidence, "busy_frac", "gpu", "frac", _BUSY)


def device_busy_frac(evidence: Evidence, device: Device) -> Reading:
    """Mean busy share of one accelerator."""
    value = mean(evidence, "busy_frac", device)
    return Reading(value, "frac", "measured", note=f"{_BUSY}; {evidence.window_note}")


def clock_hz(evidence: Evidence) -> Reading:
    """Mean clock of the accelerators."""
    return _mean_gauge(evidence, "clock_hz", "gpu", "Hz", "streaming multiprocessors")


def temperature_max_c(evidence: Evidence) -> Reading:
    """The hottest reading of any accelerator in the window."""
    hottest = [_hottest_c(evidence, device) for device in sampled(evidence, "gpu")]
    return Reading(max(hottest), "C", "measured", note=evidence.window_note)


@asked_of("gpu")
def _hottest_c(evidence: Evidence, device: Device) -> float:
    series = readings(evidence, "temperature_c", device)
    return float(series.values[inside(evidence, series.t_ns)].max())


def throttled_frac(evidence: Evidence) -> Reading:
    """Share of readings in which an accelerator's clock was held down."""
    held = [_held_frac(evidence, device) for device in sampled(evidence, "gpu")]
    note = f"by power cap, heat or another reason the driver gives; {evidence.window_note}"
    return Reading(sum(held) / len(held), "frac", "measured", note=note)


@asked_of("gpu")
def _held_frac(evidence: Evidence, device: Device) -> float:
    series = readings(evidence, "throttled", device)
    bits = series.values[inside(evidence, series.t_ns)].astype(np.int64)
    return float(((bits & ~_NOT_A_LIMIT) != 0).mean())


ask_each(mean, "busy_frac", of=("gpu", "node"))
ask_each(mean, "clock_hz", of=("gpu",))
ask_each(mean, "iowait_frac", of=("node",))
ask_each(rate, "cpu_s", of=("process",))


def _rate(evidence: Evidence, column: str, kind: str) -> float:
    """How fast a counter grew in the window, over all devices of a kind."""
    return sum(rate(evidence, column, device) for device in sampled(evidence, kind))


def process_cores(evidence: Evidence) -> Reading:
    """CPU time of the program and its children over the window: cores kept busy."""
    value = _rate(evidence, "cpu_s", "process")
    return Reading(value, "cores", "measured", note=f"children included; {evidence.window_note}")


def node_cpu_frac(evidence: Evidence) -> Reading:
    """Mean load of all cores of the node, whoever caused it."""
    return _mean_gauge(evidence, "busy_frac", "node", "frac", "all cores, all programs")


def iowait_frac(evidence: Evidence) -> Reading:
    """Share of CPU time that waited for storage: a starved data loader shows here."""
    return _mean_gauge(evidence, "iowait_frac", "node", "frac", "all cores, all programs")


def _traffic(column: str) -> Callable[[Evidence], Reading]:
    def compute(evidence: Evidence) -> Reading:
        value = _rate(evidence, column, "node")
        return Reading(value, "B/s", "measured", note=f"all programs; {evidence.window_note}")

    return compute


# What a writer's own cost holds: our threads in somebody's program, or processes that only measure.
_COUNTED = {
    "threads": "the threads that read and write, loading pyarrow included",  # of older runs
    "all threads": "the threads that read and write, that judge alerts and that make figures for"
    " sinks, loading pyarrow included",
    "processes": "the recorder and its relay as whole processes, starting Python included",
}


def own_cpu_frac(evidence: Evidence) -> Reading:
    """CPU time of ergmeter's own threads and processes over the life of the run, all together."""
    devices = evidence.devices("self")
    known = [device for device in devices if _own_cpu_s(evidence, device)]
    if not known:
        raise NotMeasurable(_why_no_cost(evidence))
    note = f"of one core, whole run: {'; '.join(dict.fromkeys(map(_counted, known)))}"
    note += f"; {len(known)} writers together" if len(known) > 1 else ""
    early = len(devices) - len(known)
    note += f"; {early} more ended before their cost was recorded" if early else ""
    spent_s = sum(_own_cpu_s(evidence, device) for device in known)
    value = spent_s / evidence.watched.duration_s
    return Reading(value, "frac", "measured", note=note + _folded(evidence))


def device_own_cpu_frac(evidence: Evidence, device: Device) -> Reading:
    """One writer's share of it. They add up: each is over the life of the whole run."""
    spent_s = _own_cpu_s(evidence, device)
    if not spent_s:
        raise NotMeasurable(_why_no_cost(evidence))
    note = f"of one core, over the life of the whole run: {_counted(device)}"
    value = spent_s / evidence.watched.duration_s
    return Reading(value, "frac", "measured", note=note + _folded(evidence))


def _why_no_cost(evidence: Evidence) -> str:
    if evidence.is_imported:
        return "a log does not hold ergmeter's CPU time"
    if evidence.run.status == RUNNING:
        return "ergmeter's CPU time is not recorded yet: it is written every few seconds"
    return "the writer ended before ergmeter's CPU time was recorded"


@asked_of("self")
def _own_cpu_s(evidence: Evidence, device: Device) -> float:
    series = evidence.series("cpu_s").get(device.id)
    return 0.0 if series is None else float(series.values.max())


def _counted(device: Device) -> str:
    return _COUNTED.get(str(device.facts.get("counted")), _COUNTED["threads"])


@cached_per_device
def _folded(evidence: Evidence) -> str:
    """Older runs have one such device, "ergmeter", for all writers: only the dearest shows."""
    ids = [d.id for writer in evidence.run.writers for d in writer.devices if d.kind == "self"]
    folded = len(ids) - len(set(ids)) + 1
    return f"; of the one that cost most of {folded} writers" if folded > 1 else ""


METRICS = [
    Metric(
        "utilization.busy_frac",
        "accelerator busy",
        "frac",
        "higher",
        "mean over time of the driver's utilisation, mean over devices",
        ("an accelerator",),
        busy_frac,
        per_device=device_busy_frac,
        kinds=("gpu",),
        upper_bound=1.0,
        above_bound=_ABOVE,
        aliases=(
            Alias(
                "PCU",
                "EfficientLLM",
                "called peak compute utilization; is the driver's"
                " utilisation, the share of time with any kernel resident",
                "frac",
            ),
        ),
    ),
    Metric(
        "utilization.clock_hz",
        "accelerator clock",
        "Hz",
        "higher",
        "mean over time and devices",
        ("an accelerator",),
        clock_hz,
    ),
    Metric(
        "utilization.temperature_max_c",
        "accelerator temperature",
        "C",
        "lower",
        "highest reading in the window",
        ("an accelerator",),
        temperature_max_c,
    ),
    Metric(
        "utilization.throttled_frac",
        "clock held down",
        "frac",
        "lower",
        "readings with a clock limit other than idle / readings",
        ("an accelerator",),
        throttled_frac,
        upper_bound=1.0,
    ),
    Metric(
        "utilization.process_cores",
        "CPU cores used",
        "cores",
        "neither",
        "CPU seconds of the process tree / window",
        ("the process probe",),
        process_cores,
    ),
    Metric(
        "utilization.node_cpu_frac",
        "node CPU busy",
        "frac",
        "neither",
        "mean over time of the load of all cores",
        ("the node probe",),
        node_cpu_frac,
        upper_bound=1.0,
        above_bound=_ABOVE,
    ),
    Metric(
        "utilization.iowait_frac",
        "waiting for storage",
        "frac",
        "lower",
        "mean over time of the share of CPU time in iowait",
        ("the node probe",),
        iowait_frac,
        upper_bound=1.0,
        above_bound=_ABOVE,
    ),
    *(
        Metric(
            f"traffic.{column}_per_s",
            title,
            "B/s",
            "neither",
            f"increase of {column} / window; {of}",
            ("the node probe",),
            _traffic(column),
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
    ),
]
