"""`erg compare --html` in a real browser: what is drawn against figures worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import erg
from tests.e2e.pages import EVIL, Opened, check_it_is_sound, each_way, needs_chromium
from tests.e2e.test_compare import COLUMNS, RATES, row, trained, written

pytestmark = [needs_chromium, pytest.mark.browser]

SINGLE = 1200.0  # tokens/s of torch's one run
LONG = "x" * 300
NAMED = "2026-11-16-train-on-two-nodes-8648"  # with a figure 44 characters
# Names that are short, of 79 and of 300 characters, and curves.
PAGES = ["three", "refused", "evil", "target", "long"]


def compared(out: Path, *sources: object, code: int = 0) -> Path:
    ended, _, said = erg("compare", *sources, "--html", out)
    assert ended == code, said
    assert said.startswith(f"{out} (")  # and what is printed stays what it was
    return out


def ledger(path: Path, groups: dict[str, tuple[float, ...]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        row(name, seed, rate) for name, rates in groups.items() for seed, rate in enumerate(rates)
    ]
    path.write_text("\n".join([COLUMNS, *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three backends, one of them run once; what may not be compared; names that attack; a way."""
    folder = tmp_path_factory.mktemp("compared")
    three = ledger(folder / "three" / "energy_results.csv", {**RATES, "torch": (SINGLE,)})
    refused = written(folder / "refused" / "energy_results.csv", seq_len=2048)
    evil = ledger(folder / "evil" / "energy_results.csv", {"bnb": RATES["bnb"], EVIL: (900.0,)})
    long = ledger(folder / "long" / "energy_results.csv", {LONG: RATES["bnb"], "b": (900.0,)})
    named = ledger(folder / "named" / "energy_results.csv", {"a": RATES["bnb"], NAMED: (900.0,)})
    for number, more in enumerate((0.99, 1.0, 1.01)):
        trained(folder / "quick" / str(number), seconds=1.0 * more)
        trained(folder / "slow" / str(number), seconds=1.95 * more)
    return {
        "three": compared(folder / "three.html", three),
        "refused": compared(folder / "refused.html", refused, code=1),
        "evil": compared(folder / "evil.html", evil),
        "long": compared(folder / "long.html", long),
        "named": compared(folder / "named.html", named),
        "target": compared(
            folder / "target.html", folder / "quick", folder / "slow", "--target-loss", "2.001"
        ),
    }


def rows(one: Opened, chart: str, data: str = "points") -> dict[str, dict[str, Any]]:
    """What a chart holds, by name, as Vega has it."""
    found = one.ask(f"ergmeterViews['{chart}'].data('{data}').map((row) => ({{...row}}))")
    return {row["name"]: row for row in found}


@pytest.mark.parametrize("name", PAGES)
@each_way
def test_a_page_is_sound(shown: Callable[..., Opened], name: str, width: int, scheme: str) -> None:
    check_it_is_sound(shown(name, width=width, scheme=scheme))


def test_ratios_are_drawn_with_the_interval_that_comes_out_by_hand(
    shown: Callable[..., Opened],
) -> None:
    one = shown("three")
    spans = rows(one, "ratios", "spans")
    # Logs of 1.30, 1.31 and 1.32: mean 0.27001, standard deviation 0.00763; 4.3027 x 0.00763 /
    # sqrt(3) is 0.01896.
    speed = spans["unsloth: tokens/s"]
    assert speed["v"] == pytest.approx(math.exp(0.27001), abs=2e-5)
    assert speed["low"] == pytest.approx(math.exp(0.25105), abs=2e-4)
    assert speed["high"] == pytest.approx(math.exp(0.28897), abs=2e-4)
    # Every run drew 12 000 J, so energy per token is the inverse.
    energy = spans["unsloth: J/token"]
    assert energy["low"] == pytest.approx(1 / speed["high"])
    assert (speed["shape"], energy["shape"]) == ("triangle-up", "triangle-up")
    assert spans["unsloth: memory"]["low"] == spans["unsloth: memory"]["high"] == 1
    assert one.ask("ergmeterViews.ratios.scale('x').type") == "log"
    # One line at 1, from the top to the bottom of three figures of two groups, and no dashes.
    assert one.ask("ergmeterViews.ratios.data('neutral').map((row) => row.v)") == [1]
    line = one.page.locator("#chart-ratios .mark-rule line").first.bounding_box()
    assert line["height"] >= 6 * 40 - 1
    # Words have a rim, so that neither it nor the grid strikes them out.
    rim = "getComputedStyle(document.querySelector('#chart-ratios .mark-text text')).paintOrder"
    assert one.ask(rim).startswith("stroke")


def test_a_group_of_one_run_is_a_dot_without_an_interval_and_says_so(
    shown: Callable[..., Opened],
) -> None:
    one = shown("three")
    points = rows(one, "ratios")
    single = points["torch: tokens/s"]
    assert single["v"] == pytest.approx(SINGLE / (1000 * 1010 * 990) ** (1 / 3))
    assert (single["low"], single["shape"]) == (None, "diamond")
    assert single["said"].endswith(", one run")
    assert not any(name.startswith("torch") for name in rows(one, "ratios", "spans"))


def test_the_front_is_drawn_by_shape_and_by_where_the_means_are(
    shown: Callable[..., Opened],
) -> None:
    one = shown("three")
    points = rows(one, "pareto")
    assert {name: row["shape"] for name, row in points.items()} == {
        "bnb": "circle",
        "torch": "circle",
        "unsloth": "diamond",
    }
    assert points["unsloth"]["y"] == pytest.approx((1300 * 1323.1 * 1306.8) ** (1 / 3))
    assert points["torch"]["x"] == pytest.approx(40 * 300 / (40 * SINGLE))
    assert rows(one, "pareto", "across").keys() == {"bnb", "unsloth"}
    words = one.page.text_content("#pareto")
    assert "beaten: bnb (by unsloth and torch), torch (by unsloth)" in words


def test_verdicts_come_first_and_in_words(shown: Callable[..., Opened]) -> None:
    one = shown("three")
    assert one.ask("document.querySelector('main section').id") == "verdicts"
    words = one.page.inner_text("#verdicts")
    assert "unsloth 1.31x faster, 95 % interval 1.29 to 1.34" in words
    assert "could explain it: optimizer (PagedAdamW8bit / AdamW)" in words
    table = one.page.inner_text("#differences-section")
    assert "optimizer" in table
    assert one.page.locator("#runs tbody tr").count() == 7


def test_what_is_not_comparable_has_its_reasons_and_no_ratio(
    shown: Callable[..., Opened],
) -> None:
    one = shown("refused")
    said = one.page.inner_text("#verdicts")
    assert "not comparable: sequence length differs (1024 / 2048)" in said
    assert "--anyway" not in said
    assert one.page.inner_text("#ratios .absent") == "- not comparable with bnb: unsloth"
    assert "two comparable groups" in one.page.inner_text("#pareto .absent")
    assert "faster" not in one.page.inner_text("main")
    groups = one.page.inner_text("#groups")
    assert "bnb" in groups  # figures stay
    assert "unsloth" in groups


def test_the_way_to_a_target_loss_is_drawn(shown: Callable[..., Opened]) -> None:
    one = shown("target")
    spans = rows(one, "ratios", "spans")
    assert spans["slow: to target"]["v"] == pytest.approx(1.95, rel=1e-3)
    assert spans["slow: to target"]["shape"] == "triangle-down"


def curve(one: Opened, chart: str, run: int) -> list[dict[str, Any]]:
    """The points of one run's line, as Vega has them."""
    found = one.ask(f"ergmeterViews['course-{chart}'].data('points').map((row) => ({{...row}}))")
    return [row for row in found if row["i"] == run]


def test_all_runs_are_in_one_chart_from_their_first_step_on(shown: Callable[..., Opened]) -> None:
    one = shown("target")
    # Steps of 1.95 s, 100 tokens each, and a loss that falls from 3 by 0.1.
    slow = curve(one, "loss", 4)
    assert [row["v"] for row in slow] == pytest.approx([3 - 0.1 * n for n in range(20)])
    assert [row["tokens"] for row in slow] == [100 * n for n in range(1, 21)]
    assert [row["step"] for row in slow] == list(range(1, 21))
    assert [row["time"] for row in slow] == pytest.approx([1.95 * n for n in range(1, 21)])
    rates = [row["v"] for row in curve(one, "tokens_per_s", 4)]
    assert rates == pytest.approx([100 / 1.95] * 20, rel=1e-5)
    # 250 W, read ten times a second from a second before the first step on: from its start to 20 s.
    power = curve(one, "power_w", 1)
    assert [row["time"] for row in power] == pytest.approx([n / 10 for n in range(201)])
    assert {row["v"] for row in power} == {250}
    named = ["quick: 0", "quick: 1", "quick: 2", "slow: 0", "slow: 1", "slow: 2"]
    assert one.page.locator("#course-loss .legend li").all_inner_texts() == named
    lines = one.ask(
        "[...document.querySelectorAll('#chart-course-loss .mark-line path')]"
        ".map((line) => [line.getAttribute('stroke'), line.getAttribute('stroke-dasharray')])"
    )
    assert len({tuple(line) for line in lines}) == 6
    assert [colour for colour, _ in lines] == ["var(--c1)"] * 3 + ["var(--c2)"] * 3
    said = one.page.inner_text("#courses")
    assert "Not shown: memory in use on the device" in said


def test_the_x_axis_is_chosen_by_keyboard_and_nothing_is_asked_for(
    opened: Callable[..., Opened],
) -> None:
    one = opened("target")

    def shown(chart: str) -> tuple[str, float]:
        words = one.page.get_attribute(f"#chart-course-{chart} svg", "aria-label")
        end = one.ask(f"ergmeterViews['course-{chart}'].scale('x').domain()[1]")
        return words.rpartition("; x axis: ")[2], round(end, 3)

    assert shown("loss") == ("tokens so far", 2000)
    # The slowest ends at 39.39 s; its power was read last at 39.3 s.
    assert shown("power_w") == ("s since the first step began", 39.3)
    assert one.page.inner_text("#x-axis legend") == "x axis"
    one.page.focus("#x-axis input:checked")
    one.page.keyboard.press("ArrowRight")
    one.page.wait_for_selector("html[data-axis=step]")
    assert shown("loss") == ("steps so far", 20)
    assert shown("power_w")[0] == "steps so far"
    one.page.keyboard.press("ArrowRight")  # and on, before that is drawn
    one.page.keyboard.press("ArrowRight")
    one.page.wait_for_selector("html[data-axis=time]")
    assert shown("loss") == ("s since the first step began", round(20 * 1.95 * 1.01, 3))
    assert one.page.locator("#chart-course-loss svg").count() == 1
    assert one.page.locator("#chart-course-loss .mark-line path").count() == 6
    assert len(curve(one, "loss", 0)) == 20
    assert one.complaints == []
    assert len(one.asked_for) == 1


def test_the_nearest_reading_is_told_beside_the_pointer(opened: Callable[..., Opened]) -> None:
    one = opened("target", width=400)
    place = one.page.locator("#chart-course-tokens_per_s")
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    # In the middle of the window there is least room on either side.
    for share in (0.5, 0.52):
        one.page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] / 3)
    one.page.wait_for_selector("#vg-tooltip-element.visible")
    told = dict(line.split("\t") for line in one.page.inner_text("#vg-tooltip-element").split("\n"))
    assert told.keys() == {"run", "tokens/s", "steps", "tokens", "s"}
    group, _, repeat = told["run"].partition(": ")
    each_s = {"quick": 1.0, "slow": 1.95}[group] * (0.99, 1.0, 1.01)[int(repeat)]
    assert float(told["tokens/s"]) == pytest.approx(100 / each_s, rel=1e-4)
    steps = float(told["steps"])
    assert float(told["s"]) == pytest.approx(steps * each_s, rel=1e-4)
    assert float(told["tokens"].replace(",", "")) == steps * 100
    shown = one.page.locator("#vg-tooltip-element").bounding_box()
    assert 0 <= shown["x"] <= 400 - shown["width"]


def test_a_ledger_has_no_curves_and_the_page_says_so(shown: Callable[..., Opened]) -> None:
    one = shown("three")
    assert one.page.inner_text("#courses .dim") == (
        "7 runs are not drawn: a ledger's row has no steps and no samples: name the run's"
        " directory."
    )
    assert one.page.locator("#x-axis").count() == 0


def test_what_a_group_is_called_does_not_run(shown: Callable[..., Opened]) -> None:
    one = shown("evil")
    for chart in one.page.query_selector_all(".chart svg"):
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        for share in (0.25, 0.5, 0.75):
            one.page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] / 2)
    assert one.ask("window.hacked") is None
    assert one.page.query_selector("img") is None
    assert EVIL in one.page.inner_text("h1")
    assert EVIL in one.page.inner_text("#groups")
    assert one.complaints == []


def test_a_name_is_whole_where_the_window_is_narrow(opened: Callable[..., Opened]) -> None:
    one = opened("named", width=400)
    words = one.ask(
        "[...document.querySelectorAll('#chart-ratios .mark-text text')]"
        ".map((text) => text.textContent)"
    )
    assert {f"{NAMED}: tokens/s", f"{NAMED}: J/token", f"{NAMED}: memory"} <= set(words)
    assert not any("…" in one for one in words)


def test_on_paper_it_is_light_and_everything_is_open(opened: Callable[..., Opened]) -> None:
    one = opened("three", scheme="dark")
    one.ask("dispatchEvent(new Event('beforeprint'))")
    one.page.emulate_media(media="print")
    ground = one.ask("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(255, 255, 255)"
    assert one.ask("document.querySelectorAll('details:not([open])').length") == 0
