"""The result of `erg analyze` as document parts, for the HTML page and for Markdown.

A headline metric keeps its basis and interval, or its reason where the value is absent. Compiled
graphs are sorted by their work and cut to the largest. Files that could not be read are listed
apart, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ergmeter.flops.conventions import CONVENTIONS
from ergmeter.metrics.definitions.compute import HFU, MFU
from ergmeter.neuron.document import missing
from ergmeter.neuron.kernels import Ranked, RankedGraph, decimals, percent, rank_graphs
from ergmeter.neuron.metrics import JSON_NAMES, NKI, SCORE, TFLOP, TFLOP_PER_S, THROUGHPUT
from ergmeter.neuron.mfu import TERA, impossible_mfu
from ergmeter.neuron.score import REMARK, Factor
from ergmeter.records import Missing, Reading
from ergmeter.units import number_of, significant
from ergmeter.version import __version__
from ergmeter.views.analyze.console import (
    IMPOSSIBLE,
    bound,
    doubts,
    frac_percentage,
    is_more,
    legend,
    percentage,
    ratios_of,
)
from ergmeter.views.blocks import Block, Cell, Items, PagePart, Paragraph, SortableCell, TableBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ergmeter.neuron.analysis import Analysis
    from ergmeter.neuron.kernels import GraphResult, KernelTotal, NkiSummary
    from ergmeter.neuron.throughput import LogSummary

_TITLES = {
    MFU: "MFU",
    HFU: "HFU",
    THROUGHPUT: "throughput",
    TFLOP_PER_S: "work",
    TFLOP: "work of a sequence",
    NKI: "NKI share",
    SCORE: "score",
}


@dataclass(frozen=True)
class Headline:
    """A headline metric with its value, or the reason why it is absent."""

    key: str
    title: str
    formula: str
    value: str = ""
    interval: str = ""
    basis: str = ""
    note: str = ""
    reason: str = ""
    impossible: str = ""


def title(analysis: Analysis) -> str:
    """Return what was analyzed: the model, and the nodes it was trained on."""
    request, name = analysis.request, analysis.model.name
    path = Path(request.model_config)
    if not name and path.suffix == ".json":
        name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    nodes = number_of(analysis.nodes, "node")
    return f"{name or request.model_config} on {nodes} of {request.hw_backend}"


def headlines(analysis: Analysis) -> list[Headline]:
    """Return the headline metrics in order."""
    details = analysis.details
    rows = dict.fromkeys((MFU, HFU, THROUGHPUT, TFLOP_PER_S, TFLOP, NKI, SCORE), "")
    if not is_more(analysis.value(HFU), analysis.value(MFU)):
        del rows[HFU]
    under = "as the original counts"
    if details is not None:
        convention = details.figures.flops.convention
        under = f"under {convention}"
        rows[TFLOP] = CONVENTIONS[convention].formula
    else:
        rows[TFLOP] = (
            "forward and backward FLOPs of one sequence; the original calls it TFLOPs/second"
        )
    rows[MFU] = f"TFLOP of a sequence x sequences/s / peak of all cores, {under}"
    rows[TFLOP_PER_S] = f"TFLOP of a sequence x sequences/s, {under}"
    rows[THROUGHPUT] = analysis.throughput_formula
    rows[NKI] = "multiply-adds that NKI kernels state / all multiply-adds of the graphs"
    if HFU in rows:
        rows[HFU] = "as MFU, with what is computed twice"
    offset = analysis.request.baseline.offset
    product = "MFU / base x throughput / base x loss x convergence"
    rows[SCORE] = f"{product} x ({offset:g} + NKI share)"
    return [_headline(analysis, key, rows[key]) for key in rows if key in analysis.readings]


def _headline(analysis: Analysis, key: str, formula: str) -> Headline:
    result, names = analysis.readings[key], JSON_NAMES[key]
    name = names.name
    if key == TFLOP and analysis.original is not None:
        name = "tflops_per_second"  # as it calls that
    if isinstance(result, Missing):
        return Headline(name, _TITLES[key], formula, reason=result.reason)
    mark = analysis.nki.mark if analysis.nki is not None and key in (NKI, SCORE) else ""

    def text_of(value: float) -> str:
        if key == NKI:
            return percent(value)
        scaled = value * names.scale
        return decimals(scaled, 2, full=100.0) if names.unit == "%" else significant(scaled, 5)

    ends = [result.low, result.high]
    interval = " to ".join(text_of(end) for end in ends if end is not None)
    return Headline(
        name, _TITLES[key], formula,
        f"{text_of(result.value)} {names.unit}".rstrip() + bound(mark) + result.mark,
        f"{interval} {names.unit}".rstrip() if None not in ends else "",
        result.basis, result.note, impossible=result.impossible,
    )  # fmt: skip


def citation(analysis: Analysis) -> str:
    """Return a citable sentence: values and their basis."""
    clauses = [
        f"{headline.title} {headline.value}"
        f"{f' [{headline.interval}]' if headline.interval else ''} ({headline.basis})"
        for headline in headlines(analysis)
        if headline.value
    ]
    details = analysis.details
    under = "" if details is None else f", convention {details.figures.flops.convention}"
    batch = f"{analysis.batch_size} sequences of {analysis.seq_len} a step"
    figures = "; ".join(clauses) or "no figures"
    return f"ergmeter {__version__}: {title(analysis)}, {batch}{under}: {figures}."


# Compiled graphs and their kernels.


_KERNELS_OF_A_GRAPH = 3
_STATES = {"known": "stated", "absent": "not stated", "unreadable": "can't be read"}


def graphs_part(analysis: Analysis, *, most: int) -> PagePart:
    """Return the tables about graphs, at most `most` rows each."""
    nki, ranking = analysis.nki, rank_graphs(analysis.graphs, most=most)
    assert nki is not None
    blocks: list[Block] = [_summary(nki)]
    if ranking.graphs:
        blocks += [_graphs(analysis, ranking), *_about_graphs(analysis, ranking)]
    if ranking.failed:
        blocks += _failures(ranking, most)
    blocks += _kernels(nki.kernels, most)
    left = [f"{number} left out: {why}" for why, number in analysis.left_out.items()]
    texts = (*(f"not known in the graphs: {text}" for text in doubts(analysis)), *left)
    if texts:
        blocks.append(Items(texts))
    return PagePart("graphs", "Compiled graphs", tuple(blocks))


def _summary(nki: NkiSummary) -> TableBlock:
    rows = [("graphs read", f"{nki.successful} of {nki.total}")]
    for name, value in ratios_of(nki).items():
        value_text = "-" if value is None else percent(value) + bound(nki.mark)
        rows.append((f"NKI share, {name}", value_text))
    rows.append(("MACs of all graphs", _count_cell(nki.macs).text))
    rows.append(("of NKI kernels", _count_cell(nki.nki_macs).text))
    if nki.weighting:
        rows.append(("weights", nki.weighting))
        rows.append(("average, min and max are over", nki.ratios_are_over))
    return TableBlock("all graphs together", ("of all graphs", "figure"), tuple(rows))


def _graphs(analysis: Analysis, ranked: Ranked) -> TableBlock:
    """Tabulate the graphs, without columns that no graph has."""
    graphs = [row.graph for row in ranked.graphs]
    has_runs = analysis.request.graph_runs is not None
    columns: dict[str, Callable[[RankedGraph], Cell]] = {
        "module": lambda row: row.graph.module or "-",
        "file": lambda row: row.graph.name,
        "MACs": lambda row: _count_cell(row.graph.macs),
        "of all MACs x runs" if has_runs else "of all": lambda row: _share(row.macs_frac),
        "NKI MACs": lambda row: _count_cell(row.graph.nki_macs),
        "NKI share": lambda row: _share(analysis.nki_ratio(row.graph), row.graph.mark),
        "kernels (calls)": lambda row: (
            _kernels_of(row.graph) if analysis.original is None else "not known"
        ),
    }
    if has_runs:
        columns["runs"] = lambda row: _count_cell(row.graph.runs)
    if any(analysis.graph_score(graph) for graph in graphs):
        columns["score"] = lambda row: _score(analysis, row.graph)
    if len({graph.compiler for graph in graphs}) > 1:
        columns["compiler"] = lambda row: row.graph.compiler or "-"
    rows = tuple(tuple(cell(row) for cell in columns.values()) for row in ranked.graphs)
    return TableBlock("compiled graphs, by work", tuple(columns), rows, is_sortable=True)


def _count_cell(value: int | None) -> SortableCell:
    return SortableCell("-", None) if value is None else SortableCell(f"{value:,}", float(value))


def _share(frac: float | None, sign: str = "") -> SortableCell:
    return SortableCell("-" if frac is None else percent(frac) + sign, frac)


def _score(analysis: Analysis, graph: GraphResult) -> SortableCell:
    score = analysis.graph_score(graph)
    value = None if score is None else score.value
    return SortableCell("-" if value is None else significant(value, 5) + graph.mark, value)


def _kernels_of(graph: GraphResult) -> str:
    """Return the first kernels of a graph by name and calls, and the number of others."""
    kernels = graph.kernels
    names = [f"{k.function or k.target} ({k.calls})" for k in kernels[:_KERNELS_OF_A_GRAPH]]
    more = len(kernels) - _KERNELS_OF_A_GRAPH
    return ", ".join([*names, *([f"and {more} more"] if more > 0 else [])]) or "none"


def _about_graphs(analysis: Analysis, ranked: Ranked) -> Iterator[Block]:
    meanings = legend(row.graph.mark for row in ranked.graphs)
    if meanings:
        yield Items(tuple(meanings))
    text = "A MAC is a multiply-add: 2 FLOP."
    macs = "MACs" if analysis.request.graph_runs is None else "MACs x runs"
    if ranked.rest:
        frac = ranked.rest_macs_frac
        share = "" if frac is None else f" with {percent(frac)} of the {macs}"
        text += (
            f" The {len(ranked.graphs)} graphs with the most {macs} are shown; the other"
            f" {ranked.rest:,}{share} are in the JSON of --detailed."
        )
    yield Paragraph(text)


def _failures(ranked: Ranked, most: int) -> Iterator[Block]:
    rows = tuple(
        (graph.module or "-", graph.path, str(graph.error)) for graph in ranked.failed[:most]
    )
    yield TableBlock(
        "graphs that can't be read", ("module", "file that can't be read", "why"), rows
    )
    more = len(ranked.failed) - most
    if more > 0:
        yield Paragraph(f"{more:,} more can't be read: the JSON has them as nki_analysis.failed.")


def _kernels(kernels: Sequence[KernelTotal], most: int) -> Iterator[Block]:
    """Yield the table of kernels with their work."""
    if not kernels:
        return
    rows = tuple(
        (
            kernel.function or "-",
            kernel.target,
            _STATES.get(kernel.macs_state, kernel.macs_state),
            _count_cell(kernel.calls),
            _count_cell(kernel.macs),
        )
        for kernel in kernels[:most]
    )
    head = ("kernel", "called as", "its MACs are", "calls", "MACs of all calls")
    yield TableBlock("NKI kernels", head, rows, is_sortable=True)
    if len(kernels) > most:
        yield Paragraph(
            f"{len(kernels) - most:,} more kernels are in the JSON: nki_analysis.kernels."
        )


_OURS = "log_disagrees"  # `about` of findings that compare the log with the other inputs
_NOT_ASKED = "No score was asked for: --calculate-score gives one, with its factors."


def analysis_parts(analysis: Analysis, *, most_graphs: int) -> list[PagePart]:
    """Return all document parts in reading order."""
    return [
        _figures_part(analysis),
        score_part(analysis),
        _conventions_part(analysis),
        log_part(analysis.log),
        graphs_part(analysis, most=most_graphs),
        _agreement_part(analysis),
        _advice_part(analysis),
        _absent_part(analysis),
        _inputs_part(analysis),
        PagePart("cite", "How to cite", (Paragraph(citation(analysis), is_to_copy=True),)),
    ]


def _figures_part(analysis: Analysis) -> PagePart:
    head = ("figure", "value", "95 % interval", "how", "of this job")
    rows = tuple(map(_figure, headlines(analysis)))
    blocks: tuple[Block, ...] = (TableBlock("figures", head, rows),)
    if analysis.original is not None:
        version = analysis.original.version
        blocks += (Paragraph(f"The numbers are those of {version}, faults included."),)
    return PagePart("figures", "Figures", blocks)


def _figure(headline: Headline) -> tuple[str, ...]:
    if not headline.value:
        return headline.title, "-", "-", "absent", headline.reason
    note = "; ".join(filter(None, (headline.impossible, headline.note)))
    return headline.title, headline.value, headline.interval or "-", headline.basis, note


def score_part(analysis: Analysis) -> PagePart:
    """Return the score, one factor a row."""
    result, score = analysis.readings.get(SCORE), analysis.score
    if result is None or score is None:
        return PagePart("score", "Score", (Paragraph(_NOT_ASKED),))
    rows = [_factor(factor) for factor in score.factors()]
    score_text = "-"
    if isinstance(result, Reading):
        score_text = f"{significant(result.value, 5)}{bound(score.mark)}{result.mark}"
    rows.append(("score", "", "", score_text, score_text, ""))
    head = ("factor", "reached", "base", "ratio", "product so far", "log2 of the ratio")
    blocks: list[Block] = [TableBlock("factors of the score", head, tuple(rows))]
    if isinstance(result, Missing):
        blocks.append(Paragraph(f"No score: {result.reason}."))
    if analysis.original is None:
        blocks.append(Paragraph(f"Mind that {REMARK}."))
    return PagePart("score", "Score", tuple(blocks))


def _factor(factor: Factor) -> tuple[str, ...]:
    marked = bound(factor.mark)
    ratio = "-" if factor.ratio is None else significant(factor.ratio, 5) + marked
    product = "-" if factor.product is None else significant(factor.product, 5) + marked
    added = "-" if factor.doublings is None else f"{factor.doublings:+.3f}"
    if factor.is_given:
        return factor.name, "as given", "", ratio, product, added
    reached = "-"
    if factor.reached is not None:
        reached = f"{significant(factor.reached, 4)} {factor.unit}".rstrip()
    reached += IMPOSSIBLE if factor.is_impossible else ""
    base = "-" if factor.base is None else f"{factor.base:g} {factor.unit}".rstrip()
    if not factor.unit:  # the share is added to the offset
        base = f"{base} + share"
    return factor.name, reached, base, ratio, product, added


def _conventions_part(analysis: Analysis) -> PagePart:
    """Return MFU under the other conventions, and differences from the original's count."""
    details, version = analysis.details, analysis.original
    if version is not None:
        lists = (
            Paragraph("Kept as the original has it:"), Items(version.quirks_kept),
            Paragraph("Not kept:"), Items(version.not_kept),
        )  # fmt: skip
        return PagePart("conventions", "What was kept of the original", lists)
    assert details is not None
    figures, theirs = details.figures, details.original
    mfus = figures.mfu_by_convention
    rows = tuple(
        (name, significant(flops / TERA, 5), frac_percentage(mfus.get(name)))
        for name, flops in figures.by_convention.items()
    )
    chosen = f"The figures above are under {figures.flops.convention}"
    blocks: list[Block] = [Paragraph(f"{chosen}: erg conventions explains all.")]
    blocks.append(TableBlock("conventions", ("convention", "TFLOP a sequence", "MFU"), rows))
    if theirs is not None:
        count = f"By the original's count: {significant(theirs.tflop_per_sequence, 5)} TFLOP"
        mfu = theirs.mfu_percent
        wrong = IMPOSSIBLE if mfu is not None and impossible_mfu(mfu) else ""
        mfu_text = "" if mfu is None else f", MFU {percentage(mfu)}{wrong}"
        blocks.append(Paragraph(f"{count} a sequence{mfu_text}."))
        extra = theirs.over_exact_tflop_per_sequence
        if extra:
            pieces = tuple((why, f"{tflop:+.3f}") for why, tflop in extra.items())
            head = ("what it counts that exact does not", "TFLOP a sequence")
            blocks.append(TableBlock("the original's count over exact", head, pieces))
    return PagePart("conventions", "Under other conventions", tuple(blocks))


def log_part(log: LogSummary | None) -> PagePart:
    """Return the part about the training log."""
    if log is None:
        return PagePart("log", "Log", (Paragraph("No log was given: --log-file."),))
    rows = []
    for name, of, unit in (
        ("step time", log.step_times, "s"),
        ("printed throughput", log.throughput, "sequences/s"),
        ("loss", log.losses, ""),
    ):
        if of.count:
            values = (of.average, of.min, of.max)
            figures = (f"{significant(v or 0.0, 5)} {unit}".rstrip() for v in values)
            rows.append((name, *figures, f"{of.count:,}"))
    blocks: list[Block] = [Paragraph(" ".join(_about_log(log)))]
    if rows:
        head = ("of the log", "mean", "least", "most", "lines")
        blocks.append(TableBlock("what the log printed", head, tuple(rows)))
    return PagePart("log", "Log", (*blocks, *([Items(log.notes)] if log.notes else ())))


def _about_log(log: LogSummary) -> Iterator[str]:
    steps, losses = log.steps, log.losses
    yield f"{log.log_file}: {steps.count:,} steps, {steps.first} to {steps.last}."
    if log.runs_in_log > 1:
        yield f"{log.runs_in_log} runs in it: the last one is shown."
    if log.steady_state is not None:
        yield f"Steady state: {log.steady_state.rule}."
    if losses.not_finite:
        yield (
            f"{losses.not_finite} printed losses are no number (nan or inf), first at step"
            f" {losses.first_not_finite_step}."
        )


def _agreement_part(analysis: Analysis) -> PagePart:
    """Return findings where log, YAML and command line disagree."""
    texts = tuple(finding.text for finding in analysis.findings if finding.about == _OURS)
    if texts:
        return PagePart("agreement", "Agreement", (Items(texts),))
    if analysis.original is not None:
        words = "Not checked: the original takes the log and the YAML as they are."
    elif analysis.log is None:
        words = "Not checked: there is no log to hold against the YAML."
    else:
        words = "Nothing found: what the log says of its steps contradicts no option and no YAML."
    return PagePart("agreement", "Agreement", (Paragraph(words),))


def _advice_part(analysis: Analysis) -> PagePart:
    texts = tuple(finding.text for finding in analysis.findings if finding.about != _OURS)
    block = Items(texts) if texts else Paragraph("Nothing in the inputs calls for a remark.")
    return PagePart("advice", "Worth knowing", (block,))


def _absent_part(analysis: Analysis) -> PagePart:
    """Return the absent metrics by reason."""
    by_reason: dict[str, list[str]] = {}
    for key, why in missing(analysis).items():
        by_reason.setdefault(why, []).append(key)
    if not by_reason:
        return PagePart("absent", "Absent", (Paragraph("Nothing that was asked for is absent."),))
    rows = tuple((why, ", ".join(keys)) for why, keys in by_reason.items())
    return PagePart("absent", "Absent", (TableBlock("absent figures", ("why", "what"), rows),))


def _inputs_part(analysis: Analysis) -> PagePart:
    """Return files and sizes with their source, then assumptions."""
    rows = tuple((what, _input(value), source) for what, value, source in analysis.inputs)
    versions = [("ergmeter", __version__, "this program")]
    if analysis.model.config_sha256:
        versions.append(("SHA-256 of config.json", analysis.model.config_sha256, "its content"))
    compilers = ", ".join(analysis.compilers) or "-"
    versions.append(("neuronxcc", compilers, "the paths of the graphs"))
    grid = TableBlock("inputs", ("input", "value", "from"), (*rows, *versions))
    lora = None if analysis.details is None else analysis.details.job.lora
    notes = list(analysis.notes)
    if lora:
        notes.insert(0, f"LoRA: r={lora.r} on {', '.join(lora.targets)}")
    assumed = (Paragraph("Assumed and noted:"), Items(tuple(notes))) if notes else ()
    return PagePart("inputs", "Inputs", (grid, *assumed))


def _input(value: object) -> str:
    if value is None:
        return "-"
    return significant(value, 6) if isinstance(value, float) else str(value)
