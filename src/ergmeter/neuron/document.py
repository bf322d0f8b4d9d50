"""The metrics of a job as JSON: the keys of nki-llama's script (the original), then our own.

A program that reads the original's file finds every key in its place. An unknown value is null, and
`missing` has the reason under the same key.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ergmeter.flops.conventions import CONVENTIONS
from ergmeter.metrics.definitions.compute import HFU, MFU
from ergmeter.neuron.kernels import LOWER_BOUND, UNCERTAIN, GraphResult
from ergmeter.neuron.mfu import BACKENDS, TERA, VERSION, Machine, impossible_mfu
from ergmeter.neuron.score import JSON_NAMES, NKI, REMARK, SCORE, THROUGHPUT, Score
from ergmeter.records import Reading
from ergmeter.version import __version__

if TYPE_CHECKING:
    from ergmeter.neuron.analysis import Analysis, JobDetails

    Json = dict[str, Any]

FORMAT = "ergmeter analyze 1"
_ORIGINAL_MFU = "original_count.mfu_percent"
# Keys of the original's log part; and our keys of a score that the original does not have.
_ORIGINAL_LOG = ("log_file", "timestamps", "steps", "step_times", "throughput", "losses")
_ORIGINAL_LOSSES = ("average", "min", "max", "first", "last", "count")
_NOT_IN_BREAKDOWN = ("is_mfu_impossible", "nki_factor", "score_without_nki")
_GRAPH_FACTORS = (
    *("mfu_improvement", "throughput_improvement", "loss_improvement", "convergence_rate"),
    "nki_flop_ratio",
)


def document(analysis: Analysis) -> Json:
    """Return the JSON document of an analysis with our own numbers."""
    assert analysis.details is not None
    content = original_document(analysis) | _beyond(analysis, analysis.details)
    return content | {"missing": missing(analysis)}


def original_document(analysis: Analysis) -> Json:
    """Return the document with the original's top-level keys, in its order.

    In compatibility mode nested objects have the original's keys only.
    """
    details, score = analysis.details, analysis.score
    content = original_keys(analysis) | {"nki_analysis": _nki(analysis)}
    if analysis.log is not None:
        log = content["log_metrics"] = asdict(analysis.log)
        if details is None:
            log["losses"] = {name: log["losses"][name] for name in _ORIGINAL_LOSSES}
            content["log_metrics"] = {name: log[name] for name in _ORIGINAL_LOG}
        elif analysis.pace.is_from_log:
            log["throughput"] |= {"used": analysis.pace.seq_per_s, "used_is": analysis.pace.source}
    if analysis.request.calculate_score and score is not None:
        factors = breakdown(score)
        if details is None:
            factors = {key: factors[key] for key in factors if key not in _NOT_IN_BREAKDOWN}
            factors |= _wrong(score)
        else:
            factors |= {**_doubt(score.mark), "remark": REMARK}
        content |= {"training_score": analysis.value(SCORE), "training_score_breakdown": factors}
    return content


def missing(analysis: Analysis) -> dict[str, str]:
    """Return the reason, by key, for each value of the document that is null."""
    reasons = {"mfu_percent": analysis.reason(MFU)}
    summary = summary_keys(analysis)
    reasons |= {key: analysis.reason(NKI) for key, value in summary.items() if value is None}
    if analysis.request.per_file_scores:
        reasons["average_score"] = analysis.score_missing
    if analysis.value(THROUGHPUT) is None:
        names = (key for key, value in original_keys(analysis).items() if value is None)
        reasons |= dict.fromkeys(names, analysis.reason(THROUGHPUT))
    for key in (SCORE, HFU):
        reasons[JSON_NAMES[key].name] = analysis.reason(key)
    reasons[_ORIGINAL_MFU] = _no_original_mfu(analysis)
    return {key: why for key, why in reasons.items() if why}


def reading_values(analysis: Analysis) -> dict[str, float | None]:
    """Return every metric by its JSON name and in its JSON unit; None if it is missing."""
    values = {name: analysis.value(key) for key, name in JSON_NAMES.items()}
    return {n.name: None if value is None else value * n.scale for n, value in values.items()}


def original_keys(analysis: Analysis) -> Json:
    """Return the original's keys that do not depend on the compiled graphs."""
    values, request = reading_values(analysis), analysis.request
    rate = values["throughput_seq_per_sec"]
    return {
        "model_config": request.model_config,
        "batch_size": analysis.batch_size,
        "sequence_length": analysis.seq_len,
        "num_nodes": analysis.nodes,
        "hardware_backend": request.hw_backend,
        "throughput_seq_per_sec": rate,
        "mfu_percent": values["mfu_percent"],
        "tflops_per_second": values["tflops_per_second"],
        "throughput_tflops_per_node": analysis.tflop_per_s_per_node,
        "seq_per_second_per_node": None if rate is None else rate / analysis.nodes,
        "time_per_batch_seconds": None if rate is None else analysis.batch_size / rate,
    }


def summary_keys(analysis: Analysis) -> Json:
    """Return the original's keys of `nki_analysis.summary`, with statistics of graphs' scores."""
    nki = analysis.nki
    return {
        "total_files": nki.total,
        "successful_analyses": nki.successful,
        "failed_analyses": nki.total - nki.successful,
        "total_hlo_macs": nki.macs,
        "total_nki_macs": nki.nki_macs,
        "overall_nki_ratio": nki.overall_ratio,
        "average_nki_ratio": nki.average_ratio,
        "min_nki_ratio": nki.least_ratio,
        "max_nki_ratio": nki.most_ratio,
        **{f"{name}_score": value for name, value in analysis.score_statistics.items()},
    }


def breakdown(score: Score) -> Json:
    """Return `training_score_breakdown`: the score's factors under the original's names."""
    base = score.baseline
    return {
        "base_mfu": base.mfu_percent,
        "base_throughput": base.throughput_seq_per_s,
        "achieved_mfu": score.mfu_percent,
        "is_mfu_impossible": score.is_mfu_impossible,
        "achieved_throughput": score.seq_per_s,
        "mfu_improvement": score.mfu_improvement,
        "throughput_improvement": score.throughput_improvement,
        "nki_flop_ratio": score.nki_ratio,
        "loss_improvement": base.loss_improvement,
        "convergence_rate": base.convergence_rate,
        "nki_factor": score.nki_factor,
        "score_offset": base.offset,
        "score_without_nki": score.without_nki,
    }


def input_documents(analysis: Analysis) -> list[Json]:
    """Return the inputs with their sources as JSON."""
    return [{"what": what, "value": value, "from": of} for what, value, of in analysis.inputs]


def versions(analysis: Analysis) -> Json:
    """Return the versions of ergmeter, the model's configuration and the compilers as JSON."""
    model = asdict(analysis.model)
    if analysis.model.config_sha256 is None:
        model = {"dimensions": analysis.request.model_config}
    return {"ergmeter": __version__, "model": model, "neuronxcc": list(analysis.compilers)}


def impossible(analysis: Analysis) -> dict[str, str]:
    """Return the reason, by key, for each value that is impossible."""
    reasons = {
        JSON_NAMES[key].name: result.impossible
        for key, result in analysis.readings.items()
        if isinstance(result, Reading)
    }
    if analysis.score is not None:
        names = (f"{name}_score" for name in analysis.score_statistics)
        reasons |= dict.fromkeys(names, analysis.score.impossible)
    return {key: why for key, why in reasons.items() if why}


def _nki(analysis: Analysis) -> Json:
    nki = analysis.nki
    files = [_graph(graph, analysis) for graph in analysis.graphs]
    listed = {"per_file_metrics": files} if analysis.request.detailed else {}
    content: Json = {"summary": summary_keys(analysis), **listed}
    if analysis.original is not None:
        return content
    content["summary"] |= {
        "ratios_are_over": nki.ratios_are_over,
        "files_with_nki_macs": nki.graphs_with_nki,
        "files_without_nki_macs": nki.graphs_without_nki,
        "files_without_macs": nki.graphs_without_macs,
        **_doubt(nki.mark),
        "weighting": nki.weighting,
        "kernel_calls": nki.calls,
    }
    failed = ("module_name", "file_path", "error")
    return content | {
        "kernels": [asdict(kernel) for kernel in nki.kernels],
        "unreadable_kernel_configs": [asdict(config) for config in nki.unreadable],
        "not_known": nki.doubts,
        "left_out": analysis.left_out,
        "failed": [{key: file[key] for key in failed} for file in files if "error" in file],
    }


def _graph(graph: GraphResult, analysis: Analysis) -> Json:
    """Return one graph under the original's names; in compatibility mode without other keys."""
    is_own = analysis.original is None
    content: Json = {
        "status": "success" if graph.error is None else "error",
        "file_path": graph.path,
        "file_name": graph.name,
    }
    if is_own or graph.error is None:
        content |= {"module_name": graph.module, "neuronxcc_version": graph.compiler}
    if graph.error is not None:
        # The original writes these zeros, so its readers need them. No sum includes them.
        return content | {"error": graph.error, "hlo_macs": 0, "nki_macs": 0, "nki_ratio": 0.0}
    ratio = analysis.nki_ratio(graph)
    content |= {"hlo_macs": graph.macs, "nki_macs": graph.nki_macs, "nki_ratio": ratio}
    doubt = _doubt(graph.mark) if is_own else {}
    if is_own:
        content |= doubt | {
            "runs": None if analysis.request.graph_runs is None else graph.runs,
            "kernels": [
                {"macs_state" if name == "state" else name: value for name, value in kernel.items()}
                for kernel in map(asdict, graph.kernels)
            ],
            "not_known": graph.doubts,
        }
    score = analysis.graph_score(graph)
    if score is not None:
        factors = breakdown(score)
        content["training_score"] = {
            "score": score.value, **{name: factors[name] for name in _GRAPH_FACTORS}, **doubt,
            **_wrong(score),
        }  # fmt: skip
    return content


def _wrong(score: Score) -> dict[str, str]:
    """Return why a score is impossible, as JSON; empty if it is possible."""
    return {"impossible": score.impossible} if score.impossible else {}


def _doubt(mark: str) -> dict[str, bool]:
    """Return as JSON whether a ratio is a lower bound, or may be too high or too low."""
    return {"is_lower_bound": mark == LOWER_BOUND, "is_uncertain": mark == UNCERTAIN}


def obtained(analysis: Analysis) -> Json:
    """Return how each metric was obtained, by its JSON name; missing metrics have no entry."""
    origins: Json = {}
    for key, reading in analysis.readings.items():
        if isinstance(reading, Reading):
            name, scale = JSON_NAMES[key].name, JSON_NAMES[key].scale
            ends = {"low": reading.low, "high": reading.high}
            scaled = {end: None if value is None else value * scale for end, value in ends.items()}
            origins[name] = {"basis": reading.basis, **scaled, "note": reading.note}
            if key == THROUGHPUT:
                origins[name]["formula"] = analysis.pace.formula
    return origins


def _no_original_mfu(analysis: Analysis) -> str:
    """Return why the original's MFU is missing; "" if it is not."""
    theirs = analysis.estimate
    if theirs is None or theirs.mfu_percent is not None:
        return ""
    if theirs.peak_tflops_per_second is None:
        backend = analysis.request.hw_backend
        return f"the original has peaks of trn1 and trn2 only, not of {backend}"
    return analysis.reason(THROUGHPUT)


def _beyond(analysis: Analysis, details: JobDetails) -> Json:
    """Return our own top-level keys, which the original's document does not have."""
    figures, job, machine, theirs = details.figures, details.job, details.machine, analysis.estimate
    flops, mfu, by_name = figures.flops, analysis.readings[MFU], figures.mfu_by_convention
    hardware, values = flops.hardware_per_step, reading_values(analysis)
    marked = impossible(analysis)
    if theirs is not None and theirs.mfu_percent and (why := impossible_mfu(theirs.mfu_percent)):
        marked[_ORIGINAL_MFU] = why
    return {
        "format": FORMAT,
        "compat": None,
        "batch_size_from": job.batch_from,
        "sequence_length_from": job.seq_len_from,
        "convention": flops.convention,
        "convention_formula": CONVENTIONS[flops.convention].formula,
        "tflop_per_sequence": values["tflop_per_sequence"],
        "hardware_tflop_per_sequence": None if hardware is None else hardware / TERA,
        "hfu_percent": values["hfu_percent"],
        "mfu_basis": mfu.basis if isinstance(mfu, Reading) else None,
        "mfu_note": mfu.note if isinstance(mfu, Reading) else None,
        "throughput_basis": analysis.pace.source,
        "obtained": obtained(analysis),
        "inputs": input_documents(analysis),
        "conventions": {
            name: {
                "tflop_per_sequence": each / TERA,
                "mfu_percent": 100 * by_name[name] if name in by_name else None,
            }
            for name, each in figures.by_convention.items()
        },
        "original_count": None if theirs is None else {"version": VERSION} | asdict(theirs),
        "peak": _peak(machine),
        "devices_per_node": machine.devices_per_node,
        "parameters": figures.work.params,
        "parameters_trained": figures.work.params_trained,
        "lora": None if job.lora is None else {"r": job.lora.r, "targets": list(job.lora.targets)},
        "checkpointing": job.checkpointing,
        "versions": versions(analysis),
        "impossible": marked,
        "findings": [asdict(finding) for finding in analysis.findings],
        "notes": list(analysis.notes),
    }


def _peak(machine: Machine) -> Json:
    each = machine.core_flops_per_s
    per_node, cores = machine.cores_per_node, machine.cores
    return {
        "dtype": machine.dtype,
        "tflops_per_second_per_core": each / TERA,
        "tflops_per_second_per_chip": machine.chip_flops_per_s / TERA,
        "cores_per_chip": BACKENDS[machine.backend].cores_per_chip,
        "cores_per_node": per_node,
        "cores": cores,
        "tflops_per_second_per_node": None if per_node is None else per_node * each / TERA,
        "tflops_per_second": None if cores is None else cores * each / TERA,
        "source": machine.source,
    }
