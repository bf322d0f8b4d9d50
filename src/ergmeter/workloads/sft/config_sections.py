"""The sections of a training's configuration, and the readers of their values.

Every key that can be written has a field here, and the training reads these fields. In the
original, precision, optimizer and steps were in the file and in the ledger, and the trainer got
none of them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

# Value readers: each returns the value, or raises with what it should have been. To YAML `2e-4`
# without a dot is text, and `no` is False. So a number may be written as text, and a choice that
# has "no" accepts False.


class NotTaken(Exception):  # noqa: N818  what it is, rather than that it went wrong
    """A value that the key does not accept. The text says what it accepts."""


Kind: TypeAlias = Callable[[Any], Any]


def flag(value: object) -> bool:
    """True or false."""
    if isinstance(value, bool):
        return value
    raise NotTaken("must be true or false")


def word(value: object) -> str:
    """Some text."""
    if isinstance(value, str) and value.strip():
        return value
    raise NotTaken("must be text")


def file(value: object) -> Path:
    """A path, from the working directory."""
    if isinstance(value, str) and value.strip():
        return Path(value).expanduser()
    raise NotTaken("must be a path")


def whole_number(least: int) -> Kind:
    """A reader of whole numbers of at least `least`."""

    def read(value: object) -> int:
        if value == "auto":
            raise NotTaken(
                "must be a number: `auto` lets each side of a comparison run with another one"
            )
        number = _number(value)
        if number is None or not number.is_integer() or number < least:
            raise NotTaken(f"must be a whole number of {least} or more")
        return int(number)

    return read


def number(least: float, *, below: float = math.inf, above: bool = False) -> Kind:
    """A number from `least` on (`above`: past it) and `below` a limit."""
    wanted = f"above {least:g}" if above else f"of {least:g} or more"
    if below < math.inf:
        wanted += f" and below {below:g}"

    def read(value: object) -> float:
        parsed = _number(value)
        if parsed is None or not least <= parsed < below or (above and parsed == least):
            raise NotTaken(f"must be a number {wanted}")
        return parsed

    return read


def choice(*allowed: str | int) -> Kind:
    """A reader of one of several values."""
    names = ", ".join(map(str, allowed))

    def read(value: object) -> str | int:
        if value is False and "no" in allowed:
            return "no"
        if isinstance(value, str | int) and not isinstance(value, bool) and value in allowed:
            return value
        near = nearest(str(value), [str(option) for option in allowed])
        raise NotTaken(f"must be one of {names}" + (f"; did you mean {near}?" if near else ""))

    return read


def modules(value: object) -> tuple[str, ...] | None:
    """Names of layers; `auto` leaves the choice to the training."""
    if value == "auto":
        return None
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise NotTaken("must be a list of layers' names, or auto")


def nearest(name: str, names: Sequence[str]) -> str | None:
    """The closest match of a name, or None."""
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return matches[0] if matches else None


def is_mapping(value: object) -> bool:
    """Whether it has keys and values."""
    return isinstance(value, Mapping)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


BUILTIN = "builtin:"  # a model or a data set that is made here, with no network

TaskMode = Literal["sft", "cpt", "cpt_mixed"]
ModelType = Literal["causal", "seq2seq"]
Backend = Literal["torch", "bnb", "unsloth"]
Mode = Literal["lora", "qlora", "dora", "full"]
When = Literal["no", "steps", "epoch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model: "builtin:tiny" and its kin, a folder, or a name on the hub."""

    name: str
    local_dir: Path | None = None
    type: ModelType = "causal"
    max_seq_len: int = 512
    trust_remote_code: bool = False
    attention: str | None = None  # attn_implementation; None: what transformers chooses

    @property
    def is_builtin(self) -> bool:
        """Whether it is made here."""
        return self.name.startswith(BUILTIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """The adapters' shape. `target_modules` None: every linear layer but the head."""

    r: int = 32
    alpha: int = 32
    dropout: float = 0.05
    target_modules: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is trained, and by which library. `bits` None: weights are not quantised."""

    backend: Backend = "torch"
    mode: Mode = "lora"
    bits: Literal[4, 8] | None = None
    lora: LoraSettings = field(default_factory=LoraSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """The training. Batches are those of one device."""

    output_dir: Path
    batch_size: int = 4
    grad_accum: int = 1
    epochs: float = 1.0
    max_steps: int | None = None
    lr: float = 2e-4
    lr_scheduler: str = "linear"
    warmup_ratio: float = 0.0
    warmup_steps: int | None = None
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    fp16: bool = False
    bf16: bool = False
    optim: str = "adamw_torch"
    gradient_checkpointing: bool = False
    evaluation_strategy: When = "no"
    eval_steps: int | None = None
    save_strategy: When = "no"
    save_steps: int | None = None
    save_total_limit: int | None = None
    early_stopping_patience: int | None = None
    logging_steps: int = 10
    resume: bool = False
    dataloader_workers: int = 0
    tensorboard: bool = False
    trainer: Literal["transformers", "trl"] = "transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The text. `train_path` None: the built-in data set, with its own held-out part."""

    train_path: Path | None = None
    val_path: Path | None = None
    template_path: Path | None = None
    packing: bool = False
    pad_to_multiple_of: int | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """One of several data sets in a mixture. `path` None: the built-in one."""

    path: Path | None
    type: Literal["cpt", "sft"]
    weight: float = 1.0
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What is measured beside the training."""

    enable_energy_logging: bool = True
    sample_interval_s: float = 0.05
    warmup_s: float = 60.0
    log_vram_every_s: float = 1.0
    results_csv: Path = Path("outputs/energy_results.csv")
    hf_memory: bool = False  # the Trainer's own tracker, whose thread may cost half the speed


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """A whole configuration, checked. `merged`: the keys and values that it was read from."""

    path: Path
    merged: dict[str, object]
    model: Model
    tuning: Tuning
    train: Train
    data: Data
    metrics: Metrics
    task_mode: TaskMode = "sft"
    seed: int = 42
    report: bool = True
    block_size: int | None = None
    pack_factor: int | None = None
    datasets: tuple[DataSource, ...] = ()

    @property
    def has_validation(self) -> bool:
        """Whether there is text that is held out, and so something to evaluate on."""
        if self.data.val_path is not None:
            return True
        if self.task_mode == "cpt_mixed":
            return all(source.path is None for source in self.datasets)
        return self.data.train_path is None
