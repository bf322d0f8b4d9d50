"""Reads a Hugging Face `config.json`: fields under several names, with defaults and clear errors.

A missing `num_key_value_heads` means the number of heads in one family, 1 in another and 8 in a
third. So a missing field gets the default of its family's class in transformers, and is listed as
an assumption. A field without a default is derived as that class derives it, or is an error.

The fields that were read are recorded, so that a field without effect can be reported.
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
# A published configuration omits fields that equal its class's default: LLaVA 1.5 the width of its
# language model, SmolLM3 that its head is tied. transformers.json has the defaults of every field
# that a reader reads, and the head of each class.
# `scripts/transformers_table.py` writes it; a test compares it with the installed transformers.

# Families of remote code whose configuration class is another family's.
_SAME_CLASS = {"kimi_k2": "deepseek_v3"}


@cache
def _table() -> dict[str, Any]:
    file = resources.files("ergmeter.flops") / "transformers.json"
    table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return table


def transformers_version() -> str:
    """Return the version of transformers that the table of defaults was made from."""
    return str(_table()["version"])


def defaults_of(model_type: str) -> dict[str, Any]:
    """Return the defaults of a family's configuration class in transformers, by field.

    Fields with the default None are not included: the class derives them from other fields.
    """
    defaults: dict[str, Any] = _table()["defaults"].get(_SAME_CLASS.get(model_type, model_type), {})
    return defaults


def aliases_of(model_type: str) -> dict[str, list[str]]:
    """Return the other names that a family's configuration class accepts, by field."""
    aliases: dict[str, list[str]] = _table()["aliases"].get(model_type, {})
    return aliases


@cache
def _heads() -> dict[str, str]:
    return {name: head for head, names in _table()["heads"].items() for name in names}


def head_of(architecture: str) -> str | None:
    """Return the kind of head of a transformers class; None if no mapping lists the class."""
    return _heads().get(architecture)


_LARGEST = 1 << 40  # far above any model's dimension, to catch typing errors
_LONGEST_VALUE = 80  # characters of a wrong value in its error

# Layers and experts are built one by one: a typing error here would take hours to build.
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
    """A required field is missing. `names`: the names that the field may have."""

    def __init__(self, where: str, names: tuple[str, ...], near: str) -> None:
        self.names = names
        label = names[0] if len(names) == 1 else f"{names[0]} (or {', '.join(names[1:])})"
        super().__init__(f"{where}: the field {label} is missing; add it{near}")


def quoted_value(value: object) -> str:
    """Return a value as errors quote it: its repr, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


class ModelConfig:
    """A configuration's fields, checked when they are read.

    A missing field has the default of its class in transformers; `assumptions` lists the defaults
    that were used. A field that is null gets no default.
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
        self._views = [self]  # with nested configs, and the fields read as another family's

    def __contains__(self, name: str) -> bool:
        return self._lookup(name) is not None

    @property
    def fields(self) -> dict[str, Any]:
        """A copy of the fields in the file, without defaults."""
        return dict(self._fields)

    @property
    def model_type(self) -> str:
        """The family that the field `model_type` names."""
        return _family(self._fields, self.where)

    @property
    def assumptions(self) -> list[str]:
        """Assumptions made so far: the defaults used (a line per family), misspelt fields."""
        version = transformers_version()
        lines = [
            f"left out, so as transformers {version} has it for {family}: "
            + ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items())
            for family, values in self._defaulted.items()
        ]
        return [*self.assumed, *lines, *self._misspelt()]

    def _misspelt(self) -> list[str]:
        """Return notes on unread fields whose names nearly match a field that is missing."""
        read = set[str]().union(*(view.read for view in self._views))
        return [
            f"{view.where}: {name} is not read; did you mean {meant[0]}?"
            for view in self._views
            for name in sorted(view._fields.keys() - read)
            if (meant := get_close_matches(name, view.read - view._fields.keys(), 1, ALMOST))
        ]

    def integer(self, *names: str, default: int | None = None, at_least: int = 1) -> int:
        """Return the whole number under the first of these names that has a value."""
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
        """Return the whole number under one of these names; None if absent or null."""
        if all(name not in self for name in names):
            return None
        return self.integer(*names, at_least=at_least)

    def integer_or_auto(self, name: str) -> int | None:
        """Return the whole number in this field; None if absent or "auto"."""
        return None if self._lookup(name) == "auto" else self.maybe(name)

    def flag(self, *names: str, default: bool | None = None) -> bool:
        """Return the boolean under the first of these names that has a value."""
        name, value = self._value(names, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """Return the number above 0 under the first of these names that has a value."""
        name, value = self._value(names, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not 1 / _LARGEST < value < _LARGEST:
            raise self._wrong(name, "a number above 0", value)
        return float(value)

    def share(self, name: str, of: int, *, default: float | None = None) -> int:
        """Return `of` times the ratio in this field, as a whole number."""
        size = int(self.number(name, default=default) * of)
        if not 1 <= size < _LARGEST:
            raise FormatError(
                f"{self.where}: {name} is {quoted_value(self._lookup(name))}; times {of} it must"
                " be from 1 to 2^40"
            )
        return size

    def word(self, name: str) -> str | None:
        """Return the string in this field; None if absent."""
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a word", value)
        return value

    def names(self, *names: str) -> list[str] | None:
        """Return the list of strings under the first of these names that has one, or None."""
        for name in names:
            value = self.raw(name)
            if value is None:
                continue
            if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
                raise self._wrong(name, "a list of words", value)
            return list(value)
        return None

    def integers(self, name: str) -> list[int] | None:
        """Return a list of whole numbers from 0 (such as layer numbers); None if absent."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            raise self._wrong(name, "a list of whole numbers from 0", value)
        return list(value)

    def _wrong(self, name: str, wanted: str, value: object) -> FormatError:
        return FormatError(f"{self.where}: {name} must be {wanted}; got {quoted_value(value)}")

    def part(self, name: str, *, kind: str = "") -> ModelConfig:
        """Return a nested configuration, such as `text_config`.

        Its family is `kind` if it names none, or the same as its parent.
        """
        value = self.raw(name)
        if not isinstance(value, dict):
            raise FormatError(f"{self.where}: {name} is missing or not an object")
        where = f"{self.where}: {name}"
        kind = kind or f"{self.model_type}.{name}"
        own = _family(value, where)
        family = own if defaults_of(own) or (own and own != self.model_type) else kind
        return self._of_family(value, family, where)

    def as_family(self, kind: str) -> ModelConfig:
        """Return these fields, with the defaults of the family `kind`."""
        return self._of_family(self._fields, kind, self.where)

    def having(self, name: str, value: object) -> ModelConfig:
        """Return a copy with the field `name` set to `value`."""
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
        """Return the value in the file, else the default; None if there is neither."""
        names = (name, *aliases_of(self.model_type).get(name, ()))
        self.read.update(names)
        for each in names:
            if each in self._fields:  # a null in the file counts as set: no default
                return self._fields[each]
        return self._defaults.get(name)

    def raw(self, name: str) -> Any:  # noqa: ANN401  whatever the file holds
        """Return the unchecked value, or None; a default that is used is listed as assumed."""
        value = self._lookup(name)
        names = (name, *aliases_of(self.model_type).get(name, ()))
        if value is not None and not any(each in self._fields for each in names):
            self._defaulted.setdefault(self.model_type, {})[name] = value
        return value

    def _value(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:  # noqa: ANN401
        """Return the first of these names that has a value, and the value: file, then default."""
        self.read.update(names)
        written = [name for name in names if self._fields.get(name) is not None]
        for name in written or names:
            value = self.raw(name)
            if value is not None:
                return name, value
        if default is None:
            unread = self._fields.keys() - self.read
            near = get_close_matches(names[0], unread, 1, ALMOST)
            hint = f"; did you write it as {near[0]}?" if near else ""
            raise MissingFieldError(self.where, names, hint)
        return names[0], default


def _family(fields: dict[str, Any], where: str) -> str:
    value = fields.get("model_type")
    if value is not None and not isinstance(value, str):
        raise FormatError(f"{where}: model_type must be a word; got {quoted_value(value)}")
    return value or ""


def read_config(path: str | Path) -> ModelConfig:
    """Return the configuration in a config.json, given its path or the model's directory."""
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
        raise FormatError(f"{path} is not a JSON object; pass a model's config.json")
    return ModelConfig(fields, where=str(path))
