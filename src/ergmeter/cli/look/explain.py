"""`erg explain`: where the rest of the peak went."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ergmeter.cli.options import Forms, GroupedCommand, flag, with_forms
from ergmeter.cli.run_options import with_run_and_settings

if TYPE_CHECKING:
    from ergmeter.records import Flops
    from ergmeter.runlog.reader import Run
    from ergmeter.runlog.settings import Settings


@click.command(cls=GroupedCommand)
@flag("--all", "show_all", help="With the evidence, and what could not be attributed.")
@with_forms
@with_run_and_settings
def command(
    settings: Settings, flops: tuple[Flops, ...], run: Run, forms: Forms, *, show_all: bool
) -> None:
    """Show where the rest of the peak went. Without RUN: the newest under runs/.

    A waterfall from the peak to what was achieved: stalls and waits, idle time, the clock,
    kernels that do not multiply, recomputation, padding; in percent of the peak and in joules.
    Losses that can't be attributed are one block. Then the changes most worth trying.
    """
    from ergmeter.metrics.explain.waterfall import explain
    from ergmeter.metrics.summarize import evidence_of
    from ergmeter.views.run.explain import document

    explanation = explain(evidence_of(run, settings, flops=flops))
    is_page = forms.form != "text" or forms.page is not None
    forms.show(document(run, explanation, show_all=show_all or is_page))
