"""Results in the form that FMS's programs and notebooks read: benchmarks.csv, raw_summary.csv.

FMS's readers expect benchmarks.csv without settings that have the same value in all rows, except
for a few that are always there. So the columns are known only after the last row, and rows wait in
a temporary file. A failed cell is a row without metrics. All metrics are of the whole training; our
own tables (`results.parquet`, `results.csv`) have those after the warm-up.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa

from ergmeter.atomic_write import replacing
from ergmeter.bench import tables
from ergmeter.bench.results import TRAINER_NAMES
from ergmeter.bench.tables import BYTES_PER_MIB
from ergmeter.compare.entry import FAILED

BENCHMARKS, RAW = "benchmarks.csv", "raw_summary.csv"
OURS = ("results.parquet", "results.csv")
_ALWAYS_WRITTEN = (
    *("torch_dtype", "framework_config", "peft_method", "model_name_or_path", "num_gpus"),
    *("per_device_train_batch_size", "status", *TRAINER_NAMES),
)
_MEM = "mem_"
_ERRORS = ("error_messages", "dry_run")
_WRITTEN_STATUSES = ("ok", *(status for status in FAILED if status != "cancelled"))


def collected(batches: Iterable[pa.Table], directory: Path) -> None:
    """Write all tables of a results directory, ours and FMS's, into it, replacing older ones."""
    with ExitStack() as stack:
        takers = [stack.enter_context(tables.table_writer(directory / name)) for name in OURS]
        takers.append(stack.enter_context(fms_writer(directory)))
        for batch in batches:
            for add in takers:
                add(batch)


@contextmanager
def fms_writer(directory: Path) -> Iterator[Callable[[pa.Table], object]]:
    """Yield a function that adds a batch of rows; FMS's two files are written at the end.

    raw_summary.csv has every cell, with all of its results.json and both measures of memory.
    benchmarks.csv leaves out constant settings, error messages, and cells that were cancelled or
    dry runs. Columns are in alphabetical order.
    """
    directory.mkdir(parents=True, exist_ok=True)
    names: set[str] = set()
    values: dict[str, set[str]] = {}  # up to two different values per column of benchmarks.csv
    with tempfile.TemporaryFile("w+", encoding="utf-8") as rows:

        def add(batch: pa.Table) -> None:
            for row in batch.to_pylist():
                is_dry = bool(json.loads(row["raw"] or "{}").get("dry_run"))
                is_shown = row["status"] in _WRITTEN_STATUSES and not is_dry
                fms_row = _fms(row)
                names.update(fms_row)
                for name, value in fms_row.items() if is_shown else ():
                    different = values.setdefault(name, set())
                    # As pandas' nunique, which does not count missing values.
                    if value not in (None, "") and len(different) < 2:
                        different.add(str(value))
                rows.write(json.dumps([is_shown, fms_row]) + "\n")

        yield add
        columns = [
            name
            for name in sorted(values.keys() - set(_ERRORS))
            if name in _ALWAYS_WRITTEN or name.startswith(_MEM) or len(values[name]) > 1
        ]
        _write(directory / BENCHMARKS, columns, _benchmark_rows(rows))
        _write(directory / RAW, sorted(names), (row for _, row in _read(rows)))


def _read(rows: TextIO) -> Iterator[tuple[bool, dict[str, Any]]]:
    rows.seek(0)
    for line in rows:
        is_shown, row = json.loads(line)
        yield is_shown, row


def _benchmark_rows(rows: TextIO) -> Iterator[dict[str, Any]]:
    """The rows of benchmarks.csv, without the metrics of failed cells."""
    for is_shown, row in _read(rows):
        if is_shown:
            has_failed = row["status"] != "ok"
            yield {n: v for n, v in row.items() if not has_failed or n not in TRAINER_NAMES}


def _write(path: Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    with replacing(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def _fms(row: dict[str, Any]) -> dict[str, Any]:
    # A cell that could not be started left no results.json.
    raw: dict[str, Any] = json.loads(row["raw"] or "{}") or {
        name: row[name] for name in tables.ARGUMENTS if row[name] is not None
    }
    raw["status"] = row["status"]
    raw["framework_config"] = row["framework_config"]
    raw["num_gpus"] = row["num_gpus"]
    nvidia_bytes = row["memory_nvidia_mean_bytes"]
    ours = {
        **json.loads(row["training"] or "{}"),
        "mem_peak_torch_mem_alloc_in_bytes": row["memory_hf_peak_bytes"],
        "mem_torch_mem_alloc_in_bytes": row["memory_hf_alloc_bytes"],
        "mem_nvidia_mem_reserved": None if nvidia_bytes is None else nvidia_bytes / BYTES_PER_MIB,
    }
    for name, value in ours.items():
        if raw.get(name) in (None, "") and value is not None:
            raw[name] = value
    return raw
