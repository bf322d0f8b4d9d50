"""Reads FMS's own files: defaults.yaml, CONTENTS.yaml and its frameworks.

Each scenario begins with the file's defaults; FMS lost a default for all later scenarios once one
had replaced it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator

from ergmeter.config_file import check, read_yaml

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


class _ListedFramework(BaseModel):
    """An entry of CONTENTS.yaml; further keys have no use here."""

    shortname: Annotated[str, BeforeValidator(str)]
    filename: Annotated[str, BeforeValidator(str)]


class _Contents(BaseModel):
    framework_configs: list[_ListedFramework]


def defaults(path: Path | None, *, beside: Path) -> dict[str, Any]:
    """The default arguments: of that file, or of the one beside the scenarios, if there is one."""
    if path is None:
        path = beside.parent / DEFAULTS
        if not path.is_file():
            return {}
    return read_yaml(path).values


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
    files = {}
    for entry in check(_Contents, read_yaml(path)).framework_configs:
        name = entry.shortname
        tuning = BUILTIN[name].tuning if name in BUILTIN else None
        files[name] = Framework(name, tuning, path.parent / entry.filename)
    return files


def text(value: Any) -> str | int | float | bool | None:  # noqa: ANN401  of YAML
    """A setting as one value: the original joins a list's by spaces."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)
