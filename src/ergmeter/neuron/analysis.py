"""Analyzes the files of a Trainium job: the request, its progress events, and its result."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ergmeter.errors import FormatError, UsageError
from ergmeter.flops.conventions import EXACT
from ergmeter.flops.source import read_model
from ergmeter.metrics.catalog import refusal
from ergmeter.metrics.definitions.compute import MFU
from ergmeter.neuron.advice import AdviceFinding, about_graphs, about_kernels, about_mfu, about_runs
from ergmeter.neuron.compile_cache import (
    CachedGraphs,
    Choice,
    find_graphs,
    modules_named_in,
    read_graph_runs,
    runs_of,
)
from ergmeter.neuron.kernels import GraphResult, NkiSummary, graph_result, summarize
from ergmeter.neuron.mfu import (
    TERA,
    Figures,
    Machine,
    OriginalEstimate,
    figures,
    machine,
    original_estimate,
)
from ergmeter.neuron.score import NKI, SCORE, THROUGHPUT, Baseline, Score
from ergmeter.neuron.training_job import NeuronJob, read_job, read_training_file
from ergmeter.neuron.training_log import (
    LogSummary,
    Throughput,
    about_log,
    is_printed,
    reconcile,
    summarize_log,
    throughput,
)
from ergmeter.records import Missing, Reading, Result, weakest
from ergmeter.units import NO_UNIT

if TYPE_CHECKING:
    from ergmeter.importers.log import ParsedLog


Watch: TypeAlias = Callable[[str, int, int], None]  # (task, amount done, total amount)


DEFAULT_COMPILE_DIR = "/home/ubuntu/neuron_cache"
DEFAULT_BACKEND = "trn1"
DEFAULT_CONVENTION = EXACT


@dataclass(frozen=True, slots=True)
class AnalysisRequest:
    """The options of one `erg analyze`. None: not given on the command line."""

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

    @property
    def directory(self) -> str:
        """The directory of the compile cache: as given, or the default."""
        return self.compile_dir or DEFAULT_COMPILE_DIR


def check_request(request: AnalysisRequest, *, is_original: bool = False) -> None:
    """Raise UsageError for a size that is 0, negative or not a number.

    The original script treats 0 as not given, and omits a factor whose baseline is 0 or less.
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
    baselines = {"--base-mfu": base.mfu_percent, "--base-throughput": base.throughput_seq_per_s}
    for option, value in (sizes | baselines).items():
        if value is None or (is_original and value == 0):
            continue
        may_be_negative = is_original and option in baselines
        if not math.isfinite(value) or (value < 0 and not may_be_negative) or value == 0:
            raise UsageError(f"{option} must be a number above 0; got {value:g}")


def check_inputs(request: AnalysisRequest, *, is_original: bool = False) -> None:
    """Raise UsageError for an invalid size, FormatError for a file that does not exist."""
    check_request(request, is_original=is_original)
    _check_model(request.model_config)
    _check_log(request.log_file)


def _check_log(path: str | None) -> None:
    """Raise FormatError if the log does not exist. Pipes and - (standard input) are accepted."""
    if path is None or path == "-":
        return
    if not Path(path).exists():
        raise FormatError(f"--log-file {path}: no such file")
    if Path(path).is_dir():
        raise UsageError(f"--log-file {path}: is a directory; pass a file")


def _check_model(path: str) -> None:
    """Raise FormatError if the model does not exist or is not a config.json."""
    try:
        read_model(path)
    except FormatError as error:
        if isinstance(error.__cause__, FileNotFoundError) and not Path(path).exists():
            advice = "--model-config takes the model's config.json"
            raise FormatError(f"{path}: no such file; {advice}") from error
        if Path(path).suffix in (".yaml", ".yml"):
            advice = "is the training's YAML; is it meant for --config?"
            raise FormatError(f"--model-config {path} {advice}") from error
        raise FormatError(f"--model-config {error}") from error


class JobInput(NamedTuple):
    """An input and its source: the YAML, the log, an option or an assumption."""

    what: str
    value: str | float | None
    source: str


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """Identifies a model's configuration: its name, type, version and a checksum."""

    name: str | None = None
    model_type: str | None = None
    transformers_version: str | None = None
    config_sha256: str | None = None  # None: no file, but dimensions on the command line


@dataclass(frozen=True, slots=True)
class JobDetails:
    """The inputs and results behind our own numbers; compatibility mode has none."""

    job: NeuronJob
    machine: Machine
    figures: Figures


@dataclass(frozen=True, slots=True)
class OriginalVersion:
    """The version of nki-llama's script that is reproduced, and which of its faults are kept."""

    version: str
    quirks_kept: tuple[str, ...]
    not_kept: tuple[str, ...]


@dataclass(frozen=True)
class Analysis:
    """The metrics of a job by key, and their inputs.

    Exactly one is set: `details` (our own numbers) or `original` (those of nki-llama's script).
    """

    request: AnalysisRequest
    batch_size: int
    seq_len: int
    nodes: int
    readings: dict[str, Result]
    pace: Throughput
    estimate: OriginalEstimate | None  # None: the original can't count the model
    tflop_per_s_per_node: float | None
    inputs: tuple[JobInput, ...]
    model: ModelVersion
    log: LogSummary | None
    nki: NkiSummary
    graphs: tuple[GraphResult, ...]
    score: Score | None
    findings: tuple[AdviceFinding, ...]
    left_out: dict[str, int] = field(default_factory=dict)  # files of the cache, by reason
    notes: tuple[str, ...] = ()
    details: JobDetails | None = None
    original: OriginalVersion | None = None

    @property
    def compilers(self) -> tuple[str, ...]:
        """The compiler versions that built the graphs."""
        return tuple(sorted({graph.compiler for graph in self.graphs if graph.compiler}))

    @property
    def score_missing(self) -> str:
        """Why neither the job nor a graph has a score; "" if MFU and throughput are known."""
        return "" if self.original is not None else no_score(self.readings[MFU])

    def value(self, key: str) -> float | None:
        """Return a metric's value, even if it is impossible; None if it is missing."""
        result = self.readings.get(key)
        return result.value if isinstance(result, Reading) else None

    def reason(self, key: str) -> str:
        """Return why a metric is missing, or "" if it is not."""
        result = self.readings.get(key)
        return result.reason if isinstance(result, Missing) else ""

    def nki_ratio(self, graph: GraphResult) -> float | None:
        """Return a graph's NKI ratio; without matrix products None, or 0 in compatibility mode."""
        return graph.nki_ratio or (0.0 if self.original is not None else graph.nki_ratio)

    def graph_score(self, graph: GraphResult) -> Score | None:
        """Return a graph's own score: the job's factors with the graph's NKI ratio."""
        if not self.request.per_file_scores or self.score is None or graph.error is not None:
            return None
        if self.score.without_nki is None:
            return None
        return replace(self.score, nki_ratio=self.nki_ratio(graph), mark=graph.mark)

    @property
    def score_statistics(self) -> dict[str, float]:
        """Average, min and max of the graphs' own scores; empty without scores."""
        scores = filter(None, map(self.graph_score, self.graphs))
        values = [score.value for score in scores if score.value is not None]
        if not values:
            return {}
        return {"average": sum(values) / len(values), "min": min(values), "max": max(values)}


def input_rows(
    request: AnalysisRequest, sizes: Sequence[JobInput], *, log_format: str = ""
) -> tuple[JobInput, ...]:
    """Return the rows of the input table: files that are given or searched for, then sizes."""
    cache_from = "--compile-dir" if request.compile_dir else "the default of --compile-dir"
    files = [
        JobInput("training's YAML", request.config, "--config"),
        JobInput("model", request.model_config, "--model-config"),
        JobInput("log", request.log_file, f"--log-file{log_format and f', read as {log_format}'}"),
        JobInput("compile cache", request.directory, cache_from),
    ]
    if request.graph_runs is not None:
        files.append(JobInput("runs of each graph", request.graph_runs, "--graph-runs"))
    return tuple(
        row if row.value is not None else row._replace(source="not given")
        for row in (*files, *sizes)
    )


def model_version(path: str) -> ModelVersion:
    """Return the name, version and checksum of a model's config.json; empty for dimensions."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        return ModelVersion()
    content = file.read_bytes()
    fields = json.loads(content)
    return ModelVersion(
        fields.get("_name_or_path"), fields.get("model_type"), fields.get("transformers_version"),
        hashlib.sha256(content).hexdigest(),
    )  # fmt: skip


# The analysis.


def analyze(request: AnalysisRequest, watch: Watch) -> Analysis:
    """Return the metrics of a job; `watch` gets progress events."""
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
    rate = pace.seq_per_s
    convention = request.convention or DEFAULT_CONVENTION
    job_figures = figures(request.model_config, job, hardware, pace, convention=convention)
    graphs = _graphs_found(request)
    results = _count(graphs, runs, watch)
    summary = summarize(results, weighted=runs is not None)
    no_graphs = list(about_graphs(graphs, request.directory, named_in_yaml=job.cache))
    texts = {
        "no_hlo": no_graphs,
        "nki_ratio": about_kernels(summary),
        "graph_runs": () if runs is None else about_runs(results, runs, request.graph_runs or ""),
        "log_disagrees": [*differences, *(() if log is None else about_log(log, job, pace))],
    }
    has_rate = log is None or is_printed(log, job, pace)
    findings = [
        *(AdviceFinding(about, text) for about in texts for text in texts[about]),
        *about_mfu(job_figures, job, hardware, pace, is_printed=has_rate),
    ]
    why = "no graph that could be read has a matrix product"
    if runs is not None and not any(result.runs for result in results):
        why = f"none of the graphs ran, by {request.graph_runs}"
    elif no_graphs:
        why = no_graphs[0]
    readings = job_figures.readings(pace) | {NKI: _nki_reading(summary, why)}
    score = None
    if request.calculate_score or request.per_file_scores:
        score = _score(request.baseline, readings, summary)
    if request.calculate_score and score is not None:
        readings[SCORE] = _score_reading(score, readings)
    flops, theirs = job_figures.flops.model_per_step, job_figures.original_flops
    return Analysis(
        request=request,
        batch_size=job.batch_size,
        seq_len=job.seq_len,
        nodes=job.nodes,
        readings=readings,
        pace=pace,
        estimate=None
        if theirs is None
        else original_estimate(
            theirs, rate, nodes=request.num_nodes or 1, backend=request.hw_backend,
            over_exact=job_figures.differences,
        ),
        tflop_per_s_per_node=None if rate is None else flops * rate / hardware.nodes / TERA,
        inputs=input_rows(
            request, _sizes(job, hardware, pace), log_format=log.format if log else ""
        ),
        model=model_version(request.model_config),
        log=None if log is None else summarize_log(log),
        nki=summary,
        graphs=tuple(results),
        score=score,
        findings=tuple(findings),
        left_out=graphs.left_out if graphs else {},
        notes=(*job.notes, *hardware.notes, *job_figures.notes),
        details=JobDetails(job, hardware, job_figures),
    )  # fmt: skip


def _sizes(job: NeuronJob, hardware: Machine, pace: Throughput) -> list[JobInput]:
    devices_from = job.devices_from if job.devices is not None else "assumed, see the notes"
    return [
        JobInput("sequences a step", job.batch_size, job.batch_from),
        JobInput("tokens a sequence", job.seq_len, job.seq_len_from),
        JobInput("sequences per second", pace.seq_per_s, pace.source),
        JobInput("nodes", job.nodes, job.nodes_from),
        JobInput("devices of a node", hardware.devices_per_node, devices_from),
        JobInput("cores in all", hardware.cores, "devices, and what a device is"),
        JobInput("type of products", job.dtype, job.dtype_from),
        JobInput("TFLOP/s of a core", hardware.core_flops_per_s / TERA, hardware.source),
        JobInput("recomputation", job.checkpointing, "the YAML"),
    ]


def _check(request: AnalysisRequest) -> None:
    check_inputs(request)
    if request.modules_from_log and request.log_file is None:
        raise UsageError("--modules-from-log needs --log-file")
    if request.compile_dir is not None and not Path(request.compile_dir).exists():
        raise FormatError(
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
        return read_log(path, progress=lambda done: watch("reading the log", done, size))
    except FormatError as error:
        advice = "leave out --log-file, and give --throughput if you know it"
        raise FormatError(f"{error}; {advice}") from error


def _graphs_found(request: AnalysisRequest) -> CachedGraphs | None:
    """Return the selected graphs; None if the default directory does not exist."""
    choice = request.choice
    if request.modules_from_log and request.log_file is not None:
        choice = replace(choice, named_in_log=modules_named_in(request.log_file))
    return find_graphs(request.directory, choice) if Path(request.directory).exists() else None


def _count(
    graphs: CachedGraphs | None, runs: dict[str, int] | None, watch: Watch
) -> list[GraphResult]:
    """Count the MACs of the selected graphs."""
    if graphs is None or not graphs.chosen:
        return []
    from ergmeter.hlo import count_files  # noqa: PLC0415  loaded where there is something to count

    results: list[GraphResult] = []
    counts = count_files(file.path for file in graphs.chosen)
    for file, counted in zip(graphs.chosen, counts, strict=True):
        times = 1 if runs is None else runs_of(file.module, runs)
        results.append(graph_result(counted, file, runs=times))
        watch("counting graphs", len(results), len(graphs.chosen))
    if Path(graphs.directory).is_file() and results[0].error is not None:
        raise FormatError(f"--compile-dir {graphs.directory}: {results[0].error}")
    return results


def _nki_reading(summary: NkiSummary, why: str) -> Result:
    if summary.overall_ratio is None:
        return Missing(why)
    note = f"counted in {summary.counted} compiled graphs, {summary.weighting}"
    return Reading(summary.overall_ratio, "frac", "derived", note=note)


def no_score(mfu: Result) -> str:
    """Return why there is no score for this MFU; "" if there is one."""
    if isinstance(mfu, Missing):
        return mfu.reason
    return f"MFU {refusal(mfu)}" if mfu.impossible else ""


def _score(baseline: Baseline, readings: dict[str, Result], summary: NkiSummary) -> Score:
    """Return the score, from its factors."""
    mfu, rate = readings[MFU], readings[THROUGHPUT]
    return Score(
        baseline,
        100 * mfu.value if isinstance(mfu, Reading) else None,
        rate.value if isinstance(rate, Reading) else None,
        summary.overall_ratio,
        is_mfu_impossible=isinstance(mfu, Reading) and bool(mfu.impossible),
        mark=summary.mark,
    )


def _score_reading(score: Score, readings: dict[str, Result]) -> Result:
    """Return the score as a reading, with an interval from that of the throughput.

    The interval's ratios are squared, because the product has the throughput twice: in MFU and
    directly.
    """
    mfu, rate, nki = readings[MFU], readings[THROUGHPUT], readings[NKI]
    if why := no_score(mfu):
        return Missing(why)
    if isinstance(nki, Missing):
        return Missing(f"the NKI ratio is not known: {nki.reason}")
    assert isinstance(mfu, Reading)
    assert isinstance(rate, Reading)
    assert score.value is not None
    note = "a product of five factors, given or measured"
    result = Reading(score.value, NO_UNIT, weakest(mfu.basis, rate.basis), note=note)
    if score.mark or rate.low is None or rate.high is None:
        return result
    low, high = (score.value * (end / rate.value) ** 2 for end in (rate.low, rate.high))
    note = f"{note}; its interval is that of the throughput, squared"
    return replace(result, low=low, high=high, note=note)
