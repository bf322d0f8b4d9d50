"""Conventions for counting a training step's FLOPs, by name, each with its definition and source.

For Llama-3-8B at 8192 tokens the conventions in use differ by 20 %, and papers rarely name theirs.
A report shows the chosen convention and how much the others differ from it.

All but `exact` are formulas of other projects, kept with their faults to compare with their
numbers. They count full sequences, not documents. If a formula does not apply to a model (it needs
a 4 h feed-forward, a causal mask, or every weight trained), the reason is reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ergmeter.atomic_write import toml_beside
from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.flops.batch import Batch
from ergmeter.flops.graph.graph import Graph

# The sizes of a model that formulas use: N, M, L, H, Q, h, V and others.
#
# Each formula has an N of its own: with or without the input embedding, tied or not, with all
# experts or the active ones. So the sums are stored apart and added by name.


@dataclass(frozen=True, slots=True)
class Sizes:
    """Inputs of the formulas, summed over a model; per token unless noted."""

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
        """Return the sum over layers of heads x (qk + v size) x keys per query.

        `per_window(window, seq_len)`: the keys per query that a convention counts in a window.
        """
        return self.core_full * seq_len + sum(
            per_window(window, seq_len) * size for window, size in self.windows
        )


def sizes(graph: Graph) -> Sizes:
    """Return a model's sizes. NotMeasurable if not every parameter is used for every token."""
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
    linears, cores = graph.linears(), [work for _, work in graph.attentions()]
    tied = {node.tied_to for node in graph if node.tied_to}
    per_head = [(core, core.heads * (core.qk_dim + core.v_dim)) for core in cores]
    spans = [(core.window or core.chunk or 0, size) for core, size in per_head]
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
        core_full=sum(size for window, size in spans if not window),
        windows=tuple((window, size) for window, size in spans if window),
        layers=graph.layers,
        hidden=graph.hidden,
        vocab=graph.vocab,
        is_causal=all(core.mask == "causal" for core in cores),
    )


# The conventions.

EXACT = "exact"

_TEXTS = toml_beside(__file__, "conventions.toml")
LETTERS: dict[str, str] = _TEXTS["letters"]
"""Meanings of the letters in the formulas."""


PerToken: TypeAlias = "Callable[[Sizes, int], float]"


def _gpt(model_sizes: Sizes) -> str | None:
    """Return why a model is not a GPT with 12 h^2 weights per layer; None if it is one."""
    each = (model_sizes.weights - model_sizes.head) / (model_sizes.layers * model_sizes.hidden**2)
    if each == _GPT_WEIGHTS and model_sizes.core == 2 * model_sizes.layers * model_sizes.hidden:
        return None
    return (
        "it is for layers of 12 h^2 weights (as many key-value heads as heads, a feed-forward of"
        f" 4 h without a gate); these have {each:.3g} h^2"
    )


def _heads_are_hidden(model_sizes: Sizes) -> str | None:
    """Return why the heads together are not as wide as the hidden size; None if they are."""
    if model_sizes.core == 2 * model_sizes.layers * model_sizes.hidden:
        return None
    return "it takes heads as wide together as the hidden size, and here they are not"


_GPT_WEIGHTS = 12
# Recomputed: forward 2, the inputs' gradients 2, and forward once more.
_LORA: dict[str, Any] = {"recomputed": 6 / 4, "is_for_lora": True}


@dataclass(frozen=True, slots=True)
class Convention:
    """One way to count the FLOPs per token of a training step."""

    name: str
    weights: Callable[[Sizes], float] | None  # FLOPs of a token's products; None: of the graph
    attention: PerToken
    formula: str
    definition: str
    source: str
    only_for: str = ""  # what it is made for, in words
    recomputed: float = 4 / 3  # hardware FLOPs over model FLOPs, where layers are computed twice
    is_head_recomputed: bool = True
    is_for_lora: bool = False
    halves: bool = False  # attention, because its mask is causal
    # The reason why it does not apply to a model, if so.
    made_for: Callable[[Sizes], str | None] = lambda _sizes: None

    @property
    def letters(self) -> dict[str, str]:
        """Meanings of the letters in its formula."""
        letters = re.findall(r"[A-Za-z]", self.formula) if self.weights else []
        return {letter: LETTERS[letter] for letter in LETTERS if letter in letters}

    def undefined(self, model_sizes: Sizes) -> str | None:
        """Return why the convention does not apply to a model, or None."""
        if self.halves and not model_sizes.is_causal:
            return "it halves attention for a causal mask, and here every token sees every other"
        return self.made_for(model_sizes)

    def model(self, model_sizes: Sizes, batch: Batch) -> float:
        """Return the model FLOPs of a training step."""
        assert self.weights is not None
        attention = self.attention(model_sizes, batch.seq_len)
        return (self.weights(model_sizes) + attention) * batch.tokens

    def hardware(self, model_sizes: Sizes, batch: Batch) -> float:
        """Return the hardware FLOPs of a training step with full recomputation."""
        once = 0 if self.is_head_recomputed else 6 * model_sizes.head * batch.tokens
        return (self.model(model_sizes, batch) - once) * self.recomputed + once

    def core_again(self, model_sizes: Sizes, batch: Batch) -> float:
        """Return the FLOPs of recomputed attention, as this convention counts attention."""
        return self.attention(model_sizes, batch.seq_len) * (self.recomputed - 1) * batch.tokens


def _none(_sizes: Sizes, _seq_len: int) -> float:
    return 0


def _ignored(_window: int, seq_len: int) -> float:
    return seq_len


def _twice_mean(window: int, seq_len: int) -> float:
    """Return twice the exact average of keys per query in a window; seq_len if it covers all."""
    if window >= seq_len:
        return seq_len
    return 2 * window - window * (window - 1) / seq_len


def _attention(times: float, per_window: Callable[[int, int], float]) -> PerToken:
    """Return an attention term: `times` x heads x (qk + v size) x keys per query.

    6 counts all pairs, forward and backward; 3 counts half of them.
    """
    return lambda s, n: times * s.reach(n, per_window=per_window)


_ALL_PAIRS = _attention(6, _ignored)
_ALL_PAIRS_IN_WINDOWS = _attention(6, min)
_HALF_THE_PAIRS = _attention(3, _ignored)


def _with_softmax(operations: int) -> PerToken:
    """Return an attention term with all pairs, and `operations` per pair for the softmax."""
    return lambda s, n: _ALL_PAIRS(s, n) + operations * s.heads * n


def _multiplied(s: Sizes) -> float:
    return 6 * (s.weights - s.router)


def _frozen(s: Sizes) -> float:
    return 4 * (s.weights - s.router)


def _multiplied_and_looked_up(s: Sizes) -> float:
    return 6 * (s.weights + s.vocab * s.hidden)


def _convention(
    name: str,
    weights: Callable[[Sizes], float] | None,
    attention: PerToken = _none,
    **more: Any,  # noqa: ANN401  its other fields
) -> Convention:
    """Return a convention with its texts from conventions.toml."""
    return Convention(name, weights, attention, **_TEXTS["convention"][name], **more)


_ALL = (
    _convention(EXACT, None),
    _convention("palm", lambda s: 6 * s.params, _ALL_PAIRS_IN_WINDOWS),
    _convention("megatron", _multiplied, _HALF_THE_PAIRS, halves=True),
    _convention("megatron-2024", _multiplied, _ALL_PAIRS),
    _convention(
        "megatron-2021",
        lambda s: 72 * s.layers * s.hidden**2 + 6 * s.vocab * s.hidden,
        lambda s, n: 12 * s.layers * s.hidden * n,
        is_head_recomputed=False,
        made_for=_gpt,
    ),
    _convention("bridge", _multiplied, _attention(3, _twice_mean), halves=True),
    _convention(
        "torchtitan", lambda s: 6 * (s.params - s.embedding - s.positions), _ALL_PAIRS_IN_WINDOWS
    ),
    _convention(
        "mosaicml",
        lambda s: 6 * s.params,
        lambda s, n: 12 * s.layers * s.hidden * n,
        made_for=_heads_are_hidden,
    ),
    _convention("nanogpt", lambda s: 6 * (s.params - s.positions), _ALL_PAIRS),
    _convention("maxtext", lambda s: 6 * s.weights, _attention(3, min), halves=True),
    _convention("maxtext-2024", lambda s: 6 * s.weights, _ALL_PAIRS),
    _convention("verl", _multiplied_and_looked_up, _attention(3, min), halves=True),
    _convention("hf-6nd", lambda s: 6 * (s.params_held - s.embedding_held - s.positions)),
    _convention("6nd", lambda s: 6 * s.params),
    _convention("neuron", _multiplied_and_looked_up, _with_softmax(18)),
    _convention("chinchilla", _multiplied_and_looked_up, _with_softmax(9)),
    _convention("bridge-lora", _frozen, **_LORA),
    _convention("automodel-lora", _frozen, _attention(2, _twice_mean), **_LORA, halves=True),
)

CONVENTIONS: dict[str, Convention] = {convention.name: convention for convention in _ALL}


def convention(name: str) -> Convention:
    """Return the convention of this name. Raises UsageError, which lists the names."""
    known_convention = CONVENTIONS.get(name.lower())
    if known_convention is None:
        raise UsageError(f"no convention {name!r}; there are {', '.join(CONVENTIONS)}")
    return known_convention
