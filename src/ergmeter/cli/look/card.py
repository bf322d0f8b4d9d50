"""`erg card`: a run as a section of a model card, and as a badge."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ergmeter.cli.options import GroupedCommand, check_writable, flag, path_option, with_default
from ergmeter.cli.run_options import with_run_and_settings
from ergmeter.errors import UsageError

if TYPE_CHECKING:
    from ergmeter.records import Flops, Summary
    from ergmeter.runlog.reader import Run
    from ergmeter.runlog.settings import Settings

_SHORT = {"tokens_per_s": "throughput.tokens_per_s"}


@click.command(cls=GroupedCommand)
@path_option("-o", "--out", help="File to write, instead of the screen.")
@path_option("--badge", metavar="FILE.svg", help="Also write a badge.")
@with_default(
    "--metric",
    default="j_per_token",
    help="Metric of the badge: j_per_token, mfu, tokens_per_s, or any key or alias.",
)
@click.option("--location", help="Where it was trained, for the metadata: Quebec, Canada.")
@click.option(
    "--training-type",
    type=click.Choice(["pre-training", "fine-tuning"]),
    help="For the metadata. [default: fine-tuning where adapters were trained, else left out]",
)
@flag("--force", help="Overwrite files that exist.")
@with_run_and_settings
def command(
    settings: Settings,
    flops: tuple[Flops, ...],
    run: Run,
    out: Path | None,
    badge: Path | None,
    metric: str,
    location: str | None,
    training_type: str | None,
    force: bool,
) -> None:
    """Write a section for a model card, in Markdown. Without RUN: the newest under runs/.

    A paragraph to cite, a table of figures with their basis and window, what was not measured and
    why; in front of it the metadata for emissions and hardware that the Hugging Face Hub reads.
    Emissions are there only where energy was measured and a grid is stated: --grid FR.
    """
    from ergmeter.metrics.catalog import find
    from ergmeter.metrics.summarize import settings_of, summarize
    from ergmeter.views.run import model_card as view

    key = find(_SHORT.get(metric.lower(), metric))[0].key
    if badge is not None and badge.suffix.lower() != ".svg":
        raise UsageError(f"a badge is SVG, and {badge} does not end in .svg: name such a file")
    for option, target in (("-o", out), ("--badge", badge)):
        _check_free(target, option=option, force=force)
    if out is not None and badge is not None and out.resolve() == badge.resolve():
        raise UsageError(f"{out} is for the card and for the badge; name another file")
    several = len(run.trainings)
    if several > 1:
        raise UsageError(
            f"{several} trainings in this run: a card is of one: --training 1 (to {several})"
        )
    summary = summarize(run, settings, flops=flops)
    all_steps = _over_all_steps(run, settings, flops, summary)
    declared = settings_of(run, settings)
    sources = view.Sources(run, summary, all_steps, declared, flops, location, training_type)
    text = view.page(sources)
    if badge is not None:
        badge.write_text(view.badge(key, view.figure(sources, key)), "utf-8")
    if out is None:
        click.echo(text)
    else:
        out.write_text(text, "utf-8")
    for path in (out, badge):
        if path is not None:
            click.echo(str(path), err=out is None)


def _over_all_steps(
    run: Run, settings: Settings, flops: tuple[Flops, ...], summary: Summary
) -> Summary:
    """Return the summary with warm-up, evaluation and checkpoints, which emit CO2 too."""
    from ergmeter.metrics.evidence.window import UNBROKEN
    from ergmeter.metrics.summarize import summarize

    if not summary.window.get("warmup_steps") and not summary.window.get("cuts"):
        return summary
    all_of_it = dataclasses.replace(
        settings, warmup=None, warmup_s=None, warmup_steps=0, window=UNBROKEN
    )
    return summarize(run, all_of_it, flops=flops)


def _check_free(path: Path | None, *, option: str, force: bool) -> None:
    if path is None:
        return
    check_writable(path, option=option)
    if path.exists() and not force:
        raise UsageError(f"{path} is there already: pass --force to overwrite it, or another name")
