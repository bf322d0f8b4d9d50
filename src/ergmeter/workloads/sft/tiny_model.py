"""The built-in models, built once and cached, for machines that can't download one.

Weights are random, of a fixed seed, and the tokenizer is trained on the demo's text. Each rank
builds in a folder of its own, and the first to finish renames it. The name ends with a digest of
the recipe, so that a changed recipe gets a new folder. Another process builds the model:

    python -m ergmeter.workloads.sft.tiny_model NAME TARGET

In the measured process it would keep a copy of the weights, change the random numbers and load
transformers before Unsloth can patch it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ergmeter.errors import PluginError
from ergmeter.workloads import demo_text
from ergmeter.workloads.sft.config_file import BUILTIN

SEED = 1
# `1b` has the shape of Llama 3.2 1B but for its vocabulary: 1.1 thousand million parameters. `tiny`
# is as small as still has a step of some 50 ms on a slow core.
RECIPES: dict[str, dict[str, Any]] = {
    "tiny": {"type": "llama", "dtype": "float32", "config": {
        "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }},
    "tiny-seq2seq": {"type": "t5", "dtype": "float32", "config": {
        "vocab_size": 1024, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2,
        "num_heads": 4, "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0,
    }},
    "1b": {"type": "llama", "dtype": "bfloat16", "config": {
        "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 8192, "tie_word_embeddings": False,
    }},
}  # fmt: skip


def saved_model(name: str, directory: Path) -> Path:
    """The folder of that built-in model and its tokenizer, which from_pretrained loads."""
    recipe = _recipe(name)
    digest = hashlib.sha256(json.dumps([SEED, recipe], sort_keys=True).encode()).hexdigest()
    target = directory / f"{name.removeprefix(BUILTIN)}-{digest[:8]}"
    if not target.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        _make(name, target)
    return target


def _make(name: str, target: Path) -> None:
    words = [sys.executable, "-m", "ergmeter.workloads.sft.tiny_model", name, str(target)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise PluginError(f"{name} could not be made in {target.parent}: {lines[-1]}")


# Padding is a token of its own: where it is also the end, ends are taken for padding.
PAD, BEGIN, END = "<pad>", "<s>", "</s>"
_MARKS = (PAD, BEGIN, END)


def tokenizer(name: str) -> Any:  # noqa: ANN401  of transformers, which has no types
    """A byte-level BPE tokenizer, trained on the built-in data set's text.

    That text has about a thousand different words, so it does not fill a large vocabulary. The
    unused embeddings cost as much as in any model.
    """
    import transformers  # noqa: PLC0415  in the process that builds
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_recipe(name)["config"]["vocab_size"],
        special_tokens=list(_MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(
        (document.text.decode() for document in demo_text.documents()), trainer
    )
    kind: Any = transformers.PreTrainedTokenizerFast
    return kind(tokenizer_object=made, pad_token=PAD, bos_token=BEGIN, eos_token=END)


def model(name: str) -> Any:  # noqa: ANN401
    """The model with its initial weights, the same at every call."""
    import torch  # noqa: PLC0415  in the process that builds
    import transformers  # noqa: PLC0415

    recipe = _recipe(name)
    pad, begin, end = range(len(_MARKS))
    is_llama = recipe["type"] == "llama"
    config_kind: Any = transformers.LlamaConfig if is_llama else transformers.T5Config
    kind: Any = (
        transformers.AutoModelForCausalLM if is_llama else transformers.AutoModelForSeq2SeqLM
    )
    marks = {"bos_token_id": begin} if is_llama else {"decoder_start_token_id": pad}
    config = config_kind(**recipe["config"], pad_token_id=pad, eos_token_id=end, **marks)
    torch.manual_seed(SEED)
    return kind.from_config(config, dtype=getattr(torch, recipe["dtype"]))


def make(name: str, target: Path) -> None:
    """Saves model and tokenizer in a new folder, renamed to the target when complete."""
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        model(name).save_pretrained(folder)
        tokenizer(name).save_pretrained(folder)
        _name_class(folder / "tokenizer_config.json")
        folder.chmod(0o755)  # others may read what mkdtemp made for us alone
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # another process was quicker: its model is the same
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _recipe(name: str) -> dict[str, Any]:
    return RECIPES[name.removeprefix(BUILTIN)]


def _name_class(path: Path) -> None:
    """Set the tokenizer's class to a name that every version loads: transformers 5 writes one that
    4 can't load, and another environment may train the same model."""
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2))


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
