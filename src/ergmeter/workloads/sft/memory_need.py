"""Estimates the memory of a training before it begins, and compares it with what is free.

The estimate is that of `erg estimate`. Unknown parts count as 0, so that a training that fits is
not refused: rows that are not read yet, states of an optimizer that is unknown or may leave the
device, attention probabilities that torch's sdpa may or may not store.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from typing import Any

import psutil
import torch

from ergmeter.errors import ErgmeterError
from ergmeter.flops.batch import Batch
from ergmeter.flops.estimate.memory import Kernels, Setup, step_memory
from ergmeter.flops.estimate.storage import declared_method
from ergmeter.flops.graph.adapters import Lora, module_names
from ergmeter.flops.source import read_graph, read_model
from ergmeter.flops.work import TrainedParts
from ergmeter.units import scaled
from ergmeter.workloads.sft.config_file import SftConfig
from ergmeter.workloads.sft.prepared_data import Prepared
from ergmeter.workloads.sft.progress import TrainingWatch
from ergmeter.workloads.sft.trainers import TARGETS

# transformers' names. All others count as SGD, which stores nothing: paged states leave a device.
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), "adamw-fused"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw-8bit"),
}


def free_bytes() -> float:
    """Free memory of the device, for each rank on it.

    Infinite if it can't be read, or if the ranks share a model, which the estimate does not cover.
    """
    if any(f"ACCELERATE_USE_{name}" in os.environ for name in ("FSDP", "DEEPSPEED")):
        return math.inf
    try:
        if torch.cuda.is_available():
            return float(torch.cuda.mem_get_info()[0])
        return psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    except (OSError, RuntimeError):
        return math.inf


def check(
    config: SftConfig, watch: TrainingWatch, model: str, free: float, data: Prepared | None = None
) -> None:
    """Refuses a training that needs more than the free memory.

    Without `data`, before anything is loaded, a batch is a single token.
    """
    rows, read, answered = 1, 1, 1
    if data is not None:
        batch = data.collate([max(data.train, key=lambda row: len(row["input_ids"]))])
        rows = min(config.train.batch_size, len(data.train))
        read, answered = batch["input_ids"].shape[1], batch["labels"].shape[1]
    with suppress(ErgmeterError):  # no estimate reads such a model
        needed = step_bytes(config, model, rows, read, answered)
        if needed > free:
            ways = ", ".join(_ways(config, model, rows, read, answered))
            watch.refuse(
                f"the training needs {scaled(needed, 'B')} of memory by `erg estimate` ({rows} x"
                f" {read} tokens at a time), and {scaled(free, 'B')} is free: take {ways},"
                " or --anyway"
            )


def _ways(config: SftConfig, model: str, rows: int, read: int, answered: int) -> list[str]:
    """Settings to reduce or change that save a tenth of the memory or more; and a smaller model."""
    is_full, is_torch = config.tuning.mode == "full", config.tuning.backend == "torch"
    other = {"mode": "lora"} if is_full else {"mode": "qlora", "bits": 4}
    tuning = config.tuning.model_copy(update=other)
    name = f"tuning.mode {tuning.mode}{' (tuning.backend bnb)' * (is_torch and not is_full)}"
    ways = (
        ("a smaller train.batch_size", config, rows // 2, read, answered),
        ("a shorter model.max_seq_len", config, rows, read // 2, answered // 2),
        (name, config.model_copy(update={"tuning": tuning}), rows, read, answered),
    )
    most = 0.9 * step_bytes(config, model, rows, read, answered)
    fewer = [way for way, to, *by in ways if min(by) and step_bytes(to, model, *by) <= most]
    return [*fewer, "a smaller model"]


def step_bytes(config: SftConfig, model: str, rows: int, read: int, answered: int) -> float:
    """Peak memory of a step on one device, for rows of `read` tokens in, `answered` tokens out."""
    train, tuning = config.train, config.tuning
    graph, is_lora = read_graph(model), tuning.mode != "full"
    targets = tuning.lora.target_modules or tuple(n for n in TARGETS if n in module_names(graph))
    dtype = "bf16" if train.bf16 else "fp16" if train.fp16 else "fp32"
    stored = "nf4" if declared_method(read_model(model)) else None
    is_unsloth = tuning.backend == "unsloth"  # whose kernels keep few activations
    loss: Any = "fused" if is_unsloth else "logits"
    attention: Any = "eager" if config.model.attn_implementation == "eager" else "flash"
    setup = Setup(
        dtype if is_lora or dtype == "fp32" else "mixed",
        _OPTIMIZERS.get(train.optim, "sgd"),
        {4: "nf4-double", 8: "int8"}.get(tuning.bits or 0, stored),
        Kernels(attention, loss=loss, has_adapter_dropout=tuning.lora.dropout > 0),
        train.grad_accum,
    )
    source_len = read if config.model.type == "seq2seq" else None
    batch = Batch.of(rows * train.grad_accum, answered, source_len=source_len, facts=graph.facts)
    lora = Lora(tuning.lora.r, targets, is_dora=tuning.mode == "dora") if is_lora else None
    checkpointing: Any = "full" if train.gradient_checkpointing or is_unsloth else "none"
    how = TrainedParts(lora, checkpointing=checkpointing)
    return step_memory(graph, batch, training=how, setup=setup).peak.total_bytes
