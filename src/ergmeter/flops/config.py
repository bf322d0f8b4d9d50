"""Reads a Hugging Face `config.json`: the fields by their many names, and an error that names them.

The trap: a default. A missing `num_key_value_heads` is the number of heads in one family, one in
another and 8 in a third. A field is therefore read where its family says what its absence means,
and otherwise its absence is an error. What had to be taken from a family's own defaults (published
configurations of vision-language models leave out what equals them) is kept as an assumption.

Which fields were read is remembered: one that somebody typed and no family read changes nothing,
and whoever typed it believes otherwise.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ergmeter.errors import FormatError

_LARGEST = 1 << 40  # no dimension of any model is near this; a typing error is
_SHOWN = 80  # characters of a wrong value in its error

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

    def __init__(self, where: str, names: tuple[str, ...]) -> None:
        self.names = names
        said = names[0] if len(names) == 1 else f"{names[0]} (or {', '.join(names[1:])})"
        super().__init__(f"{where}: the field {said} is missing; add it")


def shown(value: object) -> str:
    """A wrong value as an error quotes it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class Config:
    """A configuration's fields, checked when they are read."""

    def __init__(
        self,
        fields: dict[str, Any],
        *,
        where: str,
        defaults: dict[str, Any] | None = None,
        assumed: list[str] | None = None,
    ) -> None:
        self._fields = fields
        self._defaults = defaults or {}
        self.where = where
        self.assumed = assumed if assumed is not None else []
        self.read: set[str] = set()  # fields that somebody has asked for

    def __contains__(self, name: str) -> bool:
        return self._found(name) is not None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields as they stand in the file."""
        return dict(self._fields)

    @property
    def model_type(self) -> str:
        """What family it says it is of."""
        return _family(self._fields, self.where)

    def whole(self, *names: str, default: int | None = None, at_least: int = 1) -> int:
        """A whole number under one of these names."""
        name, value = self._value(names, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise FormatError(f"{self.where}: {name} must be a whole number; got {shown(value)}")
        most = _MOST.get(name)
        if not at_least <= value < _LARGEST or (most is not None and value > most):
            limit = "less than 2^40" if most is None else f"at most {most:,}"
            raise FormatError(
                f"{self.where}: {name} must be at least {at_least} and {limit}; got {shown(value)}"
            )
        return value

    def maybe(self, *names: str, at_least: int = 1) -> int | None:
        """A whole number, or None where it is absent or null."""
        if all(self._found(name) is None for name in names):
            return None
        return self.whole(*names, at_least=at_least)

    def whole_or_auto(self, name: str) -> int | None:
        """A whole number, or None where it is absent or "auto"."""
        return None if self._found(name) == "auto" else self.maybe(name)

    def flag(self, *names: str, default: bool | None = None) -> bool:
        """A true or false under one of these names."""
        name, value = self._value(names, default)
        if not isinstance(value, bool):
            raise FormatError(f"{self.where}: {name} must be true or false; got {shown(value)}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """A ratio under one of these names: above 0, and of a size that a model can have."""
        name, value = self._value(names, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not 1 / _LARGEST < value < _LARGEST:
            raise FormatError(f"{self.where}: {name} must be a number above 0; got {shown(value)}")
        return float(value)

    def share(self, name: str, of: int, *, default: float | None = None) -> int:
        """That many times a size, which is a size again."""
        size = int(self.number(name, default=default) * of)
        if not 1 <= size < _LARGEST:
            raise FormatError(
                f"{self.where}: {name} {shown(self._found(name))} times {of} is no size"
            )
        return size

    def word(self, name: str) -> str | None:
        """A word, or None where it is absent."""
        value = self._found(name)
        if value is not None and not isinstance(value, str):
            raise FormatError(f"{self.where}: {name} must be a word; got {shown(value)}")
        return value

    def names(self, *names: str) -> list[str] | None:
        """A list of words, or None where it is absent."""
        for name in names:
            value = self._found(name)
            if value is None:
                continue
            if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
                raise FormatError(
                    f"{self.where}: {name} must be a list of words; got {shown(value)}"
                )
            return list(value)
        return None

    def wholes(self, name: str) -> list[int] | None:
        """A list of numbers of layers, from 0, or None where it is absent."""
        value = self._found(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(_is_count(number) for number in value):
            raise FormatError(
                f"{self.where}: {name} must be a list of whole numbers from 0; got {shown(value)}"
            )
        return list(value)

    def raw(self, name: str) -> Any:  # noqa: ANN401  whatever the file holds
        """The value as it stands, or None."""
        return self._found(name)

    def part(
        self, name: str, *, defaults: dict[str, dict[str, Any]] | None = None, kind: str = ""
    ) -> Config:
        """A nested configuration, such as `text_config`, with its own family's defaults.

        One that does not say its family, or says its parent's, is of the family `kind`.
        """
        value = self._fields.get(name)
        if not isinstance(value, dict):
            raise FormatError(f"{self.where}: {name} is missing or is no object")
        known = defaults or {}
        where = f"{self.where}: {name}"
        own = _family(value, where)
        family = own if own in known or (own and own != self.model_type) else kind
        fields = {**value, "model_type": family}
        return Config(fields, where=where, defaults=known.get(family), assumed=self.assumed)

    def _found(self, name: str) -> Any:  # noqa: ANN401
        self.read.add(name)
        # A null in the file is somebody's decision; only what is not there has a default.
        return self._fields[name] if name in self._fields else self._defaults.get(name)

    def _value(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:  # noqa: ANN401
        for name in names:
            self.read.add(name)
            if self._fields.get(name) is not None:
                return name, self._fields[name]
        for name in names:
            if name in self._defaults and name not in self._fields:
                value = self._defaults[name]
                said = f"{name} = {value}, the default of {self.model_type}"
                if said not in self.assumed:
                    self.assumed.append(said)
                return name, value
        if default is None:
            raise MissingFieldError(self.where, names)
        return names[0], default


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _family(fields: dict[str, Any], where: str) -> str:
    value = fields.get("model_type")
    if value is not None and not isinstance(value, str):
        raise FormatError(f"{where}: model_type must be a word; got {shown(value)}")
    return value or ""


def read_config(path: str | Path) -> Config:
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
    return Config(fields, where=str(path))
