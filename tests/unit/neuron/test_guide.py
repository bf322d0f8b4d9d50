"""Every command line of the original's guide, with its own arguments, in both ways of counting.

Checked are the exit code, the files, every documented key of the JSON against a calculation by
hand, and the sections, tables and lines of the console.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ergmeter.cli.calculate.analyze import command
from ergmeter.compat.nki_llama import CONSOLE_SECTIONS, analyze_compat
from ergmeter.neuron import analysis as analysis_module
from ergmeter.neuron.analysis import AnalysisRequest, analyze
from ergmeter.neuron.score import SCORE, Baseline, Score
from ergmeter.records import Reading
from ergmeter.views.calculate.analyze import console_document
from tests.runs import printed
from tests.unit.neuron.graphs import config, one_dot, write

Erg = Callable[..., tuple[int, str, str]]
DATA = Path(__file__).parents[2] / "data"
YAML, LLAMA = DATA / "neuron" / "llama3_8b_sft.yaml", DATA / "configs" / "llama-3.1-8b.json"
SMALL = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 32000,
    "tie_word_embeddings": False,
}  # fmt: skip

EXAMPLE = (
    "--config /home/ubuntu/nki-llama/src/fine-tune/neuronx-distributed-training/examples/conf/"
    "hf_llama3_8B_SFT_config.yaml --model-config /home/ubuntu/nki-llama/src/fine-tune/configs/"
    "model-config/8B_config_llama3-1/config.json --log-file /home/ubuntu/nki-llama/logs/"
    "nki-llama_20250610_014432.log --compile-dir {} --throughput 2.1 --hw-backend trn1"
    " --calculate-score --per-file-scores --detailed --print-per-file"
    " --output benchmark_finetuning.json"
)
CACHE = "/home/ubuntu/neuron_cache"
MODULE = "neuronxcc-2.18.121.0+9e31e41a/MODULE_15329989265349737271+a65e371e"
BASIC = "--config training_config.yaml --model-config model_config.json"
ADVANCED = (
    f"{BASIC} --compile-dir {CACHE} --log-file training.log --batch-size 32 --seq-len 2048"
    " --throughput 150.5 --num-nodes 4 --hw-backend trn1 --calculate-score --per-file-scores"
    " --print-per-file --detailed --base-mfu 50.0 --base-throughput 100.0 --loss-improvement 1.2"
    " --convergence-rate 1.1 --output metrics_report.json"
)
WORKFLOW = "--config config.yaml --model-config model.json"
EVALUATION = f"{WORKFLOW} --log-file training.log --calculate-score --print-per-file"
COMPARATIVE = (
    f"{WORKFLOW} --calculate-score --base-mfu 45.0 --base-throughput 80.0 --loss-improvement 1.15"
)
DEBUGGING = f"{WORKFLOW} --print-per-file --per-file-scores --detailed"
LOG = "step_time: 1.234\nthroughput: 150.5\nseq/s: 150.5\nloss: 2.345\n"  # as the guide has it

DEFAULTS = {
    "--config": None, "--model-config": None, "--compile-dir": None, "--log-file": None,
    "--batch-size": None, "--seq-len": None, "--throughput": None, "--num-nodes": None,
    "--hw-backend": "trn1", "--output": None, "--detailed": False, "--print-per-file": False,
    "--calculate-score": False, "--per-file-scores": False, "--base-mfu": 50.0,
    "--base-throughput": 100.0, "--loss-improvement": 1.0, "--convergence-rate": 1.0,
}  # fmt: skip
COLUMNS = ("File Name", "Module", "HLO MACs", "NKI MACs", "NKI Ratio", "Score")
NO_RATE = "no throughput: pass --throughput, or --log-file"
PRESENT_FACTORS = (
    *("base_mfu", "base_throughput", "achieved_mfu", "achieved_throughput", "mfu_improvement"),
    *("throughput_improvement", "nki_flop_ratio", "loss_improvement", "convergence_rate"),
)


def tflop(fields: dict[str, Any], length: int, *, is_original: bool) -> float:
    """TFLOP of a sequence, by hand: forward, and twice that backward."""
    hidden, layers = fields["hidden_size"], fields["num_hidden_layers"]
    heads, vocabulary = fields["num_attention_heads"], fields["vocab_size"]
    of_keys = fields["num_key_value_heads"] * hidden // heads
    layer = 2 * hidden * (hidden + of_keys) + 3 * hidden * fields["intermediate_size"]
    tables = vocabulary * hidden * (2 if is_original else 1)  # the lookup too
    pairs = length**2 if is_original else length * (length + 1) / 2
    softmax = 6 * heads * length**2 if is_original else 0
    core = layers * (4 * hidden * pairs + softmax)
    return float(3 * (2 * (layers * layer + tables) * length + core) / 1e12)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the guide names, with /home/ubuntu below this directory.

    Two graphs: 105 multiply-adds beside a kernel of 45, and 6 without a kernel.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert analysis_module.DEFAULT_COMPILE_DIR == CACHE
    cache = Path(f"{tmp_path}{CACHE}")
    monkeypatch.setattr(analysis_module, "DEFAULT_COMPILE_DIR", str(cache))
    write(cache / MODULE, one_dot(3, 5, 7, config(45)))
    write(cache / "neuronxcc-2.18.121.0+9e31e41a" / "MODULE_77+00000000", one_dot(1, 2, 3))
    words = shlex.split(EXAMPLE.replace("/home", f"{tmp_path}/home"))
    for option, content in (
        ("--config", YAML.read_text()), ("--model-config", LLAMA.read_text()), ("--log-file", LOG)
    ):  # fmt: skip
        path = Path(words[words.index(option) + 1])
        path.parent.mkdir(parents=True)
        path.write_text(content)
    for name in ("training_config.yaml", "config.yaml"):
        Path(name).write_text(YAML.read_text())
    for name in ("model_config.json", "model.json"):
        Path(name).write_text(json.dumps(SMALL))
    Path("training.log").write_text(LOG * 12)
    return tmp_path


@pytest.fixture(params=[False, True], ids=["right", "compat"])
def is_original(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def guide(erg: Erg, job: Path, is_original: bool) -> Callable[..., tuple[str, dict[str, Any]]]:
    """`guide(line, output)`: what a command line of the guide prints, and its JSON."""

    def call(line: str, output: str = "training_metrics.json") -> tuple[str, dict[str, Any]]:
        words = shlex.split(line.replace("/home", f"{job}/home"))
        before = set(job.iterdir())
        code, out, err = erg("analyze", *words, *(["--compat"] if is_original else []))
        assert (code, err) == (0, "")
        assert {path.name for path in set(job.iterdir()) - before} - {"xdg"} == {output}
        assert out.rstrip().endswith(f"Metrics saved to: {output}")
        titles = [title for title in out.splitlines() if title in CONSOLE_SECTIONS.values()]
        listed = "--print-per-file" in words
        assert titles == [
            title for name, title in CONSOLE_SECTIONS.items() if name != "graphs" or listed
        ]
        return out, json.loads((job / output).read_text())

    return call


def score_lines(out: str) -> list[str]:
    """The lines of the section of the score."""
    text = out.partition("\nTraining Score Breakdown\n")[2]
    return text.partition("\n\n")[0].splitlines()


def test_every_documented_option_has_its_documented_default() -> None:
    values = command.make_context("analyze", []).params
    assert {name: values[name[2:].replace("-", "_")] for name in DEFAULTS} == DEFAULTS
    (backend,) = (option for option in command.params if option.name == "hw_backend")
    assert {"trn1", "trn2"} <= set(backend.type.choices)  # type: ignore[attr-defined]  # a Choice


@pytest.mark.parametrize("compile_dir", [CACHE, f"{CACHE}/{MODULE}"], ids=["cache", "module"])
def test_the_examples(
    guide: Callable[..., Any], job: Path, is_original: bool, compile_dir: str
) -> None:
    out, found = guide(EXAMPLE.format(compile_dir), "benchmark_finetuning.json")
    work = tflop(json.loads(LLAMA.read_text()), 4096, is_original=is_original)
    assert work == pytest.approx(224.0427 if is_original else 197.63, abs=5e-3)
    mfu = 100 * 2.1 * work / 3040
    assert mfu == pytest.approx(15.477 if is_original else 13.652, abs=5e-4)
    is_one = compile_dir != CACHE
    graphs, macs = (1, 150) if is_one else (2, 156)
    # The original's average and least leave out the graph without a kernel.
    average, least = (0.3, 0.3) if is_original or is_one else (0.15, 0.0)
    assert found["model_config"].endswith("/8B_config_llama3-1/config.json")
    assert found | {
        "batch_size": 64, "sequence_length": 4096, "num_nodes": 1, "hardware_backend": "trn1",
        "throughput_seq_per_sec": 2.1,
    } == found  # fmt: skip
    assert found["mfu_percent"] == pytest.approx(mfu)
    assert found["tflops_per_second"] == pytest.approx(work if is_original else 2.1 * work)
    summary = found["nki_analysis"]["summary"]
    assert (summary["total_files"], summary["successful_analyses"]) == (graphs, graphs)
    assert summary["overall_nki_ratio"] == pytest.approx(45 / macs)
    assert summary["average_nki_ratio"] == pytest.approx(average)
    assert (summary["min_nki_ratio"], summary["max_nki_ratio"]) == (least, 0.3)
    files = {each["hlo_macs"]: each for each in found["nki_analysis"]["per_file_metrics"]}
    assert list(files) == [150, 6][:graphs]
    assert files[150]["neuronxcc_version"] == "neuronxcc-2.18.121.0+9e31e41a"
    assert files[150]["module_name"] == "MODULE_15329989265349737271+a65e371e"
    without_nki = mfu / 50 * 2.1 / 100
    score = without_nki * (1 + 45 / macs)
    assert files[150]["training_score"]["score"] == pytest.approx(without_nki * 1.3)
    assert found["training_score"] == pytest.approx(score)
    factors = found["training_score_breakdown"]
    assert [factors[name] for name in PRESENT_FACTORS] == pytest.approx(
        [50.0, 100.0, mfu, 2.1, mfu / 50, 0.021, 45 / macs, 1.0, 1.0]
    )
    assert score_lines(out) == [
        f"MFU improvement: {mfu / 50:.4f} (50.00% → {mfu:.2f}%)",
        "Throughput improvement: 0.0210 (100.00 → 2.10 seq/s)",
        "Loss improvement: 1.0000",
        "Convergence rate improvement: 1.0000",
        f"NKI flop ratio: {45 / macs:.4f}",
        f"Final Training Score: {score:.4f}",
    ]
    header = next(line for line in out.splitlines() if line.startswith("File Name"))
    assert re.findall("|".join(COLUMNS), header) == list(COLUMNS)
    row = next(line for line in out.splitlines() if line.startswith("model.hlo_module.pb"))
    assert f"{without_nki * 1.3:.5g}" in row
    assert re.search(r" 150 .* 45 .*0\.3000 ", row)


def test_basic_usage_and_the_first_workflow(
    guide: Callable[..., Any], job: Path, is_original: bool
) -> None:
    for line in (BASIC, WORKFLOW):
        out, found = guide(line)
        assert "training_score" not in found
        assert "per_file_metrics" not in found["nki_analysis"]
        assert found["nki_analysis"]["summary"]["total_files"] == 2
        assert str(job / CACHE[1:]) in "".join(out.split())
        if is_original:
            mfu = 100 * 100 * tflop(SMALL, 4096, is_original=True) / 3040
            assert found["throughput_seq_per_sec"] == 100.0
            assert found["mfu_percent"] == pytest.approx(mfu)
            assert f"\nMFU: {mfu:.2f}%\n" in out
        else:
            assert found["mfu_percent"] is found["throughput_seq_per_sec"] is None
            assert found["missing"]["mfu_percent"] == NO_RATE
            assert f"\nMFU: - ({NO_RATE})\n" in out
        (job / "training_metrics.json").unlink()


def test_advanced_usage_with_all_features(guide: Callable[..., Any], is_original: bool) -> None:
    out, found = guide(ADVANCED, "metrics_report.json")
    work = tflop(SMALL, 2048, is_original=is_original)
    mfu = 100 * 150.5 * work / (4 * 3040)
    score = mfu / 50 * 1.505 * 1.2 * 1.1 * (1 + 45 / 156)
    assert found | {
        "model_config": "model_config.json", "batch_size": 32, "sequence_length": 2048,
        "num_nodes": 4, "hardware_backend": "trn1", "throughput_seq_per_sec": 150.5,
    } == found  # fmt: skip
    assert found["mfu_percent"] == pytest.approx(mfu)
    assert found["tflops_per_second"] == pytest.approx(work if is_original else 150.5 * work)
    assert found["throughput_tflops_per_node"] == pytest.approx(150.5 * work / 4)
    assert found["seq_per_second_per_node"] == 150.5 / 4
    assert found["time_per_batch_seconds"] == 32 / 150.5
    assert found["training_score"] == pytest.approx(score)
    assert found["nki_analysis"]["summary"]["average_score"] == pytest.approx(
        score / (1 + 45 / 156) * (1 + 0.3 / 2)
    )
    assert score_lines(out)[1:4] == [
        "Throughput improvement: 1.5050 (100.00 → 150.50 seq/s)",
        "Loss improvement: 1.2000",
        "Convergence rate improvement: 1.1000",
    ]
    assert score_lines(out)[5] == f"Final Training Score: {score:.4f}"


def section(out: str, title: str) -> dict[str, list[str]]:
    """A section of the console: each line's words by the first of them, up to two spaces."""
    text = out.partition(f"\n{title}\n")[2].partition("\n\n")[0]
    rows = (re.split(r" {2,}", line.strip()) for line in text.splitlines())
    return {label: words for label, *words in rows}


def test_the_summaries_of_the_console_have_what_was_asked_for_and_found(
    guide: Callable[..., Any], is_original: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guide's Configuration Summary and Summary Statistics, of its advanced command."""
    monkeypatch.setenv("COLUMNS", "300")
    out, found = guide(ADVANCED, "metrics_report.json")
    asked = section(out, CONSOLE_SECTIONS["inputs"])
    assert {name: asked[name][0] for name in ("model", "log", "nodes")} == {
        "model": "model_config.json", "log": "training.log", "nodes": "4",
    }  # fmt: skip
    assert [asked[f"sequences {each}"][0] for each in ("a step", "per second")] == ["32", "150.5"]
    assert asked["tokens a sequence"][0] == "2048"
    assert asked["compile cache"][0].endswith(CACHE)
    work, mfu = tflop(SMALL, 2048, is_original=is_original), found["mfu_percent"]
    summary = section(out, CONSOLE_SECTIONS["figures"])
    assert f"MFU: {mfu:.2f}%" in " ".join(summary)
    rate = work if is_original else 150.5 * work
    assert f"TFLOPs/second: {rate:.2f}" in summary
    assert {"Throughput: 150.50 seq/s", f"Throughput per node: {150.5 * work / 4:.2f} TFLOP/s"} <= (
        set(summary)
    )
    average, least = ("0.3000", "0.3000") if is_original else ("0.1500", "0.0000")
    graphs = section(out, CONSOLE_SECTIONS["nki"])
    labels = ("Files analyzed", "Overall NKI Ratio", "Average NKI Ratio", "Min NKI Ratio",
              "Max NKI Ratio", "Total HLO MACs", "Total NKI MACs")  # fmt: skip
    figures = ["2/2", f"{45 / 156:.4f}", average, least, "0.3000", "156", "45"]
    assert [graphs[label][0] for label in labels] == figures


def test_the_other_documented_hardware(guide: Callable[..., Any], is_original: bool) -> None:
    """trn2: by the original 16 chips of 667 TFLOP/s a node; here the 32 devices of the YAML."""
    out, found = guide(f"{BASIC} --throughput 20 --hw-backend trn2 --num-nodes 2")
    node = 10672 if is_original else 32 * 2 * 667 / 8
    mfu = 100 * 20 * tflop(SMALL, 4096, is_original=is_original) / (2 * node)
    assert (found["hardware_backend"], found["num_nodes"]) == ("trn2", 2)
    assert found["mfu_percent"] == pytest.approx(mfu)
    assert f"\nMFU: {mfu:.2f}%" in out


def test_advanced_usage_on_a_model_for_which_its_throughput_is_impossible(
    guide: Callable[..., Any], is_original: bool
) -> None:
    """118 % of four trn1.32xlarge, for an 8B model."""
    Path("model_config.json").write_text(LLAMA.read_text())
    out, found = guide(ADVANCED, "metrics_report.json")
    work = tflop(json.loads(LLAMA.read_text()), 2048, is_original=is_original)
    mfu = 100 * 150.5 * work / (4 * 3040)
    assert found["mfu_percent"] == pytest.approx(mfu)
    assert found["impossible"]["mfu_percent"].startswith("above 100 %: an input is wrong")
    improvement = f"{mfu / 50:.4f}" if is_original else "-"
    first, *_, last = score_lines(out)
    assert first == f"MFU improvement: {improvement} (50.00% → {mfu:.2f}% (impossible))"
    if is_original:
        score = mfu / 50 * 1.505 * 1.2 * 1.1 * (1 + 45 / 156)
        assert found["training_score"] == pytest.approx(score)
        why = found["impossible"]["training_score"]
        assert why == "computed from an MFU above 100 %: an input is wrong"
        assert last == f"Final Training Score: {score:.4f} (impossible: {why})"
    else:
        assert found["training_score"] is None
        assert found["missing"]["training_score"].startswith(f"MFU {mfu:.0f} % is impossible: ")
        assert last == f"Final Training Score: - ({found['missing']['training_score']})"


def test_the_workflow_of_a_full_evaluation_reads_the_documented_log(
    guide: Callable[..., Any], is_original: bool
) -> None:
    out, found = guide(EVALUATION)
    # The original does not read `throughput:` and `loss:`, and takes 100 sequences a second.
    rate = 100.0 if is_original else 150.5
    mfu = 100 * rate * tflop(SMALL, 4096, is_original=is_original) / 3040
    log = found["log_metrics"]
    assert log["step_times"]["average"] == pytest.approx(1.234)
    assert log["losses"]["average"] == (None if is_original else pytest.approx(2.345))
    assert log["throughput"]["average"] == (None if is_original else pytest.approx(150.5))
    assert found["throughput_seq_per_sec"] == pytest.approx(rate)
    assert found["mfu_percent"] == pytest.approx(mfu)
    score = mfu / 50 * rate / 100 * (1 + 45 / 156)
    assert found["training_score"] == pytest.approx(score)
    assert score_lines(out)[-1] == f"Final Training Score: {score:.4f}"
    assert "MODULE_15329989265349737271+a65e371e" in out


def test_the_workflow_of_a_comparison(guide: Callable[..., Any], is_original: bool) -> None:
    out, found = guide(COMPARATIVE)
    factors = found["training_score_breakdown"]
    given = [factors[name] for name in ("base_mfu", "base_throughput", "loss_improvement")]
    assert given == [45.0, 80.0, 1.15]
    if is_original:
        mfu = 100 * 100 * tflop(SMALL, 4096, is_original=True) / 3040
        assert found["training_score"] == pytest.approx(mfu / 45 * 1.25 * 1.15 * (1 + 45 / 156))
    else:
        assert found["training_score"] is None
        assert found["missing"]["training_score"] == NO_RATE
        assert score_lines(out)[0] == "MFU improvement: - (45.00% → -)"
        assert score_lines(out)[-1] == f"Final Training Score: - ({NO_RATE})"


def test_a_0_on_the_command_line_is_as_not_given_to_the_original_alone(erg: Erg, job: Path) -> None:
    options = ("--throughput", "0", "--batch-size", "0", "--seq-len", "0", "--calculate-score")
    words = (
        *shlex.split(WORKFLOW),
        *options,
        "--base-mfu",
        "0",
        "--base-throughput",
        "0",
        "--json",
    )
    code, out, _ = erg("analyze", *words, "--compat")
    assert code == 0
    found = json.loads(out)
    sizes = [found[name] for name in ("throughput_seq_per_sec", "batch_size", "sequence_length")]
    assert sizes == [100.0, 64, 4096]
    # The factor of a baseline of 0 is 1.
    assert found["training_score"] == pytest.approx(1 + 45 / 156)
    code, out, err = erg("analyze", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "must be a number above 0; got 0" in err


def test_the_workflow_of_debugging_nki(guide: Callable[..., Any], is_original: bool) -> None:
    out, found = guide(DEBUGGING)
    files = found["nki_analysis"]["per_file_metrics"]
    ratios = {file["hlo_macs"]: (file["nki_macs"], file["nki_ratio"]) for file in files}
    assert ratios == {150: (45, 0.3), 6: (0, 0.0)}
    assert "training_score" not in found
    if is_original:
        mfu = 100 * 100 * tflop(SMALL, 4096, is_original=True) / 3040
        scores = {file["hlo_macs"]: file["training_score"]["score"] for file in files}
        assert scores == pytest.approx({150: mfu / 50 * 1.3, 6: mfu / 50})
    else:
        assert found["missing"]["average_score"] == NO_RATE
        assert f"No score of a graph: {NO_RATE}." in out


@pytest.mark.parametrize("analyzed", [analyze, analyze_compat])
def test_the_documented_score_is_printed_as_documented(
    job: Path, analyzed: Callable[..., Any]
) -> None:
    """1.2 x 1.5 x 1.2 x 1.1 x 1.15."""
    request = AnalysisRequest("config.yaml", "model.json", throughput=2.1, calculate_score=True)
    result = analyzed(request, lambda *_: None)
    base = Baseline(50.0, 100.0, loss_improvement=1.2, convergence_rate=1.1)
    score = Score(base, mfu_percent=60.0, seq_per_s=150.0, nki_ratio=0.15)
    assert score.value == pytest.approx(2.7324)
    readings = result.readings | {SCORE: Reading(score.value or 0.0, "", "derived")}
    result = replace(result, score=score, readings=readings)
    text = printed(*console_document(result, per_file=False).parts)
    assert score_lines(text) == [
        "MFU improvement: 1.2000 (50.00% → 60.00%)",
        "Throughput improvement: 1.5000 (100.00 → 150.00 seq/s)",
        "Loss improvement: 1.2000",
        "Convergence rate improvement: 1.1000",
        "NKI flop ratio: 0.1500",
        "Final Training Score: 2.7324",
    ]


@pytest.mark.parametrize(
    ("line", "rate"),
    [("step_time: 1.234", 64 / 1.234), ("throughput: 150.5", 150.5), ("seq/s: 150.5", 150.5)],
)
def test_each_documented_line_of_a_log_is_enough(
    erg: Erg, job: Path, line: str, rate: float
) -> None:
    Path("training.log").write_text(f"{line}\nloss: 2.345\n" * 12)
    code, out, _ = erg("analyze", *shlex.split(WORKFLOW), "--log-file", "training.log", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["throughput_seq_per_sec"] == pytest.approx(rate)
    losses = found["log_metrics"]["losses"]
    assert (losses["average"], losses["count"]) == (pytest.approx(2.345), 12)


def test_troubleshooting_names_the_cause(erg: Erg, job: Path) -> None:
    words = ("analyze", *shlex.split(WORKFLOW), "--throughput", "20")

    def findings(*more: object) -> dict[str, str]:
        code, out, err = erg(*words, *more, "--json")
        assert code == 0, err
        return {each["about"]: each["text"] for each in json.loads(out)["findings"]}

    code, _, err = erg(*words, "--compile-dir", "elsewhere")
    assert code == 1
    assert err.startswith("erg: --compile-dir elsewhere does not exist; it is the cache that holds")
    (job / "empty").mkdir()
    assert findings("--compile-dir", "empty")["no_hlo"].startswith("no HLO found: looked in empty")
    write(job / "odd" / "MODULE_1+0", one_dot(3, 5, 7, b"no configuration"))
    text = "NKI ratio 0: 1 kernel call with a configuration that can't be read, in 1 of the graphs"
    assert findings("--compile-dir", "odd")["nki_ratio"] == text
    compat = findings("--compile-dir", "odd", "--compat")
    assert compat["nki_ratio"] == "1 kernel configuration can't be read: taken as 0"
    write(job / "plain" / "MODULE_1+0", one_dot(3, 5, 7))
    plain = findings("--compile-dir", "plain")
    assert plain["nki_ratio"].startswith("NKI ratio 0: no NKI kernel is called in 1 graph;")
    assert plain["low_mfu"]
