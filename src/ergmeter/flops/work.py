"""The work of one step: FLOPs by part, under every convention, with bytes moved and assumptions."""

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

# Bytes that inference must move: the weights once, the cache of earlier positions.
#
# Decoding is bound by memory. To make one token every active weight is read, and the keys and
# values of its context. Bandwidth utilisation is these bytes over time and the memory's bandwidth.
# The least that any program must move is counted. Activations are left out: they fit in caches.


@dataclass(frozen=True, slots=True)
class MemoryTraffic:
    """Bytes of one forward pass."""

    weights_bytes: float
    cache_read_bytes: float
    cache_written_bytes: float

    @property
    def total_bytes(self) -> float:
        """All of them."""
        return self.weights_bytes + self.cache_read_bytes + self.cache_written_bytes


def forward_traffic(graph: Graph, batch: Batch, storage: Storage) -> MemoryTraffic:
    """Bytes one forward pass over a batch has to move.

    Of the experts those that at least one row is sent to are read; how many is an expectation, over
    rows sent at random. A lookup reads its rows of the table and no more.
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
    """Numbers that a node reads from its cache, and writes to it."""
    work = node.work
    if isinstance(work, Attention) and work.keys is not None:  # of a source, which is kept whole
        cached = work.cached * batch.source_length(work.keys) * sequence.count
        return (cached, 0) if sequence.past else (0, cached)
    if isinstance(work, Attention) and work.mask == "causal":
        before = _cached_keys(work, sequence.past)
        new = min(sequence.new, _cached_keys(work, sequence.past + sequence.new))
        return work.cached * before * sequence.count, work.cached * new * sequence.count
    state = work.state if isinstance(work, Scan | Convolution) else 0
    return (state * sequence.count if sequence.past else 0), state * sequence.count


def _cached_keys(work: Attention, length: int) -> int:
    """The number of these positions that the next one sees."""
    if work.chunk is not None:
        return length % work.chunk
    if work.window is not None:  # which has the next one in it
        return min(length, work.window - 1)
    return length


def _share_read(node: Node, batch: Batch) -> float:
    """The share of a node's weights that is read; a tied matrix is read where it is multiplied."""
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
    """The parts of a model that are trained, and those that are recomputed."""

    lora: Lora | None = None
    frozen: tuple[str, ...] = ()  # names, or parts of dotted names, that are not trained
    trains: Trainable | None = None  # or a test of each node, for a live model
    checkpointing: Checkpointing = "none"
    is_checkpointing_assumed: bool = False  # it was not stated, and there is no live model


@dataclass(frozen=True)
class Work:
    """One step of a model: what it costs, and under which names."""

    phase: str
    batch: Batch
    training: TrainedParts
    parts: Parts  # by `exact`, as documents; hardware as the grid
    flops: dict[str, Flops]  # by convention, the chosen one first
    not_defined: dict[str, str]  # conventions that have nothing to say here, and why
    params: int
    params_active: int
    params_trained: int
    assumptions: tuple[str, ...] = field(default=())
    traffic: MemoryTraffic | None = None  # of inference
    kept: tuple[str, ...] = ()  # how weights and cache are stored, and the source
    kept_bytes: float | None = None  # of all weights
    params_given: int | None = None  # N of the formulas, where it was passed

    @property
    def chosen(self) -> Flops:
        """The FLOPs under the convention that was asked for."""
        return next(iter(self.flops.values()))

    @property
    def of_params_given(self) -> list[str]:
        """Conventions whose N is the one that was given."""
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
    """Count one step. `params`: the N of another program's figure, where it differs from ours.

    `storage`, how weights and cache are kept, is for the bytes that inference moves.
    """
    if phase not in PHASES:
        raise UsageError(f"no phase {phase!r}; there are {', '.join(PHASES)}")
    if phase == "decode" and not writes(graph):
        raise UsageError(
            f"this {graph.family} model writes no tokens one by one (it has no head of a causal"
            " language model), so it has no decoding step: count prefill"
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
            "everything is frozen, so nothing is trained: freeze less, or count prefill"
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
        raise UsageError("N was given, and no formula of N is defined for this step; leave it out")
    return work


def _under_each(
    job: _Job, first: Convention, like: Flops, n_note: str
) -> tuple[dict[str, Flops], dict[str, str]]:
    """FLOPs by convention, the chosen one first, and the reasons why others do not apply.

    `like` has what is the same under all of them; `n_note` goes with formulas of N.
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
    """True if the model goes on from what it reads, token by token."""
    has_scan = any(isinstance(node.work, Scan) for node in graph)
    is_causal = has_scan or any(work.mask == "causal" for _, work in graph.attentions())
    return is_causal and any(node.stream == "logits" for node in graph)


@dataclass(frozen=True)
class _Job:
    """A step, ready to be counted under any convention."""

    batch: Batch
    trainable: Trainable | None  # None: inference
    how: TrainedParts
    parts: Parts
    sizes: Sizes | None
    no_sizes: str  # why formulas have nothing to say
    is_partly_frozen: bool

    def under(self, each: Convention) -> tuple[float, float]:
        """Model and hardware FLOPs, or NotMeasurable where it is not for a step like this."""
        if each.weights is None:
            sums = total(self.parts)
            return sums.model, sums.hardware
        if self.sizes is None:
            raise NotMeasurable(self.no_sizes)
        if each.is_for_lora and (self.how.lora is None or self.trainable is None):
            raise NotMeasurable("it is for training with LoRA, and this is not")
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
    """Assumptions of a step, beside the model's own."""
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
        lines.append("no images, so none of what sees them is counted; pass --images")
    if phase == "train":
        return [*lines, NO_RECOMPUTATION] if how.is_checkpointing_assumed else lines
    if batch.rows("logits") < batch.rows("tokens"):
        lines.append("the head is applied to the last token of each prompt, and to no other")
    if any(work.copies > 1 for _, work in graph.linears()):
        lines.append("experts read: the number expected if the router picks them at random")
    more = _absorbed(graph, batch)
    if more is None:
        return lines
    line = "latent attention: bytes of the compressed cache, FLOPs as if it were unpacked"
    if phase == "decode":
        line += (
            "; with its projection absorbed by the query's and the output's, as servers decode,"
            f" {scaled(more, 'FLOP')} more"
        )
    return [*lines, line]


NO_RECOMPUTATION = "no recomputation of activations; --checkpointing says otherwise"


def _absorbed(graph: Graph, batch: Batch) -> float | None:
    """FLOPs that absorbed projections add to latent attention; None where there is none.

    Queries then meet what is cached as it is, longer than keys and values are, and the projection
    costs as much as before: of each head's query up to the rank, and of its result down again.
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
    """The model with its adapters, if it has any, and which of its nodes are trained."""
    if how.trains is not None:
        return graph, how.trains
    if how.lora is not None:
        if how.frozen:
            raise UsageError("LoRA freezes all but its adapters; leave out what else is frozen")
        return with_adapters(graph, how.lora)
    if not how.frozen:
        return graph, trains_all
    missed = [name for name in how.frozen if not name or not any(_is_named(n, name) for n in graph)]
    if missed:
        raise UsageError(f"nothing in this model is called {missed[0]!r}, so it can't be frozen")
    return graph, lambda node: not any(_is_named(node, name) for name in how.frozen)


def _is_named(node: Node, name: str) -> bool:
    """True if a name means this node: a part, a role, or a run of its dotted name."""
    return name in (node.part, node.role) or f".{name}." in f".{node.name}."


def _exact(count: Callable[[Batch], Parts], batch: Batch) -> Parts:
    """FLOPs by part: of the documents, and what the grid and recomputation add."""
    needed = count(batch)
    if batch.is_grid:
        return needed
    # Padding is computed like any other row. Pairs are those of the documents, packed or padded:
    # what a kernel spends on pairs that need not meet is its own, and which kernel is not known.
    computed = count(batch.computed())
    return {
        part: replace(flops, recomputed=computed[part].hardware - flops.model)
        for part, flops in needed.items()
    }


def _row(count: Callable[[Batch], Parts], batch: Batch) -> float:
    """What one more position costs that holds no token: it goes through every layer and meets
    nothing. Under every convention: formulas of N have no word for it."""
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
