"""What the page of `erg analyze` says of its figures: how each was obtained, and of what."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_analyze import bar
from tests.unit.neuron.graphs import config, one_dot, write

pytest.importorskip("vl_convert")

Erg = Callable[..., tuple[int, str, str]]
DATA = Path(__file__).parents[2] / "data"
YAML, MODEL = DATA / "neuron" / "llama3_8b_sft.yaml", DATA / "configs" / "llama-3.1-8b.json"
JOB = ("analyze", "--config", YAML, "--model-config", MODEL, "--compile-dir", "cache")
LOG = ("--log-file", "t.log")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of two graphs, and a log of 20 steps of which the first has no pace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    write(tmp_path / "cache" / "MODULE_1+0", one_dot(3, 5, 7, config(45)))
    write(tmp_path / "cache" / "MODULE_2+0", one_dot(1, 2, 3))
    lines = [bar(step, 600 + 32 * step, 0.5 if step == 1 else 2.0) for step in range(1, 21)]
    (tmp_path / "t.log").write_text("\r".join(lines) + "\n")
    return tmp_path


def said(erg: Erg, *words: object) -> str:
    """The words of a page, a space for each tag."""
    code, _, err = erg(*words, "--html", "a.html")
    assert (code, err[:8]) == (0, "a.html (")
    whole = re.sub(r"<script.*?</script>", "", Path("a.html").read_text(), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", whole)).split())


@pytest.mark.parametrize(
    ("words", "formula"),
    [
        (("--throughput", "7"), "as given by --throughput"),
        (("--throughput", "7", *LOG), "as given by --throughput"),
        (("--throughput", "7", "--compat"), "as given by --throughput"),
        ((*LOG, "--compat"), "mean of the values that the log prints, all of them"),
        (("--compat",), "assumed, as the original does"),
        (LOG, "1216 sequences in 608 s by the progress bar"),  # 19 x 64 in 19 x 32 s
    ],
)
def test_the_formula_of_the_throughput_is_how_it_was_obtained(
    erg: Erg, job: Path, words: tuple[str, ...], formula: str
) -> None:
    found = said(erg, *JOB, *words)
    figures = found.partition("Figures figure value")[2].partition(" How to cite")[0]
    assert re.search(rf"sequences/s .*? {re.escape(formula)} work", figures), found[:3000]


def test_a_pace_that_was_given_is_not_one_of_the_log_s(erg: Erg, job: Path) -> None:
    assert "sequences per second 7 7 sequences/s, as given" in said(
        erg, *JOB, *LOG, "--throughput", "7"
    )
    assert "sequences per second 2 t.log: 1216 sequences in 608 s" in said(erg, *JOB, *LOG)


def test_a_share_of_work_times_runs_is_called_so(erg: Erg, job: Path) -> None:
    (job / "runs.txt").write_text("MODULE_1+0 1\nMODULE_2+0 100\n")
    assert "of all MACs x runs" in said(erg, *JOB, "--graph-runs", "runs.txt")
    assert "of all MACs x runs" not in said(erg, *JOB)


def test_a_comparison_names_its_convention_and_lists_every_output(erg: Erg, job: Path) -> None:
    for name, rate in (("a", 22.1094999), ("b", 22.3)):
        erg(*JOB, "--throughput", rate, "--num-nodes", 4, "--output", f"{name}.json")
    found = said(erg, "analyze", "--compare", "a.json", "b.json")
    assert "MFU is under exact" in found
    assert "b.json" in found
    assert "22.3 samples/s" in found
    assert "ledger" not in found  # analyses have no curves and no losses
    assert "loss" not in found
    assert json.loads((job / "a.json").read_text())["throughput_seq_per_sec"] == 22.1094999


def test_groups_are_named_by_column_and_value(erg: Erg, job: Path) -> None:
    for name, nodes in (("a", 4), ("b", 2)):
        words = ("--throughput", 22.3, "--num-nodes", nodes, "--output", f"{name}.json")
        erg(*JOB, *words)
    group, other = (f"num_nodes={nodes}, peak_tflops_per_second={3040 * nodes}" for nodes in (4, 2))
    for form in ("text", "md"):
        code, out, _ = erg("analyze", "--compare", "a.json", "b.json", "--format", form)
        assert code == 0
        assert f"{other} against {group}" in " ".join(out.replace("\\", "").split())
    found = json.loads(erg("analyze", "--compare", "a.json", "b.json", "--json")[1])
    assert [each["name"] for each in found["groups"]] == ["4, 12160", "2, 6080"]


# 197.63 TFLOP a sequence x 151.5 / 3040 TFLOP/s.
ABOVE = ("--hw-backend", "trn1", "--throughput", "151.5", "--calculate-score", "--per-file-scores")


def test_an_mfu_of_985_percent_is_marked_and_no_score_is_made_from_it(erg: Erg, job: Path) -> None:
    code, out, _ = erg(*JOB, *ABOVE, "--output", "o.json")
    assert code == 0
    shown = " ".join(out.split())
    assert "MFU 984.91 % (impossible) - reported above 100 %: an input is wrong" in shown
    assert "MFU 984.9 % (impossible) 50 % - - -" in shown
    assert "No score: MFU 985 % is impossible: above 100 %: an input is wrong" in shown
    assert "By the original's count: MFU 1116.5" in shown
    assert re.search(r"MFU 1116\.\d+% \(impossible\)", out)
    found = json.loads(Path("o.json").read_text())
    assert found["mfu_percent"] == pytest.approx(100 * 197.63 * 151.5 / 3040, rel=1e-4)
    assert found["training_score"] is None
    assert found["missing"]["training_score"].startswith("MFU 985 % is impossible: above 100 %")
    assert set(found["impossible"]) == {
        *("mfu_percent", "hfu_percent", "original_count.mfu_percent"),
    }
    assert {one["mfu_percent"] for one in found["conventions"].values()} == {None}
    breakdown = found["training_score_breakdown"]
    assert breakdown["is_mfu_impossible"] is True
    assert breakdown["mfu_improvement"] is None
    assert "average_score" not in found["nki_analysis"]["summary"]


def test_an_impossible_mfu_is_marked_on_the_page_and_in_markdown(erg: Erg, job: Path) -> None:
    page = said(erg, *JOB, *ABOVE)
    assert "MFU 984.91 % (impossible) - reported above 100 %: an input is wrong" in page
    written = erg(*JOB, *ABOVE, "--md")[1]
    assert "| MFU | 984.91 % (impossible) |" in written


def test_an_impossible_output_is_marked_in_a_comparison_and_in_no_mean(erg: Erg, job: Path) -> None:
    erg(*JOB, *ABOVE, "--output", "new.json")
    erg(*JOB, *ABOVE[:2], "--throughput", "2", "--calculate-score", "--output", "good.json")
    # As an older version wrote it: the value, the score made from it, and no mark.
    old = json.loads(Path("new.json").read_text())
    del old["impossible"]
    Path("old.json").write_text(json.dumps(old | {"training_score": 12.5}))
    out = erg("analyze", "--compare", "good.json", "new.json", "old.json")[1]
    assert out.count("985 % (impossible)") >= 2
    assert "12.5 (impossible)" in out
    code, gated, _ = erg("gate", "new.json", "good.json", "--noise", "1%")
    assert code == 0  # by its throughput
    note = "- new.json: MFU 985 % is impossible: above 100 %: an input is wrong"
    assert note in gated
    assert "good.json: MFU" not in gated
    compared = erg("analyze", "--compare", "good.json", "new.json", "old.json", "--json")[1]
    groups = json.loads(compared)["groups"]
    rows = [row for group in groups for row in group["outputs"]]
    assert [row["mfu_percent"] is None for row in rows] == [False, True, True]
    assert rows[1]["impossible"]["mfu_percent"].startswith("above 100 %")
    assert rows[2]["impossible"]["training_score"].startswith("computed from an MFU above 100 %")


def test_compat_keeps_the_original_s_score_and_marks_both(erg: Erg, job: Path) -> None:
    # 224.04 TFLOP x 151.5 / 3040 is 1116.53 %; times 1.515 / 50 it is 33.83. NKI: 45 of 156 MACs.
    options = (*JOB, *ABOVE, "--compat", "--print-per-file", "--detailed", "--output", "o.json")
    code, out, _ = erg(*options)
    assert code == 0  # as of `erg mfu`
    why = "computed from an MFU above 100 %: an input is wrong"
    assert "\nMFU  1116.53 % (impossible)  -  " in out
    assert "\nscore  43.59 (impossible)  -  " in out
    assert "\nMFU improvement: 22.3306 (50.00% → 1116.53% (impossible))\n" in out
    assert f"\nFinal Training Score: 43.5897 (impossible: {why})\n" in out
    shown = " ".join(out.split())
    graphs = "Scores of the graphs: average 38.9054, min 33.8308, max 43.9801"
    assert f"{graphs} (impossible: {why})." in shown
    assert "MFU 1117 % (impossible) 50 % 22.331 (impossible) - -" in shown
    assert "NKI share 0.2885 1 + share 1.2885 - +0.366" in shown  # no product, nor a logarithm
    rows = [line for line in out.splitlines() if " MODULE_" in line]
    assert [row.split()[-2:] for row in rows] == [
        ["43.98", "(impossible)"], ["33.831", "(impossible)"],
    ]  # fmt: skip
    found = json.loads(Path("o.json").read_text())
    assert found["mfu_percent"] == pytest.approx(100 * 224.0426740 * 151.5 / 3040)
    assert found["training_score"] == pytest.approx(33.8308 * (1 + 45 / 156), rel=1e-5)
    of_graphs = ("average_score", "min_score", "max_score")
    assert found["impossible"] == {
        "mfu_percent": "above 100 %: an input is wrong",
        **dict.fromkeys(("training_score", *of_graphs), why),
    }
    files = found["nki_analysis"]["per_file_metrics"]
    assert [file["training_score"]["impossible"] for file in files] == [why, why]
    assert found["training_score_breakdown"]["impossible"] == why


def test_pages_mark_the_original_s_impossible_score_with_its_reason(erg: Erg, job: Path) -> None:
    why = "computed from an MFU above 100 %: an input is wrong"
    written = erg(*JOB, *ABOVE, "--compat", "--md")[1]
    (line,) = (line for line in written.splitlines() if line.startswith("| score | 43.59 (imp"))
    assert why in line
    assert f"(impossible: {why})" in written  # scores of the graphs
    page = said(erg, *JOB, *ABOVE, "--compat")
    assert f"score 43.59 (impossible) - reported {why}" in page
    assert f"The score is impossible: {why}." in page
    assert f"max 43.9801 (impossible: {why})." in page
    assert "score 43.59 raises" not in page


def test_a_possible_score_of_compat_has_no_mark(erg: Erg, job: Path) -> None:
    words = (*ABOVE, "--throughput", "2.1", "--compat", "--detailed", "--json")
    out = erg(*JOB, *words)[1]
    found = json.loads(out)
    assert found["impossible"] == {}
    assert found["training_score"] == pytest.approx(15.477 / 50 * 0.021 * (1 + 45 / 156), rel=1e-4)
    assert out.count('"impossible"') == 1
