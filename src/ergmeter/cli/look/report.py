"""`erg report`: a run's metrics as a card, JSON or a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ergmeter.cli.options import Forms, GroupedCommand, flag, repeated, with_forms
from ergmeter.cli.run_options import with_run_and_settings

if TYPE_CHECKING:
    from ergmeter.records import Flops
    from ergmeter.runlog.reader import Run
    from ergmeter.runlog.settings import Settings
    from ergmeter.views.document import Section


@click.command(cls=GroupedCommand)
@repeated(
    "--metric",
    "metrics",
    metavar="NAME",
    help="Just this metric, by key or alias (tokens_per_s, AEC, ...). May be repeated.",
)
@flag("--long", "is_long", help="The full card: more metrics, with how each was obtained.")
@flag("--all", "show_all", help="Every metric, with notes and missing ones.")
@flag("--memory", help="Just memory over time, by device and phase.")
@with_forms
@with_run_and_settings
def command(
    settings: Settings,
    flops: tuple[Flops, ...],
    run: Run,
    metrics: tuple[str, ...],
    is_long: bool,
    show_all: bool,
    memory: bool,
    forms: Forms,
) -> None:
    """Show a run's metrics. Without RUN: the newest under runs/.

    A run can be reported while it is written. Settings given here replace those of the run in this
    report; the run is not changed. Where one command ran several trainings, each has a card of its
    own.
    """
    if memory and (metrics or forms.form == "json"):
        raise click.UsageError("--memory draws bars only; `erg export` has the readings")
    if forms.page is not None and (metrics or memory or show_all or is_long):
        raise click.UsageError("--html has everything on its page: give it alone")
    if metrics:
        from ergmeter.metrics.summarize import summarize
        from ergmeter.views.documents import metrics_document

        forms.show(metrics_document(summarize(run, settings, flops=flops), metrics))
    elif memory:
        from ergmeter.views.run.report import memory_document

        forms.show(memory_document(run))
    else:
        _show(run, settings, flops, forms, is_long=is_long, show_all=show_all)


def _show(
    run: Run,
    settings: Settings,
    flops: tuple[Flops, ...],
    forms: Forms,
    *,
    is_long: bool,
    show_all: bool,
) -> None:
    """Show the report; with --html alone, write the page and print nothing else."""
    from ergmeter.metrics.summarize import evidence_of, summaries, summary_of
    from ergmeter.views.documents import report
    from ergmeter.views.run.card import document

    is_long = is_long or forms.form != "text"
    if forms.page is None and forms.form != "json":
        cards = summaries(run, settings, flops=flops)
        forms.show(document(cards, is_long=is_long, show_all=show_all))
        return
    evidence = evidence_of(run, settings, flops=flops)
    summary = summary_of(evidence)
    sections: list[Section] = []
    if forms.page is not None:
        from ergmeter.views.run.report import page_sections

        several = len(run.trainings)
        if several > 1 and not run.beside:
            raise click.UsageError(
                f"{several} trainings in this run, each with a page of its own: --training 1 (to"
                f" {several})"
            )
        sections = page_sections(evidence, summary)
    data = report(run, summary, settings)
    cards = [(evidence, summary)]
    shown = document(cards, sections=sections, is_long=is_long, show_all=show_all, data=data)
    if forms.form == "text":
        forms.write_page(shown, is_alone=True)
    else:
        forms.show(shown)
