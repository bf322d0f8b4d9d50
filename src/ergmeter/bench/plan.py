"""Which cells does a file of scenarios have, and what does each of them start?

Nothing is started and no device is looked for: a plan is made on any machine. All that is wrong
with the file is told before there is a plan.

The trap: an axis that a scenario has settled. The original multiplied `packing: False` by its own
axis of packing all the same, and ran one configuration under two numbers. Here an argument that a
scenario gives takes its axis away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ergmeter.bench import datastage, fms
from ergmeter.bench.cells import Cell, Plan
from ergmeter.bench.making import Asked, Check, Making
from ergmeter.bench.problems import Problems, hint
from ergmeter.bench.scenarios import Scenario, Scenarios, read
from ergmeter.bench.templates import Template, template


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
) -> Plan:
    """All cells. What is given here goes before what the file says, and that before FMS's defaults.

    `command`: the workload of all; `otherwise`: that of scenarios that name none.
    `only`: scenarios by name, slow ones too.
    `log_memory_hf`: whether cells have the Trainer's memory tracker on, whatever they say; None: as
    they say, else in `sft_trainer`, where FMS has it on, and not in `erg train`.
    `check`: is given the YAML of each `erg train` cell, and says what is wrong with it.
    """
    problems = Problems(scenarios_path)
    found = read(
        scenarios_path,
        problems=problems,
        defaults=defaults,
        contents=contents,
        frameworks=frameworks,
    )
    problems.stop_if_any()
    given = {
        "effective_batch_size": effective_batch_size,
        "num_gpus": num_gpus,
        "packing": packing,
        "max_seq_len": max_seq_len,
    }
    asked = Asked(
        axes={name: list(values) for name, values in given.items() if values is not None},
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
    making = Making(found, problems, asked)
    chosen = _chosen(found, only, problems)
    cells = list(_numbered([cell for one in chosen for cell in making.cells(one)]))
    problems.stop_if_any()
    if not cells:
        problems.add("has no cells to run: every scenario is left out, or all are excluded")
        problems.stop_if_any()
    settings = {
        "axes": asked.axes,
        "only": list(only),
        "command": command,
        "slow": [one.name for one in found.scenarios if one.slow and one not in chosen],
        "data": [datastage.to_json(job) for job in making.jobs.values()],
    }
    return Plan(
        str(scenarios_path),
        tuple(cells),
        settings=settings,
        keys=making.keys,
        warnings=tuple(making.warnings),
    )


def _chosen(found: Scenarios, only: Sequence[str], problems: Problems) -> list[Scenario]:
    names = [one.name for one in found.scenarios]
    for name in only:
        if name not in names:
            problems.add(f"there is no scenario {name!r}; {hint(name, names)}")
    problems.stop_if_any()
    return [one for one in found.scenarios if (one.name in only if only else not one.slow)]


def _template(command: str, problems: Problems) -> Template:
    try:
        return template(command)
    except ValueError as error:
        problems.add(f"--command {command!r}: {error}")
        problems.stop_if_any()
        raise


def _accelerate(given: Path | None, scenarios_path: Path) -> Path | None:
    beside = scenarios_path.parent / fms.ACCELERATE
    return given or (beside if beside.is_file() else None)


def _numbered(cells: Sequence[Cell]) -> Iterator[Cell]:
    """First all first repeats: more repeats later leave the numbers as they were."""
    for index, cell in enumerate(sorted(cells, key=lambda one: one.repeat)):
        yield dataclasses.replace(cell, index=index)
