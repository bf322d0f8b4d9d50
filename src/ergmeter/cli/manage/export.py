"""`erg export`: a run as files for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from ergmeter.cli.options import PATH, flag, path_option
from ergmeter.cli.run_options import tell_damage


@click.command()
@click.argument("run", type=PATH)
@click.option(
    "--format",
    "form",
    type=click.Choice(["csv", "parquet", "json"]),
    required=True,
    help="csv and parquet: a file per table. json: one file.",
)
@path_option("--out", help="Directory to write to. [default: RUN-export]")
@flag("--force", help="Overwrite files of an earlier export.")
def command(run: Path, form: str, out: Path | None, force: bool) -> int:
    """Write a run's steps, samples, marks, reported metrics and summary to files.

    Times are nanoseconds on the run's monotonic clock, beside wall-clock times in UTC.
    """
    from ergmeter.metrics.summarize import summarize
    from ergmeter.runlog.reader import Run
    from ergmeter.views.documents import export

    opened = Run.open(run)
    target = out or run.with_name(f"{run.resolve().name}-export")
    for path in export(opened, summarize(opened), target, form=form, force=force):
        click.echo(str(path))
    return tell_damage(opened)
