"""Reads a job's settings (batch, sequence, nodes, adapters, precision) from options and its YAML.

The YAML also has the numbers of devices and nodes, adapters (a third fewer FLOPs than full
training), recomputation, and changes to the model's number of layers. All of these are used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from ergmeter.errors import ALMOST, FormatError
from ergmeter.flops.analytic import Checkpointing
from ergmeter.flops.config import quoted_value
from ergmeter.flops.graph.adapters import Lora

# The YAML has OmegaConf references: `${trainer.max_steps}` or `${multiply:8,512}`. Simple ones are
# resolved; another is an error that names the key and quotes the text.


_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_DEEPEST = 20  # nested references; more is a cycle
# Keys that distinguish a training's YAML from a model's config.json, which is YAML too.
_PARTS = {"data", "trainer", "model"}
_OF_A_MODEL = {"model_type", "architectures", "hidden_size"}


class Unresolved:
    """A reference that can't be resolved, with its text."""

    def __init__(self, text: str) -> None:
        self.text = text


class TrainingFile:
    """A training's YAML. A key that is absent or null is None."""

    def __init__(self, fields: dict[str, Any], *, where: str) -> None:
        self._fields = fields
        self.where = where
        self.misspelt: dict[str, str] = {}  # notes on keys that resemble missing ones

    def value(self, key: str) -> Any:  # noqa: ANN401  whatever the file holds
        """Return the value of a dotted key; `Unresolved` for a reference that can't be resolved."""
        return self._value(key.split("."), 0)

    def whole_number(self, key: str, *, instead: str) -> int | None:
        """Return a whole number of 1 or more; None if absent. `instead`: advice for errors."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, Unresolved):
            raise FormatError(
                f"{self.where}: {key} is {quoted_value(value.text)}, a reference that can't be"
                f" resolved here; write the number, or {instead}"
            )
        if isinstance(value, float) and math.isfinite(value) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 40:
            raise FormatError(
                f"{self.where}: {key} must be a whole number of 1 or more; got"
                f" {quoted_value(value)}; correct it, or {instead}"
            )
        return value

    def required(self, key: str, *, instead: str) -> int:
        """Return a whole number of 1 or more. Raises FormatError if the key is missing."""
        value = self.whole_number(key, instead=instead)
        if value is None:
            near = "".join(f"; {note}" for note in self.misspelt.values())
            raise FormatError(f"{self.where}: the key {key} is missing; add it, or {instead}{near}")
        return value

    def _value(self, path: list[str], depth: int) -> Any:  # noqa: ANN401
        value: Any = self._fields
        for level, name in enumerate(path):
            fields = value if isinstance(value, dict) else {}
            near = [] if name in fields else get_close_matches(name, map(str, fields), 1, ALMOST)
            if near:
                key = ".".join((*path[:level], *near))
                self.misspelt[key] = f"{key} is not read; did you mean {name}?"
            value = fields.get(name)
        return self._followed(value, path[:-1], depth) if isinstance(value, str) else value

    def _followed(self, text: str, parent: list[str], depth: int) -> Any:  # noqa: ANN401
        """Return the value of a text after its references are resolved, innermost first."""
        original = text
        while (match := _INNERMOST.search(text)) is not None:
            value = self._referred(match[1].strip(), parent, depth + 1)
            if value is None or isinstance(value, dict | list | Unresolved):
                return Unresolved(original)
            text = text[: match.start()] + str(value) + text[match.end() :]
        if "${" in text:
            return Unresolved(original)
        return text if text == original else _scalar(text)

    def _referred(self, reference: str, parent: list[str], depth: int) -> Any:  # noqa: ANN401
        """Resolve a `${...}`: another key, a relative one (`.name`), or a product."""
        if depth > _DEEPEST:
            return None
        if reference.startswith("multiply:"):
            factors = [_scalar(word) for word in reference.partition(":")[2].split(",")]
            are_numbers = all(type(factor) in (int, float) for factor in factors)
            return math.prod(factors) if are_numbers else None
        if not re.fullmatch(r"\.*[\w.]+", reference):
            return None
        name = reference.lstrip(".")
        up = len(reference) - len(name)  # one dot: beside it; each further dot: a level above
        if up > len(parent) + 1:
            return None
        base = parent[: len(parent) - up + 1] if up else []
        return self._value([*base, *name.split(".")], depth)


def _scalar(text: str) -> Any:  # noqa: ANN401
    """Return a text parsed as a YAML scalar."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def read_training_file(path: str | Path) -> TrainingFile:
    """Read the YAML of a training. Raises FormatError if it is not one."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        why = f"{path} can't be read: {error.strerror or error}"
        raise FormatError(f"{why}; --config takes the training's YAML") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} can't be read as text: {error}") from error
    try:
        fields = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise FormatError(f"{path} is not YAML: {reason}") from error
    if not isinstance(fields, dict):
        raise FormatError(f"{path} has no keys; --config takes the training's YAML")
    if not _PARTS & fields.keys() and _OF_A_MODEL & fields.keys():
        raise FormatError(
            f"--config {path} is a model's config.json; is it meant for --model-config?"
        )
    return TrainingFile(fields, where=str(path))


# Linear layers that the trainer fuses into one, and the modules they are made of.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# neuronx-distributed-training's defaults for missing `peft` fields.
_DEFAULT_RANK = 16
# The trainer's precision modes that multiply in bf16.
_IN_BF16 = ("bf16SR", "mixed_precision", "mixed_precisionSR", "autocast")
_DEFAULT_TARGETS = ("qkv_proj",)

_PEFT = "model_alignment_strategy.peft"


@dataclass(frozen=True, slots=True)
class NeuronJob:
    """The settings of a training that its FLOPs and hardware depend on."""

    batch_size: int
    seq_len: int
    nodes: int
    devices: int | None  # per node, as the trainer counts them
    devices_from: str
    dtype: str
    lora: Lora | None
    checkpointing: Checkpointing
    overrides: dict[str, int]  # fields of config.json that the YAML replaces
    replicas: int | None  # data-parallel; None if the YAML does not determine it
    pipeline_stages: int
    micro_batches: int | None  # per replica and step
    cache: str | None  # compiler_cache_url of the YAML
    notes: tuple[str, ...]
    batch_from: str = "the YAML"  # or "--batch-size", "the log"
    seq_len_from: str = "the YAML"
    at_once: int | None = None  # sequences of one micro-batch, over all replicas
    # Throughput uses this batch and not the log's counts: --batch-size, or a log of a single rank.
    batch_overrules: bool = False
    nodes_from: str = "the YAML"  # or "--num-nodes", "assumed"
    dtype_from: str = "the YAML"


def read_job(
    file: TrainingFile,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    nodes: int | None = None,
    devices: int | None = None,
    dtype: str | None = None,
) -> NeuronJob:
    """Return a job's settings from its YAML; arguments override it."""
    notes: list[str] = []
    batch = batch_size or file.required("data.global_batch_size", instead="pass --batch-size")
    length = seq_len or file.required("data.seq_length", instead="pass --seq-len")
    if seq_len is None:
        _compare_lengths(file, length, notes)
    found_nodes = nodes or file.whole_number("trainer.num_nodes", instead="pass --num-nodes")
    nodes_from = "--num-nodes" if nodes else "the YAML"
    if found_nodes is None:
        found_nodes, nodes_from = 1, "assumed"
        notes.append("nodes are not given (--num-nodes, trainer.num_nodes): 1 is assumed")
    found_devices = devices or file.whole_number("trainer.devices", instead="pass --devices")
    stages = _degree(file, "pipeline_model_parallel_size")
    replicas = _replicas(file, found_devices, found_nodes, stages)
    at_once = _at_once(file, replicas)
    cache = file.value("compiler_cache_url")
    found_dtype, dtype_from = (dtype, "--dtype") if dtype else _dtype(file, notes)
    return NeuronJob(
        batch_size=batch,
        seq_len=length,
        nodes=found_nodes,
        devices=found_devices,
        devices_from="--devices" if devices else f"trainer.devices of {file.where}",
        dtype=found_dtype,
        lora=_lora(file, notes),
        checkpointing=_checkpointing(file, notes),
        overrides=_overrides(file),
        replicas=replicas,
        pipeline_stages=stages,
        micro_batches=micro_batches(batch, at_once),
        cache=cache if isinstance(cache, str) and cache else None,
        notes=(*notes, *_strategy_notes(file), *file.misspelt.values()),
        batch_from="--batch-size" if batch_size else "the YAML",
        seq_len_from="--seq-len" if seq_len else "the YAML",
        at_once=at_once,
        nodes_from=nodes_from,
        dtype_from=dtype_from,
    )


def _compare_lengths(file: TrainingFile, length: int, notes: list[str]) -> None:
    encoder = file.value("model.encoder_seq_length")
    if isinstance(encoder, int) and encoder != length:
        notes.append(
            f"data.seq_length {length} is taken; model.encoder_seq_length is {encoder}:"
            " pass --seq-len if that is what was trained"
        )


def _dtype(file: TrainingFile, notes: list[str]) -> tuple[str, str]:
    """Return the data type of matrix products, and its source."""
    precision = file.value("precision.type")
    if precision == "fp32":
        return "fp32", "the YAML"
    if isinstance(precision, Unresolved):
        precision = precision.text
    if precision not in _IN_BF16:
        why = "is not given" if precision is None else f"is {precision}, which is not known here"
        notes.append(f"precision.type {why}: bf16 and its peak are assumed (--dtype)")
        return "bf16", "assumed"
    return "bf16", "the YAML"


def _lora(file: TrainingFile, notes: list[str]) -> Lora | None:
    if str(file.value(f"{_PEFT}.enabled")).strip().lower() != "true":
        return None
    rank = file.whole_number(f"{_PEFT}.lora_rank", instead="leave it out for 16")
    if rank is None:
        rank = _DEFAULT_RANK
        notes.append(f"{_PEFT}.lora_rank is not given: {rank}, the trainer's default")
    named = file.value(f"{_PEFT}.target_modules")
    if named is None:
        named = list(_DEFAULT_TARGETS)
        notes.append(f"{_PEFT}.target_modules is not given: {named[0]}, the trainer's default")
    if isinstance(named, Unresolved) or not _are_words(named):
        raise FormatError(
            f"{file.where}: {_PEFT}.target_modules must be a list of module names; got"
            f" {named.text if isinstance(named, Unresolved) else named!r}"
        )
    targets = [module for name in named for module in _FUSED.get(name, (name,))]
    fused = [name for name in named if name in _FUSED]
    if fused:
        notes.append(
            f"adapters on the fused {', '.join(fused)} are counted as adapters on each of its"
            " parts: the shared half is then counted more than once, far below a percent"
        )
    return Lora(rank, tuple(dict.fromkeys(targets)))


def _are_words(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, list) and bool(value) and all(isinstance(word, str) for word in value)


def _checkpointing(file: TrainingFile, notes: list[str]) -> Checkpointing:
    granularity = file.value("model.activations_checkpoint_granularity")
    if granularity == "selective":
        modules = file.value("model.activations_checkpoint_recompute")
        if _are_words(modules) and modules != ["CoreAttention"]:
            listed = ", ".join(modules)
            notes.append(f"recomputed are {listed}; HFU counts the attention core alone")
        return "selective"
    return "full" if granularity == "full" else "none"


def _overrides(file: TrainingFile) -> dict[str, int]:
    """Return the config.json fields that the YAML overrides; -1 in the YAML means unchanged."""
    names = {"model.num_layers": "num_hidden_layers", "model.hidden_size": "hidden_size"}
    return {
        field: value
        for key, field in names.items()
        if isinstance(value := file.value(key), int) and not isinstance(value, bool) and value > 0
    }


def _degree(file: TrainingFile, name: str) -> int:
    degree = file.value(f"distributed_strategy.{name}")
    return degree if isinstance(degree, int) and degree > 0 else 1


def _replicas(file: TrainingFile, devices: int | None, nodes: int, stages: int) -> int | None:
    """Return the number of data-parallel model copies; None if the devices do not divide."""
    size = stages * _degree(file, "tensor_model_parallel_size")
    size *= _degree(file, "context_parallel_size")
    return None if devices is None or devices * nodes % size else devices * nodes // size


def _at_once(file: TrainingFile, replicas: int | None) -> int | None:
    micro = file.value("data.micro_batch_size")
    if replicas is None or not isinstance(micro, int) or isinstance(micro, bool) or micro < 1:
        return None
    return micro * replicas


def micro_batches(batch_size: int, at_once: int | None) -> int | None:
    """Return the micro-batches per replica and step; None if the YAML does not determine them."""
    return None if at_once is None else batch_size // at_once or None


def _strategy_notes(file: TrainingFile) -> Iterator[str]:
    """Yield notes on alignment and packing, whose FLOPs the YAML does not determine."""
    strategy = file.value("model_alignment_strategy")
    strategy = strategy if isinstance(strategy, dict) else {}
    yield from (
        f"alignment by {name}: a sequence is counted as one forward and backward pass; a reference"
        " model's passes are not counted"
        for name in ("dpo", "orpo", "kto")
        if name in strategy
    )
    sft = strategy.get("sft")
    if isinstance(sft, dict) and sft.get("packing") is True:
        yield (
            "sft.packing: several documents may share a sequence; attention is counted as if"
            " each sequence were one document, which is an upper bound"
        )
