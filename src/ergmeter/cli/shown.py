"""A run on the terminal, as `erg record` and `erg report` show it: one card, or one a training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.metrics.summarize import summarize
from ergmeter.views.terminal import every_metric, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from ergmeter.records import Flops
    from ergmeter.runlog.reader import Run
    from ergmeter.runlog.settings import Settings


def show_run(
    console: Console,
    run: Run,
    settings: Settings | None = None,
    *,
    flops: Sequence[Flops] = (),
    show_all: bool = False,
) -> None:
    """Print the card of a run. Of several trainings in it each has its own."""
    for one in parts(run):
        summary = summarize(one, settings, flops=flops)
        show(console, one, summary)
        if show_all:
            console.print(every_metric(summary))


def parts(run: Run) -> list[Run]:
    """The run itself, or its trainings where there are several."""
    several = len(run.trainings)
    return [run.training(number + 1) for number in range(several)] if several > 1 else [run]
