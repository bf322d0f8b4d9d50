"""The table of compiled graphs on the console of `erg analyze`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.neuron.shares import LEGEND, LOWER_BOUND, UNCERTAIN
from ergmeter.views.analyze_text import bound, fixed, ratio, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Document = Mapping[str, Any]

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
