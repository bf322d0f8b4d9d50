"""`erg bench`: a matrix of scenarios, planned, run, listed, reported and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ergmeter.cli.compare import bench_progress, bench_tables
from ergmeter.cli.options.bench import (
    AGAIN,
    again,
    ask_for_log,
    check_launcher,
    check_needs,
    plan_options,
    planned,
    smi_query,
)

if TYPE_CHECKING:
    from ergmeter.bench.execute.launching import Launcher


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

    from ergmeter.bench.plan import durations
    from ergmeter.views.bench import plan as bench_plan

    plan = planned(given)
    check_needs(plan, is_error=False)
    known = durations.known_durations(results) if results is not None else None
    estimate = durations.estimate(plan, known, seconds_a_cell=cell_s)
    if as_json:
        click.echo(json.dumps(bench_plan.document(plan, estimate), indent=1, allow_nan=False))
        return
    Console().print(bench_plan.plan_view(plan, estimate, every=every))


@command.command("run")
@plan_options
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="The directory of results."
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with what is in --out: nothing done runs again; cells that are new are added.",
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
    help="Seconds of rest between two cells; with the launcher local.  [default: 15 where there"
    " are GPUs, else 0]",
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
    on where it was. Exits with 1 if a cell failed, or is not what its scenario expects.
    """
    from ergmeter.bench.execute import driver, results_directory, secrets, state
    from ergmeter.bench.execute.launching import cool_down_s
    from ergmeter.bench.execute.moved_directory import OpenDirectory
    from ergmeter.bench.plan import data

    if given["resume"] and given["move_aside"]:
        raise click.UsageError("--resume goes on with --out, --move-aside puts it away: give one")
    check_launcher(given)
    rerun = again(given["rerun"], is_resumed=given["resume"])
    query = smi_query(given)  # what is wrong with it is said before anything is made
    plan = planned(given)
    secrets.hand_over(plan.keys)
    out: Path = given["out"]
    asked = results_directory.Opening(
        resume=given["resume"],
        move_aside=given["move_aside"],
        script={name: str(v) if isinstance(v, Path) else v for name, v in given.items()},
    )
    is_old = results_directory.is_resumed(
        out, asked
    )  # what is wrong with it is said before anything starts
    check_needs(plan, is_error=given["launcher_name"] == "local" and not given["dry_run"])
    if given["dry_run"]:
        shown = results_directory.joined(out, plan)[1] if is_old else plan
        bench_progress.show_starts(shown, out, seed=given["seed"], rerun=rerun)
        return 0
    rest_s = cool_down_s(given["cool_down_s"]) if given["launcher_name"] == "local" else 0.0
    launcher = _launcher(given, rest_s=rest_s)
    own = state.at_work(out) if given["resume"] else set()
    launcher.check([cell for cell in plan.cells if not cell.skip], own=own)
    plan = results_directory.opened(out, plan, asked)
    for line in plan.warnings:
        click.echo(line, err=True)
    ask_for_log(out, given, query)
    progress = driver.prepare(out, plan, at_once=given["jobs"], cool_down_s=rest_s)
    driver.reopened(out, progress, rerun)
    cells = driver.remaining(out, progress, seed=given["seed"])
    with OpenDirectory(out) as place:
        if cells:
            data.prepare(plan, out / "data", say=lambda line: click.echo(line, err=True))
        with bench_progress.live_progress(progress, out) as tell:
            is_done = driver.drive(place, progress, cells, launcher, tell)
        if place.has_moved:
            out = place.path
            ended = "" if is_done else ", so its cells were ended"
            click.echo(f"{given['out']} was moved to {out}{ended}", err=True)
        _collect(out)
    return bench_progress.ending(progress, out, is_done=is_done)


def _collect(out: Path) -> None:
    """The tables of results in their directory, as they are now."""
    from ergmeter.bench.results import results
    from ergmeter.compat.fms import exports

    try:
        exports.collected(results.batches(out), out)
    except OSError as error:  # a full disk: the cells have what they measured all the same
        click.echo(f"the tables of {out} could not be written: {error}", err=True)


def _pairs(given: tuple[str, ...]) -> dict[str, str]:
    for pair in given:
        if not pair.partition("=")[0] or "=" not in pair:
            raise click.UsageError(f"--launcher-option takes NAME=VALUE; got {pair!r}")
    return dict(pair.split("=", 1) for pair in given)


def _launcher(given: dict[str, Any], *, rest_s: float) -> Launcher:
    from ergmeter import registry
    from ergmeter.bench.execute.launching import LaunchOptions

    options = LaunchOptions(
        jobs=given["jobs"],
        cool_down_s=rest_s,
        allow_busy=given["allow_busy"],
        given=_pairs(given["launcher_options"]),
    )
    found: Launcher = registry.load("launchers", given["launcher_name"])(options)
    return found


command.add_command(bench_tables.listed)
command.add_command(bench_tables.report)
command.add_command(bench_tables.compare)


def main() -> None:
    """`python -m ergmeter.cli.compare.bench`: this group alone."""
    from ergmeter.cli import main as erg

    erg.main(command=command, program="erg bench")


if __name__ == "__main__":
    main()
