"""The training's YAML: values by dotted key, with the references between them followed.

The trap: OmegaConf. A value may be written as `${trainer.max_steps}` or `${multiply:8,512}`, which
a YAML reader hands over as text; taken for a number it ends in a traceback, taken for absent in a
default. What is simple is followed; the rest is an error that names the key and quotes the text.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

from ergmeter.errors import FormatError, UsageError

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_DEEPEST = 20  # references to references; more is a circle
_SHOWN = 80
# Keys that tell a training's YAML from a model's config.json, which is YAML too.
_PARTS = {"data", "trainer", "model"}
_OF_A_MODEL = {"model_type", "architectures", "hidden_size"}


class Unresolved:
    """A reference that can't be followed here: its text as it stands in the file."""

    def __init__(self, text: str) -> None:
        self.text = text


class TrainingFile:
    """What a training's YAML says. A key that is absent or null is None."""

    def __init__(self, fields: dict[str, Any], *, where: str) -> None:
        self._fields = fields
        self.where = where

    def value(self, key: str) -> Any:  # noqa: ANN401  whatever the file holds
        """The value of a dotted key; `Unresolved` where it refers to what is not known."""
        return self._value(key.split("."), 0)

    def whole(self, key: str, *, instead: str) -> int | None:
        """A whole number of 1 or more, or None where it is absent. `instead`: what else to do."""
        found = self.value(key)
        if found is None:
            return None
        if isinstance(found, Unresolved):
            raise FormatError(
                f"{self.where}: {key} is {_quoted(found.text)}, a reference that can't be followed"
                f" here; write the number, or {instead}"
            )
        if isinstance(found, float) and math.isfinite(found) and found.is_integer():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found < 1 << 40:
            raise FormatError(
                f"{self.where}: {key} must be a whole number of 1 or more; got"
                f" {_quoted(found)}; correct it, or {instead}"
            )
        return found

    def required(self, key: str, *, instead: str) -> int:
        """A whole number of 1 or more that has to be there."""
        found = self.whole(key, instead=instead)
        if found is None:
            raise FormatError(f"{self.where}: the key {key} is missing; add it, or {instead}")
        return found

    def flag(self, key: str) -> bool:
        """Whether the key is there and true."""
        found = self.value(key)
        return found is True or (isinstance(found, str) and found.strip().lower() == "true")

    def word(self, key: str) -> str | None:
        """A word, or None where there is none or it can't be followed."""
        found = self.value(key)
        return found if isinstance(found, str) and found else None

    def part(self, key: str) -> dict[str, Any]:
        """A mapping, or an empty one."""
        found = self.value(key)
        return found if isinstance(found, dict) else {}

    def _value(self, path: list[str], depth: int) -> Any:  # noqa: ANN401
        found: Any = self._fields
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return self._followed(found, path[:-1], depth) if isinstance(found, str) else found

    def _followed(self, text: str, parent: list[str], depth: int) -> Any:  # noqa: ANN401
        """The text with its references replaced, from the innermost outwards."""
        whole = text
        while (match := _INNERMOST.search(text)) is not None:
            found = self._referred(match[1].strip(), parent, depth + 1)
            if found is None or isinstance(found, dict | list | Unresolved):
                return Unresolved(whole)
            text = text[: match.start()] + str(found) + text[match.end() :]
        if "${" in text:
            return Unresolved(whole)
        return text if text == whole else _scalar(text)

    def _referred(self, reference: str, parent: list[str], depth: int) -> Any:  # noqa: ANN401
        """What stands in `${...}`: another key, one beside it (`.name`), or a product."""
        if depth > _DEEPEST:
            return None
        if reference.startswith("multiply:"):
            factors = [_scalar(word) for word in reference.partition(":")[2].split(",")]
            return math.prod(factors) if all(_is_number(factor) for factor in factors) else None
        if not re.fullmatch(r"\.*[\w.]+", reference):
            return None
        name = reference.lstrip(".")
        up = len(reference) - len(name)  # one dot: beside it; each further dot: a level above
        if up > len(parent) + 1:
            return None
        base = parent[: len(parent) - up + 1] if up else []
        return self._value([*base, *name.split(".")], depth)


def _scalar(text: str) -> Any:  # noqa: ANN401
    """The number, word or truth that a text is."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def read_training_file(path: str | Path) -> TrainingFile:
    """The YAML of a training."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file; --config takes the training's YAML") from error
    except OSError as error:
        why = error.strerror or error
        raise UsageError(
            f"{path} can't be read: {why}; --config takes the training's YAML"
        ) from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} can't be read as text: {error}") from error
    try:
        fields = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        said = " ".join(str(error).split())
        raise FormatError(f"{path} is not YAML: {said}") from error
    if not isinstance(fields, dict):
        raise FormatError(f"{path} holds no keys; --config takes the training's YAML")
    if not _PARTS & fields.keys() and _OF_A_MODEL & fields.keys():
        raise FormatError(
            f"--config {path} is a model's config.json; is it meant for --model-config?"
        )
    return TrainingFile(fields, where=str(path))
