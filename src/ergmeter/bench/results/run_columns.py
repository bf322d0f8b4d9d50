"""What does a cell's own run say of it? The catalogue's figures that a row of results holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ergmeter.bench.results.memory_columns import NVML, of_devices
from ergmeter.errors import ErgmeterError, NotMeasurable
from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.evidence.gpu_use import gpu_use
from ergmeter.metrics.evidence.ranks import need_all
from ergmeter.metrics.evidence.samples import ACCELERATORS
from ergmeter.metrics.summarize import evidence_of
from ergmeter.runlog.reader import Run

if TYPE_CHECKING:
    from pathlib import Path

    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Reading

FROM_RUN, TRAINER = "run", "trainer"
_RATES = {
    "real_tokens_per_s": "throughput.real_tokens_per_s",
    "computed_tokens_per_s": "throughput.computed_tokens_per_s",
    "padding_frac": "tokens.padding_frac",
    "samples_per_s": "throughput.samples_per_s",
    "steps_per_s": "throughput.steps_per_s",
    "step_median_s": "time.step_median_s",
}
_TIMED = {"timed_steps": "steps.count", "timed_s": "time.window_s"}
# A row holds these of all ranks. A Meter on one of them tells that rank's.
_OF_ALL = {
    "real_tokens_per_s": "tokens",
    "computed_tokens_per_s": "tokens",
    "padding_frac": "tokens",
    "samples_per_s": "samples",
}
_FIGURES = {
    "loss": "training.loss",
    "runtime_s": "time.run_s",
    "mfu_frac": "utilization.mfu_frac",
    "whole_run_tokens_per_s": "throughput.whole_run_tokens_per_s",
    "whole_run_mfu_frac": "utilization.whole_run_mfu_frac",
    "whole_run_joules_per_token": "energy.whole_run_joules_per_token",
    "joules_per_token": "energy.joules_per_token",
    "energy_j": "energy.run_j",
    "mean_w": "energy.mean_w",
    "memory_device_peak_bytes": "memory.device_peak_bytes",
    "memory_allocator_peak_bytes": "memory.allocator_peak_bytes",
    "memory_process_peak_bytes": "memory.process_peak_bytes",
}
_EACH = ("memory_allocator_devices_bytes", "memory_allocator_ids")


def measured(path: Path, missing: dict[str, str], *, num_gpus: int | None) -> dict[str, Any]:
    """The columns that the run at this path fills; reasons for the others go into `missing`."""
    columns = {**_RATES, **_TIMED, **_FIGURES}
    try:
        evidence = evidence_of(Run.open(path))
    except ErgmeterError as error:
        why = str(error) if path.exists() else "the cell left no run"
        missing |= dict.fromkeys((*columns, *_EACH), why)
        return {}
    row = {name: _reading(evidence, key, name, missing) for name, key in columns.items()}
    read = {name: one for name, one in row.items() if one is not None}
    found: dict[str, Any] = {name: one.value for name, one in read.items()}
    impossible = {name: one.impossible for name, one in read.items() if one.impossible}
    if impossible:
        found["impossible"] = json.dumps(impossible, sort_keys=True)
    if any(name in found for name in _RATES):
        found["rates_from"] = FROM_RUN
        found["window"] = evidence.window_kind
    for kind in ("real", "computed"):
        whole = found.get(f"{kind}_tokens_per_s")
        if whole is not None and num_gpus and evidence.devices("gpu"):
            found[f"{kind}_tokens_per_s_per_device"] = whole / num_gpus
        elif whole is not None:
            missing[f"{kind}_tokens_per_s_per_device"] = _why_not_each(evidence)
    run = evidence.run
    return found | _run_facts(run) | _nvml(run) | _allocators(run, missing)


def _why_not_each(evidence: Evidence) -> str:
    why = evidence.why_no_device("accelerator", *ACCELERATORS)
    return why if not evidence.devices("gpu") else "how many devices it ran on is not told"


def _reading(evidence: Evidence, key: str, name: str, missing: dict[str, str]) -> Reading | None:
    try:
        if name in _OF_ALL:
            need_all(evidence, _OF_ALL[name])
        return catalogue()[key].reading(evidence)
    except NotMeasurable as error:
        missing[name] = str(error)
    return None


def _run_facts(run: Run) -> dict[str, Any]:
    """What the program said of itself: its losses are those of all the training."""
    named = {"loss": "train_loss", "eval_loss": "eval_loss"}
    found = {name: run.workload.get(key) for name, key in named.items()}
    gpus = [run.devices[id_].name for id_, use in gpu_use(run).items() if use.counts]
    said: dict[str, Any] = {n: float(v) for n, v in found.items() if isinstance(v, int | float)}
    return said | ({"device": ", ".join(sorted(set(gpus)))} if gpus else {})


def _nvml(run: Run) -> dict[str, Any]:
    """What each device held when it was first looked at, and at most."""
    taken = {
        device: (float(one.values[0]), float(one.values.max()))
        for device, one in sorted(run.series("memory_bytes").items())
        if len(one.values) and device in run.devices and run.devices[device].kind == "gpu"
    }
    return of_devices(taken, NVML) if taken else {}


def _allocators(run: Run, missing: dict[str, str]) -> dict[str, Any]:
    """The allocator's own peak, of each rank on each device that it put something on."""
    peaks = run.series("allocated_peak_bytes")
    found = {
        (writer.header.get("rank") or 0, ":".join(device.id.split(":")[-2:])): device.id
        for writer in run.writers
        for device in writer.devices
        if device.kind == "allocator" and device.id in peaks
    }
    if not found:
        why = missing.get("memory_allocator_peak_bytes", "no allocator was read")
        missing |= dict.fromkeys(_EACH, why)
        return {}
    return {
        "memory_allocator_ids": " ".join(f"rank{rank}/{where}" for rank, where in sorted(found)),
        "memory_allocator_devices_bytes": [
            float(peaks[device].values.max()) for _, device in sorted(found.items())
        ],
    }
