"""Reads a Hugging Face `config.json`: fields by their many names, with defaults and named errors.

A missing `num_key_value_heads` is the number of heads in one family, one in another and 8 in a
third. So a field that is left out gets the default of its family's class in transformers, and is
listed as an assumption. A field without a default is derived as the class derives it, or is an
error.

The fields that were read are recorded. A typed field that no family reads would change nothing, so
it is refused.
"""

from __future__ import annotations

import json
import math
from difflib import get_close_matches
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from ergmeter.errors import ALMOST, FormatError

# Defaults of fields and heads of classes, as transformers has them.
#
# A published configuration leaves out fields that equal its class's default. LLaVA 1.5 does not say
# how wide its language model is, SmolLM3 not that its head is tied. transformers.json has the
# defaults of every field that a reader looks at, and the head of each class.
# `scripts/transformers_table.py` writes it; a test compares it with the installed transformers.

# Families of remote code whose configuration class is another family's.
_SAME_CLASS = {"kimi_k2": "deepseek_v3"}


@cache
def _table() -> dict[str, Any]:
    file = resources.files("ergmeter.flops") / "transformers.json"
    table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return table


def transformers_version() -> str:
    """The version of transformers that the tables were made from."""
    return str(_table()["version"])


def defaults_of(model_type: str) -> dict[str, Any]:
    """Defaults of the fields of a family's configuration class.

    A field whose default is None is not in it: the class derives it from other fields.
    """
    defaults: dict[str, Any] = _table()["defaults"].get(_SAME_CLASS.get(model_type, model_type), {})
    return defaults


def aliases_of(model_type: str) -> dict[str, list[str]]:
    """Other names under which the configuration class of a family takes a field."""
    aliases: dict[str, list[str]] = _table()["aliases"].get(model_type, {})
    return aliases


@cache
def _heads() -> dict[str, str]:
    return {name: head for head, names in _table()["heads"].items() for name in names}


def head_of(architecture: str) -> str | None:
    """The head that a class of transformers has, or None where its mappings do not list it."""
    return _heads().get(architecture)


_LARGEST = 1 << 40  # no dimension of any model is near this; a typing error is
_LONGEST_VALUE = 80  # characters of a wrong value in its error

# What is built one by one, so that a typing error in it would take hours instead of a line.
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers",
    "encoder_layers", "decoder_layers", "depth", "mtp_num_layers",
)  # fmt: skip
EXPERTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_shared_experts",
    "moe_num_shared_experts",
)  # fmt: skip
_MOST_LAYERS = 10_000
_MOST_EXPERTS = 1_000_000
_MOST = {**dict.fromkeys(_LAYERS, _MOST_LAYERS), **dict.fromkeys(EXPERTS, _MOST_EXPERTS)}


class MissingFieldError(FormatError):
    """A field that nothing can take the place of, by the names it may have."""

    def __init__(self, where: str, names: tuple[str, ...], near: str) -> None:
        self.names = names
        label = names[0] if len(names) == 1 else f"{names[0]} (or {', '.join(names[1:])})"
        super().__init__(f"{where}: the field {label} is missing; add it{near}")


def quoted_value(value: object) -> str:
    """A wrong value as an error quotes it."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


class ModelConfig:
    """A configuration's fields, checked when they are read.

    A field that is left out has its class's default in transformers; `assumptions` lists those
    that were read. A field that is null has none.
    """

    def __init__(
        self,
        fields: dict[str, Any],
        *,
        where: str,
        defaults: dict[str, Any] | None = None,
        assumed: list[str] | None = None,
    ) -> None:
        self._fields = fields
        self._own_defaults = defaults
        self._defaulted: dict[str, dict[str, Any]] = {}  # by family, the defaults that were read
        self.where = where
        self.assumed = assumed if assumed is not None else []
        self.read: set[str] = set()  # names of the fields that were read
        self._views = [self]  # also its parts, and its fields read as another family's

    def __contains__(self, name: str) -> bool:
        return self._lookup(name) is not None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields as they stand in the file."""
        return dict(self._fields)

    @property
    def model_type(self) -> str:
        """The family that the field `model_type` names."""
        return _family(self._fields, self.where)

    @property
    def assumptions(self) -> list[str]:
        """Assumptions that were made, the defaults of each family in one line."""
        version = transformers_version()
        lines = [
            f"left out, so as transformers {version} has it for {family}: "
            + ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items())
            for family, values in self._defaulted.items()
        ]
        return [*self.assumed, *lines, *self._misspelt()]

    def _misspelt(self) -> list[str]:
        """Notes on fields that nothing read, with almost the name of one that is left out."""
        read = set[str]().union(*(view.read for view in self._views))
        return [
            f"{view.where}: {name} is not read; did you mean {meant[0]}?"
            for view in self._views
            for name in sorted(view._fields.keys() - read)
            if (meant := get_close_matches(name, view.read - view._fields.keys(), 1, ALMOST))
        ]

    def integer(self, *names: str, default: int | None = None, at_least: int = 1) -> int:
        """A whole number under one of these names."""
        name, value = self._value(names, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "a whole number", value)
        most = _MOST.get(name)
        if not at_least <= value < _LARGEST or (most is not None and value > most):
            limit = "less than 2^40" if most is None else f"at most {most:,}"
            raise self._wrong(name, f"at least {at_least} and {limit}", value)
        return value

    def maybe(self, *names: str, at_least: int = 1) -> int | None:
        """A whole number, or None where it is absent or null."""
        if all(name not in self for name in names):
            return None
        return self.integer(*names, at_least=at_least)

    def integer_or_auto(self, name: str) -> int | None:
        """A whole number, or None where it is absent or "auto"."""
        return None if self._lookup(name) == "auto" else self.maybe(name)

    def flag(self, *names: str, default: bool | None = None) -> bool:
        """A true or false under one of these names."""
        name, value = self._value(names, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """A ratio under one of these names: above 0, and of a size that a model can have."""
        name, value = self._value(names, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not 1 / _LARGEST < value < _LARGEST:
            raise self._wrong(name, "a number above 0", value)
        return float(value)

    def share(self, name: str, of: int, *, default: float | None = None) -> int:
        """A size times the ratio in this field, as a whole number."""
        size = int(self.number(name, default=default) * of)
        if not 1 <= size < _LARGEST:
            raise FormatError(
                f"{self.where}: {name} {quoted_value(self._lookup(name))} times {of} is no size"
            )
        return size

    def word(self, name: str) -> str | None:
        """A word, or None where it is absent."""
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a word", value)
        return value

    def names(self, *names: str) -> list[str] | None:
        """A list of words, or None where it is absent."""
        for name in names:
            value = self.raw(name)
            if value is None:
                continue
            if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
                raise self._wrong(name, "a list of words", value)
            return list(value)
        return None

    def integers(self, name: str) -> list[int] | None:
        """A list of numbers of layers, from 0, or None where it is absent."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            raise self._wrong(name, "a list of whole numbers from 0", value)
        return list(value)

    def _wrong(self, name: str, wanted: str, value: object) -> FormatError:
        return FormatError(f"{self.where}: {name} must be {wanted}; got {quoted_value(value)}")

    def part(self, name: str, *, kind: str = "") -> ModelConfig:
        """A nested configuration, such as `text_config`.

        One that does not say its family, or says its parent's, is of the family `kind`.
        """
        value = self.raw(name)
        if not isinstance(value, dict):
            raise FormatError(f"{self.where}: {name} is missing or is no object")
        where = f"{self.where}: {name}"
        kind = kind or f"{self.model_type}.{name}"
        own = _family(value, where)
        family = own if defaults_of(own) or (own and own != self.model_type) else kind
        return self._of_family(value, family, where)

    def as_family(self, kind: str) -> ModelConfig:
        """The same fields, read as another family's."""
        return self._of_family(self._fields, kind, self.where)

    def having(self, name: str, value: object) -> ModelConfig:
        """The same configuration with another value of one field."""
        fields = {**self._fields, name: value}
        return ModelConfig(
            fields, where=self.where, defaults=self._own_defaults, assumed=list(self.assumed)
        )

    def _of_family(self, fields: dict[str, Any], kind: str, where: str) -> ModelConfig:
        other = ModelConfig({**fields, "model_type": kind}, where=where, assumed=self.assumed)
        other._defaulted, other._views = self._defaulted, self._views
        self._views.append(other)
        return other

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        if self._own_defaults is not None:
            return self._own_defaults
        return defaults_of(self.model_type)

    def _lookup(self, name: str) -> Any:  # noqa: ANN401
        """The value in the file, else the default; None where there is neither."""
        names = (name, *aliases_of(self.model_type).get(name, ()))
        self.read.update(names)
        for each in names:
            if each in self._fields:  # a null in the file is a decision, and no default
                return self._fields[each]
        return self._defaults.get(name)

    def raw(self, name: str) -> Any:  # noqa: ANN401  whatever the file holds
        """The value as it stands, or None; a default is listed as assumed."""
        value = self._lookup(name)
        names = (name, *aliases_of(self.model_type).get(name, ()))
        if value is not None and not any(each in self._fields for each in names):
            self._defaulted.setdefault(self.model_type, {})[name] = value
        return value

    def _value(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:  # noqa: ANN401
        """The value under the first of these names that the file has, else the default of one."""
        self.read.update(names)
        written = [name for name in names if self._fields.get(name) is not None]
        for name in written or names:
            value = self.raw(name)
            if value is not None:
                return name, value
        if default is None:
            unread = self._fields.keys() - self.read
            near = get_close_matches(names[0], unread, 1, ALMOST)  # most are caught: quick
            hint = f"; did you write it as {near[0]}?" if near else ""
            raise MissingFieldError(self.where, names, hint)
        return names[0], default


def _family(fields: dict[str, Any], where: str) -> str:
    value = fields.get("model_type")
    if value is not None and not isinstance(value, str):
        raise FormatError(f"{where}: model_type must be a word; got {quoted_value(value)}")
    return value or ""


def read_config(path: str | Path) -> ModelConfig:
    """The configuration in a file, or in the directory of a model."""
    file = Path(path)
    what = "no such file"
    if file.is_dir():
        file, what = file / "config.json", "no config.json in this directory"
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FormatError(f"{path}: {what}; pass a model's config.json") from error
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} can't be read as text: {error}") from error
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5000 digits
        raise FormatError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise FormatError(f"{path} holds no object of fields; pass a model's config.json")
    return ModelConfig(fields, where=str(path))
