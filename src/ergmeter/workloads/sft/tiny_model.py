"""Where does a model come from, if nothing can be downloaded? It is made here, once, and kept.

Three traps. Two ranks that make it at the same time: each builds in a folder of its own and the
first to finish gives it the name. A recipe that changes under an old folder: the name ends with a
digest of the recipe. And making it in the process that is measured, which would keep a copy of the
weights in its memory, move its random numbers and load transformers before Unsloth could change
it: it is made by another process.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ergmeter.errors import PluginError, UsageError
from ergmeter.workloads.sft.config.sections import BUILTIN

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


def saved(name: str, directory: Path) -> Path:
    """The folder of that built-in model and its tokenizer, which from_pretrained loads."""
    recipe = recipe_of(name)
    digest = hashlib.sha256(json.dumps([SEED, recipe], sort_keys=True).encode()).hexdigest()
    target = directory / f"{name.removeprefix(BUILTIN)}-{digest[:8]}"
    if not target.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        _make(name, target)
    return target


def recipe_of(name: str) -> dict[str, Any]:
    """What it is made of."""
    try:
        return RECIPES[name.removeprefix(BUILTIN)]
    except KeyError:
        names = ", ".join(BUILTIN + one for one in RECIPES)
        raise UsageError(f"{name} is no built-in model; they are {names}") from None


def _make(name: str, target: Path) -> None:
    words = [sys.executable, "-m", "ergmeter.workloads.sft.build_model", name, str(target)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise PluginError(f"{name} could not be made in {target.parent}: {lines[-1]}")
