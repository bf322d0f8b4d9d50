"""Plans a bench: the cells of a file of scenarios, with the command that each starts.

Nothing is started and no device is needed.

Values of the command line override the file's axes, which override the defaults of FMS's program.
An argument that a scenario sets is not an axis, unless the command line asks for it. Cells are
numbered in FMS's order: models, frameworks, then the axes of the bench, the last changing first.

An effective batch that the devices can't share evenly is an error, unless a constraint skips the
cell; FMS rounds it down. An axis that changes nothing is an error too: its cells would differ by
noise alone.
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

# The defaults of the flags of FMS's benchmark.py.
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
    """The effective batch can't be split evenly over the devices."""


def products(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the axes' values; the last axis changes first."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def shared(arguments: Mapping[str, Any], *, effective: int | None, devices: int) -> dict[str, int]:
    """Return the batch arguments to add, so that a step has the effective batch size.

    FMS's rule: if the accumulation is given, the batch of a device is effective / devices (ignoring
    the accumulation, for compatibility); if the batch is given, the accumulation is effective /
    devices / batch; both is an error. Neither is an error in FMS; here the accumulation is then 1.
    """
    batch, accumulation = arguments.get(BATCH), arguments.get(ACCUMULATION)
    if effective is None:
        return {}
    if batch is not None and accumulation is not None:
        raise UnevenBatch(
            f"{BATCH} and {ACCUMULATION} are both given, so {EFFECTIVE} {effective} would be"
            f" ignored; remove one of the three (null removes a default)"
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

    `command`: the command of all cells; `otherwise`: that of scenarios without one.
    `only`: the names of the scenarios to plan, which may be slow ones.
    `log_memory_hf`: turns the Trainer's memory tracker on or off in all cells; None: as scenarios
    set it, else on in `sft_trainer`, as in FMS, and off in `erg train`.
    `check`: returns what is wrong with the YAML of an `erg train` cell, or None.
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
    # All first repeats come first: a later plan with more repeats keeps their numbers.
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
    """Return a scenario's axes in FMS's order: its own, then those of the bench."""
    own = scenario.axes
    bench = {} if scenario.template.workload == "other" else {**FMS_AXES}
    if all(name in scenario.arguments or name in own for name in (BATCH, ACCUMULATION)):
        bench.pop(EFFECTIVE, None)
    bench = {name: values for name, values in bench.items() if name not in scenario.arguments}
    # Later dicts override earlier ones.
    values = {**bench, **own, **asked}
    last = [name for name in FMS_AXES if name in values]
    axes = {name: list(listed) for name, listed in own.items() if name not in last}
    axes |= {name: list(values[name]) for name in last}
    axes.setdefault("num_gpus", [1])
    return axes


@dataclasses.dataclass(slots=True, kw_only=True)
class Expansion:
    """Makes the cells of a file's scenarios, with options that apply to all of them.

    `jobs`: data to prepare, by file; `keys`: secret variables, which the plan does not store;
    `warnings`: commands that look as if they had secrets, and models that are not here;
    `problems`: why there can be no plan.
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
        """Yield the cells of one scenario, one for each repeat of each configuration."""
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
        # Exclude again: settings that follow from others, such as the batch, are known only now.
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
        """Return a cell without its repeat, and its arguments as the file has them."""
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
        """Add the batch of a device to the arguments. Returns why the cell is skipped, or ""."""
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
                return f"the model is a {architecture}; the scenario is for {names}"
        return ""

    def _data(self, scenario: Scenario, settings: Mapping[str, Any]) -> str | None:
        """The path of a cell's prepared data; None if it names its own file or needs none."""
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


# Names that a command's template may always use, even if a cell has no value for them.
_ABSENT = dict.fromkeys((*_OUTSIDE, BATCH, ACCUMULATION, "nodes"))


def _points(scenario: Scenario) -> Iterator[tuple[dict[str, Any], Patterns]]:
    """Yield every combination that is not excluded, then those of `include`.

    Each comes with the patterns that may exclude it later, by settings that follow from others.
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
    """Return a pattern in which a null framework is "none", the name that cells use."""
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
    """The model's class name, such as LlamaForCausalLM; None if its config can't be read here."""
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
    """Yield a line for everything that is wrong with a scenario."""
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
    """Yield the axes and expected facts that `erg train` does not have."""
    for name in scenario.axes:
        if not erg_train.takes(name):
            yield f"axes: erg train has no argument {name!r}; {hint(name, erg_train.TAKEN)}"
    for expected in scenario.claims:
        name = expected.claim.name
        if expected.claim.kind == "fact" and name not in outcome.ERG_TRAIN_FACTS:
            suggestion = hint(name, outcome.ERG_TRAIN_FACTS)
            yield f"expects {name!r}, which erg train does not record; {suggestion}"


def absent_models(scenario: Scenario) -> Iterator[str]:
    """Yield a warning for each model folder that is absent: the plan may be for another machine."""
    for model in scenario.axes.get(MODELS, ()) if scenario.template.workload != "other" else ():
        if model.startswith((".", "/")) and not Path(model).is_dir():
            yield f"scenario {scenario.name!r}: its model, the folder {model}, does not exist here"


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
            yield f"{name!r} is not one of its settings; {hint(name, sorted(names))}"
    environment = scenario.environment.items()
    variables = [text for name, text in environment if not launching.is_secret(name, text)]
    texts = [*template.words, *variables]
    named = [
        name for text in texts for name in scenarios.unknown_names(text, {*names, "arguments"})
    ]
    for name in dict.fromkeys(named):
        near = hint(name, sorted(names))
        yield f"{{{name}}} in the command or environment is not a setting; {near}"
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
    """True if the command receives the path of the prepared data."""
    if scenario.template.takes_all:
        return True
    put = " ".join((*scenario.template.words, *scenario.environment.values()))
    return f"{{{DATA_PATH}}}" in put


def _framework_without_effect(
    scenario_file: Scenarios, axes: Mapping[str, list[Any]], put: str
) -> Iterator[str]:
    """Yield a complaint if frameworks reach the command neither by name nor as a file."""
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
    """True if a setting reaches the command, itself or as the batch arguments made from it."""
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
            " read: use --command sft_trainer, or map the name to a backend under"
            " framework_configs"
        )
    elif template.workload == "sft_trainer" and framework.file is None and name != NONE:
        yield (
            f"framework_config {name!r} has no file for sft_trainer: name one of your own under"
            f" framework_configs{_no_contents(scenario_file)}"
        )


def _no_contents(scenario_file: Scenarios) -> str:
    """The end of a message: where FMS's file of shortnames was expected; "" if it was found."""
    if scenario_file.contents:
        return ""
    places = " or ".join(str(at) for at in scenarios.contents_places(scenario_file.path))
    return (
        f"; FMS's shortnames, for --command sft_trainer, are in its {scenarios.CONTENTS}, which is"
        f" not at {places}: copy it there, or give --contents"
    )
