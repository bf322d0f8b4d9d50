"""The memory of a training before it begins: by the estimate of `erg estimate`, against what is
free; nothing that fits is refused."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from ergmeter.flops.estimate.estimate import CUBLAS_BYTES
from ergmeter.workloads.sft import memory_need, tiny_model, training
from ergmeter.workloads.sft.config_file import SftConfig, load
from ergmeter.workloads.sft.prepared_data import prepare_data
from ergmeter.workloads.sft.progress import TrainingWatch
from tests.models import models as kept_models

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).parents[3]
TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
LONGEST = 2048  # tokens that the tiny model has positions for
Write = Callable[..., SftConfig]


@pytest.fixture
def write(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Write]:
    """`write(train={...})`: a configuration of the tiny model with these changes."""
    monkeypatch.chdir(tmp_path)
    folder = str(kept_models(tmp_path_factory))

    def configuration(**changes: dict[str, Any]) -> SftConfig:
        settings: dict[str, Any] = {
            "model": {"name": "builtin:tiny", "local_dir": folder, "max_seq_len": 64},
            "tuning": {"lora": {"r": 4, "alpha": 8, "dropout": 0.0}},
            "train": {"batch_size": 2, "max_steps": 1},
            "metrics": {"enable_energy_logging": False},
        }
        for section, values in changes.items():
            settings[section] = {**settings.get(section, {}), **values}
        path = Path("run.yaml")
        path.write_text(yaml.safe_dump(settings))
        return load(path)

    yield configuration
    torch.manual_seed(0)


def model_of(name: str, *, within: Path = Path(), **fields: int) -> str:
    """The folder of a configuration, as a downloaded model has it, without its weights."""
    recipe = tiny_model.RECIPES[name]
    config = {"model_type": recipe["type"], **recipe["config"], **fields}
    folder = within / f"config-of-{name}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("tuning", "train", "options"),
    [
        (
            {"backend": "torch", "lora": {"r": 4, "alpha": 8, "dropout": 0.0}},
            {"bf16": True, "optim": "adamw_torch"},
            ("--dtype", "bf16", "--lora", f"r=4,targets={TARGETS}"),
        ),
        (
            {"backend": "torch", "lora": {"r": 4, "dropout": 0.1}},
            {"gradient_checkpointing": True, "optim": "sgd"},
            ("--dtype", "fp32", "--lora", f"r=4,targets={TARGETS}", "--lora-dropout",
             "--checkpointing", "full", "--optimizer", "sgd"),
        ),
        (
            {"backend": "bnb", "mode": "qlora", "lora": {"r": 4, "dropout": 0.0}},
            {"bf16": True, "optim": "adamw_bnb_8bit"},
            ("--dtype", "bf16", "--lora", f"r=4,targets={TARGETS}", "--quantize", "nf4-double",
             "--optimizer", "adamw-8bit"),
        ),
        ({"backend": "torch", "mode": "full"}, {"bf16": True}, ("--dtype", "mixed")),
    ],
    ids=["lora", "lora with dropout, checkpointing", "qlora", "full"],
)  # fmt: skip
def test_it_is_the_estimate_of_erg_estimate(
    write: Write,
    erg: Callable[..., tuple[int, str, str]],
    tuning: dict[str, Any],
    train: dict[str, Any],
    options: tuple[str, ...],
) -> None:
    config = write(tuning=tuning, train={"grad_accum": 2, "batch_size": 8, **train})
    model = model_of("1b")
    ours = memory_need.step_bytes(config, model, rows=8, read=1024, answered=1024)
    words = ("--seq-len", 1024, "--batch-size", 16, "--micro-batches", 2, "--attention", "flash")
    code, printed, problem = erg("estimate", f"{model}/config.json", *words, *options, "--json")
    assert code == 0, problem
    theirs = json.loads(printed)["readings"]["estimate.memory_peak_bytes"]["value"]
    assert ours == theirs - CUBLAS_BYTES


def test_no_more_is_estimated_than_was_measured(tmp_path: Path) -> None:
    """On an H200, what the shipped configurations had on the device at most.

    Before the ledger `guide.csv` they had no dropout, and all computed in bf16.
    """
    model = model_of("1b", within=tmp_path)
    earlier = {"tuning.lora.dropout": 0.0, "train.bf16": True, "train.fp16": False}
    for path in (ROOT / "tests/data").glob("h200_*/*.csv"):
        changes = {} if path.stem == "guide" else earlier
        for row in csv.DictReader(path.read_text().splitlines()):
            config = load(ROOT / f"configs/run_{row['backend']}.yaml", changes=changes)
            needed = memory_need.step_bytes(config, model, rows=8, read=1024, answered=1024)
            assert 2e9 < needed < 1e6 * float(row["vram_peak_MB"]), row


def test_a_model_too_large_to_load_is_refused_before_it_is_loaded(
    write: Write, erg: Callable[..., tuple[int, str, str]]
) -> None:
    """Ten million million weights; there is no file of them, and none is looked for."""
    folder = model_of("1b", hidden_size=2**18, intermediate_size=2**20, num_hidden_layers=8)
    write(model={"name": f"./{folder}", "local_dir": None}, tuning={"mode": "full"})
    code, printed, _ = erg("train", "--config", "run.yaml")
    (line,) = [line for line in printed.splitlines() if "stopped" in line]
    assert code == 1
    assert "the training needs" in line
    assert " is free: take tuning.mode lora, a smaller model, or --anyway)" in line
    assert line.endswith("nothing is saved")
    code, _, problem = erg("train", "--config", "run.yaml", "--anyway")
    assert code == 2
    assert "Warning: the training needs" in problem
    assert "model.name" in problem.splitlines()[-1]  # it went on, to load what is not there


def test_a_batch_too_large_is_refused_once_the_rows_are_read(write: Write) -> None:
    """Attention that keeps its probabilities, of as many rows as this machine has no memory for."""
    changes: dict[str, Any] = {
        "model": {"max_seq_len": LONGEST, "attn_implementation": "eager"},
        "data": {"train_path": "text.txt"},
        "train": {"batch_size": 10**6},
    }
    a_row = memory_need.step_bytes(write(**changes), model_of("tiny"), 1, LONGEST, LONGEST)
    rows = int(1.2 * psutil.virtual_memory().total / a_row)
    Path("text.txt").write_text("The bell rings at noon. " * (rows * LONGEST // 6))
    path = Path("run.yaml")
    path.write_text(path.read_text() + "task_mode: cpt\n")
    outcome = training.run(load(path))
    assert (outcome.status, outcome.saved, outcome.run) == ("stopped", False, None)
    assert f" x {LONGEST} tokens at a time), and " in outcome.problem


ROW = {"prompt": "Who keeps the bees?", "response": "Anna keeps the bees. " * 50}
FREE = ", and 1 B is free: take "
BATCH, LENGTH = "a smaller train.batch_size, ", "a shorter model.max_seq_len, "
QLORA = "tuning.mode qlora (tuning.backend bnb), "


@pytest.mark.parametrize(
    ("tuning", "rows", "advice"),
    [
        ({"mode": "full"}, 0, "tuning.mode lora, "),
        ({"mode": "lora"}, 0, QLORA),
        ({"mode": "dora"}, 0, QLORA),
        ({"backend": "bnb", "bits": 8}, 0, "tuning.mode qlora, "),
        ({"backend": "bnb", "mode": "qlora"}, 0, ""),
        ({"backend": "bnb", "mode": "qlora"}, 1, LENGTH),
        ({"mode": "lora"}, 4, BATCH + LENGTH + QLORA),
        ({"mode": "lora"}, 64, BATCH + LENGTH),  # the weights are a small part
    ],
)
def test_only_what_would_help_is_advised(
    write: Write, tuning: dict[str, Any], rows: int, advice: str
) -> None:
    """`rows` 0: before any are read."""
    Path("pairs.jsonl").write_text((json.dumps(ROW) + "\n") * 64)
    config = write(
        model={"max_seq_len": 512}, tuning=tuning, train={"batch_size": rows or 8},
        data={"train_path": "pairs.jsonl"},
    )  # fmt: skip
    data = prepare_data(config, tiny_model.tokenizer("tiny")) if rows else None
    watch = TrainingWatch()
    memory_need.check(config, watch, model_of("1b"), 1.0, data)
    assert watch.reason.partition(FREE)[2] == f"{advice}a smaller model, or --anyway"


def test_what_is_too_large_is_refused_before_the_model_is_loaded(
    write: Write, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the rows are read. There are no weights to load."""
    (made,) = kept_models(tmp_path_factory).glob("tiny-*[0-9a-f]")
    shutil.copytree(made, "model", ignore=shutil.ignore_patterns("*.safetensors"))
    changes = {"name": "./model", "local_dir": None}
    needed = memory_need.step_bytes(write(model=changes), "model", 2, 16, 16)
    monkeypatch.setattr(memory_need, "free_bytes", lambda: needed)  # of rows cut to 64 tokens
    outcome = training.run(write(model=changes))
    assert (outcome.status, outcome.run) == ("stopped", None)
    assert "(2 x 64 tokens at a time)" in outcome.problem


def test_a_batch_is_no_larger_than_the_rows_there_are(write: Write) -> None:
    lines = [json.dumps({"prompt": "Who?", "response": f"Anna {n}."}) for n in range(3)]
    Path("pairs.jsonl").write_text("\n".join(lines))
    config = write(train={"batch_size": 10**9}, data={"train_path": "pairs.jsonl"})
    assert training.run(config).status == "finished"


def test_the_shipped_configurations_for_a_processor_are_small(tmp_path: Path) -> None:
    paths = sorted((ROOT / "configs/cpu").glob("run_*.yaml"))
    assert len(paths) == 3
    model = model_of("tiny", within=tmp_path)
    for path in paths:
        config = load(path)
        width = config.model.max_seq_len
        needed = memory_need.step_bytes(config, model, config.train.batch_size, width, width)
        assert 0 < needed < 100e6, path


def test_unreadable_memory_refuses_nothing(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert memory_need.free_bytes() < float("inf")
    with monkeypatch.context() as sharded:  # as `accelerate launch` says it
        sharded.setenv("ACCELERATE_USE_FSDP", "true")
        assert memory_need.free_bytes() == float("inf")
    monkeypatch.setattr(psutil, "PROCFS_PATH", "/nowhere")
    assert memory_need.free_bytes() == float("inf")
    watch = TrainingWatch()
    config = write(tuning={"mode": "full"})
    memory_need.check(config, watch, model_of("1b", hidden_size=2**18), memory_need.free_bytes())
    assert watch.reason == ""


def test_a_model_that_no_estimate_reads_is_not_refused(write: Write) -> None:
    watch = TrainingWatch()
    for model in ("nobody/has-this", "nowhere"):
        memory_need.check(write(), watch, model, free=1.0)
    assert watch.reason == ""
