"""`erg bench`: a matrix of scenarios, planned, run, listed, reported and compared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ergmeter.cli.compare import bench_output
from ergmeter.cli.options import (
    COUNT,
    PATH,
    Forms,
    flag,
    given_parameters,
    path_option,
    repeated,
    with_default,
    with_each,
    with_forms,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.bench.execute import nvidia_smi_logger
    from ergmeter.bench.execute.launching import Launcher
    from ergmeter.bench.plan.cells import BenchPlan

AGAIN = ("oom", "error", "timeout", "diverged")  # cancelled cells run again in any case

_SMI = "nvidia-smi"  # FMS calls it nvidia


def _time_s(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    """Parse a time as in a scenario file: 90, 90s, 30m, 2h."""
    from ergmeter.bench.plan.scenarios import seconds

    time_s = None if text is None else seconds(text)
    if text is not None and not time_s:
        raise click.BadParameter(f"takes a time above 0 such as 90, 90s, 30m, 2h; got {text}")
    return time_s


plan_options = with_each(
    click.argument("scenarios", type=PATH),
    click.option("--num-gpus", metavar="N[,N...]", help="GPUs of a cell: an axis of the matrix."),
    click.option(
        "--effective-batch-size",
        metavar="N[,N...]",
        help="Samples of a step over all GPUs: an axis.",
    ),
    click.option("--max-seq-len", metavar="N[,N...]", help="Longest sequence: an axis."),
    click.option("--packing", metavar="true,false", help="Whether sequences are packed: an axis."),
    repeated("--only", metavar="NAME", help="Just this scenario. May be repeated."),
    click.option(
        "--repeats", type=click.IntRange(1, 1000), help="Run each cell this many times, in rounds."
    ),
    click.option(
        "--command",
        "workload",
        help="What every cell runs, whatever its scenario says: `erg train`, `sft_trainer`, or a"
        " template of a command.",
    ),
    click.option(
        "--timeout",
        "timeout_s",
        callback=_time_s,
        metavar="TIME",
        help="End a cell after this time, whatever its scenario says: seconds, 90s, 30m, 2h.",
    ),
    path_option("--defaults", help="Arguments of all scenarios, as YAML."),
    path_option("--contents", help="CONTENTS.yaml: shortnames and their files."),
    flag("--no-data", help="Leave the data stage out."),
    click.option(
        "--memory",
        type=click.Choice(["nvidia-smi", "nvidia", "huggingface", "all"]),
        callback=lambda _context, _option, asked: _SMI if asked == "nvidia" else asked,
        help="Also log GPU memory: by an nvidia-smi process beside each cell, by the Trainer (in"
        " sft_trainer on unless only nvidia-smi is asked for). NVML is read in any case.",
    ),
)


def planned(options: dict[str, Any]) -> BenchPlan:
    """Return the plan that the options describe, and print its warnings."""
    from ergmeter.bench.plan.plan import plan

    kinds = dict.fromkeys(("num_gpus", "effective_batch_size", "max_seq_len"), _whole_number)
    axes: dict[str, Any] = {
        name: _listed(name, options[name], kind)
        for name, kind in {**kinds, "packing": _truth}.items()
    }
    bench_plan = plan(
        options["scenarios"],
        **axes,
        only=options["only"],
        repeats=options["repeats"],
        timeout_s=options["timeout_s"],
        defaults=options["defaults"],
        contents=options["contents"],
        command=options["workload"],
        data_stage=not options["no_data"],
        log_memory_hf=None if options["memory"] is None else options["memory"] != "nvidia-smi",
        check=wrong,
    )
    for line in bench_plan.warnings:
        click.echo(line, err=True)
    return bench_plan


def wrong(text: str) -> str | None:
    """Return the errors that `erg train` would report for a cell's configuration, or None."""
    from ergmeter.bench.plan.erg_train import parsed
    from ergmeter.workloads.sft.config_file import errors_in

    return "; ".join(errors_in(parsed(text))) or None


def check_needs(plan: BenchPlan, *, is_error: bool) -> None:
    """Print which packages of the cells this Python lacks; PluginError if `is_error`."""
    from ergmeter.bench.execute.launching import gpus_here
    from ergmeter.bench.plan.erg_train import missing_packages
    from ergmeter.errors import PluginError

    lacks = missing_packages(plan.cells, has_gpus=bool(gpus_here()))
    if lacks and is_error:
        raise PluginError(lacks)
    if lacks:
        click.echo(lacks, err=True)


_SCHEDULERS = ("slurm", "ray")  # which choose the GPUs, and when a cell starts


def check_launcher(options: dict[str, Any]) -> None:
    """Refuse options that have no effect with a scheduler."""
    given = given_parameters()
    for name in ("cool_down_s", "allow_busy"):
        if name in given and options[name] and options["launcher_name"] in _SCHEDULERS:
            raise click.UsageError(
                f"{given[name].opts[0]} is for the launcher local: with {options['launcher_name']}"
                " the scheduler places the cells; leave it out"
            )


def smi_query(options: dict[str, Any]) -> nvidia_smi_logger.Query | None:
    """Return what `nvidia-smi` shall log beside the cells; None if that is not requested."""
    from ergmeter.bench.execute import nvidia_smi_logger

    words, interval_s = options["smi_keywords"], options["smi_interval_s"]
    if options["memory"] not in ("nvidia-smi", "all"):
        if words is not None or interval_s is not None:
            raise click.UsageError(
                "--smi-keywords and --smi-interval need --memory nvidia-smi, or all"
            )
        return None
    return nvidia_smi_logger.Query(
        nvidia_smi_logger.KEYWORDS if words is None else nvidia_smi_logger.parsed(words),
        nvidia_smi_logger.INTERVAL_S if interval_s is None else interval_s,
    )


def ask_for_log(out: Path, options: dict[str, Any], query: nvidia_smi_logger.Query | None) -> None:
    """Request `nvidia-smi` logs for a directory; warn if this machine has no `nvidia-smi`."""
    from ergmeter.bench.execute import nvidia_smi_logger

    if options["memory"] is None:
        return  # a resumed directory keeps its setting
    nvidia_smi_logger.ask(out, query)
    lack = nvidia_smi_logger.lack()
    if query is not None and options["launcher_name"] == "local" and lack:
        click.echo(f"--memory {options['memory']}: {lack}; cells run without its log", err=True)


def _listed(name: str, text: str | None, kind: Callable[[str], object]) -> list[object] | None:
    """Parse the values of an axis from the command line; None if it is not given."""
    option = f"--{name.replace('_', '-')}"
    if text is None:
        return None
    try:
        values = [kind(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}; got {text!r}") from error
    if not values:
        raise click.UsageError(f"{option} names no value; leave it out or give one")
    return list(dict.fromkeys(values))


def _whole_number(text: str) -> object:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("takes whole numbers from 1, separated by commas")
    return int(text)


def _truth(text: str) -> object:
    if text.lower() not in ("true", "false"):
        raise ValueError("takes true and false, separated by commas")
    return text.lower() == "true"


@click.group
def command() -> None:
    """Run a matrix of scenarios and compare the results.

    A file of scenarios says what to train and along which axes; each combination is a cell, each
    cell a run like any other, kept with its output in a directory of results.

    \b
    erg bench plan scenarios.yaml --num-gpus 1,2
    erg bench run scenarios.yaml --num-gpus 1,2 --repeats 3 --out results
    erg bench report results
    """


@command.command("plan")
@plan_options
@flag("--all", "every", help="Every cell with its command.")
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
    help="Seconds that a cell takes, if no similar cell has run.",
)
@with_forms
def plan_command(
    every: bool,
    results: Path | None,
    cell_s: float | None,
    forms: Forms,
    **options: Any,  # noqa: ANN401  click passes what it parsed
) -> None:
    """Show the cells of SCENARIOS, their commands and a time estimate. Nothing is started."""
    from ergmeter.bench.execute.driver import estimate_duration, known_durations
    from ergmeter.views.bench import plan_document

    plan = planned(options)
    check_needs(plan, is_error=False)
    earlier = known_durations(results) if results is not None else None
    estimate = estimate_duration(plan, earlier, seconds_a_cell=cell_s)
    forms.show(plan_document(plan, estimate, every=every))


@command.command("run")
@plan_options
@path_option("--out", required=True, help="The directory of results.")
@flag(
    "--resume",
    help="Continue in --out: finished cells do not run again; new cells are added.",
)
@click.option(
    "--rerun",
    metavar="STATUS[,...]",
    help=f"With --resume: also rerun cells that ended so ({', '.join(AGAIN)}); output moves aside.",
)
@flag("--move-aside", help="Keep an earlier --out under another name.")
@flag("--dry-run", help="Show what would be started (on GPUs with --num-gpus), and start nothing.")
@with_default(
    "--launcher", "launcher_name", default="local", help="What starts the cells; a plugin's name."
)
@with_default(
    "--jobs", type=COUNT, default=1, help="How many cells run at once, each on its own GPUs."
)
@click.option(
    "--cool-down",
    "cool_down_s",
    type=click.FloatRange(min=0),
    help="Seconds of rest between two cells; with the launcher local.  [default: 15 where there"
    " are GPUs, else 0]",
)
@repeated(
    "--launcher-option",
    "launcher_options",
    metavar="NAME=VALUE",
    help="An option of the launcher: partition=a100. May be repeated.",
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
@with_default("--seed", type=int, default=0, help="Seed for the order of the cells.")
@flag("--allow-busy", help="With local: start even if other processes use the GPUs.")
def run_command(**options: Any) -> int:  # noqa: ANN401  click passes what it parsed
    """Run the cells of SCENARIOS, in random order with their repeats interleaved.

    Every cell ends with a status: ok, oom, error, timeout, diverged, cancelled or skipped, and what
    it measured is kept. Ctrl-C ends the cells that run; whatever ended this command, --resume goes
    on where it was. Exits with 1 if a cell failed, or is not what its scenario expects.
    """
    from ergmeter.bench.execute import driver, launching, results_directory, state
    from ergmeter.bench.plan import data

    if options["resume"] and options["move_aside"]:
        raise click.UsageError("--resume goes on with --out, --move-aside puts it away: give one")
    check_launcher(options)
    rerun = bench_output.statuses("--rerun", options["rerun"], AGAIN)
    if rerun and not options["resume"]:
        raise click.UsageError("--rerun repeats cells that have run: give --resume too")
    query = smi_query(options)  # raises before anything is created
    plan = planned(options)
    os.environ.update(plan.keys)  # for the processes that it starts
    out: Path = options["out"]
    earlier = {name: options[name] for name in ("resume", "move_aside")}
    is_old = results_directory.is_resumed(out, **earlier)  # before anything starts
    is_local = options["launcher_name"] == "local"
    check_needs(plan, is_error=is_local and not options["dry_run"])
    if options["dry_run"]:
        planned_cells = results_directory.joined(out, plan)[1] if is_old else plan
        bench_output.show_starts(planned_cells, out, seed=options["seed"], rerun=rerun)
        return 0
    rest_s = launching.cool_down_s(options["cool_down_s"]) if is_local else 0.0
    launcher = _launcher(options, rest_s=rest_s)
    own = state.at_work(out) if options["resume"] else set()
    launcher.check([cell for cell in plan.cells if not cell.skip], own=own)
    script = {name: str(v) if isinstance(v, Path) else v for name, v in options.items()}
    plan = results_directory.opened(out, plan, **earlier, script=script)
    for line in plan.warnings:
        click.echo(line, err=True)
    ask_for_log(out, options, query)
    progress = driver.prepare(out, plan, at_once=options["jobs"], cool_down_s=rest_s)
    driver.reopened(out, progress, rerun)
    cells = driver.remaining(out, progress, seed=options["seed"])
    if cells:
        data.prepare(plan, out / "data", say=lambda line: click.echo(line, err=True))
    with bench_output.live_progress(progress, out) as tell:
        is_done = driver.drive(out, progress, cells, launcher, tell)
    _collect(out)
    return bench_output.ending(progress, out, is_done=is_done)


def _collect(out: Path) -> None:
    """Write the current tables of results into their directory."""
    from ergmeter.bench import results
    from ergmeter.compat import fms

    try:
        fms.collected(results.batches(out), out)
    except OSError as error:  # a full disk: the results of the cells are stored already
        click.echo(f"the tables of {out} could not be written: {error}", err=True)


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    for pair in texts:
        if not pair.partition("=")[0] or "=" not in pair:
            raise click.UsageError(f"--launcher-option takes NAME=VALUE; got {pair!r}")
    return dict(pair.split("=", 1) for pair in texts)


def _launcher(arguments: dict[str, Any], *, rest_s: float) -> Launcher:
    from ergmeter import registry
    from ergmeter.bench.execute.launching import LaunchOptions

    options = LaunchOptions(
        jobs=arguments["jobs"],
        cool_down_s=rest_s,
        allow_busy=arguments["allow_busy"],
        given=_pairs(arguments["launcher_options"]),
    )
    launcher: Launcher = registry.load("launchers", arguments["launcher_name"])(options)
    return launcher


command.add_command(bench_output.listed)
command.add_command(bench_output.report)
command.add_command(bench_output.compare)
