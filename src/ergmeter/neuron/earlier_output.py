"""Reads earlier outputs of `erg analyze` or of nki-llama's script (the original), to compare them.

The original uses its own FLOPs, peak and nodes under the same keys as ours. So its MFU is listed
under the convention "the original's", which our documents have too, in `original_count`. Outputs
are compared under a convention that all of them have. Outputs with the same inputs are repeats.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ergmeter.compare.comparison import Comparison, compare
from ergmeter.compare.entry import Entry, Group, SourceEntries, Wanted, facts_of
from ergmeter.compare.grouping import why_other_terms
from ergmeter.compare.pairing import CompareOptions
from ergmeter.errors import FormatError, UsageError
from ergmeter.metrics.catalog import refusal
from ergmeter.metrics.definitions.compute import MFU
from ergmeter.neuron.mfu import PEAK_TFLOP_PER_S_PER_NODE, impossible_mfu, impossible_score
from ergmeter.neuron.score import COMPARED, JSON_NAMES, NKI, SCORE, UNITS, with_rate
from ergmeter.records import BASES, Basis, Missing, Reading, Result, mapped

THEIRS = "the original's"  # its count, in place of a convention
_KEYS = {JSON_NAMES[key].name: key for key in COMPARED}
_BEGINNING_BYTES = 1 << 14
_INPUTS = ("batch_size", "sequence_length", "num_nodes", "hardware_backend")
# Facts that define groups; inputs that follow from other inputs are left out.
_GROUPED_BY = (
    *("counted_by", "model", "precision", "tuning", "lora_r", "lora_targets"),
    *("batch_size", "seq_len"),
    *("device", "num_nodes", "devices_per_node", "peak_tflops_per_second", "neuronxcc"),
)
_NOT_STATED = "not stated"
_FACTORS = ("mfu_improvement", "throughput_improvement", "loss_improvement", "convergence_rate")


@dataclass(frozen=True)
class EarlierOutput:
    """The JSON document of an earlier analysis, by `erg analyze` or the original script."""

    path: str
    document: dict[str, Any]

    @property
    def is_original(self) -> bool:
        """True if the original script or `erg analyze --compat` wrote it."""
        return "format" not in self.document or bool(self.document.get("compat"))

    @property
    def mfu_by_convention(self) -> dict[str, float]:
        """MFU in percent under each convention that the document has."""
        if self.is_original:
            values = {THEIRS: _number(self.document, "mfu_percent")}
        else:
            conventions = _part(self.document, "conventions")
            values = {name: _number(conventions, name, "mfu_percent") for name in conventions}
            values[THEIRS] = _number(self.document, "original_count", "mfu_percent")
        return {name: value for name, value in values.items() if value is not None}

    @property
    def convention(self) -> str:
        """The convention of the document's `mfu_percent`."""
        return THEIRS if self.is_original else str(self.document.get("convention"))

    @property
    def inputs(self) -> dict[str, Any]:
        """The inputs of the analysis; outputs with equal inputs are repeats."""
        document = self.document
        versions = _part(document, "versions")
        identity = {name: document.get(name) for name in _INPUTS}
        identity["counted by"] = "the original" if self.is_original else "erg analyze"
        identity["peak_tflops_per_second"] = self._peak()
        checksum = _part(versions, "model").get("config_sha256")
        identity["config_sha256"] = checksum
        identity["model_config"] = None if checksum else document.get("model_config")
        compilers = _list(versions, "neuronxcc") or self._compilers()
        identity["neuronxcc"] = ", ".join(map(str, compilers)) or None
        identity["lora"] = document["lora"] or "none" if "lora" in document else None
        identity["devices_per_node"] = document.get("devices_per_node")
        return identity

    def _peak(self) -> float | None:
        """Return the peak that MFU is relative to, in TFLOP/s of all nodes."""
        if not self.is_original:
            return _number(self.document, "peak", "tflops_per_second")
        each = PEAK_TFLOP_PER_S_PER_NODE.get(str(self.document.get("hardware_backend")))
        nodes = _number(self.document, "num_nodes")
        return None if each is None or nodes is None else each * nodes

    def _compilers(self) -> list[str]:
        files = _list(_part(self.document, "nki_analysis"), "per_file_metrics")
        named = {file.get("neuronxcc_version") for file in files if isinstance(file, dict)}
        return sorted(str(name) for name in named if name)

    @property
    def score_offset(self) -> float | None:
        """The score's offset to the NKI ratio; computed from the factors if not recorded."""
        parts = _part(self.document, "training_score_breakdown")
        recorded = _number(parts, "score_offset")
        if recorded is not None:
            return recorded
        numbers = [factor for name in _FACTORS if (factor := _number(parts, name))]
        score, ratio = _number(self.document, "training_score"), _number(parts, "nki_flop_ratio")
        if len(numbers) < len(_FACTORS) or score is None or ratio is None:
            return None
        return round(score / math.prod(numbers) - ratio, 6)

    @cached_property
    def entry(self) -> Entry:
        """The output as an entry: its inputs as facts, its metrics by key."""
        facts, lora = self.inputs, _part(self.document, "lora")
        checksum = facts["config_sha256"]
        facts |= {
            "counted_by": facts.pop("counted by"),
            "model": str(checksum)[:12] if checksum else facts["model_config"],
            "device": facts["hardware_backend"],
            "seq_len": facts["sequence_length"],
            "steps": _number(_part(self.document, "log_metrics"), "steps", "count"),
            "precision": _part(self.document, "peak").get("dtype"),
            "convention": self.convention,
        }
        if facts.pop("lora") is not None:
            facts["tuning"] = "lora" if lora else "full"
            facts |= {"lora_r": lora.get("r"), "lora_targets": lora.get("targets")} if lora else {}
        figures = {key: self._figure(name, key) for name, key in _KEYS.items()}
        if length := _number(self.document, "sequence_length"):
            figures = with_rate(figures, "tokens", length, f"{length:.0f} tokens a sequence")
        if isinstance(figures[SCORE], Reading):
            base = _part(self.document, "training_score_breakdown")
            facts |= {name: _number(base, name) for name in ("base_mfu", "base_throughput")}
            facts |= {"score_offset": self.score_offset, "score_convention": self.convention}
        mfu = figures[MFU]
        wrong = isinstance(mfu, Reading) and mfu.impossible and f"{self.path}: MFU {refusal(mfu)}"
        cautions = (wrong,) if wrong else ()
        return Entry(
            self.path, self.path, facts_of(facts), figures, kind="analysis", cautions=cautions
        )

    def entry_under(self, convention: str | None) -> Entry:
        """Return the entry with MFU under a convention; None: MFU is missing, none is common."""
        own, entry = self.entry.figures[MFU], self.entry
        if convention == self.convention or not isinstance(own, Reading) or own.impossible:
            mfu: Result = own
        elif convention is not None and convention in self.mfu_by_convention:
            value = self.mfu_by_convention[convention] / 100
            ratio = value / own.value if own.value else 1.0
            mfu = replace(mapped(own, lambda frac: frac * ratio), value=value, note=convention)
        else:
            mfu = Missing("the outputs have no convention in common")
        facts = {**entry.facts, **facts_of({"convention": convention})}
        if convention is None:
            facts.pop("convention", None)
        return replace(entry, figures={**entry.figures, MFU: mfu}, facts=facts)

    def _figure(self, name: str, key: str) -> Result:
        at = ("nki_analysis", "summary", name) if key == NKI else (name,)
        value, scale = _number(self.document, *at), JSON_NAMES[key].scale
        if value is None:
            reason = _part(self.document, "missing").get(name)
            return Missing(str(reason or "the output does not have it"))
        origin = _part(_part(self.document, "obtained"), name)
        low, high = (_number(origin, end) for end in ("low", "high"))
        basis: Basis = next((each for each in BASES if each == origin.get("basis")), "reported")
        return Reading(
            value / scale, UNITS[key], basis,
            None if low is None else low / scale, None if high is None else high / scale,
            note=str(origin.get("note") or (self.convention if key == MFU else "")),
            impossible=self.impossible.get(key, ""),
        )  # fmt: skip

    @property
    def impossible(self) -> dict[str, str]:
        """Why MFU and score are impossible, by key; "" if possible. Computed for older outputs."""
        mfu = _number(self.document, "mfu_percent")
        if mfu is None:
            return {}
        own = str(_part(self.document, "impossible").get("mfu_percent") or "")
        why = own or impossible_mfu(mfu)
        return {MFU: why, SCORE: impossible_score(why)}


def read_outputs(paths: Sequence[str]) -> list[EarlierOutput]:
    """Return the outputs of `erg analyze` or the original script at these paths, two or more."""
    if len(paths) < 2:
        raise UsageError(f"--compare needs two or more earlier outputs; got {len(paths)}")
    resolved: set[Path] = set()
    for path in paths:
        if Path(path).resolve() in resolved:
            raise UsageError(f"--compare: {path} is given twice; a repeat is another run's output")
        resolved.add(Path(path).resolve())
    return [EarlierOutput(path, _read(path)) for path in paths]


def compare_outputs(outputs: Sequence[EarlierOutput]) -> Comparison:
    """Compare outputs under a convention that all have; those with equal inputs are repeats."""
    convention, notes = _common_convention(outputs)
    notes += _about_counts(outputs)
    if len({json.dumps(output.inputs) for output in outputs}) == 1:
        notes.append("all outputs have the same inputs: they are repeats of one run")
    entries = [output.entry_under(convention) for output in outputs]
    by = _group_columns(entries)
    unstated = dict.fromkeys(by, _NOT_STATED)
    entries = [replace(e, facts={**unstated, **e.facts}, remarks=tuple(notes)) for e in entries]
    present = [key for key in COMPARED if any(isinstance(e.figures[key], Reading) for e in entries)]
    options = CompareOptions(by, metrics=tuple(present or COMPARED))
    return compare(SourceEntries(tuple(entries)), options)


def with_column_names(comparison: Comparison) -> Comparison:
    """Return the comparison with groups named by column and value, such as `num_nodes=4`."""

    def named(group: Group) -> Group:
        facts = group.entries[0].facts
        return replace(group, name=", ".join(f"{by}={facts[by]}" for by in comparison.group_by))

    pairs = [replace(pair, new=named(pair.new), ref=named(pair.ref)) for pair in comparison.pairs]
    return replace(comparison, groups=tuple(map(named, comparison.groups)), pairs=tuple(pairs))


def _group_columns(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Return the facts that define the groups: they differ, or only some outputs have them."""

    def groups(names: list[str]) -> int:
        return len({tuple(entry.facts.get(name) for name in names) for entry in entries})

    stated = {name: {e.facts[name] for e in entries if name in e.facts} for name in _GROUPED_BY}
    by = [name for name, values in stated.items() if len(values) > 1]
    for name in _GROUPED_BY:
        if groups([*by, name]) > groups(by):
            by.append(name)
    return tuple(by) or ("device",)


def comparison_keys(comparison: Comparison, outputs: Sequence[EarlierOutput]) -> dict[str, Any]:
    """Return the convention and, for each group, its inputs, changes, spreads and outputs, as JSON.

    `changed` and `not_comparable` compare with the group before.
    """
    by_path = {output.path: output for output in outputs}
    groups = []
    before = comparison.groups[0]
    for group in comparison.groups:
        old, inputs = (by_path[side.entries[0].source].inputs for side in (before, group))
        is_first = group is before
        groups.append(
            {
                "inputs": inputs,
                "changed": {
                    name: [old[name], new]
                    for name, new in inputs.items()
                    if new != old[name] and None not in (new, old[name])
                },
                "not_comparable": [
                    JSON_NAMES[m.key].name
                    for m in comparison.measures
                    if not is_first and why_other_terms(before, group, m)
                ],
                "metrics": {
                    JSON_NAMES[m.key].name: _spread(values)
                    for m in comparison.measures
                    if (values := _values(group.entries, m.key))
                    and not why_other_terms(group, group, m)
                },
                "outputs": [_output_keys(by_path[entry.source], entry) for entry in group.entries],
            }
        )
        before = group
    return {"convention": _common_convention(outputs)[0], "groups": groups}


def _output_keys(output: EarlierOutput, entry: Entry) -> dict[str, Any]:
    reasons = {name: output.impossible.get(key) for name, key in _KEYS.items()}
    return {
        "path": output.path,
        "original": output.is_original,
        **{name: _json_value(entry, key) for name, key in _KEYS.items()},
        "impossible": {name: why for name, why in reasons.items() if why},
    }


def _json_value(entry: Entry, key: str) -> float | None:
    value = entry.value(key)
    return None if value is None else value * JSON_NAMES[key].scale


def _values(entries: Sequence[Entry], key: str) -> list[float]:
    values = (_json_value(entry, key) for entry in entries)
    return [value for value in values if value is not None]


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean and spread over repeats; the standard deviation is the sample's (n - 1)."""
    return {
        "count": len(values),
        "mean": statistics.fmean(values),
        "standard_deviation": statistics.stdev(values) if len(values) > 1 else None,
        "min": min(values),
        "max": max(values),
    }


def _common_convention(outputs: Sequence[EarlierOutput]) -> tuple[str | None, list[str]]:
    """Return the convention to compare MFUs under (None if none is common), and a note."""
    own = {output.convention for output in outputs}
    if len(own) == 1:
        return min(own), [f"MFU is under {min(own)}"]
    common = set.intersection(*(set(output.mfu_by_convention) for output in outputs))
    listed = " and ".join(sorted(own))
    if not common:
        return None, [f"MFU is not compared: the outputs have no convention in common ({listed})"]
    chosen = next((o.convention for o in outputs if o.convention in common), min(common))
    return chosen, [f"the outputs' own MFUs are under {listed}; all are compared under {chosen}"]


def _about_counts(outputs: Sequence[EarlierOutput]) -> list[str]:
    if len({output.is_original for output in outputs}) < 2:
        return []
    has_lora = any(output.inputs["lora"] not in (None, "none") for output in outputs)
    lora = ", LoRA as full training" if has_lora else ""
    return [
        f"the original counts every model as a dense Llama{lora}, and its peak is that of whole"
        " instances",
        "NKI ratios of the original count every computation once, ours what runs: they are not"
        " comparable",
    ]


def entry_of(path: str) -> Entry:
    """Return an output of `erg analyze` or the original script as an entry of a comparison."""
    return EarlierOutput(path, _read(path)).entry


class AnalysisSource:
    """Reads outputs of `erg analyze` or the original script for comparisons."""

    def recognises(self, path: Path) -> bool:
        """True if the file is an output of an analysis: `mfu_percent` is among its first keys."""
        if not path.is_file() or path.suffix != ".json":
            return False
        with path.open("rb") as file:
            return b'"mfu_percent"' in file.read(_BEGINNING_BYTES)

    def read(self, path: Path, wanted: Wanted) -> SourceEntries:  # noqa: ARG002  it has all
        """Return the entry of the output. Raises FormatError if it is damaged."""
        return SourceEntries((entry_of(str(path)),))


def _read(path: str) -> dict[str, Any]:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        why = f"{path} can't be read: {error.strerror or error}"
        raise FormatError(f"{why}; --compare takes earlier outputs") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(document, dict) or "mfu_percent" not in document:
        raise FormatError(f"{path} is not an output of erg analyze: it has no mfu_percent")
    mfu = document["mfu_percent"]
    if mfu is not None and _number(document, "mfu_percent") is None:
        raise FormatError(f"{path}: mfu_percent must be a number or null; got {mfu!r}")
    return document


def _part(document: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the object under a key; empty if there is none."""
    value = document.get(name)
    return value if isinstance(value, dict) else {}


def _list(document: dict[str, Any], name: str) -> list[Any]:
    """Return the list under a key; empty if there is none."""
    value = document.get(name)
    return value if isinstance(value, list) else []


def _number(document: dict[str, Any], *keys: str) -> float | None:
    """Return the number under a path of keys; None if there is none."""
    for name in keys[:-1]:
        document = _part(document, name)
    value = document.get(keys[-1])
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
