"""Short forms of click's options, options that name a form of output or a file, the progress bar.

A page never replaces a file that is not an HTML page, nor another output of the same command.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.console import Console

    from ergmeter.views.document import Document

Decorator: TypeAlias = "Callable[[Callable[..., Any]], Callable[..., Any]]"
PATH = click.Path(path_type=Path)
COUNT = click.IntRange(min=1)

flag = partial(click.option, is_flag=True)
path_option = partial(click.option, type=PATH)
repeated = partial(click.option, multiple=True)
with_default = partial(click.option, show_default=True)
# Of an earlier version: accepted, so that scripts which pass it go on to work.
without_effect = partial(click.option, hidden=True, expose_value=False)


def with_each(
    *options: Callable[..., Any], group: str = "", common: Sequence[str] = ()
) -> Decorator:
    """Return a decorator that adds options to a command, in the order of its help.

    Options of a `group` are listed by `--help-all` only, except the `common` ones.
    """

    def with_all(function: Callable[..., Any]) -> Callable[..., Any]:
        before = len(getattr(function, "__click_params__", ()))
        for option in reversed(options):
            function = option(function)
        for param in function.__click_params__[before:]:  # type: ignore[attr-defined]
            if group and param.name not in common:
                param.group = group
        return function

    return with_all


_SHOWS_ALL = "ergmeter.help_all"


class GroupedCommand(click.Command):
    """A command whose `--help` leaves out groups of options, which `--help-all` shows."""

    def __init__(self, *arguments: Any, **declared: Any) -> None:  # noqa: ANN401  as click's own
        super().__init__(*arguments, **declared)
        titles = dict.fromkeys(param.group for param in self.params if hasattr(param, "group"))
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=self._print_all,
                help=f"Show the other options too: {', '.join(titles)}.",
            )
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, by group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            title = getattr(param, "group", "options")
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record and (title == "options" or ctx.meta.get(_SHOWS_ALL)):
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title[:1].upper() + title[1:]):
                formatter.write_dl(records)

    def _print_all(self, ctx: click.Context, _parameter: object, is_asked: bool) -> None:
        if is_asked:
            click.echo(self.full_help(ctx))
            ctx.exit()

    def full_help(self, ctx: click.Context) -> str:
        """Return the help with all options."""
        ctx.meta[_SHOWS_ALL] = True
        return self.get_help(ctx)


def given_parameters() -> dict[str, click.Parameter]:
    """Return the parameters that the command line gives, by name."""
    context = click.get_current_context()
    return {
        param.name: param
        for param in context.command.params
        if param.name and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    }


def listed(_context: object, _parameter: object, text: str | None) -> tuple[str, ...]:
    """Split an option's text at commas; empty if it is not given."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


# Of the commands that compare cells of benches.
NOISE = repeated(
    "--noise",
    "noises",
    metavar="[METRIC=]SHARE|PATH",
    help="How much a single run scatters, where runs were not repeated: 1%, loss=0.2%, or a path of"
    " repeats (runs, a ledger, a bench) to measure it on.",
)
BY = click.option(
    "--by",
    callback=listed,
    metavar="COLUMNS",
    help="Match cells by these columns, joined by commas.",
)


_BEGINS = b"<!doctype html"
_AS_WE_RUN = os.access in os.supports_effective_ids


def warn(lines: Iterable[str]) -> int:
    """Print lines to stderr. Return 1, the exit code of a failure, if there are any; else 0."""
    texts = list(lines)
    for line in texts:
        click.echo(f"erg: {line}", err=True)
    return 1 if texts else 0


def print_json(document: object) -> None:
    """Print a document as JSON, which has no NaN."""
    click.echo(json.dumps(document, indent=1, allow_nan=False))


@dataclass(frozen=True)
class Forms:
    """The form in which a command was asked to show its document, and a page to write."""

    form: str  # json, md or csv; on the terminal for any other
    page: Path | None = None

    def show(self, document: Document, *, console: Console | None = None, csv: str = "") -> None:
        """Write the page, then print the document, or its CSV."""
        self.write_page(document)
        if self.form == "json":
            from ergmeter.views.render.json import json_text

            click.echo(json_text(document))
        elif self.form == "md":
            from ergmeter.views.render.markdown import markdown

            click.echo(markdown(document), nl=False)
        elif self.form == "csv":
            click.echo(csv, nl=False)
        else:
            from rich import console as rich_console

            from ergmeter.views.render.terminal import show

            show(document, console or rich_console.Console())

    def write_page(self, document: Document, *, is_alone: bool = False) -> None:
        """Write the page, if one was asked for, and print its path: on stdout if it `is_alone`."""
        if self.page is not None:
            from ergmeter.views.render.html import html

            text = html(document)
            self.page.write_text(text, encoding="utf-8")
            click.echo(f"{self.page} ({len(text.encode()) / 1e6:.2f} MB)", err=not is_alone)


def _with_form(
    options: list[Callable[..., Any]], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Add options that name a form to a command with `--html`; it gets both as `forms`."""

    @functools.wraps(function)
    def wrapped(
        as_json: bool,
        as_markdown: bool,
        page: Path | None,
        form: str = "text",
        **options: Any,  # noqa: ANN401  click passes what it parsed
    ) -> Any:  # noqa: ANN401
        asked = {"--json": "json"} if as_json else {}
        asked |= {"--md": "md"} if as_markdown else {}
        asked |= {f"--format {form}": form} if "form" in given_parameters() else {}
        if len(set(asked.values())) > 1:
            raise click.UsageError(f"{' and '.join(asked)} are two forms; give one")
        check_page(page)
        return function(forms=Forms(next(iter(asked.values()), form), page), **options)

    return with_each(*options)(wrapped)


_JSON = flag("--json", "as_json", help="As JSON, in base units (FLOPs, bytes, seconds, joules).")
_markdown = partial(flag, help="As Markdown, for an issue.")
_FLAGS = [_JSON, _markdown("--md", "--markdown", "as_markdown")]
# For commands whose `--format` has both.
SHORT_FLAGS = [
    flag("--json", "as_json", help="The same as --format json."),
    flag("--md", "as_markdown", help="The same as --format md."),
]


def with_format(
    *formats: str, help: str | None = None, flags: list[Callable[..., Any]] = _FLAGS
) -> Decorator:
    """Add `--format`, by default the first of these, to a command with `--html`."""
    option = with_default(
        "--format", "form", type=click.Choice(formats), default=formats[0], help=help
    )
    return partial(_with_form, [option, *flags])


with_page = path_option(
    "--html",
    "page",
    metavar="FILE",
    help="Write one page with charts, that needs no network (pip install 'ergmeter[html]').",
)
# Add `--json`, `--md` and `--html` to a command, which gets them as `forms`. Of reference tables,
# `--markdown` prints a page of the documentation.
with_forms = partial(_with_form, [*_FLAGS, with_page])
with_reference_forms = partial(_with_form, [_JSON, _markdown("--md", "as_markdown"), with_page])


def check_page(page: Path | None, outputs: Iterable[Path] = ()) -> None:
    """Refuse a page that can't be drawn or written, or would replace something else."""
    if page is None:
        return
    check_writable(page, option="--html")
    if first_bytes(page, len(_BEGINS)).lower() not in (b"", _BEGINS):
        raise click.UsageError(
            f"--html {page}: the file exists and is not an HTML page, so it is not replaced; name"
            " another"
        )
    if page.resolve() in [output.resolve() for output in outputs]:
        raise click.UsageError(f"--html {page} is another output as well; name another file")
    from ergmeter.views.charts.plots import converter

    converter()


def check_writable(path: Path, *, option: str) -> None:
    """Refuse a file path that is a directory, can't be written, or has no directory."""
    if path.is_dir():
        raise click.UsageError(f"{option} {path}: is a directory; it takes a file")
    folder = path.parent
    if not folder.is_dir():
        what = "is not a directory" if folder.exists() else "does not exist"
        raise click.UsageError(f"{option} {path}: the directory {folder} {what}")
    if not path.exists():
        _check_access(folder, f"{option} {path}")
    elif not os.access(path, os.W_OK, effective_ids=_AS_WE_RUN):
        raise click.UsageError(f"{option} {path}: can't be written to; name another file")


def check_folder(folder: Path, *, option: str) -> None:
    """Refuse a directory path that is something else, or can't be created or written to."""
    paths = (folder, *folder.absolute().parents)
    there = next(path for path in paths if path.exists() or path.is_symlink())
    if not there.is_dir():
        raise click.UsageError(f"{option} {folder}: {there} is not a directory; name another")
    _check_access(there, f"{option} {folder}")


def _check_access(folder: Path, what: str) -> None:
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=_AS_WE_RUN):
        raise click.UsageError(f"{what}: the directory {folder} can't be written to; name another")


def first_bytes(path: Path, count: int) -> bytes:
    """Return the first bytes of a file; none if there is no file, or a pipe."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(count)


@contextmanager
def progress_bar(
    what: str,
    *,
    quiet: bool = False,
    has_line: bool = False,
    refresh_per_second: float = 0.0,
    time: Literal["remaining", "elapsed"] | None = None,
) -> Iterator[Callable[[float, float | None, str], None]]:
    """Yield a function show(done, total, text) that updates a progress bar.

    Without a terminal there is no bar; with `has_line`, `what` is printed once. Drawing takes CPU
    time from what is measured, so it is limited to `refresh_per_second`; by default it is drawn at
    each update.
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
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(30),
        progress.TextColumn("{task.fields[now]}", markup=False),
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
