"""The metrics of a job as JSON: the original's keys in their order, then what it does not say.

Readers of the original's file find every key where it was. A value that is not known is null, and
`missing` has its reason under the same key.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.flops.conventions import CONVENTIONS
from ergmeter.neuron.figures import ORIGINAL
from ergmeter.neuron.logged import log_document
from ergmeter.neuron.machine import BACKENDS
from ergmeter.neuron.score import REMARK, Score, score_statistics
from ergmeter.records import Missing, Reading
from ergmeter.version import __version__

if TYPE_CHECKING:
    from ergmeter.importers.log import ParsedLog
    from ergmeter.neuron.advice import Finding
    from ergmeter.neuron.cache import Found
    from ergmeter.neuron.figures import Figures
    from ergmeter.neuron.job import Job
    from ergmeter.neuron.kernels import GraphResult, NkiSummary
    from ergmeter.neuron.machine import Machine
    from ergmeter.neuron.pace import Throughput
    from ergmeter.neuron.request import Request

FORMAT = "ergmeter analyze 1"
_TERA = 1e12


@dataclass(frozen=True)
class Parts:
    """What a document is made from; the graphs come last."""

    request: Request
    job: Job
    machine: Machine
    pace: Throughput
    figures: Figures
    log: ParsedLog | None
    found: Found | None = None
    results: tuple[GraphResult, ...] = ()
    summary: NkiSummary | None = None
    findings: tuple[Finding, ...] = ()
    score: Score | str | None = None

    def files(self) -> list[dict[str, Any]]:
        """The graphs one by one."""
        return [_file(result, self) for result in self.results]


def document(parts: Parts) -> dict[str, Any]:
    """Everything."""
    job, found, pace = parts.job, parts.figures, parts.pace
    missing: dict[str, str] = {}
    whole: dict[str, Any] = {
        "model_config": parts.request.model_config,
        "batch_size": job.batch_size,
        "sequence_length": job.seq_len,
        "num_nodes": job.nodes,
        "hardware_backend": parts.machine.backend,
        "throughput_seq_per_sec": pace.seq_per_s,
        "mfu_percent": _percent("mfu_percent", found.mfu, missing),
        "tflops_per_second": _tera(found.flops_per_s),
        "throughput_tflops_per_node": _tera(found.flops_per_s_per_node),
        "seq_per_second_per_node": None if pace.seq_per_s is None else pace.seq_per_s / job.nodes,
        "time_per_batch_seconds": None
        if pace.seq_per_s is None
        else job.batch_size / pace.seq_per_s,
        "nki_analysis": _nki(parts, missing),
    }
    if pace.seq_per_s is None:
        for key, value in whole.items():
            if value is None:
                missing.setdefault(key, pace.said)
    if parts.log is not None:
        whole["log_metrics"] = log_document(parts.log, pace)
    whole |= _score(parts, missing)
    return whole | _beyond(parts, missing)


def _percent(key: str, found: Reading | Missing, missing: dict[str, str]) -> float | None:
    if isinstance(found, Missing):
        missing[key] = found.reason
        return None
    return 100 * found.value


def _tera(flops: float | None) -> float | None:
    return None if flops is None else flops / _TERA


def _nki(parts: Parts, missing: dict[str, str]) -> dict[str, Any]:
    summary = parts.summary
    if summary is None:
        return {"summary": {}}
    ratios = {
        "total_hlo_macs": summary.macs,
        "total_nki_macs": summary.nki_macs,
        "overall_nki_ratio": summary.overall_ratio,
        "average_nki_ratio": summary.average_ratio,
        "min_nki_ratio": summary.least_ratio,
        "max_nki_ratio": summary.most_ratio,
    }
    files = parts.files()
    figures: dict[str, Any] = {
        "total_files": summary.total,
        "successful_analyses": summary.successful,
        "failed_analyses": summary.total - summary.successful,
        **ratios,
        **score_statistics(file.get("training_score") for file in files),
        "ratios_are_over": _ratios_are_over(summary),
        "files_with_nki_macs": summary.graphs_with_nki,
        "files_without_nki_macs": summary.graphs_without_nki,
        "files_without_macs": summary.graphs_without_macs,
        "is_lower_bound": summary.is_lower_bound,
        "weighting": summary.weighting,
        "kernel_calls": summary.calls,
    }
    why = next((one.text for one in parts.findings if one.about == "no_hlo"), None)
    why = why or "no graph that could be read has a matrix product"
    if parts.request.graph_runs is not None and not any(one.runs for one in parts.results):
        why = f"none of the graphs ran, by {parts.request.graph_runs}"
    missing.update({key: why for key, value in ratios.items() if value is None})
    whole: dict[str, Any] = {"summary": figures}
    if parts.request.detailed:
        whole["per_file_metrics"] = files
    return whole | {
        "kernels": summary.kernels,
        "unreadable_kernel_configs": summary.unreadable,
        "not_known": summary.doubts,
        "left_out": parts.found.left_out if parts.found else {},
        "failed": [
            {"module_name": one.module, "file_path": one.path, "error": one.error}
            for one in parts.results
            if one.error is not None
        ],
    }


def _ratios_are_over(summary: NkiSummary) -> str:
    without = summary.graphs_without_nki
    count = summary.graphs_with_nki + without
    graphs = "1 graph that multiplies" if count == 1 else f"{count} graphs that multiply"
    return f"{graphs}, of which {without} {'has' if without == 1 else 'have'} no NKI MACs"


def _file(result: GraphResult, parts: Parts) -> dict[str, Any]:
    """One graph, under the original's names."""
    whole: dict[str, Any] = {
        "status": "success" if result.error is None else "error",
        "file_path": result.path,
        "file_name": result.name,
        "module_name": result.module,
        "neuronxcc_version": result.compiler,
    }
    if result.error is not None:
        # The zeros are the original's, for its readers; they are in no sum here.
        return whole | {"error": result.error, "hlo_macs": 0, "nki_macs": 0, "nki_ratio": 0.0}
    whole |= {
        "hlo_macs": result.macs,
        "nki_macs": result.nki_macs,
        "nki_ratio": result.nki_ratio,
        "is_lower_bound": result.is_lower_bound,
        "runs": result.runs if parts.request.graph_runs is not None else None,
        "kernels": [
            {
                "function": kernel.function,
                "target": kernel.target,
                "macs_state": kernel.state,
                "calls": kernel.calls,
                "macs_per_call": kernel.macs_per_call,
            }
            for kernel in result.kernels
        ],
        "not_known": result.doubts,
    }
    if parts.request.per_file_scores and isinstance(parts.score, Score):
        whole["training_score"] = file_score(replace(parts.score, nki_ratio=result.nki_ratio))
    return whole


def file_score(found: Score) -> dict[str, Any]:
    """A graph's own score: the job's factors with the graph's NKI ratio."""
    return {
        "score": found.value,
        "mfu_improvement": found.mfu_improvement,
        "throughput_improvement": found.throughput_improvement,
        "loss_improvement": found.loss_improvement,
        "convergence_rate": found.convergence_rate,
        "nki_flop_ratio": found.nki_ratio,
    }


def _score(parts: Parts, missing: dict[str, str]) -> dict[str, Any]:
    if not parts.request.calculate_score or parts.score is None:
        return {}
    if isinstance(parts.score, str):
        missing["training_score"] = parts.score
        return {"training_score": None, "training_score_breakdown": None}
    found, base, pace = parts.score, parts.request.baseline, parts.pace
    if found.value is None:
        missing["training_score"] = "the NKI ratio is not known: " + missing.get(
            "overall_nki_ratio", "no graphs"
        )
    mfu = parts.figures.mfu
    return {
        "training_score": found.value,
        "training_score_breakdown": {
            "base_mfu": base.mfu_percent,
            "base_throughput": base.throughput_seq_per_s,
            "achieved_mfu": 100 * mfu.value if isinstance(mfu, Reading) else None,
            "achieved_throughput": pace.seq_per_s,
            "mfu_improvement": found.mfu_improvement,
            "throughput_improvement": found.throughput_improvement,
            "nki_flop_ratio": found.nki_ratio,
            "loss_improvement": found.loss_improvement,
            "convergence_rate": found.convergence_rate,
            "nki_factor": found.nki_factor,
            "score_offset": found.offset,
            "score_without_nki": found.without_nki,
            "remark": REMARK,
        },
    }


def _beyond(parts: Parts, missing: dict[str, str]) -> dict[str, Any]:
    """What the original's document has no key for."""
    found, job, machine = parts.figures, parts.job, parts.machine
    return {
        "format": FORMAT,
        "compat": None,
        "convention": found.convention,
        "convention_formula": CONVENTIONS[found.convention].formula,
        "tflop_per_sequence": found.model_flops / _TERA,
        "hardware_tflop_per_sequence": _tera(found.hardware_flops),
        "hfu_percent": _percent("hfu_percent", found.hfu, missing),
        "mfu_basis": None if isinstance(found.mfu, Missing) else found.mfu.basis,
        "mfu_note": None if isinstance(found.mfu, Missing) else found.mfu.note,
        "throughput_basis": parts.pace.said,
        "conventions": {
            name: {
                "tflop_per_sequence": flops / _TERA,
                "mfu_percent": None
                if name not in found.mfu_by_convention
                else 100 * found.mfu_by_convention[name],
            }
            for name, flops in found.by_convention.items()
        },
        "original_count": _original(parts),
        "peak": _peak(machine),
        "devices_per_node": machine.devices_per_node,
        "parameters": found.params,
        "parameters_trained": found.params_trained,
        "lora": None if job.lora is None else {"r": job.lora.r, "targets": list(job.lora.targets)},
        "checkpointing": job.checkpointing,
        "versions": {
            "ergmeter": __version__,
            "model": model_version(parts.request.model_config),
            "neuronxcc": list(parts.found.compilers) if parts.found else [],
        },
        "findings": [{"about": one.about, "text": one.text} for one in parts.findings],
        "notes": [*job.notes, *machine.notes, *found.notes],
        "missing": missing,
    }


def _original(parts: Parts) -> dict[str, Any] | None:
    """The same job by the original's count of FLOPs, and why it differs, in TFLOP of a sequence."""
    found = parts.figures
    flops = found.by_convention.get(ORIGINAL)
    if flops is None:
        return None
    mfu, rate = found.mfu_by_convention.get(ORIGINAL), parts.pace.seq_per_s
    return {
        "convention": ORIGINAL,
        "tflop_per_sequence": flops / _TERA,
        "tflops_per_second": None if rate is None else flops * rate / _TERA,
        "mfu_percent": None if mfu is None else 100 * mfu,
        "over_exact_tflop_per_sequence": {
            reason: extra / _TERA for reason, extra in found.differences
        },
    }


def _peak(machine: Machine) -> dict[str, Any]:
    cores, backend = machine.cores, BACKENDS[machine.backend]
    return {
        "dtype": machine.dtype,
        "tflops_per_second_per_core": machine.core_flops_per_s / _TERA,
        "tflops_per_second_per_chip": machine.chip_flops_per_s / _TERA,
        "cores_per_chip": backend.cores_per_chip,
        "cores_per_node": machine.cores_per_node,
        "cores": cores,
        "tflops_per_second_per_node": None
        if machine.cores_per_node is None
        else machine.cores_per_node * machine.core_flops_per_s / _TERA,
        "tflops_per_second": None if cores is None else cores * machine.core_flops_per_s / _TERA,
        "source": machine.source,
    }


def model_version(path: str) -> dict[str, Any]:
    """What identifies a model's configuration: its own words, and a checksum of the file."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        return {"dimensions": path}
    content = file.read_bytes()
    fields = json.loads(content)
    return {
        "name": fields.get("_name_or_path"),
        "model_type": fields.get("model_type"),
        "transformers_version": fields.get("transformers_version"),
        "config_sha256": hashlib.sha256(content).hexdigest(),
    }
