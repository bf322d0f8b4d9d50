"""`erg serve` in a real browser: listed, followed, compared, attacked.

The browser is the system's chromium; the server and the program that writes a run are processes of
their own.
"""

from __future__ import annotations

import asyncio
import csv
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from ergmeter import Run
from ergmeter.records import Device, Mark, Sample
from tests.e2e.conftest import ERG, TIMEOUT_S, Lab, environment, erg, eventually, script
from tests.runs import add_writer, even_steps, make_run

playwright_api = pytest.importorskip("playwright.sync_api")
playwright_api.expect.set_options(timeout=TIMEOUT_S * 1000)
axe_api = pytest.importorskip("axe_playwright_python.sync_playwright")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
    pytest.mark.browser,
]

DATA = Path(__file__).parents[1] / "data" / "h200_run"
BACKENDS = DATA.with_name("h200_backends") / "first.csv"
S = 10**9
EVIL = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
WAIT_MS = TIMEOUT_S * 1000


def simple_run(path: Path, name: str, *, seconds: float = 1.0, tag: str = "") -> Path:
    """Twenty steps of 100 tokens, of so many seconds each."""
    run = make_run(path, name)
    if tag:
        said = {"tags": [tag], "notes": [{"at": "2026-11-01", "text": f"a note: {tag}"}]}
        (run / "labels.json").write_text(json.dumps(said))
    gpu = Device("GPU-0", "gpu", f"GPU {EVIL}" if name == EVIL else "Test GPU", "nvml")
    count = round(20 * seconds) + 1
    samples = [Sample(i * S, "GPU-0", power_w=300.0, energy_j=300.0 * i) for i in range(count)]
    add_writer(
        run,
        steps=even_steps(20, seconds=seconds, tokens_real=100),
        samples=samples,
        devices=[gpu],
        marks=[Mark(3 * S, name, name)],
        settings={"warmup_steps": 0},
    )
    return run


def directory(root: Path) -> Path:
    """Runs quick, slow and hostile, one cut short, one of an H200, a bench and a ledger."""
    simple_run(root / "quick", "quick", seconds=0.5, tag="keep")
    simple_run(root / "slow", "slow", seconds=2.0)
    simple_run(root / "evil", EVIL, tag=EVIL)
    cut = make_run(root / "cut", "cut")
    add_writer(
        cut, steps=even_steps(5), header={"pid": 2**22 + 1, "pid_started_s": 1.0}, closed=False
    )
    for file in cut.rglob("*"):
        os.utime(file, (1, 1))
    with tarfile.open(DATA / "demo.tar.gz") as packed:
        packed.extractall(root / "h200", filter="data")
    for number, (batch, length, status) in enumerate(
        [(1, 512, "ok"), (2, 512, "ok"), (1, 1024, "ok"), (2, 1024, "oom")]
    ):
        cell = root / "matrix" / f"exp_{number}"
        cell.mkdir(parents=True)
        loss = math.nan if number == 1 else float(number + 1)
        said = {"train_tokens_per_second": 100.0 * batch, "train_runtime": 10.0, "train_loss": loss}
        settings = {"per_device_train_batch_size": batch, "max_seq_length": length, "num_gpus": 1}
        why = f"out of memory {EVIL}" if status == "oom" else ""
        (cell / "status.json").write_text(json.dumps({"status": status, "reason": why}))
        results = {**settings, **(said if status == "ok" else {})}
        (cell / "results.json").write_text(json.dumps(results))
    simple_run(root / "matrix" / "exp_1" / "run", "of a cell")
    with (root / "energy_results.csv").open("w", newline="") as ledger:
        rows = csv.writer(ledger)
        rows.writerow(["backend", "tok_per_s", "tokens_processed", "wall_s", "window_s"])
        rows.writerow([EVIL, "123.5", "1000", "8.1", "8.0"])
    shutil.copy(root / "energy_results.csv", root / "matrix" / "exp_0")
    shutil.copy(BACKENDS, root / "backends.csv")
    return root


class Served:
    """A server over a directory, as a process."""

    def __init__(self, root: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [ERG, "serve", str(root), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(PYTHONUNBUFFERED="1"),
            start_new_session=True,
            text=True,
        )
        assert self.process.stdout
        said = self.process.stdout.readline()
        found = re.search(r"http://\S+", said)
        assert found, said + self.stop()
        self.address = found[0].partition("?")[0].rstrip("/")
        self.whole = found[0]

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(self.address + path, timeout=TIMEOUT_S) as answer:
            return json.load(answer)

    def id(self, name: str) -> str:
        def known() -> dict[str, str]:
            return {run["name"]: run["id"] for run in self.ask("/api/runs")["runs"]}

        eventually(lambda: name in known(), f"{name} in the list")
        return known()[name]

    def stop(self, how: int = signal.SIGINT) -> str:
        """End it. What it printed as an error."""
        if self.process.poll() is None:
            os.kill(self.process.pid, how)
        _, said = self.process.communicate(timeout=TIMEOUT_S)
        return said


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(directory(tmp_path_factory.mktemp("served") / "runs"))
    eventually(lambda: server.ask("/api/runs")["pending"] == 0, "all runs read")
    yield server
    assert server.stop() == ""


@pytest.fixture
def opened(tabs: Any) -> Iterator[Callable[..., Any]]:
    """`opened(address)`: a page; afterwards nothing was complained of and nothing ran."""
    pages: list[Any] = []
    complaints: list[str] = []

    def heard(message: Any) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    def open_(address: str, *, width: int = 1280, dark: bool = False) -> Any:
        page = tabs.new_page()
        pages.append(page)
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme="dark" if dark else "light")
        page.set_default_timeout(WAIT_MS)
        page.on("console", heard)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        return page

    yield open_
    for page in pages:
        assert page.evaluate("window.hacked") is None
        page.close()
    assert complaints == []


def names(page: Any) -> list[str]:
    found: list[str] = page.locator("#runs tbody td.name a").all_inner_texts()
    return found


def steps(page: Any) -> int:
    """How many steps the page says there are; a run that has just begun has none yet."""
    said = page.inner_text("#step")
    return 0 if said == "none yet" else int(said.replace(",", ""))


def expect_names(page: Any, wanted: list[str]) -> None:
    playwright_api.expect(page.locator("#runs tbody td.name a")).to_have_text(wanted)


def test_the_list_sorts_filters_and_searches(served: Served, opened: Callable[..., Any]) -> None:
    page = opened(served.address + "/")
    playwright_api.expect(page.locator("#count")).to_have_text(
        "5 runs, 1 cell of benches not shown"
    )
    page.click('button[data-sort="throughput.tokens_per_s"]')
    expect_names(page, ["h200/demo", "quick", "evil", "slow", "cut"])
    page.click('button[data-sort="throughput.tokens_per_s"]')
    # What is absent stands last, whichever way.
    expect_names(page, ["slow", "evil", "quick", "h200/demo", "cut"])
    assert page.get_attribute('th[aria-sort="ascending"]', "class") == "number"
    page.select_option("#state", "cut")
    expect_names(page, ["cut"])
    page.select_option("#state", "")
    page.select_option("#tag", "keep")
    expect_names(page, ["quick"])
    page.select_option("#tag", "")
    page.fill("#q", "test gpu slow")
    expect_names(page, ["slow"])
    page.reload()  # the address holds the view
    expect_names(page, ["slow"])


def test_a_search_that_finds_nothing_says_so_and_how_to_be_rid_of_it(
    served: Served, opened: Callable[..., Any]
) -> None:
    page = opened(served.address + "/#sort=name&down=")
    expect_names(page, ["cut", "evil", "h200/demo", "quick", "slow"])
    page.select_option("#state", "cut")
    page.fill("#q", EVIL)
    none = page.locator("#none")
    playwright_api.expect(none).to_contain_text(f"No run matches “{EVIL}” and state cut off.")
    assert page.inner_text("#count").startswith("0 of 5 runs")
    page.focus("#clear")
    page.keyboard.press("Enter")
    expect_names(page, ["cut", "evil", "h200/demo", "quick", "slow"])
    assert none.is_hidden()
    assert page.input_value("#q") == page.input_value("#state") == ""


def test_a_wrong_address_leads_back_to_the_runs(served: Served, tabs: Any) -> None:
    page = tabs.new_page()  # which may complain: of a page that is not there
    page.set_default_timeout(WAIT_MS)
    for address in ("/nowhere", f"/run/{EVIL}", "/run/0123456789ab"):
        answer = page.goto(f"{served.address}{address}")
        assert answer.status == 404
        assert page.inner_text("h1") == "Nothing here"
        assert page.locator("header nav a").count() == 3
        assert page.evaluate("window.hacked") is None
    serious = [one["id"] for one in axe_api.Axe().run(page).response["violations"]]
    assert serious == []
    page.click("text=All runs")
    page.wait_for_selector("#runs tbody >> text=quick")
    page.close()


def test_the_chosen_runs_are_compared(served: Served, opened: Callable[..., Any]) -> None:
    page = opened(served.address + "/#q=test+gpu&sort=name")
    expect_names(page, ["slow", "quick"])
    page.check('input[aria-label="choose slow"]')
    assert page.get_attribute("#compare", "href") is None
    page.check('input[aria-label="choose quick"]')
    page.click("text=compare 2 runs")
    page.wait_for_selector("html[data-drawn=true]")
    cells = page.locator("table").first.locator("tbody tr").all_inner_texts()
    assert [row.split()[:3] for row in cells] == [["slow", "1", "50"], ["quick", "1", "200"]]
    assert page.inner_text("h2").startswith("quick against slow")
    # The words of `erg compare`: of one run each there is no interval.
    assert page.locator(".verdict .badge").first.inner_text() == "? no interval"


def test_a_comparison_draws_its_intervals_and_its_front(
    served: Served, opened: Callable[..., Any]
) -> None:
    both = f"{served.id('slow')},{served.id('quick')}"
    page = opened(f"{served.address}/compare?ids={both}")
    page.wait_for_selector("html[data-drawn=true]")
    ratios = page.evaluate("ergmeterViews.ratios.data('points').map((row) => ({...row}))")
    held = {row["name"]: row for row in ratios}
    # 100 tokens in 0.5 s against 100 in 2 s, at 300 W; of one run each there is no interval.
    assert held["quick: tokens/s"]["v"] == pytest.approx(4.0)
    assert held["quick: J/token"]["v"] == pytest.approx(0.25, rel=1e-3)
    assert held["quick: tokens/s"]["low"] is None
    front = page.evaluate("ergmeterViews.pareto.data('points').map((row) => [row.name, row.shape])")
    assert dict(front) == {"slow": "circle", "quick": "diamond"}
    words = page.locator("#ratios details")
    words.locator("summary").click()
    assert "quick" in words.locator("tbody tr").first.inner_text()
    assert page.get_attribute("#chart-ratios svg", "aria-label").startswith("ratio to slow")


def test_a_comparison_draws_its_runs_over_what_one_chooses(
    served: Served, opened: Callable[..., Any]
) -> None:
    both = f"{served.id('slow')},{served.id('quick')}"
    page = opened(f"{served.address}/compare?ids={both}")
    page.wait_for_selector("html[data-drawn=true]")
    names = page.locator("#course-tokens_per_s .legend li").all_inner_texts()
    assert names == ["slow", "quick"]
    rows = page.evaluate("ergmeterViews['course-tokens_per_s'].data('points').map((r) => ({...r}))")
    # Twenty steps of 100 tokens each, of 2 s and of 0.5 s.
    assert [row["v"] for row in rows] == pytest.approx([50.0] * 20 + [200.0] * 20)
    assert [row["time"] for row in rows[20:]] == pytest.approx([n / 2 for n in range(1, 21)])
    end = "ergmeterViews['course-tokens_per_s'].scale('x').domain()[1]"
    assert page.evaluate(end) == 40
    assert "no step has a loss" in page.inner_text("#courses")
    page.focus("#x-axis input:checked")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("html[data-axis=step]")
    assert page.evaluate(end) == 20
    label = page.get_attribute("#chart-course-tokens_per_s svg", "aria-label")
    assert label.endswith("; x axis: steps so far")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("html[data-axis=tokens]")
    assert page.evaluate(end) == 2000


def test_a_finished_run_shows_its_report(served: Served, opened: Callable[..., Any]) -> None:
    page = opened(f"{served.address}/run/{served.id('h200/demo')}")
    page.wait_for_selector("html[data-drawn=true]")
    assert page.inner_text("h1") == "demo"
    assert page.locator(".card").count() >= 5
    points = page.evaluate("ergmeterViews.power.data('points').length")
    assert 100 < points < 3000
    assert page.locator("nav.app a").count() == 4


def test_hostile_names_are_shown_and_do_nothing(served: Served, opened: Callable[..., Any]) -> None:
    page = opened(served.address + "/#q=evil")
    expect_names(page, ["evil"])
    assert page.inner_text("#runs tbody .tag") == EVIL
    assert f"a note: {EVIL}" in page.inner_text("#runs tbody")
    page.click("text=evil")
    page.wait_for_selector("html[data-drawn=true]")
    assert EVIL in page.inner_text("h1")
    both = f"{served.id('evil')},{served.id('quick')}"
    compared = opened(f"{served.address}/compare?ids={both}")
    compared.wait_for_selector("html[data-drawn=true]")
    ledger = opened(served.address + "/ledgers")
    ledger.click("text=energy_results.csv")
    ledger.wait_for_selector("td")
    assert EVIL in ledger.inner_text("table")
    bench = opened(served.address + "/benches")
    bench.click("text=matrix")
    bench.wait_for_selector(".failed")
    assert "✕ oom" in bench.inner_text(".failed")
    assert "out of memory </script>" in bench.inner_text(".failed")


@pytest.mark.parametrize("width", [1280, 400])
def test_a_ledger_of_fifty_columns_can_be_read(
    served: Served, opened: Callable[..., Any], width: int
) -> None:
    """Nine runs on an H200: one line a row, what people look for first, the rest to scroll to."""
    page = opened(served.address + "/ledgers", width=width)
    page.click("text=backends.csv")
    page.wait_for_selector(".ledger td")
    heads = page.locator(".ledger th").all_inner_texts()
    assert heads[:3] == ["backend", "tokens/s", "energy per token"]
    assert len(set(heads)) == len(heads)
    assert "model" not in heads
    assert page.inner_text("#alike summary").startswith("The same in all rows: ")
    page.evaluate("document.querySelector('#alike').open = true")
    assert "model builtin:1b" in page.inner_text("#alike p")
    row = page.locator(".ledger tbody tr").first.locator("td")
    assert row.nth(1).inner_text() == "22,387 tokens/s"
    assert row.nth(1).locator("span").get_attribute("title") == "22386.733622123968 tokens/s"
    line = page.eval_on_selector(".ledger td", "e => parseFloat(getComputedStyle(e).lineHeight)")
    heights = page.eval_on_selector_all(".ledger tr", "all => all.map((e) => e.offsetHeight)")
    assert len(heights) == 10
    assert max(heights) < 2 * line
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.focus(".ledger")
    page.keyboard.press("ArrowRight")
    eventually(lambda: page.eval_on_selector(".ledger", "e => e.scrollLeft") > 0, "it scrolls")


def test_ledgers_of_cells_are_not_listed_beside_those_of_people(served: Served) -> None:
    names = [one["name"] for one in served.ask("/api/ledgers")["ledgers"]]
    assert sorted(names) == ["backends.csv", "energy_results.csv"]


def test_one_run_compares_with_nothing_and_the_page_says_so(
    served: Served, opened: Callable[..., Any]
) -> None:
    page = opened(f"{served.address}/compare?ids={served.id('quick')}")
    playwright_api.expect(page.locator("#state-line")).to_have_text(
        "one group: nothing to compare it with"
    )
    assert page.locator("text=compare anyway").count() == 0


def test_what_is_compared_anyway_is_not_called_comparable(
    served: Served, opened: Callable[..., Any]
) -> None:
    both = f"{served.id('h200/demo')},{served.id('quick')}"  # on two kinds of devices
    page = opened(f"{served.address}/compare?ids={both}")
    state = page.locator("#state-line")
    playwright_api.expect(state).to_contain_text("not comparable as they are", timeout=WAIT_MS)
    page.click("text=compare anyway")
    playwright_api.expect(state).to_contain_text("compared anyway", timeout=WAIT_MS)
    assert state.get_attribute("data-kind") == "bad"


def test_a_matrix_tells_failed_cells_apart_without_colour(
    served: Served, opened: Callable[..., Any]
) -> None:
    page = opened(served.address + "/benches")
    page.click("text=matrix")
    page.wait_for_selector(".matrix")
    assert page.inner_text("#state-line") == "4 cells in 4 configurations, 1 without a result"
    rows = page.locator(".matrix tbody tr").count()
    columns = page.locator(".matrix thead th").count()
    assert (rows, columns) == (2, 2)
    assert page.locator(".cell.failed").count() == 1
    style = page.eval_on_selector(".cell.failed", "e => getComputedStyle(e).borderTopStyle")
    assert style == "dashed"
    page.select_option("#across", "")
    playwright_api.expect(page.locator(".matrix thead th")).to_have_count(1)


def test_a_loss_that_is_no_number_is_told_and_is_not_in_the_scale(
    served: Served, opened: Callable[..., Any]
) -> None:
    page = opened(served.address + "/benches")
    page.click("text=matrix")
    page.wait_for_selector(".matrix")
    page.select_option("#figure", "loss")
    playwright_api.expect(page.locator(".cell.none span")).to_have_text(["nan"])
    playwright_api.expect(page.locator(".cell.level0 span")).to_have_text(["1"])
    playwright_api.expect(page.locator(".cell.level4 span")).to_have_text(["3"])


def test_a_cell_of_a_bench_links_to_the_page_of_its_run(
    served: Served, opened: Callable[..., Any]
) -> None:
    page = opened(served.address + "/benches")
    page.click("text=matrix")
    page.wait_for_selector(".matrix")
    # One cell has a run in its directory; of the others there is the directory's name.
    assert page.locator(".cell a").all_inner_texts() == ["exp_1"]
    runs = page.locator(".cell .runs").all_inner_texts()
    assert sorted(runs) == ["exp_0", "exp_1", "exp_2", "exp_3"]
    assert page.get_attribute(".cell a", "href") == f"/run/{served.id('matrix/exp_1/run')}"
    page.click(".cell a")
    page.wait_for_selector("html[data-drawn=true]")
    assert page.inner_text("h1") == "of a cell"


@pytest.fixture(scope="module")
def following(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Served]]:
    """A directory and its server, for tests that put runs there and leave it empty."""
    root = tmp_path_factory.mktemp("following")
    server = Served(root)
    yield root, server
    assert server.stop() == ""


@pytest.fixture
def serving(lab: Lab, following: tuple[Path, Served]) -> Iterator[Served]:
    """A server over an empty directory. Name it before `opened`, whose pages must go first."""
    root, server = following
    (lab.path / "runs").symlink_to(root)
    yield server
    lab.close()  # what writes there
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    eventually(lambda: not server.ask("/api/runs")["runs"], "an empty list")
    eventually(lambda: not server.ask("/api/benches")["benches"], "no bench")


def test_an_empty_list_says_how_to_make_a_run_and_then_has_it(
    serving: Served, lab: Lab, opened: Callable[..., Any]
) -> None:
    page = opened(serving.address + "/")
    none = page.locator("#none")
    playwright_api.expect(none).to_contain_text("No run in this directory yet.", timeout=WAIT_MS)
    assert "erg record -- python train.py" in none.inner_text()
    assert page.locator("#filters, #runs, #compare").evaluate_all(
        "all => all.every((one) => one.offsetParent === null)"
    )
    simple_run(lab.path / "runs" / "one", "one")
    expect_names(page, ["one"])
    assert none.is_hidden()
    for address, how in (("/benches", "erg bench run"), ("/ledgers", "energy_results.csv")):
        other = opened(serving.address + address)
        playwright_api.expect(other.locator("#state-line")).to_contain_text(how, timeout=WAIT_MS)


def test_new_steps_are_on_the_page_and_at_the_end_it_becomes_the_report(
    serving: Served, lab: Lab, opened: Callable[..., Any]
) -> None:
    writer = lab.start(*script("steady", "runs/one", EVIL), stdout=subprocess.PIPE)
    page = opened(f"{serving.address}/run/{serving.id('one')}")
    page.wait_for_selector("#step")
    seen: list[int] = []

    def step_came() -> bool:
        if not seen or steps(page) != seen[-1]:
            seen.append(steps(page))
        return len(seen) >= 8

    eventually(step_came, "eight updates")
    assert seen == sorted(set(seen))
    page.wait_for_selector("#figure-loss svg")
    playwright_api.expect(page.locator("#state-line")).to_have_text("running")
    # Legends of the page, which wrap; those in the picture were cut on a narrow screen.
    page.wait_for_selector("#figure-memory .legend li >> text=on the host")
    assert page.locator("#charts .role-legend").count() == 0
    page.wait_for_selector("#figures strong >> text=/ of 17 checks /")  # the verdict of erg check
    (lab.path / "runs" / "one.stop").touch()
    out, _ = writer.communicate(timeout=TIMEOUT_S)
    page.wait_for_selector("text=How to cite")
    assert page.inner_text("h1") == EVIL
    assert "finished" in page.inner_text("header")
    page.wait_for_selector("html[data-drawn=true]")
    assert page.evaluate("ergmeterViews.loss.data('points').length") == int(out)


def long_run(lab: Lab) -> None:
    """`runs/long`, which is so from the moment that the server sees it."""
    run = simple_run(lab.path / "long", "long")
    with (run / "trace.bin").open("wb") as file:
        file.truncate(25_000_000)  # long by its size
    run.rename(lab.path / "runs" / "long")


def test_the_page_of_a_long_run_has_what_is_there_soon_and_then_its_report(
    serving: Served, lab: Lab, tabs: Any
) -> None:
    long_run(lab)
    asked: list[str] = []
    page = tabs.new_page()
    page.set_default_timeout(WAIT_MS)
    page.on("request", lambda one: asked.append(one.url.rpartition("/")[2]))
    page.goto(f"{serving.address}/run/{serving.id('long')}")
    page.wait_for_selector("text=How to cite")
    page.close()
    first, last = asked.index("charts?only=phases,steps,loss"), asked.index("report")
    assert first < asked.index("charts?only=power") < last
    assert asked.index("row") < last


PACE_S = 0.1  # of steady.py
# Each number of steps that the page shows, with the time at which it did.
NOTE_STEPS = """() => {
  window.shown = [];
  const note = () => {
    const said = Number((document.getElementById("step") || {}).textContent?.replaceAll(",", ""));
    if (said && said !== (shown.at(-1) || [0])[0]) shown.push([said, Date.now()]);
  };
  const changes = { childList: true, subtree: true };
  new MutationObserver(note).observe(document.getElementById("live"), changes);
  note();
}"""


def test_a_step_is_shown_soon_after_it_is_made(
    serving: Served, lab: Lab, opened: Callable[..., Any]
) -> None:
    """By the writer's own pace, which a busy machine slows down too; of each update its oldest.

    A second where nothing else runs. Ten are granted: a page that asks by the minute is later.
    """
    writer = lab.start(*script("steady", "runs/one"), stdout=subprocess.PIPE)
    page = opened(f"{serving.address}/run/{serving.id('one')}")
    page.evaluate(NOTE_STEPS)
    eventually(lambda: page.evaluate("shown.length") >= 12, "twelve updates")
    shown = page.evaluate("shown")
    (lab.path / "runs" / "one.stop").touch()
    writer.communicate(timeout=TIMEOUT_S)
    run = Run.open(lab.path / "runs" / "one")
    ended_ms = (run.steps()["end_ns"] + run.wall_zero_ns) / 1e6
    made = [int(np.searchsorted(ended_ms, at_ms, side="right")) for _, at_ms in shown]
    # An update from 20 steps to 27 shows the 21st; by then so many more had been made.
    late = [count - (before + 1) for (before, _), count in zip(shown, made[1:], strict=False)]
    assert all(count >= step for (step, _), count in zip(shown, made, strict=True))
    assert statistics.median(late) <= 10.0 / PACE_S


async def heard(server: Served, run: str, events: int) -> list[int]:
    """The numbers of steps in so many events of a run's stream."""
    host, port = server.address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /api/run/{run}/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    seen: list[int] = []
    while len(seen) < events:
        line = await asyncio.wait_for(reader.readline(), TIMEOUT_S)
        assert line, "the stream ended"
        step = json.loads(line[6:])["step"] if line.startswith(b"data: ") else None
        if step is not None and step not in seen:
            seen.append(step)
    writer.close()
    return seen


def heard_by(clients: int, server: Served, run: str, *, events: int) -> list[list[int]]:
    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(heard(server, run, events) for _ in range(clients)))

    # In a thread of its own: playwright has a loop in this one.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(all_of_them())).result()


def test_fifty_clients_all_hear_of_new_steps_and_cost_a_few_times_what_one_does(
    serving: Served, lab: Lab
) -> None:
    lab.start(*script("steady", "runs/one"))
    run = serving.id("one")
    heard_by(1, serving, run, events=2)  # what is loaded with the first
    spent_s: list[float] = []
    own = psutil.Process(serving.process.pid)
    for clients in (1, 50):
        before = own.cpu_times()
        seen = heard_by(clients, serving, run, events=6)
        after = own.cpu_times()
        spent_s.append(after.user + after.system - before.user - before.system)
        assert all(one == sorted(one) for one in seen)
    # Each on its own would be fifty times; the kernel counts in hundredths of a second.
    assert spent_s[1] < 15 * max(spent_s[0], 0.05)


def resident_bytes(process: psutil.Process) -> int:
    with suppress(psutil.NoSuchProcess):  # one that has ended since it was listed
        return int(process.memory_info().rss)
    return 0


def test_memory_stays_where_it_was_however_often_it_is_asked(serving: Served, lab: Lab) -> None:
    """An hour of pages that come and go, in short: a thousand streams and what a page asks for."""
    lab.start(*script("steady", "runs/one"))
    run = serving.id("one")
    own = psutil.Process(serving.process.pid)

    def resident_bytes_after(rounds: int) -> int:
        for number in range(rounds):
            heard_by(20, serving, run, events=1)
            if number % 5 == 0:  # each is dearer than a stream
                for address in ("/api/runs", f"/api/run/{run}", f"/api/run/{run}/charts"):
                    serving.ask(address)
        return sum(map(resident_bytes, (own, *own.children(recursive=True))))

    # The charting library is made in a worker when the server starts: it is there before we look.
    with urllib.request.urlopen(serving.address, timeout=TIMEOUT_S) as page:
        library = re.search(rb'data-charts="([^"]+)"', page.read())
    assert library
    urllib.request.urlopen(serving.address + library[1].decode(), timeout=TIMEOUT_S).close()
    first = resident_bytes_after(10)
    # 50 kB that each of the thousand streams leaves behind would be more.
    assert resident_bytes_after(50) < 1.5 * first


def test_a_killed_writer_is_shown_as_cut_off(
    serving: Served, lab: Lab, opened: Callable[..., Any]
) -> None:
    writer = lab.start(*script("steady", "runs/one"))
    page = opened(f"{serving.address}/run/{serving.id('one')}")
    page.wait_for_selector("#step")
    writer.kill()
    page.wait_for_selector("text=How to cite")
    assert page.inner_text("header p").startswith("cut off")
    listed = opened(serving.address + "/")
    listed.wait_for_selector("text=✂ cut off")


def test_a_directory_that_goes_is_told_and_what_was_seen_stays(
    serving: Served, lab: Lab, tabs: Any
) -> None:
    lab.start(*script("steady", "runs/one"))
    page = tabs.new_page()  # which may complain here: what it asks for is gone
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{serving.address}/run/{serving.id('one')}")
    page.wait_for_selector("#step")
    before = steps(page)
    # While it is written: of one that was killed before, the page may have become the report.
    (lab.path / "runs" / "one").rename(lab.path / "away")
    page.wait_for_selector("text=the run's directory is gone")
    assert steps(page) >= before
    assert page.inner_text("h1") == "steady"
    page.close()


def test_twenty_tabs_of_live_runs_all_move(serving: Served, lab: Lab, tabs: Any) -> None:
    """A browser opens six connections to a server: a stream for each tab would stop the seventh."""
    for name in ("one", "two"):
        lab.start(*script("steady", f"runs/{name}"))
    ids = [serving.id("one"), serving.id("two")]
    pages = [tabs.new_page() for _ in range(20)]
    for number, page in enumerate(pages):
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{serving.address}/run/{ids[number % 2]}", wait_until="domcontentloaded")
    for page in pages:
        page.wait_for_selector("#step")
    before = [steps(page) for page in pages]
    for page, count in zip(pages, before, strict=True):
        eventually(partial(_is_past, page, count), "a step more")
    for page in pages:
        page.close()


def _is_past(page: Any, count: int) -> bool:
    return steps(page) > count


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Served]:
    simple_run(tmp_path / "runs" / "one", "one")
    server = Served(tmp_path / "runs", "--token", "correct-horse-battery")
    yield server
    assert server.stop(signal.SIGTERM) == ""
    assert server.process.returncode == 0


def test_with_a_token_the_printed_address_opens_and_no_other(
    locked: Served, opened: Callable[..., Any]
) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        locked.ask("/api/runs")
    page = opened(locked.whole)
    page.wait_for_url(locked.address + "/")
    expect_names(page, ["one"])
    assert "token" not in page.url


def test_misuse_is_one_line(lab: Lab) -> None:
    nowhere = f"{lab.path}/nowhere"
    said = f"erg: {nowhere} does not exist; erg serve takes a directory of runs\n"
    assert erg("serve", nowhere) == (1, "", said)
    said = "erg: the token has 5 characters; it needs 16\n"
    assert erg("serve", lab.path, "--token", "short") == (2, "", said)
    said = "erg: --host 'a..b' is neither a host name nor an address\n"
    assert erg("serve", lab.path, "--host", "a..b") == (2, "", said)
    done = lab.run(ERG, "serve", ".", "--host", "host.invalid")
    assert done.returncode == 2
    assert done.stderr.startswith(b"erg: can't listen on host.invalid port 0: ")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_every_page_is_accessible_and_as_wide_as_the_window(
    served: Served, opened: Callable[..., Any], width: int, dark: bool
) -> None:
    both = f"{served.id('slow')},{served.id('quick')}"
    bench = served.ask("/api/benches")["benches"][0]["id"]
    ledger = served.ask("/api/ledgers")["ledgers"][0]["id"]
    places = {
        "/": "#runs tbody .number",
        f"/compare?ids={both}": "#charts svg",
        f"/bench/{bench}": ".matrix td",
        f"/ledger/{ledger}": "td",
        "/ledgers": "li",
    }
    page = opened("about:blank", width=width, dark=dark)
    for address, wanted in places.items():
        page.goto(served.address + address)
        page.wait_for_selector("html[data-drawn=true]")
        assert page.locator(wanted).count(), address
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), address
        if address == "/":  # no figure is out of sight
            right = "Math.max(...edges.map((one) => one.getBoundingClientRect().right))"
            edges = "[...document.querySelectorAll('#runs tbody .number')]"
            assert page.evaluate(f"(() => {{ const edges = {edges}; return {right}; }})()") <= width
        found = axe_api.Axe().run(page).response["violations"]
        serious = [one["id"] for one in found if one["impact"] in ("serious", "critical")]
        assert page.evaluate("window.hacked") is None
        assert serious == [], (address, [node["html"] for v in found for node in v["nodes"]][:5])
