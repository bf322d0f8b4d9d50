"""Are the measured rates of two tables over the same kind of window?

Rates over the pace of training and rates that include evaluation and checkpoints differ by what
those took, and by no change of the program. Rows of the other kind are made anew from their cells'
directories; where one of them is gone, the two tables can't be compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ergmeter.bench.results.results import collect
from ergmeter.bench.results.run_columns import FROM_RUN
from ergmeter.bench.results.tables import as_table
from ergmeter.errors import UsageError
from ergmeter.metrics.evidence.window import TRAINING, UNBROKEN

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    import pyarrow as pa


def of_one_window(new: pa.Table, ref: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Both tables as they are, or with their rows over the training window where kinds differ."""
    kinds = _kinds(new), _kinds(ref)
    if not all(kinds) or len(set.union(*kinds)) == 1:
        return new, ref
    return _anew(new, "NEW", *kinds), _anew(ref, "REF", *kinds)


def _kinds(table: pa.Table) -> set[str]:
    columns = table.select(["rates_from", "window"]).to_pylist()
    return {_kind(row) for row in columns if row["rates_from"] == FROM_RUN}


def _kind(row: Mapping[str, Any]) -> str:
    return row["window"] or UNBROKEN


def _anew(table: pa.Table, name: str, new: set[str], ref: set[str]) -> pa.Table:
    rows = table.to_pylist()
    for at, row in enumerate(rows):
        if row["rates_from"] != FROM_RUN or _kind(row) == TRAINING:
            continue
        cell = Path(row["path"] or "")
        if not row["path"] or not (cell / "run").is_dir():
            raise UsageError(
                f"NEW's rates are over the window {'/'.join(sorted(new))}, REF's over"
                f" {'/'.join(sorted(ref))}: not comparable, and {name}'s {row['id'] or 'row'} can't"
                f" be computed anew ({row['path'] or 'its directory'} is gone); measure it again"
            )
        rows[at] = collect(cell, keep=False)
    return as_table(rows)
