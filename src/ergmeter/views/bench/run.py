"""How far a bench is: a live table on a terminal, a line for each ended cell elsewhere.

The trap: a screen full of what went well. Counts stand for what is done; a cell has a row of its
own while it runs, and when it failed, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ergmeter.bench.execute.outcome import FINAL
from ergmeter.bench.execute.state import directory_of
from ergmeter.bench.overview import failure_log
from ergmeter.units import duration

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ergmeter.bench.execute.driver import BenchProgress
    from ergmeter.bench.execute.outcome import Status
    from ergmeter.bench.execute.state import CellState
    from ergmeter.bench.overview import CellListing
    from ergmeter.bench.plan.cells import Cell

_STYLES = {"ok": "green", "running": "cyan", "pending": "dim", "skipped": "dim"}
_ORDER: tuple[Status, ...] = (
    *("ok", "running", "pending", "oom", "error", "timeout", "diverged", "cancelled", "skipped"),
)
_FAILED = ("oom", "error", "timeout", "diverged", "cancelled")
_MOST_ROWS = 12
_REST = -1  # no cell's number: that a cool-down was told


def label(cell: Cell, names: Sequence[str]) -> str:
    """A cell in a few words: of its settings those that tell it from others."""
    parts = [f"{name}={cell.settings[name]}" for name in names if name in cell.settings]
    return " ".join([cell.scenario, *parts, f"#{cell.repeat}"])


def counts(
    found: Mapping[Status, int], *, broken: int = 0, eta_s: float | None = None, rests_s: float = 0
) -> Text:
    """ "12 of 48 cells ended: 10 ok, 1 oom, 1 error; about 14 min left"."""
    number = sum(found.values())
    left = number - sum(found.get(name, 0) for name in FINAL)
    text = Text(f"{number - left} of {number} cells ended")
    shown = [name for name in _ORDER if found.get(name)]
    for place, name in enumerate(shown):
        text.append(": " if place == 0 else ", ")
        text.append(f"{found[name]} {name}", _STYLES.get(name, "red"))
        if name == "ok" and broken:
            them = "it claims" if broken == 1 else "they claim"
            text.append(f", {broken} of them not what {them} (see report)", "red")
    if left and rests_s:
        text.append(f"; cooling down, {duration(rests_s)}")
    if left and eta_s is not None:
        text.append(f"; about {duration(eta_s)} left")
    return text


def live(progress: BenchProgress, names: Sequence[str]) -> RenderableType:
    """The counts, what runs now, and what failed last."""
    cells = {cell.index: cell for cell in progress.plan.cells}
    failed = [cell.index for cell, _ in progress.failed]
    rows = [cell.index for cell in progress.running][:_MOST_ROWS] + failed[-_MOST_ROWS:]
    shown = table([(cells[i], progress.states[i]) for i in rows], names)
    above = counts(
        progress.counts, broken=progress.broken, eta_s=progress.eta_s, rests_s=progress.rests_s
    )
    return Group(above, shown)


def listed(found: CellListing) -> RenderableType:
    """The first cells, what there is besides, and all of them in counts."""
    parts: list[RenderableType] = [table(found.rows, found.names)]
    if found.more:
        number = found.more.total()
        parts.append(Text(f"and {number} more ({_by_status(found.more)}): --all shows them", "dim"))
    return Group(*parts, counts(found.counts, broken=found.broken, eta_s=found.eta_s))


def _by_status(found: Mapping[Status, int]) -> str:
    return ", ".join(f"{found[name]} {name}" for name in _ORDER if found.get(name))


def table(
    rows: Sequence[tuple[Cell, CellState]], names: Sequence[str], *, out: Path | None = None
) -> Table:
    """A row a cell: its number, status, time and, where there is one, the reason.

    `out`: the directory of results, where it is to say which file of a cell tells more.
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
        told = failure_log(directory_of(out, cell)) if out else None
        if told and not state.broken:
            what.append(f"  see {told}", "dim")
        made.add_row(
            str(cell.index),
            Text(state.status, _STYLES.get(state.status, "red")),
            _time(state),
            what,
        )
    return made


def _time(state: CellState) -> str:
    """How long it took, or has taken."""
    if state.lasts_s is not None:
        return f"{duration(state.lasts_s)} so far"
    return "" if state.lasted_s is None else duration(state.lasted_s)


def news(
    progress: BenchProgress, told: dict[int, str], names: Sequence[str], *, out: Path
) -> Iterator[str]:
    """A line for each cell whose status is not the one told before; `told` is kept up to date."""
    for cell in progress.plan.cells:
        state = progress.states[cell.index]
        if told.get(cell.index, "pending") == state.status:
            continue
        told[cell.index] = state.status
        took = "" if state.lasted_s is None else f" after {duration(state.lasted_s)}"
        yield f"exp_{cell.index} {state.status}{took} ({label(cell, names)}){_why(state)}"
        seen = failure_log(directory_of(out, cell)) if state.status in _FAILED else None
        if seen:
            yield f"  see {seen}"
    if progress.rests_s and _REST not in told:
        yield f"cooling down for {duration(progress.rests_s)}"
        told[_REST] = ""
    elif not progress.rests_s:
        told.pop(_REST, None)


def _why(state: CellState) -> str:
    if state.broken:
        return f": not what it claims: {state.broken}"
    return f": {state.reason}" if state.reason else ""
