"""The work of one step: FLOPs by part and by convention, memory traffic, assumptions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.flops.analytic import Checkpointing, Parts, node_pairs, step_flops, total
from ergmeter.flops.conventions import CONVENTIONS, EXACT, Convention, Sizes, convention, sizes
from ergmeter.flops.estimate.storage import ASSUMED, Storage
from ergmeter.flops.graph.adapters import Lora, with_adapters
from ergmeter.flops.graph.graph import Attention, Convolution, Linear, Scan, trains_all
from ergmeter.records import Flops
from ergmeter.units import scaled

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.flops.batch import Batch, Sequences
    from ergmeter.flops.graph.graph import Graph, Node, Trainable

# Bytes that inference must move: the weights once, the KV cache of earlier positions.
#
# Decoding is bound by memory: each token reads every active weight, and the keys and values of its
# context. Bandwidth utilisation is these bytes over time and the memory's bandwidth. Only the least
# that any program must move is counted. Activations are not: they fit in on-chip caches.


@dataclass(frozen=True, slots=True)
class MemoryTraffic:
    """Bytes that one forward pass moves between memory and chip."""

    weights_bytes: float
    cache_read_bytes: float
    cache_written_bytes: float

    @property
    def total_bytes(self) -> float:
        """Weights and cache, reads and writes."""
        return self.weights_bytes + self.cache_read_bytes + self.cache_written_bytes


def forward_traffic(graph: Graph, batch: Batch, storage: Storage) -> MemoryTraffic:
    """Return the bytes that one forward pass over a batch has to move.

    Only experts that receive a token are read: the expected number under random routing. Embedding
    lookups count as 0.
    """
    weights = sum(_share_read(node, batch) * storage.held_bytes(node) for node in graph)
    read = written = 0.0
    for node in graph:
        for sequence in batch.stream(node.stream):
            kept_read, kept_written = _cached(node, sequence, batch)
            read += kept_read
            written += kept_written
    each = storage.cache.bits / 8
    return MemoryTraffic(weights, read * each, written * each)


def _cached(node: Node, sequence: Sequences, batch: Batch) -> tuple[float, float]:
    """Return the elements that a node reads from its cache, and writes to it."""
    work = node.work
    if isinstance(work, Attention) and work.keys is not None:  # cross attention: the whole source
        cached = work.cached * batch.source_length(work.keys) * sequence.count
        return (cached, 0) if sequence.past else (0, cached)
    if isinstance(work, Attention) and work.mask == "causal":
        before = _cached_keys(work, sequence.past)
        new = min(sequence.new, _cached_keys(work, sequence.past + sequence.new))
        return work.cached * before * sequence.count, work.cached * new * sequence.count
    state = work.state if isinstance(work, Scan | Convolution) else 0
    return (state * sequence.count if sequence.past else 0), state * sequence.count


def _cached_keys(work: Attention, length: int) -> int:
    """Return how many of `length` cached positions the next position attends to."""
    if work.chunk is not None:
        return length % work.chunk
    if work.window is not None:  # the window includes the next position itself
        return min(length, work.window - 1)
    return length


def _share_read(node: Node, batch: Batch) -> float:
    """Return the share of a node's weights that is read; 0 for lookups, tied or not."""
    rows = batch.rows(node.stream)
    if not rows or node.role in ("embedding", "positions"):
        return 0
    work = node.work
    if isinstance(work, Linear) and work.copies > 1:
        return 1 - (1 - work.used / work.copies) ** rows
    return 1


# The work of a step.

Phase = Literal["train", "prefill", "decode"]
PHASES: tuple[str, ...] = get_args(Phase)


@dataclass(frozen=True, slots=True)
class TrainedParts:
    """The parts of a model that are trained, and how activations are recomputed."""

    lora: Lora | None = None
    frozen: tuple[str, ...] = ()  # parts, roles or dotted names (or pieces of them) that are frozen
    trains: Trainable | None = None  # instead, a function of each node (for a live model)
    checkpointing: Checkpointing = "none"
    is_checkpointing_assumed: bool = False  # checkpointing was not given; no live model shows it


@dataclass(frozen=True)
class Work:
    """The FLOPs, parameters and memory traffic of one step of a model."""

    phase: str
    batch: Batch
    training: TrainedParts
    parts: Parts  # convention `exact`; model FLOPs of the documents, hardware FLOPs of the grid
    flops: dict[str, Flops]  # by convention, the chosen one first
    not_defined: dict[str, str]  # conventions that do not apply, and why
    params: int
    params_active: int
    params_trained: int
    assumptions: tuple[str, ...] = field(default=())
    traffic: MemoryTraffic | None = None  # inference only
    kept: tuple[str, ...] = ()  # notes on the types of weights and cache, and their source
    kept_bytes: float | None = None  # of all weights
    params_given: int | None = None  # N of the formulas, if it was passed

    @property
    def chosen(self) -> Flops:
        """The FLOPs under the chosen convention."""
        return next(iter(self.flops.values()))

    @property
    def of_params_given(self) -> list[str]:
        """Names of the conventions that use the N that was passed; none if none was."""
        if self.params_given is None:
            return []
        return [name for name in self.flops if "N" in CONVENTIONS[name].letters]


def step_work(
    graph: Graph,
    batch: Batch,
    *,
    phase: str = "train",
    training: TrainedParts | None = None,
    chosen: str = EXACT,
    params: int | None = None,
    storage: Storage = ASSUMED,
) -> Work:
    """Count one step of a model.

    `params`: the N for the formulas, if it differs from the model's own, to reproduce another
    program's number. `storage`: types of weights and cache, for the memory traffic of inference.
    """
    if phase not in PHASES:
        raise UsageError(f"no phase {phase!r}; there are {', '.join(PHASES)}")
    if phase == "decode" and not writes(graph):
        raise UsageError(
            f"this {graph.family} model has no head of a causal language model, so it has no"
            " decoding step: pass --phase prefill"
        )
    first = convention(chosen)
    how = training or TrainedParts(is_checkpointing_assumed=True)
    adapted, trainable = trained_graph(graph, how)
    judge = trainable if phase == "train" else None
    count = partial(step_flops, adapted, trainable=judge, checkpointing=how.checkpointing)
    parts = _exact(count, batch)
    model_sizes, reason = _sizes(graph, params, phase)
    trained = sum(node.params for node in adapted if trainable(node))
    if judge is not None and not trained:
        raise UsageError(
            "everything is frozen, so nothing is trained: freeze less, or pass --phase prefill"
        )
    moved = None if phase == "train" else forward_traffic(adapted, batch, storage)
    padding = _row(count, batch) if batch.is_grid else None
    frozen = judge is not None and trained != adapted.params
    job = _Job(batch, judge, how, parts, model_sizes, reason, frozen)
    assumed = (*adapted.assumptions, *_assumptions(graph, batch, phase, how))
    notes = () if moved is None else storage.notes
    like = Flops(
        model_per_step=0.0,
        convention=first.name,
        engine="analytic",
        hardware_per_padding=padding,
        tokens_per_step=batch.tokens_real,
        bytes_per_step=moved.total_bytes if moved else None,
        assumptions=(*assumed, *(f"kept: {line}" for line in notes)),
    )
    n_note = (
        f"given: N = {params:,}, in place of the model's own {graph.params_active:,}"
        if params
        else ""
    )
    flops, not_defined = _under_each(job, first, like, n_note)
    work = Work(
        phase=phase,
        batch=batch,
        training=how,
        parts=parts,
        flops=flops,
        not_defined=not_defined,
        params=adapted.params,
        params_active=adapted.params_active,
        params_trained=trained,
        assumptions=assumed,
        traffic=moved,
        kept=notes,
        kept_bytes=None if moved is None else storage.total_bytes(adapted),
        params_given=params,
    )
    if params is not None and not work.of_params_given:
        raise UsageError("no formula with N applies to this step; leave out --params")
    return work


def _under_each(
    job: _Job, first: Convention, like: Flops, n_note: str
) -> tuple[dict[str, Flops], dict[str, str]]:
    """Return FLOPs by convention, the chosen one first, and why other conventions do not apply.

    `like` has the fields that are equal for all; `n_note` is added to formulas that use N.
    """
    flops: dict[str, Flops] = {}
    not_defined: dict[str, str] = {}
    for each in [first, *(c for c in CONVENTIONS.values() if c is not first)]:
        try:
            model, hardware = job.under(each)
        except NotMeasurable as error:
            not_defined[each.name] = str(error)
            continue
        flops[each.name] = replace(
            like,
            model_per_step=model,
            hardware_per_step=hardware,
            convention=each.name,
            assumptions=(*like.assumptions, *([n_note] if n_note and "N" in each.letters else ())),
        )
    if first.name in not_defined:
        raise NotMeasurable(f"{first.name}: {not_defined[first.name]}")
    return flops, not_defined


def writes(graph: Graph) -> bool:
    """True if the model can generate tokens one by one: it is causal and has logits."""
    has_scan = any(isinstance(node.work, Scan) for node in graph)
    is_causal = has_scan or any(work.mask == "causal" for _, work in graph.attentions())
    return is_causal and any(node.stream == "logits" for node in graph)


@dataclass(frozen=True)
class _Job:
    """The inputs that any convention needs to count a step."""

    batch: Batch
    trainable: Trainable | None  # None: inference
    how: TrainedParts
    parts: Parts
    sizes: Sizes | None
    no_sizes: str  # why formulas do not apply
    is_partly_frozen: bool

    def under(self, each: Convention) -> tuple[float, float]:
        """Return model and hardware FLOPs; NotMeasurable if the convention does not apply."""
        if each.weights is None:
            sums = total(self.parts)
            return sums.model, sums.hardware
        if self.sizes is None:
            raise NotMeasurable(self.no_sizes)
        if each.is_for_lora and (self.how.lora is None or self.trainable is None):
            raise NotMeasurable("it is for training with LoRA, and this step is not")
        if not each.is_for_lora and self.is_partly_frozen:
            raise NotMeasurable("it counts every weight as trained, and here some are frozen")
        reason = each.undefined(self.sizes)
        if reason:
            raise NotMeasurable(reason)
        model = each.model(self.sizes, self.batch)
        if self.trainable is None:
            return model / 3, model / 3
        if self.how.checkpointing == "full":
            return model, each.hardware(self.sizes, self.batch)
        if self.how.checkpointing == "selective":
            return model, model + each.core_again(self.sizes, self.batch)
        return model, model


def _assumptions(graph: Graph, batch: Batch, phase: str, how: TrainedParts) -> list[str]:
    """Return the assumptions of a step; the graph has the model's own."""
    lines = []
    longest = max(document.past + document.new for document in batch.documents)
    limit = graph.facts.get("learned_positions", longest)
    if longest > limit:
        lines.append(
            f"the table of learned positions has {limit}, so this model can't run {longest} tokens;"
            " counted as if it could"
        )
    padding = batch.tokens - batch.tokens_real
    if padding:
        lines.append(
            f"hardware FLOPs: {padding} of {batch.tokens} positions are padding, computed in every"
            " layer; in attention only the documents' own pairs"
        )
    if "tokens_per_image" in graph.facts and not batch.images and phase != "decode":
        lines.append("no images, so the vision parts are not counted; pass --images")
    if phase == "train":
        return [*lines, NO_RECOMPUTATION] if how.is_checkpointing_assumed else lines
    if batch.rows("logits") < batch.rows("tokens"):
        lines.append("the head is applied only to the last token of each prompt")
    if any(work.copies > 1 for _, work in graph.linears()):
        lines.append("experts read: the number expected if the router picks them at random")
    more = _absorbed(graph, batch)
    if more is None:
        return lines
    line = "latent attention: bytes of the compressed cache, FLOPs as if it were unpacked"
    if phase == "decode":
        line += (
            "; servers decode with its up-projection absorbed into the query and output"
            f" projections: {scaled(more, 'FLOP')} more"
        )
    return [*lines, line]


NO_RECOMPUTATION = "no recomputation of activations; if there is, pass --checkpointing"


def _absorbed(graph: Graph, batch: Batch) -> float | None:
    """Return the FLOPs that absorbed projections add to latent attention; None without any.

    Queries then attend to the compressed cache directly. Its vectors are longer than keys and
    values. The projections cost as much as before: each head's query up to the rank, its result
    down again.
    """
    linears = {node.name: work for node, work in graph.linears()}
    more = None
    for node, core in graph.attentions():
        if core.latent:
            longer = core.latent - core.qk_dim + linears[node.of[1]].inputs - core.v_dim
            pairs = node_pairs(core, batch, node.stream, "needed")
            more = (more or 0.0) + 2 * core.heads * longer * pairs
    return more


def trained_graph(graph: Graph, how: TrainedParts) -> tuple[Graph, Trainable]:
    """Return the graph, with adapters if `how` has LoRA, and which of its nodes are trained."""
    if how.trains is not None:
        return graph, how.trains
    if how.lora is not None:
        if how.frozen:
            raise UsageError("LoRA already freezes everything but its adapters; leave out --freeze")
        return with_adapters(graph, how.lora)
    if not how.frozen:
        return graph, trains_all
    missed = [name for name in how.frozen if not name or not any(_is_named(n, name) for n in graph)]
    if missed:
        raise UsageError(f"nothing in this model is called {missed[0]!r}, so it can't be frozen")
    return graph, lambda node: not any(_is_named(node, name) for name in how.frozen)


def _is_named(node: Node, name: str) -> bool:
    """True if `name` is this node's part or role, or consecutive words of its dotted name."""
    return name in (node.part, node.role) or f".{name}." in f".{node.name}."


def _exact(count: Callable[[Batch], Parts], batch: Batch) -> Parts:
    """Return FLOPs by part: model FLOPs of the documents; padding and recomputation as hardware."""
    needed = count(batch)
    if batch.is_grid:
        return needed
    # Padding is computed like any other row. Attention pairs are those within documents: how many
    # other pairs a kernel computes depends on the kernel, which is unknown.
    computed = count(batch.computed())
    return {
        part: replace(flops, recomputed=computed[part].hardware - flops.model)
        for part, flops in needed.items()
    }


def _row(count: Callable[[Batch], Parts], batch: Batch) -> float:
    """Return the hardware FLOPs of one more padded position: every layer, but no attention pairs.

    It is the same under every convention, because formulas with N do not count padding.
    """
    return total(count(replace(batch, padding=1))).hardware - total(count(batch)).hardware


def _sizes(graph: Graph, params: int | None, phase: str) -> tuple[Sizes | None, str]:
    if phase == "decode":
        return None, "it is a formula for whole sequences, and a decoding step is one position"
    try:
        model_sizes = sizes(graph)
    except NotMeasurable as error:
        return None, str(error)
    if params is not None:
        all_params = params + (model_sizes.params_held - model_sizes.params)
        model_sizes = replace(model_sizes, params=params, params_held=all_params)
    return model_sizes, ""
