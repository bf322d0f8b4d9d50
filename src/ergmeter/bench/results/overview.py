"""What did a bench come to, on a page? Rows of results folded together as they come.

The trap: a table of 20 000 rows in memory to show the first 200. Rows are kept of the first `most`
configurations, just the columns that a page shows; of the others there are counts.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ergmeter.bench.plan.cell_names import COMMON, NOT_TOLD, repeats_of, telling
from ergmeter.stats.ratio import mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pyarrow as pa

# -- absences --------------------------------------------------------------------------------------
# Which figures of a report are not there, in which cells, and why?
#
# The trap: a dash that nobody explains. Each cell's row has its reasons; cells that lack the same
# for the same reason are one line, though their times and counts differ in it.


# What a report shows, by its columns: the figure is there if one of them is.
_FIGURES = {
    "tokens/s": ("tokens_per_s",),
    "/device": ("tokens_per_s_per_device",),
    "samples/s": ("samples_per_s",),
    "loss": ("loss",),
    "memory": (
        *("memory_process_peak_bytes", "memory_hf_peak_bytes", "memory_allocator_peak_bytes"),
        *("memory_nvidia_peak_bytes", "memory_nvidia_mean_bytes"),
    ),
    "time": ("runtime_s",),
}
_NUMBERS = re.compile(r"[\d.]+")
_MOST = 8  # cells that are named


class Absences:
    """What the cells that ended well do not tell, gathered a row at a time."""

    def __init__(self) -> None:
        self._cells = 0
        self._found: dict[tuple[tuple[str, ...], str], tuple[str, list[int]]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """One more cell. Of one that failed, its failure is the reason."""
        if row["status"] != "ok":
            return
        self._cells += 1
        reasons = json.loads(row["missing"] or "{}")
        lacking: dict[str, list[str]] = {}
        for name, columns in _FIGURES.items():
            if all(row[column] is None for column in columns):
                why = reasons.get(columns[0]) or "nothing told it"
                lacking.setdefault(why, []).append(name)
        for why, names in lacking.items():
            key = tuple(names), _NUMBERS.sub("#", why)
            self._found.setdefault(key, (why, []))[1].append(row["index"])

    @property
    def lines(self) -> list[str]:
        """One for each kind of lack."""
        return [
            f"no {', '.join(names)} in {self._named(cells)}: {why}"
            for (names, _), (why, cells) in self._found.items()
        ]

    def _named(self, cells: list[int]) -> str:
        if len(cells) == self._cells > 1:
            return f"all {len(cells)} cells that are ok"
        shown = ", ".join(str(cell) for cell in cells[:_MOST])
        more = f" and {len(cells) - _MOST} more" if len(cells) > _MOST else ""
        return f"cell{'s' * (len(cells) > 1)} {shown}{more}"


# -- overview --------------------------------------------------------------------------------------


MEMORY = {
    "memory_hf_peak_bytes": "hf",
    "memory_allocator_peak_bytes": "torch",
    "memory_nvidia_peak_bytes": "nvidia",
    "memory_nvidia_mean_bytes": "nvidia mean",
    "memory_process_peak_bytes": "host",
}
_COLUMNS = (
    *("index", "group", "status", "reason", "claims_broken", "tokens_counted", "rates_from"),
    *("tokens_per_s", "tokens_per_s_per_device", "samples_per_s", "loss", "runtime_s", "settings"),
    *("joules_per_token", "mfu_frac", "whole_run_tokens_per_s", "whole_run_mfu_frac"),
    *("whole_run_joules_per_token", "path", "missing", "impossible"),
    *COMMON,
    *MEMORY,
)
_FEWEST = 3  # repeats that an interval is told of
_WELL = ("ok", "pending", "running", "skipped")


class Overview:
    """All cells in counts, and the first configurations with the rows of their repeats."""

    def __init__(self, *, most: int | None = None) -> None:
        self._most = most
        self._others: set[object] = set()
        self._first: dict[str, Any] = {}
        self._differ: set[str] = set()
        self.cells = 0
        self.statuses: Counter[str] = Counter()
        self.groups: dict[object, list[Mapping[str, Any]]] = {}
        self.troubles: list[str] = []
        self.more_troubles = 0
        self.tokens_counted: set[str] = set()
        self.rates_from: set[str] = set()
        self.memory: set[str] = set()
        self.absences = Absences()

    def add(self, batch: pa.Table) -> None:
        """Some rows more."""
        for row in batch.select(_COLUMNS).to_pylist():
            self._add(row)

    @property
    def more(self) -> int:
        """How many configurations there are whose rows are not kept."""
        return len(self._others)

    @property
    def is_repeated(self) -> bool:
        """Whether a configuration ran more than once."""
        return any(len(rows) > 1 for rows in self.groups.values())

    @property
    def shown(self) -> list[str]:
        """The settings that tell configurations apart; those of a bench's own where they must."""
        firsts = [rows[0] for rows in self.groups.values()]
        return telling(self._differ, firsts) or ["scenario"]

    def _add(self, row: Mapping[str, Any]) -> None:
        self.cells += 1
        self.statuses[row["status"]] += 1
        row = {**json.loads(row["settings"] or "{}"), **row}
        for name in row.keys() - set(_COLUMNS) - set(NOT_TOLD) | set(COMMON):
            if self._first.setdefault(name, row[name]) != row[name]:
                self._differ.add(name)
        self.tokens_counted |= {row["tokens_counted"]} - {None}
        self.rates_from |= {row["rates_from"]} - {None}
        kind = next((said for column, said in MEMORY.items() if row[column] is not None), None)
        self.memory |= {kind} if kind else set()
        self.absences.add(row)
        self._keep(row)
        for line in _troubles(row):
            if self._most is None or len(self.troubles) < self._most:
                self.troubles.append(line)
            else:
                self.more_troubles += 1

    def _keep(self, row: Mapping[str, Any]) -> None:
        key = repeats_of(row)
        if key in self.groups:
            self.groups[key].append(row)
        elif self._most is None or len(self.groups) < self._most:
            self.groups[key] = [row]
        else:
            self._others.add(key)


def overview(found: pa.Table) -> Overview:
    """Of a whole table."""
    made = Overview()
    made.add(found)
    return made


def of_repeats(rows: Iterable[Mapping[str, Any]], column: str) -> float | None:
    """A figure of a configuration: the mean of its repeats, of memory the highest; None if none.

    The mean is that of the comparison, the geometric one, where there is one.
    """
    found: list[float] = [row[column] for row in rows if row[column] is not None]
    if not found:
        return None
    if column.startswith("memory_"):
        return max(found)
    if len(found) == 1 or not _has_ratios(found):
        return sum(found) / len(found)
    return mean(found).value


@dataclass(frozen=True, slots=True)
class MeanSpread:
    """Where a configuration's mean lies: the comparison's interval of it, or all that was seen."""

    low: float
    high: float
    is_interval: bool


def spread(rows: Iterable[Mapping[str, Any]], column: str) -> MeanSpread | None:
    """Of three repeats or more the interval of 95 %, of two both; of one there is none.

    An interval of two is 13 standard errors to each side, and tells less than the two.
    """
    found: list[float] = [row[column] for row in rows if row[column] is not None]
    if len(found) < 2:
        return None
    if len(found) < _FEWEST or not _has_ratios(found):
        return MeanSpread(min(found), max(found), is_interval=False)
    whole = mean(found)
    assert whole.low is not None
    assert whole.high is not None
    return MeanSpread(whole.low, whole.high, is_interval=True)


def _has_ratios(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) and value > 0 for value in values)


def _troubles(row: Mapping[str, Any]) -> list[str]:
    """What failed and what is not what it says, with the number of the cell's directory."""
    said = []
    if row["status"] not in _WELL:
        said.append(f"cell {row['index']}: {row['status']}: {row['reason'] or 'no reason known'}")
    if row["claims_broken"]:
        said.append(f"cell {row['index']} is not what it says: {row['claims_broken']}")
    return said
