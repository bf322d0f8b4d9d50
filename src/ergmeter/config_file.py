"""Reads YAML configuration files, validates them with pydantic, and reports all errors at once.

Each error has its line and the closest known key. Only modules that read a configuration file
import this one, since pydantic takes 0.2 s to load.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ergmeter.errors import FormatError, UsageError, suggestion
from ergmeter.units import listed_by

Location: TypeAlias = tuple[str | int, ...]

_MAX_NAMES = 12
_MAX_KINDS = 20
_MAX_VALUE = 60  # characters
_repr = reprlib.Repr()  # short also for a value that aliases make huge
_repr.maxstring = _repr.maxother = _MAX_VALUE
_VARIABLE = re.compile(r"^(?:.*, )?line \d+: |(?<!\w)(?:'[^']*'|\"[^\"]*\")(?!\w)")
_TEXTS = {
    "bool_type": "must be true or false",
    **dict.fromkeys(("string_type", "string_pattern_mismatch"), "must be text"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "must be a number"),
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be below {lt:g}",
    **dict.fromkeys(("model_type", "dict_type"), "must have keys and values"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    "too_short": "must not be empty",
}


class ConfigModel(BaseModel):
    """A section of a configuration file. Unknown keys are errors; null means the default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        fields = cls.model_fields
        return {
            key: value
            for key, value in values.items()
            if value is not None or key not in fields or fields[key].default is None
        }


Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ConfigError:
    """One error, and its location: the keys from the top of the file to the wrong value."""

    location: Location
    text: str


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The values of a YAML file, and the parsed document, which has their line numbers."""

    path: Path
    values: dict[str, Any]
    document: yaml.Node | None

    def line(self, location: Location) -> int | None:
        """The line of a key or list item; None if it is not in this file."""
        node, line = self.document, None
        for part in location:
            children = _children(node)
            if str(part) not in children:
                return None
            line, node = children[str(part)]
        return line


def _children(node: yaml.Node | None) -> dict[str, tuple[int, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): (key.start_mark.line + 1, value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        items = enumerate(node.value)
        return {str(index): (item.start_mark.line + 1, item) for index, item in items}
    return {}


class _UniqueKeyLoader(yaml.SafeLoader):
    """A loader that rejects duplicate keys, of which YAML would use the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in lines and key != "<<":
                raise UsageError(f"line {line}: {key!r} is also in line {lines[key]}; keep one")
            lines[key] = line
        return dict(super().construct_mapping(node, deep=deep))


def read_yaml(path: Path) -> ConfigFile:
    """Read a YAML file of keys and values; both may be absent."""
    try:
        loader = _UniqueKeyLoader(path.read_text(encoding="utf-8"))
        document = loader.get_single_node()
        values = {} if document is None else loader.construct_document(document)
    except FileNotFoundError as error:
        raise FormatError(f"no file at {path}") from error
    except UsageError as error:
        raise UsageError(f"{path}, {error}") from None
    except (IsADirectoryError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path}{_yaml_message(error)}") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UsageError(f"{path} must have keys and values; got {_quoted(values)}")
    return ConfigFile(path, values, document)


def _yaml_message(error: Exception) -> str:
    """YAML's message, with its line if it has one."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f" is not YAML: {' '.join(str(error).split())}"
    parts = [getattr(error, name, None) for name in ("context", "problem")]
    reason = ", ".join(part for part in parts if part)
    return f", line {mark.line + 1}, column {mark.column + 1} is not YAML: {reason}"


def validate(
    model: type[Model],
    values: Mapping[str, Any],
    *,
    unknown: Callable[[Location, Sequence[str]], str] | None = None,
) -> tuple[Model | None, list[ConfigError]]:
    """Validate values. Return the model and all errors.

    In the model, defaults replace wrong values. It is None if a wrong value has no default.

    `unknown`: the message for an unknown key, from its location and the names of its siblings.
    """
    try:
        return model.model_validate(values), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    unknown = unknown or unknown_key
    errors = [
        ConfigError(
            detail["loc"],
            unknown(detail["loc"], list(_section(model, detail["loc"]).model_fields))
            if detail["type"] == "extra_forbidden"
            else _message(model, detail),
        )
        for detail in details
    ]
    try:
        return model.model_validate(_without(values, [error.location for error in errors])), errors
    except ValidationError:
        return None, errors


def check(model: type[Model], file: ConfigFile) -> Model:
    """Return the validated model of a file. UsageError lists everything that is wrong."""
    validated, errors = validate(model, file.values)
    if validated is None or errors:
        raise usage_error(file.path, [with_line(error, [file]) for error in errors])
    return validated


def with_line(error: ConfigError, files: Sequence[ConfigFile]) -> str:
    """The error's text with its line number, from the first of these files that has its key."""
    for location in (error.location, error.location[:-1]):
        for file in files:
            line = file.line(location)
            if line is not None:
                where = f"line {line}" if file is files[0] else f"{file.path}, line {line}"
                return f"{where}: {error.text}"
    return error.text


def usage_error(path: Path, lines: Iterable[str]) -> UsageError:
    """A UsageError with the first error of each kind and the number of similar ones."""
    kinds = listed_by((_VARIABLE.sub("", line), line) for line in dict.fromkeys(lines))
    ranked = sorted(kinds.values(), key=len, reverse=True)
    messages = [
        alike[0] + (f" (and {len(alike) - 1} more like it)" if alike[1:] else "")
        for alike in ranked[:_MAX_KINDS]
    ]
    left = sum(map(len, ranked[_MAX_KINDS:]))
    messages += [f"and {left} others"] if left else []
    between = "\n  " if messages[1:] else " "
    return UsageError(f"{path}:{between}{between.join(messages)}")


def dotted(location: Location) -> str:
    """A location as text, such as `train.lr` or `datasets[0].type`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).lstrip(".")


def hint(name: object, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The closest match as a question ("did you mean lr?"); if none is close, all names."""
    options = list(dict.fromkeys(names))
    near = suggestion(name, options, "did you mean {}?", cutoff=cutoff)
    if near:
        return near
    listed = ", ".join(options[:_MAX_NAMES]) or "none"
    return f"there are {listed}" + (", ..." if len(options) > _MAX_NAMES else "")


def unknown_key(location: Location, names: Sequence[str]) -> str:
    """The message for an unknown key: its location and the closest known key."""
    return f"{dotted(location)} is no key; {hint(location[-1], names)}"


def _message(model: type[BaseModel], detail: Mapping[str, Any]) -> str:
    location, kind, context = detail["loc"], detail["type"], detail.get("ctx", {})
    if kind == "missing":
        advice = _section(model, location).model_fields[str(location[-1])].description
        return f"{dotted(location)} is missing" + (f": {advice}" if advice else "")
    if kind == "literal_error":
        allowed = re.findall(r"[^', ]+", context["expected"].replace(" or ", ", "))
        near = suggestion(detail["input"], allowed, "; did you mean {}?")
        text = f"must be one of {', '.join(allowed)}{near}"
    elif kind == "value_error":
        text = str(context["error"])
    else:
        text = _TEXTS[kind].format(**context) if kind in _TEXTS else str(detail["msg"])
    return f"{dotted(location)} {text}; got {_quoted(detail['input'])}"


def _section(model: type[BaseModel], location: Location) -> type[BaseModel]:
    """The pydantic model whose field is the last key of a location."""
    for part in location[:-1]:
        field = model.model_fields.get(str(part))
        inner = next(_models(field.annotation), None) if field else None
        model = inner or model
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:  # noqa: ANN401  any type hint
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _without(values: Mapping[str, Any], locations: Iterable[Location]) -> dict[str, Any]:
    """A copy of the values without those at these locations."""
    result = dict(values)
    inner: dict[str, list[Location]] = {}
    for key, *rest in locations:
        if not rest or not isinstance(values.get(str(key)), Mapping):
            result.pop(str(key), None)
        else:
            inner.setdefault(str(key), []).append(tuple(rest))
    for name, rests in inner.items():
        result[name] = _without(values[name], rests)
    return result


def _quoted(value: object) -> str:
    text = _repr.repr(value)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."
