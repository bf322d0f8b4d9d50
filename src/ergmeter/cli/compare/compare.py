"""`erg compare`: ratios between runs or ledgers, with intervals."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ergmeter.cli.options import (
    PATH,
    GroupedCommand,
    flag,
    listed,
    progress_bar,
    repeated,
    with_default,
    with_format,
    with_page,
)
from ergmeter.cli.run_options import with_settings
from ergmeter.errors import UsageError

if TYPE_CHECKING:
    from ergmeter.cli.options import Forms
    from ergmeter.compare.run_curves import Axis
    from ergmeter.runlog.settings import Settings


@click.command(cls=GroupedCommand)
@click.argument("sources", type=PATH, nargs=-1, required=True)
@click.option(
    "--group-by",
    "group_by",
    callback=listed,
    metavar="COLUMNS",
    help="What separates the groups: columns of the ledger, joined by commas, or `source`, the path"
    " that is named here. Default: backend, or source if there is one backend.",
)
@click.option(
    "--baseline",
    metavar="GROUP",
    help="The group that others are compared with. Default: the first.",
)
@repeated(
    "--metric",
    "metrics",
    metavar="NAME",
    help="Just this metric, by key or alias (tokens_per_s, eval_loss, ...). May be repeated.",
)
@flag("--anyway", help="Compare what is not comparable; the reasons stay.")
@click.option(
    "--target-loss",
    type=float,
    metavar="LOSS",
    help="Time and energy until the training loss came down to this. Takes run directories.",
)
@with_default(
    "--confidence", type=click.FloatRange(0.5, 0.9999), default=0.95, help="That of the intervals."
)
@with_default(
    "--difference",
    type=click.FloatRange(0, 100, min_open=True),
    default=2.0,
    metavar="PERCENT",
    help="Where no difference is shown: how many repeats would show one of this size.",
)
@with_format("table", "csv", "json", "md")
@with_page
@click.option(
    "--x",
    "axis",
    type=click.Choice(("step", "tokens", "time")),
    help="Initial x axis of the curves on the page of --html. Default: tokens for losses, or"
    " steps if a run has no token counts; time for the rest.",
)
@with_settings
def command(
    settings: Settings,
    sources: tuple[Path, ...],
    group_by: tuple[str, ...],
    baseline: str | None,
    metrics: tuple[str, ...],
    anyway: bool,
    target_loss: float | None,
    confidence: float,
    difference: float,
    axis: Axis | None,
    forms: Forms,
) -> int:
    """Compare runs, folders of runs and energy ledgers, group by group.

    Repeats are averaged, and each group is compared with the first: the ratio with its interval
    (Student's t on logarithms; paired where seeds match), a verdict in words, what differs in
    configuration and could explain it. Exits 1 if groups are not comparable, or there is one only,
    and says why; 0 otherwise, also where no difference is shown. Several trainings in a run that
    is named are groups of their own, unless --group-by says otherwise; RUN:2 names the second.
    """
    from ergmeter.compare.comparison import compare, figures_needed
    from ergmeter.compare.pairing import CompareOptions
    from ergmeter.compare.run_curves import compared_curves
    from ergmeter.compare.sources import read_entries
    from ergmeter.views.compare import comparison_document, csv_text

    options = CompareOptions(
        group_by, baseline, metrics, anyway, target_loss, confidence, difference / 100.0
    )
    if axis is not None and forms.page is None:
        raise UsageError(f"--x {axis} is for the page: give --html FILE too")
    with progress_bar("reading runs", refresh_per_second=10) as show:
        entries = read_entries(
            sources,
            settings,
            keys=figures_needed(options),
            on_progress=lambda done, of: show(done, of, f"{done:,} of {of:,}"),
        )
    comparison = compare(entries, options)
    curves = compared_curves(comparison.groups, settings) if forms.page else None
    forms.show(comparison_document(comparison, curves, x=axis), csv=csv_text(comparison))
    return 0 if comparison.is_comparable else 1
