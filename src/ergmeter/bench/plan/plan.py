"""Plans a bench: the cells of a file of scenarios, with the command that each starts.

Nothing is started and no device is needed. An argument that a scenario sets removes its axis; FMS
multiplied by the axis all the same and ran one configuration under two numbers.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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

_BLANK = re.compile(r"\s*")


def cells(path: Path) -> Iterator[Cell]:
    """The cells of the plan at this path, in its order, made one at a time."""
    try:
        for member in _members(path.read_text(encoding="utf-8"), path):
            yield Cell.from_json(member)
    except FileNotFoundError as error:
        raise FormatError(f"{path} is not there: no plan was made here") from error
    except NotADirectoryError as error:
        raise UsageError(
            f"{path.parent} is a file; name the directory of results that it is in"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise FormatError(f"{path} is no plan: {type(error).__name__}: {error}") from error


def _members(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """The members of the list `cells` in the JSON object; the version comes before it."""
    decoder = json.JSONDecoder()

    def value(at: int) -> tuple[Any, int]:
        """The value that begins behind this character, and where what follows it begins."""
        item, end = decoder.raw_decode(text, _BLANK.match(text, at + 1).end())  # type: ignore[union-attr]
        return item, _BLANK.match(text, end).end()  # type: ignore[union-attr]

    (key, at), version = value(text.index("{")), None
    while key != "cells":
        item, at = value(at)
        version = item if key == "version" else version
        key, at = value(at)
    if version != VERSION:
        raise FormatError(f"{path} is of version {version!r}; this ergmeter reads {VERSION}")
    at = text.index("[", at)
    if text[_BLANK.match(text, at + 1).end()] == "]":  # type: ignore[union-attr]
        return
    while text[at] != "]":
        item, at = value(at)
        yield item


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
