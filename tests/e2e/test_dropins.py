"""The two drop-ins in programs of their own: loops as their documents show them, outputs read back.

Devices are scripted, so that their true power is known; TensorBoard's and W&B's files are read with
their own readers.
"""

from __future__ import annotations

import json
import math
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ergmeter.metrics.summarize import summarize
from ergmeter.records import Reading
from ergmeter.runlog.reader import Run
from tests.e2e.conftest import PYTHON, TIMEOUT_S, environment, eventually
from tests.nvml.library import Gpu, Script, build
from tests.runs import ALL_STEPS
from tests.unit.sinks.readback import wandb_file

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.frameworks

PARAMETERS = 1_000_000
TAGS = {
    "efficientllm/amu_gb": "AMU (GB)",
    "efficientllm/pcu_ratio": "PCU (Ratio)",
    "efficientllm/al_seconds": "AL (Seconds)",
    "efficientllm/tt_tokens_per_param_per_sec": "TT (Tokens/Param/Sec)",
    "efficientllm/st_samples_per_param_per_sec": "ST (Samples/Param/Sec)",
    "efficientllm/aec_watts": "AEC (Watts)",
}

FOLDER = Path(__file__).parents[2] / "examples" / "megatron"
# The document's four steps, as they stand there; it uses should_log_metrics without importing it.
MEGATRON = """
import json, sys, time
from torch.utils.tensorboard import SummaryWriter
from megatron_patch.efficientllm_metrics import (
    initialize_efficientllm_metrics,
    finalize_efficientllm_metrics,
    get_metrics_collector
)
from megatron_patch.efficientllm_metrics import should_log_metrics

tensorboard_writer = SummaryWriter("tensorboard")
total_model_parameters = 1_000_000
initialize_efficientllm_metrics(total_model_parameters)
metrics_collector = get_metrics_collector()
told = []
for iteration in range(1, 61):
    tokens_processed, samples_processed, loss = 1000 + iteration, 8, 3.0 / iteration
    before_s = time.perf_counter()
    metrics_collector.record_iteration_start()
    began_s = time.perf_counter()
    time.sleep(0.05)
    least_s = time.perf_counter() - began_s
    metrics_collector.record_iteration_end(tokens_processed, samples_processed)
    told.append((least_s, time.perf_counter() - before_s, tokens_processed))
    if should_log_metrics(iteration):
        metrics_collector.log_metrics(iteration, loss, tensorboard_writer)
finalize_efficientllm_metrics()
tensorboard_writer.close()
json.dump(
    {"told": told, "run": str(metrics_collector.run_path), **metrics_collector.get_all_metrics()},
    open("told.json", "w"),
)
"""


def blocks_of(output: str) -> dict[int, dict[str, float]]:
    """The figures of each block by iteration and label."""
    found: dict[int, dict[str, float]] = {}
    for line in output.splitlines():
        if line.startswith("[EfficientLLM Metrics] Iteration "):
            block = found[int(line.split()[-1].rstrip(":"))] = {}
        elif line.startswith("  "):
            label, _, figure = line.strip().partition(": ")
            block[label] = math.nan if figure.startswith("- (") else float(figure)
    return found


def test_the_megatron_loop_on_a_gpu_whose_power_is_known(lab: Lab, tmp_path: Path) -> None:
    library = build(tmp_path)
    gpu = Gpu([(0.0, 100.0), (4.0, 500.0), (9.0, 200.0)], memory_bytes=3e9, busy_frac=0.9)
    epoch_ns = time.monotonic_ns()
    done = lab.run(
        PYTHON, "-c", MEGATRON,
        env=environment(
            PYTHONPATH=str(FOLDER), **library.environment(Script([gpu], epoch_ns=epoch_ns))
        ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    told: dict[str, Any] = json.loads((lab.path / "told.json").read_text())
    blocks = blocks_of(done.stdout.decode())
    assert list(blocks) == [10, 20, 30, 40, 50, 60]
    run = Run.open(lab.path / told["run"])
    check_against_the_curve(told, run, gpu, epoch_ns)
    check_against_the_clock(told)
    check_tensorboard(lab.path / "tensorboard", blocks)
    check_parts(told, run)
    last = blocks[60]
    assert last["Loss"] == pytest.approx(0.05)
    assert last["AMU (GB)"] == 3.0  # of 1e9 bytes
    assert last["PCU (Ratio)"] == 0.9
    # A power and an energy of one window: the whole run's, from the first iteration on.
    assert last["Energy (J)"] / last["AEC (Watts)"] == pytest.approx(
        reading(run, "time.window_s"), rel=0.1
    )


def reading(run: Run, key: str) -> float:
    found = summarize(run, ALL_STEPS).readings[key]
    assert isinstance(found, Reading), found
    return found.value


def check_against_the_curve(told: dict[str, Any], run: Run, gpu: Gpu, epoch_ns: int) -> None:
    steps = run.steps()
    start_s, end_s = (
        (int(t) - epoch_ns) / 1e9 for t in (steps["start_ns"][0], steps["end_ns"][-1])
    )
    truth_j = gpu.joules(start_s, end_s)
    found = summarize(run, ALL_STEPS).readings["energy.run_j"]
    assert isinstance(found, Reading)
    # In the interval that the figure states, which is wide where readings came late: a device
    # counted twice or a window of another length is outside of it.
    assert found.low is not None
    assert found.high is not None
    assert found.low <= truth_j <= found.high < 2 * found.low
    assert told["aec_watts"] == pytest.approx(told["energy_joules"] / (end_s - start_s), rel=1e-6)
    # And what `erg report` says of the same run.
    assert told["energy_joules"] == pytest.approx(found.value, rel=1e-6)
    assert told["amu_gb"] * 1e9 == pytest.approx(reading(run, "memory.device_mean_bytes"), rel=1e-6)
    assert told["pcu_ratio"] == pytest.approx(reading(run, "utilization.busy_frac"), rel=1e-6)
    assert told["al_seconds"] == pytest.approx(reading(run, "time.in_step_s"), rel=1e-9)


def check_parts(told: dict[str, Any], run: Run) -> None:
    """AL's two parts, of one rank on one GPU: 90 % of an iteration has a kernel."""
    latency_s, inside_s = told["al_seconds"], 60 * told["al_seconds"]
    if inside_s < 0.96 * reading(run, "time.window_s"):
        return  # this machine is too busy: the pauses between iterations are a part of the time
    assert told["al_computation_seconds"] == pytest.approx(0.9 * latency_s)
    assert told["al_communication_seconds"] == 0
    assert reading(run, "profile.computation_s") == pytest.approx(0.9 * latency_s, rel=1e-6)


def check_against_the_clock(told: dict[str, Any]) -> None:
    least_s, most_s, tokens = (sum(column) for column in zip(*told["told"], strict=True))
    rate = told["tt_tokens_per_param_per_sec"] * PARAMETERS
    assert tokens / most_s <= rate <= tokens / least_s
    assert least_s <= 60 * told["al_seconds"] <= most_s
    assert told["st_samples_per_param_per_sec"] == pytest.approx(
        told["tt_tokens_per_param_per_sec"] * 8 * 60 / tokens
    )


def check_tensorboard(folder: Path, blocks: dict[int, dict[str, float]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    assert set(accumulator.Tags()["scalars"]) == set(TAGS)
    for tag, label in TAGS.items():
        points = accumulator.Scalars(tag)
        assert [point.step for point in points] == list(blocks)
        for point in points:
            printed = blocks[point.step][label]
            assert point.value == pytest.approx(printed, rel=0.01), (tag, point.step)


def test_the_config_file_sets_the_variables() -> None:
    config = FOLDER / "megatron_patch" / "efficientllm_config.sh"
    done = subprocess.run(
        ["sh", "-c", f". {config} && env"], env={"EFFICIENTLLM_LOG_INTERVAL": "25"},
        capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    found = dict(line.split("=") for line in done.stdout.splitlines() if "EFFICIENTLLM" in line)
    assert found == {
        "EFFICIENTLLM_METRICS_ENABLED": "true",
        "EFFICIENTLLM_COLLECTION_INTERVAL": "1.0",
        "EFFICIENTLLM_HISTORY_SIZE": "1000",
        "EFFICIENTLLM_LOG_INTERVAL": "25",  # what is set already stays
        "EFFICIENTLLM_PROFILE_STEPS": "0",
    }


INTERVALS = """
from megatron_patch.efficientllm_metrics import (
    finalize_efficientllm_metrics, get_metrics_collector, initialize_efficientllm_metrics)

for asked in (None, 0.05, 5.0):
    initialize_efficientllm_metrics(1_000_000, asked)
    get_metrics_collector().record_iteration_start()
    get_metrics_collector().record_iteration_end(1000, 8)
    finalize_efficientllm_metrics()
"""


def test_the_collection_interval_is_how_often_devices_are_read_at_least(
    lab: Lab, tmp_path: Path
) -> None:
    """By the variable or the argument; ten times a second anyway."""
    script = Script([Gpu(100.0)], epoch_ns=time.monotonic_ns())
    variables = {**build(tmp_path).environment(script), "EFFICIENTLLM_COLLECTION_INTERVAL": "0.02"}
    done = lab.run(PYTHON, "-c", INTERVALS, env=environment(PYTHONPATH=str(FOLDER), **variables))
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().splitlines()
    printed = [line for line in lines if line.startswith("[EfficientLLM] Collection interval: ")]
    assert [line.split()[3] for line in printed] == ["0.02s,", "0.05s,", "5.0s,"]
    runs = [line.split()[-1] for line in lines if " erg report " in line]
    headers = [Run.open(lab.path / run).writers[0].header for run in runs]
    assert [header["probes"]["nvml"]["period_s"] for header in headers] == [0.02, 0.05, 0.1]


# Seed 004's loop, with a model that dropout makes sensitive to eval mode; twice, to compare losses.
MONITORED = """
import json
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from ergmeter.integrations.monitor import TrainingMonitor

torch.set_num_threads(1)
total_steps, lr, epoch = 12, 1e-3, 0
config = {
    "deepspeed": {"train_batch_size": 3},
    "monitor": {"freq": {"training_log_freq": 1, "perf_log_freq": 2}},
    "wandb": {"enabled": True, "project": "drop-ins", "run_name": "seed"},
}

def train(monitored):
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, attention_dropout=0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    if monitored:
        monitor = TrainingMonitor("./outputs", config, flops_profile_freq=5, model=model,
                                  peak_flops_per_s=1e11)
    losses = []
    for step in range(total_steps):
        ids = torch.randint(0, 256, (3, 24))
        attention_mask = (torch.arange(24) < torch.tensor([[24], [10 + step], [5]])).long()
        output = model(input_ids=ids, attention_mask=attention_mask, labels=ids)
        output.loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        loss = output.loss.item()
        losses.append(loss)
        if monitored:
            monitor.log_step(step, epoch, loss, grad_norm, lr, attention_mask)
    if monitored:
        monitor.log_epoch(epoch, sum(losses) / len(losses), 1.0, current_step=step)
        monitor.log_evaluation(step, 2.5, 0.25)
        monitor.finish_training()
        return losses, str(monitor.run_path)
    return losses, ""

without, _ = train(False)
losses, run = train(True)
json.dump({"without": without, "with": losses, "run": run}, open("told.json", "w"))
"""


def test_seed_004s_loop_and_what_comes_of_it(lab: Lab) -> None:
    pytest.importorskip("transformers")
    done = lab.run(
        PYTHON, "-c", MONITORED, env=environment(WANDB_MODE="offline", WANDB_SILENT="true")
    )
    assert done.returncode == 0, done.stderr.decode()
    told = json.loads((lab.path / "told.json").read_text())
    assert told["with"] == told["without"]  # to the last bit
    log = json.loads((lab.path / "outputs" / "training_log.json").read_text())
    steps = log["step_logs"]
    assert [one["loss"] for one in steps] == told["with"]
    tokens = [24 + min(24, 10 + step) + 5 for step in range(12)]
    timed = list(zip(steps, tokens, strict=True))[1:]
    assert steps[0]["step_time"] is None  # the loop does not say when it begins
    for one, count in timed:
        assert one["tokens_per_second"] * one["step_time"] == pytest.approx(count)
        assert one["mfu"] > 0
    run = Run.open(lab.path / told["run"])
    assert reading(run, "tokens.total") == sum(tokens[1:])
    said = [line for line in done.stdout.decode().splitlines() if line.startswith("🔍")]
    assert said[0].startswith("🔍 步骤 0: MFU = - (")
    how = "FLOPs of the model's configuration; no profiler was run"
    assert said[1:] == [f"🔍 步骤 {n}: MFU = {steps[n]['mfu']:.4f} ({how})" for n in (5, 10)]
    check_wandb(lab.path, steps)


def check_wandb(folder: Path, steps: list[dict[str, Any]]) -> None:
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows, summary = wandb_file(path)
    training = [row for row in rows if "training/loss" in row]
    assert [row["step"] for row in training] == list(range(12))
    names = {"loss": "loss", "lr": "learning_rate", "grad_norm": "grad_norm", "epoch": "epoch"}
    for row, one in zip(training, steps, strict=True):
        for name, key in names.items():
            assert row[f"training/{name}"] == pytest.approx(one[key])
    measured = [row for row in rows if "perf/mfu" in row]
    assert [row["step"] for row in measured] == [2, 4, 6, 8, 10]  # 0 had no time: no point, not 0
    for row in measured:
        one = steps[row["step"]]
        assert row["perf/mfu"] == pytest.approx(one["mfu"])
        assert row["perf/mfu_percent"] == pytest.approx(100 * one["mfu"])
        assert row["perf/step_time"] == pytest.approx(one["step_time"])
        assert row["perf/steps_per_second"] == pytest.approx(1 / one["step_time"])
        assert row["perf/tokens_per_second"] == pytest.approx(one["tokens_per_second"])
        assert row["perf/samples_per_second"] == pytest.approx(3 / one["step_time"])
        assert row["perf/flops_per_second"] == pytest.approx(one["mfu"] * 1e11)
    assert not [row for row in rows if row.get("perf/mfu") == 0]
    assert summary["eval/overall_loss"] == 2.5
    assert summary["eval/overall_accuracy"] == 0.25
    assert summary["training/epoch_number"] == 0
    assert summary["training/total_time"] > 0


ENDLESS = """
from ergmeter.integrations.monitor import TrainingMonitor
monitor = TrainingMonitor("out", {"monitor": {"freq": {"local_save_freq": 3}}})
for step in range(10**9):
    monitor.log_step(step, 0, 1.0, 1.0, 1e-4)
"""


def test_the_log_is_whole_whenever_it_is_looked_at_and_after_a_kill(lab: Lab) -> None:
    path = lab.path / "out" / "training_log.json"
    process = lab.start(PYTHON, "-c", ENDLESS, stdout=subprocess.DEVNULL)
    eventually(path.exists, "the first log")
    seen: list[int] = []
    while len(set(seen)) < 20:
        seen.append(len(json.loads(path.read_text())["step_logs"]))
    process.kill()
    process.wait()
    steps = json.loads(path.read_text())["step_logs"]
    assert [one["step"] for one in steps] == list(range(len(steps)))
    assert len(steps) >= max(seen)
    appended = path.with_name("training_log.steps.jsonl").read_text().splitlines()
    assert len(appended) >= len(steps)
