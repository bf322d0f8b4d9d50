"""TrainingMonitor: MFU of every step by hand, a log that is always valid, and no harm done."""

from __future__ import annotations

import inspect
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ergmeter.compat.training_monitor import (
    Masked,
    MonitorSettings,
    TrainingLog,
    TrainingMonitor,
    calculate_mfu_with_profiler,
    knowledge,
)
from ergmeter.errors import UsageError
from ergmeter.integrations import guard
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Reading
from ergmeter.runlog.reader import Run
from tests.runs import ALL_STEPS

PEAK = 1e12
LAYERS, HIDDEN, INNER, VOCABULARY = 2, 64, 160, 256
CONFIG = LlamaConfig(
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=INNER,
    vocab_size=VOCABULARY,
)


@pytest.fixture(scope="module")
def model() -> Any:
    made: Any = LlamaForCausalLM
    return made(CONFIG).to(torch.bfloat16).train()


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(guard, "_warned", set())


@pytest.fixture
def monitor(model: Any) -> Iterator[TrainingMonitor]:
    made = TrainingMonitor("out", {}, model=model, peak_flops_per_s=PEAK)
    yield made
    made.finish_training()


def by_hand(lengths: list[int]) -> float:
    """FLOPs of a training step over these sequences: 6 a weight a token, 6 a causal pair a width.

    A pair costs 2 for its score and 2 for its value, a width each; three times that with gradients.
    """
    weights = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER) + HIDDEN * VOCABULARY
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return 6.0 * weights * sum(lengths) + 12.0 * LAYERS * HIDDEN * pairs


def mask(*lengths: int, width: int = 0) -> torch.Tensor:
    """Rows of these lengths, padded on the right."""
    width = width or max(lengths)
    return torch.tensor([[1] * length + [0] * (width - length) for length in lengths])


def logged(monitor: TrainingMonitor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(monitor.log_file).read_text(encoding="utf-8"))
    return found


def test_every_step_has_its_mfu_of_its_real_tokens(monitor: TrainingMonitor) -> None:
    monitor.start_training()
    batches = [[16, 16], [16, 9], [3, 16], [5, 7]]
    for step, lengths in enumerate(batches):
        time.sleep(0.002)
        monitor.log_step(step, 0, 2.0, 1.0, 1e-4, mask(*lengths, width=16))
    monitor.save_logs()
    steps = logged(monitor)["step_logs"]
    assert [one["step"] for one in steps] == [0, 1, 2, 3]
    for one, lengths in zip(steps, batches, strict=True):
        flops = by_hand(lengths)
        assert one["mfu"] == pytest.approx(flops / one["step_time"] / PEAK, rel=1e-6)
        assert one["tokens_per_second"] == pytest.approx(sum(lengths) / one["step_time"])


def test_lengths_between_two_that_were_counted_are_exact(model: Any) -> None:
    for length in (1, 17, 100, 384, 1000):
        expected = by_hand([length]) / length
        assert knowledge(model).token_flops(model, length) == pytest.approx(expected, rel=1e-9)


def test_it_agrees_with_the_function(
    monitor: TrainingMonitor, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "NVIDIA H100 80GB HBM3")
    monitor.start_training()
    time.sleep(0.001)
    monitor.log_step(1, 0, 2.0, 1.0, 1e-4, mask(32, 32, 32, 32))
    entry = monitor.get_latest_metrics()
    assert entry is not None
    function = calculate_mfu_with_profiler(model, 4, 32, entry["step_time"])
    assert entry["mfu"] * PEAK == pytest.approx(function * 989.5e12, rel=1e-6)


def test_the_first_step_has_no_time_where_nobody_saw_it_begin(monitor: TrainingMonitor) -> None:
    """Seed 004's loop never calls start_training."""
    for step in range(3):
        time.sleep(0.002)
        monitor.log_step(step, 0, 2.0, 1.0, 1e-4, mask(8))
    first, *rest = monitor.step_logs
    assert first["step_time"] is None
    assert first["mfu"] is None
    assert all(one["step_time"] >= 0.002 and one["mfu"] > 0 for one in rest)


def test_profiled_steps_are_printed_and_the_others_are_not(
    monitor: TrainingMonitor, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor.flops_profile_freq = 3
    monitor.start_training()
    for step in range(7):
        time.sleep(0.001)
        monitor.log_step(step, 0, 2.0, 1.0, 1e-4, mask(8, 8))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("🔍")]
    mfus = [one["mfu"] for one in monitor.step_logs]
    how = "FLOPs of the model's configuration; no profiler was run"
    assert said == [f"🔍 步骤 {n}: MFU = {mfus[n]:.4f} ({how})" for n in (0, 3, 6)]


def test_a_model_without_a_configuration_is_printed_as_counted_on_its_shapes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(100, 32)
            self.output = torch.nn.Linear(32, 100, bias=False)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.output(self.embedding(input_ids))
            return logits

    monitor = TrainingMonitor(
        "out", {}, flops_profile_freq=1, model=Words(), peak_flops_per_s=1e12, dtype="bf16"
    )
    monitor.start_training()
    time.sleep(0.001)
    monitor.log_step(1, 0, 2.0, 1.0, 1e-4, mask(8))
    monitor.finish_training()
    entry = monitor.step_logs[0]
    assert entry["mfu"] * entry["step_time"] * 1e12 == pytest.approx(6 * 8 * 32 * 100)
    expected = "(FLOPs counted on tensors without memory; no profiler was run)"
    assert expected in capsys.readouterr().out


def test_the_calls_have_the_documented_arguments_and_defaults(model: Any) -> None:
    made = inspect.signature(TrainingMonitor).parameters
    assert list(made)[:4] == ["output_dir", "config", "log_file", "flops_profile_freq"]
    assert (made["config"].default, made["log_file"].default) == (None, "training_log.json")
    called = inspect.signature(TrainingMonitor.log_step).parameters
    assert list(called)[1:8] == [
        *("step", "epoch", "loss", "grad_norm", "learning_rate", "attention_mask", "skip_wandb"),
    ]
    assert (called["attention_mask"].default, called["skip_wandb"].default) == (None, False)
    function = inspect.signature(calculate_mfu_with_profiler).parameters
    assert list(function)[:4] == ["model", "batch_size", "seq_length", "step_time"]
    assert TrainingMonitor("elsewhere").flops_profile_freq == 500
    # By position, with a log of another name; and by name.
    monitor = TrainingMonitor("out", None, "mine.json", 2)
    monitor.set_model_ref(model)
    assert (monitor.flops_profile_freq, monitor.log_file) == (2, str(Path("out") / "mine.json"))
    monitor.log_step(
        step=3, epoch=1, loss=2.0, grad_norm=1.0, learning_rate=1e-4, attention_mask=mask(8),
        skip_wandb=True,
    )  # fmt: skip
    monitor.finish_training()
    (entry,) = logged(monitor)["step_logs"]
    assert (entry["step"], entry["epoch"], entry["learning_rate"]) == (3, 1, 1e-4)
    written = {path.name for path in Path("out").iterdir()}
    assert written == {"mine.json", "mine.steps.jsonl"}


def test_the_newest_step_and_means_of_the_last_ones(monitor: TrainingMonitor) -> None:
    assert (monitor.get_latest_metrics(), monitor.get_avg_metrics(2)) == (None, {})
    monitor.start_training()
    for step in range(4):
        time.sleep(0.001)
        monitor.log_step(step, 0, 4.0 - step, float(step), 1e-4, mask(8) if step else None)
    entries = monitor.step_logs
    assert monitor.get_latest_metrics() == entries[-1]
    assert monitor.get_avg_metrics(2) == {
        "avg_loss": 1.5, "avg_grad_norm": 2.5, "num_steps": 2,
        "avg_step_time": pytest.approx((entries[2]["step_time"] + entries[3]["step_time"]) / 2),
        "avg_mfu": pytest.approx((entries[2]["mfu"] + entries[3]["mfu"]) / 2),
    }  # fmt: skip
    # A step whose MFU is not known lowers no mean.
    assert monitor.get_avg_metrics()["num_steps"] == 4
    known = [entry["mfu"] for entry in entries[1:]]
    assert monitor.get_avg_metrics()["avg_mfu"] == pytest.approx(sum(known) / 3)


def test_an_mfu_above_1_is_marked_and_not_cut_off(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = TrainingMonitor("out", {}, flops_profile_freq=1, model=model, peak_flops_per_s=1e9)
    monitor.start_training()
    assert by_hand([512] * 64) > 20 * 1e9  # above 1 even on a machine that takes 20 s for the call
    monitor.log_step(1, 0, 2.0, 1.0, 1e-4, mask(*[512] * 64))
    monitor.finish_training()
    mfu = monitor.step_logs[0]["mfu"]
    assert mfu > 1
    assert f"MFU = {mfu:.4f} (impossible: above 1) (" in capsys.readouterr().out


@pytest.mark.parametrize(("freq", "times"), [(1, 1000), (10, 100), (50, 20), (100, 10), (500, 2)])
def test_as_many_lines_as_the_documents_table_has_computations(
    freq: int, times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its table: how often MFU is computed in 1000 steps, by flops_profile_freq."""
    config: dict[str, Any] = {"monitoring": {"flops_profile_freq": 500}}
    monitor = TrainingMonitor(output_dir="./outputs", config=config, flops_profile_freq=freq)
    for step in range(1000):
        monitor.log_step(step, 0, 2.0, 1.0, 1e-4)
    monitor.finish_training()
    assert capsys.readouterr().out.count("🔍 步骤 ") == times


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        ({}, 0, "the argument flops_profile_freq is 0"),
        ({}, -1, "the argument flops_profile_freq is -1"),
        ({}, "abc", "the argument flops_profile_freq is 'abc'"),
        ({}, 2.5, "the argument flops_profile_freq is 2.5"),
        ({}, True, "the argument flops_profile_freq is True"),
        ({"monitoring": {"flops_profile_freq": 0}}, None, "monitoring.flops_profile_freq is 0"),
        (
            {"monitor": {"freq": {"flops_profile_freq": "often"}}}, None,
            "monitor.freq.flops_profile_freq is 'often'",
        ),
        (
            {"monitor": {"freq": {"training_log_freq": 0}}}, None,
            "monitor.freq.training_log_freq is 0",
        ),
        ({"deepspeed": {"train_batch_size": -8}}, None, "deepspeed.train_batch_size is -8"),
        (
            {"training": {"gradient_accumulation_steps": 0}}, None,
            "training.gradient_accumulation_steps is 0",
        ),
        ({"model": {"max_sequence_length": "long"}}, None, "model.max_sequence_length is 'long'"),
    ],
)  # fmt: skip
def test_a_number_that_is_none_is_refused_when_the_monitor_is_made(
    config: Any, given: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        TrainingMonitor("out", config, flops_profile_freq=given)
    assert str(refused.value) == f"{message}: it must be a whole number of 1 or more"
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_model_and_no_configuration_is_refused_or_reported(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=r"model is .llama., not a torch\.nn\.Module"):
        TrainingMonitor("out", {}, model="llama")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"config is 'config.yaml': it must be a mapping"):
        TrainingMonitor("out", "config.yaml")  # type: ignore[arg-type]
    monitor = TrainingMonitor("out", {}, flops_profile_freq=1, model=model, peak_flops_per_s=PEAK)
    monitor.start_training()
    monitor.set_model_ref("llama")  # type: ignore[arg-type]  # in the middle: it goes on
    time.sleep(0.001)
    monitor.log_step(1, 0, 2.0, 1.0, 1e-4, mask(8))
    monitor.finish_training()
    assert monitor.step_logs[0]["tokens_per_second"] > 0
    assert "MFU = - (model is 'llama', not a torch.nn.Module)" in capsys.readouterr().out


def test_a_step_below_0_is_reported_once_and_not_logged(
    monitor: TrainingMonitor, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor.start_training()
    time.sleep(0.05)
    monitor.log_step(-3, 0, 2.0, 1.0, 1e-4, mask(8))
    refused_s = time.perf_counter()
    monitor.log_step(-2, 0, 2.0, 1.0, 1e-4, mask(8))
    time.sleep(0.01)
    monitor.log_step(1, 0, 2.0, 1.0, 1e-4, mask(8))
    lasted_s = time.perf_counter() - refused_s
    error = capsys.readouterr().err
    line = "ergmeter: log_step: step is -3, must be 0 or more: such steps are not logged\n"
    assert error == line
    [entry] = monitor.step_logs
    assert entry["step"] == 1
    assert 0.01 <= entry["step_time"] <= lasted_s  # since the refused one


@pytest.mark.parametrize(
    "step", ["a", None, math.nan, math.inf, [1], 10**400], ids=lambda step: f"{step!r:.5}"
)
def test_a_step_that_is_no_number_is_reported_once_and_the_others_are_logged(
    step: Any, monitor: TrainingMonitor, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor.start_training()
    monitor.log_step(1, 0, 2.0, 1.0, 1e-4, mask(8))
    monitor.log_step(step, 0, 2.0, 1.0, 1e-4, mask(8))
    monitor.log_step(step, 0, 2.0, 1.0, 1e-4, mask(8))
    monitor.log_step(2, "first", 2.0, 1.0, 1e-4, mask(8), real_time_flops="x")  # type: ignore[arg-type]
    monitor.finish_training()
    line = f"ergmeter: log_step: step is {step!r}, must be 0 or more: such steps are not logged\n"
    assert capsys.readouterr().err == line
    steps = logged(monitor)["step_logs"]
    assert [entry["step"] for entry in steps] == [1, 2]
    assert (steps[1]["epoch"], steps[1]["real_time_flops"]) == (None, None)
    assert steps[1]["step_time"] > 0


def test_a_call_that_fails_is_reported_and_what_follows_is_logged_and_written(
    monitor: TrainingMonitor, capsys: pytest.CaptureFixture[str]
) -> None:
    unchecked: Any = monitor
    monitor.start_training()
    monitor.log_step(1, 0, 2.0, 1.0, 1e-4, mask(8))
    for step in (2, 3):
        unchecked.log_step(step)  # arguments are missing
    for step in (4, 5):
        time.sleep(0.001)
        monitor.log_step(step, 0, 2.0, 1.0, 1e-4, mask(8))
    unchecked.log_evaluation(5, 1.5, 0.5, ["no mapping"])
    monitor.finish_training()
    reported = capsys.readouterr().err.splitlines()
    assert len(reported) == 2
    assert "log_step() missing 4 required positional arguments: 'epoch'" in reported[0]
    assert "AttributeError" in reported[1]
    steps = logged(monitor)["step_logs"]
    assert [entry["step"] for entry in steps] == [1, 4, 5]
    # Two steps were not logged: the time since is not that of one step.
    assert [entry["step_time"] is None for entry in steps] == [False, True, False]


def test_a_model_that_cant_be_counted_costs_the_mfu_and_not_the_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Odd(torch.nn.Module):
        def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
            raise OSError("its weights are elsewhere")

    monitor = TrainingMonitor("out", {}, flops_profile_freq=1)
    monitor.set_model_ref(Odd())
    monitor.start_training()
    time.sleep(0.001)
    monitor.log_step(1, 0, 2.0, 1.0, 1e-4, mask(8))
    monitor.finish_training()
    assert "MFU = - (OSError: its weights are elsewhere)" in capsys.readouterr().out
    (entry,) = logged(monitor)["step_logs"]
    assert entry["tokens_per_second"] * entry["step_time"] == pytest.approx(8)


def test_epochs_are_written_without_any_step(monitor: TrainingMonitor) -> None:
    monitor.log_epoch(0, 2.5, 12.5)
    found = logged(monitor)
    assert (found["step_logs"], found["epoch_logs"][0]["avg_loss"]) == ([], 2.5)


@pytest.mark.parametrize("rows", [[[1, 1], [1, 0]], ((1, 1), (1, 0))])
def test_a_mask_that_is_a_list_is_used(
    rows: Any, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = TrainingMonitor("out", {}, flops_profile_freq=1, model=model, peak_flops_per_s=PEAK)
    monitor.start_training()
    time.sleep(0.001)
    monitor.log_step(1, 0, 2.0, 1.0, 1e-4, rows)
    monitor.finish_training()
    (entry,) = monitor.step_logs
    assert entry["tokens_per_second"] * entry["step_time"] == pytest.approx(3)
    assert entry["mfu"] == pytest.approx(by_hand([2, 1]) / entry["step_time"] / PEAK)


@pytest.mark.parametrize(
    "odd", [[[1, 1], [1]], "1110", 7, {"mask": 1}, [[[1]]], torch.ones(1, 2, 3)]
)
def test_what_is_no_mask_is_named_as_the_reason(
    odd: Any, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = TrainingMonitor("out", {}, flops_profile_freq=1, model=model, peak_flops_per_s=PEAK)
    monitor.start_training()
    time.sleep(0.001)
    monitor.log_step(1, 0, 2.0, 1.0, 1e-4, odd)
    monitor.finish_training()
    what = " ".join(repr(torch.tensor(odd) if odd == [[[1]]] else odd).split())
    reason = f"MFU = - (attention_mask is {what}, not rows of 0 and 1 of equal length)"
    assert reason in capsys.readouterr().out
    assert monitor.step_logs[0]["mfu"] is None


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"monitoring": {"flops_profile_frq": 7}},
            "monitoring.flops_profile_frq is not read; the nearest key that is: "
            "monitoring.flops_profile_freq",
        ),
        (
            {"monitoring": {"training_log_freq": 7}},
            "monitoring.training_log_freq is not read; the nearest key that is: "
            "monitor.freq.training_log_freq",
        ),
        (
            {"monitor": {"freq": {"perf_freq": 7}}},
            "monitor.freq.perf_freq is not read; the nearest key that is: "
            "monitor.freq.perf_log_freq",
        ),
    ],
)
def test_a_key_that_is_not_read_is_named_once_with_the_nearest(
    config: Any, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert TrainingMonitor("out", config).flops_profile_freq == 500
    assert capsys.readouterr().err == f"ergmeter: config: {line}\n"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(guard, "_warned", set())
    TrainingMonitor("out", config)
    assert capsys.readouterr().err == ""


def test_keys_of_the_original_are_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("training", "perf", "gpu", "eval")
    freq = {**{f"{name}_log_freq": 5 for name in names}, "flops_profile_freq": 5}
    freq |= {"local_save_freq": 5, "progress_update_freq": 5}
    TrainingMonitor("out", {"monitor": {"freq": freq}, "monitoring": None, "optimizer": {"lr": 1}})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("config", [{"monitoring": 5}, {"monitor": []}, {"monitor": {"freq": 5}}])
def test_a_section_that_is_no_mapping_is_refused(config: Any) -> None:
    with pytest.raises(UsageError, match=r"^monitor\S* is (5|\[\]): it must be a mapping"):
        TrainingMonitor("out", config)


def test_without_a_mask_or_a_model_mfu_is_absent_and_says_why(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = TrainingMonitor("out", None, flops_profile_freq=1)
    bare.start_training()
    bare.log_step(1, 0, 2.0, 1.0, 1e-4)
    bare.log_step(2, 0, 2.0, 1.0, 1e-4, mask(4))
    bare.set_model_ref(model)
    bare.log_step(3, 0, 2.0, 1.0, 1e-4, mask(4))
    bare.finish_training()
    reasons = [line.partition("- ")[2] for line in capsys.readouterr().out.splitlines()[1:4]]
    assert "no attention_mask" in reasons[0]
    assert "no model was given" in reasons[1]
    if not torch.cuda.is_available():
        assert "pass peak_flops_per_s=" in reasons[2]
    assert [one["mfu"] for one in bare.step_logs[:2]] == [None, None]
    # Named late, it is described in the run all the same, and nothing failed of it.
    path = bare.run_path
    assert path is not None
    run = Run.open(path)
    assert not [mark for mark in run.marks if mark.name == "integration_failed"]
    assert run.flops[0].model_per_step == pytest.approx(by_hand([4]))


def test_accumulation_multiplies_what_the_mask_says(model: Any) -> None:
    config = {"deepspeed": {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}}
    monitor = TrainingMonitor("out", config, model=model, peak_flops_per_s=PEAK)
    monitor.start_training()
    time.sleep(0.002)
    monitor.log_step(1, 0, 2.0, 1.0, 1e-4, mask(10, 6))
    entry = monitor.get_latest_metrics()
    path = monitor.run_path
    monitor.finish_training()
    assert entry is not None
    assert entry["tokens_per_second"] * entry["step_time"] == pytest.approx(4 * 16)
    expected = 4 * by_hand([10, 6]) / entry["step_time"] / PEAK
    assert entry["mfu"] == pytest.approx(expected, rel=1e-6)
    assert path is not None
    steps = Run.open(path).steps()
    assert (steps["tokens_real"][0], steps["tokens_computed"][0]) == (64, 80)
    assert (steps["samples"][0], steps["micro_steps"][0]) == (8, 4)
    assert any("4 micro-batches" in mark.detail for mark in Run.open(path).marks)


def test_the_run_has_the_same_steps_tokens_and_mfu(monitor: TrainingMonitor) -> None:
    monitor.start_training()
    for step in range(1, 13):
        time.sleep(0.003)
        monitor.log_step(step, 0, 3.0 / step, 1.5, 1e-4, mask(16, 9))
    path = monitor.run_path
    entries = monitor.step_logs
    monitor.finish_training()
    assert path is not None
    run = Run.open(path)
    found = summarize(run, ALL_STEPS).readings

    def value(key: str) -> float:
        reading = found[key]
        assert isinstance(reading, Reading), reading
        return reading.value

    assert value("tokens.total") == 12 * 25
    assert value("steps.count") == 12
    assert list(run.steps()["loss"]) == [pytest.approx(3.0 / step) for step in range(1, 13)]
    inside_s = sum(entry["step_time"] for entry in entries)
    assert value("time.in_step_s") * 12 == pytest.approx(inside_s, rel=1e-9)
    mean_mfu = sum(entry["mfu"] * entry["step_time"] for entry in entries) / inside_s
    # Over the wall clock, logging included, and with sequences of one whole length.
    assert value("utilization.mfu_frac") == pytest.approx(
        mean_mfu * inside_s / value("time.window_s"), rel=0.02
    )


def test_the_model_trains_on_as_before(monitor: TrainingMonitor, model: Any) -> None:
    state = torch.get_rng_state()
    calls: list[int] = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    monitor.flops_profile_freq = 1
    monitor.start_training()
    for step in range(3):
        monitor.log_step(step, 0, 2.0, 1.0, 1e-4, mask(11, 5))
    hook.remove()
    assert model.training
    assert calls == []
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_evaluation_is_no_steps_time(monitor: TrainingMonitor) -> None:
    monitor.start_training()
    for step in (1, 2):
        monitor.log_step(step, 0, 2.0, 1.0, 1e-4, mask(8))
    time.sleep(0.2)
    before_s = time.perf_counter()
    monitor.log_evaluation(2, 1.9, 0.5, {"f1": 0.4})
    evaluated_s = time.perf_counter()
    time.sleep(0.002)
    least_s = time.perf_counter() - evaluated_s
    monitor.log_step(3, 0, 2.0, 1.0, 1e-4, mask(8))
    most_s = time.perf_counter() - before_s
    assert least_s <= monitor.step_logs[-1]["step_time"] <= most_s
    path = monitor.run_path
    monitor.finish_training()
    assert path is not None
    reading = summarize(Run.open(path)).readings["time.eval_s"]
    assert isinstance(reading, Reading)
    assert reading.value >= 0.2


def test_a_step_with_an_evaluation_somewhere_in_it_has_no_time(monitor: TrainingMonitor) -> None:
    monitor.start_training()
    for step in range(1, 4):
        time.sleep(0.002)
        if step == 2:
            monitor.log_evaluation(step, 1.9, 0.5)
        monitor.log_step(step, 0, 2.0, 1.0, 1e-4, mask(8))
    assert [one["step_time"] is None for one in monitor.step_logs] == [False, True, False]
    assert monitor.step_logs[1]["mfu"] is None


def test_the_log_has_the_documented_keys_and_no_nan(monitor: TrainingMonitor) -> None:
    monitor.start_training()
    monitor.log_step(1, 0, math.nan, math.inf, 1e-4, mask(8))
    monitor.log_epoch(0, 2.5, 12.5, current_step=1)
    text = Path(monitor.log_file).read_text(encoding="utf-8")
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert list(found) == ["step_logs", "epoch_logs", "total_training_time"]
    [step], [epoch] = found["step_logs"], found["epoch_logs"]
    documented = ["step", "epoch", "loss", "grad_norm", "learning_rate", "step_time", "timestamp"]
    assert list(step)[:7] == documented
    assert step["loss"] is None
    assert step["not_finite"] == {"loss": "nan", "grad_norm": "inf"}
    assert (epoch["epoch"], epoch["avg_loss"], epoch["elapsed_time"]) == (0, 2.5, 12.5)
    assert found["total_training_time"] > 0


def test_the_log_is_rewritten_in_all_a_bounded_number_of_times_its_size(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path / "log.json", save_every=10)
    written = saves = 0
    for number in range(20_000):
        log.append({"step": number})
        before = log._saved
        log.save_if_due(1.0)
        if log._saved != before:
            saves += 1
            written += log._saved
            assert log.path.stat().st_size > 10 * log._saved
    assert written < 12 * 20_000
    assert saves < 100
    log.save(2.0)
    found = json.loads(log.path.read_text())
    assert [entry["step"] for entry in found["step_logs"]] == list(range(20_000))
    assert len(log.recent) == 1000
    log.close()


def test_an_earlier_trainings_log_is_set_aside(model: Any, tmp_path: Path) -> None:
    for _ in range(2):
        monitor = TrainingMonitor(tmp_path / "out", {}, model=model)
        monitor.log_step(1, 0, 2.0, 1.0, 1e-4)
        monitor.finish_training()
    kept = json.loads((tmp_path / "out" / "training_log.json.1").read_text())
    assert len(kept["step_logs"]) == 1
    assert len(logged(monitor)["step_logs"]) == 1


@pytest.mark.parametrize(
    ("config", "given", "freq", "source"),
    [
        ({"monitoring": {"flops_profile_freq": 7}}, None, 7, "monitoring.flops_profile_freq"),
        (
            {"monitor": {"freq": {"flops_profile_freq": 8}}}, None,
            8, "monitor.freq.flops_profile_freq",
        ),
        ({"monitor": {"flops_profile_freq": 9}}, None, 9, "monitor.flops_profile_freq"),
        ({"monitoring": {"flops_profile_freq": 7}}, 3, 3, "the argument flops_profile_freq"),
        ({}, None, 500, "the default"),
        (None, None, 500, "the default"),
    ],
)  # fmt: skip
def test_each_spelling_of_the_frequency_is_read(
    config: Any, given: int | None, freq: int, source: str
) -> None:
    found = MonitorSettings.of(config, flops_profile_freq=given, world=1)
    assert (found.flops_profile_freq, found.flops_profile_freq_from) == (freq, source)


def test_the_batch_size_is_deepspeeds_else_the_roots_else_not_known(tmp_path: Path) -> None:
    def batch(config: Any) -> int | None:
        return MonitorSettings.of(config, flops_profile_freq=None, world=2).batch_size

    assert batch({"deepspeed": {"train_batch_size": 48}, "train_batch_size": 5}) == 48
    micro = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}
    assert batch({"deepspeed": micro}) == 3 * 4 * 2
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 64}))
    assert batch({"deepspeed": str(path)}) == 64
    assert batch({"deepspeed": "nowhere.json", "train_batch_size": 5}) == 5
    assert batch({"deepspeed": {**micro, "train_batch_size": "auto"}}) == 3 * 4 * 2
    assert batch({"deepspeed": {"train_batch_size": "auto"}}) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "can't be read: FileNotFoundError: [Errno 2] No such file or directory: 'ds.json'"),
        ('{"train_batch_size": 8,}', "can't be read: JSONDecodeError: "),
        ("[8]", "neither a mapping nor a JSON file with one"),
    ],
)
def test_a_deepspeed_file_that_cant_be_read_is_named_and_nothing_is_made_up(
    text: str | None, why: str, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        Path("ds.json").write_text(text)
    config = {"deepspeed": "ds.json"}
    monitor = TrainingMonitor(
        "out", config, flops_profile_freq=1, model=model, peak_flops_per_s=PEAK
    )
    printed = capsys.readouterr()
    for output in (printed.out, printed.err):
        assert "ds.json" in output
        assert why in output
        assert "not in the configuration" not in output
    monitor.start_training()
    time.sleep(0.001)
    monitor.log_step(1, 0, 2.0, 1.0, 1e-4, mask(8))
    path = monitor.run_path
    monitor.finish_training()
    # How many micro-batches a step has is not known, so nor are its tokens.
    assert (monitor.step_logs[0]["mfu"], monitor.step_logs[0]["tokens_per_second"]) == (None, None)
    assert "MFU = - (gradient accumulation is unknown, and so are the tokens" in (
        capsys.readouterr().out
    )
    assert path is not None
    assert math.isnan(Run.open(path).steps()["tokens_real"][0])


def test_accumulation_that_is_given_elsewhere_does_not_need_the_deepspeed_file(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"deepspeed": "ds.json", "training": {"gradient_accumulation_steps": 2}}
    monitor = TrainingMonitor("out", config, model=model, peak_flops_per_s=PEAK)
    monitor.start_training()
    time.sleep(0.001)
    monitor.log_step(1, 0, 2.0, 1.0, 1e-4, mask(8))
    monitor.finish_training()
    entry = monitor.step_logs[0]
    assert entry["tokens_per_second"] * entry["step_time"] == pytest.approx(16)
    assert capsys.readouterr().err.count("ds.json can't be read") == 1


def test_a_disk_that_fails_costs_the_log_and_nothing_else(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("a file where a folder should be")
    monitor = TrainingMonitor(tmp_path / "out", {}, model=model)
    line = f"no training log from here on: {monitor.log_file} can't be written: FileExistsError: "
    error = capsys.readouterr().err
    assert error.startswith(f"ergmeter: {line}")
    assert error.count("\n") == 1
    for step in range(3):
        monitor.log_step(step, 0, 2.0, 1.0, 1e-4, mask(8))
    path = monitor.run_path
    monitor.finish_training()
    assert capsys.readouterr().err == ""
    assert path is not None
    assert len(Run.open(path).steps()["start_ns"]) == 2


def test_another_rank_is_in_the_run_and_says_and_writes_nothing(
    model: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monitor = TrainingMonitor("out", {}, flops_profile_freq=1, model=model, peak_flops_per_s=PEAK)
    monitor.start_training()
    monitor.log_step(1, 0, 2.0, 1.0, 1e-4, mask(8))
    monitor.finish_training()
    assert capsys.readouterr().out == ""
    assert not Path("out").exists()
    assert monitor.run_path is not None
    steps = Run.open(monitor.run_path).steps()
    assert (steps["rank"][0], steps["tokens_real"][0]) == (1, 8)


class Rows:
    """W&B's side of a monitor, in memory."""

    def __init__(self) -> None:
        self.rows: dict[int | None, dict[str, Any]] = {}

    def log(self, values: dict[str, Any], *, step: int | None = None) -> None:
        self.rows.setdefault(step, {}).update(values)

    def finish(self) -> None:
        pass


def test_rows_come_as_often_as_the_configuration_says_and_not_for_skipped_steps(model: Any) -> None:
    config = {"monitor": {"freq": {"training_log_freq": 2, "perf_log_freq": 3}}}
    monitor = TrainingMonitor("out", config, model=model, peak_flops_per_s=PEAK)
    rows = Rows()
    monitor._rows = rows  # type: ignore[assignment]
    monitor.start_training()
    for step in range(1, 13):
        monitor.log_step(step, 0, 2.0, 1.0, 1e-4, mask(8), step in (4, 9))
    by_group = {
        group: [step for step, row in rows.rows.items() if any(n.startswith(group) for n in row)]
        for group in ("training/", "perf/")
    }
    monitor.finish_training()
    assert by_group == {"training/": [2, 6, 8, 10, 12], "perf/": [3, 6, 12]}
    assert set(rows.rows) == {2, 3, 6, 8, 10, 12, None}
    assert set(rows.rows[None]) == {"training/total_time"}


def test_the_keys_of_wandb_and_any_values_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    asked: dict[str, Any] = {}

    class Opened(Rows):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            asked.update(options)
            self.axes: dict[str, str | None] = {}

        def define_metric(self, name: str, *, step_metric: str | None = None) -> None:
            self.axes[name] = step_metric

    monkeypatch.setattr(wandb, "init", Opened)
    monkeypatch.setattr(wandb, "run", None)
    keys = {"project": "p", "run_name": "r", "tags": ["a", "b"], "notes": "n"}
    config = {"wandb": {"enabled": True, **keys}, "train_batch_size": 2}
    monitor = TrainingMonitor("out", config)
    assert asked == {
        "project": "p", "name": "r", "tags": ["a", "b"], "notes": "n", "config": config,
        "resume": "allow",
    }  # fmt: skip
    rows: Any = monitor._rows._run
    assert rows.axes == {"step": None, **dict.fromkeys(("training/*", "perf/*", "eval/*"), "step")}
    monitor.log_metrics({"eval/f1": 0.5, "mine": 2}, 7)
    monitor.log_evaluation(8, 1.5, 0.25, {"f1": 0.75})
    monitor.log_epoch(0, 2.5, 12.5, current_step=8)
    monitor.finish_training()
    assert rows.rows[7] == {"eval/f1": 0.5, "mine": 2, "step": 7}
    evaluated = {"eval/overall_loss": 1.5, "eval/overall_accuracy": 0.25, "eval/f1": 0.75}
    epoch = {"epoch_avg_loss": 2.5, "epoch_number": 0, "epoch_time": 12.5}
    ended = {f"training/{name}": value for name, value in epoch.items()}
    assert rows.rows[8] == {**evaluated, **ended, "step": 8}


class OnItsWay:
    """A fetch of two sums that arrives when the test says so."""

    def __init__(self, *sums: int) -> None:
        self.is_here = False
        self._sums = list(sums)

    def values(self) -> list[int]:
        return self._sums


def test_a_mask_on_a_device_is_not_waited_for_and_steps_stay_in_order(
    monitor: TrainingMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = OnItsWay(8, 64)
    masks: Any = [Masked(1, 8, None, None, first), Masked(1, 8, 4, 16, None)]  # type: ignore[arg-type]
    masks += [Masked(1, 8, None, None, OnItsWay(2, 4))]  # type: ignore[arg-type]
    monkeypatch.setattr(Masked, "of", lambda *_, **__: masks.pop(0))
    monkeypatch.setattr(Masked, "counts", lambda *_: None)
    monkeypatch.setattr(monitor._training, "stepped", lambda *_, **__: None)
    monitor.start_training()
    for step in (1, 2):
        time.sleep(0.001)
        monitor.log_step(step, 0, 2.0, 1.0, 1e-4, None)
    assert monitor.step_logs == []
    first.is_here = True
    monitor.log_step(3, 0, 2.0, 1.0, 1e-4, None)
    assert [one["step"] for one in monitor.step_logs] == [1, 2]
    monitor.save_logs()  # which waits
    steps = logged(monitor)["step_logs"]
    found = [round(one["tokens_per_second"] * one["step_time"]) for one in steps]
    assert found == [8, 4, 2]
