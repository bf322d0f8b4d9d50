"""GPU memory of a cell: by the Trainer's own sums, and by `nvidia-smi`; as columns and as a table.

The FMS guide adds each stage's temporary peak to the total; its program counts a peak only in the
stage that had it. They differ if a model peaks in `init`; both are computed here. The first reading
of `nvidia-smi` is the memory in use before, if the log began before the program. All devices are
stored, since a mean hides the one that runs out.

The log of `nvidia-smi` goes before NVML's probe, which may begin when the cell already holds
memory. In the table each figure names its source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.atomic_write import read_json
from ergmeter.bench.execute import nvidia_smi_logger
from ergmeter.bench.tables import COLUMNS, MEMORY, number
from ergmeter.errors import FormatError, NotMeasurable
from ergmeter.importers.nvidia_smi import CsvLog, key_of

if TYPE_CHECKING:
    import pyarrow as pa

TABLE_COLUMNS = (
    "index",
    "id",
    "group",
    "scenario",
    "repeat",
    "num_gpus",
    "status",
    *MEMORY,
    "missing",
)


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One line: source, subject, bytes (None if absent) and a note."""

    by: str
    of: str
    value_bytes: float | None
    note: str = ""


class MemoryTable:
    """The figures of the first `most` cells, and how many cells there are beside them."""

    def __init__(self, *, most: int | None = None) -> None:
        self._most = most
        self.cells: list[tuple[str, list[MemoryLine]]] = []
        self.more = 0

    def add(self, batch: pa.Table) -> None:
        """Some rows more. Cells that have not run have no figures, and no reason for that."""
        for row in batch.select(TABLE_COLUMNS).to_pylist():
            if row["status"] in ("pending", "running", "skipped"):
                continue
            if self._most is not None and len(self.cells) >= self._most:
                self.more += 1
                continue
            name = f"{row['index']} {row['scenario'] or ''}".strip()
            self.cells.append((name, list(memory_lines(row))))


def memory_lines(row: Mapping[str, Any]) -> Iterator[MemoryLine]:
    """All figures of a cell's row: the devices', the Trainer's, the allocator's."""
    missing = json.loads(row["missing"] or "{}")
    yield from _nvidia(row, missing)
    yield from _trainer(row, missing)
    peaks = row["memory_allocator_devices_bytes"]
    if peaks:
        ids = (row["memory_allocator_ids"] or "").split()
        for of, peak in zip(ids, peaks, strict=True):
            yield MemoryLine("torch allocator", of, peak, "peak in tensors, by our own probe")
    else:
        yield _absent("torch allocator", "memory_allocator_peak_bytes", missing)


def _nvidia(row: Mapping[str, Any], missing: Mapping[str, str]) -> Iterator[MemoryLine]:
    mean, source = row["memory_nvidia_mean_bytes"], row["memory_nvidia_from"] or "nvidia"
    if mean is None:
        yield _absent(source, "memory_nvidia_mean_bytes", missing)
        return
    each = row["memory_nvidia_devices_bytes"] or ()
    ids = (row["memory_nvidia_ids"] or "").split() or [f"device {n}" for n, _ in enumerate(each)]
    first = row["memory_nvidia_first_bytes"] or [None] * len(each)
    for of, taken, before in zip(ids, each, first, strict=True):
        text = "" if before is None else f"peak above the {_exact(before)} B of before"
        yield MemoryLine(source, of, taken, text)
    yield MemoryLine(source, "mean", mean, row["memory_nvidia_note"] or "FMS's figure")


def _trainer(row: Mapping[str, Any], missing: Mapping[str, str]) -> Iterator[MemoryLine]:
    by = "huggingface"
    sums = {
        "memory_hf_alloc_bytes": ("allocated", "FMS's program: most at the end of init or train"),
        "memory_hf_peak_bytes": ("peak", "FMS's program: most within init or train"),
        "memory_hf_peak_prose_bytes": ("peak, summed", "FMS's guide: all changes and peaks"),
    }
    if all(row[column] is None for column in sums):
        yield _absent(by, "memory_hf_peak_bytes", missing)
        return
    if row["memory_hf_before_bytes"] is not None:
        yield MemoryLine(by, "before init", row["memory_hf_before_bytes"])
    for stage in STAGES.values():
        left, peak = (row[f"memory_hf_{stage}_{what}_bytes"] for what in ("alloc", "peak"))
        if left is not None:
            yield MemoryLine(by, f"after {stage}", left)
        if peak is not None:
            yield MemoryLine(by, f"peak in {stage}", peak)
    for column, (of, note) in sums.items():
        if row[column] is not None:
            yield MemoryLine(by, of, row[column], note)
        elif column in missing:
            yield MemoryLine(by, of, None, missing[column])
    more = row["memory_hf_discrepancy_bytes"]
    if more is not None:
        yield MemoryLine(by, "guide less program", more, "the same" if not more else _DIFFER)


_DIFFER = "the guide adds peaks of several stages, which were not there at once"


def _absent(by: str, column: str, missing: Mapping[str, str]) -> MemoryLine:
    return MemoryLine(by, "-", None, missing.get(column, "not told"))


def _exact(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ")


BYTES_PER_MIB = 2**20
NVML, SMI = "nvml", "nvidia-smi"
# Keys of transformers' TrainerMemoryTracker, and the names of the methods that they stand for.
STAGES = {"init": "init", "train": "train", "eval": "evaluate", "test": "predict"}
FMS_STAGES = ("init", "train")
SAVED = "all_results.json"
_IS_MEMORY = re.compile(r"_mem_[cg]pu")
_USED = "memory.used"


def saved_by_trainer(output_dir: Path) -> dict[str, float]:
    """The memory in all_results.json, where `Trainer.save_metrics` puts what each stage returned.

    What evaluate and predict took is nowhere else: they print before their tracker is read.
    """
    saved = read_json(output_dir / SAVED).items()
    figures = {name: number(value) for name, value in saved if _IS_MEMORY.search(name)}
    return {name: value for name, value in figures.items() if value is not None}


def of_trainer(metrics: Mapping[str, object], missing: dict[str, str]) -> dict[str, float]:
    """The columns of what a Trainer logged with `skip_memory_metrics=False`, on rank 0.

    Of each stage what was allocated when it ended, and the most during it; then FMS's sums. Apple's
    devices keep no peak.
    """
    before = number(metrics.get("before_init_mem_gpu"))
    deltas = {
        stage: delta
        for key, stage in STAGES.items()
        if (delta := number(metrics.get(f"{key}_mem_gpu_alloc_delta"))) is not None
    }
    fms = [stage for stage in FMS_STAGES if stage in deltas]
    if before is None or not fms:
        why = _why_no_trainer_memory(metrics)
        missing |= {name: why for name in COLUMNS if name.startswith("memory_hf_")}
        return {}
    row = {"memory_hf_before_bytes": before}
    total = before
    peaked: dict[str, float] = {}  # above the end of the stage
    for key, stage in STAGES.items():
        end, peak = (f"memory_hf_{stage}_{what}_bytes" for what in ("alloc", "peak"))
        if stage not in deltas:
            why = "it was not called, or only within train(), whose memory it is then"
            missing |= dict.fromkeys((end, peak), f"the Trainer told no memory of {stage}: {why}")
            continue
        total += deltas[stage]
        row[end] = total
        above = number(metrics.get(f"{key}_mem_gpu_peaked_delta"))
        if above is None:
            missing[peak] = f"the Trainer's tracker was told no peak of the stage {stage}"
        else:
            row[peak] = total + above
            peaked[stage] = above
    row["memory_hf_alloc_bytes"] = max(before, *(row[f"memory_hf_{s}_alloc_bytes"] for s in fms))
    no_peak = next((stage for stage in fms if stage not in peaked), None)
    if no_peak is not None:
        names = (
            f"memory_hf_{name}_bytes" for name in ("peak", "peak_prose", "discrepancy", "seed")
        )
        missing |= dict.fromkeys(names, missing[f"memory_hf_{no_peak}_peak_bytes"])
        return row
    highest = max(before, *(row[f"memory_hf_{stage}_peak_bytes"] for stage in fms))
    prose = before + sum(deltas[stage] + peaked[stage] for stage in fms)
    return row | {
        "memory_hf_peak_bytes": highest,
        "memory_hf_peak_prose_bytes": prose,
        "memory_hf_discrepancy_bytes": prose - highest,
        "memory_hf_seed_bytes": prose,  # FMS's first program (May 2024) has the guide's sum
    }


def _why_no_trainer_memory(metrics: Mapping[str, object]) -> str:
    if "before_init_mem_gpu" in metrics:
        return "the Trainer logged no memory of its init or train stage"
    if "before_init_mem_cpu" in metrics:
        return "the Trainer's memory tracker saw no GPU"
    return "the Trainer did not log memory: --memory huggingface, or --skip_memory_metrics False"


def smi_peaks(path: Path) -> dict[str, tuple[float, float]]:
    """The first reading of memory.used and the highest, by device.

    The file is what `nvidia-smi --query-gpu <any keywords> --format csv` wrote, at any interval.
    """
    log = CsvLog()
    used: dict[str, tuple[float, float]] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for row in log.rows(file):
            key, value = key_of(row.cells), row.figure(_USED)
            if value is not None:
                device = row.cells[key] if key else "0"
                first, highest = used.get(device, (value, value))
                used[device] = first, max(highest, value)
    if _USED not in log.names:
        raise FormatError(
            f"{path}: no column {_USED} in its first line ({log.first or 'empty'}); log with"
            " --query-gpu timestamp,name,index,memory.used --format csv"
        )
    if not used:
        raise NotMeasurable(f"{path.name} holds no reading of {_USED}")
    return used


def of_devices(taken: Mapping[str, tuple[float, float]], source: str) -> dict[str, Any]:
    """The columns of memory by device: the first reading and the highest."""
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
            f"{node}{device}": readings
            for node, path in logs.items()
            for device, readings in smi_peaks(path).items()
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
