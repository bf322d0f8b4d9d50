"""A plan on the terminal: what there is of each scenario, each cell and its command, the time."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ergmeter.bench.overview import varying
from ergmeter.bench.plan import erg_train
from ergmeter.bench.plan.cells import BRACE
from ergmeter.units import duration
from ergmeter.workloads.sft.config_sections import Metrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.bench.plan.cells import BenchPlan, Cell, DurationEstimate

_SHOWN = 20
_MINUTE_S, _HOUR_S = 60, 3600


def plan_view(
    plan: BenchPlan, estimate: DurationEstimate, *, every: bool = False
) -> RenderableType:
    """The plan. `every`: each cell with all its settings and its whole command, however many."""
    parts: list[RenderableType] = [_by_scenario(plan), Text()]
    cells = plan.cells if every else plan.cells[:_SHOWN]
    names = varying(plan.cells)
    parts.append(_cells(cells, names))
    if len(plan.cells) > len(cells):
        parts.append(Text(f"... and {len(plan.cells) - len(cells)} more", "dim"))
    alike = _settings(plan.cells[0], [n for n in plan.cells[0].settings if n not in names])
    if alike:
        parts += [Text(), Text(f"in {'all' if plan.cells[1:] else 'it'}: {alike}")]
    started = [cell for cell in cells if not cell.skip]
    if every:
        for cell in cells:
            parts += [Text(), Text(heading(cell), "dim"), Text(command_line(cell))]
    elif started:
        parts += [Text(), Text(f"the command of {started[0].index}:", "dim")]
        parts.append(Text(command_line(started[0])))
    slow = plan.settings.get("slow") or []
    if slow:
        parts += [Text(), Text(f"left out, being slow: {', '.join(slow)} (name it to run it)")]
    return Group(*parts, Text(), Text(in_words(estimate)))


def _by_scenario(plan: BenchPlan) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("scenario")
    for title in ("configurations", "cells", "skipped", "warm-up"):
        table.add_column(title, justify="right")
    cells = Counter(cell.scenario for cell in plan.cells)
    skipped = Counter(cell.scenario for cell in plan.cells if cell.skip)
    first = Counter(cell.scenario for cell in plan.cells if cell.repeat == 1)
    for name, number in cells.items():
        warm = _warmup(next(cell for cell in plan.cells if cell.scenario == name))
        table.add_row(name, str(first[name]), str(number), str(skipped[name] or ""), warm)
    if len(cells) > 1:
        table.add_row("all", str(first.total()), str(cells.total()), str(skipped.total() or ""))
    return table


def _warmup(cell: Cell) -> str:
    """What of a cell's time is in none of its figures, where we say it: `erg train` does."""
    if erg_train.FILE not in cell.files:
        return ""
    said_s = erg_train.warmup_s(cell.files[erg_train.FILE])
    return duration(Metrics().warmup_s) + " (default)" if said_s is None else duration(said_s)


def _settings(cell: Cell, names: Sequence[str]) -> str:
    return ", ".join(f"{name}={cell.settings[name]}" for name in names if name in cell.settings)


def heading(cell: Cell) -> str:
    """The cell in a line: its number, whose it is and all its settings."""
    said = _settings(cell, list(cell.settings))
    return f"# exp_{cell.index}: {cell.scenario}, repeat {cell.repeat}" + (
        f": {said}" if said else ""
    )


def _cells(cells: Sequence[Cell], names: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("cell", "scenario", "settings"):
        table.add_column(title)
    for cell in cells:
        line = Text(_settings(cell, names))
        if cell.repeat > 1:
            line.append(f"{', ' if line.plain else ''}repeat {cell.repeat}")
        if cell.skip:
            line.append(f"  skipped: {cell.skip}", "yellow")
        table.add_row(str(cell.index), cell.scenario, line)
    return table


def command_line(cell: Cell) -> str:
    """What is started, with its environment, as it can be read; places are filled in later."""
    put = [f"{name}={shlex.quote(value)}" for name, value in cell.environment.items()]
    words = [word.replace(BRACE, "{") for word in cell.command]
    said = [word if word.startswith("{") else shlex.quote(word) for word in words]
    launcher = [] if cell.launch == "plain" else [f"[{cell.launch}, {cell.num_gpus} ranks]"]
    if cell.nodes > 1:
        launcher = [f"[{cell.launch}, {cell.num_gpus} ranks on each of {cell.nodes} nodes]"]
    return " ".join([*put, *launcher, *said])


def in_words(estimate: DurationEstimate) -> str:
    """The time, and what it rests on."""
    known = estimate.measured + estimate.alike + estimate.given
    if not known and not estimate.unknown:
        return "nothing would run: every cell is skipped"
    if not known:
        return "time: not known; results of an earlier run of it would tell"
    rests = [
        (estimate.measured, "by the same configuration's earlier runs"),
        (estimate.alike, "by other cells of the scenario"),
        (estimate.given, "by the time given"),
    ]
    said = ", ".join(f"{number} {words}" for number, words in rests if number)
    unknown = f"; {estimate.unknown} cells not known and not counted" if estimate.unknown else ""
    return (
        f"time: about {_time(estimate.total_s)} one after the other, without cool-downs"
        f" ({said}{unknown})"
    )


def _time(seconds: float) -> str:
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} min"
    return f"{seconds / _HOUR_S:.1f} h"


def document(plan: BenchPlan, estimate: DurationEstimate) -> dict[str, Any]:
    """The plan as JSON, with the estimate."""
    names = ("total_s", "measured", "alike", "given", "unknown", "skipped")
    return {**plan.to_json(), "estimate": {name: getattr(estimate, name) for name in names}}
