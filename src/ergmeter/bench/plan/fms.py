"""Reads FMS's own files: defaults.yaml, CONTENTS.yaml and its frameworks.

Each scenario begins with the file's defaults; FMS lost a default for all later scenarios once one
had replaced it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ergmeter.errors import UsageError

NONE = "none"  # what the original writes for no framework
DEFAULTS = "defaults.yaml"
CONTENTS = "CONTENTS.yaml"
ACCELERATE = "accelerate.yaml"
CONFIG_VARIABLE = "ACCELERATION_FRAMEWORK_CONFIG_FILE"
_SAMPLES = Path("../../sample-configurations")  # from its folder of scenarios


@dataclass(frozen=True, slots=True)
class Framework:
    """A shortname's meaning: a backend of `erg train`, or a file of fms-acceleration."""

    name: str
    tuning: Mapping[str, Any] | None = None
    file: Path | None = None


# Those whose like `erg train` has. accelerated-peft-bnb loads and wraps the model in a way of its
# own and is not among them: run as plain bitsandbytes it would be its own baseline.
BUILTIN = {
    NONE: Framework(NONE, {"backend": "torch"}),
    "torch": Framework("torch", {"backend": "torch"}),
    "bnb": Framework("bnb", {"backend": "bnb", "bits": 4}),
    "unsloth": Framework("unsloth", {"backend": "unsloth"}),
    "baseline-peft-bnb": Framework("baseline-peft-bnb", {"backend": "bnb", "bits": 4}),
}


def yaml_file(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"no file at {path}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}{_where(error)}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError(f"{path} must hold keys and values; got {type(value).__name__}")
    return value


def _where(error: Exception) -> str:
    """The line, and YAML's message."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f" is not YAML: {' '.join(str(error).split())}"
    parts = [getattr(error, name, None) for name in ("context", "problem")]
    why = ", ".join(part for part in parts if part)
    return f", line {mark.line + 1}, column {mark.column + 1} is not YAML: {why}"


def defaults(path: Path | None, *, beside: Path) -> dict[str, Any]:
    """The default arguments: of that file, or of the one beside the scenarios, if there is one."""
    if path is None:
        path = beside.parent / DEFAULTS
        if not path.is_file():
            return {}
    return yaml_file(path)


def merged(defaults: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A scenario's arguments over the defaults, in the original's order; null removes one."""
    remaining = {name: value for name, value in defaults.items() if name not in arguments}
    return {name: value for name, value in {**remaining, **arguments}.items() if value is not None}


def contents_path(path: Path | None, *, beside: Path) -> Path | None:
    """The list of frameworks: given, beside the scenarios, or where the original has it."""
    if path is not None:
        return path
    return next((at for at in contents_places(beside) if at.is_file()), None)


def contents_places(beside: Path) -> tuple[Path, ...]:
    """Where it is looked for."""
    return tuple(at / CONTENTS for at in (beside.parent, beside.parent / _SAMPLES))


def contents(path: Path | None) -> dict[str, Framework]:
    """The frameworks of a CONTENTS.yaml by shortname; their files lie beside it."""
    if path is None:
        return {}
    listed = yaml_file(path).get("framework_configs")
    if not isinstance(listed, list):
        raise UsageError(f"{path} has no list framework_configs")
    files = {}
    for index, entry in enumerate(listed):
        if not isinstance(entry, dict) or not {"shortname", "filename"} <= entry.keys():
            raise UsageError(f"{path}: framework_configs[{index}] needs shortname and filename")
        name = str(entry["shortname"])
        tuning = BUILTIN[name].tuning if name in BUILTIN else None
        files[name] = Framework(name, tuning, path.parent / str(entry["filename"]))
    return files


def text(value: Any) -> str | int | float | bool | None:  # noqa: ANN401  of YAML
    """A setting as one value: the original joins a list's by spaces."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)
