"""Options of the sinks: defaults, checks, and what each sink needs to be installed.

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

    from ergmeter.ports import SinkRequest

PREFIX = "ergmeter"
_TRACKER: dict[str, Any] = {"metrics": None, "prefix": PREFIX, "devices": True}
# Options by name, with their defaults; None: the sink determines it itself.
OPTIONS: dict[str, dict[str, Any]] = {
    "console": {"metrics": None, "style": "line", "every_s": 60.0, "stream": "stderr"},
    "csv": {"metrics": None, "path": None, "rows": "updates", "ledger": False, "columns": None},
    "jsonl": {"metrics": None, "devices": True, "path": None},
    "tensorboard": {**_TRACKER, "path": None},
    "wandb": {**_TRACKER, "project": None, "run_name": None},
    "mlflow": {
        **_TRACKER, "tracking_uri": None, "experiment": None, "run_id": None, "run_name": None,
    },
    "trackio": {**_TRACKER, "project": None, "run_name": None},
    "prometheus": {
        **_TRACKER, "port": 9478, "address": "127.0.0.1", "push": None, "job": PREFIX,
    },
    "otel": {
        **_TRACKER, "endpoint": None, "headers": None, "timeout_s": 10.0, "exporter": None,
        "reader": None, "hardware_names": True,
    },
}  # fmt: skip
_NEEDS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "prometheus": "prometheus_client",
    "otel": "opentelemetry",
}


def missing_library(sink: str) -> str:
    """The missing library that a sink needs, with the command to install it; else empty."""
    needed = _NEEDS.get(sink)
    if needed is None or find_spec(needed) is not None:
        return ""
    return f"{needed} is not installed; pip install 'ergmeter[{sink}]'"


_TRUTHS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def options_of(request: SinkRequest, *, sink: str, **defaults: Any) -> dict[str, Any]:  # noqa: ANN401
    """The options of a request, with this sink's defaults and those it computed."""
    return checked_options(sink, request.options, **defaults)


def checked_options(sink: str, options: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:  # noqa: ANN401
    """All options of a sink. UsageError for an unknown one.

    Text, as a command line gives it, becomes a number or a truth where the default is one.
    """
    allowed = {**OPTIONS[sink], **defaults}
    for name in options:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(
                f"the sink {sink!r} has no option {name!r}; {hint}it takes {', '.join(allowed)}"
            )
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
