"""How much GPU memory did a cell take: by the Trainer's own sums, and by `nvidia-smi`?

The trap: two figures of one name. The FMS guide says that a training takes what was there before,
plus each stage's change, plus *each* stage's temporary peak; its program lets a peak count only in
the stage that had it. In the guide's example both come to the same number, because nothing peaked
during `init`; a quantised model that is unpacked there tells them apart. Both are computed here.

The other trap: the first reading of `nvidia-smi` taken as "what was there before". It is, if the
log began before the program. A mean over devices hides the one that runs out of memory; all are
kept.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError, NotMeasurable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

BYTES_PER_MIB = 2**20
# Keys of transformers' TrainerMemoryTracker: evaluate() is "eval" there and predict() "test".
STAGES = ("init", "train", "eval", "test")
FMS_STAGES = ("init", "train")
_BEFORE = "before_init_mem_gpu"
_UNITS = {"MiB": BYTES_PER_MIB, "KiB": 2**10, "GiB": 2**30, "B": 1}


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage of the Trainer left allocated, and how far above that it had been."""

    name: str
    alloc_delta_bytes: float
    peaked_delta_bytes: float
    total_bytes: float  # allocated when it ended

    @property
    def peak_bytes(self) -> float:
        """The most that was allocated during the stage."""
        return self.total_bytes + self.peaked_delta_bytes


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """What transformers' memory tracker said of rank 0, and the sums that were made of it."""

    before_bytes: float
    stages: tuple[Stage, ...]

    @property
    def _of_fms(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.name in FMS_STAGES)

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
            stage.alloc_delta_bytes + stage.peaked_delta_bytes for stage in self._of_fms
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
        raise NotMeasurable("the Trainer did not log memory: pass --skip_memory_metrics False")
    stages: list[Stage] = []
    total = before
    for name in STAGES:
        delta = _number(metrics.get(f"{name}_mem_gpu_alloc_delta"))
        if delta is None:
            continue
        total += delta
        peaked = _number(metrics.get(f"{name}_mem_gpu_peaked_delta")) or 0.0
        stages.append(Stage(name, delta, peaked, total))
    if not any(stage.name in FMS_STAGES for stage in stages):
        raise NotMeasurable("the Trainer logged no memory of its init or train stage")
    return TrainerMemory(before, tuple(stages))


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
        return sum(one.taken_bytes for one in self.devices) / len(self.devices)

    @property
    def largest_bytes(self) -> float:
        """What was taken on the device where it was most."""
        return max(one.taken_bytes for one in self.devices)


def smi_log(path: Path) -> SmiLog:
    """Read what `nvidia-smi --query-gpu <any keywords> --format csv` wrote, at any interval."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        rows = csv.reader(file, skipinitialspace=True)
        head = [name.strip() for name in next(rows, [])]
        names = [name.partition(" [")[0] for name in head]
        key = next((name for name in ("uuid", "index", "pci.bus_id") if name in names), None)
        if "memory.used" not in names:
            raise FormatError(
                f"{path}: no column memory.used in its first line ({', '.join(head) or 'empty'});"
                " log with --query-gpu timestamp,name,index,memory.used --format csv"
            )
        units = {name: _unit(full) for name, full in zip(names, head, strict=True)}
        found, skipped = _by_device(rows, names, key)
    devices = tuple(
        log
        for device, columns in found.items()
        if (log := _device_log(device, columns, units["memory.used"])) is not None
    )
    if not devices:
        raise NotMeasurable(f"{path.name} holds no reading of memory.used")
    return SmiLog(
        devices, {k: {n: tuple(v) for n, v in c.items()} for k, c in found.items()}, skipped
    )


def _by_device(
    rows: Iterable[list[str]], names: list[str], key: str | None
) -> tuple[dict[str, dict[str, list[str]]], int]:
    found: dict[str, dict[str, list[str]]] = {}
    skipped = 0
    for row in rows:
        cells = [cell.strip() for cell in row]
        if len(cells) != len(names) or cells[0].partition(" [")[0] == names[0]:
            skipped += 1
            continue
        by_name = dict(zip(names, cells, strict=True))
        columns = found.setdefault(by_name[key] if key else "0", {name: [] for name in names})
        for name, cell in by_name.items():
            columns[name].append(cell)
    return found, skipped


def _device_log(device: str, columns: Mapping[str, list[str]], scale: int) -> DeviceLog | None:
    values = [
        value for text in columns["memory.used"] if (value := _bytes(text, scale)) is not None
    ]
    if not values:
        return None
    name = columns["name"][0] if columns.get("name") else ""
    return DeviceLog(device, name, values[0], max(values), len(values))


def _unit(head: str) -> int:
    found = re.search(r"\[(\w+)\]", head)
    return _UNITS.get(found[1], BYTES_PER_MIB) if found else BYTES_PER_MIB


def _bytes(text: str, scale: int) -> float | None:
    """A cell such as `4 MiB`, or `4` where units were switched off. `[N/A]` is none."""
    found = re.fullmatch(r"([\d.]+)(?:\s*(\w+))?", text)
    if not found:
        return None
    value = _number(found[1])
    return None if value is None else value * _UNITS.get(found[2] or "", scale)


def _number(value: object) -> float | None:
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(str(value))
    except ValueError:
        return None
