"""The sections of a training's configuration.

Every key that can be written has a field here, and the training reads these fields. In the
original, precision, optimizer and steps were in the file and in the ledger, and the trainer got
none of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StringConstraints, model_validator

from ergmeter.config_file import ConfigModel

BUILTIN = "builtin:"  # a model or a data set that is made here, with no network


def _number(value: object) -> object:
    """A number that may be written as text: to YAML `2e-4` without a dot is text."""
    if value == "auto":
        raise ValueError(
            "must be a number: `auto` lets each side of a comparison run with another one"
        )
    if isinstance(value, bool):
        raise ValueError("must be a number")  # noqa: TRY004  pydantic takes a ValueError
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value  # for pydantic's error


def _path(value: object) -> Path:
    """A path, from the working directory."""
    if isinstance(value, Path) or (isinstance(value, str) and value.strip()):
        return Path(value).expanduser()
    raise ValueError("must be a path")


def _source_path(value: object) -> Path | None:
    return None if value == "builtin" else _path(value)


def _layers(value: object) -> object:
    """Names of layers; `auto` leaves the choice to the training."""
    if value == "auto":
        return None
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return value
    raise ValueError("must be a list of layers' names, or auto")


Text = Annotated[str, StringConstraints(pattern=r"\S")]
FilePath = Annotated[Path, BeforeValidator(_path)]
Count = Annotated[int, BeforeValidator(_number), Field(ge=1)]
CountOrZero = Annotated[int, BeforeValidator(_number), Field(ge=0)]
Length = Annotated[int, BeforeValidator(_number), Field(ge=2)]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, lt=1)]
# To YAML `no` is False.
When = Annotated[
    Literal["no", "steps", "epoch"], BeforeValidator(lambda when: "no" if when is False else when)
]
# The schedules of transformers that need no further settings.
Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
    "inverse_sqrt",
]  # fmt: skip


class Model(ConfigModel):
    """The model: "builtin:tiny" and its kin, a folder, or a name on the hub."""

    name: Text = Field(description="a name on the hub, a folder, or builtin:tiny")
    local_dir: FilePath | None = None
    type: Literal["causal", "seq2seq"] = "causal"
    max_seq_len: Length = 512
    trust_remote_code: StrictBool = False
    attn_implementation: Text | None = None  # None: what transformers chooses

    @property
    def is_builtin(self) -> bool:
        """Whether it is made here."""
        return self.name.startswith(BUILTIN)


class LoraSettings(ConfigModel):
    """The adapters' shape. `target_modules` None: every linear layer but the head."""

    r: Count = 32
    alpha: Count = 32
    dropout: Share = 0.05
    target_modules: Annotated[tuple[str, ...] | None, BeforeValidator(_layers)] = None


class Tuning(ConfigModel):
    """What is trained, and by which library. `bits` None: weights are not quantised."""

    backend: Literal["torch", "bnb", "unsloth"] = "torch"
    mode: Literal["lora", "qlora", "dora", "full"] = "lora"
    bits: Literal[4, 8] | None = None
    lora: LoraSettings = LoraSettings()

    @model_validator(mode="before")
    @classmethod
    def _bits_of_qlora(cls, values: Any) -> Any:  # noqa: ANN401  of YAML
        is_qlora = isinstance(values, dict) and values.get("mode") == "qlora"
        return {**values, "bits": values.get("bits") or 4} if is_qlora else values


class Train(ConfigModel):
    """The training. Batches are those of one device."""

    output_dir: FilePath
    batch_size: Count = 4
    grad_accum: Count = 1
    epochs: Positive = 1.0
    max_steps: Count | None = None
    lr: Positive = 2e-4
    lr_scheduler: Schedule = "linear"
    warmup_ratio: Share = 0.0
    warmup_steps: CountOrZero | None = None
    weight_decay: NotNegative = 0.0
    max_grad_norm: Positive = 1.0
    fp16: StrictBool = False
    bf16: StrictBool = False
    optim: Text = "adamw_torch"
    gradient_checkpointing: StrictBool = False
    evaluation_strategy: When = "no"
    eval_steps: Count | None = None
    save_strategy: When = "no"
    save_steps: Count | None = None
    save_total_limit: Count | None = None
    early_stopping_patience: Count | None = None
    logging_steps: Count = 10
    resume: StrictBool = False
    dataloader_workers: CountOrZero = 0
    tensorboard: StrictBool = False
    trainer: Literal["transformers", "trl"] = "transformers"


class Data(ConfigModel):
    """The text. `train_path` None: the built-in data set, with its own held-out part."""

    train_path: FilePath | None = None
    val_path: FilePath | None = None
    template_path: FilePath | None = None
    packing: StrictBool = False
    pad_to_multiple_of: Count | None = None
    limit: Count | None = None


class DataSource(ConfigModel):
    """One of several data sets in a mixture. `path` None: the built-in one."""

    path: Annotated[Path | None, BeforeValidator(_source_path)]
    type: Literal["cpt", "sft", "chat"]  # chat is sft
    weight: Positive = 1.0
    name: Text | None = None


class Metrics(ConfigModel):
    """What is measured beside the training."""

    enable_energy_logging: StrictBool = True
    sample_interval_s: Positive = 0.05
    warmup_s: NotNegative = 60.0
    log_vram_every_s: Positive = 1.0
    results_csv: FilePath = Path("outputs/energy_results.csv")
    hf_memory: StrictBool = False  # the Trainer's own tracker, whose thread may cost half the speed


class SftSettings(ConfigModel):
    """All that a configuration file may have."""

    model: Model
    train: Train
    tuning: Tuning = Tuning()
    data: Data = Data()
    metrics: Metrics = Metrics()
    task_mode: Literal["sft", "cpt", "cpt_mixed"] = "sft"
    seed: CountOrZero = 42
    report: StrictBool = True
    block_size: Length | None = None
    pack_factor: Count | None = None
    datasets: tuple[DataSource, ...] = ()

    @property
    def has_validation(self) -> bool:
        """Whether there is text that is held out, and so something to evaluate on."""
        if self.data.val_path is not None:
            return True
        if self.task_mode == "cpt_mixed":
            return all(source.path is None for source in self.datasets)
        return self.data.train_path is None


class SftConfig(SftSettings):
    """A checked configuration. `merged`: the keys and values that it was read from."""

    path: Path
    merged: dict[str, Any]
