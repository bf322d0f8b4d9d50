"""`erg report`: what a run came to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ergmeter.cli.options import with_settings
from ergmeter.cli.work_options import with_model

if TYPE_CHECKING:
    from ergmeter.records import Flops
    from ergmeter.runlog.reader import Run
    from ergmeter.runlog.settings import Settings


@click.command()
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="Just this metric, by key or alias (tok_per_s, AEC, ...). May be repeated.",
)
@click.option(
    "--training",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of several trainings that one command ran, just this one.",
)
@click.option("--all", "show_all", is_flag=True, help="Every metric, with notes and missing ones.")
@click.option("--memory", is_flag=True, help="Just memory over time, by device and phase.")
@click.option(
    "--html",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write one page with charts, that needs no network (pip install 'ergmeter[html]').",
)
@with_model
@with_settings
def command(
    settings: Settings,
    flops: tuple[Flops, ...],
    run: Path | None,
    as_json: bool,
    metrics: tuple[str, ...],
    training: int | None,
    show_all: bool,
    memory: bool,
    page: Path | None,
) -> int:
    """Show what a run came to. Without RUN: the newest under runs/.

    A run can be reported while it is written. The settings given here take the place of those the
    run was made with; nothing is written. Where one command ran several trainings, each has a card
    of its own.
    """
    from rich.console import Console

    from ergmeter.cli.shown import show_run
    from ergmeter.metrics.summarize import summarize
    from ergmeter.runlog.directory import newest_run
    from ergmeter.runlog.reader import Run
    from ergmeter.views import documents

    opened = Run.open(run or newest_run(Path("runs")))
    opened = opened.training(training) if training else opened
    if memory and (as_json or metrics):
        raise click.UsageError("--memory is to be looked at; `erg export` has the readings")
    if page is not None:
        if as_json or metrics or memory or show_all:
            raise click.UsageError("--html has everything on its page: give it alone")
        _write_page(opened, page, settings, flops)
        return _damage(opened)
    if memory:
        from ergmeter.views.memory import timeline

        Console().print(timeline(opened))
        return _damage(opened)
    if not as_json and not metrics:
        show_run(Console(), opened, settings, flops=flops, show_all=show_all)
        return _damage(opened)
    summary = summarize(opened, settings, flops=flops)
    if as_json:
        whole = (
            documents.metrics(summary, metrics)
            if metrics
            else documents.report(opened, summary, settings)
        )
        click.echo(json.dumps(whole, indent=1, allow_nan=False))
    else:
        for line in documents.metric_lines(summary, metrics):
            click.echo(line)
    return _damage(opened)


def _write_page(run: Run, page: Path, settings: Settings, flops: tuple[Flops, ...]) -> None:
    from ergmeter.metrics.summarize import evidence_of, summary_of
    from ergmeter.views.html.report import report

    several = len(run.trainings)
    if several > 1 and not run.beside:
        raise click.UsageError(
            f"{several} trainings in this run, each with a page of its own: --training 1 (to"
            f" {several})"
        )
    evidence = evidence_of(run, settings, flops=flops)
    whole = report(evidence, summary_of(evidence))
    page.write_text(whole, encoding="utf-8")
    click.echo(f"{page} ({len(whole.encode()) / 1e6:.2f} MB)")


def _damage(opened: Run) -> int:
    """Say what could not be read. The exit code."""
    for line in opened.damage:
        click.echo(f"erg: damaged, left out: {line}", err=True)
    return 1 if opened.damage else 0
