"""Energy of a run: joules, watts and joules per token, in total and by device.

Energy counters are used first, integrated power second; the note of a sum names both. The energy of
a device without readings is not guessed: the sum is then absent, and its reason has the known part.

What is measured is whole boards: accelerators if there are any, else CPU packages and DRAM. The
rest of the node is not included.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric, efficientllm, over_whole_run, sft_play
from ergmeter.metrics.definitions.tokens import label_of, steps_of, tokens
from ergmeter.metrics.device_energy import BASIS, COUNTER, boundary, counted_once, device_drawn
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.gpu_use import gpu_names
from ergmeter.metrics.evidence.ranks import need_all, need_devices
from ergmeter.metrics.evidence.samples import cached_result, sampled, why_absent
from ergmeter.records import Basis, Device, Missing, Reading, mapped, or_missing, or_none, weakest
from ergmeter.units import J_PER_WH, number_of

_ROUNDING = 1e-9  # tolerance when a mean is compared with the highest reading


def total(evidence: Evidence, devices: list[Device]) -> Reading:
    """The energy of all devices together. If one is unknown, NotMeasurable has the known part."""
    devices = counted_once(devices)
    results = [or_missing(device_drawn, evidence, device) for device in devices]
    measured = [part for part in results if not isinstance(part, Missing)]
    reasons = [part.reason for part in results if isinstance(part, Missing)]
    joules = sum(part.energy.joules for part in measured)
    if reasons:
        others = number_of(len(measured), "other device")
        partial = f" ({others} drew {joules:.1f} J)" if measured else ""
        raise NotMeasurable("; ".join(reasons) + partial)
    ways = sorted({part.way for part in measured})
    remarks = sorted({part.remark for part in measured if part.remark and part.way != COUNTER})
    edges = "both ends" + (" and at each cut" if len(evidence.span.starts_ns) > 1 else "")
    note = (
        f"{_names(devices)}, {_scope(devices)}; {' and '.join(ways)}"
        + (f" ({'; '.join(remarks)})" if remarks else "")
        + f"; interval from the readings at {edges}; {evidence.window_note}"
    )
    basis = weakest(*(BASIS.get(part.way, "derived") for part in measured))
    low_j, high_j = (sum(getattr(d.energy, edge) for d in measured) for edge in ("low_j", "high_j"))
    return Reading(joules, "J", basis, low_j, high_j, note)


def _scope(devices: list[Device]) -> str:
    """The part of a machine that the sensors measure; "whole boards" by default."""
    scopes = dict.fromkeys(str(device.facts.get("scope", "")) for device in devices)
    return ", ".join(scope for scope in scopes if scope) or "whole boards"


def _names(devices: list[Device]) -> str:
    names = [device.name for device in devices]
    counts = {name: names.count(name) for name in names}
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())


def run_j(evidence: Evidence) -> Reading:
    """Energy of the window."""
    return _of_the_run(evidence, total(evidence, boundary(evidence)))


def _of_the_run(evidence: Evidence, reading: Reading) -> Reading:
    """Add to the note which GPUs are left out, and which count although their use is unknown."""
    unused, unknown = evidence.gpus("unused"), evidence.gpus("unknown")
    note = reading.note
    note += f"; left out, not used by this run: {gpu_names(unused)}" if unused else ""
    if not unknown:
        return replace(reading, note=note)
    note += f"; counted, but its use by this run is unknown: {gpu_names(unknown)}"
    return replace(reading, basis=weakest(reading.basis, "derived"), note=note)


def _of_kind(evidence: Evidence, kind: str) -> Reading:
    """Energy of all devices of a kind, such as "cpu"."""
    reading = total(evidence, sampled(evidence, kind))
    return _of_the_run(evidence, reading) if kind == "gpu" else reading


def device_j(evidence: Evidence, device: Device) -> Reading:
    """Energy of one device."""
    return total(evidence, [device])


def _scaled(
    reading: Reading, factor: float, unit: str, note: str = "", basis: Basis = "measured"
) -> Reading:
    """A reading times a factor; `basis`: that of the factor."""
    together = "; ".join(part for part in (note, reading.note) if part)
    basis = weakest(reading.basis, basis)
    return mapped(reading, lambda edge: edge * factor, unit=unit, basis=basis, note=together)


def mean_w(evidence: Evidence) -> Reading:
    """Energy of the window over its length."""
    return _over_time(evidence, run_j(evidence))


def _over_time(evidence: Evidence, energy: Reading) -> Reading:
    """Mean power. Uncertain cuts, in which the device may have trained, lower the lower bound."""
    window = evidence.span
    power = _scaled(energy, 1 / window.duration_s, "W")
    if power.low is None or not window.uncertain_s:
        return power
    low = power.low * window.duration_s / (window.duration_s + window.uncertain_s)
    return replace(power, low=low)


def device_mean_w(evidence: Evidence, device: Device) -> Reading:
    """Energy of one device over the length of the window."""
    return _over_time(evidence, device_j(evidence, device))


@cached_result
def device_peak_w(evidence: Evidence, device: Device) -> Reading:
    """The highest power reading of one device in the window.

    In a short window every reading may be below the mean power that the energy counter gives. Then
    the mean is returned if its interval allows it; else NotMeasurable is raised.
    """
    power = evidence.series("power_w").get(device.id)
    if power is None:
        why = why_absent(device, "power_w")
        raise NotMeasurable(
            f"{device.name} [{device.id}] gives no power reading{f': {why}' if why else ''}"
        )
    inside = evidence.span.contains(power.t_ns)
    if not inside.any():
        raise NotMeasurable(f"no power reading of {device.name} [{device.id}] in the window")
    highest_w, count = float(power.values[inside].max()), int(inside.sum())
    readings = number_of(count, "reading")
    note = f"highest of {readings}; shorter peaks are not seen"
    mean = or_none(device_mean_w, evidence, device)
    if mean is None:
        return Reading(highest_w, "W", "measured", note=note)
    if mean.value <= highest_w * (1 + _ROUNDING):
        return Reading(max(highest_w, mean.value), "W", "measured", note=note)
    values = f"{highest_w:.4g} W is the highest of {readings}, and {mean.value:.4g} W the mean"
    if mean.low is None or mean.low > highest_w:
        raise NotMeasurable(
            f"{device.name} [{device.id}]: {values}: the readings missed the peak, or a sensor is"
            " off"
        )
    note = f"the mean power, which a peak is no less than: {values}, within its interval"
    return Reading(mean.value, "W", weakest("derived", mean.basis), note=note)


def peak_w(evidence: Evidence) -> Reading:
    """The sum of the devices' highest power readings; an upper bound if there are several."""
    peaks = [device_peak_w(evidence, device) for device in boundary(evidence)]
    several = f"sum of {len(peaks)} devices' own peaks, an upper bound; " if len(peaks) > 1 else ""
    basis = weakest(*(peak.basis for peak in peaks))
    # The note of the device with the weakest basis.
    note = next(peak.note for peak in peaks if peak.basis == basis)
    return Reading(sum(peak.value for peak in peaks), "W", basis, note=several + note)


def wh(evidence: Evidence) -> Reading:
    """Energy of the window in watt-hours."""
    return _scaled(run_j(evidence), 1 / J_PER_WH, "Wh")


def joules_per_token(evidence: Evidence) -> Reading:
    """Energy over tokens of the same window."""
    need_all(evidence)
    need_devices(evidence)
    amounts, label, basis = tokens(evidence)
    energy, per_token = run_j(evidence), 1 / float(amounts.sum())
    return _scaled(energy, per_token, "J/token", label_of(evidence, label), basis)


def joules_per_10k_tokens(evidence: Evidence) -> Reading:
    """Energy per ten thousand tokens of the same window."""
    return _scaled(joules_per_token(evidence), 10_000, "J")


def joules_per_step(evidence: Evidence) -> Reading:
    """Energy over steps of the same window."""
    need_devices(evidence)
    energy, per_step = run_j(evidence), 1 / steps_of(evidence)
    return _scaled(energy, per_step, "J/step", basis=evidence.steps_basis)


_SENSOR = ("an energy counter or power readings",)
_DRAWS = ("gpu", "cpu", "dram", "module")
_energy = partial(Metric, unit="J", direction="lower", needs=_SENSOR, quantity="energy")
_per_token = partial(
    Metric, direction="lower", needs=(*_SENSOR, "steps with tokens"), quantity="energy per token"
)
_power = partial(Metric, unit="W", direction="neither")

METRICS = [
    _energy(
        "energy.run_j",
        "energy",
        formula="over the window's intervals, counter at the end - at the start, else integral of"
        " instant power; summed over accelerators, or over CPU packages and DRAM where there is no"
        " accelerator",
        compute=run_j,
        per_device=device_j,
        kinds=_DRAWS,
        column="energy_j",
        rule="energy",
        aliases=sft_play("energy_J", "J", "energy after the warm-up"),
        views="short card 75 in absent as energy expected;"
        " card 600 in energy expected; report 90 expected; citation 30;"
        " model card 170 in all steps; watch 50 as energy; so far 50; serve run 40;"
        " ledger notes 20 as energy_J",
    ),
    _per_token(
        "energy.joules_per_token",
        "energy per token",
        "J/token",
        formula="energy.run_j / tokens.total",
        compute=joules_per_token,
        noun="energy per token",
        column="joules_per_token",
        rule="joules_per_token",
        aliases=sft_play(
            "J_per_token",
            "J/token",
            "energy over tokens of the same window; the original divided by tokens of the whole"
            " run",
        ),
        views="short card 70 as J/token expected;"
        " card 610 in energy; report 100; citation 40; model card 120 expected;"
        " list 30 as J/token; watch 60 as J/token; so far 40; serve list 40 as J/token;"
        " serve live 50; serve run 50; serve ledger 20; console 60; compare 30 as J/token;"
        " bench matrix 40 in open as J/token; pareto 20",
    ),
    _per_token(
        "energy.joules_per_10k_tokens",
        "energy per 10k tokens",
        "J",
        formula="10 000 x energy.joules_per_token",
        compute=joules_per_10k_tokens,
        aliases=sft_play("E10k_J", "J", "energy of ten thousand tokens"),
    ),
    _per_token(
        "energy.joules_per_step",
        "energy per step",
        "J/step",
        formula="energy.run_j / steps.count",
        needs=(*_SENSOR, "steps"),
        compute=joules_per_step,
    ),
    _power(
        "energy.mean_w",
        "mean power",
        formula="energy.run_j / window",
        needs=_SENSOR,
        compute=mean_w,
        per_device=device_mean_w,
        kinds=_DRAWS,
        column="mean_w",
        aliases=(
            *efficientllm(
                "AEC",
                "W",
                "average energy consumption, which is a power: energy of the run's own devices over"
                " the window",
            ),
            *sft_play("avg_power_W", "W", "mean power after the warm-up"),
        ),
        views="card 640 in energy; report 120; model card 150; watch 40 as power; recent 30;"
        " serve live 40 as power; serve run 60; console 50; otel 30 as hw.power",
    ),
    _power(
        "energy.peak_w",
        "peak power",
        formula="highest power reading in the window",
        needs=("power readings",),
        compute=peak_w,
        per_device=device_peak_w,
        aliases=sft_play("peak_power_W", "W", "highest power reading"),
        views="card 650 in energy",
    ),
    _energy("energy.wh", "energy", unit="Wh", formula="energy.run_j / 3600", compute=wh),
    *(
        Metric(
            f"energy.{name}_j",
            f"{title} energy",
            "J",
            "lower",
            f"as energy.run_j, over {over}",
            (needs,),
            partial(_of_kind, kind=kind),
        )
        for name, title, over, needs, kind in (
            ("accelerator", "accelerator", "accelerators", "an accelerator", "gpu"),
            ("cpu", "CPU package", "CPU packages", "RAPL", "cpu"),
            ("dram", "DRAM", "DRAM domains", "RAPL", "dram"),
            (
                *("module", "module"),
                "modules (Grace) or the machine (Apple): with what is in them, so it is part of no"
                " sum",
                *("a meter of a module", "module"),
            ),
        )
    ),
]
METRICS += over_whole_run(METRICS, "energy.run_j", "energy.mean_w")
METRICS += over_whole_run(
    METRICS,
    "energy.joules_per_token",
    is_in_bench=True,
    views="short card 70 in whole run as J/token;"
    " card 620 in energy; report 110; model card 130 in the whole run; console 110;"
    " compare 40; bench matrix 80 as J/token, whole run",
)
