"""FMS's calls, as its documents have them: exit codes, files, columns and numbers.

Scenarios that name no command run fms-hf-tuning. It wants an older torch than the tests have, so
scripts/fms stands where it would.
"""

from __future__ import annotations

import csv
import json
import re
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from ergmeter.bench.execute import launching
from ergmeter.bench.plan.cells import Cell
from ergmeter.workloads.sft.tiny_model import saved_model
from tests.e2e.conftest import PYTHON, SCRIPTS, Lab, environment, needs, quick
from tests.models import models

needs("torch")
pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).parents[2]
STAND_IN = str(SCRIPTS / "fms")
LORA = {
    "peft_method": "lora", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"],
    "learning_rate": 0.01, "max_steps": 5, "gradient_accumulation_steps": 1,
}  # fmt: skip


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def variables(**more: str) -> dict[str, str]:
    made = environment(CUDA_VISIBLE_DEVICES="", PYTHON=PYTHON, **quick("datasets"), **more)
    return {**made, "PYTHONPATH": f"{STAND_IN}:{made['PYTHONPATH']}"}


def test_lora_cells_of_sft_trainer_train_on_two_ranks(lab: Lab) -> None:
    """By run_benchmarks.sh, with FMS's positional order and its later one; on gloo, by torchrun."""
    pair = {"instruction": "Who keeps the bees?", "input": "", "output": "Anna."}
    (lab.path / "rows.jsonl").write_text(f"{json.dumps(pair)}\n" * 8)
    file = {
        "axes": {"max_seq_len": [64], "packing": [False]},
        "data_processing": {"dataset_name": "rows.jsonl"},
        "scenarios": [{"name": "accelerated-peft", "arguments": {
            "model_name_or_path": ["builtin:tiny"], **LORA}}],
    }  # fmt: skip
    (lab.path / "mine.yaml").write_text(yaml.safe_dump(file))
    words = ("2", "4", "results", "mine.yaml", "accelerated-peft")
    done = lab.run("bash", ROOT / "scripts/run_benchmarks.sh", *words, env=variables())
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    assert b"1 of 1 cells ended: 1 ok" in done.stdout
    cell = lab.path / "results" / "exp_0"
    command = (cell / "command.sh").read_text()
    assert "-m torch.distributed.run --standalone --nproc-per-node=2" in command
    assert re.search(r"-m tuning\.sft_trainer .*--r 4 ", command)
    for rank in (0, 1):  # each had its own arguments, and not those of torchrun
        asked = json.loads((cell / "hf" / f"rank-{rank}.json").read_text())
        assert (asked["r"], asked["per_device_train_batch_size"]) == (4, 2)
    figures = json.loads((cell / "hf" / "figures.json").read_text())
    (row,) = rows_of(lab.path / "results" / "benchmarks.csv")
    for name in ("train_loss", "train_runtime", "train_samples_per_second"):
        assert float(row[name]) == figures[name]
    assert float(row["train_tokens_per_second"]) == figures["train_tokens_per_second"]
    assert (row["status"], row["num_gpus"], row["peft_method"]) == ("ok", "2", "lora")
    assert row["per_device_train_batch_size"] == "2"


RANK = """
import json, os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(1, 2) * dist.get_rank()).sum().backward()
gradient = model.module.weight.grad[0].tolist()
rank = [dist.get_rank(), dist.get_world_size(), gradient, sys.argv[1:], os.environ["FSDP_VERSION"]]
os.write(1, (json.dumps(rank) + chr(10)).encode())  # in one write: ranks share a pipe
dist.barrier()
os._exit(0)  # torch now and then aborts as it ends gloo's threads
"""


def test_accelerate_starts_the_ranks_by_the_file_that_is_shipped(lab: Lab) -> None:
    """As on GPUs, which take no part in starting them: a tiny model on gloo."""
    (lab.path / "rank.py").write_text(RANK)
    arguments = ("--r", "4", "--m", "x", "--", "--num_processes", "9")
    cell = Cell(
        0, "0", "s", {}, num_gpus=2, repeat=1, command=(PYTHON, "rank.py", *arguments, "{run}"),
        launch="accelerate",
        launch_options=("--config_file", str(ROOT / "scenarios" / "accelerate.yaml")),
    )  # fmt: skip
    how = launching.start(cell, lab.path / "exp_0", has_gpus=True)
    done = lab.run(*how.words, env=variables())
    assert done.returncode == 0, done.stderr.decode()
    ranks = sorted(json.loads(line) for line in done.stdout.decode().splitlines())
    asked = [*arguments, str(lab.path / "exp_0" / "run")]
    # The mean of the gradients 0 and 1 of the two ranks.
    assert ranks == [[rank, 2, [0.5, 0.5], asked, "1"] for rank in (0, 1)]


TOX = (PYTHON, "-m", "tox", "-q", "-c", ROOT / "tox.ini", "--workdir", "tox", "-e", "run-benches")
# Nothing is installed: its Python is ours.
OURS = ("skip_install=true", "extras=", f"set_env=PYTHON={PYTHON}")


def tox(lab: Lab, *arguments: str, **more: str) -> str:
    """`tox -e run-benches -- ARGUMENTS`, to the end of a dry run."""
    words = [word for setting in OURS for word in ("-x", f"testenv:run-benches.{setting}")]
    words += ["--", *arguments] if arguments else []
    done = lab.run(*TOX, *words, env=variables(DRY_RUN="true", **more))
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    return done.stdout.decode()


def test_tox_takes_the_arguments_of_the_script(lab: Lab) -> None:
    needs("tox")
    small = tox(lab)
    # As the file has them: torch and bnb, batches of 4 and 8, one rank.
    assert len(re.findall(r"^# exp_\d: lora, ", small, re.MULTILINE)) == 4
    # Every scenario that is not slow, on 1 and 2 GPUs.
    both = tox(lab, "1 2")
    assert len(re.findall(r"^# exp_\d: lora, .*num_gpus=[12], ", both, re.MULTILINE)) == 8
    scenario = {"name": "mine", "arguments": {"model_name_or_path": ["builtin:tiny"], **LORA}}
    (lab.path / "mine.yaml").write_text(yaml.safe_dump({"scenarios": [scenario]}))
    command = "/opt/fms/bin/python -m tuning.sft_trainer {arguments}"
    own = tox(
        lab, "2", "out", "mine.yaml", "mine", "--command", command,
        NO_DATA_PROCESSING="true", MEMORY_LOGGING="nvidia",
    )  # fmt: skip
    # The variables reach the script: no data of ours, and not the Trainer's tracker.
    assert own.count("/data/cache_all.json ") == own.count("--skip_memory_metrics True") == 2
    settings = ConfigParser()
    settings.read(ROOT / "tox.ini")
    passed = settings["testenv:run-benches"]["pass_env"].split()
    assert {"DRY_RUN", "NO_DATA_PROCESSING", "NO_OVERWRITE", "MEMORY_LOGGING"} <= set(passed)
    assert own.count("/opt/fms/bin/python -m accelerate.commands.launch --num_processes=2") == 2
    assert own.count("-- /opt/fms/bin/python -m tuning.sft_trainer --model_name_or_path") == 2
    assert (ROOT / "setup_requirements.txt").read_text() == "tox>=4\n"


def test_the_page_prints_what_it_says(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Pasted into a shell in a checkout, of which it needs scripts and scenarios."""
    needs("transformers", "accelerate", "peft", "bitsandbytes")
    for folder in ("scripts", "scenarios"):
        (lab.path / folder).symlink_to(ROOT / folder)
    (lab.path / "outputs").mkdir()
    (lab.path / "outputs" / "models").symlink_to(models(tmp_path_factory))
    saved_model("builtin:tiny", lab.path / "outputs" / "models")
    made = variables()
    made["PATH"] = f"{Path(PYTHON).parent}:{made['PATH']}"
    text = (ROOT / "docs" / "from-fms.md").read_text()
    printed: list[str] = []
    for kind, block in re.findall(r"^```(bash|text)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if kind == "text":
            assert [line for line in block.splitlines() if line not in printed] == []
            continue
        done = lab.run("bash", "-ec", block, env=made)
        assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
        printed = done.stdout.decode().splitlines()
    # The last was the dry run: one rank by itself, and two by accelerate.
    assert sum(line.startswith("# exp_") for line in printed) == 2
    assert sum("accelerate.commands.launch" in line for line in printed) == 1
    # Of the bench: what the page says of its files; and no word of kernels that no cell uses.
    results = lab.path / "outputs" / "results"
    plain, quantised = rows_of(results / "benchmarks.csv")
    always = {"framework_config", "model_name_or_path", "num_gpus", "peft_method", "status"}
    figures = ("loss", "runtime", "samples_per_second", "steps_per_second", "tokens_per_second")
    always |= {"per_device_train_batch_size", *(f"train_{name}" for name in figures)}
    assert sorted(plain) == list(plain)
    assert always <= set(plain)
    own = rows_of(results / "results.csv")
    for row, cell in zip((plain, quantised), own, strict=True):
        last = [log["loss"] for log in logs(results / f"exp_{cell['index']}") if "loss" in log][-1]
        assert float(cell["loss"]) == pytest.approx(last)
        assert float(row["train_loss"]) != pytest.approx(last, rel=1e-3)
    assert "bitsandbytes" not in (results / "exp_0" / "stderr").read_text()
    assert "kernels" not in (results / "exp_0" / "stderr").read_text()


def logs(cell: Path) -> list[dict[str, float]]:
    state = json.loads((cell / "hf" / "trainer_state.json").read_text())
    return list(state["log_history"])
