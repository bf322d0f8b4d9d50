"""What was a sink asked to do? Its options by name, the unknown ones refused.

The trap: an option that is misspelt and ignored. `projekt="llama"` would send a run to the default
project, and nobody would know why; so a name that a sink does not take is a mistake, and is said.
"""

from __future__ import annotations

import difflib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ergmeter.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ergmeter.ports import SinkRequest

# -- declared --------------------------------------------------------------------------------------
# What each of our sinks takes and needs, known without loading it.
#
# The trap: a misspelt option or a library that isn't installed, told when ten hours of training are
# over. Sinks load in a thread of their own, later and heavily; what can be wrong with them is here.


PREFIX = "ergmeter"
_TRACKER: dict[str, Any] = {"metrics": None, "prefix": PREFIX, "devices": True}
# Options by name, with their defaults; None stands for what the sink finds out itself.
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


def lacks(sink: str) -> str:
    """What a sink of ours needs that isn't here, with the cure; else nothing."""
    needed = _NEEDS.get(sink)
    if needed is None or find_spec(needed) is not None:
        return ""
    return f"{needed} is not installed; pip install 'ergmeter[{sink}]'"


# -- options ---------------------------------------------------------------------------------------


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
