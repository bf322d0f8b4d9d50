"""Bench cells as entries of a comparison: from directories, tables of results and FMS's files."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.bench.execute.state import CELL, PLAN, RESULTS
from ergmeter.bench.results import FROM_RUN, TRAINER, TRAINER_METRICS, cell_directories, collect
from ergmeter.bench.results import batches as read_batches
from ergmeter.bench.tables import ARGUMENTS, COLUMNS, READING_PARTS, is_ours
from ergmeter.compare.entry import Entry, SourceEntries, Wanted, facts_of
from ergmeter.compare.ledgers import is_ledger
from ergmeter.errors import FormatError
from ergmeter.metrics.catalog import Metric, bench_columns
from ergmeter.metrics.evidence.window import UNBROKEN
from ergmeter.records import Missing, Reading, Result

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

_USUAL = ("scenario", "num_gpus", "nodes", *ARGUMENTS)
# Where a cell ran, and FMS's axis, which is the argument max_seq_length.
_NO_SETTINGS = ("output_dir", "results_csv", "process_port", "max_seq_len")
_RATES = {
    FROM_RUN: "of the steps after the warm-up",
    TRAINER: "of the whole training, as transformers printed them",
}
_TRACKED = ("_mem_cpu", "_mem_gpu")  # in the names of the Trainer's memory metrics
_SMI = ("nvidia-smi", "reference")
_FACTS_OF_WORK = {
    "model_name_or_path": "model",
    "max_seq_length": "seq_len",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "grad_accum",
    "torch_dtype": "precision",
}
_FACTS = ("id", "scenario", "device", "path", "started", "rates_from", "tokens_counted")


class CellSource:
    """A directory of `erg bench run`, one of its cells, a table of results, or a file of FMS."""

    def recognises(self, path: Path) -> bool:
        """True for a bench directory, a cell, a Parquet file, or a CSV with its columns."""
        if path.is_dir():
            cells = (path, *cell_directories(path))
            is_cell = any((cell / name).is_file() for cell in cells for name in (CELL, RESULTS))
            return is_cell or (path / PLAN).is_file()
        if path.suffix == ".parquet":
            return True
        if path.suffix != ".csv" or not path.is_file() or is_ledger(path):
            return False
        return is_ours(path) or _is_fms(path)

    def read(self, path: Path, wanted: Wanted) -> SourceEntries:  # noqa: ARG002  a row has all
        """The cells, failed ones included; those that were never to run are left out."""
        if (path / CELL).is_file():
            return SourceEntries((entry_of(collect(path), argument=str(path)),))
        return SourceEntries(tuple(entries(read_batches(path), argument=str(path))))


def _is_fms(path: Path) -> bool:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        header = next(csv.reader(file), [])
    return bool(set(TRAINER_METRICS) & set(header))


def entries(batches: Iterable[pa.Table], *, argument: str = "") -> Iterator[Entry]:
    """An entry for each row that was to run."""
    for batch in batches:
        for row in batch.to_pylist():
            if row["status"] == "skipped":
                continue
            filled = {name: value for name, value in row.items() if value is not None}
            try:
                yield entry_of(filled, argument=argument)
            except (LookupError, ValueError, TypeError, AttributeError) as error:
                where = f"{argument}: the row of cell {row['index']}"
                raise FormatError(f"{where} is damaged: {type(error).__name__}: {error}") from error


def entry_of(row: dict[str, Any], *, argument: str = "") -> Entry:
    """The entry of one row of results."""
    further = json.loads(row.get("settings") or "{}")
    settings = {name: row.get(name) for name in _USUAL}
    settings |= {
        n: further[n] for n in sorted(further) if n not in COLUMNS and n not in _NO_SETTINGS
    }
    facts = facts_of({name: row.get(name) for name in _FACTS})
    facts |= facts_of({ours: row.get(name) for name, ours in _FACTS_OF_WORK.items()})
    if row.get("rates_from") == FROM_RUN:
        facts["window"] = row.get("window") or UNBROKEN
    path = Path(row["path"]) if row.get("path") else None
    run = path / "run" if path is not None and (path / "run").is_dir() else None
    return Entry(
        row.get("path") or argument,
        argument,
        facts,
        RowReadings(row),
        run,
        kind="cell",
        status=row["status"],
        reason=row.get("reason") or "",
        broken=row.get("claims_broken") or "",
        settings=settings,
        configuration_id=row.get("group") or "",
        conditions=_conditions(row),
        again=(lambda: entry_of(collect(path, keep=False), argument=argument))
        if path is not None and run is not None
        else None,
    )


class RowReadings(Mapping[str, Result]):
    """The metrics of a row by key of the catalogue, made when they are asked for."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row
        self._missing: dict[str, str] = dict(json.loads(row.get("missing") or "{}"))
        self._impossible: dict[str, str] = dict(json.loads(row.get("impossible") or "{}"))

    def __getitem__(self, key: str) -> Result:
        metric = _by_key()[key]
        value = self._row.get(metric.column)
        if value is None:
            return Missing(self._missing[metric.column])
        parts = {part: self._row.get(f"{metric.column}_{part}") for part in READING_PARTS}
        return Reading(
            value,
            metric.unit,
            parts["basis"] or "reported",
            parts["low"],
            parts["high"],
            parts["note"] or "",
            self._impossible.get(metric.column, ""),
        )

    def __iter__(self) -> Iterator[str]:
        return (key for key in _by_key() if key in self)

    def __contains__(self, key: object) -> bool:
        metric = _by_key().get(str(key))
        if metric is None:
            return False
        return self._row.get(metric.column) is not None or metric.column in self._missing

    def __len__(self) -> int:
        return sum(1 for _ in self)


@cache
def _by_key() -> dict[str, Metric]:
    return {metric.key: metric for metric in bench_columns().values()}


def _conditions(row: Mapping[str, Any]) -> dict[str, str | None]:
    """How a cell was measured. A published file does not say what was off."""
    raw = row.get("raw") or "{}"
    is_tracked = any(part in raw for part in _TRACKED) and any(
        part in name for name in json.loads(raw) for part in _TRACKED
    )
    is_measured = bool(row.get("id"))
    smi = "on" if row.get("memory_nvidia_from") in _SMI else "off"
    return {
        "scenario": row.get("scenario"),
        "device": row.get("device"),
        "rates are": _RATES.get(row.get("rates_from") or ""),
        "the Trainer's memory tracker was": (
            "on" if is_tracked else "off" if is_measured else None
        ),
        "nvidia-smi beside each cell was": smi if is_measured else None,
    }
