"""The built-in models, built once and cached, for machines that can't download one.

Each rank builds in a folder of its own, and the first to finish renames it. The name ends with a
digest of the recipe, so that a changed recipe gets a new folder. Another process builds the model.
In the measured process it would keep a copy of the weights, change the random numbers and load
transformers before Unsloth can patch it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ergmeter.errors import PluginError, UsageError
from ergmeter.workloads.sft.config_file import BUILTIN

SEED = 1
# `1b` has the shape of Llama 3.2 1B but for its vocabulary: 1.1 thousand million parameters. `tiny`
# is as small as still has a step of some 50 ms on a slow core.
RECIPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "type": "llama",
        "dtype": "float32",
        "tokens": 1024,
        "config": {
            "vocab_size": 1024,
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        },
    },
    "tiny-seq2seq": {
        "type": "t5",
        "dtype": "float32",
        "tokens": 1024,
        "config": {
            "vocab_size": 1024,
            "d_model": 128,
            "d_kv": 32,
            "d_ff": 256,
            "num_layers": 2,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",
            "dropout_rate": 0.0,
        },
    },
    "1b": {
        "type": "llama",
        "dtype": "bfloat16",
        "tokens": 32_000,
        "config": {
            "vocab_size": 32_000,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        },
    },
}


def saved_model(name: str, directory: Path) -> Path:
    """The folder of that built-in model and its tokenizer, which from_pretrained loads."""
    recipe = recipe_of(name)
    digest = hashlib.sha256(json.dumps([SEED, recipe], sort_keys=True).encode()).hexdigest()
    target = directory / f"{name.removeprefix(BUILTIN)}-{digest[:8]}"
    if not target.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        _make(name, target)
    return target


def recipe_of(name: str) -> dict[str, Any]:
    """The recipe of a built-in model."""
    try:
        return RECIPES[name.removeprefix(BUILTIN)]
    except KeyError:
        names = ", ".join(BUILTIN + recipe for recipe in RECIPES)
        raise UsageError(f"{name} is no built-in model; they are {names}") from None


def _make(name: str, target: Path) -> None:
    words = [sys.executable, "-m", "ergmeter.workloads.sft.build_model", name, str(target)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise PluginError(f"{name} could not be made in {target.parent}: {lines[-1]}")
