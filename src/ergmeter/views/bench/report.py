"""The documents of `erg bench report`: configurations with heat maps, and memory by source.

A cell links to the page of its run by a relative path, so that both can be moved together. Without
such a page its directory is named.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ergmeter.bench.overview import (
    Configuration,
    Matrix,
    Overview,
    matrix,
    memory_sources,
    of_repeats,
    outcomes,
    report_heads,
    report_of,
    spread,
    view_columns,
)
from ergmeter.compare.pairing import configuration_name, setting_title
from ergmeter.metrics.catalog import bench_columns
from ergmeter.units import duration, scaled, significant
from ergmeter.views.document import (
    Document,
    HeadlinePart,
    HeatCell,
    HeatMap,
    Items,
    Link,
    LinkCell,
    Note,
    Paragraph,
    Part,
    Section,
    State,
    Table,
    TableColumn,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ergmeter.bench.overview import MemoryTable

_UNWELL = "!"
_WRAPPED = ("tokens/s", "memory")
_REASON_CHARACTERS = 160
_MEMORY_SAID = {
    "hf": "in tensors, as the Trainer tells it",
    "torch": "in tensors, as torch's allocator tells it",
    "nvidia": "on the fullest device above its first reading",
    "nvidia mean": "above the first reading, mean of the devices",
    "host": "resident on the host",
}
_MEMORY_NOTES = (
    "nvidia's are of all programs on a device, contexts and reserves included; the Trainer's and"
    " the allocator's are what tensors held",
    "the Trainer tells of rank 0 alone; an evaluation within train() is in train's figures",
)


def report_document(overview: Overview, *, name: str, page: Path | None = None) -> Document:
    """Return a bench by configuration: counts, values, failures and notes.

    With `page`, the file that it is written to, it has heat maps and links to the pages of runs.
    """
    addresses = {} if page is None else _addresses(overview, page)
    heat_maps = () if page is None else _heat_maps(overview, addresses)
    counts = ", ".join(f"{number} {status}" for status, number in overview.statuses.most_common())
    more = _items(_more(overview.more, "configurations"))
    failures: tuple[Part, ...] = (
        *(Note("serious", line) for line in overview.troubles),
        *_items(_more(overview.more_troubles, "troubles")),
    )
    sections = (
        Section("matrices", "matrices", heat_maps, media=("html",)),
        Section("rows", "configurations", (_table(overview, addresses), *more)),
        Section("failures", "failures", failures),
        Section("notes", "notes", _items(notes(overview))),
    )
    state: State = "bad" if overview.troubles else ""
    headline = HeadlinePart(f"{overview.cells} cells", counts, state=state)
    return Document(f"Bench: {name}", (headline, *(part for part in sections if part.parts)))


def memory_document(memory: MemoryTable, *, name: str) -> Document:
    """Return each memory metric of each cell, by source; absent ones with their reason."""
    title = f"Memory of the bench: {name}"
    if not memory.cells:
        return Document(title, (Paragraph("no cell has run yet"),))
    rows = [
        (
            "" if number else cell,
            line.by,
            line.of,
            "-" if line.value_bytes is None else f"{line.value_bytes:,.0f}".replace(",", " "),
            "" if line.value_bytes is None else scaled(line.value_bytes, "B"),
            line.note,
        )
        for cell, lines in memory.cells
        for number, line in enumerate(lines)
    ]
    columns = (
        *(TableColumn(head, no_wrap=True) for head in ("cell", "by", "of")),
        *(TableColumn(head, "number") for head in ("bytes", "rounded")),
        TableColumn("note"),
    )
    remarks = (*_more(memory.more, "cells"), *_MEMORY_NOTES)
    return Document(title, (Table(columns, tuple(rows)), Items(remarks)))


def figure_in_words(configuration: Configuration, name: str) -> str:
    """Return a configuration's mean; tokens that include padding are marked."""
    value = configuration.figures[name]
    mark = " (impossible)" if name in configuration.impossible else ""
    mark += "*" * (configuration.is_padded and name.startswith("tokens_"))
    return _value(value, name) + (mark if math.isfinite(value) else "")


def notes(overview: Overview) -> list[str]:
    """Return notes on how to read the metrics."""
    remarks = overview.absences.lines
    if overview.is_repeated:
        remarks.append(
            "figures are geometric means of the repeats that are ok; beside tokens/s is the"
            " interval of the mean (95 %, three repeats or more) or both of two"
        )
    if any(_mark(rows) for rows in overview.groups.values()):
        remarks.append(f"figures marked {_UNWELL} are of runs that did not end well")
    if "run" in overview.rates_from:
        remarks.append(
            "tokens/s and samples/s are the pace of training: steps after the warm-up, without"
            " evaluation and checkpoints (timed_steps in timed_s of --export); tokens/s of the"
            " whole run stand beside them; time is of the whole training or, where nobody told"
            " that, of the run"
        )
    if "computed" in overview.tokens_counted:
        remarks.append(
            "tokens/s marked * counts padding, as the program did: real ones are not known"
        )
    used = [f"{source}: {_MEMORY_SAID[source]}" for source in sorted(overview.memory)]
    if used:
        remarks.append(f"memory is the highest of the repeats; {', '.join(used)}")
    if "trainer" in overview.rates_from:
        remarks.append(
            "rates that transformers printed are of the whole training, its first steps included"
        )
    return remarks


def _more(number: int, what: str) -> list[str]:
    """Return the number of rows not shown, and how to see them."""
    return [f"and {number} more {what}: --all shows them"] if number else []


def _items(texts: Sequence[str]) -> tuple[Items, ...]:
    return (Items(tuple(texts)),) if texts else ()


# The table of configurations.


def _table(overview: Overview, addresses: Mapping[str, str]) -> Table:
    columns = (
        *("cell", "status"),
        *(head if head in _WRAPPED else TableColumn(head, "number") for head in report_heads()),
        TableColumn("runs", "links"),
    )
    settings = overview.shown_columns
    lines = [(*_line(rows, settings), _runs(rows, addresses)) for rows in overview.groups.values()]
    return Table(columns, tuple(lines))


def _line(rows: Sequence[Mapping[str, Any]], settings: Sequence[str]) -> tuple[str, ...]:
    ok = [row for row in rows if row["status"] == "ok"] or list(rows)
    name = configuration_name(rows[0], settings) or f"cell {rows[0]['index']}"
    figures = (_figure(ok, columns, _mark(rows)) for columns in report_heads().values())
    return (name, outcomes(rows), *figures)


def _figure(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], mark: str) -> str:
    """Return the mean of repeats in the first column that has one."""
    means = ((column, of_repeats(rows, column)) for column in columns)
    column, mean = next((pair for pair in means if pair[1] is not None), ("", None))
    if mean is None:
        return "-"
    if bench_columns()[column].unit == "tokens/s":
        mark += "*" * any(row["tokens_counted"] == "computed" for row in rows)
    source = f" {memory_sources()[column]}" if column in memory_sources() else ""
    ends = spread(rows, column) if column == "tokens_per_s" else None
    around = "" if ends is None else f" ({significant(ends[0])} to {significant(ends[1])})"
    return f"{_value(mean, column)}{mark}{source}{around}"


def _value(value: float, column: str) -> str:
    unit = bench_columns()[column].unit
    if not math.isfinite(value):
        return str(value)
    if unit == "B":
        return scaled(value, unit)
    if unit == "frac":
        return f"{significant(value * 100, 3)} %"
    return duration(value) if unit == "s" else significant(value)


def _mark(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the mark for values from repeats none of which succeeded."""
    if any(row["status"] == "ok" for row in rows):
        return ""
    columns = view_columns("bench report")
    return _UNWELL if any(row[column] is not None for row in rows for column in columns) else ""


def _runs(rows: Sequence[Mapping[str, Any]], addresses: Mapping[str, str]) -> LinkCell:
    paths = [str(row["path"]) for row in rows if row["path"]]
    return LinkCell(tuple(Link(path, addresses.get(path, "")) for path in paths))


def _addresses(overview: Overview, page: Path) -> dict[str, str]:
    """Return relative addresses of the pages of runs, by cell directory."""
    paths = {str(row["path"]) for rows in overview.groups.values() for row in rows if row["path"]}
    return {
        path: quote(os.path.relpath(report.resolve(), page.resolve().parent))
        for path in paths
        if (report := report_of(path)) is not None
    }


# Heat maps.


def _heat_maps(overview: Overview, addresses: Mapping[str, str]) -> tuple[Part, ...]:
    """Return a heat map of each metric that a configuration has, the main ones open."""
    layout = matrix(overview)
    number = len(layout.configurations)
    cut = f"The first {number} of {number + overview.more} configurations: --all shows the others."
    parts: list[Part] = [Paragraph(cut)] if overview.more else []
    metrics = view_columns("bench matrix")
    memory = [name for name in layout.figures if metrics[name].group == "memory"]
    first = [name for name in layout.figures if metrics[name].group == "open"] + memory[:1]
    first = first or list(layout.figures[:1])
    parts += [
        heat_map(layout, name, addresses, is_folded=name not in first)
        for name in sorted(layout.figures, key=lambda name: name not in first)
    ]
    others = [name for name, at in metrics.items() if at.group != "memory"]
    absent = [metrics[name].label for name in others if name not in layout.figures]
    absent += [] if memory else ["memory"]
    which = "cell that is shown" if overview.more else "cell"
    none = f"No {which} tells: {', '.join(absent)}."
    return (*parts, Paragraph(none, style="dim")) if absent else tuple(parts)


def heat_map(
    layout: Matrix, metric: str, addresses: Mapping[str, str], *, is_folded: bool = False
) -> HeatMap:
    """Return one metric of all configurations, by their settings."""
    title = view_columns("bench matrix")[metric].label
    corner = ", ".join(setting_title(name) for name in layout.down)
    head: tuple[str, ...] = (title,)
    if layout.across is not None:
        corner += f" \\ {setting_title(layout.across)}"
        head = tuple(_setting(value) for value in layout.columns)
    cells = {
        at: tuple(_heat_cell(configuration, metric, addresses) for configuration in group)
        for at, group in layout.places.items()
    }
    rows = tuple(
        (", ".join(map(_setting, row)), tuple(cells.get((row, at), ()) for at in layout.columns))
        for row in layout.rows
    )
    better = bench_columns()[metric].direction
    note = f"Darker is more; {better} is better. Hatched cells with ✕ have no figure."
    return HeatMap(f"matrix-{metric}", title, corner, head, rows, note, is_folded)


def _setting(value: object) -> str:
    return "-" if value is None else str(value)


def _heat_cell(configuration: Configuration, metric: str, addresses: Mapping[str, str]) -> HeatCell:
    links = tuple(
        Link(path.rstrip("/").rpartition("/")[2], addresses.get(path, ""))
        for path in configuration.paths
    )
    if metric not in configuration.figures:
        state, text = _without(configuration)
        return HeatCell(text, None, state, _shortened(configuration.reason), links)
    number = configuration.runs[metric]
    text = figure_in_words(configuration, metric) + (f" ({number} runs)" if number > 1 else "")
    remarks: tuple[str, ...] = (
        () if configuration.status == "ok" else (f"✕ {configuration.status}",)
    )
    if metric in configuration.impossible:
        remarks += _shortened(configuration.impossible[metric])
        return HeatCell(text, None, "none impossible", remarks, links)
    return HeatCell(text, configuration.figures[metric], remarks=remarks, links=links)


def _without(configuration: Configuration) -> tuple[str, str]:
    """Return the state and text of a cell that lacks the metric."""
    if configuration.is_ok:
        return "none", "- no figure"
    if configuration.is_waiting:
        return "waiting", f"… {configuration.status}"
    return "failed", f"✕ {configuration.status}"


def _shortened(reason: str) -> tuple[str, ...]:
    """Return a reason cut to the size of a cell, or nothing if there is none."""
    if len(reason) > _REASON_CHARACTERS:
        reason = f"{reason[:_REASON_CHARACTERS].rstrip()}..."
    return (reason,) if reason else ()
