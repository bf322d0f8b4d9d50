"""Of which architecture is a model, as far as can be told without loading it?

From its own config.json: in its folder, or in the hub's cache on this machine. Nothing is fetched,
since a plan must not depend on the network; what is not known is said in the scenarios' file.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path

_BUILTIN = {
    "builtin:tiny": "LlamaForCausalLM",
    "builtin:1b": "LlamaForCausalLM",
    "builtin:tiny-seq2seq": "T5ForConditionalGeneration",
}


@lru_cache(maxsize=1024)
def architecture(model: str) -> str | None:
    """The name of its class, such as LlamaForCausalLM, or None if that is not known here."""
    if model in _BUILTIN:
        return _BUILTIN[model]
    for path in _configs(model):
        try:
            named = json.loads(path.read_text(encoding="utf-8")).get("architectures")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(named, list) and named:
            return str(named[0])
    return None


def _configs(model: str) -> list[Path]:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return [folder / "config.json"]
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    snapshots = cache / f"models--{model.replace('/', '--')}" / "snapshots"
    return sorted(snapshots.glob("*/config.json")) if "/" in model else []
