"""Options that several commands take: the warm-up, what the program does not say, the grid."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

from ergmeter.runlog.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

_OPTIONS = [
    click.option("--warmup-steps", type=click.IntRange(min=0), help="Leave out the first N steps."),
    click.option(
        "--warmup-s", type=click.FloatRange(min=0), help="Leave out the first S seconds of steps."
    ),
    click.option(
        "--warmup", type=click.Choice(["auto"]), help="Leave out steps until their time settles."
    ),
    click.option(
        "--parameters", type=click.IntRange(min=1), help="Parameters of the model, for TT and ST."
    ),
    click.option(
        "--tokens-per-step",
        type=click.IntRange(min=1),
        help="Tokens of a step, all ranks, where the program does not say. Marked as assumed.",
    ),
    click.option(
        "--samples-per-step",
        type=click.IntRange(min=1),
        help="Samples of a step, all ranks, where the program does not say. Marked as assumed.",
    ),
    click.option(
        "--grid-g-per-kwh",
        type=click.FloatRange(min=0),
        help="Carbon intensity of the electricity.",
    ),
    click.option("--grid-source", help="Where that intensity is from."),
    click.option(
        "--pue", type=click.FloatRange(min=1), help="Power usage effectiveness of the building."
    ),
    click.option("--pue-source", help="Where that PUE is from."),
]
_NAMES = [
    option_name.replace("-", "_")
    for option_name in (
        "warmup-steps",
        "warmup-s",
        "warmup",
        "parameters",
        "tokens-per-step",
        "samples-per-step",
        "grid-g-per-kwh",
        "grid-source",
        "pue",
        "pue-source",
    )
]


def with_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `Settings` to a command, which gets them as one `settings`."""

    @functools.wraps(function)
    def wrapped(**given: Any) -> Any:  # noqa: ANN401  click passes what it parsed
        settings = Settings.declared(None, {name: given.pop(name) for name in _NAMES})
        return function(settings=settings, **given)

    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped
