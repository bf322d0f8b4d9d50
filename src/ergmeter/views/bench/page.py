"""The HTML page of a bench comparison: the gate's verdict for each cell, then ratios."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ergmeter.compare.gate import (
    GATE_STATES,
    POOLED,
    RESULT_WORDS,
    ConfigurationResult,
    Gate,
    ResultWord,
    configuration_results,
)
from ergmeter.compare.padding import has_both_rates
from ergmeter.version import __version__
from ergmeter.views.bench.compare import (
    axis_unit,
    change_in_words,
    change_rows,
    gate_method,
    gate_title,
    metric_names,
    remarks,
)
from ergmeter.views.charts.chart import Chart, Scale, Table, scale_for
from ergmeter.views.charts.interval_chart import Axis, Dot, Kind, interval_chart
from ergmeter.views.html.page import bullet_list, figure, header, page, section, table, text

if TYPE_CHECKING:
    from ergmeter.compare.comparison import Comparison
    from ergmeter.compare.rules import GateRule
    from ergmeter.compare.verdicts import State, Verdict

_MOST = 60  # rows of a chart; the table below it has all
_KINDS: dict[State, Kind] = {
    "worse": "worse",
    "inconclusive": "open",
    "pass": "pass",
    "absent": "absent",
}
_STATE_WORDS: dict[State, str] = {"worse": "red"}
_WORDS: dict[Kind, str] = {
    "worse": "worse than is allowed",
    "open": "inconclusive",
    "pass": "within the rule",
    "bare": "single runs: no interval",
}
_VERDICT_SIGNS: dict[ResultWord, str] = {
    "worse": "▼ worse",
    "missing": "- missing",
    "new": "+ new",
    "inconclusive": "? inconclusive",
    "not judged": "- not judged",
    "pass": "✓ pass",
}
_COMPARE_LINKS = {
    "verdicts": "verdicts",
    "ratios": "ratios",
    "paradox": "faster and slower at once",
    "changes": "all changes",
    "method": "how it was judged",
}


def bench_compare_page(comparison: Comparison, judged: Gate, *, new: str, ref: str) -> str:
    """Return the HTML page of a bench comparison with its verdicts."""
    verdicts = configuration_results(judged)
    charts = [_chart(number, rule, judged) for number, rule in enumerate(judged.rules)]
    sections = [
        section("verdicts", "Verdicts", _summary(judged, verdicts), _verdicts(verdicts)),
        section("ratios", "NEW over REF", *(figure(chart) for chart in charts)),
        section("paradox", "Faster and slower at once", _paradoxes(comparison)),
        section("changes", "All changes", _changes(comparison), bullet_list(remarks(comparison))),
        section("method", "How it was judged", bullet_list(gate_method(judged))),
    ]
    about = (
        f"NEW {new} held against REF {ref}; cells matched by {', '.join(comparison.group_by)};"
        f" intervals of {comparison.options.confidence * 100:g} %; ergmeter {__version__}"
    )
    return page(
        title=f"{new} against {ref}",
        header=header(f"{new} against {ref}", about, _COMPARE_LINKS),
        sections=sections,
        charts=charts,
        whole_s=(0.0, 1.0),
        counted_s=(0.0, 1.0),
    )


def _summary(judged: Gate, verdicts: tuple[ConfigurationResult, ...]) -> str:
    counts = Counter(verdict.word for verdict in verdicts if verdict.name != POOLED)
    tally = ", ".join(f"{counts[word]} {word}" for word in RESULT_WORDS if counts[word])
    title = gate_title(judged)
    title = text(title[:1].upper() + title[1:])
    return f"<p><strong>{title}.</strong></p><p>Cells: {text(tally)}.</p>"


def _verdicts(verdicts: tuple[ConfigurationResult, ...]) -> str:
    rows = tuple(
        (verdict.name, _VERDICT_SIGNS[verdict.word], "; ".join(verdict.reasons))
        for verdict in verdicts
    )
    by_cell = table(Table(("cell", "verdict", "why"), rows), caption="verdicts by cell")
    return f'<div class="roomy">{by_cell}</div>'


def _chart(number: int, rule: GateRule, judged: Gate) -> Chart:
    own = sorted((verdict for verdict in judged.verdicts if verdict.rule == rule), key=_badness)
    id_, title = f"rule-{number}", str(rule)
    if not any(verdict.contrast for verdict in own):
        why = (
            "; ".join(dict.fromkeys(verdict.words for verdict in own))
            or "no cell works on both sides"
        )
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
    rows = tuple(
        (
            verdict.name,
            _verdict_text(verdict),
            _STATE_WORDS.get(verdict.state, verdict.state),
            verdict.words,
        )
        for verdict in own
    )
    return interval_chart(
        id_,
        title,
        "",
        [_dot(verdict, scale) for verdict in own[:_MOST]],
        axis,
        words=_WORDS,
        table=Table(("cell", "change", "verdict", "why"), rows),
        note=note,
    )


def _badness(verdict: Verdict) -> tuple[int, float]:
    """Return the sort key: verdict first, then the change in the unwanted direction."""
    rank = GATE_STATES.index(verdict.state)
    if verdict.contrast is None:
        return rank, 0.0
    change = verdict.contrast.value - verdict.contrast.neutral
    way = verdict.rule.way if verdict.rule else "change"
    return rank, -abs(change) if way == "change" else change if way == "fall" else -change


def _dot(verdict: Verdict, scale: Scale) -> Dot:
    change = verdict.contrast
    if change is None:
        return Dot(verdict.name, None, None, None, "absent", "absent")
    kind: Kind = "bare" if change.low is None else _KINDS[verdict.state]
    value, low, high = (
        None if end is None else end / scale.factor
        for end in (change.value, change.low, change.high)
    )
    ends = (verdict.rule.low, verdict.rule.high) if verdict.rule else ()
    limits = tuple(end / scale.factor for end in ends if end is not None)
    return Dot(verdict.name, value, low, high, _verdict_text(verdict), kind, limits)


def _scale(own: list[Verdict]) -> Scale:
    """Return the scale of differences: bytes and joules with an SI prefix."""
    figures = [verdict.contrast for verdict in own if verdict.contrast is not None]
    unit = axis_unit(own[0].measure.unit)
    ends = [
        end
        for figure in figures
        for end in (figure.value, figure.low, figure.high)
        if end is not None
    ]
    return scale_for(unit, max(map(abs, ends)))


def _verdict_text(verdict: Verdict) -> str:
    return "absent" if verdict.contrast is None else change_in_words(verdict)


def _paradoxes(comparison: Comparison) -> str:
    lines = [f"{pair.name}: {pair.padding}" for pair in comparison.pairs if pair.padding]
    both = sum(has_both_rates(pair.groups) for pair in comparison.pairs)
    none = (
        f"No cell: samples/s and tokens/s go the same way in all {both} that tell both."
        if both
        else "Not known: no cell tells both samples/s and tokens/s with padding on both sides."
    )
    return bullet_list(lines) or f'<p class="dim">{none}</p>'


def _changes(comparison: Comparison) -> str:
    rows = tuple(change_rows(comparison))
    changes_table = table(Table(("cell", *metric_names(comparison)), rows), caption="all changes")
    return f'<div class="roomy">{changes_table}</div>'
