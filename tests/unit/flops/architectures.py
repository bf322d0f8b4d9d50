"""Configurations of published models, in tests/data/configs, and what is known of their sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ergmeter.flops.config import ModelConfig
from ergmeter.flops.source import model_graph

DATA = Path(__file__).parents[2] / "data" / "configs"

# Parameters in billions, as their model cards or papers round them.
PUBLISHED = {
    "bamba-9b": 9.78,
    "command-r-35b": 35.0,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671,
    "falcon-40b": 41.3,
    "falcon-7b": 6.92,
    "falcon-mamba-7b": 7.27,
    "gemma-2-9b": 9.24,
    "gemma-2b": 2.51,
    "gemma-3-27b-text": 27.0,
    "gpt-oss-120b": 116.8,
    "gpt-oss-20b": 20.9,
    "gpt2-xl": 1.558,
    "granite-3.0-1b-a400m": 1.33,
    "granite-3.1-8b": 8.17,
    "jamba-v0.1": 51.6,
    "kimi-k2": 1026,
    "llama-2-7b": 6.74,
    "llama-3.1-405b": 406,
    "llama-3.1-70b": 70.6,
    "llama-3.1-8b": 8.03,
    "llama-4-scout-text": 107.8,
    "mamba-2.8b": 2.77,
    "mamba2-2.7b": 2.70,
    "mistral-7b-v0.1": 7.24,
    "mistral-nemo-12b": 12.2,
    "mixtral-8x22b": 140.6,
    "mixtral-8x7b": 46.7,
    "mpt-7b": 6.65,
    "olmo-2-13b": 13.7,
    "olmo-7b": 6.89,
    "olmoe-1b-7b": 6.92,
    "phi-2": 2.78,
    "phi-3-mini": 3.82,
    "phi-4": 14.7,
    "pythia-12b": 11.8,
    "qwen1.5-moe-a2.7b": 14.3,
    "qwen2.5-32b": 32.8,
    "qwen2.5-7b": 7.62,
    "qwen3-235b-a22b": 235,
    "qwen3-30b-a3b": 30.5,
    "qwen3-32b": 32.8,
    "qwen3-8b": 8.19,
    "qwen3-next-80b-a3b": 79.7,
    "smollm3-3b": 3.08,
    "stablelm-3b": 2.80,
    "starcoder2-7b": 7.17,
}


def fields(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return found


def graph(name: str) -> Any:
    return model_graph(ModelConfig(fields(name), where=name))
