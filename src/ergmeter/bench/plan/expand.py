"""How does a scenario become cells: its axes, each point's arguments, what is started?

What is asked for on the command line goes before the file's axes, and these before the original's
defaults; an argument that a scenario gives is no axis any more, unless it is asked for as one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ergmeter.bench.execute import secrets
from ergmeter.bench.plan import data as datastage
from ergmeter.bench.plan import erg_train, fms, templates, validate
from ergmeter.bench.plan.cells import PYTHON, UNSLOTH_PYTHON, Cell, Launch, Value
from ergmeter.bench.plan.constraints import BadCondition, matches
from ergmeter.bench.plan.problems import Problems
from ergmeter.bench.plan.scenarios import MODELS, Scenario, Scenarios
from ergmeter.bench.plan.templates import Template
from ergmeter.bench.plan.validate import DATA_PATH, FRAMEWORK

# -- axes ------------------------------------------------------------------------------------------
# Which combinations does a scenario have, and how is a batch shared out among devices?
#
# The order is that of the system this follows: a scenario's models, its frameworks, then the axes
# of the whole bench, the last of them changing first. So cell 7 there is cell 7 here.
#
# The trap: a batch that does not divide. 4 examples on 3 devices were rounded down there to 1 each,
# and the cell that said 4 ran 3. Here it is an error, or a constraint's reason.


# What benchmark.py takes where its flags say nothing.
FMS_AXES: dict[str, tuple[Any, ...]] = {
    "effective_batch_size": (4, 8),
    "num_gpus": (1, 2),
    "packing": (True,),
    "max_seq_len": (4096,),
}
WHOLE = ("effective_batch_size", "num_gpus", "max_seq_len", "nodes")

BATCH = "per_device_train_batch_size"
ACCUMULATION = "gradient_accumulation_steps"
EFFECTIVE = "effective_batch_size"


class UnevenBatch(Exception):  # noqa: N818  the text says what does not divide
    """The effective batch can't be had on so many devices."""


def products(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination; the last axis changes first."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def size(axes: Mapping[str, Sequence[Any]]) -> int:
    """How many combinations there are."""
    number = 1
    for values in axes.values():
        number *= len(values)
    return number


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
    each = _divided(effective, devices, f"{EFFECTIVE} {effective} on {devices} devices")
    if batch is None:
        return {BATCH: each} if accumulation is not None else {BATCH: each, ACCUMULATION: 1}
    return {
        ACCUMULATION: _divided(
            each, int(batch), f"{EFFECTIVE} {effective} on {devices} devices in batches of {batch}"
        )
    }


def _divided(number: int, by: int, what: str) -> int:
    if by < 1 or number % by or number < by:
        raise UnevenBatch(
            f"{what} does not divide evenly; `exclude` leaves such cells out, a constraint"
            f" ({EFFECTIVE} % num_gpus == 0) skips them"
        )
    return number // by


# -- making ----------------------------------------------------------------------------------------


Check: TypeAlias = Callable[[str], str | None]
Patterns: TypeAlias = Sequence[Mapping[str, Any]]
_OUTSIDE = (EFFECTIVE, "num_gpus", "nodes", FRAMEWORK)  # settings, but no arguments
_SKIPS_MEMORY = "skip_memory_metrics"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the caller asks for, for all scenarios."""

    axes: dict[str, list[Any]]
    template: Template | None  # goes before the scenarios' own
    otherwise: Template  # of scenarios that have none
    repeats: int | None
    timeout_s: float | None
    warmup_s: float | None
    accelerate_config: Path | None
    log_memory_hf: bool | None
    data_stage: bool
    check: Check | None


class Making:
    """The way from a file's scenarios to cells.

    `jobs`: what the data stage has to do for them; `keys`: what is not written down of them;
    `warnings`: what is, and looks as if it should not be.
    """

    def __init__(self, found: Scenarios, problems: Problems, asked: Asked) -> None:
        self._found = found
        self._problems = problems
        self._asked = asked
        self.jobs: dict[str, datastage.DataJob] = {}
        self.keys: dict[str, str] = {}
        self.warnings: list[str] = []

    def cells(self, scenario: Scenario) -> Iterator[Cell]:
        """All cells of one scenario, each repeat of each."""
        template = self._asked.template or scenario.template or self._asked.otherwise
        axes = self._axes(scenario, template)
        wrong = list(validate.complaints(self._found, scenario, template, axes))
        data = {"data_processing": dict(scenario.data or {})}
        for given in (scenario.arguments, axes, *scenario.include, data):
            wrong += secrets.complaints(given)
        for text in wrong:
            self._problems.add(text, scenario=scenario.name)
        if wrong:
            return
        looks = secrets.warning(template.words, scenario=scenario.name)
        self.warnings += [looks] if looks else []
        self.warnings += validate.absent_models(scenario, template)
        seen: set[str] = set()
        for point, excluded in _points(scenario, template, axes):
            try:
                made = list(self._repeats(scenario, template, point, excluded=excluded))
            except (UnevenBatch, erg_train.CannotMap, BadCondition) as error:
                self._problems.add(str(error), scenario=scenario.name)
                continue
            if made and made[0].group not in seen:
                seen.add(made[0].group)
                yield from made

    def _axes(self, scenario: Scenario, template: Template) -> dict[str, list[Any]]:
        """The scenario's own first, then those of the whole bench, as the original orders them."""
        asked, own = self._asked.axes, scenario.axes
        bench = {} if template.workload == "other" else {**FMS_AXES}
        both = (BATCH, ACCUMULATION)
        if all(name in scenario.arguments or name in own for name in both):
            bench.pop(EFFECTIVE, None)
        bench = {name: values for name, values in bench.items() if name not in scenario.arguments}
        # In each of these the later goes before the earlier.
        values = {**bench, **own, **asked}
        last = [name for name in FMS_AXES if name in values]
        first = {MODELS: scenario.models, FRAMEWORK: scenario.frameworks}
        axes: dict[str, list[Any]] = {name: list(one) for name, one in first.items() if one}
        axes |= {name: list(listed) for name, listed in own.items() if name not in last}
        axes |= {name: list(values[name]) for name in last}
        axes.setdefault("num_gpus", [1])
        return axes

    def _repeats(
        self,
        scenario: Scenario,
        template: Template,
        point: Mapping[str, Any],
        *,
        excluded: Patterns,
    ) -> Iterator[Cell]:
        cell, arguments = self._made(scenario, template, point)
        # Once more: only now are the settings known that follow from others, such as the batch.
        if any(matches(one, cell.settings) for one in excluded):
            return
        asked = self._asked
        warmup_s = scenario.warmup_s if asked.warmup_s is None else asked.warmup_s
        timeout_s = scenario.timeout_s if asked.timeout_s is None else asked.timeout_s
        written = None
        if template.workload == "erg" and not cell.skip:
            tuning = self._found.frameworks[str(point.get(FRAMEWORK, fms.NONE))].tuning or {}
            if asked.log_memory_hf is not None:
                arguments = {**arguments, _SKIPS_MEMORY: not asked.log_memory_hf}
            written = erg_train.config(arguments, tuning, warmup_s=warmup_s)
            self._checked(written)
        for repeat in range(1, (asked.repeats or scenario.repeats or 1) + 1):
            files = {erg_train.FILE: erg_train.reseeded(written, repeat)} if written else {}
            made = dataclasses.replace(
                cell, repeat=repeat, files=files, timeout_s=timeout_s, warmup_s=warmup_s
            )
            yield dataclasses.replace(made, id=made.digest(repeat))

    def _checked(self, written: str) -> None:
        wrong = self._asked.check(written) if self._asked.check else None
        if wrong:
            raise erg_train.CannotMap(wrong)

    def _made(
        self, scenario: Scenario, template: Template, point: Mapping[str, Any]
    ) -> tuple[Cell, dict[str, Any]]:
        """A cell as it is for every repeat, and its arguments as they were written."""
        gpus, nodes = int(point["num_gpus"]), int(point.get("nodes", 1))
        arguments = {name: value for name, value in point.items() if name not in _OUTSIDE}
        data = self._data(scenario, template, {**scenario.arguments, **arguments})
        if data:
            arguments[DATA_PATH] = data
        arguments |= {k: v for k, v in scenario.arguments.items() if k not in point}
        seen = {**{name: point[name] for name in _OUTSIDE if name in point}, **arguments}
        skip = self._shared(scenario, arguments, seen, devices=gpus * nodes)
        settings = {name: fms.text(value) for name, value in {**seen, **arguments}.items()}
        if template.workload != "other":
            settings.setdefault(FRAMEWORK, fms.NONE)
        launch = _launch(scenario, template, ranks=gpus * nodes)
        cell = Cell(
            index=0,
            id="",
            scenario=scenario.name,
            settings=settings,
            num_gpus=gpus,
            nodes=nodes,
            repeat=1,
            command=self._command(template, settings, arguments),
            launch=launch,
            environment=self._environment(scenario, template, settings),
            expects=tuple(one.claim for one in scenario.expects if matches(one.when, settings)),
            skip=skip,
            launch_options=self._options(launch),
        )
        return cell, arguments

    def _shared(
        self,
        scenario: Scenario,
        arguments: dict[str, Any],
        seen: Mapping[str, Any],
        *,
        devices: int,
    ) -> str:
        """Put each device's batch into the arguments; or why the cell is skipped."""
        uneven = None
        try:
            arguments |= shared(arguments, effective=seen.get(EFFECTIVE), devices=devices)
        except UnevenBatch as error:
            uneven = error
        skip = self._skipped(scenario, {**seen, **arguments})
        if uneven is not None and not skip:
            raise uneven
        return skip

    def _skipped(self, scenario: Scenario, seen: Mapping[str, Any]) -> str:
        for condition in scenario.constraints:
            if not condition.holds({**dict.fromkeys(condition.names), **seen}):
                return condition.reason
        if scenario.architectures:
            found = validate.known_architecture(self._found, str(seen.get(MODELS)))
            if found not in scenario.architectures:
                return f"{found} is not of the architectures {', '.join(scenario.architectures)}"
        return ""

    def _data(self, scenario: Scenario, template: Template, seen: Mapping[str, Any]) -> str | None:
        """Where the cell's data will be; None where it has a file of its own, or needs none."""
        stanza = scenario.data
        if DATA_PATH in seen or (stanza is None and template.workload != "sft_trainer"):
            return None
        if not validate.takes_data(scenario, template):
            return None
        job = datastage.job(
            stanza or {},
            model=str(seen.get(MODELS, "")),
            response_template=seen.get("response_template"),
            text_field=seen.get("dataset_text_field"),
            as_pairs=template.workload == "erg" or _is_of_pairs(template, stanza or {}),
        )
        if self._asked.data_stage:
            self.jobs.setdefault(job.file, job)
        elif template.workload == "sft_trainer":
            return f"{{data}}/{datastage.original_name(job)}"
        return f"{{data}}/{job.file}"

    def _command(
        self, template: Template, settings: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> tuple[str, ...]:
        given = dict(arguments)
        if template.workload == "sft_trainer":
            given["output_dir"] = "{hf}"
            if _SKIPS_MEMORY not in given or self._asked.log_memory_hf is not None:
                given[_SKIPS_MEMORY] = self._asked.log_memory_hf is False
        if not template.takes_all or template.workload == "other":
            named = template.names
            given = {name: value for name, value in given.items() if name not in named}
        words = template.command({**_ABSENT, **settings}, templates.flags(given))
        if template.workload == "erg" and self._backend(settings) == "unsloth":
            words = tuple(UNSLOTH_PYTHON if word == PYTHON else word for word in words)
        return words

    def _backend(self, settings: Mapping[str, Any]) -> object:
        tuning = self._found.frameworks[str(settings[FRAMEWORK])].tuning
        return (tuning or {}).get("backend")

    def _environment(
        self, scenario: Scenario, template: Template, settings: Mapping[str, Value]
    ) -> dict[str, str]:
        self.keys |= secrets.keys(scenario.environment, scenario=scenario.name)
        found = {
            name: secrets.SAID
            if secrets.is_key(name, text)
            else templates.filled(text, {**_ABSENT, **settings})
            for name, text in scenario.environment.items()
        }
        framework = self._found.frameworks.get(str(settings.get(FRAMEWORK)))
        if template.workload != "erg" and framework is not None and framework.file is not None:
            found[fms.CONFIG_VARIABLE] = str(framework.file)
        return found

    def _options(self, launch: Launch) -> tuple[str, ...]:
        if launch != "accelerate":
            return ()
        config = self._asked.accelerate_config
        return ("--config_file", str(config)) if config else ()


# What a template may name of any cell, also where nothing gives it a value.
_ABSENT = dict.fromkeys((*_OUTSIDE, BATCH, ACCUMULATION, "nodes"))


def _is_of_pairs(template: Template, stanza: Mapping[str, Any]) -> bool:
    """Prompts and responses, unless text in one field is asked for, or tokens."""
    asked = ("dataset_text_field", "tokenize")
    return template.workload == "other" and not any(stanza.get(name) for name in asked)


def _launch(scenario: Scenario, template: Template, *, ranks: int) -> Launch:
    """One rank needs no launcher, unless one is asked for."""
    return scenario.launch or (template.launch if ranks > 1 else "plain")


def _points(
    scenario: Scenario, template: Template, axes: Mapping[str, list[Any]]
) -> Iterator[tuple[dict[str, Any], Patterns]]:
    """Every combination that is not excluded, then those that are included besides.

    With each the patterns that may still exclude it.
    """
    excluded = [_named(one) for one in scenario.exclude]
    given = {} if template.workload == "other" else {FRAMEWORK: fms.NONE}
    for point in products(axes):
        if not any(matches(one, {**given, **scenario.arguments, **point}) for one in excluded):
            yield point, excluded
    for more in scenario.include:
        added = {name: one if isinstance(one, list) else [one] for name, one in more.items()}
        for point in products({**axes, **added}):
            yield point, ()


def _named(pattern: Mapping[str, Any]) -> dict[str, Any]:
    """With null for a framework as the shortname that it is in cells."""
    found = dict(pattern)
    if FRAMEWORK in found:
        wanted = found[FRAMEWORK] if isinstance(found[FRAMEWORK], list) else [found[FRAMEWORK]]
        found[FRAMEWORK] = [fms.NONE if one is None else one for one in wanted]
    return found
