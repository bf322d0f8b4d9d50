"""Two benches against each other: what `erg bench compare --html` writes.

The trap: a table of percentages in which noise looks like news. Each cell has a word first (worse,
inconclusive, pass, missing), by the gate's rules and its count of chance; the ratios are drawn
with their intervals and with what the rule allows.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ergmeter.bench.comparing import TOGETHER, tells_both
from ergmeter.bench.gate import WORDS, cell_verdicts
from ergmeter.version import __version__
from ergmeter.views.bench.compare import (
    change_in_words,
    changes,
    gate_method,
    gate_title,
    remarks,
    unit_of,
)
from ergmeter.views.charts.chart import Chart, Scale, Table, scale_for
from ergmeter.views.charts.interval_chart import Axis, Dot, interval_chart
from ergmeter.views.html.page import figure, header, listed, page, section, table, text

if TYPE_CHECKING:
    from ergmeter.bench.comparing import BenchComparison, GateRule
    from ergmeter.bench.gate import CellVerdict, Gate, Judgement, State, Word
    from ergmeter.views.charts.interval_chart import Kind

_MOST = 60  # rows of a chart; the table below it has all
_ORDER: tuple[State, ...] = ("red", "inconclusive", "pass", "absent")
_KINDS: dict[State, Kind] = {
    "red": "worse",
    "inconclusive": "open",
    "pass": "pass",
    "absent": "absent",
}
_WORDS: dict[Kind, str] = {
    "worse": "worse than is allowed",
    "open": "inconclusive",
    "pass": "within the rule",
    "bare": "single runs: no interval",
}
_SIGNS: dict[Word, str] = {
    "worse": "▼ worse",
    "missing": "- missing",
    "new": "+ new",
    "inconclusive": "? inconclusive",
    "not judged": "- not judged",
    "pass": "✓ pass",
}
_LINKS = {
    "verdicts": "verdicts",
    "ratios": "ratios",
    "paradox": "faster and slower at once",
    "changes": "all changes",
    "method": "how it was judged",
}


def bench_compare_page(found: BenchComparison, judged: Gate, *, new: str, ref: str) -> str:
    """The whole page: the same cells compared and judged."""
    verdicts = cell_verdicts(judged)
    charts = [_chart(number, rule, judged) for number, rule in enumerate(judged.rules)]
    sections = [
        section("verdicts", "Verdicts", _summary(judged, verdicts), _verdicts(verdicts)),
        section("ratios", "NEW over REF", *(figure(one) for one in charts)),
        section("paradox", "Faster and slower at once", _paradoxes(found)),
        section("changes", "All changes", _changes(found), listed(remarks(found))),
        section("method", "How it was judged", listed(gate_method(judged))),
    ]
    about = (
        f"NEW {new} held against REF {ref}; cells matched by {', '.join(found.paired.by)};"
        f" intervals of {found.options.confidence * 100:g} %; ergmeter {__version__}"
    )
    return page(
        title=f"{new} against {ref}",
        header=header(f"{new} against {ref}", about, _LINKS),
        sections=sections,
        charts=charts,
        whole_s=(0.0, 1.0),
        counted_s=(0.0, 1.0),
    )


def _summary(judged: Gate, verdicts: tuple[CellVerdict, ...]) -> str:
    counts = Counter(one.word for one in verdicts if one.name != TOGETHER)
    said = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])
    title = gate_title(judged)
    return (
        f"<p><strong>{text(title[:1].upper() + title[1:])}.</strong></p><p>Cells: {text(said)}.</p>"
    )


def _verdicts(verdicts: tuple[CellVerdict, ...]) -> str:
    rows = tuple((one.name, _SIGNS[one.word], "; ".join(one.reasons)) for one in verdicts)
    told = table(Table(("cell", "verdict", "why"), rows), caption="verdicts by cell")
    return f'<div class="roomy">{told}</div>'


def _chart(number: int, rule: GateRule, judged: Gate) -> Chart:
    own = sorted((one for one in judged.judgements if one.rule == rule), key=_badness)
    id_, title = f"rule-{number}", str(rule)
    if not any(one.figure for one in own):
        why = "; ".join(dict.fromkeys(one.words for one in own)) or "no cell works on both sides"
        return Chart(id_, title, "", None, reason=why)
    is_ratio = rule.scale == "ratio"
    scale = Scale(1.0, "") if is_ratio else _scale(own)
    less = f"NEW less REF, {scale.unit}" if scale.unit else "NEW less REF"
    axis = Axis(
        "NEW over REF (logarithmic)" if is_ratio else less,
        is_log=is_ratio,
        neutral=1.0 if is_ratio else 0.0,
    )
    note = "thick upright lines are what the rule allows, on the thin one nothing changed"
    if len(own) > _MOST:
        note += f"; the first {_MOST} of {len(own)}, the worst first: the table has all"
    rows = tuple((one.name, _judgement_text(one), one.state, one.words) for one in own)
    return interval_chart(
        id_,
        title,
        "",
        [_dot(one, scale) for one in own[:_MOST]],
        axis,
        words=_WORDS,
        table=Table(("cell", "change", "verdict", "why"), rows),
        note=note,
    )


def _badness(one: Judgement) -> tuple[int, float]:
    """The worst first: by what was found, then by how far it went the way that is not wanted."""
    place = _ORDER.index(one.state)
    if one.figure is None:
        return place, 0.0
    change = one.figure.value - one.figure.neutral
    if one.rule.is_two_sided:
        return place, -abs(change)
    return place, change if one.rule.rise is None else -change


def _dot(one: Judgement, scale: Scale) -> Dot:
    found = one.figure
    if found is None:
        return Dot(one.name, None, None, None, "absent", "absent")
    kind: Kind = "bare" if found.low is None else _KINDS[one.state]
    value, low, high = (
        None if end is None else end / scale.factor for end in (found.value, found.low, found.high)
    )
    ends = (one.rule.low, one.rule.high)
    limits = tuple(end / scale.factor for end in ends if end is not None)
    return Dot(one.name, value, low, high, _judgement_text(one), kind, limits)


def _scale(own: list[Judgement]) -> Scale:
    """How a difference is written: bytes and joules with a prefix."""
    figures = [one.figure for one in own if one.figure is not None]
    unit = unit_of(figures[0].column)
    ends = [end for one in figures for end in (one.value, one.low, one.high) if end is not None]
    return scale_for(unit, max(map(abs, ends)))


def _judgement_text(one: Judgement) -> str:
    return "absent" if one.figure is None else change_in_words(one.figure)


def _paradoxes(found: BenchComparison) -> str:
    told = [f"{cell.pair.name}: {cell.paradox}" for cell in found.cells if cell.paradox]
    both = sum(tells_both(cell.pair) for cell in found.cells)
    none = (
        f"No cell: samples/s and tokens/s go the same way in all {both} that tell both."
        if both
        else "Not known: no cell tells both samples/s and tokens/s with padding on both sides."
    )
    return listed(told) or f'<p class="dim">{none}</p>'


def _changes(found: BenchComparison) -> str:
    rows = [tuple(changes(cell.pair.name, cell.figures, found.metrics)) for cell in found.cells]
    if found.together:
        rows.append(tuple(changes(TOGETHER, found.together, found.metrics)))
    told = table(Table(("cell", *found.metrics), tuple(rows)), caption="all changes")
    return f'<div class="roomy">{told}</div>'
