"""Drives a bench: which cells are left, in which order, and how far it is.

The trap: all repeats of one cell in a row, then all of the next. What drifts (temperature, page
cache, a neighbour) then falls on one configuration and looks like its property. Here every round
has each configuration once, in an order drawn anew from a seed that is kept, so that a drift is
spread over all.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ergmeter.bench.execute import state
from ergmeter.bench.execute.launching import Launcher, PendingCells
from ergmeter.bench.execute.moved_directory import OpenDirectory
from ergmeter.bench.execute.outcome import CellOutcome, Status
from ergmeter.bench.plan.cells import BenchPlan, Cell
from ergmeter.bench.results.schema import FAILED

if TYPE_CHECKING:
    from types import FrameType

POLL_S = 0.2
ENDED_BY_US = "it was ended by SIGTERM"  # as its runner has it
_END_S = 60.0  # longer than a runner gives its cell to end


@dataclass
class BenchProgress:
    """How far a bench is: what a view shows."""

    plan: BenchPlan
    states: dict[int, state.CellState] = field(default_factory=dict)
    at_once: int = 1
    cool_down_s: float = 0.0  # after each cell
    rests_s: float = 0.0  # what is left of it now, where it is all that is waited for

    @property
    def counts(self) -> Counter[Status]:
        """How many cells are in each status."""
        return Counter(self.states[cell.index].status for cell in self.plan.cells)

    @property
    def broken(self) -> int:
        """How many ended well and are not what their scenario claims of them."""
        return sum(bool(self.states[cell.index].broken) for cell in self.plan.cells)

    @property
    def failed(self) -> list[tuple[Cell, state.CellState]]:
        """The cells that did not end well, and those that did and are not what they claim."""
        both = [(cell, self.states[cell.index]) for cell in self.plan.cells]
        return [(cell, one) for cell, one in both if one.status in FAILED or one.broken]

    @property
    def running(self) -> list[Cell]:
        """The cells that are at work now."""
        return [cell for cell in self.plan.cells if self.states[cell.index].status == "running"]

    @property
    def left(self) -> int:
        """How many have not ended."""
        return sum(not self.states[cell.index].is_final for cell in self.plan.cells)

    @property
    def eta_s(self) -> float | None:
        """How long the rest may take, by those that ended; None before the first."""
        took = [one.lasted_s for one in self.states.values() if one.is_final]
        known = [seconds for seconds in took if seconds is not None]
        if not known:
            return None
        resting_s = self.cool_down_s * (self.left - len(self.running))  # before each that waits
        return (sum(known) / len(known) * self.left + resting_s) / self.at_once


def order(cells: Iterable[Cell], *, seed: int) -> list[Cell]:
    """Round by round (first repeats, second repeats, ...), each round in a random order."""
    rounds: dict[int, list[Cell]] = {}
    for cell in cells:
        rounds.setdefault(cell.repeat, []).append(cell)
    drawn: list[Cell] = []
    for number, members in sorted(rounds.items()):
        shuffled = sorted(members, key=lambda cell: cell.id)
        random.Random(f"{seed}/{number}").shuffle(shuffled)
        drawn += shuffled
    return drawn


def prepare(
    out: Path, plan: BenchPlan, *, at_once: int = 1, cool_down_s: float = 0.0
) -> BenchProgress:
    """Give every cell its directory; those that constraints leave out get their status now."""
    progress = BenchProgress(plan, at_once=at_once, cool_down_s=cool_down_s)
    for cell in plan.cells:
        directory = state.directory_of(out, cell)
        directory.mkdir(exist_ok=True)
        if not (directory / state.CELL).exists():
            state.write_json(directory / state.CELL, cell.to_json())
        found = state.read(directory)
        if cell.skip and found.status == "pending":
            found = found.ended(CellOutcome("skipped", cell.skip))
            state.write(directory, found)
        progress.states[cell.index] = found
    return progress


def reopened(out: Path, progress: BenchProgress, statuses: Collection[str]) -> None:
    """Have cells that ended with one of these statuses run again; their output is put aside."""
    for cell in progress.plan.cells:
        known = progress.states[cell.index]
        if known.status in statuses:
            anew = replace(known, status="pending", reason="", exit_code=None, claims=())
            state.write(state.directory_of(out, cell), anew)
            progress.states[cell.index] = anew


def remaining(out: Path, progress: BenchProgress, *, seed: int) -> list[tuple[Cell, Path]]:
    """The cells to start, in order: those that have not ended and that nobody works on.

    A cell that outlived the driver that started it is waited for, not started again.
    """
    found = []
    for cell in order(progress.plan.cells, seed=seed):
        known = progress.states[cell.index]
        directory = state.directory_of(out, cell).resolve()
        if not known.is_final and not state.is_worked_on(directory, known):
            found.append((cell, directory))
            progress.states[cell.index] = replace(known, status="pending", reason="")
    return found


def drive(
    place: OpenDirectory,
    progress: BenchProgress,
    cells: Sequence[tuple[Cell, Path]],
    launcher: Launcher,
    tell: Callable[[BenchProgress], None],
) -> bool:
    """Have the cells run and watch them. Whether all was done; False if it was interrupted, or the
    directory of results moved: cells that wait know it by its old path."""
    earlier = {cell.index for cell in progress.running}
    watched = {cell.index: cell for cell in (*progress.running, *(cell for cell, _ in cells))}
    at = PendingCells(set(watched) - earlier, set())
    with _interruptible() as interrupted:
        running = [(one, state.directory_of(place.path, one)) for one in progress.running]
        launcher.take_over(running)
        launcher.submit(cells)
        while watched and not interrupted and not place.has_moved:
            if not launcher.waits or not earlier & set(watched):
                at = launcher.poll()
            progress.rests_s = at.rests_s
            begun = [cell for index, cell in watched.items() if index not in at.waiting]
            for cell in begun:
                if _looked_at(place, progress, cell, is_held=cell.index in at.running):
                    del watched[cell.index]
            tell(progress)
            if watched:
                time.sleep(POLL_S)
        if not watched:
            return True
        launcher.cancel()
        for index, cell in watched.items():
            directory = state.directory_of(place.path, cell)
            # One that waited a moment ago may have begun since; one that never did is pending.
            if index not in at.waiting or state.read(directory).status != "pending":
                _end_here(directory)
                _looked_at(place, progress, cell, is_held=False)
                if interrupted:
                    progress.states[index] = _named_by(interrupted[0], directory)
        tell(progress)
    return False


def _looked_at(place: OpenDirectory, progress: BenchProgress, cell: Cell, *, is_held: bool) -> bool:
    """Read again how a cell is. Whether it has ended: nobody holds it, here or elsewhere."""
    directory = state.directory_of(place.path, cell)
    known = state.read(directory)
    has_ended = not is_held and not state.is_worked_on(directory, known)
    if has_ended:
        has_ended = _write_off(directory)
        known = state.read(directory)
    if is_held and known.status == "cancelled":
        # Of the attempt before: its runner has not come as far as to say that it is at it again.
        known = replace(known, status="pending", reason="")
    progress.states[cell.index] = known
    return has_ended


def _write_off(directory: Path) -> bool:
    """Give a cell that nobody works on an end. False if somebody does after all."""
    # SLURM's launcher leaves the job's id there, and what submitit says in a folder of its own.
    job, logs = directory / "job", directory.parent / "slurm"
    why = f" (see the job's log in {logs})" if job.exists() and logs.is_dir() else ""
    lost = {
        "running": "its runner is gone (see runner.log); --resume runs it again",
        "pending": f"it was not started{why}; --resume runs it",
    }
    with state.claimed(directory) as is_ours:
        known = state.read(directory)  # once more: it may have ended after it was last looked at
        if known.status not in lost:
            return True
        if is_ours:
            state.write(directory, known.ended(CellOutcome("cancelled", lost[known.status])))
        return is_ours


def _end_here(directory: Path) -> None:
    """End a runner that an earlier driver started; one on another machine is left alone."""
    worker = state.read(directory).worker
    process = worker.found() if worker else None
    if process is not None:
        with suppress(psutil.Error):
            process.terminate()
            process.wait(timeout=_END_S)


def _named_by(number: int, directory: Path) -> state.CellState:
    """The state of a cell that was ended with its bench, saying so: to its runner it was a SIGTERM,
    which is not what a person did who pressed Ctrl-C."""
    known = state.read(directory)
    if known.status == "cancelled" and known.reason == ENDED_BY_US:
        by = "Ctrl-C" if number == signal.SIGINT else "a SIGTERM to the driver"
        known = replace(known, reason=f"it was ended with its bench, by {by}")
        state.write(directory, known)
    return known


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """A list that has something in it once Ctrl-C or SIGTERM came."""
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before = {one: signal.signal(one, note) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
