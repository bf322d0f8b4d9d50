"""How much memory: the device's, the program's part of it, and the program's on the host.

The trap: one number called "memory". What a device has in use includes contexts and other programs;
what the driver says that this program's processes hold is its part, context included; what its
allocator holds (see `allocator`) is less again; resident memory is the host's. Each has a name of
its own. A peak is over the whole run, because that is what does not fit; a mean is over the window.
Another trap: the largest of readings seconds apart is no peak. Where the kernel keeps a high-water
mark, that counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Alias, Metric
from ergmeter.metrics.evidence.device_cache import ask_each, asked_of
from ergmeter.metrics.evidence.gauges import highest_of, inside, mean, readings, sampled
from ergmeter.records import Reading
from ergmeter.stats.intervals import MIN_BLOCKS, slope_interval
from ergmeter.units import NS_PER_S, number_of, scaled

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Device

_S_PER_H = 3600.0
_AMU = "amu"  # as its importer names it


def highest(evidence: Evidence, column: str, devices: list[Device], note: str) -> Reading:
    """The highest reading of a column on any one device, over the whole run."""
    peaks = {d.id: highest_of(evidence, column, d) for d in devices}
    most = max(peaks, key=lambda device: peaks[device])
    of = f"of {most}, the fullest of {len(peaks)}; " if len(peaks) > 1 else ""
    return Reading(peaks[most], "B", "measured", note=f"{of}{note}; over the whole run")


def mean_bytes(evidence: Evidence, column: str, devices: list[Device], note: str) -> Reading:
    """The mean over the window of a column, mean over devices."""
    means = [mean(evidence, column, device) for device in devices]
    each = f"mean over {len(means)} devices; " if len(means) > 1 else ""
    value = sum(means) / len(means)
    return Reading(value, "B", "measured", note=f"{each}{note}; {evidence.window_note}")


def _gpus(evidence: Evidence) -> list[Device]:
    return sampled(evidence, "gpu")


def _printed(evidence: Evidence, reason: NotMeasurable, *, mean: bool) -> Reading:
    """What the program printed of its memory, where we saw none. Raises the reason if nothing.

    EfficientLLM's AMU is a mean; whatever else is printed is how much it was at that moment.
    """
    said = [one for one in evidence.run.reported() if one.unit == "B"]
    values = [one.value for one in said if (one.name == _AMU) == mean]
    if not values:
        raise reason
    what = "the last mean that" if mean else f"the most of {len(values)} figures that"
    note = f"{what} the program printed; not measured here: {reason}"
    return Reading(values[-1] if mean else max(values), "B", "reported", note=note)


def device_peak_bytes(evidence: Evidence) -> Reading:
    """The most memory in use on a device."""
    try:
        return highest(evidence, "memory_bytes", _gpus(evidence), "in use by all programs")
    except NotMeasurable as reason:
        return _printed(evidence, reason, mean=False)


def device_mean_bytes(evidence: Evidence) -> Reading:
    """Mean memory in use on a device."""
    try:
        return mean_bytes(evidence, "memory_bytes", _gpus(evidence), "in use by all programs")
    except NotMeasurable as reason:
        return _printed(evidence, reason, mean=True)


def one_device_peak_bytes(evidence: Evidence, device: Device) -> Reading:
    """The most memory in use on this device."""
    return highest(evidence, "memory_bytes", [device], "in use by all programs")


def one_device_mean_bytes(evidence: Evidence, device: Device) -> Reading:
    """Mean memory in use on this device."""
    return mean_bytes(evidence, "memory_bytes", [device], "in use by all programs")


def _share_of_total(evidence: Evidence, devices: list[Device]) -> Reading:
    """The fullest device, by its own size: how near it came to the end."""
    shares = {}
    for device in devices:
        total = device.facts.get("memory_total_bytes")
        if not total:
            raise NotMeasurable(f"{device.name} [{device.id}] does not say how much memory it has")
        most = highest_of(evidence, "memory_bytes", device)
        shares[device.id] = (most / total, most, total)
    fullest = max(shares, key=lambda device: shares[device])
    share, most, total = shares[fullest]
    of = f"of {fullest}, the fullest of {len(shares)}: " if len(shares) > 1 else ""
    note = f"{of}{scaled(most, 'B')} of {scaled(total, 'B')}, in use by all programs; whole run"
    return Reading(share, "frac", "measured", note=note)


def device_peak_frac(evidence: Evidence) -> Reading:
    """The most memory in use on a device, of what it has."""
    return _share_of_total(evidence, _gpus(evidence))


def one_device_peak_frac(evidence: Evidence, device: Device) -> Reading:
    """The most memory in use on this device, of what it has."""
    return _share_of_total(evidence, [device])


_NOBODYS = (
    "NVML did not report what the program's own processes hold, as in many containers and in WSL;"
    " memory.allocator_peak_bytes has what torch holds"
)
_NVIDIA = ("nvml", "dcgm")


def device_program_peak_bytes(evidence: Evidence) -> Reading:
    """The most that the program's own processes held on a device."""
    known = evidence.series("process_bytes")
    gpus = _gpus(evidence)
    devices = [device for device in gpus if device.id in known]
    if not devices and not any(device.probe in _NVIDIA for device in gpus):
        raise NotMeasurable("only NVML reports memory by process: no GPU of this run is NVIDIA's")
    if not devices:
        raise NotMeasurable(_NOBODYS)
    note = "of the program and its children, contexts included; the highest reading"
    return highest(evidence, "process_bytes", devices, note)


def _processes(evidence: Evidence) -> list[Device]:
    return sampled(evidence, "process")


def process_peak_bytes(evidence: Evidence) -> Reading:
    """The most resident memory of the program and its children, or of one of them alone."""
    peaks = {device.id: _process_peak(evidence, device) for device in _processes(evidence)}
    most = max(peaks, key=lambda device: peaks[device][0])
    value, note = peaks[most]
    of = f"of {most}, the fullest of {len(peaks)}; " if len(peaks) > 1 else ""
    return Reading(value, "B", "measured", note=f"{of}{note}")


_READ = "the largest reading of resident memory, children included, pages they share once for each"
_MARK = "the kernel's high-water mark of resident memory, as last read, of the largest process"
_BETWEEN = "a lower bound where several processes peaked together between two readings"


@asked_of("process")
def _process_peak(evidence: Evidence, device: Device) -> tuple[float, str]:
    """The largest reading of the whole tree or the highest mark of one process, and which."""
    marks = evidence.series("memory_peak_bytes").get(device.id)
    mark = float(marks.values.max()) if marks is not None else 0.0
    try:
        read = highest_of(evidence, "memory_bytes", device)
    except NotMeasurable:
        if marks is None:
            raise
        read = 0.0
    if marks is None:
        unseen = "no high-water mark was read, so what was held between readings is not in it"
        return read, f"{_READ}; {unseen}; over the whole run"
    if read > mark:
        alone = "more than the high-water mark of any one process"
        return read, f"{_READ}: {alone}; over the whole run; {_BETWEEN}"
    early = len(marks.values) > 1 and marks.values[0] == mark
    when = "; it stood so high at the first reading already" if early else ""
    return mark, f"{_MARK}, over the life of the program{when}; {_BETWEEN}"


def process_mean_bytes(evidence: Evidence) -> Reading:
    """Mean resident memory of the program and its children."""
    return mean_bytes(evidence, "memory_bytes", _processes(evidence), "resident, children included")


def _growth(evidence: Evidence, devices: list[Device]) -> Reading:
    slopes = [_device_growth(evidence, device) for device in devices]
    value, low, high = (float(sum(part)) * _S_PER_H for part in zip(*slopes, strict=True))
    sure = "" if low > 0 or high < 0 else "; not distinguishable from none"
    note = f"straight line through the means of up to 20 blocks{sure}; {evidence.window_note}"
    return Reading(value, "B/h", "derived", low, high, note)


@asked_of("gpu", "process")
def _device_growth(evidence: Evidence, device: Device) -> tuple[float, float, float]:
    """Of one device, bytes a second, and between which they lie."""
    series = readings(evidence, "memory_bytes", device)
    here = inside(evidence, series.t_ns)
    t_s = (series.t_ns[here] - evidence.span.start_ns) / NS_PER_S
    slope = slope_interval(t_s, series.values[here])
    if slope is None:
        least = 2 * MIN_BLOCKS
        raise NotMeasurable(f"{number_of(int(here.sum()), 'reading')}: a trend needs {least}")
    return slope


ask_each(mean, "memory_bytes", of=("gpu", "process"))
ask_each(highest_of, "process_bytes", of=("gpu",))


def process_growth(evidence: Evidence) -> Reading:
    """How fast the program's resident memory grew: a leak grows for ever."""
    return _growth(evidence, _processes(evidence))


def device_growth(evidence: Evidence) -> Reading:
    """How fast the memory in use on the devices grew."""
    return _growth(evidence, _gpus(evidence))


_SFT_PLAY = "SFT-Play"

METRICS = [
    Metric(
        "memory.device_peak_bytes",
        "device memory, peak",
        "B",
        "lower",
        "highest memory in use on any one device, whole run",
        ("an accelerator",),
        device_peak_bytes,
        per_device=one_device_peak_bytes,
        kinds=("gpu",),
        aliases=(
            Alias(
                "vram_peak_MB",
                _SFT_PLAY,
                "in MB of 1 000 000 bytes; the original's MB were MiB",
                "MB",
                1e-6,
            ),
        ),
    ),
    Metric(
        "memory.device_mean_bytes",
        "device memory, mean",
        "B",
        "lower",
        "mean over time of memory in use, mean over devices",
        ("an accelerator",),
        device_mean_bytes,
        per_device=one_device_mean_bytes,
        kinds=("gpu",),
        aliases=(
            Alias(
                "AMU",
                "EfficientLLM",
                "average memory utilization: mean over time of device"
                " memory in use, in GB of 1e9 bytes; the original's GB were GiB",
                "GB",
                1e-9,
            ),
            Alias("vram_avg_MB", _SFT_PLAY, "in MB of 1 000 000 bytes", "MB", 1e-6),
        ),
    ),
    Metric(
        "memory.device_peak_frac",
        "device memory, peak of all there is",
        "frac",
        "neither",
        "highest memory in use on a device / its memory, whole run, of the fullest",
        ("an accelerator",),
        device_peak_frac,
        per_device=one_device_peak_frac,
        kinds=("gpu",),
        upper_bound=1.0,
        above_bound="a reading of the device or its total memory is wrong",
    ),
    Metric(
        "memory.device_program_peak_bytes",
        "device memory, the program's own",
        "B",
        "lower",
        "highest sum over the program's processes of what the driver says they hold on any one"
        " device, whole run",
        ("an accelerator whose driver tells what each process holds",),
        device_program_peak_bytes,
    ),
    Metric(
        "memory.device_growth_bytes_per_h",
        "device memory growth",
        "B/h",
        "lower",
        "slope of a line through memory in use over the window",
        ("an accelerator",),
        device_growth,
    ),
    Metric(
        "memory.process_peak_bytes",
        "host memory, peak",
        "B",
        "lower",
        "the larger of: highest reading of the resident memory of the process tree, whole run;"
        " highest high-water mark of one of its processes, life of the program",
        ("the process probe",),
        process_peak_bytes,
    ),
    Metric(
        "memory.process_mean_bytes",
        "host memory, mean",
        "B",
        "lower",
        "mean over time of resident memory of the process tree",
        ("the process probe",),
        process_mean_bytes,
    ),
    Metric(
        "memory.process_growth_bytes_per_h",
        "host memory growth",
        "B/h",
        "lower",
        "slope of a line through resident memory over the window",
        ("the process probe",),
        process_growth,
    ),
]
