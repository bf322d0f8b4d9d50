"""What does a published benchmark file of FMS say? Its rows, in the schema of our own results.

The trap: a row without figures that looks like a cell without news. FMS did not see that those
runs had failed, so they stand in its files with blank metrics: 39 of the 124 rows of one of them.
Here they are failed cells. Three generations of names for memory are read, each under what it
really was: the first one's sum is the guide's, the later ones' is the program's.
"""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

from ergmeter.bench.results.memory import BYTES_PER_MIB
from ergmeter.bench.results.schema import ARGUMENTS, FAILED
from ergmeter.bench.results.tables import as_table
from ergmeter.bench.results.trainer_columns import chosen, fms_figures, number
from ergmeter.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pyarrow as pa

# Column, scale to bytes and theirs: of 30 May 2024 and later, of 27 May, of 21 May.
_MEMORY: dict[str, tuple[str, float]] = {
    "mem_nvidia_mem_reserved": ("memory_nvidia_mean_bytes", BYTES_PER_MIB),
    "mem_peak_torch_mem_alloc_in_bytes": ("memory_hf_peak_bytes", 1.0),
    "mem_torch_mem_alloc_in_bytes": ("memory_hf_alloc_bytes", 1.0),
    "nvidia_mem_reserved": ("memory_nvidia_mean_bytes", BYTES_PER_MIB),
    "peak_torch_mem_alloc_in_bytes": ("memory_hf_peak_bytes", 1.0),
    "torch_mem_alloc_in_bytes": ("memory_hf_alloc_bytes", 1.0),
    "reserved_gpu_mem": ("memory_nvidia_mean_bytes", BYTES_PER_MIB),
    "alloc_gpu_memory_in_bytes": ("memory_hf_seed_bytes", 1.0),
}
_METRICS = ("train_runtime", "train_samples_per_second", "train_tokens_per_second", "train_loss")
_NEEDED = ("num_gpus", "per_device_train_batch_size")


def read(path: Path) -> pa.Table:
    """The rows of a `benchmarks.csv` or `raw_summary.csv` of any of the three generations."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} can't be read as a table: {error}") from error
    reader = csv.DictReader(io.StringIO(text, newline=""))
    header = reader.fieldnames or []
    if not set(_METRICS) & set(header):
        raise FormatError(
            f"{path} is no table of results: it has none of {', '.join(_METRICS)}"
            f" ({', '.join(header[:6]) or 'it is empty'}, ...)"
        )
    return as_table([_row(row, line, path) for line, row in enumerate(reader)])


def _row(said: Mapping[str, str | None], index: int, path: Path) -> dict[str, Any]:
    cells = {name: value.strip() for name, value in said.items() if name and value}
    gpus = number(cells.get("num_gpus"))
    row: dict[str, Any] = {
        "index": index,
        "repeat": 1,
        "num_gpus": int(gpus) if gpus else None,
        "nodes": 1,
        "scenario": cells.get("scenario"),  # in files of ours
        "path": f"{path}, line {index + 2}",
        "device": cells.get("gpu_device_name"),
        "settings": json.dumps({k: v for k, v in cells.items() if k in ARGUMENTS}, sort_keys=True),
        "raw": json.dumps(cells),
    }
    row |= {name: cells.get(name) for name in ARGUMENTS}
    row["framework_config"] = row["framework_config"] or "none"
    row |= fms_figures(cells, row["num_gpus"])
    row |= _memory(cells)
    row["status"], row["reason"] = _outcome(cells)
    return chosen(row, {"real_tokens_per_s": "FMS counts padding with the rest"})


def _memory(cells: Mapping[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for theirs, (ours, scale) in _MEMORY.items():
        # The first generation may have written its unit into the cell.
        value = number(cells.get(theirs, "").removesuffix("MiB").strip())
        if value is not None and ours not in row:
            row[ours] = value * scale
    if "memory_hf_seed_bytes" in row:
        row["memory_hf_peak_prose_bytes"] = row["memory_hf_seed_bytes"]
    if "memory_nvidia_mean_bytes" in row:
        row["memory_nvidia_from"] = "reference"
    return row


def _outcome(cells: Mapping[str, str]) -> tuple[str, str]:
    told = cells.get("status")  # in files of ours, of cells that failed
    if told in FAILED:
        return told, "as the reference says; it does not say why"
    if any(number(cells.get(name)) is not None for name in _METRICS):
        return "ok", ""
    read_as = next((name for name in _MEMORY if name.endswith("reserved") and name in cells), None)
    held = f"; nvidia-smi had read {cells[read_as]} MiB" if read_as else ""
    return "error", f"it failed: the reference has no metrics for it, and does not say why{held}"
