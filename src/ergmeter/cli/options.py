"""Options that several commands take: the warm-up, what the program does not say, the grid."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

from ergmeter.runlog.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

# By the field of `Settings` that each is for.
_OPTIONS: dict[str, dict[str, Any]] = {
    "warmup_steps": {"type": click.IntRange(min=0), "help": "Leave out the first N steps."},
    "warmup_s": {
        "type": click.FloatRange(min=0),
        "help": "Leave out the first S seconds of steps.",
    },
    "warmup": {
        "type": click.Choice(["auto"]),
        "help": "Leave out steps until their time settles.",
    },
    "parameters": {
        "type": click.IntRange(min=1),
        "help": "Parameters of the model, for TT and ST.",
    },
    "tokens_per_step": {
        "type": click.IntRange(min=1),
        "help": "Tokens of a step, all ranks, where the program does not say. Marked as assumed.",
    },
    "samples_per_step": {
        "type": click.IntRange(min=1),
        "help": "Samples of a step, all ranks, where the program does not say. Marked as assumed.",
    },
    "grid_g_per_kwh": {
        "type": click.FloatRange(min=0),
        "help": "Carbon intensity of the electricity.",
    },
    "grid_source": {"help": "Where that intensity is from."},
    "pue": {
        "type": click.FloatRange(min=1),
        "help": "Power usage effectiveness of the building.",
    },
    "pue_source": {"help": "Where that PUE is from."},
}


def with_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `Settings` to a command, which gets them as one `settings`."""

    @functools.wraps(function)
    def wrapped(**given: Any) -> Any:  # noqa: ANN401  click passes what it parsed
        settings = Settings.declared(None, {name: given.pop(name) for name in _OPTIONS})
        return function(settings=settings, **given)

    for name, attributes in reversed(_OPTIONS.items()):
        wrapped = click.option(f"--{name.replace('_', '-')}", **attributes)(wrapped)
    return wrapped
