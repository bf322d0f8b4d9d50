"""Shared by the commands that measure: libraries that a workload needs, and a progress bar."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import click

from ergmeter.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

INTERRUPTED = 130  # what a shell gives a program that Ctrl-C ended


def workload(name: str, *, what: str) -> ModuleType:
    """The module of that name. PluginError where torch is not installed."""
    with needing("torch", what=what, extra="torch"):
        return importlib.import_module(f"ergmeter.workloads.{name}")


@contextmanager
def needing(*libraries: str, what: str, extra: str) -> Iterator[None]:
    """Raise PluginError, with what to install, where one of these libraries is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in libraries:
            raise
        raise PluginError(f"{what} needs {missing}: pip install 'ergmeter[{extra}]'") from error


@contextmanager
def progress_bar(
    what: str,
    *,
    quiet: bool,
    refresh_per_second: float = 0.0,
    time: Literal["remaining", "elapsed"] | None = None,
) -> Iterator[Callable[[float, float | None, str], None]]:
    """Yield what takes how much is done, of how much, and a text.

    It shows a bar on a terminal, and elsewhere one line before it all. Drawing takes processor time
    from what is measured, so it is drawn seldom, or by default when something is done.
    """
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        if not quiet:
            click.echo(what, err=True)
        yield lambda _done, _total, _now: None
        return
    times = {"remaining": progress.TimeRemainingColumn, "elapsed": progress.TimeElapsedColumn}
    with progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(30),
        progress.TextColumn("{task.fields[now]}"),
        *([times[time]()] if time else []),
        console=console,
        auto_refresh=refresh_per_second > 0,
        refresh_per_second=refresh_per_second or 10,
        transient=True,
    ) as bar:
        task = bar.add_task(what, total=None, now="loading" if time == "remaining" else "")
        refresh = not refresh_per_second
        yield lambda done, total, now: bar.update(
            task, completed=done, total=total, now=now, refresh=refresh
        )
