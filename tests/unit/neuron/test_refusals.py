"""Bad input to `erg analyze`: one line that names it, and the code that says whose fault it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ergmeter.cli.main import main
from tests.unit.neuron.graphs import one_dot, write

DATA = Path(__file__).parents[2] / "data"
YAML, MODEL = DATA / "neuron" / "llama3_8b_sft.yaml", DATA / "configs" / "llama-3.1-8b.json"
Analyze = Callable[..., tuple[int, str]]


@pytest.fixture
def analyze(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Analyze:
    """The command in an empty directory: its code, and what it says on the error stream."""
    monkeypatch.chdir(tmp_path)
    files = ("--config", str(YAML), "--model-config", str(MODEL))

    def call(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["analyze", *files, *arguments])
        return int(ended.value.code or 0), capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("arguments", "rc", "said"),
    [
        (("--config", "none.yaml"), 1, "none.yaml can't be read: No such file"),
        (
            ("--config", "."),
            1,
            ". can't be read: Is a directory; --config takes the training's YAML",
        ),
        (("--model-config", "none.json"), 1, "none.json: no such file"),
        (("--model-config", "none"), 1, "none: no such file"),
        (("--graph-runs", "none"), 1, "--graph-runs none can't be read: No such file"),
        (("--log-file", "none.log"), 1, "--log-file none.log: no such file"),
        (("--compile-dir", "none"), 1, "--compile-dir none does not exist"),
        (("--batch-size", "0"), 2, "--batch-size must be a number above 0; got 0"),
        (("--throughput", "nan"), 2, "--throughput must be a number above 0; got nan"),
        (("--devices", "64"), 2, "64 devices of 1 core a node (--devices) are more than the 32"),
        (("--devices", "64"), 2, "is it another --hw-backend?"),
        (("--hw-backend", "trn2", "--devices", "96", "--lnc", "2"), 2, "or --lnc 1?"),
        (("--base-mfu", "0"), 2, "--base-mfu must be a number above 0; got 0"),
        (("--base-throughput", "-5"), 2, "--base-throughput must be a number above 0; got -5"),
        (("--compile-dir", __file__), 1, "damaged or not an HLO module"),
        (("--compare", "a.json"), 2, "and --html; leave out --config"),
        (("--convention", "mine"), 2, "no convention 'mine'"),
        (("--hw-backend", "p5"), 2, "'p5' is not one of"),
        (("--output", "none/out.json"), 2, "--output none/out.json: the directory none does not"),
        (("--output", "."), 2, "--output .: is a directory; it takes a file"),
        (("--config", str(MODEL)), 1, "is a model's config.json; is it meant for --model-config?"),
        (("--model-config", str(YAML)), 1, "is the training's YAML; is it meant for --config?"),
        (("--model-config", __file__), 1, "--model-config "),
        (("--log-file", "."), 2, "--log-file .: is a directory"),
        (("--modules-from-log",), 2, "--modules-from-log needs --log-file"),
        (("--compat", "--hw-backend", "trn3"), 2, "--compat knows --hw-backend trn1 and trn2"),
        (("--compat", "--convention", "exact"), 2, "the original, which has no --convention"),
        (("--compat", "--module", "MODULE_1"), 2, "--module, --since or --until; leave it out"),
        (("--compat", "--log-file", "."), 2, "--log-file .: is a directory"),
        (("--compat", "--log-file", "-"), 2, "--log-file -: is no file"),
        (("--compat", "--model-config", "layers=2,hidden=8,heads=2"), 2, "--compat takes a config"),
        (("--compat", "--log-file", "none.log"), 1, "--log-file none.log: no such file"),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    analyze: Analyze, arguments: tuple[str, ...], rc: int, said: str
) -> None:
    code, err = analyze("--throughput", "2", *arguments)
    assert code == rc
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("key", ["data.global_batch_size", "data.seq_length"])
@pytest.mark.parametrize("mode", [(), ("--compat",)], ids=["right", "compat"])
def test_a_missing_key_of_the_yaml_is_named(
    analyze: Analyze, key: str, mode: tuple[str, ...]
) -> None:
    other = "seq_length" if key.endswith("size") else "global_batch_size"
    Path("job.yaml").write_text(f"data: {{{other}: 4096}}\n")
    code, err = analyze("--config", "job.yaml", *mode)
    assert code == 1
    assert f"job.yaml: the key {key} is missing" in err


def test_the_files_of_a_job_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, option in (
        (["--model-config", "a"], "--config"),
        (["--config", "a"], "--model"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["analyze", *arguments])
        assert ended.value.code == 2
        assert option in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["analyze", "stray.json"])
    assert "'stray.json' is unexpected: files are for --compare" in capsys.readouterr().err


def test_a_model_that_is_not_in_the_local_cache_is_misuse(
    analyze: Analyze, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "hub")
    for mode in ((), ("--compat",)):
        code, err = analyze("--model-config", "meta-llama/Llama-3.1-8B", *mode)
        assert code == 2
        assert "meta-llama/Llama-3.1-8B: no such file, and its config.json is not in the" in err
        assert err.count("\n") == 1


def test_a_damaged_model_in_the_local_cache_is_a_damaged_file(
    analyze: Analyze, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "hub")
    folder = Path("hub/models--meta-llama--Llama-3.1-8B")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc" / "config.json").write_text("{")
    code, err = analyze("--model-config", "meta-llama/Llama-3.1-8B")
    assert code == 1
    assert "snapshots/abc/config.json" in err


def test_a_log_without_steps_is_refused_without_advice_that_analyze_does_not_take(
    analyze: Analyze,
) -> None:
    Path("train.log").write_text("hello\nworld 3\n")
    code, err = analyze("--log-file", "train.log")
    assert code == 1
    assert "no training step recognised in 2 lines" in err
    assert "--format" not in err
    assert err.endswith("; leave out --log-file, and give --throughput if you know it\n")


def test_a_swapped_pair_is_recognised(analyze: Analyze) -> None:
    code, err = analyze("--config", str(MODEL), "--model-config", str(YAML))
    assert code == 1
    assert "is it meant for --config?" in err


@pytest.mark.parametrize(
    "choice",
    [("--module", "MODULE_9"), ("--since", "2999-01-01"), ("--modules-from-log",)],
)
def test_a_choice_without_a_match_is_refused_before_anything_is_printed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    choice: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "cache" / "MODULE_1+0", one_dot(3, 5, 7))
    Path("train.log").write_text("step_time: 30.0\nthroughput: 2.133\n" * 12)
    files = ["--config", str(YAML), "--model-config", str(MODEL), "--compile-dir", "cache"]
    with pytest.raises(SystemExit) as ended:
        main(["analyze", *files, "--log-file", "train.log", *choice])
    assert ended.value.code == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("erg: no graph of cache is chosen: 1 ")


def test_a_file_of_runs_is_read_before_anything_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs.json").write_text('{"MODULE_1": [1]}')
    files = ["--config", str(YAML), "--model-config", str(MODEL)]
    with pytest.raises(SystemExit) as ended:
        main(["analyze", *files, "--graph-runs", "runs.json"])
    assert ended.value.code == 1
    assert capsys.readouterr().out == ""
