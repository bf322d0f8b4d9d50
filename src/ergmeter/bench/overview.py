"""Summarises a bench for a page: overview, matrix of configurations, list of cells, memory.

Rows are folded one at a time. Only the first `most` configurations are stored; the others are
counted. A configuration has its metrics or the reason for their absence, never a zero, and
configurations are not averaged with each other.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ergmeter.bench.execute.outcome import FINAL, Status
from ergmeter.bench.plan.cells import Cell, Value
from ergmeter.bench.tables import MEMORY, STAGES
from ergmeter.compare.pairing import COMMON, UNNAMED, naming_settings
from ergmeter.metrics.catalog import Position, every_metric, in_view
from ergmeter.stats.ratio import mean
from ergmeter.units import grouped

if TYPE_CHECKING:
    import pyarrow as pa

    from ergmeter.bench.execute.state import CellState


def cell_document(cell: Cell, state: CellState, path: Path) -> dict[str, Any]:
    """One cell as a JSON object: its configuration, its state and its directory."""
    return {
        "cell": cell.index,
        "id": cell.id,
        "scenario": cell.scenario,
        "repeat": cell.repeat,
        "num_gpus": cell.num_gpus,
        "nodes": cell.nodes,
        "settings": dict(cell.settings),
        "status": state.status,
        "reason": state.reason,
        "attempts": len(state.attempts),
        "claims_broken": state.broken,
        # The time of attempts that will be repeated does not count.
        "duration_s": state.lasted_s if state.is_final else None,
        "path": str(path),
    }


class Varying:
    """Collects the settings that vary between cells, in order of first appearance."""

    def __init__(self) -> None:
        self._first: dict[str, Value] = {}
        self.differ: set[str] = set()  # settings with several values
        self._in_all: set[str] | None = None

    def add(self, settings: Mapping[str, Value]) -> None:
        """Add the settings of a cell."""
        self._in_all = {*settings} if self._in_all is None else self._in_all & settings.keys()
        for name, value in settings.items():
            if self._first.setdefault(name, value) != value:
                self.differ.add(name)

    @property
    def names(self) -> list[str]:
        """Settings with several values, or that only some cells have."""
        constant = (self._in_all or set()) - self.differ
        return [name for name in self._first if name not in constant]


def varying(cells: Iterable[Cell]) -> list[str]:
    """Return the names of the settings that vary among these cells."""
    settings = Varying()
    for cell in cells:
        settings.add(cell.settings)
    return settings.names


def failure_log(directory: Path) -> Path | None:
    """Return the log to read of a failed cell: the first of its output files that is not empty."""
    names = ("stderr", "stderr.node0", "stdout", "stdout.node0", "runner.log")
    paths = [directory / name for name in names]
    return next((path for path in paths if path.is_file() and path.stat().st_size), None)


@dataclass(frozen=True, slots=True)
class CellListing:
    """The first cells with their states, the names of settings that vary, and counts of all cells.

    `more`: matching cells without a row, by status. `broken`: cells with unmet expectations.
    `eta_s`: estimated time of the remaining cells, run one by one; None if no cell has ended yet,
    or none is running.
    """

    rows: list[tuple[Cell, CellState]]
    names: list[str]
    more: Counter[Status]
    counts: Counter[Status]
    broken: int
    eta_s: float | None


def cell_listing(
    cells: Iterable[tuple[Cell, CellState]], *, most: int | None, statuses: Collection[str] = ()
) -> CellListing:
    """List the first `most` cells, only those with these statuses if given; count all cells."""
    settings, broken = Varying(), 0
    rows: list[tuple[Cell, CellState]] = []
    more, counts = Counter[Status](), Counter[Status]()
    durations_s: list[float] = []
    for cell, state in cells:
        settings.add(cell.settings)
        counts[state.status] += 1
        broken += bool(state.broken)
        if state.is_final and state.lasted_s is not None:
            durations_s.append(state.lasted_s)
        if statuses and state.status not in statuses:
            continue
        if most is None or len(rows) < most:
            rows.append((cell, state))
        else:
            more[state.status] += 1
    left = sum(number for status, number in counts.items() if status not in FINAL)
    eta_s = fmean(durations_s) * left if durations_s and counts["running"] else None
    return CellListing(rows, settings.names, more, counts, broken, eta_s)


@cache
def view_columns(view: str) -> dict[str, Position]:
    """The columns of a bench's results that a view shows, in its order, with their labels."""
    metrics = ((every_metric()[key], at) for key, at in in_view(view).items())
    return {
        metric.column: at._replace(label=at.label or metric.title)
        for metric, at in metrics
        if metric.column
    }


@cache
def report_heads() -> Mapping[str, Sequence[str]]:
    """Columns of results by head of the report's table, which shows the first with a value."""
    columns = view_columns("bench report").items()
    return grouped((at.group or at.label, column) for column, at in columns)


@cache
def memory_sources() -> dict[str, str]:
    """The label of the source of each memory column, by column."""
    metrics = view_columns("bench report").items()
    return {column: at.label for column, at in metrics if at.group == "memory"}


_NUMBERS = re.compile(r"[\d.]+")
_MOST = 8  # cells that are named


class Absences:
    """Collects, row by row, the metrics that successful cells lack, with the reasons."""

    def __init__(self) -> None:
        self._cells = 0
        self._missing: dict[tuple[tuple[str, ...], str], tuple[str, list[int]]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a cell's row. Failed cells are ignored: the failure itself is the reason."""
        if row["status"] != "ok":
            return
        self._cells += 1
        reasons = json.loads(row["missing"] or "{}")
        columns_of = view_columns("bench report")
        lacking = grouped(
            # The last memory column is the host's, which every run should have.
            (reasons.get(columns[-1]) or "no source has it", name)
            for name, columns in report_heads().items()
            if columns_of[columns[-1]].is_expected
            and all(row[column] is None for column in columns)
        )
        for why, names in lacking.items():
            key = tuple(names), _NUMBERS.sub("#", why)
            self._missing.setdefault(key, (why, []))[1].append(row["index"])

    @property
    def lines(self) -> list[str]:
        """One line for each reason, with the metrics and the cells that it applies to."""
        return [
            f"no {', '.join(names)} in {self._named(cells)}: {why}"
            for (names, _), (why, cells) in self._missing.items()
        ]

    def _named(self, cells: list[int]) -> str:
        if len(cells) == self._cells > 1:
            return f"all {len(cells)} cells that are ok"
        names = ", ".join(str(cell) for cell in cells[:_MOST])
        more = f" and {len(cells) - _MOST} more" if len(cells) > _MOST else ""
        return f"cell{'s' * (len(cells) > 1)} {names}{more}"


_WAITING = ("pending", "running", "skipped")


@dataclass(frozen=True, slots=True)
class Configuration:
    """One configuration: the rows of its repeats."""

    rows: list[Mapping[str, Any]]

    @property
    def ok(self) -> list[Mapping[str, Any]]:
        """The repeats whose status is ok."""
        return [row for row in self.rows if row["status"] == "ok"]

    @property
    def is_waiting(self) -> bool:
        """True if all repeats are pending, running or skipped."""
        return all(row["status"] in _WAITING for row in self.rows)

    @property
    def outcomes(self) -> str:
        """The statuses of the repeats, with their counts: "3 ok, 1 error"."""
        counts = Counter(str(row["status"]) for row in self.rows)
        is_repeated = len(self.rows) > 1
        return ", ".join(f"{n} {s}" if is_repeated else s for s, n in counts.most_common())

    @property
    def status(self) -> str:
        """The statuses with their counts; "ok" if all repeats are ok."""
        return "ok" if len(self.ok) == len(self.rows) else self.outcomes

    @property
    def reason(self) -> str:
        """The reason of the first repeat that is not ok; empty if none has a reason."""
        failed = (row for row in self.rows if row["status"] != "ok" and row["reason"])
        return next((str(row["reason"]) for row in failed), "")

    @property
    def paths(self) -> list[str]:
        """The directories of the repeats."""
        return [str(row["path"]) for row in self.rows if row["path"]]

    @property
    def is_padded(self) -> bool:
        """True if the token rate of any repeat counts padding."""
        return any(row["tokens_counted"] == "computed" for row in self.ok or self.rows)

    def mean(self, column: str) -> float | None:
        """A metric's value over the repeats that are ok, by `of_repeats`; nan is possible."""
        return of_repeats(self.ok, column)

    def runs(self, column: str) -> int:
        """The number of repeats that the mean is made of."""
        return sum(row[column] is not None for row in self.ok)

    def impossible(self, column: str) -> str:
        """Why the metric can't be right; empty if it can."""
        reasons = (json.loads(row["impossible"] or "{}").get(column) for row in self.ok)
        return next(filter(None, reasons), "")


_FACTS = (
    *("index", "group", "status", "reason", "claims_broken", "tokens_counted", "rates_from"),
    *("settings", "path", "missing", "impossible", "damaged", *COMMON),
)
_FEWEST = 3  # repeats needed for an interval
_WELL = ("ok", *_WAITING)


class Overview:
    """Counts of all cells, and the first `most` configurations with the rows of their repeats."""

    def __init__(self, *, most: int | None = None) -> None:
        self._most = most
        self._others: set[object] = set()
        self._settings = Varying()
        self._stored: dict[object, Configuration] = {}
        self.cells = 0
        self.statuses: Counter[str] = Counter()
        self.troubles: list[str] = []
        self.more_troubles = 0
        self.tokens_counted: set[str] = set()
        self.rates_from: set[str] = set()
        self.memory: set[str] = set()
        self.absences = Absences()
        self._metrics = [*{**view_columns("bench report"), **view_columns("bench matrix")}]
        self._unnamed = {*_FACTS, *self._metrics, *UNNAMED}

    def add(self, batch: pa.Table) -> None:
        """Add a batch of rows."""
        self.add_rows(batch.select([*_FACTS, *self._metrics]).to_pylist())

    def add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows that do not come from a table; an empty text is an absent value."""
        for row in rows:
            facts = {name: None if (v := row.get(name)) == "" else v for name in _FACTS}
            metrics = ((name, row.get(name)) for name in self._metrics)
            self._add(facts | {name: v if v is None else float(v) for name, v in metrics})

    @property
    def more(self) -> int:
        """Number of configurations whose rows are not stored."""
        return len(self._others)

    @property
    def configurations(self) -> list[Configuration]:
        """The configurations whose rows are stored."""
        return list(self._stored.values())

    @property
    def shown_columns(self) -> list[str]:
        """The settings that tell configurations from each other; at least "scenario"."""
        firsts = [configuration.rows[0] for configuration in self.configurations]
        return naming_settings(self._settings.differ, firsts) or ["scenario"]

    def _add(self, row: Mapping[str, Any]) -> None:
        self.cells += 1
        self.statuses[row["status"]] += 1
        row = {**json.loads(row["settings"] or "{}"), **row}
        names = row.keys() - self._unnamed | set(COMMON)
        self._settings.add({name: row[name] for name in names})
        self.tokens_counted |= {row["tokens_counted"]} - {None}
        self.rates_from |= {row["rates_from"]} - {None}
        sources = memory_sources().items()
        self.memory |= set([name for column, name in sources if row[column] is not None][:1])
        self.absences.add(row)
        self._keep(row)
        for line in _troubles(row):
            self.add_trouble(line)

    def add_trouble(self, line: str) -> None:
        """Add a line to the troubles; only count it if there are `most` already."""
        if self._most is None or len(self.troubles) < self._most:
            self.troubles.append(line)
        else:
            self.more_troubles += 1

    def _keep(self, row: Mapping[str, Any]) -> None:
        key = repeats_of(row)
        if key in self._stored:
            self._stored[key].rows.append(row)
        elif self._most is None or len(self._stored) < self._most:
            self._stored[key] = Configuration([row])
        else:
            self._others.add(key)


def repeats_of(row: Mapping[str, Any]) -> tuple[object, object]:
    """Return the key of a row's configuration: its group and scenario, which all repeats share.

    Two scenarios may run the same command. A row without a group is its own configuration.
    """
    return (row["group"], row["scenario"]) if row["group"] else (row["index"], None)


def overview(table: pa.Table) -> Overview:
    """Return the Overview of one table of results."""
    made = Overview()
    made.add(table)
    return made


def of_repeats(rows: Iterable[Mapping[str, Any]], column: str) -> float | None:
    """Return the mean of a column over repeats (memory: the maximum); None if no row has a value.

    The mean is geometric, as in comparisons, if all values are positive and finite.
    """
    values: list[float] = [row[column] for row in rows if row[column] is not None]
    if not values:
        return None
    if column.startswith("memory_"):
        return max(values)
    if len(values) == 1 or not _has_ratios(values):
        return sum(values) / len(values)
    return mean(values).value


def spread(rows: Iterable[Mapping[str, Any]], column: str) -> tuple[float, float] | None:
    """The mean's 95 % interval for three repeats or more; the two values for two; else None.

    An interval from two values spans 13 standard errors to each side, so the values say more.
    """
    values: list[float] = [row[column] for row in rows if row[column] is not None]
    if len(values) < 2:
        return None
    if len(values) < _FEWEST or not _has_ratios(values):
        return min(values), max(values)
    average = mean(values)
    assert average.low is not None
    assert average.high is not None
    return average.low, average.high


def _has_ratios(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) and value > 0 for value in values)


def _troubles(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each failure, unmet expectation and damaged file of a cell."""
    if row["status"] not in _WELL:
        yield f"cell {row['index']}: {row['status']}: {row['reason'] or 'no reason known'}"
    if row["claims_broken"]:
        yield f"cell {row['index']}: unmet expectation: {row['claims_broken']}"
    if row["damaged"]:
        yield f"cell {row['index']}: damaged, left out: {row['damaged']}"


# Settings preferred as columns of the matrix: the sizes that a bench scales.
_ACROSS = (
    *("num_gpus", "nodes", "per_device_train_batch_size", "effective_batch_size"),
    *("max_seq_length", "gradient_accumulation_steps"),
)
_MOST_ACROSS = 8
_LONGEST = 16  # characters of a value in a head
_REPORTS = ("report.html", "run/report.html")


@dataclass(frozen=True, slots=True)
class Matrix:
    """Configurations as a grid: settings `down` label its rows, the setting `across` its columns.

    `places`: configurations by row label and column label, which is None without `across`.
    `figures`: columns of results for which any configuration has a value.
    """

    down: tuple[str, ...]
    across: str | None
    places: Mapping[tuple[tuple[Any, ...], Any], list[Configuration]]
    figures: tuple[str, ...]

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """The sorted row labels: a value of each setting in `down`."""
        return sorted({row for row, _ in self.places}, key=lambda row: [*map(_rank, row)])

    @property
    def columns(self) -> list[Any]:
        """The sorted column labels: values of the setting `across`."""
        return sorted({column for _, column in self.places}, key=_rank)


def matrix(bench_overview: Overview) -> Matrix:
    """Return the matrix of the configurations that an overview stores.

    Its columns are a setting with few, short values; a size such as num_gpus is preferred.
    """
    names = bench_overview.shown_columns
    settings = [
        {name: _plain(configuration.rows[0].get(name)) for name in names}
        for configuration in bench_overview.configurations
    ]
    fit = [name for name in names if _is_short({values[name] for values in settings})]
    across = next((name for name in _ACROSS if name in fit), fit[-1] if fit else None)
    across = across if len(names) > 1 else None
    down = tuple(name for name in names if name != across)
    places: dict[tuple[tuple[Any, ...], Any], list[Configuration]] = defaultdict(list)
    for values, configuration in zip(settings, bench_overview.configurations, strict=True):
        row = tuple(values[name] for name in down)
        places[row, values[across] if across else None].append(configuration)
    figures = tuple(
        column
        for column in view_columns("bench matrix")
        if any(made.mean(column) is not None for made in bench_overview.configurations)
    )
    return Matrix(down, across, dict(places), figures)


def report_of(path: str) -> Path | None:
    """Return the HTML report of a cell's run, if the cell's directory has one."""
    return next((report for name in _REPORTS if (report := Path(path) / name).is_file()), None)


def _is_short(values: set[Any]) -> bool:
    return 1 < len(values) <= _MOST_ACROSS and all(len(str(value)) <= _LONGEST for value in values)


def _plain(value: object) -> object:
    """Return a setting as a row label: lists and objects as JSON text."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def _rank(value: object) -> tuple[int, float, str]:
    """Sort key: numbers by size, then words, then absent values."""
    if value is None:
        return 2, 0.0, ""
    try:
        return 0, float(str(value)), ""
    except ValueError:
        return 1, 0.0, str(value)


# GPU memory of each cell.

TABLE_COLUMNS = (
    *("index", "id", "group", "scenario", "repeat", "num_gpus", "status", *MEMORY, "missing"),
)


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One line: source, subject, bytes (None if absent) and a note."""

    by: str
    of: str
    value_bytes: float | None
    note: str = ""


class MemoryTable:
    """GPU memory of the first `most` cells; `more` counts the cells left out."""

    def __init__(self, *, most: int | None = None) -> None:
        self._most = most
        self.cells: list[tuple[str, list[MemoryLine]]] = []
        self.more = 0

    def add(self, batch: pa.Table) -> None:
        """Add a batch of rows. Cells that have not run are skipped."""
        for row in batch.select(TABLE_COLUMNS).to_pylist():
            if row["status"] in _WAITING:
                continue
            if self._most is not None and len(self.cells) >= self._most:
                self.more += 1
                continue
            name = f"{row['index']} {row['scenario'] or ''}".strip()
            self.cells.append((name, list(memory_lines(row))))


def memory_lines(row: Mapping[str, Any]) -> Iterator[MemoryLine]:
    """Yield a row's memory values: per device, by the Trainer and by torch's allocator."""
    missing = json.loads(row["missing"] or "{}")
    yield from _nvidia(row, missing)
    yield from _trainer(row, missing)
    peaks = row["memory_allocator_devices_bytes"]
    if peaks:
        ids = (row["memory_allocator_ids"] or "").split()
        for of, peak in zip(ids, peaks, strict=True):
            yield MemoryLine("torch allocator", of, peak, "peak of tensors, by erg's own probe")
    else:
        yield _absent("torch allocator", "memory_allocator_peak_bytes", missing)


def _nvidia(row: Mapping[str, Any], missing: Mapping[str, str]) -> Iterator[MemoryLine]:
    mean, source = row["memory_nvidia_mean_bytes"], row["memory_nvidia_from"] or "nvidia"
    if mean is None:
        yield _absent(source, "memory_nvidia_mean_bytes", missing)
        return
    each = row["memory_nvidia_devices_bytes"] or ()
    ids = (row["memory_nvidia_ids"] or "").split() or [f"device {n}" for n, _ in enumerate(each)]
    first = row["memory_nvidia_first_bytes"] or [None] * len(each)
    for of, taken, before in zip(ids, each, first, strict=True):
        text = "" if before is None else f"peak above the {_exact(before)} B in use before"
        yield MemoryLine(source, of, taken, text)
    yield MemoryLine(source, "mean", mean, row["memory_nvidia_note"] or "FMS's figure")


def _trainer(row: Mapping[str, Any], missing: Mapping[str, str]) -> Iterator[MemoryLine]:
    by = "huggingface"
    sums = {
        "memory_hf_alloc_bytes": ("allocated", "FMS's program: most at the end of init or train"),
        "memory_hf_peak_bytes": ("peak", "FMS's program: most within init or train"),
        "memory_hf_peak_prose_bytes": ("peak, summed", "FMS's guide: all changes and peaks"),
    }
    if all(row[column] is None for column in sums):
        yield _absent(by, "memory_hf_peak_bytes", missing)
        return
    if row["memory_hf_before_bytes"] is not None:
        yield MemoryLine(by, "before init", row["memory_hf_before_bytes"])
    for stage in STAGES.values():
        left, peak = (row[f"memory_hf_{stage}_{what}_bytes"] for what in ("alloc", "peak"))
        if left is not None:
            yield MemoryLine(by, f"after {stage}", left)
        if peak is not None:
            yield MemoryLine(by, f"peak in {stage}", peak)
    for column, (of, note) in sums.items():
        if row[column] is not None:
            yield MemoryLine(by, of, row[column], note)
        elif column in missing:
            yield MemoryLine(by, of, None, missing[column])
    more = row["memory_hf_discrepancy_bytes"]
    if more is not None:
        yield MemoryLine(by, "guide - program", more, "the same" if not more else _DIFFER)


_DIFFER = "the guide adds the peaks of several stages, which did not occur at once"


def _absent(by: str, column: str, missing: Mapping[str, str]) -> MemoryLine:
    return MemoryLine(by, "-", None, missing.get(column, "no reason was recorded"))


def _exact(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ")
