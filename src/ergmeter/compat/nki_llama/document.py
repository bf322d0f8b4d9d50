"""The document of a job with the original's numbers, and the list of its quirks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.compat.nki_llama.original_inputs import original_count, read_original_log
from ergmeter.errors import UsageError
from ergmeter.neuron.advice import AdviceFinding
from ergmeter.neuron.analysis_types import (
    DEFAULT_COMPILE_DIR,
    Analysis,
    AnalysisProgress,
    FoundGraphs,
    GraphCounted,
    Inputs,
    LogRead,
    Searching,
    ThroughputChosen,
    check_log,
    check_model,
    check_request,
)
from ergmeter.neuron.compile_cache import Choice, graph_file
from ergmeter.neuron.document import FORMAT, as_origin, compat_inputs, file_score, model_version
from ergmeter.neuron.mfu import (
    DEFAULT_SEQ_PER_S,
    NOT_KEPT,
    PATTERNS,
    QUIRKS,
    VERSION,
    impossible_mfu,
    original_figures,
    original_files,
    original_summary,
)
from ergmeter.neuron.score import Score, score
from ergmeter.neuron.training_job import read_training_file
from ergmeter.records import Reading
from ergmeter.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ergmeter.compat.nki_llama.original_inputs import OriginalLog
    from ergmeter.neuron.analysis_types import AnalysisRequest, Watch
    from ergmeter.neuron.mfu import OriginalFigures
    from ergmeter.records import Basis


_DECLARED, _MEAN = "--throughput", "--log-file, the mean of its values"
_ASSUMED = "assumed, as the original does"
_FORMULAS = {
    _DECLARED: "as given by --throughput",
    _MEAN: "mean of the values that the log prints, all of them",
    _ASSUMED: _ASSUMED,
}
_RATED = ("throughput_seq_per_sec", "mfu_percent", "training_score")


def analyze_compat(request: AnalysisRequest, watch: Watch) -> Analysis:
    """Returns the original's metrics of a job."""
    check_request(request, is_original=True)
    check_model(request.model_config)
    if not Path(request.model_config).exists():
        raise UsageError(
            f"--compat takes a config.json, as the original does; got {request.model_config}"
        )
    check_log(request.log_file)
    _check(request)
    file = read_training_file(request.config)
    batch = request.batch_size or file.required(
        "data.global_batch_size", instead="pass --batch-size"
    )
    length = request.seq_len or file.required("data.seq_length", instead="pass --seq-len")
    log = _read_log(request, watch)
    rate = request.throughput or (log.throughput.average if log else None)
    if log and not request.throughput and rate is not None:
        watch(ThroughputChosen(rate, is_from_log=True))
    rate_from = _DECLARED if request.throughput else _MEAN
    if not rate:
        rate, rate_from = DEFAULT_SEQ_PER_S, _ASSUMED
        watch(ThroughputChosen(rate, is_from_log=False))
    figures = original_figures(
        request.model_config,
        batch_size=batch,
        seq_len=length,
        seq_per_s=rate,
        nodes=request.num_nodes or 1,
        backend=request.hw_backend,
    )
    content = _head(request, figures, batch, length, rate)
    watch(Inputs(content))
    files, unreadable = _files(request, watch, figures, rate)
    summary = original_summary(files)
    content["nki_analysis"] = {"summary": summary}
    if log is not None:
        content["log_metrics"] = log.document()
    if request.detailed:
        content["nki_analysis"]["per_file_metrics"] = files
    if request.calculate_score:
        content |= _score(request, figures, rate, summary["overall_nki_ratio"])
    findings = _findings(request.compile_dir or DEFAULT_COMPILE_DIR, len(files), unreadable)
    compilers = {compiler for file in files if (compiler := graph_file(file["file_path"]).compiler)}
    beyond = {
        "format": FORMAT,
        "compat": {"version": VERSION, "quirks_kept": list(QUIRKS), "not_kept": list(NOT_KEPT)},
        "unreadable_kernel_configs": unreadable,
        "findings": [{"about": finding.about, "text": finding.text} for finding in findings],
        "versions": {
            "ergmeter": __version__,
            "model": model_version(request.model_config),
            "neuronxcc": sorted(compilers),
        },
        "impossible": impossible_mfu(figures.mfu_percent),
        "obtained": _obtained(rate_from),
        "inputs": compat_inputs(
            request, batch_size=batch, seq_len=length, seq_per_s=rate, rate_from=rate_from
        ),
    }
    return Analysis(content | beyond, files)


def _obtained(rate_from: str) -> dict[str, dict[str, Any]]:
    """How its metrics were obtained: without intervals, by the formulas listed as quirks."""
    basis: Basis = "assumed" if rate_from == _ASSUMED else "reported"
    rated = Reading(0.0, "", basis, note=f"as the original has it; throughput: {rate_from}")
    counted = Reading(0.0, "", "derived", note="as the original has it")
    return {
        **{key: as_origin(rated) for key in _RATED},
        "throughput_seq_per_sec": as_origin(rated) | {"formula": _FORMULAS[rate_from]},
        **{key: as_origin(counted) for key in ("tflops_per_second", "overall_nki_ratio")},
    }


def _findings(directory: str, count: int, unreadable: int) -> Iterator[AdviceFinding]:
    """Findings that the original does not report: an empty cache, and values taken as 0."""
    if not count:
        gone = "" if Path(directory).exists() else ", which does not exist,"
        names = ", ".join(PATTERNS)
        yield AdviceFinding("no_hlo", f"no HLO found: looked in {directory}{gone} for {names}")
    if unreadable:
        what = "kernel configuration" if unreadable == 1 else "kernel configurations"
        yield AdviceFinding("nki_ratio", f"{unreadable} {what} can't be read: taken as 0")


def _check(request: AnalysisRequest) -> None:
    """Raises UsageError for options that the original does not have."""
    new = {
        "--convention": request.convention is not None,
        "--devices": request.devices is not None,
        "--lnc": request.lnc is not None,
        "--dtype": request.dtype is not None,
        "--compiler-version, --module, --since or --until": request.choice != Choice(),
        "--modules-from-log": request.modules_from_log,
        "--graph-runs": request.graph_runs is not None,
    }
    for option, is_given in new.items():
        if is_given:
            raise UsageError(f"--compat is as the original, which has no {option}; leave it out")


def _read_log(request: AnalysisRequest, watch: Watch) -> OriginalLog | None:
    if request.log_file is None:
        return None
    if not Path(request.log_file).is_file():  # a pipe, standard input
        raise UsageError(f"--log-file {request.log_file}: is no file")
    log = read_original_log(request.log_file)
    watch(LogRead(log.document()))
    return log


def _head(
    request: AnalysisRequest, figures: OriginalFigures, batch: int, length: int, rate: float
) -> dict[str, Any]:
    return {
        "model_config": request.model_config,
        "batch_size": batch,
        "sequence_length": length,
        "num_nodes": request.num_nodes or 1,
        "hardware_backend": request.hw_backend,
        "throughput_seq_per_sec": rate,
        "mfu_percent": figures.mfu_percent,
        "tflops_per_second": figures.tflop_per_sequence,
        "throughput_tflops_per_node": figures.tflop_per_s_per_node,
        "seq_per_second_per_node": figures.seq_per_s_per_node,
        "time_per_batch_seconds": figures.batch_s,
    }


def _files(
    request: AnalysisRequest, watch: Watch, figures: OriginalFigures, rate: float
) -> tuple[list[dict[str, Any]], int]:
    """Every graph as the original counts it, and the number of configurations taken as 0."""
    directory = request.compile_dir or DEFAULT_COMPILE_DIR
    watch(Searching(directory))
    paths = original_files(directory)
    watch(FoundGraphs(len(paths), is_original=True))
    files = []
    unreadable = 0
    for done, path in enumerate(paths, start=1):
        graph, not_read = _file(path)
        unreadable += not_read
        if request.per_file_scores and graph["status"] == "success":
            graph["training_score"] = file_score(
                _factors(request, figures, rate, graph["nki_ratio"])
            )
        files.append(graph)
        watch(AnalysisProgress("counting graphs", done, len(paths)))
        watch(GraphCounted(path))
    return files, unreadable


def _file(path: str) -> tuple[dict[str, Any], int]:
    file = graph_file(path)
    name = Path(path).name
    try:
        count = original_count(path)
    except (ValueError, OSError) as error:
        return {
            "status": "error",
            "file_path": path,
            "file_name": name,
            "error": str(error),
            "hlo_macs": 0,
            "nki_macs": 0,
            "nki_ratio": 0.0,
        }, 0
    return {
        "status": "success",
        "file_path": path,
        "file_name": name,
        "module_name": file.module,
        "neuronxcc_version": file.compiler,
        "hlo_macs": count.macs,
        "nki_macs": count.nki_macs,
        "nki_ratio": count.nki_macs / count.macs if count.macs > 0 else 0.0,
    }, count.unreadable


def _factors(
    request: AnalysisRequest, figures: OriginalFigures, rate: float, ratio: float
) -> Score:
    return score(request.baseline, mfu_percent=figures.mfu_percent, seq_per_s=rate, nki_ratio=ratio)


def _score(
    request: AnalysisRequest, figures: OriginalFigures, rate: float, ratio: float
) -> dict[str, Any]:
    factors, base = _factors(request, figures, rate, ratio), request.baseline
    return {
        "training_score": factors.value,
        "training_score_breakdown": {
            "base_mfu": base.mfu_percent,
            "base_throughput": base.throughput_seq_per_s,
            "achieved_mfu": figures.mfu_percent,
            "achieved_throughput": rate,
            "mfu_improvement": factors.mfu_improvement,
            "throughput_improvement": factors.throughput_improvement,
            "nki_flop_ratio": ratio,
            "loss_improvement": factors.loss_improvement,
            "convergence_rate": factors.convergence_rate,
            "score_offset": factors.offset,
        },
    }
