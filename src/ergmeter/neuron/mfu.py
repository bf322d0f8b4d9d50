"""FLOPs per sequence, cores, peak and MFU of a Trainium job, under a named convention.

The original script prints the TFLOP of one sequence as "TFLOPs/second". It counts the embedding
lookup as a matrix product, the softmax as six operations a pair, all pairs despite the causal mask,
and frozen weights as trained. Here the FLOPs engine counts, and each difference has its own number.

The peak is that of the cores used, not of the instance: MFU of a job on one of sixteen chips would
be sixteen times too low. "Devices" are counted as the trainer does. On Trainium2 and 3 a device is
a logical core, by default two physical ones (LNC=2), so 64 devices are the 128 cores of a
trn2.48xlarge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ergmeter.errors import FormatError, NotMeasurable, UsageError
from ergmeter.flops.analytic import step_flops, total
from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.conventions import sizes
from ergmeter.flops.graph.graph import Graph
from ergmeter.flops.source import model_graph, read_model
from ergmeter.flops.work import TrainedParts, Work, step_work, trained_graph
from ergmeter.hardware.table import lookup
from ergmeter.metrics.definitions.compute import HFU, MFU, TokenRate, compute_results
from ergmeter.metrics.definitions.peaks import Peak
from ergmeter.neuron.score import TFLOP, TFLOP_PER_S, THROUGHPUT
from ergmeter.neuron.training_job import NeuronJob
from ergmeter.neuron.training_log import Throughput
from ergmeter.records import BOUND_TOLERANCE, Flops, Missing, Reading, Result, mapped, weakest

TERA = 1e12


@dataclass(frozen=True, slots=True)
class Backend:
    """A family of instances. Source: AWS Neuron documentation of instances and chips."""

    name: str
    cores_per_chip: int
    largest: str  # the largest instance of the family
    cores_in_largest: int | None  # physical; None: not published as one instance
    cores_per_device: int  # default: physical cores in what a trainer calls a device


BACKENDS = {
    "trn1": Backend("trn1", 2, "trn1.32xlarge", 32, 1),
    "trn2": Backend("trn2", 8, "trn2.48xlarge", 128, 2),
    "trn3": Backend("trn3", 8, "a Trn3 UltraServer", None, 2),
    "inf2": Backend("inf2", 2, "inf2.48xlarge", 24, 1),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """The cores that a job uses, and their dense peak."""

    backend: str
    nodes: int
    devices_per_node: int | None  # as the trainer counts them; None: not known
    cores_per_node: int | None  # physical
    dtype: str
    core_flops_per_s: float
    chip_flops_per_s: float
    source: str
    notes: tuple[str, ...]

    @property
    def cores(self) -> int | None:
        """Physical cores of all nodes."""
        return None if self.cores_per_node is None else self.cores_per_node * self.nodes


def machine(
    name: str, *, nodes: int, devices: int | None, lnc: int | None, dtype: str, devices_from: str
) -> Machine:
    """Return the machine of a job. `devices`: per node, as the trainer counts; None: not given."""
    backend = BACKENDS.get(name)
    if backend is None:
        raise UsageError(f"no hardware backend {name!r}; there are {', '.join(BACKENDS)}")
    core, chip = lookup(f"{name}-core"), lookup(f"{name}-chip")
    notes: list[str] = []
    grouped = _cores_per_device(backend, devices, lnc, notes)
    cores = None if devices is None else devices * grouped
    most = backend.cores_in_largest
    if devices is None and most is not None:
        cores, devices = most, most // grouped
        notes.append(
            f"devices per node are not given: all {most} cores of {backend.largest} are assumed;"
            " pass --devices, or put trainer.devices into the YAML"
        )
    if cores is not None and most is not None and cores > most:
        raise UsageError(
            f"{devices} devices of {grouped} core{'s' if grouped > 1 else ''} a node"
            f" ({devices_from}) are more than the {most} cores of {backend.largest};"
            f" is it another --hw-backend{', or --lnc 1' if grouped > 1 else ''}?"
        )
    return Machine(
        backend=name,
        nodes=nodes,
        devices_per_node=devices,
        cores_per_node=cores,
        dtype=dtype,
        core_flops_per_s=core.peak(dtype),
        chip_flops_per_s=chip.peak(dtype),
        source=f"{core.source}, checked {core.checked}; {core.note}",
        notes=tuple(notes),
    )


def _cores_per_device(
    backend: Backend, devices: int | None, lnc: int | None, notes: list[str]
) -> int:
    """Return the physical cores per device: `lnc` if given, else the backend's default."""
    if lnc is not None:
        if backend.cores_per_device == 1 and lnc != 1:
            raise UsageError(f"{backend.name} supports --lnc 1 only; got {lnc}")
        return lnc
    default, most = backend.cores_per_device, backend.cores_in_largest
    if default > 1 and devices is not None:
        if most is not None and devices * default > most:
            notes.append(
                f"{devices} devices a node are more than {backend.largest} has with LNC={default},"
                " so LNC=1 is taken: a device is one physical core"
            )
            return 1
        notes.append(
            f"a device is taken as {default} physical cores (LNC={default}, the default of"
            f" {backend.name}); pass --lnc 1 if it was one"
        )
    return default


# The original's numbers: `calculate_training_metrics.py` of nki-llama, 2025-06-12 (3c877c4), with
# the FLOPs of neuronx-distributed-training's llama_perf_estimate.py, which it calls.
#
# The formula keeps the original's faults. Our own count under the convention `neuron` is the same
# for dense Llamas only.


VERSION = "nki-llama calculate_training_metrics.py, 2025-06-12 (commit 3c877c4)"

PEAK_TFLOP_PER_S_PER_NODE = {"trn1": 3040.0, "trn2": 10672.0}

# transformers' LlamaConfig defaults, for fields that config.json omits.
_LLAMA = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}


def impossible_mfu(mfu_percent: float) -> str:
    """Return why an MFU in percent is impossible; "" if it is possible."""
    return "above 100 %: an input is wrong" if mfu_percent > 100 * BOUND_TOLERANCE else ""


def impossible_score(why: str) -> str:
    """Return why a score is impossible, given why its MFU is; "" if MFU is possible."""
    return f"computed from an MFU {why}" if why else ""


def sequence_flops(model: str, seq_len: int) -> int:
    """Return forward and backward FLOPs of one sequence, by the original script's formula."""
    config = read_model(model)
    fields = config.fields
    sizes: dict[str, Any] = {n: fields.get(n, default) for n, default in _LLAMA.items()}
    heads_of_keys = fields.get("num_key_value_heads")
    sizes["kv"] = sizes["num_attention_heads"] if heads_of_keys is None else heads_of_keys
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FormatError(f"{config.where}: {name} must be a whole number; got {value!r}")
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    head_size, squared = hidden // heads, seq_len * seq_len
    projections = 2 * hidden**2 * seq_len * 2 + 2 * (2 * sizes["kv"] * head_size * hidden * seq_len)
    core = 2 * squared * hidden * 2 + 6 * heads * squared
    feed_forward = 3 * (2 * hidden * sizes["intermediate_size"] * seq_len)
    tables = 2 * (2 * sizes["vocab_size"] * hidden * seq_len)
    forward: int = sizes["num_hidden_layers"] * (projections + core + feed_forward) + tables
    return 3 * forward


ORIGINAL = "neuron"  # the convention of the original's estimator, for every family


@dataclass(frozen=True)
class OriginalEstimate:
    """The original script's results at the same throughput, and why its FLOPs differ from ours.

    Field names are those in the JSON.
    """

    tflop_per_sequence: float
    tflops_per_second: float | None
    mfu_percent: float | None
    num_nodes: int
    peak_tflops_per_second: float | None
    over_exact_tflop_per_sequence: dict[str, float]  # by reason


@dataclass(frozen=True)
class Figures:
    """FLOPs, MFU and HFU of a job. FLOPs are of one sequence."""

    work: Work  # of one sequence, by every convention
    by_convention: dict[str, float]
    utilization: dict[str, Result]  # MFU and HFU, by key
    original_flops: float | None  # the original script's count, which treats any model as a Llama
    differences: dict[str, float]  # `original_flops` minus ours, by reason
    notes: tuple[str, ...]

    @property
    def mfu(self) -> Result:
        """MFU under the chosen convention."""
        return self.utilization[MFU]

    @property
    def flops(self) -> Flops:
        """The FLOPs of a sequence under the chosen convention."""
        return self.work.chosen

    @property
    def mfu_by_convention(self) -> dict[str, float]:
        """MFU under each convention; empty if MFU is missing or impossible."""
        mfu = self.mfu
        if not isinstance(mfu, Reading) or mfu.impossible:
            return {}
        each = self.flops.model_per_step
        return {name: mfu.value * flops / each for name, flops in self.by_convention.items()}

    def readings(self, pace: Throughput) -> dict[str, Result]:
        """Return throughput, TFLOP per sequence, TFLOP/s, MFU and HFU by key of the metric."""
        convention, flops, rate = self.flops.convention, self.flops.model_per_step, pace.result
        tflop, note = flops / TERA, f"{convention}, from config.json"
        work = rate
        if isinstance(rate, Reading):
            per_s = mapped(rate, lambda seq_per_s: seq_per_s * tflop, unit="TFLOP/s")
            basis = weakest("derived", rate.basis)
            work = replace(per_s, value=flops * rate.value / TERA, basis=basis, note=convention)
        readings: dict[str, Result] = {TFLOP: Reading(tflop, "TFLOP", "derived", note=note)}
        readings |= {THROUGHPUT: rate, TFLOP_PER_S: work}
        return readings | self.utilization


def original_estimate(
    flops: float, rate: float | None, *, nodes: int, backend: str, over_exact: dict[str, float]
) -> OriginalEstimate:
    """Return the original script's TFLOP/s and MFU, from its FLOPs per sequence and a rate."""
    tflop, peak = flops / TERA, PEAK_TFLOP_PER_S_PER_NODE.get(backend)
    per_node = None if rate is None else rate * tflop / nodes
    return OriginalEstimate(
        tflop_per_sequence=tflop,
        tflops_per_second=None if rate is None else flops * rate / TERA,
        mfu_percent=None if peak is None or per_node is None else per_node * 100 / peak,
        num_nodes=nodes,
        peak_tflops_per_second=None if peak is None else nodes * peak,
        over_exact_tflop_per_sequence={why: more / TERA for why, more in over_exact.items()},
    )


def figures(
    model: str, job: NeuronJob, machine: Machine, throughput: Throughput, *, convention: str
) -> Figures:
    """Compute FLOPs, MFU and HFU of a job. MFU is missing if throughput or cores are unknown."""
    graph, notes = _graph(model, job)
    batch = Batch.of(1, job.seq_len, facts=graph.facts)
    training = TrainedParts(lora=job.lora, checkpointing=job.checkpointing)
    try:
        work = step_work(graph, batch, training=training, chosen=convention)
    except UsageError as error:
        if job.lora is None:
            raise
        raise UsageError(f"model_alignment_strategy.peft.target_modules: {error}") from error
    by_convention = {name: flops.model_per_step for name, flops in work.flops.items()}
    by_original = step_work(graph, batch).flops.get(ORIGINAL)  # None: not defined for the model
    full = None if by_original is None else by_original.model_per_step
    if full is not None:  # the original counts every weight as trained, with adapters too
        by_convention[ORIGINAL] = full
    theirs = _original(model, job)
    return Figures(
        work=work,
        by_convention=by_convention,
        utilization=_utilization(work, job, machine, throughput.result),
        original_flops=theirs,
        differences=_differences(graph, batch, training, total(work.parts).model, full, theirs),
        notes=(*notes, *work.assumptions),
    )


def _graph(model: str, job: NeuronJob) -> tuple[Graph, list[str]]:
    config = read_model(model)
    fields, notes = config.fields, []
    for name, value in job.overrides.items():
        if name in fields and fields[name] != value:
            notes.append(
                f"{name} is {value}, as the YAML sets it for the training; {config.where} says"
                f" {fields[name]}"
            )
            fields[name] = value
    if not config.model_type:
        fields["model_type"] = "llama"
        notes.append(f"{config.where} names no model_type: llama is assumed, as the original does")
    return model_graph(ModelConfig(fields, where=config.where)), notes


def _utilization(work: Work, job: NeuronJob, machine: Machine, pace: Result) -> dict[str, Result]:
    if isinstance(pace, Missing):
        return dict.fromkeys((MFU, HFU), pace)
    if machine.cores is None:
        cores = f"how many cores a node of {machine.backend} has"
        return dict.fromkeys((MFU, HFU), Missing(f"{cores} is not known: pass --devices"))
    tokens = mapped(pace, lambda seq_per_s: seq_per_s * job.seq_len)
    rate = TokenRate(
        tokens.value, machine.cores, tokens.basis, tokens.note, tokens.low, tokens.high
    )
    peak = Peak(
        f"{machine.backend}-core", machine.dtype, machine.core_flops_per_s, machine.source,
        "reported",
    )  # fmt: skip
    results = compute_results(list(work.flops.values()), rate, peak)
    return {key: results[key] for key in (MFU, HFU)}


def _original(model: str, job: NeuronJob) -> float | None:
    """Return the original script's FLOPs per sequence; None if config.json has invalid sizes."""
    try:
        return float(sequence_flops(model, job.seq_len))
    except FormatError:
        return None


def _differences(
    graph: Graph,
    batch: Batch,
    training: TrainedParts,
    ours: float,
    full: float | None,
    theirs: float | None,
) -> dict[str, float]:
    """Return the original script's FLOPs per sequence minus our `exact`, by reason."""
    if theirs is None:
        return {}
    pieces = {} if full is None else _pieces(graph, batch, training, ours, full)
    rest = theirs - ours - sum(pieces.values())
    if abs(rest) > 1e-9 * theirs:
        pieces["a dense Llama of config.json's sizes counted instead of this model"] = rest
    return pieces


def _pieces(
    graph: Graph, batch: Batch, training: TrainedParts, ours: float, full: float
) -> dict[str, float]:
    """Return the convention `neuron` minus `exact`, by reason."""
    try:
        dimensions = sizes(graph)
    except NotMeasurable:
        return {}
    adapted, trainable = trained_graph(graph, training)
    unmasked = total(step_flops(adapted, batch, trainable=trainable, pairs="computed")).model
    pieces = {
        "the embedding lookup counted as a matrix product": 6.0
        * dimensions.vocab * dimensions.hidden * batch.tokens,
        "the softmax counted as 6 operations a pair": 18.0
        * dimensions.heads * batch.seq_len * batch.tokens,
        "pairs of tokens that the causal mask keeps apart": unmasked - ours,
    }  # fmt: skip
    rest = full - ours - sum(pieces.values())
    name = "weights counted as trained that are frozen" if training.lora else "the rest"
    if abs(rest) > 1e-9 * full:
        pieces[name] = rest
    return pieces
