"""`erg analyze --html` in a real browser: against the JSON, sorted, attacked, read aloud.

The known answer is that of test_analyze.py. Its log is 19 steps of 64 sequences in 608 s by a bar
of whole seconds, so the pace is 2 sequences/s, known to one second in 608.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import erg
from tests.e2e.pages import EVIL, Opened, check_it_is_sound, each_way, needs_chromium
from tests.e2e.test_analyze import COMPILER, FIRST, MODEL, SECOND, YAML, bar
from tests.unit.neuron.graphs import Computation, config, module, one_dot, write

pytestmark = [needs_chromium, pytest.mark.browser]

SCORE = ("--calculate-score", "--per-file-scores", "--base-mfu", "20", "--base-throughput", "1")
NAMES = ["full", "compat", "bare", "many", "evil", "compared"]
MANY = 250
EVIL_FILE = "<img src=x onerror=window.hacked=1>|`a`.hlo_module.pb"


def analyzed(folder: Path, *arguments: object) -> None:
    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)
        here.setenv("XDG_CACHE_HOME", str(folder / "xdg"))
        code, _, said = erg("analyze", *arguments)
    assert code == 0, said


def make_job(folder: Path) -> None:
    """Two graphs and a file that is none; a log with a compile of 600 s; 250 graphs; an attack."""
    called = Computation(2, "body", 10)
    called.dot(called.parameter(2, 4), called.parameter(4, 6), 2, 6)
    main = Computation(1)
    main.dot(main.parameter(3, 5), main.parameter(5, 7), 3, 7)
    main.call(2)
    main.call(2)
    cache = folder / "cache" / COMPILER
    write(cache / FIRST, one_dot(3, 5, 7, config(1000), config(0, name="rms_norm")))
    write(cache / SECOND, module(main, called))
    write(cache / "MODULE_99+00000000", b"no module at all")
    lines = [bar(step, 600 + 32 * step, 0.5 if step == 1 else 2.0) for step in range(1, 21)]
    (folder / "train.log").write_text("\r".join(lines) + "\n")
    for size in range(1, MANY + 1):
        write(folder / "many" / f"MODULE_{size}+0", one_dot(1, 1, size))
    write(
        folder / "evil" / "MODULE_6+0",
        one_dot(3, 5, 7, config(45, name=EVIL), config(None, name=EVIL)),
        name=EVIL_FILE,
    )
    write(folder / "evil" / "MODULE_7+0", b"none", name=EVIL_FILE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job, and the pages of its analyses beside their documents."""
    folder = tmp_path_factory.mktemp("analyzed")
    make_job(folder)
    log, given = ("--log-file", "train.log"), ("--throughput", "2.1")
    for name, more in {
        "full": ("--compile-dir", "cache", *log, *SCORE),
        "compat": ("--compile-dir", "cache", *log, *SCORE, "--compat"),
        "bare": ("--compile-dir", "empty", "--calculate-score"),
        "many": ("--compile-dir", "many", *given),
        "evil": ("--compile-dir", "evil", *given, *SCORE),
    }.items():
        (folder / "empty").mkdir(exist_ok=True)
        files = ("--output", f"{name}.json", "--html", f"{name}.html", "--detailed")
        analyzed(folder, "--config", YAML, "--model-config", MODEL, *more, *files)
    for number, rate in enumerate((2.0, 2.1, 2.2, 3.0)):
        compiler = ("--compile-dir", "cache") if number == 3 else ("--compile-dir", "many")
        paced = ("--throughput", rate, "--output", f"{number}.json")
        analyzed(folder, "--config", YAML, "--model-config", MODEL, *compiler, *paced)
    outputs = [f"{number}.json" for number in range(4)]
    analyzed(folder, "--compare", *outputs, "--html", "compared.html")
    return folder


@pytest.fixture(scope="module")
def pages(folder: Path) -> dict[str, Path]:
    return {name: folder / f"{name}.html" for name in NAMES}


def document(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def figure(one: Opened, title: str) -> list[str]:
    """The cells of a metric: its value, its interval or a dash, its basis."""
    (found,) = (row[1:] for row in rows(one, "figure, value") if row[0] == title)
    return found


def rows(one: Opened, caption: str) -> list[list[str]]:
    """The cells of the table whose label begins so, in the order in which they are shown."""
    found: list[list[str]] = one.ask(
        f"""[...document.querySelectorAll(`[role=region][aria-label^="{caption}"] tbody tr`)]
              .map((row) => [...row.cells].map((cell) => cell.textContent))"""
    )
    return found


@pytest.mark.parametrize("name", NAMES)
@each_way
def test_a_page_is_sound(shown: Any, name: str, width: int, scheme: str) -> None:
    check_it_is_sound(shown(name, width=width, scheme=scheme))


def test_the_figures_are_those_of_the_document_with_basis_and_interval(
    shown: Any, folder: Path
) -> None:
    one, found = shown("full"), document(folder, "full")
    # 2 sequences/s by 608 s that are known to one of them; MFU moves with it.
    low, high = 2 * (1 - 1 / 608), 2 / (1 - 1 / 608)
    edges = f"{low:.4f} to {high:.4f} sequences/s"
    assert figure(one, "throughput")[:3] == ["2 sequences/s", edges, "derived"]
    mfu = 100 * 2 * 197.63 / 3040
    assert figure(one, "MFU")[0] == f"{found['mfu_percent']:.2f} %" == f"{mfu:.2f} %"
    assert figure(one, "MFU")[1] == f"{mfu * low / 2:.2f} to {mfu * high / 2:.2f} %"
    assert figure(one, "NKI share")[0] == f"{100 * 1000 / 1306:.2f} %"
    obtained = found["obtained"]
    assert obtained["throughput_seq_per_sec"]["low"] == pytest.approx(low)
    assert obtained["mfu_percent"]["high"] == pytest.approx(mfu * high / 2, rel=1e-4)
    # The pace is in the score twice.
    score = found["training_score"]
    assert obtained["training_score"]["low"] == pytest.approx(score * (low / 2) ** 2)


def test_the_factors_of_the_score_multiply_to_it_and_their_bars_add_up(
    shown: Any, folder: Path
) -> None:
    one, found = shown("full"), document(folder, "full")
    bars = one.ask(
        """(() => { const view = ergmeterViews.score_factors, x = view.scale('x');
             return view.data('points').map((row) => [row.name, row.v, x(row.v) - x(1)]); })()"""
    )
    *factors, score = bars
    by_hand = (2 * 197.63 / 3040 / 0.2) * 2 * 1 * 1 * (1 + 1000 / 1306)
    assert [name for name, *_ in factors] == [
        "MFU", "throughput", "loss", "convergence", "NKI share"
    ]  # fmt: skip
    assert math.prod(ratio for _, ratio, _ in factors) == pytest.approx(by_hand, rel=1e-4)
    assert score[1] == found["training_score"] == pytest.approx(by_hand, rel=1e-4)
    pixels = {name: length for name, _, length in bars}
    assert sum(length for _, _, length in factors) == pytest.approx(score[2], abs=0.01)
    assert pixels["MFU"] < 0 < pixels["throughput"]  # 13 % of a base of 20; 2 of a base of 1
    assert pixels["loss"] == pixels["convergence"] == 0
    assert one.ask("ergmeterViews.score_factors.scale('x').type") == "log"


def test_the_table_of_factors_has_value_base_ratio_and_product(shown: Any) -> None:
    found = {row[0]: row[1:] for row in rows(shown("full"), "factors of the score")}
    assert found["MFU"][:3] == ["13 %", "20 %", "0.6501"]
    assert found["throughput"] == ["2 sequences/s", "1 sequences/s", "2", "1.3002", "+1.000"]
    assert found["loss"][0] == "as given"
    assert found["NKI share"][1:3] == ["1 + share", "1.7657"]
    assert found["NKI share"][3] == found["score"][3]
    by_hand = (2 * 197.63 / 3040 / 0.2) * 2 * (1 + 1000 / 1306)
    assert float(found["score"][3]) == pytest.approx(by_hand, rel=1e-4)


def test_a_page_without_a_log_says_so(shown: Any) -> None:
    assert "No log was given" in shown("many").page.inner_text("#log")


def test_graphs_stand_by_their_work_with_share_and_kernels(shown: Any, folder: Path) -> None:
    found = rows(shown("full"), "compiled graphs, by work")
    assert [row[:7] for row in found] == [
        ["model.hlo_module.pb", FIRST, "1,105", "84.61 %", "1,000", "0.9050",
         "flash_fwd (1), rms_norm (1)"],
        ["model.hlo_module.pb", SECOND, "201", "15.39 %", "0", "0.0000", "none"],
    ]  # fmt: skip
    files = document(folder, "full")["nki_analysis"]["per_file_metrics"]
    scores = {file["module_name"]: file.get("training_score") for file in files}
    assert float(found[0][7]) == pytest.approx(scores[FIRST]["score"], abs=5e-5)
    (failed,) = rows(shown("full"), "graphs that can't be read")
    assert failed[0] == "MODULE_99+00000000"
    assert "damaged or not an HLO module" in failed[2]


def test_of_many_graphs_the_largest_are_shown_and_the_rest_is_counted(shown: Any) -> None:
    one = shown("many")
    found = rows(one, "compiled graphs, by work")
    assert [int(row[2]) for row in found] == list(range(250, 50, -1))
    # 1 + ... + 50 of 1 + ... + 250.
    share = 100 * 50 * 51 / (250 * 251)
    said = f"the other 50 with {share:.3f} % of the MACs are in the JSON of --detailed"
    assert said in one.page.inner_text("#graphs")


def test_a_head_sorts_by_value_by_mouse_and_by_keyboard(opened: Any) -> None:
    one = opened("many")
    caption = "compiled graphs, by work"
    head = one.page.locator("table.sortable th").nth(2)
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    head.get_by_role("button").press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert [int(row[2]) for row in rows(one, caption)] == list(range(51, 251))
    by_name = one.page.locator("table.sortable th").nth(1)
    by_name.get_by_role("button").click()
    assert head.get_attribute("aria-sort") is None
    assert rows(one, caption)[0][1] == "MODULE_100+0"


def test_what_is_absent_stands_with_its_reason(shown: Any) -> None:
    one = shown("bare")
    why = "no throughput: pass --throughput, or --log-file"
    absent = {row[0]: row[1] for row in rows(one, "why, what")}
    assert "mfu_percent" in absent[why]
    for title in ("MFU", "throughput", "work", "score"):
        assert figure(one, title)[:4] == ["-", "-", "absent", why]
    assert "no HLO found: looked in empty" in one.page.inner_text("#notes")
    bars = one.ask("ergmeterViews.score_factors.data('rows').map((row) => [row.name, row.said])")
    assert dict(bars)["MFU"] == dict(bars)["score"] == "not known"
    assert dict(bars)["loss"] == "x 1"


def test_inputs_have_their_source(shown: Any) -> None:
    found = {row[0]: row[1:] for row in rows(shown("full"), "input, value")}
    assert found["sequences a step"] == ["64", "the YAML"]
    assert found["compile cache"] == ["cache", "--compile-dir"]
    assert found["log"] == ["train.log", "--log-file, read as nxdt"]
    assert found["neuronxcc"][0] == COMPILER
    assert found["nodes"] == ["1", "the YAML"]
    assert found["type of products"][1] == "the YAML"


def test_outputs_side_by_side_with_their_spread(shown: Any) -> None:
    one = shown("compared")
    text = one.page.inner_text("body")
    assert "Not all groups are comparable" not in text
    assert "1.43x" in text  # 3.0 over the mean of 2.0, 2.1 and 2.2
    assert one.ask("Object.keys(ergmeterViews).length") > 0


def test_names_of_files_and_kernels_are_text(shown: Any) -> None:
    one = shown("evil")
    found = rows(one, "compiled graphs, by work")
    assert found[0][0] == EVIL_FILE
    assert EVIL in found[0][6]
    assert found[0][5].endswith("*")  # a kernel that states no MACs
    assert rows(one, "NKI kernels")[0][0] == EVIL
    for chart in one.page.query_selector_all(".chart svg"):
        box = chart.bounding_box()
        one.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert one.ask("window.hacked") is None
    assert one.page.query_selector("img") is None
    assert one.complaints == []


def test_a_score_of_a_lower_bound_is_said_to_be_one(shown: Any) -> None:
    one = shown("evil")
    assert figure(one, "score")[0].endswith("(a lower bound)")
    bars = dict(one.ask("ergmeterViews.score_factors.data('points').map((r) => [r.name, r.said])"))
    assert bars["NKI share"].startswith("at least x ")
    assert bars["score"].startswith("at least ")
    assert not bars["MFU"].startswith("at least")


def test_on_paper_it_is_light_and_everything_is_open(opened: Any) -> None:
    one = opened("full", scheme="dark")
    one.ask("dispatchEvent(new Event('beforeprint'))")
    one.page.emulate_media(media="print")
    assert one.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert one.ask("document.querySelectorAll('details:not([open])').length") == 0
