"""Memory of one device at the moments of a training step that can be its peak.

Weights, gradients, optimizer states and activations do not all exist at the same time. Backward
frees activations while it allocates gradients, logits exist before the first gradient, and the
optimizer's temporaries after the last activation. A plain sum of all of them is wrong by up to a
third, in either direction. The peak is the largest of three kinds of moments:

  backward through the loss      every activation, and the logits with their gradient
  backward through a layer       the layers below it, the gradients of those above it
  optimizer step                 every gradient, no activation

With pipeline stages a device stores its own layers' activations for each micro-batch in flight.

Fragmentation, the CUDA context and buffers of collectives are not included. The allocator's count
of tensor bytes does not include them either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ergmeter.errors import UsageError
from ergmeter.flops.batch import Batch
from ergmeter.flops.estimate.arrangement import (
    FP32,
    Kernels,
    Parallel,
    ParameterMemory,
    Setup,
    assumptions,
    check_sizes,
)
from ergmeter.flops.estimate.saved_activations import LayerBackward, LayerPeak, Saved, SavedTensors
from ergmeter.flops.graph.graph import Attention, Fold, Graph, Linear, Node
from ergmeter.flops.work import TrainedParts, trained_graph
from ergmeter.units import listed_by, scaled

KINDS = (
    "weights",
    "cast weights",  # autocast's copies of them in 16 bits
    "gradients",
    "optimizer",
    "activations",
    "loss",
    "output",  # the model's output: logits, and its cache of keys and values
    "working",  # gradients of activations, unpacked weights, an optimizer's temporaries
    "gathered",  # sharded weights and gradients that are gathered for the running layer
    "workspace",
)


# The parts of a model that are in no layer.
_HEAD = "the head"
_EMBEDDING = "the embedding"


@dataclass(frozen=True, slots=True)
class MemoryMoment:
    """Bytes on a device at one moment of a step, by kind of memory."""

    name: str
    bytes: dict[str, float]

    @property
    def total_bytes(self) -> float:
        """The bytes of all kinds together."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Memory:
    """The moments of a step on the device with the largest peak."""

    moments: tuple[MemoryMoment, ...]
    stage: int  # of the pipeline
    sequences: int  # of one micro-batch on one device
    host_bytes: float  # optimizer states in the host's memory
    assumptions: tuple[str, ...]

    @property
    def peak(self) -> MemoryMoment:
        """The moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.total_bytes)


def step_memory(
    graph: Graph, batch: Batch, *, training: TrainedParts | None = None, setup: Setup | None = None
) -> Memory:
    """Return the memory of a step on the device with the largest peak.

    `batch` is that of the whole step: all devices and micro-batches together.
    """
    how, plan = training or TrainedParts(), setup or Setup()
    if plan.quantize is not None and how.lora is None:
        raise UsageError("quantised weights can't be trained: add adapters with --lora")
    if plan.micro_batches < 1:
        raise UsageError(f"micro-batches must be 1 or more; got {plan.micro_batches}")
    return _Layout(graph, batch, how, plan).memory()


@dataclass(frozen=True, slots=True)
class _Loss:
    """Bytes that the loss needs; `logits` are the logits that the model returns."""

    forward: float = 0
    backward: float = 0
    logits: float = 0


@dataclass(frozen=True, slots=True)
class _Output:
    """Bytes of the model's output: logits, and a cache of keys and values."""

    logits: float
    cache: dict[str, float]  # by layer, keys and values that autograd saves as the same tensors
    copied: float  # keys and values of which autograd saves other copies

    @property
    def total(self) -> float:
        """Bytes of the whole output, after autograd has freed what it saved."""
        return self.logits + self.copied + sum(self.cache.values())

    @property
    def unsaved(self) -> float:
        """Bytes of the output that autograd does not save as well."""
        return self.logits + self.copied


class _Layout:
    """Computes the memory of each pipeline stage of a model at each moment of a step."""

    def __init__(self, graph: Graph, batch: Batch, how: TrainedParts, setup: Setup) -> None:
        self.graph, self.trainable = trained_graph(graph, how)
        if how.checkpointing == "full":  # transformers then turns the cache off
            setup = replace(setup, kernels=replace(setup.kernels, has_cache=False))
        self.batch, self.how, self.setup = batch, how, setup
        self.numbers = setup.precision
        self.layers = list(dict.fromkeys(node.layer for node in graph if node.layer is not None))
        check_sizes(graph, batch, setup)
        parallel = setup.parallel
        spread = parallel.data * setup.micro_batches
        self.sequences = batch.sequences // spread
        # At a given sequence length, all saved memory is proportional to the rows.
        self.rows_share = 1 / (spread * parallel.context)
        if setup.kernels.has_adapter_dropout and any(isinstance(n.work, Fold) for n in self.graph):
            raise UsageError(
                "PEFT has no dropout for adapters on experts: leave out --lora-dropout"
            )
        self.parameters = ParameterMemory(self.graph, self.trainable, setup)
        self.trained, self.needs = self.parameters.trained, self.parameters.needs
        if not any(self.trained.values()):
            frozen = f" ({', '.join(how.frozen)})" if how.frozen else ""
            raise UsageError(
                f"nothing is trained: everything that the loss depends on is frozen{frozen};"
                " freeze less"
            )
        self.tensors = SavedTensors(self.graph, batch, self.parameters)
        self.saved = self._saved()
        self.stage_of = self._stages()
        after = {node.name for node in _after_layers(list(self.graph))}
        self.part_of = {
            node.name: node.layer or (_HEAD if node.name in after else _EMBEDDING)
            for node in self.graph
        }
        self.saved_in: dict[str, list[Saved]] = {part: [] for part in self.part_of.values()}
        for each in self.saved:
            self.saved_in[self.part_of[each.node]].append(each)

    def memory(self) -> Memory:
        """Return the memory of the pipeline stage with the largest peak."""
        count = self.setup.parallel.pipeline
        each = [self._moments(stage) for stage in range(count)]
        fullest = max(range(count), key=lambda s: max(m.total_bytes for m in each[s]))
        nodes = [node for node in self.graph if self.stage_of[node.name] == fullest]
        host = sum(self.parameters.states(node)[1] for node in nodes)
        return Memory(each[fullest], fullest, self.sequences, host, self._assumptions(nodes))

    def _saved(self) -> list[Saved]:
        """Return the storages that autograd saves, with the bytes of one device's share."""

        def here(each: Saved) -> Saved:
            share = self._share(each.is_split)
            if each.is_weight:
                share = 1 / self.setup.parallel.tensor
            return replace(each, bytes=each.bytes * share)

        return list(map(here, self.tensors.all()))

    def _share(self, is_split: bool) -> float:
        """Return a device's share of an activation tensor."""
        parallel = self.setup.parallel
        between = parallel.tensor if parallel.is_sequence_parallel else 1
        return self.rows_share / (parallel.tensor if is_split else between)

    def _stages(self) -> dict[str, int]:
        """Return the pipeline stage of each node: layers evenly, others with their neighbours."""
        count = len(self.layers)
        number = {layer: at for at, layer in enumerate(self.layers)}
        stages, now = {}, 0
        for node in self.graph:
            if node.layer is not None:
                now = number[node.layer] * self.setup.parallel.pipeline // count
            stages[node.name] = now
        return stages

    def _moments(self, stage: int) -> tuple[MemoryMoment, ...]:
        parallel, setup = self.setup.parallel, self.setup
        nodes = [node for node in self.graph if self.stage_of[node.name] == stage]
        states = {
            "weights": sum(map(self.parameters.weight_bytes, nodes)) / parallel.sharded(3)
            + self._tied_bytes(nodes, stage),
            "optimizer": sum(self.parameters.states(node)[0] for node in nodes),
            "workspace": setup.workspace_bytes,
        }
        gradients = sum(map(self.parameters.gradient_bytes, nodes)) / parallel.sharded(2)
        output = self._output(nodes)
        step = {
            "gradients": gradients,
            "working": self.parameters.scratch(nodes),
            "output": output.total if setup.output == "until-next" else 0.0,
        }
        last = _moment("optimizer step", states, step)
        # After the first micro-batch all gradients exist; in a single one backward adds them.
        waiting = gradients if setup.micro_batches > 1 else None
        return (*self._passes(nodes, stage, states, waiting, output), last)

    def _passes(
        self,
        nodes: list[Node],
        stage: int,
        states: dict[str, float],
        waiting: float | None,
        output: _Output,
    ) -> tuple[MemoryMoment, ...]:
        """Return two peaks: that at the loss (end of forward, loss backward), that of backward."""
        by_layer = listed_by((node.layer, node) for node in nodes if node.layer is not None)
        states = {**states, "gathered": self.parameters.gathered_bytes(nodes, list(by_layer))}
        saved = self._saved_bytes(nodes, by_layer)
        under_way = min(self.setup.parallel.pipeline - stage, self.setup.micro_batches)
        activations = under_way * sum(saved.values())
        cast = self._cast_bytes(nodes)
        waits = cast
        if self.how.checkpointing == "full":  # checkpointed layers have no graph that keeps copies
            waits = {part: 0.0 if part in by_layer else size for part, size in cast.items()}
        loss = self._loss_bytes(nodes)
        base = {"gradients": waiting or 0.0, "activations": activations}
        previous = output.total if self.setup.output == "until-next" else 0
        ends = {**_both(cast, loss.forward), "output": output.unsaved + previous}
        middle = [_moment("end of the forward pass", states, {**base, **ends})]
        returned = output.unsaved if self.setup.output != "freed" else 0.0
        if loss.backward:
            name = "backward through the loss"
            turns = {**_both(waits, loss.backward), "output": returned}
            middle.append(_moment(name, states, {**base, **turns}))
        # Stage 2 shards a gradient after its reduction; the latest layer's is still whole.
        shards = self.setup.parallel.sharded(2)
        done = latest = 0.0
        back: list[MemoryMoment] = []
        parts = {_HEAD: _after_layers(nodes), **dict(reversed(by_layer.items()))}
        for part, inside in parts.items():
            copies = {**waits, part: cast[part]}
            peak = self._backward_peak(part, inside, loss)
            made = peak.weight_gradients
            is_again = part in by_layer and self.how.checkpointing == "full"
            now = {
                "cast weights": sum(copies.values()),
                "gradients": (done + made) / shards if waiting is None else waiting,
                "gathered": states["gathered"] + (latest + made) * (1 - 1 / shards),
                "activations": activations - (0 if is_again else saved[part]) + peak.saved,
                "working": peak.working,
                "output": returned,
            }
            back.append(_moment(f"backward through {part}", states, now))
            activations -= saved[part]
            returned += output.cache.get(part, 0.0) if self.setup.output != "freed" else 0.0
            latest = sum(map(self.parameters.made_gradient_bytes, inside))
            done += latest
        end = {
            "gradients": sum(map(self.parameters.gradient_bytes, nodes)) / shards,
            "activations": activations,
            "working": self._embedding_bytes(nodes),
            "output": returned,
        }
        back.append(_moment(f"backward through {_EMBEDDING}", states, end))
        return tuple(max(some, key=lambda m: m.total_bytes) for some in (middle, back))

    def _backward_peak(self, part: str, nodes: list[Node], loss: _Loss) -> LayerPeak:
        """Return the memory peak of the backward pass through a layer, or through the head."""
        if not any(self.needs[node.name] for node in nodes):
            return LayerPeak()
        saved = self.saved_in[part]
        if self.how.checkpointing == "full":  # a layer's input is already counted
            saved = [each for each in saved if self.part_of.get(each.storage, part) == part]
        arriving, flowing = dict[str, float](), 0.0
        if part == _HEAD:
            arriving = {node.name: loss.logits for node in nodes if node.role == "head"}
        else:
            flowing = self._residual_bytes(nodes[0])
        again = self.how.checkpointing == "selective"
        walk = LayerBackward(self.tensors, self._share, recomputes_core=again)
        return walk.peak(nodes, saved, arriving, flowing)

    def _embedding_bytes(self, nodes: list[Node]) -> float:
        """Return the gradient bytes at the embedding; a tied one has a second weight gradient."""
        total = 0.0
        tied = {node.tied_to for node in nodes if node.tied_to and self.trained[node.name]}
        for node in nodes:
            if node.role == "embedding" and self.trained[node.name]:
                total += self._residual_bytes(node)
                total += self.parameters.gradient_bytes(node) if node.name in tied else 0.0
        return total

    def _cast_bytes(self, nodes: list[Node]) -> dict[str, float]:
        """Return the bytes of autocast's 16-bit copies of matrices, by layer, head, embedding."""
        copies = dict.fromkeys([*self.part_of.values(), _HEAD], 0.0)
        for node in nodes:
            copies[self.part_of[node.name]] += self.parameters.cast_bytes(node)
        return copies

    def _tied_bytes(self, nodes: list[Node], stage: int) -> float:
        """Return the bytes of copies of tied matrices whose other use is on another stage."""
        total = 0.0
        for node in nodes:
            if node.tied_to is not None and self.stage_of[node.tied_to] != stage:
                other = next(each for each in self.graph if each.name == node.tied_to)
                total += self.parameters.weight_bytes(other) / self.setup.parallel.sharded(3)
        return total

    def _saved_bytes(self, nodes: list[Node], layers: dict[str, list[Node]]) -> dict[str, float]:
        """Return the bytes saved for the backward pass, by layer, head, embedding."""
        saved = dict.fromkeys([*layers, _HEAD, _EMBEDDING], 0.0)
        inputs: dict[str, float] = {}  # of checkpointed layers, saved if they have a gradient
        if self.how.checkpointing == "full":
            for layer, inside in layers.items():
                if any(self.needs[node.name] for node in inside):
                    inputs[layer] = self._residual_bytes(inside[0])
        here = {node.name for node in nodes}
        for each in self.saved:
            part = self.part_of[each.node]
            is_again = part in inputs or (self.how.checkpointing == "selective" and each.is_core)
            if each.node in here and not is_again:
                saved[part] += each.bytes
        for layer, size in inputs.items():
            saved[layer] += size
        return saved

    def _residual_bytes(self, node: Node) -> float:
        """Return the bytes of the residual stream (or its gradient) for the rows of a node."""
        rows = self.batch.grid().rows(node.stream)
        return rows * self.graph.hidden * self.numbers.stream * self._share(is_split=False)

    def _output(self, nodes: list[Node]) -> _Output:
        """Return the bytes of the model's output: logits and, with a cache, keys and values."""
        logits, cache, copied = self._loss_bytes(nodes).logits, dict[str, float](), 0.0
        # Under autocast keys are rotated in 32 bits, so the cache is in 32; attention casts a copy.
        size = self.numbers.stream
        for node in nodes if self.setup.kernels.has_cache else []:
            work = node.work
            if not isinstance(work, Attention) or work.mask != "causal" or work.keys is not None:
                continue
            rows = self.batch.grid().rows(node.stream) * self.rows_share
            pair = work.kv_heads * (work.qk_dim + work.v_dim) / self.setup.parallel.tensor
            is_repeated = work.kv_heads != work.heads and (
                self.tensors.is_written_out(work)
                or self.tensors.is_masked(work, self.batch.seq_len)
            )
            if is_repeated or self.numbers.is_autocast:
                copied += rows * pair * size
            else:
                part = self.part_of[node.name]
                cache[part] = cache.get(part, 0.0) + rows * pair * size
        return _Output(logits, cache, copied)

    def _loss_bytes(self, nodes: list[Node]) -> _Loss:
        """Return the bytes that the loss needs.

        transformers: the logits, which the model returns; a 32-bit copy of them until their
        log-softmax exists, which is saved; in backward two gradients of that size, of the
        log-softmax and of its input. A fused loss computes logits in pieces as large as its input,
        and the gradients at the same time.
        """
        for node in nodes:
            if node.role == "head" and isinstance(node.work, Linear):
                head, work = node, node.work
                break
        else:
            return _Loss()
        rows = self.batch.grid().rows(head.stream) * self.rows_share
        size = self.numbers.compute
        if self.setup.kernels.loss == "fused":
            inputs = rows * work.inputs
            weight = work.params * self.numbers.weight if self.trained[head.name] else 0
            gradients = inputs * size + weight / self.setup.parallel.tensor
            return _Loss(gradients + inputs * (size + FP32), gradients)
        logits = rows * work.outputs / self.setup.parallel.tensor
        first = FP32 if size == FP32 else 2 * FP32  # 32-bit logits are not copied
        return _Loss(logits * first, logits * 3 * FP32, logits=logits * size)

    def _assumptions(self, nodes: list[Node]) -> tuple[str, ...]:
        lines = assumptions(self.setup, self.how, self.graph)
        return (*self.graph.assumptions, *lines, *self._alternatives(nodes))

    def _alternatives(self, nodes: list[Node]) -> Iterator[str]:
        """Yield lines on the program's own choices, with the extra bytes of the alternative."""
        logits = scaled(self._output(nodes).total, "B")
        output = {
            "freed": f"the model's output is freed before the backward pass, as in transformers'"
            f" Trainer; `output = model(...)` in a loop holds {logits} more: --output until-next",
            "until-step": f"the model's output, {logits}, is held through the backward pass",
            "until-next": f"the model's output, {logits}, is held until the next forward pass"
            " replaces it, as `output = model(...)` in a loop does",
        }
        yield output[self.setup.output]
        if self.setup.optimizer == "adamw-fused":
            foreach = replace(self.setup, optimizer="adamw")
            more = ParameterMemory(self.graph, self.trainable, foreach).scratch(nodes)
            yield (
                f"torch's own default on CUDA, foreach AdamW, takes {scaled(more, 'B')} more in the"
                " optimizer's step: --optimizer adamw"
            )


def _moment(name: str, states: dict[str, float], now: dict[str, float]) -> MemoryMoment:
    both = {**states, **now}
    return MemoryMoment(name, {kind: both.get(kind, 0.0) for kind in KINDS})


def _both(cast: dict[str, float], loss: float) -> dict[str, float]:
    return {"cast weights": sum(cast.values()), "loss": loss}


def _after_layers(nodes: list[Node]) -> list[Node]:
    """Return the nodes after the last layer: norm and head, which backward visits first."""
    last = max((at for at, node in enumerate(nodes) if node.layer is not None), default=-1)
    return nodes[last + 1 :]


__all__ = ["KINDS", "Kernels", "Memory", "MemoryMoment", "Parallel", "Setup", "step_memory"]
