"""Reads a file of scenarios and checks all of it before anything starts.

FMS's keys are `scenarios`, each with `name`, `framework_config`, `slow` and `arguments`, and
`data_processing`. The other keys are ours, in a scenario or at the top for all of them.

All problems are collected and raised at once, grouped by kind. `exclude` takes cells out of the
plan; a constraint keeps them in it as skipped, with its reason. In the template of a command
`{name}` stands for a setting and `{arguments}` for all arguments as `--name value`. `{out}`,
`{run}`, `{hf}`, `{data}`, `{python}` and `{port}` are filled in when the cell starts.
"""

from __future__ import annotations

import ast
import difflib
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, Literal, TypeAlias, get_args

from ergmeter.bench.plan import fms
from ergmeter.bench.plan.cells import AT_START, BRACE, Expectation, Launch
from ergmeter.errors import UsageError

_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Is, ast.IsNot,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Name, ast.Load,
    ast.Constant, ast.Tuple, ast.List,
)  # fmt: skip
# YAML's own words for these.
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class BadCondition(Exception):  # noqa: N818  the text says what is wrong with it
    """The condition can't be parsed, or can't be evaluated for a cell."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a cell's settings, and the reason if it is false."""

    text: str
    names: frozenset[str]
    code: CodeType
    reason: str = ""

    @classmethod
    def of(cls, text: str, *, reason: str = "") -> Condition:
        """Parse a condition."""
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError) as error:
            raise BadCondition(f"{text!r} is no condition") from error
        for node in ast.walk(tree):
            if not isinstance(node, _ALLOWED):
                raise BadCondition(
                    f"{text!r} holds {type(node).__name__}; a condition compares settings"
                )
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        code = compile(tree, "<condition>", "eval")
        return cls(text, frozenset(names - _WORDS.keys()), code, reason)

    def holds(self, settings: Mapping[str, Any]) -> bool:
        """Whether it is true of a cell."""
        try:
            # Safe: of the grammar only the nodes above are let through, so nothing can be called.
            return bool(eval(self.code, {"__builtins__": {}}, {**_WORDS, **settings}))
        except (NameError, TypeError, ArithmeticError) as error:
            raise BadCondition(f"{self.text!r} can't be told: {error}") from error


def matches(pattern: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether a cell has all these values; a list stands for any of its values."""
    return all(
        settings.get(name) in wanted if isinstance(wanted, list) else settings.get(name) == wanted
        for name, wanted in pattern.items()
    )


Workload: TypeAlias = Literal["erg", "sft_trainer", "other"]

ARGUMENTS = "arguments"
OF_A_CELL = ("num_gpus", "nodes")
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w.]*)\}")
_OPEN, _CLOSE = "\x00", "\x01"  # for {{ and }}
_MISTAKEN = re.compile(rf"{_OPEN}(?=(\w+)[}}{_CLOSE}])")

_ERG = ("{python}", "-m", "ergmeter", "train", "--config", "{out}/train.yaml", "--out", "{run}",
        "--no-report")  # fmt: skip
_SFT = ("{python}", "-m", "tuning.sft_trainer", "{arguments}")
PRESETS: dict[str, tuple[Workload, tuple[str, ...]]] = {
    "erg train": ("erg", _ERG),
    "sft_trainer": ("sft_trainer", _SFT),
    "sft_trainer.py": ("sft_trainer", _SFT),
}


@dataclass(frozen=True, slots=True)
class Template:
    """A command with places for settings."""

    workload: Workload
    words: tuple[str, ...]

    @property
    def launch(self) -> Launch:
        """How several ranks of it are started, if nothing else is asked for."""
        return {"erg": "torchrun", "sft_trainer": "accelerate"}.get(self.workload, "plain")  # type: ignore[return-value]

    @property
    def names(self) -> set[str]:
        """The settings that it names, `arguments` among them."""
        return {name for word in self.words for name in unknown_names(word, ())}

    @property
    def takes_all(self) -> bool:
        """Whether every argument reaches the command."""
        return self.workload == "erg" or ARGUMENTS in self.names

    def command(self, settings: Mapping[str, Any], arguments: Sequence[str]) -> tuple[str, ...]:
        """The command of one cell."""
        words: list[str] = []
        for word in self.words:
            if word == f"{{{ARGUMENTS}}}":
                words.extend(arguments)
            else:
                words.append(fill(word, settings))
        return tuple(words)


def template(command: str | Sequence[str]) -> Template:
    """The template of that text or list of words; ValueError if it can't be split."""
    if isinstance(command, str):
        if command.strip() in PRESETS:
            return Template(*PRESETS[command.strip()])
        words = shlex.split(command)
    else:
        words = [str(word) for word in command]
    if not words:
        raise ValueError("the command is empty")
    is_of_fms = any("sft_trainer" in word for word in words) and "{arguments}" in words
    return Template("sft_trainer" if is_of_fms else "other", tuple(words))


def fill(text: str, settings: Mapping[str, Any]) -> str:
    """The text with settings in it; `{{` and `}}` are braces; what is known at the start stays."""

    def put(match: re.Match[str]) -> str:
        if match[0] in AT_START:
            return match[0]
        if match[1] is None:
            return _OPEN if match[0] == "{{" else _CLOSE
        value = settings[match[1]]
        return "" if value is None else str(value)

    def restore_brace(match: re.Match[str]) -> str:
        return BRACE if f"{{{match[1]}}}" in AT_START else "{"

    return (
        _MISTAKEN.sub(restore_brace, _PLACEHOLDER.sub(put, text))
        .replace(_OPEN, "{")
        .replace(_CLOSE, "}")
    )


def unknown_names(text: str, allowed: Collection[str]) -> list[str]:
    """Names in a text that stand for nothing."""
    placeholders = [name for name in _PLACEHOLDER.findall(text) if name]
    return [name for name in placeholders if f"{{{name}}}" not in AT_START and name not in allowed]


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """`--name value` for each, several values after one name; null removes the argument."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None:
            continue
        words.append(f"--{name}")
        words.extend(map(str, value) if isinstance(value, list) else (str(value),))
    return words


_NAMES_SHOWN = 12
_KINDS = 5
_QUOTED = re.compile(r"(?<!\w)(?:'[^']*'|\"[^\"]*\")(?!\w)")


@dataclass(slots=True)
class Problems:
    """Everything that is wrong with one file, collected before anything starts."""

    path: Path
    lines: list[str] = field(default_factory=list)

    def add(self, text: str, *, scenario: str = "") -> None:
        """Add a problem, unless it is listed already."""
        line = f"scenario {scenario!r}: {text}" if scenario else text
        if line not in self.lines:
            self.lines.append(line)

    def stop_if_any(self) -> None:
        """End with the first of each kind, and how many more are like it."""
        if not self.lines:
            return
        kinds: dict[str, list[str]] = {}
        for line in self.lines:
            kinds.setdefault(_QUOTED.sub("", line), []).append(line)
        ranked = sorted(kinds.values(), key=len, reverse=True)
        lines = [
            alike[0] + (f" (and {len(alike) - 1} more like it)" if alike[1:] else "")
            for alike in ranked[:_KINDS]
        ]
        left = sum(map(len, ranked[_KINDS:]))
        lines += [f"and {left} others"] if left else []
        between = "\n  " if lines[1:] else " "
        raise UsageError(f"{self.path}:{between}{between.join(lines)}")


def hint(name: object, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """What may have been meant, if anything is as near as that; or what there is."""
    options = list(dict.fromkeys(names))
    near = difflib.get_close_matches(str(name), options, n=1, cutoff=cutoff)
    if near:
        return f"did you mean {near[0]}?"
    listed = ", ".join(options[:_NAMES_SHOWN]) or "none"
    return f"there are {listed}" + (", ..." if len(options) > _NAMES_SHOWN else "")


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


def read_scenarios(
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
    default_arguments = fms.defaults(defaults, beside=path)
    listed_in = fms.contents_path(contents, beside=path)
    top_keys = {
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
    made = [
        reading.scenario(entry, index, shared, default_arguments)
        for index, entry in enumerate(listed)
    ]
    read = tuple(scenario for scenario in made if scenario is not None)
    reading.twice(read)
    architectures = reading.mapping(values.get("model_architectures"), "model_architectures", "")
    return Scenarios(
        path=path,
        scenarios=read,
        frameworks=top_keys,
        model_architectures={str(k): str(v) for k, v in architectures.items()},
        contents=listed_in,
    )


def seconds(value: object) -> float | None:
    """Of a number, or of a text such as 90s, 30m, 2h; None if it is none."""
    match = _TIME.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
    return None if match is None else float(match[1]) * _UNITS_S[match[2] or ""]


class _Reading:
    """One pass over a file."""

    def __init__(self, problems: Problems, path: Path) -> None:
        self._problems = problems
        self._path = path

    def names(self, values: Mapping[Any, Any], allowed: Sequence[str], scenario: str) -> None:
        for name in values:
            if name not in allowed:
                self._problems.add(f"{name} is no key; {hint(name, allowed)}", scenario=scenario)

    def twice(self, scenarios: Sequence[Scenario]) -> None:
        names = set()
        for scenario in scenarios:
            if scenario.name in names:
                self._problems.add("there are two of this name", scenario=scenario.name)
            names.add(scenario.name)

    def frameworks(self, values: object) -> dict[str, fms.Framework]:
        """The file's own: `name: {backend: bnb, bits: 4}`, or `name: path/of/config.yaml`."""
        frameworks = {}
        for name, entry in self.mapping(values, "framework_configs", "").items():
            framework = {"file": entry} if isinstance(entry, str) else entry
            where = f"framework_configs.{name}"
            if not isinstance(framework, dict) or not framework:
                self._problems.add(f"{where} must be a file, or have backend; got {entry!r}")
                continue
            self.names(framework, _FRAMEWORK, where)
            file = self._path.parent / str(framework["file"]) if "file" in framework else None
            tuning = {key: framework[key] for key in ("backend", "bits") if key in framework}
            frameworks[str(name)] = fms.Framework(str(name), tuning or None, file)
        return frameworks

    def scenario(
        self, value: object, index: int, shared: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> Scenario | None:
        """Read one scenario; None if it has no usable name."""
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            self._problems.add(f"scenarios[{index}] has no name")
            return None
        name = value["name"]
        self.names(value, _OWN, name)
        arguments = fms.merged(defaults, self.mapping(value.get("arguments"), "arguments", name))
        models = arguments.pop(MODELS, [])
        both = {**shared, **{key: item for key, item in value.items() if key in _SHARED}}
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
        for key, item in value.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", str(key)) or item is None:
                wrong = f"environment takes NAME: text; got {key}: {item}"
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
        time_s = None if value is None else seconds(value)
        if value is not None and time_s is None:
            self._problems.add(
                f"{key} must be seconds, or such as 90s, 30m, 2h; got {value!r}", scenario=name
            )
        return time_s

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
        launches: tuple[Launch, ...] = get_args(Launch)
        launch: Launch | None = next((name for name in launches if name == value), None)
        if value is not None and launch is None:
            self._problems.add(f"launch {value!r} is none; {hint(value, launches)}", scenario=name)
        return launch

    def axes(self, values: Mapping[str, Any], name: str) -> dict[str, list[Any]]:
        axes = {}
        for key, value in values.items():
            if value == [] or isinstance(value, dict):
                self._problems.add(f"axes.{key} must be a list of values", scenario=name)
            else:
                axes[str(key)] = value if isinstance(value, list) else [value]
        return axes

    def patterns(self, values: list[Any], key: str, name: str) -> tuple[Mapping[str, Any], ...]:
        for value in values:
            if not isinstance(value, dict) or not value:
                self._problems.add(f"{key} must list settings; got {value!r}", scenario=name)
        return tuple(value for value in values if isinstance(value, dict) and value)

    def constraints(self, values: list[Any], name: str) -> tuple[Condition, ...]:
        """`require: CONDITION` with a `reason`, or the condition alone."""
        conditions = []
        for value in values:
            constraint = {"require": value} if isinstance(value, str) else value
            if not isinstance(constraint, dict) or not isinstance(constraint.get("require"), str):
                self._problems.add(f"a constraint needs `require`; got {value!r}", scenario=name)
                continue
            self.names(constraint, ("require", "reason"), name)
            reason = str(constraint.get("reason") or f"needs {constraint['require']}")
            try:
                conditions.append(Condition.of(constraint["require"], reason=reason))
            except BadCondition as error:
                self._problems.add(f"constraint {error}", scenario=name)
        return tuple(conditions)

    def claims(self, values: list[Any], name: str) -> tuple[Expected, ...]:
        """`pattern: REGEX`, or facts of the run by name; `when` limits it to some cells."""
        expected: list[Expected] = []
        for value in values:
            if not isinstance(value, dict) or not value.keys() - {"when"}:
                self._problems.add(
                    f"expects takes `pattern: REGEX` or `fact: value`; got {value!r}", scenario=name
                )
                continue
            when = self.mapping(value.get("when"), "expects.when", name)
            made = [self._claim(str(k), value[k], name) for k in value if k != "when"]
            expected += [Expected(claim, when) for claim in made if claim is not None]
        return tuple(expected)

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
        stanza = self.mapping(value, "data_processing", name)
        self.names(stanza, _DATA, name)
        return stanza


def _chosen(value: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Shortnames of frameworks; an empty item of the list is none."""
    if "framework_config" not in value:
        return None
    frameworks = value["framework_config"]
    listed = frameworks if isinstance(frameworks, list) else [frameworks]
    return tuple(fms.NONE if name is None else str(name) for name in listed)
