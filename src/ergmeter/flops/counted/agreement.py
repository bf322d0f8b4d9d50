"""Do the two ways of telling a step's FLOPs agree, and if they do not, where?

The analytic count knows what a model is for; the counted one knows what its code computes. Where
both are right they are equal to the last digit. Where they differ it is news: an implementation
that computes every expert for every token, a scan whose reference code pads to whole chunks, or a
mistake in one of the two. A total does not say which, so they are compared part by part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.flops.analytic import PartFlops

if TYPE_CHECKING:
    from ergmeter.flops.analytic import Parts
    from ergmeter.flops.counted.op_totals import CountedStep

TOLERANCE_FRAC = 0.01
_NAMED = 3  # parts a sentence names

# A fused kernel computes scores and values in one go, so they can only be compared together.
_TOGETHER = {"attention scores": "attention", "attention values": "attention"}

_OUTPUTS = frozenset({"o_proj", "dense", "c_proj", "out_proj", "wo", "o"})
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_SCANNED = frozenset({"mamba", "mixer", "linear_attn"})
_SHARED = frozenset({"shared_expert", "shared_experts", "shared_mlp"})
_EXPERTS = frozenset({"experts", "block_sparse_moe"})
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})


@dataclass(frozen=True)
class Agreement:
    """Two counts of one step, by part: analytic, counted."""

    parts: dict[str, tuple[PartFlops, PartFlops]]

    def totals(self, *, without: frozenset[str] = frozenset()) -> tuple[PartFlops, PartFlops]:
        """Both counts of all parts, some left out."""
        kept = [both for part, both in self.parts.items() if part not in without]
        return (
            sum((analytic for analytic, _ in kept), PartFlops()),
            sum((counted for _, counted in kept), PartFlops()),
        )

    def relative(self, *, without: frozenset[str] = frozenset()) -> float:
        """How far the analytic model FLOPs are above the counted ones, as a share of these."""
        analytic, counted = self.totals(without=without)
        if not counted.model:
            return 0.0 if not analytic.model else float("inf")
        return analytic.model / counted.model - 1

    @property
    def differing(self) -> list[str]:
        """Parts whose difference is more than 1 % of the whole, the largest first."""
        _, counted = self.totals()
        apart = {part: abs(a.model - c.model) for part, (a, c) in self.parts.items()}
        return sorted(
            (part for part in apart if apart[part] > TOLERANCE_FRAC * counted.model),
            key=lambda part: -apart[part],
        )

    @property
    def sentence(self) -> str:
        """Whether they agree; and if not, where they differ."""
        analytic, counted = self.totals()
        relative = self.relative()
        if not self.differing:
            return f"analytic and counted FLOPs agree to {max(abs(relative), 1e-6):.2g}"
        side = "above" if relative > 0 else "below"
        where = ", ".join(
            f"{part} {self.parts[part][0].model:.4g} against {self.parts[part][1].model:.4g}"
            for part in self.differing[:_NAMED]
        )
        return (
            f"analytic is {100 * abs(relative):.1f} % {side} counted"
            f" ({analytic.model:.4g} against {counted.model:.4g} FLOPs); they differ in: {where}"
        )


def agreement(parts: Parts, counted: CountedStep) -> Agreement:
    """Put an analytic count and a counted one side by side.

    Counted attention is the whole rectangle, so the analytic one must have been asked for
    `pairs="computed"`.
    """
    found: dict[str, list[PartFlops]] = {}
    for part, cost in parts.items():
        both = found.setdefault(_TOGETHER.get(part, part), [PartFlops(), PartFlops()])
        both[0] += cost
    for (module, operator), cost in counted.rows.items():
        both = found.setdefault(part_of(module, operator), [PartFlops(), PartFlops()])
        both[1] += cost
    return Agreement({part: (a, c) for part, (a, c) in found.items()})


def part_of(module: str, operator: str = "") -> str:
    """The part of a model that a module of this name is, as the analytic engine calls them.

    What a mixing module computes itself, outside its layers, is the mixing: attention or a scan.
    """
    words = module.split(".")
    if "convolution" in operator:
        return "convolution"
    if any(word.startswith("lora_") for word in words):
        return "lora"
    if not any(word.isdigit() for word in words):
        return "head" if "head" in words[-1] or words[-1] == "embed_out" else "other"
    if _SHARED & set(words):
        return "shared expert"
    if _ROUTERS & set(words):
        return "router"
    if _EXPERTS & set(words):
        return "experts"
    return _in_a_block(words, operator)


def _in_a_block(words: list[str], operator: str) -> str:
    place = next((i for i, word in enumerate(words) if word in _SCANNED), None)
    if place is not None:
        # Mamba multiplies by the weights of its dt_proj itself: a matrix. States come in batches.
        is_own = place == len(words) - 1 and not operator.endswith(("::mm", "::addmm"))
        inside = "linear attention" if words[place] == "linear_attn" else "mamba"
        return "scan" if is_own else inside
    place = next((i for i, word in enumerate(words) if _ATTENTION.search(word)), None)
    if place is None:
        return "mlp"
    if place == len(words) - 1:
        return "attention"
    inner = [word for word in words[place + 1 :] if word not in ("base_layer", "default")]
    return "attention output" if inner and inner[-1] in _OUTPUTS else "attention qkv"
