"""Drives a bench: remaining cells, their order, the progress and expected durations.

Every round has each configuration once, in random order from a stored seed, so that drift
(temperature, page cache, other jobs) spreads over all configurations.

Expected durations come from the same configuration where it has run, else from its scenario, else
from the caller; cells without any are counted as unknown.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean

import psutil

from ergmeter import signals
from ergmeter.atomic_write import write_json
from ergmeter.bench.execute import state
from ergmeter.bench.execute.launching import Launcher, PendingCells
from ergmeter.bench.execute.outcome import CellOutcome, Status
from ergmeter.bench.plan.cells import BenchPlan, Cell
from ergmeter.compare.entry import FAILED
from ergmeter.errors import ErgmeterError

POLL_S = 0.2
_ENDED_BY_US = "it was ended by SIGTERM"  # as the runner words it
_END_S = 60.0  # longer than a runner gives its cell to end


@dataclass
class BenchProgress:
    """The progress of a bench, for views."""

    plan: BenchPlan
    states: dict[int, state.CellState] = field(default_factory=dict)
    at_once: int = 1
    cool_down_s: float = 0.0  # after each cell
    rests_s: float = 0.0  # the rest of the present pause, if nothing else is waited for

    @property
    def counts(self) -> Counter[Status]:
        """The number of cells in each status."""
        return Counter(self.states[cell.index].status for cell in self.plan.cells)

    @property
    def broken(self) -> int:
        """The number of cells with an unmet expectation."""
        return sum(bool(self.states[cell.index].broken) for cell in self.plan.cells)

    @property
    def failed(self) -> list[tuple[Cell, state.CellState]]:
        """The cells that failed, and those with an unmet expectation, with their states."""
        both = [(cell, self.states[cell.index]) for cell in self.plan.cells]
        return [(cell, now) for cell, now in both if now.status in FAILED or now.broken]

    @property
    def running(self) -> list[Cell]:
        """The cells that are running now."""
        return [cell for cell in self.plan.cells if self.states[cell.index].status == "running"]

    @property
    def left(self) -> int:
        """The number of cells that have not ended."""
        return sum(not self.states[cell.index].is_final for cell in self.plan.cells)

    @property
    def eta_s(self) -> float | None:
        """Estimated time for the remaining cells, by those that ended; None before the first."""
        took = [state.lasted_s for state in self.states.values() if state.is_final]
        durations_s = [seconds for seconds in took if seconds is not None]
        if not durations_s:
            return None
        resting_s = self.cool_down_s * (self.left - len(self.running))  # before each that waits
        return (sum(durations_s) / len(durations_s) * self.left + resting_s) / self.at_once


def order(cells: Iterable[Cell], *, seed: int) -> Iterator[Cell]:
    """Round by round (first repeats, second repeats, ...), each round in a random order."""
    by_id = sorted(cells, key=lambda cell: (cell.repeat, cell.id))
    for number, members in groupby(by_id, key=lambda cell: cell.repeat):
        shuffled = list(members)
        random.Random(f"{seed}/{number}").shuffle(shuffled)
        yield from shuffled


def prepare(
    out: Path, plan: BenchPlan, *, at_once: int = 1, cool_down_s: float = 0.0
) -> BenchProgress:
    """Create every cell's directory; mark cells that a constraint leaves out as skipped."""
    progress = BenchProgress(plan, at_once=at_once, cool_down_s=cool_down_s)
    for cell in plan.cells:
        directory = state.directory_of(out, cell)
        directory.mkdir(exist_ok=True)
        if not (directory / state.CELL).exists():
            write_json(directory / state.CELL, cell.to_json())
        cell_state = state.read(directory)
        if cell.skip and cell_state.status == "pending":
            cell_state = cell_state.ended(CellOutcome("skipped", cell.skip))
            state.write(directory, cell_state)
        progress.states[cell.index] = cell_state
    return progress


def reopened(out: Path, progress: BenchProgress, statuses: Collection[str]) -> None:
    """Set cells with one of these statuses to pending, so that they run again."""
    for cell in progress.plan.cells:
        cell_state = progress.states[cell.index]
        if cell_state.status in statuses:
            anew = replace(cell_state, status="pending", reason="", exit_code=None, claims=())
            state.write(state.directory_of(out, cell), anew)
            progress.states[cell.index] = anew


def remaining(out: Path, progress: BenchProgress, *, seed: int) -> list[tuple[Cell, Path]]:
    """The cells to start, in order: not ended, and no process works on them.

    A cell that outlived the driver that started it is waited for, not started again.
    """
    cells = []
    for cell in order(progress.plan.cells, seed=seed):
        cell_state = progress.states[cell.index]
        directory = state.directory_of(out, cell).resolve()
        if not cell_state.is_final and not state.is_worked_on(directory, cell_state):
            cells.append((cell, directory))
            progress.states[cell.index] = replace(cell_state, status="pending", reason="")
    return cells


def drive(
    out: Path,
    progress: BenchProgress,
    cells: Sequence[tuple[Cell, Path]],
    launcher: Launcher,
    tell: Callable[[BenchProgress], None],
) -> bool:
    """Run the cells and watch them. Returns True if all have ended, False if interrupted.

    Raises ErgmeterError if the directory is moved or deleted: the cells have its old path.
    """
    earlier = {cell.index for cell in progress.running}
    watched = {cell.index: cell for cell in (*progress.running, *(cell for cell, _ in cells))}
    at = PendingCells(set(watched) - earlier, set())
    interrupted: list[int] = []
    with signals.handled(lambda number, _frame: interrupted.append(number)):
        running = [(cell, state.directory_of(out, cell)) for cell in progress.running]
        launcher.take_over(running)
        launcher.submit(cells)
        while watched and not interrupted:
            if not (out / state.PLAN).exists():
                launcher.cancel()
                raise ErgmeterError(f"{out} was moved or deleted; its cells were ended")
            if not launcher.waits or not earlier & set(watched):
                at = launcher.poll()
            progress.rests_s = at.rests_s
            begun = [cell for index, cell in watched.items() if index not in at.waiting]
            for cell in begun:
                if _looked_at(out, progress, cell, is_held=cell.index in at.running):
                    del watched[cell.index]
            tell(progress)
            if watched:
                time.sleep(POLL_S)
        if not watched:
            return True
        launcher.cancel()
        for index, cell in watched.items():
            directory = state.directory_of(out, cell)
            # One that waited a moment ago may have begun since; one that never did is pending.
            if index not in at.waiting or state.read(directory).status != "pending":
                _end_here(directory)
                _looked_at(out, progress, cell, is_held=False)
                progress.states[index] = _named_by(interrupted[0], directory)
        tell(progress)
    return False


def _named_by(number: int, directory: Path) -> state.CellState:
    """Name the signal to the driver in a cancelled cell's state: its runner saw a SIGTERM only."""
    cell_state = state.read(directory)
    if cell_state.status == "cancelled" and cell_state.reason == _ENDED_BY_US:
        by = "Ctrl-C" if number == signal.SIGINT else "a SIGTERM to the driver"
        cell_state = replace(cell_state, reason=f"it was ended with its bench, by {by}")
        state.write(directory, cell_state)
    return cell_state


def _looked_at(out: Path, progress: BenchProgress, cell: Cell, *, is_held: bool) -> bool:
    """Read a cell's state again. True if it has ended and no process works on it."""
    directory = state.directory_of(out, cell)
    cell_state = state.read(directory)
    has_ended = not is_held and not state.is_worked_on(directory, cell_state)
    if has_ended:
        has_ended = _write_off(directory)
        cell_state = state.read(directory)
    if is_held and cell_state.status == "cancelled":
        # The status of the attempt before: the new runner has not written its own yet.
        cell_state = replace(cell_state, status="pending", reason="")
    progress.states[cell.index] = cell_state
    return has_ended


def _write_off(directory: Path) -> bool:
    """Mark a cell that no process works on as cancelled. False if a process does after all."""
    # SLURM's launcher leaves the job's id there, and what submitit says in a folder of its own.
    job, logs = directory / "job", directory.parent / "slurm"
    why = f" (see the job's log in {logs})" if job.exists() and logs.is_dir() else ""
    lost = {
        "running": "its runner is gone (see runner.log); --resume runs it again",
        "pending": f"it was not started{why}; --resume runs it",
    }
    with state.claimed(directory) as is_ours:
        cell_state = state.read(directory)  # again: it may have ended since
        if cell_state.status not in lost:
            return True
        if is_ours:
            ending = CellOutcome("cancelled", lost[cell_state.status])
            state.write(directory, cell_state.ended(ending))
        return is_ours


def _end_here(directory: Path) -> None:
    """End a runner that an earlier driver started; one on another machine is left alone."""
    worker = state.read(directory).worker
    process = worker.live() if worker else None
    if process is not None:
        with suppress(psutil.Error):
            process.terminate()
            process.wait(timeout=_END_S)


# Expected durations.


@dataclass(frozen=True, slots=True)
class DurationEstimate:
    """Estimated seconds for a plan's cells one by one, and how many cells have which estimate."""

    total_s: float
    measured: int  # cells whose configuration has run before
    alike: int  # cells whose scenario has run in another configuration
    given: int  # cells with the caller's estimate
    unknown: int
    skipped: int


def estimate_duration(
    plan: BenchPlan,
    durations_s: Mapping[str, float] | None = None,
    *,
    seconds_a_cell: float | None = None,
) -> DurationEstimate:
    """Estimate the time of all cells that are not skipped. `durations_s`: `known_durations`'."""
    counts = dict.fromkeys(("measured", "alike", "given", "unknown", "skipped"), 0)
    total_s = 0.0
    for cell in plan.cells:
        kind, seconds = _cell_duration(cell, durations_s or {}, seconds_a_cell)
        counts[kind] += 1
        total_s += seconds
    return DurationEstimate(total_s, **counts)


def _cell_duration(
    cell: Cell, durations_s: Mapping[str, float], seconds_a_cell: float | None
) -> tuple[str, float]:
    if cell.skip:
        return "skipped", 0.0
    # The digest of a group takes longer than the rest.
    if durations_s and cell.group in durations_s:
        return "measured", durations_s[cell.group]
    if cell.scenario in durations_s:
        return "alike", durations_s[cell.scenario]
    return ("unknown", 0.0) if seconds_a_cell is None else ("given", seconds_a_cell)


def known_durations(directory: Path) -> dict[str, float]:
    """Mean seconds of cells that ended well, by their configuration's id and by their scenario."""
    durations_s: dict[str, list[float]] = {}
    for cell, cell_state in state.states(directory):
        if cell_state.status == "ok" and cell_state.lasted_s is not None:
            for name in (cell.group, cell.scenario):
                durations_s.setdefault(name, []).append(max(0.0, cell_state.lasted_s))
    return {name: fmean(of_cells) for name, of_cells in durations_s.items()}
