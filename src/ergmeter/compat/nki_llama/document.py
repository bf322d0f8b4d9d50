"""The document of a job with the original's numbers, and the list of its quirks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.compat.nki_llama.original_inputs import OriginalLog, original_count, read_original_log
from ergmeter.errors import UsageError
from ergmeter.neuron.advice import AdviceFinding
from ergmeter.neuron.analysis import Analysis, AnalysisProgress, GraphCounted, Started, check_inputs
from ergmeter.neuron.compile_cache import Choice, graph_file
from ergmeter.neuron.document import FORMAT, as_origin, input_documents, versions
from ergmeter.neuron.mfu import PEAK_TFLOP_PER_S_PER_NODE, VERSION, impossible_mfu, sequence_flops
from ergmeter.neuron.score import Score, score_statistics
from ergmeter.neuron.training_job import read_training_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ergmeter.neuron.analysis import AnalysisRequest, Watch
    from ergmeter.records import Basis

QUIRKS = (
    "tflops_per_second is TFLOP of one sequence, not per second",
    "FLOPs count the embedding lookup as a matrix product, the softmax as 6 operations a pair and"
    " every pair of tokens, causal or not",
    "query and output projections are hidden x hidden, whatever head_dim says; LoRA is counted as"
    " full training",
    "the peak is that of whole instances, 3040 TFLOP/s (trn1) or 10672 (trn2) a node, whatever"
    " trainer.devices says; nodes are those of --num-nodes, else 1",
    "without a throughput 100 sequences/s are taken",
    "the log's throughput is the mean of all printed values that differ from the one before,"
    " warm-up included; exponents are cut off (2.73e-5 reads as 2.73)",
    "MACs are summed over every computation of every graph once: no loop counts, no convolutions,"
    " both branches of a condition, unreadable and absent kernel MACs as 0",
    "average, minimum and maximum NKI ratio leave out the graphs at 0",
    "what config.json leaves out is taken from transformers' LlamaConfig: hidden_size 4096, 32"
    " heads and layers, intermediate_size 11008, vocab_size 32000",
)
NOT_KEPT = (
    "--per-file-scores gives scores without --calculate-score as well, as the guide has it; there"
    " the original gives none",
    "a log that is not there is an error instead of a warning",
    "unreadable kernel configurations are counted instead of announced one by one",
)

DEFAULT_SEQ_PER_S = 100.0
# Its own also name model.hlo_module.pb and graph.hlo, which these match first.
PATTERNS = ("*.hlo_module.pb", "*.hlo")
# Our keys of a score's breakdown that its own does not have.
_NOT_IN_BREAKDOWN = ("is_mfu_impossible", "nki_factor", "score_without_nki")
_DECLARED, _MEAN = "--throughput", "--log-file, the mean of its values"
_ASSUMED = "assumed, as the original does"
_FORMULAS = {
    _DECLARED: "as given by --throughput",
    _MEAN: "mean of the values that the log prints, all of them",
    _ASSUMED: _ASSUMED,
}


def analyze_compat(request: AnalysisRequest, watch: Watch) -> Analysis:
    """Returns the original's metrics of a job."""
    _check(request)
    file = read_training_file(request.config)
    batch = request.batch_size or file.required(
        "data.global_batch_size", instead="pass --batch-size"
    )
    length = request.seq_len or file.required("data.seq_length", instead="pass --seq-len")
    log = None if request.log_file is None else read_original_log(request.log_file)
    rate, rate_from = _throughput(request, log)
    nodes, directory = request.num_nodes or 1, request.directory
    content: dict[str, Any] = {
        "model_config": request.model_config,
        "batch_size": batch,
        "sequence_length": length,
        "num_nodes": nodes,
        "hardware_backend": request.hw_backend,
        "throughput_seq_per_sec": rate,
    }
    content |= original_figures(
        request.model_config, batch_size=batch, seq_len=length, seq_per_s=rate, nodes=nodes,
        backend=request.hw_backend,
    )  # fmt: skip
    logged = {} if log is None else {"log_metrics": log.document()}
    paths = original_files(directory)
    source = {_DECLARED: "option", _MEAN: "log", _ASSUMED: "default"}[rate_from]
    watch(Started(content | logged, directory, len(paths), source, is_original=True))
    files, unreadable = _files(request, watch, paths, content)
    summary = original_summary(files)
    content["nki_analysis"] = {"summary": summary} | (
        {"per_file_metrics": files} if request.detailed else {}
    )
    content |= logged
    if request.calculate_score:
        score = _score(request, content, summary["overall_nki_ratio"])
        content["training_score"] = score.value
        content["training_score_breakdown"] = {
            key: value for key, value in score.breakdown().items() if key not in _NOT_IN_BREAKDOWN
        }
    compilers = {compiler for path in paths if (compiler := graph_file(path).compiler)}
    beyond = {
        "format": FORMAT,
        "compat": {"version": VERSION, "quirks_kept": list(QUIRKS), "not_kept": list(NOT_KEPT)},
        "unreadable_kernel_configs": unreadable,
        "findings": [asdict(each) for each in _findings(directory, len(files), unreadable)],
        "versions": versions(request, sorted(compilers)),
        "impossible": impossible_mfu(content["mfu_percent"]),
        "obtained": _obtained(rate_from),
        "inputs": input_documents(
            request,
            [
                ("sequences a step", batch, "--batch-size" if request.batch_size else "the YAML"),
                ("tokens a sequence", length, "--seq-len" if request.seq_len else "the YAML"),
                ("sequences per second", rate, rate_from),
                ("nodes", nodes, "--num-nodes" if request.num_nodes else "assumed"),
            ],
        ),
    }
    return Analysis(content | beyond, files)


def _check(request: AnalysisRequest) -> None:
    """Raises UsageError for what the original does not have, or can't use."""
    check_inputs(request, is_original=True)
    if not Path(request.model_config).exists():
        raise UsageError(
            f"--compat takes a config.json, as the original does; got {request.model_config}"
        )
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
    if request.log_file is not None and not Path(request.log_file).is_file():  # a pipe
        raise UsageError(f"--log-file {request.log_file}: is no file")


def _throughput(request: AnalysisRequest, log: OriginalLog | None) -> tuple[float, str]:
    """Sequences per second, and where they are from."""
    if request.throughput:
        return request.throughput, _DECLARED
    mean = log.throughput.average if log else None
    return (mean, _MEAN) if mean else (DEFAULT_SEQ_PER_S, _ASSUMED)


def original_figures(
    model: str, *, batch_size: int, seq_len: int, seq_per_s: float, nodes: int, backend: str
) -> dict[str, float]:
    """MFU and throughput by the original's formulas, under its own names."""
    peak = PEAK_TFLOP_PER_S_PER_NODE.get(backend)
    if peak is None:
        raise UsageError(
            f"--compat knows --hw-backend trn1 and trn2, as the original does; got {backend}"
        )
    tflop = sequence_flops(model, seq_len) / 1e12
    per_node = seq_per_s * tflop / nodes
    return {
        "mfu_percent": per_node * 100 / peak,
        "tflops_per_second": tflop,
        "throughput_tflops_per_node": per_node,
        "seq_per_second_per_node": seq_per_s / nodes,
        "time_per_batch_seconds": batch_size / seq_per_s,
    }


def _obtained(rate_from: str) -> dict[str, dict[str, Any]]:
    """How its metrics were obtained: without intervals, by the formulas listed as quirks."""
    note = "as the original has it"
    basis: Basis = "assumed" if rate_from == _ASSUMED else "reported"
    rated = as_origin(basis, f"{note}; throughput: {rate_from}")
    counted = as_origin("derived", note)
    return {
        "throughput_seq_per_sec": rated | {"formula": _FORMULAS[rate_from]},
        "mfu_percent": rated,
        "training_score": rated,
        "tflops_per_second": counted,
        "overall_nki_ratio": counted,
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


def original_files(directory: str) -> list[str]:
    """The files the original would open, in its order: pattern by pattern, each path once."""
    base = Path(directory)
    paths = (str(path) for pattern in PATTERNS for path in base.rglob(pattern))
    return list(dict.fromkeys(paths))


def original_summary(files: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The original's summary: ratios only over files above 0, else 0."""
    good = [file for file in files if file["status"] == "success"]
    macs, nki = (sum(file[name] for file in good) for name in ("hlo_macs", "nki_macs"))
    ratios = [file["nki_ratio"] for file in good if file["nki_ratio"] > 0]
    summary: dict[str, Any] = {
        "total_files": len(files),
        "successful_analyses": len(good),
        "failed_analyses": len(files) - len(good),
        "total_hlo_macs": macs,
        "total_nki_macs": nki,
        "overall_nki_ratio": nki / macs if macs > 0 else 0.0,
        "average_nki_ratio": sum(ratios) / len(ratios) if ratios else 0.0,
        "min_nki_ratio": min(ratios, default=0.0),
        "max_nki_ratio": max(ratios, default=0.0),
    }
    return summary | score_statistics(file.get("training_score") for file in good)


def _files(
    request: AnalysisRequest, watch: Watch, paths: Sequence[str], content: dict[str, Any]
) -> tuple[list[dict[str, Any]], int]:
    """Every graph as the original counts it, and the number of configurations taken as 0."""
    files = []
    unreadable = 0
    for done, path in enumerate(paths, start=1):
        graph, not_read = _file(path)
        unreadable += not_read
        if request.per_file_scores and graph["status"] == "success":
            graph["training_score"] = _score(request, content, graph["nki_ratio"]).graph_document()
        files.append(graph)
        watch(AnalysisProgress("counting graphs", done, len(paths)))
        watch(GraphCounted(path))
    return files, unreadable


def _file(path: str) -> tuple[dict[str, Any], int]:
    graph = {"status": "success", "file_path": path, "file_name": Path(path).name}
    try:
        count = original_count(path)
    except (ValueError, OSError) as error:
        zeros = {"hlo_macs": 0, "nki_macs": 0, "nki_ratio": 0.0}
        return graph | {"status": "error", "error": str(error)} | zeros, 0
    file = graph_file(path)
    return graph | {
        "module_name": file.module,
        "neuronxcc_version": file.compiler,
        "hlo_macs": count.macs,
        "nki_macs": count.nki_macs,
        "nki_ratio": count.nki_macs / count.macs if count.macs > 0 else 0.0,
    }, count.unreadable


def _score(request: AnalysisRequest, content: dict[str, Any], ratio: float) -> Score:
    mfu, rate = content["mfu_percent"], content["throughput_seq_per_sec"]
    return Score(request.baseline, mfu, rate, ratio)
