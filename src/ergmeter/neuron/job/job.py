"""What was trained: batch, sequence, nodes, adapters, precision, from the command line or the YAML.

The trap: reading two keys of the YAML and ignoring the rest. The file says how many cores and
nodes there were, that only adapters were trained (which is a third less work), what is computed
twice, and even that the model has fewer layers than its config.json. Each is taken, and said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ergmeter.errors import FormatError
from ergmeter.flops.graph.adapters import Lora
from ergmeter.neuron.job.yaml_settings import Unresolved

if TYPE_CHECKING:
    from ergmeter.flops.analytic import Checkpointing
    from ergmeter.neuron.job.yaml_settings import TrainingFile

# Linear layers that the trainer fuses into one, and the modules they are made of.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# neuronx-distributed-training's own defaults for what `peft` leaves out.
_DEFAULT_RANK = 16
# Its modes of precision that multiply in bf16.
_IN_BF16 = ("bf16SR", "mixed_precision", "mixed_precisionSR", "autocast")
_DEFAULT_TARGETS = ("qkv_proj",)

_PEFT = "model_alignment_strategy.peft"


@dataclass(frozen=True, slots=True)
class NeuronJob:
    """One training, as far as its FLOPs and its hardware go."""

    batch_size: int
    seq_len: int
    nodes: int
    devices: int | None  # per node, as the trainer counts them
    devices_from: str
    dtype: str
    lora: Lora | None
    checkpointing: Checkpointing
    overrides: dict[str, int]  # fields of config.json that the YAML replaces
    replicas: int | None  # data-parallel; None where the YAML does not say enough
    pipeline_stages: int
    micro_batches: int | None  # of one replica in a step
    cache: str | None  # where the YAML says the compiled graphs are
    notes: tuple[str, ...]
    batch_from: str = "the YAML"  # or "--batch-size", "the log"
    seq_len_from: str = "the YAML"
    at_once: int | None = None  # sequences of one micro-batch, over all replicas
    # The batch goes before what the log counts: it was given, or the log's is that of one rank.
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
    """The job of a YAML; what is given on the command line wins."""
    notes: list[str] = []
    batch = batch_size or file.required("data.global_batch_size", instead="pass --batch-size")
    length = seq_len or file.required("data.seq_length", instead="pass --seq-len")
    if seq_len is None:
        _compare_lengths(file, length, notes)
    found_nodes = nodes or file.whole("trainer.num_nodes", instead="pass --num-nodes")
    nodes_from = "--num-nodes" if nodes else "the YAML"
    if found_nodes is None:
        found_nodes, nodes_from = 1, "assumed"
        notes.append("nodes are not given (--num-nodes, trainer.num_nodes): 1 is assumed")
    found_devices = devices or file.whole("trainer.devices", instead="pass --devices")
    stages = _degree(file, "pipeline_model_parallel_size")
    replicas = _replicas(file, found_devices, found_nodes, stages)
    at_once = _at_once(file, replicas)
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
        cache=file.word("compiler_cache_url"),
        notes=(*notes, *_strategy_notes(file)),
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
    """What products are computed in, and who says so."""
    said = file.value("precision.type")
    if said == "fp32":
        return "fp32", "the YAML"
    if isinstance(said, Unresolved):
        said = said.text
    if said not in _IN_BF16:
        why = "is not given" if said is None else f"is {said}, which is not known here"
        notes.append(f"precision.type {why}: bf16 and its peak are assumed (--dtype)")
        return "bf16", "assumed"
    return "bf16", "the YAML"


def _lora(file: TrainingFile, notes: list[str]) -> Lora | None:
    if not file.flag(f"{_PEFT}.enabled"):
        return None
    rank = file.whole(f"{_PEFT}.lora_rank", instead="leave it out for 16")
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
    said = file.value("model.activations_checkpoint_granularity")
    if said in ("full", "selective"):
        if said == "selective":
            modules = file.value("model.activations_checkpoint_recompute")
            if _are_words(modules) and modules != ["CoreAttention"]:
                notes.append(
                    f"recomputed are {', '.join(modules)}; HFU counts the attention core alone"
                )
        return said  # type: ignore[no-any-return]  # one of two literals, just checked
    return "none"


def _overrides(file: TrainingFile) -> dict[str, int]:
    """Dimensions that the trainer sets over the model's own; -1 means leave it."""
    names = {"model.num_layers": "num_hidden_layers", "model.hidden_size": "hidden_size"}
    return {
        field: value
        for key, field in names.items()
        if isinstance(value := file.value(key), int) and not isinstance(value, bool) and value > 0
    }


def _degree(file: TrainingFile, name: str) -> int:
    found = file.value(f"distributed_strategy.{name}")
    return found if isinstance(found, int) and found > 0 else 1


def _replicas(file: TrainingFile, devices: int | None, nodes: int, stages: int) -> int | None:
    """Copies of the model, each with its own part of the batch."""
    if devices is None:
        return None
    size = stages * _degree(file, "tensor_model_parallel_size")
    size *= _degree(file, "context_parallel_size")
    return devices * nodes // size if devices * nodes % size == 0 else None


def _at_once(file: TrainingFile, replicas: int | None) -> int | None:
    micro = file.value("data.micro_batch_size")
    if replicas is None or not isinstance(micro, int) or isinstance(micro, bool) or micro < 1:
        return None
    return micro * replicas


def micro_batches(batch_size: int, at_once: int | None) -> int | None:
    """How many turns a replica takes for its part of a batch, where the YAML says enough."""
    return None if at_once is None else batch_size // at_once or None


def _strategy_notes(file: TrainingFile) -> list[str]:
    """What the FLOPs leave out, because the YAML says that it is there and not how much it is."""
    strategy = file.part("model_alignment_strategy")
    notes = [
        f"alignment by {name}: a sequence is counted as one forward and backward pass; a reference"
        " model's passes are not counted"
        for name in ("dpo", "orpo", "kto")
        if name in strategy
    ]
    sft = strategy.get("sft")
    if isinstance(sft, dict) and sft.get("packing") is True:
        notes.append(
            "sft.packing: several documents may share a sequence; attention is counted as if"
            " each sequence were one document, which is an upper bound"
        )
    return notes
