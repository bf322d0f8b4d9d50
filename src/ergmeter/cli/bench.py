"""`erg bench`: a matrix of scenarios, planned, run, listed, reported and compared."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ergmeter.cli import bench_tables
from ergmeter.cli.bench_options import (
    AGAIN,
    again,
    ask_for_log,
    check_launcher,
    plan_options,
    planned,
    smi_query,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ergmeter.bench.cells import Plan
    from ergmeter.bench.launching import Launcher
    from ergmeter.bench.monitor import Progress

_FAILED = ("oom", "error", "timeout", "diverged", "cancelled")
_INTERRUPTED = 130  # what a shell gives a program that Ctrl-C ended
_REDRAW_S = 0.5  # drawing takes processor time from what is measured
_MOST = 200  # rows on a terminal


@click.group(context_settings={"help_option_names": ["-h", "--help"]})  # also called by itself
def command() -> None:
    """Run a matrix of scenarios and compare what came of it.

    A file of scenarios says what to train and along which axes; each combination is a cell, each
    cell a run like any other, kept with its output in a directory of results.

    \b
    erg bench plan scenarios.yaml --num-gpus 1,2
    erg bench run scenarios.yaml --num-gpus 1,2 --repeats 3 --out results
    erg bench report results
    """


@command.command("plan")
@plan_options
@click.option("--all", "every", is_flag=True, help="Every cell with its command.")
@click.option(
    "--results",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Results of earlier runs, for the time estimate.",
)
@click.option(
    "--cell-time",
    "cell_s",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Seconds that a cell takes, where none of its kind has run.",
)
@click.option("--json", "as_json", is_flag=True, help="The plan as JSON.")
def plan_command(
    every: bool,
    results: Path | None,
    cell_s: float | None,
    as_json: bool,
    **given: Any,  # noqa: ANN401  click passes what it parsed
) -> None:
    """Show the cells of SCENARIOS, their commands and a time estimate. Nothing is started."""
    from rich.console import Console

    from ergmeter.bench import durations
    from ergmeter.views import bench_plan

    plan = planned(given)
    known = durations.known(results) if results is not None else None
    estimate = durations.estimate(plan, known, seconds_a_cell=cell_s)
    if as_json:
        click.echo(json.dumps(bench_plan.document(plan, estimate), indent=1, allow_nan=False))
        return
    Console().print(bench_plan.shown(plan, estimate, every=every))


@command.command("run")
@plan_options
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="The directory of results."
)
@click.option(
    "--resume", is_flag=True, help="Go on with what is in --out: nothing done runs again."
)
@click.option(
    "--rerun",
    metavar="STATUS[,...]",
    help=f"With --resume: run these again too ({', '.join(AGAIN)}); their output is put aside.",
)
@click.option("--move-aside", is_flag=True, help="Keep an earlier --out under another name.")
@click.option("--dry-run", is_flag=True, help="Show what would be started, and start nothing.")
@click.option(
    "--launcher",
    "launcher_name",
    default="local",
    show_default=True,
    help="Who has the cells run; a plugin's name.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="So many cells at once, each on GPUs of its own.",
)
@click.option(
    "--cool-down",
    "cool_down_s",
    type=click.FloatRange(min=0),
    default=15.0,
    show_default=True,
    help="Seconds that a GPU rests between two cells; with the launcher local.",
)
@click.option(
    "--launcher-option",
    "launcher_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="For the launcher, by its own names: partition=a100. May be repeated.",
)
@click.option(
    "--smi-keywords",
    metavar="WORD[,...]",
    help="With --memory nvidia-smi or all: what it logs, of `nvidia-smi --help-query-gpu`; index"
    " and memory.used are added.  [default: timestamp,name,index,memory.used]",
)
@click.option(
    "--smi-interval",
    "smi_interval_s",
    type=float,
    metavar="S",
    help="With --memory nvidia-smi or all: seconds between two readings.  [default: 1]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order of the cells.")
@click.option(
    "--allow-busy", is_flag=True, help="With local: start although others compute on the GPUs."
)
def run_command(**given: Any) -> int:  # noqa: ANN401  click passes what it parsed
    """Run the cells of SCENARIOS, in random order with their repeats interleaved.

    Every cell ends with a status: ok, oom, error, timeout, diverged, cancelled or skipped, and what
    it measured is kept. Ctrl-C ends the cells that run; whatever ended this command, --resume goes
    on where it was. Exits with 1 if a cell failed.
    """
    from ergmeter.bench import datastage, hidden, monitor, state
    from ergmeter.bench.launching import Options
    from ergmeter.bench.place import Place

    if given["resume"] and given["move_aside"]:
        raise click.UsageError("--resume goes on with --out, --move-aside puts it away: give one")
    check_launcher(given)
    rerun = again(given["rerun"], is_resumed=given["resume"])
    query = smi_query(given)  # what is wrong with it is said before anything is made
    plan = planned(given)
    hidden.hand_over(plan.keys)
    out: Path = given["out"]
    if given["dry_run"]:
        _show_starts(plan, out)
        return 0
    launcher = _launcher(
        given["launcher_name"],
        Options(
            jobs=given["jobs"],
            cool_down_s=given["cool_down_s"],
            allow_busy=given["allow_busy"],
            given=_pairs(given["launcher_options"]),
        ),
    )
    own = state.at_work(out) if given["resume"] else set()
    launcher.check([cell for cell in plan.cells if not cell.skip], own=own)
    script = {name: str(v) if isinstance(v, Path) else v for name, v in given.items()}
    opening = state.Opening(resume=given["resume"], move_aside=given["move_aside"], script=script)
    plan = state.opened(out, plan, opening)
    state.claim_driver(out)
    ask_for_log(out, given, query)
    progress = monitor.prepare(out, plan, at_once=given["jobs"])
    monitor.reopened(out, progress, rerun)
    cells = monitor.remaining(out, progress, seed=given["seed"])
    with Place(out) as place:
        if cells:
            datastage.prepare(plan, out / "data", say=lambda line: click.echo(line, err=True))
        with _shown(progress) as tell:
            is_done = monitor.drive(place, progress, cells, launcher, tell)
        if place.has_moved:
            out = place.path
            ended = "" if is_done else ", so its cells were ended"
            click.echo(f"{given['out']} was moved to {out}{ended}", err=True)
        _collect(out)
    return _ending(progress, out, is_done=is_done)


def _collect(out: Path) -> None:
    """The tables of results in their directory, as they are now."""
    from ergmeter.bench import exports, results

    try:
        exports.collected(results.batches(out), out)
    except OSError as error:  # a full disk: the cells have what they measured all the same
        click.echo(f"the tables of {out} could not be written: {error}", err=True)


def _pairs(given: tuple[str, ...]) -> dict[str, str]:
    for pair in given:
        if not pair.partition("=")[0] or "=" not in pair:
            raise click.UsageError(f"--launcher-option takes NAME=VALUE; got {pair!r}")
    return dict(pair.split("=", 1) for pair in given)


def _launcher(name: str, options: Any) -> Launcher:  # noqa: ANN401  launching.Options
    from ergmeter import registry

    found: Launcher = registry.load("launchers", name)(options)
    return found


def _show_starts(plan: Plan, out: Path) -> None:
    """Every cell as it would be started here, in the order of their numbers."""
    from ergmeter.bench import launching, state

    has_gpus = bool(launching.gpus_here())
    for cell in plan.cells:
        directory = state.directory_of(out, cell).resolve()
        if cell.skip:
            click.echo(f"# {directory.name}: skipped: {cell.skip}")
            continue
        click.echo(f"# {directory.name}: {cell.scenario}, repeat {cell.repeat}")
        how = launching.start(cell, directory, has_gpus=has_gpus)
        click.echo(launching.command_line(how))


@contextmanager
def _shown(progress: Progress) -> Iterator[Callable[[Progress], None]]:
    """A live table on a terminal; lines elsewhere."""
    from rich.console import Console
    from rich.live import Live

    from ergmeter.bench.listing import varying
    from ergmeter.views import bench_run

    names = varying(progress.plan.cells)
    console = Console(stderr=True)
    if not console.is_terminal:
        told: dict[int, str] = {index: one.status for index, one in progress.states.items()}

        def say(now: Progress) -> None:
            for line in bench_run.news(now, told, names):
                click.echo(line, err=True)

        yield say
        return
    drawn_s = 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def draw(now: Progress) -> None:
            nonlocal drawn_s
            if time.monotonic() - drawn_s > _REDRAW_S:
                live.update(bench_run.live(now, names), refresh=True)
                drawn_s = time.monotonic()

        yield draw


def _ending(progress: Progress, out: Path, *, is_done: bool) -> int:
    from rich.console import Console

    from ergmeter.bench.listing import varying
    from ergmeter.views import bench_run

    console = Console()
    console.print(bench_run.counts(progress.counts, eta_s=progress.eta_s))
    failed = [
        (cell, progress.states[cell.index])
        for cell in progress.plan.cells
        if progress.states[cell.index].status in _FAILED
    ]
    if failed:
        console.print(bench_run.table(failed[:_MOST], varying(progress.plan.cells)))
    if len(failed) > _MOST:
        click.echo(f"and {len(failed) - _MOST} more: erg bench list {out} --all")
    if not is_done:
        click.echo(f"go on with: erg bench run ... --out {out} --resume")
        return _INTERRUPTED
    click.echo(f"see more: erg bench report {out}")
    return 1 if failed else 0


command.add_command(bench_tables.listed)
command.add_command(bench_tables.report)
command.add_command(bench_tables.compare)


def main() -> None:
    """`python -m ergmeter.cli.bench`: this group alone."""
    from ergmeter.cli import main as erg

    erg.main(command=command, program="erg bench")


if __name__ == "__main__":
    main()
