"""The compiled graphs and their kernels, in tables: for the page and for Markdown.

The trap: hundreds of rows in which the three that matter are lost. Graphs stand by their work, the
rest is counted and said where to get, and what could not be read is apart with its reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.neuron.document import rank_graphs
from ergmeter.neuron.kernels import LEGEND, LOWER_BOUND, UNCERTAIN, percent
from ergmeter.units import significant
from ergmeter.views.analyze.blocks import Items, PagePart, Paragraph, SortableCell, TableBlock
from ergmeter.views.analyze.text import bound, counted, fixed, ratio, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Document = Mapping[str, Any]
    from ergmeter.neuron.document import Ranked, RankedGraph
    from ergmeter.views.analyze.blocks import Block, Cell

    AnalyzeGraphPartsDocument = Mapping[str, Any]

# -- analyze files ---------------------------------------------------------------------------------
# The table of compiled graphs on the console of `erg analyze`.


_ORIGINAL_COLUMNS = 120  # of its rules, whatever stands between them


def files_section(
    files: Sequence[Document],
    summary: Document,
    *,
    why: str | None = None,
    is_original: bool = False,
) -> Iterator[str]:
    """The graphs, one a line. `why`: they were to have scores, and have none."""
    if not files and not is_original:
        yield "\nPer-file NKI analysis: no graphs"
        return
    has_scores = any("training_score" in one for one in files)
    wide = max([20, *(len(one.get("module_name") or "-") for one in files)])
    long = max([40, *(len(one["file_name"]) for one in files)])
    many = max([15, *(len(f"{one['hlo_macs']:,}") for one in files)])
    head = f"{'File Name':<{long}} {'Module':<{wide}} {'HLO MACs':>{many}} {'NKI MACs':>{many}}"
    head += f" {'NKI Ratio':>10}" + (f" {'Score':>10}" if has_scores else "")
    rule = "-" * (_ORIGINAL_COLUMNS if is_original else len(head))
    yield "\nPer-file NKI analysis:"
    yield rule
    yield head
    yield rule
    for one in files:
        if one["status"] != "success":
            # The original names no module of a file that it can't read.
            module = f" {one['module_name'] or '-':<{wide}}" if "module_name" in one else ""
            yield f"{one['file_name']:<{long}}{module} ERROR: {one['error']}"
            continue
        mark = mark_of(one)
        line = (
            f"{one['file_name']:<{long}} {one['module_name'] or '-':<{wide}}"
            f" {one['hlo_macs']:>{many},} {one['nki_macs']:>{many},}"
            f" {ratio(one['nki_ratio']) + mark:>10}"
        )
        found = one.get("training_score")
        yield line + (f" {fixed(found['score'], 4) + mark:>10}" if found else "")
    yield rule
    for mark, meaning in LEGEND.items():
        if any(mark_of(one) == mark for one in files):
            yield f"{mark} {meaning}"
    if why:
        yield from wrapped(f"No score of a graph: {why}")
    if "average_score" in summary:
        yield "\nPer-file Score Statistics:"
        for name in ("average", "min", "max"):
            value = summary[f"{name}_score"]
            yield f"  {name.title()} Score: {value:.4f}{bound(summary)}"


def mark_of(file: Document) -> str:
    """What stands behind a graph's ratio, where that is not known whole."""
    if file.get("is_uncertain"):
        return UNCERTAIN
    return LOWER_BOUND if file.get("is_lower_bound") else ""


# -- analyze graph parts ---------------------------------------------------------------------------


_KERNELS_OF_A_GRAPH = 3
_STATES = {"known": "stated", "absent": "not stated", "unreadable": "can't be read"}


def graphs_part(
    document: AnalyzeGraphPartsDocument, files: Sequence[AnalyzeGraphPartsDocument], *, most: int
) -> PagePart:
    """Every table about graphs. `most`: so many rows of each at most."""
    analysis = document["nki_analysis"]
    found = rank_graphs(files, most=most)
    blocks: list[Block] = [_summary(analysis["summary"])]
    if found.graphs:
        blocks += [_graphs(found), *_about_graphs(found)]
    if found.failed:
        blocks += _failures(found, most)
    blocks += _kernels(analysis.get("kernels", ()), most)
    doubts = [counted(number, what) for what, number in analysis.get("not_known", {}).items()]
    left = [f"{number} left out: {why}" for why, number in analysis.get("left_out", {}).items()]
    if doubts or left:
        blocks.append(Items((*(f"not known in the graphs: {text}" for text in doubts), *left)))
    return PagePart("graphs", "Compiled graphs", tuple(blocks))


def _summary(summary: AnalyzeGraphPartsDocument) -> TableBlock:
    rows: list[tuple[Cell, ...]] = [
        ("graphs read", f"{summary['successful_analyses']} of {summary['total_files']}")
    ]
    for name in ("overall", "average", "min", "max"):
        value = summary[f"{name}_nki_ratio"]
        said = "-" if value is None else percent(value) + bound(summary)
        rows.append((f"NKI share, {name}", said))
    for name, key in (
        ("MACs of all graphs", "total_hlo_macs"),
        ("of NKI kernels", "total_nki_macs"),
    ):
        rows.append((name, "-" if summary[key] is None else f"{summary[key]:,}"))
    if "weighting" in summary:
        rows.append(("weights", str(summary["weighting"])))
        rows.append(("average, min and max are over", str(summary["ratios_are_over"])))
    return TableBlock("all graphs together", ("of all graphs", "figure"), tuple(rows))


def _graphs(found: Ranked) -> TableBlock:
    """A row for each; columns that no graph has are left out."""
    files = [one.file for one in found.graphs]
    has_scores = any("training_score" in file for file in files)
    has_runs = _has_runs(found)
    compilers = {file.get("neuronxcc_version") for file in files}
    share = "of all MACs x runs" if has_runs else "of all"
    head = ["module", "file", "MACs", share, "NKI MACs", "NKI share", "kernels (calls)"]
    head += ["runs"] * has_runs + ["score"] * has_scores + ["compiler"] * (len(compilers) > 1)
    rows = []
    for one in found.graphs:
        row = _graph(one)
        if has_runs:
            row.append(_count_cell(one.file.get("runs")))
        if has_scores:
            row.append(_score(one.file))
        if len(compilers) > 1:
            row.append(str(one.file.get("neuronxcc_version") or "-"))
        rows.append(tuple(row))
    return TableBlock("compiled graphs, by work", tuple(head), tuple(rows), is_sortable=True)


def _has_runs(found: Ranked) -> bool:
    """Whether the graphs are ranked by how often they ran as well."""
    return any(one.file.get("runs") is not None for one in found.graphs)


def _graph(one: RankedGraph) -> list[Cell]:
    file, share = one.file, one.file["nki_ratio"]
    return [
        str(file.get("module_name") or "-"),
        str(file["file_name"]),
        _count_cell(file["hlo_macs"]),
        SortableCell("-" if one.macs_frac is None else percent(one.macs_frac), one.macs_frac),
        _count_cell(file["nki_macs"]),
        SortableCell("-" if share is None else percent(share) + mark_of(file), share),
        _kernels_of(file),
    ]


def _count_cell(value: int | None) -> SortableCell:
    return SortableCell(
        "-" if value is None else f"{value:,}", None if value is None else float(value)
    )


def _score(file: AnalyzeGraphPartsDocument) -> SortableCell:
    value = file.get("training_score", {}).get("score")
    return SortableCell("-" if value is None else significant(value, 5) + mark_of(file), value)


def _kernels_of(file: AnalyzeGraphPartsDocument) -> str:
    """The first kernels of a graph by name and calls, and how many more there are."""
    kernels = file.get("kernels")
    if kernels is None:
        return "not known"  # the original keeps none
    said = [f"{_name(one)} ({one['calls']})" for one in kernels[:_KERNELS_OF_A_GRAPH]]
    more = len(kernels) - _KERNELS_OF_A_GRAPH
    return ", ".join([*said, *([f"and {more} more"] if more > 0 else [])]) or "none"


def _name(kernel: AnalyzeGraphPartsDocument) -> str:
    return str(kernel["function"] or kernel["target"])


def _about_graphs(found: Ranked) -> Iterator[Block]:
    marks = {mark_of(one.file) for one in found.graphs}
    legend = [f"{mark} {said}" for mark, said in LEGEND.items() if mark in marks]
    if legend:
        yield Items(tuple(legend))
    said = "A MAC is a multiply-add: 2 FLOP."
    macs = "MACs x runs" if _has_runs(found) else "MACs"
    if found.rest:
        frac = found.rest_macs_frac
        share = "" if frac is None else f" with {percent(frac)} of the {macs}"
        said += (
            f" The {len(found.graphs)} graphs with the most {macs} are shown; the other"
            f" {found.rest:,}{share} are in the JSON of --detailed."
        )
    yield Paragraph(said)


def _failures(found: Ranked, most: int) -> Iterator[Block]:
    rows = tuple(
        (str(one.get("module_name") or "-"), str(one["file_path"]), str(one["error"]))
        for one in found.failed[:most]
    )
    yield TableBlock(
        "graphs that can't be read", ("module", "file that can't be read", "why"), rows
    )
    more = len(found.failed) - most
    if more > 0:
        yield Paragraph(f"{more:,} more can't be read: the JSON has them as nki_analysis.failed.")


def _kernels(kernels: Sequence[AnalyzeGraphPartsDocument], most: int) -> Iterator[Block]:
    """Kernels by name and by what is known of their work."""
    if not kernels:
        return
    rows = tuple(
        (
            str(one["function"] or "-"),
            str(one["target"]),
            _STATES.get(one["macs_state"], str(one["macs_state"])),
            _count_cell(one["calls"]),
            _count_cell(one["macs"]),
        )
        for one in kernels[:most]
    )
    head = ("kernel", "called as", "its MACs are", "calls", "MACs of all calls")
    yield TableBlock("NKI kernels", head, rows, is_sortable=True)
    if len(kernels) > most:
        yield Paragraph(
            f"{len(kernels) - most:,} more kernels are in the JSON: nki_analysis.kernels."
        )
