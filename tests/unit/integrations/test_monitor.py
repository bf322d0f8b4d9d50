"""The two functions of a profiler MFU monitor: right, harmless, and quick after the first call."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ergmeter.compat import training_monitor as monitor
from ergmeter.compat.training_monitor import calculate_mfu_with_profiler, get_gpu_peak_flops
from ergmeter.errors import UsageError
from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.source import model_graph
from ergmeter.flops.work import step_work

CONFIG = LlamaConfig(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=160,
    vocab_size=256,
)


@pytest.fixture
def model() -> Any:
    made: Any = LlamaForCausalLM
    return made(CONFIG).to(torch.bfloat16).train()


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "NVIDIA H100 80GB HBM3")


@pytest.mark.usefixtures("h100")
def test_it_is_the_training_step_against_the_devices_own_peak(model: Any) -> None:
    graph = model_graph(ModelConfig(CONFIG.to_dict(), where="test"))
    flops = step_work(graph, Batch.of(4, 32)).chosen.model_per_step
    found = calculate_mfu_with_profiler(model, batch_size=4, seq_length=32, step_time=0.001)
    assert found == pytest.approx(flops / 0.001 / 989.5e12)


def test_the_documented_call_with_a_peak_of_ones_own(model: Any) -> None:
    """Its own example: 4 sequences of 512 tokens in 0.1 s; the table is not asked for a peak."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mfu = calculate_mfu_with_profiler(
            model, batch_size=4, seq_length=512, step_time=0.1, peak_flops_per_s=1e12
        )
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160) + 64 * 256
    pairs = 512 * 513 // 2
    by_hand = 4 * (6 * weights * 512 + 12 * 2 * 64 * pairs)
    assert mfu == pytest.approx(by_hand / 0.1 / 1e12, rel=1e-9)
    assert f"MFU: {mfu:.4f}" == "MFU: 0.0207"
    for wrong in (0, -1, "fast", math.nan):
        with pytest.raises(UsageError, match="peak_flops_per_s must be a number"):
            calculate_mfu_with_profiler(model, 4, 512, 0.1, peak_flops_per_s=wrong)  # type: ignore[arg-type]


@pytest.mark.usefixtures("h100")
def test_a_model_of_none_is_nan_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "_warned", set())
    no_model: Any = None
    with pytest.warns(UserWarning, match="model is None, not a torch.nn.Module") as warned:
        assert math.isnan(calculate_mfu_with_profiler(no_model, 4, 32, 0.1))
    assert len(warned) == 1


@pytest.mark.usefixtures("h100")
def test_nothing_is_clamped(model: Any) -> None:
    assert calculate_mfu_with_profiler(model, 4, 32, 1e-12) > 1


@pytest.mark.usefixtures("h100")
def test_the_model_is_left_as_it_was(model: Any) -> None:
    before = torch.get_rng_state()
    calculate_mfu_with_profiler(model, 4, 32, 0.1)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("h100")
def test_a_model_without_a_configuration_is_counted_by_running_its_shapes() -> None:
    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(100, 32)
            self.one = torch.nn.Linear(32, 64, bias=False)
            self.two = torch.nn.Linear(64, 100, bias=False)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.two(torch.relu(self.one(self.embedding(input_ids))))
            return hidden

    found = calculate_mfu_with_profiler(Words(), 2, 16, 1.0, dtype="bf16")
    by_hand = 6 * 2 * 16 * (32 * 64 + 64 * 100)
    assert found == pytest.approx(by_hand / 989.5e12)


@pytest.mark.usefixtures("h100")
def test_it_is_counted_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = calculate_mfu_with_profiler(model, 4, 32, 0.1)
    monkeypatch.setattr(monitor, "_sequence_flops", lambda *_: pytest.fail("counted again"))
    assert calculate_mfu_with_profiler(model, 8, 32, 0.2) == pytest.approx(first)


@pytest.mark.usefixtures("h100")
def test_freezing_counts_anew(model: Any) -> None:
    whole = calculate_mfu_with_profiler(model, 4, 32, 0.1)
    for parameter in model.model.parameters():
        parameter.requires_grad_(requires_grad=False)
    assert calculate_mfu_with_profiler(model, 4, 32, 0.1) < whole


@pytest.mark.usefixtures("h100")
def test_weights_in_fp32_do_not_say_what_products_are_in(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "_warned", set())
    held = model.to(torch.float32)
    with pytest.warns(UserWarning, match="pass dtype=") as said:
        assumed = calculate_mfu_with_profiler(held, 4, 32, 0.1)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calculate_mfu_with_profiler(held, 4, 32, 0.1) == assumed
        told = calculate_mfu_with_profiler(held, 4, 32, 0.1, dtype="tf32")
    assert told == pytest.approx(2 * assumed, rel=1e-3)  # 494.7 against 989.5 TFLOP/s


def test_an_unknown_peak_is_nan_and_one_warning(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "NVIDIA H299")
    monkeypatch.setattr(monitor, "_warned", set())
    with pytest.warns(UserWarning, match="unknown peak"):
        assert math.isnan(calculate_mfu_with_profiler(model, 4, 32, 0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isnan(calculate_mfu_with_profiler(model, 4, 32, 0.1))


def test_peaks_by_name_and_type() -> None:
    assert get_gpu_peak_flops("NVIDIA L40S") == 362.05e12
    assert get_gpu_peak_flops("NVIDIA L4") == 121e12
    assert get_gpu_peak_flops("NVIDIA H200", dtype="fp8") == 1979e12


def test_without_a_gpu_there_is_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(monitor, "_warned", set())
    with pytest.warns(UserWarning, match="no CUDA device"):
        assert math.isnan(get_gpu_peak_flops())


@pytest.mark.parametrize(
    "bad",
    [
        *((0, 8, 1.0), (1, 0, 1.0), (1, 8, 0.0), (1, 8, math.nan), (1, 8, "x"), (1, 8, None)),
        *(("x", 8, 1.0), (1.5, 8, 1.0), (1, True, 1.0)),
    ],
)
def test_nonsense_is_refused(model: Any, bad: tuple[Any, Any, Any]) -> None:
    with pytest.raises(UsageError):
        calculate_mfu_with_profiler(model, *bad)
