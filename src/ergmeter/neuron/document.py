"""The metrics of a job as JSON: the original's keys in their order, then further ones.

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
from ergmeter.neuron.analysis_types import DEFAULT_COMPILE_DIR
from ergmeter.neuron.instance import BACKENDS
from ergmeter.neuron.mfu import PEAK_TFLOP_PER_S_PER_NODE, VERSION, impossible_mfu, original_figures
from ergmeter.neuron.score import REMARK, score_statistics
from ergmeter.neuron.throughput import log_document
from ergmeter.records import Missing, Reading, weakest
from ergmeter.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    File = Mapping[str, Any]
    from ergmeter.neuron.analysis_types import AnalysisRequest, Parts
    from ergmeter.neuron.instance import Machine
    from ergmeter.neuron.kernels import GraphResult, NkiSummary
    from ergmeter.neuron.score import Score


# Graphs are ranked by their multiply-adds, times their runs where these are known. Rows below the
# cut are counted and summed, so that the shares add up. Unreadable graphs are listed apart, with
# their reasons.


@dataclass(frozen=True, slots=True)
class RankedGraph:
    """One graph, and its share of all multiply-adds; None where there are none."""

    file: File
    macs_frac: float | None


@dataclass(frozen=True)
class Ranked:
    """The graphs with the most work, the sum of the others, and the unreadable ones."""

    graphs: tuple[RankedGraph, ...]
    rest: int
    rest_macs_frac: float | None
    failed: tuple[File, ...]


def rank_graphs(files: Sequence[File], *, most: int) -> Ranked:
    """Ranks up to `most` graphs, those with the most work first."""
    good = [file for file in files if file["status"] == "success"]
    good.sort(key=lambda file: (-_work(file), str(file["file_path"])))
    total = sum(map(_work, good))
    rest = good[most:]
    return Ranked(
        tuple(RankedGraph(file, _work(file) / total if total else None) for file in good[:most]),
        len(rest),
        sum(map(_work, rest)) / total if total else None,
        tuple(file for file in files if file["status"] != "success"),
    )


def _work(file: File) -> int:
    """Multiply-adds times runs; runs are 1 if unknown."""
    runs = file.get("runs")
    return int(file["hlo_macs"]) * (1 if runs is None else int(runs))


def graph_documents(parts: Parts) -> list[dict[str, Any]]:
    """The JSON of each graph."""
    return [_file(result, parts) for result in parts.results]


def nki_document(parts: Parts, missing: dict[str, str]) -> dict[str, Any]:
    """`nki_analysis`; the reasons of what is null go to `missing`."""
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
    files = graph_documents(parts)
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
        "is_uncertain": summary.is_uncertain,
        "weighting": summary.weighting,
        "kernel_calls": summary.calls,
    }
    why = next((finding.text for finding in parts.findings if finding.about == "no_hlo"), None)
    why = why or "no graph that could be read has a matrix product"
    if parts.request.graph_runs is not None and not any(result.runs for result in parts.results):
        why = f"none of the graphs ran, by {parts.request.graph_runs}"
    missing.update({key: why for key, value in ratios.items() if value is None})
    if parts.request.per_file_scores and parts.score_missing is not None:
        missing["average_score"] = parts.score_missing
    analysis: dict[str, Any] = {"summary": figures}
    if parts.request.detailed:
        analysis["per_file_metrics"] = files
    return analysis | {
        "kernels": summary.kernels,
        "unreadable_kernel_configs": summary.unreadable,
        "not_known": summary.doubts,
        "left_out": parts.graphs.left_out if parts.graphs else {},
        "failed": [
            {"module_name": result.module, "file_path": result.path, "error": result.error}
            for result in parts.results
            if result.error is not None
        ],
    }


def _ratios_are_over(summary: NkiSummary) -> str:
    without = summary.graphs_without_nki
    count = summary.graphs_with_nki + without
    graphs = "1 graph that multiplies" if count == 1 else f"{count} graphs that multiply"
    return f"{graphs}, of which {without} {'has' if without == 1 else 'have'} no NKI MACs"


def _file(result: GraphResult, parts: Parts) -> dict[str, Any]:
    """One graph, under the original's names."""
    graph: dict[str, Any] = {
        "status": "success" if result.error is None else "error",
        "file_path": result.path,
        "file_name": result.name,
        "module_name": result.module,
        "neuronxcc_version": result.compiler,
    }
    if result.error is not None:
        # The zeros are the original's, for its readers; they are in no sum here.
        return graph | {"error": result.error, "hlo_macs": 0, "nki_macs": 0, "nki_ratio": 0.0}
    graph |= {
        "hlo_macs": result.macs,
        "nki_macs": result.nki_macs,
        "nki_ratio": result.nki_ratio,
        "is_lower_bound": result.is_lower_bound,
        "is_uncertain": result.is_uncertain,
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
    if parts.request.per_file_scores and parts.score and parts.score_missing is None:
        own = replace(parts.score, nki_ratio=result.nki_ratio)
        graph["training_score"] = file_score(own) | {
            "is_lower_bound": result.is_lower_bound,
            "is_uncertain": result.is_uncertain,
        }
    return graph


def file_score(score: Score) -> dict[str, Any]:
    """A graph's own score: the job's factors with the graph's NKI ratio."""
    return {
        "score": score.value,
        "mfu_improvement": score.mfu_improvement,
        "throughput_improvement": score.throughput_improvement,
        "loss_improvement": score.loss_improvement,
        "convergence_rate": score.convergence_rate,
        "nki_flop_ratio": score.nki_ratio,
    }


# How each headline metric was obtained: basis, interval and note.
#
# Only a log's throughput has an interval, that of its rows. Products of it have the same interval,
# scaled. The score contains the throughput twice (in MFU and directly), so its edges are squared. A
# throughput given on the command line has no interval.


_TERA = 1e12


def origins(parts: Parts) -> dict[str, dict[str, Any]]:
    """How each metric was obtained, by its key; unknown metrics have no entry."""
    pace, figures = parts.pace, parts.figures
    origin: dict[str, dict[str, Any]] = {
        "tflop_per_sequence": as_origin(
            Reading(
                figures.model_flops, "", "derived", note=f"{figures.convention}, from config.json"
            )
        )
    }
    if pace.seq_per_s is not None:
        rate = Reading(pace.seq_per_s, "", pace.basis, pace.low, pace.high, pace.source)
        how = pace.how or "as given by --throughput"
        origin["throughput_seq_per_sec"] = as_origin(rate) | {"formula": how}
        basis = weakest("derived", pace.basis)
        work = Reading(pace.seq_per_s, "", basis, pace.low, pace.high, figures.convention)
        origin["tflops_per_second"] = as_origin(work, factor=figures.model_flops / _TERA)
    for key, share in (("mfu_percent", figures.mfu), ("hfu_percent", figures.hfu)):
        if isinstance(share, Reading):
            origin[key] = as_origin(share, factor=100.0)
    summary = parts.summary
    if summary is not None and summary.overall_ratio is not None:
        note = f"counted in {summary.counted} compiled graphs, {summary.weighting}"
        share = Reading(summary.overall_ratio, "", "derived", note=note)
        origin["overall_nki_ratio"] = as_origin(share)
    score = _score(parts)
    return origin if score is None else origin | {"training_score": as_origin(score)}


def _score(parts: Parts) -> Reading | None:
    """The score, where all its factors are known."""
    value = None if parts.score is None else parts.score.value
    pace, mfu, summary = parts.pace, parts.figures.mfu, parts.summary
    if value is None or summary is None or pace.seq_per_s is None or not isinstance(mfu, Reading):
        return None
    basis, formula = weakest(mfu.basis, pace.basis), "a product of five factors, given or found"
    is_whole = not (summary.is_lower_bound or summary.is_uncertain)
    if not is_whole or pace.low is None or pace.high is None:
        return Reading(value, "", basis, note=formula)
    low, high = (value * (end / pace.seq_per_s) ** 2 for end in (pace.low, pace.high))
    note = f"{formula}; its interval is that of the pace, squared"
    return Reading(value, "", basis, low, high, note)


def as_origin(reading: Reading, *, factor: float = 1.0) -> dict[str, Any]:
    """Basis, interval and note of a reading; the interval is multiplied by `factor`."""
    low, high = (None if end is None else end * factor for end in (reading.low, reading.high))
    return {"basis": reading.basis, "low": low, "high": high, "note": reading.note}


# Each input keeps its source, since "batch 64" may be the YAML's, the log's, an option's or an
# assumption.


Input = dict[str, Any]


def inputs(parts: Parts) -> list[Input]:
    """Files, then sizes, in the order in which they are read."""
    job, machine, pace, peak = parts.job, parts.machine, parts.pace, parts.machine.core_flops_per_s
    devices_from = job.devices_from if job.devices is not None else "assumed, see the notes"
    form = None if parts.log is None else f"--log-file, read as {parts.log.format}"
    return [
        *files_read(parts.request, log_from=form),
        _input("sequences a step", job.batch_size, job.batch_from),
        _input("tokens a sequence", job.seq_len, job.seq_len_from),
        _input("sequences per second", pace.seq_per_s, pace.source),
        _input("nodes", job.nodes, job.nodes_from),
        _input("devices of a node", machine.devices_per_node, devices_from),
        _input("cores in all", machine.cores, "devices, and what a device is"),
        _input("type of products", job.dtype, job.dtype_from),
        _input("TFLOP/s of a core", peak / 1e12, machine.source),
        _input("recomputation", job.checkpointing, "the YAML"),
    ]


def files_read(request: AnalysisRequest, *, log_from: str | None = None) -> list[Input]:
    """The files that were given, or searched for."""
    directory = request.compile_dir
    cache_from = "--compile-dir" if directory else "the default of --compile-dir"
    files = [
        _input("training's YAML", request.config, "--config"),
        _input("model", request.model_config, "--model-config"),
        _input("log", request.log_file, log_from or "--log-file"),
        _input("compile cache", directory or DEFAULT_COMPILE_DIR, cache_from),
    ]
    if request.graph_runs is not None:
        files.append(_input("runs of each graph", request.graph_runs, "--graph-runs"))
    return files


def compat_inputs(
    request: AnalysisRequest, *, batch_size: int, seq_len: int, seq_per_s: float, rate_from: str
) -> list[Input]:
    """The inputs in compatibility mode."""
    return [
        *files_read(request),
        _input(
            "sequences a step", batch_size, "--batch-size" if request.batch_size else "the YAML"
        ),
        _input("tokens a sequence", seq_len, "--seq-len" if request.seq_len else "the YAML"),
        _input("sequences per second", seq_per_s, rate_from),
        _input("nodes", request.num_nodes or 1, "--num-nodes" if request.num_nodes else "assumed"),
    ]


def _input(what: str, value: str | float | None, source: str) -> Input:
    return {"what": what, "value": value, "from": "not given" if value is None else source}


FORMAT = "ergmeter analyze 1"


def document(parts: Parts) -> dict[str, Any]:
    """The complete document."""
    job, figures, pace = parts.job, parts.figures, parts.pace
    missing: dict[str, str] = {}
    content: dict[str, Any] = {
        "model_config": parts.request.model_config,
        "batch_size": job.batch_size,
        "sequence_length": job.seq_len,
        "num_nodes": job.nodes,
        "hardware_backend": parts.machine.backend,
        "throughput_seq_per_sec": pace.seq_per_s,
        "mfu_percent": _percent("mfu_percent", figures.mfu, missing),
        "tflops_per_second": _tera(figures.flops_per_s),
        "throughput_tflops_per_node": _tera(figures.flops_per_s_per_node),
        "seq_per_second_per_node": None if pace.seq_per_s is None else pace.seq_per_s / job.nodes,
        "time_per_batch_seconds": None
        if pace.seq_per_s is None
        else job.batch_size / pace.seq_per_s,
        "nki_analysis": nki_document(parts, missing),
    }
    if pace.seq_per_s is None:
        for key, value in content.items():
            if value is None:
                missing.setdefault(key, pace.source)
    if parts.log is not None:
        content["log_metrics"] = log_document(parts.log, pace)
    content |= _document_score(parts, missing)
    content |= _beyond(parts, missing)
    theirs = (content["original_count"] or {}).get("mfu_percent")
    if theirs is not None and impossible_mfu(theirs):
        content["impossible"]["original_count.mfu_percent"] = impossible_mfu(theirs)["mfu_percent"]
    return content


def _percent(key: str, share: Reading | Missing, missing: dict[str, str]) -> float | None:
    if isinstance(share, Missing):
        missing[key] = share.reason
        return None
    return 100 * share.value


def _tera(flops: float | None) -> float | None:
    return None if flops is None else flops / _TERA


def _document_score(parts: Parts, missing: dict[str, str]) -> dict[str, Any]:
    if not parts.request.calculate_score or parts.score is None:
        return {}
    score, base, pace = parts.score, parts.request.baseline, parts.pace
    if parts.score_missing is not None:
        missing["training_score"] = parts.score_missing
    elif score.value is None:
        missing["training_score"] = "the NKI ratio is not known: " + missing.get(
            "overall_nki_ratio", "no graphs"
        )
    mfu = parts.figures.mfu
    return {
        "training_score": score.value,
        "training_score_breakdown": {
            "base_mfu": base.mfu_percent,
            "base_throughput": base.throughput_seq_per_s,
            "achieved_mfu": 100 * mfu.value if isinstance(mfu, Reading) else None,
            "is_mfu_impossible": isinstance(mfu, Reading) and bool(mfu.impossible),
            "achieved_throughput": pace.seq_per_s,
            "mfu_improvement": score.mfu_improvement,
            "throughput_improvement": score.throughput_improvement,
            "nki_flop_ratio": score.nki_ratio,
            "loss_improvement": score.loss_improvement,
            "convergence_rate": score.convergence_rate,
            "nki_factor": score.nki_factor,
            "score_offset": score.offset,
            "score_without_nki": score.without_nki,
            "is_lower_bound": parts.summary is not None and parts.summary.is_lower_bound,
            "is_uncertain": parts.summary is not None and parts.summary.is_uncertain,
            "remark": REMARK,
        },
    }


def _beyond(parts: Parts, missing: dict[str, str]) -> dict[str, Any]:
    """The keys that the original's document does not have."""
    figures, job, machine = parts.figures, parts.job, parts.machine
    return {
        "format": FORMAT,
        "compat": None,
        "batch_size_from": job.batch_from,
        "sequence_length_from": job.seq_len_from,
        "convention": figures.convention,
        "convention_formula": CONVENTIONS[figures.convention].formula,
        "tflop_per_sequence": figures.model_flops / _TERA,
        "hardware_tflop_per_sequence": _tera(figures.hardware_flops),
        "hfu_percent": _percent("hfu_percent", figures.hfu, missing),
        "mfu_basis": None if isinstance(figures.mfu, Missing) else figures.mfu.basis,
        "mfu_note": None if isinstance(figures.mfu, Missing) else figures.mfu.note,
        "throughput_basis": parts.pace.source,
        "obtained": origins(parts),
        "inputs": inputs(parts),
        "conventions": {
            name: {
                "tflop_per_sequence": flops / _TERA,
                "mfu_percent": None
                if name not in figures.mfu_by_convention
                else 100 * figures.mfu_by_convention[name],
            }
            for name, flops in figures.by_convention.items()
        },
        "original_count": _original(parts, missing),
        "peak": _peak(machine),
        "devices_per_node": machine.devices_per_node,
        "parameters": figures.params,
        "parameters_trained": figures.params_trained,
        "lora": None if job.lora is None else {"r": job.lora.r, "targets": list(job.lora.targets)},
        "checkpointing": job.checkpointing,
        "versions": {
            "ergmeter": __version__,
            "model": model_version(parts.request.model_config),
            "neuronxcc": list(parts.graphs.compilers) if parts.graphs else [],
        },
        "impossible": _impossible(parts),
        "findings": [{"about": finding.about, "text": finding.text} for finding in parts.findings],
        "notes": [*job.notes, *machine.notes, *figures.notes],
        "missing": missing,
    }


def _impossible(parts: Parts) -> dict[str, str]:
    """Reasons, by key, why a value is impossible."""
    shares = {"mfu_percent": parts.figures.mfu, "hfu_percent": parts.figures.hfu}
    return {
        key: share.impossible
        for key, share in shares.items()
        if isinstance(share, Reading) and share.impossible
    }


def _original(parts: Parts, missing: dict[str, str]) -> dict[str, Any] | None:
    """The original's count at the same throughput, and how its FLOPs differ."""
    figures, request, rate = parts.figures, parts.request, parts.pace.seq_per_s
    if figures.original_flops is None:
        return None
    nodes = request.num_nodes or 1
    peak = PEAK_TFLOP_PER_S_PER_NODE.get(request.hw_backend)
    mfu = None
    if peak is None:
        missing["original_count.mfu_percent"] = (
            f"the original knows peaks of trn1 and trn2 alone, not of {request.hw_backend}"
        )
    elif rate is None:
        missing["original_count.mfu_percent"] = parts.pace.source
    else:
        mfu = original_figures(
            request.model_config,
            batch_size=parts.job.batch_size,
            seq_len=parts.job.seq_len,
            seq_per_s=rate,
            nodes=nodes,
            backend=request.hw_backend,
        ).mfu_percent
    flops = figures.original_flops
    return {
        "version": VERSION,
        "tflop_per_sequence": flops / _TERA,
        "tflops_per_second": None if rate is None else flops * rate / _TERA,
        "mfu_percent": mfu,
        "num_nodes": nodes,
        "peak_tflops_per_second": None if peak is None else nodes * peak,
        "over_exact_tflop_per_sequence": {
            reason: extra / _TERA for reason, extra in figures.differences
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
    """Identifies a model's configuration: its name, type, version and a checksum."""
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
