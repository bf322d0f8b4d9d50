"""The keys and values of a YAML file, laid over those of the file that it includes.

The trap: what YAML accepts in silence. A key that stands twice is taken the last time, so that a
setting a page further up means nothing; here it is an error that names both lines.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from ergmeter.errors import FormatError, UsageError

INCLUDE = "include"
Values = dict[str, Any]
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as quick, where built


class _Once(_Loader):  # type: ignore[misc]
    """YAML in which a key stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in lines and key != "<<":
                raise FormatError(f"{key!r} stands twice, in lines {lines[key]} and {line}")
            lines[key] = line
        return dict(super().construct_mapping(node, deep=deep))


def with_includes(path: Path, *, each: Callable[[Values], Values] = dict) -> Values:
    """What the file says, over what the files say that it includes, section by section.

    `each`: what is done to every file's values before they meet those of another.
    """
    return _read(path, (), each)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Values:
    """Both, and where they disagree the one above; mappings are merged key by key."""
    result = dict(below)
    for key, value in above.items():
        there = result.get(key)
        both = isinstance(there, Mapping) and isinstance(value, Mapping)
        result[key] = merged(there, value) if both else value  # type: ignore[arg-type]
    return result


def _read(path: Path, above: tuple[Path, ...], each: Callable[[Values], Values]) -> Values:
    if path.resolve() in above:
        chain = " -> ".join(one.name for one in (*above, path))
        raise UsageError(f"{path}: the files include each other in a circle: {chain}")
    values = _parsed(path)
    included = values.pop(INCLUDE, None)
    if included is None:
        return each(values)
    if not isinstance(included, str):
        raise UsageError(f"{path}: include must be the path of one YAML file; got {included!r}")
    below = _read(_found(included, path), (*above, path.resolve()), each)
    return merged(below, each(values))


def _found(included: str, path: Path) -> Path:
    """Beside the including file, as one expects; else from where one works, as the original had."""
    beside, here = path.parent / included, Path(included)
    for candidate in (beside, here):
        if candidate.is_file():
            return candidate
    raise UsageError(f"{path}: include: {included} is neither at {beside} nor at {here.resolve()}")


def _parsed(path: Path) -> Values:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError(f"no configuration at {path}") from error
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a YAML file: {error}") from error
    try:
        values = yaml.load(text, _Once)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise FormatError(f"{path}{line}: not YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise FormatError(f"{path}: not YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise FormatError(f"{path} holds no sections (model:, train:, ...), so it is no training")
    return values
