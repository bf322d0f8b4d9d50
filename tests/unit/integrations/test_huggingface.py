"""What can be said of the callback before a Trainer calls it. Trainings are in tests/e2e."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ergmeter import Meter
from ergmeter.errors import UsageError
from ergmeter.metrics.definitions.tokens import reported_counts
from ergmeter.metrics.evidence.ranks import shared_tokens_note
from ergmeter.metrics.summarize import evidence_of
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.frameworks

transformers = pytest.importorskip("transformers")
huggingface = pytest.importorskip("ergmeter.integrations.huggingface")

STATE = {"global_step": 0, "logging_steps": 1}
ARGUMENTS = {"logging_strategy": "steps", "bf16": True, "fp16": False}


def begun(path: Path, **options: Any) -> Run:
    """The run of a training that began and ended, as a loop without a Trainer tells it."""
    callback = huggingface.ErgmeterCallback(path, probes=[], warmup_steps=0, **options)
    arguments = SimpleNamespace(**ARGUMENTS)
    state = SimpleNamespace(**STATE)
    callback.on_train_begin(arguments, state, None, model=None)
    callback.on_step_begin(arguments, state, None)
    callback.on_step_end(arguments, state, None)
    callback.on_train_end(arguments, state, None)
    assert callback.path == path
    assert callback.summary().readings["steps.count"].value == 1
    return Run.open(path)


def test_a_wrong_option_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(UsageError, match="no setting 'warmup_step'"):
        huggingface.ErgmeterCallback(warmup_step=3)
    with pytest.raises(UsageError, match="not both"):
        huggingface.ErgmeterCallback("run", meter=Meter())


def test_without_a_training_there_is_no_run_to_name() -> None:
    with pytest.raises(UsageError, match="no training has begun"):
        _ = huggingface.ErgmeterCallback().path


def test_products_are_in_what_the_arguments_say_unless_the_user_says_otherwise(
    tmp_path: Path,
) -> None:
    assert begun(tmp_path / "said").settings["dtype"] == "bf16"
    assert begun(tmp_path / "given", dtype="fp8").settings["dtype"] == "fp8"
    declared = Settings(dtype="fp16", pue=1.5)
    assert begun(tmp_path / "settings", settings=declared).settings["dtype"] == "fp16"


def test_a_loop_that_is_no_trainer_has_steps_and_the_reason_why_no_tokens(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    (mark,) = [mark for mark in run.marks if mark.name == "tokens_not_counted"]
    assert "isn't found" in mark.detail
    assert run.status == "finished"


# What a Trainer with parallelism is to its callback, rank after rank in one process: Accelerate's
# own configuration, and torch's stand-in for a group. Each pair is given a batch of its own, whole.
RANKS = """
import sys, torch
import torch.distributed as dist
from types import SimpleNamespace
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from torch.testing._internal.distributed.fake_pg import FakeStore
from ergmeter.integrations import model_description as world
from ergmeter.integrations.huggingface import ErgmeterCallback

class Trainer:
    def __init__(self, callback, config):
        self.model = torch.nn.Linear(1, 1)
        self.accelerator = SimpleNamespace(parallelism_config=config)
        self.callback_handler = SimpleNamespace(callbacks=[callback])
    def get_tp_size(self):
        return self.accelerator.parallelism_config.tp_size
    def training_step(self, model, inputs):
        pass
    def train(self, rows):
        (callback,) = self.callback_handler.callbacks
        args = SimpleNamespace(logging_strategy="steps", bf16=True)
        state = SimpleNamespace(global_step=0, logging_steps=1)
        callback.on_train_begin(args, state, None, model=self.model)
        for _ in range(3):
            callback.on_step_begin(args, state, None)
            self.training_step(self.model, {"input_ids": torch.ones(rows, 100, dtype=torch.long)})
            callback.on_step_end(args, state, None)
        callback.on_train_end(args, state, None)

world.agreed_word = lambda name: "what four ranks would agree on"
for rank in range(4):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    for cut in ("cp", "tp"):
        config = ParallelismConfig(dp_shard_size=2, **{f"{cut}_size": 2})
        AcceleratorState._shared_state["device_mesh"] = config.get_device_mesh("cpu")
        callback = ErgmeterCallback(f"{sys.argv[1]}/{cut}{rank}", probes=[], rank=rank)
        Trainer(callback, config).train(1 + rank // 2)
    dist.destroy_process_group()
"""


def test_ranks_that_are_given_the_same_batch_are_counted_once(tmp_path: Path) -> None:
    """Two pairs with 1 and 2 rows of 100 tokens: 300 a step, and not 600."""
    command = [sys.executable, "-c", RANKS, str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    for cut in ("cp", "tp"):
        for rank in range(1, 4):
            (share,) = (one.parent for one in (tmp_path / f"{cut}{rank}").glob("*/writer.json"))
            share.rename(tmp_path / f"{cut}0" / share.name)
        evidence = evidence_of(Run.open(tmp_path / f"{cut}0"))
        # Of all steps: these ranks stepped one after the other, which a window would cut.
        values = reported_counts(evidence, evidence.work, "tokens_computed")
        assert values is not None
        assert values.sum() == 3 * 300
        assert "2 of 4 ranks" in shared_tokens_note(evidence)
