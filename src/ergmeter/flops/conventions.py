"""The ways in which people count a training step, by name: each with its definition and source.

The trap: "our MFU is 45 %". Under which count? For Llama-3-8B at 8192 tokens the conventions in use
are 20 % apart, and none of them is written beside the number. Here each is a function with a name;
a report shows the one that was chosen and how far the others are from it.

All but `exact` are other people's formulas, kept as they are, with their faults: they are for
comparing with their figures. They know a grid of sequences, not documents. A formula is kept out of
what it was not made for (a 4 h feed-forward, a causal mask, every weight trained), with the reason:
there it says something of another model, and a spread that holds it is wider than the disagreement.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ergmeter.errors import UsageError

if TYPE_CHECKING:
    from ergmeter.flops.batch import Batch
    from ergmeter.flops.sizes import Sizes

EXACT = "exact"

LETTERS = {
    "N": "parameters",
    "M": "weights that are multiplied",
    "L": "layers",
    "H": "query heads",
    "Q": "size of a head",
    "h": "hidden size",
    "V": "vocabulary",
    "E": "entries of the input embedding",
    "P": "learned positions",
    "T": "tokens of a sequence",
}
"""What the letters of the formulas stand for."""


PerToken: TypeAlias = "Callable[[Sizes, int], float]"


def _any(_found: Sizes) -> str | None:
    return None


def _no_attention(_found: Sizes, _seq_len: int) -> float:
    return 0


def _gpt(found: Sizes) -> str | None:
    """The GPT of 2021: 12 h^2 weights a layer, keys of every head, a feed-forward of 4 h."""
    each = (found.weights - found.head) / (found.layers * found.hidden**2)
    if each == _GPT_WEIGHTS and found.core == 2 * found.layers * found.hidden:
        return None
    return (
        "it is for layers of 12 h^2 weights (as many key-value heads as heads, a feed-forward of"
        f" 4 h without a gate); these have {each:.3g} h^2"
    )


def _heads_are_hidden(found: Sizes) -> str | None:
    """H Q = h in every layer."""
    if found.core == 2 * found.layers * found.hidden:
        return None
    return "it takes heads as wide together as the hidden size, and here they are not"


_GPT_WEIGHTS = 12
_RECOMPUTED_LORA = 6 / 4  # forward 2, the inputs' gradients 2, and forward once more


@dataclass(frozen=True, slots=True)
class Convention:
    """One way to count, per token of a training step of sequences of `seq_len`."""

    name: str
    formula: str
    definition: str
    source: str
    weights: Callable[[Sizes], float] | None  # FLOPs of a token's products; None: of the graph
    attention: PerToken = _no_attention
    recomputed: float = 4 / 3  # hardware FLOPs over model FLOPs, where layers are computed twice
    is_head_recomputed: bool = True
    is_for_lora: bool = False
    halves: bool = False  # attention, because its mask is causal
    made_for: Callable[[Sizes], str | None] = _any  # why it says nothing of a model, if so
    only_for: str = ""  # the same in words

    @property
    def letters(self) -> dict[str, str]:
        """What the letters of its formula stand for."""
        found = re.findall(r"[A-Za-z]", self.formula) if self.weights else []
        return {letter: LETTERS[letter] for letter in LETTERS if letter in found}

    def undefined(self, found: Sizes) -> str | None:
        """Why it has nothing to say of a model, or None."""
        if self.halves and not found.is_causal:
            return "it halves attention for a causal mask, and here every token sees every other"
        return self.made_for(found)

    def model(self, found: Sizes, batch: Batch) -> float:
        """Model FLOPs of a training step."""
        assert self.weights is not None
        return (self.weights(found) + self.attention(found, batch.seq_len)) * batch.tokens

    def hardware(self, found: Sizes, batch: Batch) -> float:
        """The same with every layer computed a second time."""
        once = 0 if self.is_head_recomputed else 6 * found.head * batch.tokens
        return (self.model(found, batch) - once) * self.recomputed + once

    def core_again(self, found: Sizes, batch: Batch) -> float:
        """Attention computed a second time, counted as this convention counts attention."""
        return self.attention(found, batch.seq_len) * (self.recomputed - 1) * batch.tokens


def _capped(window: int, seq_len: int) -> float:
    return min(window, seq_len)


def _ignored(_window: int, seq_len: int) -> float:
    return seq_len


def _twice_mean(window: int, seq_len: int) -> float:
    """Twice the keys an average query sees through a window, exactly; S where it sees all."""
    if window >= seq_len:
        return seq_len
    return 2 * window - window * (window - 1) / seq_len


def _attention(times: float, per_window: Callable[[int, int], float]) -> PerToken:
    """The attention term: so many times heads x both sizes x the keys a query is counted to see.

    6 counts every pair and 3 half of them, forward and backward.
    """
    return lambda s, n: times * s.reach(n, per_window=per_window)


_ALL_PAIRS = _attention(6, _ignored)
_ALL_PAIRS_IN_WINDOWS = _attention(6, _capped)
_HALF_THE_PAIRS = _attention(3, _ignored)


def _with_softmax(operations: int) -> PerToken:
    """Every pair, and so many operations more on each."""
    return lambda s, n: _ALL_PAIRS(s, n) + operations * s.heads * n


def _multiplied(s: Sizes) -> float:
    return 6 * (s.weights - s.router)


def _multiplied_and_looked_up(s: Sizes) -> float:
    return 6 * (s.weights + s.vocab * s.hidden)


_ALL = (
    Convention(
        EXACT,
        "matmuls of the graph",
        "Every matrix product the step needs and none it does not: pairs the mask lets meet, and of"
        " the backward products those whose gradient somebody asks for (frozen weights, adapters,"
        " layers below the lowest trained one). Documents of a packed or padded batch one by one."
        " Convolutions and state-space scans included.",
        "derived part by part in docs/flops.md",
        None,
    ),
    Convention(
        "palm",
        "6 N + 12 LHQT",
        "N is every parameter, a tied one once, of experts the active ones; attention not halved"
        " for its causal mask, a window counted as the keys it shows.",
        "PaLM, arXiv 2204.02311, appendix B",
        lambda s: 6 * s.params,
        _ALL_PAIRS_IN_WINDOWS,
    ),
    Convention(
        "megatron",
        "6 M + 6 LHQT",
        "M is every weight that is multiplied, the head once, the input embedding and the router"
        " not; attention halved; windows not looked at. (Megatron pads the vocabulary; give it"
        " padded.)",
        "Megatron-LM training.py since March 2025",
        _multiplied,
        _HALF_THE_PAIRS,
        halves=True,
    ),
    Convention(
        "megatron-2024",
        "6 M + 12 LHQT",
        "The same before the halving.",
        "Megatron-LM training.py, end of 2023 to March 2025",
        _multiplied,
        _ALL_PAIRS,
    ),
    Convention(
        "megatron-2021",
        "72 Lh^2 (1 + T/6h + V/12Lh)",
        "A GPT with a feed-forward of 4 h, attention not halved. The paper prints it with every"
        " layer recomputed, 96 Lh^2 (1 + T/6h + V/16Lh): hardware FLOPs, and its 52 % an HFU.",
        "Narayanan et al. 2021, arXiv 2104.04473, equation 3",
        lambda s: 72 * s.layers * s.hidden**2 + 6 * s.vocab * s.hidden,
        lambda s, n: 12 * s.layers * s.hidden * n,
        is_head_recomputed=False,
        made_for=_gpt,
        only_for="layers of 12 h^2 weights: an ungated feed-forward of 4 h, keys of each head",
    ),
    Convention(
        "bridge",
        "6 M + 6 LHQT",
        "As megatron, with a window's pairs counted exactly.",
        "Megatron-Bridge flop_utils.py since 2026; AutoModel for most families",
        _multiplied,
        _attention(3, _twice_mean),
        halves=True,
    ),
    Convention(
        "torchtitan",
        "6 (N - E) + 12 LHQT",
        "N without the input embedding, unless the head is tied to it, of experts the active"
        " ones; attention not halved, a window counted as the keys it shows. (Before 2026 a tied"
        " head was left out as well.)",
        "torchtitan models/utils.py, 2026",
        lambda s: 6 * (s.params - s.embedding - s.positions),
        _ALL_PAIRS_IN_WINDOWS,
    ),
    Convention(
        "mosaicml",
        "6 N + 12 LhT",
        "N is every parameter, tied and learned positions included, of experts the active"
        " ones; h is the hidden size. Its HFU is 4/3 of it where activations are"
        " recomputed.",
        "LLM-Foundry scripts/train/benchmarking/collect_results.py; fms-fsdp uses the same",
        lambda s: 6 * s.params,
        lambda s, n: 12 * s.layers * s.hidden * n,
        made_for=_heads_are_hidden,
        only_for="heads that are together as wide as the hidden size",
    ),
    Convention(
        "nanogpt",
        "6 (N - P) + 12 LHQT",
        "N without the learned positions, of experts the active ones; attention not halved.",
        "nanoGPT model.py, estimate_mfu",
        lambda s: 6 * (s.params - s.positions),
        _ALL_PAIRS,
    ),
    Convention(
        "maxtext",
        "6 M + 6 LHQT",
        "M with the router; attention halved, a window as well.",
        "MaxText maxtext_utils.py since July 2025",
        lambda s: 6 * s.weights,
        _attention(3, _capped),
        halves=True,
    ),
    Convention(
        "maxtext-2024",
        "6 M + 12 LHQT",
        "M with the router; attention not halved.",
        "MaxText maxtext_utils.py, May 2024 to July 2025",
        lambda s: 6 * s.weights,
        _ALL_PAIRS,
    ),
    Convention(
        "verl",
        "6 (M + Vh) + 6 LHQT",
        "The input embedding counted as a product; attention halved.",
        "verl utils/flops_counter.py since January 2026",
        _multiplied_and_looked_up,
        _attention(3, _capped),
        halves=True,
    ),
    Convention(
        "hf-6nd",
        "6 N'",
        "N' is every parameter but the input embeddings, and so without a tied head; all experts;"
        " no attention term.",
        "transformers floating_point_ops, which total_flos adds up",
        lambda s: 6 * (s.params_held - s.embedding_held - s.positions),
    ),
    Convention(
        "6nd",
        "6 N",
        "N is every parameter, of experts the active ones; no attention term.",
        "Kaplan et al. 2020, arXiv 2001.08361, with all parameters as N",
        lambda s: 6 * s.params,
    ),
    Convention(
        "neuron",
        "6 (M + Vh) + 12 LHQT + 18 LHT",
        "The input embedding counted as a product and the softmax as 6 operations a pair;"
        " attention not halved.",
        "neuronx-distributed-training llama_perf_estimate.py",
        _multiplied_and_looked_up,
        _with_softmax(18),
    ),
    Convention(
        "chinchilla",
        "6 (M + Vh) + 12 LHQT + 9 LHT",
        "The input embedding counted as a product and the softmax as 3 operations a pair;"
        " attention not halved.",
        "Hoffmann et al. 2022, arXiv 2203.15556, appendix F",
        _multiplied_and_looked_up,
        _with_softmax(9),
    ),
    Convention(
        "bridge-lora",
        "4 M",
        "For LoRA: forward and the inputs' gradients of frozen weights; attention and adapters left"
        " out.",
        "Megatron-Bridge performance summary, LoRA rows of 2026",
        lambda s: 4 * (s.weights - s.router),
        recomputed=_RECOMPUTED_LORA,
        is_for_lora=True,
    ),
    Convention(
        "automodel-lora",
        "2/3 (6 M + 6 LHQT)",
        "For LoRA: two thirds of everything, the attention core included.",
        "NeMo AutoModel recipes/llm/benchmark.py since November 2025",
        lambda s: 4 * (s.weights - s.router),
        _attention(2, _twice_mean),
        recomputed=_RECOMPUTED_LORA,
        is_for_lora=True,
        halves=True,
    ),
)

CONVENTIONS: dict[str, Convention] = {convention.name: convention for convention in _ALL}


def convention(name: str) -> Convention:
    """The convention of that name, or UsageError with those there are."""
    found = CONVENTIONS.get(name.lower())
    if found is None:
        raise UsageError(f"no convention {name!r}; there are {', '.join(CONVENTIONS)}")
    return found
