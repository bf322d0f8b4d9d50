"""Reading a prompt and going on from it, by hand and against each other, at published sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.graph.graph import Graph
from ergmeter.flops.source import model_graph
from ergmeter.flops.work import step_work

CONFIGS = Path(__file__).parents[2] / "data" / "configs"


def graph(name: str, **changed: Any) -> Graph:
    fields = json.loads((CONFIGS / f"{name}.json").read_text())
    return model_graph(ModelConfig(fields | changed, where=name))


def flops(model: Graph, batch: Batch, phase: str) -> float:
    return step_work(model, batch, phase=phase).chosen.model_per_step


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("llama-3.1-8b", {}),
        ("gemma-2-9b", {"sliding_window": 8}),
        ("gpt-oss-20b", {"sliding_window": 5}),
        ("llama-4-scout-text", {"attention_chunk_size": 7}),
        ("deepseek-v3", {}),
        ("jamba-v0.1", {}),
        ("qwen3-next-80b-a3b", {}),
    ],
)
def test_tokens_made_one_by_one_cost_what_they_cost_read_at_once(
    name: str, changed: dict[str, Any]
) -> None:
    model = graph(name, num_hidden_layers=4, layer_types=None, **changed)
    at_once = flops(model, Batch.of(2, 20), "prefill")  # the head at every position
    one_by_one = sum(flops(model, Batch.of(2, 1, past=past), "decode") for past in range(20))
    assert one_by_one == pytest.approx(at_once, rel=1e-12)
    in_two = flops(model, Batch.of(2, 11), "prefill") + flops(
        model, Batch.of(2, 9, past=11), "prefill"
    )
    assert in_two == pytest.approx(at_once, rel=1e-12)


def test_a_decoding_step_of_alternating_windows_by_hand() -> None:
    # Gemma 2 9B: 42 layers of 3584, 16 heads of 256 with 8 of keys, half of them see 4096.
    layer = 3584 * 256 * (16 + 2 * 8) + 16 * 256 * 3584 + 3 * 3584 * 14336
    weights = 42 * layer + 256000 * 3584
    seen = 21 * 4096 + 21 * 10001
    by_hand = 3 * (2 * weights + 2 * 16 * (256 + 256) * seen)
    assert flops(graph("gemma-2-9b"), Batch.of(3, 1, past=10_000), "decode") == by_hand


def test_a_decoding_step_of_a_mixture_by_hand() -> None:
    # gpt-oss-20b: 24 layers of 2880, 64 heads of 64 with 8 of keys, half of them see 128; 4 of 32
    # experts.
    layer = 2880 * 64 * (64 + 2 * 8) + 64 * 64 * 2880 + 2880 * 32 + 4 * 3 * 2880 * 2880
    weights = 24 * layer + 201088 * 2880
    seen = 12 * 128 + 12 * 8193
    by_hand = 2 * weights + 2 * 64 * (64 + 64) * seen
    assert flops(graph("gpt-oss-20b"), Batch.of(1, 1, past=8192), "decode") == by_hand


def test_latent_attention_unpacked_and_what_absorbing_adds() -> None:
    # DeepSeek-V3: 128 heads; scores of 128 + 64 and values of 128, or of 512 + 64 and 512.
    work = step_work(graph("deepseek-v3"), Batch.of(1, 1, past=8192), phase="decode")
    pairs = 61 * 8193
    core = work.parts["attention scores"].forward + work.parts["attention values"].forward
    assert core == 2 * 128 * (192 + 128) * pairs
    more = 2 * 128 * (576 + 512) * pairs - core
    assert any(f"{more / 1e9:.4g} GFLOP more" in line for line in work.assumptions)
    read = step_work(graph("deepseek-v3"), Batch.of(1, 64), phase="prefill")
    assert not any("more" in line for line in read.assumptions)


def test_the_last_logits_alone() -> None:
    model = graph("llama-3.1-8b")
    head = 2 * 4096 * 128256
    every = flops(model, Batch.of(4, 100, lengths=[70, 30, 9]), "prefill")
    last = flops(model, Batch.of(4, 100, lengths=[70, 30, 9], last_logits=True), "prefill")
    assert every - last == head * (109 - 3)
