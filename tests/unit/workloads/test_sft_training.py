"""Trainings of the built-in model, to their row in the ledger, each value against a hand count."""

from __future__ import annotations

import csv
import gc
import json
import pkgutil
import re
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
import yaml

from ergmeter.compare.ledgers import read_ledger
from ergmeter.errors import PluginError, UsageError
from ergmeter.runlog.reader import Run
from ergmeter.sinks.shared.appended_file import LEDGER_COLUMNS
from ergmeter.workloads.sft import facts, ledger, tiny_model, training
from ergmeter.workloads.sft import training as sensors
from ergmeter.workloads.sft.config_file import load
from tests.models import models as kept_models

pytestmark = pytest.mark.frameworks

PAIRS = [
    ("Who keeps the bees?", "Anna keeps the bees, behind the mill."),
    ("When did the river freeze?", "In the second week of January, after the storm."),
    ("What is in the barn?", "Hay."),
    ("Why is the bell silent?", "Its rope was cut when the tower was mended."),
    ("Where does the road end?", "At the lake."),
    ("How old is the oak?", "Older than the house and younger than the hill it stands on."),
]
EPOCHS = 2
ROOT = Path(__file__).parents[3]
# As it was written before the whole training's tokens, carbon and cost were in it.
BEFORE_CARBON = Path(__file__).parents[2] / "data" / "sft_play" / "ledger_before_carbon.csv"
WORKERS = 2  # that make the batches; others train without


@pytest.fixture(autouse=True, scope="module")
def _nothing_copied() -> Iterator[None]:
    """Workers that are forked from here don't copy all that they look through for garbage."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept_models(tmp_path_factory)


Write = Callable[..., Path]


@pytest.fixture
def configuration(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """`configuration({"train": {...}})`: the path of a small one with these changes."""
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "pairs.jsonl"
    lines = [json.dumps({"prompt": p, "response": r}) + "\n" for p, r in PAIRS]
    data.write_text("".join(lines))
    (tmp_path / "held_out.jsonl").write_text("".join(lines[:3]))

    def write(changes: dict[str, Any] | None = None) -> Path:
        whole: dict[str, Any] = {
            "model": {"name": "builtin:tiny", "local_dir": str(models), "max_seq_len": 64},
            "tuning": {"backend": "torch", "lora": {"r": 4, "alpha": 8, "dropout": 0.0}},
            "train": {
                "batch_size": 2,
                "epochs": EPOCHS,
                "output_dir": "outputs/adapter",
                "logging_steps": 1,
            },
            "data": {"train_path": str(data)},
            "metrics": {"warmup_s": 0, "results_csv": "outputs/ledger.csv"},
        }
        for section, values in (changes or {}).items():
            if isinstance(values, dict):
                whole[section] = {**whole.get(section, {}), **values}
            else:
                whole[section] = values
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(whole))
        return path

    yield write
    torch.manual_seed(0)


def rows(path: str = "outputs/ledger.csv") -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


@cache
def tokenizer_of(models: Path, name: str = "builtin:tiny") -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model.saved_model(name, models))


# -- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, WORKERS])
def test_tokens_of_padded_pairs_are_those_of_the_text(
    configuration: Write, models: Path, workers: int
) -> None:
    config = load(
        configuration(
            {
                "train": {
                    "dataloader_workers": workers,
                    "evaluation_strategy": "steps",
                    "eval_steps": 2,
                },
                "data": {"train_path": "pairs.jsonl", "val_path": "held_out.jsonl"},
            }
        )
    )
    outcome = training.run(config)
    assert outcome.status == "finished", outcome.problem
    truth = EPOCHS * sum(_length(models, pair) for pair in PAIRS)
    assert float(rows()[0]["tokens_processed"]) == truth
    assert rows()[0]["steps"] == str(EPOCHS * 3)
    assert float(rows()[0]["eval_loss"]) > 0


def test_tokens_of_packed_rows_are_those_of_the_text(configuration: Write, models: Path) -> None:
    changes = {
        "train": {"dataloader_workers": WORKERS, "batch_size": 2},
        "data": {"train_path": "pairs.jsonl", "packing": True},
    }
    outcome = training.run(load(configuration(changes)))
    assert outcome.status == "finished", outcome.problem
    row = rows()[0]
    assert float(row["tokens_processed"]) == EPOCHS * sum(_length(models, p) for p in PAIRS)
    assert int(row["steps"]) < EPOCHS * len(PAIRS)  # several of them share a row
    assert row["packing"] == "true"


def test_tokens_of_continued_pre_training_are_those_of_its_blocks(
    configuration: Write, models: Path
) -> None:
    text = "\n".join(f"{question} {answer}" for question, answer in PAIRS)
    Path("tale.txt").write_text(text)
    Path("held_out.txt").write_text(text[: len(text) // 2])
    size = 16
    changes = {
        "task_mode": "cpt",
        "block_size": size,
        "train": {
            "dataloader_workers": WORKERS,
            "batch_size": 1,
            "evaluation_strategy": "epoch",
        },
        "data": {"train_path": "tale.txt", "val_path": "held_out.txt"},
    }
    outcome = training.run(load(configuration(changes)))
    assert outcome.status == "finished", outcome.problem
    whole = len(tokenizer_of(models)(text, add_special_tokens=False)["input_ids"]) + 1
    row = rows()[0]
    assert float(row["tokens_processed"]) == EPOCHS * (whole // size) * size
    assert (row["dataset"], row["seq_len"]) == ("cpt", str(size))


def test_tokens_of_seq2seq_are_those_of_encoder_and_decoder(
    configuration: Write, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_model, "_make", tiny_model.make)  # here: a process takes seconds
    changes = {
        "model": {"name": "builtin:tiny-seq2seq", "type": "seq2seq"},
        "train": {
            "dataloader_workers": WORKERS,
            "evaluation_strategy": "steps",
            "eval_steps": 2,
        },
        "data": {"train_path": "pairs.jsonl", "val_path": "held_out.jsonl"},
    }
    outcome = training.run(load(configuration(changes)))
    assert outcome.status == "finished", outcome.problem
    # The encoder's text has an end of its own beside the answer's.
    truth = EPOCHS * sum(_length(models, pair, "builtin:tiny-seq2seq") + 1 for pair in PAIRS)
    assert float(rows()[0]["tokens_processed"]) == truth


def _length(models: Path, pair: tuple[str, str], model: str = "builtin:tiny") -> int:
    """What the model is given of a pair, by the tokenizer alone: question, line, answer, end."""
    tokenizer = tokenizer_of(models, model)
    texts = (pair[0], "\n", pair[1])
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return sum(map(len, ids)) + 1


def test_a_row_holds_what_really_ran(configuration: Write) -> None:
    config = load(configuration({"train": {"optim": "adamw_torch"}}))
    outcome = training.run(config)
    row = rows()[0]
    assert list(row) == list(ledger.COLUMNS)
    assert list(row)[:22] == [
        *("model", "dataset", "backend", "optimizer", "batch_size", "grad_accum", "seq_len"),
        *("steps", "precision", "seed", "notes", "wall_s", "warmup_s", "tokens_processed"),
        *("tok_per_s", "energy_J", "avg_power_W", "peak_power_W", "J_per_token", "E10k_J"),
        *("vram_peak_MB", "vram_avg_MB"),
    ]
    assert list(row)[-4:] == [f"gpu_cost_{part}" for part in ("low", "high", "basis", "note")]
    described = ("model", "dataset", "backend", "batch_size", "grad_accum", "seq_len", "seed")
    assert [row[name] for name in described] == [
        "builtin:tiny",
        "sft",
        "torch",
        "2",
        "1",
        "64",
        "42",
    ]
    assert row["tok_per_s_basis"] == "measured"
    (entry,) = read_ledger(Path("outputs/ledger.csv"), argument="x").entries
    assert entry.figures["throughput.tokens_per_s"].note == row["tok_per_s_note"] != ""  # type: ignore[union-attr]
    assert row["optimizer"] == "torch.AdamW"
    assert (row["precision"], row["weights_dtype"]) == ("fp32", "fp32")
    assert row["kernels"] == "library"
    assert row["device"].endswith(" cores")  # which processor, not just that it is one
    assert row["torch"] == torch.__version__.partition("+")[0] or row["torch"] == torch.__version__
    assert row["notes"].startswith("lora_r=4_alpha=8; ")
    assert (row["status"], row["run"]) == ("finished", str(outcome.run))
    assert row["energy_J"] == row["J_per_token"] == row["E10k_J"] == ""
    assert "no energy_J: " in row["notes"]
    assert row["co2e_g"] == row["energy_cost"] == row["gpu_cost"] == ""
    assert "; no co2e_g: no grid intensity was given; no energy_cost: no price of" in row["notes"]
    window_s, tokens = float(row["window_s"]), float(row["window_tokens"])
    assert float(row["tok_per_s"]) == pytest.approx(tokens / window_s, rel=1e-9)
    assert Path("outputs/adapter/adapter_model.safetensors").exists()
    assert outcome.run is not None
    assert Run.open(outcome.run).workload["optimizer"] == "torch.AdamW"


def test_a_mixture_in_bf16_is_named_so_in_its_row(configuration: Write) -> None:
    sources = [{"path": name, "type": "sft", "weight": 1} for name in ("pairs.jsonl", "more.jsonl")]
    Path("more.jsonl").write_text(Path("pairs.jsonl").read_text().replace("Anna", "Bert"))
    changes = {
        "task_mode": "cpt_mixed", "datasets": sources, "data": {"train_path": None},
        "train": {"max_steps": 1, "bf16": True},
    }  # fmt: skip
    outcome = training.run(load(configuration(changes)))
    assert outcome.status == "finished", outcome.problem
    (row,) = rows()
    assert (row["dataset"], row["precision"], row["compute_dtype"]) == ("cpt_mixed", "bf16", "bf16")


def ran(
    script: str, *words: object, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[int, list[str], list[str]]:
    """A script of the guide in this process: its exit code, and the lines of both its outputs."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    said = capfd.readouterr()
    out, err = ([line.strip() for line in text.splitlines()] for text in (said.out, said.err))
    return int(ended.value.code or 0), out, err


def test_the_guides_batch_of_configurations_and_its_analysis(
    configuration: Write, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`for config in configs/run_*.yaml`: two small ones of a backend, so nothing is compared."""
    Path("configs").mkdir()
    for name, size in (("a", 1), ("b", 3)):
        changes = {
            "report": False, "train": {"batch_size": size},
            "metrics": {"results_csv": "outputs/energy_results.csv"},
        }  # fmt: skip
        configuration(changes).rename(f"configs/run_{name}.yaml")
    call = partial(ran, monkeypatch=monkeypatch, capfd=capfd)
    for path in sorted(Path("configs").glob("run_*.yaml")):
        code, out, _ = call("scripts/train.py", "--config", path)
        assert code == 0
        assert "[train] Energy logging enabled: 0.05s interval, 0s warmup" in out
        assert "[train] Energy logging stopped" in out
        assert "[train] Metrics saved to outputs/energy_results.csv" in out
    written = rows("outputs/energy_results.csv")
    steps = [(row["batch_size"], row["steps"]) for row in written]
    assert steps == [("1", str(EPOCHS * 6)), ("3", str(EPOCHS * 2))]
    assert {row["tokens_processed"] for row in written} == {written[0]["tokens_processed"]}
    code, out, _ = call("scripts/analyze_energy.py", "outputs/energy_results.csv")
    assert code == 0
    assert "One group: nothing to compare it with." in out


@pytest.mark.parametrize(
    ("backend", "code", "message"),
    [
        ("bnb", 2, "train.py: train.fp16 needs a GPU (gradients are scaled there); there is none:"),
        ("unsloth", 1, "train.py: tuning.backend unsloth: Unsloth is not installed here."),
    ],
)
def test_the_guides_two_trainings_are_one_line_where_they_cant_be(
    configuration: Write,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    backend: str,
    code: int,
    message: str,
) -> None:
    """`python scripts/train.py --config configs/run_bnb.yaml`, as shipped."""
    del configuration  # for its folder
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    path = ROOT / "configs" / f"run_{backend}.yaml"
    ended, _, err = ran("scripts/train.py", "--config", path, monkeypatch=monkeypatch, capfd=capfd)
    assert ended == code
    assert err[-1].startswith(message)
    assert not Path("outputs").exists()
    assert not Path("runs").exists()


def test_what_the_guide_names_is_where_the_page_has_it() -> None:
    page = (ROOT / "docs" / "from-sft-play.md").read_text()
    section = page.partition("## Files that the guide names\n")[2].partition("\n## ")[0]
    for theirs in ("metrics/nvml_utils.py", "metrics/token_counter.py", "train_with_metrics()"):
        assert f"| `{theirs}`" in section
    names = re.findall(r"`(ergmeter\.[\w.]+)`", section)
    assert len(names) == 4
    assert all(pkgutil.resolve_name(name) for name in names)
    # `pip install pynvml torch transformers` of the guide is `pip install '.[train]'`.
    required = "\n".join(requires("ergmeter") or ())
    assert re.search(r"^nvidia-ml-py\b[^;]*$", required, re.MULTILINE)
    for name in ("torch", "transformers"):
        assert re.search(rf"\b{name}\b.*; extra == .train.$", required, re.MULTILINE)


def test_without_energy_logging_there_is_a_training_and_no_row(configuration: Write) -> None:
    changes = {"train": {"max_steps": 1}, "metrics": {"enable_energy_logging": False}}
    outcome = training.run(load(configuration(changes)))
    assert (outcome.status, outcome.run, outcome.row) == ("finished", None, None)
    assert Path("outputs/adapter/adapter_model.safetensors").exists()
    assert not Path("outputs/ledger.csv").exists()
    assert not Path("runs").exists()


def test_four_bits_are_bitsandbytes_own(configuration: Write) -> None:
    changes = {
        "tuning": {"backend": "bnb", "mode": "qlora", "bits": 4, "lora": {"r": 4, "alpha": 8}},
        "train": {"optim": "adamw_bnb_8bit", "max_steps": 2},
    }
    outcome = training.run(load(configuration(changes)))
    assert outcome.status == "finished", outcome.problem
    row = rows()[0]
    assert row["optimizer"] == "bitsandbytes.AdamW 8bit"
    assert (row["bits"], row["weights_dtype"]) == ("4", "nf4")
    # Numbers, not the bytes that two of them share.
    unquantised = _parameters("builtin:tiny", load(configuration()))
    assert int(row["parameters"]) - int(row["trainable_parameters"]) == unquantised


def _parameters(name: str, config: Any) -> int:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(training.source(config))
    return sum(one.numel() for one in model.parameters())


def test_dora_and_full_train_what_they_say(configuration: Write) -> None:
    for mode in ("dora", "full"):
        config = load(configuration({"tuning": {"mode": mode}, "train": {"max_steps": 1}}))
        assert training.run(config).status == "finished"
    dora, full = rows()
    assert dora["tuning"] == "dora"
    assert full["trainable_parameters"] == full["parameters"]
    assert full["lora_r"] == ""
    assert "lora_r" not in full["notes"]


def test_tokens_processed_are_of_the_training_as_wall_s_and_rates_are_of_the_window(
    configuration: Write, models: Path
) -> None:
    """The warm-up is the first step: the second begins later than a tenth of a millisecond."""
    outcome = training.run(load(configuration({"metrics": {"warmup_s": 1e-4}})))
    row = rows()[0]
    every = EPOCHS * sum(_length(models, pair) for pair in PAIRS)
    assert outcome.run is not None
    counts = Run.open(outcome.run).steps()["tokens_real"]
    counts = counts[counts == counts]  # rows of other phases have none
    assert float(row["tokens_processed"]) == every == counts.sum()
    window = every - counts[0]
    assert (float(row["window_tokens"]), row["window_steps"]) == (window, str(EPOCHS * 3 - 1))
    rate = window / float(row["window_s"])
    assert float(row["tok_per_s"]) == pytest.approx(rate, rel=1e-9)
    (entry,) = read_ledger(Path("outputs/ledger.csv"), argument="x").entries
    assert entry.value("tokens.whole_run_total") == every
    assert entry.value("tokens.total") == window
    assert entry.value("throughput.tokens_per_s") == pytest.approx(rate, rel=1e-9)


def test_a_run_shorter_than_its_warm_up_has_no_steady_figures(
    configuration: Write, models: Path
) -> None:
    config = load(configuration({"metrics": {"warmup_s": 60}}))
    assert training.run(config).status == "finished"
    row = rows()[0]
    for name in ("window_tokens", "tok_per_s", "J_per_token", "window_s"):
        assert row[name] == "", name
    assert float(row["wall_s"]) > 0
    assert float(row["tokens_processed"]) == EPOCHS * sum(_length(models, p) for p in PAIRS)
    assert "no tok_per_s: " in row["notes"]


# -- ends -----------------------------------------------------------------------------------------


def test_an_error_while_a_step_is_ended_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """From a thread, whose process ends."""

    def full_disk(*_given: object, **_named: object) -> None:
        raise OSError("no space left")

    fit: Any = SimpleNamespace(_ended=full_disk, _finish=None)
    assert training._Fit._end_now(fit, True) == 1
    message = "[train] the training could not be ended properly: OSError: no space left\n"
    assert capsys.readouterr().err == message


def test_an_error_in_training_saves_the_adapters_and_leaves_a_row(
    configuration: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer

    whole, calls = Trainer.training_step, []

    def fails(self: Any, *given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the device is gone")
        return whole(self, *given, **named)

    monkeypatch.setattr(Trainer, "training_step", fails)
    outcome = training.run(load(configuration()))
    assert outcome.status == "failed"
    assert "at step 2: RuntimeError: the device is gone" in outcome.problem
    assert Path("outputs/adapter/adapter_model.safetensors").exists()
    assert "the device is gone" in Path("outputs/adapter/traceback.txt").read_text()
    row = rows()[0]
    assert (row["status"], row["steps"]) == ("failed", "2")
    assert "the device is gone" in row["notes"]


@pytest.mark.parametrize("version", ["0.1.0", "before carbon"])
def test_a_ledger_of_an_earlier_version_gets_rows_in_its_own_columns_and_meaning(
    tmp_path: Path, version: str
) -> None:
    """Their `tokens_processed` is the window's: a column does not change what it means."""
    path = tmp_path / "ledger.csv"
    lines = BEFORE_CARBON.read_text().splitlines()
    if version == "0.1.0":
        lines = [",".join((*LEDGER_COLUMNS, *ledger.MORE))]
    path.write_text("\n".join(lines) + "\n")
    cells = {
        **dict.fromkeys(ledger.COLUMNS),
        "model": "m",
        "run": "runs/x",
        "energy_J_note": "n",
        "status": "finished",
        "tokens_processed": 300,
        "tokens_processed_note": "whole",
        "window_tokens": 200,
        "tok_per_s": 20,
        "window_s": 10,
        "wall_s": 18,
        "window_tokens_note": "window",
        "co2e_g": 5,
    }
    ledger.check(path)  # before the training
    assert ledger.append_row(path, cells).problem == ""
    *before, row = list(csv.DictReader(path.read_text().splitlines()))
    assert [*row] == lines[0].split(",")
    assert (row["run"], row["tokens_processed"]) == ("runs/x", "200")
    assert row.get("tokens_processed_note", "window") == "window"
    entry = read_ledger(path, argument="x").entries[-1]
    assert entry.value("tokens.total") == 200
    assert entry.value("tokens.whole_run_total") is None
    assert entry.value("throughput.tokens_per_s") == 20
    for earlier in before:
        window = float(earlier["tok_per_s"]) * float(earlier["window_s"])
        assert float(earlier["tokens_processed"]) == pytest.approx(window, rel=1e-9)


def test_a_full_disk_at_the_ledger_puts_the_row_beside_it(configuration: Write) -> None:
    Path("outputs").mkdir()
    Path("outputs/ledger.csv").symlink_to("/dev/full")
    outcome = training.run(load(configuration({"train": {"max_steps": 1}})))
    assert outcome.saved
    assert outcome.written is not None
    assert "No space left on device" in outcome.written.problem
    assert outcome.written.path is not None
    assert outcome.written.path.parent == Path("outputs")
    assert rows(str(outcome.written.path))[0]["status"] == "finished"


def test_a_row_that_no_file_takes_is_printed(
    configuration: Write, erg: Callable[..., tuple[int, str, str]]
) -> None:
    path = configuration(
        {"train": {"max_steps": 1}, "metrics": {"results_csv": "pairs.jsonl/ledger.csv"}}
    )
    code, out, err = erg("train", "--config", path, "--no-report")
    assert code == 0, err
    assert "saved in outputs/adapter" in out
    printed = err[err.index("model,dataset,backend") :]
    assert next(csv.DictReader(printed.splitlines()))["status"] == "finished"


def test_a_loss_that_is_no_number_is_not_a_loss_of_nought(
    configuration: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer

    whole = Trainer.compute_loss

    def diverges(self: Any, *given: Any, **named: Any) -> Any:
        loss: Any = whole(self, *given, **named)
        return loss * float("nan")

    monkeypatch.setattr(Trainer, "compute_loss", diverges)
    outcome = training.run(load(configuration({"train": {"max_steps": 3}})))
    row = rows()[0]
    assert (outcome.status, row["status"], row["train_loss"]) == ("diverged", "diverged", "")
    assert "diverged" in row["notes"]


def test_a_failure_before_the_first_step_leaves_earlier_adapters(
    configuration: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer

    assert training.run(load(configuration({"train": {"max_steps": 1}}))).saved
    adapters = Path("outputs/adapter/adapter_model.safetensors")
    before = adapters.read_bytes()

    def fails(*_given: Any, **_named: Any) -> Any:
        raise RuntimeError("out of everything")

    monkeypatch.setattr(Trainer, "training_step", fails)
    outcome = training.run(load(configuration()))
    assert not outcome.saved
    assert "no step was done" in outcome.problem
    assert adapters.read_bytes() == before


def test_the_seed_decides_the_adapters(configuration: Write) -> None:
    losses = []
    for seed in (1, 1, 2):
        config = load(configuration({"seed": seed, "train": {"max_steps": 3}}))
        assert training.run(config).status == "finished"
        torch.rand(seed)  # whatever went on in between
        losses.append(rows()[-1]["train_loss"])
    assert losses[0] == losses[1] != losses[2]


def test_a_ledger_of_other_columns_is_refused_before_the_training(configuration: Write) -> None:
    theirs = Path("outputs/ledger.csv")
    theirs.parent.mkdir()
    theirs.write_text("model,backend\na,b\n")
    with pytest.raises(UsageError, match=r"results_csv: .* has other columns"):
        training.run(load(configuration({"train": {"max_steps": 1}})))
    assert theirs.read_text() == "model,backend\na,b\n"
    assert not Path("runs").exists()


def test_pages_without_a_gpu_are_refused(configuration: Write) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    changes = {
        "tuning": {"backend": "bnb", "mode": "qlora", "bits": 4},
        "train": {"optim": "paged_adamw_8bit"},
    }
    with pytest.raises(UsageError, match=r"needs a GPU.* without paging it is adamw_bnb_8bit"):
        training.run(load(configuration(changes)))


def test_resume_goes_on_from_the_checkpoint(configuration: Write) -> None:
    saving = {"train": {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}}
    assert training.run(load(configuration(saving))).status == "finished"
    again = {"train": {**saving["train"], "max_steps": 5, "resume": True}}
    outcome = training.run(load(configuration(again)))
    assert outcome.status == "finished", outcome.problem
    assert rows()[1]["steps"] == "5"
    assert outcome.run is not None
    index = Run.open(outcome.run).steps()["index"]
    assert list(index[index == index]) == [2, 3, 4]  # other phases have none


def test_resume_without_a_complete_checkpoint_is_refused(configuration: Write) -> None:
    Path("outputs/adapter/checkpoint-2").mkdir(parents=True)  # cut while it was written
    config = load(configuration({"train": {"resume": True}}))
    with pytest.raises(UsageError, match=r"outputs/adapter: no complete checkpoint; train\.save_s"):
        training.run(config)


def test_resume_passes_over_a_checkpoint_that_was_cut(configuration: Write) -> None:
    saving = {"train": {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}}
    assert training.run(load(configuration(saving))).status == "finished"
    Path("outputs/adapter/checkpoint-4/trainer_state.json").unlink()
    again = {"train": {**saving["train"], "save_strategy": "no", "resume": True}}
    outcome = training.run(load(configuration(again)))
    assert outcome.status == "finished", outcome.problem
    assert outcome.run is not None
    index = Run.open(outcome.run).steps()["index"]
    assert list(index[index == index]) == [2, 3]


@pytest.mark.parametrize("steps", [{"max_steps": 3}, {"max_steps": 2}, {"epochs": 1}])
def test_resume_with_no_step_left_is_refused(configuration: Write, steps: dict[str, int]) -> None:
    saving = {"train": {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}}
    assert training.run(load(configuration(saving))).status == "finished"
    config = load(configuration({"train": {**steps, "resume": True}}))
    with pytest.raises(UsageError, match=r"step 3 of [23] is done; give a larger train\.max_steps"):
        training.run(config)
    assert len(rows()) == 1


def test_a_signal_while_the_row_is_written_is_in_the_outcome(
    configuration: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A series would go on, if its training took no notice."""
    row = ledger.row

    def interrupted(*given: Any) -> dict[str, object]:
        signal.raise_signal(signal.SIGTERM)
        return row(*given)

    monkeypatch.setattr(ledger, "row", interrupted)
    outcome = training.run(load(configuration({"train": {"max_steps": 1}})))
    assert (outcome.status, outcome.signal) == ("finished", signal.SIGTERM)
    assert rows()[0]["status"] == "finished"


def test_early_stopping_stops(configuration: Write) -> None:
    changes = {
        "train": {
            "lr": 1e-9,  # nothing gets better
            "epochs": 50,
            "evaluation_strategy": "steps",
            "eval_steps": 1,
            "early_stopping_patience": 2,
        },
        "data": {"train_path": "pairs.jsonl", "val_path": "held_out.jsonl"},
    }
    outcome = training.run(load(configuration(changes)))
    assert outcome.status == "finished"
    assert int(rows()[0]["steps"]) < 150


# -- what is refused ------------------------------------------------------------------------------


def test_fp16_without_a_gpu_is_refused(configuration: Write) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match="fp16 needs a GPU"):
        training.run(load(configuration({"train": {"fp16": True}})))


def test_unsloth_is_not_replaced_by_something_else(configuration: Write) -> None:
    with pytest.raises(PluginError, match=r"`\./dev unsloth`"):
        training.run(load(configuration({"tuning": {"backend": "unsloth"}})))
    assert not Path("outputs/ledger.csv").exists()


def test_a_layer_there_is_not_is_named_with_those_there_are(configuration: Write) -> None:
    changes = {"tuning": {"lora": {"r": 4, "alpha": 8, "target_modules": ["q_prj"]}}}
    with pytest.raises(UsageError, match=r"no 'q_prj'; its linear layers are .*q_proj"):
        training.run(load(configuration(changes)))


def test_a_model_there_is_not_is_one_line(configuration: Write) -> None:
    with pytest.raises(UsageError, match=r"model\.name: there is no folder \./nowhere"):
        training.run(load(configuration({"model": {"name": "./nowhere", "local_dir": None}})))


# -- the three situations of the guide ------------------------------------------------------------


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose PCI bus has one NVIDIA device, beside one of another maker."""
    for slot, maker in (("00", "0x1af4"), ("01", "0x10de")):
        (tmp_path / "pci" / slot).mkdir(parents=True)
        (tmp_path / "pci" / slot / "vendor").write_text(f"{maker}\n")
    monkeypatch.setattr(sensors, "_PCI", tmp_path / "pci")
    return tmp_path / "pci" / "01" / "vendor"


def refusing(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def refuses() -> None:
        raise pynvml.NVMLError(error)

    monkeypatch.setattr(pynvml, "nvmlInit", refuses)


@pytest.mark.usefixtures("nvidia")
def test_no_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    said = str(sensors.warning())
    words = "[train] Warning: Could not import metrics: No module named 'pynvml'"
    assert said.startswith(words)
    assert "pip install nvidia-ml-py" in said


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "NVML initialization failed"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "NVML initialization failed"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "Insufficient permissions"),
    ],
)
@pytest.mark.usefixtures("nvidia")
def test_nvml_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, error: int, words: str) -> None:
    refusing(monkeypatch, error)
    said = str(sensors.warning())
    assert said.startswith(f"[train] Warning: Could not import metrics: {words}")
    assert "training goes on" in said


def test_without_an_nvidia_gpu_nvml_is_no_matter(
    nvidia: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time and tokens are measured all the same, and energy where RAPL or another has it."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    nvidia.write_text("0x8086\n")
    refusing(monkeypatch, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert sensors.warning() is None


# -- facts ----------------------------------------------------------------------------------------


def test_the_optimizer_is_the_class_that_steps() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))

    class Wrapped:
        def __init__(self, optimizer: object) -> None:
            self.optimizer = optimizer

    plain = torch.optim.AdamW([parameter])
    assert facts.optimizer_name(plain) == "torch.AdamW"
    assert facts.optimizer_name(Wrapped(plain)) == "torch.AdamW"
    assert facts.optimizer_name(torch.optim.SGD([parameter], fused=True)) == "torch.SGD fused"


def test_data_that_differ_have_other_digests() -> None:
    one = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}
    other = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}
    assert facts.data_sha256([one]) == facts.data_sha256([dict(one)])
    assert facts.data_sha256([one]) != facts.data_sha256([other])
