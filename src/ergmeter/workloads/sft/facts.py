"""Facts of what actually ran, read from the objects that run and not from the configuration.

The optimizer is the class that steps. Types are those of the parameters. The attention is that of
the loaded model's configuration. Kernels are named by the functions that the layers call. Versions
are of the loaded modules.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ergmeter.workloads.sft.config_file import SftConfig

PACKAGES = ("torch", "transformers", "peft", "trl", "bitsandbytes", "unsloth")
_GIT_S = 10
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def training_facts(config: SftConfig, trainer: Any, *, seq_len: int) -> dict[str, Any]:  # noqa: ANN401
    """The facts of a training under the ledger's names, once its optimizer exists."""
    model = trainer.model
    trained, total = _counts(model)
    lora = config.tuning.lora if config.tuning.mode != "full" else None
    return {
        "model": config.model.name,
        "dataset": config.task_mode,
        "backend": config.tuning.backend,
        "optimizer": optimizer_name(trainer.optimizer),
        "batch_size": config.train.batch_size,
        "grad_accum": config.train.grad_accum,
        "seq_len": seq_len,
        "precision": precision(trainer, model),
        "seed": config.seed,
        "tuning": config.tuning.mode,
        "bits": _bits(model),
        "lora_r": lora.r if lora else None,
        "lora_alpha": lora.alpha if lora else None,
        "lora_targets": " ".join(_adapted(model)) if lora else None,
        "weights_dtype": _majority(model),
        "compute_dtype": precision(trainer, model),
        "attention": _attention(model),
        "packing": config.data.packing,
        "pad_to_multiple_of": config.data.pad_to_multiple_of,
        "lora_dropout": lora.dropout if lora else None,
        "lr": config.train.lr,
        "lr_scheduler": config.train.lr_scheduler,
        "trainer": f"{type(trainer).__module__.partition('.')[0]}.{type(trainer).__name__}",
        "evaluation": _when(config.train.evaluation_strategy, config.train.eval_steps),
        "checkpoints": _when(config.train.save_strategy, config.train.save_steps),
        "gradient_checkpointing": any(
            getattr(module, "gradient_checkpointing", False) for module in model.modules()
        ),
        "world_size": trainer.args.world_size,
        "parameters": total,
        "trainable_parameters": trained,
        "kernels": kernels(model),
        **versions(),
        "threads": None if torch.cuda.is_available() else torch.get_num_threads(),
        "git_commit": commit(),
        "config": config.path.stem,
        "currency": config.metrics.currency,
    }


def _when(strategy: str, steps: int | None) -> str:
    return f"every {steps} steps" if strategy == "steps" else strategy


def _attention(model: Any) -> str | None:  # noqa: ANN401
    """The attention in the model's configuration; None under Unsloth, which ignores that."""
    if "unsloth" in kernels(model):
        return None
    implementation = getattr(_inner(model).config, "_attn_implementation", None)
    return None if implementation is None else str(implementation)


def optimizer_name(optimizer: Any) -> str:  # noqa: ANN401
    """The class that steps, with its package; Accelerate's wrapper is looked through."""
    while hasattr(optimizer, "optimizer") and optimizer.optimizer is not optimizer:
        optimizer = optimizer.optimizer
    kind = type(optimizer)
    parts = [f"{kind.__module__.partition('.')[0]}.{kind.__name__}"]
    if getattr(optimizer, "defaults", {}).get("fused"):
        parts.append("fused")
    own: Any = getattr(optimizer, "args", None)  # where bitsandbytes keeps what makes it different
    if getattr(own, "optim_bits", 32) != 32:
        parts.append(f"{own.optim_bits}bit")
    trained = (p for group in optimizer.param_groups for p in group["params"])
    if getattr(optimizer, "is_paged", False) and any(parameter.is_cuda for parameter in trained):
        parts.append("paged")  # elsewhere than on a GPU bitsandbytes pages nothing
    return " ".join(parts)


def precision(trainer: Any, model: Any) -> str:  # noqa: ANN401
    """The precision of matrix products: autocast's, else that of the weights."""
    if trainer.args.bf16:
        return "bf16"
    if trainer.args.fp16:
        return "fp16"
    quantised = getattr(_inner(model).config, "quantization_config", None)
    computed = getattr(quantised, "bnb_4bit_compute_dtype", None)
    return _short(computed) if computed is not None else _majority(model, floats=True)


def kernels(model: Any) -> str:  # noqa: ANN401
    """Libraries whose kernels the layers call, such as "unsloth" or "liger".

    They are recognised by the module in which a layer's `forward` is defined; else "library".
    """
    names = {
        owner
        for module in model.modules()
        for owner in ("unsloth", "liger_kernel")
        if owner in str(getattr(type(module).forward, "__module__", ""))
        or owner in str(getattr(getattr(module, "forward", None), "__module__", ""))
    }
    return " ".join(sorted(names)) or "library"


def versions() -> dict[str, str | None]:
    """Versions of the packages that are loaded, not of those only installed."""
    return {name: _version(name) if name in sys.modules else None for name in PACKAGES}


def commit() -> str | None:
    """The commit of the working directory, with a + where files differ; None outside of git."""
    words = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=_GIT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def data_sha256(rows: Iterable[dict[str, Any]]) -> str:
    """A short digest of the token ids and labels that are trained on, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        for name in ("input_ids", "labels"):
            digest.update(np.asarray(row[name], dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _inner(model: Any) -> Any:  # noqa: ANN401
    """The model inside PEFT's wrapper; a model without one unchanged."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _counts(model: Any) -> tuple[int, int]:  # noqa: ANN401
    """The numbers of trained and of all parameters; packed 4-bit weights count unpacked."""
    trained = total = 0
    for parameter in model.parameters():
        numbers = _numbers(parameter)
        total += numbers
        trained += numbers if parameter.requires_grad else 0
    return trained, total


def _numbers(parameter: Any) -> int:  # noqa: ANN401
    state = getattr(parameter, "quant_state", None)
    return int(state.shape.numel() if state is not None else parameter.numel())


def _bits(model: Any) -> int | None:  # noqa: ANN401
    """Bits of quantised weights, from the layers' classes."""
    kinds = {type(module).__name__ for module in model.modules()}
    if any("Linear4bit" in kind for kind in kinds):
        return 4
    return 8 if any("Linear8bit" in kind for kind in kinds) else None


def _majority(model: Any, *, floats: bool = False) -> str:  # noqa: ANN401
    """The type of most frozen weights; of most weights if none is frozen."""
    counts: Counter[str] = Counter()
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    for parameter in frozen or model.parameters():  # adapters are few, and in a type of their own
        if not floats or parameter.is_floating_point():
            counts[_short(parameter.dtype)] += _numbers(parameter)
    name = counts.most_common(1)[0][0]
    return {"uint8": "nf4"}.get(name, name) if _bits(model) == 4 else name


def _short(dtype: object) -> str:
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name)


def _adapted(model: Any) -> list[str]:  # noqa: ANN401
    names = {n.rpartition(".")[2] for n, m in model.named_modules() if hasattr(m, "lora_A")}
    return sorted(names)
