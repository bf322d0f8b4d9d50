"""Analyzes the files of a Trainium job and returns the document of its metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError, UsageError
from ergmeter.metrics.catalog import refusal
from ergmeter.neuron.advice import (
    AdviceFinding,
    about_graphs,
    about_kernels,
    about_mfu,
    about_runs,
)
from ergmeter.neuron.analysis_types import (
    DEFAULT_CONVENTION,
    Analysis,
    AnalysisProgress,
    GraphCounted,
    Parts,
    Started,
    check_inputs,
)
from ergmeter.neuron.compile_cache import (
    find_graphs,
    modules_named_in,
    read_graph_runs,
    runs_of,
)
from ergmeter.neuron.document import document, graph_documents
from ergmeter.neuron.kernels import GraphResult, NkiSummary, graph_result, summarize
from ergmeter.neuron.log_agreement import about_log, is_printed, reconcile
from ergmeter.neuron.mfu import Figures, figures, machine
from ergmeter.neuron.score import Score
from ergmeter.neuron.throughput import Throughput, throughput
from ergmeter.neuron.training_job import read_job, read_training_file
from ergmeter.records import Reading

if TYPE_CHECKING:
    from ergmeter.hlo import FileCount
    from ergmeter.importers.log import ParsedLog
    from ergmeter.neuron.analysis_types import AnalysisRequest, Watch
    from ergmeter.neuron.compile_cache import CachedGraphs


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
