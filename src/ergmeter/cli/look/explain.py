"""`erg explain`: where the rest of the peak went."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ergmeter.cli.options import flag
from ergmeter.cli.run_options import (
    check_page,
    print_json,
    with_page,
    with_run,
    with_settings,
    write_page,
)
from ergmeter.cli.work_options import with_model

if TYPE_CHECKING:
    from pathlib import Path

    from ergmeter.records import Flops
    from ergmeter.runlog.reader import Run
    from ergmeter.runlog.settings import Settings


@click.command()
@flag("--json", "as_json", help="The same as JSON.")
@flag("--markdown", help="The same as Markdown, for an issue.")
@with_page
@with_model
@with_settings
@with_run
def command(
    settings: Settings,
    flops: tuple[Flops, ...],
    run: Run,
    as_json: bool,
    markdown: bool,
    page: Path | None,
) -> None:
    """Show where the rest of the peak went. Without RUN: the newest under runs/.

    A waterfall from the peak to what was achieved: stalls and waits, idle time, the clock, kernels
    that do not multiply, recomputation, padding; in percent of the peak and in joules, each with
    its evidence. What can't be told apart is one block. Then the changes most worth trying.
    """
    from rich.console import Console

    from ergmeter.metrics.explain.waterfall import explain
    from ergmeter.metrics.summarize import evidence_of
    from ergmeter.views.run import explain as view

    if as_json and markdown:
        raise click.UsageError("--json and --markdown are two forms; give one")
    check_page(page)
    explanation = explain(evidence_of(run, settings, flops=flops))
    if page is not None:
        from ergmeter.views.run.report_page import explain_page

        write_page(page, explain_page(run, explanation))
    if markdown:
        from ergmeter.views.blocks import markdown as markdown_text
        from ergmeter.views.run.explain import explain_parts

        title = f"{run.name}: where the rest of the peak went, {explanation.window}"
        click.echo(markdown_text(title, list(explain_parts(explanation))), nl=False)
    elif as_json:
        print_json(view.document(run, explanation))
    else:
        console = Console()
        console.print(view.page(run, explanation))
        console.print(view.evidence(explanation))
