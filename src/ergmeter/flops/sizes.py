"""The few numbers of a model that formulas are made of: N, M, L, H, Q, h, V and their kin.

The trap: one N for all. With or without the input embedding, tied or not, with all experts or the
active ones: each formula has its own, so the sums are kept apart and put together by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.flops.graph.graph import Attention, Linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.flops.graph.graph import Graph


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the formulas take, summed over a model: per token unless it says otherwise."""

    params: int  # N: held, but of the experts only the active ones
    params_held: int
    embedding: int  # the input embedding, where nothing else uses it
    embedding_held: int  # the input embedding, tied or not
    positions: int
    weights: int  # multiplied with each token: projections, feed-forward, head, router
    router: int
    head: int
    heads: int  # query heads, over all layers
    core: int  # heads x (query size + value size), over all layers: 2 L H Q where all are alike
    core_full: int  # of it, in layers without a window
    windows: tuple[tuple[int, int], ...]  # (window, heads x both sizes) of the others
    layers: int
    hidden: int
    vocab: int
    is_causal: bool = True  # every query sees what came before it, and nothing else

    def reach(self, seq_len: int, *, per_window: Callable[[int, int], float]) -> float:
        """Sum over layers of heads x both sizes x the keys a query is counted to see."""
        return self.core_full * seq_len + sum(
            per_window(window, seq_len) * size for window, size in self.windows
        )


def sizes(graph: Graph) -> Sizes:
    """The sums of a model. NotMeasurable where its parameters do not all meet every token."""
    streams = {node.stream for node in graph if node.params} - {"tokens", "logits"}
    if streams:
        raise NotMeasurable(
            "this formula takes every parameter for every token, and part of this model works on"
            f" something else ({', '.join(sorted(streams))}); use exact"
        )
    layers = {node.name: node.layer for node in graph}
    if any(node.layer and node.tied_to and layers[node.tied_to] != node.layer for node in graph):
        raise NotMeasurable(
            "this formula counts each parameter once, and here layers share theirs; use exact"
        )
    linears = [(node, node.work) for node in graph if isinstance(node.work, Linear)]
    cores = [node.work for node in graph if isinstance(node.work, Attention)]
    tied = {node.tied_to for node in graph if node.tied_to}
    per_head = [(core, core.heads * (core.qk_dim + core.v_dim)) for core in cores]
    windowed = tuple(
        (core.window or core.chunk or 0, size)
        for core, size in per_head
        if core.window or core.chunk
    )
    return Sizes(
        params=graph.params_active,
        params_held=graph.params,
        embedding=sum(
            node.params for node in graph if node.role == "embedding" and node.name not in tied
        ),
        embedding_held=graph.params_of("embedding"),
        positions=graph.params_of("positions"),
        weights=sum(work.weights for _, work in linears),
        router=sum(work.weights for node, work in linears if node.part == "router"),
        head=sum(work.weights for node, work in linears if node.role == "head"),
        heads=sum(core.heads for core in cores),
        core=sum(size for _, size in per_head),
        core_full=sum(size for core, size in per_head if not (core.window or core.chunk)),
        windows=windowed,
        layers=graph.layers,
        hidden=graph.hidden,
        vocab=graph.vocab,
        is_causal=all(core.mask == "causal" for core in cores),
    )
