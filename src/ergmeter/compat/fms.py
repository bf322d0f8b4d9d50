"""Results in the form that FMS's programs and notebooks read: benchmarks.csv, raw_summary.csv.

FMS's readers expect that a setting with one value in all rows is left out, unless it is on a list.
The columns are known after the last row only, so rows wait in a file. Metrics stay in any case. A
failed cell is a row without metrics. All metrics are of the whole training; our own tables
(`results.parquet`, `results.csv`) have those after the warm-up.
"""

from __future__ import annotations

import csv
import json
import os
import tempfile
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ergmeter.bench import tables
from ergmeter.bench.memory import BYTES_PER_MIB
from ergmeter.bench.results import TRAINER_NAMES
from ergmeter.bench.tables import ARGUMENTS, FAILED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    import pyarrow as pa

BENCHMARKS, RAW = "benchmarks.csv", "raw_summary.csv"
OURS = ("results.parquet", "results.csv")
_ALWAYS_WRITTEN = (
    *("torch_dtype", "framework_config", "peft_method", "model_name_or_path", "num_gpus"),
    *("per_device_train_batch_size", *TRAINER_NAMES),
)
_MEM = "mem_"
_ERRORS = ("error_messages", "dry_run")
_WRITTEN_STATUSES = ("ok", *(status for status in FAILED if status != "cancelled"))


def collected(batches: Iterable[pa.Table], directory: Path) -> None:
    """All tables of a directory of results, ours and FMS's, in it; those of before are replaced."""
    with ExitStack() as stack:
        writers: list[tables.TableWriter | FmsWriter] = [
            stack.enter_context(tables.TableWriter(directory / name)) for name in OURS
        ]
        writers.append(stack.enter_context(FmsWriter(directory)))
        for batch in batches:
            for writer in writers:
                writer.add(batch)


def write(table: pa.Table, directory: Path) -> tuple[Path, Path]:
    """FMS's two files of a whole table."""
    with FmsWriter(directory) as writer:
        writer.add(table)
    return directory / BENCHMARKS, directory / RAW


class FmsWriter:
    """FMS's two files. They are there at the end, whole.

    raw_summary.csv has every cell with all of its results.json, and memory both ways;
    benchmarks.csv is without constant settings, error messages and cells that did not end by
    themselves. Names are in alphabetical order.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._rows = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  closed at exit
        self._names: set[str] = set()
        self._first: dict[str, str] = {}  # of rows that benchmarks.csv has
        self._varying: set[str] = set()

    def add(self, batch: pa.Table) -> None:
        """Add a batch of rows."""
        for row in batch.to_pylist():
            is_shown = row["status"] in _WRITTEN_STATUSES and not _is_dry(row)
            fms_row = _fms(row)
            self._names |= fms_row.keys()
            if is_shown:
                self._note(fms_row)
            self._rows.write(json.dumps([is_shown, fms_row]) + "\n")

    def _note(self, row: dict[str, Any]) -> None:
        """By pandas' nunique, which does not count what is absent."""
        for name, value in row.items():
            first = self._first.setdefault(name, "")
            if value in (None, ""):
                continue
            if first == "":
                self._first[name] = str(value)
            elif first != str(value):
                self._varying.add(name)

    def __enter__(self) -> FmsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._rows:
            if kind is None:
                there = sorted(self._first.keys() - set(_ERRORS))
                columns = [name for name in there if _is_kept(name) or name in self._varying]
                self._write(BENCHMARKS, columns, is_all=False)
                self._write(RAW, sorted(self._names), is_all=True)

    def _write(self, name: str, columns: Sequence[str], *, is_all: bool) -> None:
        beside = self._directory / f".{name}.{os.getpid()}"
        try:
            with beside.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
                writer.writeheader()
                for is_shown, row in self._fms_rows():
                    if is_all:
                        writer.writerow(row)
                    elif is_shown:
                        has_failed = row["status"] != "ok"
                        writer.writerow(_without_figures(row) if has_failed else row)
            beside.replace(self._directory / name)
        finally:
            beside.unlink(missing_ok=True)

    def _fms_rows(self) -> Iterator[tuple[bool, dict[str, Any]]]:
        self._rows.seek(0)
        for line in self._rows:
            is_shown, row = json.loads(line)
            yield is_shown, row


def _fms(row: dict[str, Any]) -> dict[str, Any]:
    # A cell that could not be started left no results.json.
    raw: dict[str, Any] = json.loads(row["raw"] or "{}") or {
        name: row[name] for name in ARGUMENTS if row[name] is not None
    }
    raw["status"] = row["status"]
    raw["framework_config"] = row["framework_config"]
    raw["num_gpus"] = row["num_gpus"]
    ours = {
        **json.loads(row["training"] or "{}"),
        "mem_peak_torch_mem_alloc_in_bytes": row["memory_hf_peak_bytes"],
        "mem_torch_mem_alloc_in_bytes": row["memory_hf_alloc_bytes"],
        "mem_nvidia_mem_reserved": _mib(row["memory_nvidia_mean_bytes"]),
    }
    for name, value in ours.items():
        if raw.get(name) in (None, "") and value is not None:
            raw[name] = value
    return raw


def _without_figures(row: dict[str, Any]) -> dict[str, Any]:
    """Remove the metrics of a failed cell: they are no result."""
    return {name: value for name, value in row.items() if name not in TRAINER_NAMES}


def _mib(value: float | None) -> float | None:
    return None if value is None else value / BYTES_PER_MIB


def _is_dry(row: dict[str, Any]) -> bool:
    return bool(json.loads(row["raw"] or "{}").get("dry_run"))


def _is_kept(name: str) -> bool:
    return name in _ALWAYS_WRITTEN or name.startswith(_MEM)
