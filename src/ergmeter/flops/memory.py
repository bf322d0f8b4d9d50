"""Does it fit? The bytes one device holds at the moments of a step that can be its largest.

The trap: one sum. Weights, gradients, optimizer and activations are never all there at once: the
gradients come as the activations go, the logits are there when the first gradient is not yet, the
optimizer's scratch when the activations are gone. Adding them up is wrong by a third, in either
direction. So three kinds of moments are laid out and the largest is the peak:

  backward through the loss      every activation, and the logits with their gradient
  backward through a layer       the layers below it, the gradients of those above it
  optimizer step                 every gradient, no activation

Under pipeline stages a device holds its own layers for as many micro-batches as are under way.

What the allocator loses to fragmentation, a CUDA context and the buffers of collectives are not
here: an allocator's own count of tensors does not have them either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ergmeter.errors import UsageError
from ergmeter.flops.arrangement import (
    FP32,
    Kernels,
    Parallel,
    Setup,
    check_sizes,
    is_written_out,
    precision,
    said,
)
from ergmeter.flops.graph import Attention, Fold, Linear
from ergmeter.flops.holdings import Holdings
from ergmeter.flops.saved import saved_tensors
from ergmeter.flops.work import Training, trained_graph
from ergmeter.flops.written import written

if TYPE_CHECKING:
    from ergmeter.flops.batch import Batch
    from ergmeter.flops.graph import Graph, Node
    from ergmeter.flops.saved import Saved

KINDS = (
    "weights",
    "cast weights",  # autocast's copies of them in 16 bits
    "gradients",
    "optimizer",
    "activations",
    "loss",
    "working",  # gradients of activations, weights unpacked, an optimizer's scratch
    "gathered",  # what sharding puts together for the layer at work
    "workspace",
)


@dataclass(frozen=True, slots=True)
class Moment:
    """What a device holds at one instant of a step, by kind."""

    name: str
    bytes: dict[str, float]

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Memory:
    """The moments of a step, on the device that holds the most."""

    moments: tuple[Moment, ...]
    stage: int  # of the pipeline
    sequences: int  # of one micro-batch on one device
    host_bytes: float  # an optimizer's states that live in the host's memory
    assumptions: tuple[str, ...]

    @property
    def peak(self) -> Moment:
        """The largest."""
        return max(self.moments, key=lambda moment: moment.total_bytes)


def step_memory(
    graph: Graph, batch: Batch, *, training: Training | None = None, setup: Setup | None = None
) -> Memory:
    """Bytes on the fullest device. The batch is a whole step's, of all devices."""
    how, given = training or Training(), setup or Setup()
    _check(how, given)
    return _Layout(graph, batch, how, given).memory()


def _check(how: Training, setup: Setup) -> None:
    if setup.quantize is not None and how.lora is None:
        raise UsageError("quantised weights can't be trained: add adapters with --lora")
    if setup.micro_batches < 1:
        raise UsageError(f"a step has 1 micro-batch or more; got {setup.micro_batches}")


@dataclass(frozen=True, slots=True)
class _Loss:
    forward: float = 0
    backward: float = 0
    after: float = 0  # while the layers are walked back through


class _Layout:
    """A model cut into the stages of a pipeline, and what each of them holds."""

    def __init__(self, graph: Graph, batch: Batch, how: Training, setup: Setup) -> None:
        self.graph, self.trainable = trained_graph(graph, how)
        self.batch, self.how, self.setup = batch, how, setup
        self.numbers, self.code = precision(setup.dtype), written(graph)
        self.layers = list(dict.fromkeys(node.layer for node in graph if node.layer is not None))
        check_sizes(graph, batch, setup)
        parallel = setup.parallel
        spread = parallel.data * setup.micro_batches
        self.sequences = batch.sequences // spread
        # Everything kept grows with the rows alone, the length of a sequence being what it is.
        self.rows_share = 1 / (spread * parallel.context)
        if setup.kernels.has_adapter_dropout and any(isinstance(n.work, Fold) for n in self.graph):
            raise UsageError(
                "PEFT has no dropout for adapters on experts: leave out --lora-dropout"
            )
        self.parameters = Holdings(self.graph, self.trainable, setup)
        self.trained, self.needs = self.parameters.trained, self.parameters.needs
        if not any(self.trained.values()):
            frozen = f" ({', '.join(how.frozen)})" if how.frozen else ""
            raise UsageError(
                f"nothing is trained: all that the loss comes from is frozen{frozen}, and an"
                " estimate is of a training; leave something to train"
            )
        self.saved = self._saved()
        self.stage_of = self._stages()

    def memory(self) -> Memory:
        """On the stage that holds the most."""
        count = self.setup.parallel.pipeline
        each = [self._moments(stage) for stage in range(count)]
        fullest = max(range(count), key=lambda s: max(m.total_bytes for m in each[s]))
        nodes = [node for node in self.graph if self.stage_of[node.name] == fullest]
        host = sum(self.parameters.states(node)[1] for node in nodes)
        return Memory(each[fullest], fullest, self.sequences, host, self._assumptions())

    def _saved(self) -> list[Saved]:
        found = saved_tensors(
            self.graph, self.batch, self.trainable, self.numbers, self.setup.kernels
        )
        parallel = self.setup.parallel
        between = parallel.tensor if parallel.is_sequence_parallel else 1

        def here(one: Saved) -> Saved:
            rows = 1 if one.is_weight else self.rows_share
            share = parallel.tensor if one.is_split else between
            return replace(one, bytes=one.bytes * rows / share)

        return list(map(here, found))

    def _stages(self) -> dict[str, int]:
        """Which stage of the pipeline each node is on: layers evenly, the rest beside them."""
        count = len(self.layers)
        number = {layer: at for at, layer in enumerate(self.layers)}
        found, now = {}, 0
        for node in self.graph:
            if node.layer is not None:
                now = number[node.layer] * self.setup.parallel.pipeline // count
            found[node.name] = now
        return found

    def _moments(self, stage: int) -> tuple[Moment, ...]:
        parallel, setup = self.setup.parallel, self.setup
        nodes = [node for node in self.graph if self.stage_of[node.name] == stage]
        held = {
            "weights": sum(map(self.parameters.weight_bytes, nodes)) / parallel.sharded(3)
            + self._tied_bytes(nodes, stage),
            "optimizer": sum(self.parameters.states(node)[0] for node in nodes),
            "workspace": setup.workspace_bytes,
        }
        whole = sum(map(self.parameters.gradient_bytes, nodes)) / parallel.sharded(2)
        scratch = sum(map(self.parameters.scratch, nodes))
        last = _moment("optimizer step", held, {"gradients": whole, "working": scratch})
        # What an earlier micro-batch left is whole; otherwise gradients come one by one.
        waiting = whole if setup.micro_batches > 1 else None
        return (*self._passes(nodes, stage, held, waiting), last)

    def _passes(
        self, nodes: list[Node], stage: int, held: dict[str, float], waiting: float | None
    ) -> tuple[Moment, ...]:
        """The moment between the passes, and that of the layer on the way back that holds most."""
        by_layer: dict[str, list[Node]] = {}
        for node in nodes:
            if node.layer is not None:
                by_layer.setdefault(node.layer, []).append(node)
        layers = list(by_layer)
        held = {**held, "gathered": self.parameters.gathered_bytes(nodes, layers)}
        kept, again = self._kept(nodes, by_layer)
        below = sum(kept.values())
        under_way = min(self.setup.parallel.pipeline - stage, self.setup.micro_batches)
        others = (under_way - 1) * below
        cast = self.parameters.cast_bytes(nodes)
        waits = cast
        if self.how.checkpointing == "full":  # no graph holds on to the layers' copies
            waits = {layer: 0 if layer else size for layer, size in cast.items()}
        loss = self._loss_bytes(nodes)
        base = {"gradients": waiting or 0.0, "activations": others + below}
        middle = [_moment("end of the forward pass", held, {**base, **_both(cast, loss.forward)})]
        if loss.backward:
            name = "backward through the loss"
            middle.append(_moment(name, held, {**base, **_both(waits, loss.backward)}))
        # Stage 2 shards a gradient once it is reduced: of what was walked through last it is whole.
        shards = self.setup.parallel.sharded(2)
        done = latest = sum(map(self.parameters.gradient_bytes, _after_layers(nodes)))
        found: list[Moment] = []
        for layer, inside in reversed(by_layer.items()):
            own = {**waits, layer: cast[layer]}
            now = {
                **_both(own, loss.after),
                "gradients": done / shards if waiting is None else waiting,
                "gathered": held["gathered"] + latest * (1 - 1 / shards),
                "activations": others + below + again[layer],
                "working": self._working_bytes(inside),
            }
            found.append(_moment(f"backward through {layer}", held, now))
            below -= kept[layer]
            latest = sum(map(self.parameters.gradient_bytes, inside))
            done += latest
        return tuple(max(some, key=lambda m: m.total_bytes) for some in (middle, found) if some)

    def _tied_bytes(self, nodes: list[Node], stage: int) -> float:
        """A tied matrix is held a second time where its other use is on another stage."""
        found = 0.0
        for node in nodes:
            if node.tied_to is not None and self.stage_of[node.tied_to] != stage:
                other = next(each for each in self.graph if each.name == node.tied_to)
                found += self.parameters.weight_bytes(other) / self.setup.parallel.sharded(3)
        return found

    def _kept(
        self, nodes: list[Node], layers: dict[str, list[Node]]
    ) -> tuple[dict[str | None, float], dict[str | None, float]]:
        """By layer: what waits for the backward pass, and what is computed again there."""
        on_stage = {node.layer for node in nodes}
        kept: dict[str | None, float] = dict.fromkeys([*layers, None], 0.0)
        again: dict[str | None, float] = dict.fromkeys([*layers, None], 0.0)
        inputs = self._input_bytes(layers) if self.how.checkpointing == "full" else {}
        is_last = self.setup.parallel.pipeline == 1 or any(node.role == "head" for node in nodes)
        for one in self.saved:
            if one.layer not in on_stage or (one.layer is None and not is_last):
                continue
            if one.layer in inputs or (self.how.checkpointing == "selective" and one.is_core):
                again[one.layer] += one.bytes
            else:
                kept[one.layer] += one.bytes
        for layer, size in inputs.items():
            kept[layer] += size
        return kept, again

    def _input_bytes(self, layers: dict[str, list[Node]]) -> dict[str, float]:
        """What a checkpointed layer keeps: what it was given. One without a gradient keeps none."""
        parallel = self.setup.parallel
        between = parallel.tensor if parallel.is_sequence_parallel else 1
        found: dict[str, float] = {}
        for layer, inside in layers.items():
            if not any(self.needs[node.name] for node in inside):
                continue
            rows = self.batch.grid().rows(inside[0].stream)
            size = rows * self.graph.hidden * self.numbers.stream
            found[layer] = size * self.rows_share / between
        return found

    def _loss_bytes(self, nodes: list[Node]) -> _Loss:
        """What the loss holds.

        As transformers has it: the logits, which the model returns; the same in 32 bits, until
        their log-softmax is made, which is kept; then two gradients of that size, of the
        log-softmax and of its input. A fused loss makes the logits by pieces as large as its input,
        and the gradients at once.
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
            weight = work.held * self.numbers.weight if self.trained[head.name] else 0
            given = inputs * size + weight / self.setup.parallel.tensor
            return _Loss(given + inputs * (size + FP32), given, given)
        logits = rows * work.outputs / self.setup.parallel.tensor
        first = FP32 if size == FP32 else 2 * FP32  # what is in 32 bits already is not copied
        capped = size if self.code.caps_logits else 0  # the tanh, kept until it is walked back
        return _Loss(
            logits * (size + capped + first), logits * (size + capped + 3 * FP32), logits * size
        )

    def _working_bytes(self, nodes: list[Node]) -> float:
        """Gradients under way in a layer, and a weight unpacked.

        At their most, where act(gate) x up is walked back through: of the product, which is gone by
        then if it was kept, and of both its factors, beside the one that flows between layers.
        Where attention is written out: of its probabilities, before and after the softmax.
        """
        widest = unpacked = eager = 0.0
        for node in nodes:
            work = node.work
            if isinstance(work, Linear) and self.needs[node.name]:
                share = self.parameters.split(node)
                count = 2 if self.trained[node.name] else 3
                widest = max(widest, count * work.inputs * work.used / share)
                if self.setup.quantize and work.is_module and node.part != "lora":
                    unpacked = max(unpacked, work.held / share * self.numbers.compute)
            elif isinstance(work, Fold):  # the gradient of the sum, which is of the whole weight
                share = self.setup.parallel.tensor
                unpacked = max(unpacked, work.held / share * self.numbers.compute)
            elif isinstance(work, Attention) and is_written_out(
                work, self.numbers, self.setup.kernels, self.code
            ):
                keys = self.batch.seq_len
                eager = max(eager, work.heads * keys / self.setup.parallel.tensor * 2 * FP32)
        if not widest:
            return 0
        rows = self.batch.grid().rows(nodes[0].stream) * self.rows_share
        between = self.graph.hidden * self.numbers.stream
        return rows * (max(widest * self.numbers.compute, eager) + between) + unpacked

    def _assumptions(self) -> tuple[str, ...]:
        return (*self.graph.assumptions, *said(self.setup, self.how, self.graph))


def _moment(name: str, held: dict[str, float], now: dict[str, float]) -> Moment:
    both = {**held, **now}
    return Moment(name, {kind: both.get(kind, 0.0) for kind in KINDS})


def _both(cast: dict[str | None, float], loss: float) -> dict[str, float]:
    return {"cast weights": sum(cast.values()), "loss": loss}


def _after_layers(nodes: list[Node]) -> list[Node]:
    """Those that the backward pass meets before any layer."""
    last = max((at for at, node in enumerate(nodes) if node.layer is not None), default=-1)
    return nodes[last + 1 :]


__all__ = ["KINDS", "Kernels", "Memory", "Moment", "Parallel", "Setup", "step_memory"]
