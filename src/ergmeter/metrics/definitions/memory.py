"""Memory: of the device, of the program on it, of its allocator, of the host; growth; by phase.

Memory in use on a device includes contexts and other programs. The driver's value for this
program's processes includes their context; the allocator holds less than that; resident memory is
on the host. Each has its own metric. A peak is over the whole run, a mean over the window. Readings
seconds apart can miss a peak, so a high-water mark is used where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric, efficientllm, sft_play
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.samples import (
    cached_for_kinds,
    highest_of,
    inside,
    mean,
    mean_over,
    prefetch,
    readings,
    sampled,
)
from ergmeter.metrics.phases import PHASE_TITLES, PRECEDENCE, before, spans_of, touched, union_of
from ergmeter.records import Device, Reading, TimeArray, or_none
from ergmeter.stats.intervals import MIN_BLOCKS, slope_interval
from ergmeter.units import NS_PER_S, number_of, scaled

_S_PER_H = 3600.0
_AMU = "amu"  # as its importer names it


def _fullest(amounts: dict[str, float]) -> tuple[str, str]:
    """Return the device with the largest amount, and text for a note if there are several."""
    most = max(amounts, key=lambda device: amounts[device])
    return most, f"of {most}, the fullest of {len(amounts)}" if len(amounts) > 1 else ""


def highest(evidence: Evidence, column: str, devices: list[Device], note: str) -> Reading:
    """The highest reading of a column on any one device, over the whole run."""
    peaks = {d.id: highest_of(evidence, column, d) for d in devices}
    most, of = _fullest(peaks)
    note = "; ".join(filter(None, (of, note, "over the whole run")))
    return Reading(peaks[most], "B", "measured", note=note)


def mean_bytes(evidence: Evidence, column: str, devices: list[Device], note: str) -> Reading:
    """A column's mean over the window and over the devices."""
    value, each = mean_over([mean(evidence, column, device) for device in devices])
    return Reading(value, "B", "measured", note=f"{each}{note}; {evidence.window_note}")


def _gpus(evidence: Evidence, device: Device | None = None) -> list[Device]:
    return sampled(evidence, "gpu") if device is None else [device]


def _printed(evidence: Evidence, reason: NotMeasurable, *, mean: bool) -> Reading:
    """The memory that the program printed, where none was measured; else raises the reason.

    EfficientLLM's AMU is a mean; every other printed value is memory at that moment.
    """
    figures = [reported for reported in evidence.run.reported() if reported.unit == "B"]
    values = [figure.value for figure in figures if (figure.name == _AMU) == mean]
    if not values:
        raise reason
    what = "the last mean that" if mean else f"the most of {len(values)} figures that"
    note = f"{what} the program printed; not measured here: {reason}"
    return Reading(values[-1] if mean else max(values), "B", "reported", note=note)


def _in_use(evidence: Evidence, device: Device | None = None, *, mean: bool) -> Reading:
    """Device memory in use, mean or peak, of `device` or of all GPUs; else as printed."""
    over_time = mean_bytes if mean else highest
    try:
        devices = _gpus(evidence, device)
        return over_time(evidence, "memory_bytes", devices, "in use by all programs")
    except NotMeasurable as reason:
        if device is not None:
            raise
        return _printed(evidence, reason, mean=mean)


def device_peak_frac(evidence: Evidence, device: Device | None = None) -> Reading:
    """Peak memory in use / the device's memory, of the fullest GPU or of `device`."""
    shares, notes = {}, {}
    for gpu in _gpus(evidence, device):
        total = gpu.facts.get("memory_total_bytes")
        if not total:
            raise NotMeasurable(f"{gpu.name} [{gpu.id}] does not say how much memory it has")
        most = highest_of(evidence, "memory_bytes", gpu)
        shares[gpu.id] = most / total
        notes[gpu.id] = f"{scaled(most, 'B')} of {scaled(total, 'B')}, in use by all programs"
    fullest, of = _fullest(shares)
    note = f"{f'{of}: ' if of else ''}{notes[fullest]}; whole run"
    return Reading(shares[fullest], "frac", "measured", note=note)


_NOBODYS = (
    "NVML did not report what the program's own processes hold, as in many containers and in WSL;"
    " memory.allocator_peak_bytes has what torch holds"
)
_NVIDIA = ("nvml", "dcgm")


def device_program_peak_bytes(evidence: Evidence) -> Reading:
    """Peak GPU memory of the program's own processes, on the device with the most."""
    by_process = evidence.series("process_bytes")
    gpus = _gpus(evidence)
    devices = [device for device in gpus if device.id in by_process]
    if not devices and not any(device.probe in _NVIDIA for device in gpus):
        raise NotMeasurable("only NVML reports memory by process: no GPU of this run is NVIDIA's")
    if not devices:
        raise NotMeasurable(_NOBODYS)
    note = "of the program and its children, contexts included; the highest reading"
    return highest(evidence, "process_bytes", devices, note)


def process_peak_bytes(evidence: Evidence) -> Reading:
    """Peak resident memory: of the program with its children, or of one process if higher."""
    peaks = {device.id: _process_peak(evidence, device) for device in sampled(evidence, "process")}
    most, of = _fullest({device: value for device, (value, _) in peaks.items()})
    value, note = peaks[most]
    return Reading(value, "B", "measured", note="; ".join(filter(None, (of, note))))


_READ = "the largest reading of resident memory of all processes, shared pages counted in each"
_MARK = "the kernel's high-water mark of resident memory, as last read, of the largest process"
_BETWEEN = "a lower bound where several processes peaked together between two readings"


@cached_for_kinds("process")
def _process_peak(evidence: Evidence, device: Device) -> tuple[float, str]:
    """Return the larger of two peaks, and a note that says which.

    The peaks: the largest reading of the process tree; the high-water mark of one process.
    """
    marks = evidence.series("memory_peak_bytes").get(device.id)
    mark = float(marks.values.max()) if marks is not None else 0.0
    try:
        read = highest_of(evidence, "memory_bytes", device)
    except NotMeasurable:
        if marks is None:
            raise
        read = 0.0
    if marks is None:
        unseen = "no high-water mark was read, so peaks between readings are missed"
        return read, f"{_READ}; {unseen}; over the whole run"
    if read > mark:
        alone = "more than the high-water mark of any one process"
        return read, f"{_READ}: {alone}; over the whole run; {_BETWEEN}"
    early = len(marks.values) > 1 and marks.values[0] == mark
    when = "; it was already this high at the first reading" if early else ""
    return mark, f"{_MARK}, over the life of the program{when}; {_BETWEEN}"


def process_mean_bytes(evidence: Evidence) -> Reading:
    """Mean resident memory of the program and its children."""
    processes = sampled(evidence, "process")
    return mean_bytes(evidence, "memory_bytes", processes, "resident, children included")


def _growth(evidence: Evidence, kind: str) -> Reading:
    """Growth of memory in use per hour, summed over all devices of a kind; it reveals leaks."""
    slopes = [_device_growth(evidence, device) for device in sampled(evidence, kind)]
    value, low, high = (float(sum(part)) * _S_PER_H for part in zip(*slopes, strict=True))
    sure = "" if low > 0 or high < 0 else "; not distinguishable from none"
    note = f"straight line through the means of up to 20 blocks{sure}; {evidence.window_note}"
    return Reading(value, "B/h", "derived", low, high, note)


@cached_for_kinds("gpu", "process")
def _device_growth(evidence: Evidence, device: Device) -> tuple[float, float, float]:
    """Return the growth of one device's memory in bytes per second, with low and high bounds."""
    series = readings(evidence, "memory_bytes", device)
    here = inside(evidence, series.t_ns)
    t_s = (series.t_ns[here] - evidence.span.start_ns) / NS_PER_S
    slope = slope_interval(t_s, series.values[here])
    if slope is None:
        least = 2 * MIN_BLOCKS
        raise NotMeasurable(f"{number_of(int(here.sum()), 'reading')}: a trend needs {least}")
    return slope


prefetch(mean, "memory_bytes", of=("gpu", "process"))
prefetch(highest_of, "process_bytes", of=("gpu",))


_device_bytes = partial(Metric, unit="B", direction="lower", needs=("an accelerator",))
_host_bytes = partial(Metric, unit="B", direction="lower", needs=("the process probe",))

METRICS = [
    _device_bytes(
        "memory.device_peak_bytes",
        "device memory, peak",
        formula="highest memory in use on any one device, whole run",
        compute=partial(_in_use, mean=False),
        per_device=partial(_in_use, mean=False),
        noun="peak memory",
        quantity="device memory, peak",
        column="memory_device_peak_bytes",
        aliases=sft_play(
            "vram_peak_MB", "MB", "in MB of 1 000 000 bytes; the original's MB were MiB", 1e-6
        ),
        views="short card 60 in whole run as memory;"
        " card 800 in memory; report 130; model card 160 in the whole run;"
        " serve live 70 as device memory; serve run 70; serve ledger 30; console 70;"
        " ledger notes 30 as vram_peak_MB; compare 50 as memory; pareto 30 in memory",
    ),
    _device_bytes(
        "memory.device_mean_bytes",
        "device memory, mean",
        formula="mean over time of memory in use, mean over devices",
        compute=partial(_in_use, mean=True),
        per_device=partial(_in_use, mean=True),
        aliases=(
            *efficientllm(
                "AMU",
                "GB",
                "average memory utilization: mean over time of device memory in use, in GB of 1e9"
                " bytes; the original's GB were GiB",
                1e-9,
            ),
            *sft_play("vram_avg_MB", "MB", "in MB of 1 000 000 bytes", 1e-6),
        ),
        views="otel 20 as hw.gpu.memory.usage",
    ),
    Metric(
        "memory.device_peak_frac",
        "device memory, peak share",
        "frac",
        "neither",
        "highest memory in use on a device / its memory, whole run, of the fullest",
        ("an accelerator",),
        device_peak_frac,
        per_device=device_peak_frac,
        quantity="device memory, peak",
        upper_bound=1.0,
        above_bound="a reading of the device or its total memory is wrong",
    ),
    _device_bytes(
        "memory.device_program_peak_bytes",
        "device memory, the program's own",
        formula="highest sum over the program's processes of what the driver says they hold on any"
        " one device, whole run",
        needs=("an accelerator whose driver tells what each process holds",),
        compute=device_program_peak_bytes,
    ),
    _device_bytes(
        "memory.device_growth_bytes_per_h",
        "device memory growth",
        unit="B/h",
        formula="slope of a line through memory in use over the window",
        compute=partial(_growth, kind="gpu"),
    ),
    _host_bytes(
        "memory.process_peak_bytes",
        "host memory, peak",
        formula="the larger of: highest reading of the resident memory of the process tree, whole"
        " run; highest high-water mark of one of its processes, life of the program",
        compute=process_peak_bytes,
        noun="host memory",
        column="memory_process_peak_bytes",
        views="short card 50 in whole run as memory;"
        " card 820 in memory expected; report 140; serve live 80 as host memory;"
        " serve run 80; serve ledger 40; console 80; compare 60 as host mem.; pareto 40 in memory;"
        " bench report 100 in memory as host expected; bench matrix 130 in memory",
    ),
    _host_bytes(
        "memory.process_mean_bytes",
        "host memory, mean",
        formula="mean over time of resident memory of the process tree",
        compute=process_mean_bytes,
    ),
    _host_bytes(
        "memory.process_growth_bytes_per_h",
        "host memory growth",
        unit="B/h",
        formula="slope of a line through resident memory over the window",
        compute=partial(_growth, kind="process"),
        views="card 830 in memory",
    ),
]


# The framework's allocator. It takes memory in blocks and keeps them. Reserved memory without
# tensors is not available to other programs, and free parts of blocks in use are often unusable for
# the allocator too. Its own high-water marks are read, so no peak between readings is missed.

_ALLOCATOR_NEEDS = ("a Meter in a torch program on CUDA",)


def allocators(evidence: Evidence) -> list[Device]:
    """The allocators that reserved memory: a rank sees every GPU of its node but uses only one."""
    devices = sampled(evidence, "allocator")
    took = [device for device in devices if or_none(highest_of, evidence, "reserved_bytes", device)]
    return took or devices


def _allocator_highest(evidence: Evidence, column: str, note: str) -> Reading:
    return highest(evidence, column, allocators(evidence), note)


def allocator_mean_bytes(evidence: Evidence) -> Reading:
    """Mean over time of memory in tensors."""
    return mean_bytes(evidence, "allocated_bytes", allocators(evidence), "tensors of this program")


def allocator_unused_frac(evidence: Evidence) -> Reading:
    """The share of reserved memory that tensors never used, even at their peak."""
    unused = []
    for device in allocators(evidence):
        taken = highest_of(evidence, "reserved_bytes", device)
        needed = highest_of(evidence, "allocated_peak_bytes", device)
        amounts = f"{scaled(needed, 'B')} needed of {scaled(taken, 'B')} taken"
        note = f"{amounts}, each at its own peak; {device.id}; whole run"
        unused.append((1 - needed / taken, note))
    value, note = max(unused)
    return Reading(value, "frac", "measured", note=note)


_HIGHEST = ("reserved_bytes", "allocated_peak_bytes", "split_bytes")
prefetch(mean, "allocated_bytes", of=("allocator",))
prefetch(highest_of, *_HIGHEST, of=("allocator",))

_allocator_bytes = partial(Metric, unit="B", direction="lower", needs=_ALLOCATOR_NEEDS)

ALLOCATOR_METRICS = [
    _allocator_bytes(
        "memory.allocator_peak_bytes",
        "allocator, peak",
        formula="the allocator's high-water mark of tensor memory",
        compute=partial(
            _allocator_highest,
            column="allocated_peak_bytes",
            note="tensors of this program, the allocator's own peak",
        ),
        column="memory_allocator_peak_bytes",
        views="card 810 in memory;"
        " bench report 70 in memory as torch expected;"
        " bench matrix 100 in memory as memory in tensors, peak (torch)",
    ),
    _allocator_bytes(
        "memory.allocator_mean_bytes",
        "allocator, mean",
        formula="mean over time of tensor memory, mean over devices",
        compute=allocator_mean_bytes,
    ),
    _allocator_bytes(
        "memory.allocator_reserved_bytes",
        "allocator, reserved",
        formula="highest memory the allocator took from the device",
        compute=partial(_allocator_highest, column="reserved_bytes", note="taken from the device"),
    ),
    _allocator_bytes(
        "memory.allocator_unused_frac",
        "allocator, reserved but unused",
        unit="frac",
        formula="1 - the allocator's peak of tensor memory / its peak of memory taken from the"
        " device; of the allocator where it is most",
        compute=allocator_unused_frac,
        upper_bound=1.0,
    ),
    _allocator_bytes(
        "memory.allocator_split_bytes",
        "allocator, fragments",
        formula="the allocator's peak of inactive split blocks: free parts of blocks in use",
        compute=partial(
            _allocator_highest,
            column="split_bytes",
            note="free parts of blocks that are in use, unusable for other programs; the"
            " allocator's peak",
        ),
    ),
]


# Memory by phase. The allocator's high-water mark only rises: after a training step of 40 GB it
# reads 40 GB through an evaluation that needs 5. So a phase's memory is the highest reading during
# it, or the mark if it rose while no other phase was active. The first mark may be from before the
# measurement. If the mark is above the readings, the peak lies between the two, and the note says
# so. An instant belongs to one phase (`metrics.phases`).

_WORDS = {phase: PHASE_TITLES[phase] for phase in ("train", "eval", "checkpoint")}


def _during(evidence: Evidence, phase: str, t_ns: TimeArray) -> Any:  # noqa: ANN401  a mask
    """A mask of the instants in a phase. Raises NotMeasurable if the phase has none of them."""
    if not len(spans_of(evidence, phase)[0]):
        raise NotMeasurable(f"no {phase} span was recorded")
    if evidence.from_output:
        raise NotMeasurable("printed lines do not show when a phase began; a Meter does")
    own, earlier = union_of(evidence, phase), union_of(evidence, *before(evidence, phase))
    mask = touched(own, t_ns, t_ns) & ~touched(earlier, t_ns, t_ns)
    if not mask.any():
        raise NotMeasurable(f"no reading was taken during {_WORDS[phase]}")
    return mask


def _highest(peaks: dict[str, Reading]) -> Reading:
    most, of = _fullest({device: peak.value for device, peak in peaks.items()})
    peak = peaks[most]
    # Another device may have had more, where it is known less well.
    bounds = [other.high for other in peaks.values() if other.high is not None]
    high = max((bound for bound in bounds if bound > peak.value), default=None)
    low = None if high is None else peak.value
    note = "; ".join(filter(None, (of, peak.note, "whole run")))
    return Reading(peak.value, "B", "measured", low, high, note)


def _on_device(phase: str) -> Callable[[Evidence], Reading]:
    @cached_for_kinds("gpu")
    def of_one(evidence: Evidence, device: Device) -> Reading:
        series = readings(evidence, "memory_bytes", device)
        in_use = series.values[_during(evidence, phase, series.t_ns)]
        note = (
            f"the highest of {number_of(len(in_use), 'reading')} in {_WORDS[phase]}, in use by all"
            " programs; peaks between two readings are missed"
        )
        return Reading(float(in_use.max()), "B", "measured", note=note)

    return lambda evidence: _highest({d.id: of_one(evidence, d) for d in sampled(evidence, "gpu")})


def _in_allocator(phase: str) -> Callable[[Evidence], Reading]:
    @cached_for_kinds("allocator")
    def of_one(evidence: Evidence, device: Device) -> Reading:
        allocated = readings(evidence, "allocated_bytes", device)
        marks = readings(evidence, "allocated_peak_bytes", device)
        during = _during(evidence, phase, allocated.t_ns)
        read = float(allocated.values[during].max())
        risen, most = _marked(evidence, phase, marks.t_ns, marks.values)
        peak = max(read, risen)
        note = f"the highest of {number_of(int(during.sum()), 'reading')} in {_WORDS[phase]}"
        if risen >= peak:
            note = f"the allocator's own mark, which rose to it in {_WORDS[phase]}"
        if peak >= most:
            return Reading(peak, "B", "measured", note=note)
        note += (
            "; between two readings it may have been more, up to the allocator's mark at that time,"
            " which another phase may have set"
        )
        return Reading(peak, "B", "measured", peak, most, note)

    return lambda evidence: _highest({d.id: of_one(evidence, d) for d in allocators(evidence)})


def _marked(
    evidence: Evidence,
    phase: str,
    t_ns: TimeArray,
    marks: Any,  # noqa: ANN401  floats
) -> tuple[float, float]:
    """Return two high-water marks of a phase.

    The highest that the mark rose to while only this phase was active, or 0; and the highest that
    the mark was at any time in the phase.
    """
    since_ns = np.concatenate(([0], t_ns[:-1]))
    own = touched(union_of(evidence, phase), since_ns, t_ns)
    others = union_of(evidence, *(other for other in PRECEDENCE if other != phase))
    alone = own & ~touched(others, since_ns, t_ns)
    rose = alone & (np.diff(marks, prepend=marks[:1]) > 0)
    return float(marks[rose].max(initial=0.0)), float(marks[own].max(initial=0.0))


_PHASE_NEEDS = ("spans of a Meter or an integration",)

MEMORY_PHASE_METRICS = [
    *(
        _device_bytes(
            f"memory.device_{phase}_peak_bytes",
            f"device memory in {words}, peak",
            formula="highest reading of memory in use on any one device at an instant of a"
            f" {phase} span",
            needs=("an accelerator", *_PHASE_NEEDS),
            compute=_on_device(phase),
        )
        for phase, words in _WORDS.items()
    ),
    *(
        _allocator_bytes(
            f"memory.allocator_{phase}_peak_bytes",
            f"allocator in {words}, peak",
            formula="the higher of: highest reading of tensor memory at an instant of a"
            f" {phase} span; the allocator's mark where it rose between two readings and only"
            f" {phase} was on",
            needs=(*_ALLOCATOR_NEEDS, *_PHASE_NEEDS),
            compute=_in_allocator(phase),
        )
        for phase, words in _WORDS.items()
    ),
]
