"""The configuration of a training: its sections, and its YAML file, read with all errors at once.

Every key that can be written has a field here, and the training reads these fields. In the
original, precision, optimizer and steps were in the file and in the ledger, and the trainer got
none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StringConstraints, model_validator

from ergmeter.config_file import (
    ConfigError,
    ConfigFile,
    ConfigModel,
    Location,
    dotted,
    read_yaml,
    unknown_key,
    usage_error,
    validate,
    with_line,
)
from ergmeter.errors import UsageError, closest
from ergmeter.runlog.settings import Settings

BUILTIN = "builtin:"  # a model that ergmeter makes itself, without the network


def _number(value: object) -> object:
    """A number that may be written as text: to YAML `2e-4` without a dot is text."""
    if value == "auto":
        raise ValueError("must be a number: with `auto` the sides of a comparison could differ")
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


def _layers(value: object) -> object:
    """Names of layers; `auto` leaves the choice to the training."""
    if value == "auto":
        return None
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return value
    raise ValueError("must be a list of layers' names, or auto")


Text = Annotated[str, StringConstraints(pattern=r"\S")]


def _path_or_builtin(value: object) -> Path | None:
    return None if value == "builtin" else _path(value)


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


def _sinks(value: object) -> tuple[object, ...]:
    """Sinks as a Meter takes them: NAME, NAME:OPTION=VALUE, or a name with its options."""
    from ergmeter.meter.sink_feed import planned  # noqa: PLC0415  only those who name some

    sinks: list[Any] = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict):
            sinks += [(name, options or {}) for name, options in item.items()]
        elif item != "none":  # as transformers spells an empty list
            sinks.append(item)
    try:
        planned(sinks)
    except UsageError as error:  # pydantic takes a ValueError
        raise ValueError(f"has a bad entry: {error}") from error
    return tuple(sinks)


# To YAML `NO`, Norway's code, is False.
Grid = Annotated[Text, BeforeValidator(lambda name: "NO" if name is False else name)]
# The schedules of transformers that need no further settings.
Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
    "inverse_sqrt",
]  # fmt: skip


class Model(ConfigModel):
    """The model: a built-in one such as "builtin:tiny", a folder, or a name on the hub."""

    name: Text = Field(description="a name on the hub, a folder, or builtin:tiny")
    local_dir: FilePath | None = None
    type: Literal["causal", "seq2seq"] = "causal"
    max_seq_len: Length = 512
    trust_remote_code: StrictBool = False
    attn_implementation: Text | None = None  # None: what transformers chooses

    @property
    def is_builtin(self) -> bool:
        """True if ergmeter makes the model itself."""
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
    """The training's settings. Batch sizes are those of one device."""

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
    report_to: Annotated[tuple[Any, ...], BeforeValidator(_sinks)] = ()
    sinks_every_s: Positive = 10.0
    trainer: Literal["transformers", "trl"] = "transformers"


class Data(ConfigModel):
    """The training text. `train_path` None: the built-in data set, with its own held-out part."""

    train_path: FilePath | None = None
    val_path: FilePath | None = None
    template_path: FilePath | None = None
    packing: StrictBool = False
    pad_to_multiple_of: Count | None = None
    limit: Count | None = None


class DataSource(ConfigModel):
    """One of several data sets in a mixture. `path` None: the built-in one."""

    path: Annotated[Path | None, BeforeValidator(_path_or_builtin)]
    type: Literal["cpt", "sft", "chat"]  # chat is sft
    weight: Positive = 1.0
    name: Text | None = None


class Metrics(ConfigModel):
    """What is measured during the training, and where it is written."""

    enable_energy_logging: StrictBool = True
    sample_interval_s: Positive = 0.05
    warmup_s: NotNegative = 60.0
    log_vram_every_s: Positive = 1.0
    results_csv: FilePath = Path("outputs/energy_results.csv")
    hf_memory: StrictBool = False  # the Trainer's own tracker, whose thread may cost half the speed
    # What carbon and cost are computed with; `Settings` checks the values.
    grid: Grid | None = None
    grid_g_per_kwh: Number | None = None
    grid_source: Text | None = None
    pue: Number | None = None
    pue_source: Text | None = None
    price_per_gpu_hour: Number | None = None
    price_per_kwh: Number | None = None
    currency: Text | None = None

    @property
    def declared(self) -> dict[str, Any]:
        """The values given here that are a Meter's settings: warm-up, carbon and cost."""
        names = {"grid", *(field.name for field in fields(Settings))}
        return self.model_dump(include=names, exclude_none=True)


class SftSettings(ConfigModel):
    """All settings that a configuration file may have."""

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
        """True if there is held-out text to evaluate on."""
        if self.data.val_path is not None:
            return True
        if self.task_mode == "cpt_mixed":
            return all(source.path is None for source in self.datasets)
        return self.data.train_path is None


class SftConfig(SftSettings):
    """A checked configuration. `merged`: the keys and values that it was read from."""

    path: Path
    merged: dict[str, Any]


# Contradictory settings are errors, and the training does not start. Resolving them silently would
# put a setting into the ledger that never ran.


BUILTIN_TYPES = {"tiny": "causal", "tiny-seq2seq": "seq2seq", "1b": "causal"}


def contradictions(config: SftSettings) -> list[str]:
    """Returns a line for each pair of contradictory settings, with what to do."""
    checks = (_model, _tuning, _schedule, _data, _packing, _blocks, _mixture, _metrics)
    return [line for check in checks for line in check(config)]


def is_of_bitsandbytes(optim: str) -> bool:
    """True if transformers takes this optimizer from bitsandbytes."""
    name = optim.lower()
    return "paged" in name or "bnb" in name or ("8bit" in name and name != "adamw_torch_8bit")


def _model(config: SftSettings) -> Iterator[str]:
    model = config.model
    if model.is_builtin:
        name = model.name.removeprefix(BUILTIN)
        of = BUILTIN_TYPES.get(name)
        if of is None:
            near = closest(name, BUILTIN_TYPES)
            names = ", ".join(f"{BUILTIN}{name}" for name in BUILTIN_TYPES)
            hint = f"did you mean {BUILTIN}{near}?" if near else f"there are {names}"
            yield f"model.name {model.name} is no built-in model; {hint}"
        elif of != model.type:
            yield f"model.type is {model.type}, but {model.name} is {of}; write model.type: {of}"
    if model.type == "seq2seq" and config.task_mode != "sft":
        yield f"task_mode {config.task_mode} needs model.type causal; a seq2seq model takes sft"
    if model.attn_implementation and config.tuning.backend == "unsloth":
        yield "model.attn_implementation: Unsloth chooses its own attention; leave it out"
    if model.type == "seq2seq" and config.tuning.backend == "unsloth":
        yield "tuning.backend unsloth trains causal models only; for seq2seq write torch or bnb"
    if model.type == "seq2seq" and config.train.trainer == "trl":
        yield "train.trainer trl trains causal models; for seq2seq write transformers"


def _tuning(config: SftSettings) -> Iterator[str]:
    tuning, optim = config.tuning, config.train.optim
    if tuning.backend == "torch":
        if tuning.mode == "qlora":
            yield "tuning.mode qlora needs 4-bit weights: write tuning.backend bnb or unsloth"
        elif tuning.bits:
            yield f"tuning.bits {tuning.bits} needs tuning.backend bnb or unsloth; got torch"
        if is_of_bitsandbytes(optim):
            yield f"train.optim {optim} needs bitsandbytes: write tuning.backend bnb or adamw_torch"
    if tuning.mode == "full" and tuning.bits:
        yield (
            f"tuning.mode full can't train weights of {tuning.bits} bits; remove tuning.bits or"
            " write tuning.mode lora"
        )
    if tuning.mode == "qlora" and tuning.bits == 8:
        yield "tuning.mode qlora is 4-bit by definition; for tuning.bits 8 write tuning.mode lora"
    if tuning.backend == "bnb" and not tuning.bits and not is_of_bitsandbytes(optim):
        yield (
            "tuning.backend bnb with neither tuning.bits nor an optimizer of bitsandbytes is the"
            " same as torch; write tuning.bits: 4, or tuning.backend: torch"
        )


def _schedule(config: SftSettings) -> Iterator[str]:
    train = config.train
    if train.fp16 and train.bf16:
        yield "train.fp16 and train.bf16 are both true; keep one"
    if train.warmup_ratio and train.warmup_steps:
        yield "train.warmup_ratio and train.warmup_steps are both given; keep one"
    if train.save_strategy == "steps" and train.save_steps is None:
        yield "train.save_strategy steps needs train.save_steps"
    if train.evaluation_strategy == "steps" and train.eval_steps is None:
        yield "train.evaluation_strategy steps needs train.eval_steps"
    if train.evaluation_strategy != "no" and not config.has_validation:
        yield (
            f"train.evaluation_strategy {train.evaluation_strategy} has nothing to evaluate on;"
            " give data.val_path"
        )
    if train.early_stopping_patience and train.evaluation_strategy == "no":
        yield "train.early_stopping_patience needs train.evaluation_strategy steps or epoch"


def _data(config: SftSettings) -> Iterator[str]:
    data, longest = config.data, config.model.max_seq_len
    if data.val_path and not data.train_path and config.task_mode != "cpt_mixed":
        yield "data.val_path without data.train_path: the built-in text has a held-out part itself"
    if data.val_path and data.val_path == data.train_path:
        yield "data.val_path is data.train_path: a loss on trained text is no evaluation"
    multiple = data.pad_to_multiple_of
    if multiple and longest % multiple:
        yield (
            f"data.pad_to_multiple_of {multiple} does not divide model.max_seq_len {longest}, so"
            " that rows would be padded past it"
        )
    if data.template_path and config.task_mode == "cpt":
        yield "data.template_path is for sft; task_mode cpt takes text as it is"


def _packing(config: SftSettings) -> Iterator[str]:
    if not config.data.packing:
        return
    if config.model.type == "seq2seq":
        yield "data.packing is for causal models; a seq2seq model takes one document a row"
    if config.task_mode != "sft":
        yield f"data.packing is for sft; task_mode {config.task_mode} fills its blocks anyway"
    if config.tuning.backend == "unsloth":
        yield (
            "data.packing with tuning.backend unsloth: its attention may mix the documents of a"
            " packed row; write data.packing: false"
        )


def _blocks(config: SftSettings) -> Iterator[str]:
    is_cpt = config.task_mode != "sft"
    for name, value in (("block_size", config.block_size), ("pack_factor", config.pack_factor)):
        if value and not is_cpt:
            yield f"{name} is for task_mode cpt and cpt_mixed; for sft write data.packing: true"
    longest = config.model.max_seq_len
    if is_cpt and config.block_size and config.block_size > longest:
        yield f"block_size {config.block_size} is more than model.max_seq_len {longest}"


def _mixture(config: SftSettings) -> Iterator[str]:
    if config.task_mode == "cpt_mixed":
        if not config.datasets:
            yield "task_mode cpt_mixed needs datasets: a list of path, type and weight"
        if config.data.train_path:
            yield "data.train_path beside datasets: task_mode cpt_mixed trains on datasets only"
    elif config.datasets:
        yield f"datasets is for task_mode cpt_mixed; got {config.task_mode}"


def _metrics(config: SftSettings) -> Iterator[str]:
    try:
        Settings.declared(None, config.metrics.declared)
    except UsageError as error:
        yield f"metrics: {error}"
    if config.train.report_to and not config.metrics.enable_energy_logging:
        yield "train.report_to needs metrics.enable_energy_logging: true"


# Keys of the original that have no use here, with what to do about each.
NO_USE = {
    "mode": "the original never read it; write task_mode",
    "run_name": "remove it; train.output_dir distinguishes runs",
    "stride": "remove it: windows that overlap count a token twice",
    "logging": "write train.logging_steps and train.report_to",
    "model.revision": "remove it; load that revision into a folder and give its path as model.name",
    "data.format": "remove it; the format is recognised by the file's own keys",
    "data.split": "remove it; give data.train_path and data.val_path",
    "data.test_path": "remove it; there is no test after the training",
    "data.cache_dir": "remove it; nothing is cached",
    "train.load_best_model_at_end": "remove it; what is measured is the whole training",
    "train.metric_for_best_model": "remove it; early stopping goes by the evaluation's loss",
    "train.greater_is_better": "remove it; early stopping goes by the evaluation's loss",
    "train.overwrite_output_dir": "remove it; choose another train.output_dir",
}


# By section: alternative names of keys, from the original and from transformers.
OTHER_NAMES = {
    "model": {"max_seq_length": "max_seq_len", "max_length": "max_seq_len"},
    "tuning.lora": {"rank": "r", "lora_alpha": "alpha", "lora_dropout": "dropout"},
    "train": {
        "per_device_train_batch_size": "batch_size",
        "gradient_accumulation_steps": "grad_accum",
        "num_train_epochs": "epochs",
        "learning_rate": "lr",
        "lr_scheduler_type": "lr_scheduler",
        "num_warmup_steps": "warmup_steps",
        "eval_strategy": "evaluation_strategy",
        "dataloader_num_workers": "dataloader_workers",
        "sinks": "report_to",
    },
}
_SECTIONS: dict[str, type[ConfigModel]] = {
    "": SftSettings, "model": Model, "tuning": Tuning, "tuning.lora": LoraSettings,
    "train": Train, "data": Data, "metrics": Metrics,
}  # fmt: skip


def load(path: Path, *, changes: Mapping[str, object] | None = None) -> SftConfig:
    """Reads a configuration. `changes`: values by dotted key that override the file's."""
    changes = changes or {}
    files = list(_with_includes(path, ()))
    values: dict[str, Any] = {}
    for file in reversed(files):
        values = _merged(values, _renamed(file.values, ""))
    for key, value in changes.items():
        values = _merged(values, _renamed(_nested(key, value), ""))
    settings, errors = _checked(values, output_dir=Path("outputs") / path.stem)
    if settings is None or errors:
        lines = [
            error.text if dotted(error.location) in changes else _with_line(error, files)
            for error in errors
        ]
        raise usage_error(path, lines)
    return SftConfig(path=path, merged=values, **dict(settings))


def errors_in(values: Mapping[str, Any]) -> list[str]:
    """Error messages for the values of a configuration; empty if they are valid."""
    _, errors = _checked(_renamed(values, ""), output_dir=Path("outputs"))
    return [error.text for error in errors]


def _checked(
    values: Mapping[str, Any], *, output_dir: Path
) -> tuple[SftSettings | None, list[ConfigError]]:
    defaults = {"model": {}, "train": {"output_dir": output_dir}}
    present = {key: value for key, value in values.items() if value is not None}
    settings, errors = validate(SftSettings, _merged(defaults, present), unknown=_unknown)
    if settings is not None:
        errors += [ConfigError((), line) for line in contradictions(settings)]
    return settings, errors


def _with_includes(path: Path, above: tuple[Path, ...]) -> Iterator[ConfigFile]:
    """A file, then the file that it includes, and so on."""
    if path.resolve() in above:
        chain = " -> ".join(file.name for file in (*above, path))
        raise UsageError(f"{path}: the files include each other in a circle: {chain}")
    file = read_yaml(path)
    included = file.values.pop("include", None)
    yield file
    if isinstance(included, str):
        yield from _with_includes(_included_path(included, path), (*above, path.resolve()))
    elif included is not None:
        raise UsageError(f"{path}: include must be the path of one YAML file; got {included!r}")


def _included_path(included: str, path: Path) -> Path:
    """The included path: relative to the including file, else to the working directory."""
    beside, here = path.parent / included, Path(included)
    for candidate in (beside, here):
        if candidate.is_file():
            return candidate
    raise UsageError(f"{path}: include: {included} is neither at {beside} nor at {here.resolve()}")


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two mappings key by key; the one above wins."""
    result = dict(below)
    for key, value in above.items():
        lower = result.get(key)
        both = isinstance(lower, Mapping) and isinstance(value, Mapping)
        result[key] = _merged(lower, value) if both else value  # type: ignore[arg-type]
    return result


def _nested(key: str, value: object) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: _nested(rest, value) if rest else value}


def _renamed(values: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Rename alternative keys, so that one file's `lr` overrides another's `learning_rate`.

    If a file has both names of a key, both stay, and cause an error.
    """
    first_names = OTHER_NAMES.get(section, {})
    result: dict[str, Any] = {}
    for name, value in values.items():
        inner = f"{section}.{name}".lstrip(".")
        if inner in _SECTIONS and isinstance(value, Mapping):
            result[name] = _renamed(value, inner)
        else:
            first = first_names.get(name, name)
            result[name if first in values else first] = value
    return result


def _unknown(location: Location, siblings: Sequence[str]) -> str:
    """The message for an unknown key: the closest match, or the section it belongs to."""
    path, section, name = dotted(location), dotted(location[:-1]), str(location[-1])
    if path in NO_USE:
        return f"{path} has no use here: {NO_USE[path]}"
    others = OTHER_NAMES.get(section, {})
    if name in others:
        return f"{path} and {section}.{others[name]} are the same setting; keep one"
    for elsewhere, model in _SECTIONS.items():
        if name in model.model_fields or name in OTHER_NAMES.get(elsewhere, {}):
            return f"{path} is no key; did you mean {elsewhere}.{name}?".replace(" .", " ")
    near = closest(name, [*siblings, *others])
    if near:
        return f"{path} is no key; did you mean {dotted((*location[:-1], near))}?"
    return unknown_key(location, siblings)


def _with_line(error: ConfigError, files: Sequence[ConfigFile]) -> str:
    """The error with its line in a file, where the key may have an alternative name."""
    *section, name = error.location or ("",)
    others = OTHER_NAMES.get(dotted(tuple(section)), {})
    names = [name, *(other for other, first in others.items() if first == name)]
    written = next(
        (other for other in names if any(file.line((*section, other)) for file in files)), name
    )
    return with_line(ConfigError((*section, written), error.text), files)
