"""Shared by `erg demo`, `erg calibrate` and `erg train`: their workload needs torch, and a bar."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

INTERRUPTED = 130  # what a shell gives a program that Ctrl-C ended


def workload(name: str, *, what: str) -> ModuleType:
    """The module of that name. PluginError where torch is not installed."""
    from ergmeter.errors import PluginError

    try:
        return importlib.import_module(f"ergmeter.workloads.{name}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise PluginError(f"{what} needs torch: pip install 'ergmeter[torch]'") from error


@contextmanager
def progress_bar(
    what: str, *, quiet: bool, refresh_per_second: float = 0.0, shows_remaining: bool = False
) -> Iterator[Callable[[float, float, str], None]]:
    """Yield what takes how much is done, of how much, and a text.

    It shows a bar on a terminal, and elsewhere one line before it all. Drawing takes processor time
    from what is measured, so it is drawn seldom, or by default when something is done.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        if not quiet:
            click.echo(what, err=True)
        yield lambda _done, _total, _now: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(30), TextColumn("{task.fields[now]}"))
    with Progress(
        *columns,
        *([TimeRemainingColumn()] if shows_remaining else []),
        console=console,
        auto_refresh=refresh_per_second > 0,
        refresh_per_second=refresh_per_second or 10,
        transient=True,
    ) as bar:
        task = bar.add_task(what, total=None, now="loading" if shows_remaining else "")
        refresh = not refresh_per_second
        yield lambda done, total, now: bar.update(
            task, completed=done, total=total, now=now, refresh=refresh
        )
