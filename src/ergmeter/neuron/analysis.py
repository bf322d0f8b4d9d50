"""From a job's files to the document of its metrics, with right values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError, UsageError
from ergmeter.metrics.catalog import refusal
from ergmeter.neuron.advice import about_graphs, about_kernels, about_mfu, about_runs
from ergmeter.neuron.document import document
from ergmeter.neuron.figures import figures
from ergmeter.neuron.graph_runs import read_graph_runs, runs_of
from ergmeter.neuron.graphs import graph_documents
from ergmeter.neuron.job.compile_cache import Choice, find_graphs, modules_named_in
from ergmeter.neuron.job.job import read_job
from ergmeter.neuron.job.log_figures import log_document
from ergmeter.neuron.job.machine import machine
from ergmeter.neuron.job.pace import throughput
from ergmeter.neuron.job.request import (
    DEFAULT_COMPILE_DIR,
    DEFAULT_CONVENTION,
    check_log,
    check_model,
    check_request,
)
from ergmeter.neuron.job.yaml_settings import read_training_file
from ergmeter.neuron.kernels import graph_result, summarize
from ergmeter.neuron.parts import Analysis, Parts
from ergmeter.neuron.progress import (
    AnalysisProgress,
    FoundGraphs,
    GraphCounted,
    Inputs,
    LogRead,
    Searching,
    ThroughputChosen,
)
from ergmeter.neuron.score import Score, score
from ergmeter.records import Reading

if TYPE_CHECKING:
    from ergmeter.hlo import FileCount
    from ergmeter.importers.log import ParsedLog
    from ergmeter.neuron.advice import AdviceFinding
    from ergmeter.neuron.figures import Figures
    from ergmeter.neuron.job.compile_cache import CachedGraphs
    from ergmeter.neuron.job.job import NeuronJob
    from ergmeter.neuron.job.pace import Throughput
    from ergmeter.neuron.job.request import AnalysisRequest
    from ergmeter.neuron.kernels import GraphResult, NkiSummary
    from ergmeter.neuron.progress import Watch


def analyze(request: AnalysisRequest, watch: Watch) -> Analysis:
    """The metrics of a job."""
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
    job, differences = _settled(job, log)
    pace = throughput(request.throughput, log, job)
    convention = request.convention or DEFAULT_CONVENTION
    found_figures = figures(request.model_config, job, hardware, pace, convention=convention)
    parts = Parts(request, job, hardware, pace, found_figures, log)
    found = _graphs_found(request)
    # What can be refused has been: from here on there is something to say.
    if log is not None:
        watch(LogRead(log_document(log, pace)))
    if pace.is_from_log and pace.seq_per_s is not None:
        watch(ThroughputChosen(pace.seq_per_s, is_from_log=True, said=pace.how))
    watch(Inputs(document(parts)))
    results = _count(request, found, runs, watch)
    summary = summarize(results, weighted=runs is not None)
    directory = request.compile_dir or DEFAULT_COMPILE_DIR
    findings = [
        *about_graphs(found, directory, named_in_yaml=job.cache),
        *about_kernels(summary),
        *(about_runs(results, runs, request.graph_runs or "") if runs is not None else ()),
        *differences,
        *_about_log(log, job, pace),
        *about_mfu(found_figures, job, hardware, pace, is_printed=_is_printed(log, job, pace)),
    ]
    factors, why = _score(request, found_figures, pace, summary)
    whole = replace(
        parts,
        found=found,
        results=tuple(results),
        summary=summary,
        findings=tuple(findings),
        score=factors,
        score_missing=why,
    )
    return Analysis(document(whole), graph_documents(whole), whole)


def _settled(job: NeuronJob, log: ParsedLog | None) -> tuple[NeuronJob, list[AdviceFinding]]:
    if log is None:
        return job, []
    from ergmeter.neuron.job.agreement import settled  # noqa: PLC0415  numpy, for those with a log

    return settled(job, log)


def _about_log(log: ParsedLog | None, job: NeuronJob, pace: Throughput) -> list[AdviceFinding]:
    if log is None:
        return []
    from ergmeter.neuron.job.agreement import about_log  # noqa: PLC0415  numpy, for those with a log

    return about_log(log, job, pace)


def _is_printed(log: ParsedLog | None, job: NeuronJob, pace: Throughput) -> bool:
    if log is None:
        return True
    from ergmeter.neuron.job.agreement import is_printed  # noqa: PLC0415  numpy, for those with a log

    return is_printed(log, job, pace)


def _check(request: AnalysisRequest) -> None:
    check_request(request)
    check_model(request.model_config)
    check_log(request.log_file)
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
    """The graphs that are meant; None where the default directory is not there."""
    directory = request.compile_dir or DEFAULT_COMPILE_DIR
    choice: Choice = request.choice
    if request.modules_from_log and request.log_file is not None:
        choice = replace(choice, named_in_log=modules_named_in(request.log_file))
    return find_graphs(directory, choice) if Path(directory).exists() else None


def _count(
    request: AnalysisRequest, found: CachedGraphs | None, runs: dict[str, int] | None, watch: Watch
) -> list[GraphResult]:
    """The graphs, counted."""
    directory = request.compile_dir or DEFAULT_COMPILE_DIR
    watch(Searching(directory))
    watch(FoundGraphs(0 if found is None else len(found.chosen)))
    if found is None or not found.chosen:
        return []
    from ergmeter.hlo import count_files  # noqa: PLC0415  loaded where there is something to count

    done = 0

    def progress(_: FileCount) -> None:
        nonlocal done
        done += 1
        watch(AnalysisProgress("counting graphs", done, len(found.chosen)))

    results = []
    paths = [file.path for file in found.chosen]
    for file, counted in zip(
        found.chosen,
        count_files(paths, processes=request.processes, progress=progress),
        strict=True,
    ):
        results.append(
            graph_result(counted, file, runs=1 if runs is None else runs_of(file.module, runs))
        )
        watch(GraphCounted(file.path))
    if Path(directory).is_file() and results[0].error is not None:
        raise FormatError(f"--compile-dir {directory}: {results[0].error}")
    return results


def _score(
    request: AnalysisRequest, found: Figures, pace: Throughput, summary: NkiSummary
) -> tuple[Score | None, str | None]:
    """The factors of the score, if one was asked for, and why two of them are not known."""
    if not (request.calculate_score or request.per_file_scores):
        return None, None
    mfu, why = found.mfu, None
    if not isinstance(mfu, Reading):
        why = mfu.reason
    elif mfu.impossible:
        why = f"MFU {refusal(mfu)}"
    factors = score(
        request.baseline,
        mfu_percent=100 * mfu.value if isinstance(mfu, Reading) and why is None else None,
        seq_per_s=pace.seq_per_s,
        nki_ratio=summary.overall_ratio,
    )
    return factors, why
