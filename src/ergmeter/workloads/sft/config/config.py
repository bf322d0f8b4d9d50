"""What should this training do? A YAML file, read into sections, or everything wrong with it.

The trap: the first error only. Whoever mends a file in eight turns of one error each has stopped
reading by the third; all that is wrong with it is told at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ergmeter.errors import FormatError, UsageError
from ergmeter.workloads.sft.config import keys
from ergmeter.workloads.sft.config.contradictions import contradictions
from ergmeter.workloads.sft.config.keys import NO_USE, SECTIONS, Key, by_first_names
from ergmeter.workloads.sft.config.sections import (
    Data,
    DataSource,
    LoraSettings,
    Metrics,
    Model,
    SftConfig,
    Train,
    Tuning,
)
from ergmeter.workloads.sft.config.value_kinds import NotTaken, is_mapping, nearest

# -- included --------------------------------------------------------------------------------------
# The keys and values of a YAML file, laid over those of the file that it includes.
#
# The trap: what YAML accepts in silence. A key that stands twice is taken the last time, so that a
# setting a page further up means nothing; here it is an error that names both lines.


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
    below = _read(_included_path(included, path), (*above, path.resolve()), each)
    return merged(below, each(values))


def _included_path(included: str, path: Path) -> Path:
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


# -- config ----------------------------------------------------------------------------------------


_BUILTIN_DATA = "builtin"
_PARTS = ("model", "tuning", "train", "data", "metrics", "datasets")
_SHOWN = 60


def load(path: Path, *, changes: Mapping[str, object] | None = None) -> SftConfig:
    """The configuration of that file. `changes`: values by dotted key, laid over it."""
    values = with_includes(path, each=by_first_names)
    for key, value in (changes or {}).items():
        values = merged(values, by_first_names(_nested(key, value)))
    reading = _Reading()
    config = reading.config(values, path)
    wrong = [*reading.wrong, *(contradictions(config) if config else ())]
    if wrong:
        more = f" (and {len(wrong) - 1} more: {'; '.join(wrong[1:])})" if wrong[1:] else ""
        raise UsageError(f"{path}: {wrong[0]}{more}")
    assert config is not None
    return config


def _nested(key: str, value: object) -> Values:
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


@dataclass(slots=True)
class _Reading:
    """One pass over a file: what it says, and all that is wrong with it."""

    wrong: list[str] = field(default_factory=list)

    def config(self, values: Values, path: Path) -> SftConfig | None:
        """All sections, or None if one of them lacks what it can't be without."""
        top = self.section(values, "", keys.TOP, inside=_PARTS)
        model = self.part(values, "model", keys.MODEL)
        tuning = self.part(values, "tuning", keys.TUNING, inside=("lora",))
        train = self.part(values, "train", keys.TRAIN)
        data = self.part(values, "data", keys.DATA)
        lora = self.part(values.get("tuning"), "tuning.lora", keys.LORA)
        metrics = self.part(values, "metrics", keys.METRICS)
        datasets = self.sources(values.get("datasets"))
        if tuning.get("mode") == "qlora":
            tuning.setdefault("bits", 4)
        if "name" not in model:
            if not any(line.startswith("model") for line in self.wrong):
                self.wrong.append(
                    "model.name is missing: a name on the hub, a folder, or builtin:tiny"
                )
            return None
        return SftConfig(
            path=path,
            merged=values,
            model=Model(**model),
            tuning=Tuning(**tuning, lora=LoraSettings(**lora)),
            train=Train(**{"output_dir": Path("outputs") / path.stem, **train}),
            data=Data(**data),
            metrics=Metrics(**metrics),
            datasets=datasets,
            **top,
        )

    def part(
        self, values: object, name: str, known: Mapping[str, Key], inside: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """The fields of a section that may be absent."""
        found = values.get(name.rpartition(".")[2]) if isinstance(values, Mapping) else None
        if found is None:
            return {}
        if not is_mapping(found):
            self.wrong.append(
                f"{name} must be a section of keys and values; got {_value_text(found)}"
            )
            return {}
        return self.section(found, f"{name}.", known, inside)

    def section(
        self,
        values: Mapping[Any, Any],
        prefix: str,
        known: Mapping[str, Key],
        inside: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        """Fields by their name. A key without a value stands for the default."""
        by_name = {name: key for key, one in known.items() for name in (key, *one.also)}
        fields: dict[str, Any] = {}
        written: dict[str, str] = {}
        for name, value in values.items():
            if name in inside:
                continue
            key = by_name.get(name)
            if key is None:
                self.wrong.append(_unknown(f"{prefix}{name}", [*by_name, *inside]))
            elif value is not None:
                if key in written:
                    self.wrong.append(
                        f"{prefix}{name} and {prefix}{written[key]} are the same setting; keep one"
                    )
                written[key] = name
                self.read(fields, f"{prefix}{name}", known[key], key, value)
        return fields

    def read(self, fields: dict[str, Any], path: str, key: Key, name: str, value: object) -> None:
        """Put the value into its field, or say why it can't be."""
        try:
            fields[key.field or name] = key.kind(value)
        except NotTaken as error:
            self.wrong.append(f"{path} {error}; got {_value_text(value)}")

    def sources(self, values: object) -> tuple[DataSource, ...]:
        """The data sets of a mixture."""
        if values is None:
            return ()
        if not isinstance(values, list):
            self.wrong.append(f"datasets must be a list; got {_value_text(values)}")
            return ()
        found = [self.source(value, f"datasets[{place}]") for place, value in enumerate(values)]
        return tuple(source for source in found if source is not None)

    def source(self, value: object, where: str) -> DataSource | None:
        """One of them, or None if it lacks what it can't be without."""
        if not isinstance(value, Mapping):
            self.wrong.append(f"{where} must have keys and values; got {_value_text(value)}")
            return None
        fields = self.section(value, f"{where}.", keys.SOURCE)
        missing = [key for key in ("path", "type") if key not in value]
        if missing:
            self.wrong.append(f"{where}.{missing[0]} is missing")
        if not fields.keys() >= {"path", "type"}:
            return None
        path = None if fields["path"] == _BUILTIN_DATA else Path(fields["path"]).expanduser()
        kind = "cpt" if fields["type"] == "cpt" else "sft"
        return DataSource(**{**fields, "path": path, "type": kind})


def _unknown(path: str, siblings: list[str]) -> str:
    """What to say of a key that there is not: what it may be meant for, or where it belongs."""
    if path in NO_USE:
        return f"{path} has no use here: {NO_USE[path]}"
    name = path.rpartition(".")[2]
    elsewhere = [
        f"{section}.{name}" if section else name
        for section, known in {**SECTIONS, "": keys.TOP}.items()
        if name in known or any(name in key.also for key in known.values())
    ]
    if elsewhere:
        return f"{path} is no key; did you mean {elsewhere[0]}?"
    near = nearest(name, siblings)
    if near:
        return f"{path} is no key; did you mean {path.removesuffix(name)}{near}?"
    return f"{path} is no key; there are {', '.join(siblings)}"


def _value_text(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
