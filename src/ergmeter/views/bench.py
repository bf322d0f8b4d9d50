"""`erg bench`: its plan, its progress while it runs, and the documents of its report.

Progress is a live table on a terminal, elsewhere one line for each finished cell. Finished cells
are counted; only running and failed cells have a row. On the page of a report, a cell links to the
page of its run by a relative path, so that both can be moved together. Without such a page its
directory is named.
"""

from __future__ import annotations

import math
import os
import shlex
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING
from urllib.parse import quote

from ergmeter.bench.execute.outcome import FINAL, Status
from ergmeter.bench.execute.state import CellState, directory_of
from ergmeter.bench.overview import (
    Configuration,
    Matrix,
    Overview,
    failure_log,
    matrix,
    memory_sources,
    of_repeats,
    report_heads,
    report_of,
    spread,
    varying,
    view_columns,
)
from ergmeter.bench.plan import erg_train
from ergmeter.bench.plan.cells import BRACE, BenchPlan, Cell
from ergmeter.compare.entry import FAILED
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
    columns_of,
)
from ergmeter.workloads.sft.config_file import Metrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from ergmeter.bench.execute.driver import BenchProgress, DurationEstimate
    from ergmeter.bench.overview import CellListing, MemoryTable

# The plan.


_MOST_CELLS = 20
_MINUTE_S, _HOUR_S = 60, 3600


def plan_document(plan: BenchPlan, estimate: DurationEstimate, *, every: bool = False) -> Document:
    """Return the plan. `every`: all cells with all settings and the full command."""
    cells = plan.cells if every else plan.cells[:_MOST_CELLS]
    names = varying(plan.cells)
    parts: list[Part] = [_by_scenario(plan), _cells(cells, names)]
    if len(plan.cells) > len(cells):
        parts.append(Paragraph(f"... and {len(plan.cells) - len(cells)} more", style="dim"))
    alike = _settings(plan.cells[0], [n for n in plan.cells[0].settings if n not in names])
    if alike:
        parts.append(Paragraph(f"in {'all' if plan.cells[1:] else 'it'}: {alike}"))
    started = [cell for cell in cells if not cell.skip]
    for cell in cells if every else started[:1]:
        head = _title(cell) if every else f"the command of cell {cell.index}"
        settings = [Paragraph(_settings(cell, list(cell.settings)), style="dim")] if every else []
        parts.append(Section(f"cell-{cell.index}", head, (*settings, _command(cell))))
    slow = plan.settings.get("slow") or []
    last = [f"left out, being slow: {', '.join(slow)} (name it to run it)"] if slow else []
    notes = Section("notes", "notes", (Items((*last, in_words(estimate))),))
    data = {**plan.to_json(), "estimate": asdict(estimate)}
    return Document("Plan of a bench", (*parts, notes), data)


def _command(cell: Cell) -> Paragraph:
    return Paragraph(command_line(cell), is_to_copy=True)


def _by_scenario(plan: BenchPlan) -> Table:
    cells = Counter(cell.scenario for cell in plan.cells)
    skipped = Counter(cell.scenario for cell in plan.cells if cell.skip)
    first = Counter(cell.scenario for cell in plan.cells if cell.repeat == 1)
    rows = []
    for name, number in cells.items():
        warm = _warmup(next(cell for cell in plan.cells if cell.scenario == name))
        rows.append((name, str(first[name]), str(number), str(skipped[name] or ""), warm))
    if len(cells) > 1:
        totals = (str(first.total()), str(cells.total()), str(skipped.total() or ""))
        rows.append(("all", *totals, ""))
    columns = columns_of("scenario", "configurations", "cells", "skipped", "warm-up")
    return Table(columns, tuple(rows))


def _warmup(cell: Cell) -> str:
    """Return the warm-up time of a cell, if its command states one (`erg train` does)."""
    if erg_train.FILE not in cell.files:
        return ""
    said_s = erg_train.warmup_s(cell.files[erg_train.FILE])
    return duration(Metrics().warmup_s) + " (default)" if said_s is None else duration(said_s)


def _settings(cell: Cell, names: Sequence[str]) -> str:
    return ", ".join(_named_settings(cell, names))


def _named_settings(cell: Cell, names: Sequence[str]) -> list[str]:
    """Return `name=value` of each setting, in one line."""
    there = {name: str(cell.settings[name]) for name in names if name in cell.settings}
    return [f"{name}={value}".replace("\n", "\\n") for name, value in there.items()]


def heading(cell: Cell) -> str:
    """Return a cell in one line: number, scenario and settings."""
    settings = _settings(cell, list(cell.settings))
    return ": ".join(filter(None, (f"# {_title(cell)}", settings)))


def _title(cell: Cell) -> str:
    return f"exp_{cell.index}: {cell.scenario}, repeat {cell.repeat}"


def _cells(cells: Sequence[Cell], names: Sequence[str]) -> Table:
    rows = []
    for cell in cells:
        repeat = f"repeat {cell.repeat}" if cell.repeat > 1 else ""
        settings = ", ".join(filter(None, (_settings(cell, names), repeat)))
        rows.append((str(cell.index), cell.scenario, settings, cell.skip or ""))
    columns = (TableColumn("cell", "number"), "scenario", "settings", "skipped because")
    table = Table(columns, tuple(rows))
    return table if any(cell.skip for cell in cells) else table.only(range(3))


def command_line(cell: Cell) -> str:
    """Return the command with its environment; placeholders are filled in later."""
    put = [f"{name}={shlex.quote(value)}" for name, value in cell.environment.items()]
    words = [word.replace(BRACE, "{") for word in cell.command]
    quoted = [word if word.startswith("{") else shlex.quote(word) for word in words]
    launcher = [] if cell.launch == "plain" else [f"[{cell.launch}, {cell.num_gpus} ranks]"]
    if cell.nodes > 1:
        launcher = [f"[{cell.launch}, {cell.num_gpus} ranks on each of {cell.nodes} nodes]"]
    return " ".join([*put, *launcher, *quoted])


def in_words(estimate: DurationEstimate) -> str:
    """Return the estimated time and its basis."""
    estimated = estimate.measured + estimate.alike + estimate.given
    if not estimated and not estimate.unknown:
        return "nothing would run: every cell is skipped"
    if not estimated:
        return "time: unknown until there are results of an earlier run"
    rests = [
        (estimate.measured, "by the same configuration's earlier runs"),
        (estimate.alike, "by other cells of the scenario"),
        (estimate.given, "by the time given"),
    ]
    rest = ", ".join(f"{number} {words}" for number, words in rests if number)
    unknown = f"; {estimate.unknown} cells not known and not counted" if estimate.unknown else ""
    return (
        f"time: about {_estimated_time(estimate.total_s)} one after the other, without cool-downs"
        f" ({rest}{unknown})"
    )


def _estimated_time(seconds: float) -> str:
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} min"
    return f"{seconds / _HOUR_S:.1f} h"


# Progress.


_ORDER: tuple[Status, ...] = (
    *("ok", "running", "pending", "oom", "error", "timeout", "diverged", "cancelled", "skipped"),
)
_MOST_ROWS = 12
_REST = -1  # key in `printed` for the cool-down line; not a cell number


def label(cell: Cell, names: Sequence[str]) -> str:
    """Return a short name of a cell: the settings that differ between cells."""
    return " ".join([cell.scenario, *_named_settings(cell, names), f"#{cell.repeat}"])


def counts(
    by_status: Mapping[Status, int],
    *,
    broken: int = 0,
    eta_s: float | None = None,
    rests_s: float = 0,
) -> str:
    """Return a line such as "12 of 48 cells ended: 10 ok, 1 oom, 1 error; about 14 min left"."""
    number = sum(by_status.values())
    left = number - sum(by_status.get(name, 0) for name in FINAL)
    numbers = [f"{by_status[name]} {name}" for name in _ORDER if by_status.get(name)]
    if broken and by_status.get("ok"):
        them = "it claims" if broken == 1 else "they claim"
        numbers[0] += f", {broken} of them not what {them} (see report)"
    text = f"{number - left} of {number} cells ended" + (": " if numbers else "")
    text += ", ".join(numbers)
    if left and rests_s:
        text += f"; cooling down, {duration(rests_s)}"
    return text + (f"; about {duration(eta_s)} left" if left and eta_s is not None else "")


def progress_parts(progress: BenchProgress, names: Sequence[str]) -> tuple[str, Table]:
    """Return counts, and a table of running cells and the latest failures."""
    running = [(cell, progress.states[cell.index]) for cell in progress.running]
    rows = running[:_MOST_ROWS] + progress.failed[-_MOST_ROWS:]
    above = counts(
        progress.counts, broken=progress.broken, eta_s=progress.eta_s, rests_s=progress.rests_s
    )
    return above, cell_table(rows, names)


def list_document(listing: CellListing, *, name: str) -> Document:
    """Return the first cells, the number of others, and counts."""
    more = listing.more
    statuses = ", ".join(f"{more[status]} {status}" for status in _ORDER if more[status])
    others = f"and {more.total()} more ({statuses}): --all shows them"
    return Document(
        f"Cells of {name}",
        (
            cell_table(listing.rows, listing.names),
            *([Paragraph(others, style="dim")] if more else []),
            Paragraph(counts(listing.counts, broken=listing.broken, eta_s=listing.eta_s)),
        ),
    )


def cell_table(
    rows: Sequence[tuple[Cell, CellState]], names: Sequence[str], *, out: Path | None = None
) -> Table:
    """Return a table with a row for each cell: number, status, time and reason.

    `out`: the results directory, to name the file with the evidence of a failure.
    """
    lines = []
    for cell, state in rows:
        failure = failure_log(directory_of(out, cell)) if out and not state.broken else None
        texts = (
            label(cell, names),
            state.reason,
            f"not what it claims: {state.broken}" if state.broken else "",
            f"see {failure}" if failure else "",
        )
        lines.append((str(cell.index), state.status, _time(state), "; ".join(filter(None, texts))))
    columns = (
        TableColumn("cell", "number"),
        TableColumn("status", "status"),
        TableColumn("lasted", "number"),
        "what",
    )
    return Table(columns, tuple(lines))


def _time(state: CellState) -> str:
    """Return the time a cell took, or has taken so far."""
    if state.lasts_s is not None:
        return f"{duration(state.lasts_s)} so far"
    return "" if state.lasted_s is None else duration(state.lasted_s)


def news(
    progress: BenchProgress, printed: dict[int, str], names: Sequence[str], *, out: Path
) -> Iterator[str]:
    """Yield a line for each cell whose status changed; updates `printed`."""
    for cell in progress.plan.cells:
        state = progress.states[cell.index]
        if printed.get(cell.index, "pending") == state.status:
            continue
        printed[cell.index] = state.status
        took = "" if state.lasted_s is None else f" after {duration(state.lasted_s)}"
        yield f"exp_{cell.index} {state.status}{took} ({label(cell, names)}){_why(state)}"
        failure = failure_log(directory_of(out, cell)) if state.status in FAILED else None
        if failure:
            yield f"  see {failure}"
    if progress.rests_s and _REST not in printed:
        yield f"cooling down for {duration(progress.rests_s)}"
        printed[_REST] = ""
    elif not progress.rests_s:
        printed.pop(_REST, None)


def _why(state: CellState) -> str:
    if state.broken:
        return f": not what it claims: {state.broken}"
    return f": {state.reason}" if state.reason else ""


# The report.


_UNWELL = "!"
_WRAPPED = ("tokens/s", "memory")
_REASON_CHARACTERS = 160
_MEMORY_SAID = {
    "hf": "in tensors, as the Trainer reports it",
    "torch": "in tensors, as torch's allocator reports it",
    "nvidia": "on the fullest device above its first reading",
    "nvidia mean": "above the first reading, mean of the devices",
    "host": "resident on the host",
}
_MEMORY_NOTES = (
    "nvidia's values cover all programs on a device, contexts and reserves included; the"
    " Trainer's and the allocator's cover tensors alone",
    "the Trainer reports rank 0 alone; an evaluation within train() is in train's figures",
)


def report_document(overview: Overview, *, name: str, page: Path | None = None) -> Document:
    """Return a bench by configuration: counts, values, failures and notes.

    `page`: the HTML file that it is written to; it adds heat maps and links to the pages of runs.
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
    value = configuration.mean(name)
    if value is None:
        return "-"
    mark = " (impossible)" if configuration.impossible(name) else ""
    mark += "*" * (configuration.is_padded and name.startswith("tokens_"))
    return _value(value, name) + (mark if math.isfinite(value) else "")


def notes(overview: Overview) -> list[str]:
    """Return notes on how to read the metrics."""
    remarks = overview.absences.lines
    if any(len(configuration.rows) > 1 for configuration in overview.configurations):
        remarks.append(
            "figures are geometric means of the repeats that are ok; beside tokens/s is the"
            " interval of the mean (95 %, three repeats or more) or both of two"
        )
    if any(map(_mark, overview.configurations)):
        remarks.append(f"figures marked {_UNWELL} are of runs that did not end well")
    if "run" in overview.rates_from:
        remarks.append(
            "tokens/s and samples/s are the pace of training: steps after the warm-up, without"
            " evaluation and checkpoints (timed_steps in timed_s of --export); tokens/s of the"
            " whole run stand beside them; time is train_runtime of the Trainer, else of the run"
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
    lines = (_line(made, settings, addresses) for made in overview.configurations)
    return Table(columns, tuple(lines))


def _line(
    configuration: Configuration, settings: Sequence[str], addresses: Mapping[str, str]
) -> tuple[str, ...]:
    first = configuration.rows[0]
    name = configuration_name(first, settings) or f"cell {first['index']}"
    figures = (_figure(configuration, columns) for columns in report_heads().values())
    links = LinkCell(tuple(Link(path, addresses.get(path, "")) for path in configuration.paths))
    return (name, configuration.outcomes, *figures, links)


def _figure(configuration: Configuration, columns: Sequence[str]) -> str:
    """Return the mean of repeats in the first column that has one."""
    rows = configuration.ok or configuration.rows
    means = ((column, of_repeats(rows, column)) for column in columns)
    column, mean = next((pair for pair in means if pair[1] is not None), ("", None))
    if mean is None:
        return "-"
    mark = _mark(configuration)
    if bench_columns()[column].unit == "tokens/s":
        mark += "*" * configuration.is_padded
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


def _mark(configuration: Configuration) -> str:
    """Return the mark for values from repeats none of which succeeded."""
    values = (row[column] for row in configuration.rows for column in view_columns("bench report"))
    is_marked = not configuration.ok and any(value is not None for value in values)
    return _UNWELL if is_marked else ""


def _addresses(overview: Overview, page: Path) -> dict[str, str]:
    """Return relative addresses of the pages of runs, by cell directory."""
    return {
        path: quote(os.path.relpath(report.resolve(), page.resolve().parent))
        for configuration in overview.configurations
        for path in configuration.paths
        if (report := report_of(path)) is not None
    }


# Heat maps.


def _heat_maps(overview: Overview, addresses: Mapping[str, str]) -> tuple[Part, ...]:
    """Return a heat map of each metric that a configuration has, the main ones open."""
    layout = matrix(overview)
    number = len(overview.configurations)
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
    none = f"No {which} has: {', '.join(absent)}."
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
    mean = configuration.mean(metric)
    if mean is None:
        state, text = _without(configuration)
        return HeatCell(text, None, state, _shortened(configuration.reason), links)
    number = configuration.runs(metric)
    text = figure_in_words(configuration, metric) + (f" ({number} runs)" if number > 1 else "")
    is_well = configuration.status == "ok"
    remarks: tuple[str, ...] = () if is_well else (f"✕ {configuration.status}",)
    impossible = configuration.impossible(metric)
    if impossible:
        remarks += _shortened(impossible)
        return HeatCell(text, None, "none impossible", remarks, links)
    return HeatCell(text, mean, remarks=remarks, links=links)


def _without(configuration: Configuration) -> tuple[str, str]:
    """Return the state and text of a cell that lacks the metric."""
    if configuration.ok:
        return "none", "- no figure"
    if configuration.is_waiting:
        return "waiting", f"… {configuration.status}"
    return "failed", f"✕ {configuration.status}"


def _shortened(reason: str) -> tuple[str, ...]:
    """Return a reason cut to the size of a cell, or nothing if there is none."""
    if len(reason) > _REASON_CHARACTERS:
        reason = f"{reason[:_REASON_CHARACTERS].rstrip()}..."
    return (reason,) if reason else ()
