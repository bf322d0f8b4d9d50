"""`erg record`: measure a command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from ergmeter.cli.options import (
    GroupedCommand,
    check_folder,
    flag,
    path_option,
    repeated,
    with_each,
)
from ergmeter.cli.run_options import TOKENS_ARE, with_alerts, with_model, with_settings, with_sinks

_OF_THE_COMMAND = ("name", "tokens_are", "keep_buffering", "pty")


@click.command(
    cls=GroupedCommand,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
)
@path_option("--out", help="The run directory to make. [default: runs/DATE-NAME-xxxx]")
@click.option("--name", help="What to call the run. [default: the script's name]")
@with_each(
    TOKENS_ARE,
    repeated("--probe", "probes", help="Use just these probes (may be repeated)."),
    click.option(
        "--interval",
        "interval_s",
        type=click.FloatRange(min=0.001),
        help="Seconds between readings of devices.",
    ),
    flag("--keep-buffering", help="Do not have Python flush each line."),
    flag(
        "--pty",
        help="Give the command a pseudo-terminal for its standard output, so that a program which"
        " buffers its output in a pipe prints each line as it comes.",
    ),
    flag("--no-hook", help="Read only the output: load no hook into the command's Python."),
    group="recording",
)
@flag("--quiet", help="Show no card at the end.")
@with_sinks
@with_alerts
@with_model
@with_settings
@click.argument("command_line", nargs=-1, required=True, metavar="-- COMMAND [ARGUMENTS]...")
def command(
    command_line: tuple[str, ...],
    out: Path | None,
    probes: tuple[str, ...],
    interval_s: float | None,
    no_hook: bool,
    quiet: bool,
    **options: Any,  # noqa: ANN401  of a RecordRequest, and of its Meter
) -> int:
    """Measure any command: its output, its signals and its exit code pass through unchanged.

    Steps and tokens come from a hook in the Python of a torch, Hugging Face or Lightning program,
    else from the lines that it prints, or from an ergmeter.Meter inside it. The card goes to
    standard error.

    \b
    erg record -- python train.py --config a.yaml
    erg record --warmup-steps 5 --out runs/baseline -- torchrun train.py
    """
    if os.name != "posix":
        raise click.UsageError("erg record needs POSIX signals and pipes; use ergmeter.Meter here")
    from ergmeter import registry
    from ergmeter.meter.run_plan import probe_names
    from ergmeter.recorder import RecordRequest, record
    from ergmeter.runlog.format import RUN_VARIABLE

    probe_names(probes)  # raises for an unknown one
    if RUN_VARIABLE in os.environ:  # measured already, by the recorder around us
        unused = f"; --out {out} is not used" if out else ""
        unused += "; alerts and budgets are not judged here" if options["alerts"] else ""
        around = os.environ[RUN_VARIABLE]
        click.echo(
            f"erg: the recorder around this command measures it, into {around}{unused}", err=True
        )
        os.execvp(command_line[0], command_line)
    _check_place(out)
    paced = registry.declaring("probes", has_interval=True) if interval_s else ()
    recording = record(
        RecordRequest(
            command=command_line,
            out=out,
            probe_options={name: {"period_s": interval_s} for name in paced},
            hook=not no_hook,
            **{name: options.pop(name) for name in _OF_THE_COMMAND},
            meter={**options, "probes": probes or None},
        )
    )
    if not quiet:
        _show(recording.run)
    return recording.exit_code


def _check_place(out: Path | None) -> None:
    """Refuse a directory where no run can be written, before the command starts."""
    if out is None:
        check_folder(Path("runs"), option="without --out DIR a run goes to")
    else:
        check_folder(out.absolute().parent, option="--out")


def _show(run: Path) -> None:
    from rich.console import Console

    from ergmeter.cli.run_options import show_run
    from ergmeter.errors import ErgmeterError
    from ergmeter.runlog.reader import Run

    try:
        show_run(Console(stderr=True), Run.open(run))
    except ErgmeterError as error:
        print(f"erg: {error}", file=sys.stderr)
