"""The result of `erg analyze` on the terminal, in the original tool's layout.

Its number formats are those of the page and of Markdown too.
"""

from __future__ import annotations

import math
import re
import textwrap
from typing import TYPE_CHECKING, Any

from ergmeter.neuron.analysis import Event, GraphCounted, Started
from ergmeter.neuron.compile_cache import abbreviated_list
from ergmeter.neuron.kernels import LEGEND, LOWER_BOUND, UNCERTAIN, decimals
from ergmeter.units import number_of, significant

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    Document = Mapping[str, Any]

_COLUMNS = 80
_WIDE, _NARROW = 60, 50  # of the rules that the original draws
_ORIGINAL_COLUMNS = 120  # and of those around its table of graphs


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


def fixed(value: float | None, digits: int) -> str:
    """Format with a fixed number of decimals; integers with thousands separators."""
    return "-" if value is None else f"{value:{'' if digits else ','}.{digits}f}"


def bound(figures: Mapping[str, Any]) -> str:
    """Return the note behind a ratio that is not fully known."""
    if figures.get("is_uncertain"):
        return " (not certain)"
    return " (a lower bound)" if figures.get("is_lower_bound") else ""


def mark(document: Mapping[str, Any], key: str) -> str:
    """Return the mark behind an impossible value."""
    return " (impossible)" if document.get("impossible", {}).get(key) else ""


def counted(count: int, what: str) -> str:
    """Return a count with its noun: `2 loops whose ...`, `1 loop whose ...`."""
    noun, _, rest = what.partition(" ")
    if count == 1:
        noun = noun.removesuffix("es") if noun.endswith("ches") else noun.removesuffix("s")
    return f"{count:,} {noun} {rest}"


def percentage(value: float | None, space: str = " ") -> str:
    """Format a percentage, or a dash if unknown."""
    return "-" if value is None else f"{decimals(value, 2, full=100.0)}{space}%"


def mark_of(file: Document) -> str:
    """Return the mark of a graph's ratio that is not fully known."""
    if file.get("is_uncertain"):
        return UNCERTAIN
    return LOWER_BOUND if file.get("is_lower_bound") else ""


def is_more(value: float | None, other: float | None) -> bool:
    """True if a value is known to be more than another, beyond rounding."""
    return value is not None and other is not None and value > other * (1 + 1e-9)


def doubts(analysis: Document) -> list[str]:
    """Return what the counts of the graphs leave unknown, one sentence a kind."""
    return [counted(count, what) for what, count in analysis.get("not_known", {}).items()]


# The training log, under the original's labels.


def log_section(log: Document) -> Iterator[str]:
    """Yield the lines about the training log."""
    yield ""
    yield from heading("LOG FILE METRICS SUMMARY", _WIDE)
    yield f"Log file: {log['log_file']}"
    stamps, steps = log["timestamps"], log["steps"]
    if stamps["first"]:
        yield "\nTraining Timeline:"
        yield from (f"  {end.title()} timestamp: {stamps[end]}" for end in ("first", "last"))
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


def event_lines(event: Event) -> Iterator[str]:
    """Yield the console lines of a progress event."""
    if isinstance(event, GraphCounted):
        yield f"Analyzing: {event.path}"
    if not isinstance(event, Started):
        return
    document = event.document
    if "log_metrics" in document:
        yield from log_section(document["log_metrics"])
    if event.rate_from == "log":
        rate = document["throughput_seq_per_sec"]
        yield f"\nUsing average throughput from log file: {rate:.2f} seq/s"
        yield from wrapped(event.rate_note or "", "  ")
    elif event.rate_from == "default":
        yield "Warning: No throughput information provided, using default"
    yield from inputs_section(document)
    yield f"\nSearching for HLO files in {event.directory}..."
    is_one = event.graphs == 1 and not event.is_original
    yield f"Found {event.graphs} HLO {'file' if is_one else 'files'}"


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


def files_section(files: Sequence[Document], document: Document) -> Iterator[str]:
    """Yield one line for each graph."""
    summary, is_original = document["nki_analysis"]["summary"], document["compat"] is not None
    if not files and not is_original:
        yield "\nPer-file NKI analysis: no graphs"
        return
    has_scores = any("training_score" in file for file in files)
    wide = max([20, *(len(file.get("module_name") or "-") for file in files)])
    long = max([40, *(len(file["file_name"]) for file in files)])
    many = max([15, *(len(f"{file['hlo_macs']:,}") for file in files)])
    head = f"{'File Name':<{long}} {'Module':<{wide}} {'HLO MACs':>{many}} {'NKI MACs':>{many}}"
    head += f" {'NKI Ratio':>10}" + (f" {'Score':>10}" if has_scores else "")
    rule = "-" * (_ORIGINAL_COLUMNS if is_original else len(head))
    yield "\nPer-file NKI analysis:"
    yield rule
    yield head
    yield rule
    for file in files:
        if file["status"] != "success":
            # The original names no module of a file that it can't read.
            module = f" {file['module_name'] or '-':<{wide}}" if "module_name" in file else ""
            yield f"{file['file_name']:<{long}}{module} ERROR: {file['error']}"
            continue
        mark = mark_of(file)
        line = (
            f"{file['file_name']:<{long}} {file['module_name'] or '-':<{wide}}"
            f" {file['hlo_macs']:>{many},} {file['nki_macs']:>{many},}"
            f" {ratio(file['nki_ratio']) + mark:>10}"
        )
        score = file.get("training_score")
        yield line + (f" {fixed(score['score'], 4) + mark:>10}" if score else "")
    yield rule
    yield from legend(map(mark_of, files))
    if why := document.get("missing", {}).get("average_score"):
        yield from wrapped(f"No score of a graph: {why}")
    if "average_score" in summary:
        yield "\nPer-file Score Statistics:"
        for name in ("average", "min", "max"):
            yield f"  {name.title()} Score: {summary[f'{name}_score']:.4f}{bound(summary)}"


def legend(marks: Iterable[str]) -> list[str]:
    """Return the meaning of each of the marks."""
    used = set(marks)
    return [f"{mark} {meaning}" for mark, meaning in LEGEND.items() if mark in used]


def score_section(document: Document) -> Iterator[str]:
    """Yield the factors of the score and their product."""
    parts = document["training_score_breakdown"]
    yield "\nTraining Score Breakdown:"
    yield "=" * _NARROW
    mfu, rate = parts["mfu_improvement"], parts["throughput_improvement"]
    reached = percentage(parts["achieved_mfu"], "")
    if mfu is None:
        wrong = parts.get("is_mfu_impossible")
        yield f"MFU improvement: -{f' (MFU {reached} is impossible)' if wrong else ''}"
    else:
        yield f"MFU improvement: {mfu:.4f} ({parts['base_mfu']:.2f}% → {reached})"
    ends = f"{parts['base_throughput']:.2f} → {fixed(parts['achieved_throughput'], 2)} seq/s"
    yield f"Throughput improvement: {'-' if rate is None else f'{rate:.4f} ({ends})'}"
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
    under = f" ({document['convention']})" if document["compat"] is None else ""
    value = document["mfu_percent"]
    mfu = f"{percentage(value, '')}{mark(document, 'mfu_percent')}{under}"
    reason = document.get("missing", {}).get("mfu_percent")
    yield from wrapped(f"MFU: {f'- ({reason})' if value is None else mfu}")
    yield f"TFLOPs/second: {fixed(document['tflops_per_second'], 2)}"
    if document["compat"] is None:
        yield from _by_convention(document)
    yield from _nki_summary(document["nki_analysis"]["summary"])
    yield ""
    for title, key, unit in (
        ("Throughput", "throughput_seq_per_sec", "seq/s"),
        ("Throughput per node", "throughput_tflops_per_node", "TFLOP/s"),
    ):
        value = document[key]  # its reason is in the line of MFU
        yield f"{title}: {'-' if value is None else f'{value:.2f} {unit}'}"
    yield from _reasons(document)


def _by_convention(document: Document) -> Iterator[str]:
    yield f"TFLOP per sequence: {document['tflop_per_sequence']:.2f} ({document['convention']})"
    hfu = document["hfu_percent"]
    if is_more(hfu, document["mfu_percent"]):
        wrong = mark(document, "hfu_percent")
        yield f"HFU: {percentage(hfu, '')}{wrong} (with what is computed twice)"
    theirs = document["original_count"]
    if theirs is None or _is_same(theirs, document):
        return
    figures = f"{theirs['tflop_per_sequence']:.2f} TFLOP per sequence"
    if theirs["tflops_per_second"] is not None:
        figures = f"{theirs['tflops_per_second']:.1f} TFLOP/s, {figures}"
    if theirs["mfu_percent"] is not None:
        nodes = number_of(theirs["num_nodes"], "node")
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
    pairs = [(theirs[name], document[name]) for name in ("tflop_per_sequence", "mfu_percent")]
    return all(None not in pair and math.isclose(*pair) for pair in pairs)


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
        "Not known in the graphs": doubts(document["nki_analysis"]),
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
        graphs = number_of(len(struck), "graph")
        yield f"{graphs} that can't be read ({names}): {struck[0]['error']}"


def _file_path(file: Document) -> str:
    """Return the path of a file, with its module if it has one."""
    module, path = file["module_name"], str(file["file_path"])
    _, inside, name = path.rpartition(f"{module}/")
    return f"{module}/{name}" if module and inside else path


def _left_out(document: Document) -> Iterator[str]:
    for why, count in document["nki_analysis"].get("left_out", {}).items():
        yield f"{number_of(count, 'file')} left out: {why}"


def _number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
