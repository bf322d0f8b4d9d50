"""Plans a bench: the cells of a file of scenarios, with the command that each starts.

Nothing is started and no device is needed. An argument that a scenario sets removes its axis; FMS
multiplied by the axis all the same and ran one configuration under two numbers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from ergmeter.bench.plan import data, fms
from ergmeter.bench.plan.cells import VERSION, BenchPlan, Cell
from ergmeter.bench.plan.expand import Asked, Check, Making
from ergmeter.bench.plan.scenarios import (
    Problems,
    Scenario,
    Scenarios,
    Template,
    read_scenarios,
    template,
)
from ergmeter.config_file import hint
from ergmeter.errors import FormatError, UsageError

_PIECE = 1 << 18  # characters
_BLANK = " \t\r\n"


def cells(path: Path) -> Iterator[Cell]:
    """The cells of the plan at this path, in its order."""
    try:
        with path.open(encoding="utf-8") as file:
            for member in _members(_Text(file), path):
                yield Cell.from_json(member)
    except FileNotFoundError as error:
        raise FormatError(f"{path} is not there: no plan was made here") from error
    except NotADirectoryError as error:
        raise UsageError(
            f"{path.parent} is a file; name the directory of results that it is in"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path} is no plan: {type(error).__name__}: {error}") from error


def _members(text: _Text, path: Path) -> Iterator[dict[str, Any]]:
    """The members of the list `cells` in the JSON object; the version comes before it."""
    text.take("{")
    key, version = text.value(), None
    while key != "cells":
        text.take(":")
        value = text.value()
        version = value if key == "version" else version
        text.take(",")
        key = text.value()
    if version != VERSION:
        raise FormatError(f"{path} is of version {version!r}; this ergmeter reads {VERSION}")
    text.take(":")
    text.take("[")
    while text.next() != "]":
        yield text.value()
        if text.next() == ",":
            text.take(",")
    text.take("]")


class _Text:
    """JSON that is read as far as it is needed."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self._decoder = json.JSONDecoder()

    def next(self) -> str:
        """The next character that is not blank; it stays."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _BLANK:
                    return self._text[self._at]
                self._at += 1
            if not self._read():
                raise ValueError("it ends too early")

    def take(self, wanted: str) -> None:
        if self.next() != wanted:
            raise ValueError(f"{wanted!r} was expected, not {self.next()!r}")
        self._at += 1

    def value(self) -> Any:  # noqa: ANN401  whatever JSON can hold
        """The next value, whole."""
        self.next()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except ValueError:
                if not self._read():
                    raise
                continue
            # A number at the very end may go on in the next piece.
            if end < len(self._text) or not self._read():
                self._at = end
                return value

    def _read(self) -> bool:
        """Take a piece more, and let go of what is behind. Whether there was one."""
        more = self._file.read(_PIECE)
        self._text = self._text[self._at :] + more
        self._at = 0
        return bool(more)


def plan(
    scenarios_path: Path,
    *,
    num_gpus: Sequence[int] | None = None,
    effective_batch_size: Sequence[int] | None = None,
    packing: Sequence[bool] | None = None,
    max_seq_len: Sequence[int] | None = None,
    only: Sequence[str] = (),
    repeats: int | None = None,
    command: str | None = None,
    otherwise: str = "erg train",
    timeout_s: float | None = None,
    warmup_s: float | None = None,
    defaults: Path | None = None,
    contents: Path | None = None,
    frameworks: Mapping[str, str] | None = None,
    accelerate_config: Path | None = None,
    log_memory_hf: bool | None = None,
    data_stage: bool = True,
    check: Check | None = None,
) -> BenchPlan:
    """Plan all cells. Arguments override the file, and the file overrides FMS's defaults.

    `command`: the workload of all; `otherwise`: that of scenarios that name none.
    `only`: scenarios by name, slow ones too.
    `log_memory_hf`: whether cells have the Trainer's memory tracker on, whatever they say; None: as
    they say, else in `sft_trainer`, where FMS has it on, and not in `erg train`.
    `check`: is given the YAML of each `erg train` cell, and says what is wrong with it.
    """
    problems = Problems(scenarios_path)
    scenario_file = read_scenarios(
        scenarios_path, defaults=defaults, contents=contents, frameworks=frameworks
    )
    axes = {
        "effective_batch_size": effective_batch_size,
        "num_gpus": num_gpus,
        "packing": packing,
        "max_seq_len": max_seq_len,
    }
    asked = Asked(
        axes={name: list(values) for name, values in axes.items() if values is not None},
        template=None if command is None else _template(command, problems),
        otherwise=_template(otherwise, problems),
        repeats=repeats,
        timeout_s=timeout_s,
        warmup_s=warmup_s,
        accelerate_config=_accelerate(accelerate_config, scenarios_path),
        log_memory_hf=log_memory_hf,
        data_stage=data_stage,
        check=check,
    )
    making = Making(scenario_file, problems, asked)
    chosen = _chosen(scenario_file, only, problems)
    cells = list(_numbered([cell for scenario in chosen for cell in making.cells(scenario)]))
    problems.stop_if_any()
    if not cells:
        problems.add("has no cells to run: every scenario is left out, or all are excluded")
        problems.stop_if_any()
    settings = {
        "axes": asked.axes,
        "only": list(only),
        "command": command,
        "slow": [
            scenario.name
            for scenario in scenario_file.scenarios
            if scenario.slow and scenario not in chosen
        ],
        "data": [data.to_json(job) for job in making.jobs.values()],
    }
    return BenchPlan(
        str(scenarios_path),
        tuple(cells),
        settings=settings,
        keys=making.keys,
        warnings=tuple(making.warnings),
    )


def _chosen(scenario_file: Scenarios, only: Sequence[str], problems: Problems) -> list[Scenario]:
    names = [scenario.name for scenario in scenario_file.scenarios]
    for name in only:
        if name not in names:
            problems.add(f"there is no scenario {name!r}; {hint(name, names)}")
    problems.stop_if_any()
    return [
        scenario
        for scenario in scenario_file.scenarios
        if (scenario.name in only if only else not scenario.slow)
    ]


def _template(command: str, problems: Problems) -> Template:
    try:
        return template(command)
    except ValueError as error:
        problems.add(f"--command {command!r}: {error}")
        problems.stop_if_any()
        raise


def _accelerate(path: Path | None, scenarios_path: Path) -> Path | None:
    beside = scenarios_path.parent / fms.ACCELERATE
    return path or (beside if beside.is_file() else None)


def _numbered(cells: Sequence[Cell]) -> Iterator[Cell]:
    """First all first repeats: more repeats later leave the numbers as they were."""
    for index, cell in enumerate(sorted(cells, key=lambda member: member.repeat)):
        yield dataclasses.replace(cell, index=index)
