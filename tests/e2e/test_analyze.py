"""`erg analyze` on a whole example: a YAML, a config.json, a log and a small compile cache.

Known answer: Llama-3.1-8B, sequences of 4096, one trn1.32xlarge: 197.63 TFLOP a sequence as counted
by hand in docs/flops.md, 224.04 by the original. The cache holds two graphs: one with a product of
105 multiply-adds and a kernel of 1000, one whose product of 48 runs twice beside one of 105.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from ergmeter.compare.entry import read_side
from ergmeter.compat.nki_llama import CONSOLE_SECTIONS
from ergmeter.neuron.score import COMPARED
from ergmeter.records import Reading
from ergmeter.runlog.reader import Run
from tests.documented import sessions
from tests.e2e.conftest import ERG, PYTHON, Lab, erg
from tests.unit.neuron.graphs import Computation, config, module, one_dot, write
from tests.unit.neuron.test_agreement import megatron

DATA = Path(__file__).parents[1] / "data"
MODEL = DATA / "configs" / "llama-3.1-8b.json"
YAML = DATA / "neuron" / "llama3_8b_sft.yaml"
COMPILER = "neuronxcc-2.18.121.0+9e31e41a"
FIRST, SECOND = "MODULE_15329989265349737271+a65e371e", "MODULE_77+00000000"

# As an installed script does; a test environment need not have it beside its Python.
SCRIPT = (
    "import sys; from importlib.metadata import entry_points;"
    "(found,) = entry_points(group='console_scripts', name='calculate_training_metrics.py');"
    "sys.argv[0] = found.name; sys.exit(found.load()())"
)
GUIDE_PATH = DATA.parents[1] / "scripts" / "calculate_training_metrics.py"
WAYS = [(ERG, "analyze"), (PYTHON, "-c", SCRIPT), (PYTHON, GUIDE_PATH)]


def bar(step: int, elapsed_s: int, rate: float) -> str:
    minutes, seconds = divmod(elapsed_s, 60)
    return (
        f"Epoch 0:  {step}%|▍    | {step}/99 [{minutes:02d}:{seconds:02d}<58:44, v_num=8,"
        f" reduced_train_loss={7 - step / 10:.3f}, lr=2.73e-5, gradient_norm=8.600,"
        f" global_step={step}.000, consumed_samples={64 * step}.0, throughput={rate},"
        " throughput_peak=2.0]"
    )


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where counts are remembered, instead of the user's own cache."""
    return str(tmp_path_factory.mktemp("caches"))


@pytest.fixture
def example(lab: Lab, caches: str, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The files of a job: a compile of 600 s, then 20 steps of 64 sequences in 32 s each."""
    monkeypatch.setenv("XDG_CACHE_HOME", caches)
    called = Computation(2, "body", 10)
    called.dot(called.parameter(2, 4), called.parameter(4, 6), 2, 6)
    main = Computation(1)
    main.dot(main.parameter(3, 5), main.parameter(5, 7), 3, 7)
    main.call(2)
    main.call(2)
    cache = lab.path / "cache" / COMPILER
    write(cache / FIRST, one_dot(3, 5, 7, config(1000), config(0, name="rms_norm")))
    write(cache / SECOND, module(main, called))
    write(cache / SECOND, one_dot(9, 9, 9), name="wrapped_neff.hlo")
    write(cache / "MODULE_99+00000000", b"no module at all")
    lines = [f"Using a cached neff at {cache / FIRST}/model.neff"]
    lines += [bar(step, 600 + 32 * step, 0.5 if step == 1 else 2.0) for step in range(1, 21)]
    (lab.path / "train.log").write_text("\r".join(lines) + "\n")
    return lab


def analyze(lab: Lab, way: tuple[object, ...], *more: object, rc: int = 0) -> tuple[str, str]:
    common = ("--config", YAML, "--model-config", MODEL)
    done = lab.run(*way, *common, *more)
    assert done.returncode == rc, done.stderr.decode()
    return done.stdout.decode(), done.stderr.decode()


def written(lab: Lab, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((lab.path / name).read_text())
    return found


FULL = (
    "--compile-dir", "cache", "--log-file", "train.log", "--hw-backend", "trn1",
    "--calculate-score", "--per-file-scores", "--detailed", "--print-per-file",
    "--base-mfu", "10", "--base-throughput", "1", "--output", "out.json",
)  # fmt: skip
ORIGINAL_KEYS = [
    "model_config", "batch_size", "sequence_length", "num_nodes", "hardware_backend",
    "throughput_seq_per_sec", "mfu_percent", "tflops_per_second", "throughput_tflops_per_node",
    "seq_per_second_per_node", "time_per_batch_seconds", "nki_analysis", "log_metrics",
    "training_score", "training_score_breakdown",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=["erg", "script", "path"])
def test_the_example_comes_out_right(example: Lab, way: tuple[object, ...]) -> None:
    out, _ = analyze(example, way, *FULL)
    found = written(example, "out.json")
    assert list(found)[: len(ORIGINAL_KEYS)] == ORIGINAL_KEYS
    assert (found["batch_size"], found["sequence_length"]) == (64, 4096)
    assert found["throughput_seq_per_sec"] == pytest.approx(2.0)  # 64 in 32 s, the compile left out
    assert found["tflop_per_sequence"] == pytest.approx(197.63, abs=5e-3)
    assert found["tflops_per_second"] == pytest.approx(2 * 197.63, abs=1e-2)
    assert found["mfu_percent"] == pytest.approx(100 * 2 * 197.63 / 3040, rel=1e-4)
    assert found["conventions"]["neuron"]["mfu_percent"] == pytest.approx(14.74, abs=5e-3)
    nki = found["nki_analysis"]["summary"]
    assert (nki["total_files"], nki["successful_analyses"], nki["failed_analyses"]) == (3, 2, 1)
    assert nki["overall_nki_ratio"] == 1000 / (1105 + 201)
    assert nki["average_nki_ratio"] == 1000 / 1105 / 2
    assert (nki["min_nki_ratio"], nki["files_without_nki_macs"]) == (0.0, 1)
    factor = (100 * 2 * 197.63 / 3040 / 10) * 2
    assert found["training_score"] == pytest.approx(factor * (1 + 1000 / 1306), rel=1e-4)
    assert found["training_score_breakdown"]["score_offset"] == 1.0
    assert found["versions"]["neuronxcc"] == [COMPILER]
    assert found["compat"] is None
    assert found["missing"] == {}
    assert "\nMFU  13.00 %  12.98 to 13.02 %  reported\n   exact; " in out
    assert f"\nFinal Training Score: {found['training_score']:.4f}\n" in out


@pytest.mark.parametrize("way", WAYS, ids=["erg", "script", "path"])
def test_compat_gives_the_original_s_numbers_and_names_its_quirks(
    example: Lab, way: tuple[object, ...]
) -> None:
    out, _ = analyze(example, way, *FULL, "--compat")
    found = written(example, "out.json")
    assert list(found)[: len(ORIGINAL_KEYS)] == ORIGINAL_KEYS
    assert found["throughput_seq_per_sec"] == 1.25  # the mean of 0.5 and, once, 2.0
    assert found["tflops_per_second"] == pytest.approx(224.04, abs=5e-3)
    assert found["mfu_percent"] == pytest.approx(100 * 1.25 * 224.04 / 3040, rel=1e-4)
    nki = found["nki_analysis"]["summary"]
    assert (nki["total_files"], nki["successful_analyses"]) == (4, 3)  # the stub is one of them
    assert nki["overall_nki_ratio"] == 1000 / (1105 + 153 + 729)
    assert (nki["average_nki_ratio"], nki["min_nki_ratio"]) == (1000 / 1105, 1000 / 1105)
    assert found["log_metrics"]["throughput"] == {
        "average": 1.25, "min": 0.5, "max": 2.0, "count": 2
    }  # fmt: skip
    assert "3c877c4" in found["compat"]["version"]
    assert len(found["compat"]["quirks_kept"]) == 9
    assert "\nwork of a sequence  224.04 TFLOP" in out
    assert "tflops_per_second is TFLOP of one sequence" in out


def test_the_known_answer_in_both_modes(lab: Lab) -> None:
    out, _ = analyze(lab, WAYS[0], "--throughput", "2.1", "--json", "--compat")
    found = json.loads(out)
    assert found["mfu_percent"] == pytest.approx(15.477, abs=5e-4)
    assert found["tflops_per_second"] == pytest.approx(224.04, abs=5e-3)
    out, _ = analyze(lab, WAYS[0], "--throughput", "2.1", "--json")
    found = json.loads(out)
    assert found["mfu_percent"] == pytest.approx(13.652, abs=5e-4)
    theirs = found["original_count"]
    assert theirs["mfu_percent"] == pytest.approx(15.477, abs=5e-4)
    assert theirs["tflops_per_second"] == pytest.approx(470.5, abs=5e-2)
    why = theirs["over_exact_tflop_per_sequence"]
    assert sum(why.values()) == pytest.approx(224.04 - 197.63, abs=1e-2)
    assert not (lab.path / "training_metrics.json").exists()


@pytest.mark.parametrize("mode", [(), ("--compat",)], ids=["right", "compat"])
def test_the_sections_stand_in_the_original_s_order(
    example: Lab, monkeypatch: pytest.MonkeyPatch, mode: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    out, _ = analyze(example, WAYS[1], *FULL, *mode)
    titles = [
        "LOG FILE METRICS SUMMARY", "Calculating metrics with", "Per-file NKI analysis",
        "Training Score Breakdown", "TRAINING METRICS SUMMARY", "NKI Analysis Summary",
    ]  # fmt: skip
    assert list(CONSOLE_SECTIONS.values()) == titles
    lines = out.splitlines()
    assert [line for line in lines if line in titles] == titles
    assert lines[-1] == "Metrics saved to: out.json"
    labels = ("Files analyzed", "Overall NKI Ratio", "Average NKI Ratio", "Min NKI Ratio",
              "Max NKI Ratio", "Total HLO MACs", "Total NKI MACs")  # fmt: skip
    assert [label for line in lines for label in labels if line.startswith(label)] == [*labels]
    row = next(line for line in lines if line.startswith("model.hlo_modu")).split()
    assert (row[2], row[5:7]) == ("1,105", ["1,000", "0.9050"])
    failed = out.partition("graphs that can't be read\n")[2].splitlines()
    assert failed[0].strip() == "MODULE_99+00000000"
    assert "hlo" in failed[2].lower()


def test_graphs_are_listed_only_if_asked_for(example: Lab) -> None:
    out, _ = analyze(example, WAYS[0], *(word for word in FULL if word != "--print-per-file"))
    assert "Per-file NKI analysis" not in out
    assert FIRST not in out


@pytest.mark.parametrize("mode", [(), ("--compat",)], ids=["right", "compat"])
def test_a_score_of_each_graph_needs_no_overall_one(example: Lab, mode: tuple[str, ...]) -> None:
    arguments = [word for word in FULL if word != "--calculate-score"]
    analyze(example, WAYS[0], *arguments, *mode)
    found = written(example, "out.json")
    assert "training_score" not in found
    files = found["nki_analysis"]["per_file_metrics"]
    scores = {
        file["module_name"]: file["training_score"]["score"]
        for file in files
        if file["status"] == "success" and file["file_name"] != "wrapped_neff.hlo"
    }
    assert scores[FIRST] == pytest.approx(scores[SECOND] * (1 + 1000 / 1105))
    assert found["nki_analysis"]["summary"]["max_score"] == max(scores.values())
    if mode:
        assert any("--per-file-scores" in text for text in found["compat"]["not_kept"])


def test_what_was_not_counted_is_named_without_being_asked_for(example: Lab) -> None:
    out, _ = analyze(example, WAYS[0], "--compile-dir", "cache", "--output", "out.json")
    (failed,) = written(example, "out.json")["nki_analysis"]["failed"]
    assert failed["module_name"] == "MODULE_99+00000000"
    assert "damaged or not an HLO module" in failed["error"]
    said = " ".join(out.partition("Not counted:")[2].split())
    file = "MODULE_99+00000000/model.hlo_module.pb"
    assert f"1 graph that can't be read ({file}): damaged" in said
    assert "1 file left out: wrapped_neff.hlo, a stub around a compiled graph" in said


def test_sentences_fit_80_columns(example: Lab) -> None:
    out, _ = analyze(example, WAYS[0], *FULL)
    long = [line for line in out.splitlines() if len(line) > 80]
    assert [line for line in long if len(line.split()) > 1] == []  # others are paths, not broken


def test_a_graph_with_kernels_of_unknown_work_is_no_plain_0(
    example: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    write(example.path / "one" / "MODULE_5+0", one_dot(3, 5, 7, config(None)))
    write(example.path / "one" / "MODULE_6+0", one_dot(3, 5, 7))
    options = ("--compile-dir", "one", "--detailed", "--print-per-file", "--output", "out.json")
    out, _ = analyze(example, WAYS[0], *options)
    files = written(example, "out.json")["nki_analysis"]["per_file_metrics"]
    assert [file["is_lower_bound"] for file in files] == [True, False]
    rows = [line.split()[5:7] for line in out.splitlines() if " MODULE_" in line]
    assert rows == [["0", "0.0000*"], ["0", "0.0000"]]
    assert "\n- * a lower bound: kernels that do not state their MACs" in out


def test_a_score_of_a_lower_bound_is_a_lower_bound(
    example: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    write(example.path / "one" / "MODULE_5+0", one_dot(3, 5, 7, config(45), config(None)))
    write(example.path / "one" / "MODULE_6+0", one_dot(3, 5, 7))
    scores = ("--calculate-score", "--per-file-scores", "--detailed", "--print-per-file")
    options = ("--compile-dir", "one", "--throughput", "2", *scores, "--output", "out.json")
    out, _ = analyze(example, WAYS[0], *options)
    found = written(example, "out.json")
    assert found["training_score_breakdown"]["is_lower_bound"] is True
    assert found["nki_analysis"]["summary"]["overall_nki_ratio"] == 45 / 255
    files = found["nki_analysis"]["per_file_metrics"]
    assert [one["training_score"]["is_lower_bound"] for one in files] == [True, False]
    rows = [line.split() for line in out.splitlines() if " MODULE_" in line]
    assert [row[6].endswith("*") for row in rows if len(row) > 6] == [True, False]
    assert [row[-1].endswith("*") for row in rows[-2:]] == [True, False]
    said = " ".join(out.split())
    bound = "(a lower bound)"
    for text in (
        f"Overall NKI Ratio 0.1765 {bound}", f"NKI share 17.65 % {bound}",
        f"NKI flop ratio: 0.1765 {bound}", f"Final Training Score: 0.0061 {bound}",
    ):  # fmt: skip
        assert text in said, text
    assert re.search(r"Scores of the graphs: average [\d.]+, min [\d.]+, max [\d.]+ \(a l", said)
    write(example.path / "two" / "MODULE_6+0", one_dot(3, 5, 7, config(45)))
    options = ("--compile-dir", "two", "--throughput", "2", *scores, "--output", "out.json")
    assert "lower bound" not in analyze(example, WAYS[0], *options)[0]
    assert written(example, "out.json")["training_score_breakdown"]["is_lower_bound"] is False


def test_without_a_throughput_the_score_s_other_factors_are_shown(example: Lab) -> None:
    scores = ("--calculate-score", "--per-file-scores", "--detailed", "--print-per-file")
    given = ("--loss-improvement", "1.2", "--convergence-rate", "1.1", "--output", "out.json")
    out, _ = analyze(example, WAYS[0], "--compile-dir", "cache", *scores, *given)
    found = written(example, "out.json")
    parts = found["training_score_breakdown"]
    assert (parts["loss_improvement"], parts["convergence_rate"]) == (1.2, 1.1)
    assert parts["mfu_improvement"] is parts["score_without_nki"] is None
    assert parts["nki_factor"] == 1 + 1000 / 1306
    said = " ".join(out.split())
    for text in (
        "MFU improvement: - (50.00% → -)", "Throughput improvement: - (100.00 → - seq/s)",
        "Loss improvement: 1.2000", "Convergence rate improvement: 1.1000", "flop ratio: 0.7657",
    ):  # fmt: skip
        assert text in said
    why = "no throughput: pass --throughput, or --log-file"
    assert f"No score: {why}." in said
    assert f"No score of a graph: {why}." in said  # in place of a column of dashes
    assert "Score" not in next(line for line in out.splitlines() if "HLO MACs" in line)
    assert found["missing"]["average_score"] == why


def test_figures_on_the_console_are_rounded(lab: Lab) -> None:
    given = ("--throughput", "51.78311317793129", "--output", "out.json")
    out, _ = analyze(lab, WAYS[0], *given)
    assert "\nsequences per second  51.7831\n" in out
    assert "\nthroughput  51.783 sequences/s  -  reported\n" in out
    assert written(lab, "out.json")["throughput_seq_per_sec"] == 51.78311317793129
    out, _ = analyze(lab, WAYS[0], "--output", "out.json")
    assert "\nMFU  -  -  absent\n   no throughput: pass --throughput, or --log-file\n" in out


def test_a_loss_that_is_no_number_is_counted(example: Lab) -> None:
    log = example.path / "train.log"
    log.write_text(log.read_text().replace("reduced_train_loss=6.000", "reduced_train_loss=nan"))
    options = ("--log-file", "train.log", "--compile-dir", "cache", "--output", "out.json")
    out, _ = analyze(example, WAYS[0], *options)
    found = written(example, "out.json")["log_metrics"]
    assert (found["losses"]["count"], found["losses"]["not_finite"]) == (19, 1)
    assert (found["losses"]["first_not_finite_step"], found["losses"]["not_printed"]) == (10, 0)
    assert "\n- Not a number (nan or inf): 1 of 20 losses, first at step 10\n" in out
    assert "\n- Loss: 6.9 first, 5 last\n" in out
    modified = found["timestamps"]["file_modification"]
    assert modified.startswith("20")
    assert f"\n- File modified {modified}; its lines have no time\n" in out
    assert "   1216 sequences in 608 s by the progress bar\n" in out


def test_a_log_of_other_sequences_than_the_yaml_s_makes_the_figures(example: Lab) -> None:
    # 128 sequences of 2048 in 5 s a step; the YAML says 64 of 4096.
    head = ["  seq_length ......... 2048", "  global_batch_size .......... 128"]
    lines = [megatron(10 * step) for step in range(1, 9)]
    (example.path / "other.log").write_text("\n".join(head + lines) + "\n")
    out, _ = analyze(example, WAYS[0], "--log-file", "other.log", "--output", "a.json")
    found = written(example, "a.json")
    assert (found["sequence_length"], found["sequence_length_from"]) == (2048, "the log")
    assert (found["batch_size"], found["batch_size_from"]) == (128, "the log")
    assert found["time_per_batch_seconds"] == pytest.approx(5.0)
    assert "sequences a step  128\n   the log\ntokens a sequence  2048\n   the log\n" in out
    asked = ("--throughput", "25.6", "--seq-len", "2048", "--batch-size", "128", "--json")
    same = json.loads(analyze(example, WAYS[0], *asked)[0])
    assert found["mfu_percent"] == pytest.approx(same["mfu_percent"])
    assert (same["sequence_length_from"], same["batch_size_from"]) == ("--seq-len", "--batch-size")
    said = [one["text"] for one in found["findings"] if one["about"] == "log_disagrees"]
    assert len(said) == 2


def test_losses_that_are_all_nan_are_said(example: Lab) -> None:
    log = example.path / "train.log"
    log.write_text(re.sub(r"reduced_train_loss=[\d.]+", "reduced_train_loss=nan", log.read_text()))
    options = ("--log-file", "train.log", "--compile-dir", "cache", "--output", "out.json")
    out, _ = analyze(example, WAYS[0], *options)
    assert "\n- Not a number (nan or inf): 20 of 20 losses, first at step 1\n" in out
    assert written(example, "out.json")["log_metrics"]["losses"]["average"] is None


def test_graphs_are_chosen_by_the_log_and_weighted_by_their_runs(example: Lab) -> None:
    options = ("--compile-dir", "cache", "--throughput", "2", "--json")
    log = ("--log-file", "train.log", "--modules-from-log")
    found = json.loads(analyze(example, WAYS[0], *options, *log)[0])
    assert found["nki_analysis"]["summary"]["overall_nki_ratio"] == 1000 / 1105
    (example.path / "runs").write_text(f"{FIRST} 10\n{SECOND} 3\n")
    found = json.loads(analyze(example, WAYS[0], *options, "--graph-runs", "runs")[0])
    assert found["nki_analysis"]["summary"]["overall_nki_ratio"] == 10_000 / (11_050 + 603)
    assert found["nki_analysis"]["summary"]["weighting"] == "each graph as often as it ran"
    (example.path / "runs").write_text("MODULE_typo 10\n")
    found = json.loads(analyze(example, WAYS[0], *options, "--graph-runs", "runs")[0])
    assert found["nki_analysis"]["summary"]["overall_nki_ratio"] is None
    assert found["missing"]["overall_nki_ratio"] == "none of the graphs ran, by runs"
    texts = [one["text"] for one in found["findings"] if one["about"] == "graph_runs"]
    assert texts[0].startswith("2 of 2 graphs are not in runs: not counted, with 100 %")
    assert texts[1] == "1 module of runs is not among the graphs: MODULE_typo"


def test_lora_of_the_yaml_is_counted_as_lora(lab: Lab) -> None:
    lora = DATA / "neuron" / "llama3_8b_lora.yaml"
    out, _ = analyze(lab, WAYS[0], "--config", lora, "--throughput", "2.1", "--json")
    found = json.loads(out)
    # Adapters of rank 16 on q (4096 to 4096), k and v (4096 to 1024), in 32 layers.
    assert found["parameters_trained"] == 32 * 16 * (3 * 4096 + 4096 + 2 * 1024)
    assert found["lora"] == {"r": 16, "targets": ["q_proj", "k_proj", "v_proj"]}
    # A third less, but for the attention core, which is walked through both ways all the same.
    assert 0.66 < found["tflop_per_sequence"] / 197.63 < 0.72


def test_without_a_throughput_there_is_no_mfu_and_a_reason(lab: Lab) -> None:
    out, _ = analyze(lab, WAYS[0], "--json", "--calculate-score")
    found = json.loads(out)
    for key in ("mfu_percent", "throughput_seq_per_sec", "tflops_per_second", "training_score"):
        assert found[key] is None
        assert "--throughput" in found["missing"][key]
    assert found["tflop_per_sequence"] == pytest.approx(197.63, abs=5e-3)


def test_outputs_of_both_kinds_are_compared(example: Lab) -> None:
    for name, more in (("a.json", ()), ("b.json", ()), ("c.json", ("--compat",))):
        analyze(example, WAYS[0], "--throughput", "2.1", *more, "--output", name)
    done = example.run(ERG, "analyze", "--compare", "a.json", "b.json", "c.json", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["convention"] == "the original's"
    means = [group["metrics"]["mfu_percent"]["mean"] for group in found["groups"]]
    assert means == pytest.approx([15.477] * len(means), abs=5e-4)
    assert [len(group["outputs"]) for group in found["groups"]] == [2, 1]
    shown = example.run(ERG, "analyze", "--compare", "a.json", "b.json", "c.json").stdout.decode()
    shown = " ".join(shown.split())
    assert "counted_by=the original against counted_by=erg analyze (1 and 2 runs)" in shown
    assert example.run(ERG, "analyze", "--compare", "a.json").returncode == 2


def run_of(lab: Lab, name: str, *more: object) -> dict[str, Any]:
    """The JSON of an analysis that also made a run."""
    printed, _ = analyze(
        lab, WAYS[0], "--compile-dir", "cache", "--calculate-score", "--base-mfu", "10",
        "--base-throughput", "1", *more, "--json", "--run", name,
    )  # fmt: skip
    document: dict[str, Any] = json.loads(printed)
    return document


def report_of(run: Path, *options: str) -> dict[str, Any]:
    code, printed, error = erg("report", "--json", *options, run)
    assert code == 0, error
    report: dict[str, Any] = json.loads(printed)
    return report


def judged(lab: Lab, *words: object) -> dict[str, Any]:
    done = lab.run(ERG, "gate", *words, "--json")
    assert done.returncode == 0, done.stderr
    judgement: dict[str, Any] = json.loads(done.stdout)
    return judgement


@pytest.mark.parametrize("given", [(), ("--throughput", "3")])
def test_a_run_of_an_analysis_reports_the_same_metrics(
    example: Lab, given: tuple[str, ...]
) -> None:
    document = run_of(example, "run", "--log-file", "train.log", *given)
    report = report_of(example.path / "run")
    readings = report["readings"]
    rate = document["throughput_seq_per_sec"]
    assert rate == (3.0 if given else pytest.approx(2.0))
    assert readings["throughput.samples_per_s"]["value"] == rate
    assert readings["throughput.tokens_per_s"]["value"] == rate * document["sequence_length"]
    assert readings["analysis.score"]["value"] == document["training_score"]
    ratio = document["nki_analysis"]["summary"]["overall_nki_ratio"]
    assert readings["analysis.nki_frac"]["value"] == ratio == pytest.approx(1000 / 1306)
    assert 100 * readings["utilization.mfu_frac"]["value"] == document["mfu_percent"]
    assert 100 * readings["utilization.hfu_frac"]["value"] == document["hfu_percent"]
    for key, name, scale in (
        ("utilization.mfu_frac", "mfu_percent", 100),
        ("analysis.score", "training_score", 1),
        ("analysis.nki_frac", "overall_nki_ratio", 1),
    ):
        origin, reading = document["obtained"][name], readings[key]
        assert (reading["basis"], reading["note"]) == (origin["basis"], origin["note"])
        for end in ("low", "high"):
            assert (reading[end] is None) == (origin[end] is None)
            assert reading[end] is None or scale * reading[end] == origin[end]
    assert readings["steps.count"]["value"] == 19
    assert readings["training.loss"]["value"] == 5.0
    assert report["settings"]["num_devices"] == document["peak"]["cores"] == 32
    per_step = document["tflop_per_sequence"] * 1e12 * document["batch_size"]
    (flops, *_) = Run.open(example.path / "run").flops
    assert flops.model_per_step == pytest.approx(per_step)
    assert (flops.convention, flops.engine) == (document["convention"], "analytic")
    assert flops.tokens_per_step == document["batch_size"] * document["sequence_length"]


@pytest.mark.parametrize("given", [(), ("--throughput", "3")])
def test_the_entries_of_a_run_and_of_its_analysis_agree(
    example: Lab, given: tuple[str, ...]
) -> None:
    document = run_of(example, "run", "--log-file", "train.log", *given)
    (example.path / "run.json").write_text(json.dumps(document))
    of_run, of_file = (
        read_side(example.path / name, (*COMPARED, "throughput.tokens_per_s")).entries[0]
        for name in ("run", "run.json")
    )
    assert set(of_file.figures) == {*COMPARED, "throughput.tokens_per_s"}
    for key, result in of_file.figures.items():
        other = of_run.figures[key]
        assert isinstance(result, Reading)
        assert isinstance(other, Reading)
        for name in ("unit", "basis", "note", "impossible"):
            assert getattr(result, name) == getattr(other, name), (key, name)
        for name in ("value", "low", "high"):
            assert getattr(result, name) == pytest.approx(getattr(other, name)), (key, name)


def test_the_default_rules_judge_analyses(example: Lab) -> None:
    for name, given in (("slow", ()), ("fast", ("--throughput", "3"))):
        document = run_of(example, name, "--log-file", "train.log", *given)
        (example.path / f"{name}.json").write_text(json.dumps(document))
    for new in ("slow.json", "slow", "fast.json"):
        assert judged(example, new, "slow.json", "--noise", "1%")["state"] == "pass"
    worse = example.run(ERG, "gate", "slow.json", "fast.json", "--noise", "1%")
    assert worse.returncode == 1, worse.stdout
    assert "tokens_per_s -3% -33.3 % (12288 to 8192)" in " ".join(worse.stdout.decode().split())


def test_other_settings_are_computed_from_the_steps(example: Lab) -> None:
    document = run_of(example, "run", "--log-file", "train.log")
    readings = report_of(example.path / "run", "--dtype", "fp32")["readings"]
    in_fp32 = document["mfu_percent"] / 100 * 95 / 23.75
    assert readings["utilization.mfu_frac"]["value"] == pytest.approx(in_fp32)
    assert readings["throughput.samples_per_s"]["value"] == pytest.approx(2.0)
    assert readings["throughput.steps_per_s"]["value"] == pytest.approx(2.0 / 64)
    assert readings["analysis.score"]["value"] == document["training_score"]


def test_with_a_given_throughput_no_rate_is_computed_from_the_steps(example: Lab) -> None:
    document = run_of(example, "run", "--log-file", "train.log", "--throughput", "3")
    why = "the analysis used --throughput 3, not the times of the log's steps"
    length, batch = document["sequence_length"], document["batch_size"]
    flops, mfu = document["tflop_per_sequence"] * 1e12, document["mfu_percent"] / 100
    expected = {
        "throughput.samples_per_s": 3.0,
        "throughput.tokens_per_s": 3.0 * length,
        "throughput.steps_per_s": 3.0 / batch,
        "compute.model_flops_per_token": flops / length,
        "compute.model_flops_per_step": flops * batch,
        "compute.model_flops_per_s_per_device": flops * 3 / 32,
        **{f"utilization.{name}_frac": mfu for name in ("mfu", "hfu", "all_work")},
    }
    in_fp32 = {key: mfu * 4 for key, value in expected.items() if value == mfu}
    absent = {
        *("throughput.whole_run_tokens_per_s", "throughput.whole_run_samples_per_s"),
        *("throughput.tokens_per_s_per_device", "utilization.whole_run_mfu_frac", "time.step_s"),
    }
    run = example.path / "run"
    given_again = ("--model-config", str(MODEL), "--seq-len", str(length))
    for options, values in (
        ((), expected),
        (given_again, expected),
        (("--dtype", "fp32"), expected | in_fp32),
    ):
        readings = report_of(run, *options)["readings"]
        rates = {
            key: reading["value"]
            for key, reading in readings.items()
            if "value" in reading and re.match(r"(throughput|utilization|compute)\.", key)
        }
        assert rates == pytest.approx(values), options
        assert {key: readings[key]["missing"] for key in absent} == dict.fromkeys(absent, why)
    for options in ((), given_again):
        _, printed, _ = erg("explain", *options, run)
        shown = " ".join(printed.split())
        assert why in shown
        assert "MFU 1" not in shown
        assert "--model-config" not in shown
    (writer,) = Run.open(run).writers
    assert writer.header["no_speed"] == why


def test_runs_of_analyses_are_gated_and_compared(example: Lab) -> None:
    slow = run_of(example, "slow", "--log-file", "train.log")
    fast = run_of(example, "fast", "--log-file", "train.log", "--throughput", "3")
    (example.path / "slow.json").write_text(json.dumps(slow))
    rules = [
        word
        for name in ("tokens_per_s", "mfu", "analysis.score", "analysis.nki_frac")
        for word in ("--rule", f"{name} -3%")
    ]
    assert judged(example, "slow", "slow", *rules, "--noise", "1%")["state"] == "pass"
    assert judged(example, "fast", "slow", *rules, "--noise", "1%")["state"] == "pass"
    worse = example.run(ERG, "gate", "slow", "fast", *rules, "--noise", "1%")
    assert worse.returncode == 1, worse.stdout
    shown = " ".join(worse.stdout.decode().split())
    assert "worse slow tokens_per_s -3% -33.3 % (12288 to 8192)" in shown
    assert "worse slow analysis.score -3%" in shown
    of_file = ("slow", "slow.json", "--rule", "analysis.score -3%", "--noise", "1%")
    assert judged(example, *of_file)["state"] == "pass"
    done = example.run(
        ERG, "compare", "slow", "fast", "--metric", "analysis.score", "--metric", "mfu", "--json"
    )
    groups = json.loads(done.stdout)["groups"]
    scores = [group["means"]["analysis.score"]["value"] for group in groups]
    assert scores == pytest.approx([slow["training_score"], fast["training_score"]])


def test_of_a_log_of_several_runs_the_last_has_the_metrics(example: Lab) -> None:
    lines = [bar(step, 32 * step, 2.0) for step in (*range(1, 9), *range(1, 13))]
    (example.path / "two.log").write_text("\n".join(lines) + "\n")
    document = run_of(example, "run", "--log-file", "two.log")
    first, last = (report_of(example.path / name)["readings"] for name in ("run", "run-2"))
    assert "analysis.score" not in first
    assert last["analysis.score"]["value"] == document["training_score"]
    assert last["steps.count"]["value"] == 11


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--run needs --log-file"),
        (("--log-file", "-"), "- is not a file"),
        (("--log-file", "train.log", "--compat"), "leave out --compat"),
    ],
)
def test_a_run_needs_a_log_and_our_own_numbers(
    example: Lab, words: tuple[str, ...], message: str
) -> None:
    _, error = analyze(example, WAYS[0], *words, "--run", "run", rc=2)
    assert message in error
    assert not (example.path / "run").exists()


@pytest.mark.parametrize("way", WAYS[1:], ids=["script", "path"])
def test_the_script_calls_itself_by_its_own_name(lab: Lab, way: tuple[object, ...]) -> None:
    done = lab.run(*way, "--help")
    assert done.returncode == 0
    assert done.stdout.decode().startswith("Usage: calculate_training_metrics.py [OPTIONS]")
    for arguments, said in (
        (("--batch",), "calculate_training_metrics.py: No such option"),
        ((), "calculate_training_metrics.py: the training's YAML is needed"),
    ):
        done = lab.run(*way, *arguments)
        assert done.returncode == 2
        assert done.stderr.decode().startswith(said)
        assert "erg" not in done.stderr.decode()


# The guide's example as it stands there, the installation of the Neuron SDK and all.
GUIDE = r"""
source /opt/aws_neuronx_venv_pytorch_2_6/bin/activate

# Get report over all training jobs in neuron_cache directory
python /home/ubuntu/nki-llama/src/fine-tune/scripts/calculate_training_metrics.py \
      --config /home/ubuntu/nki-llama/src/fine-tune/neuronx-distributed-training/examples/conf/hf_llama3_8B_SFT_config.yaml \
      --model-config /home/ubuntu/nki-llama/src/fine-tune/configs/model-config/8B_config_llama3-1/config.json \
      --log-file /home/ubuntu/nki-llama/logs/nki-llama_20250610_014432.log \
      --compile-dir /home/ubuntu/neuron_cache \
      --throughput 2.1 \
      --hw-backend trn1 \
      --calculate-score \
      --per-file-scores \
      --detailed \
      --print-per-file \
      --output benchmark_finetuning.json
"""  # noqa: E501


def test_the_guide_s_example_is_pasted_into_a_shell(example: Lab) -> None:
    """With /home and /opt below the lab; of the rest of the guide's lines the arguments are in
    tests/unit/neuron/test_guide.py."""
    home = example.path / "home" / "ubuntu"
    fine_tune = home / "nki-llama" / "src" / "fine-tune"
    sdk = example.path / "opt" / "aws_neuronx_venv_pytorch_2_6" / "bin"
    for path, source in {
        fine_tune / "scripts" / GUIDE_PATH.name: GUIDE_PATH,
        fine_tune / "neuronx-distributed-training/examples/conf/hf_llama3_8B_SFT_config.yaml": YAML,
        fine_tune / "configs/model-config/8B_config_llama3-1/config.json": MODEL,
        home / "nki-llama/logs/nki-llama_20250610_014432.log": example.path / "train.log",
        home / "neuron_cache": example.path / "cache",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(source)
    sdk.mkdir(parents=True)
    (sdk / "activate").write_text(f"PATH={Path(PYTHON).parent}:$PATH\n")
    commands = GUIDE.replace("/home", f"{example.path}/home").replace("/opt", f"{example.path}/opt")
    done = example.run("bash", "-ec", commands)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(b"\nMetrics saved to: benchmark_finetuning.json\n")
    found = written(example, "benchmark_finetuning.json")
    assert found["mfu_percent"] == pytest.approx(13.652, abs=5e-4)
    assert found["nki_analysis"]["summary"]["total_files"] == 3
    score = found["mfu_percent"] / 50 * 2.1 / 100 * (1 + 1000 / 1306)
    assert found["training_score"] == pytest.approx(score)
    assert not (example.path / "training_metrics.json").exists()


def test_compat_says_where_it_looked_for_graphs(lab: Lab) -> None:
    options = ("--compat", "--throughput", "2", "--compile-dir", "nowhere", "--output", "a.json")
    out, _ = analyze(lab, WAYS[0], *options)
    assert re.search(r"\nFiles analyzed +0/0\n", out)
    said = " ".join(out.partition("Worth knowing:")[2].split())
    assert said.startswith("- no HLO found: looked in nowhere, which does not exist, for *.hlo_mod")
    (finding,) = written(lab, "a.json")["findings"]
    assert finding["about"] == "no_hlo"
    assert written(lab, "a.json")["nki_analysis"]["summary"]["total_files"] == 0


@pytest.mark.parametrize(
    ("page", "section", "output", "mfu_percent"),
    [
        ("tutorial-trainium", "1. The files", "metrics.json", 352 / 224 * 197.63 / 3040 * 100),
        ("from-nki-llama", "Two minutes: the same numbers", "outputs/theirs.json", 15.477),
    ],
)
def test_the_examples_of_the_docs_print_what_they_say(
    lab: Lab,
    caches: str,
    monkeypatch: pytest.MonkeyPatch,
    page: str,
    section: str,
    output: str,
    mfu_percent: float,
) -> None:
    """Pasted into a shell in a checkout, of which they need tests/data and scripts."""
    monkeypatch.setenv("XDG_CACHE_HOME", caches)
    monkeypatch.setenv("PATH", f"{Path(ERG).parent}:{os.environ['PATH']}")
    for folder in ("tests", "scripts"):
        (lab.path / folder).symlink_to(DATA.parents[1] / folder)
    _, _, text = (DATA.parents[1] / "docs" / f"{page}.md").read_text().partition(f"## {section}")
    for commands, lines in sessions(text):
        done = lab.run("bash", "-ec", commands)
        assert done.returncode == 0, done.stderr
        printed = [line.rstrip() for line in done.stdout.decode().splitlines()]
        assert [line for line in lines if line not in printed] == []
    assert written(lab, output)["mfu_percent"] == pytest.approx(mfu_percent, rel=1e-4)
