"""The request of an analysis, its progress events, and its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ergmeter.errors import FormatError, UsageError
from ergmeter.flops.conventions import EXACT
from ergmeter.neuron.compile_cache import CachedGraphs, Choice
from ergmeter.neuron.score import Baseline, Score

if TYPE_CHECKING:
    from ergmeter.importers.log import ParsedLog
    from ergmeter.neuron.advice import AdviceFinding
    from ergmeter.neuron.kernels import GraphResult, NkiSummary
    from ergmeter.neuron.mfu import Figures, Machine
    from ergmeter.neuron.throughput import Throughput
    from ergmeter.neuron.training_job import NeuronJob

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
