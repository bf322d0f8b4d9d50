"""The configuration as transformers' TrainingArguments: every key of it, or an error.

The trap: a key that is read and never passed on. The original wrote `optim`, `bf16` and `max_steps`
into its table and trained with the library's defaults. So each field is handed over by name, one
that this version of transformers does not know is an error, and none is left to a default that
changes between versions.
"""

from __future__ import annotations

import math
import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from ergmeter.errors import UsageError

if TYPE_CHECKING:
    from ergmeter.workloads.sft.config.sections import SftConfig


def training_arguments(config: SftConfig, kind: Any, *, examples: int) -> Any:  # noqa: ANN401
    """Arguments of this kind (TrainingArguments or one made of it) for so many examples."""
    wanted = {**_common(config), **_when(config), "warmup_steps": _warmup_steps(config, examples)}
    known = {field.name for field in fields(kind)}
    unknown = sorted(wanted.keys() - known)
    if unknown:
        raise UsageError(
            f"this version of transformers has no {', '.join(unknown)}; it must be 4.57 or newer"
        )
    try:
        return kind(**wanted)
    except (ValueError, ImportError) as error:
        said = " ".join(str(error).split())[:300]
        raise UsageError(f"train: transformers refuses this: {said}") from error


def _common(config: SftConfig) -> dict[str, Any]:
    train = config.train
    return {
        "output_dir": str(train.output_dir),
        "per_device_train_batch_size": train.batch_size,
        "per_device_eval_batch_size": train.batch_size,
        "gradient_accumulation_steps": train.grad_accum,
        "num_train_epochs": train.epochs,
        "max_steps": -1 if train.max_steps is None else train.max_steps,
        "learning_rate": train.lr,
        "lr_scheduler_type": train.lr_scheduler,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
        "bf16": train.bf16,
        "fp16": train.fp16,
        "optim": train.optim,
        "dataloader_num_workers": train.dataloader_workers,
        "dataloader_drop_last": False,
        # Said, not left to be found out: without it two ranks on processors train as one each.
        "use_cpu": not (torch.cuda.is_available() or torch.backends.mps.is_available()),
        "dataloader_pin_memory": torch.cuda.is_available(),
        "seed": config.seed,
        "data_seed": config.seed,
        "gradient_checkpointing": False,  # the backend does that to the model itself
        "remove_unused_columns": False,  # position_ids of packed rows are not to be taken out
        "label_names": ["labels"],
        "disable_tqdm": True,  # one bar, ours
        "skip_memory_metrics": not config.metrics.hf_memory,
        "report_to": ["tensorboard"] if train.tensorboard else [],
    }


def _when(config: SftConfig) -> dict[str, Any]:
    train = config.train
    said: dict[str, Any] = {
        "logging_strategy": "steps",
        "logging_nan_inf_filter": False,  # it would log 0 for a loss that is no number
        "logging_steps": train.logging_steps,
        "eval_strategy": train.evaluation_strategy,
        "save_strategy": train.save_strategy,
        "save_total_limit": train.save_total_limit,
    }
    if train.eval_steps is not None:
        said["eval_steps"] = train.eval_steps
    if train.save_steps is not None:
        said["save_steps"] = train.save_steps
    if train.early_stopping_patience is not None:
        said |= {"metric_for_best_model": "eval_loss", "greater_is_better": False}
    return said


def _warmup_steps(config: SftConfig, examples: int) -> int:
    """transformers 5 takes steps alone."""
    train = config.train
    if train.warmup_steps is not None:
        return train.warmup_steps
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return math.ceil(train.warmup_ratio * planned_steps(config, examples, ranks=ranks))


def planned_steps(config: SftConfig, examples: int, *, ranks: int) -> int:
    """Optimizer steps that a training to its end takes, the last of an epoch with what is left."""
    train = config.train
    if train.max_steps is not None:
        return train.max_steps
    batches = math.ceil(examples / (train.batch_size * ranks))
    return max(1, math.ceil(train.epochs * max(1, math.ceil(batches / train.grad_accum))))
