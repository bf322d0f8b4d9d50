"""Cells and plans of a bench, and their JSON forms.

A cell's id is a digest of what it runs, so that a plan that grows keeps the ids of its old cells.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ergmeter.errors import FormatError, UsageError

Value: TypeAlias = str | int | float | bool | None
Launch: TypeAlias = Literal["plain", "torchrun", "accelerate"]
VERSION = 1
_SEED = re.compile(r"^seed:.*$", re.MULTILINE)
_DIGITS = 12

# Placeholders in commands that are filled in when a cell starts: its directory is not known when it
# is planned.
OUT, RUN, HF, DATA, PORT = "{out}", "{run}", "{hf}", "{data}", "{port}"
PYTHON, UNSLOTH_PYTHON = "{python}", "{unsloth_python}"
REPEAT, SEED = "{repeat}", "{seed}"
BRACE = "{brace}"  # a literal { before text that looks like a placeholder: {brace}seed}
AT_START = (OUT, RUN, HF, DATA, PORT, PYTHON, UNSLOTH_PYTHON, REPEAT, SEED, BRACE)
SFT_TRAINER = ("-m", "tuning.sft_trainer")  # of fms-hf-tuning, behind the Python that has it
_AT_START = re.compile("|".join(map(re.escape, AT_START)))
FIRST_SEED = 42  # of the first repeat; the others follow, the same in every configuration
_PORT = 29511  # as in FMS


@dataclass(frozen=True, slots=True)
class Expectation:
    """What must be true of a run: a regular expression in its output, or a fact of its header."""

    kind: Literal["pattern", "fact"]
    name: str
    value: str | int | float | bool


def broken_expectations(checked: Iterable[Mapping[str, Any]]) -> str:
    """The expectations that were not met, in one line; empty if all were."""
    return "; ".join(f"{c.get('name')}: {c.get('seen')}" for c in checked if not c.get("held"))


@dataclass(frozen=True)
class Cell:
    """One repeat of a configuration. `settings` are all its arguments and axes.

    `command` is what one rank runs, or the complete command if `launch` is plain. `filled` replaces
    the placeholders (AT_START) in it and in `environment`, `files` and `launch_options`. `files`:
    texts to write into the cell's directory before it starts, by name. `launch_options` go to
    torchrun or accelerate. `skip`: why the cell is not run.
    """

    index: int
    id: str
    scenario: str
    settings: Mapping[str, Value]
    num_gpus: int
    repeat: int
    command: tuple[str, ...]
    nodes: int = 1
    launch: Launch = "plain"
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    expects: tuple[Expectation, ...] = ()
    skip: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    launch_options: tuple[str, ...] = ()
    warmup_s: float | None = None

    @cached_property
    def group(self) -> str:
        """The id of its configuration, which all its repeats share."""
        return self.digest(0)

    @property
    def is_of_fms(self) -> bool:
        """True if the cell runs fms-hf-tuning's trainer."""
        return self.command[1:3] == SFT_TRAINER

    def digest(self, repeat: int) -> str:
        """A hash (12 hex digits) of what the cell runs, equal wherever and whenever it is planned.

        It covers the cell's files, except the seed in them, which follows from the repeat.
        """
        parts = [
            dict(sorted(self.settings.items())),
            list(self.command),
            dict(sorted(self.environment.items())),
            [self.launch, *self.launch_options, self.nodes],
            {name: _SEED.sub("", text) for name, text in sorted(self.files.items())},
            repeat,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:_DIGITS]

    def filled(self, directory: Path, *, port: int = _PORT) -> Cell:
        """Return the cell with its placeholders filled in: directory, port, seed and so on."""
        names = {
            OUT: str(directory),
            RUN: str(directory / "run"),
            HF: str(directory / "hf"),
            DATA: str(directory.parent / "data"),
            PORT: str(port),
            REPEAT: str(self.repeat),
            SEED: str(FIRST_SEED + self.repeat - 1),
            PYTHON: own_python("tuning") if self.is_of_fms else sys.executable,
            UNSLOTH_PYTHON: own_python("unsloth"),
            BRACE: "{",
        }
        return replace(
            self,
            command=tuple(_put(part, names) for part in self.command),
            environment={k: _put(v, names) for k, v in self.environment.items()},
            files={k: _put(v, names) for k, v in self.files.items()},
            launch_options=tuple(_put(part, names) for part in self.launch_options),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the cell as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Cell:
        """Make a cell from its JSON object; names that a later version added are ignored."""
        fields = {name: value[name] for name in cls.__dataclass_fields__ if name in value}
        fields["command"] = tuple(fields["command"])
        fields["launch_options"] = tuple(fields.get("launch_options", ()))
        fields["expects"] = tuple(
            Expectation(**expectation) for expectation in fields.get("expects", ())
        )
        return cls(**fields)


def own_python(package: str) -> str:
    """Return the Python that has a package: unsloth, or tuning, which is fms-hf-tuning's.

    This Python if the package is installed here. Else that of ERGMETER_UNSLOTH_PYTHON or
    ERGMETER_FMS_PYTHON, or the one that `./dev unsloth` or `./dev fms` makes.
    """
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    name = "fms" if package == "tuning" else package
    return os.environ.get(f"ERGMETER_{name.upper()}_PYTHON") or f".venv-{name}/bin/python"


def _put(text: str, names: Mapping[str, str]) -> str:
    """Fill in all placeholders in one pass: placeholders in inserted values are not replaced."""
    return _AT_START.sub(lambda match: names[match[0]], text)


@dataclass(frozen=True)
class BenchPlan:
    """All cells of a scenario file, and the options they were planned with.

    `keys` (secrets, by environment variable) and `warnings` (for the user) are never stored.
    """

    source: str
    cells: tuple[Cell, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object, without keys and warnings."""
        return {
            "version": VERSION,
            "source": self.source,
            "settings": dict(self.settings),
            "cells": [cell.to_json() for cell in self.cells],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> BenchPlan:
        """Make a plan from its JSON object. Raises FormatError for another version."""
        if value.get("version") != VERSION:
            raise FormatError(
                f"the plan is of version {value.get('version')!r}; this ergmeter reads {VERSION}"
            )
        cells = tuple(Cell.from_json(cell) for cell in value["cells"])
        return cls(source=value["source"], cells=cells, settings=value.get("settings", {}))

    @classmethod
    def read(cls, path: Path) -> BenchPlan:
        """Read the plan in that file."""
        check_plan(path)
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise FormatError(f"{path} is not a plan: {type(error).__name__}: {error}") from error


def check_plan(path: Path) -> None:
    """Raise FormatError if there is no plan at this path, UsageError if it is below a file."""
    if path.parent.is_file():
        raise UsageError(f"{path.parent} is a file; give the results directory that it is in")
    if not path.exists():
        raise FormatError(f"{path} is not there: no plan was made here")
