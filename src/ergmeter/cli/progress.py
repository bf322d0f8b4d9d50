"""The progress bar of commands that take a while."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress_bar(
    what: str,
    *,
    quiet: bool = False,
    has_line: bool = False,
    refresh_per_second: float = 0.0,
    time: Literal["remaining", "elapsed"] | None = None,
) -> Iterator[Callable[[float, float | None, str], None]]:
    """Yield what takes how much is done, of how much, and a text.

    It shows a bar on a terminal, and elsewhere one line before it all, if it `has_line`. Drawing
    takes processor time from what is measured, so it is drawn seldom, or by default when something
    is done.
    """
    if quiet or not sys.stderr.isatty():
        if has_line and not quiet:
            click.echo(what, err=True)
        yield lambda _done, _total, _now: None
        return
    from rich import progress
    from rich.console import Console

    times = {"remaining": progress.TimeRemainingColumn, "elapsed": progress.TimeElapsedColumn}
    with progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(30),
        progress.TextColumn("{task.fields[now]}"),
        *([times[time]()] if time else []),
        console=Console(stderr=True),
        auto_refresh=refresh_per_second > 0,
        refresh_per_second=refresh_per_second or 10,
        transient=True,
    ) as bar:
        task = bar.add_task(what, total=None, now="loading" if time == "remaining" else "")
        refresh = not refresh_per_second
        yield lambda done, total, now: bar.update(
            task, completed=done, total=total, now=now, refresh=refresh
        )
