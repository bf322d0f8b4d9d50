"""Traits of a family's code that decide what autograd saves and that no size shows.

Two models of the same sizes can save different tensors. A cap on the scores saves a second matrix
of scores. A norm that subtracts its mean twice saves two copies in 32 bits. An activation written
in Python saves five tensors instead of one. Each was read off torch's saved-tensor hooks for
transformers 5.22 on a CPU, and 5.17 on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ergmeter.flops.config import ModelConfig
    from ergmeter.flops.graph.graph import Graph

CAPPED_SCORES = "capped scores"
CAPPED_LOGITS = "capped logits"
SPELLED_OUT = "an activation spelled out"
KEEPS_RESULT = "an activation that keeps its result"

# They multiply by the scale before they round to 16 bits, so what is scaled is kept in 32.
_SCALED_IN_32_BITS = ("gemma", "olmo2", "cohere", "gpt_oss")
# They take the mean off twice, once for the variance, and keep both in 32 bits.
_CENTRED = ("cohere",)
# They turn a part of each head and join it with the rest, so queries, and with them attention's
# result, are laid out in another order than the next matrix wants, which copies it.
_TURNED_IN_PART = (
    *("gpt_neox", "phi", "phi3", "stablelm", "glm", "glm4", "glm4_moe"),
    *("deepseek_v2", "deepseek_v3", "kimi_k2"),
)
# Elsewhere a norm without parameters stands for none at all.
_NORMS_WITHOUT_PARAMETERS = ("olmo", "nanochat")
# Written out, their softmax is in the scores' own type, and one tensor serves twice.
_SOFTMAX_AS_IT_COMES = ("gpt2", "gpt_oss", "falcon")
# Written out, they multiply queries and keys in 32 bits.
_SCORES_IN_32_BITS = ("gptj", "gpt_neo")
# transformers has no sdpa for them.
_WITHOUT_SDPA = ("bloom", "gptj", "gpt_neo", "mpt")
# They hand a mask to sdpa whether it is needed or not, and copy keys and values for each head.
_MASKED_ALWAYS = ("falcon",)
# Their norms are torch's LayerNorm although they have no bias.
_LAYER_NORMS = ("mpt", "dbrx")
# Their routers multiply in 32 bits, from a copy of what they are given.
_ROUTED_IN_32_BITS = ("deepseek_v2", "deepseek_v3", "glm4_moe", "kimi_k2")
# Extra keys that are no token: transformers has no fused kernel for them.
_WITH_SINKS = ("gpt_oss",)
# Clamped before and after: gate, up, both clamped, the sigmoid, and what it makes of the gate.
_CLAMPED = ("gpt_oss",)
# Activations that transformers writes in Python: 0.5 x (1 + tanh(...)) and its like. The others
# are one operation of torch.
_IN_PYTHON = ("gelu_new", "gelu_accurate", "gelu_python_tanh")
_DEFAULT_ACTIVATIONS = {**dict.fromkeys(("gpt2", "phi", "gptj"), "gelu_new"), "opt": "relu"}
# The derivative follows from the result, so torch keeps that and not what the activation was given.
_FROM_RESULT = ("relu",)
_DEFAULT_CAPS = {"gemma2": (True, True)}  # of scores, of logits, where a config does not say


@dataclass(frozen=True, slots=True)
class ActivationTraits:
    """Traits of a model's code beyond its matrices."""

    scales_in_32_bits: bool
    centres_twice: bool
    joins_heads: bool
    norms_bare: bool
    softmax_as_it_comes: bool
    scores_in_32_bits: bool
    is_masked_always: bool
    is_layer_norm: bool
    routes_in_32_bits: bool
    has_no_sdpa: bool
    has_sinks: bool
    caps_scores: bool
    caps_logits: bool
    keeps_result: bool  # of the activation, in place of what it is given
    steps: int  # tensors that an activation keeps beyond what it is given

    @property
    def has_no_fused_attention(self) -> bool:
        """True if transformers falls back to attention written out where sdpa is asked for."""
        return self.caps_scores or self.has_sinks or self.has_no_sdpa


def code_traits(graph: Graph) -> ActivationTraits:
    """The traits of this model's code."""
    family = graph.family
    return ActivationTraits(
        scales_in_32_bits=family.startswith(_SCALED_IN_32_BITS),
        centres_twice=family.startswith(_CENTRED),
        joins_heads=family in _TURNED_IN_PART,
        norms_bare=family in _NORMS_WITHOUT_PARAMETERS,
        softmax_as_it_comes=family in _SOFTMAX_AS_IT_COMES,
        scores_in_32_bits=family in _SCORES_IN_32_BITS,
        is_masked_always=family in _MASKED_ALWAYS,
        is_layer_norm=family in _LAYER_NORMS,
        has_no_sdpa=family in _WITHOUT_SDPA,
        routes_in_32_bits=family in _ROUTED_IN_32_BITS,
        has_sinks=family in _WITH_SINKS,
        caps_scores=CAPPED_SCORES in graph.traits,
        caps_logits=CAPPED_LOGITS in graph.traits,
        keeps_result=KEEPS_RESULT in graph.traits,
        steps=3 if SPELLED_OUT in graph.traits or family in _CLAMPED else 0,
    )


def traits(config: ModelConfig) -> frozenset[str]:
    """The names of traits that follow from a configuration's fields."""
    inner = config.raw("text_config")
    fields = inner if isinstance(inner, dict) else config.fields
    kind = str(fields.get("model_type") or config.model_type)
    scores, logits = _DEFAULT_CAPS.get(kind, (False, False))
    matching = set()
    if fields.get("attn_logit_softcapping", scores):
        matching.add(CAPPED_SCORES)
    if fields.get("final_logit_softcapping", logits):
        matching.add(CAPPED_LOGITS)
    names = ("hidden_activation", "activation_function", "hidden_act")
    used = next((fields[name] for name in names if fields.get(name)), None)
    activation = used or _DEFAULT_ACTIVATIONS.get(kind)
    if activation in _IN_PYTHON:
        matching.add(SPELLED_OUT)
    if activation in _FROM_RESULT:
        matching.add(KEEPS_RESULT)
    return frozenset(matching)
