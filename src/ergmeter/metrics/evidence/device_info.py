"""What did a run run on? Names, driver, limit and heat of its devices, for whoever compares runs.

The trap: two machines called "cpu". A run without a GPU names its processor, as the probes do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.metrics.evidence.gpu_use import gpu_use

if TYPE_CHECKING:
    from ergmeter.runlog.reader import Run


def board_facts(run: Run) -> dict[str, str | float]:
    """By the ledger's names; what is not known, or differs between the GPUs, is left out."""
    gpus = [run.devices[id_] for id_, use in gpu_use(run).items() if use.counts]
    found: dict[str, str | float] = {}
    names = sorted({one.name for one in gpus} or _processors(run))
    if names:
        found["device"] = " + ".join(names)
    drivers = sorted({str(driver) for one in gpus if (driver := one.facts.get("driver"))})
    if len(drivers) == 1:
        found["driver"] = drivers[0]
    limits = {float(limit) for one in gpus if (limit := one.facts.get("power_limit_w"))}
    if len(limits) == 1:
        found["power_limit_W"] = limits.pop()
    return {**found, **_temperatures(run, {one.id for one in gpus})}


def _processors(run: Run) -> set[str]:
    """By the node's own word, cores included: "AMD EPYC, 2 cores"."""
    nodes = [one.facts for one in run.devices.values() if one.kind == "node"]
    named = {f"{one['cpu_model']}, {one['cores']} cores" for one in nodes if one.get("cpu_model")}
    return named or {one.name for one in run.devices.values() if one.kind == "cpu"}


def _temperatures(run: Run, gpus: set[str]) -> dict[str, float]:
    """Of the hottest GPU, at the first and the last reading."""
    series = run.series("temperature_c")
    known = [one.values for device, one in series.items() if device in gpus and len(one.values)]
    if not known:
        return {}
    return {
        "temperature_start_C": max(float(values[0]) for values in known),
        "temperature_end_C": max(float(values[-1]) for values in known),
    }
