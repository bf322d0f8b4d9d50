"""What of a cell's memory goes into its row: the Trainer's stages and sums, `nvidia-smi`'s log.

The trap: two sources of one column, of which the later overwrites the better. A log of `nvidia-smi`
began before the cell, so that its first reading is what was there before; a probe inside the cell
may begin when the cell holds something already. So the log goes first, and where it was asked for
and is not to be had, NVML's figures say that they stand in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from ergmeter.bench.execute import nvidia_smi_logger
from ergmeter.bench.results.memory import STAGES, TrainerMemory, smi_log, trainer_memory
from ergmeter.bench.results.schema import COLUMNS
from ergmeter.errors import FormatError, NotMeasurable

NVML, SMI = "nvml", "nvidia-smi"


def of_trainer(metrics: Mapping[str, object], missing: dict[str, str]) -> dict[str, float]:
    """The Trainer's memory: each stage, and the sums that were made of them."""
    try:
        found = trainer_memory(metrics)
    except NotMeasurable as error:
        missing |= {name: str(error) for name in COLUMNS if name.startswith("memory_hf_")}
        return {}
    row: dict[str, float] = {}
    for column, value in _ASKED.items():
        try:
            row[column] = value(found)
        except NotMeasurable as error:
            missing[column] = str(error)
    return row


def _of_stage(name: str, what: str) -> Callable[[TrainerMemory], float]:
    def value(found: TrainerMemory) -> float:
        stage = found.stage(name)
        return stage.total_bytes if what == "alloc" else stage.peak_bytes

    return value


_ASKED: dict[str, Callable[[TrainerMemory], float]] = {
    **{
        f"memory_hf_{name}_bytes": attrgetter(f"{name}_bytes")
        for name in ("before", "alloc", "peak", "peak_prose", "discrepancy", "seed")
    },
    **{
        f"memory_hf_{name}_{what}_bytes": _of_stage(name, what)
        for name in STAGES.values()
        for what in ("alloc", "peak")
    },
}


def of_devices(taken: Mapping[str, tuple[float, float]], source: str) -> dict[str, Any]:
    """The columns of what each device held: by its id, the first reading and the highest."""
    above = [most - first for first, most in taken.values()]
    return {
        "memory_nvidia_ids": " ".join(taken),
        "memory_nvidia_devices_bytes": above,
        "memory_nvidia_first_bytes": [first for first, _ in taken.values()],
        "memory_nvidia_mean_bytes": sum(above) / len(above),
        "memory_nvidia_peak_bytes": max(above),
        "memory_nvidia_from": source,
    }


def of_smi(cell: Path, row: Mapping[str, Any], missing: dict[str, str]) -> dict[str, Any]:
    """The columns of the cell's log, over those that the row has of NVML."""
    try:
        problem = nvidia_smi_logger.problem(cell)
        if problem:
            raise NotMeasurable(problem)
        logs = nvidia_smi_logger.logs(cell)
        nodes = row.get("nodes") or 1
        if logs and len(logs) != nodes:
            raise NotMeasurable(
                f"{len(logs)} of {nodes} nodes left a log of {nvidia_smi_logger.PROGRAM},"
                " and the peak may be another's"
            )
        devices = {
            f"{node}{one.device}": (one.first_bytes, one.peak_bytes)
            for node, path in logs.items()
            for one in smi_log(path).devices
        }
        if devices:
            return of_devices(devices, SMI)
        why = missing.get("memory_device_peak_bytes", "no device's memory was read")
    except (NotMeasurable, FormatError) as error:
        why = str(error)
        if row.get("memory_nvidia_from"):
            return {"memory_nvidia_note": f"read by NVML in the cell's run, not logged: {why}"}
    missing |= {name: why for name in COLUMNS if name.startswith("memory_nvidia_")}
    return {}
