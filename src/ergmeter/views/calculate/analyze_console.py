"""The result of `erg analyze` on the terminal, in the original tool's layout.

Its number formats are those of the page and of Markdown too.
"""

from __future__ import annotations

import math
import re
import textwrap
from typing import TYPE_CHECKING

from ergmeter.flops.conventions import CONVENTIONS
from ergmeter.metrics.definitions.compute import HFU, MFU
from ergmeter.neuron.analysis import Event, GraphCounted, Started
from ergmeter.neuron.compile_cache import abbreviated_list
from ergmeter.neuron.kernels import LEGEND, LOWER_BOUND, UNCERTAIN, decimals
from ergmeter.neuron.mfu import BACKENDS, TERA, OriginalEstimate, impossible_mfu
from ergmeter.neuron.score import REMARK, SCORE, TFLOP, TFLOP_PER_S, THROUGHPUT
from ergmeter.records import Reading, Result
from ergmeter.units import number_of, significant

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ergmeter.neuron.analysis import Analysis, JobDetails
    from ergmeter.neuron.kernels import GraphResult, NkiSummary
    from ergmeter.neuron.score import Score
    from ergmeter.neuron.training_log import LogSummary, LossStatistics, Statistics

_COLUMNS = 80
_WIDE, _NARROW = 60, 50  # of the rules that the original draws
_ORIGINAL_COLUMNS = 120  # and of those around its table of graphs
IMPOSSIBLE = " (impossible)"
_BOUNDS = {UNCERTAIN: " (not certain)", LOWER_BOUND: " (a lower bound)"}


def wrapped(text: str, lead: str = "") -> Iterator[str]:
    """Yield a sentence wrapped to the width of a terminal; paths and names are not broken."""
    yield from textwrap.wrap(
        text,
        _COLUMNS,
        initial_indent=lead,
        subsequent_indent=" " * max(2, len(lead)),
        break_long_words=False,
        break_on_hyphens=False,
    )


def heading(title: str, width: int) -> Iterator[str]:
    """Yield a title between two rules."""
    yield from ("=" * width, title, "=" * width)


def ratio(value: float | None) -> str:
    """Format a ratio, or a dash if unknown."""
    return "-" if value is None else decimals(value, 4)


def fixed(value: float | None, digits: int, unit: str = "") -> str:
    """Format with a fixed number of decimals; integers with thousands separators."""
    return "-" if value is None else f"{value:{'' if digits else ','}.{digits}f} {unit}".rstrip()


def bound(mark: str) -> str:
    """Return the note behind a ratio that is not exact, from its mark."""
    return _BOUNDS.get(mark, "")


def mark_of(result: Result | None) -> str:
    """Return the mark behind an impossible value."""
    return result.mark if isinstance(result, Reading) else ""


def counted(count: int, what: str) -> str:
    """Return a count with its noun: `2 loops whose ...`, `1 loop whose ...`."""
    noun, _, rest = what.partition(" ")
    if count == 1:
        noun = noun.removesuffix("es") if noun.endswith("ches") else noun.removesuffix("s")
    return f"{count:,} {noun} {rest}"


def percentage(value: float | None, space: str = " ") -> str:
    """Format a percentage, or a dash if unknown."""
    return "-" if value is None else f"{decimals(value, 2, full=100.0)}{space}%"


def frac_percentage(frac: float | None, space: str = " ") -> str:
    """Format a fraction as a percentage, or a dash if unknown."""
    return percentage(None if frac is None else 100 * frac, space)


def is_more(value: float | None, other: float | None) -> bool:
    """True if a value is known to be more than another, beyond rounding."""
    return value is not None and other is not None and value > other * (1 + 1e-9)


# The training log, under the original's labels.


def log_section(log: LogSummary) -> Iterator[str]:
    """Yield the lines about the training log."""
    yield ""
    yield from heading("LOG FILE METRICS SUMMARY", _WIDE)
    yield f"Log file: {log.log_file}"
    stamps, steps = log.timestamps, log.steps
    if stamps.first:
        yield "\nTraining Timeline:"
        yield f"  First timestamp: {stamps.first}"
        yield f"  Last timestamp: {stamps.last}"
    elif stamps.file_modification:
        yield f"\nFile modified: {stamps.file_modification} (the lines have no time)"
    if steps.count:
        yield "\nTraining Steps:"
        yield f"  Total steps recorded: {steps.count}"
        yield f"  First step: {steps.first}"
        yield f"  Last step: {steps.last}"
    yield from _statistics("Step Time Statistics", log.step_times, "seconds", 3)
    yield from _statistics("Throughput Statistics", log.throughput, "seq/s", 3)
    losses = {"First loss": log.losses.first, "Last loss": log.losses.last}
    yield from _statistics("Loss Statistics", log.losses, "", 4, losses)
    if log.losses.not_finite and not log.losses.count:
        yield "\nLoss Statistics:"
    yield from (f"  {line}" for line in without_a_loss(log.losses))
    if log.steady_state is not None:
        if log.runs_in_log > 1:
            yield f"\n{log.runs_in_log} runs in this log: the last one is shown"
        yield ""
        yield from wrapped(f"Steady state: {log.steady_state.rule}")
        for note in log.notes:
            yield from wrapped(note, "  - ")


def without_a_loss(losses: LossStatistics) -> Iterator[str]:
    """Yield counts of NaN losses and of missing losses, which the original counts as one."""
    printed = losses.not_finite + losses.count
    if losses.not_finite:
        step = losses.first_not_finite_step
        first = "" if step is None else f", first at step {step}"
        yield f"Not a number (nan or inf): {losses.not_finite} of {printed} printed{first}"
    if losses.not_printed and printed:
        yield f"Not printed: {losses.not_printed} of {printed + losses.not_printed} lines"


def _statistics(
    title: str, of: Statistics, unit: str, digits: int, more: dict[str, float | None] | None = None
) -> Iterator[str]:
    if of.average is None:
        return
    yield f"\n{title}:"
    values = {"Average": of.average, "Min": of.min, "Max": of.max, **(more or {})}
    for name, value in values.items():
        if value is not None:
            yield f"  {name}: {value:.{digits}f} {unit}".rstrip()
    yield f"  Number of measurements: {of.count}"


def event_lines(event: Event) -> Iterator[str]:
    """Yield the console lines of a progress event."""
    if isinstance(event, GraphCounted):
        yield f"Analyzing: {event.path}"
    if not isinstance(event, Started):
        return
    analysis = event.analysis
    if analysis.log is not None:
        yield from log_section(analysis.log)
    if analysis.pace.is_from_log:
        rate = analysis.value(THROUGHPUT)
        yield f"\nUsing average throughput from log file: {rate:.2f} seq/s"
        if analysis.details is not None:
            yield from wrapped(analysis.pace.formula, "  ")
    elif isinstance(analysis.pace.result, Reading) and analysis.pace.result.basis == "assumed":
        yield "Warning: No throughput information provided, using default"
    yield from inputs_section(analysis)
    yield f"\nSearching for HLO files in {analysis.request.directory}..."
    is_one = event.graphs == 1 and analysis.original is None
    yield f"Found {event.graphs} HLO {'file' if is_one else 'files'}"


def inputs_section(analysis: Analysis) -> Iterator[str]:
    """Yield the inputs of the metrics."""
    rate, details = analysis.value(THROUGHPUT), analysis.details
    batch_from, length_from = ("", "") if details is None else _from_log(details)
    yield "\nCalculating metrics with:"
    yield f"  Model config: {analysis.request.model_config}"
    yield f"  Batch size: {analysis.batch_size}{batch_from}"
    yield f"  Sequence length: {analysis.seq_len}{length_from}"
    rate_text = "-" if rate is None else rate if details is None else significant(rate, 6)
    yield f"  Throughput: {rate_text} seq/s"
    yield f"  Hardware: {analysis.request.hw_backend}"
    yield f"  Nodes: {analysis.nodes}"
    if details is not None:
        yield from _own_inputs(details)


def _from_log(details: JobDetails) -> list[str]:
    sources = (details.job.batch_from, details.job.seq_len_from)
    return [" (the log's)" if source == "the log" else "" for source in sources]


def _own_inputs(details: JobDetails) -> Iterator[str]:
    job, machine, flops, work = (
        details.job, details.machine, details.figures.flops, details.figures.work
    )  # fmt: skip
    cores, each = machine.cores_per_node, machine.core_flops_per_s / TERA
    per_node = None if cores is None else cores * machine.core_flops_per_s / TERA
    devices = _number_text(machine.devices_per_node)
    yield f"  Devices per node: {devices} ({_number_text(cores)} cores)"
    yield (
        f"  Peak: {each:g} TFLOP/s a core, {machine.chip_flops_per_s / TERA:g} a chip of"
        f" {BACKENDS[machine.backend].cores_per_chip}, {_number_text(per_node)} a node,"
        f" dense {machine.dtype}"
    )
    formula = CONVENTIONS[flops.convention].formula
    yield from wrapped(f"Convention: {flops.convention} ({formula})", "  ")
    if job.lora is not None:
        share = decimals(100 * work.params_trained / work.params, 3, full=100)
        targets = ", ".join(job.lora.targets)
        yield from wrapped(f"LoRA: r={job.lora.r} on {targets} ({share} % trained)", "  ")


def files_section(analysis: Analysis) -> Iterator[str]:
    """Yield one line for each graph."""
    graphs, is_original = analysis.graphs, analysis.original is not None
    if not graphs and not is_original:
        yield "\nPer-file NKI analysis: no graphs"
        return
    scores = {graph.path: score for graph in graphs if (score := analysis.graph_score(graph))}
    wide = max([20, *(len(graph.module or "-") for graph in graphs)])
    long = max([40, *(len(graph.name) for graph in graphs)])
    many = max([15, *(len(f"{graph.macs:,}") for graph in graphs)])
    head = f"{'File Name':<{long}} {'Module':<{wide}} {'HLO MACs':>{many}} {'NKI MACs':>{many}}"
    head += f" {'NKI Ratio':>10}" + (f" {'Score':>10}" if scores else "")
    rule = "-" * (_ORIGINAL_COLUMNS if is_original else len(head))
    yield "\nPer-file NKI analysis:"
    yield from (rule, head, rule)
    for graph in graphs:
        if graph.error is not None:
            # The original names no module of a file that it can't read.
            module = "" if is_original else f" {graph.module or '-':<{wide}}"
            yield f"{graph.name:<{long}}{module} ERROR: {graph.error}"
            continue
        line = (
            f"{graph.name:<{long}} {graph.module or '-':<{wide}}"
            f" {graph.macs:>{many},} {graph.nki_macs:>{many},}"
            f" {ratio(analysis.nki_ratio(graph)) + graph.mark:>10}"
        )
        score = scores.get(graph.path)
        yield line + (f" {fixed(score.value, 4) + graph.mark:>10}" if score else "")
    yield rule
    yield from legend(graph.mark for graph in graphs)
    if analysis.request.per_file_scores and analysis.score_missing:
        yield from wrapped(f"No score of a graph: {analysis.score_missing}")
    statistics = analysis.score_statistics
    if statistics and analysis.nki is not None:
        yield "\nPer-file Score Statistics:"
        for name, value in statistics.items():
            yield f"  {name.title()} Score: {value:.4f}{bound(analysis.nki.mark)}"


def legend(marks: Iterable[str]) -> list[str]:
    """Return the meaning of each of the marks."""
    used = set(marks)
    return [f"{mark} {meaning}" for mark, meaning in LEGEND.items() if mark in used]


def score_section(score: Score, result: Result, *, is_original: bool) -> Iterator[str]:
    """Yield the factors of the score and their product."""
    base, mfu, rate = score.baseline, score.mfu_improvement, score.throughput_improvement
    reached = percentage(score.mfu_percent, "")
    yield "\nTraining Score Breakdown:"
    yield "=" * _NARROW
    if mfu is None:
        wrong = f" (MFU {reached} is impossible)" if score.is_mfu_impossible else ""
        yield f"MFU improvement: -{wrong}"
    else:
        yield f"MFU improvement: {mfu:.4f} ({base.mfu_percent:.2f}% → {reached})"
    ends = f"{base.throughput_seq_per_s:.2f} → {fixed(score.seq_per_s, 2)} seq/s"
    yield f"Throughput improvement: {'-' if rate is None else f'{rate:.4f} ({ends})'}"
    yield f"Loss improvement: {base.loss_improvement:.4f}"
    yield f"Convergence rate improvement: {base.convergence_rate:.4f}"
    marked = bound(score.mark)
    yield f"NKI flop ratio: {ratio(score.nki_ratio)}{marked}"
    if score.nki_factor is not None and not is_original:
        sum_of = f"({base.offset:g} + NKI flop ratio)"
        yield f"NKI factor: {score.nki_factor:.4f} {sum_of}{marked}"
    yield "=" * _NARROW
    if isinstance(result, Reading):
        yield f"Final Training Score: {result.value:.4f}{marked}{result.mark}"
    else:
        yield from wrapped(f"Final Training Score: - ({result.reason})")
        if score.without_nki is not None:
            yield f"Without the NKI factor: {score.without_nki:.4f}"
    if not is_original:
        yield from wrapped(f"({REMARK})")


def result_lines(analysis: Analysis, *, per_file: bool) -> Iterator[str]:
    """Yield the graphs one by one if asked for, the score, and the summary."""
    if per_file:
        yield from files_section(analysis)
    if analysis.score is not None and SCORE in analysis.readings:
        is_original = analysis.original is not None
        yield from score_section(analysis.score, analysis.readings[SCORE], is_original=is_original)
    yield from summary_section(analysis)


def summary_section(analysis: Analysis) -> Iterator[str]:
    """Yield the headline metrics, then their basis."""
    yield ""
    yield from heading("TRAINING METRICS SUMMARY", _NARROW)
    details, mfu = analysis.details, analysis.readings[MFU]
    under = f" ({details.figures.flops.convention})" if details is not None else ""
    if isinstance(mfu, Reading):
        yield from wrapped(f"MFU: {frac_percentage(mfu.value, '')}{mfu.mark}{under}")
    else:
        yield from wrapped(f"MFU: - ({mfu.reason})")
    work = TFLOP if details is None else TFLOP_PER_S  # the original's label is of the former
    yield f"TFLOPs/second: {fixed(analysis.value(work), 2)}"
    if details is not None:
        yield from _by_convention(analysis, details)
    if analysis.nki is not None:
        yield from _nki_summary(analysis.nki)
    yield ""
    # The reason why one is missing is in the line of MFU.
    yield f"Throughput: {fixed(analysis.value(THROUGHPUT), 2, 'seq/s')}"
    yield f"Throughput per node: {fixed(analysis.tflop_per_s_per_node, 2, 'TFLOP/s')}"
    for title, texts in remarks(analysis).items():
        yield f"\n{title}:"
        for text in texts:
            yield from wrapped(text, "  - ")


def _by_convention(analysis: Analysis, details: JobDetails) -> Iterator[str]:
    mfu, hfu = analysis.value(MFU), analysis.value(HFU)
    tflop = analysis.value(TFLOP)
    yield f"TFLOP per sequence: {tflop:.2f} ({details.figures.flops.convention})"
    if is_more(hfu, mfu):
        wrong = mark_of(analysis.readings[HFU])
        yield f"HFU: {frac_percentage(hfu, '')}{wrong} (with what is computed twice)"
    theirs = analysis.estimate
    if theirs is None:
        return
    percent = None if mfu is None else 100 * mfu
    pairs = ((theirs.tflop_per_sequence, tflop), (theirs.mfu_percent, percent))
    if all(a is not None and b is not None and math.isclose(a, b) for a, b in pairs):
        return
    yield ""
    yield from wrapped(original_text(theirs))
    yield "  it differs from exact, in TFLOP per sequence, by"
    for reason, extra in theirs.over_exact_tflop_per_sequence.items():
        yield f"  {extra:+10.3f}  {reason}"


def original_text(theirs: OriginalEstimate) -> str:
    """Return the original's numbers in a sentence."""
    figures = f"{theirs.tflop_per_sequence:.2f} TFLOP per sequence"
    if theirs.tflops_per_second is not None:
        figures = f"{theirs.tflops_per_second:.1f} TFLOP/s, {figures}"
    if theirs.mfu_percent is not None:
        wrong = IMPOSSIBLE if impossible_mfu(theirs.mfu_percent) else ""
        figures = f"MFU {theirs.mfu_percent:.3f}%{wrong}, {figures}; its peak is"
        nodes = number_of(theirs.num_nodes, "node")
        figures += f" {theirs.peak_tflops_per_second:g} TFLOP/s ({nodes})"
    return f"By the original's count: {figures}"


def _nki_summary(nki: NkiSummary) -> Iterator[str]:
    yield "\nNKI Analysis Summary:"
    for name, text in nki_rows(nki).items():
        yield f"  {name}: {text}"
    if nki.weighting and nki.successful:
        yield from wrapped(f"Ratios are over {nki.ratios_are_over}; {nki.weighting}", "  ")
        if any(nki.calls.values()):
            yield (
                f"  Kernel calls: {nki.calls['known']} with MACs stated, {nki.calls['absent']}"
                f" without, {nki.calls['unreadable']} unreadable"
            )


def nki_rows(nki: NkiSummary) -> dict[str, str]:
    """Return the totals over all graphs, by the original's labels."""
    ratios = {
        "Overall": nki.overall_ratio,
        "Average": nki.average_ratio,
        "Min": nki.least_ratio,
        "Max": nki.most_ratio,
    }
    marked = {f"{name} NKI Ratio": ratio(r) + bound(nki.mark) for name, r in ratios.items()}
    return {
        "Files analyzed": f"{nki.successful}/{nki.total}",
        **marked,
        "Total HLO MACs": fixed(nki.macs, 0),
        "Total NKI MACs": fixed(nki.nki_macs, 0),
    }


def remarks(analysis: Analysis) -> dict[str, tuple[str, ...]]:
    """Return explanations, assumptions and the quirks kept from the original, by title."""
    nki, original = analysis.nki, analysis.original
    groups = {
        "Worth knowing": [finding.text for finding in analysis.findings],
        "Assumed and noted": analysis.notes,
        "Not known in the graphs": [
            counted(n, what) for what, n in (nki.doubts if nki else {}).items()
        ],
        "Not counted": [*_failed(analysis), *_left_out(analysis)],
        f"Kept as in {original.version}" if original else "": original.quirks_kept
        if original
        else (),
        "Not kept": original.not_kept if original else (),
    }
    return {title: tuple(texts) for title, texts in groups.items() if texts}


def _failed(analysis: Analysis) -> Iterator[str]:
    """Yield unreadable graphs, grouped by reason."""
    kinds: dict[str, list[GraphResult]] = {}
    for graph in analysis.graphs:
        if graph.error is not None and analysis.original is None:
            kinds.setdefault(re.sub(r"\d+", "N", graph.error), []).append(graph)
    for failed in kinds.values():
        names = abbreviated_list([_file_path(graph) for graph in failed])
        graphs = number_of(len(failed), "graph")
        yield f"{graphs} that can't be read ({names}): {failed[0].error}"


def _file_path(graph: GraphResult) -> str:
    """Return the path of a file, with its module if it has one."""
    _, inside, name = graph.path.rpartition(f"{graph.module}/")
    return f"{graph.module}/{name}" if graph.module and inside else graph.path


def _left_out(analysis: Analysis) -> Iterator[str]:
    for why, count in analysis.left_out.items():
        yield f"{number_of(count, 'file')} left out: {why}"


def _number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
