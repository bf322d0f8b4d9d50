"""The parts of a document, and what each renderer makes of them."""

from __future__ import annotations

import io
import json
import math
import re

import pytest
from rich.console import Console

from ergmeter.views.charts.chart import Chart
from ergmeter.views.document import (
    AxisChoice,
    BarCell,
    ChartGrid,
    ChartPart,
    Document,
    HeadlinePart,
    HeatCell,
    HeatMap,
    Items,
    Link,
    LinkCell,
    Note,
    Paragraph,
    Part,
    Section,
    SortableCell,
    Table,
    TableColumn,
    Weight,
)
from ergmeter.views.render.html import html
from ergmeter.views.render.json import json_text
from ergmeter.views.render.markdown import markdown
from ergmeter.views.render.terminal import show
from tests.golden.text import html_text

pytest.importorskip("jinja2")
HOSTILE = "<img src=x onerror=alert(1)>|`[red]*_a_*\x1b[31m</script>"


def terminal(*parts: Part, width: int = 80) -> str:
    out = io.StringIO()
    show(Document("title", parts), Console(file=out, width=width))
    return out.getvalue()


def text(*parts: Part) -> str:
    """What Markdown has below the title."""
    return markdown(Document("title", parts)).removeprefix("## title\n\n")


def page(*parts: Part) -> list[str]:
    """The lines of a page below its title and its links."""
    lines = html_text(html(Document("title", parts))).splitlines()
    return lines[next(n for n, line in enumerate(lines) if line.startswith("ergmeter ")) + 1 :]


SHARES = Table(
    ("part", TableColumn("share", "number"), TableColumn("how", "basis")),
    (("linear", "97.5 %", "measured"), ("all", "100 %", "derived")),
    "by part",
    strong_rows=frozenset({1}),
)


def test_a_table_has_its_caption_and_aligned_numbers() -> None:
    assert terminal(SHARES).splitlines() == [
        "by part",
        "part     share  how     ",
        "────────────────────────",
        "linear  97.5 %  measured",
        "all      100 %  derived ",
    ]
    assert text(SHARES) == (
        "by part\n\n| part | share | how |\n| --- | --- | --- |\n"
        "| linear | 97.5 % | measured |\n| all | 100 % | derived |\n"
    )
    assert page(SHARES) == [
        *("by part", "part | share | how", "linear | 97.5 % | measured", "all | 100 % | derived")
    ]
    shares = html(Document("title", (SHARES,)))
    assert '<td class="number">97.5 %</td>' in shares
    assert '<span class="badge measured">measured</span>' in shares
    assert "<strong>all</strong>" in shares


def test_what_is_below_a_row_is_a_column_elsewhere() -> None:
    table = Table(("metric", "value", TableColumn("of", "below")), (("mfu", "41 %", "bf16"),))
    assert terminal(table) == "mfu  41 %\n   bf16\n"
    assert "| mfu | 41 % | bf16 |" in text(table)
    assert "mfu | 41 % | bf16" in page(table)


def test_a_bar_is_drawn_on_a_terminal_alone() -> None:
    columns = ("block", TableColumn("", "bar"), TableColumn("share", "number"))
    table = Table(columns, (("idle", BarCell(1.0, 0.5), "50 %"),), has_head=False)
    assert terminal(table) == f"idle  {' ' * 10}{'#' * 10}  50 %\n"
    assert "| idle | 50 % |" in text(table)
    assert "idle | 50 %" in page(table)


def test_columns_move_together_before_a_table_is_too_wide() -> None:
    table = Table(tuple(TableColumn("1234567", "number") for _ in range(10)), (("8",) * 10,))
    assert len(terminal(table).splitlines()[0]) == 79
    assert len(terminal(table, width=120).splitlines()[0]) == 88


def test_a_table_that_sorts_has_buttons_and_values() -> None:
    row = (SortableCell("1.5 k", 1500.0), SortableCell("-", None))
    sortable = html(Document("title", (Table(("a", "b"), (row,), is_sortable=True),)))
    assert '<table class="sortable">' in sortable
    assert '<button type="button">a</button>' in sortable
    assert '<td class="number" data-value="1500.0">1.5 k</td>' in sortable
    assert '<td class="number" data-value="">-</td>' in sortable


def test_a_headline_that_repeats_the_title_is_for_a_terminal() -> None:
    document = Document(
        "run: where it went", (HeadlinePart("run", about="10 s"), Items(("a",))), about="10 s"
    )
    assert markdown(document) == "## run: where it went, 10 s\n\n- a\n"
    assert html_text(html(document)).count("10 s") == 1
    headline = HeadlinePart("run", "not fit", "over 10 s", "bad")
    assert terminal(headline) == "run: not fit  over 10 s\n"
    assert text(headline) == "**run: not fit** over 10 s\n"
    assert page(headline) == ["run: not fit over 10 s"]
    assert '<strong class="bad">' in html(Document("title", (headline,)))


@pytest.mark.parametrize(
    ("weight", "sign", "mark"),
    [
        ("serious", "!!", "**!!** "),
        ("minor", "!", "**!** "),
        ("remark", "*", ""),
        ("ok", "ok", "**ok** "),
        ("absent", "-", "**-** "),
    ],
)
def test_a_note_says_its_weight_and_its_effect(weight: Weight, sign: str, mark: str) -> None:
    note = Note(weight, "throttled", "slower\nand warmer")
    assert terminal(note) == f"  {sign:<3}throttled\n     slower\n     and warmer\n"
    assert text(note) == f"- {mark}throttled\n  - slower\n  - and warmer\n"
    assert f'<span class="{weight}"></span>throttled' in html(Document("title", (note,)))


@pytest.mark.parametrize(
    ("weight", "sign", "words"),
    [
        ("better", "+", "better"),
        ("worse", "-", "worse"),
        ("differs", "*", "differs"),
        ("not shown", "=", "no difference shown"),
        ("no interval", "?", "no interval"),
        ("no verdict", "", "absent"),
    ],
)
def test_a_verdict_has_its_sign(weight: Weight, sign: str, words: str) -> None:
    note = Note(weight, "1.25x faster")
    assert terminal(note) == f"  {sign:<3}1.25x faster\n"
    assert text(note) == f"- **{words}**: 1.25x faster\n"
    badge = f"{sign} {words}".strip()
    assert f'<span class="badge">{badge}</span> 1.25x faster' in html(Document("title", (note,)))


def test_notes_wrap_below_their_text() -> None:
    lines = terminal(Note("minor", "a word " * 20), Items(("b word " * 20,)), width=40).splitlines()
    assert [line[:5].rstrip() for line in lines[:4]] == ["  !", "", "", ""]
    assert [line[:2] for line in lines[4:]] == ["- ", "  ", "  ", "  "]
    assert max(map(len, lines)) <= 40


def test_a_section_has_a_title_and_a_link() -> None:
    section = Section("next", "what next", (Items(("measure longer",)),))
    assert terminal(Items(("a",)), section) == "- a\n\nwhat next\n- measure longer\n"
    assert text(section) == "### What next\n\n- measure longer\n"
    made = html(Document("title", (section,)))
    assert '<a href="#next">what next</a>' in made
    assert '<h2 id="next-title">What next</h2>' in made
    folded = html(Document("title", (Section("next", "what next", (), is_folded=True),)))
    assert "<details><summary>What next</summary>" in folded


def test_a_section_inside_one_is_a_level_below_and_keeps_its_title() -> None:
    inner = Section("pair", "bnb against torch", (Items(("slower",)),))
    outer = Section("verdicts", "verdicts", (inner, Paragraph("front: torch")))
    assert terminal(outer) == "verdicts\nbnb against torch\n- slower\n\nfront: torch\n"
    assert text(outer) == "### Verdicts\n\n#### bnb against torch\n\n- slower\n\nfront: torch\n"
    made = html(Document("title", (outer,)))
    assert '<h3 id="pair-title">bnb against torch</h3>' in made
    assert "#pair" not in made


def test_a_section_is_left_out_where_it_is_not_shown() -> None:
    for_files = Section("runs", "runs", (Items(("run 7",)),), media=("markdown", "html"))
    assert terminal(Items(("a",)), for_files) == "- a\n"
    assert "run 7" in text(for_files)
    assert page(for_files) == ["runs", "Runs", "run 7"]  # the link, and the section
    for_pages = Section("runs", "runs", (Items(("run 7",)),), media=("html",))
    assert text(Items(("a",)), for_pages) == "- a\n"
    assert page(for_pages) == ["runs", "Runs", "run 7"]


def test_charts_beside_each_other_and_their_axes_are_for_pages() -> None:
    parts: tuple[Part, ...] = (
        AxisChoice((("step", "steps"), ("time", "time")), "time"),
        ChartGrid(tuple(Chart(name, name, "s", None, reason="no steps") for name in "ab")),
        Items(("a",)),
    )
    assert terminal(*parts) == "- a\n"
    assert text(*parts) == "- a\n"
    made = html(Document("title", parts))
    assert '<div class="pair"><figure id="a">' in " ".join(made.split()).replace("> <", "><")
    assert 'name="x" value="time" autocomplete="off" checked>time</label>' in made
    assert made.count(" checked>") == 1
    assert [chart.id for chart in Document("title", parts).charts] == ["a", "b"]


def test_a_table_that_is_too_wide_continues_below_with_its_row_titles() -> None:
    columns = (TableColumn("group"), *(TableColumn(f"metric {n}", "number") for n in range(4)))
    table = Table(columns, (("base", "1", "2\n±1 %", "3", "4"),), row_titles=1)
    assert [line.rstrip() for line in terminal(table, width=30).splitlines()] == [
        "group  metric 0  metric 1",
        "─────────────────────────",
        "base          1         2",
        "                     ±1 %",
        "",
        "group  metric 2  metric 3",
        "─────────────────────────",
        "base          3         4",
    ]
    assert len(terminal(table, width=60).splitlines()) == 4
    assert "| base | 1 | 2 ±1 % | 3 | 4 |" in text(table)


def test_a_text_to_copy_is_not_wrapped() -> None:
    line = "erg report " + "x" * 100
    assert terminal(Paragraph(line, is_to_copy=True)) == f"{line}\n"
    assert text(Paragraph(line, is_to_copy=True)) == f"```text\n{line}\n```\n"
    quoted = "erg record -- sh -c 'echo ```'"
    assert text(Paragraph(quoted, is_to_copy=True)) == f"````text\n{quoted}\n````\n"
    assert f"<pre>{line}</pre>" in html(Document("title", (Paragraph(line, is_to_copy=True),)))


def test_a_chart_is_its_table_and_note_where_none_is_drawn() -> None:
    pytest.importorskip("vl_convert")
    spec = {"mark": "bar", "data": {"values": [{"a": 1}]}}
    chart = Chart("c", "losses", "%", spec, Table(("block",), (("idle",),)), "of the peak")
    part = ChartPart(chart)
    assert terminal(part).splitlines() == ["block", "─────", "idle ", "", "of the peak"]
    assert text(part) == "| block |\n| --- |\n| idle |\n\nof the peak\n"
    made = html(Document("title", (part,)))
    assert '<div class="chart" id="chart-c"></div>' in made
    assert "<figcaption>of the peak</figcaption>" in made
    absent = ChartPart(Chart("c", "losses", "%", None, reason="no MFU"))
    assert terminal(absent) == "  -  losses: no MFU\n"
    assert text(absent) == "- **-** losses: no MFU\n"
    assert '<p class="absent">- no MFU</p>' in html(Document("title", (absent,)))


def heat_map(*values: float | None) -> HeatMap:
    cells = tuple(HeatCell(f"is {value}", value, "failed") for value in values)
    return HeatMap("m", "speed", "batch", ("gpus 1",), (("4", (cells,)),), "darker is more")


def test_a_heat_map_is_shaded_in_five_levels_and_on_pages_only() -> None:
    drawn = heat_map(0.0, 19.9, 20.0, 79.9, 100.0, None, math.nan)
    made = html(Document("title", (drawn,)))
    shades = re.findall(r'<div class="cell (\w+)"><span>is', made)
    assert shades == [*("level0", "level0", "level1", "level3", "level4", "failed", "failed")]
    assert '<td>batch</td><th scope="col">gpus 1</th>' in made
    assert "<figcaption>darker is more</figcaption>" in made
    assert 'class="cell level0"' in html(Document("title", (heat_map(7.0, 7.0),)))
    for_pages = Section("maps", "maps", (Paragraph("some"),), media=("html",))
    assert terminal(Items(("a",)), drawn, for_pages) == "- a\n"
    assert text(Items(("a",)), drawn, for_pages) == "- a\n"
    assert "<h2" in html(Document("title", (for_pages,)))


def test_a_column_of_links_is_on_pages_only() -> None:
    links = LinkCell((Link("exp_0", 'a"b.html'), Link("exp_1")))
    table = Table(("cell", TableColumn("runs", "links")), (("a", links), ("b", LinkCell(()))))
    made = html(Document("title", (table,)))
    assert '<a href="a&#34;b.html">exp_0</a>, exp_1</td>' in made
    assert ">-</td>" in made
    assert text(table) == "| cell |\n| --- |\n| a |\n| b |\n"
    assert terminal(table).split() == ["cell", "────", "a", "b"]


def test_a_page_without_charts_holds_no_chart_library() -> None:
    made = html(Document("title", (SHARES,)))
    assert "vegaEmbed=" not in made
    assert len(made) < 40_000
    assert made.count("<script") == 2


def test_json_is_the_data_and_has_no_nan() -> None:
    assert json.loads(json_text(Document("title", (), {"a": [1, 2.5]}))) == {"a": [1, 2.5]}
    assert json.loads(json_text(Document("title", (), {"a": math.nan}))) == {"a": None}


def hostile_document() -> Document:
    chart = Chart("c", HOSTILE, HOSTILE, None, reason=HOSTILE)
    table = Table((HOSTILE, TableColumn(HOSTILE, "below")), ((HOSTILE, HOSTILE),), HOSTILE)
    parts: tuple[Part, ...] = (
        HeadlinePart(HOSTILE, HOSTILE, HOSTILE, "bad"),
        table,
        Table((HOSTILE,), ((SortableCell(HOSTILE, 1.0),),), is_sortable=True),
        ChartPart(chart),
        Note("serious", HOSTILE, HOSTILE),
        Items((HOSTILE,)),
        Paragraph(HOSTILE),
        Paragraph(HOSTILE, is_to_copy=True),
        Section("s", HOSTILE, (Items((HOSTILE,)),)),
    )
    return Document(HOSTILE, parts, {"name": HOSTILE}, HOSTILE)


def test_hostile_names_stay_text_in_every_form() -> None:
    document = hostile_document()
    out = io.StringIO()
    show(document, Console(file=out, width=200, force_terminal=True, color_system=None))
    assert out.getvalue().count("[red]*_a_*") >= 12
    assert "\x1b" not in out.getvalue()
    lines = markdown(document).splitlines()
    assert not [line for line in lines if "<img" in line and not line.startswith("<img")]
    code = lines.index("```text")
    assert all("<img" not in line for n, line in enumerate(lines) if n != code + 1)
    assert all("\x1b" not in line for line in lines)
    rows = [line for line in lines if line.startswith("| ")]
    assert {len(row.replace("\\|", "").split("|")) for row in rows} == {3, 4}
    made = html(document)
    assert "<img" not in made
    assert "\x1b" not in made
    assert made.count("&lt;img src=x onerror=alert(1)&gt;") >= 15
    assert made.count("</script>") == made.count("<script")
    assert json.loads(json_text(document))["name"] == HOSTILE
