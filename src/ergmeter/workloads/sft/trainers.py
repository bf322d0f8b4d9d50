"""Loads the model by a backend, and makes the arguments and the Trainer that trains it.

The plain transformers Trainer is the default for all backends. TRL's SFTTrainer takes entropy and
accuracy of every batch from its logits, which Unsloth's fused loss never computes. So it would do
more work for one backend than for the other; `train.trainer: trl` asks for it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ergmeter.config_file import hint
from ergmeter.errors import PluginError, UsageError
from ergmeter.registry import library
from ergmeter.workloads.sft.config_file import SftConfig, is_of_bitsandbytes
from ergmeter.workloads.sft.prepared_data import Prepared

# Backends load what was asked for, or the training stops with the reason and what to do. The
# original fell back from `unsloth` to bitsandbytes without a word, so its comparison was of one
# backend with itself.


# The default LoRA targets, by the usual names: attention and the feed-forward part.
TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("q", "k", "v", "o", "wi_0", "wi_1", "wo"),  # T5's
)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be trained, and its tokenizer."""

    model: Any
    tokenizer: Any


def check(config: SftConfig) -> None:
    """Raises if the configuration can't run here, before anything is loaded or written."""
    tuning, train = config.tuning, config.train
    cuda = torch.cuda.is_available()
    if cuda and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif torch.cuda.device_count() > 1:
        raise UsageError(
            f"{torch.cuda.device_count()} GPUs are visible to one process, which transformers would"
            " share a batch among: set CUDA_VISIBLE_DEVICES to one of them, or start"
            " torchrun --nproc-per-node=N -m ergmeter train ..."
        )
    if train.fp16 and not cuda:
        raise UsageError(
            "train.fp16 needs a GPU (gradients are scaled there); there is none: use bf16, or"
            " neither for fp32"
        )
    if train.bf16 and cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name()
        raise UsageError(f"train.bf16: {name} does not compute in bf16; use train.fp16")
    if is_of_bitsandbytes(train.optim) or tuning.bits:
        _there("bitsandbytes", "this optimizer" if not tuning.bits else "quantised weights")
    if "paged" in train.optim and not cuda:
        raise UsageError(
            f"train.optim {train.optim} needs a GPU, and there is none; without paging it is"
            f" {train.optim.removeprefix('paged_').replace('adamw_8bit', 'adamw_bnb_8bit')}"
        )
    if tuning.mode != "full":
        _there("peft", f"tuning.mode {tuning.mode}")
    if tuning.backend == "unsloth":
        _unsloth()
    optimizers = importlib.import_module("transformers.training_args").OptimizerNames
    names = sorted(name.value for name in optimizers)
    if train.optim not in names:
        raise UsageError(
            f"train.optim: transformers has no {train.optim!r}; {hint(train.optim, names)}"
        )


def first_imports(config: SftConfig) -> None:
    """Imports Unsloth, which patches transformers, before it; silences bitsandbytes."""
    # PEFT loads it in any case. On a processor it warns of kernels that only the Hub has.
    is_used = is_of_bitsandbytes(config.train.optim) or config.tuning.bits
    name = "bitsandbytes.backends.cpu" if is_used else "bitsandbytes"
    logging.getLogger(name).setLevel(logging.ERROR)
    if config.tuning.backend == "unsloth":
        _unsloth()


def load_part(config: SftConfig, path: Path | str, kind: str) -> Any:  # noqa: ANN401
    """A small part of a model: `AutoTokenizer`, `AutoConfig`."""
    load = getattr(importlib.import_module("transformers"), kind).from_pretrained
    return _loaded(load, path, trust_remote_code=config.model.trust_remote_code)


def load_model(config: SftConfig, path: Path | str) -> LoadedModel:
    """The model of the configuration, with its adapter, and its tokenizer."""
    importlib.import_module("transformers").set_seed(config.seed)  # of the adapters, too
    made = _by_unsloth(config, path) if config.tuning.backend == "unsloth" else _plain(config, path)
    if config.train.gradient_checkpointing and config.tuning.backend != "unsloth":
        made.model.gradient_checkpointing_enable({"use_reentrant": False})
        made.model.enable_input_require_grads()
    made.model.config.use_cache = False
    return made


def compute_dtype(config: SftConfig) -> torch.dtype:
    """The configured precision of matrix products."""
    if config.train.bf16:
        return torch.bfloat16
    return torch.float16 if config.train.fp16 else torch.float32


def _plain(config: SftConfig, path: Path | str) -> LoadedModel:
    import transformers  # noqa: PLC0415  after Unsloth, where that is asked for

    importlib.import_module("transformers.utils.logging").disable_progress_bar()  # one bar, ours
    kinds = {
        "causal": transformers.AutoModelForCausalLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
    }
    # Frozen weights lie in the type they are used in; trained ones in fp32, with autocast.
    dtype = torch.float32 if config.tuning.mode == "full" else compute_dtype(config)
    options: dict[str, Any] = {"dtype": dtype}
    if config.model.attn_implementation:
        options["attn_implementation"] = config.model.attn_implementation
    if config.tuning.bits:
        options["quantization_config"] = _quantised(config, transformers)
        where = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        options["device_map"] = {"": where}
    trust = config.model.trust_remote_code
    model = _loaded(
        kinds[config.model.type].from_pretrained, path, trust_remote_code=trust, **options
    )
    tokenizer = load_part(config, path, "AutoTokenizer")
    if config.tuning.bits:
        peft = importlib.import_module("peft")
        checkpoints = config.train.gradient_checkpointing
        model = peft.prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=checkpoints,
            gradient_checkpointing_kwargs={"use_reentrant": False} if checkpoints else None,
        )
    if config.tuning.mode != "full":
        model = _adapted(config, model)
    return LoadedModel(model, tokenizer)


def _loaded(load: Any, path: Path | str, **options: Any) -> Any:  # noqa: ANN401
    """Calls a library's loader, and turns its failure into a one-line error."""
    try:
        return load(path, **options)
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"model.name {path}: {reason}") from error


def _quantised(config: SftConfig, transformers: Any) -> Any:  # noqa: ANN401
    if config.tuning.bits == 8:
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype(config),
    )


def _adapted(config: SftConfig, model: Any) -> Any:  # noqa: ANN401
    peft = importlib.import_module("peft")
    task = "SEQ_2_SEQ_LM" if config.model.type == "seq2seq" else "CAUSAL_LM"
    settings = peft.LoraConfig(**_lora_arguments(config, model), task_type=task)
    return peft.get_peft_model(model, settings)


def _lora_arguments(config: SftConfig, model: Any) -> dict[str, Any]:  # noqa: ANN401
    """Arguments for the adapters, the same for PEFT and Unsloth."""
    lora = config.tuning.lora
    return {
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets(config, model),
        "use_dora": config.tuning.mode == "dora",
    }


def targets(config: SftConfig, model: Any) -> list[str]:  # noqa: ANN401
    """The modules that get an adapter: the configured ones, or the usual ones that exist."""
    there = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    named = config.tuning.lora.target_modules
    missing = sorted(set(named or ()) - there)
    if missing:
        linear = sorted(
            {n.rpartition(".")[2] for n, m in model.named_modules() if hasattr(m, "in_features")}
        )
        raise UsageError(
            f"tuning.lora.target_modules: the model has no {missing[0]!r};"
            f" its linear layers are {', '.join(linear)}"
        )
    modules = list(named or [name for name in TARGETS if name in there])
    if not modules:
        raise UsageError(
            "tuning.lora.target_modules: none of the usual names is in this model; name its layers"
        )
    return modules


def _by_unsloth(config: SftConfig, path: Path | str) -> LoadedModel:
    unsloth = _unsloth()
    tuning = config.tuning
    checkpoints = "unsloth" if config.train.gradient_checkpointing else False
    options: dict[str, Any] = {"use_gradient_checkpointing": checkpoints}
    if tuning.mode == "full":
        options["full_finetuning"] = True
    model, tokenizer = _loaded(
        unsloth.FastLanguageModel.from_pretrained,
        str(path),
        max_seq_length=config.model.max_seq_len,
        dtype=compute_dtype(config),
        load_in_4bit=tuning.bits == 4,
        load_in_8bit=tuning.bits == 8,
        trust_remote_code=config.model.trust_remote_code,
        **options,
    )
    if tuning.mode != "full":
        model = unsloth.FastLanguageModel.get_peft_model(
            model,
            **_lora_arguments(config, model),
            use_gradient_checkpointing=checkpoints,
            random_state=config.seed,
        )
    return LoadedModel(model, tokenizer)


def _unsloth() -> Any:  # noqa: ANN401  a module
    if importlib.util.find_spec("unsloth") is None:
        raise PluginError(
            "tuning.backend unsloth: Unsloth is not installed here. It needs its own environment:"
            " `./dev unsloth` sets up its environment, `./dev train-unsloth` trains in it"
        )
    try:
        return importlib.import_module("unsloth")
    except (ImportError, NotImplementedError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise PluginError(f"tuning.backend unsloth: it does not load here: {reason}") from error


def _there(package: str, what: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise PluginError(f"{what} needs {package}: pip install 'ergmeter[train]'")


# TrainingArguments get each field by name. A field that this version of transformers does not have
# is an error, and none is left to a default that changes between versions.


def training_arguments(config: SftConfig, kind: Any, *, examples: int) -> Any:  # noqa: ANN401
    """Make `kind` (TrainingArguments or a subclass) from a configuration and the data's size."""
    wanted = {**_common(config), **_when(config), "warmup_steps": _warmup_steps(config, examples)}
    unknown = sorted(wanted.keys() - {field.name for field in fields(kind)})
    if unknown:
        raise UsageError(
            f"this version of transformers has no {', '.join(unknown)}; it must be 4.57 or newer"
        )
    try:
        return kind(**wanted)
    except (ValueError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"train: transformers refuses this: {reason}") from error


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
        # Explicit: otherwise two ranks on CPUs would each train alone.
        "use_cpu": not (torch.cuda.is_available() or torch.backends.mps.is_available()),
        "dataloader_pin_memory": torch.cuda.is_available(),
        "seed": config.seed,
        "data_seed": config.seed,
        "gradient_checkpointing": False,  # the backend does that to the model itself
        "remove_unused_columns": False,  # it would remove the position_ids of packed rows
        "label_names": ["labels"],
        "disable_tqdm": True,  # one bar, ours
        "skip_memory_metrics": not config.metrics.hf_memory,
        "report_to": ["tensorboard"] if train.tensorboard else [],
    }


def _when(config: SftConfig) -> dict[str, Any]:
    train = config.train
    arguments: dict[str, Any] = {
        "logging_strategy": "steps",
        "logging_nan_inf_filter": False,  # it would log 0 for a loss that is no number
        "logging_steps": train.logging_steps,
        "eval_strategy": train.evaluation_strategy,
        "eval_steps": train.eval_steps,
        "save_strategy": train.save_strategy,
        "save_total_limit": train.save_total_limit,
    }
    if train.save_steps is not None:
        arguments["save_steps"] = train.save_steps
    if train.early_stopping_patience is not None:
        arguments |= {"metric_for_best_model": "eval_loss", "greater_is_better": False}
    return arguments


def _warmup_steps(config: SftConfig, examples: int) -> int:
    """The warm-up in steps, since transformers 5 takes no ratio."""
    train = config.train
    if train.warmup_steps is not None:
        return train.warmup_steps
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return math.ceil(train.warmup_ratio * planned_steps(config, examples, ranks=ranks))


def planned_steps(config: SftConfig, examples: int, *, ranks: int) -> int:
    """Optimizer steps of a whole training; an epoch's last step may have fewer batches."""
    train = config.train
    if train.max_steps is not None:
        return train.max_steps
    batches = math.ceil(examples / (train.batch_size * ranks))
    return max(1, math.ceil(train.epochs * max(1, math.ceil(batches / train.grad_accum))))


def trainer(
    config: SftConfig, loaded: LoadedModel, data: Prepared, *, callbacks: Sequence[object]
) -> Any:  # noqa: ANN401
    """A Trainer that is ready to train this model on this data."""
    import transformers  # noqa: PLC0415  after Unsloth, where that is asked for

    kind, arguments_kind, more = _kinds(config)
    arguments = training_arguments(config, arguments_kind, examples=len(data.train))
    for name, value in more.items():
        setattr(arguments, name, value)
    made = kind(
        model=loaded.model,
        args=arguments,
        train_dataset=data.train,
        eval_dataset=data.evaluation if config.train.evaluation_strategy != "no" else None,
        data_collator=data.collate,
        processing_class=loaded.tokenizer,
        callbacks=list(callbacks),
    )
    if config.train.early_stopping_patience is not None:
        made.add_callback(transformers.EarlyStoppingCallback(config.train.early_stopping_patience))
    # transformers prints every log as a dict; the progress bar shows the same.
    made.remove_callback(transformers.PrinterCallback)
    return made


def _kinds(config: SftConfig) -> tuple[Any, Any, dict[str, Any]]:
    import transformers  # noqa: PLC0415  after Unsloth, where that is asked for

    if config.model.type == "seq2seq":
        return transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments, {}
    if config.train.trainer != "trl":
        return transformers.Trainer, transformers.TrainingArguments, {}
    trl = library("trl", "train.trainer trl", "'ergmeter[train]'")
    # The rows are tokenised, cut and packed already.
    prepared = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}
    return trl.SFTTrainer, trl.SFTConfig, prepared
