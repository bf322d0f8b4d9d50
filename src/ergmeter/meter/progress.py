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
    """What this rank is meant to reach, one of the first three; and what the run may use up.

    Of several ranks with data of their own each has its share: `tokens=total // world_size`. What
    may be used up (`kwh`, `cost` in what the prices are in, `hours`) is of all that this process
    watches, and an alert when it is: `Meter(stop_on="budget")` stops for it.
    """

    steps: int | None = None
    tokens: int | None = None
    flops: float | None = None
    kwh: float | None = None
    cost: float | None = None
    hours: float | None = None

    def __post_init__(self) -> None:
        goals = [value for value in (self.steps, self.tokens, self.flops) if value is not None]
        limits = [value for value in (self.kwh, self.cost, self.hours) if value is not None]
        if len(goals) > 1 or not goals + limits or not all(value > 0 for value in goals + limits):
            raise UsageError(
                "a budget is one positive number of this rank's steps, tokens or FLOPs, and what"
                f" the run may use up: kwh, cost, hours; got {self!r}"
            )

    @property
    def has_goal(self) -> bool:
        """Whether there is something to be reached."""
        return any(value is not None for value in (self.steps, self.tokens, self.flops))

    @property
    def rules(self) -> tuple[str, ...]:
        """What may be used up, as alerts."""
        limits = (("energy", self.kwh, " kWh"), ("cost", self.cost, ""), ("time", self.hours, " h"))
        return tuple(f"{what} > {much:g}{unit}" for what, much, unit in limits if much is not None)

    def as_json(self) -> dict[str, float]:
        """For the head of a writer's share: the goal; limits stand among the alerts."""
        return {self.unit: self.total} if self.has_goal else {}

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
