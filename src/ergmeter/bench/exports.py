"""The results in the shape that FMS's programs and notebooks read: benchmarks.csv, raw_summary.csv.

The trap is the format's own, and kept here because its readers count on it: a column whose values
are all alike is left out, unless it is on a list, and rows that failed are left out as well. Our
own tables (`results.write`) leave out nothing.
"""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

from ergmeter.bench.memory import BYTES_PER_MIB

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pyarrow as pa

BENCHMARKS, RAW = "benchmarks.csv", "raw_summary.csv"
_KEPT = (
    *("torch_dtype", "framework_config", "peft_method", "model_name_or_path", "num_gpus"),
    *("per_device_train_batch_size", "train_tokens_per_second"),
)
_MEM = "mem_"
_ERRORS = ("error_messages", "dry_run")


def raw_rows(found: pa.Table) -> list[dict[str, Any]]:
    """Every cell as FMS's raw_summary.csv has it: all of results.json, and memory both ways."""
    return [_fms(row) for row in found.to_pylist()]


def benchmark_rows(found: pa.Table) -> list[dict[str, Any]]:
    """As FMS's benchmarks.csv has it: without failures, constants and errors, names in order."""
    rows = [_fms(row) for row in found.to_pylist() if row["status"] == "ok" and not _is_dry(row)]
    names = sorted({name for row in rows for name in row} - set(_ERRORS))
    kept = [name for name in names if _is_kept(name) or _varies(rows, name)]
    return [{name: row.get(name) for name in kept} for row in rows]


def write(found: pa.Table, directory: Path) -> tuple[Path, Path]:
    """Both files, beside the cells."""
    paths = directory / BENCHMARKS, directory / RAW
    for path, rows in zip(paths, (benchmark_rows(found), raw_rows(found)), strict=True):
        path.write_text(text(rows), encoding="utf-8")
    return paths


def text(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as CSV, columns in alphabetical order, empty where a row has none."""
    names = sorted({name for row in rows for name in row})
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows([{k: v for k, v in row.items() if v is not None} for row in rows])
    return out.getvalue()


def _fms(row: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(row["raw"] or "{}")
    said["framework_config"] = row["framework_config"]
    said["num_gpus"] = row["num_gpus"]
    ours = {
        "train_loss": row["loss"],
        "train_runtime": row["runtime_s"],
        "train_samples_per_second": row["samples_per_s"],
        "train_steps_per_second": row["steps_per_s"],
        # Theirs is one process's, with padding.
        "train_tokens_per_second": row["computed_tokens_per_s_per_device"],
        "mem_peak_torch_mem_alloc_in_bytes": row["memory_hf_peak_bytes"],
        "mem_torch_mem_alloc_in_bytes": row["memory_hf_alloc_bytes"],
        "mem_nvidia_mem_reserved": _mib(row["memory_nvidia_mean_bytes"]),
    }
    for name, value in ours.items():
        if said.get(name) in (None, "") and value is not None:
            said[name] = value
    return said


def _mib(value: float | None) -> float | None:
    return None if value is None else value / BYTES_PER_MIB


def _is_dry(row: dict[str, Any]) -> bool:
    return bool(json.loads(row["raw"] or "{}").get("dry_run"))


def _is_kept(name: str) -> bool:
    return name in _KEPT or name.startswith(_MEM)


def _varies(rows: Sequence[dict[str, Any]], name: str) -> bool:
    """By pandas' nunique, which does not count what is absent."""
    seen = {str(row[name]) for row in rows if row.get(name) not in (None, "")}
    return len(seen) > 1
