"""`erg bench run --memory all`: a real training with a scripted `nvidia-smi` beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from tests.e2e.conftest import PYTHON, SCRIPTS, Lab, environment, erg
from tests.models import models as kept_models
from tests.unit.bench.test_smi import SCRIPT

pytestmark = pytest.mark.soak

BENCH = (PYTHON, "-m", "ergmeter.cli.compare.bench")
TRAINING_S = 200.0
# A program of transformers as its examples are: train, evaluate, predict, save each one's metrics.
PROGRAM = (
    f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})"
    + """
import light, torch
from transformers import Trainer, TrainingArguments

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def forward(self, x, labels):
        told = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(told, labels), "logits": told}

rows = [{"x": torch.tensor([float(n)]), "labels": torch.tensor([2.0 * n])} for n in range(8)]
arguments = TrainingArguments(
    output_dir=sys.argv[1], max_steps=2, report_to=[], use_cpu=True, skip_memory_metrics=False,
    save_strategy="no", disable_tqdm=True,
)
trainer = Trainer(model=Line(), args=arguments, train_dataset=rows, eval_dataset=rows)
trainer.save_metrics("train", trainer.train().metrics)
trainer.save_metrics("eval", trainer.evaluate())
trainer.save_metrics("predict", trainer.predict(rows).metrics)
"""
)


@pytest.fixture
def scripted(lab: Lab) -> dict[str, str]:
    """Variables of a machine with two devices and an `nvidia-smi` that reads them."""
    here, programs = lab.path / "scripted", lab.path / "bin"
    for folder in (here, programs):
        folder.mkdir()
    (here / "held").write_text("0 4\n1 104\n")
    (programs / "nvidia-smi").write_text(SCRIPT.format(python=PYTHON))
    (programs / "nvidia-smi").chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    return environment(PATH=path, SCRIPTED_SMI=str(here), HF_HUB_OFFLINE="1")


def test_a_training_has_its_memory_both_ways_or_the_reasons(
    lab: Lab, scripted: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    models = kept_models(tmp_path_factory)
    training = {
        "name": "tiny",
        "axes": {"num_gpus": [1], "effective_batch_size": [2], "max_seq_len": [64],
                 "packing": [False]},
        "arguments": {"model_name_or_path": "builtin:tiny", "model.local_dir": str(models),
                      "max_steps": 2, "learning_rate": 1e-3},
        "warmup": "0s",
    }  # fmt: skip
    (lab.path / "program.py").write_text(PROGRAM)
    program = {"name": "stages", "command": "{python} program.py {hf}", "arguments": {}}
    (lab.path / "s.yaml").write_text(yaml.safe_dump({"scenarios": [training, program]}))
    asked = ("--memory", "all", "--smi-interval", "0.05", "--cool-down", "0")
    done = lab.run(
        *BENCH, "run", "s.yaml", "--out", "results", *asked, env=scripted, timeout_s=TRAINING_S
    )
    assert done.returncode == 0, done.stderr.decode()
    code, _, why = erg(
        "bench", "report", lab.path / "results", "--export", lab.path / "all.parquet"
    )
    assert code == 0, why
    trained, staged = pq.read_table(lab.path / "all.parquet").to_pylist()
    for row in (trained, staged):
        assert row["memory_nvidia_from"] == "nvidia-smi"
        assert row["memory_nvidia_ids"] == "0 1"
        assert row["memory_nvidia_devices_bytes"] == [0, 0]  # nothing of it is on these
        assert row["memory_nvidia_first_bytes"] == [4 * 2**20, 104 * 2**20]
        missing = json.loads(row["missing"])
        assert missing["memory_hf_peak_bytes"] == "the Trainer's memory tracker saw no GPU"
    assert "torch uses no GPU" in json.loads(trained["missing"])["memory_allocator_devices_bytes"]
    assert json.loads(trained["raw"])["before_init_mem_cpu"] > 0
    told = json.loads(staged["raw"])
    stages = {name.partition("_mem_cpu")[0] for name in told if "_mem_cpu_alloc" in name}
    assert stages == {"init", "train", "eval", "test"}
    assert not Path(f"/proc/{(lab.path / 'scripted' / 'pid').read_text()}").exists()
