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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.bench.execute import nvidia_smi_logger
from ergmeter.bench.tables import COLUMNS, MEMORY
from ergmeter.errors import FormatError, NotMeasurable
from ergmeter.importers.nvidia_smi import CsvLog, key_of

if TYPE_CHECKING:
    from collections.abc import Iterator

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
_STAGE_ORDER = ("init", "train", "evaluate", "predict")


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
    for stage in _STAGE_ORDER:
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
# Keys of transformers' TrainerMemoryTracker, and the names of the methods that they stand for.
STAGES = {"init": "init", "train": "train", "eval": "evaluate", "test": "predict"}
FMS_STAGES = ("init", "train")
_BEFORE = "before_init_mem_gpu"
SAVED = "all_results.json"
_IS_MEMORY = re.compile(r"_mem_[cg]pu")
_USED = "memory.used"


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage of the Trainer left allocated, and how far above that it had been.

    `peaked_delta_bytes` is None where the device keeps no peak, as Apple's does not.
    """

    name: str
    alloc_delta_bytes: float
    peaked_delta_bytes: float | None
    total_bytes: float  # allocated when it ended

    @property
    def peaked_bytes(self) -> float:
        """Peak above the end of the stage. Raises NotMeasurable without a peak."""
        if self.peaked_delta_bytes is None:
            raise NotMeasurable(f"the Trainer's tracker was told no peak of the stage {self.name}")
        return self.peaked_delta_bytes

    @property
    def peak_bytes(self) -> float:
        """The most that was allocated during the stage."""
        return self.total_bytes + self.peaked_bytes


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """The report of transformers' memory tracker on rank 0, and its sums."""

    before_bytes: float
    stages: tuple[Stage, ...]

    @property
    def _of_fms(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.name in FMS_STAGES)

    def stage(self, name: str) -> Stage:
        """One stage by its method's name. Raises NotMeasurable if it was not reported."""
        match = next((stage for stage in self.stages if stage.name == name), None)
        if match is None:
            why = "it was not called, or only within train(), whose memory it is then"
            raise NotMeasurable(f"the Trainer told no memory of {name}: {why}")
        return match

    @property
    def alloc_bytes(self) -> float:
        """FMS's program: the most that was allocated at the end of a stage."""
        return max(self.before_bytes, *(stage.total_bytes for stage in self._of_fms))

    @property
    def peak_bytes(self) -> float:
        """FMS's program: the highest of the stages' peaks."""
        return max(self.before_bytes, *(stage.peak_bytes for stage in self._of_fms))

    @property
    def peak_prose_bytes(self) -> float:
        """FMS's guide: all changes and all temporary peaks, added up."""
        return self.before_bytes + sum(
            stage.alloc_delta_bytes + stage.peaked_bytes for stage in self._of_fms
        )

    @property
    def seed_bytes(self) -> float:
        """FMS's first program (May 2024), as `alloc_gpu_memory_in_bytes`: the guide's sum."""
        return self.peak_prose_bytes

    @property
    def peak_all_stages_bytes(self) -> float:
        """The same as `peak_bytes` with evaluation and prediction, where they were called."""
        return max(self.before_bytes, *(stage.peak_bytes for stage in self.stages))

    @property
    def discrepancy_bytes(self) -> float:
        """By how much the guide's sum is larger than the program's."""
        return self.peak_prose_bytes - self.peak_bytes


def trainer_memory(metrics: Mapping[str, object]) -> TrainerMemory:
    """The sums over what a Trainer logged with `skip_memory_metrics=False`.

    Raises NotMeasurable where it did not, or did so without a GPU.
    """
    before = _number(metrics.get(_BEFORE))
    if before is None:
        if "before_init_mem_cpu" in metrics:
            raise NotMeasurable("the Trainer's memory tracker saw no GPU")
        raise NotMeasurable(
            "the Trainer did not log memory: --memory huggingface, or --skip_memory_metrics False"
        )
    stages: list[Stage] = []
    total = before
    for key, name in STAGES.items():
        delta = _number(metrics.get(f"{key}_mem_gpu_alloc_delta"))
        if delta is None:
            continue
        total += delta
        peaked = _number(metrics.get(f"{key}_mem_gpu_peaked_delta"))
        stages.append(Stage(name, delta, peaked, total))
    if not any(stage.name in FMS_STAGES for stage in stages):
        raise NotMeasurable("the Trainer logged no memory of its init or train stage")
    return TrainerMemory(before, tuple(stages))


def saved_by_trainer(output_dir: Path) -> dict[str, float]:
    """The memory in all_results.json, where `Trainer.save_metrics` puts what each stage returned.

    What evaluate and predict took is nowhere else: they print before their tracker is read.
    """
    try:
        saved = json.loads((output_dir / SAVED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    items = saved.items() if isinstance(saved, dict) else ()
    figures = {name: _number(value) for name, value in items if _IS_MEMORY.search(name)}
    return {name: value for name, value in figures.items() if value is not None}


@dataclass(frozen=True, slots=True)
class DeviceLog:
    """One device in a log of `nvidia-smi`: its readings of memory.used."""

    device: str
    name: str
    first_bytes: float
    peak_bytes: float
    readings: int

    @property
    def taken_bytes(self) -> float:
        """The peak above the first reading, which is what was there before."""
        return self.peak_bytes - self.first_bytes


@dataclass(frozen=True, slots=True)
class SmiLog:
    """A log of `nvidia-smi --query-gpu`. `columns`: keyword to values, by device, as text."""

    devices: tuple[DeviceLog, ...]
    columns: Mapping[str, Mapping[str, tuple[str, ...]]]
    skipped: int  # lines that are no readings: the last of a killed process, messages

    @property
    def mean_bytes(self) -> float:
        """FMS's figure: what was taken, averaged over the devices."""
        return sum(device.taken_bytes for device in self.devices) / len(self.devices)

    @property
    def largest_bytes(self) -> float:
        """What was taken on the device where it was most."""
        return max(device.taken_bytes for device in self.devices)


def smi_log(path: Path) -> SmiLog:
    """Read what `nvidia-smi --query-gpu <any keywords> --format csv` wrote, at any interval."""
    log = CsvLog()
    columns: dict[str, dict[str, list[str]]] = {}
    used: dict[str, list[float]] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for row in log.rows(file):
            key = key_of(row.cells)
            device = row.cells[key] if key else "0"
            for name, cell in row.cells.items():
                columns.setdefault(device, {}).setdefault(name, []).append(cell)
            value = row.figure(_USED)
            if value is not None:
                used.setdefault(device, []).append(value)
    if _USED not in log.names:
        raise FormatError(
            f"{path}: no column {_USED} in its first line ({log.first or 'empty'}); log with"
            " --query-gpu timestamp,name,index,memory.used --format csv"
        )
    if not used:
        raise NotMeasurable(f"{path.name} holds no reading of {_USED}")
    return SmiLog(
        tuple(
            DeviceLog(
                device, columns[device].get("name", [""])[0], values[0], max(values), len(values)
            )
            for device, values in used.items()
        ),
        {k: {n: tuple(v) for n, v in c.items()} for k, c in columns.items()},
        log.skipped,
    )


def _number(value: object) -> float | None:
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(str(value))
    except ValueError:
        return None


NVML, SMI = "nvml", "nvidia-smi"


def of_trainer(metrics: Mapping[str, object], missing: dict[str, str]) -> dict[str, float]:
    """The Trainer's memory: each stage, and the sums that were made of them."""
    try:
        memory = trainer_memory(metrics)
    except NotMeasurable as error:
        missing |= {name: str(error) for name in COLUMNS if name.startswith("memory_hf_")}
        return {}
    row: dict[str, float] = {}
    for column, value in _ASKED.items():
        try:
            row[column] = value(memory)
        except NotMeasurable as error:
            missing[column] = str(error)
    return row


def _of_stage(name: str, what: str) -> Callable[[TrainerMemory], float]:
    def value(memory: TrainerMemory) -> float:
        stage = memory.stage(name)
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
            f"{node}{device.device}": (device.first_bytes, device.peak_bytes)
            for node, path in logs.items()
            for device in smi_log(path).devices
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
