"""The columns of a table of results, its files (Parquet, CSV, FMS's), and a row's metrics.

Every table has all columns in this order, whether they vary or not, so that two files line up.
Other settings are in `settings`, and what else a program printed is in `raw`. Rows are read and
written in batches; a file is replaced as a whole. Rows of FMS's files without metrics are failed
cells.

The Trainer's tokens per second are one process's and count padding; its samples per second are of
all processes.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ergmeter.atomic_write import replacing
from ergmeter.compare.entry import FAILED
from ergmeter.errors import FormatError, UsageError
from ergmeter.metrics.catalog import bench_columns
from ergmeter.records import Missing, Reading, Result
from ergmeter.sinks.shared.appended_file import header_of, integral

VERSION = 1

IDENTITY = {
    "index": pa.int64(),
    "id": pa.string(),
    "group": pa.string(),
    "scenario": pa.string(),
    "repeat": pa.int64(),
    "num_gpus": pa.int64(),
    "nodes": pa.int64(),
}
OUTCOME = {
    "status": pa.string(),
    "reason": pa.string(),
    "exit_code": pa.int64(),
    "attempts": pa.int64(),
    "started": pa.string(),
    "ended": pa.string(),
    "claims_held": pa.int64(),
    "claims_broken": pa.string(),  # names, joined by "; "
}
# Arguments by the names that FMS and transformers give them, as text.
ARGUMENTS = {
    name: pa.string()
    for name in (
        *("framework_config", "model_name_or_path", "peft_method", "torch_dtype", "bf16", "fp16"),
        *("effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"),
        *("packing", "max_seq_length", "max_steps", "learning_rate", "r", "lora_alpha"),
        *("lora_dropout", "target_modules"),
    )
}
# Keys of transformers' TrainerMemoryTracker, and the names of the methods that they stand for.
STAGES = {"init": "init", "train": "train", "eval": "evaluate", "test": "predict"}
# The order of the columns. Metrics of the catalogue that are not listed here follow FIGURES.
RATES = (
    *("tokens_per_s", "tokens_per_s_per_device", "tokens_counted", "real_tokens_per_s"),
    *("real_tokens_per_s_per_device", "computed_tokens_per_s", "computed_tokens_per_s_per_device"),
    *("padding_frac", "samples_per_s", "steps_per_s", "step_median_s", "runtime_s", "rates_from"),
)
FIGURES = (
    *("loss", "eval_loss", "epoch", "window", "timed_steps", "timed_s", "mfu_frac"),
    *("whole_run_tokens_per_s", "whole_run_mfu_frac", "whole_run_joules_per_token"),
    *("joules_per_token", "energy_j", "mean_w"),
)
MEMORY = (
    *("memory_nvidia_mean_bytes", "memory_nvidia_peak_bytes", "memory_nvidia_devices_bytes"),
    *("memory_nvidia_first_bytes", "memory_nvidia_ids", "memory_nvidia_from"),
    *("memory_nvidia_note", "memory_hf_before_bytes"),
    *(f"memory_hf_{stage}_{what}_bytes" for stage in STAGES.values() for what in ("alloc", "peak")),
    *("memory_hf_alloc_bytes", "memory_hf_peak_bytes", "memory_hf_peak_prose_bytes"),
    *("memory_hf_discrepancy_bytes", "memory_hf_seed_bytes", "memory_device_peak_bytes"),
    *("memory_allocator_peak_bytes", "memory_allocator_devices_bytes", "memory_allocator_ids"),
    "memory_process_peak_bytes",
)
_FACTS = {
    "tokens_counted": pa.string(),  # real, computed, or as the program counted
    "rates_from": pa.string(),  # run: measured; trainer: what transformers printed
    "window": pa.string(),  # kind of window of measured rates, MFU and energy; empty: unbroken
    "memory_nvidia_devices_bytes": pa.list_(pa.float64()),  # the peak of each
    "memory_nvidia_first_bytes": pa.list_(pa.float64()),  # memory in use before, subtracted
    "memory_nvidia_ids": pa.string(),  # of these devices, joined by spaces
    "memory_nvidia_from": pa.string(),  # nvml: this run's probe; nvidia-smi: its log; reference
    "memory_nvidia_note": pa.string(),  # why nvidia-smi's log was not used
    "memory_allocator_devices_bytes": pa.list_(pa.float64()),  # of each
    "memory_allocator_ids": pa.string(),  # rank0/cuda:0 and so on, joined by spaces
}
REST = {
    "device": pa.string(),
    "missing": pa.string(),  # JSON: column to the reason why it is empty
    "impossible": pa.string(),  # JSON: column to the reason why its value cannot be right
    "damaged": pa.string(),  # files that were left out, each with what is wrong, joined by "; "
    "settings": pa.string(),  # JSON: every argument and axis
    "raw": pa.string(),  # JSON: results.json without additions, or the reference's row
    "training": pa.string(),  # JSON: the whole training, warm-up included, by the Trainer's names
    "path": pa.string(),
}

# Beside the value of a metric: its interval, how it was obtained, and a note.
READING_PARTS = {
    "low": pa.float64(),
    "high": pa.float64(),
    "basis": pa.string(),
    "note": pa.string(),
}
# Metrics without columns for basis and note, and what these are by the source of the value.
_WITHOUT_PARTS = ("memory_nvidia_", "memory_hf_")
_MEMORY_FROM = {
    "nvml": ("measured", "sampled by NVML in the cell's run"),
    "nvidia-smi": ("measured", "sampled by nvidia-smi beside the cell"),
    "reference": ("reported", "as the published file has it"),
    "memory_hf": ("reported", "by the memory tracker of transformers' Trainer, rank 0"),
}


@cache
def reading_columns() -> tuple[str, ...]:
    """The metric columns that are followed by their low, high, basis and note."""
    return tuple(name for name in bench_columns() if not name.startswith(_WITHOUT_PARTS))


@cache
def columns() -> dict[str, pa.DataType]:
    """All columns with their types, in order; the parts of a reading follow its value."""
    others = (name for name in bench_columns() if name not in MEMORY)
    result = {**IDENTITY, **OUTCOME, **ARGUMENTS}
    for name in dict.fromkeys((*RATES, *FIGURES, *others, *MEMORY)):
        result[name] = _FACTS.get(name, pa.float64())
        if name in reading_columns():
            result |= {f"{name}_{part}": of_part for part, of_part in READING_PARTS.items()}
    return result | REST


@cache
def schema() -> pa.Schema:
    """The schema of every table of results."""
    return pa.schema(list(columns().items()), metadata={"ergmeter.bench.version": str(VERSION)})


DONE = ("ok", *FAILED, "skipped")


ROWS = 250  # in a batch
_ENDINGS = (".parquet", ".csv")
_NEEDED = {"id", "status"}
_JSON = ("missing", "impossible", "settings", "raw", "training")
_LONGEST = 1 << 27  # characters of a CSV cell: `raw` holds all that a training printed


def number(value: object) -> float | None:
    """Return a value from JSON or text as a number, which may be nan or inf; None if it is none."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(str(value))
    except ValueError:
        return None


def as_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Return rows as a table with all columns; absent values and empty texts are null."""
    filled = [{name: value for name, value in row.items() if value != ""} for row in rows]
    return pa.Table.from_pylist(filled, schema=schema())


def batched(rows: Iterable[dict[str, Any]]) -> Iterator[pa.Table]:
    """Yield rows as tables of up to 250 rows."""
    left = iter(rows)
    while some := list(itertools.islice(left, ROWS)):
        yield as_table(some)


def one_table(batches: Iterable[pa.Table]) -> pa.Table:
    """Join batches into one table, which is empty if there are none."""
    return pa.concat_tables([as_table([]), *batches]).combine_chunks()


@contextmanager
def table_writer(path: Path) -> Iterator[Callable[[pa.Table], object]]:
    """Yield a function that adds a batch of rows to a new .parquet or .csv file.

    The file appears under its name when the block ends.
    """
    check_ending(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        if path.suffix == ".parquet":
            with pq.ParquetWriter(part, schema()) as parquet:
                yield parquet.write_table
        else:
            with part.open("w", encoding="utf-8") as file:
                file.write(csv_text(as_table([])))
                yield lambda batch: file.write(csv_text(batch, header=False))


def check_ending(path: Path) -> None:
    """Raise UsageError if the ending is neither .parquet nor .csv."""
    if path.suffix not in _ENDINGS:
        raise UsageError(f"{path.name} ends in neither .parquet nor .csv")


def csv_text(table: pa.Table, *, header: bool = True) -> str:
    """Return a table as CSV with all columns; an absent value is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if header:
        writer.writerow(table.column_names)
    writer.writerows([_cell(row[name]) for name in table.column_names] for row in table.to_pylist())
    return text.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, list):
        return " ".join(f"{number:.17g}" for number in value)
    return integral(value)


def documents(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield each row as a dict, with the columns that hold JSON parsed."""
    for row in table.to_pylist():
        parsed = {name: json.loads(row[name]) if row[name] else None for name in _JSON}
        yield {**row, **parsed}


def is_ours(path: Path) -> bool:
    """True if a CSV file has the columns that `table_writer` writes."""
    return {"id", "status", *RATES} <= set(_header(path))


def is_fms(path: Path) -> bool:
    """True if a CSV file has a metric of FMS's files, or cells that all failed."""
    return _is_of_fms(_header(path))


def _is_of_fms(names: Sequence[str]) -> bool:
    return bool({*TRAINER_METRICS} & {*names}) or {"framework_config", "status"} <= {*names}


def _header(path: Path) -> tuple[str, ...]:
    csv.field_size_limit(_LONGEST)
    return header_of(path)


def from_parquet(path: Path) -> Iterator[pa.Table]:
    """Yield the tables of a Parquet file of results; unknown columns are dropped."""
    try:
        file = pq.ParquetFile(path)
        if _NEEDED - {*file.schema_arrow.names}:
            raise FormatError(f"{path} is not a table of results: no columns id and status")
        for batch in file.iter_batches(batch_size=ROWS):
            yield _aligned(batch)
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{path} is not a Parquet file of results: {error}") from error


def _aligned(batch: pa.RecordBatch) -> pa.Table:
    """Return a batch with exactly our columns: absent ones are null, unknown ones are dropped."""
    names = set(batch.schema.names)
    arrays = [
        batch[name].cast(kind) if name in names else pa.nulls(batch.num_rows, kind)
        for name, kind in columns().items()
    ]
    return pa.Table.from_arrays(arrays, schema=schema())


def from_csv(path: Path) -> Iterator[pa.Table]:
    """Yield the tables of a CSV file of results; unknown columns are dropped."""
    csv.field_size_limit(_LONGEST)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        try:
            yield from batched(
                {name: _typed(name, cell) for name, cell in row.items() if name in columns()}
                for row in rows
            )
        except (ValueError, csv.Error, pa.ArrowException) as error:
            raise FormatError(f"{path}: line {rows.line_num}: {error}") from error


def _typed(name: str, cell: str | None) -> Any:  # noqa: ANN401  whatever the column holds
    if not cell:
        return None
    kind = columns()[name]
    read: dict[pa.DataType, Callable[[str], Any]] = {pa.int64(): int, pa.float64(): float}
    try:
        if pa.types.is_list(kind):
            return [float(part) for part in cell.split()]
        return read.get(kind, str)(cell)
    except ValueError as error:
        raise ValueError(f"{name} can't be {cell[:40]!r}") from error


# A row of results.

BYTES_PER_MIB = 2**20
FROM_RUN, TRAINER = "run", "trainer"  # the source of a row's rates
_PRINTED = {
    "loss": "train_loss",
    "eval_loss": "eval_loss",
    "epoch": "epoch",
    "runtime_s": "train_runtime",
    "samples_per_s": "train_samples_per_second",
    "steps_per_s": "train_steps_per_second",
    "computed_tokens_per_s_per_device": "train_tokens_per_second",
}


def trainer_figures(results: Mapping[str, Any], num_gpus: int | None) -> dict[str, Any]:
    """Return as our columns what transformers' Trainer printed at the end.

    Its train_tokens_per_second counts padding and is one process's; its train_samples_per_second
    is of all processes together.
    """
    row: dict[str, Any] = {ours: number(results.get(name)) for ours, name in _PRINTED.items()}
    per_device = row["computed_tokens_per_s_per_device"]
    is_counted = per_device is not None and num_gpus
    row["computed_tokens_per_s"] = per_device * num_gpus if is_counted else None
    row["rates_from"] = TRAINER if row["runtime_s"] is not None else None
    return row


def with_headline_rate(row: dict[str, Any], missing: Mapping[str, str]) -> dict[str, Any]:
    """Add a row's headline token rate (of real tokens if they were counted) and absence reasons."""
    kind = "real" if row.get("real_tokens_per_s") is not None else "computed"
    for name in ("tokens_per_s", "tokens_per_s_per_device"):
        for part in ("", *(f"_{part}" for part in READING_PARTS)):
            row[f"{name}{part}"] = row.get(f"{kind}_{name}{part}")
    for name in reading_columns():
        if row.get(name) is not None:
            row[f"{name}_basis"] = row.get(f"{name}_basis") or "reported"
    row["tokens_counted"] = kind if row["tokens_per_s"] is not None else None
    missing = {**_of_tokens(missing), **missing}
    reasons = {name: why for name, why in missing.items() if row.get(name) is None}
    row["missing"] = json.dumps(reasons, sort_keys=True)
    return row


def _of_tokens(missing: Mapping[str, str]) -> dict[str, str]:
    """Why the headline rates are absent: the reasons of the rates they are chosen from."""
    reasons = {}
    for ending in ("", "_per_device"):
        for kind in ("real", "computed"):  # computed tokens win: they need less
            why = missing.get(f"{kind}_tokens_per_s{ending}") or missing.get(f"{kind}_tokens_per_s")
            if why:
                reasons[f"tokens_per_s{ending}"] = why
    return reasons


# FMS's column: ours, and its scale to bytes. FMS's files of 30 May 2024, of 27 May, of 21 May.
_FMS_MEMORY: dict[str, tuple[str, float]] = {
    "mem_nvidia_mem_reserved": ("memory_nvidia_mean_bytes", BYTES_PER_MIB),
    "mem_peak_torch_mem_alloc_in_bytes": ("memory_hf_peak_bytes", 1.0),
    "mem_torch_mem_alloc_in_bytes": ("memory_hf_alloc_bytes", 1.0),
    "nvidia_mem_reserved": ("memory_nvidia_mean_bytes", BYTES_PER_MIB),
    "peak_torch_mem_alloc_in_bytes": ("memory_hf_peak_bytes", 1.0),
    "torch_mem_alloc_in_bytes": ("memory_hf_alloc_bytes", 1.0),
    "reserved_gpu_mem": ("memory_nvidia_mean_bytes", BYTES_PER_MIB),
    "alloc_gpu_memory_in_bytes": ("memory_hf_seed_bytes", 1.0),
}
TRAINER_METRICS = (
    *("train_runtime", "train_samples_per_second", "train_tokens_per_second", "train_loss"),
)


def read_fms_file(path: Path) -> pa.Table:
    """Read FMS's `benchmarks.csv` or `raw_summary.csv`, of any of its three formats."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} can't be read as a table: {error}") from error
    reader = csv.DictReader(io.StringIO(text, newline=""))
    header = reader.fieldnames or []
    if not _is_of_fms(header):
        raise FormatError(
            f"{path} is not a table of results: it has none of {', '.join(TRAINER_METRICS)}"
            f" ({', '.join(header[:6]) or 'it is empty'}, ...)"
        )
    return as_table([_fms_row(row, line, path) for line, row in enumerate(reader)])


def _fms_row(fms_cells: Mapping[str, str | None], index: int, path: Path) -> dict[str, Any]:
    cells = {name: value.strip() for name, value in fms_cells.items() if name and value}
    gpus = number(cells.get("num_gpus"))
    row: dict[str, Any] = {
        "index": index,
        "repeat": 1,
        "num_gpus": int(gpus) if gpus else None,
        "nodes": 1,
        "scenario": cells.get("scenario"),  # in files that erg wrote
        "path": f"{path}, line {index + 2}",
        "device": cells.get("gpu_device_name"),
        "settings": json.dumps({k: v for k, v in cells.items() if k in ARGUMENTS}, sort_keys=True),
        "raw": json.dumps(cells),
    }
    row |= {name: cells.get(name) for name in ARGUMENTS}
    row["framework_config"] = row["framework_config"] or "none"
    row |= trainer_figures(cells, row["num_gpus"])
    row |= _fms_memory(cells)
    row["status"], row["reason"] = _fms_outcome(cells)
    return with_headline_rate(row, {"real_tokens_per_s": "FMS's token rates count padding too"})


def _fms_memory(cells: Mapping[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for theirs, (ours, scale) in _FMS_MEMORY.items():
        # FMS's first format may have the unit in the cell.
        value = number(cells.get(theirs, "").removesuffix("MiB").strip())
        if value is not None and ours not in row:
            row[ours] = value * scale
    if "memory_hf_seed_bytes" in row:
        row["memory_hf_peak_prose_bytes"] = row["memory_hf_seed_bytes"]
    if "memory_nvidia_mean_bytes" in row:
        row["memory_nvidia_from"] = "reference"
    return row


def _fms_outcome(cells: Mapping[str, str]) -> tuple[str, str]:
    status = cells.get("status")  # in files that erg wrote, for failed cells
    if status in FAILED:
        return status, "the reference gives no reason"
    if any(number(cells.get(name)) is not None for name in TRAINER_METRICS):
        return "ok", ""
    read_as = next(
        (name for name in _FMS_MEMORY if name.endswith("reserved") and name in cells), None
    )
    reading = f"; nvidia-smi had read {cells[read_as]} MiB" if read_as else ""
    return "error", f"the reference has no metrics for this cell, and no reason{reading}"


class RowReadings(Mapping[str, Result]):
    """A row's metrics by key of the catalogue, made on access.

    To save memory, numbers are in one array, and equal texts and column names are stored once.
    """

    __slots__ = ("_impossible", "_missing", "_numbers", "_positions", "_texts")

    def __init__(self, row: Mapping[str, Any]) -> None:
        kinds = _column_kinds()
        present = [name for name, value in row.items() if name in kinds and value not in (None, "")]
        numbers = tuple(name for name in present if kinds[name] is float)
        self._positions = _positions(numbers)
        self._numbers = array("d", [float(row[name]) for name in numbers])
        self._texts = _shared(tuple((n, row[n]) for n in present if kinds[n] is str))
        self._missing = _reasons(row.get("missing") or "{}")
        self._impossible = _reasons(row.get("impossible") or "{}")

    def _number(self, column: str) -> float | None:
        position = self._positions.get(column)
        return None if position is None else self._numbers[position]

    def __getitem__(self, key: str) -> Result:
        column, *edges, basis, note = _metric_columns()[key]
        value = self._number(column)
        if value is None:
            return Missing(self._missing[column])
        low, high = map(self._number, edges)
        texts, why = self._texts, self._impossible.get(column, "")
        unit = bench_columns()[column].unit
        is_nvidia = column.startswith("memory_nvidia_")
        source = texts.get("memory_nvidia_from", "") if is_nvidia else column[:9]
        of_memory = _MEMORY_FROM.get(source, ("reported", ""))
        how: Any = texts.get(basis, of_memory[0])
        return Reading(value, unit, how, low, high, texts.get(note, of_memory[1]), why)

    def __iter__(self) -> Iterator[str]:
        return (key for key in _metric_columns() if key in self)

    def __contains__(self, key: object) -> bool:
        names = _metric_columns().get(str(key))
        return names is not None and (names[0] in self._positions or names[0] in self._missing)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@cache
def _metric_columns() -> dict[str, tuple[str, ...]]:
    """The columns of each metric by its key: value, low, high, basis and note."""
    columns = ((metric.key, name) for name, metric in bench_columns().items())
    return {key: (name, *(f"{name}_{part}" for part in READING_PARTS)) for key, name in columns}


@cache
def _column_kinds() -> dict[str, type]:
    """The type (float or str) of each column of a metric."""
    kinds = (float, float, float, str, str)
    of_metrics = (zip(names, kinds, strict=True) for names in _metric_columns().values())
    return {"memory_nvidia_from": str, **dict(itertools.chain.from_iterable(of_metrics))}


@lru_cache(maxsize=256)
def _positions(names: tuple[str, ...]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


@lru_cache(maxsize=256)
def _shared(texts: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return {name: sys.intern(text) for name, text in texts}


@lru_cache(maxsize=256)
def _reasons(text: str) -> dict[str, str]:
    return dict(json.loads(text))
