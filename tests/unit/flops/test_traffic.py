"""Bytes that a decoding step has to move: weights, caches of every kind, states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.estimate.storage import ASSUMED
from ergmeter.flops.graph.graph import Attention, Graph
from ergmeter.flops.source import model_graph
from ergmeter.flops.work import MemoryTraffic, forward_traffic

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
T5 = {
    "model_type": "t5",
    "d_model": 1024,
    "d_kv": 64,
    "d_ff": 4096,
    "num_layers": 24,
    "num_decoder_layers": 24,
    "num_heads": 16,
    "vocab_size": 32128,
    "feed_forward_proj": "relu",
    "relative_attention_num_buckets": 32,
}


def graph(name: str) -> Graph:
    return model_graph(ModelConfig(json.loads((CONFIGS / f"{name}.json").read_text()), where=name))


def decoding(model: Graph, batch: Batch) -> MemoryTraffic:
    return forward_traffic(model, batch, ASSUMED)  # 2 B a weight and a cached number


def test_the_cache_of_grouped_keys_and_values() -> None:
    moved = decoding(graph("llama-3.1-8b"), Batch.of(8, 1, past=4096))
    position = 32 * 2 * 8 * 128
    assert moved.cache_read_bytes == 2 * 8 * 4096 * position
    assert moved.cache_written_bytes == 2 * 8 * position
    assert moved.weights_bytes == 2 * (8_030_261_248 - 128256 * 4096)  # a lookup reads a row


def test_a_window_is_all_that_is_read() -> None:
    # The window of 4096 has the new position in it, so 4095 are read, as transformers keeps them.
    moved = decoding(graph("mistral-7b-v0.1"), Batch.of(1, 1, past=32768))
    assert moved.cache_read_bytes == 2 * 4095 * 32 * 2 * 8 * 128


def test_of_a_prompt_just_what_the_next_token_sees_is_kept() -> None:
    position = 2 * 2 * 8 * 128  # bytes, of a layer with 8 heads of keys and values
    moved = decoding(graph("mistral-7b-v0.1"), Batch.of(2, 9000))
    assert (moved.cache_read_bytes, moved.cache_written_bytes) == (0, 2 * 4095 * 32 * position)
    # Half of gpt-oss-20b's 24 layers see 128 positions, of heads half as wide.
    moved = decoding(graph("gpt-oss-20b"), Batch.of(1, 1000))
    assert moved.cache_written_bytes == 12 * (127 + 1000) * position / 2
    # Of Llama 4's 48 layers 36 see their chunk of 8192 alone: 9000 - 8192 positions.
    moved = decoding(graph("llama-4-scout-text"), Batch.of(1, 9000))
    assert moved.cache_written_bytes == (36 * 808 + 12 * 9000) * position


def test_a_chunk_is_read_as_far_as_it_goes() -> None:
    model = graph("llama-4-scout-text")
    cores = [node.work for node in model if isinstance(node.work, Attention)]
    full = sum(core.chunk is None for core in cores)
    moved = decoding(model, Batch.of(1, 1, past=32768))  # four whole chunks of 8192
    assert moved.cache_read_bytes == 2 * full * 32768 * 2 * 8 * 128


def test_latent_attention_keeps_what_is_compressed() -> None:
    moved = decoding(graph("deepseek-v3"), Batch.of(1, 1, past=1000))
    assert moved.cache_read_bytes == 2 * 61 * 1000 * (512 + 64)


def test_a_source_is_kept_whole_and_read_at_every_step() -> None:
    model = model_graph(ModelConfig(T5, where="t5"))
    batch = Batch.of(64, 1, past=100, source_len=4096, facts=model.facts)
    position = 24 * 2 * 16 * 64
    assert decoding(model, batch).cache_read_bytes == 2 * 64 * position * (4096 + 100)


def test_a_state_is_read_and_written_whatever_the_context() -> None:
    model = graph("mamba-2.8b")
    inner, state, conv, layers = 5120, 16, 4, 64
    for past in (1, 100_000):
        moved = decoding(model, Batch.of(256, 1, past=past))
        numbers = 256 * layers * (inner * state + inner * (conv - 1))
        assert moved.cache_read_bytes == moved.cache_written_bytes == 2 * numbers


def test_of_the_experts_those_are_read_that_somebody_meets() -> None:
    model = graph("mixtral-8x7b")
    one, many = (decoding(model, Batch.of(rows, 1, past=1)).weights_bytes for rows in (1, 512))
    rest = 2 * (model.params_active - 32000 * 4096)
    assert one == pytest.approx(rest)
    assert many == pytest.approx(2 * (model.params - 32000 * 4096), rel=1e-6)
