"""`--html FILE` of commands that write a page: the option, what is refused, how it is written.

The trap: a page that takes the place of what it is of, be that a source or a file in the directory
that is read. So a file that is no HTML page is never replaced, whatever it is; and a page is no
other output of the same command.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_BEGINS = b"<!doctype html"
_AS_WE_RUN = os.access in os.supports_effective_ids


def with_page(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--html` to a command, which gets it as `page`."""
    return click.option(
        "--html",
        "page",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write one page with charts, that needs no network (pip install 'ergmeter[html]').",
    )(function)


def check_page(page: Path | None, outputs: Iterable[Path] = ()) -> None:
    """Before the work: a page can be drawn and written, and replaces nothing but a page."""
    if page is None:
        return
    check_writable(page, option="--html")
    if _is_something_else(page):
        raise click.UsageError(
            f"--html {page}: there is a file that is no HTML page, which is not replaced; name"
            " another"
        )
    if page.resolve() in [one.resolve() for one in outputs]:
        raise click.UsageError(f"--html {page} is another output as well; name another file")
    from ergmeter.views.plots import converter

    converter()


def check_writable(path: Path, *, option: str) -> None:
    """Refuse what is a directory, or has none to be in, or one that takes no file."""
    if path.is_dir():
        raise click.UsageError(f"{option} {path}: is a directory; it takes a file")
    folder = path.parent
    if not folder.is_dir():
        what = "is no directory" if folder.exists() else "does not exist"
        raise click.UsageError(f"{option} {path}: the directory {folder} {what}")
    if not path.exists():
        _check_access(folder, f"{option} {path}")
    elif not os.access(path, os.W_OK, effective_ids=_AS_WE_RUN):
        raise click.UsageError(f"{option} {path}: can't be written to; name another file")


def check_folder(folder: Path, *, option: str) -> None:
    """Refuse a directory that is something else, or can't be made or written to."""
    paths = (folder, *folder.absolute().parents)
    there = next(one for one in paths if one.exists() or one.is_symlink())
    if not there.is_dir():
        raise click.UsageError(f"{option} {folder}: {there} is no directory; name another")
    _check_access(there, f"{option} {folder}")


def _check_access(folder: Path, what: str) -> None:
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=_AS_WE_RUN):
        raise click.UsageError(f"{what}: the directory {folder} can't be written to; name another")


def write_page(page: Path, whole: str, *, is_told_apart: bool = True) -> None:
    """Write a page and say so: on stderr, where stdout is of something else."""
    page.write_text(whole, encoding="utf-8")
    click.echo(f"{page} ({len(whole.encode()) / 1e6:.2f} MB)", err=is_told_apart)


def _is_something_else(page: Path) -> bool:
    """Whether there is a file that holds something and is no page; a pipe is not looked into."""
    if not page.is_file():
        return False
    with page.open("rb") as file:
        begins = file.read(len(_BEGINS))
    return bool(begins) and begins.lower() != _BEGINS
