"""A training ends at an alert that it was told to stop for, on all ranks or on none."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ergmeter import Meter, Run
from ergmeter.integrations.guard import Stopping
from tests.ports import free_port

pytestmark = pytest.mark.frameworks


def test_who_asked_for_no_stop_is_never_asked(tmp_path: Path) -> None:
    meter = Meter(tmp_path / "run", alerts=["loss nan"])
    assert not Stopping(meter)._asks
    assert Stopping(Meter(tmp_path / "run", alerts=["loss nan"], stop_on="nan"))._asks


def test_who_else_measures_decides_nothing(tmp_path: Path) -> None:
    # On rank 0 alone it would ask, and wait for the others for ever.
    with Meter(tmp_path / "run", probes=(), alerts=["loss nan"], stop_on="nan"):
        assert not Stopping()._asks


def test_ranks_that_cant_be_asked_train_on_and_a_mark_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refusing(*_tensors: Any, **_more: Any) -> None:
        asked.append(1)
        raise RuntimeError("No backend type associated with device type cpu")

    with Meter(tmp_path / "run", **STOPS) as meter:
        stopping = Stopping(meter)
        monkeypatch.setattr("ergmeter.integrations.guard.world_size", lambda: 2)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_backend", lambda: "odd")
        monkeypatch.setattr(torch.distributed, "all_reduce", refusing)
        assert [stopping.is_due(meter, step) for step in (10, 20, 30)] == [False] * 3
        monkeypatch.undo()
    assert len(asked) == 1
    (said,) = [mark.detail for mark in Run.open(tmp_path / "run").marks if "stop" in mark.name]
    assert said.startswith("the ranks can't agree (RuntimeError: No backend type")


RANKS = """
import math, os, sys, time
import torch.distributed as dist
from ergmeter import Meter
from ergmeter.integrations.guard import Stopping

rank, children = 0, []
for other in range(1, int(os.environ["WORLD_SIZE"])):  # forked: they have loaded torch already
    child = os.fork()
    if child == 0:
        rank, children = other, []
        break
    children.append(child)
os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
dist.init_process_group("gloo")
options = {"alerts": ["loss nan"], "stop_on": "nan"}
meter = Meter(sys.argv[1], probes=(), **options)
stopping = Stopping(meter)
meter.start()
for number in range(1, 3000):
    with meter.step(tokens=1) as step:
        time.sleep(0.005)
        # Only one of them loses it.
        step.loss = math.nan if rank == 1 and number > 50 else 1.0
    dist.barrier()
    measured = None if rank == 2 else meter  # one whose measuring failed still answers
    if stopping.is_due(measured, number):
        break
os.write(1, f"{rank} {number}\\n".encode())
meter.close()
dist.destroy_process_group()
for child in children:
    os.waitpid(child, 0)
"""


def test_ranks_stop_at_the_same_step_also_where_one_is_not_measured(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(textwrap.dedent(RANKS))
    world = 3
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")], env={**os.environ, **shared},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line.split() for line in done.stdout.splitlines()]
    assert sorted(rank for rank, _ in said) == ["0", "1", "2"]
    steps = {int(step) for _, step in said}
    assert len(steps) == 1
    assert 50 < steps.pop() < 2999


class Lost(torch.nn.Module):
    """A model whose loss is lost after some steps, each of a few milliseconds."""

    def __init__(self, nan_at: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.calls, self.nan_at = 0, nan_at

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.calls += 1
        time.sleep(0.005)
        factor = math.nan if self.calls > self.nan_at else 1.0
        return {"loss": (self.weight * factor).sum() * input_ids.numel()}


ROW = {"input_ids": torch.ones(4, dtype=torch.long), "labels": torch.ones(4)}
ROWS: Any = [ROW] * 8
STOPS: dict[str, Any] = {"probes": (), "alerts": ["loss nan"], "stop_on": "nan"}
MOST = 5000


def test_a_trainer_of_transformers_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from ergmeter.integrations.huggingface import ErgmeterCallback

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=MOST, per_device_train_batch_size=2,
        logging_steps=1, logging_nan_inf_filter=False, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    callback = ErgmeterCallback(tmp_path / "run", **STOPS)
    trainer = transformers.Trainer(Lost(30), arguments, train_dataset=ROWS, callbacks=[callback])
    trainer.train()
    assert 30 < trainer.state.global_step < MOST
    told(tmp_path / "run", total_steps=MOST)


@pytest.mark.filterwarnings("ignore")  # Lightning's own, about small loaders
def test_a_trainer_of_lightning_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from ergmeter.integrations.lightning import ErgmeterCallback

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Lost(30)

        def training_step(self, batch: Any, _index: int) -> Any:
            return self.model(batch["input_ids"])["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        max_steps=MOST, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        callbacks=[ErgmeterCallback(tmp_path / "run", **STOPS)],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(ROWS, batch_size=2))
    assert 30 < trainer.global_step < MOST
    told(tmp_path / "run", total_steps=MOST)


def told(path: Path, *, total_steps: int) -> None:
    run = Run.open(path)
    assert [m.detail for m in run.marks if m.name == "stop_asked"] == [
        "loss nan: loss nan at step 30"
    ]
    assert run.status == "finished"
    assert run.writers[0].header["total_steps"] == total_steps
