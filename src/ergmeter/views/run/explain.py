"""`erg explain`: its chart and its document."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.explain.time import LossBlock
from ergmeter.metrics.explain.waterfall import Change, Explanation, WaterfallLevel, levels
from ergmeter.records import Missing
from ergmeter.runlog.reader import Run
from ergmeter.units import grouped, scaled, significant
from ergmeter.views.charts import vega
from ergmeter.views.charts.chart import Chart, css
from ergmeter.views.document import (
    BarCell,
    ChartPart,
    Document,
    HeadlinePart,
    Items,
    Note,
    Paragraph,
    Part,
    Section,
    Table,
    TableColumn,
)
from ergmeter.views.documents import finite, result

NOTHING = "nothing can be attributed: no MFU, no readings of a device, no waits between steps"
_LEAST = 0.01  # percent; shares are rounded to it
_LEAST_FACTOR = 0.1  # a smaller gain is given in percent
_OF_JOULES = (
    "each block is what is lost beyond the ones above it; joules of waits and stalls of 0.2 s and"
    " more are as measured, the rest is divided by share"
)
WATERFALL = "from the peak to what was achieved"
CHANGES = "most worth trying"


def share(block: LossBlock) -> str:
    """Return a block's share of the peak; a gain with a plus sign."""
    value = 100 * abs(block.share_frac)
    sign = "+" if block.share_frac < 0 else ""
    if 0 < value < _LEAST:
        return f"{sign}< {_LEAST} %"
    number = f"{value:.1f}" if value >= 0.05 or not value else significant(value, 1)
    return f"{sign}{number} %"


def joules(block: LossBlock) -> str:
    """Return a block's energy; a gain has none."""
    return "" if block.joules is None or block.share_frac < 0 else scaled(block.joules, "J")


def total_joules(explanation: Explanation) -> str:
    """Return the energy of the window, if known."""
    return "" if isinstance(explanation.energy, Missing) else scaled(explanation.energy.value, "J")


def energy_note(explanation: Explanation) -> str:
    """Return how energy was attributed to blocks, or why it was not."""
    if isinstance(explanation.energy, Missing):
        return f"no joules: {explanation.energy.reason}"
    return _OF_JOULES if explanation.blocks else ""


def gain(change: Change) -> str:
    """Return the upper bound of a change's speedup."""
    if change.gain_frac >= _LEAST_FACTOR:
        return f"up to {1 + change.gain_frac:.1f}x faster"
    return f"up to {100 * change.gain_frac:.0f} % faster"


def facts(block: LossBlock) -> str:
    """Return the evidence of a block."""
    return "; ".join(f"{fact.key}: {fact.said}" for fact in block.facts)


def unattributed(explanation: Explanation) -> dict[str, str]:
    """Return unattributed causes by their reason."""
    causes = (
        (why, name.removesuffix("_frac").replace("_", " "))
        for name, why in explanation.missing.items()
    )
    return {why: ", ".join(names) for why, names in grouped(causes).items()}


# The chart.


PEAK, LOST, GAINED, LEFT = "peak", "lost", "gained", "what is left"
ONE_BLOCK = "lost, unattributed"
_COLOURS = {PEAK: "c8", LOST: "c2", ONE_BLOCK: "c4", GAINED: "c3", LEFT: "c1"}
_STRIPED = "striped"  # its CSS class on the page
_ROW = 36  # pixels: a line of text and a bar below it
_STRIPE_FRAC = 0.01  # from one stripe to the next
# Of a row: the fields that the tooltip and the table show.
_WATERFALL_HEADS = {
    "name": "block",
    "share": "of the peak",
    "joules": "joules",
    "how": "how",
    "why": "is",
}


def waterfall_chart(explanation: Explanation) -> Chart:
    """Return the waterfall. Raises NotMeasurable if nothing is known."""
    if explanation.achieved is None:
        reasons = "; ".join(dict.fromkeys(explanation.missing.values()))
        raise NotMeasurable(f"{NOTHING}{f' ({reasons})' if reasons else ''}")
    rows = _waterfall_rows(explanation)
    kinds = [kind for kind in _COLOURS if any(row["kind"] == kind for row in rows)]
    described = ", ".join(row["said"] for row in rows)
    evidence_texts = ("", *(facts(level.block) for level in levels(explanation)))
    table_rows = (
        (*(row[field] for field in _WATERFALL_HEADS), text)
        for row, text in zip(rows, evidence_texts, strict=True)
    )
    return Chart(
        "waterfall",
        WATERFALL,
        "%",
        vega.framed(f"waterfall: {described}", _ROW * len(rows), _waterfall_layers(rows, kinds)),
        Table((*_WATERFALL_HEADS.values(), "seen"), tuple(table_rows)),
        "; ".join(filter(None, (f"100 % is {explanation.of}", energy_note(explanation)))),
        legend=tuple((kind, _legend_class(kind)) for kind in kinds if kind != PEAK),
    )


def _legend_class(kind: str) -> str:
    return f"{_COLOURS[kind]} {_STRIPED}" if kind == ONE_BLOCK else _COLOURS[kind]


def _waterfall_rows(explanation: Explanation) -> list[dict[str, Any]]:
    peak = {"name": "peak", "v": 1.0, "low": 0.0, "high": 1.0, "kind": PEAK, "share": "100 %"}
    peak |= {"joules": total_joules(explanation) or "-", "how": "", "why": explanation.of}
    rows = [peak, *(_waterfall_row(level, explanation) for level in levels(explanation))]
    for at, row in enumerate(rows):
        drew = f" · {row['joules']}" if row["joules"] != "-" else ""
        row |= {"at": at, "said": f"{row['name']} · {row['share']}{drew}"}
    return rows


def _waterfall_row(level: WaterfallLevel, explanation: Explanation) -> dict[str, Any]:
    block = level.block
    return {
        "name": block.title,
        "v": block.share_frac,
        "low": min(level.from_frac, level.to_frac),
        "high": max(level.from_frac, level.to_frac),
        "kind": _bar_kind(level, explanation),
        "share": share(block),
        "joules": joules(block) or "-",
        "how": block.basis,
        "why": block.why,
    }


def _bar_kind(level: WaterfallLevel, explanation: Explanation) -> str:
    if level.block is explanation.achieved:
        return LEFT
    if level.block.share_frac < 0:
        return GAINED
    return ONE_BLOCK if level.block.is_merged else LOST


def _waterfall_layers(rows: vega.Rows, kinds: list[str]) -> list[vega.Layer]:
    y = vega.numbered_rows("at")
    x = vega.axis(
        "low",
        "% of the peak",
        domain=(0, max(row["high"] for row in rows)),
        nice=False,
        format=".0%",
        ticks=4,
        grid=False,
    )
    colours = {kind: css(_COLOURS[kind]) for kind in kinds}
    named = {"values": [kind for kind in kinds if kind != PEAK]}
    bar = partial(vega.bar, x=x, x2="high", y=y, band=0.4, yOffset=7)
    return [
        bar(
            "points",
            rows,
            color=vega.by_value("kind", colours, legend=named),
            stroke=vega.by_value("kind", colours, legend=False),
            tooltip=vega.tooltip(_WATERFALL_HEADS),
            strokeWidth=1,  # the smallest is still a line
        ),
        bar("stripes", list(_stripes(rows)), color="bg", tooltip=None),
        vega.bar_texts(y, limit=vega.computed("width")),
    ]


def _stripes(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the gaps that make a bar striped, if it stands for several causes."""
    for row in rows:
        if row["kind"] == ONE_BLOCK:
            first, last = (math.ceil(row[edge] / _STRIPE_FRAC) for edge in ("low", "high"))
            lows = (max(row["low"], number * _STRIPE_FRAC) for number in range(first, last))
            yield from (
                {"at": row["at"], "low": low, "high": min(low + _STRIPE_FRAC / 3, row["high"])}
                for low in lows
            )


# The document.


def document(run: Run, explanation: Explanation, *, show_all: bool = True) -> Document:
    """Return the waterfall with advice, and if `show_all` with evidence and what is missing."""
    parts: list[Part] = [HeadlinePart(run.name, about=explanation.window)]
    if explanation.achieved is None:
        parts.append(HeadlinePart(text=NOTHING, state="unsure"))
        parts += [Paragraph(text, style="dim") for text in (energy_note(explanation),) if text]
    waterfall = [] if explanation.achieved is None else [_waterfall(explanation)]
    causes = (  # why there is no MFU is an answer, the others are details
        f"{names}: {why}"
        for why, names in unattributed(explanation).items()
        if show_all or "mfu" in names.split(", ")
    )
    sections = [
        Section("waterfall-section", "the waterfall", (*waterfall, *remark_notes(explanation))),
        Section("changes", CHANGES, change_table(explanation, has_evidence=show_all)),
        Section("not-told", "unattributed", _items(causes)),
        Section("record-next", "to record next time", _items(explanation.record_next)),
        Section("evidence", "evidence", _evidence(explanation) if show_all else ()),
    ]
    return Document(
        f"{run.name}: where the rest of the peak went",
        (*parts, *(section for section in sections if section.parts)),
        _data(run, explanation),
        explanation.window,
    )


def _waterfall(explanation: Explanation) -> ChartPart:
    rows = (
        (
            level.block.title,
            BarCell(level.to_frac, level.from_frac),
            share(level.block),
            joules(level.block),
            level.block.basis,
        )
        for level in levels(explanation)
    )
    peak = ("peak", BarCell(0.0, 1.0), "100.0 %", total_joules(explanation), "")
    columns = (
        "block",
        TableColumn("", "bar"),
        TableColumn("of the peak", "number"),
        TableColumn("joules", "number"),
        TableColumn("how", "basis"),
    )
    table_rows = (peak, *rows)
    ends = frozenset({0, len(table_rows) - 1})
    return ChartPart(
        waterfall_chart(explanation), Table(columns, table_rows, has_head=False, strong_rows=ends)
    )


def remark_notes(explanation: Explanation) -> tuple[Note, ...]:
    """Return the remarks on the waterfall as notes."""
    return tuple(Note("remark", remark) for remark in explanation.remarks)


def _items(texts: Iterable[str]) -> tuple[Items, ...]:
    lines = tuple(texts)
    return (Items(lines),) if lines else ()


def change_table(explanation: Explanation, *, has_evidence: bool = True) -> tuple[Table, ...]:
    """Return a table of changes: upper bound of the gain, advice and evidence."""
    rows = tuple(
        (f"{number}. {gain(change)}: {change.advice}", change.why if has_evidence else "")
        for number, change in enumerate(explanation.changes, 1)
    )
    return (Table(("change", TableColumn("evidence", "below")), rows),) if rows else ()


def _evidence(explanation: Explanation) -> tuple[Table, ...]:
    if explanation.achieved is None:
        return ()
    blocks = (*explanation.blocks, explanation.achieved)
    rows = tuple((block.title, block.why, facts(block)) for block in blocks)
    return (Table(("block", TableColumn("is", style="dim"), TableColumn("seen", "below")), rows),)


def _data(run: Run, explanation: Explanation) -> dict[str, Any]:
    """Return JSON. Shares add up to 1, joules to the energy of the window."""
    return {
        "run": str(run.path),
        "window": explanation.window,
        "of": explanation.of,
        "energy": result(explanation.energy),
        "blocks": [finite(asdict(block)) for block in explanation.blocks],
        "achieved": finite(asdict(explanation.achieved)) if explanation.achieved else None,
        "remarks": list(explanation.remarks),
        "changes": [finite(asdict(change)) for change in explanation.changes],
        "missing": explanation.missing,
        "record_next": list(explanation.record_next),
    }
