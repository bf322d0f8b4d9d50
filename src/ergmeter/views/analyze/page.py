"""The HTML pages of `erg analyze`: one analysis, or several outputs compared.

Page and console are made from the same document. The page adds charts (score factors, pace, spread
over repeats) and sortable tables. Steps outside the throughput mean, such as compilation, are grey.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ergmeter.errors import NotMeasurable
from ergmeter.neuron.compare import METRICS, OutputComparison
from ergmeter.neuron.kernels import LOWER_BOUND, UNCERTAIN
from ergmeter.neuron.metrics import SCORE
from ergmeter.neuron.throughput import PaceLine, pace_line
from ergmeter.units import significant
from ergmeter.version import __version__
from ergmeter.views.analyze import compare
from ergmeter.views.analyze.parts import Headline, analysis_parts, headlines, title
from ergmeter.views.blocks import Block, Cell, Items, PagePart, SortableCell, TableBlock, words
from ergmeter.views.charts.chart import Chart, Table, chart_of, framed
from ergmeter.views.html.page import bullet_list, figure, header, page, section, table, td, text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ergmeter.neuron.analysis import Analysis, JobDetails
    from ergmeter.neuron.score import Factor, Score


def _layer(
    name: str, mark: dict[str, Any], values: list[dict[str, Any]] | None = None, **encoding: object
) -> dict[str, Any]:
    """Return a layer of a chart; without values it draws those of an earlier layer's name."""
    data = {"name": name} if values is None else {"name": name, "values": values}
    return {"data": data, "mark": {**mark, "aria": False}, "encoding": encoding}


def _measured(field: str, title: str, **more: object) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", "title": title, **more}


def _named(field: str, order: list[str], **more: object) -> dict[str, Any]:
    return {"field": field, "type": "nominal", "sort": order, "title": None, **more}


# Spread over repeats: each output is a point, with the mean and spread of its group behind it.
# A group of one output has no spread.


_ROW_PIXELS = 30
_LEGEND = (("an output", "c1"), ("mean ± standard deviation", "c2"))
_WITHIN_FRAC = 0.08  # share of the axis left free at both ends


def spread_charts(comparison: OutputComparison) -> list[Chart]:
    """Return a chart for each metric that can be compared between outputs."""
    called = compare.names_of(comparison)
    groups = [
        f"{number}: {called[group.outputs[0].path]}"
        + (f" + {len(group.outputs) - 1}" if len(group.outputs) > 1 else "")
        for number, group in enumerate(comparison.groups, start=1)
    ]
    charts = []
    for name, head in zip(METRICS, compare.heads(comparison)[1:], strict=True):
        points = [
            {"g": label, "v": value, "said": significant(value, 5), "name": called[output.path]}
            for label, group in zip(groups, comparison.groups, strict=True)
            for output in group.outputs
            if (value := output.value(name, convention=comparison.convention)) is not None
        ]
        if points:
            charts.append(_spread_chart(comparison, name, head, groups, points))
    return charts


def _spread_chart(
    comparison: OutputComparison,
    name: str,
    title: str,
    groups: list[str],
    points: list[dict[str, Any]],
) -> Chart:
    means, apart = [], []
    for number, group in enumerate(comparison.groups):
        spread = group.spreads.get(name)
        if spread is not None and (deviation := spread.standard_deviation) is not None:
            ends = {"e": spread.mean + deviation, "b": spread.mean - deviation}
            means.append({"g": groups[number], "v": spread.mean, **ends})
        if name in group.not_comparable:
            apart.append(str(number + 1))
    rows = tuple((point["name"], point["g"], point["said"]) for point in points)
    described = ", ".join(f"{output} {value}" for output, _, value in rows)
    note = f"group {', '.join(apart)} is not comparable to the one before it" if apart else ""
    layers = _layers(points, means, title=title, groups=groups)
    return Chart(
        f"spread-{name}", title, "",
        framed(f"{title}: {described}", _ROW_PIXELS * len(groups) + 10, layers),
        Table(("output", "group", title), rows), note,
        legend=_LEGEND if means else _LEGEND[:1],
    )  # fmt: skip


def _layers(
    points: list[dict[str, Any]], means: list[dict[str, Any]], *, title: str, groups: list[str]
) -> list[dict[str, Any]]:
    every = [row["v"] for row in points]
    every += [end for row in means for end in (row["b"], row["e"])]
    low, high = min(every), max(every)
    room = (high - low) * _WITHIN_FRAC or abs(high) * _WITHIN_FRAC or 1.0
    scale = {"domain": [low - room, high + room], "nice": False, "zero": False}
    ticks = {"format": ".5~g", "tickCount": {"expr": "max(3, floor(width / 90))"}}
    x = _measured("v", title, scale=scale, axis=ticks)
    y = _named("g", groups, scale={"domain": groups}, axis={"labelLimit": 130})
    tooltip = [{"field": "name", "title": "output"}, {"field": "said", "title": title}]
    point = {"type": "point", "filled": True, "size": 60, "opacity": 0.9, "color": "var(--c1)"}
    layers = [_layer("points", point, points, x=x, y=y, tooltip=tooltip)]
    if means:
        ruled = {"type": "rule", "color": "var(--c2)", "strokeWidth": 3}
        ticked = {"type": "tick", "color": "var(--c2)", "thickness": 3, "size": 18}
        spread = {"x": {**x, "field": "b"}, "x2": {"field": "e"}, "y": y}
        layers = [
            _layer("means", ruled, means, **spread), _layer("means", ticked, x=x, y=y), *layers
        ]  # fmt: skip
    return layers


# Score factors as bars from 1 on a logarithmic axis: 2 is as long as 1/2, a factor of 1 has no bar,
# and the lengths of all factors add up to the score.


_TICKS, _FEW_TICKS = 7, 3
_SCORE_CHART_ROW_PIXELS = 34
_SCORE_CHART_LEGEND = (("raises the score", "c1"), ("lowers it", "c2"))
_ROOM = 1.15  # beyond the longest bar
_MARKS = {"": "", LOWER_BOUND: "at least ", UNCERTAIN: "about "}


def score_chart(score: Score) -> Chart:
    """Return the chart of the score's factors."""
    ratios, value = score.factors(), score.value
    rows = [_row(factor.name, factor.ratio, _factor_text(factor)) for factor in ratios]
    score_text = "not known" if value is None else f"{_MARKS[score.mark]}{significant(value, 5)}"
    rows.append(_row("score", value, score_text))
    described = ", ".join(f"{row['name']} {row['said']}" for row in rows)
    table = Table(
        ("factor", "ratio", "log2 of the ratio"),
        (
            *((factor.name, _factor_text(factor), _added(factor.doublings)) for factor in ratios),
            ("score", score_text, _added(None if not value else math.log2(value))),
        ),
    )
    return Chart(
        "score_factors",
        "factors of the score",
        "ratio, log scale",
        framed(
            f"factors of the score: {described}",
            _SCORE_CHART_ROW_PIXELS * len(rows),
            _score_chart_layers(rows),
        ),
        table,
        "bars begin at 1, and twice is as long as half: the score's bar is those of its factors"
        " end to end",
        legend=_SCORE_CHART_LEGEND,
    )


def _row(name: str, ratio: float | None, text: str) -> dict[str, Any]:
    is_drawn = ratio is not None and ratio > 0
    side = "raises the score" if not is_drawn or (ratio or 0) >= 1 else "lowers it"
    return {"name": name, "v": ratio if is_drawn else None, "one": 1, "said": text, "s": side}


def _factor_text(factor: Factor) -> str:
    if factor.ratio is None:
        return "not known"
    return f"{_MARKS[factor.mark]}x {significant(factor.ratio, 5)}"


def _added(doublings: float | None) -> str:
    return "-" if doublings is None else f"{doublings:+.3f}"


def _score_chart_layers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    values = [row["v"] for row in rows if row["v"] is not None]
    low, high = min([1.0, *values]) / _ROOM, max([1.0, *values]) * _ROOM
    y = _named("name", [row["name"] for row in rows])
    scale = {"type": "log", "base": 2, "domain": [low, high], "nice": False}
    ticks = {"values": _ticks(low, high), "format": ".4~g"}
    x = _measured("v", "ratio, log scale (1 changes nothing)", scale=scale, axis=ticks)
    labels, colours = zip(*_SCORE_CHART_LEGEND, strict=True)
    sides = {"domain": list(labels), "range": [f"var(--{colour})" for colour in colours]}
    colour = {"field": "s", "type": "nominal", "scale": sides}
    tooltip = [{"field": "name", "title": "factor"}, {"field": "said", "title": "ratio"}]
    bar = {"type": "bar", "height": {"band": 0.4}, "yOffset": 6}
    words = {
        "type": "text", "align": "left", "baseline": "bottom", "dx": 3, "dy": -2, "fontSize": 11
    }  # fmt: skip
    ink = {"value": "var(--ink)"}
    return [
        _layer("points", bar, rows, x=x, x2={"field": "one"}, y=y, color=colour, tooltip=tooltip),
        _layer(
            "one", {"type": "rule", "color": "var(--mark)"}, [{"v": 1}],
            x={"field": "v", "type": "quantitative"},
        ),
        _layer("points", words, x={"value": 0}, y=y, text={"field": "said"}, color=ink),
    ]  # fmt: skip


def _ticks(low: float, high: float) -> list[float]:
    """Return powers of 2 within the axis, 1 included; if they are few, also 1.5 times each."""
    first, last = math.floor(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first) / _TICKS))
    between = (1.0, 1.5) if last - first <= _FEW_TICKS else (1.0,)
    powers = range(first - first % step, last + 1, step)
    ticks = [2.0**power * times for power in powers for times in between]
    return [tick for tick in ticks if low <= tick <= high]


_POINTS = 1600
_DOTS = 60
_UNIT = "sequences/s"
_LINE = "a line of the log"
_PACE_CHART_LEGEND = ((_LINE, "c1"), ("what is taken", "c2"))


def pace_chart(details: JobDetails | None) -> Chart:
    """Return the throughput over the log's steps. Raises NotMeasurable without a pace."""
    if details is None or details.log is None:
        raise NotMeasurable("the original keeps no steps: leave out --compat")
    pace, taken = pace_line(details.log, details.job, points=_POINTS), details.pace.seq_per_s
    line = pace.line
    (low, low_at), (high, high_at) = line.lowest, line.highest
    ends = f"from {significant(low)} to {significant(high)} {_UNIT}"
    bounds = "; lowest and highest of each stretch are drawn" if line.is_bounded else ""
    before = f"before {pace.over} {pace.counted_from:,.0f}"
    grey = f"; grey is not counted, it is {before}" if pace.counted_from > line.t_s[0] else ""
    note = f"{pace.how}{grey}"
    taken_of = "of the counted ones" if details.pace.is_from_log else "as given"
    table = Table(
        ("of the log's last run", _UNIT, f"at {pace.over}"),
        (
            ("lowest", significant(low), f"{low_at:,.0f}"),
            ("highest", significant(high), f"{high_at:,.0f}"),
            ("taken", *(("-", "-") if taken is None else (significant(taken), taken_of))),
        ),
    )
    return Chart(
        "pace",
        f"throughput by {pace.over}",
        _UNIT,
        framed(f"throughput by {pace.over}: {ends}", 190, _pace_chart_layers(pace, taken)),
        table,
        note + bounds,
        legend=_PACE_CHART_LEGEND if taken is not None else _PACE_CHART_LEGEND[:1],
    )


def _pace_chart_layers(pace_line: PaceLine, taken: float | None) -> list[dict[str, Any]]:
    line = pace_line.line
    rows = [
        {"t": t, "v": None if math.isnan(value) else float(f"{value:.6g}"), "s": _LINE}
        for t, value in zip(line.t_s.tolist(), line.values.tolist(), strict=True)
    ]
    ends = [rows[0]["t"], max(rows[-1]["t"], rows[0]["t"] + 1)]
    steps = {
        "grid": False, "format": ",d", "tickMinStep": 1,
        "tickCount": {"expr": "max(3, floor(width / 70))"},
    }  # fmt: skip
    scale = {"domain": ends, "nice": False, "zero": False}
    x = _measured("t", pace_line.over, scale=scale, axis=steps)
    rates = {"tickCount": 5, "format": ",.6~r", "minExtent": 44}
    y = _measured("v", _UNIT, scale={"zero": True, "nice": True}, axis=rates)
    tooltip = [
        _measured("t", pace_line.over, format=",d"), _measured("v", _UNIT, format=".5~g")
    ]  # fmt: skip
    dots = {"size": 14, "color": "var(--c1)"} if line.readings <= _DOTS else False
    drawn = {"type": "line", "clip": True, "strokeWidth": 1.5, "color": "var(--c1)", "point": dots}
    layers = [_layer("points", drawn, rows, x=x, y=y, tooltip=tooltip)]
    if pace_line.counted_from > ends[0]:
        shade = {"type": "rect", "clip": True, "color": "var(--shade)"}
        span = [{"t": ends[0], "e": pace_line.counted_from}]
        layers.insert(0, _layer("uncounted", shade, span, x=x, x2={"field": "e"}))
    if taken is not None:
        ruled = {"type": "rule", "color": "var(--c2)", "strokeWidth": 1.5}
        level = [{"v": float(f"{taken:.6g}")}]
        layers.append(_layer("taken", ruled, level, y={"field": "v", "type": "quantitative"}))
    return layers


# Document parts as HTML. Number cells carry their value in an attribute, by which the script sorts.


def part_section(part: PagePart, *before: str) -> str:
    """Render a part as an HTML section, with its charts before its blocks."""
    return section(part.id, part.title, *before, *map(_block, part.blocks))


def _block(block: Block) -> str:
    if isinstance(block, TableBlock):
        if block.is_sortable:
            return _sortable(block)
        rows = tuple(tuple(map(words, row)) for row in block.rows)
        return f'<div class="roomy">{table(Table(block.head, rows), caption=block.caption)}</div>'
    if isinstance(block, Items):
        return bullet_list(block.texts)
    if block.is_to_copy:
        return f"<p>A sentence that says what is known and how:</p><pre>{text(block.text)}</pre>"
    return f"<p>{text(block.text)}</p>"


def _sortable(grid: TableBlock) -> str:
    head = "".join(
        f'<th scope="col"><button type="button">{text(title)}</button></th>' for title in grid.head
    )
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in grid.rows)
    return (
        '<div class="scroll roomy" tabindex="0" role="region"'
        f' aria-label="{text(grid.caption)}">'
        f'<table class="sortable"><caption>{text(grid.caption)}; a head sorts</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    if not isinstance(cell, SortableCell):
        return td(cell)
    value = "" if cell.value is None else f"{cell.value!r}"
    return f'<td class="number" data-value="{value}">{text(cell.text)}</td>'


def cards(headlines: Iterable[Headline]) -> str:
    """Render headline metrics as cards, and absent ones with their reason."""
    every = list(headlines)
    by_reason: dict[str, list[str]] = {}
    for headline in every:
        if not headline.value:
            by_reason.setdefault(headline.reason, []).append(headline.title)
    absent = "".join(
        f'<p class="absent">Not shown: {text(", ".join(titles))}. Why: {text(why)}</p>'
        for why, titles in by_reason.items()
    )
    boxes = "".join(_card(headline) for headline in every if headline.value)
    return f'<div class="cards">{boxes}</div>{absent}'


def _card(headline: Headline) -> str:
    edges = f'<div class="dim">{text(headline.interval)}</div>' if headline.interval else ""
    kind, why = "card", ""
    if headline.impossible:
        kind, why = "card impossible", f'<div class="why">{text(headline.impossible)}</div>'
    return (
        f'<article class="{kind}"><h3>{text(headline.title)}</h3>'
        f'<div class="value">{text(headline.value)}</div>{why}{edges}'
        f'<span class="badge {text(headline.basis)}">{text(headline.basis)}</span>'
        f"<details><summary>how: {text(headline.title)}</summary><dl>"
        f"<dt>formula</dt><dd>{text(headline.formula)}</dd>"
        f"<dt>of this job</dt><dd>{text(headline.note)}</dd>"
        f"<dt>key</dt><dd><code>{text(headline.key)}</code></dd></dl></details></article>"
    )


_MOST_GRAPHS = 200
_NO_TIME_S = (0.0, 1.0)  # no chart of these pages is over time


def analysis_page(analysis: Analysis) -> str:
    """Return the HTML page of one analysis."""
    parts = {part.id: part for part in analysis_parts(analysis, most_graphs=_MOST_GRAPHS)}
    charts = _charts(analysis)
    figures = parts.pop("figures")
    without_table = PagePart(
        figures.id, figures.title, figures.blocks[1:]
    )  # the cards replace the table
    sections = [part_section(without_table, cards(headlines(analysis)))]
    for part in parts.values():
        chart = charts.get(part.id)
        sections.append(part_section(part, *([figure(chart)] if chart is not None else ())))
    links = {figures.id: figures.title, **{part.id: part.title for part in parts.values()}}
    below = f"{analysis.batch_size} sequences of {analysis.seq_len} tokens a step"
    return _page(title(analysis), below, links, sections, list(charts.values()))


def _charts(analysis: Analysis) -> dict[str, Chart]:
    """Return charts by the part they belong to, with a reason if not drawn."""
    charts = {}
    if analysis.score is not None and SCORE in analysis.readings:
        charts["score"] = score_chart(analysis.score)
    if analysis.log is not None:
        id_, name = "pace", "throughput by step"
        charts["log"] = chart_of(id_, name, "", lambda: pace_chart(analysis.details))
    return charts


def comparison_page(comparison: OutputComparison) -> str:
    """Return the HTML page that compares several outputs."""
    charts, parts = spread_charts(comparison), compare.comparison_parts(comparison)
    pictures = "".join(map(figure, charts))
    sections = [part_section(parts[0]), section("spreads", "Side by side", _pair(pictures))]
    sections += [part_section(part) for part in parts[1:]]
    links = {parts[0].id: parts[0].title, "spreads": "Side by side"}
    links |= {part.id: part.title for part in parts[1:]}
    name = compare.title(comparison)
    return _page(name, "earlier outputs side by side", links, sections, charts)


def _pair(pictures: str) -> str:
    if not pictures:
        return '<p class="absent">- no metric is in any of the outputs</p>'
    return f'<div class="pair">{pictures}</div>'


def _page(
    name: str, below: str, links: dict[str, str], sections: Sequence[str], charts: Iterable[Chart]
) -> str:
    about = f"{below} · erg analyze of ergmeter {__version__}"
    return page(
        title=name,
        header=header(name, about, {id_: word.lower() for id_, word in links.items()}),
        sections=sections,
        charts=charts,
        whole_s=_NO_TIME_S,
        counted_s=_NO_TIME_S,
    )
