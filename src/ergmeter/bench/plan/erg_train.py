"""Writes the `train.yaml` of a cell that runs `erg train`, and lists the packages that cells need.

Packages are looked up and not imported, once before the first cell starts.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import yaml

from ergmeter.bench.plan.cells import FIRST_SEED, PYTHON, UNSLOTH_PYTHON, Cell, own_python
from ergmeter.config_file import hint
from ergmeter.units import grouped

FILE = "train.yaml"
# The C versions are ten times as fast, where built.
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# FMS's arguments that `erg train` has under the same name, by section, and under another one.
_SAME_NAME = {
    "model": ("max_seq_len", "trust_remote_code", "attn_implementation"),
    "data": ("packing",),
    "train": (
        *("max_steps", "warmup_ratio", "warmup_steps", "weight_decay", "max_grad_norm", "fp16"),
        *("bf16", "optim", "gradient_checkpointing", "evaluation_strategy", "eval_steps"),
        *("save_strategy", "save_steps", "save_total_limit", "logging_steps"),
    ),
}
KEYS = {
    "model_name_or_path": "model.name",
    "max_seq_length": "model.max_seq_len",
    **{name: f"{section}.{name}" for section, names in _SAME_NAME.items() for name in names},
    "training_data_path": "data.train_path",
    "validation_data_path": "data.val_path",
    "per_device_train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.grad_accum",
    "num_train_epochs": "train.epochs",
    "learning_rate": "train.lr",
    "lr_scheduler_type": "train.lr_scheduler",
    "eval_strategy": "train.evaluation_strategy",
    "dataloader_num_workers": "train.dataloader_workers",
    "r": "tuning.lora.r",
    "lora_alpha": "tuning.lora.alpha",
    "lora_dropout": "tuning.lora.dropout",
    "target_modules": "tuning.lora.target_modules",
    "seed": "seed",
}
SECTIONS = ("model", "tuning", "train", "data", "metrics")
TOP = ("task_mode", "seed", "block_size")
# FMS's arguments without effect here, with the reason: `erg train` does this in any case.
IMPLIED = {
    "include_tokens_per_second": "tokens are counted in any case",
    "response_template": "only the response bears loss in any case",
    "dataset_text_field": "the data stage writes prompt and response",
}
_AXES = ("effective_batch_size", "num_gpus", "nodes", "framework_config")
_SEED = re.compile(r"^seed: (-?\d+)$", re.MULTILINE)


class CannotMap(Exception):  # noqa: N818  the text names the argument
    """`erg train` can't do what an argument of the scenario asks for."""


def config(
    arguments: Mapping[str, Any], tuning: Mapping[str, Any], *, warmup_s: float | None
) -> str:
    """Return the train.yaml of a cell's first repeat. Raises CannotMap."""
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        if value is None or name in _AXES or name in IMPLIED:
            continue
        if name in _CHOICES:
            chosen = _chosen(name, value)
        elif name == "target_modules" and isinstance(value, str) and value != "auto":
            chosen = KEYS[name], value.split()
        else:
            chosen = _key(name), _unquoted(value)
        if chosen is not None:
            _put(values, *chosen)
    for name, value in tuning.items():
        _put(values, f"tuning.{name}", value)
    _settle(values, arguments)
    seed = values.setdefault("seed", FIRST_SEED)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise CannotMap(f"seed must be a whole number; got {seed!r}")
    _put(values, "train.output_dir", "{hf}")
    _put(values, "metrics.results_csv", "{out}/energy_results.csv")
    if warmup_s is not None:
        _put(values, "metrics.warmup_s", warmup_s)
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def parsed(text: str) -> dict[str, Any]:
    """Return the keys and values of a train.yaml."""
    return dict(yaml.load(text, Loader=_Loader))


def warmup_s(text: str) -> float | None:
    """The warm-up in seconds that a train.yaml sets; None if `erg train` decides."""
    seconds = parsed(text).get("metrics", {}).get("warmup_s")
    return None if seconds is None else float(seconds)


def reseeded(text: str, repeat: int) -> str:
    """Return a first repeat's YAML with the seed of a later repeat: first seed + repeat - 1."""
    return _SEED.sub(lambda match: f"seed: {int(match[1]) + repeat - 1}", text, count=1)


def _key(name: str) -> str:
    if name in KEYS:
        return KEYS[name]
    if takes(name):
        return name
    raise CannotMap(
        f"erg train has no argument {name!r}; {hint(name, TAKEN)}; omit it with"
        f" `{name}: null`, or use --command sft_trainer if fms-hf-tuning has it"
    )


def takes(name: str) -> bool:
    """True for the name of an argument or axis that `erg train` has, or may safely ignore."""
    section, dot, rest = name.partition(".")
    return name in TAKEN or name in TOP or bool(dot and rest and section in SECTIONS)


def _unquoted(value: Any) -> Any:  # noqa: ANN401  of YAML
    """Return text such as `2e-4`, which YAML does not parse as a number, as a number."""
    if isinstance(value, str) and any(c.isdigit() for c in value):
        with suppress(ValueError):
            return float(value)
    return value


def _put(values: dict[str, Any], key: str, value: Any) -> None:  # noqa: ANN401  of YAML
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    if last in values and values[last] != value:
        raise CannotMap(f"{key} is given twice: {values[last]!r} and {value!r}")
    values[last] = value


# Arguments with few values, and the key and value that each of these stands for.
_CHOICES: dict[str, dict[str, tuple[str, Any] | None]] = {
    "peft_method": {
        "lora": ("tuning.mode", "lora"),
        "none": ("tuning.mode", "full"),
        "None": ("tuning.mode", "full"),
    },
    "torch_dtype": {
        "bfloat16": ("train.bf16", True),
        "float16": ("train.fp16", True),
        "float32": None,
    },
    "use_flash_attn": {"True": ("model.attn_implementation", "flash_attention_2"), "False": None},
    "logging_strategy": {"steps": None},
    # True writes nothing, so that the cell is the same as one without the argument.
    "skip_memory_metrics": {"True": None, "False": ("metrics.hf_memory", True)},
}


def _chosen(name: str, value: Any) -> tuple[str, Any] | None:  # noqa: ANN401  of YAML
    choices = _CHOICES[name]
    if str(value) not in choices:
        raise CannotMap(f"erg train has no {name} {value!r}; {hint(value, choices)}")
    return choices[str(value)]


TAKEN = (*_AXES, *KEYS, *_CHOICES, *IMPLIED)


def _settle(values: dict[str, Any], arguments: Mapping[str, Any]) -> None:
    """Set the mode that follows from several arguments, and check that the precision fits."""
    tuning = values.setdefault("tuning", {})
    mode = tuning.setdefault("mode", "full")
    if mode == "lora" and tuning.get("bits") == 4:
        tuning["mode"] = "qlora"
    dtype = arguments.get("torch_dtype")
    chosen = _chosen("torch_dtype", dtype) if dtype is not None else None
    precision = chosen[0].removeprefix("train.") if chosen else None
    train = values.get("train", {})
    asked = [name for name in ("bf16", "fp16") if train.get(name) is True]
    if dtype is not None and asked not in ([], [precision]):
        raise CannotMap(f"torch_dtype {dtype} and {' and '.join(asked)} contradict each other")
    if precision and mode == "full":
        raise CannotMap(
            f"torch_dtype {dtype} without peft_method: erg train keeps the weights of a full"
            f" fine-tuning in float32; write torch_dtype: null and {precision}: true"
        )


_ALWAYS = ("torch", "transformers", "accelerate")
_OF_FMS = (
    "`./dev fms` puts fms-hf-tuning there, ERGMETER_FMS_PYTHON names another Python that has it,"
    " and so does --command '/path/of/python -m tuning.sft_trainer {arguments}'"
)
_OF_EXTRA = "pip install 'ergmeter[train]', or in a clone pip install '.[train]'"


def missing_packages(cells: Iterable[Cell], *, has_gpus: bool) -> str:
    """The packages that these cells lack and how to get them, in one line; empty if none."""
    needs: dict[str, str] = {}
    for cell in {cell.group: cell for cell in cells}.values():  # repeats need the same
        # With PYTHONPATH set by the scenario, we do not know which modules a cell has.
        if not cell.skip and "PYTHONPATH" not in cell.environment:
            needs |= _needs(cell, has_gpus=has_gpus)
    missing = grouped((way, need) for need, way in needs.items() if not _is_there(need))
    lines = [f"{', '.join(names)}: {way}" for way, names in missing.items()]
    return f"for these cells {sys.executable} lacks {'; '.join(lines)}" if lines else ""


def _needs(cell: Cell, *, has_gpus: bool) -> Iterator[tuple[str, str]]:
    """Yield the modules and Pythons that a cell needs, each with how to install it."""
    if cell.command[0] == UNSLOTH_PYTHON:
        yield (
            own_python("unsloth"),
            "`./dev unsloth` makes it, ERGMETER_UNSLOTH_PYTHON names another",
        )
    if cell.is_of_fms:  # its ranks are started by its own Python
        if cell.command[0] == PYTHON:
            yield own_python("tuning"), _OF_FMS
        return
    if cell.launch != "plain":
        yield "torch", _OF_EXTRA
    if cell.launch == "accelerate" and has_gpus:  # without them its ranks are torchrun's
        yield "accelerate", _OF_EXTRA
    if cell.command[0] == PYTHON and FILE in cell.files:
        for name in (*_ALWAYS, *_asked(cell.files[FILE])):
            yield name, _OF_EXTRA


def _asked(text: str) -> Iterator[str]:
    """Yield the packages that a train.yaml needs besides those of _ALWAYS."""
    config = parsed(text)
    tuning, train = config.get("tuning", {}), config.get("train", {})
    optim = str(train.get("optim", ""))
    if tuning.get("mode", "full") != "full":
        yield "peft"
    if tuning.get("bits") or any(word in optim for word in ("bnb", "8bit", "paged")):
        yield "bitsandbytes"
    if train.get("trainer") == "trl":
        yield "trl"


def _is_there(name: str) -> bool:
    if "/" in name:
        return shutil.which(name) is not None
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # loaded, but without a spec
        return True
