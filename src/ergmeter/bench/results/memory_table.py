"""Which figures of memory does each cell have, and by whom? Lines for a page, as rows come.

The trap: one figure a cell, of whichever kind there was. Two cells are then held against each other
of which one says what tensors held on rank 0 and the other what all devices held on the mean. Here
each figure is a line that says whose it is; what is absent is a line with its reason.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ergmeter.bench.results.schema import MEMORY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa

COLUMNS = ("index", "id", "group", "scenario", "repeat", "num_gpus", "status", *MEMORY, "missing")
_STAGES = ("init", "train", "evaluate", "predict")


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One line: who says it, of what, how many bytes (None where it is absent), and what else."""

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
        for row in batch.select(COLUMNS).to_pylist():
            if row["status"] in ("pending", "running", "skipped"):
                continue
            if self._most is not None and len(self.cells) >= self._most:
                self.more += 1
                continue
            name = f"{row['index']} {row['scenario'] or ''}".strip()
            self.cells.append((name, list(figures(row))))


def figures(row: Mapping[str, Any]) -> Iterator[MemoryLine]:
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
        said = "" if before is None else f"peak above the {_exact(before)} B of before"
        yield MemoryLine(source, of, taken, said)
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
    for stage in _STAGES:
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
