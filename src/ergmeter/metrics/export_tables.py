"""The tables of a run for export, with the energy of each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.definitions.energy_breakdown import energy_of, step_rows
from ergmeter.records import COLUMN_KINDS

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence


def export_tables(evidence: Evidence) -> dict[str, pa.Table]:
    """The tables that have columns, by name, with all hosts on one clock as in the report."""
    tables = {name: evidence.run.table(name) for name in COLUMN_KINDS}
    tables = {name: table for name, table in tables.items() if table.num_columns}
    if "steps" in tables:
        tables["steps"] = _with_energy(evidence, tables["steps"])
    return tables


def _with_energy(evidence: Evidence, table: pa.Table) -> pa.Table:
    """The steps with the energy of all devices in each, as in the report.

    With several ranks only the one with the most steps has energy: otherwise a sum over the column
    would count each joule once per rank. Steps without energy in the report have none here.
    """
    try:
        lane = step_rows(evidence)
        start_ns, end_ns = (table[name].to_numpy() for name in ("start_ns", "end_ns"))
        each = energy_of(evidence, start_ns, end_ns)
    except NotMeasurable:
        return table
    numbers = np.unique(lane["writer"]).astype(int)
    writers = [evidence.run.writers[number].header["writer"] for number in numbers]
    is_own = pc.is_in(table["writer"], pa.array(writers)).to_numpy()
    columns = {"energy_j": each.joules, "energy_low_j": each.low_j, "energy_high_j": each.high_j}
    for name, values in columns.items():
        absent = ~is_own | np.isnan(values)
        table = table.append_column(name, pa.array(values, mask=absent))
    return table
