"""`--html FILE` of commands that also write a page: the option, and how the file is written.

The trap: a page that takes the place of what it is of. A file that is read is never written to.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def with_page(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--html` to a command, which gets it as `page`."""
    return click.option(
        "--html",
        "page",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Also write one page with charts, that needs no network (pip install"
        " 'ergmeter[html]').",
    )(function)


def check_page(page: Path | None, sources: Iterable[Path]) -> None:
    """Before anything is read: a page is no source, and there is a directory for it."""
    if page is None:
        return
    if not page.parent.is_dir():
        raise click.UsageError(f"--html {page}: there is no directory {page.parent}; make it first")
    for source in sources:
        if page.exists() and source.exists() and page.samefile(source):
            raise click.UsageError(f"--html {page} is what is read; name another file")


def write_page(page: Path, whole: str) -> None:
    """Write a page, and say so where it does not get into what is printed."""
    page.write_text(whole, encoding="utf-8")
    click.echo(f"{page} ({len(whole.encode()) / 1e6:.2f} MB)", err=True)
