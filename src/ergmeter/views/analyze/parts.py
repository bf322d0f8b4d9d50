"""The result of `erg analyze` as document parts, for the HTML page and for Markdown.

Compiled graphs are sorted by their work and cut to the largest. Files that could not be read are
listed apart, with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.neuron.document import rank_graphs
from ergmeter.neuron.kernels import LEGEND, LOWER_BOUND, UNCERTAIN, decimals, percent
from ergmeter.neuron.score import factors
from ergmeter.units import significant
from ergmeter.version import __version__
from ergmeter.views.analyze.text import (
    bound,
    citation,
    counted,
    fixed,
    headlines,
    mark,
    ratio,
    wrapped,
)
from ergmeter.views.blocks import Items, PagePart, Paragraph, SortableCell, TableBlock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ergmeter.neuron.document import Ranked, RankedGraph
    from ergmeter.neuron.score import Factor
    from ergmeter.views.analyze.text import Headline
    from ergmeter.views.blocks import Block, Cell

    Document = Mapping[str, Any]

# Compiled graphs and their kernels.


_ORIGINAL_COLUMNS = 120  # width of the table's rules


def files_section(
    files: Sequence[Document],
    summary: Document,
    *,
    why: str | None = None,
    is_original: bool = False,
) -> Iterator[str]:
    """Yield one line for each graph. `why`: the reason if scores are missing."""
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
    for mark, meaning in LEGEND.items():
        if any(mark_of(file) == mark for file in files):
            yield f"{mark} {meaning}"
    if why:
        yield from wrapped(f"No score of a graph: {why}")
    if "average_score" in summary:
        yield "\nPer-file Score Statistics:"
        for name in ("average", "min", "max"):
            value = summary[f"{name}_score"]
            yield f"  {name.title()} Score: {value:.4f}{bound(summary)}"


def mark_of(file: Document) -> str:
    """Return the mark of a ratio that is not fully known."""
    if file.get("is_uncertain"):
        return UNCERTAIN
    return LOWER_BOUND if file.get("is_lower_bound") else ""


_KERNELS_OF_A_GRAPH = 3
_STATES = {"known": "stated", "absent": "not stated", "unreadable": "can't be read"}


def graphs_part(document: Document, files: Sequence[Document], *, most: int) -> PagePart:
    """Return the tables about graphs, at most `most` rows each."""
    analysis = document["nki_analysis"]
    ranking = rank_graphs(files, most=most)
    blocks: list[Block] = [_summary(analysis["summary"])]
    if ranking.graphs:
        blocks += [_graphs(ranking), *_about_graphs(ranking)]
    if ranking.failed:
        blocks += _failures(ranking, most)
    blocks += _kernels(analysis.get("kernels", ()), most)
    doubts = [counted(number, what) for what, number in analysis.get("not_known", {}).items()]
    left = [f"{number} left out: {why}" for why, number in analysis.get("left_out", {}).items()]
    if doubts or left:
        blocks.append(Items((*(f"not known in the graphs: {text}" for text in doubts), *left)))
    return PagePart("graphs", "Compiled graphs", tuple(blocks))


def _summary(summary: Document) -> TableBlock:
    rows: list[tuple[Cell, ...]] = [
        ("graphs read", f"{summary['successful_analyses']} of {summary['total_files']}")
    ]
    for name in ("overall", "average", "min", "max"):
        value = summary[f"{name}_nki_ratio"]
        value_text = "-" if value is None else percent(value) + bound(summary)
        rows.append((f"NKI share, {name}", value_text))
    for name, key in (
        ("MACs of all graphs", "total_hlo_macs"),
        ("of NKI kernels", "total_nki_macs"),
    ):
        rows.append((name, "-" if summary[key] is None else f"{summary[key]:,}"))
    if "weighting" in summary:
        rows.append(("weights", str(summary["weighting"])))
        rows.append(("average, min and max are over", str(summary["ratios_are_over"])))
    return TableBlock("all graphs together", ("of all graphs", "figure"), tuple(rows))


def _graphs(ranked: Ranked) -> TableBlock:
    """Tabulate the graphs, without columns that no graph has."""
    files = [graph.file for graph in ranked.graphs]
    has_scores = any("training_score" in file for file in files)
    has_runs = _has_runs(ranked)
    compilers = {file.get("neuronxcc_version") for file in files}
    share = "of all MACs x runs" if has_runs else "of all"
    head = ["module", "file", "MACs", share, "NKI MACs", "NKI share", "kernels (calls)"]
    head += ["runs"] * has_runs + ["score"] * has_scores + ["compiler"] * (len(compilers) > 1)
    rows = []
    for graph in ranked.graphs:
        row = _graph(graph)
        if has_runs:
            row.append(_count_cell(graph.file.get("runs")))
        if has_scores:
            row.append(_score(graph.file))
        if len(compilers) > 1:
            row.append(str(graph.file.get("neuronxcc_version") or "-"))
        rows.append(tuple(row))
    return TableBlock("compiled graphs, by work", tuple(head), tuple(rows), is_sortable=True)


def _has_runs(ranked: Ranked) -> bool:
    """True if graphs are also ranked by how often they ran."""
    return any(graph.file.get("runs") is not None for graph in ranked.graphs)


def _graph(graph: RankedGraph) -> list[Cell]:
    file, share = graph.file, graph.file["nki_ratio"]
    return [
        str(file.get("module_name") or "-"),
        str(file["file_name"]),
        _count_cell(file["hlo_macs"]),
        SortableCell("-" if graph.macs_frac is None else percent(graph.macs_frac), graph.macs_frac),
        _count_cell(file["nki_macs"]),
        SortableCell("-" if share is None else percent(share) + mark_of(file), share),
        _kernels_of(file),
    ]


def _count_cell(value: int | None) -> SortableCell:
    return SortableCell(
        "-" if value is None else f"{value:,}", None if value is None else float(value)
    )


def _score(file: Document) -> SortableCell:
    value = file.get("training_score", {}).get("score")
    return SortableCell("-" if value is None else significant(value, 5) + mark_of(file), value)


def _kernels_of(file: Document) -> str:
    """Return the first kernels of a graph by name and calls, and the number of others."""
    kernels = file.get("kernels")
    if kernels is None:
        return "not known"  # the original keeps none
    names = [f"{_name(kernel)} ({kernel['calls']})" for kernel in kernels[:_KERNELS_OF_A_GRAPH]]
    more = len(kernels) - _KERNELS_OF_A_GRAPH
    return ", ".join([*names, *([f"and {more} more"] if more > 0 else [])]) or "none"


def _name(kernel: Document) -> str:
    return str(kernel["function"] or kernel["target"])


def _about_graphs(ranked: Ranked) -> Iterator[Block]:
    marks = {mark_of(graph.file) for graph in ranked.graphs}
    legend = [f"{mark} {meaning}" for mark, meaning in LEGEND.items() if mark in marks]
    if legend:
        yield Items(tuple(legend))
    text = "A MAC is a multiply-add: 2 FLOP."
    macs = "MACs x runs" if _has_runs(ranked) else "MACs"
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
        (str(file.get("module_name") or "-"), str(file["file_path"]), str(file["error"]))
        for file in ranked.failed[:most]
    )
    yield TableBlock(
        "graphs that can't be read", ("module", "file that can't be read", "why"), rows
    )
    more = len(ranked.failed) - most
    if more > 0:
        yield Paragraph(f"{more:,} more can't be read: the JSON has them as nki_analysis.failed.")


def _kernels(kernels: Sequence[Document], most: int) -> Iterator[Block]:
    """Yield the table of kernels with their work."""
    if not kernels:
        return
    rows = tuple(
        (
            str(kernel["function"] or "-"),
            str(kernel["target"]),
            _STATES.get(kernel["macs_state"], str(kernel["macs_state"])),
            _count_cell(kernel["calls"]),
            _count_cell(kernel["macs"]),
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


def analysis_parts(
    document: Document, files: Sequence[Document], *, most_graphs: int
) -> list[PagePart]:
    """Return all document parts in reading order."""
    return [
        _figures_part(document),
        score_part(document),
        _conventions_part(document),
        log_part(document),
        graphs_part(document, files, most=most_graphs),
        _agreement_part(document),
        _advice_part(document),
        _absent_part(document),
        _inputs_part(document),
        PagePart("cite", "How to cite", (Paragraph(citation(document), is_to_copy=True),)),
    ]


def _figures_part(document: Document) -> PagePart:
    head = ("figure", "value", "95 % interval", "how", "of this job")
    rows = tuple(
        (headline.title, headline.value, headline.interval or "-", headline.basis, _note(headline))
        if headline.value
        else (headline.title, "-", "-", "absent", headline.reason)
        for headline in headlines(document)
    )
    return PagePart("figures", "Figures", (TableBlock("figures", head, rows), *_remarks(document)))


def _note(headline: Headline) -> str:
    return "; ".join(part for part in (headline.impossible, headline.note) if part)


def _remarks(document: Document) -> Iterator[Paragraph]:
    if document["compat"] is not None:
        yield Paragraph(
            f"The numbers are those of {document['compat']['version']}, faults included."
        )


def score_part(document: Document) -> PagePart:
    """Return the score, one factor a row."""
    if "training_score_breakdown" not in document:
        return PagePart("score", "Score", (Paragraph(_NOT_ASKED),))
    parts = document["training_score_breakdown"]
    rows = [_factor(factor) for factor in factors(parts)]
    value, reason = document["training_score"], document.get("missing", {}).get("training_score")
    wrong = mark(document, "training_score")
    score_text = "-" if value is None else f"{significant(value, 5)}{bound(parts)}{wrong}"
    rows.append(("score", "", "", score_text, score_text, ""))
    head = ("factor", "reached", "base", "ratio", "product so far", "log2 of the ratio")
    blocks: list[Block] = [TableBlock("factors of the score", head, tuple(rows))]
    if reason:
        blocks.append(Paragraph(f"No score: {reason}."))
    if "remark" in parts:
        blocks.append(Paragraph(f"Mind that {parts['remark']}."))
    return PagePart("score", "Score", tuple(blocks))


def _factor(factor: Factor) -> tuple[str, ...]:
    marked = bound({"is_lower_bound": factor.is_bound, "is_uncertain": factor.is_uncertain})
    ratio = "-" if factor.ratio is None else significant(factor.ratio, 5) + marked
    product = "-" if factor.product is None else significant(factor.product, 5) + marked
    added = "-" if factor.doublings is None else f"{factor.doublings:+.3f}"
    if factor.is_given:
        return factor.name, "as given", "", ratio, product, added
    reached = (
        "-"
        if factor.reached is None
        else f"{significant(factor.reached, 4)} {factor.unit}".rstrip()
    )
    reached += " (impossible)" if factor.is_impossible else ""
    base = "-" if factor.base is None else f"{factor.base:g} {factor.unit}".rstrip()
    if not factor.unit:  # the share is added to the offset
        base = f"{base} + share"
    return factor.name, reached, base, ratio, product, added


def _conventions_part(document: Document) -> PagePart:
    """Return MFU under the other conventions, and differences from the original's count."""
    if document["compat"] is not None:
        quirks = Items(tuple(document["compat"]["quirks_kept"]))
        lost = Items(tuple(document["compat"]["not_kept"]))
        paragraphs = (
            Paragraph("Kept as the original has it:"),
            quirks,
            Paragraph("Not kept:"),
            lost,
        )
        return PagePart("conventions", "What was kept of the original", paragraphs)
    rows = [
        (
            name,
            f"{significant(convention['tflop_per_sequence'], 5)}",
            _percent(convention["mfu_percent"]),
        )
        for name, convention in document["conventions"].items()
    ]
    chosen = f"The figures above are under {document['convention']}: erg conventions explains all."
    blocks: list[Block] = [Paragraph(chosen)]
    blocks.append(TableBlock("conventions", ("convention", "TFLOP a sequence", "MFU"), tuple(rows)))
    theirs = document["original_count"]
    if theirs is not None:
        count = f"By the original's count: {significant(theirs['tflop_per_sequence'], 5)} TFLOP"
        share = theirs["mfu_percent"]
        wrong = mark(document, "original_count.mfu_percent")
        mfu = "" if share is None else f", MFU {_percent(share)}{wrong}"
        blocks.append(Paragraph(f"{count} a sequence{mfu}."))
        extra = theirs["over_exact_tflop_per_sequence"]
        if extra:
            pieces = tuple((why, f"{tflop:+.3f}") for why, tflop in extra.items())
            head = ("what it counts that exact does not", "TFLOP a sequence")
            blocks.append(TableBlock("the original's count over exact", head, pieces))
    return PagePart("conventions", "Under other conventions", tuple(blocks))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{decimals(value, 2, full=100.0)} %"


def log_part(document: Document) -> PagePart:
    """Return the part about the training log."""
    log = document.get("log_metrics")
    if log is None:
        return PagePart("log", "Log", (Paragraph("No log was given: --log-file."),))
    rows = []
    for name, key, unit in (
        ("step time", "step_times", "s"),
        ("printed throughput", "throughput", "sequences/s"),
        ("loss", "losses", ""),
    ):
        of = log[key]
        if of["count"]:
            figures = (
                f"{significant(of[n], 5)} {unit}".rstrip() for n in ("average", "min", "max")
            )
            rows.append((name, *figures, f"{of['count']:,}"))
    blocks: list[Block] = [Paragraph(" ".join(_about_log(log)))]
    if rows:
        head = ("of the log", "mean", "least", "most", "lines")
        blocks.append(TableBlock("what the log printed", head, tuple(rows)))
    notes = tuple(log.get("notes", ()))
    return PagePart("log", "Log", (*blocks, *([Items(notes)] if notes else ())))


def _about_log(log: Document) -> Iterator[str]:
    steps, losses = log["steps"], log["losses"]
    yield f"{log['log_file']}: {steps['count']:,} steps, {steps['first']} to {steps['last']}."
    if log.get("runs_in_log", 1) > 1:
        yield f"{log['runs_in_log']} runs in it: the last one is shown."
    if "steady_state" in log:
        yield f"Steady state: {log['steady_state']['rule']}."
    if losses.get("not_finite"):
        yield (
            f"{losses['not_finite']} printed losses are no number (nan or inf), first at step"
            f" {losses['first_not_finite_step']}."
        )


def _agreement_part(document: Document) -> PagePart:
    """Return findings where log, YAML and command line disagree."""
    texts = tuple(finding["text"] for finding in document["findings"] if finding["about"] == _OURS)
    if texts:
        return PagePart("agreement", "Agreement", (Items(texts),))
    if document["compat"] is not None:
        words = "Not checked: the original takes the log and the YAML as they are."
    elif "log_metrics" not in document:
        words = "Not checked: there is no log to hold against the YAML."
    else:
        words = "Nothing found: what the log says of its steps contradicts no option and no YAML."
    return PagePart("agreement", "Agreement", (Paragraph(words),))


def _advice_part(document: Document) -> PagePart:
    texts = tuple(finding["text"] for finding in document["findings"] if finding["about"] != _OURS)
    block = Items(texts) if texts else Paragraph("Nothing in the inputs calls for a remark.")
    return PagePart("advice", "Worth knowing", (block,))


def _absent_part(document: Document) -> PagePart:
    """Return the absent metrics by reason."""
    by_reason: dict[str, list[str]] = {}
    for key, why in document.get("missing", {}).items():
        by_reason.setdefault(why, []).append(key)
    if not by_reason:
        return PagePart("absent", "Absent", (Paragraph("Nothing that was asked for is absent."),))
    rows = tuple((why, ", ".join(keys)) for why, keys in by_reason.items())
    return PagePart("absent", "Absent", (TableBlock("absent figures", ("why", "what"), rows),))


def _inputs_part(document: Document) -> PagePart:
    """Return files and sizes with their source, then assumptions."""
    rows = tuple(
        (entry["what"], _input(entry["value"]), str(entry["from"])) for entry in document["inputs"]
    )
    model = document["versions"]["model"]
    versions = [("ergmeter", __version__, "this program")]
    if model.get("config_sha256"):
        versions.append(("SHA-256 of config.json", model["config_sha256"], "its content"))
    compilers = ", ".join(document["versions"]["neuronxcc"]) or "-"
    versions.append(("neuronxcc", compilers, "the paths of the graphs"))
    grid = TableBlock("inputs", ("input", "value", "from"), (*rows, *versions))
    lora = document.get("lora")
    notes = list(document.get("notes", ()))
    if lora:
        notes.insert(0, f"LoRA: r={lora['r']} on {', '.join(lora['targets'])}")
    assumed = (Paragraph("Assumed and noted:"), Items(tuple(notes))) if notes else ()
    return PagePart("inputs", "Inputs", (grid, *assumed))


def _input(value: object) -> str:
    if value is None:
        return "-"
    return significant(value, 6) if isinstance(value, float) else str(value)
