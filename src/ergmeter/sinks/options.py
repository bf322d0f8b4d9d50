"""What was a sink asked to do? Its options by name, the unknown ones refused.

The trap: an option that is misspelt and ignored. `projekt="llama"` would send a run to the default
project, and nobody would know why; so a name that a sink does not take is a mistake, and is said.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from ergmeter.errors import UsageError
from ergmeter.sinks.declared import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ergmeter.ports import SinkRequest

_TRUTHS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def options_of(request: SinkRequest, *, sink: str, **found: Any) -> dict[str, Any]:  # noqa: ANN401
    """The options of a request, with the defaults of this sink, and those that it found out."""
    return checked(sink, request.options, **found)


def checked(sink: str, options: Mapping[str, Any], **found: Any) -> dict[str, Any]:  # noqa: ANN401
    """All options of a sink. UsageError for what it does not take.

    Text, as a command line gives it, becomes a number or a truth where the default is one.
    """
    known = {**OPTIONS[sink], **found}
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(
                f"the sink {sink!r} has no option {name!r}; {hint}it takes {', '.join(known)}"
            )
    given = {**known, **options}
    return {name: _like(known[name], value, option=name) for name, value in given.items()}


def choice(value: str, of: tuple[str, ...], *, option: str) -> str:
    """One of a few words. UsageError for any other."""
    if value not in of:
        raise UsageError(f"{option} is one of {', '.join(of)}; got {value!r}")
    return value


def _like(default: Any, value: Any, *, option: str) -> Any:  # noqa: ANN401
    """A text as what the default is."""
    if not isinstance(value, str) or not isinstance(default, int | float):
        return value
    try:
        if isinstance(default, bool):
            return _TRUTHS[value.lower()]
        return type(default)(value)
    except (KeyError, ValueError):
        kind = "true or false" if isinstance(default, bool) else "a number"
        raise UsageError(f"{option} is {kind}; got {value!r}") from None
