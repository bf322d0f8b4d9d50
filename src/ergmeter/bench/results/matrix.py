"""The cells of a bench as a matrix: which settings vary, and what each configuration came to.

The trap: a failed cell that looks like a slow one. A configuration has its figures or the words for
what became of it, never a zero; and configurations are not averaged with each other: one setting
runs across, all others that vary name the rows, so that each has a place of its own.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.bench.gate.pairing import impossible_in
from ergmeter.bench.results.overview import MEMORY, of_repeats

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ergmeter.bench.results.overview import Overview

FIGURES = {
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_device": "tokens/s per device",
    "samples_per_s": "samples/s",
    "joules_per_token": "J/token",
    "mfu_frac": "MFU",
    "whole_run_tokens_per_s": "tokens/s, whole run",
    "whole_run_mfu_frac": "MFU, whole run",
    "whole_run_joules_per_token": "J/token, whole run",
    "memory_hf_peak_bytes": "memory in tensors, peak (hf)",
    "memory_allocator_peak_bytes": "memory in tensors, peak (torch)",
    "memory_nvidia_peak_bytes": "device memory, peak",
    "memory_nvidia_mean_bytes": "device memory, peak, mean of the devices",
    "memory_process_peak_bytes": "host memory, peak",
    "runtime_s": "time",
    "loss": "loss",
}
LOWER = ("joules_per_token", "whole_run_joules_per_token", *MEMORY, "runtime_s", "loss")
# What is read best from left to right: the sizes that a bench is made to scale.
_ACROSS = (
    *("num_gpus", "nodes", "per_device_train_batch_size", "effective_batch_size"),
    *("max_seq_length", "gradient_accumulation_steps"),
)
_MOST_ACROSS = 8
_LONGEST = 16  # characters of a value in a head
_WAITING = ("pending", "running", "skipped")
_REPORTS = ("report.html", "run/report.html")


@dataclass(frozen=True, slots=True)
class Configuration:
    """One configuration: its settings, how its repeats ended, their mean figures."""

    settings: Mapping[str, Any]
    status: str
    is_ok: bool  # whether a repeat came to its end
    is_waiting: bool
    reason: str
    figures: Mapping[str, float]  # one may be nan, as a loss that diverged is
    runs: Mapping[str, int]  # how many values each figure is of
    is_padded: bool  # whether its tokens count padding
    paths: tuple[str, ...]  # of its cells
    impossible: Mapping[str, str] = field(default_factory=dict)  # by figure, why it can't be right


@dataclass(frozen=True, slots=True)
class Matrix:
    """Configurations by what tells them apart: `down` names the rows, `across` the columns."""

    down: tuple[str, ...]
    across: str | None
    configurations: tuple[Configuration, ...]
    figures: tuple[str, ...]

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """The values that name the rows, in order."""
        named = {tuple(one.settings[name] for name in self.down) for one in self.configurations}
        return sorted(named, key=lambda row: [_rank(value) for value in row])

    @property
    def columns(self) -> list[Any]:
        """The values that run across, in order; one that is None where nothing does."""
        if self.across is None:
            return [None]
        return sorted({one.settings[self.across] for one in self.configurations}, key=_rank)

    @property
    def places(self) -> dict[tuple[tuple[Any, ...], Any], list[Configuration]]:
        """What stands where: by the values of a row and that of a column."""
        found: dict[tuple[tuple[Any, ...], Any], list[Configuration]] = defaultdict(list)
        for one in self.configurations:
            row = tuple(one.settings[name] for name in self.down)
            found[row, one.settings[self.across] if self.across else None].append(one)
        return dict(found)


def matrix(found: Overview) -> Matrix:
    """Of the configurations that an overview has kept."""
    names = found.shown
    groups = [configuration(rows, names) for rows in found.groups.values()]
    across = _across(groups, names)
    figures = tuple(name for name in FIGURES if any(name in one.figures for one in groups))
    down = tuple(name for name in names if name != across)
    return Matrix(down, across, tuple(groups), figures)


def configuration(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> Configuration:
    """The repeats of one configuration, by the settings of these names."""
    ok = [row for row in rows if row["status"] == "ok"]
    counts = Counter(str(row["status"]) for row in rows)
    status = (
        "ok"
        if len(ok) == len(rows)
        else ", ".join(f"{n} {s}" if len(rows) > 1 else s for s, n in counts.most_common())
    )
    reasons = [str(row["reason"]) for row in rows if row["status"] != "ok" and row["reason"]]
    means = {name: of_repeats(ok, name) for name in FIGURES}
    return Configuration(
        settings={name: _plain(rows[0].get(name)) for name in names},
        status=status,
        is_ok=bool(ok),
        is_waiting=not ok and counts.keys() <= set(_WAITING),
        reason=reasons[0] if reasons else "",
        figures={name: mean for name, mean in means.items() if mean is not None},
        runs={name: sum(row[name] is not None for row in ok) for name in FIGURES},
        is_padded=any(row["tokens_counted"] == "computed" for row in ok),
        paths=tuple(str(row["path"]) for row in rows if row["path"]),
        impossible=impossible_in(ok),
    )


def report_of(path: str) -> Path | None:
    """The page that was made of a cell's run, if it lies in the cell's directory."""
    return next((found for name in _REPORTS if (found := Path(path) / name).is_file()), None)


def _across(groups: Sequence[Configuration], names: Sequence[str]) -> str | None:
    """The setting that runs across: few short values, a size before anything else."""
    if len(names) < 2:
        return None
    fit = [name for name in names if _is_short({one.settings[name] for one in groups})]
    return next((name for name in _ACROSS if name in fit), fit[-1] if fit else None)


def _is_short(values: set[Any]) -> bool:
    return 1 < len(values) <= _MOST_ACROSS and all(len(str(one)) <= _LONGEST for one in values)


def _plain(value: object) -> object:
    """A setting that can name a row: a list in the words of its file."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def _rank(value: object) -> tuple[int, float, str]:
    """Numbers by their size, then words, then what is not said."""
    if value is None:
        return 2, 0.0, ""
    try:
        return 0, float(str(value)), ""
    except ValueError:
        return 1, 0.0, str(value)
