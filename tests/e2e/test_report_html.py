"""`erg report --html` in a real browser: drawn, moved, read aloud, attacked.

The browser is the system's chromium; `./dev test` installs it. What a chart holds is read back from
Vega itself.
"""

from __future__ import annotations

import json
import re
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ergmeter.records import Device, Mark, Sample
from tests.e2e.conftest import erg
from tests.e2e.pages import EVIL, Opened, check_it_is_sound, each_way, needs_chromium
from tests.runs import add_writer, even_steps, make_run

pytestmark = [needs_chromium, pytest.mark.browser]

DATA = Path(__file__).parents[1] / "data" / "h200_run"
S = 10**9
ON_TIME = ["phases", "power", "energy", "memory", "activity", "clocks", "temperature", "steps"]


def page_of(run: Path, out: Path, *, command: str = "report") -> Path:
    code, _, said = erg(command, run, "--html", out)
    assert code == 0, said
    return out


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of two runs of an H200, of one that attacks, and of one without accelerator; and
    what is explained of a third of an H200, which had no counters."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("demo", "bench", "mfu_full"):
        with tarfile.open(DATA / f"{name}.tar.gz") as packed:
            packed.extractall(folder / name, filter="data")
    runs = {"demo": folder / "demo" / "demo", "ladder": folder / "bench" / "ladder"}
    # A run begins and ends when it is written, by this machine's clock.
    start_ns = time.monotonic_ns()
    clock = {"clock": {"monotonic_ns": start_ns, "wall_ns": time.time_ns()}}
    steps = [
        replace(one, start_ns=start_ns + one.start_ns, end_ns=start_ns + one.end_ns)
        for one in even_steps(10)
    ]
    runs["evil"] = make_run(folder / "evil", name=EVIL)
    add_writer(
        runs["evil"],
        header=clock,
        steps=steps,
        samples=[Sample(start_ns + i * S, "GPU-0", power_w=300.0) for i in range(12)],
        devices=[Device("GPU-0", "gpu", f"GPU {EVIL}", "nvml", {"driver": EVIL})],
        marks=[Mark(start_ns + 3 * S, EVIL, EVIL)],
        settings={"note": EVIL},
    )
    runs["bare"] = make_run(folder / "bare", name="bare")
    add_writer(runs["bare"], header=clock, steps=steps, unavailable={"nvml": "no NVML library"})
    made = {name: page_of(run, folder / f"{name}.html") for name, run in runs.items()}
    made["explained"] = folder / "explained.html"
    page_of(folder / "mfu_full" / "full", made["explained"], command="explain")
    made["checked"] = page_of(runs["demo"], folder / "checked.html", command="check")
    made["estimated"] = folder / "estimated.html"
    model = "hidden=4096,layers=32,heads=32,kv_heads=8,ffn=14336,vocab=128256"
    options = ("--seq-len", 4096, "--device", "h100-sxm", "--mfu", 0.4)
    assert erg("estimate", model, *options, "--html", made["estimated"])[0] == 0
    return made


@pytest.mark.parametrize(
    "name", ["demo", "ladder", "evil", "bare", "explained", "checked", "estimated"]
)
@each_way
def test_a_page_is_sound(shown: Any, name: str, width: int, scheme: str) -> None:
    check_it_is_sound(shown(name, width=width, scheme=scheme))


def test_charts_have_the_points_that_the_run_has(shown: Any) -> None:
    points = shown("demo").points()
    # As many as the recording has readings: counted in its files (see its README).
    assert points["power"] == 157
    assert points["clocks"] == points["temperature"] == points["activity"] == 18
    assert points["steps"] == points["loss"] == 243  # 240 counted and 3 of warm-up
    assert "roofline" not in points
    assert shown("ladder").points()["roofline"] == 1


def test_the_highest_point_drawn_is_the_peak_power_of_the_card(shown: Any) -> None:
    peak = shown("demo").ask("Math.max(...ergmeterViews.power.data('points').map((row) => row.v))")
    assert peak == pytest.approx(641.7, abs=0.05)  # `erg report` of the same run: 641.7 W


def test_a_chart_that_has_no_place_says_why(shown: Any) -> None:
    text = shown("demo").page.inner_text("#roofline-section")
    assert "no hardware counter of device memory traffic" in text


@pytest.mark.parametrize(
    ("page", "run"), [("ladder", "bench/ladder"), ("explained", "mfu_full/full")]
)
def test_the_waterfall_has_the_blocks_and_the_figures_of_erg_explain(
    shown: Any, pages: dict[str, Path], page: str, run: str
) -> None:
    code, told, _ = erg("explain", pages[page].parent / run, "--json")
    assert code == 0
    found = json.loads(told)
    blocks = [*found["blocks"], found["achieved"]]
    peak, *rows = shown(page).ask("ergmeterViews.waterfall.data('points')")
    assert (peak["low"], peak["high"]) == (0, 1)
    assert [row["name"] for row in rows] == [one["title"] for one in blocks]
    assert [row["v"] for row in rows] == [one["share_frac"] for one in blocks]
    assert [row["high"] - row["low"] for row in rows] == pytest.approx(
        [abs(one["share_frac"]) for one in blocks]
    )
    for row, block in zip(rows, blocks, strict=True):
        ((number, prefix),) = re.findall(r"^([\d.]+) (k?)J$", row["joules"])
        assert float(number) * (1000 if prefix else 1) == pytest.approx(block["joules"], rel=1e-3)


def test_pointing_at_a_block_says_what_it_is(shown: Any) -> None:
    one = shown("explained")
    one.page.locator("#chart-waterfall .mark-rect path").nth(3).hover()
    one.page.wait_for_selector("#vg-tooltip-element.visible")
    words = one.page.inner_text("#vg-tooltip-element")
    assert "unattributed" in words
    assert "no counter says what the device did" in words


def test_only_what_is_not_told_apart_is_striped(shown: Any) -> None:
    stripes = "ergmeterViews.waterfall.data('stripes').map((row) => row.at)"
    assert set(shown("explained").ask(stripes)) == {3}  # after the peak, the gaps and the clock
    assert shown("ladder").ask(stripes) == []
    legend = shown("explained").page.inner_text("#waterfall .legend")
    assert legend.split("\n") == ["lost", "lost, unattributed", "what is left"]


def test_a_waterfall_that_can_not_be_drawn_keeps_its_place_and_says_why(shown: Any) -> None:
    text = shown("bare").page.inner_text("#waterfall-section")
    assert "Not shown: from the peak to what was achieved. Why: nothing can be attributed" in text


def test_zooming_moves_the_time_axis_of_all_charts_and_all_of_the_run_comes_back(
    shown: Any,
) -> None:
    one = shown("demo")
    before = one.domains()
    assert set(ON_TIME) <= before.keys()
    whole = before["power"]
    one.page.click("button[data-zoom=nearer]")
    one.wait("ergmeterViews.memory.scale('x').domain()[0] > 0")
    after = one.domains()
    quarter = (whole[1] - whole[0]) / 4
    for domain in after.values():
        assert domain == pytest.approx([whole[0] + quarter, whole[1] - quarter])
    one.page.click("button[data-zoom=all]")
    one.wait("ergmeterViews.memory.scale('x').domain()[0] === 0")
    assert one.domains()["power"] == pytest.approx(whole)


@pytest.mark.parametrize("width", [1280, 400])
def test_a_moment_is_at_one_place_in_all_charts_over_time(shown: Any, width: int) -> None:
    one = shown("demo", width=width)
    edges = one.ask(
        "Object.entries(ergmeterViews).filter(([id]) => id in "
        + json.dumps(dict.fromkeys([*ON_TIME, "loss"], 1))
        + ").map(([id, view]) => { const left = view.origin()[0]"
        " + document.querySelector(`#chart-${id} svg`).getBoundingClientRect().left;"
        " return [left, left + view.width()]; })"
    )
    assert len(edges) == len(ON_TIME) + 1
    for places in zip(*edges, strict=True):
        assert max(places) - min(places) <= 1


def test_shift_and_the_wheel_zoom_every_chart_and_the_bare_wheel_scrolls(opened: Any) -> None:
    one = opened("demo")
    chart = one.page.locator("#chart-power svg")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    one.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    scrolled = one.ask("scrollY")
    one.page.mouse.wheel(0, 120)
    one.wait(f"scrollY > {scrolled}")
    assert one.domains()["power"][0] == 0
    one.page.mouse.wheel(0, -120)
    one.wait(f"scrollY <= {scrolled}")
    one.page.keyboard.down("Shift")
    one.page.mouse.wheel(0, -400)
    one.page.keyboard.up("Shift")
    one.wait("ergmeterViews.temperature.scale('x').domain()[0] > 0")
    domains = one.domains()
    for domain in domains.values():
        assert domain == pytest.approx(domains["power"])
    assert one.complaints == []


def test_the_zoom_works_by_keyboard_alone(shown: Any) -> None:
    one = shown("demo")
    one.page.focus("button[data-zoom=counted]")
    one.page.keyboard.press("Enter")
    one.wait("ergmeterViews.power.scale('x').domain()[0] > 6")
    low, high = one.domains()["power"]
    assert high - low == pytest.approx(9.31, abs=0.01)  # the card: 240 steps in 9.31 s
    one.page.click("button[data-zoom=all]")  # as others look at it
    one.wait("ergmeterViews.power.scale('x').domain()[0] === 0")


def test_pointing_at_a_line_shows_the_nearest_reading_with_its_unit(shown: Any) -> None:
    one = shown("demo")
    chart = one.page.locator("#chart-power svg")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    one.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    one.page.wait_for_selector("#vg-tooltip-element.visible")
    words = one.page.inner_text("#vg-tooltip-element")
    assert "NVIDIA H200" in words
    assert "undefined" not in words
    value = float(words.split("W")[1].split()[0])
    held = one.ask("ergmeterViews.power.data('points').map((row) => row.v)")
    assert min(abs(value - reading) for reading in held) < 0.01


def ground(one: Opened) -> str:
    return str(one.ask("getComputedStyle(document.body).backgroundColor"))


def line(one: Opened) -> str:
    of_power = "getComputedStyle(document.querySelector('#chart-power .mark-line path')).stroke"
    return str(one.ask(of_power))


def test_the_light_goes_on_and_off_for_lines_too_and_follows_the_system_at_first(
    opened: Any, shown: Any
) -> None:
    light = ("rgb(255, 255, 255)", "rgb(0, 114, 178)")
    dark = ("rgb(20, 23, 27)", "rgb(86, 180, 233)")
    one = opened("demo", scheme="dark")
    assert (ground(one), line(one)) == dark
    one.page.click("#theme")
    assert (ground(one), line(one)) == light
    one.page.click("#theme")
    assert (ground(one), line(one)) == dark
    follows = shown("demo")
    assert (ground(follows), line(follows)) == light


def test_on_paper_it_is_light_and_everything_is_open(opened: Any) -> None:
    one = opened("demo", scheme="dark")
    one.ask("dispatchEvent(new Event('beforeprint'))")
    one.page.emulate_media(media="print")
    assert ground(one) == "rgb(255, 255, 255)"
    assert one.ask("document.querySelectorAll('details:not([open])').length") == 0
    assert not one.page.is_visible(".zoom")


def test_what_a_run_is_called_and_marked_with_does_not_run(shown: Any) -> None:
    one = shown("evil")
    for chart in one.page.query_selector_all(".chart svg"):
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        for share in (0.25, 0.5, 0.75):
            one.page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] / 2)
    assert one.ask("window.hacked") is None
    assert one.page.query_selector("img") is None
    assert EVIL in one.page.inner_text("h1")
    assert one.complaints == []


def test_a_script_that_gets_in_is_refused_by_the_policy(opened: Any) -> None:
    one = opened("bare")
    one.ask(
        """(() => { const added = document.createElement('script');
             added.textContent = 'window.hacked = 1'; document.body.append(added); })()"""
    )
    assert one.ask("window.hacked") is None
    assert any("Content Security Policy" in said for said in one.complaints)
