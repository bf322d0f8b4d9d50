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

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError, NotMeasurable
from ergmeter.importers.nvidia_smi import CsvLog, key_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

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
        """How far above its end it had been. Raises NotMeasurable where no peak is kept."""
        if self.peaked_delta_bytes is None:
            raise NotMeasurable(f"the Trainer's tracker was told no peak of the stage {self.name}")
        return self.peaked_delta_bytes

    @property
    def peak_bytes(self) -> float:
        """The most that was allocated during the stage."""
        return self.total_bytes + self.peaked_bytes


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """What transformers' memory tracker said of rank 0, and the sums that were made of it."""

    before_bytes: float
    stages: tuple[Stage, ...]

    @property
    def _of_fms(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.name in FMS_STAGES)

    def stage(self, name: str) -> Stage:
        """One stage by its method's name. Raises NotMeasurable if nothing was told of it."""
        found = next((stage for stage in self.stages if stage.name == name), None)
        if found is None:
            why = "it was not called, or only within train(), whose memory it is then"
            raise NotMeasurable(f"the Trainer told no memory of {name}: {why}")
        return found

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
        said = json.loads((output_dir / SAVED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    items = said.items() if isinstance(said, dict) else ()
    found = {name: _number(value) for name, value in items if _IS_MEMORY.search(name)}
    return {name: value for name, value in found.items() if value is not None}


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
            DeviceLog(one, columns[one].get("name", [""])[0], values[0], max(values), len(values))
            for one, values in used.items()
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
