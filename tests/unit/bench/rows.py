"""Made-up rows of results, with just what a test speaks of."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa

from ergmeter.bench import tables
from ergmeter.bench.overview import overview
from ergmeter.bench.results import batches, entries
from ergmeter.bench.tables import as_table
from ergmeter.compare import comparison
from ergmeter.compare import gate as compare_gate
from ergmeter.compare.comparison import Comparison, GroupPair
from ergmeter.compare.gate import Gate
from ergmeter.compare.pairing import CompareOptions, Pairing
from ergmeter.stats.ratio import Contrast
from ergmeter.views.bench import report_document
from ergmeter.views.document import Section, Table


def write_table(table: pa.Table, path: Path) -> None:
    with tables.table_writer(path) as add:
        add(table)


def load_table(path: Path) -> pa.Table:
    return tables.one_table(batches(path))


def row(**fields: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "index": 0,
        "repeat": 1,
        "num_gpus": 1,
        "nodes": 1,
        "status": "ok",
        "framework_config": "none",
        "settings": "{}",
        "raw": "{}",
    }
    found = {**plain, **fields}
    found["settings"] = (
        json.dumps(found["settings"]) if isinstance(found["settings"], dict) else found["settings"]
    )
    return found


def repeats(group: str, column: str, values: list[float], **fields: Any) -> list[dict[str, Any]]:
    return [
        row(group=group, framework_config=group, repeat=i, **{column: value}, **fields)
        for i, value in enumerate(values, 1)
    ]


def noisy(
    seed: int, *, groups: int = 1, runs: int = 3, noise: float = 0.01, factor: float = 1.0
) -> pa.Table:
    """Cells of known speed and of normal noise on it."""
    chance = random.Random(seed)
    rows = []
    for group in range(groups):
        speed = 1000.0 * (group + 1) * factor
        values = [speed * (1.0 + chance.gauss(0.0, noise)) for _ in range(runs)]
        rows += repeats(f"g{group}", "real_tokens_per_s", values)
    return as_table(rows)


def configuration_lines(table: pa.Table) -> list[tuple[str, ...]]:
    """The rows of a report's table, one for each configuration, without the links."""
    document = report_document(overview(table), name="b")
    (section,) = (p for p in document.parts if isinstance(p, Section) and p.id == "rows")
    assert isinstance(section.parts[0], Table)
    return list(section.parts[0].without("links").rows)


def gate(new: pa.Table, ref: pa.Table, rules: Any = (), **asked: Any) -> Gate:
    """The gate on two tables of results."""
    return compare_gate.gate(
        list(entries(new.to_pylist())), list(entries(ref.to_pylist())), rules, **asked
    )


def compare(new: pa.Table, ref: pa.Table, *, options: CompareOptions | None = None) -> Comparison:
    """The comparison of two tables of results."""
    sides = [list(entries(table.to_pylist())) for table in (new, ref)]
    return comparison.compare_sides(sides[0], sides[1], options or CompareOptions())


def change(pair: GroupPair, metric: str) -> Contrast:
    """The change of one metric, by its name in rules."""
    (found,) = (v.contrast for v in pair.verdicts if v.measure.label == metric)
    assert found is not None
    return found


def matched(found: Comparison) -> Pairing:
    """How the configurations of a comparison were matched."""
    return found.pairing
