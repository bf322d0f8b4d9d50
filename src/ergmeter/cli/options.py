"""Short forms of click's options, which the commands declare theirs with."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

PATH = click.Path(path_type=Path)
COUNT = click.IntRange(min=1)

flag = partial(click.option, is_flag=True)
path_option = partial(click.option, type=PATH)
repeated = partial(click.option, multiple=True)
with_default = partial(click.option, show_default=True)


def with_each(
    function: Callable[..., Any], options: list[Callable[..., Any]]
) -> Callable[..., Any]:
    """Add options to a command, in the order of its help."""
    for option in reversed(options):
        function = option(function)
    return function


def listed(_context: object, _parameter: object, text: str | None) -> tuple[str, ...]:
    """The parts of an option that are joined by commas; none where it is not given."""
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
