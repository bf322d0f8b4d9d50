"""Earlier outputs side by side: what changed between versions, and how far repeats lie apart.

The trap: two MFUs under two counts. An output of the original counts 6 % more FLOPs for the same
job than ours by default, and calls TFLOP of a sequence TFLOP per second. So figures are brought to
one convention, where every output has it, and not compared where none is common. Runs with the same
inputs are repeats: they get a mean and a spread, and a change within that spread is no change.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from ergmeter.errors import FormatError, UsageError
from ergmeter.neuron.figures import ORIGINAL

if TYPE_CHECKING:
    from collections.abc import Sequence

METRICS = ("mfu_percent", "throughput_seq_per_sec", "overall_nki_ratio", "training_score")
_INPUTS = ("batch_size", "sequence_length", "num_nodes", "hardware_backend")


@dataclass(frozen=True)
class Output:
    """One earlier document."""

    path: str
    document: dict[str, Any]

    @property
    def is_original(self) -> bool:
        """Whether the original wrote it, or we did in its manner."""
        return "format" not in self.document or bool(self.document.get("compat"))

    @property
    def mfu_by_convention(self) -> dict[str, float]:
        """MFU in percent under each convention it has."""
        if self.is_original:
            found = {ORIGINAL: self.document.get("mfu_percent")}
        else:
            conventions = _part(self.document, "conventions")
            found = {name: _part(conventions, name).get("mfu_percent") for name in conventions}
        return {name: float(value) for name, value in found.items() if _is_number(value)}

    @property
    def convention(self) -> str:
        """The one its `mfu_percent` is under."""
        return ORIGINAL if self.is_original else str(self.document.get("convention"))

    @property
    def inputs(self) -> dict[str, Any]:
        """What makes two outputs repeats of one run."""
        document = self.document
        versions = _part(document, "versions")
        found = {name: document.get(name) for name in _INPUTS}
        checksum = _part(versions, "model").get("config_sha256")
        found["config_sha256"] = checksum
        found["model_config"] = None if checksum else document.get("model_config")
        compilers = _list(versions, "neuronxcc") or self._compilers()
        found["neuronxcc"] = ", ".join(map(str, compilers)) or None
        found["lora"] = json.dumps(document["lora"] or "none") if "lora" in document else None
        found["devices_per_node"] = document.get("devices_per_node")
        return found

    def _compilers(self) -> list[str]:
        files = _list(_part(self.document, "nki_analysis"), "per_file_metrics")
        named = {file.get("neuronxcc_version") for file in files if isinstance(file, dict)}
        return sorted(str(name) for name in named if name)

    @property
    def score_offset(self) -> float | None:
        """What the NKI ratio was added to; found from the factors where it is not recorded."""
        parts = _part(self.document, "training_score_breakdown")
        recorded = parts.get("score_offset")
        if _is_number(recorded):
            return float(recorded)
        names = (
            "mfu_improvement",
            "throughput_improvement",
            "loss_improvement",
            "convergence_rate",
        )
        score, factors = self.document.get("training_score"), [parts.get(name) for name in names]
        known = [float(factor) for factor in factors if _is_number(factor) and factor]
        ratio = parts.get("nki_flop_ratio")
        if len(known) < len(names) or not _is_number(score) or not _is_number(ratio):
            return None
        return round(float(score) / math.prod(known) - float(ratio), 6)

    def value(self, metric: str, *, convention: str | None) -> float | None:
        """One of the metrics; MFU under a convention, or None."""
        if metric == "mfu_percent":
            return self.mfu_by_convention.get(convention) if convention else None
        if metric == "overall_nki_ratio":
            found = _part(_part(self.document, "nki_analysis"), "summary").get(metric)
        else:
            found = self.document.get(metric)
        return float(found) if _is_number(found) else None


@dataclass(frozen=True, slots=True)
class Spread:
    """A metric over repeats."""

    count: int
    mean: float
    deviation: float | None  # of the sample (n - 1); None for one run
    least: float
    most: float


@dataclass(frozen=True)
class Group:
    """Outputs with the same inputs."""

    outputs: tuple[Output, ...]
    inputs: dict[str, Any]
    changed: dict[str, tuple[Any, Any]]  # against the group before, where both are known
    spreads: dict[str, Spread]


@dataclass(frozen=True)
class Comparison:
    """Groups in the order in which their first outputs were given."""

    groups: tuple[Group, ...]
    convention: str | None
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Everything, for programs."""
        return {
            "convention": self.convention,
            "notes": list(self.notes),
            "groups": [
                {
                    "inputs": group.inputs,
                    "changed": {name: list(pair) for name, pair in group.changed.items()},
                    "metrics": {
                        name: {
                            "count": spread.count,
                            "mean": spread.mean,
                            "standard_deviation": spread.deviation,
                            "min": spread.least,
                            "max": spread.most,
                        }
                        for name, spread in group.spreads.items()
                    },
                    "outputs": [
                        {
                            "path": output.path,
                            "original": output.is_original,
                            **{
                                name: output.value(name, convention=self.convention)
                                for name in METRICS
                            },
                        }
                        for output in group.outputs
                    ],
                }
                for group in self.groups
            ],
        }


def read_outputs(paths: Sequence[str]) -> list[Output]:
    """Documents of ours or of the original."""
    if len(paths) < 2:
        raise UsageError(f"--compare takes two or more earlier outputs; got {len(paths)}")
    seen: set[Path] = set()
    for path in paths:
        if Path(path).resolve() in seen:
            raise UsageError(f"--compare: {path} is given twice; a repeat is another run's output")
        seen.add(Path(path).resolve())
    return [Output(path, _read(path)) for path in paths]


def _read(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file; --compare takes earlier outputs") from error
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"{path} can't be read: {why}; --compare takes earlier outputs") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(found, dict) or "mfu_percent" not in found:
        raise FormatError(f"{path} is no output of erg analyze: it has no mfu_percent")
    mfu = found["mfu_percent"]
    if mfu is not None and not _is_number(mfu):
        raise FormatError(f"{path}: mfu_percent must be a number or null; got {mfu!r}")
    return found


def compare(outputs: Sequence[Output]) -> Comparison:
    """The outputs in groups of repeats, each against the group before."""
    convention, notes = _common_convention(outputs)
    offsets = {offset for output in outputs if (offset := output.score_offset) is not None}
    if len(offsets) > 1:
        said = " and ".join(f"{offset:g}" for offset in sorted(offsets))
        notes.append(f"the scores were made with offsets {said}: they are not comparable")
    counts = {output.convention for output in outputs if output.score_offset is not None}
    if len(counts) > 1:
        said = " and ".join(sorted(counts))
        notes.append(f"the scores hold MFUs under {said}: they are not comparable")
    if len({output.is_original for output in outputs}) > 1:
        notes.append(
            "NKI ratios of the original count every computation once, ours what runs: a ratio may"
            " differ for the same graphs"
        )
    grouped: dict[str, list[Output]] = {}
    for output in outputs:
        grouped.setdefault(json.dumps(output.inputs, sort_keys=True), []).append(output)
    groups: list[Group] = []
    for members in grouped.values():
        inputs = members[0].inputs
        before = groups[-1].inputs if groups else inputs
        changed = {
            name: (before[name], value)
            for name, value in inputs.items()
            if value != before[name] and value is not None and before[name] is not None
        }
        groups.append(Group(tuple(members), inputs, changed, _spreads(members, convention)))
    return Comparison(tuple(groups), convention, tuple(notes))


def _common_convention(outputs: Sequence[Output]) -> tuple[str | None, list[str]]:
    own = {output.convention for output in outputs}
    if len(own) == 1:
        return own.pop(), []
    common = set.intersection(*(set(output.mfu_by_convention) for output in outputs))
    if not common:
        said = ", ".join(sorted(own))
        return None, [f"MFU is not compared: the outputs have no convention in common ({said})"]
    chosen = next((o.convention for o in outputs if o.convention in common), min(common))
    said = " and ".join(sorted(own))
    return chosen, [f"the outputs' own MFUs are under {said}; all are shown under {chosen}"]


def _spreads(outputs: Sequence[Output], convention: str | None) -> dict[str, Spread]:
    found = {}
    for name in METRICS:
        values = [
            value
            for output in outputs
            if (value := output.value(name, convention=convention)) is not None
        ]
        if values:
            deviation = statistics.stdev(values) if len(values) > 1 else None
            mean = statistics.fmean(values)
            found[name] = Spread(len(values), mean, deviation, min(values), max(values))
    return found


def _part(document: dict[str, Any], name: str) -> dict[str, Any]:
    """An object inside another; an empty one where there is none."""
    found = document.get(name)
    return found if isinstance(found, dict) else {}


def _list(document: dict[str, Any], name: str) -> list[Any]:
    """A list inside an object; an empty one where there is none."""
    found = document.get(name)
    return found if isinstance(found, list) else []


def _is_number(value: Any) -> TypeGuard[float]:  # noqa: ANN401  whatever the file holds
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
