"""Analyzes the files of a Trainium job: the request, its progress events, and its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ergmeter.errors import FormatError, UsageError
from ergmeter.flops.conventions import EXACT
from ergmeter.metrics.catalog import refusal
from ergmeter.neuron.advice import AdviceFinding, about_graphs, about_kernels, about_mfu, about_runs
from ergmeter.neuron.compile_cache import (
    CachedGraphs,
    Choice,
    find_graphs,
    modules_named_in,
    read_graph_runs,
    runs_of,
)
from ergmeter.neuron.document import document, graph_documents
from ergmeter.neuron.kernels import GraphResult, NkiSummary, graph_result, summarize
from ergmeter.neuron.log_agreement import about_log, is_printed, reconcile
from ergmeter.neuron.mfu import Figures, Machine, figures, machine
from ergmeter.neuron.score import Baseline, Score
from ergmeter.neuron.throughput import Throughput, throughput
from ergmeter.neuron.training_job import NeuronJob, read_job, read_training_file
from ergmeter.records import Reading

if TYPE_CHECKING:
    from ergmeter.hlo import FileCount
    from ergmeter.importers.log import ParsedLog


# Progress events, for a console or a progress bar.


@dataclass(frozen=True, slots=True)
class AnalysisProgress:
    """Progress of a long task."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Started:
    """All inputs are read, and what can be refused has been; the graphs are still to be counted."""

    document: Mapping[str, Any]  # inputs, the log, and metrics that need no graphs
    directory: str  # that was searched for graphs
    graphs: int
    rate_from: str  # "option", "log", "default", or "" where there is no throughput
    rate_note: str | None = None  # how the log's throughput was obtained
    is_original: bool = False


@dataclass(frozen=True, slots=True)
class GraphCounted:
    """One more graph has been counted."""

    path: str


Event: TypeAlias = AnalysisProgress | Started | GraphCounted
Watch: TypeAlias = Callable[[Event], None]


DEFAULT_COMPILE_DIR = "/home/ubuntu/neuron_cache"
DEFAULT_BACKEND = "trn1"
DEFAULT_CONVENTION = EXACT


@dataclass(frozen=True, slots=True)
class AnalysisRequest:
    """One analysis. None: not given on the command line."""

    config: str
    model_config: str
    compile_dir: str | None = None
    log_file: str | None = None
    batch_size: int | None = None
    seq_len: int | None = None
    throughput: float | None = None
    num_nodes: int | None = None
    devices: int | None = None
    lnc: int | None = None
    dtype: str | None = None
    hw_backend: str = DEFAULT_BACKEND
    convention: str | None = None
    detailed: bool = False
    calculate_score: bool = False
    per_file_scores: bool = False
    baseline: Baseline = field(default_factory=Baseline)
    choice: Choice = field(default_factory=Choice)
    modules_from_log: bool = False
    graph_runs: str | None = None
    processes: int | None = None

    @property
    def directory(self) -> str:
        """The compile cache: as given, or the default one."""
        return self.compile_dir or DEFAULT_COMPILE_DIR


def check_request(request: AnalysisRequest, *, is_original: bool = False) -> None:
    """Raises UsageError for a size that is 0, negative or not a number.

    The original takes a 0 as not given, and leaves a factor out whose baseline is 0 or less.
    """
    base = request.baseline
    sizes = {
        "--batch-size": request.batch_size,
        "--seq-len": request.seq_len,
        "--throughput": request.throughput,
        "--num-nodes": request.num_nodes,
        "--devices": request.devices,
        "--loss-improvement": base.loss_improvement,
        "--convergence-rate": base.convergence_rate,
    }
    for option, value in sizes.items():
        if value is None or (is_original and value == 0):
            continue
        if not 0 < value < float("inf"):
            raise UsageError(f"{option} must be a number above 0; got {value:g}")
    baselines = {"--base-mfu": base.mfu_percent, "--base-throughput": base.throughput_seq_per_s}
    for option, value in baselines.items():
        if not math.isfinite(value) or (value <= 0 and not is_original):
            raise UsageError(f"{option} must be a number above 0; got {value:g}")


def check_inputs(request: AnalysisRequest, *, is_original: bool = False) -> None:
    """Raises UsageError for a size that can't be, and for a model or a log that does not exist."""
    check_request(request, is_original=is_original)
    _check_model(request.model_config)
    _check_log(request.log_file)


def _check_log(path: str | None) -> None:
    """Raises UsageError if the log does not exist. Pipes and - (standard input) are accepted."""
    if path is None or path == "-":
        return
    if not Path(path).exists():
        raise UsageError(f"--log-file {path}: no such file")
    if Path(path).is_dir():
        raise UsageError(f"--log-file {path}: is no file")


def _check_model(path: str) -> None:
    """Raises UsageError if the model's path or hub name does not exist."""
    if "=" in path and not Path(path).exists():  # typed dimensions: layers=32,...
        return
    if Path(path).exists():
        _check_config(path)
        return
    if path.endswith(".json") or path[:1] in ("/", ".") or "/" not in path:
        raise UsageError(f"{path}: no such file; --model-config takes the model's config.json")
    from ergmeter.flops.source import read_model  # noqa: PLC0415  the engine, for a hub's name

    read_model(path)


def _check_config(path: str) -> None:
    """Raises FormatError, naming --model-config, if the file is no config.json."""
    from ergmeter.flops.config import read_config  # noqa: PLC0415  the engine

    try:
        read_config(path)
    except FormatError as error:
        if Path(path).suffix in (".yaml", ".yml"):
            advice = "is the training's YAML; is it meant for --config?"
            raise FormatError(f"--model-config {path} {advice}") from error
        raise FormatError(f"--model-config {error}") from error


@dataclass(frozen=True)
class Parts:
    """The inputs and results that a document is made from; graph fields are filled last."""

    request: AnalysisRequest
    job: NeuronJob
    machine: Machine
    pace: Throughput
    figures: Figures
    log: ParsedLog | None
    graphs: CachedGraphs | None = None
    results: tuple[GraphResult, ...] = ()
    summary: NkiSummary | None = None
    findings: tuple[AdviceFinding, ...] = ()
    score: Score | None = None
    score_missing: str | None = None  # why no score is known, of the job or of any graph


class Analysis(NamedTuple):
    """The document of a job, its graphs, and the parts they were made from."""

    document: dict[str, Any]
    files: list[dict[str, Any]]
    parts: Parts | None = None  # None: the original's numbers, which keep no steps


# The analysis.


def analyze(request: AnalysisRequest, watch: Watch) -> Analysis:
    """Returns the metrics of a job; `watch` gets progress events."""
    _check(request)
    job = read_job(
        read_training_file(request.config),
        batch_size=request.batch_size,
        seq_len=request.seq_len,
        nodes=request.num_nodes,
        devices=request.devices,
        dtype=request.dtype,
    )
    hardware = machine(
        request.hw_backend,
        nodes=job.nodes,
        devices=job.devices,
        lnc=request.lnc,
        dtype=job.dtype,
        devices_from=job.devices_from,
    )
    runs = None if request.graph_runs is None else read_graph_runs(request.graph_runs)
    log = _read_log(request, watch)
    job, differences = (job, []) if log is None else reconcile(job, log)
    pace = throughput(request.throughput, log, job)
    convention = request.convention or DEFAULT_CONVENTION
    job_figures = figures(request.model_config, job, hardware, pace, convention=convention)
    parts = Parts(request, job, hardware, pace, job_figures, log)
    graphs = _graphs_found(request)
    count = 0 if graphs is None else len(graphs.chosen)
    rate_from = "" if pace.seq_per_s is None else "log" if pace.is_from_log else "option"
    watch(Started(document(parts), request.directory, count, rate_from, pace.how))
    results = _count(request, graphs, runs, watch)
    summary = summarize(results, weighted=runs is not None)
    texts = {
        "no_hlo": about_graphs(graphs, request.directory, named_in_yaml=job.cache),
        "nki_ratio": about_kernels(summary),
        "graph_runs": () if runs is None else about_runs(results, runs, request.graph_runs or ""),
        "log_disagrees": [*differences, *(() if log is None else about_log(log, job, pace))],
    }
    has_rate = log is None or is_printed(log, job, pace)
    findings = [
        *(AdviceFinding(about, text) for about in texts for text in texts[about]),
        *about_mfu(job_figures, job, hardware, pace, is_printed=has_rate),
    ]
    factors, why = _score(request, job_figures, pace, summary)
    complete = replace(
        parts,
        graphs=graphs,
        results=tuple(results),
        summary=summary,
        findings=tuple(findings),
        score=factors,
        score_missing=why,
    )
    return Analysis(document(complete), graph_documents(complete), complete)


def _check(request: AnalysisRequest) -> None:
    check_inputs(request)
    if request.modules_from_log and request.log_file is None:
        raise UsageError("--modules-from-log needs --log-file")
    if request.compile_dir is not None and not Path(request.compile_dir).exists():
        raise UsageError(
            f"--compile-dir {request.compile_dir} does not exist; it is the cache that holds"
            " neuronxcc-<version>/MODULE_<hash> directories"
        )


def _read_log(request: AnalysisRequest, watch: Watch) -> ParsedLog | None:
    if request.log_file is None:
        return None
    from ergmeter.importers.log import read_log  # noqa: PLC0415  numpy, for those with a log

    path = Path(request.log_file)
    size = path.stat().st_size if path.is_file() else 0
    try:
        return read_log(
            path, progress=lambda done: watch(AnalysisProgress("reading the log", done, size))
        )
    except FormatError as error:
        advice = "leave out --log-file, and give --throughput if you know it"
        raise FormatError(f"{error}; {advice}") from error


def _graphs_found(request: AnalysisRequest) -> CachedGraphs | None:
    """The selected graphs; None where the default directory does not exist."""
    choice = request.choice
    if request.modules_from_log and request.log_file is not None:
        choice = replace(choice, named_in_log=modules_named_in(request.log_file))
    return find_graphs(request.directory, choice) if Path(request.directory).exists() else None


def _count(
    request: AnalysisRequest, graphs: CachedGraphs | None, runs: dict[str, int] | None, watch: Watch
) -> list[GraphResult]:
    """Counts the graphs."""
    if graphs is None or not graphs.chosen:
        return []
    from ergmeter.hlo import count_files  # noqa: PLC0415  loaded where there is something to count

    done = 0

    def progress(_: FileCount) -> None:
        nonlocal done
        done += 1
        watch(AnalysisProgress("counting graphs", done, len(graphs.chosen)))

    results = []
    paths = [file.path for file in graphs.chosen]
    counts = count_files(paths, processes=request.processes, progress=progress)
    for file, counted in zip(graphs.chosen, counts, strict=True):
        times = 1 if runs is None else runs_of(file.module, runs)
        results.append(graph_result(counted, file, runs=times))
        watch(GraphCounted(file.path))
    if Path(graphs.directory).is_file() and results[0].error is not None:
        raise FormatError(f"--compile-dir {graphs.directory}: {results[0].error}")
    return results


def _score(
    request: AnalysisRequest, job_figures: Figures, pace: Throughput, summary: NkiSummary
) -> tuple[Score | None, str | None]:
    """The score's factors if requested, and why MFU or throughput is unknown."""
    if not (request.calculate_score or request.per_file_scores):
        return None, None
    mfu, ratio = job_figures.mfu, summary.overall_ratio
    if not isinstance(mfu, Reading):
        return Score(request.baseline, None, pace.seq_per_s, ratio), mfu.reason
    why = f"MFU {refusal(mfu)}" if mfu.impossible else None
    return Score(request.baseline, 100 * mfu.value, pace.seq_per_s, ratio, bool(why)), why
