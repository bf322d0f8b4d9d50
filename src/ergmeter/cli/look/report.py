"""`erg report`: what a run came to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ergmeter.cli.options import check_page, flag, print_json, repeated, with_page, write_page
from ergmeter.cli.run_options import show_run, with_run, with_settings
from ergmeter.cli.work_options import with_model

if TYPE_CHECKING:
    from pathlib import Path

    from ergmeter.records import Flops
    from ergmeter.runlog.reader import Run
    from ergmeter.runlog.settings import Settings


@click.command()
@flag("--json", "as_json", help="Everything, as JSON.")
@repeated(
    "--metric",
    "metrics",
    metavar="NAME",
    help="Just this metric, by key or alias (tokens_per_s, AEC, ...). May be repeated.",
)
@flag("--all", "show_all", help="Every metric, with notes and missing ones.")
@flag("--memory", help="Just memory over time, by device and phase.")
@with_page
@with_model
@with_settings
@with_run
def command(
    settings: Settings,
    flops: tuple[Flops, ...],
    run: Run,
    as_json: bool,
    metrics: tuple[str, ...],
    show_all: bool,
    memory: bool,
    page: Path | None,
) -> None:
    """Show what a run came to. Without RUN: the newest under runs/.

    A run can be reported while it is written. The settings given here take the place of those the
    run was made with; nothing is written. Where one command ran several trainings, each has a card
    of its own.
    """
    from rich.console import Console

    if memory and (as_json or metrics):
        raise click.UsageError("--memory is to be looked at; `erg export` has the readings")
    if page is not None:
        if as_json or metrics or memory or show_all:
            raise click.UsageError("--html has everything on its page: give it alone")
        check_page(page)
        _write_page(run, page, settings, flops)
    elif memory:
        from ergmeter.views.run.memory import timeline

        Console().print(timeline(run))
    elif as_json or metrics:
        _print_figures(run, settings, flops, metrics, as_json=as_json)
    else:
        show_run(Console(), run, settings, flops=flops, show_all=show_all)


def _print_figures(
    run: Run,
    settings: Settings,
    flops: tuple[Flops, ...],
    metrics: tuple[str, ...],
    *,
    as_json: bool,
) -> None:
    from ergmeter.metrics.summarize import summarize
    from ergmeter.views import documents

    summary = summarize(run, settings, flops=flops)
    if not as_json:
        for line in documents.metric_lines(summary, metrics):
            click.echo(line)
        return
    if metrics:
        print_json(documents.metrics(summary, metrics))
    else:
        print_json(documents.report(run, summary, settings))


def _write_page(run: Run, page: Path, settings: Settings, flops: tuple[Flops, ...]) -> None:
    from ergmeter.metrics.summarize import evidence_of, summary_of
    from ergmeter.views.run.report_page import report

    several = len(run.trainings)
    if several > 1 and not run.beside:
        raise click.UsageError(
            f"{several} trainings in this run, each with a page of its own: --training 1 (to"
            f" {several})"
        )
    evidence = evidence_of(run, settings, flops=flops)
    html = report(evidence, summary_of(evidence))
    write_page(page, html, is_told_apart=False)
