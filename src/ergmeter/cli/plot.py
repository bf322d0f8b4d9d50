"""`erg plot`: one chart of a run as a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ergmeter.cli.options import with_settings
from ergmeter.cli.work_options import with_model

if TYPE_CHECKING:
    from ergmeter.records import Flops
    from ergmeter.runlog.settings import Settings

# Those of `views.plots`, which would load numpy for `erg plot --help`; a test keeps them the same.
KINDS = (
    *("phases", "power", "energy", "memory", "activity", "clocks", "temperature", "node", "disk"),
    *("network", "steps", "loss", "ladder", "time_spent", "energy_spent", "step_times"),
    "roofline",
)


@click.command()
@click.argument("run", type=click.Path(path_type=Path), required=False)
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
@click.option(
    "--training",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of several trainings that one command ran, just this one.",
)
@with_model
@with_settings
def command(
    settings: Settings,
    flops: tuple[Flops, ...],
    run: Path | None,
    kind: str,
    out: Path,
    dark: bool,
    training: int | None,
) -> None:
    """Draw one chart of a run into a file, without a browser. Without RUN: the newest under runs/.

    The charts are those of `erg report --html`. One that can't be drawn is not written, and the
    reason is told. Needs pip install 'ergmeter[html]'.
    """
    from ergmeter.metrics.summarize import evidence_of, summarize
    from ergmeter.runlog.directory import newest_run
    from ergmeter.runlog.reader import Run
    from ergmeter.views.plots import FORMATS, plot

    form = out.suffix.lower().removeprefix(".")
    if form not in FORMATS:
        raise click.UsageError(f"{out} is neither .svg nor .png: the name says what it will be")
    opened = Run.open(run or newest_run(Path("runs")))
    opened = opened.training(training) if training else opened
    evidence = evidence_of(opened, settings, flops=flops)
    summary = summarize(opened, settings, flops=flops)
    theme = "dark" if dark else "light"
    out.write_bytes(plot(evidence, summary, kind, form=form, theme=theme))
    click.echo(out)
