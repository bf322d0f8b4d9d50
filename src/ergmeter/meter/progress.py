"""How far this rank is, of a budget its user declared in steps, tokens or FLOPs.

The trap: a global budget set against one rank's count. A rank knows what it has done and asks no
other (a collective would hold up the training), so a budget is this rank's too. The other way would
be to multiply by WORLD_SIZE; but ranks that share a batch, in tensor or pipeline parallelism, would
have their tokens counted several times.
"""

from __future__ import annotations

from dataclasses import dataclass

from ergmeter.errors import UsageError


@dataclass(frozen=True, slots=True)
class Budget:
    """What this rank is meant to reach: exactly one of the three.

    Of several ranks with data of their own each has its share: `tokens=total // world_size`.
    """

    steps: int | None = None
    tokens: int | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.steps, self.tokens, self.flops) if value is not None]
        if len(given) != 1 or given[0] <= 0:
            raise UsageError(
                "a budget is one positive number of this rank's steps, tokens or FLOPs;"
                f" got {self!r}"
            )

    @property
    def unit(self) -> str:
        """What it is counted in."""
        if self.steps is not None:
            return "steps"
        return "tokens" if self.tokens is not None else "FLOPs"

    @property
    def total(self) -> float:
        """How much of it there is."""
        return float(self.steps or self.tokens or self.flops or 0)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where this rank stands. `eta_s` is None until there is a rate to tell it from."""

    done: float  # by this rank, as is the total
    total: float
    unit: str
    eta_s: float | None

    @property
    def done_frac(self) -> float:
        """The share that is done; above 1 when the budget was exceeded."""
        return self.done / self.total


def progress(budget: Budget, done: float, elapsed_s: float) -> Progress:
    """Where a rank stands after so much work in so much time, at its mean rate so far."""
    left = max(0.0, budget.total - done)
    eta_s = left * elapsed_s / done if done > 0 and elapsed_s > 0 else None
    return Progress(done, budget.total, budget.unit, eta_s)
