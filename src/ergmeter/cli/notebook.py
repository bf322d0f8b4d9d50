"""`%load_ext ergmeter`, and `%%erg`, which measures a notebook's cell as `erg record` a command.

The cell runs in the kernel. A Meter around the kernel's process makes the run, and the hook of
`erg record` reports the steps of torch, Hugging Face and Lightning into it. A Meter or callback in
the cell joins the run. Between cells nothing is measured.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ergmeter.cli.options import GroupedCommand, path_option
from ergmeter.cli.run_options import with_model, with_settings
from ergmeter.errors import ErgmeterError, UsageError
from ergmeter.integrations import record_hook
from ergmeter.integrations.training import failure
from ergmeter.meter import Around, Meter, active_meters
from ergmeter.recorder import hook
from ergmeter.recorder.bootstrap import sitecustomize
from ergmeter.recorder.output import UNRECOGNISED
from ergmeter.recorder.record import FlopCounts, RecordRequest, has_steps, new_run
from ergmeter.records import Mark
from ergmeter.registry import library
from ergmeter.runlog.format import RUN_VARIABLE
from ergmeter.runlog.reader import FINISHED, Run

_NO_STEPS = "no steps: no optimizer of torch stepped in the cell; mark steps with ergmeter.Meter"


def load(shell: Any) -> None:  # noqa: ANN401  IPython's InteractiveShell
    """Add `%%erg` to this IPython."""
    ipython = library("IPython", "%load_ext ergmeter", "ipykernel")

    def erg(line: str, code: str | None = None) -> None:
        __tracebackhide__ = True
        try:
            words = shlex.split(line)
            answer = _command.main(words, "%%erg", obj=(shell, code, words), standalone_mode=False)
        except (click.ClickException, ErgmeterError, OSError, ValueError) as error:
            message = getattr(error, "format_message", error.__str__)()
            raise ipython.core.error.UsageError(f"%%erg: {message}") from None
        if answer:  # else help was asked for
            path, cell_error = answer
            shell.user_ns["erg_run"] = run = Run.open(path)
            ipython.display.display(run)
            if cell_error is not None:  # without IPython's own frame
                raise cell_error.with_traceback(cell_error.__traceback__.tb_next)

    erg.__doc__ = _command.help
    shell.register_magic_function(erg, "line_cell", "erg")


@click.command(cls=GroupedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@path_option("--out", help="The run directory to make. [default: runs/DATE-NAME-xxxx]")
@click.option("--name", help="What to call the run. [default: the notebook's name]")
@with_model
@with_settings
@click.pass_obj
def _command(cell: Any, /, **options: Any) -> tuple[Path, Any]:  # noqa: ANN401  a Meter's options
    """Measure this cell. Shows its card and a chart when it has run.

    Steps and tokens of torch, Hugging Face and Lightning are seen without a change to the code.
    The run is in the variable erg_run afterwards: erg_run.to_pandas() has its steps.

    \b
    %%erg --name baseline --warmup-steps 3
    trainer.train()
    """
    shell, code, words = cell
    if code is None:
        raise UsageError("a cell is measured: begin it with %%erg")
    others = (str(other.path) for other in active_meters.meters())
    if around := os.environ.get(RUN_VARIABLE) or next(others, ""):
        raise UsageError(f"this kernel is measured already, into {around}: end that first")
    name = options.pop("name") or Path(os.environ.get("JPY_SESSION_NAME", "notebook")).stem
    request = RecordRequest(["%%erg", *words], options.pop("out"))
    meter = Meter(name=name, **options)
    path, environment = new_run(request, name)
    meter.plan = replace(meter.plan, around=Around(path, environment))
    _begin_peaks()
    meter.start()
    active_meters.discard(meter)  # or a Meter in the cell could not join the run
    meter.watch(os.getpid())
    os.environ[RUN_VARIABLE] = str(path)
    sitecustomize.watch_imports()  # type: ignore[no-untyped-call]
    record_hook.enter_cell(sitecustomize.NAMES)
    counts = FlopCounts(path)
    try:
        error = _run(shell, code)
        record_hook.leave_cell()
        if not has_steps(path):
            meter.record(Mark(time.monotonic_ns(), UNRECOGNISED, _NO_STEPS))
        meter.close(failure(error) if error else FINISHED)
    finally:
        del os.environ[RUN_VARIABLE]
        shutil.rmtree(path / hook.FOLDER)
        meter.close()
        counts.finish(meter)
    return path, error


def _begin_peaks() -> None:
    """Begin the peaks of memory anew, which are of the cells before."""
    with suppress(OSError):  # not on Linux; see proc(5)
        Path("/proc/self/clear_refs").write_text("5")
    torch: Any = sys.modules.get("torch")
    for device in range(torch.cuda.device_count() if torch and torch.cuda.is_initialized() else 0):
        torch.cuda.reset_peak_memory_stats(device)


def _run(shell: Any, code: str) -> Any:  # noqa: ANN401
    """Run the code as IPython does. Returns its error, which is shown when it is raised again."""
    show = shell._showtraceback
    shell._showtraceback = lambda *_error: None
    try:
        result = shell.run_cell(code)
    finally:
        shell._showtraceback = show
    return result.error_before_exec or result.error_in_exec
