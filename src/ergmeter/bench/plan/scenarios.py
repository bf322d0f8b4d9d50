"""Reads a file of scenarios and FMS's own files, and checks all before anything starts.

FMS's keys are `scenarios`, each with `name`, `framework_config`, `slow` and `arguments`, and
`data_processing`. The other keys are ours, in a scenario or at the top for all of them.

All problems are raised at once, grouped by kind. `exclude` takes cells out of the
plan; a constraint keeps them in it as skipped, with its reason. In the template of a command
`{name}` stands for a setting and `{arguments}` for all arguments as `--name value`. `{out}`,
`{run}`, `{hf}`, `{data}`, `{python}` and `{port}` are filled in when the cell starts.
"""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field, InstanceOf, StrictBool, model_validator

from ergmeter.bench.plan.cells import AT_START, BRACE, Expectation, Launch
from ergmeter.config_file import (
    ConfigError,
    ConfigModel,
    check,
    hint,
    read_yaml,
    usage_error,
    validate,
    with_line,
)

_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Is, ast.IsNot,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Name, ast.Load,
    ast.Constant, ast.Tuple, ast.List,
)  # fmt: skip
# YAML's own words for these.
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class BadCondition(ValueError):  # noqa: N818  the text says what is wrong with it
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
            raise BadCondition(
                f"{text!r} is not a valid condition; compare settings, such as 'num_gpus > 1'"
            ) from error
        for node in ast.walk(tree):
            if not isinstance(node, _ALLOWED):
                raise BadCondition(f"{text!r}: a condition can't contain {type(node).__name__}")
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        code = compile(tree, "<condition>", "eval")
        return cls(text, frozenset(names - _WORDS.keys()), code, reason)

    def holds(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a cell with these settings meets the condition."""
        try:
            # Safe: of the grammar only the nodes above are let through, so nothing can be called.
            return bool(eval(self.code, {"__builtins__": {}}, {**_WORDS, **settings}))
        except (NameError, TypeError, ArithmeticError) as error:
            raise BadCondition(f"{self.text!r} can't be evaluated: {error}") from error


def matches(pattern: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """True if the settings have all values of the pattern; a list matches any of its items."""
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
    """A command with {placeholders} for settings."""

    workload: Workload
    words: tuple[str, ...]

    @property
    def launch(self) -> Launch:
        """What starts several ranks of the command, unless the scenario sets `launch`."""
        return {"erg": "torchrun", "sft_trainer": "accelerate"}.get(self.workload, "plain")  # type: ignore[return-value]

    @property
    def names(self) -> set[str]:
        """The names in the command's placeholders, which may include `arguments`."""
        return {name for word in self.words for name in unknown_names(word, ())}

    @property
    def takes_all(self) -> bool:
        """True if every argument reaches the command."""
        return self.workload == "erg" or ARGUMENTS in self.names

    def command(self, settings: Mapping[str, Any], arguments: Sequence[str]) -> tuple[str, ...]:
        """Return the command with a cell's settings and arguments filled in."""
        place = f"{{{ARGUMENTS}}}"
        words = (arguments if word == place else [fill(word, settings)] for word in self.words)
        return tuple(itertools.chain.from_iterable(words))


def template(command: str | Sequence[str]) -> Template:
    """Parse a command: text, a list of words or a preset. ValueError if it can't be split."""
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
    """Fill settings into a text; `{{` and `}}` are braces; placeholders of AT_START stay."""

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
    """Return a text's placeholders that are neither allowed nor filled in when a cell starts."""
    placeholders = [name for name in _PLACEHOLDER.findall(text) if name]
    return [name for name in placeholders if f"{{{name}}}" not in AT_START and name not in allowed]


def as_flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield `--name value` for each argument, `--name a b` for a list and nothing for null."""
    for name, value in arguments.items():
        if value is None:
            continue
        yield f"--{name}"
        yield from map(str, value) if isinstance(value, list) else (str(value),)


_DATA = ("dataset_name", "dataset_split", "formatting", "tokenize", "input_field",
         "dataset_text_field", "chat_template", "response_template", "response_field",
         "additional_dataset_kwargs")  # fmt: skip
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h)?")
MODELS, FRAMEWORK = "model_name_or_path", "framework_config"


# FMS's own files. Each scenario starts from the file's defaults. (In FMS, a default that one
# scenario replaced was lost for all later scenarios.)

NONE = "none"  # FMS's name for no framework
DEFAULTS = "defaults.yaml"
CONTENTS = "CONTENTS.yaml"
ACCELERATE = "accelerate.yaml"
CONFIG_VARIABLE = "ACCELERATION_FRAMEWORK_CONFIG_FILE"
_SAMPLES = Path("../../sample-configurations")  # from FMS's folder of scenarios


@dataclass(frozen=True, slots=True)
class Framework:
    """What a shortname means: a backend of `erg train`, a file of fms-acceleration, or both."""

    name: str
    tuning: Mapping[str, Any] | None = None
    file: Path | None = None


# Frameworks that `erg train` can run. accelerated-peft-bnb loads and wraps the model in its own way
# and is not among them: run as plain bitsandbytes it would be its own baseline.
BUILTIN = {
    NONE: Framework(NONE, {"backend": "torch"}),
    "torch": Framework("torch", {"backend": "torch"}),
    "bnb": Framework("bnb", {"backend": "bnb", "bits": 4}),
    "unsloth": Framework("unsloth", {"backend": "unsloth"}),
    "baseline-peft-bnb": Framework("baseline-peft-bnb", {"backend": "bnb", "bits": 4}),
}


class _ListedFramework(BaseModel):
    """An entry of CONTENTS.yaml; other keys are ignored."""

    shortname: Annotated[str, BeforeValidator(str)]
    filename: Annotated[str, BeforeValidator(str)]


class _Contents(BaseModel):
    framework_configs: list[_ListedFramework]


def _default_arguments(path: Path | None, *, beside: Path) -> dict[str, Any]:
    """Read default arguments from `path`, else from defaults.yaml beside the scenarios, if any."""
    if path is None:
        path = beside.parent / DEFAULTS
        if not path.is_file():
            return {}
    return read_yaml(path).values


def _merged(defaults: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a scenario's arguments over the defaults, in FMS's order; null removes an argument."""
    remaining = {name: value for name, value in defaults.items() if name not in arguments}
    return {name: value for name, value in {**remaining, **arguments}.items() if value is not None}


def contents_places(beside: Path) -> tuple[Path, ...]:
    """Where CONTENTS.yaml may be: beside the scenario file, or where FMS has it."""
    return tuple(at / CONTENTS for at in (beside.parent, beside.parent / _SAMPLES))


def _listed_frameworks(path: Path | None) -> dict[str, Framework]:
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
    """Return a setting as one value: a list is joined by spaces, as in FMS."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


@dataclass(frozen=True, slots=True)
class Expected:
    """An expectation, and the settings (`when`) of the cells it is for; empty: all cells."""

    claim: Expectation
    when: Mapping[str, Any]


def seconds(value: object) -> float | None:
    """Parse a duration such as 90, 90s, 30m or 2h; None if it is none."""
    match = _TIME.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
    return None if match is None else float(match[1]) * _UNITS_S[match[2] or ""]


def _seconds(value: object) -> float:
    time_s = seconds(value)
    if time_s is None:
        raise ValueError("must be a number of seconds, or 90s, 30m, 2h and so on")
    return time_s


def _template(value: object) -> Template:
    if isinstance(value, str) or (isinstance(value, list) and value):
        return template(value)
    raise ValueError("must be text or a list")


def _axis(value: object) -> object:
    return value if isinstance(value, list | dict) else [value]


def _environment(value: object) -> object:
    """Check the variables under `environment`."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if not re.fullmatch(r"[A-Za-z_]\w*", str(key)) or item is None:
            raise ValueError(f"takes NAME: text, not {key}: {item}")
    return value


def _data_stanza(value: object) -> object:
    for key in value if isinstance(value, dict) else ():
        if key not in _DATA:
            raise ValueError(f"has no key {key}; {hint(key, _DATA)}")
    return value


def _expected(value: object) -> list[Expected]:
    """Parse an item of `expects`: `pattern: REGEX` or facts; `when` limits it to some cells."""
    if not isinstance(value, dict) or not value.keys() - {"when"}:
        raise ValueError("takes `pattern: REGEX` or `fact: value`")
    when = value.get("when") or {}
    if not isinstance(when, dict):
        raise ValueError("takes keys and values as `when`")  # noqa: TRY004  for pydantic
    return [Expected(_claim(str(key), value[key]), when) for key in value if key != "when"]


def _claim(key: str, value: object) -> Expectation:
    if not isinstance(value, str | int | float | bool):
        raise ValueError(f"{key} must be one value")  # noqa: TRY004  for pydantic
    if key != "pattern":
        return Expectation("fact", key, value)
    try:
        re.compile(str(value))
    except re.error as error:
        raise ValueError(f"pattern {value!r}: {error}") from error
    return Expectation("pattern", str(value), str(value))


def _condition(value: object) -> Condition:
    """Parse a constraint: `require: CONDITION` with a `reason`, or the condition alone."""
    constraint = {"require": value} if isinstance(value, str) else value
    if not isinstance(constraint, dict) or not isinstance(constraint.get("require"), str):
        raise ValueError("needs `require`")  # noqa: TRY004  for pydantic
    for key in constraint:
        if key not in ("require", "reason"):
            raise ValueError(f"has no key {key}; {hint(key, ('require', 'reason'))}")
    reason = str(constraint.get("reason") or f"needs {constraint['require']}")
    return Condition.of(constraint["require"], reason=reason)


Axis = Annotated[list[Any], BeforeValidator(_axis), Field(min_length=1)]
Constraint = Annotated[InstanceOf[Condition], BeforeValidator(_condition)]
Claims = Annotated[list[InstanceOf[Expected]], BeforeValidator(_expected)]
Key = Annotated[str, BeforeValidator(str)]  # YAML reads a name such as 1b or 2024 as it likes
Seconds = Annotated[float, BeforeValidator(_seconds)]
Variables = Annotated[dict[Key, Key], BeforeValidator(_environment)]
Pattern = Annotated[dict[Key, Any], Field(min_length=1)]


class _Shared(ConfigModel):
    """Keys of a scenario that may also be at the top of the file, for all scenarios."""

    command: Annotated[InstanceOf[Template], BeforeValidator(_template)] | None = None
    launch: Launch | None = None
    axes: dict[Key, Axis] = Field(default_factory=dict)
    include: list[Pattern] = Field(default_factory=list)
    exclude: list[Pattern] = Field(default_factory=list)
    constraints: list[Constraint] = Field(default_factory=list)
    repeats: Annotated[int, Field(strict=True, ge=1)] | None = None
    warmup: Seconds | None = None
    timeout: Seconds | None = None
    environment: Variables = Field(default_factory=dict)
    architectures: list[Key] = Field(default_factory=list)
    expects: list[Claims] = Field(default_factory=list)
    data_processing: Annotated[dict[str, Any], BeforeValidator(_data_stanza)] | None = None


class Scenario(_Shared):
    """A scenario.

    `read_scenarios` adds the defaults to `arguments`, models and frameworks to `axes`, and for keys
    that the scenario lacks the values at the top of the file.
    """

    name: Annotated[str, Field(strict=True)]
    framework_config: Annotated[list[Any], BeforeValidator(_axis)] | None = None
    slow: StrictBool = False
    arguments: Annotated[dict[str, Any], BeforeValidator(lambda value: value or {})] = Field(
        description="write `arguments: {}` if there are none"
    )

    @property
    def template(self) -> Template:
        """The scenario's command. Use it only after the default command was filled in."""
        assert self.command is not None
        return self.command

    @property
    def claims(self) -> list[Expected]:
        """Everything the scenario expects of its cells."""
        return [claim for claims in self.expects for claim in claims]


class _OwnFramework(ConfigModel):
    """An entry of `framework_configs`: `name: {backend: bnb, bits: 4}` or `name: FILE`."""

    backend: Any = None
    bits: Any = None
    file: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_file(cls, value: Any) -> Any:  # noqa: ANN401  of YAML
        if not value:
            raise ValueError("must be a file, or have `backend`")
        return {"file": value} if isinstance(value, str) else value


class _ScenarioFile(_Shared):
    """All keys of a scenario file."""

    scenarios: Annotated[list[Scenario], Field(min_length=1)]
    defaults: Key | None = None
    framework_configs: dict[Key, _OwnFramework] = Field(default_factory=dict)
    model_architectures: dict[Key, Key] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenarios:
    """A scenario file that was read and checked."""

    path: Path
    scenarios: tuple[Scenario, ...]
    frameworks: Mapping[str, Framework]
    model_architectures: Mapping[str, str]
    contents: Path | None = None  # the CONTENTS.yaml that was found
    data_processing: Mapping[str, Any] | None = None  # of scenarios without their own


def read_scenarios(
    path: Path,
    *,
    defaults: Path | None = None,
    contents: Path | None = None,
    frameworks: Mapping[str, str] | None = None,
) -> Scenarios:
    """Read a scenario file. Raises UsageError with everything that is wrong.

    `frameworks`: files by shortname, which override those of CONTENTS.yaml.
    """
    file = read_yaml(path)
    settings, errors = validate(_ScenarioFile, file.values)
    errors = [_of_scenario(error, file.values) for error in errors]
    names = Counter(scenario.name for scenario in settings.scenarios) if settings else {}
    twice = [name for name, number in names.items() if number > 1]
    errors += [ConfigError((), f"scenario {name!r}: there are two of this name") for name in twice]
    if settings is None or errors:
        raise usage_error(path, [with_line(error, [file]) for error in errors])
    if defaults is None and settings.defaults is not None:
        defaults = path.parent / settings.defaults
    default_arguments = _default_arguments(defaults, beside=path)
    places = (at for at in contents_places(path) if at.is_file())
    listed_in = next(places, None) if contents is None else contents
    return Scenarios(
        path=path,
        scenarios=tuple(
            _with_shared(scenario, settings, default_arguments) for scenario in settings.scenarios
        ),
        frameworks={
            **BUILTIN,
            **_listed_frameworks(listed_in),
            **{name: _framework(name, of, path) for name, of in settings.framework_configs.items()},
            **{name: Framework(name, file=Path(at)) for name, at in (frameworks or {}).items()},
        },
        model_architectures=settings.model_architectures,
        contents=listed_in,
        data_processing=settings.data_processing,
    )


def _of_scenario(error: ConfigError, values: Mapping[str, Any]) -> ConfigError:
    """Return an error with the scenario's name instead of its number in the list."""
    match error.location:
        case ("scenarios", int(index), *rest):
            scenario = values["scenarios"][index]
            name = scenario.get("name") if isinstance(scenario, dict) else None
            if name is not None and rest:
                text = error.text.removeprefix(f"scenarios[{index}].")
                text = text.replace(f"did you mean scenarios[{index}].", "did you mean ")
                return ConfigError(error.location, f"scenario {name!r}: {text}")
    return error


def _framework(name: str, settings: _OwnFramework, path: Path) -> Framework:
    file = None if settings.file is None else path.parent / settings.file
    tuning = settings.model_dump(include={"backend", "bits"}, exclude_unset=True)
    return Framework(name, tuning or None, file)


def _with_shared(own: Scenario, shared: _Shared, defaults: Mapping[str, Any]) -> Scenario:
    """Return a scenario with the default arguments and the keys at the top of the file."""
    arguments = _merged(defaults, own.arguments)
    models, frameworks = arguments.pop(MODELS, []), own.framework_config
    if "framework_config" in own.model_fields_set:
        frameworks = [None] if frameworks is None else frameworks
        # An empty item of the list is no framework.
        frameworks = [NONE if name is None else str(name) for name in frameworks]
    first = {MODELS: list(map(str, models if isinstance(models, list) else [models]))}
    first[FRAMEWORK] = frameworks or []
    update: dict[str, Any] = {
        "arguments": arguments,
        "framework_config": frameworks,
        "axes": {k: v for k, v in first.items() if v} | shared.axes | own.axes,
        "environment": {**shared.environment, **own.environment},
    }
    for name in ("include", "exclude", "constraints", "expects"):
        update[name] = [*getattr(shared, name), *getattr(own, name)]
    inherited = _Shared.model_fields.keys() - update.keys() - own.model_fields_set
    return own.model_copy(update=update | {name: getattr(shared, name) for name in inherited})
