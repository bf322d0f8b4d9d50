"""Reads earlier outputs of `erg analyze` or of the original, as entries of a comparison.

The original has its own FLOPs, peak and nodes, under the same keys as ours. So its MFU is listed
under "the original's", which our documents also have, in `original_count`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.compare.entry import Entry, SourceEntries, Wanted, facts_of
from ergmeter.errors import FormatError, UsageError
from ergmeter.metrics.definitions.compute import MFU
from ergmeter.neuron.metrics import COMPARED, JSON_NAMES, NKI, SCORE, UNITS
from ergmeter.neuron.mfu import PEAK_TFLOP_PER_S_PER_NODE, impossible_mfu, impossible_score
from ergmeter.records import Missing, Reading, Result

if TYPE_CHECKING:
    from collections.abc import Sequence

THEIRS = "the original's"  # its count, in place of a convention
_KEYS = {JSON_NAMES[key].name: key for key in COMPARED}
METRICS = tuple(_KEYS)
_BEGINNING_BYTES = 1 << 14
_INPUTS = ("batch_size", "sequence_length", "num_nodes", "hardware_backend")
_FACTORS = ("mfu_improvement", "throughput_improvement", "loss_improvement", "convergence_rate")


@dataclass(frozen=True)
class EarlierOutput:
    """The document of an earlier analysis."""

    path: str
    document: dict[str, Any]

    @property
    def is_original(self) -> bool:
        """True if the original wrote it, or `erg analyze --compat` did."""
        return "format" not in self.document or bool(self.document.get("compat"))

    @property
    def mfu_by_convention(self) -> dict[str, float]:
        """MFU in percent under each convention it has."""
        if self.is_original:
            values = {THEIRS: _number(self.document, "mfu_percent")}
        else:
            conventions = _part(self.document, "conventions")
            values = {name: _number(conventions, name, "mfu_percent") for name in conventions}
            values[THEIRS] = _number(self.document, "original_count", "mfu_percent")
        return {name: value for name, value in values.items() if value is not None}

    @property
    def convention(self) -> str:
        """The convention of its `mfu_percent`."""
        return THEIRS if self.is_original else str(self.document.get("convention"))

    @property
    def inputs(self) -> dict[str, Any]:
        """The inputs; outputs with equal inputs are repeats."""
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
        """The peak that MFU is relative to, in TFLOP/s."""
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
    def has_score(self) -> bool:
        """True if it has a score."""
        return isinstance(self.entry.figures[SCORE], Reading)

    @property
    def score_base(self) -> tuple[float | None, float | None]:
        """The score's baseline: MFU in percent and sequences/s."""
        parts = _part(self.document, "training_score_breakdown")
        return _number(parts, "base_mfu"), _number(parts, "base_throughput")

    @property
    def score_offset(self) -> float | None:
        """The offset added to the NKI ratio; derived from the factors if not recorded."""
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
        """Its inputs as facts, also by a ledger's names, and its metrics as readings by key."""
        facts, lora = self.inputs, _part(self.document, "lora")
        facts |= {
            "model": facts["config_sha256"] or facts["model_config"],
            "device": facts["hardware_backend"],
            "seq_len": facts["sequence_length"],
            "steps": _number(_part(self.document, "log_metrics"), "steps", "count"),
            "precision": _part(self.document, "peak").get("dtype"),
            "convention": self.convention,
            "score_offset": self.score_offset,
        }
        if facts.pop("lora") is not None:
            facts["tuning"] = "lora" if lora else "full"
            facts |= {"lora_r": lora.get("r"), "lora_targets": lora.get("targets")} if lora else {}
        facts["base_mfu"], facts["base_throughput"] = self.score_base
        figures = {key: self._figure(name, key) for name, key in _KEYS.items()}
        return Entry(self.path, self.path, facts_of(facts), figures, kind="analysis")

    def _figure(self, name: str, key: str) -> Result:
        at = ("nki_analysis", "summary", name) if key == NKI else (name,)
        value, scale = _number(self.document, *at), JSON_NAMES[key].scale
        if value is None:
            reason = _part(self.document, "missing").get(name)
            return Missing(str(reason or "the output does not hold it"))
        origin = _part(_part(self.document, "obtained"), name)
        low, high = (_number(origin, end) for end in ("low", "high"))
        return Reading(
            value / scale, UNITS[key], "reported",
            None if low is None else low / scale, None if high is None else high / scale,
            note=self.convention if key == MFU else str(origin.get("note") or ""),
            impossible=self._wrong.get(key, ""),
        )  # fmt: skip

    @property
    def _wrong(self) -> dict[str, str]:
        """Why MFU and score are impossible. Older outputs do not record it."""
        mfu = _number(self.document, "mfu_percent")
        if mfu is None:
            return {}
        own = str(_part(self.document, "impossible").get("mfu_percent") or "")
        why = own or impossible_mfu(mfu)
        return {MFU: why, SCORE: impossible_score(why)}

    def impossible(self, metric: str) -> str:
        """Why a metric cannot be right; "" where it can."""
        return self._wrong.get(_KEYS[metric], "")

    def value(self, metric: str, *, convention: str | None) -> float | None:
        """One of the metrics, to compute with; MFU under a convention. None if it is impossible."""
        if self.impossible(metric):
            return None
        if metric == "mfu_percent":
            return self.mfu_by_convention.get(convention) if convention else None
        return self.entry.value(_KEYS[metric])

    def summary(self, convention: str | None) -> dict[str, Any]:
        """Its metrics as JSON, and why one is impossible."""
        return {
            "path": self.path,
            "original": self.is_original,
            **{name: self.value(name, convention=convention) for name in METRICS},
            "impossible": {name: why for name in METRICS if (why := self.impossible(name))},
        }


def read_outputs(paths: Sequence[str]) -> list[EarlierOutput]:
    """Reads documents of `erg analyze` or of the original."""
    if len(paths) < 2:
        raise UsageError(f"--compare takes two or more earlier outputs; got {len(paths)}")
    resolved: set[Path] = set()
    for path in paths:
        if Path(path).resolve() in resolved:
            raise UsageError(f"--compare: {path} is given twice; a repeat is another run's output")
        resolved.add(Path(path).resolve())
    return [EarlierOutput(path, _read(path)) for path in paths]


def entry_of(path: str) -> Entry:
    """Reads a document of `erg analyze` or of the original as an entry of a comparison."""
    return EarlierOutput(path, _read(path)).entry


class AnalysisSource:
    """Outputs of `erg analyze` or of the original, as a source of entries."""

    def recognises(self, path: Path) -> bool:
        """True if the file is such an output, by its first keys."""
        if not path.is_file() or path.suffix != ".json":
            return False
        with path.open("rb") as file:
            return b'"mfu_percent"' in file.read(_BEGINNING_BYTES)

    def read(self, path: Path, wanted: Wanted) -> SourceEntries:  # noqa: ARG002  it has all
        """The entry of the output. FormatError if it is damaged."""
        return SourceEntries((entry_of(str(path)),))


def _read(path: str) -> dict[str, Any]:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file; --compare takes earlier outputs") from error
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"{path} can't be read: {why}; --compare takes earlier outputs") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(document, dict) or "mfu_percent" not in document:
        raise FormatError(f"{path} is no output of erg analyze: it has no mfu_percent")
    mfu = document["mfu_percent"]
    if mfu is not None and _number(document, "mfu_percent") is None:
        raise FormatError(f"{path}: mfu_percent must be a number or null; got {mfu!r}")
    return document


def _part(document: dict[str, Any], name: str) -> dict[str, Any]:
    """An object inside another; an empty one where there is none."""
    value = document.get(name)
    return value if isinstance(value, dict) else {}


def _list(document: dict[str, Any], name: str) -> list[Any]:
    """A list inside an object; an empty one where there is none."""
    value = document.get(name)
    return value if isinstance(value, list) else []


def _number(document: dict[str, Any], *keys: str) -> float | None:
    """The number under a path of keys, if there is one."""
    for name in keys[:-1]:
        document = _part(document, name)
    value = document.get(keys[-1])
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
