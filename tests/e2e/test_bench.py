"""`erg bench` as a process: trainings on the processor, and drivers that are ended in every way."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import yaml

from ergmeter.bench.execute.outcome import ERG_TRAIN_FACTS
from ergmeter.runlog.reader import Run
from ergmeter.workloads.sft.tiny_model import saved_model
from tests.e2e.conftest import PYTHON, SCRIPTS, TIMEOUT_S, Lab, environment, erg, eventually, quick
from tests.models import models as kept_models
from tests.nvml.library import Gpu, Script, build
from tests.unit.bench.test_nvidia_smi_logger import SCRIPT

BENCH = (PYTHON, "-m", "ergmeter", "bench")
TRAININGS_S = 280.0
# Says that it began; ends at once, or when a file is there, so that a test can catch it at work.
PROGRAM = """
import sys, time
from pathlib import Path
number, go = int(sys.argv[1]), Path(sys.argv[2])
with Path(f"began-{number}").open("a") as file:
    file.write("x")
while number == 2 and not go.exists():
    time.sleep(0.02)
print("loss=1.5")
"""


# A program of transformers as its examples are: train, evaluate, predict, save each one's metrics.
STAGES = (
    f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})"
    + """
import gc, light, torch
from transformers import Trainer, TrainingArguments

gc.freeze()  # the memory tracker collects garbage at each stage

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


def trainings(lab: Lab, models: Path) -> str:
    """A framework's training on two ranks, and a program of somebody else's."""
    scenario = {
        "name": "tiny",
        "framework_config": [None, "bnb"],
        "axes": {"num_gpus": [1, 2], "effective_batch_size": [4], "max_seq_len": [64],
                 "packing": [False]},
        "arguments": {
            "model_name_or_path": "builtin:tiny", "model.local_dir": str(models),
            "peft_method": "lora", "r": 4, "lora_alpha": 8, "max_steps": 2, "learning_rate": 1e-3,
            "logging_steps": 1,
        },
        "warmup": "0s",
        # The others show nothing that this one does not, and each cell takes its time.
        "exclude": [{"framework_config": "none"}, {"num_gpus": 1}],
        "expects": [{"tuning": "qlora", "when": {"framework_config": "bnb"}}],
    }  # fmt: skip
    saved_model("builtin:tiny", models)  # or both ranks make it
    (lab.path / "stages.py").write_text(STAGES)
    stages = {"name": "stages", "command": "{python} stages.py {hf}", "arguments": {}}
    (lab.path / "scenarios.yaml").write_text(yaml.safe_dump({"scenarios": [scenario, stages]}))
    return "scenarios.yaml"


def waiting(lab: Lab) -> str:
    """Three cells, of which one waits for a sign."""
    (lab.path / "program.py").write_text(PROGRAM)
    scenario = {
        "name": "three",
        "command": "{python} program.py {n} go {run}",
        "axes": {"n": [1, 2, 3]},
        "arguments": {"steps": 1},
        "environment": {"STEPS": "{steps}"},
    }
    (lab.path / "scenarios.yaml").write_text(yaml.safe_dump({"scenarios": [scenario]}))
    return "scenarios.yaml"


def statuses(lab: Lab) -> dict[str, str]:
    """By the cell's `n`; without those that have not begun."""
    found = {}
    for path in lab.path.glob("results/exp_*/status.json"):
        cell = json.loads(path.with_name("cell.json").read_text())
        found[str(cell["settings"].get("n"))] = json.loads(path.read_text())["status"]
    return found


def began(lab: Lab) -> dict[int, int]:
    """How often each cell of `waiting` was started."""
    paths = [lab.path / f"began-{n}" for n in (1, 2, 3)]
    return {n: len(path.read_text()) if path.exists() else 0 for n, path in enumerate(paths, 1)}


def run(lab: Lab, *options: object) -> tuple[object, ...]:
    return (*BENCH, "run", waiting(lab), "--out", "results", "--cool-down", "0", *options)


def caught(lab: Lab, **options: Any) -> subprocess.Popen[bytes]:
    """A driver, with two cells done and the third at work."""
    driver = lab.start(*run(lab, "--jobs", "2"), **options)
    at_work = {"1": "ok", "2": "running", "3": "ok"}
    eventually(
        lambda: statuses(lab) == at_work and began(lab)[2] and "child" in worker_of(lab),
        "two done, one at work",
    )
    return driver


def worker_of(lab: Lab) -> dict[str, Any]:
    said = [json.loads(p.read_text()) for p in lab.path.glob("results/exp_*/status.json")]
    (running,) = (one for one in said if one["status"] == "running")
    return dict(running)


@pytest.fixture
def lab(lab: Lab) -> Lab:
    """Where pyarrow finds no pandas: it would load it in each driver."""
    lab.variables = quick("pandas")
    return lab


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
    return environment(
        PATH=path, SCRIPTED_SMI=str(here), HF_HUB_OFFLINE="1",
        **quick("datasets", "pandas", "scipy", "sklearn"),
    )  # fmt: skip


@pytest.mark.frameworks
@pytest.mark.timeout(600)
def test_frameworks_and_ranks_train_and_are_reported_with_their_memory(
    lab: Lab, scripted: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    scenarios = trainings(lab, kept_models(tmp_path_factory))
    code, planned, why = erg("bench", "plan", lab.path / scenarios, "--json")
    assert code == 0, why
    assert len(json.loads(planned)["cells"]) == 2
    asked = ("--memory", "all", "--smi-interval", "0.5", "--cool-down", "0")
    command = (*BENCH, "run", scenarios, "--out", "results", *asked)
    done = lab.run(*command, env=scripted, timeout_s=TRAININGS_S)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    assert b"2 of 2 cells ended: 2 ok" in done.stdout
    with pytest.MonkeyPatch.context() as here:
        here.chdir(lab.path)
        code, _, why = erg("bench", "report", "results", "--export", "all.parquet", "--fms", "fms")
    assert code == 0, why
    trained, staged = pq.read_table(lab.path / "all.parquet").to_pylist()
    settings = ("framework_config", "num_gpus", "status")
    assert [trained[name] for name in settings] == ["bnb", 2, "ok"]
    assert trained["tokens_per_s"] > 0
    assert trained["loss"] > 0
    # The same samples a step, shared by the ranks.
    assert trained["per_device_train_batch_size"] == "2"
    assert (trained["claims_held"], staged["claims_held"]) == (1, 0)
    for row in (trained, staged):
        assert row["claims_broken"] in ("", None)
    header = Run.open(Path(lab.path, trained["path"]) / "run")
    assert set(header.workload) <= set(ERG_TRAIN_FACTS)  # which `expects` may name
    assert header.workload["world_size"] == 2
    assert sorted(set(header.steps()["rank"])) == [0, 1]
    assert len((lab.path / "fms" / "benchmarks.csv").read_text().splitlines()) == 3
    listed = json.loads(erg("bench", "list", lab.path / "results", "--json")[1])
    assert [one["status"] for one in listed] == ["ok"] * 2
    check_memory_both_ways_or_the_reasons(trained, staged)
    assert not Path(f"/proc/{(lab.path / 'scripted' / 'pid').read_text()}").exists()


def check_memory_both_ways_or_the_reasons(trained: dict[str, Any], staged: dict[str, Any]) -> None:
    """By nvidia-smi and by the Trainer's tracker, which sees no GPU here."""
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


def test_ctrl_c_ends_the_cells_and_what_it_says_goes_on(lab: Lab) -> None:
    driver = caught(lab, stdout=subprocess.PIPE)
    child = worker_of(lab)["child"]["pid"]
    driver.send_signal(signal.SIGINT)
    said, _ = driver.communicate(timeout=TIMEOUT_S)
    assert driver.returncode == 130
    assert statuses(lab) == {"1": "ok", "2": "cancelled", "3": "ok"}
    assert not psutil.pid_exists(child)
    assert "it was ended with its bench, by Ctrl-C" in " ".join(said.decode().split())
    assert b" left" not in said
    hint = said.decode().split("go on with: ")[1].splitlines()[0]
    assert hint == ("erg bench run scenarios.yaml --jobs 2 --cool-down 0.0 --out results --resume")
    (lab.path / "go").touch()
    again = lab.run(*BENCH, *shlex.split(hint)[2:])
    assert again.returncode == 0, again.stderr.decode()
    assert b"ended with its bench" not in again.stderr  # which is of the attempt before
    assert statuses(lab) == {"1": "ok", "2": "ok", "3": "ok"}
    assert began(lab) == {1: 1, 2: 2, 3: 1}


def test_a_killed_driver_loses_nothing(lab: Lab) -> None:
    """Its cell goes on; a driver that takes over waits for it."""
    driver = caught(lab)
    driver.kill()
    driver.wait(TIMEOUT_S)
    second = lab.start(*run(lab, "--resume"))
    driven_by = lab.path / "results" / "driver.json"
    eventually(lambda: json.loads(driven_by.read_text())["pid"] == second.pid, "it takes over")
    (lab.path / "go").touch()
    assert second.wait(TIMEOUT_S) == 0
    assert statuses(lab) == {"1": "ok", "2": "ok", "3": "ok"}
    assert began(lab) == {1: 1, 2: 1, 3: 1}


def test_after_a_restart_of_the_machine_only_what_was_cut_off_runs_again(lab: Lab) -> None:
    """Everything is killed at once."""
    driver = caught(lab)
    running = worker_of(lab)
    for pid in (driver.pid, running["worker"]["pid"], running["child"]["pid"]):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    driver.wait(TIMEOUT_S)
    assert statuses(lab)["2"] == "running"
    (lab.path / "go").touch()
    again = lab.run(*run(lab, "--resume"))
    assert again.returncode == 0, again.stderr.decode()
    assert statuses(lab) == {"1": "ok", "2": "ok", "3": "ok"}
    assert began(lab) == {1: 1, 2: 2, 3: 1}
    (aside,) = lab.path.glob("results/exp_*/attempt_1")
    assert (aside / "stdout").exists()


def test_results_that_are_moved_meanwhile_end_the_bench(lab: Lab) -> None:
    driver = caught(lab, stderr=subprocess.PIPE)
    results, aside = lab.path / "results", lab.path / "aside"
    results.rename(aside)
    _, said = driver.communicate(timeout=TIMEOUT_S)
    assert driver.returncode == 1
    assert "results was moved or deleted; its cells were ended" in said.decode()
    assert not results.exists()
    aside.rename(results)
    (lab.path / "go").touch()
    assert lab.run(*run(lab, "--resume")).returncode == 0
    assert statuses(lab) == {"1": "ok", "2": "ok", "3": "ok"}


def test_a_dry_run_starts_nothing_and_results_are_not_written_over(lab: Lab) -> None:
    (lab.path / "go").touch()
    dry = lab.run(*run(lab, "--dry-run"))
    assert dry.returncode == 0, dry.stderr.decode()
    assert dry.stdout.decode().count("program.py") == 3
    assert not (lab.path / "results").exists()
    assert lab.run(*run(lab)).returncode == 0
    code, _, said = erg("bench", "run", lab.path / waiting(lab), "--out", lab.path / "results")
    assert code == 2
    assert "--resume continues it" in said
    assert began(lab) == {1: 1, 2: 1, 3: 1}


def test_several_cells_are_listed_while_they_run(lab: Lab) -> None:
    driver = caught(lab)
    said = json.loads(erg("bench", "list", lab.path / "results", "--json")[1])
    assert sorted(one["status"] for one in said) == ["ok", "ok", "running"]
    (lab.path / "go").touch()
    assert driver.wait(TIMEOUT_S) == 0


def test_gpus_that_others_compute_on_are_refused(
    lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> None:
    library = build(tmp_path_factory.mktemp("nvml"))
    (lab.path / "go").touch()
    busy = [Gpu(), Gpu(processes=[(os.getpid(), 1 << 30)])]
    script = library.environment(Script(busy, epoch_ns=time.monotonic_ns()))
    variables = {**environment(**script, **lab.variables), "CUDA_VISIBLE_DEVICES": "0,1"}
    refused = lab.run(*run(lab), env=variables)
    assert refused.returncode == 2
    assert f"process {os.getpid()}".encode() in refused.stderr
    assert b"on GPU 1" in refused.stderr
    assert not (lab.path / "results").exists()
    free = lab.run(*run(lab), env={**variables, "CUDA_VISIBLE_DEVICES": "0"})
    assert free.returncode == 0, free.stderr.decode()
    shown = {json.loads(p.read_text())["CUDA_VISIBLE_DEVICES"]
             for p in lab.path.glob("results/exp_*/environment.json")}  # fmt: skip
    assert shown == {"0"}
