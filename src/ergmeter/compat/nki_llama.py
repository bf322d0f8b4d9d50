"""Computes the numbers of nki-llama's Trainium calculator, and lists its quirks.

This is `erg analyze --compat`. It reads logs and HLO files as that original does; the correct
readers are `ergmeter.importers.log` and `ergmeter.hlo`.
"""

from __future__ import annotations

import base64
import json
import math
import mmap
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from ergmeter.errors import UsageError
from ergmeter.hlo import proto
from ergmeter.hlo.module import Instruction
from ergmeter.hlo.wire import Buffer, Malformed, Span, integers, message, span, spans
from ergmeter.metrics.definitions.compute import MFU
from ergmeter.neuron.advice import AdviceFinding
from ergmeter.neuron.analysis import (
    Analysis,
    AnalysisRequest,
    JobInput,
    OriginalVersion,
    Watch,
    check_inputs,
    input_rows,
    model_version,
)
from ergmeter.neuron.compile_cache import Choice, graph_file
from ergmeter.neuron.document import (
    FORMAT,
    impossible,
    input_documents,
    obtained,
    original_document,
    versions,
)
from ergmeter.neuron.kernels import GraphResult, NkiSummary
from ergmeter.neuron.mfu import (
    PEAK_TFLOP_PER_S_PER_NODE,
    VERSION,
    impossible_mfu,
    impossible_score,
    original_estimate,
    sequence_flops,
)
from ergmeter.neuron.score import NKI, SCORE, TFLOP, THROUGHPUT, Score
from ergmeter.neuron.training_job import read_training_file
from ergmeter.neuron.training_log import (
    LogSummary,
    LogTimes,
    LossStatistics,
    Statistics,
    StepNumbers,
    Throughput,
)
from ergmeter.records import Reading, Result
from ergmeter.units import NO_UNIT

ORIGINAL = OriginalVersion(
    VERSION,
    quirks_kept=(
        "tflops_per_second is TFLOP of one sequence, not per second",
        "FLOPs count the embedding lookup as a matrix product, the softmax as 6 operations a pair"
        " and every pair of tokens, causal or not",
        "query and output projections are hidden x hidden, whatever head_dim says; LoRA is counted"
        " as full training",
        "the peak is that of whole instances, 3040 TFLOP/s (trn1) or 10672 (trn2) a node, whatever"
        " trainer.devices says; nodes are those of --num-nodes, else 1",
        "without a throughput 100 sequences/s are taken",
        "the log's throughput is the mean of all printed values that differ from the one before,"
        " warm-up included; exponents are cut off (2.73e-5 reads as 2.73)",
        "MACs are summed over every computation of every graph once: no loop counts, no"
        " convolutions, both branches of a condition, unreadable and absent kernel MACs as 0",
        "average, minimum and maximum NKI ratio leave out the graphs at 0",
        "what config.json leaves out is taken from transformers' LlamaConfig: hidden_size 4096, 32"
        " heads and layers, intermediate_size 11008, vocab_size 32000",
    ),
    not_kept=(
        "--per-file-scores gives scores without --calculate-score as well, as the guide has it;"
        " there the original gives none",
        "a log that is not there is an error instead of a warning",
        "unreadable kernel configurations are counted instead of announced one by one",
    ),
)
# The original's console titles, in its order, by the section of our document with these numbers.
CONSOLE_SECTIONS = {
    "log": "LOG FILE METRICS SUMMARY",
    "inputs": "Calculating metrics with",
    "graphs": "Per-file NKI analysis",
    "score": "Training Score Breakdown",
    "figures": "TRAINING METRICS SUMMARY",
    "nki": "NKI Analysis Summary",
}
DEFAULT_SEQ_PER_S = 100.0
# The original's patterns include model.hlo_module.pb and graph.hlo, which these match too.
PATTERNS = ("*.hlo_module.pb", "*.hlo")
_DECLARED, _MEAN = "--throughput", "--log-file, the mean of its values"
_ASSUMED = "assumed, as the original does"
_FORMULAS = {
    _DECLARED: "as given by --throughput",
    _MEAN: "mean of the values that the log prints, all of them",
    _ASSUMED: _ASSUMED,
}
_AS_IT_HAS_IT = "as the original has it"


def analyze_compat(request: AnalysisRequest, watch: Watch) -> Analysis:
    """Returns the metrics that the original computes for a job."""
    _check(request)
    file = read_training_file(request.config)
    batch = request.batch_size or file.required(
        "data.global_batch_size", instead="pass --batch-size"
    )
    length = request.seq_len or file.required("data.seq_length", instead="pass --seq-len")
    log = None if request.log_file is None else read_original_log(request.log_file)
    rate, rate_from = _throughput(request, log)
    nodes, backend = request.num_nodes or 1, request.hw_backend
    if backend not in PEAK_TFLOP_PER_S_PER_NODE:
        knows = "--compat knows --hw-backend trn1 and trn2, as the original does"
        raise UsageError(f"{knows}; got {backend}")
    flops = float(sequence_flops(request.model_config, length))
    estimate = original_estimate(flops, rate, nodes=nodes, backend=backend, over_exact={})
    mfu_percent, tflop = estimate.mfu_percent or 0.0, estimate.tflop_per_sequence
    paced = Reading(
        rate, "samples/s", "assumed" if rate_from == _ASSUMED else "reported",
        note=f"{_AS_IT_HAS_IT}; throughput: {rate_from}",
    )  # fmt: skip
    sizes = [
        JobInput("sequences a step", batch, "--batch-size" if request.batch_size else "the YAML"),
        JobInput("tokens a sequence", length, "--seq-len" if request.seq_len else "the YAML"),
        JobInput("sequences per second", rate, rate_from),
        JobInput("nodes", nodes, "--num-nodes" if request.num_nodes else "assumed"),
    ]
    mfu = replace(
        paced, value=mfu_percent / 100, unit="frac", impossible=impossible_mfu(mfu_percent)
    )
    graphs, unreadable = _graphs(original_files(request.directory), watch)
    nki = original_summary(graphs, unreadable)
    ratio = nki.overall_ratio or 0.0
    readings: dict[str, Result] = {
        MFU: mfu,
        THROUGHPUT: paced,
        TFLOP: Reading(tflop, "TFLOP", "derived", note=_AS_IT_HAS_IT),
        NKI: Reading(ratio, "frac", "derived", note=_AS_IT_HAS_IT),
    }
    score = None
    if request.calculate_score or request.per_file_scores:
        why = impossible_score(mfu.impossible)
        score = Score(
            request.baseline, mfu_percent, rate, ratio,
            is_mfu_impossible=bool(why), impossible=why,
        )  # fmt: skip
        if request.calculate_score:
            readings[SCORE] = replace(mfu, value=score.value or 0.0, unit=NO_UNIT, impossible=why)
    return Analysis(
        request=request,
        batch_size=batch,
        seq_len=length,
        nodes=nodes,
        readings=readings,
        pace=Throughput(paced, _FORMULAS[rate_from], is_from_log=rate_from == _MEAN),
        estimate=estimate,
        tflop_per_s_per_node=rate * tflop / nodes,
        inputs=input_rows(request, sizes),
        model=model_version(request.model_config),
        log=log,
        nki=nki,
        graphs=graphs,
        score=score,
        findings=tuple(_findings(request.directory, len(graphs), unreadable)),
        original=ORIGINAL,
    )


def compat_document(analysis: Analysis) -> dict[str, Any]:
    """The JSON document of the original's numbers, with the original's keys first."""
    assert analysis.estimate is not None
    return original_document(analysis) | {
        "mfu_percent": analysis.estimate.mfu_percent or 0.0,  # to its last digit
        "tflops_per_second": analysis.value(TFLOP),
        "format": FORMAT,
        "compat": asdict(ORIGINAL),
        "unreadable_kernel_configs": analysis.nki.calls["unreadable"],
        "findings": [asdict(each) for each in analysis.findings],
        "versions": versions(analysis),
        "impossible": impossible(analysis),
        "obtained": _obtained(analysis),
        "inputs": input_documents(analysis),
    }


def _check(request: AnalysisRequest) -> None:
    """Raises UsageError for options or inputs that the original does not have, or can't use."""
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
            raise UsageError(f"--compat works as the original, which has no {option}; leave it out")
    if request.log_file is not None and not Path(request.log_file).is_file():  # a pipe
        raise UsageError(f"--log-file {request.log_file}: is no file")


def _throughput(request: AnalysisRequest, log: LogSummary | None) -> tuple[float, str]:
    """Sequences per second, and their source."""
    if request.throughput:
        return request.throughput, _DECLARED
    mean = log.throughput.average if log else None
    return (mean, _MEAN) if mean else (DEFAULT_SEQ_PER_S, _ASSUMED)


def _obtained(analysis: Analysis) -> dict[str, Any]:
    """How each of the original's metrics was obtained, under the original's keys."""
    origins = obtained(analysis)
    return {
        "throughput_seq_per_sec": origins["throughput_seq_per_sec"],
        "mfu_percent": origins["mfu_percent"],
        "training_score": origins["mfu_percent"],  # also where no score was asked for
        "tflops_per_second": origins["tflop_per_sequence"],
        "overall_nki_ratio": origins["overall_nki_ratio"],
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


def original_summary(graphs: Sequence[GraphResult], unreadable: int) -> NkiSummary:
    """The original's summary: ratios only over files above 0, else 0."""
    good = [graph for graph in graphs if graph.error is None]
    macs, nki = sum(graph.macs for graph in good), sum(graph.nki_macs for graph in good)
    ratios = [ratio for graph in good if (ratio := graph.nki_ratio)]
    return NkiSummary(
        total=len(graphs),
        successful=len(good),
        macs=macs,
        nki_macs=nki,
        overall_ratio=nki / macs if macs > 0 else 0.0,
        average_ratio=sum(ratios) / len(ratios) if ratios else 0.0,
        least_ratio=min(ratios, default=0.0),
        most_ratio=max(ratios, default=0.0),
        calls={"unreadable": unreadable},
    )


def _graphs(paths: Sequence[str], watch: Watch) -> tuple[tuple[GraphResult, ...], int]:
    """Every graph as the original counts it, and how many kernel configurations count as 0."""
    graphs = []
    unreadable = 0
    for done, path in enumerate(paths, start=1):
        name, file = Path(path).name, graph_file(path)
        try:
            macs, nki_macs, not_read = original_count(path)
            graph = GraphResult(path, name, file.module, file.compiler, macs, nki_macs)
            unreadable += not_read
        except (ValueError, OSError) as error:
            graph = GraphResult(path, name, file.module, file.compiler, 0, 0, str(error))
        graphs.append(graph)
        watch("counting graphs", done, len(paths))
    return tuple(graphs), unreadable


# Reads a log as the original's second version does: progress-bar lines of one trainer. Its faults
# are kept: numbers end at an `e`, the documented form `throughput: 150.5` is not recognised,
# consecutive equal values count once, and repeated time stamps are ignored, also at the end.


_NUMBER = r"([\d.]+)"
_STAMP = re.compile(r"\[(\d{4}-\d{2}-\d{2}\s+\d{2}:\d{2}:\d{2})[.,]\d+[:\]]")
_STEP_TIME = re.compile(rf"step_time[:\s]+{_NUMBER}")
_NAMES = (
    "reduced_train_loss", "lr", "global_step", "consumed_samples", "throughput",
    "throughput_peak", "gradient_norm",
)  # fmt: skip
_BAR = re.compile(
    r"Epoch\s+(\d+):\s*\d+%\|[█▌\s]+\|\s*\d+/\d+" + "".join(rf".*?{n}={_NUMBER}" for n in _NAMES)
)
_LOSS, _STEP, _RATE = "reduced_train_loss", "global_step", "throughput"  # reported by the original
_SINGLE = {name: re.compile(f"{name}={_NUMBER}") for name in (_LOSS, _STEP, _RATE)}


def read_original_log(path: str) -> LogSummary:
    """Reads a log as the original does, line by line; statistics include the warm-up."""
    stamps: dict[str, None] = {}  # each once, in the order of their first lines
    steps: set[int] = set()
    step_times: list[float] = []
    columns: dict[str, list[float]] = {_LOSS: [], _RATE: []}
    with Path(path).open(encoding="utf-8", errors="replace") as stream:  # a bare \r ends a line too
        for line in stream:
            if stamp := _STAMP.search(line):
                stamps.setdefault(stamp[1])
            if "step_time" in line and (timed := _STEP_TIME.search(line)):
                step_times += _numbers(timed[1])
            if f"{_LOSS}=" not in line:
                continue
            printed = _printed(line)
            steps.update(int(step) for step in _numbers(printed.get(_STEP, "")))
            for name, values in columns.items():
                values += [
                    value for value in _numbers(printed.get(name, "")) if values[-1:] != [value]
                ]
    written = datetime.fromtimestamp(Path(path).stat().st_mtime).strftime("%Y-%m-%d %H:%M:%S")
    first, last = next(iter(stamps), None), next(reversed(stamps), None)
    losses = columns[_LOSS]
    return LogSummary(
        path,
        LogTimes(first, last, None if stamps else written),
        StepNumbers(len(steps), min(steps, default=None), max(steps, default=None)),
        Statistics(*_statistics(step_times)),
        Statistics(*_statistics(columns[_RATE])),
        LossStatistics(
            *_statistics(losses), next(iter(losses), None), next(reversed(losses), None)
        ),
    )


def _printed(line: str) -> dict[str, str]:
    """The values of a line by name, as text: of a progress bar, else each found by itself."""
    if bar := _BAR.search(line):
        return dict(zip(_NAMES, bar.groups()[1:], strict=True))
    singles = {name: pattern.search(line) for name, pattern in _SINGLE.items()}
    return {name: match[1] for name, match in singles.items() if match}


def _numbers(text: str) -> list[float]:
    """The text as a number, in a list; an empty list if it is not one."""
    try:
        return [float(text)]
    except ValueError:
        return []


def _statistics(values: list[float]) -> tuple[float | None, float | None, float | None, int]:
    """Mean, minimum, maximum and count."""
    if not values:
        return None, None, None, 0
    return sum(values) / len(values), min(values), max(values), len(values)


# Multiply-adds as the original counts them: every dot of every computation once. Calls, loops and
# branches are not followed. A kernel counts what its configuration states, else 0.


_KERNEL = "AwsNeuronCustomNativeKernel"
_BATCHED_RIGHT, _CONTRACTED_RIGHT = 4, 2  # dimension numbers of a dot's right operand


class OriginalCount(NamedTuple):
    """MACs that the original counts in a file, and the kernel configurations it can't read."""

    macs: int
    nki_macs: int
    unreadable: int


def original_count(path: str) -> OriginalCount:
    """Count a file's MACs. ValueError with a one-line reason where the original fails."""
    with Path(path).open("rb") as stream:
        if not Path(path).stat().st_size:
            return OriginalCount(0, 0, 0)
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        module = message(data, 0, len(data))
        name = span(module, proto.MODULE_NAME)
        if name is not None:
            data[name[0] : name[1]].decode()  # protobuf refuses a name that is not UTF-8
        counts = [_computation(data, where) for where in spans(module, proto.MODULE_COMPUTATION)]
    except (Malformed, UnicodeDecodeError) as error:
        raise ValueError(f"not an HloModuleProto: {error}") from error
    finally:
        data.close()
    return OriginalCount(*map(sum, zip(*counts, strict=True))) if counts else OriginalCount(0, 0, 0)


def _computation(data: Buffer, where: Span) -> OriginalCount:
    extents = spans(message(data, *where), proto.COMPUTATION_INSTRUCTION)
    instructions = [Instruction(data, message(data, *extent), extent) for extent in extents]
    by_id = {instruction.integer(proto.ID): instruction for instruction in instructions}
    macs = nki = unreadable = 0
    for instruction in instructions:
        if instruction.opcode == "dot":
            macs += _dot(instruction, by_id)
        elif instruction.opcode == "custom-call" and _is_kernel(instruction):
            stated = _stated(instruction)
            unreadable += stated is None
            macs += stated or 0
            nki += stated or 0
    return OriginalCount(macs, nki, unreadable)


def _is_kernel(call: Instruction) -> bool:
    return call.text(proto.CUSTOM_CALL_TARGET) == _KERNEL


def _dot(dot: Instruction, by_id: dict[int, Instruction]) -> int:
    """MACs of a dot: batch x free left x contracted x free right sizes of its operands."""
    operands = dot.operand_ids
    if len(operands) != 2 or any(operand not in by_id for operand in operands):
        raise ValueError(f"a dot has operands {operands} that are not in its computation")
    left, right = (by_id[operand].shape.dimensions for operand in operands)
    numbers = dot.part(proto.DOT_DIMENSIONS)
    taken = {
        *integers(dot.data, numbers, _CONTRACTED_RIGHT),
        *integers(dot.data, numbers, _BATCHED_RIGHT),
    }
    free_right = math.prod(size for axis, size in enumerate(right) if axis not in taken)
    return math.prod(left) * free_right


def _stated(call: Instruction) -> int | None:
    """A kernel's stated `mac_count`, 0 without one; None if its configuration can't be read."""
    try:
        config = base64.b64decode(call.encoded(proto.BACKEND_CONFIG))
        return int(json.loads(config).get("mac_count", 0))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
