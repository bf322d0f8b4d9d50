"""Totals of a counted step by module, operator and direction, compared with the analytic count.

This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from ergmeter.flops.analytic import PartFlops, Parts

Key = TypeVar("Key")


def summed(costs: Iterable[tuple[Key, PartFlops]]) -> dict[Key, PartFlops]:
    """Return FLOPs by key; those with equal keys are added."""
    totals: dict[Key, PartFlops] = {}
    for key, cost in costs:
        totals[key] = totals.get(key, PartFlops()) + cost
    return totals


@dataclass(frozen=True)
class CountedStep:
    """The FLOPs of one step as counted by running it. Attention has all pairs, masked ones too."""

    rows: dict[tuple[str, str], PartFlops]  # by the innermost module and the operator
    params: int = 0
    params_trained: int = 0
    calls_not_counted: dict[str, int] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    # FLOPs of masked pairs, and of scores that fused attention recomputes.
    spared: PartFlops = field(default_factory=PartFlops)

    @cached_property
    def total(self) -> PartFlops:
        """All FLOPs; `recomputed` is by checkpointing and by fused attention (its scores)."""
        return sum(self.rows.values(), PartFlops())

    @property
    def needed(self) -> PartFlops:
        """The total without masked pairs and without fused attention's recomputation.

        Masked pairs are known if the kernel gets `is_causal` or the module has it. Eager attention
        counts with all pairs.
        """
        less = self.spared
        return self.total + PartFlops(-less.forward, -less.backward, -less.recomputed)

    @property
    def operators(self) -> dict[str, PartFlops]:
        """FLOPs by operator."""
        return summed((operator, cost) for (_, operator), cost in self.rows.items())

    @property
    def own(self) -> dict[str, PartFlops]:
        """FLOPs by module, without those of its child modules."""
        return summed((module, cost) for (module, _), cost in self.rows.items())

    def modules(self, *, depth: int | None = None) -> dict[str, PartFlops]:
        """Return FLOPs by module, child modules included; the model itself is "".

        `depth`: only modules whose names have at most this many parts.
        """
        parts = [(module.split(".") if module else [], cost) for module, cost in self.own.items()]
        return summed(
            (".".join(names[:length]), cost)
            for names, cost in parts
            for length in range(len(names) + 1)
            if depth is None or length <= depth
        )

    @property
    def not_counted(self) -> tuple[str, ...]:
        """A line for each operator that looks like a product and has no rule."""
        return tuple(
            f"not counted: {name} x {calls}" for name, calls in self.calls_not_counted.items()
        )


@dataclass(frozen=True)
class CallFlops:
    """FLOPs of one module call; the `pairs_` fields are the part of attention pairs in them."""

    forward: float = 0.0
    backward: float = 0.0
    recomputed: float = 0.0
    pairs_forward: float = 0.0
    pairs_backward: float = 0.0
    not_counted: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    error: str = ""  # why there are no FLOPs
    pairs_masked: float = 0.0  # FLOPs of pairs that a causal mask hides: left out


# Agreement of the analytic and the counted FLOPs, part by part.
#
# The analytic count follows the model, the counted one its code. Where both are right they are
# equal to the last digit. They differ where an implementation computes every expert for every
# token, where a scan's reference code pads to full chunks, or where one of the two has a fault.

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
    """The (analytic, counted) FLOPs of one step, by part."""

    parts: dict[str, tuple[PartFlops, PartFlops]]

    def totals(self, *, without: frozenset[str] = frozenset()) -> tuple[PartFlops, PartFlops]:
        """Return the total of both counts, without some parts."""
        compared = [both for part, both in self.parts.items() if part not in without]
        return (
            sum((analytic for analytic, _ in compared), PartFlops()),
            sum((counted for _, counted in compared), PartFlops()),
        )

    def relative(self, *, without: frozenset[str] = frozenset()) -> float:
        """Return analytic minus counted model FLOPs, as a share of the counted ones."""
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
        """One sentence: that they agree, or in which parts they differ."""
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


@dataclass(frozen=True, slots=True)
class AnalyticComparison:
    """The analytic count of the same step, or the reason why there is none."""

    sentence: str
    exact_flops: float | None = None  # the model FLOPs that `--engine analytic` leads with


def agreement(parts: Parts, counted: CountedStep) -> Agreement:
    """Compare an analytic count with a counted one, part by part.

    Counted attention has all pairs, so the analytic count must be made with `pairs="computed"`.
    """
    analytic = summed((_TOGETHER.get(part, part), cost) for part, cost in parts.items())
    run = summed((part_of(*names), cost) for names, cost in counted.rows.items())
    none = PartFlops()
    return Agreement(
        {part: (analytic.get(part, none), run.get(part, none)) for part in {**analytic, **run}}
    )


def part_of(module: str, operator: str = "") -> str:
    """Return the part, by the analytic engine's names, that a module's FLOPs belong to.

    Products that an attention or Mamba module computes itself are the attention core or the scan.
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
    index = next((i for i, word in enumerate(words) if word in _SCANNED), None)
    if index is not None:
        # Mamba multiplies by the weights of its dt_proj itself: a matrix. States come in batches.
        is_own = index == len(words) - 1 and not operator.endswith(("::mm", "::addmm"))
        inside = "linear attention" if words[index] == "linear_attn" else "mamba"
        return "scan" if is_own else inside
    index = next((i for i, word in enumerate(words) if _ATTENTION.search(word)), None)
    if index is None:
        return "mlp"
    if index == len(words) - 1:
        return "attention"
    inner = [word for word in words[index + 1 :] if word not in ("base_layer", "default")]
    return "attention output" if inner and inner[-1] in _OUTPUTS else "attention qkv"
