"""The plan of a bench, and its progress while it runs.

Progress is a live table on a terminal, elsewhere one line for each finished cell. Finished cells
are counted; only running and failed cells have a row.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ergmeter.bench.execute.driver import DurationEstimate
from ergmeter.bench.execute.outcome import FINAL, Status
from ergmeter.bench.execute.state import CellState, directory_of
from ergmeter.bench.overview import CellListing, failure_log, varying
from ergmeter.bench.plan import erg_train
from ergmeter.bench.plan.cells import BRACE, BenchPlan, Cell
from ergmeter.units import duration
from ergmeter.workloads.sft.config_sections import Metrics

if TYPE_CHECKING:
    from ergmeter.bench.execute.driver import BenchProgress

# The plan.


_MOST_CELLS = 20
_MINUTE_S, _HOUR_S = 60, 3600


def plan_view(
    plan: BenchPlan, estimate: DurationEstimate, *, every: bool = False
) -> RenderableType:
    """Render the plan. `every`: all cells with all settings and the full command."""
    parts: list[RenderableType] = [_by_scenario(plan), Text()]
    cells = plan.cells if every else plan.cells[:_MOST_CELLS]
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
    """Return the warm-up time of a cell, if its command states one (`erg train` does)."""
    if erg_train.FILE not in cell.files:
        return ""
    said_s = erg_train.warmup_s(cell.files[erg_train.FILE])
    return duration(Metrics().warmup_s) + " (default)" if said_s is None else duration(said_s)


def _settings(cell: Cell, names: Sequence[str]) -> str:
    return ", ".join(f"{name}={cell.settings[name]}" for name in names if name in cell.settings)


def heading(cell: Cell) -> str:
    """Return a cell in one line: number, scenario and settings."""
    settings = _settings(cell, list(cell.settings))
    return f"# exp_{cell.index}: {cell.scenario}, repeat {cell.repeat}" + (
        f": {settings}" if settings else ""
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
        return "time: not known; results of an earlier run of it would tell"
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


def document(plan: BenchPlan, estimate: DurationEstimate) -> dict[str, Any]:
    """Return the plan and the time estimate as JSON."""
    names = ("total_s", "measured", "alike", "given", "unknown", "skipped")
    return {**plan.to_json(), "estimate": {name: getattr(estimate, name) for name in names}}


_STYLES = {"ok": "green", "running": "cyan", "pending": "dim", "skipped": "dim"}
_ORDER: tuple[Status, ...] = (
    *("ok", "running", "pending", "oom", "error", "timeout", "diverged", "cancelled", "skipped"),
)
_FAILED = ("oom", "error", "timeout", "diverged", "cancelled")
_MOST_ROWS = 12
_REST = -1  # key in `printed` for the cool-down line; not a cell number


def label(cell: Cell, names: Sequence[str]) -> str:
    """Return a short name of a cell: the settings that differ between cells."""
    parts = [f"{name}={cell.settings[name]}" for name in names if name in cell.settings]
    return " ".join([cell.scenario, *parts, f"#{cell.repeat}"])


def counts(
    by_status: Mapping[Status, int],
    *,
    broken: int = 0,
    eta_s: float | None = None,
    rests_s: float = 0,
) -> Text:
    """Return a line such as "12 of 48 cells ended: 10 ok, 1 oom, 1 error; about 14 min left"."""
    number = sum(by_status.values())
    left = number - sum(by_status.get(name, 0) for name in FINAL)
    text = Text(f"{number - left} of {number} cells ended")
    present = [name for name in _ORDER if by_status.get(name)]
    for index, name in enumerate(present):
        text.append(": " if index == 0 else ", ")
        text.append(f"{by_status[name]} {name}", _STYLES.get(name, "red"))
        if name == "ok" and broken:
            them = "it claims" if broken == 1 else "they claim"
            text.append(f", {broken} of them not what {them} (see report)", "red")
    if left and rests_s:
        text.append(f"; cooling down, {duration(rests_s)}")
    if left and eta_s is not None:
        text.append(f"; about {duration(eta_s)} left")
    return text


def live(progress: BenchProgress, names: Sequence[str]) -> RenderableType:
    """Render counts, running cells and the latest failures."""
    cells = {cell.index: cell for cell in progress.plan.cells}
    failed = [cell.index for cell, _ in progress.failed]
    rows = [cell.index for cell in progress.running][:_MOST_ROWS] + failed[-_MOST_ROWS:]
    cell_table = table([(cells[i], progress.states[i]) for i in rows], names)
    above = counts(
        progress.counts, broken=progress.broken, eta_s=progress.eta_s, rests_s=progress.rests_s
    )
    return Group(above, cell_table)


def listed(cell_listing: CellListing) -> RenderableType:
    """Render the first cells, the number of others, and counts."""
    parts: list[RenderableType] = [table(cell_listing.rows, cell_listing.names)]
    if cell_listing.more:
        number = cell_listing.more.total()
        parts.append(
            Text(f"and {number} more ({_by_status(cell_listing.more)}): --all shows them", "dim")
        )
    return Group(
        *parts, counts(cell_listing.counts, broken=cell_listing.broken, eta_s=cell_listing.eta_s)
    )


def _by_status(by_status: Mapping[Status, int]) -> str:
    return ", ".join(f"{by_status[name]} {name}" for name in _ORDER if by_status.get(name))


def table(
    rows: Sequence[tuple[Cell, CellState]], names: Sequence[str], *, out: Path | None = None
) -> Table:
    """Return a table with a row a cell: number, status, time and reason.

    `out`: the results directory, to name the file with the evidence of a failure.
    """
    made = Table(box=None, pad_edge=False, header_style="dim")
    made.add_column("cell", justify="right")
    made.add_column("status", no_wrap=True)
    made.add_column("lasted", justify="right", no_wrap=True)
    made.add_column("what", overflow="fold")
    for cell, state in rows:
        what = Text(label(cell, names))
        if state.reason:
            what.append(f"  {state.reason}", "dim")
        if state.broken:
            what.append(f"  not what it claims: {state.broken}", "red")
        failure = failure_log(directory_of(out, cell)) if out else None
        if failure and not state.broken:
            what.append(f"  see {failure}", "dim")
        made.add_row(
            str(cell.index),
            Text(state.status, _STYLES.get(state.status, "red")),
            _time(state),
            what,
        )
    return made


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
        failure = failure_log(directory_of(out, cell)) if state.status in _FAILED else None
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
