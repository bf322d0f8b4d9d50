"""`erg analyze --format md`: what a pull request gets, and what can't get into it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ergmeter.views.render.markdown import escaped
from tests.unit.neuron.graphs import config, one_dot, write

Erg = Callable[..., tuple[int, str, str]]
DATA = Path(__file__).parents[2] / "data"
YAML, MODEL = DATA / "neuron" / "llama3_8b_sft.yaml", DATA / "configs" / "llama-3.1-8b.json"
JOB = ("analyze", "--config", YAML, "--model-config", MODEL)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with a cache of two graphs, and a memory of counts of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    write(tmp_path / "cache" / "MODULE_1+0", one_dot(3, 5, 7, config(45)))
    write(tmp_path / "cache" / "MODULE_2+0", one_dot(1, 2, 3))
    return tmp_path


def section(text: str, title: str) -> str:
    return text.partition(f"### {title}\n")[2].partition("\n### ")[0]


def cells(text: str, title: str) -> dict[str, list[str]]:
    """The rows of a part's tables, by their first cell."""
    lines = [line for line in section(text, title).splitlines() if line.startswith("| ")]
    split = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in lines]
    return {row[0]: row[1:] for row in split}


def test_the_known_answer_is_in_the_tables(erg: Erg, job: Path) -> None:
    options = ("--throughput", "2.1", "--compile-dir", "cache", "--calculate-score")
    code, out, err = erg(*JOB, *options, "--base-throughput", "1", "--format", "md")
    assert (code, err) == (0, "")
    assert out.startswith("## ")
    found = cells(out, "Figures")
    assert found["MFU"][0] == "13.65 %"  # 197.63 TFLOP x 2.1 / 3040
    assert found["throughput"][:3] == ["2.1 sequences/s", "-", "reported"]
    assert found["NKI share"][0] == "28.85 %"  # 45 of 3 x 5 x 7 + 45 and 6
    score = cells(out, "Score")
    assert score["throughput"][2] == "2.1"
    assert score["NKI share"][2] == "1.2885"
    product = 13.652 / 50 * 2.1 * (1 + 45 / 156)
    assert float(score["score"][2]) == pytest.approx(product, rel=1e-4)
    assert not (job / "training_metrics.json").exists()


def test_a_long_list_of_graphs_is_cut_and_says_so(erg: Erg, job: Path) -> None:
    for size in range(1, 25):
        write(job / "many" / f"MODULE_{size}+0", one_dot(1, 1, size))
    _, out, _ = erg(*JOB, "--throughput", "2", "--compile-dir", "many", "--format", "md")
    assert "MODULE_24+0" in out
    assert "MODULE_4+0" not in out
    # 1 + 2 + 3 + 4 of 1 + ... + 24 = 300.
    assert "the other 4 with 3.333 % of the MACs are in the JSON of --detailed" in out


def test_what_is_absent_has_its_reason(erg: Erg, job: Path) -> None:
    _, out, _ = erg(*JOB, "--compile-dir", "cache", "--format", "md")
    assert "no throughput: pass --throughput, or --log-file" in section(out, "Absent")
    assert cells(out, "Figures")["MFU"][:3] == ["-", "-", "absent"]
    assert "No overall score was requested" in section(out, "Score")


def test_graphs_that_are_asked_for_and_absent_are_said_to_be(erg: Erg, job: Path) -> None:
    (job / "empty").mkdir()
    _, out, _ = erg(*JOB, "--throughput", "2", "--compile-dir", "empty", "--print-per-file")
    assert "Per-file NKI analysis\nThere are no graphs." in out


def test_a_hostile_name_is_text(erg: Erg, job: Path) -> None:
    name = "a|b<img src=x>`c`[d](e)\n# f"
    write(job / "evil" / "MODULE_1+0", one_dot(3, 5, 7, config(45, name=name)))
    _, out, _ = erg(*JOB, "--throughput", "2", "--compile-dir", "evil", "--format", "md")
    assert "<img" not in out
    assert r"a\|b&lt;img src=x&gt;\`c\`\[d\](e) # f" in out
    heads = [line for line in out.splitlines() if line.startswith("| File Name")]
    rows = [line for line in out.splitlines() if "| MODULE_1+0" in line and "HLO" not in line]
    bars = {len(re.findall(r"(?<!\\)\|", line)) for line in (*heads, *rows)}
    assert len(bars) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("flash_fwd", "flash_fwd"),
        ("_private_", r"\_private\_"),
        ("50 %* ~ x", r"50 %\* \~ x"),
        ("# head", r"\# head"),
        ("a&lt;b", "a&amp;lt;b"),
        ("#5 is no head", "#5 is no head"),
        ("- item", r"\- item"),
        ("+ item", r"\+ item"),
        ("-3 %", "-3 %"),
        ("-", "-"),
        ("12. item", r"12\. item"),
        ("1.5 times", "1.5 times"),
        ("![x](y)", r"\!\[x\](y)"),
        ("see https://a.b/c", "see https:<!-- -->//a.b/c"),
        ("WWW.a.b", "WWW<!-- -->.a.b"),
        ("by @name or a@b.c", "by @<!-- -->name or a@<!-- -->b.c"),
        ("a\nb\x1b[0m", r"a b \[0m"),
    ],
)
def test_what_is_markup_is_escaped(text: str, said: str) -> None:
    assert escaped(text) == said


def test_outputs_side_by_side(erg: Erg, job: Path) -> None:
    for name, rate in (("a", 2.0), ("b", 2.2)):
        erg(*JOB, "--throughput", rate, "--compile-dir", "cache", "--output", f"{name}.json")
    code, out, err = erg("analyze", "--compare", "a.json", "b.json", "--format", "md")
    assert (code, err) == (0, "")
    found = cells(out, "Groups")
    # Of two runs, and the mean's interval.
    assert found["device=trn1"][:2] == ["2", "13.6 % ±83 %"]
    assert "| device=trn1 | b.json |" in out


def test_json_by_its_format_is_the_same_as_by_its_flag(erg: Erg, job: Path) -> None:
    options = ("--throughput", "2", "--compile-dir", "cache")
    assert erg(*JOB, *options, "--format", "json") == erg(*JOB, *options, "--json")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("none/a.html", "--html none/a.html: the directory none does not exist"),
        (".", "--html .: is a directory; it takes a file"),
    ],
)
def test_a_page_that_can_t_be_written_is_refused_before_the_work(
    erg: Erg, job: Path, path: str, said: str
) -> None:
    code, out, err = erg(*JOB, "--throughput", "2", "--html", path)
    assert (code, out) == (2, "")
    assert err == f"erg: {said}\n"


def test_a_page_leaves_a_document_on_stdout_alone(erg: Erg, job: Path) -> None:
    pytest.importorskip("vl_convert")
    options = ("--throughput", "2", "--compile-dir", "cache", "--json")
    _, alone, _ = erg(*JOB, *options)
    code, out, err = erg(*JOB, *options, "--html", "a.html")
    assert (code, out) == (0, alone)
    assert err.startswith("a.html (")


def test_md_is_the_same_as_its_format(erg: Erg, job: Path) -> None:
    options = ("--throughput", "2", "--compile-dir", "cache")
    assert erg(*JOB, *options, "--md") == erg(*JOB, *options, "--format", "md")
    code, out, err = erg(*JOB, *options, "--md", "--json")
    assert (code, out) == (2, "")
    assert "--json and --md are two forms; give one" in err
