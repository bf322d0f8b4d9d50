"""FLOPs of a sequence, TFLOP/s and MFU of a job under a named convention, and by the original's.

The trap: a label. The original prints the TFLOP of one sequence as "TFLOPs/second", counts the
lookup in the embedding table as a matrix product, the softmax as six operations a pair, every pair
of tokens although half of them never meet, and frozen weights as if they were trained. Here the
engine counts, each difference has its own figure, and what is per second says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError, NotMeasurable, UsageError
from ergmeter.flops.analytic import step_flops, total
from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.conventions import sizes
from ergmeter.flops.source import model_graph, read_model
from ergmeter.flops.work import TrainedParts, step_work, trained_graph
from ergmeter.metrics.definitions.compute import HFU, MFU, Peak, TokenRate, compute_results
from ergmeter.neuron.original import sequence_flops
from ergmeter.records import Missing, Reading

if TYPE_CHECKING:
    from ergmeter.flops.graph.graph import Graph
    from ergmeter.flops.work import Work
    from ergmeter.neuron.job.job import NeuronJob
    from ergmeter.neuron.job.machine import Machine
    from ergmeter.neuron.job.pace import Throughput

ORIGINAL = "neuron"  # the convention of the original's estimator, for every family


@dataclass(frozen=True)
class Figures:
    """What the arithmetic of a job comes to. FLOPs are of one sequence."""

    convention: str
    model_flops: float
    hardware_flops: float | None
    by_convention: dict[str, float]
    not_defined: dict[str, str]
    mfu: Reading | Missing
    hfu: Reading | Missing
    mfu_by_convention: dict[str, float]
    flops_per_s: float | None
    flops_per_s_per_node: float | None
    params: int
    params_trained: int
    original_flops: float | None  # what the original itself counts, whatever the model is
    differences: tuple[tuple[str, float], ...]  # why that is another number of FLOPs
    notes: tuple[str, ...]


def figures(
    model: str, job: NeuronJob, machine: Machine, throughput: Throughput, *, convention: str
) -> Figures:
    """The figures of a job. MFU is absent where throughput or cores are not known."""
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
    full = _fully_trained(graph, batch)
    if full is not None:  # whatever is trained: the original knows of no adapters
        by_convention[ORIGINAL] = full
    theirs = _original(model, job)
    mfu, hfu = _utilization(work, job, machine, throughput)
    rate = throughput.seq_per_s
    each = work.chosen.model_per_step
    return Figures(
        convention=work.chosen.convention,
        model_flops=each,
        hardware_flops=work.chosen.hardware_per_step,
        by_convention=by_convention,
        not_defined=work.not_defined,
        mfu=mfu,
        hfu=hfu,
        mfu_by_convention=_scaled_mfu(mfu, by_convention, each),
        flops_per_s=None if rate is None else each * rate,
        flops_per_s_per_node=None if rate is None else each * rate / machine.nodes,
        params=work.params,
        params_trained=work.params_trained,
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


def _utilization(
    work: Work, job: NeuronJob, machine: Machine, throughput: Throughput
) -> tuple[Reading | Missing, Reading | Missing]:
    if throughput.seq_per_s is None:
        missing = Missing(throughput.said)
        return missing, missing
    if machine.cores is None:
        missing = Missing(
            f"how many cores a node of {machine.backend} has is not known: pass --devices"
        )
        return missing, missing
    low, high = (
        None if end is None else end * job.seq_len for end in (throughput.low, throughput.high)
    )
    rate = TokenRate(
        throughput.seq_per_s * job.seq_len, machine.cores, throughput.basis, throughput.said,
        low, high,
    )  # fmt: skip
    peak = Peak(
        f"{machine.backend}-core", machine.dtype, machine.core_flops_per_s, machine.source,
        "reported",
    )  # fmt: skip
    found = compute_results(list(work.flops.values()), rate, peak)
    return found[MFU], found[HFU]


def _scaled_mfu(
    mfu: Reading | Missing, by_convention: dict[str, float], chosen: float
) -> dict[str, float]:
    if isinstance(mfu, Missing) or mfu.impossible:
        return {}
    return {name: mfu.value * flops / chosen for name, flops in by_convention.items()}


def _fully_trained(graph: Graph, batch: Batch) -> float | None:
    """A sequence under the original's convention; None of a model that it is not defined for."""
    found = step_work(graph, batch).flops.get(ORIGINAL)
    return None if found is None else found.model_per_step


def _original(model: str, job: NeuronJob) -> float | None:
    """A sequence as the original itself counts it; None where it has sizes that are none."""
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
) -> tuple[tuple[str, float], ...]:
    """What the original's count of a sequence has over `exact`, piece by piece, in FLOPs."""
    if theirs is None:
        return ()
    pieces = {} if full is None else _pieces(graph, batch, training, ours, full)
    rest = theirs - ours - sum(pieces.values())
    if abs(rest) > 1e-9 * theirs:
        pieces["a dense Llama of config.json's sizes counted instead of this model"] = rest
    return tuple(pieces.items())


def _pieces(
    graph: Graph, batch: Batch, training: TrainedParts, ours: float, full: float
) -> dict[str, float]:
    """What its convention has over `exact`."""
    try:
        found = sizes(graph)
    except NotMeasurable:
        return {}
    adapted, trainable = trained_graph(graph, training)
    unmasked = total(step_flops(adapted, batch, trainable=trainable, pairs="computed")).model
    pieces = {
        "the embedding lookup counted as a matrix product": 6.0
        * found.vocab * found.hidden * batch.tokens,
        "the softmax counted as 6 operations a pair": 18.0
        * found.heads * batch.seq_len * batch.tokens,
        "pairs of tokens that the causal mask keeps apart": unmasked - ours,
    }  # fmt: skip
    rest = full - ours - sum(pieces.values())
    name = "weights counted as trained that are frozen" if training.lora else "the rest"
    if abs(rest) > 1e-9 * full:
        pieces[name] = rest
    return pieces
