"""One earlier output of ours or of the original: its figures, and what they were made from.

The trap: two documents with the same keys that are not of the same count. The original has its own
FLOPs, its own peak and its own nodes, so its MFU is under no convention of ours: it is under "the
original's", which our documents have as well, in `original_count`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from ergmeter.errors import FormatError, UsageError
from ergmeter.neuron.original import PEAK_TFLOP_PER_S_PER_NODE, impossible_mfu

if TYPE_CHECKING:
    from collections.abc import Sequence

THEIRS = "the original's"  # its count, in place of a convention
_INPUTS = ("batch_size", "sequence_length", "num_nodes", "hardware_backend")


@dataclass(frozen=True)
class EarlierOutput:
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
            found = {THEIRS: self.document.get("mfu_percent")}
        else:
            conventions = _part(self.document, "conventions")
            found = {name: _part(conventions, name).get("mfu_percent") for name in conventions}
            found[THEIRS] = _part(self.document, "original_count").get("mfu_percent")
        return {name: float(value) for name, value in found.items() if _is_number(value)}

    @property
    def convention(self) -> str:
        """The one its `mfu_percent` is under."""
        return THEIRS if self.is_original else str(self.document.get("convention"))

    @property
    def inputs(self) -> dict[str, Any]:
        """What makes two outputs repeats of one run."""
        document = self.document
        versions = _part(document, "versions")
        found = {name: document.get(name) for name in _INPUTS}
        found["counted by"] = "the original" if self.is_original else "erg analyze"
        found["peak_tflops_per_second"] = self._peak()
        checksum = _part(versions, "model").get("config_sha256")
        found["config_sha256"] = checksum
        found["model_config"] = None if checksum else document.get("model_config")
        compilers = _list(versions, "neuronxcc") or self._compilers()
        found["neuronxcc"] = ", ".join(map(str, compilers)) or None
        found["lora"] = document["lora"] or "none" if "lora" in document else None
        found["devices_per_node"] = document.get("devices_per_node")
        return found

    def _peak(self) -> float | None:
        """TFLOP/s that MFU is a share of."""
        document = self.document
        if not self.is_original:
            found = _part(document, "peak").get("tflops_per_second")
            return float(found) if _is_number(found) else None
        each = PEAK_TFLOP_PER_S_PER_NODE.get(str(document.get("hardware_backend")))
        nodes = document.get("num_nodes")
        return each * nodes if each is not None and _is_number(nodes) else None

    def _compilers(self) -> list[str]:
        files = _list(_part(self.document, "nki_analysis"), "per_file_metrics")
        named = {file.get("neuronxcc_version") for file in files if isinstance(file, dict)}
        return sorted(str(name) for name in named if name)

    @property
    def has_score(self) -> bool:
        """Whether it has a score."""
        return _is_number(self.document.get("training_score"))

    @property
    def score_base(self) -> tuple[float | None, float | None]:
        """The MFU in percent and the sequences/s that its score is held against."""
        parts = _part(self.document, "training_score_breakdown")
        mfu, rate = parts.get("base_mfu"), parts.get("base_throughput")
        return (
            float(mfu) if _is_number(mfu) else None,
            float(rate) if _is_number(rate) else None,
        )

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

    def impossible(self, metric: str) -> str:
        """Why a metric cannot be right; "" where it can. Older outputs do not record it."""
        mfu = self.document.get("mfu_percent")
        own = str(_part(self.document, "impossible").get("mfu_percent") or "")
        found = impossible_mfu(float(mfu), why=own) if _is_number(mfu) else {}
        return found.get(metric, "")

    def value(self, metric: str, *, convention: str | None) -> float | None:
        """One of the metrics, to compute with; MFU under a convention. None if it is impossible."""
        if self.impossible(metric):
            return None
        if metric == "mfu_percent":
            return self.mfu_by_convention.get(convention) if convention else None
        if metric == "overall_nki_ratio":
            found = _part(_part(self.document, "nki_analysis"), "summary").get(metric)
        else:
            found = self.document.get(metric)
        return float(found) if _is_number(found) else None


def read_outputs(paths: Sequence[str]) -> list[EarlierOutput]:
    """Documents of ours or of the original."""
    if len(paths) < 2:
        raise UsageError(f"--compare takes two or more earlier outputs; got {len(paths)}")
    seen: set[Path] = set()
    for path in paths:
        if Path(path).resolve() in seen:
            raise UsageError(f"--compare: {path} is given twice; a repeat is another run's output")
        seen.add(Path(path).resolve())
    return [EarlierOutput(path, _read(path)) for path in paths]


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
