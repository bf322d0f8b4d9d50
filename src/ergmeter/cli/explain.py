"""`erg explain`: where the rest of the peak went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ergmeter.cli.options import with_settings
from ergmeter.cli.work_options import with_model

if TYPE_CHECKING:
    from ergmeter.records import Flops
    from ergmeter.runlog.settings import Settings


@click.command()
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
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
    as_json: bool,
    training: int | None,
) -> int:
    """Show where the rest of the peak went. Without RUN: the newest under runs/.

    A waterfall from the peak to what was achieved: stalls and waits, idle time, the clock, kernels
    that do not multiply, recomputation, padding; in percent of the peak and in joules, each with
    its evidence. What can't be told apart is one block. Then the changes most worth trying.
    """
    from rich.console import Console

    from ergmeter.metrics.explain import explain
    from ergmeter.metrics.summarize import evidence_of
    from ergmeter.runlog.directory import newest_run
    from ergmeter.runlog.reader import Run
    from ergmeter.views import explain as view

    opened = Run.open(run or newest_run(Path("runs")))
    opened = opened.training(training) if training else opened
    found = explain(evidence_of(opened, settings, flops=flops))
    if as_json:
        click.echo(json.dumps(view.document(opened, found), indent=1, allow_nan=False))
    else:
        console = Console()
        console.print(view.page(opened, found))
        console.print(view.evidence(found))
    for line in opened.damage:
        click.echo(f"erg: damaged, left out: {line}", err=True)
    return 1 if opened.damage else 0
