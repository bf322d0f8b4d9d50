"""The metrics of a job as JSON: the original's keys in their order, then further ones.

Readers of the original's file find every key where it was. A value that is not known is null, and
`missing` has its reason under the same key.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ergmeter.flops.conventions import CONVENTIONS
from ergmeter.neuron.mfu import BACKENDS, PEAK_TFLOP_PER_S_PER_NODE, VERSION, impossible_mfu
from ergmeter.neuron.score import REMARK, score_statistics
from ergmeter.neuron.throughput import log_document
from ergmeter.records import Basis, Missing, Reading, weakest
from ergmeter.units import number_of
from ergmeter.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ergmeter.neuron.analysis import AnalysisRequest, Parts
    from ergmeter.neuron.kernels import GraphResult, NkiSummary
    from ergmeter.neuron.mfu import Machine

    File = Mapping[str, Any]

FORMAT = "ergmeter analyze 1"
_TERA = 1e12
_KERNEL_KEYS = {"state": "macs_state"}  # names of the document that are not those of `Kernel`

# Graphs are ranked by their multiply-adds, times their runs where these are known. Rows below the
# cut are counted and summed, so that the shares add up. Unreadable graphs are listed apart, with
# their reasons.


class RankedGraph(NamedTuple):
    """One graph, and its share of all multiply-adds; None where there are none."""

    file: File
    macs_frac: float | None


class Ranked(NamedTuple):
    """The graphs with the most work, the sum of the others, and the unreadable ones."""

    graphs: list[RankedGraph]
    rest: int
    rest_macs_frac: float | None
    failed: list[File]


def rank_graphs(files: Sequence[File], *, most: int) -> Ranked:
    """Ranks up to `most` graphs, those with the most work first."""
    good = [file for file in files if file["status"] == "success"]
    good.sort(key=lambda file: (-_work(file), str(file["file_path"])))
    total, rest = sum(map(_work, good)), good[most:]
    return Ranked(
        [RankedGraph(file, _work(file) / total if total else None) for file in good[:most]],
        len(rest),
        sum(map(_work, rest)) / total if total else None,
        [file for file in files if file["status"] != "success"],
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
            {key: file[key] for key in ("module_name", "file_path", "error")}
            for file in files
            if "error" in file
        ],
    }


def _ratios_are_over(summary: NkiSummary) -> str:
    without = summary.graphs_without_nki
    graphs = number_of(summary.graphs_with_nki + without, "graph")
    multiply = "multiplies" if graphs.startswith("1 ") else "multiply"
    has = "has" if without == 1 else "have"
    return f"{graphs} that {multiply}, of which {without} {has} no NKI MACs"


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
        **_doubt(result),
        "runs": result.runs if parts.request.graph_runs is not None else None,
        "kernels": [
            {_KERNEL_KEYS.get(name, name): value for name, value in asdict(kernel).items()}
            for kernel in result.kernels
        ],
        "not_known": result.doubts,
    }
    if parts.request.per_file_scores and parts.score and parts.score_missing is None:
        own = replace(parts.score, nki_ratio=result.nki_ratio)
        graph["training_score"] = own.graph_document() | _doubt(result)
    return graph


def _doubt(ratio: GraphResult | NkiSummary | None) -> dict[str, bool]:
    """Whether a ratio is a lower bound, or may be larger or smaller."""
    return {
        "is_lower_bound": ratio is not None and ratio.is_lower_bound,
        "is_uncertain": ratio is not None and ratio.is_uncertain,
    }


# How each headline metric was obtained: basis, interval and note.
#
# Only a log's throughput has an interval, that of its rows. Products of it have the same interval,
# scaled. The score contains the throughput twice (in MFU and directly), so its edges are squared. A
# throughput given on the command line has no interval.


Ends = tuple[float | None, float | None]


def as_origin(
    basis: Basis, note: str, ends: Ends = (None, None), *, factor: float = 1.0
) -> dict[str, Any]:
    """How a metric was obtained; the ends of its interval are multiplied by `factor`."""
    low, high = (None if end is None else end * factor for end in ends)
    return {"basis": basis, "low": low, "high": high, "note": note}


def origins(parts: Parts) -> dict[str, dict[str, Any]]:
    """How each metric was obtained, by its key; unknown metrics have no entry."""
    pace, figures, summary = parts.pace, parts.figures, parts.summary
    note = f"{figures.work.chosen.convention}, from config.json"
    origin = {"tflop_per_sequence": as_origin("derived", note)}
    if pace.seq_per_s is not None:
        ends = (pace.low, pace.high)
        how = pace.how or "as given by --throughput"
        rate = as_origin(pace.basis, pace.source, ends)
        origin["throughput_seq_per_sec"] = rate | {"formula": how}
        origin["tflops_per_second"] = as_origin(
            weakest("derived", pace.basis), figures.work.chosen.convention, ends,
            factor=figures.model_flops / _TERA,
        )  # fmt: skip
    for key, share in (("mfu_percent", figures.mfu), ("hfu_percent", figures.hfu)):
        if isinstance(share, Reading):
            ends = (share.low, share.high)
            origin[key] = as_origin(share.basis, share.note, ends, factor=100.0)
    if summary is not None and summary.overall_ratio is not None:
        note = f"counted in {summary.counted} compiled graphs, {summary.weighting}"
        origin["overall_nki_ratio"] = as_origin("derived", note)
    return origin | _score_origin(parts)


def _score_origin(parts: Parts) -> dict[str, dict[str, Any]]:
    """How the score was obtained, where all its factors are known."""
    value = None if parts.score is None else parts.score.value
    pace, mfu, summary = parts.pace, parts.figures.mfu, parts.summary
    if value is None or summary is None or pace.seq_per_s is None or not isinstance(mfu, Reading):
        return {}
    basis, note = weakest(mfu.basis, pace.basis), "a product of five factors, given or found"
    is_exact = not (summary.is_lower_bound or summary.is_uncertain)
    if not is_exact or pace.low is None or pace.high is None:
        return {"training_score": as_origin(basis, note)}
    low, high = (value * (end / pace.seq_per_s) ** 2 for end in (pace.low, pace.high))
    note = f"{note}; its interval is that of the pace, squared"
    return {"training_score": as_origin(basis, note, (low, high))}


# Each input keeps its source, since "batch 64" may be the YAML's, the log's, an option's or an
# assumption.


InputRow = tuple[str, str | float | None, str]  # what it is, its value, its source


def input_documents(
    request: AnalysisRequest, sizes: Sequence[InputRow], *, log_from: str = "--log-file"
) -> list[dict[str, Any]]:
    """The files that were given or searched for, then sizes, in the order they are read."""
    cache_from = "--compile-dir" if request.compile_dir else "the default of --compile-dir"
    rows: list[InputRow] = [
        ("training's YAML", request.config, "--config"),
        ("model", request.model_config, "--model-config"),
        ("log", request.log_file, log_from),
        ("compile cache", request.directory, cache_from),
    ]
    if request.graph_runs is not None:
        rows.append(("runs of each graph", request.graph_runs, "--graph-runs"))
    return [
        {"what": what, "value": value, "from": "not given" if value is None else source}
        for what, value, source in (*rows, *sizes)
    ]


def _inputs(parts: Parts) -> list[dict[str, Any]]:
    job, machine, pace, peak = parts.job, parts.machine, parts.pace, parts.machine.core_flops_per_s
    devices_from = job.devices_from if job.devices is not None else "assumed, see the notes"
    log_from = "" if parts.log is None else f"--log-file, read as {parts.log.format}"
    sizes: list[InputRow] = [
        ("sequences a step", job.batch_size, job.batch_from),
        ("tokens a sequence", job.seq_len, job.seq_len_from),
        ("sequences per second", pace.seq_per_s, pace.source),
        ("nodes", job.nodes, job.nodes_from),
        ("devices of a node", machine.devices_per_node, devices_from),
        ("cores in all", machine.cores, "devices, and what a device is"),
        ("type of products", job.dtype, job.dtype_from),
        ("TFLOP/s of a core", peak / _TERA, machine.source),
        ("recomputation", job.checkpointing, "the YAML"),
    ]
    return input_documents(parts.request, sizes, log_from=log_from)


def document(parts: Parts) -> dict[str, Any]:
    """The complete document."""
    job, figures, rate = parts.job, parts.figures, parts.pace.seq_per_s
    missing: dict[str, str] = {}
    content: dict[str, Any] = {
        "model_config": parts.request.model_config,
        "batch_size": job.batch_size,
        "sequence_length": job.seq_len,
        "num_nodes": job.nodes,
        "hardware_backend": parts.machine.backend,
        "throughput_seq_per_sec": rate,
        "mfu_percent": _percent("mfu_percent", figures.mfu, missing),
        "tflops_per_second": _tera(figures.flops_per_s),
        "throughput_tflops_per_node": _tera(figures.flops_per_s_per_node),
        "seq_per_second_per_node": None if rate is None else rate / job.nodes,
        "time_per_batch_seconds": None if rate is None else job.batch_size / rate,
        "nki_analysis": nki_document(parts, missing),
    }
    if rate is None:
        for key in [key for key, value in content.items() if value is None]:
            missing.setdefault(key, parts.pace.source)
    if parts.log is not None:
        content["log_metrics"] = log_document(parts.log, parts.pace)
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
    if parts.score_missing is not None:
        missing["training_score"] = parts.score_missing
    elif parts.score.value is None:
        why = missing.get("overall_nki_ratio", "no graphs")
        missing["training_score"] = f"the NKI ratio is not known: {why}"
    doubt = _doubt(parts.summary)
    return {
        "training_score": parts.score.value,
        "training_score_breakdown": parts.score.breakdown() | doubt | {"remark": REMARK},
    }


def _beyond(parts: Parts, missing: dict[str, str]) -> dict[str, Any]:
    """The keys that the original's document does not have."""
    figures, job, machine = parts.figures, parts.job, parts.machine
    by_name = figures.mfu_by_convention
    return {
        "format": FORMAT,
        "compat": None,
        "batch_size_from": job.batch_from,
        "sequence_length_from": job.seq_len_from,
        "convention": figures.work.chosen.convention,
        "convention_formula": CONVENTIONS[figures.work.chosen.convention].formula,
        "tflop_per_sequence": figures.model_flops / _TERA,
        "hardware_tflop_per_sequence": _tera(figures.work.chosen.hardware_per_step),
        "hfu_percent": _percent("hfu_percent", figures.hfu, missing),
        "mfu_basis": None if isinstance(figures.mfu, Missing) else figures.mfu.basis,
        "mfu_note": None if isinstance(figures.mfu, Missing) else figures.mfu.note,
        "throughput_basis": parts.pace.source,
        "obtained": origins(parts),
        "inputs": _inputs(parts),
        "conventions": {
            name: {
                "tflop_per_sequence": flops / _TERA,
                "mfu_percent": None if (mfu := by_name.get(name)) is None else 100 * mfu,
            }
            for name, flops in figures.by_convention.items()
        },
        "original_count": _original(parts, missing),
        "peak": _peak(machine),
        "devices_per_node": machine.devices_per_node,
        "parameters": figures.work.params,
        "parameters_trained": figures.work.params_trained,
        "lora": None if job.lora is None else {"r": job.lora.r, "targets": list(job.lora.targets)},
        "checkpointing": job.checkpointing,
        "versions": versions(parts.request, parts.graphs.compilers if parts.graphs else ()),
        "impossible": _impossible(parts),
        "findings": [asdict(finding) for finding in parts.findings],
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
    figures, rate, backend = parts.figures, parts.pace.seq_per_s, parts.request.hw_backend
    if figures.original_flops is None:
        return None
    tflop, nodes = figures.original_flops / _TERA, parts.request.num_nodes or 1
    peak = PEAK_TFLOP_PER_S_PER_NODE.get(backend)
    if peak is None:
        why = f"the original knows peaks of trn1 and trn2 alone, not of {backend}"
        missing["original_count.mfu_percent"] = why
    elif rate is None:
        missing["original_count.mfu_percent"] = parts.pace.source
    mfu = None if peak is None or rate is None else rate * tflop / nodes * 100 / peak
    return {
        "version": VERSION,
        "tflop_per_sequence": tflop,
        "tflops_per_second": None if rate is None else figures.original_flops * rate / _TERA,
        "mfu_percent": mfu,
        "num_nodes": nodes,
        "peak_tflops_per_second": None if peak is None else nodes * peak,
        "over_exact_tflop_per_sequence": {
            reason: extra / _TERA for reason, extra in figures.differences
        },
    }


def _peak(machine: Machine) -> dict[str, Any]:
    each = machine.core_flops_per_s
    per_node, cores = machine.cores_per_node, machine.cores
    return {
        "dtype": machine.dtype,
        "tflops_per_second_per_core": each / _TERA,
        "tflops_per_second_per_chip": machine.chip_flops_per_s / _TERA,
        "cores_per_chip": BACKENDS[machine.backend].cores_per_chip,
        "cores_per_node": per_node,
        "cores": cores,
        "tflops_per_second_per_node": None if per_node is None else per_node * each / _TERA,
        "tflops_per_second": None if cores is None else cores * each / _TERA,
        "source": machine.source,
    }


def versions(request: AnalysisRequest, compilers: Sequence[str]) -> dict[str, Any]:
    """The versions of ergmeter, of the model's configuration and of the compilers."""
    model = _model_version(request.model_config)
    return {"ergmeter": __version__, "model": model, "neuronxcc": list(compilers)}


def _model_version(path: str) -> dict[str, Any]:
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
