"""The result of `erg analyze` as a document.

A metric keeps its basis and interval, or its reason where it is absent. Compiled graphs are sorted
by their work and cut to the largest. Files that could not be read are listed apart.

"The original" is nki-llama's calculate_training_metrics.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ergmeter.compat.nki_llama import CONSOLE_SECTIONS, compat_document
from ergmeter.flops.conventions import CONVENTIONS
from ergmeter.metrics.definitions.compute import HFU, MFU
from ergmeter.neuron.compile_cache import abbreviated_list
from ergmeter.neuron.document import document as json_document
from ergmeter.neuron.document import missing
from ergmeter.neuron.kernels import LEGEND, LOWER_BOUND, UNCERTAIN, by_work, decimals, percent
from ergmeter.neuron.mfu import BACKENDS, TERA, impossible_mfu
from ergmeter.neuron.score import (
    FORMULAS,
    JSON_NAMES,
    NKI,
    REMARK,
    SCORE,
    TFLOP,
    TFLOP_PER_S,
    THROUGHPUT,
    TITLES,
    Factor,
    Score,
)
from ergmeter.records import Missing, Reading
from ergmeter.units import grouped, number_of, significant
from ergmeter.version import __version__
from ergmeter.views.charts.interval_chart import Dot, interval_chart
from ergmeter.views.document import (
    ChartPart,
    Document,
    HeadlinePart,
    Items,
    Paragraph,
    Part,
    Section,
    SortableCell,
    Table,
    TableColumn,
    columns_of,
)
from ergmeter.views.documents import finite

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ergmeter.compare.verdicts import State
    from ergmeter.neuron.analysis import Analysis, JobDetails
    from ergmeter.neuron.kernels import GraphResult, KernelTotal
    from ergmeter.neuron.mfu import OriginalEstimate
    from ergmeter.neuron.training_log import LogSummary
    from ergmeter.views.charts.chart import Chart

_KERNELS_OF_A_GRAPH = 3
_STATES = {"known": "stated", "absent": "not stated", "unreadable": "can't be read"}
_IMPOSSIBLE = " (impossible)"
_BOUNDS = {"": "", UNCERTAIN: " (not certain)", LOWER_BOUND: " (a lower bound)"}
_TITLES = {
    "conventions": "under other conventions",
    "nki": "NKI share",
    "graphs": "compiled graphs",
    "cite": "how to cite",
}


def document(analysis: Analysis, *, most_graphs: int) -> Document:
    """Return the document of an analysis, with at most so many graphs in a table."""
    return Document(
        _title(analysis),
        tuple(_sections(analysis, most_graphs).values()),
        finite(json_document(analysis) if analysis.original is None else compat_document(analysis)),
        f"{analysis.batch_size} sequences of {analysis.seq_len} tokens a step",
    )


def console_document(analysis: Analysis, *, per_file: bool) -> Document:
    """Return the document for a terminal: the sections of the original's console come first.

    They have its titles, its order and its lines. Graphs are listed, all of them, if `per_file`.
    """
    content = document(analysis, most_graphs=0)
    sections = _sections(analysis, len(analysis.graphs) if per_file else 0)
    del sections["cite"]
    if per_file and not analysis.graphs:
        sections["graphs"] = Section("graphs", "graphs", (Paragraph("There are no graphs."),))
    lines = {"figures": _summary_lines(analysis), "score": _score_lines(analysis)}
    for name, texts in lines.items():
        if text := "\n".join(texts):
            parts = (Paragraph(text, is_to_copy=True), *sections[name].parts)
            sections[name] = replace(sections[name], parts=parts)
    first = [
        replace(sections.pop(name), title=title)
        for name, title in CONSOLE_SECTIONS.items()
        if name in sections
    ]
    headline = HeadlinePart(content.title, about=content.about)
    return replace(content, parts=(headline, *first, *sections.values()))


def _summary_lines(analysis: Analysis) -> Iterator[str]:
    """Yield the figures as the original prints them."""
    details, mfu = analysis.details, analysis.readings[MFU]
    under = "" if details is None else f" ({details.figures.flops.convention})"
    if isinstance(mfu, Reading):
        yield f"MFU: {decimals(100 * mfu.value, 2, full=100.0)}%{mfu.mark}{under}"
    else:
        yield f"MFU: - ({mfu.reason})"
    # Without details it is the original's run, whose label is of TFLOP a sequence.
    yield f"TFLOPs/second: {_fixed(analysis.value(TFLOP if details is None else TFLOP_PER_S), 2)}"
    yield f"TFLOP per sequence: {_fixed(analysis.value(TFLOP), 2)}{under}"
    yield f"Throughput: {_fixed(analysis.value(THROUGHPUT), 2)} seq/s"
    yield f"Throughput per node: {_fixed(analysis.tflop_per_s_per_node, 2)} TFLOP/s"


def _score_lines(analysis: Analysis) -> Iterator[str]:
    """Yield the score's factors and their product as the original prints them."""
    result, score = analysis.readings.get(SCORE), analysis.score
    if result is None or score is None:
        return
    base, bound = score.baseline, _BOUNDS[score.mark]
    reached = "-" if score.mfu_percent is None else f"{decimals(score.mfu_percent, 2, full=100.0)}%"
    mfu, rate = _fixed(score.mfu_improvement, 4), _fixed(score.throughput_improvement, 4)
    wrong = _IMPOSSIBLE if score.is_mfu_impossible else ""
    yield f"MFU improvement: {mfu} ({base.mfu_percent:.2f}% → {reached}{wrong})"
    ends = f"{base.throughput_seq_per_s:.2f} → {_fixed(score.seq_per_s, 2)} seq/s"
    yield f"Throughput improvement: {rate} ({ends})"
    yield f"Loss improvement: {base.loss_improvement:.4f}"
    yield f"Convergence rate improvement: {base.convergence_rate:.4f}"
    yield f"NKI flop ratio: {_fixed(score.nki_ratio, 4)}{bound}"
    if isinstance(result, Reading):
        yield f"Final Training Score: {result.value:.4f}{bound}{_reason(score)}"
    else:
        yield f"Final Training Score: - ({result.reason})"


def _reason(score: Score) -> str:
    """Return the mark of a score that is impossible, with the reason."""
    return f" (impossible: {score.impossible})" if score.impossible else ""


def _fixed(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _sections(analysis: Analysis, most_graphs: int) -> dict[str, Section]:
    """Return the sections by name, without empty ones."""
    sections = {
        "figures": _figures(analysis),
        "score": _score(analysis),
        "conventions": _conventions(analysis),
        "log": _log(analysis),
        "nki": _nki(analysis),
        "graphs": _graphs(analysis, most_graphs),
        "notes": _notes(analysis),
        "absent": _absent(analysis),
        "inputs": _inputs(analysis),
        "cite": [Paragraph(_citation(analysis), is_to_copy=True)],
    }
    return {
        name: Section(name, _TITLES.get(name, name), parts)
        for name, section in sections.items()
        if (parts := tuple(section))
    }


def _absent(analysis: Analysis) -> Iterator[Part]:
    by_reason = grouped((why, key) for key, why in missing(analysis).items())
    rows = tuple((why, ", ".join(keys)) for why, keys in by_reason.items())
    none = Paragraph("No requested metric is absent.")
    yield Table(("why", "what"), rows) if rows else none


def _title(analysis: Analysis) -> str:
    """Return what was analyzed: the model, and the nodes it was trained on."""
    request, name = analysis.request, analysis.model.name
    path = Path(request.model_config)
    if not name and path.suffix == ".json":
        name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    nodes = number_of(analysis.nodes, "node")
    return f"{name or request.model_config} on {nodes} of {request.hw_backend}"


# Metrics.


def _formula(analysis: Analysis, key: str) -> str:
    """Return how a metric is computed."""
    if key == THROUGHPUT:
        return analysis.pace.formula
    if key == TFLOP and analysis.details is not None:
        return CONVENTIONS[analysis.details.figures.flops.convention].formula
    offset = f"{analysis.request.baseline.offset:g}"
    return FORMULAS[key].replace("offset", offset)


def _texts(analysis: Analysis, key: str, reading: Reading) -> tuple[str, str]:
    """Return a value with its marks, and its interval."""
    unit, scale = JSON_NAMES[key].unit, JSON_NAMES[key].scale
    mark = analysis.nki.mark if key in (NKI, SCORE) else ""

    def text_of(value: float) -> str:
        if unit == "%":
            return decimals(value * scale, 2, full=100.0)
        return percent(value) if key == NKI else significant(value * scale, 5)

    value = f"{text_of(reading.value)} {unit}".rstrip()
    interval = "-"
    if reading.low is not None and reading.high is not None:
        interval = f"{text_of(reading.low)} to {text_of(reading.high)} {unit}".rstrip()
    return value + _BOUNDS[mark] + reading.mark, interval


def _rows(analysis: Analysis) -> Iterator[tuple[str, ...]]:
    """Yield each metric: title, value, interval, basis, note and formula."""
    mfu, hfu = analysis.value(MFU), analysis.value(HFU)
    for key, title in TITLES.items():
        result = analysis.readings.get(key)
        if key == HFU and (mfu is None or hfu is None or hfu <= mfu * (1 + 1e-9)):
            continue  # nothing is computed twice
        if isinstance(result, Reading):
            note = "; ".join(filter(None, (result.impossible, result.note)))
            texts = _texts(analysis, key, result)
            yield title, *texts, result.basis, note, _formula(analysis, key)
        elif result is not None:
            yield title, "-", "-", "absent", result.reason, _formula(analysis, key)


def _figures(analysis: Analysis) -> Iterator[Part]:
    below = (TableColumn("of this job", "below"), TableColumn("formula", "below"))
    head = ("figure", "value", "95 % interval", TableColumn("how", "basis"), *below)
    yield Table(head, tuple(_rows(analysis)))
    if analysis.tflop_per_s_per_node is not None:
        yield Paragraph(f"Work of a node: {analysis.tflop_per_s_per_node:.2f} TFLOP/s.")
    if analysis.original is not None:
        yield Paragraph(f"The numbers are those of {analysis.original.version}, faults included.")


def _citation(analysis: Analysis) -> str:
    """Return a citable sentence: values and their basis."""
    clauses = (
        f"{title} {value}{'' if interval == '-' else f' [{interval}]'} ({basis})"
        for title, value, interval, basis, *_ in _rows(analysis)
        if basis != "absent"
    )
    details = analysis.details
    under = "" if details is None else f", convention {details.figures.flops.convention}"
    batch = f"{analysis.batch_size} sequences of {analysis.seq_len} a step"
    figures = "; ".join(clauses) or "no figures"
    return f"ergmeter {__version__}: {_title(analysis)}, {batch}{under}: {figures}."


def _score(analysis: Analysis) -> Iterator[Part]:
    """Yield the score, one factor a row."""
    result, score = analysis.readings.get(SCORE), analysis.score
    if result is None or score is None:
        yield Paragraph("No overall score was requested: --calculate-score gives it, by factor.")
        return
    score_text = "-"
    if isinstance(result, Reading):
        score_text = f"{significant(result.value, 5)}{_BOUNDS[score.mark]}{result.mark}"
    table = Table(
        columns_of("factor", "reached", "base", "ratio", "product so far", "log2 of the ratio"),
        (*map(_factor, score.factors()), ("score", "", "", score_text, score_text, "")),
        "factors of the score",
        row_titles=1,
    )
    yield ChartPart(score_chart(score, table))
    if score.impossible:
        yield Paragraph(f"The score is impossible: {score.impossible}.")
    if isinstance(result, Missing):
        yield Paragraph(f"No score: {result.reason}.")
    if analysis.original is None:
        yield Paragraph(f"Mind that {REMARK}.")


def _factor(factor: Factor) -> tuple[str, ...]:
    wrong = _IMPOSSIBLE if factor.is_impossible else ""
    ratio, product = (
        "-" if value is None else f"{significant(value, 5)}{_BOUNDS[factor.mark]}{wrong}"
        for value in (factor.ratio, factor.product)
    )
    added = "-" if factor.doublings is None else f"{factor.doublings:+.3f}"
    if factor.is_given:
        return factor.name, "as given", "", ratio, product, added
    reached = "-"
    if factor.reached is not None:
        reached = f"{significant(factor.reached, 4)} {factor.unit}".rstrip()
    reached += wrong
    base = f"{factor.base:g} {factor.unit or '+ share'}"  # the share is added to the offset
    return factor.name, reached, base, ratio, product, added


def _conventions(analysis: Analysis) -> Iterator[Part]:
    """Yield MFU under the other conventions, and differences from the original's count."""
    details, theirs = analysis.details, analysis.estimate
    if details is None:
        return
    figures, mfus = details.figures, details.figures.mfu_by_convention
    rows = tuple(
        (name, significant(flops / TERA, 5), _percentage(mfus.get(name)))
        for name, flops in figures.by_convention.items()
    )
    chosen = f"The figures above are under {figures.flops.convention}"
    yield Paragraph(f"{chosen}: erg conventions explains all.")
    yield Table(columns_of("convention", "TFLOP a sequence", "MFU"), rows)
    if theirs is not None:
        yield Paragraph(_original_text(theirs))
        extra = theirs.over_exact_tflop_per_sequence
        pieces = tuple((why, f"{tflop:+.3f}") for why, tflop in extra.items())
        if pieces:
            head = columns_of("what it counts that exact does not", "TFLOP a sequence")
            yield Table(head, pieces)


def _percentage(frac: float | None) -> str:
    return "-" if frac is None else f"{decimals(100 * frac, 2, full=100.0)} %"


def _original_text(theirs: OriginalEstimate) -> str:
    """Return the original's numbers in a sentence."""
    figures = f"{theirs.tflop_per_sequence:.2f} TFLOP per sequence"
    if theirs.tflops_per_second is not None:
        figures = f"{theirs.tflops_per_second:.1f} TFLOP/s, {figures}"
    if theirs.mfu_percent is not None:
        wrong = _IMPOSSIBLE if impossible_mfu(theirs.mfu_percent) else ""
        figures = f"MFU {theirs.mfu_percent:.3f}%{wrong}, {figures}; its peak is"
        nodes = number_of(theirs.num_nodes, "node")
        figures += f" {theirs.peak_tflops_per_second:g} TFLOP/s ({nodes})"
    return f"By the original's count: {figures}."


def _log(analysis: Analysis) -> Iterator[Part]:
    log = analysis.log
    if log is None:
        yield Paragraph("No log was given: --log-file.")
        return
    steps = log.steps
    yield Paragraph(f"{log.log_file}: {steps.count:,} steps, {steps.first} to {steps.last}.")
    statistics = {
        ("step time", "s"): log.step_times,
        ("printed throughput", "sequences/s"): log.throughput,
        ("loss", ""): log.losses,
    }
    rows = tuple(
        (
            name,
            *(_statistic(value, unit) for value in (of.average, of.min, of.max)),
            f"{of.count:,}",
        )
        for (name, unit), of in statistics.items()
        if of.count
    )
    if rows:
        yield Table(columns_of("of the log", "mean", "least", "most", "lines"), rows)
    if texts := tuple(_log_texts(log)):
        yield Items(texts)


def _statistic(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{significant(value, 5)} {unit}".rstrip()


def _log_texts(log: LogSummary) -> Iterator[str]:
    """Yield times, runs and steady state of a log, its losses, and the reader's notes."""
    times, losses = log.timestamps, log.losses
    if times.first:
        yield f"Lines are from {times.first} to {times.last}"
    elif times.file_modification:
        yield f"File modified {times.file_modification}; its lines have no time"
    if log.runs_in_log > 1:
        yield f"{log.runs_in_log} runs in this log: the last one is shown"
    if log.steady_state is not None:
        yield f"Steady state: {log.steady_state.rule}"
    if losses.first is not None:
        yield f"Loss: {_statistic(losses.first, '')} first, {_statistic(losses.last, '')} last"
    printed = losses.not_finite + losses.count
    if losses.not_finite:
        step = losses.first_not_finite_step
        first = "" if step is None else f", first at step {step}"
        yield f"Not a number (nan or inf): {losses.not_finite} of {printed} losses{first}"
    if losses.not_printed and printed:
        yield f"Loss not printed: {losses.not_printed} of {printed + losses.not_printed} lines"
    yield from log.notes


# Compiled graphs and their kernels.


def _nki(analysis: Analysis) -> Iterator[Part]:
    """Yield totals over all graphs, with the original's labels."""
    nki = analysis.nki
    ratios = {
        "Overall": nki.overall_ratio,
        "Average": nki.average_ratio,
        "Min": nki.least_ratio,
        "Max": nki.most_ratio,
    }
    rows = {"Files analyzed": f"{nki.successful}/{nki.total}"}
    for name, value in ratios.items():
        text = "-" if value is None else decimals(value, 4)
        rows[f"{name} NKI Ratio"] = text + _BOUNDS[nki.mark]
    rows |= {"Total HLO MACs": _count(nki.macs), "Total NKI MACs": _count(nki.nki_macs)}
    if analysis.original is None and any(nki.calls.values()):
        calls = (f"{count} {_STATES[state]}" for state, count in nki.calls.items())
        rows["Kernel calls, by their MACs"] = ", ".join(calls)
    yield Table(columns_of("of all graphs", "figure"), tuple(rows.items()))
    if nki.weighting:
        yield Paragraph(f"Ratios are over {nki.ratios_are_over}; {nki.weighting}.")


def _graphs(analysis: Analysis, most: int) -> Iterator[Part]:
    """Yield the tables about graphs, at most `most` rows each; nothing if that is 0."""
    if not most:
        return
    if ranked := by_work(analysis.graphs):
        yield _ranking(analysis, ranked[:most])
        marks = {graph.mark for graph, _ in ranked[:most]}
        if meanings := tuple(f"{mark} {text}" for mark, text in LEGEND.items() if mark in marks):
            yield Items(meanings)
        yield Paragraph(_about_graphs(analysis, ranked, most))
    if scores := analysis.score_statistics:
        texts = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
        wrong = "" if analysis.score is None else _reason(analysis.score)
        yield Paragraph(f"Scores of the graphs: {texts}{_BOUNDS[analysis.nki.mark]}{wrong}.")
    elif analysis.request.per_file_scores and analysis.score_missing:
        yield Paragraph(f"No score of a graph: {analysis.score_missing}.")
    failed = [graph for graph in analysis.graphs if graph.error is not None]
    if failed:
        rows = tuple(
            (graph.module or "-", graph.path, graph.error or "") for graph in failed[:most]
        )
        below = (TableColumn(title, "below") for title in ("file that can't be read", "why"))
        yield Table(("module", *below), rows, "graphs that can't be read")
    if (more := len(failed) - most) > 0:
        yield Paragraph(f"{more:,} more can't be read: the JSON has them as nki_analysis.failed.")
    yield from _kernels(analysis.nki.kernels, most)


def _ranking(analysis: Analysis, ranked: Sequence[tuple[GraphResult, float | None]]) -> Table:
    """Tabulate the graphs, without columns that no graph has."""
    graphs = [graph for graph, _ in ranked]
    has_runs, is_original = analysis.request.graph_runs is not None, analysis.original is not None
    shares = "of all MACs x runs" if has_runs else "of all"
    columns = {
        "File Name": [graph.name for graph in graphs],
        "Module": [graph.module or "-" for graph in graphs],
        "HLO MACs": [_count(graph.macs) for graph in graphs],
        shares: [_share(frac) for _, frac in ranked],
        "NKI MACs": [_count(graph.nki_macs) for graph in graphs],
        "NKI Ratio": [_ratio(analysis.nki_ratio(graph), graph.mark) for graph in graphs],
        "kernels (calls)": ["not known" if is_original else _kernels_of(g) for g in graphs],
    }
    if has_runs:
        columns["runs"] = [_count(graph.runs) for graph in graphs]
    if any(analysis.graph_score(graph) for graph in graphs):
        columns["Score"] = [_score_of(analysis, graph) for graph in graphs]
    if len({graph.compiler for graph in graphs}) > 1:
        columns["compiler"] = [graph.compiler or "-" for graph in graphs]
    rows = tuple(zip(*columns.values(), strict=True))
    caption = "compiled graphs, by work"
    return Table(tuple(columns), rows, caption, is_sortable=True, row_titles=2)


def _count(value: int | None) -> SortableCell:
    return SortableCell("-", None) if value is None else SortableCell(f"{value:,}", float(value))


def _share(frac: float | None) -> SortableCell:
    return SortableCell("-" if frac is None else percent(frac), frac)


def _ratio(ratio: float | None, mark: str) -> SortableCell:
    return SortableCell("-" if ratio is None else decimals(ratio, 4) + mark, ratio)


def _score_of(analysis: Analysis, graph: GraphResult) -> SortableCell:
    score = analysis.graph_score(graph)
    if score is None or score.value is None:
        return SortableCell("-", None)
    wrong = _IMPOSSIBLE if score.impossible else ""
    return SortableCell(significant(score.value, 5) + graph.mark + wrong, score.value)


def _kernels_of(graph: GraphResult) -> str:
    """Return the first kernels of a graph by name and calls, and the number of others."""
    names = [f"{kernel.function or kernel.target} ({kernel.calls})" for kernel in graph.kernels]
    more = len(names) - _KERNELS_OF_A_GRAPH
    others = [f"and {more} more"] if more > 0 else []
    return ", ".join([*names[:_KERNELS_OF_A_GRAPH], *others]) or "none"


def _about_graphs(
    analysis: Analysis, ranked: Sequence[tuple[GraphResult, float | None]], most: int
) -> str:
    text = "A MAC is a multiply-add: 2 FLOP."
    rest = ranked[most:]
    if not rest:
        return text
    macs = "MACs" if analysis.request.graph_runs is None else "MACs x runs"
    has_work = rest[0][1] is not None
    share = (
        f" with {percent(sum(frac or 0.0 for _, frac in rest))} of the {macs}" if has_work else ""
    )
    return (
        f"{text} The {most} graphs with the most {macs} are shown; the other"
        f" {len(rest):,}{share} are in the JSON of --detailed."
    )


def _kernels(kernels: Sequence[KernelTotal], most: int) -> Iterator[Part]:
    """Yield the table of kernels with their work."""
    if not kernels:
        return
    rows = tuple(
        (
            kernel.function or "-",
            kernel.target,
            _STATES.get(kernel.macs_state, kernel.macs_state),
            _count(kernel.calls),
            _count(kernel.macs),
        )
        for kernel in kernels[:most]
    )
    head = ("kernel", "called as", "its MACs are", "calls", "MACs of all calls")
    yield Table(head, rows, "NKI kernels", is_sortable=True)
    if (more := len(kernels) - most) > 0:
        yield Paragraph(f"{more:,} more kernels are in the JSON: nki_analysis.kernels.")


def _inputs(analysis: Analysis) -> Iterator[Part]:
    """Yield files and sizes with their source."""
    rows = [(what, _input(value), source) for what, value, source in analysis.inputs]
    if analysis.details is not None:
        rows += _details(analysis.details)
    rows.append(("ergmeter", __version__, "this program"))
    if analysis.model.config_sha256:
        rows.append(("SHA-256 of config.json", analysis.model.config_sha256, "its content"))
    rows.append(("neuronxcc", ", ".join(analysis.compilers) or "-", "the paths of the graphs"))
    yield Table(("input", "value", TableColumn("from", "below")), tuple(rows))


def _input(value: str | float | None) -> str:
    if value is None:
        return "-"
    return significant(value, 6) if isinstance(value, float) else str(value)


def _details(details: JobDetails) -> Iterator[tuple[str, str, str]]:
    """Yield the peaks of a chip and a node, and the adapters that were trained."""
    machine, lora, work = details.machine, details.job.lora, details.figures.work
    chip = (
        f"{machine.chip_flops_per_s / TERA:g} a chip of {BACKENDS[machine.backend].cores_per_chip}"
    )
    node = ""
    if machine.cores_per_node is not None:
        peak = machine.cores_per_node * machine.core_flops_per_s / TERA
        node = f", {peak:g} a node of {machine.cores_per_node}"
    yield "peak of a chip, of a node", f"{chip}{node}, dense {machine.dtype}", "that of a core"
    if lora is not None:
        share = decimals(100 * work.params_trained / work.params, 3, full=100)
        yield "LoRA", f"r={lora.r} on {', '.join(lora.targets)} ({share} % trained)", "the YAML"


# Notes.


def _notes(analysis: Analysis) -> Iterator[Part]:
    """Yield explanations, assumptions and the quirks kept from the original, each under a title."""
    original = analysis.original
    groups = {
        "Worth knowing": [finding.text for finding in analysis.findings],
        "Assumed and noted": analysis.notes,
        "Not known in the graphs": [_counted(n, what) for what, n in analysis.nki.doubts.items()],
        "Not counted": list(_not_counted(analysis)),
    }
    if original is not None:
        groups[f"Kept as in {original.version}"] = original.quirks_kept
        groups["Not kept"] = original.not_kept
    for title, texts in groups.items():
        if texts:
            yield Paragraph(f"{title}:")
            yield Items(tuple(texts))


def _counted(count: int, what: str) -> str:
    """Return a count with its noun: `2 loops whose ...`, `1 loop whose ...`."""
    noun, _, rest = what.partition(" ")
    if count == 1:
        noun = noun.removesuffix("es") if noun.endswith("ches") else noun.removesuffix("s")
    return f"{count:,} {noun} {rest}"


def _not_counted(analysis: Analysis) -> Iterator[str]:
    """Yield unreadable graphs, grouped by reason, and files that were left out."""
    kinds: dict[str, list[GraphResult]] = {}
    for graph in analysis.graphs:
        if graph.error is not None and analysis.original is None:
            kinds.setdefault(re.sub(r"\d+", "N", graph.error), []).append(graph)
    for graphs in kinds.values():
        names = abbreviated_list([_file_path(graph) for graph in graphs])
        count = number_of(len(graphs), "graph")
        yield f"{count} that can't be read ({names}): {graphs[0].error}"
    for why, files in analysis.left_out.items():
        yield f"{number_of(files, 'file')} left out: {why}"


def _file_path(graph: GraphResult) -> str:
    """Return the path of a file, with its module if it has one."""
    _, inside, name = graph.path.rpartition(f"{graph.module}/")
    return f"{graph.module}/{name}" if graph.module and inside else graph.path


# The score's factors are drawn from 1 on a logarithmic axis: 2 is as long as 1/2, and the lengths
# of all factors add up to the score.


_MARKS = {"": "", LOWER_BOUND: "at least ", UNCERTAIN: "about "}


def score_chart(score: Score, table: Table) -> Chart:
    """Return the chart of the score's factors; `table` has their numbers."""
    points = [
        _dot(factor.name, factor.ratio, f"{_MARKS[factor.mark]}x", factor.is_impossible)
        for factor in score.factors()
    ]
    points.append(_dot("score", score.value, _MARKS[score.mark].strip(), bool(score.impossible)))
    return interval_chart(
        "score_factors", "factors of the score", points, "ratio, log scale (1 changes nothing)",
        is_ratio=True, words={"better": "raises the score", "worse": "lowers it"}, table=table,
        unit="ratio, log scale", number_format=".4~g",
    )  # fmt: skip


def _dot(name: str, ratio: float | None, sign: str, is_impossible: bool) -> Dot:
    if ratio is None or ratio <= 0:
        return Dot(name, "not known" if ratio is None else f"{sign} 0", "absent")
    text = f"{sign} {significant(ratio, 5)}".strip()
    if is_impossible:
        return Dot(name, text + _IMPOSSIBLE, "absent")
    state: State = "better" if ratio >= 1 else "worse"
    return Dot(name, text, state, ratio, min(1.0, ratio), max(1.0, ratio))
