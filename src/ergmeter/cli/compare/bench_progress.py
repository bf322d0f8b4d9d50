"""What `erg bench run` shows: what would start, how far it is, how it ended."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from ergmeter.bench.execute.driver import BenchProgress
    from ergmeter.bench.plan.cells import BenchPlan

_INTERRUPTED = 130  # what a shell gives a program that Ctrl-C ended
_REDRAW_S = 0.5  # drawing takes processor time from what is measured
_MOST = 200  # rows on a terminal


def show_starts(plan: BenchPlan, out: Path, *, seed: int, rerun: Collection[str]) -> None:
    """Every cell as it would be started here, by their numbers; then the order that was drawn."""
    from ergmeter.bench.execute import driver, launching, state
    from ergmeter.views.bench import plan as bench_plan

    for line in plan.warnings:
        click.echo(line, err=True)
    has_gpus = bool(launching.gpus_here())
    started = set()
    for cell in plan.cells:
        directory = state.directory_of(out, cell).resolve()
        known = state.read(directory)
        if cell.skip or (known.is_final and known.status not in rerun):
            why = f"skipped: {cell.skip}" if cell.skip else f"it is {known.status} already"
            click.echo(f"{bench_plan.heading(cell)}  # {why}")
            continue
        started.add(cell.index)
        how = launching.start(cell, directory, has_gpus=has_gpus)
        click.echo(f"{bench_plan.heading(cell)}\n{launching.command_line(how)}")
    # Drawn among all, as a run does it that finds some of them done.
    drawn = [cell.index for cell in driver.order(plan.cells, seed=seed) if cell.index in started]
    said = f"in this order, with --seed {seed}: {' '.join(map(str, drawn))}"
    click.echo(f"# {said if drawn else 'nothing would start'}")


@contextmanager
def live_progress(progress: BenchProgress, out: Path) -> Iterator[Callable[[BenchProgress], None]]:
    """A live table on a terminal; lines elsewhere."""
    from rich.console import Console
    from rich.live import Live

    from ergmeter.bench.results.listing import varying
    from ergmeter.views.bench import run

    names = varying(progress.plan.cells)
    console = Console(stderr=True)
    if not console.is_terminal:
        told: dict[int, str] = {index: one.status for index, one in progress.states.items()}

        def say(now: BenchProgress) -> None:
            for line in run.news(now, told, names, out=out):
                click.echo(line, err=True)

        yield say
        return
    drawn_s = 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def draw(now: BenchProgress) -> None:
            nonlocal drawn_s
            if time.monotonic() - drawn_s > _REDRAW_S:
                live.update(run.live(now, names), refresh=True)
                drawn_s = time.monotonic()

        yield draw


def ending(progress: BenchProgress, out: Path, *, is_done: bool) -> int:
    """Say what failed and what became of all; the exit code."""
    from rich.console import Console

    from ergmeter.bench.results.listing import varying
    from ergmeter.cli.options.bench import going_on
    from ergmeter.views.bench import run

    console = Console()
    failed = progress.failed
    if failed:
        console.print(run.table(failed[:_MOST], varying(progress.plan.cells), out=out))
    if len(failed) > _MOST:
        click.echo(f"and {len(failed) - _MOST} more: erg bench list {out} --all")
    if not is_done:
        console.print(run.counts(progress.counts, broken=progress.broken))
        click.echo(f"go on with: {going_on(out)}")
        return _INTERRUPTED
    click.echo(f"see more: erg bench report {out}")
    console.print(run.counts(progress.counts, broken=progress.broken))
    return 1 if failed else 0
