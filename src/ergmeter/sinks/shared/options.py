"""Checks the options of sinks, and whether their libraries are installed.

A misspelt option is an error: `projekt="llama"` would otherwise send a run to the default project.
Sinks load in a thread of their own, later; options and libraries are checked here, at once.
"""

from __future__ import annotations

import difflib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ergmeter.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ergmeter.ports import DeclaredSink

PREFIX = "ergmeter"
TRACKER: dict[str, Any] = {"metrics": None, "prefix": PREFIX, "devices": True}


def missing_library(sink: type[DeclaredSink]) -> str:
    """The missing library that a sink needs, with the command to install it; else empty."""
    if not sink.library or find_spec(sink.library) is not None:
        return ""
    return f"{sink.library} is not installed; pip install 'ergmeter[{sink.name}]'"


_TRUTHS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def checked_options(
    sink: type[DeclaredSink],
    options: Mapping[str, Any],
    **defaults: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """All options of a sink; `defaults` are those it computed. UsageError for an unknown one.

    Text, as a command line gives it, becomes a number or a truth where the default is one.
    """
    allowed = {**sink.options, **defaults}
    for name in options:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            wrong = f"the sink {sink.name!r} has no option {name!r}"
            raise UsageError(f"{wrong}; {hint}it takes {', '.join(allowed)}")
    values = {**allowed, **options}
    return {name: _like(allowed[name], value, option=name) for name, value in values.items()}


def choice(value: str, of: tuple[str, ...], *, option: str) -> str:
    """The value, if it is one of `of`; else UsageError."""
    if value not in of:
        raise UsageError(f"{option} is one of {', '.join(of)}; got {value!r}")
    return value


def _like(default: Any, value: Any, *, option: str) -> Any:  # noqa: ANN401
    """Text converted to the type of the default."""
    if not isinstance(value, str) or not isinstance(default, int | float):
        return value
    try:
        if isinstance(default, bool):
            return _TRUTHS[value.lower()]
        return type(default)(value)
    except (KeyError, ValueError):
        kind = "true or false" if isinstance(default, bool) else "a number"
        raise UsageError(f"{option} is {kind}; got {value!r}") from None
