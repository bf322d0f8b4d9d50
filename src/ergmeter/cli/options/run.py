"""The run that a command is about: how it is named, opened and shown, and what of it is damaged.

Libraries are imported when they are needed: `erg report --help` loads no numpy.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from ergmeter.records import Flops
    from ergmeter.runlog.reader import Run
    from ergmeter.runlog.settings import Settings


_NEXT = "see also: erg explain RUN, erg report RUN --html FILE, erg serve"

with_training = click.option(
    "--training",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of several trainings that one command ran, just this one.",
)


def with_run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add RUN and --training to a command, which gets the `run` opened. The newest without RUN.

    What could not be read of it is told when the command is done, and its exit code is 1 then.
    """

    @functools.wraps(function)
    def wrapped(run: Path | None, training: int | None, **given: Any) -> int:  # noqa: ANN401
        from ergmeter.runlog.format import newest_run
        from ergmeter.runlog.reader import Run

        opened = Run.open(run or newest_run(Path("runs")))
        opened = opened.training(training) if training else opened
        code = function(run=opened, **given) or 0
        return tell_damage(opened) or code

    argument = click.argument("run", type=click.Path(path_type=Path), required=False)
    return argument(with_training(wrapped))


def tell_damage(run: Run) -> int:
    """Say what of a run could not be read. The exit code."""
    for line in run.damage:
        click.echo(f"erg: damaged, left out: {line}", err=True)
    return 1 if run.damage else 0


def show_run(
    console: Console,
    run: Run,
    settings: Settings | None = None,
    *,
    flops: Sequence[Flops] = (),
    show_all: bool = False,
) -> None:
    """Print the card of a run. Of several trainings in it each has its own."""
    from ergmeter.metrics.summarize import summarize
    from ergmeter.views.run.card import card, every_metric, show

    for one in parts(run):
        summary = summarize(one, settings, flops=flops)
        if show_all:
            console.print(card(one, summary), every_metric(summary), sep="\n")
        else:
            show(console, one, summary)
    tell_next(console)


def tell_next(console: Console) -> None:
    """On a terminal, once and in one line: what else there is to look at.

    Not within a recording: its recorder says it at the end.
    """
    from ergmeter.runlog.format import RUN_VARIABLE

    is_looked_at = sys.stdout.isatty() and console.file.isatty()
    if is_looked_at and RUN_VARIABLE not in os.environ:
        console.print(_NEXT, style="dim", highlight=False)


def parts(run: Run) -> list[Run]:
    """The run itself, or its trainings where there are several."""
    several = len(run.trainings)
    return [run.training(number + 1) for number in range(several)] if several > 1 else [run]
