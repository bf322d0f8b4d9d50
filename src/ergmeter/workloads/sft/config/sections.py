"""What does a training's configuration hold, section by section?

The trap: a setting that is written down and never used. In the system this follows, precision,
optimizer and number of steps stood in the file and in the ledger, and the trainer got none of
them. So every key that can be written has a field here, and whoever trains reads these fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

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
