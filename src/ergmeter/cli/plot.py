"""`erg plot`: one chart of a run as a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ergmeter.cli.options import with_settings
from ergmeter.cli.shown import with_run
from ergmeter.cli.work_options import with_model

if TYPE_CHECKING:
    from ergmeter.records import Flops
    from ergmeter.runlog.reader import Run
    from ergmeter.runlog.settings import Settings

# Those of `views.plots`, which would load numpy for `erg plot --help`; a test keeps them the same.
KINDS = (
    *("phases", "power", "energy", "memory", "activity", "clocks", "temperature", "node", "disk"),
    *("network", "steps", "loss", "ladder", "time_spent", "energy_spent", "step_times"),
    "roofline",
)


@click.command()
@click.option("--kind", type=click.Choice(KINDS), default="power", show_default=True)
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="FILE",
    help="Where to: FILE.svg or FILE.png.",
)
@click.option("--dark", is_flag=True, help="On a dark ground.")
@with_model
@with_settings
@with_run
def command(
    settings: Settings,
    flops: tuple[Flops, ...],
    run: Run,
    kind: str,
    out: Path,
    dark: bool,
) -> None:
    """Draw one chart of a run into a file, without a browser. Without RUN: the newest under runs/.

    The charts are those of `erg report --html`. One that can't be drawn is not written, and the
    reason is told. Needs pip install 'ergmeter[html]'.
    """
    from ergmeter.metrics.summarize import evidence_of, summary_of
    from ergmeter.views.plots import FORMATS, plot

    form = out.suffix.lower().removeprefix(".")
    if form not in FORMATS:
        raise click.UsageError(f"{out} is neither .svg nor .png: the name says what it will be")
    evidence = evidence_of(run, settings, flops=flops)
    theme = "dark" if dark else "light"
    out.write_bytes(plot(evidence, summary_of(evidence), kind, form=form, theme=theme))
    click.echo(out)
