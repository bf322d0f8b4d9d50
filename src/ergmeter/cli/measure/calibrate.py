"""`erg calibrate`: measures what this machine can reach, and stores it for later runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ergmeter.cli.measure.torch_workload import INTERRUPTED, workload
from ergmeter.cli.options import Forms, flag, progress_bar, with_forms

if TYPE_CHECKING:
    from ergmeter.hardware.calibration import Calibration


@click.command()
@click.option(
    "--device",
    default="auto",
    help="What to measure: cpu, cuda, cuda:1, or all for every GPU, one after the other. [default:"
    " auto, the first GPU where there is one]",
)
@flag("--quick", help="Shorter windows, and less certain results.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder to keep it in. [default: ERGMETER_CALIBRATION, or ergmeter/calibration in the"
    " user's data folder]",
)
@with_forms
@flag("--quiet", help="Just the result: no progress.")
def command(device: str, quick: bool, out: Path | None, forms: Forms, quiet: bool) -> int:
    """Measure what this machine can reach, in under a minute, and keep it for later runs.

    Matrix products in each type and memory bandwidth, each sustained for a window after a warm-up;
    for a GPU also its idle power and how often its sensors have a new value. Runs that are
    recorded afterwards are compared with it beside the datasheet. No setting of the machine is
    changed. Ctrl-C keeps what was measured until then. Needs torch.

    \b
    erg calibrate
    erg calibrate --device all --json
    """
    from ergmeter.units import duration
    from ergmeter.views.calculate.machine import calibration_document

    calibrate = workload("calibration", what="erg calibrate")
    pace = calibrate.QUICK if quick else calibrate.FULL
    results: list[Calibration] = []
    ends: list[str] = []
    for target in calibrate.targets(device):
        with progress_bar(f"measuring {target.device.name}", quiet=quiet, has_line=True) as show:
            calibration = calibrate.run(target, pace=pace, tell=show)
        results.append(calibration)
        where = stored_line(calibration, out)
        how = "interrupted after" if calibration.interrupted else "measured in"
        ends.append(f"{how} {duration(calibration.took_s)}; {where}")
        if forms.form == "json" and not quiet:
            click.echo(where, err=True)
        if calibration.interrupted:
            break
    forms.show(calibration_document(results, ends))
    return INTERRUPTED if results[-1].interrupted else 0


def stored_line(calibration: Calibration, out: Path | None) -> str:
    """Store a calibration and return a line about it; a partial one replaces no full one."""
    from ergmeter.errors import FormatError
    from ergmeter.hardware.calibration import load_calibration, save_calibration

    try:
        before = load_calibration(calibration.device, folder=out)
    except FormatError:
        before = None
    if calibration.interrupted and before is not None and not before.interrupted:
        return f"not kept, as it was interrupted: the full one of {before.measured[:10]} stays"
    if not calibration.matmul and not calibration.bandwidth:
        return "not kept: it was interrupted before there was a rate"
    return f"kept in {save_calibration(calibration, folder=out)}"
