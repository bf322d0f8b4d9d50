"""The result of `erg analyze` on the terminal, in the original tool's layout."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from ergmeter.neuron.analysis_types import (
    FoundGraphs,
    GraphCounted,
    Inputs,
    LogRead,
    Searching,
    ThroughputChosen,
)
from ergmeter.neuron.compile_cache import abbreviated_list
from ergmeter.neuron.kernels import decimals
from ergmeter.units import significant
from ergmeter.views.analyze.text import bound, counted, fixed, heading, mark, ratio, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ergmeter.neuron.analysis_types import Event

    Document = Mapping[str, Any]

# The training log, under the original's labels.


_WIDE = 60


def log_section(log: Document) -> Iterator[str]:
    """Yield the lines about the training log."""
    yield ""
    yield from heading("LOG FILE METRICS SUMMARY", _WIDE)
    yield f"Log file: {log['log_file']}"
    stamps, steps = log["timestamps"], log["steps"]
    if stamps["first"]:
        yield "\nTraining Timeline:"
        yield f"  First timestamp: {stamps['first']}"
        yield f"  Last timestamp: {stamps['last']}"
    elif stamps["file_modification"]:
        yield f"\nFile modified: {stamps['file_modification']} (the lines have no time)"
    if steps["count"]:
        yield "\nTraining Steps:"
        yield f"  Total steps recorded: {steps['count']}"
        yield f"  First step: {steps['first']}"
        yield f"  Last step: {steps['last']}"
    yield from _statistics("Step Time Statistics", log["step_times"], "seconds", 3)
    yield from _statistics("Throughput Statistics", log["throughput"], "seq/s", 3)
    yield from _statistics("Loss Statistics", log["losses"], "", 4)
    yield from _without_a_loss(log["losses"])
    if "steady_state" in log:
        if log["runs_in_log"] > 1:
            yield f"\n{log['runs_in_log']} runs in this log: the last one is shown"
        yield ""
        yield from wrapped(f"Steady state: {log['steady_state']['rule']}")
        for note in log["notes"]:
            yield from wrapped(note, "  - ")


def _without_a_loss(losses: Document) -> Iterator[str]:
    """Yield counts of NaN losses and of missing losses, which the original counts as one."""
    broken, silent = losses.get("not_finite", 0), losses.get("not_printed", 0)
    printed = broken + losses["count"]
    if broken and not losses["count"]:
        yield "\nLoss Statistics:"
    if broken:
        step = losses["first_not_finite_step"]
        first = "" if step is None else f", first at step {step}"
        yield f"  Not a number (nan or inf): {broken} of {printed} printed{first}"
    if silent and printed:
        yield f"  Not printed: {silent} of {printed + silent} lines"


def _statistics(title: str, of: Document, unit: str, digits: int) -> Iterator[str]:
    if of["average"] is None:
        return
    yield f"\n{title}:"
    names = {
        "average": "Average", "min": "Min", "max": "Max",
        "first": f"First {title.split()[0].lower()}", "last": f"Last {title.split()[0].lower()}",
    }  # fmt: skip
    for key, name in names.items():
        if of.get(key) is not None:
            yield f"  {name}: {of[key]:.{digits}f} {unit}".rstrip()
    yield f"  Number of measurements: {of['count']}"


_NARROW = 50


def event_lines(event: Event) -> Iterator[str]:
    """Yield the console lines of a progress event."""
    match event:
        case LogRead(metrics):
            yield from log_section(metrics)
        case ThroughputChosen(seq_per_s, True, reason):
            yield f"\nUsing average throughput from log file: {seq_per_s:.2f} seq/s"
            yield from wrapped(reason, "  ") if reason else ()
        case ThroughputChosen():
            yield "Warning: No throughput information provided, using default"
        case Inputs(document):
            yield from inputs_section(document)
        case Searching(directory):
            yield f"\nSearching for HLO files in {directory}..."
        case FoundGraphs(count, is_original):
            yield f"Found {count} HLO {'file' if count == 1 and not is_original else 'files'}"
        case GraphCounted(path):
            yield f"Analyzing: {path}"


def inputs_section(document: Document) -> Iterator[str]:
    """Yield the inputs of the metrics."""
    rate = document["throughput_seq_per_sec"]
    yield "\nCalculating metrics with:"
    yield f"  Model config: {document['model_config']}"
    yield f"  Batch size: {document['batch_size']}{_by_log(document, 'batch_size')}"
    yield f"  Sequence length: {document['sequence_length']}{_by_log(document, 'sequence_length')}"
    rate_text = rate if "peak" not in document else None if rate is None else significant(rate, 6)
    yield f"  Throughput: {'-' if rate_text is None else rate_text} seq/s"
    yield f"  Hardware: {document['hardware_backend']}"
    yield f"  Nodes: {document['num_nodes']}"
    if "peak" not in document:
        return
    peak = document["peak"]
    yield (
        f"  Devices per node: {_number_text(document['devices_per_node'])}"
        f" ({_number_text(peak['cores_per_node'])} cores)"
    )
    yield (
        f"  Peak: {peak['tflops_per_second_per_core']:g} TFLOP/s a core,"
        f" {peak['tflops_per_second_per_chip']:g} a chip of {peak['cores_per_chip']},"
        f" {_number_text(peak['tflops_per_second_per_node'])} a node, dense {peak['dtype']}"
    )
    formula = f"Convention: {document['convention']} ({document['convention_formula']})"
    yield from wrapped(formula, "  ")
    lora = document["lora"]
    if lora:
        share = 100 * document["parameters_trained"] / document["parameters"]
        targets = ", ".join(lora["targets"])
        yield from wrapped(
            f"LoRA: r={lora['r']} on {targets} ({decimals(share, 3, full=100)} % trained)", "  "
        )


def _by_log(document: Document, key: str) -> str:
    return " (the log's)" if document.get(f"{key}_from") == "the log" else ""


def score_section(document: Document) -> Iterator[str]:
    """Yield the factors of the score and their product."""
    parts = document["training_score_breakdown"]
    yield "\nTraining Score Breakdown:"
    yield "=" * _NARROW
    if parts["mfu_improvement"] is None:
        wrong = parts.get("is_mfu_impossible")
        why = f" (MFU {_percent(parts['achieved_mfu'])} is impossible)" if wrong else ""
        yield f"MFU improvement: -{why}"
    else:
        yield (
            f"MFU improvement: {parts['mfu_improvement']:.4f}"
            f" ({parts['base_mfu']:.2f}% → {_percent(parts['achieved_mfu'])})"
        )
    if parts["throughput_improvement"] is None:
        yield "Throughput improvement: -"
    else:
        yield (
            f"Throughput improvement: {parts['throughput_improvement']:.4f}"
            f" ({parts['base_throughput']:.2f} → {parts['achieved_throughput']:.2f} seq/s)"
        )
    yield f"Loss improvement: {parts['loss_improvement']:.4f}"
    yield f"Convergence rate improvement: {parts['convergence_rate']:.4f}"
    marked = bound(parts)
    yield f"NKI flop ratio: {ratio(parts['nki_flop_ratio'])}{marked}"
    if parts.get("nki_factor") is not None:
        sum_of = f"({parts['score_offset']:g} + NKI flop ratio)"
        yield f"NKI factor: {parts['nki_factor']:.4f} {sum_of}{marked}"
    yield "=" * _NARROW
    value = document["training_score"]
    if value is None:
        yield from wrapped(f"Final Training Score: - ({document['missing']['training_score']})")
        if parts["score_without_nki"] is not None:
            yield f"Without the NKI factor: {parts['score_without_nki']:.4f}"
    else:
        yield f"Final Training Score: {value:.4f}{marked}{mark(document, 'training_score')}"
    if "remark" in parts:
        yield from wrapped(f"({parts['remark']})")


def summary_section(document: Document) -> Iterator[str]:
    """Yield the headline metrics, then their basis."""
    yield ""
    yield from heading("TRAINING METRICS SUMMARY", _NARROW)
    missing = document.get("missing", {})
    under = f" ({document['convention']})" if document["compat"] is None else ""
    value = document["mfu_percent"]
    mfu = f"- ({missing.get('mfu_percent')})"
    if value is not None:
        mfu = f"{_percent(value)}{mark(document, 'mfu_percent')}{under}"
    yield from wrapped(f"MFU: {mfu}")
    yield f"TFLOPs/second: {_or_dash(document['tflops_per_second'], '')}"
    if document["compat"] is None:
        yield from _by_convention(document)
    yield from _nki_summary(document["nki_analysis"]["summary"])
    rate, per_node = document["throughput_seq_per_sec"], document["throughput_tflops_per_node"]
    yield ""
    yield f"Throughput: {_or_dash(rate, ' seq/s')}"
    yield f"Throughput per node: {_or_dash(per_node, ' TFLOP/s')}"
    yield from _reasons(document)


def _by_convention(document: Document) -> Iterator[str]:
    yield f"TFLOP per sequence: {document['tflop_per_sequence']:.2f} ({document['convention']})"
    hfu, mfu = document["hfu_percent"], document["mfu_percent"]
    if hfu is not None and mfu is not None and hfu > mfu * (1 + 1e-9):
        yield f"HFU: {_percent(hfu)}{mark(document, 'hfu_percent')} (with what is computed twice)"
    theirs = document["original_count"]
    if theirs is None or _is_same(theirs, document):
        return
    figures = f"{theirs['tflop_per_sequence']:.2f} TFLOP per sequence"
    if theirs["tflops_per_second"] is not None:
        figures = f"{theirs['tflops_per_second']:.1f} TFLOP/s, {figures}"
    if theirs["mfu_percent"] is not None:
        nodes = "1 node" if theirs["num_nodes"] == 1 else f"{theirs['num_nodes']} nodes"
        wrong = mark(document, "original_count.mfu_percent")
        figures = f"MFU {theirs['mfu_percent']:.3f}%{wrong}, {figures}"
        figures += f"; its peak is {theirs['peak_tflops_per_second']:g} TFLOP/s ({nodes})"
    yield ""
    yield from wrapped(f"By the original's count: {figures}")
    yield "  it differs from exact, in TFLOP per sequence, by"
    for reason, extra in theirs["over_exact_tflop_per_sequence"].items():
        yield f"  {extra:+10.3f}  {reason}"


def _is_same(theirs: Document, document: Document) -> bool:
    """True if the original's metrics equal those printed above."""
    names = ("tflop_per_sequence", "mfu_percent")
    return all(
        theirs[name] is not None
        and document[name] is not None
        and math.isclose(theirs[name], document[name])
        for name in names
    )


def _nki_summary(summary: Document) -> Iterator[str]:
    yield "\nNKI Analysis Summary:"
    yield f"  Files analyzed: {summary['successful_analyses']}/{summary['total_files']}"
    for name in ("overall", "average", "min", "max"):
        yield f"  {name.title()} NKI Ratio: {ratio(summary[f'{name}_nki_ratio'])}{bound(summary)}"
    yield f"  Total HLO MACs: {fixed(summary['total_hlo_macs'], 0)}"
    yield f"  Total NKI MACs: {fixed(summary['total_nki_macs'], 0)}"
    if "weighting" in summary and summary["successful_analyses"]:
        text = f"Ratios are over {summary['ratios_are_over']}; {summary['weighting']}"
        yield from wrapped(text, "  ")
        calls = summary["kernel_calls"]
        if any(calls.values()):
            yield (
                f"  Kernel calls: {calls['known']} with MACs stated, {calls['absent']} without,"
                f" {calls['unreadable']} unreadable"
            )


def _reasons(document: Document) -> Iterator[str]:
    """Yield explanations, assumptions and the quirks kept from the original."""
    groups = {
        "Worth knowing": [finding["text"] for finding in document.get("findings", ())],
        "Assumed and noted": document.get("notes", ()),
        "Not known in the graphs": [
            counted(count, what)
            for what, count in document["nki_analysis"].get("not_known", {}).items()
        ],
        "Not counted": [*_failed(document), *_left_out(document)],
    }
    compat = document["compat"]
    if compat is not None:
        groups[f"Kept as in {compat['version']}"] = compat["quirks_kept"]
        groups["Not kept"] = compat["not_kept"]
    for title, texts in groups.items():
        if texts:
            yield f"\n{title}:"
            for text in texts:
                yield from wrapped(text, "  - ")


def _failed(document: Document) -> Iterator[str]:
    """Yield unreadable graphs, grouped by reason."""
    kinds: dict[str, list[Document]] = {}
    for file in document["nki_analysis"].get("failed", ()):
        kinds.setdefault(re.sub(r"\d+", "N", file["error"]), []).append(file)
    for struck in kinds.values():
        names = abbreviated_list([_file_path(file) for file in struck])
        graphs = "graph" if len(struck) == 1 else "graphs"
        yield f"{len(struck)} {graphs} that can't be read ({names}): {struck[0]['error']}"


def _file_path(file: Document) -> str:
    """Return the path of a file, with its module if it has one."""
    module, path = file["module_name"], str(file["file_path"])
    _, inside, name = path.rpartition(f"{module}/")
    return f"{module}/{name}" if module and inside else path


def _left_out(document: Document) -> Iterator[str]:
    for why, count in document["nki_analysis"].get("left_out", {}).items():
        yield f"{count} {'file' if count == 1 else 'files'} left out: {why}"


def _number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _percent(value: float) -> str:
    return f"{decimals(value, 2, full=100)}%"


def _or_dash(value: float | None, unit: str) -> str:
    """Format MFU, or a dash without a rate; the rate's line has the reason."""
    return "-" if value is None else f"{value:.2f}{unit}"
