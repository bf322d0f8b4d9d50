"""A run's tables as CSV, Parquet or JSON, merged over its writers, for any other program."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.metrics.definitions.energy_breakdown import energy_of, step_rows
from ergmeter.metrics.summarize import evidence_of
from ergmeter.records import COLUMN_KINDS
from ergmeter.views import documents

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Summary
    from ergmeter.runlog.reader import Run


def export(
    run: Run, summary: Summary, target: Path, *, form: str, force: bool = False
) -> Iterator[Path]:
    """Write the files and yield their paths. Refuses to overwrite unless forced."""
    target.mkdir(parents=True, exist_ok=True)
    evidence = evidence_of(run)
    # Its hosts on one clock, as in the report.
    found = {name: evidence.run.table(name) for name in COLUMN_KINDS}
    tables = {name: table for name, table in found.items() if table.num_columns}
    if "steps" in tables:
        tables["steps"] = _with_energy(evidence, tables["steps"])
    if form == "json":
        path = _free(target / "export.json", force=force)
        whole: dict[str, Any] = {"summary": documents.report(run, summary)}
        whole |= {name: documents.finite(_rows(table)) for name, table in tables.items()}
        path.write_text(json.dumps(whole, allow_nan=False))
        yield path
        return
    for name, table in tables.items():
        path = _free(target / f"{name}.{form}", force=force)
        _write(table, path, form)
        yield path
    path = target / "summary.json"  # the same in every format
    path.write_text(json.dumps(documents.report(run, summary), indent=1, allow_nan=False))
    yield path


def _with_energy(evidence: Evidence, table: pa.Table) -> pa.Table:
    """The steps with what all devices drew in each, as in the report: of several ranks those of the
    one that told the most, or a sum over the column would count each joule once for every rank; and
    none where the report has none of a step."""
    try:
        lane = step_rows(evidence)
        start_ns, end_ns = (table[name].to_numpy() for name in ("start_ns", "end_ns"))
        each = energy_of(evidence, start_ns, end_ns)
    except NotMeasurable:
        return table
    numbers = np.unique(lane["writer"]).astype(int)
    writers = [evidence.run.writers[number].header["writer"] for number in numbers]
    is_own = pc.is_in(table["writer"], pa.array(writers)).to_numpy()
    for name, values in (
        ("energy_j", each.joules), ("energy_low_j", each.low_j), ("energy_high_j", each.high_j),
    ):  # fmt: skip
        absent = ~is_own | np.isnan(values)
        table = table.append_column(name, pa.array(values, mask=absent))
    return table


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """The rows as plain values. Python has no time of nanoseconds: they are written out."""
    for number, column in enumerate(table.schema):
        if pa.types.is_timestamp(column.type):
            table = table.set_column(number, column.name, table[number].cast(pa.string()))
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _free(path: Path, *, force: bool) -> Path:
    if path.exists() and not force:
        raise UsageError(f"{path} exists; --force overwrites it, --out chooses another directory")
    return path


def _write(table: pa.Table, path: Path, form: str) -> None:
    if form == "csv":
        import pyarrow.csv  # noqa: PLC0415  each format loads its own code

        pyarrow.csv.write_csv(table, path)
    else:
        import pyarrow.parquet  # noqa: PLC0415

        pyarrow.parquet.write_table(table, path, compression="zstd")
