"""The gallery in the docs: what its script makes today, and figures that the recording has."""

from __future__ import annotations

import csv
import gzip
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from ergmeter.compare.comparison import compare
from ergmeter.compare.pairing import CompareOptions
from ergmeter.compare.sources import read_entries
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Reading
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.e2e.conftest import PYTHON, TIMEOUT_S, environment
from tests.e2e.pages import Opened, check_it_is_sound, each_way, needs_chromium

pytestmark = pytest.mark.browser

pytest.importorskip("vl_convert")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GALLERY = DOCS / "gallery"
STEPS = ROOT / "tests" / "data" / "h200" / "h200_steps.csv.gz"
SVG = "{http://www.w3.org/2000/svg}"
WARMUP_STEPS = 2
MOST_BYTES, MOST_PICTURE_BYTES = 8_000_000, 300_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of docs with the gallery as it is made now."""
    docs = tmp_path_factory.mktemp("docs")
    done = subprocess.run(
        [
            PYTHON,
            str(ROOT / "scripts" / "gallery.py"),
            "-o",
            str(docs),
            "--runs",
            str(docs / "runs"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    return docs


@pytest.fixture(scope="module")
def pages() -> dict[str, Path]:
    return {one.stem: one for one in GALLERY.glob("*.html")}


def charts(page: str) -> Any:
    (held,) = re.findall(
        r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL
    )
    return json.loads(held)


def words(page: str) -> str:
    """A page without its scripts, its style and their hashes, and without our version."""
    text = re.sub(r"<(script|style)\b.*?</\1>|<meta http-equiv[^>]*>", "", page, flags=re.DOTALL)
    return re.sub(r"ergmeter \d[\w.+]*", "ergmeter", text)


def texts(svg: Path) -> list[str]:
    return ["".join(one.itertext()) for one in ET.parse(svg).iter(f"{SVG}text")]


def test_the_page_is_what_the_script_writes_now(made: Path) -> None:
    assert (made / "gallery.md").read_text() == (DOCS / "gallery.md").read_text(), (
        "run python scripts/gallery.py"
    )


def test_its_runs_tell_what_is_tuned(made: Path) -> None:
    found = read_entries([made / "runs" / "train-1b", made / "runs" / "lora-1b"])
    (pair,) = compare(found, CompareOptions()).pairs
    assert "what is tuned differs (full / lora)" in pair.fairness.refusals


def test_the_folder_has_what_the_script_makes_and_the_screenshots(made: Path) -> None:
    own = {one.name for one in (made / "gallery").iterdir()}
    there = {one.name for one in GALLERY.iterdir()}
    assert there - own == {"train-1b-light.png", "train-1b-dark.png"}
    assert own <= there


@pytest.mark.parametrize(
    "name", ["train-1b", "stalls", "lora-1b", "finetune-1b", "tiny-20m", "backends"]
)
def test_a_report_has_the_charts_and_the_words_it_has_now(made: Path, name: str) -> None:
    now, kept = ((folder / f"{name}.html").read_text() for folder in (made / "gallery", GALLERY))
    assert charts(now) == charts(kept)
    assert words(now) == words(kept)


@needs_chromium
@each_way
@pytest.mark.parametrize("name", ["finetune-1b", "backends"])
def test_a_page_is_sound(shown: Callable[..., Opened], name: str, width: int, scheme: str) -> None:
    one = shown(name, width=width, scheme=scheme)
    check_it_is_sound(one)
    cut = one.ask("[...document.querySelectorAll('.chart svg text')].map((t) => t.textContent)")
    assert [said for said in cut if said.endswith("…")] == []


@pytest.mark.parametrize("file", sorted(one.name for one in GALLERY.glob("*.svg")))
def test_a_plot_says_what_it_says_now(made: Path, file: str) -> None:
    assert texts(made / "gallery" / file) == texts(GALLERY / file)


def test_every_file_is_shown_and_every_link_leads_somewhere() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", (DOCS / "gallery.md").read_text())
    assert {DOCS / target for target in targets} == set(GALLERY.iterdir())


def test_it_is_small_enough_to_be_kept_with_the_source() -> None:
    sizes = {one.name: one.stat().st_size for one in GALLERY.iterdir()}
    assert sum(sizes.values()) < MOST_BYTES
    assert all(size < MOST_PICTURE_BYTES for name, size in sizes.items() if name.endswith(".png"))


@pytest.mark.parametrize(
    ("name", "phase"), [("train-1b", "full_bf16_1b"), ("lora-1b", "lora_bf16_1b")]
)
def test_tokens_per_second_in_the_text_are_those_of_the_recorded_steps(
    name: str, phase: str
) -> None:
    """Computed here from the recording's rows alone."""
    with gzip.open(STEPS, "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["phase"] == phase][WARMUP_STEPS:]
    span_s = (int(rows[-1]["end_ns"]) - int(rows[0]["start_ns"])) / 1e9
    rate = sum(int(row["tokens"]) for row in rows) / span_s
    text = (DOCS / "gallery.md").read_text()
    (said,) = re.findall(rf"{name}\.html\)\*\*.*?([\d,]+) tokens/s", text)
    assert float(said.replace(",", "")) == pytest.approx(rate, rel=1e-3)


def test_the_sleeps_in_the_text_are_as_long_as_the_program_slept() -> None:
    """Six times half a second."""
    (said,) = re.findall(r"([\d.]+) s of stalls", (DOCS / "gallery.md").read_text())
    assert float(said) == pytest.approx(6 * 0.5, rel=0.02)


def test_the_fine_tuning_has_the_figures_that_were_printed_when_it_was_recorded(
    made: Path,
) -> None:
    """The last line that `erg train` wrote: 1008297 tokens, 19375.8 tok/s, 28549.4 J.

    Evaluation and the checkpoint are in, as in SFT-Play's own table.
    """
    unbroken = Settings(window="unbroken")
    readings = summarize(Run.open(made / "runs" / "finetune-1b"), unbroken).readings
    printed = {
        "tokens.total": 1008297,
        "throughput.tokens_per_s": 19375.8,
        "energy.run_j": 28549.4,
        "energy.joules_per_token": 28549.4 / 1008297,
    }
    for key, said in printed.items():
        found = readings[key]
        assert isinstance(found, Reading)
        assert found.value == pytest.approx(said, rel=2e-4), key
