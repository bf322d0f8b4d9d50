"""The work of one step, in full: by part, under every convention, with what was assumed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.flops.analytic import PartFlops, node_pairs, step_flops, total
from ergmeter.flops.conventions import CONVENTIONS, EXACT, convention
from ergmeter.flops.estimate.storage import ASSUMED
from ergmeter.flops.graph.adapters import with_adapters
from ergmeter.flops.graph.graph import Attention, Convolution, Linear, Scan, trains_all
from ergmeter.flops.sizes import sizes
from ergmeter.records import Flops
from ergmeter.units import scaled

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.flops.analytic import Checkpointing, Parts
    from ergmeter.flops.batch import Batch, Sequences
    from ergmeter.flops.conventions import Convention
    from ergmeter.flops.estimate.storage import Storage
    from ergmeter.flops.graph.adapters import Lora
    from ergmeter.flops.graph.graph import Graph, Node, Trainable
    from ergmeter.flops.sizes import Sizes

# -- traffic ---------------------------------------------------------------------------------------
# Bytes that inference must move: the weights once, the cache of what came before.
#
# Decoding is bound by memory, not by arithmetic: to make one token every active weight is read, and
# with it the keys and values of its whole context. Bandwidth utilisation is these bytes over time
# over what the memory can do, as MFU is for FLOPs.
#
# The least that any program has to move is counted. Activations are left out: they fit in caches.


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
        whole = work.cached * batch.source_length(work.keys) * sequence.count
        return (whole, 0) if sequence.past else (0, whole)
    if isinstance(work, Attention) and work.mask == "causal":
        before = _cached_keys(work, sequence.past)
        new = min(sequence.new, _cached_keys(work, sequence.past + sequence.new))
        return work.cached * before * sequence.count, work.cached * new * sequence.count
    state = 0
    if isinstance(work, Scan):
        state = work.state
    elif isinstance(work, Convolution):
        state = work.channels * (work.width - 1)
    return (state * sequence.count if sequence.past else 0), state * sequence.count


def _cached_keys(work: Attention, length: int) -> int:
    """Of so many positions those that the next one sees."""
    if work.chunk is not None:
        return length % work.chunk
    if work.window is not None:  # which has the next one in it
        return min(length, work.window - 1)
    return length


def _share_read(node: Node, batch: Batch) -> float:
    """Of what a node holds, the share read; a tied matrix is read where it is multiplied."""
    rows = batch.rows(node.stream)
    if not rows or node.role in ("embedding", "positions"):
        return 0
    work = node.work
    if isinstance(work, Linear) and work.copies > 1:
        return 1 - (1 - work.used / work.copies) ** rows
    return 1


# -- work ------------------------------------------------------------------------------------------


Phase = Literal["train", "prefill", "decode"]
PHASES: tuple[str, ...] = get_args(Phase)


@dataclass(frozen=True, slots=True)
class TrainedParts:
    """What of a model is trained, and what is computed twice."""

    lora: Lora | None = None
    frozen: tuple[str, ...] = ()  # names, or parts of dotted names, that are not trained
    trains: Trainable | None = None  # or whoever knows: of a model that is there
    checkpointing: Checkpointing = "none"
    is_checkpointing_assumed: bool = False  # nobody said it, and no model was there to ask


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
    kept: tuple[str, ...] = ()  # how weights and cache are kept, and who says so
    kept_bytes: float | None = None  # of all weights
    params_given: int | None = None  # N of the formulas, where somebody gave it

    @property
    def chosen(self) -> Flops:
        """Under the convention that was asked for."""
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
    """Count one step. `params`: the N of whoever's figure is to be met, where it is not ours.

    `storage`, how weights and cache are kept, is for the bytes that inference moves.
    """
    _check(graph, phase)
    first = convention(chosen)
    how = training or TrainedParts(is_checkpointing_assumed=True)
    adapted, trainable = trained_graph(graph, how)
    judge = trainable if phase == "train" else None
    parts = _exact(adapted, batch, judge, how.checkpointing)
    found, reason = _sizes(graph, params, phase)
    trained = sum(node.params for node in adapted if trainable(node))
    if judge is not None and not trained:
        raise UsageError(
            "everything is frozen, so nothing is trained: freeze less, or count prefill"
        )
    moved = None if phase == "train" else forward_traffic(adapted, batch, storage)
    padding = _row(adapted, batch, judge, how.checkpointing) if batch.is_grid else None
    frozen = judge is not None and trained != adapted.params
    job = _Job(adapted, batch, judge, how, parts, found, reason, frozen)
    assumed = (*adapted.assumptions, *_assumptions(graph, batch, phase, how))
    kept = () if moved is None else storage.said
    like = Flops(
        model_per_step=0.0,
        convention=first.name,
        engine="analytic",
        hardware_per_padding=padding,
        tokens_per_step=batch.tokens_real,
        bytes_per_step=moved.total_bytes if moved else None,
        assumptions=(*assumed, *(f"kept: {line}" for line in kept)),
    )
    flops, not_defined = _under_each(
        job, first, like, partial(_given_sizes, params=params, graph=graph)
    )
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
        kept=kept,
        kept_bytes=None if moved is None else storage.total_bytes(adapted),
        params_given=params,
    )
    if params is not None and not work.of_params_given:
        raise UsageError("N was given, and no formula of N is defined for this step; leave it out")
    return work


def _check(graph: Graph, phase: str) -> None:
    if phase not in PHASES:
        raise UsageError(f"no phase {phase!r}; there are {', '.join(PHASES)}")
    if phase == "decode" and not writes(graph):
        raise UsageError(
            f"this {graph.family} model writes no tokens one by one (it has no head of a causal"
            " language model), so it has no decoding step: count prefill"
        )


def _under_each(
    job: _Job, first: Convention, like: Flops, more: Callable[[Convention], list[str]]
) -> tuple[dict[str, Flops], dict[str, str]]:
    """By convention, the chosen one first; and why the others have nothing to say.

    `like` has what is the same under all of them, `more` what one assumes besides.
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
            assumptions=(*like.assumptions, *more(each)),
        )
    if first.name in not_defined:
        raise NotMeasurable(f"{first.name}: {not_defined[first.name]}")
    return flops, not_defined


def _given_sizes(each: Convention, *, params: int | None, graph: Graph) -> list[str]:
    """That a formula's N is not the model's own."""
    if params is None or "N" not in each.letters:
        return []
    return [f"given: N = {params:,}, in place of the model's own {graph.params_active:,}"]


def writes(graph: Graph) -> bool:
    """Whether the model goes on from what it reads, token by token."""
    is_causal = any(
        isinstance(node.work, Scan)
        or (isinstance(node.work, Attention) and node.work.mask == "causal")
        for node in graph
    )
    return is_causal and any(node.stream == "logits" for node in graph)


@dataclass(frozen=True)
class _Job:
    """A step, ready to be counted under any convention."""

    graph: Graph  # with its adapters
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
    """What a step takes for granted, beside the model's own."""
    said = []
    longest = max(document.past + document.new for document in batch.documents)
    limit = graph.facts.get("learned_positions", longest)
    if longest > limit:
        said.append(
            f"the table of learned positions has {limit}, so this model can't run {longest} tokens;"
            " counted as if it could"
        )
    padding = batch.tokens - batch.tokens_real
    if padding:
        said.append(
            f"hardware FLOPs: {padding} of {batch.tokens} positions are padding, computed in every"
            " layer; in attention only the documents' own pairs"
        )
    if "tokens_per_image" in graph.facts and not batch.images and phase != "decode":
        said.append("no images, so none of what sees them is counted; pass --images")
    if phase == "train":
        return [*said, NO_RECOMPUTATION] if how.is_checkpointing_assumed else said
    if batch.rows("logits") < batch.rows("tokens"):
        said.append("the head is applied to the last token of each prompt, and to no other")
    if any(isinstance(node.work, Linear) and node.work.copies > 1 for node in graph):
        said.append("experts read: the number expected if the router picks them at random")
    more = _absorbed(graph, batch)
    if more is None:
        return said
    line = "latent attention: bytes of the compressed cache, FLOPs as if it were unpacked"
    if phase == "decode":
        line += (
            "; with its projection absorbed by the query's and the output's, as servers decode,"
            f" {scaled(more, 'FLOP')} more"
        )
    return [*said, line]


NO_RECOMPUTATION = "no recomputation of activations; --checkpointing says otherwise"


def _absorbed(graph: Graph, batch: Batch) -> float | None:
    """What absorbed projections add to latent attention; None where there is none.

    Queries then meet what is cached as it is, longer than keys and values are, and the projection
    costs as much as before: of each head's query up to the rank, and of its result down again.
    """
    latent = [node for node in graph if isinstance(node.work, Attention) and node.work.latent]
    linears = {node.name: node.work for node in graph if isinstance(node.work, Linear)}
    more = 0.0
    for node in latent:
        core = node.work
        assert isinstance(core, Attention)
        assert core.latent is not None
        longer = core.latent - core.qk_dim + linears[node.of[1]].inputs - core.v_dim
        more += 2 * core.heads * longer * node_pairs(core, batch, node.stream, "needed")
    return more if latent else None


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
    """Whether a name means this node: a part, a role, or a run of its dotted name."""
    return name in (node.part, node.role) or f".{name}." in f".{node.name}."


def _exact(
    graph: Graph, batch: Batch, trainable: Trainable | None, checkpointing: Checkpointing
) -> Parts:
    """By part: what the documents need, and beside it what the grid and recomputation add."""
    needed = step_flops(graph, batch, trainable=trainable, checkpointing=checkpointing)
    if batch.is_grid:
        return needed
    # Padding is computed like any other row. Pairs are those of the documents, packed or padded:
    # what a kernel spends on pairs that need not meet is its own, and which kernel is not known.
    computed = step_flops(graph, batch.computed(), trainable=trainable, checkpointing=checkpointing)
    return {
        part: replace(flops, recomputed=computed[part].hardware - flops.model)
        for part, flops in needed.items()
    }


def _row(
    graph: Graph, batch: Batch, trainable: Trainable | None, checkpointing: Checkpointing
) -> float:
    """What one more position costs that holds no token: it goes through every layer and meets
    nothing. Under every convention: formulas of N have no word for it."""
    without, with_one = (
        total(step_flops(graph, one, trainable=trainable, checkpointing=checkpointing)).hardware
        for one in (batch, replace(batch, padding=1))
    )
    return with_one - without


def _sizes(graph: Graph, params: int | None, phase: str) -> tuple[Sizes | None, str]:
    if phase == "decode":
        return None, "it is a formula for whole sequences, and a decoding step is one position"
    try:
        found = sizes(graph)
    except NotMeasurable as error:
        return None, str(error)
    if params is not None:
        found = replace(
            found,
            params=params,
            params_held=params + (found.params_held - found.params),
        )
    return found, ""


__all__ = [
    "PHASES",
    "PartFlops",
    "Phase",
    "TrainedParts",
    "Work",
    "step_work",
    "trained_graph",
    "writes",
]
