"""The page and the plots: what is escaped, what is allowed, what is never drawn."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from ergmeter.cli.look import plot as command
from ergmeter.metrics.explain.waterfall import explain
from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.records import Device, Mark, Sample, Step
from ergmeter.runlog.manage.labels import annotate, tag
from ergmeter.runlog.reader import Run
from ergmeter.views.charts import plots
from ergmeter.views.charts.chart import DARK, LIGHT, SERIES, Chart, scale_for, with_colours
from ergmeter.views.charts.run_charts import figure_charts
from ergmeter.views.charts.time_charts import time_charts
from ergmeter.views.render.html import rendered
from tests.runs import add_writer, even_steps, make_run, report_page, run_of

pytest.importorskip("vl_convert")

Erg = Callable[..., tuple[int, str, str]]
DATA = Path(__file__).parents[2] / "data" / "h200_run"
S = 10**9
EVIL = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("h200")
    with tarfile.open(DATA / "bench.tar.gz") as packed:
        packed.extractall(path, filter="data")
    return path / "ladder"


def charts_of(run: Run) -> dict[str, Chart]:
    evidence = evidence_of(run)
    figures = figure_charts(evidence, summarize(run), explain(evidence))
    return {one.id: one for one in (*time_charts(evidence), *figures)}


def parts(spec: object) -> Iterator[dict[str, Any]]:
    """Every object in a spec."""
    if isinstance(spec, dict):
        yield spec
        for inner in spec.values():
            yield from parts(inner)
    elif isinstance(spec, list):
        for inner in spec:
            yield from parts(inner)


def shown(page: str) -> str:
    """The page without its scripts and its style."""
    return re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)


def test_nothing_that_a_run_says_is_markup(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", name=EVIL)
    gpu = Device("GPU-<b>", "gpu", f"GPU {EVIL}", "nvml", {"driver": EVIL})
    add_writer(
        path,
        steps=even_steps(10),
        samples=[Sample(i * S, "GPU-<b>", power_w=300.0) for i in range(12)],
        devices=[gpu],
        marks=[Mark(3 * S, EVIL, EVIL)],
        unavailable={"rapl": EVIL},
        settings={"note": EVIL},
    )
    page = report_page(Run.open(path))
    assert "hacked" in page
    assert "window.hacked=1</script>" not in page
    assert "<img" not in shown(page)
    assert page.count("<script") == 3  # the data, Vega, and ours
    (held,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', page)
    assert "<" not in held
    assert EVIL in json.dumps(json.loads(held)["charts"]).replace("\\u003c", "<")


def test_tags_and_notes_are_text(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(10))
    tag(run.path, add=["baseline", "h200"])
    annotate(run.path, f"the cooler was off {EVIL}")
    page = shown(report_page(run))
    assert '<td class="short">tags</td><td class="short">baseline, h200</td>' in page
    assert ">the cooler was off &lt;/script&gt;&lt;script&gt;window.<wbr>hacked=1" in page
    assert "<img" not in page


def test_what_to_know_stands_below_the_figures_and_is_text(tmp_path: Path) -> None:
    marks = [
        Mark(3 * S, "alert", f"energy > 1 kJ: {EVIL}"),
        Mark(3 * S, "stop_asked", "energy > 1 kJ: 1.2 kJ used"),
    ]
    page = shown(report_page(run_of(tmp_path / "run", steps=even_steps(10), marks=marks)))
    figures = page.partition('id="figures"')[2].partition("</section>")[0]
    told = figures.partition('id="to-know"')[2]
    assert "<li>the run was asked to stop: energy &gt; 1 kJ: 1.2 kJ used</li>" in told
    assert f"<li>alert: energy &gt; 1 kJ: {escape(EVIL)}</li>" in told
    assert EVIL not in page


def test_the_directory_is_named_where_it_is_not_the_name_of_the_run(tmp_path: Path) -> None:
    for directory, is_named in (("2026-11-16-demo-8648", True), ("demo", False)):
        path = make_run(tmp_path / directory, name="demo")
        add_writer(path, steps=even_steps(10))
        head = report_page(Run.open(path)).partition("<nav")[0]
        assert ("directory 2026-11-16-demo-8648" in head) is is_named


@pytest.mark.parametrize(
    ("words", "cell"),
    [
        ("204,831 tokens", '<td class="short">204,831 tokens</td>'),
        ("1 < 2", '<td class="short">1 &lt; 2</td>'),
        ("8589 tokens/s (one run: no interval)", '<td class="phrase">8589 tokens/s ('),
        ("over 40 steps in 12.1 s, after 2 steps of warm-up", '<td class="prose">over 40 steps'),
        ("time.step_median_s", '<td class="short">time.<wbr>step_median_s</td>'),
        ("see a" + "b" * 40, '<td class="unbroken">see ab'),
    ],
)
def test_a_cell_is_as_wide_as_its_words_ask_for(words: str, cell: str) -> None:
    assert rendered("td", words).startswith(cell)


def test_the_policy_names_the_hash_of_each_script_and_of_the_style_and_allows_no_other(
    ladder: Path,
) -> None:
    page = report_page(Run.open(ladder))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    inline = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", page, flags=re.DOTALL)
    hashes = {
        f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'"
        for one in inline
    }
    assert hashes == set(re.findall(r"'sha256-[^']*'", policy))
    assert len(inline) == 3


def test_the_page_loads_nothing_and_is_of_one_or_two_megabytes(ladder: Path) -> None:
    page = report_page(Run.open(ladder))
    assert len(page) < 2_000_000
    assert not re.findall(r'(?:src|href)="(?!#)', shown(page))


def test_no_chart_has_an_area_or_a_curve_between_readings(ladder: Path) -> None:
    for chart in charts_of(Run.open(ladder)).values():
        for part in parts(chart.spec):
            mark = part.get("mark")
            if isinstance(mark, dict):
                assert mark["type"] in ("line", "rect", "rule", "point", "bar", "text")
                assert mark.get("interpolate", "linear") in ("linear", "step-before")


def test_bars_of_amounts_begin_at_zero(ladder: Path) -> None:
    charts = charts_of(Run.open(ladder))
    for id_ in ("ladder", "waterfall", "time_spent", "energy_spent"):
        spec = charts[id_].spec
        assert spec is not None
        assert spec["layer"][0]["encoding"]["x"]["scale"]["domain"][0] == 0


def test_the_loss_lies_between_the_first_and_the_last_tick(tmp_path: Path) -> None:
    """From 5.5 to 1.2: ten ticks would end the axis at 5.5, where of five there is none."""
    losses = [5.5 - 4.3 * i / 19 for i in range(20)]
    steps = [replace(one, loss=loss) for one, loss in zip(even_steps(20), losses, strict=True)]
    chart = charts_of(run_of(tmp_path / "run", steps=steps))["loss"]
    svg = ET.fromstring(plots.plot(chart, "run", form="svg"))
    words = ["".join(one.itertext()) for one in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"1", "2", "3", "4", "5", "6"} <= set(words)


def test_every_drawn_chart_has_words_a_table_and_a_unit_on_its_axis(ladder: Path) -> None:
    for chart in charts_of(Run.open(ladder)).values():
        if chart.spec is None:
            assert chart.reason
            continue
        assert chart.spec["description"]
        assert chart.table is not None
        assert chart.table.rows
        titles = {part["title"] for part in parts(chart.spec) if isinstance(part.get("title"), str)}
        assert titles


def test_points_of_a_chart_are_bounded_and_the_spike_is_among_them(tmp_path: Path) -> None:
    gpu = Device("GPU-0", "gpu", "Test GPU", "nvml", {"power_field": "instant"})
    samples = [
        Sample(i * 10**7, "GPU-0", power_w=700.5 if i == 33_333 else 300.0) for i in range(60_000)
    ]
    run = run_of(tmp_path / "run", steps=even_steps(500), samples=samples, devices=[gpu])
    spec = charts_of(run)["power"].spec
    assert spec is not None
    (points,) = [p["values"] for p in parts(spec) if p.get("name") == "points" and "values" in p]
    assert len(points) <= 1600
    assert max(row["v"] for row in points) == 700.5


def drawn_of(evidence: Any, kind: str) -> Chart:
    (chart,) = time_charts(evidence, only=(kind,))
    assert isinstance(chart, Chart)
    return chart


def points_of(chart: Chart) -> list[dict[str, Any]]:
    held = [one.get("data", {}) for one in (chart.spec or {})["layer"]]
    (points,) = [one for one in held if one.get("name") == "points" and "values" in one]
    values: list[dict[str, Any]] = points["values"]
    return values


def test_every_device_of_two_nodes_has_its_line_and_names_of_its_own(tmp_path: Path) -> None:
    """An index is that of a node; two parts of one GPU have the same on the same node."""
    run = make_run(tmp_path / "run")
    for rank, host in enumerate(("atlas", "boron")):
        gpus = [Device(f"GPU-{host}-{n}", "gpu", "X", "nvml", {"index": n}) for n in (0, 1)]
        if host == "boron":
            gpus.append(Device("MIG-7", "gpu", "X", "nvml", {"index": 1}))
        samples = [Sample(t * S, gpu.id, power_w=100.0) for t in range(9) for gpu in gpus]
        steps = [Step(n * S, (n + 1) * S, index=n, rank=rank) for n in range(8)]
        header = {"host": host, "world": 2}
        add_writer(run, steps=steps, samples=samples, devices=gpus, header=header)
    chart = drawn_of(evidence_of(Run.open(run)), "power")
    assert {one["s"] for one in points_of(chart)} == {
        "GPU 0 (atlas)",
        "GPU 1 (atlas)",
        "GPU 0 (boron)",
        "GPU 1 (boron) (GPU-boron-1)",
        "GPU 1 (boron) (MIG-7)",
    }


def test_a_long_step_is_drawn_as_long_as_it_took(tmp_path: Path) -> None:
    """Nine steps of 1 s, of which the fifth takes 10: a stair that ends where the step did."""
    edges = [0, 1, 2, 3, 4, 14, 15, 16, 17, 18]
    spans = itertools.pairwise(edges)
    steps = [Step(a * S, b * S, index=i) for i, (a, b) in enumerate(spans)]
    evidence = evidence_of(run_of(tmp_path / "run", steps=steps))
    chart = drawn_of(evidence, "steps")
    assert [(one["t"], one["v"]) for one in points_of(chart)][3:6] == [(4, 1), (14, 10), (15, 1)]
    marks = [one["mark"] for one in (chart.spec or {})["layer"] if one["mark"]["type"] == "line"]
    assert [one["interpolate"] for one in marks] == ["step-before"]
    (spread,) = [
        one
        for one in figure_charts(evidence, summarize(evidence.run), explain(evidence))
        if one.id == "step_times"
    ]
    assert isinstance(spread, Chart)
    assert "1 longer than the last bar, up to 10 s" in spread.note.partition(";")[0]


def test_a_machine_without_an_accelerator_says_why_in_one_place(tmp_path: Path) -> None:
    why = "no NVML library here, so no NVIDIA driver"
    run = run_of(tmp_path / "run", steps=even_steps(20), unavailable={"nvml": why})
    page = shown(report_page(run))
    assert page.count(f">{why}</td>") == 1
    assert "activity, clock, temperature. Why: no accelerator" in page
    above = page.partition('id="all"')[0]
    assert why not in above  # the figures and charts point to where it stands


def test_a_run_that_is_being_written_tells_how_far_it_is(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    zero_ns = time.monotonic_ns() - 20 * S
    steps = [Step(zero_ns + i * S, zero_ns + (i + 1) * S, index=i) for i in range(20)]
    clock = {"clock": {"monotonic_ns": zero_ns, "wall_ns": time.time_ns() - 20 * S}}
    add_writer(path, steps=steps, closed=False, header={**clock, "budget": {"steps": 80}})
    page = shown(report_page(Run.open(path)))
    assert "20 of 80 steps (25.0%); left, at the counted rate: 60 s" in page


def test_a_run_being_written_without_a_budget_says_that_it_is_unknown(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    add_writer(path, steps=even_steps(20), closed=False)
    assert "Unknown: no total step or token count" in report_page(Run.open(path))


def test_each_headline_opens_to_its_formula_and_its_note(ladder: Path) -> None:
    page = shown(report_page(Run.open(ladder)))
    assert "<dd>FLOPs of a token x tokens/s / (devices x dense peak of the type" in page
    assert "of 989.5 TFLOP/s dense bf16 (NVIDIA H200 datasheet, checked 2026-11-15)" in page
    assert '<span class="badge reported">reported</span>' in page


def luminance(colour: str) -> float:
    parts_ = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts_]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_stands_out_from_its_ground_as_wcag_asks(theme: dict[str, str]) -> None:
    for text in ("ink", "dim"):
        for ground in ("bg", "card", "shade"):
            high, low = sorted((luminance(theme[text]), luminance(theme[ground])), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5


def test_a_file_has_the_colours_of_its_theme_and_no_variables(ladder: Path) -> None:
    for chart in charts_of(Run.open(ladder)).values():
        assert "var(--" not in json.dumps(with_colours(chart.spec, "dark"))
    assert with_colours(list(SERIES[:1]), "light") == ["#0072b2"]


@pytest.mark.parametrize(
    ("unit", "most", "said"),
    [
        ("B", 53.58e9, "GB"),
        ("s", 0.04, "ms"),
        ("W", 700, "W"),
        ("J", 12_310, "kJ"),
        ("C", 60, "°C"),
    ],
)
def test_an_axis_is_in_the_unit_a_person_would_say(unit: str, most: float, said: str) -> None:
    assert scale_for(unit, most).unit == said


def test_the_command_offers_every_plot_there_is() -> None:
    assert set(command.KINDS) == set(plots.KINDS)


def test_a_plot_is_a_file_of_the_kind_its_name_says(erg: Erg, ladder: Path, tmp_path: Path) -> None:
    svg, png = tmp_path / "power.svg", tmp_path / "ladder.PNG"
    assert erg("plot", ladder, "-o", svg)[0] == 0
    assert erg("plot", ladder, "--kind", "ladder", "--dark", "-o", png)[0] == 0
    text = svg.read_text()
    assert text.startswith("<svg")
    assert "device: power" in text
    assert "s since the run began" in text
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_run_is_read_once_for_a_plot(
    erg: Erg, ladder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[object] = []

    def counted(run: Run, *given: Any, **named: Any) -> Any:
        reads.append(run)
        return evidence_of(run, *given, **named)

    monkeypatch.setattr("ergmeter.metrics.summarize.evidence_of", counted)
    assert erg("plot", ladder, "-o", tmp_path / "power.svg")[0] == 0
    assert len(reads) == 1


def test_a_file_has_no_points_that_only_a_pointer_would_show(
    erg: Erg, ladder: Path, tmp_path: Path
) -> None:
    """They were 1800 of the 1900 shapes of a plot; the line through the readings is one."""
    erg("plot", ladder, "--kind", "power", "-o", tmp_path / "power.svg")
    shapes = ET.parse(tmp_path / "power.svg").iter("{http://www.w3.org/2000/svg}path")
    unseen = [
        one for one in shapes if one.get("opacity") == "0" or "0.35" in one.get("stroke-width", "")
    ]
    assert unseen == []


def test_a_plot_that_can_not_be_drawn_is_not_written_and_says_why(
    erg: Erg, ladder: Path, tmp_path: Path
) -> None:
    code, _, err = erg("plot", ladder, "--kind", "loss", "-o", tmp_path / "x.svg")
    assert (code, list(tmp_path.glob("x.*"))) == (1, [])
    assert err.startswith("erg: no plot of loss: no step has a loss")
    (_, others) = err.splitlines()
    assert others.startswith("erg: this run has plots for: --kind ")
    kinds = others.partition("--kind ")[2].split(", ")
    assert {"power", "ladder"} <= set(kinds)
    assert "loss" not in kinds


def test_a_plot_without_a_place_is_told_one(erg: Erg, ladder: Path) -> None:
    code, _, err = erg("plot", ladder, "--kind", "loss")
    assert (code, err) == (2, "erg: say where the plot goes: -o loss.svg (or .png)\n")


def test_a_name_of_no_picture_is_misuse(erg: Erg, ladder: Path, tmp_path: Path) -> None:
    code, _, err = erg("plot", ladder, "-o", tmp_path / "x.pdf")
    assert code == 2
    assert "neither .svg nor .png" in err


def test_a_page_is_written_where_one_says(erg: Erg, ladder: Path, tmp_path: Path) -> None:
    code, out, _ = erg("report", ladder, "--html", tmp_path / "page.html")
    assert code == 0
    assert re.fullmatch(rf"{re.escape(str(tmp_path))}/page.html \(\d\.\d\d MB\)\n", out)
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_a_page_is_written_beside_json_and_its_path_is_on_stderr(
    erg: Erg, ladder: Path, tmp_path: Path
) -> None:
    code, out, err = erg("report", ladder, "--json", "--html", tmp_path / "page.html")
    assert (code, json.loads(out)["run"]) == (0, "device")
    assert "page.html (" in err
    assert "<h1>device<" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("option", ["--all", "--memory", "--metric=mfu"])
def test_a_page_has_everything_and_no_part_of_it_is_asked_for(
    erg: Erg, ladder: Path, tmp_path: Path, option: str
) -> None:
    code, _, err = erg("report", ladder, option, "--html", tmp_path / "page.html")
    assert (code, "give it alone" in err) == (2, True)
    assert not (tmp_path / "page.html").exists()


def test_a_page_alone_prints_just_its_path(erg: Erg, ladder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, out, _ = erg("report", ladder, "--html", page)
    assert (code, out.splitlines()[1:]) == (0, [])
    assert out.startswith(f"{page} (")


def test_the_title_of_a_roofline_has_the_unit_of_its_axis(ladder: Path) -> None:
    chart = charts_of(Run.open(ladder))["roofline"]
    assert chart.spec is not None
    assert chart.unit == chart.spec["layer"][0]["encoding"]["y"]["title"] == "TFLOP/s"


def test_the_names_on_a_roofline_stand_where_no_line_is(ladder: Path) -> None:
    """The run's below and to the right of it, the bandwidth's to the left of the slope, the peak's
    over the flat roof, which has room above it."""
    spec = charts_of(Run.open(ladder))["roofline"].spec
    assert spec is not None
    named = {layer["data"]["name"]: layer for layer in spec["layer"]}
    texts = {name: one["mark"] for name, one in named.items() if one["mark"]["type"] == "text"}
    assert (texts["points"]["align"], texts["points"]["baseline"]) == ("left", "top")
    assert (texts["bandwidth"]["align"], texts["bandwidth"]["baseline"]) == ("right", "bottom")
    assert (texts["peak"]["align"], texts["peak"]["baseline"]) == ("right", "bottom")
    (peak,) = named["peak"]["data"]["values"]
    assert peak["y"] == pytest.approx(989.5)
    assert named["peak"]["encoding"]["y"]["scale"]["domain"][1] > 2 * peak["y"]
    (slope,) = named["bandwidth"]["data"]["values"]
    assert slope["y"] == pytest.approx(slope["x"] * 4.8)  # TB/s, as the datasheet says
