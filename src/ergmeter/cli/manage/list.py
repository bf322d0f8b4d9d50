"""`erg list`: the runs there are."""

from __future__ import annotations

from pathlib import Path

import click

from ergmeter.cli.options import PATH, Forms, warn, with_forms
from ergmeter.errors import ErgmeterError


@click.command()
@click.argument("directory", type=PATH, default=Path("runs"))
@with_forms
def command(directory: Path, forms: Forms) -> int:
    """List the runs in DIRECTORY (default: runs/), the newest last."""
    from ergmeter.metrics.summarize import summarize
    from ergmeter.runlog.format import run_paths
    from ergmeter.runlog.manage.labels import labels_of
    from ergmeter.runlog.reader import Run
    from ergmeter.views.run.check import ListedRun, list_document

    runs: list[ListedRun] = []
    damaged: list[str] = []
    for path in run_paths(directory):
        try:
            run = Run.open(path)
            runs.append(ListedRun(run, summarize(run), labels_of(path)))
        except (ErgmeterError, OSError) as error:
            if path.exists():  # else it was removed since we looked
                reason = str(error)
                damaged.append(reason if str(path) in reason else f"{path}: {reason}")
    forms.show(list_document(directory, runs))
    return warn(damaged)
