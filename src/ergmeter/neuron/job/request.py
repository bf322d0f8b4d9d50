"""What is asked: the files of a job, what is known better than they say, what to put out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from ergmeter.errors import FormatError, UsageError
from ergmeter.flops.conventions import EXACT
from ergmeter.neuron.job.compile_cache import Choice
from ergmeter.neuron.score import Baseline

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


def check_request(request: AnalysisRequest, *, is_original: bool = False) -> None:
    """Refuse sizes that are none: 0, less, or not a number.

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


def check_log(path: str | None) -> None:
    """Refuse a log that is not there; a pipe is as good as a file, and - is standard input."""
    if path is None or path == "-":
        return
    if not Path(path).exists():
        raise UsageError(f"--log-file {path}: no such file")
    if Path(path).is_dir():
        raise UsageError(f"--log-file {path}: is no file")


def check_model(path: str) -> None:
    """Refuse a path where nothing is, or a model that is not here: misuse, not a damaged file."""
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
    """Refuse what is no config.json, by the option that named it."""
    from ergmeter.flops.config import read_config  # noqa: PLC0415  the engine

    try:
        read_config(path)
    except FormatError as error:
        if Path(path).suffix in (".yaml", ".yml"):
            said = "is the training's YAML; is it meant for --config?"
            raise FormatError(f"--model-config {path} {said}") from error
        raise FormatError(f"--model-config {error}") from error
