"""`--html`: what is there is not lost to a page, and what can't be made is refused at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_compare import trained, written

Erg = Callable[..., tuple[int, str, str]]
DATA = Path(__file__).parents[1] / "data"
YAML, MODEL = DATA / "neuron" / "llama3_8b_sft.yaml", DATA / "configs" / "llama-3.1-8b.json"
JOB = ("analyze", "--config", YAML, "--model-config", MODEL, "--throughput", "2")
KEPT = "the file exists and is not an HTML page, so it is not replaced; name another"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger, a cell of a bench, a log and an earlier output."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "ledgers" / "energy_results.csv")
    (tmp_path / "bench" / "exp_0").mkdir(parents=True)
    (tmp_path / "bench" / "exp_0" / "results.json").write_text('{"train_runtime": 1.0}')
    (tmp_path / "t.log").write_text("step 1 loss 2.0\n")
    (tmp_path / "c.json").write_text(json.dumps({"mfu_percent": 1.0}))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ((*JOB, "--log-file", "t.log"), "t.log"),
        (("analyze", "--compare", "c.json", "c.json"), "c.json"),
        (("compare", "ledgers"), "ledgers/energy_results.csv"),
        (("bench", "report", "bench"), "bench/exp_0/results.json"),
        (("bench", "compare", "bench", "bench"), "bench/exp_0/results.json"),
    ],
)
def test_a_file_that_is_no_page_is_never_replaced(
    erg: Erg, folder: Path, words: tuple[object, ...], path: str
) -> None:
    before = Path(path).read_bytes()
    code, out, err = erg(*words, "--html", path)
    assert (code, out, err) == (2, "", f"erg: --html {path}: {KEPT}\n")
    assert Path(path).read_bytes() == before
    assert not (folder / "training_metrics.json").exists()


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ((*JOB, "--output", "./x.json"), "x.json"),
        (JOB, "training_metrics.json"),
        (("bench", "report", "bench", "--export", "e.csv"), "e.csv"),
        (("bench", "report", "bench", "--fms", "bench"), "bench/benchmarks.csv"),
    ],
)
def test_a_page_is_no_other_output(
    erg: Erg, folder: Path, words: tuple[object, ...], path: str
) -> None:
    code, out, err = erg(*words, "--html", path)
    assert (code, out) == (2, "")
    assert err == f"erg: --html {path} is another output as well; name another file\n"
    assert not (folder / path).exists()


def test_a_page_takes_the_place_of_a_page_and_of_nothing(erg: Erg, folder: Path) -> None:
    pytest.importorskip("vl_convert")
    for before in ("<!doctype html>\n<title>old</title>", ""):
        (folder / "page.html").write_text(before)
        code, _, err = erg("compare", "ledgers", "--html", "page.html")
        assert (code, err[:11]) == (0, "page.html (")
        assert "old" not in (folder / "page.html").read_text()[:200]


def test_the_page_of_a_run_does_not_replace_a_part_of_it(erg: Erg, folder: Path) -> None:
    trained(folder / "run", seconds=1.0)
    before = (folder / "run" / "run.json").read_text()
    code, out, err = erg("report", "run", "--html", "run/run.json")
    assert (code, out, err) == (2, "", f"erg: --html run/run.json: {KEPT}\n")
    assert (folder / "run" / "run.json").read_text() == before


def test_an_output_is_not_what_is_read(erg: Erg, folder: Path) -> None:
    code, _, err = erg(*JOB, "--log-file", "t.log", "--output", "t.log")
    assert (code, err) == (2, "erg: --output t.log is an input; name another file\n")
    assert (folder / "t.log").read_text() == "step 1 loss 2.0\n"


@pytest.mark.parametrize(
    "words",
    [("compare", "nowhere"), ("bench", "report", "nowhere"), ("bench", "compare", "nowhere", "x")],
)
def test_what_draws_is_looked_for_before_anything_is_read(
    erg: Erg, folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    code, out, err = erg(*words, "--html", "page.html")
    assert (code, out) == (1, "")
    assert "ergmeter[html]" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*JOB, "--json", "--format", "md"), "--json and --format md are two forms; give one"),
        (("compare", "ledgers", "--json", "--format", "csv"), "--json and --format csv are two"),
        (("compare", "ledgers", "--md", "--format", "table"), "--md and --format table are two"),
        (("compare", "ledgers", "--md", "--json"), "--json and --md are two forms; give one"),
        (
            (*JOB, "--format", "md", "--print-per-file"),
            "--print-per-file prints text, --format md only md",
        ),
        ((*JOB, "--format", "md", "--detailed"), "--detailed adds to the JSON: give --output"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(
    erg: Erg, folder: Path, words: tuple[object, ...], said: str
) -> None:
    code, out, err = erg(*words)
    assert (code, out) == (2, "")
    assert err.startswith(f"erg: {said}")
    assert err.count("\n") == 1
