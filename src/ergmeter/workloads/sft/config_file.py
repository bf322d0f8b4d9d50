"""Reads the YAML configuration of a training, or reports all its errors at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ergmeter.errors import FormatError, UsageError
from ergmeter.workloads.sft.config_sections import (
    BUILTIN,
    Data,
    DataSource,
    Kind,
    LoraSettings,
    Metrics,
    Model,
    NotTaken,
    SftConfig,
    Train,
    Tuning,
    choice,
    file,
    flag,
    is_mapping,
    modules,
    nearest,
    number,
    whole_number,
    word,
)

# Contradictory settings are errors, and the training does not start. Resolving them silently would
# put a setting into the ledger that never ran.


BUILTIN_TYPES = {"tiny": "causal", "tiny-seq2seq": "seq2seq", "1b": "causal"}


def contradictions(config: SftConfig) -> list[str]:
    """Yields a line for each contradiction, with what to do."""
    return [line for check in _CHECKS for line in check(config)]


def is_of_bitsandbytes(optim: str) -> bool:
    """Whether transformers takes this optimizer from bitsandbytes."""
    name = optim.lower()
    return "paged" in name or "bnb" in name or ("8bit" in name and name != "adamw_torch_8bit")


def _model(config: SftConfig) -> Iterator[str]:
    model = config.model
    if model.is_builtin:
        name = model.name.removeprefix(BUILTIN)
        of = BUILTIN_TYPES.get(name)
        if of is None:
            near = nearest(name, list(BUILTIN_TYPES))
            names = ", ".join(f"{BUILTIN}{name}" for name in BUILTIN_TYPES)
            hint = f"did you mean {BUILTIN}{near}?" if near else f"there are {names}"
            yield f"model.name {model.name} is no built-in model; {hint}"
        elif of != model.type:
            yield f"model.type is {model.type}, but {model.name} is {of}; write model.type: {of}"
    if model.type == "seq2seq" and config.task_mode != "sft":
        yield f"task_mode {config.task_mode} needs model.type causal; a seq2seq model takes sft"
    if model.type == "seq2seq" and config.tuning.backend == "unsloth":
        yield "tuning.backend unsloth trains causal models only; for seq2seq write torch or bnb"
    if model.type == "seq2seq" and config.train.trainer == "trl":
        yield "train.trainer trl trains causal models; for seq2seq write transformers"


def _tuning(config: SftConfig) -> Iterator[str]:
    tuning, optim = config.tuning, config.train.optim
    if tuning.backend == "torch":
        if tuning.mode == "qlora":
            yield "tuning.mode qlora needs 4-bit weights: write tuning.backend bnb or unsloth"
        elif tuning.bits:
            yield f"tuning.bits {tuning.bits} needs tuning.backend bnb or unsloth; got torch"
        if is_of_bitsandbytes(optim):
            yield f"train.optim {optim} is of bitsandbytes: write tuning.backend bnb or adamw_torch"
    if tuning.mode == "full" and tuning.bits:
        yield (
            f"tuning.mode full can't train weights of {tuning.bits} bits; remove tuning.bits or"
            " write tuning.mode lora"
        )
    if tuning.mode == "qlora" and tuning.bits == 8:
        yield "tuning.mode qlora is 4-bit by definition; for tuning.bits 8 write tuning.mode lora"
    if tuning.backend == "bnb" and not tuning.bits and not is_of_bitsandbytes(optim):
        yield (
            "tuning.backend bnb with neither tuning.bits nor an optimizer of bitsandbytes is what"
            " torch runs; write tuning.bits: 4, or tuning.backend: torch"
        )


def _precision(config: SftConfig) -> Iterator[str]:
    if config.train.fp16 and config.train.bf16:
        yield "train.fp16 and train.bf16 are both true; keep one"


def _schedule(config: SftConfig) -> Iterator[str]:
    train = config.train
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


def _data(config: SftConfig) -> Iterator[str]:
    data, longest = config.data, config.model.max_seq_len
    if data.val_path and not data.train_path and config.task_mode != "cpt_mixed":
        yield "data.val_path without data.train_path: the built-in text has a held-out part itself"
    if data.val_path and data.val_path == data.train_path:
        yield "data.val_path is data.train_path: a loss on what was trained on is no evaluation"
    multiple = data.pad_to_multiple_of
    if multiple and longest % multiple:
        yield (
            f"data.pad_to_multiple_of {multiple} does not divide model.max_seq_len {longest}, so"
            " that rows would be padded past it"
        )
    if data.template_path and config.task_mode == "cpt":
        yield "data.template_path is for sft; task_mode cpt takes text as it is"


def _packing(config: SftConfig) -> Iterator[str]:
    if not config.data.packing:
        return
    if config.model.type == "seq2seq":
        yield "data.packing is for causal models; a seq2seq model takes one document a row"
    if config.task_mode != "sft":
        yield f"data.packing is for sft; task_mode {config.task_mode} fills its blocks anyway"
    if config.tuning.backend == "unsloth":
        yield (
            "data.packing with tuning.backend unsloth: nothing shows that its attention keeps"
            " packed documents apart; write data.packing: false"
        )


def _blocks(config: SftConfig) -> Iterator[str]:
    is_cpt = config.task_mode != "sft"
    for name, value in (("block_size", config.block_size), ("pack_factor", config.pack_factor)):
        if value and not is_cpt:
            yield f"{name} is for task_mode cpt and cpt_mixed; for sft write data.packing: true"
    longest = config.model.max_seq_len
    if is_cpt and config.block_size and config.block_size > longest:
        yield f"block_size {config.block_size} is more than model.max_seq_len {longest}"


def _mixture(config: SftConfig) -> Iterator[str]:
    if config.task_mode == "cpt_mixed":
        if not config.datasets:
            yield "task_mode cpt_mixed needs datasets: a list of path, type and weight"
        if config.data.train_path:
            yield "data.train_path beside datasets: task_mode cpt_mixed trains on datasets only"
    elif config.datasets:
        yield f"datasets is for task_mode cpt_mixed; got {config.task_mode}"


_CHECKS: tuple[Callable[[SftConfig], Iterator[str]], ...] = (
    _model, _tuning, _precision, _schedule, _data, _packing, _blocks, _mixture,
)  # fmt: skip


# Keys, their other names, and keys of the original that do nothing here. An unknown key is an
# error, since `learning_rat: 1e-5` would train with the default. The original's unused keys have
# messages of their own.


@dataclass(frozen=True, slots=True)
class Key:
    """A key's kind of value, the other names it goes by, and its field where that differs."""

    kind: Kind
    also: tuple[str, ...] = ()
    field: str | None = None


_WHEN = choice("no", "steps", "epoch")
# The schedules of transformers that need no further settings.
_SCHEDULES = choice(
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
    "inverse_sqrt",
)  # fmt: skip

TOP = {
    "task_mode": Key(choice("sft", "cpt", "cpt_mixed")),
    "seed": Key(whole_number(0)),
    "report": Key(flag),
    "block_size": Key(whole_number(2)),
    "pack_factor": Key(whole_number(1)),
}
MODEL = {
    "name": Key(word),
    "local_dir": Key(file),
    "type": Key(choice("causal", "seq2seq")),
    "max_seq_len": Key(whole_number(2), ("max_seq_length", "max_length")),
    "trust_remote_code": Key(flag),
    "attn_implementation": Key(word, field="attention"),
}
TUNING = {
    "backend": Key(choice("torch", "bnb", "unsloth")),
    "mode": Key(choice("lora", "qlora", "dora", "full")),
    "bits": Key(choice(4, 8)),
}
LORA = {
    "r": Key(whole_number(1), ("rank",)),
    "alpha": Key(whole_number(1), ("lora_alpha",)),
    "dropout": Key(number(0, below=1), ("lora_dropout",)),
    "target_modules": Key(modules),
}
TRAIN = {
    "batch_size": Key(whole_number(1), ("per_device_train_batch_size",)),
    "grad_accum": Key(whole_number(1), ("gradient_accumulation_steps",)),
    "epochs": Key(number(0, above=True), ("num_train_epochs",)),
    "max_steps": Key(whole_number(1)),
    "lr": Key(number(0, above=True), ("learning_rate",)),
    "lr_scheduler": Key(_SCHEDULES, ("lr_scheduler_type",)),
    "warmup_ratio": Key(number(0, below=1)),
    "warmup_steps": Key(whole_number(0), ("num_warmup_steps",)),
    "weight_decay": Key(number(0)),
    "max_grad_norm": Key(number(0, above=True)),
    "fp16": Key(flag),
    "bf16": Key(flag),
    "optim": Key(word),
    "gradient_checkpointing": Key(flag),
    "evaluation_strategy": Key(_WHEN, ("eval_strategy",)),
    "eval_steps": Key(whole_number(1)),
    "save_strategy": Key(_WHEN),
    "save_steps": Key(whole_number(1)),
    "save_total_limit": Key(whole_number(1)),
    "early_stopping_patience": Key(whole_number(1)),
    "logging_steps": Key(whole_number(1)),
    "output_dir": Key(file),
    "resume": Key(flag),
    "dataloader_workers": Key(whole_number(0), ("dataloader_num_workers",)),
    "trainer": Key(choice("transformers", "trl")),
    "tensorboard": Key(flag),
}
DATA = {
    "train_path": Key(file),
    "val_path": Key(file),
    "template_path": Key(file),
    "packing": Key(flag),
    "pad_to_multiple_of": Key(whole_number(1)),
    "limit": Key(whole_number(1)),
}
METRICS = {
    "enable_energy_logging": Key(flag),
    "sample_interval_s": Key(number(0, above=True)),
    "warmup_s": Key(number(0)),
    "log_vram_every_s": Key(number(0, above=True)),
    "results_csv": Key(file),
    "hf_memory": Key(flag),
}
SOURCE = {
    "name": Key(word),
    "path": Key(word),
    "type": Key(choice("cpt", "sft", "chat")),
    "weight": Key(number(0, above=True)),
}
SECTIONS = {
    "model": MODEL,
    "tuning": TUNING,
    "tuning.lora": LORA,
    "train": TRAIN,
    "data": DATA,
    "metrics": METRICS,
}

# Of the original, with what to do about each.
NO_USE = {
    "mode": "the original never read it; write task_mode",
    "run_name": "remove it; train.output_dir tells runs apart",
    "stride": "remove it: windows that overlap count a token twice",
    "logging": "write train.logging_steps and train.tensorboard",
    "model.revision": "remove it; load that revision into a folder and give its path as model.name",
    "data.format": "remove it; the format is told by the file's own keys",
    "data.split": "remove it; give data.train_path and data.val_path",
    "data.test_path": "remove it; nothing here tests",
    "data.cache_dir": "remove it; nothing is cached",
    "train.load_best_model_at_end": "remove it; what is measured is the whole training",
    "train.metric_for_best_model": "remove it; early stopping goes by the evaluation's loss",
    "train.greater_is_better": "remove it; early stopping goes by the evaluation's loss",
    "train.overwrite_output_dir": "remove it; choose another train.output_dir",
    "train.report_to": "write train.tensorboard: true",
}


def by_first_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with each key by its first name, so that one file's `lr` lies over another's
    `learning_rate`. Where a file has both, both stay, for the error."""
    return _renamed(values, "")


def _renamed(values: Mapping[str, Any], section: str) -> dict[str, Any]:
    keys = SECTIONS.get(section, {})
    first = {other: name for name, key in keys.items() for other in key.also}
    result: dict[str, Any] = {}
    for name, value in values.items():
        below = f"{section}.{name}" if section else name
        if below in SECTIONS and isinstance(value, Mapping):
            result[name] = _renamed(value, below)
        else:
            to = first.get(name, name)
            result[name if to in values else to] = value
    return result


# A YAML file, merged over the file that it includes. YAML accepts a key twice and takes the last;
# here that is an error that names both lines.


INCLUDE = "include"
Values = dict[str, Any]
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as quick, where built


class _Once(_Loader):  # type: ignore[misc]
    """A YAML loader that rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in lines and key != "<<":
                raise FormatError(f"{key!r} stands twice, in lines {lines[key]} and {line}")
            lines[key] = line
        return dict(super().construct_mapping(node, deep=deep))


def with_includes(path: Path, *, each: Callable[[Values], Values] = dict) -> Values:
    """Reads a file, merged section by section over the files it includes.

    `each`: what is done to every file's values before they meet those of another.
    """
    return _read(path, (), each)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Values:
    """Merges two mappings key by key; the one above wins."""
    result = dict(below)
    for key, value in above.items():
        there = result.get(key)
        both = isinstance(there, Mapping) and isinstance(value, Mapping)
        result[key] = merged(there, value) if both else value  # type: ignore[arg-type]
    return result


def _read(path: Path, above: tuple[Path, ...], each: Callable[[Values], Values]) -> Values:
    if path.resolve() in above:
        chain = " -> ".join(file.name for file in (*above, path))
        raise UsageError(f"{path}: the files include each other in a circle: {chain}")
    values = _parsed(path)
    included = values.pop(INCLUDE, None)
    if included is None:
        return each(values)
    if not isinstance(included, str):
        raise UsageError(f"{path}: include must be the path of one YAML file; got {included!r}")
    below = _read(_included_path(included, path), (*above, path.resolve()), each)
    return merged(below, each(values))


def _included_path(included: str, path: Path) -> Path:
    """The included path: relative to the including file, else to the working directory."""
    beside, here = path.parent / included, Path(included)
    for candidate in (beside, here):
        if candidate.is_file():
            return candidate
    raise UsageError(f"{path}: include: {included} is neither at {beside} nor at {here.resolve()}")


def _parsed(path: Path) -> Values:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError(f"no configuration at {path}") from error
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a YAML file: {error}") from error
    try:
        values = yaml.load(text, _Once)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise FormatError(f"{path}{line}: not YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise FormatError(f"{path}: not YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise FormatError(f"{path} holds no sections (model:, train:, ...), so it is no training")
    return values


_BUILTIN_DATA = "builtin"
_PARTS = ("model", "tuning", "train", "data", "metrics", "datasets")
_MAX_QUOTED = 60


def load(path: Path, *, changes: Mapping[str, object] | None = None) -> SftConfig:
    """Reads a configuration. `changes`: values by dotted key that override the file's."""
    values = with_includes(path, each=by_first_names)
    for key, value in (changes or {}).items():
        values = merged(values, by_first_names(_nested(key, value)))
    reading = _Reading()
    config = reading.config(values, path)
    wrong = [*reading.wrong, *(contradictions(config) if config else ())]
    if wrong:
        more = f" (and {len(wrong) - 1} more: {'; '.join(wrong[1:])})" if wrong[1:] else ""
        raise UsageError(f"{path}: {wrong[0]}{more}")
    assert config is not None
    return config


def _nested(key: str, value: object) -> Values:
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


@dataclass(slots=True)
class _Reading:
    """One pass over a file that collects its values and all its errors."""

    wrong: list[str] = field(default_factory=list)

    def config(self, values: Values, path: Path) -> SftConfig | None:
        """All sections, or None if a required key is missing."""
        top = self.section(values, "", TOP, inside=_PARTS)
        model = self.part(values, "model", MODEL)
        tuning = self.part(values, "tuning", TUNING, inside=("lora",))
        train = self.part(values, "train", TRAIN)
        data = self.part(values, "data", DATA)
        lora = self.part(values.get("tuning"), "tuning.lora", LORA)
        metrics = self.part(values, "metrics", METRICS)
        datasets = self.sources(values.get("datasets"))
        if tuning.get("mode") == "qlora":
            tuning.setdefault("bits", 4)
        if "name" not in model:
            if not any(line.startswith("model") for line in self.wrong):
                self.wrong.append(
                    "model.name is missing: a name on the hub, a folder, or builtin:tiny"
                )
            return None
        return SftConfig(
            path=path,
            merged=values,
            model=Model(**model),
            tuning=Tuning(**tuning, lora=LoraSettings(**lora)),
            train=Train(**{"output_dir": Path("outputs") / path.stem, **train}),
            data=Data(**data),
            metrics=Metrics(**metrics),
            datasets=datasets,
            **top,
        )

    def part(
        self, values: object, name: str, keys: Mapping[str, Key], inside: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """The fields of a section that may be absent."""
        value = values.get(name.rpartition(".")[2]) if isinstance(values, Mapping) else None
        if value is None:
            return {}
        if not is_mapping(value):
            self.wrong.append(
                f"{name} must be a section of keys and values; got {_value_text(value)}"
            )
            return {}
        return self.section(value, f"{name}.", keys, inside)

    def section(
        self,
        values: Mapping[Any, Any],
        prefix: str,
        keys: Mapping[str, Key],
        inside: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        """Fields by their name. A key without a value stands for the default."""
        by_name = {name: key for key, declared in keys.items() for name in (key, *declared.also)}
        fields: dict[str, Any] = {}
        written: dict[str, str] = {}
        for name, value in values.items():
            if name in inside:
                continue
            key = by_name.get(name)
            if key is None:
                self.wrong.append(_unknown(f"{prefix}{name}", [*by_name, *inside]))
            elif value is not None:
                if key in written:
                    self.wrong.append(
                        f"{prefix}{name} and {prefix}{written[key]} are the same setting; keep one"
                    )
                written[key] = name
                self.read(fields, f"{prefix}{name}", keys[key], key, value)
        return fields

    def read(self, fields: dict[str, Any], path: str, key: Key, name: str, value: object) -> None:
        """Reads a value into its field, or records the error."""
        try:
            fields[key.field or name] = key.kind(value)
        except NotTaken as error:
            self.wrong.append(f"{path} {error}; got {_value_text(value)}")

    def sources(self, values: object) -> tuple[DataSource, ...]:
        """The data sets of a mixture."""
        if values is None:
            return ()
        if not isinstance(values, list):
            self.wrong.append(f"datasets must be a list; got {_value_text(values)}")
            return ()
        sources = [self.source(value, f"datasets[{number}]") for number, value in enumerate(values)]
        return tuple(source for source in sources if source is not None)

    def source(self, value: object, where: str) -> DataSource | None:
        """One data set of a mixture, or None if a required key is missing."""
        if not isinstance(value, Mapping):
            self.wrong.append(f"{where} must have keys and values; got {_value_text(value)}")
            return None
        fields = self.section(value, f"{where}.", SOURCE)
        missing = [key for key in ("path", "type") if key not in value]
        if missing:
            self.wrong.append(f"{where}.{missing[0]} is missing")
        if not fields.keys() >= {"path", "type"}:
            return None
        path = None if fields["path"] == _BUILTIN_DATA else Path(fields["path"]).expanduser()
        kind = "cpt" if fields["type"] == "cpt" else "sft"
        return DataSource(**{**fields, "path": path, "type": kind})


def _unknown(path: str, siblings: list[str]) -> str:
    """The message for an unknown key: the closest match, or the section it belongs to."""
    if path in NO_USE:
        return f"{path} has no use here: {NO_USE[path]}"
    name = path.rpartition(".")[2]
    elsewhere = [
        f"{section}.{name}" if section else name
        for section, keys in {**SECTIONS, "": TOP}.items()
        if name in keys or any(name in key.also for key in keys.values())
    ]
    if elsewhere:
        return f"{path} is no key; did you mean {elsewhere[0]}?"
    near = nearest(name, siblings)
    if near:
        return f"{path} is no key; did you mean {path.removesuffix(name)}{near}?"
    return f"{path} is no key; there are {', '.join(siblings)}"


def _value_text(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."
