"""What was counted of one step: by module, by operator, by direction. Knows nothing of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ergmeter.flops.analytic import PartFlops


@dataclass(frozen=True)
class CountedStep:
    """The FLOPs of one step as they were counted. Attention is the whole rectangle of scores."""

    rows: dict[tuple[str, str], PartFlops]  # by the innermost module and the operator
    params: int = 0
    params_trained: int = 0
    calls_not_counted: dict[str, int] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    # Of pairs that a mask keeps apart, and of scores that are made again.
    spared: PartFlops = field(default_factory=PartFlops)

    @cached_property
    def total(self) -> PartFlops:
        """All of it."""
        return sum(self.rows.values(), PartFlops())

    @property
    def forward(self) -> float:
        """The way there."""
        return self.total.forward

    @property
    def backward(self) -> float:
        """The gradients."""
        return self.total.backward

    @property
    def recomputed(self) -> float:
        """What was computed once more: checkpointing, and fused attention's own scores."""
        return self.total.recomputed

    @property
    def model(self) -> float:
        """What the mathematics needs: forward and backward."""
        return self.total.model

    @property
    def hardware(self) -> float:
        """What is computed."""
        return self.total.hardware

    @property
    def needed(self) -> PartFlops:
        """Without pairs that a causal mask keeps apart and what fused attention makes again.

        Where a kernel was told of the mask, or its module says that it is causal; attention that
        is written out as products counts whole.
        """
        whole, less = self.total, self.spared
        return PartFlops(
            whole.forward - less.forward,
            whole.backward - less.backward,
            whole.recomputed - less.recomputed,
        )

    @property
    def operators(self) -> dict[str, PartFlops]:
        """FLOPs by operator."""
        found: dict[str, PartFlops] = {}
        for (_, operator), cost in self.rows.items():
            found[operator] = found.get(operator, PartFlops()) + cost
        return found

    @property
    def own(self) -> dict[str, PartFlops]:
        """FLOPs by the module that computed them itself, its children's left out."""
        found: dict[str, PartFlops] = {}
        for (module, _), cost in self.rows.items():
            found[module] = found.get(module, PartFlops()) + cost
        return found

    def modules(self, *, depth: int | None = None) -> dict[str, PartFlops]:
        """FLOPs by module, each with all that is inside it; the model itself is "".

        With a `depth`, only modules whose names have at most so many parts.
        """
        found: dict[str, PartFlops] = {}
        for module, cost in self.own.items():
            parts = module.split(".") if module else []
            for length in range(len(parts) + 1):
                if depth is None or length <= depth:
                    name = ".".join(parts[:length])
                    found[name] = found.get(name, PartFlops()) + cost
        return found

    @property
    def not_counted(self) -> tuple[str, ...]:
        """What looked like a product and has no rule, in words."""
        return tuple(
            f"not counted: {name} x {calls}" for name, calls in self.calls_not_counted.items()
        )


@dataclass(frozen=True)
class CallFlops:
    """What one call costs; FLOPs of pairs of positions (attention) are part of them."""

    forward: float = 0.0
    backward: float = 0.0
    recomputed: float = 0.0
    pairs_forward: float = 0.0
    pairs_backward: float = 0.0
    not_counted: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    error: str = ""  # why there are no FLOPs
    pairs_masked: float = 0.0  # FLOPs of pairs that a causal mask hides: left out
