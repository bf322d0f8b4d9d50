"""What does a file of scenarios ask for? Read whole and checked before anything starts.

The original's keys are `scenarios`, each with `name`, `framework_config`, `slow` and `arguments`,
and `data_processing`; the others are ours and may stand in a scenario, or at the top for all.

The trap: a matrix that fails at its fortieth cell for a misspelt key. Everything is looked at here,
and all that is wrong is told at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from ergmeter.bench.plan import fms
from ergmeter.bench.plan.cells import Expectation, Launch
from ergmeter.bench.plan.constraints import BadCondition, Condition
from ergmeter.bench.plan.problems import Problems, hint
from ergmeter.bench.plan.templates import Template, template

_SHARED = ("command", "launch", "axes", "include", "exclude", "constraints", "repeats", "warmup",
           "timeout", "environment", "architectures", "expects", "data_processing")  # fmt: skip
_TOP = ("scenarios", "defaults", "framework_configs", "model_architectures", *_SHARED)
_OWN = ("name", "framework_config", "slow", "arguments", *_SHARED)
_FRAMEWORK = ("backend", "bits", "file")
_DATA = ("dataset_name", "dataset_split", "formatting", "tokenize", "input_field",
         "dataset_text_field", "chat_template", "response_template", "response_field",
         "additional_dataset_kwargs")  # fmt: skip
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h)?")
MODELS = "model_name_or_path"


@dataclass(frozen=True, slots=True)
class Expected:
    """A claim, and the settings of the cells that it is made of; without any: of all."""

    claim: Expectation
    when: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario. `arguments` has the defaults in it; `models` and `frameworks` are axes."""

    name: str
    arguments: Mapping[str, Any]
    models: tuple[str, ...] = ()
    frameworks: tuple[str, ...] | None = None
    slow: bool = False
    template: Template | None = None
    launch: Launch | None = None
    axes: Mapping[str, list[Any]] = field(default_factory=dict)
    include: tuple[Mapping[str, Any], ...] = ()
    exclude: tuple[Mapping[str, Any], ...] = ()
    constraints: tuple[Condition, ...] = ()
    repeats: int | None = None
    warmup_s: float | None = None
    timeout_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()
    expects: tuple[Expected, ...] = ()
    data: Mapping[str, Any] | None = None
    data_is_own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenarios:
    """A whole file."""

    path: Path
    scenarios: tuple[Scenario, ...]
    frameworks: Mapping[str, fms.Framework]
    model_architectures: Mapping[str, str]
    contents: Path | None = None  # the CONTENTS.yaml that was found


def read(
    path: Path,
    *,
    problems: Problems,
    defaults: Path | None = None,
    contents: Path | None = None,
    frameworks: Mapping[str, str] | None = None,
) -> Scenarios:
    """The file's scenarios. What is wrong goes to `problems`, what can be read is given.

    `frameworks`: files by shortname, before those of CONTENTS.yaml.
    """
    values = fms.yaml_file(path)
    reading = _Reading(problems, path)
    reading.names(values, _TOP, "")
    if defaults is None and values.get("defaults") is not None:
        defaults = path.parent / str(values["defaults"])
    given = fms.defaults(defaults, beside=path)
    listed_in = fms.contents_path(contents, beside=path)
    known = {
        **fms.BUILTIN,
        **fms.contents(listed_in),
        **reading.frameworks(values.get("framework_configs")),
        **{name: fms.Framework(name, file=Path(at)) for name, at in (frameworks or {}).items()},
    }
    shared = {key: values[key] for key in _SHARED if key in values}
    listed = values.get("scenarios")
    if not isinstance(listed, list) or not listed:
        problems.add("has no list `scenarios`")
        listed = []
    made = [reading.scenario(one, place, shared, given) for place, one in enumerate(listed)]
    found = tuple(one for one in made if one is not None)
    reading.twice(found)
    architectures = reading.mapping(values.get("model_architectures"), "model_architectures", "")
    return Scenarios(
        path=path,
        scenarios=found,
        frameworks=known,
        model_architectures={str(k): str(v) for k, v in architectures.items()},
        contents=listed_in,
    )


def seconds(value: object) -> float | None:
    """Of a number, or of a text such as 90s, 30m, 2h; None if it is none."""
    found = _TIME.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
    return None if found is None else float(found[1]) * _UNITS_S[found[2] or ""]


class _Reading:
    """One pass over a file."""

    def __init__(self, problems: Problems, path: Path) -> None:
        self._problems = problems
        self._path = path

    def names(self, values: Mapping[Any, Any], known: Sequence[str], scenario: str) -> None:
        for name in values:
            if name not in known:
                self._problems.add(f"{name} is no key; {hint(name, known)}", scenario=scenario)

    def twice(self, scenarios: Sequence[Scenario]) -> None:
        seen = set()
        for one in scenarios:
            if one.name in seen:
                self._problems.add("there are two of this name", scenario=one.name)
            seen.add(one.name)

    def frameworks(self, values: object) -> dict[str, fms.Framework]:
        """The file's own: `name: {backend: bnb, bits: 4}`, or `name: path/of/config.yaml`."""
        found = {}
        for name, one in self.mapping(values, "framework_configs", "").items():
            given = {"file": one} if isinstance(one, str) else one
            where = f"framework_configs.{name}"
            if not isinstance(given, dict) or not given:
                self._problems.add(f"{where} must be a file, or have backend; got {one!r}")
                continue
            self.names(given, _FRAMEWORK, where)
            file = self._path.parent / str(given["file"]) if "file" in given else None
            tuning = {key: given[key] for key in ("backend", "bits") if key in given}
            found[str(name)] = fms.Framework(str(name), tuning or None, file)
        return found

    def scenario(
        self, value: object, place: int, shared: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> Scenario | None:
        """One of them, or None where it can't be told which."""
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            self._problems.add(f"scenarios[{place}] has no name")
            return None
        name = value["name"]
        self.names(value, _OWN, name)
        arguments = fms.merged(defaults, self.mapping(value.get("arguments"), "arguments", name))
        models = arguments.pop(MODELS, [])
        both = {**shared, **{key: one for key, one in value.items() if key in _SHARED}}
        for key in ("axes", "environment"):
            above = self.mapping(shared.get(key), key, "")
            both[key] = {**above, **self.mapping(value.get(key), key, name)}
        for key in ("include", "exclude", "constraints", "expects"):
            own = value.get(key) if key in value else []
            both[key] = [*self.items(shared.get(key), key, ""), *self.items(own, key, name)]
        if "arguments" not in value:
            wrong = "has no arguments; write `arguments: {}` if there are none"
            self._problems.add(wrong, scenario=name)
        limited = self.items(both.get("architectures"), "architectures", name)
        return Scenario(
            name=name,
            arguments=arguments,
            models=tuple(map(str, models if isinstance(models, list) else [models])),
            frameworks=_chosen(value),
            slow=self.flag(value.get("slow", False), "slow", name),
            template=self.template(both.get("command"), name),
            launch=self.launch(both.get("launch"), name),
            axes=self.axes(both["axes"], name),
            include=self.patterns(both["include"], "include", name),
            exclude=self.patterns(both["exclude"], "exclude", name),
            constraints=self.constraints(both["constraints"], name),
            repeats=self.count(both.get("repeats"), "repeats", name),
            warmup_s=self.time_s(both.get("warmup"), "warmup", name),
            timeout_s=self.time_s(both.get("timeout"), "timeout", name),
            environment=self.environment(both["environment"], name),
            architectures=tuple(map(str, limited)),
            expects=self.claims(both["expects"], name),
            data=self.data(both.get("data_processing"), name),
            data_is_own="data_processing" in value,
        )

    def environment(self, value: Mapping[Any, Any], name: str) -> dict[str, str]:
        """Variables of a cell's own."""
        for key, one in value.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", str(key)) or one is None:
                wrong = f"environment takes NAME: text; got {key}: {one}"
                self._problems.add(wrong, scenario=name)
        return {str(k): str(v) for k, v in value.items()}

    def mapping(self, value: object, key: str, name: str) -> dict[str, Any]:
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        self._problems.add(f"{key} must have keys and values; got {value!r}", scenario=name)
        return {}

    def items(self, value: object, key: str, name: str) -> list[Any]:
        if value is None:
            return []
        if isinstance(value, list):
            return value
        self._problems.add(f"{key} must be a list; got {value!r}", scenario=name)
        return []

    def flag(self, value: object, key: str, name: str) -> bool:
        if not isinstance(value, bool):
            self._problems.add(f"{key} must be true or false; got {value!r}", scenario=name)
        return value is True

    def count(self, value: object, key: str, name: str) -> int | None:
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            return value
        self._problems.add(f"{key} must be a whole number from 1; got {value!r}", scenario=name)
        return None

    def time_s(self, value: object, key: str, name: str) -> float | None:
        """Seconds, or a text such as 90s, 30m, 2h."""
        found = None if value is None else seconds(value)
        if value is not None and found is None:
            self._problems.add(
                f"{key} must be seconds, or such as 90s, 30m, 2h; got {value!r}", scenario=name
            )
        return found

    def template(self, value: object, name: str) -> Template | None:
        if value is None:
            return None
        try:
            if isinstance(value, str) or (isinstance(value, list) and value):
                return template(value)
        except ValueError as error:
            self._problems.add(f"command {value!r}: {error}", scenario=name)
            return None
        self._problems.add(f"command must be text or a list; got {value!r}", scenario=name)
        return None

    def launch(self, value: object, name: str) -> Launch | None:
        known: tuple[Launch, ...] = get_args(Launch)
        found: Launch | None = next((one for one in known if one == value), None)
        if value is not None and found is None:
            self._problems.add(f"launch {value!r} is none; {hint(value, known)}", scenario=name)
        return found

    def axes(self, values: Mapping[str, Any], name: str) -> dict[str, list[Any]]:
        found = {}
        for key, value in values.items():
            if value == [] or isinstance(value, dict):
                self._problems.add(f"axes.{key} must be a list of values", scenario=name)
            else:
                found[str(key)] = value if isinstance(value, list) else [value]
        return found

    def patterns(self, values: list[Any], key: str, name: str) -> tuple[Mapping[str, Any], ...]:
        for one in values:
            if not isinstance(one, dict) or not one:
                self._problems.add(f"{key} must list settings; got {one!r}", scenario=name)
        return tuple(one for one in values if isinstance(one, dict) and one)

    def constraints(self, values: list[Any], name: str) -> tuple[Condition, ...]:
        """`require: CONDITION` with a `reason`, or the condition alone."""
        found = []
        for one in values:
            given = {"require": one} if isinstance(one, str) else one
            if not isinstance(given, dict) or not isinstance(given.get("require"), str):
                self._problems.add(f"a constraint needs `require`; got {one!r}", scenario=name)
                continue
            self.names(given, ("require", "reason"), name)
            reason = str(given.get("reason") or f"needs {given['require']}")
            try:
                found.append(Condition.of(given["require"], reason=reason))
            except BadCondition as error:
                self._problems.add(f"constraint {error}", scenario=name)
        return tuple(found)

    def claims(self, values: list[Any], name: str) -> tuple[Expected, ...]:
        """`pattern: REGEX`, or facts of the run by name; `when` limits it to some cells."""
        found: list[Expected] = []
        for one in values:
            if not isinstance(one, dict) or not one.keys() - {"when"}:
                self._problems.add(
                    f"expects takes `pattern: REGEX` or `fact: value`; got {one!r}", scenario=name
                )
                continue
            when = self.mapping(one.get("when"), "expects.when", name)
            made = [self._claim(str(k), one[k], name) for k in one if k != "when"]
            found += [Expected(claim, when) for claim in made if claim is not None]
        return tuple(found)

    def _claim(self, key: str, value: object, name: str) -> Expectation | None:
        if not isinstance(value, str | int | float | bool):
            self._problems.add(f"expects {key} must be one value; got {value!r}", scenario=name)
            return None
        if key != "pattern":
            return Expectation("fact", key, value)
        try:
            re.compile(str(value))
        except re.error as error:
            self._problems.add(f"expects pattern {value!r}: {error}", scenario=name)
            return None
        return Expectation("pattern", str(value), str(value))

    def data(self, value: object, name: str) -> dict[str, Any] | None:
        if value is None:
            return None
        found = self.mapping(value, "data_processing", name)
        self.names(found, _DATA, name)
        return found


def _chosen(value: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Shortnames of frameworks; an empty item of the list is none."""
    if "framework_config" not in value:
        return None
    given = value["framework_config"]
    listed = given if isinstance(given, list) else [given]
    return tuple(fms.NONE if one is None else str(one) for one in listed)
