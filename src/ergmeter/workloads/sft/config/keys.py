"""Which keys may a configuration have, under which other names, and which does it have no use for?

The trap: a key that is ignored. `learning_rat: 1e-5` then trains with the default and says 1e-5 in
the file, which is why an unknown key is an error. Those of the original that do nothing here are
known by name, so that the error can say what to do instead of guessing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ergmeter.workloads.sft.config.value_kinds import (
    Kind,
    choice,
    file,
    flag,
    modules,
    number,
    whole_number,
    word,
)


@dataclass(frozen=True, slots=True)
class Key:
    """A key's kind of value, the other names it goes by, and its field where that differs."""

    kind: Kind
    also: tuple[str, ...] = ()
    field: str | None = None


_WHEN = choice("no", "steps", "epoch")
# The schedules of transformers that need no further settings.
_SCHEDULES = choice(
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
    "inverse_sqrt",
)  # fmt: skip

TOP = {
    "task_mode": Key(choice("sft", "cpt", "cpt_mixed")),
    "seed": Key(whole_number(0)),
    "report": Key(flag),
    "block_size": Key(whole_number(2)),
    "pack_factor": Key(whole_number(1)),
}
MODEL = {
    "name": Key(word),
    "local_dir": Key(file),
    "type": Key(choice("causal", "seq2seq")),
    "max_seq_len": Key(whole_number(2), ("max_seq_length", "max_length")),
    "trust_remote_code": Key(flag),
    "attn_implementation": Key(word, field="attention"),
}
TUNING = {
    "backend": Key(choice("torch", "bnb", "unsloth")),
    "mode": Key(choice("lora", "qlora", "dora", "full")),
    "bits": Key(choice(4, 8)),
}
LORA = {
    "r": Key(whole_number(1), ("rank",)),
    "alpha": Key(whole_number(1), ("lora_alpha",)),
    "dropout": Key(number(0, below=1), ("lora_dropout",)),
    "target_modules": Key(modules),
}
TRAIN = {
    "batch_size": Key(whole_number(1), ("per_device_train_batch_size",)),
    "grad_accum": Key(whole_number(1), ("gradient_accumulation_steps",)),
    "epochs": Key(number(0, above=True), ("num_train_epochs",)),
    "max_steps": Key(whole_number(1)),
    "lr": Key(number(0, above=True), ("learning_rate",)),
    "lr_scheduler": Key(_SCHEDULES, ("lr_scheduler_type",)),
    "warmup_ratio": Key(number(0, below=1)),
    "warmup_steps": Key(whole_number(0), ("num_warmup_steps",)),
    "weight_decay": Key(number(0)),
    "max_grad_norm": Key(number(0, above=True)),
    "fp16": Key(flag),
    "bf16": Key(flag),
    "optim": Key(word),
    "gradient_checkpointing": Key(flag),
    "evaluation_strategy": Key(_WHEN, ("eval_strategy",)),
    "eval_steps": Key(whole_number(1)),
    "save_strategy": Key(_WHEN),
    "save_steps": Key(whole_number(1)),
    "save_total_limit": Key(whole_number(1)),
    "early_stopping_patience": Key(whole_number(1)),
    "logging_steps": Key(whole_number(1)),
    "output_dir": Key(file),
    "resume": Key(flag),
    "dataloader_workers": Key(whole_number(0), ("dataloader_num_workers",)),
    "trainer": Key(choice("transformers", "trl")),
    "tensorboard": Key(flag),
}
DATA = {
    "train_path": Key(file),
    "val_path": Key(file),
    "template_path": Key(file),
    "packing": Key(flag),
    "pad_to_multiple_of": Key(whole_number(1)),
    "limit": Key(whole_number(1)),
}
METRICS = {
    "enable_energy_logging": Key(flag),
    "sample_interval_s": Key(number(0, above=True)),
    "warmup_s": Key(number(0)),
    "log_vram_every_s": Key(number(0, above=True)),
    "results_csv": Key(file),
    "hf_memory": Key(flag),
}
SOURCE = {
    "name": Key(word),
    "path": Key(word),
    "type": Key(choice("cpt", "sft", "chat")),
    "weight": Key(number(0, above=True)),
}
SECTIONS = {
    "model": MODEL,
    "tuning": TUNING,
    "tuning.lora": LORA,
    "train": TRAIN,
    "data": DATA,
    "metrics": METRICS,
}

# Of the original, with what to do about each.
NO_USE = {
    "mode": "the original never read it; write task_mode",
    "run_name": "remove it; train.output_dir tells runs apart",
    "stride": "remove it: windows that overlap count a token twice",
    "logging": "write train.logging_steps and train.tensorboard",
    "model.revision": "remove it; load that revision into a folder and give its path as model.name",
    "data.format": "remove it; the format is told by the file's own keys",
    "data.split": "remove it; give data.train_path and data.val_path",
    "data.test_path": "remove it; nothing here tests",
    "data.cache_dir": "remove it; nothing is cached",
    "train.load_best_model_at_end": "remove it; what is measured is the whole training",
    "train.metric_for_best_model": "remove it; early stopping goes by the evaluation's loss",
    "train.greater_is_better": "remove it; early stopping goes by the evaluation's loss",
    "train.overwrite_output_dir": "remove it; choose another train.output_dir",
    "train.report_to": "write train.tensorboard: true",
}


def by_first_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with each key by its first name, so that one file's `lr` lies over another's
    `learning_rate`. Where a file has both, both stay, for the error."""
    return _renamed(values, "")


def _renamed(values: Mapping[str, Any], section: str) -> dict[str, Any]:
    known = SECTIONS.get(section, {})
    first = {other: name for name, key in known.items() for other in key.also}
    result: dict[str, Any] = {}
    for name, value in values.items():
        below = f"{section}.{name}" if section else name
        if below in SECTIONS and isinstance(value, Mapping):
            result[name] = _renamed(value, below)
        else:
            to = first.get(name, name)
            result[name if to in values else to] = value
    return result
