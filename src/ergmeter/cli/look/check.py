"""`erg check`: whether a measurement is fit to be compared."""

from __future__ import annotations

from pathlib import Path

import click

from ergmeter.cli.options import PATH, Forms, GroupedCommand, with_forms
from ergmeter.cli.run_options import with_settings, with_training
from ergmeter.runlog.settings import Settings


@click.command(cls=GroupedCommand)
@click.argument("runs", type=PATH, nargs=-1)
@with_training
@with_forms
@with_settings
def command(settings: Settings, runs: tuple[Path, ...], training: int | None, forms: Forms) -> int:
    """Say whether measurements are fit to be compared. Without RUNS: the newest under runs/.

    Looks for throttling, clocks that move, warming, stalls, a beginning that is too slow, a window
    that is too short, noise, gaps in the readings, sensors that disagree, memory that only grows
    and a device that is hardly used; each with what it does to the figures. Exits 1 if something
    serious was found: another run of the same would give other figures. Where a decisive check
    (window, noise, throttling) could not be made the verdict is "not known", and it exits 0.
    """
    from ergmeter.metrics.checks import fitness
    from ergmeter.metrics.summarize import evidence_of
    from ergmeter.runlog.format import newest_run
    from ergmeter.runlog.reader import Run
    from ergmeter.views.run.check import check_document

    opened = [Run.open(run) for run in runs or (newest_run(Path("runs")),)]
    opened = [run.training(training) for run in opened] if training else opened
    checks = [(run, fitness(evidence_of(run, settings))) for run in opened]
    forms.show(check_document(checks))
    return 1 if any(result.verdict == "not fit" for _, result in checks) else 0
