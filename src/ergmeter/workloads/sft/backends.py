"""Which model is trained, and by whose code? What was asked for is loaded, or the training stops.

The trap that shaped it: a fallback nobody sees. The original switched `unsloth` to bitsandbytes
where it did not load and wrote "bnb" into its table, so that the comparison it was made for could
not exist. Here a backend that can't do what the configuration says ends the run before it has cost
anything, with the reason and what to do; and `facts` looks at what was loaded, not at what was
asked for.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ergmeter.errors import PluginError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from ergmeter.workloads.sft.config.sections import SftConfig

# What LoRA is put on where nobody says, by the names in use: attention and the feed-forward part.
_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("q", "k", "v", "o", "wi_0", "wi_1", "wo"),  # T5's
)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be trained, and its tokenizer."""

    model: Any
    tokenizer: Any


def check(config: SftConfig) -> None:
    """Refuse what can't be done here, before anything is loaded or written."""
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
    if "bnb" in train.optim or "8bit" in train.optim or "paged" in train.optim or tuning.bits:
        _there("bitsandbytes", "this optimizer" if not tuning.bits else "quantised weights")
    if "paged" in train.optim and not cuda:
        raise UsageError(
            f"train.optim {train.optim}: pages are a GPU's, and there is none; without them it is"
            f" {train.optim.removeprefix('paged_').replace('adamw_8bit', 'adamw_bnb_8bit')}"
        )
    if tuning.mode != "full":
        _there("peft", f"tuning.mode {tuning.mode}")
    if tuning.backend == "unsloth":
        _check_unsloth(config)
    _check_optimizer(train.optim)


def first_imports(config: SftConfig) -> None:
    """Unsloth changes transformers as that is loaded, so it comes first."""
    if config.tuning.backend == "unsloth":
        _unsloth()


def loaded(config: SftConfig, path: Path | str) -> LoadedModel:
    """The model of the configuration, with its adapter, and its tokenizer."""
    importlib.import_module("transformers").set_seed(config.seed)  # of the adapters, too
    made = _by_unsloth(config, path) if config.tuning.backend == "unsloth" else _plain(config, path)
    if config.train.gradient_checkpointing and config.tuning.backend != "unsloth":
        made.model.gradient_checkpointing_enable({"use_reentrant": False})
        made.model.enable_input_require_grads()
    made.model.config.use_cache = False
    return made


def compute_dtype(config: SftConfig) -> torch.dtype:
    """What products are computed in, as asked for."""
    if config.train.bf16:
        return torch.bfloat16
    return torch.float16 if config.train.fp16 else torch.float32


def _weights_dtype(config: SftConfig) -> torch.dtype:
    """Frozen weights lie in the type they are used in; trained ones in fp32, with autocast."""
    return torch.float32 if config.tuning.mode == "full" else compute_dtype(config)


def _plain(config: SftConfig, path: Path | str) -> LoadedModel:
    import transformers  # noqa: PLC0415  after Unsloth, where that is asked for

    importlib.import_module("transformers.utils.logging").disable_progress_bar()  # one bar, ours
    kinds = {
        "causal": transformers.AutoModelForCausalLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
    }
    options: dict[str, Any] = {"dtype": _weights_dtype(config)}
    if config.model.attention:
        options["attn_implementation"] = config.model.attention
    if config.tuning.bits:
        options["quantization_config"] = _quantised(config, transformers)
        options["device_map"] = {"": torch.cuda.current_device() if _on_gpu() else "cpu"}
    trust = config.model.trust_remote_code
    model = _loaded(
        kinds[config.model.type].from_pretrained, path, trust_remote_code=trust, **options
    )
    tokenizer = _loaded(transformers.AutoTokenizer.from_pretrained, path, trust_remote_code=trust)
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
    """What a library loads; what it has against it in one line."""
    try:
        return load(path, **options)
    except (OSError, ValueError, ImportError) as error:
        said = " ".join(str(error).split())[:300]
        raise UsageError(f"model.name {path}: {said}") from error


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
    lora = config.tuning.lora
    settings = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets(config, model),
        use_dora=config.tuning.mode == "dora",
        task_type="SEQ_2_SEQ_LM" if config.model.type == "seq2seq" else "CAUSAL_LM",
    )
    return peft.get_peft_model(model, settings)


def targets(config: SftConfig, model: Any) -> list[str]:  # noqa: ANN401
    """The modules that get an adapter: those that were named, or the usual ones it has."""
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
    found = list(named or [name for name in _TARGETS if name in there])
    if not found:
        raise UsageError(
            "tuning.lora.target_modules: none of the usual names is in this model; name its layers"
        )
    return found


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
            r=tuning.lora.r,
            lora_alpha=tuning.lora.alpha,
            lora_dropout=tuning.lora.dropout,
            target_modules=targets(config, model),
            use_gradient_checkpointing=checkpoints,
            use_dora=tuning.mode == "dora",
            random_state=config.seed,
        )
    return LoadedModel(model, tokenizer)


def _check_unsloth(config: SftConfig) -> None:
    if config.model.type != "causal":
        raise UsageError("tuning.backend unsloth trains causal models; model.type is seq2seq")
    if config.model.attention:
        raise UsageError(
            "model.attn_implementation: Unsloth chooses its own attention; leave it out"
        )
    _unsloth()


def _unsloth() -> Any:  # noqa: ANN401  a module
    if importlib.util.find_spec("unsloth") is None:
        raise PluginError(
            "tuning.backend unsloth: Unsloth is not installed here. It wants versions of its own:"
            " `./dev unsloth` sets up its environment, `./dev train-unsloth` trains in it"
        )
    try:
        return importlib.import_module("unsloth")
    except (ImportError, NotImplementedError, RuntimeError, OSError) as error:
        said = " ".join(str(error).split())[:300]
        raise PluginError(f"tuning.backend unsloth: it does not load here: {said}") from error


def _check_optimizer(name: str) -> None:
    names = [
        one.value for one in importlib.import_module("transformers.training_args").OptimizerNames
    ]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(names))}"
        raise UsageError(f"train.optim: transformers has no {name!r}; {hint}")


def _there(package: str, what: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise PluginError(f"{what} needs {package}: pip install 'ergmeter[train]'")


def _on_gpu() -> bool:
    return torch.cuda.is_available()
