"""Plans a bench: the cells of a file of scenarios, with the command that each starts.

Nothing is started and no device is needed.

Values of the command line override the file's axes, and these the original's defaults. An argument
that a scenario sets is no axis any more, unless it is requested as one. Cells are numbered in FMS's
order: models, frameworks, then the axes of the bench, the last one changing first.

An effective batch that does not divide by the devices is an error, or a constraint's reason; FMS
rounds it down. An axis that changes nothing is an error too: its cells would differ by noise alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from ergmeter.bench.execute import launching, outcome
from ergmeter.bench.plan import erg_train, scenarios
from ergmeter.bench.plan.cells import PYTHON, UNSLOTH_PYTHON, BenchPlan, Cell, Launch, Value
from ergmeter.bench.plan.data import DataJob, data_job, original_name
from ergmeter.bench.plan.scenarios import FRAMEWORK, MODELS, NONE, Scenario, Scenarios, Template
from ergmeter.config_file import hint, usage_error
from ergmeter.errors import ErgmeterError

# What benchmark.py takes where its flags say nothing.
FMS_AXES: dict[str, tuple[Any, ...]] = {
    "effective_batch_size": (4, 8),
    "num_gpus": (1, 2),
    "packing": (True,),
    "max_seq_len": (4096,),
}
INTEGER_AXES = ("effective_batch_size", "num_gpus", "max_seq_len", "nodes")

BATCH = "per_device_train_batch_size"
ACCUMULATION = "gradient_accumulation_steps"
EFFECTIVE = "effective_batch_size"


class UnevenBatch(Exception):  # noqa: N818  the text says what does not divide
    """The effective batch can't be had on so many devices."""


def products(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination; the last axis changes first."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def shared(arguments: Mapping[str, Any], *, effective: int | None, devices: int) -> dict[str, int]:
    """What is to be added to the arguments, so that the effective batch is had.

    The original's rule: with the accumulation given, the batch of a device is effective / devices
    (the accumulation is left out of it, for compatibility); with the batch given, the accumulation
    is effective / devices / batch; not both. Neither given is an error there; here it is as if the
    accumulation were 1.
    """
    batch, accumulation = arguments.get(BATCH), arguments.get(ACCUMULATION)
    if effective is None:
        return {}
    if batch is not None and accumulation is not None:
        raise UnevenBatch(
            f"{BATCH} and {ACCUMULATION} are both given, so that {EFFECTIVE} {effective} has no"
            f" say; remove one of the three (null removes a default)"
        )
    what = f"{EFFECTIVE} {effective} on {devices} devices"
    each = _divided(effective, devices, what)
    if batch is None:
        return {BATCH: each} if accumulation is not None else {BATCH: each, ACCUMULATION: 1}
    return {ACCUMULATION: _divided(each, int(batch), f"{what} in batches of {batch}")}


def _divided(number: int, by: int, what: str) -> int:
    if by < 1 or number % by or number < by:
        raise UnevenBatch(
            f"{what} does not divide evenly; `exclude` leaves such cells out, a constraint"
            f" ({EFFECTIVE} % num_gpus == 0) skips them"
        )
    return number // by


Check: TypeAlias = Callable[[str], str | None]
Patterns: TypeAlias = Sequence[Mapping[str, Any]]
_OUTSIDE = (EFFECTIVE, "num_gpus", "nodes", FRAMEWORK)  # settings, but no arguments
_SKIPS_MEMORY = "skip_memory_metrics"


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
    scenario_file = scenarios.read_scenarios(
        scenarios_path, defaults=defaults, contents=contents, frameworks=frameworks
    )
    try:
        template = None if command is None else scenarios.template(command)
    except ValueError as error:
        raise usage_error(scenarios_path, [f"--command {command!r}: {error}"]) from error
    all_axes = {
        "effective_batch_size": effective_batch_size,
        "num_gpus": num_gpus,
        "packing": packing,
        "max_seq_len": max_seq_len,
    }
    axes = {name: list(values) for name, values in all_axes.items() if values is not None}
    beside = scenarios_path.parent / scenarios.ACCELERATE
    expansion = Expansion(
        scenario_file=scenario_file,
        accelerate_config=accelerate_config or (beside if beside.is_file() else None),
        log_memory_hf=log_memory_hf,
        data_stage=data_stage,
        check=check,
    )
    cells: list[Cell] = []
    chosen = _chosen(scenario_file, only)
    for scenario in chosen:
        update: dict[str, Any] = {
            "command": template or scenario.command or scenarios.template(otherwise),
            "repeats": repeats or scenario.repeats,
            "timeout": scenario.timeout if timeout_s is None else timeout_s,
        }
        asked = scenario.model_copy(update=update)
        cells += expansion.cells(asked.model_copy(update={"axes": _axes(asked, axes)}))
    if not cells and not expansion.problems:
        expansion.problems.append(
            "has no cells to run: every scenario is left out, or all are excluded"
        )
    if expansion.problems:
        raise usage_error(scenarios_path, expansion.problems)
    # First all first repeats: more repeats later leave the numbers as they were.
    numbered = enumerate(sorted(cells, key=lambda cell: cell.repeat))
    slow = [scenario for scenario in scenario_file.scenarios if scenario.slow]
    settings = {
        "axes": axes,
        "only": list(only),
        "command": command,
        "slow": [scenario.name for scenario in slow if scenario not in chosen],
        "data": [dataclasses.asdict(job) for job in expansion.jobs.values()],
    }
    return BenchPlan(
        str(scenarios_path),
        tuple(dataclasses.replace(cell, index=index) for index, cell in numbered),
        settings=settings,
        keys=expansion.keys,
        warnings=tuple(expansion.warnings),
    )


def _chosen(scenario_file: Scenarios, only: Sequence[str]) -> list[Scenario]:
    names = [scenario.name for scenario in scenario_file.scenarios]
    unknown = [name for name in only if name not in names]
    if unknown:
        errors = [f"there is no scenario {name!r}; {hint(name, names)}" for name in unknown]
        raise usage_error(scenario_file.path, errors)
    return [
        scenario
        for scenario in scenario_file.scenarios
        if (scenario.name in only if only else not scenario.slow)
    ]


def _axes(scenario: Scenario, asked: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The scenario's own first, then those of the whole bench, as the original orders them."""
    own = scenario.axes
    bench = {} if scenario.template.workload == "other" else {**FMS_AXES}
    if all(name in scenario.arguments or name in own for name in (BATCH, ACCUMULATION)):
        bench.pop(EFFECTIVE, None)
    bench = {name: values for name, values in bench.items() if name not in scenario.arguments}
    # In each of these the later goes before the earlier.
    values = {**bench, **own, **asked}
    last = [name for name in FMS_AXES if name in values]
    axes = {name: list(listed) for name, listed in own.items() if name not in last}
    axes |= {name: list(values[name]) for name in last}
    axes.setdefault("num_gpus", [1])
    return axes


@dataclasses.dataclass(slots=True, kw_only=True)
class Expansion:
    """Makes cells of a file's scenarios, as the caller asks for all of them.

    `jobs`: what the data stage has to do for them; `keys`: what is not written down of them;
    `warnings`: what is, and looks as if it should not be; `problems`: why there can be no plan.
    """

    scenario_file: Scenarios
    accelerate_config: Path | None
    log_memory_hf: bool | None
    data_stage: bool
    check: Check | None
    jobs: dict[str, DataJob] = dataclasses.field(default_factory=dict)
    keys: dict[str, str] = dataclasses.field(default_factory=dict)
    warnings: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)

    def cells(self, scenario: Scenario) -> Iterator[Cell]:
        """All cells of one scenario, each repeat of each."""
        wrong = list(scenario_complaints(self.scenario_file, scenario))
        data = {"data_processing": dict(scenario.data_processing or {})}
        for values in (scenario.arguments, scenario.axes, *scenario.include, data):
            wrong += launching.secret_complaints(values)
        if not wrong:
            looks = launching.secret_warning(scenario.template.words, scenario=scenario.name)
            self.warnings += [looks] if looks else []
            self.warnings += absent_models(scenario)
        ids: set[str] = set()
        for point, excluded in () if wrong else _points(scenario):
            try:
                made = list(self._repeats(scenario, point, excluded=excluded))
            except (UnevenBatch, erg_train.CannotMap, scenarios.BadCondition) as error:
                wrong.append(str(error))
                continue
            if made and made[0].group not in ids:
                ids.add(made[0].group)
                yield from made
        self.problems += [f"scenario {scenario.name!r}: {text}" for text in wrong]

    def _repeats(
        self, scenario: Scenario, point: Mapping[str, Any], *, excluded: Patterns
    ) -> Iterator[Cell]:
        cell, arguments = self._made(scenario, point)
        # Once more: only now are the settings known that follow from others, such as the batch.
        if any(scenarios.matches(pattern, cell.settings) for pattern in excluded):
            return
        written = None
        if scenario.template.workload == "erg" and not cell.skip:
            tuning = self.scenario_file.frameworks[str(point.get(FRAMEWORK, NONE))].tuning or {}
            if self.log_memory_hf is not None:
                arguments = {**arguments, _SKIPS_MEMORY: not self.log_memory_hf}
            written = erg_train.config(arguments, tuning, warmup_s=scenario.warmup)
            wrong = self.check(written) if self.check else None
            if wrong:
                raise erg_train.CannotMap(wrong)
        for repeat in range(1, (scenario.repeats or 1) + 1):
            files = {erg_train.FILE: erg_train.reseeded(written, repeat)} if written else {}
            made = dataclasses.replace(cell, repeat=repeat, files=files)
            yield dataclasses.replace(made, id=made.digest(repeat))

    def _made(self, scenario: Scenario, point: Mapping[str, Any]) -> tuple[Cell, dict[str, Any]]:
        """A cell as it is for every repeat, and its arguments as they were written."""
        gpus, nodes = int(point["num_gpus"]), int(point.get("nodes", 1))
        arguments = {name: value for name, value in point.items() if name not in _OUTSIDE}
        data = self._data(scenario, {**scenario.arguments, **arguments})
        if data:
            arguments[DATA_PATH] = data
        arguments |= {k: v for k, v in scenario.arguments.items() if k not in point}
        settings_so_far = {**{name: point[name] for name in _OUTSIDE if name in point}, **arguments}
        skip = self._shared(scenario, arguments, settings_so_far, devices=gpus * nodes)
        settings = {
            name: scenarios.text(value) for name, value in {**settings_so_far, **arguments}.items()
        }
        if scenario.template.workload != "other":
            settings.setdefault(FRAMEWORK, NONE)
        # One rank needs no launcher, unless one is asked for.
        ranks_launch = scenario.template.launch if gpus * nodes > 1 else "plain"
        launch: Launch = scenario.launch or ranks_launch
        config = self.accelerate_config if launch == "accelerate" else None
        cell = Cell(
            index=0,
            id="",
            scenario=scenario.name,
            settings=settings,
            num_gpus=gpus,
            nodes=nodes,
            repeat=1,
            command=self._command(scenario.template, settings, arguments),
            launch=launch,
            environment=self._environment(scenario, settings),
            timeout_s=scenario.timeout,
            expects=tuple(e.claim for e in scenario.claims if scenarios.matches(e.when, settings)),
            skip=skip,
            launch_options=("--config_file", str(config)) if config else (),
            warmup_s=scenario.warmup,
        )
        return cell, arguments

    def _shared(
        self,
        scenario: Scenario,
        arguments: dict[str, Any],
        settings: Mapping[str, Any],
        *,
        devices: int,
    ) -> str:
        """Put each device's batch into the arguments; or why the cell is skipped."""
        uneven = None
        try:
            arguments |= shared(arguments, effective=settings.get(EFFECTIVE), devices=devices)
        except UnevenBatch as error:
            uneven = error
        skip = self._skipped(scenario, {**settings, **arguments})
        if uneven is not None and not skip:
            raise uneven
        return skip

    def _skipped(self, scenario: Scenario, settings: Mapping[str, Any]) -> str:
        for condition in scenario.constraints:
            if not condition.holds({**dict.fromkeys(condition.names), **settings}):
                return condition.reason
        if scenario.architectures:
            architecture = known_architecture(self.scenario_file, str(settings.get(MODELS)))
            if architecture not in scenario.architectures:
                names = ", ".join(scenario.architectures)
                return f"{architecture} is not of the architectures {names}"
        return ""

    def _data(self, scenario: Scenario, settings: Mapping[str, Any]) -> str | None:
        """Where the cell's data will be; None where it has a file of its own, or needs none."""
        stanza, template = scenario.data_processing, scenario.template
        if DATA_PATH in settings or (stanza is None and template.workload != "sft_trainer"):
            return None
        if not takes_data(scenario):
            return None
        # Prompts and responses, unless text in one field is asked for, or tokens.
        is_text = any((stanza or {}).get(name) for name in ("dataset_text_field", "tokenize"))
        job = data_job(
            stanza or {},
            model=str(settings.get(MODELS, "")),
            response_template=settings.get("response_template"),
            text_field=settings.get("dataset_text_field"),
            as_pairs=template.workload == "erg" or (template.workload == "other" and not is_text),
        )
        if self.data_stage:
            self.jobs.setdefault(job.file, job)
        elif template.workload == "sft_trainer":
            return f"{{data}}/{original_name(job)}"
        return f"{{data}}/{job.file}"

    def _command(
        self, template: Template, settings: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> tuple[str, ...]:
        remaining = dict(arguments)
        if template.workload == "sft_trainer":
            remaining["output_dir"] = "{hf}"
            if _SKIPS_MEMORY not in remaining or self.log_memory_hf is not None:
                remaining[_SKIPS_MEMORY] = self.log_memory_hf is False
        if not template.takes_all or template.workload == "other":
            named = template.names
            remaining = {name: value for name, value in remaining.items() if name not in named}
        words = template.command({**_ABSENT, **settings}, list(scenarios.as_flags(remaining)))
        if template.workload == "erg":
            tuning = self.scenario_file.frameworks[str(settings[FRAMEWORK])].tuning
            if (tuning or {}).get("backend") == "unsloth":
                words = tuple(UNSLOTH_PYTHON if word == PYTHON else word for word in words)
        return words

    def _environment(self, scenario: Scenario, settings: Mapping[str, Value]) -> dict[str, str]:
        self.keys |= launching.secret_variables(scenario.environment, scenario=scenario.name)
        variables = {
            name: launching.HIDDEN
            if launching.is_secret(name, text)
            else scenarios.fill(text, {**_ABSENT, **settings})
            for name, text in scenario.environment.items()
        }
        framework = self.scenario_file.frameworks.get(str(settings.get(FRAMEWORK)))
        if scenario.template.workload != "erg" and framework and framework.file:
            variables[scenarios.CONFIG_VARIABLE] = str(framework.file)
        return variables


# What a template may name of any cell, also where nothing gives it a value.
_ABSENT = dict.fromkeys((*_OUTSIDE, BATCH, ACCUMULATION, "nodes"))


def _points(scenario: Scenario) -> Iterator[tuple[dict[str, Any], Patterns]]:
    """Every combination that is not excluded, then those that are included besides.

    With each the patterns that may still exclude it.
    """
    excluded = [_named(pattern) for pattern in scenario.exclude]
    defaults = {} if scenario.template.workload == "other" else {FRAMEWORK: NONE}
    for point in products(scenario.axes):
        if not any(
            scenarios.matches(pattern, {**defaults, **scenario.arguments, **point})
            for pattern in excluded
        ):
            yield point, excluded
    for more in scenario.include:
        added = {
            name: value if isinstance(value, list) else [value] for name, value in more.items()
        }
        for point in products({**scenario.axes, **added}):
            yield point, ()


def _named(pattern: Mapping[str, Any]) -> dict[str, Any]:
    """With null for a framework as the shortname that it is in cells."""
    if FRAMEWORK not in pattern:
        return dict(pattern)
    wanted = pattern[FRAMEWORK] if isinstance(pattern[FRAMEWORK], list) else [pattern[FRAMEWORK]]
    return {**pattern, FRAMEWORK: [NONE if name is None else name for name in wanted]}


_BUILTIN = {
    "builtin:tiny": "LlamaForCausalLM",
    "builtin:1b": "LlamaForCausalLM",
    "builtin:tiny-seq2seq": "T5ForConditionalGeneration",
}


@lru_cache(maxsize=1024)
def architecture(model: str) -> str | None:
    """The name of its class, such as LlamaForCausalLM, or None if that is not known here."""
    if model in _BUILTIN:
        return _BUILTIN[model]
    from ergmeter.flops.source import read_model  # noqa: PLC0415  few plans need it

    try:
        classes = read_model(str(Path(model).expanduser())).names("architectures")
    except ErgmeterError:
        return None
    return classes[0] if classes else None


DATA_PATH = "training_data_path"
_NEAR = 0.8  # FMS's shortnames have much in common


def scenario_complaints(scenario_file: Scenarios, scenario: Scenario) -> Iterator[str]:
    """Everything that is wrong with it, a line each."""
    yield from _setting_names(scenario_file, scenario)
    yield from _values(scenario.axes)
    if scenario.template.workload == "erg":
        yield from _of_erg_train(scenario)
    for name in scenario.framework_config or ():
        yield from _framework(scenario_file, scenario.template, name)
    for model in scenario.axes.get(MODELS, ()) if scenario.architectures else ():
        if known_architecture(scenario_file, model) is None:
            yield (
                f"the architecture of {model} is not known here; write it under"
                " model_architectures, or fetch its config.json"
            )


def _of_erg_train(scenario: Scenario) -> Iterator[str]:
    """What `erg train` does not support, as far as it is known without the arguments."""
    for name in scenario.axes:
        if not erg_train.takes(name):
            yield f"axes: erg train has nothing for {name!r}; {hint(name, erg_train.TAKEN)}"
    for expected in scenario.claims:
        name = expected.claim.name
        if expected.claim.kind == "fact" and name not in outcome.ERG_TRAIN_FACTS:
            suggestion = hint(name, outcome.ERG_TRAIN_FACTS)
            yield f"expects {name!r}, which no run of erg train tells; {suggestion}"


def absent_models(scenario: Scenario) -> Iterator[str]:
    """Folders of models that are not here: a warning, since a plan may be for another machine."""
    for model in scenario.axes.get(MODELS, ()) if scenario.template.workload != "other" else ():
        if model.startswith((".", "/")) and not Path(model).is_dir():
            yield f"scenario {scenario.name!r}: there is no folder {model} here, which is its model"


def known_architecture(scenario_file: Scenarios, model: str) -> str | None:
    """The model's architecture from the scenario file, or from its config.json."""
    return scenario_file.model_architectures.get(model) or architecture(model)


def _setting_names(scenario_file: Scenarios, scenario: Scenario) -> Iterator[str]:
    template, axes = scenario.template, scenario.axes
    names = {*scenario.arguments, *axes, *scenarios.OF_A_CELL, FRAMEWORK}
    names |= {BATCH, ACCUMULATION, EFFECTIVE}
    names |= {DATA_PATH} if scenario.data_processing is not None else set()
    used = [name for pattern in (*scenario.include, *scenario.exclude) for name in pattern]
    used += [name for expected in scenario.claims for name in expected.when]
    used += [name for constraint in scenario.constraints for name in sorted(constraint.names)]
    for name in dict.fromkeys(used):
        if name not in names:
            yield f"{name!r} is no setting of it; {hint(name, sorted(names))}"
    environment = scenario.environment.items()
    variables = [text for name, text in environment if not launching.is_secret(name, text)]
    texts = [*template.words, *variables]
    named = [
        name for text in texts for name in scenarios.unknown_names(text, {*names, "arguments"})
    ]
    for name in dict.fromkeys(named):
        near = hint(name, sorted(names))
        yield f"{{{name}}} in the command or environment stands for nothing; {near}"
    put = " ".join(texts)
    if template.workload == "other":
        yield from _framework_without_effect(scenario_file, axes, put)
    if not template.takes_all:
        yield from _axes_without_effect(axes, put)
        yield from _arguments_without_effect(scenario, axes, put)
        is_own = scenario.data_processing != scenario_file.data_processing
        if is_own and not takes_data(scenario):
            yield (
                f"the command has no {{{DATA_PATH}}} in it, so that data_processing changes nothing"
            )


def takes_data(scenario: Scenario) -> bool:
    """Whether a file of the data stage gets to the command."""
    if scenario.template.takes_all:
        return True
    put = " ".join((*scenario.template.words, *scenario.environment.values()))
    return f"{{{DATA_PATH}}}" in put


def _framework_without_effect(
    scenario_file: Scenarios, axes: Mapping[str, list[Any]], put: str
) -> Iterator[str]:
    """A framework is no argument: it has to be named, or be a file in the environment."""
    if f"{{{FRAMEWORK}}}" in put:
        return
    asked = [str(name) for name in axes.get(FRAMEWORK, ()) if name not in (None, NONE)]
    with_file = {name for name, framework in scenario_file.frameworks.items() if framework.file}
    lost = [name for name in dict.fromkeys(asked) if name not in with_file]
    if lost:
        yield (
            f"the command has no {{{FRAMEWORK}}} in it, so that {FRAMEWORK} {', '.join(lost)}"
            " changes nothing"
        )


def _axes_without_effect(axes: Mapping[str, list[Any]], put: str) -> Iterator[str]:
    for name, values in axes.items():
        if len(values) > 1 and name != FRAMEWORK and not _reaches(name, put):
            yield f"the command has no {{{name}}} in it, so that the axis {name} changes nothing"


def _arguments_without_effect(
    scenario: Scenario, axes: Mapping[str, list[Any]], put: str
) -> Iterator[str]:
    single = [name for name, values in axes.items() if len(values) == 1 and values[0] is not None]
    names = [*scenario.arguments, *(name for name in single if name != FRAMEWORK)]
    lost = [name for name in dict.fromkeys(names) if not _reaches(name, put)]
    if lost:
        yield (
            f"the command takes no {', '.join(lost)}: write {{{lost[0]}}} or {{arguments}} into it,"
            " or leave out what has no effect (null removes a default)"
        )


def _reaches(name: str, put: str) -> bool:
    """Whether a setting gets to the command, by itself or by what follows from it."""
    follow = (BATCH, ACCUMULATION) if name == EFFECTIVE else ()
    return name in scenarios.OF_A_CELL or any(
        f"{{{setting}}}" in put for setting in (name, *follow)
    )


def _values(axes: Mapping[str, list[Any]]) -> Iterator[str]:
    for name, values in axes.items():
        for value in values:
            is_whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if name in INTEGER_AXES and not is_whole:
                yield f"{name} takes whole numbers from 1; got {value!r}"
            elif name == "packing" and not isinstance(value, bool):
                yield f"packing takes true and false; got {value!r}"


def _framework(scenario_file: Scenarios, template: Template, name: str) -> Iterator[str]:
    framework = scenario_file.frameworks.get(name)
    if framework is None:
        near = hint(name, scenario_file.frameworks, cutoff=_NEAR)
        yield f"framework_config {name!r} is not known; {near}{_no_contents(scenario_file)}"
    elif template.workload == "erg" and framework.tuning is None:
        yield (
            f"framework_config {name!r} is a file of fms-acceleration, which erg train does not"
            " read: --command sft_trainer runs it, or say under framework_configs which backend"
            " stands for it"
        )
    elif template.workload == "sft_trainer" and framework.file is None and name != NONE:
        yield (
            f"framework_config {name!r} has no file for sft_trainer: name one of your own under"
            f" framework_configs{_no_contents(scenario_file)}"
        )


def _no_contents(scenario_file: Scenarios) -> str:
    """FMS's shortnames are a file of its own, which may not be where it is looked for.

    Empty if it is there.
    """
    if scenario_file.contents:
        return ""
    places = " or ".join(str(at) for at in scenarios.contents_places(scenario_file.path))
    return (
        f"; FMS's shortnames, for --command sft_trainer, are in its {scenarios.CONTENTS}, and there"
        f" is none at {places}: copy it there, or give --contents"
    )
