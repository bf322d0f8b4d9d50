"""Builds a built-in model: random weights of a fixed seed, and a tokenizer trained on demo text.

Run by `tiny_model.saved_model` in a process of its own:

    python -m ergmeter.workloads.sft.build_model NAME TARGET
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ergmeter.workloads import demo_text
from ergmeter.workloads.sft.tiny_model import SEED, recipe_of

# Padding is a token of its own: where it is also the end, ends are taken for padding.
PAD, BEGIN, END = "<pad>", "<s>", "</s>"
_MARKS = (PAD, BEGIN, END)


def tokenizer(name: str) -> Any:  # noqa: ANN401  of transformers, which has no types
    """A byte-level BPE tokenizer, trained on the built-in data set's text.

    Ours has some thousand different words, so a large vocabulary is not filled; the embeddings
    beyond are never used, and cost what they cost in any model.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe_of(name)["tokens"],
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
    """The model with its first weights: the same at every call."""
    recipe = recipe_of(name)
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


def _name_class(path: Path) -> None:
    """By the name that every version knows: transformers 5 writes one that 4 can't load, and an
    environment with another version may train the same model."""
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2))


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
