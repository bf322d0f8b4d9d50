"""`erg bench report --html` and `erg bench compare --html` in a real browser."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ergmeter.bench.tables import as_table
from tests.e2e.conftest import erg
from tests.e2e.pages import EVIL, Opened, check_it_is_sound, each_way, needs_chromium
from tests.unit.bench.rows import repeats, write_table

pytestmark = [needs_chromium, pytest.mark.browser]

# Tokens/s per device of two batches (down) on one and two devices (across); the last went out of
# memory.
CELLS = [(1, 1, 100.0), (1, 2, 95.0), (2, 1, 180.0), (2, 2, None)]
REF = {"same": [1000.0, 1004.0, 996.0], "slower": [1000.0, 1004.0, 996.0], "once": [1000.0]}
NEW = {"same": [1001.0, 1003.0, 997.0], "slower": [900.0, 904.0, 896.0], "once": [990.0]}
PAGES = ["bench", "compared"]


def made(*arguments: object, out: Path) -> Path:
    code, _, said = erg("bench", *arguments, "--html", out)
    assert code == 0, said
    return out


def bench(folder: Path) -> Path:
    """Four cells of a framework with a hostile name; one has the page of its run beside it."""
    for number, (batch, devices, rate) in enumerate(CELLS):
        cell = folder / f"exp_{number}"
        cell.mkdir(parents=True)
        settings: dict[str, Any] = {"per_device_train_batch_size": batch, "num_gpus": devices}
        settings["framework_config"] = EVIL if batch == 2 else "plain"
        told = {"train_tokens_per_second": rate, "train_runtime": 10.0} if rate else {}
        status = "ok" if rate else "oom"
        why = "" if rate else f"out of memory {EVIL}"
        (cell / "status.json").write_text(json.dumps({"status": status, "reason": why}))
        (cell / "results.json").write_text(json.dumps({**settings, **told}))
    (folder / "exp_0" / "report.html").write_text("<!doctype html><title>the run's page</title>")
    return folder


def tables(folder: Path) -> tuple[Path, Path]:
    """Two tables of results: a cell that stays, one that is slower, one run once, and others."""
    sides = []
    for name, groups in (("new", NEW), ("ref", REF)):
        rows = [
            one
            for group, values in groups.items()
            for one in repeats(group, "real_tokens_per_s", values)
        ]
        # Padding left out: more samples a second, and fewer tokens that count it.
        tokens, samples = (850.0, 13.0) if name == "new" else (1000.0, 10.0)
        rows += repeats(f"packed {EVIL}", "computed_tokens_per_s", [tokens], samples_per_s=samples)
        if name == "ref":
            rows += repeats("gone", "real_tokens_per_s", [1.0])
        write_table(as_table(rows), folder / f"{name}.parquet")
        sides.append(folder / f"{name}.parquet")
    return sides[0], sides[1]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("benches")
    new, ref = tables(folder)
    return {
        "bench": made("report", bench(folder / "results"), out=folder / "bench.html"),
        "compared": made("compare", new, ref, out=folder / "compared.html"),
    }


@pytest.mark.parametrize("name", PAGES)
@each_way
def test_a_page_is_sound(shown: Callable[..., Opened], name: str, width: int, scheme: str) -> None:
    one = shown(name, width=width, scheme=scheme)
    check_it_is_sound(one)
    assert EVIL in one.page.inner_text("main")


def test_a_heat_map_has_every_cell_where_its_settings_say(shown: Callable[..., Opened]) -> None:
    one = shown("bench")
    grid = one.page.locator("#matrix-tokens_per_s table")
    assert grid.locator("thead th").all_inner_texts() == ["1", "2"]
    assert "\\ gpus" in grid.locator("thead td").inner_text()
    cells = grid.locator("tbody td").all_inner_texts()
    # Rows go by their words, and `<` comes before `p`. Figures are of all devices together and, as
    # the Trainer counts, with padding, which the star says.
    assert [cell.split()[0] for cell in cells] == ["180*", "✕", "100*", "190*"]
    levels = grid.locator("tbody .cell").evaluate_all("all => all.map((one) => one.className)")
    # 100 to 190 in five steps: 100 is in the first, 180 and 190 are in the last.
    assert levels == ["cell level4", "cell failed", "cell level0", "cell level4"]


def test_a_failed_cell_is_told_apart_without_colour_and_says_why(
    shown: Callable[..., Opened],
) -> None:
    one = shown("bench")
    failed = one.page.locator("#matrix-tokens_per_s .failed")
    style = failed.evaluate(
        "(e) => { const s = getComputedStyle(e); return [s.borderTopStyle, s.backgroundImage]; }"
    )
    assert style[0] == "dashed"
    assert style[1].startswith("repeating-linear-gradient")
    assert f"cell 3: oom: out of memory {EVIL}" in one.page.inner_text("#failures")
    assert one.page.inner_text(".headline") == "4 cells: 3 ok, 1 oom"


def test_a_cell_links_to_the_page_of_its_run_or_names_its_directory(
    opened: Callable[..., Opened],
) -> None:
    one = opened("bench")
    links = one.page.locator("#matrix-tokens_per_s .cell a")
    assert links.all_inner_texts() == ["exp_0"]
    assert links.get_attribute("href") == "results/exp_0/report.html"
    paths = one.page.locator("#rows tbody tr td:last-child").all_inner_texts()
    assert [path.rpartition("/")[2] for path in paths] == ["exp_0", "exp_1", "exp_2", "exp_3"]
    assert one.page.locator("#rows a").count() == 1
    links.click()
    one.wait('document.title === "the run\'s page"')


def test_the_ratios_of_two_benches_are_drawn_with_their_intervals(
    shown: Callable[..., Opened],
) -> None:
    one = shown("compared")
    found = one.ask("ergmeterViews['rule-0'].data('points').map((row) => ({...row}))")
    points = {row["name"]: row for row in found}
    slower = points["slower"]
    # Welch of two groups of three: logs of 900, 904, 896 and of 1000, 1004, 996 scatter by 0.00444
    # and 0.00400; the standard error is sqrt(0.00444^2 + 0.00400^2) / sqrt(3) = 0.003452, with
    # 3.957 degrees of freedom t is 2.787: 0.00962 to either side of log(0.9).
    middle = math.log(900 * 904 * 896 / (1000 * 1004 * 996)) / 3
    assert slower["v"] == pytest.approx(math.exp(middle))
    assert slower["low"] == pytest.approx(math.exp(middle - 0.00962), abs=2e-5)
    assert slower["high"] == pytest.approx(math.exp(middle + 0.00962), abs=2e-5)
    assert (slower["shape"], points["same"]["shape"]) == ("triangle-down", "circle")
    assert (points["once"]["low"], points["once"]["shape"]) == (None, "diamond")
    limits = one.ask("ergmeterViews['rule-0'].data('limits').map((row) => row.v)")
    assert set(limits) == {0.97}  # tokens_per_s -3%


def test_each_cell_has_its_word_the_worst_first_and_the_paradox_is_explained(
    shown: Callable[..., Opened],
) -> None:
    one = shown("compared")
    rows = one.page.locator("table").first.locator("tbody tr").all_inner_texts()
    words = {tuple(row.split("\t")[:2]) for row in rows}
    assert words >= {("worse", "slower"), ("inconclusive", "gone"), ("pass", "same")}
    assert ("inconclusive", "once") in words
    assert rows[0].startswith("worse\tslower")
    said = one.page.inner_text("#changes")
    # 850 tokens for 13 samples and 1000 for 10: 65.4 a sample against 100, so 35 % was padding.
    assert "at least 35 % of what REF counted was padding" in said
    assert "missing in NEW: gone" in one.page.inner_text("#changes")
