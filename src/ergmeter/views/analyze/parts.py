"""The result of `erg analyze` as document parts, for the HTML page and for Markdown.

A headline metric keeps its basis and interval, or its reason where the value is absent. Compiled
graphs are sorted by their work and cut to the largest. Files that could not be read are listed
apart, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.neuron.document import Ranked, RankedGraph, rank_graphs
from ergmeter.neuron.kernels import decimals, percent
from ergmeter.neuron.score import Factor, factors
from ergmeter.units import number_of, significant
from ergmeter.version import __version__
from ergmeter.views.analyze.console import bound, doubts, is_more, legend, mark, mark_of, percentage
from ergmeter.views.blocks import Block, Cell, Items, PagePart, Paragraph, SortableCell, TableBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Document = Mapping[str, Any]


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


def title(document: Document) -> str:
    """Return what was analyzed: the model, and the nodes it was trained on."""
    name, path = document["versions"]["model"].get("name"), Path(document["model_config"])
    if not name and path.suffix == ".json":
        name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    nodes = number_of(document["num_nodes"], "node")
    return f"{name or document['model_config']} on {nodes} of {document['hardware_backend']}"


def headlines(document: Document) -> list[Headline]:
    """Return the headline metrics in order."""
    is_original = document["compat"] is not None
    under = "as the original counts" if is_original else f"under {document['convention']}"
    rate = document.get("obtained", {}).get("throughput_seq_per_sec", {})
    sequence = "work of a sequence"
    mfu = f"TFLOP of a sequence x sequences/s / peak of all cores, {under}"
    rows = [("mfu_percent", "MFU", "%", mfu)]
    if not is_original and is_more(document["hfu_percent"], document["mfu_percent"]):
        rows.append(("hfu_percent", "HFU", "%", "as MFU, with what is computed twice"))
    pace = rate.get("formula", "sequences of the counted steps / their time")
    rows.append(("throughput_seq_per_sec", "throughput", "sequences/s", pace))
    if is_original:
        work = "forward and backward FLOPs of one sequence; the original calls it TFLOPs/second"
        rows.append(("tflops_per_second", sequence, "TFLOP", work))
    else:
        work = f"TFLOP of a sequence x sequences/s, {under}"
        rows.append(("tflops_per_second", "work", "TFLOP/s", work))
        rows.append(("tflop_per_sequence", sequence, "TFLOP", str(document["convention_formula"])))
    nki = "multiply-adds that NKI kernels state / all multiply-adds of the graphs"
    rows.append(("overall_nki_ratio", "NKI share", "", nki))
    if "training_score_breakdown" in document:
        offset = document["training_score_breakdown"]["score_offset"]
        product = "MFU / base x throughput / base x loss x convergence"
        rows.append(("training_score", "score", "", f"{product} x ({offset:g} + NKI share)"))
    return [_headline(document, *row) for row in rows]


def _headline(document: Document, key: str, name: str, unit: str, formula: str) -> Headline:
    summary = document["nki_analysis"]["summary"]
    value = summary.get(key) if key == "overall_nki_ratio" else document[key]
    if value is None:
        reason = document.get("missing", {}).get(key, "not known")
        return Headline(key, name, formula, reason=reason)
    uncertain = {
        "overall_nki_ratio": summary,
        "training_score": document.get("training_score_breakdown", {}),
    }
    is_share = key == "overall_nki_ratio"
    number = percent(value) if is_share else f"{_value_text(value, unit)} {unit}".rstrip()
    origin = document.get("obtained", {}).get(key, {})
    ends = [origin.get("low"), origin.get("high")]
    interval = " to ".join(_value_text(end, unit) for end in ends) if None not in ends else ""
    return Headline(
        key, name, formula, number + bound(uncertain.get(key, {})) + mark(document, key),
        f"{interval} {unit}".rstrip() if interval else "",
        origin.get("basis", ""), origin.get("note", ""),
        impossible=document.get("impossible", {}).get(key, ""),
    )  # fmt: skip


def _value_text(value: float, unit: str) -> str:
    return decimals(value, 2, full=100.0) if unit == "%" else significant(value, 5)


def citation(document: Document) -> str:
    """Return a citable sentence: values and their basis."""
    clauses = [
        f"{headline.title} {headline.value}"
        f"{f' [{headline.interval}]' if headline.interval else ''} ({headline.basis})"
        for headline in headlines(document)
        if headline.value
    ]
    under = "" if document["compat"] is not None else f", convention {document['convention']}"
    batch = f"{document['batch_size']} sequences of {document['sequence_length']} a step"
    figures = "; ".join(clauses) or "no figures"
    return f"ergmeter {__version__}: {title(document)}, {batch}{under}: {figures}."


# Compiled graphs and their kernels.


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
    left = [f"{number} left out: {why}" for why, number in analysis.get("left_out", {}).items()]
    texts = (*(f"not known in the graphs: {text}" for text in doubts(analysis)), *left)
    if texts:
        blocks.append(Items(texts))
    return PagePart("graphs", "Compiled graphs", tuple(blocks))


def _summary(summary: Document) -> TableBlock:
    rows = [("graphs read", f"{summary['successful_analyses']} of {summary['total_files']}")]
    for name in ("overall", "average", "min", "max"):
        value = summary[f"{name}_nki_ratio"]
        value_text = "-" if value is None else percent(value) + bound(summary)
        rows.append((f"NKI share, {name}", value_text))
    rows.append(("MACs of all graphs", _count_cell(summary["total_hlo_macs"]).text))
    rows.append(("of NKI kernels", _count_cell(summary["total_nki_macs"]).text))
    if "weighting" in summary:
        rows.append(("weights", summary["weighting"]))
        rows.append(("average, min and max are over", summary["ratios_are_over"]))
    return TableBlock("all graphs together", ("of all graphs", "figure"), tuple(rows))


def _graphs(ranked: Ranked) -> TableBlock:
    """Tabulate the graphs, without columns that no graph has."""
    files = [graph.file for graph in ranked.graphs]
    has_runs = _has_runs(ranked)
    columns: dict[str, Callable[[RankedGraph], Cell]] = {
        "module": lambda graph: str(graph.file.get("module_name") or "-"),
        "file": lambda graph: str(graph.file["file_name"]),
        "MACs": lambda graph: _count_cell(graph.file["hlo_macs"]),
        "of all MACs x runs" if has_runs else "of all": lambda graph: _share(graph.macs_frac),
        "NKI MACs": lambda graph: _count_cell(graph.file["nki_macs"]),
        "NKI share": lambda graph: _share(graph.file["nki_ratio"], mark_of(graph.file)),
        "kernels (calls)": lambda graph: _kernels_of(graph.file),
    }
    if has_runs:
        columns["runs"] = lambda graph: _count_cell(graph.file.get("runs"))
    if any("training_score" in file for file in files):
        columns["score"] = lambda graph: _score(graph.file)
    if len({file.get("neuronxcc_version") for file in files}) > 1:
        columns["compiler"] = lambda graph: str(graph.file.get("neuronxcc_version") or "-")
    rows = tuple(tuple(cell(graph) for cell in columns.values()) for graph in ranked.graphs)
    return TableBlock("compiled graphs, by work", tuple(columns), rows, is_sortable=True)


def _has_runs(ranked: Ranked) -> bool:
    """True if graphs are also ranked by how often they ran."""
    return any(graph.file.get("runs") is not None for graph in ranked.graphs)


def _count_cell(value: int | None) -> SortableCell:
    return SortableCell("-", None) if value is None else SortableCell(f"{value:,}", float(value))


def _share(frac: float | None, sign: str = "") -> SortableCell:
    return SortableCell("-" if frac is None else percent(frac) + sign, frac)


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
    meanings = legend(mark_of(graph.file) for graph in ranked.graphs)
    if meanings:
        yield Items(tuple(meanings))
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
    rows = tuple(map(_figure, headlines(document)))
    blocks: tuple[Block, ...] = (TableBlock("figures", head, rows),)
    if document["compat"] is not None:
        version = document["compat"]["version"]
        blocks += (Paragraph(f"The numbers are those of {version}, faults included."),)
    return PagePart("figures", "Figures", blocks)


def _figure(headline: Headline) -> tuple[str, ...]:
    if not headline.value:
        return headline.title, "-", "-", "absent", headline.reason
    note = "; ".join(filter(None, (headline.impossible, headline.note)))
    return headline.title, headline.value, headline.interval or "-", headline.basis, note


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
    reached = "-"
    if factor.reached is not None:
        reached = f"{significant(factor.reached, 4)} {factor.unit}".rstrip()
    reached += " (impossible)" if factor.is_impossible else ""
    base = "-" if factor.base is None else f"{factor.base:g} {factor.unit}".rstrip()
    if not factor.unit:  # the share is added to the offset
        base = f"{base} + share"
    return factor.name, reached, base, ratio, product, added


def _conventions_part(document: Document) -> PagePart:
    """Return MFU under the other conventions, and differences from the original's count."""
    if document["compat"] is not None:
        compat = document["compat"]
        lists = (
            Paragraph("Kept as the original has it:"), Items(tuple(compat["quirks_kept"])),
            Paragraph("Not kept:"), Items(tuple(compat["not_kept"])),
        )  # fmt: skip
        return PagePart("conventions", "What was kept of the original", lists)
    rows = tuple(
        (name, significant(each["tflop_per_sequence"], 5), percentage(each["mfu_percent"]))
        for name, each in document["conventions"].items()
    )
    chosen = f"The figures above are under {document['convention']}: erg conventions explains all."
    blocks: list[Block] = [Paragraph(chosen)]
    blocks.append(TableBlock("conventions", ("convention", "TFLOP a sequence", "MFU"), rows))
    theirs = document["original_count"]
    if theirs is not None:
        count = f"By the original's count: {significant(theirs['tflop_per_sequence'], 5)} TFLOP"
        share = theirs["mfu_percent"]
        wrong = mark(document, "original_count.mfu_percent")
        mfu = "" if share is None else f", MFU {percentage(share)}{wrong}"
        blocks.append(Paragraph(f"{count} a sequence{mfu}."))
        extra = theirs["over_exact_tflop_per_sequence"]
        if extra:
            pieces = tuple((why, f"{tflop:+.3f}") for why, tflop in extra.items())
            head = ("what it counts that exact does not", "TFLOP a sequence")
            blocks.append(TableBlock("the original's count over exact", head, pieces))
    return PagePart("conventions", "Under other conventions", tuple(blocks))


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
