"""What was done between two lines, or in a block of them?

The trap: adding up what only some lines say. A count that one line of a block lacks is not known
for the block; a running total is, if the line before the block and the last one of it have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ergmeter.importers.seen import Seen
from ergmeter.records import Step
from ergmeter.units import NS_PER_S

MAX_COUNT = 2**53  # more tokens than any run has; a bigger number is noise, and no column holds it


@dataclass(slots=True)
class Edge:
    """The end of the last span: where the next one starts."""

    t_ns: int
    number: int | None
    totals: dict[str, int]
    flushed: bool = False  # by lines that came faster than they can be printed
    came_ns: int | None = None  # when its lines came, where their own times say when they ended


@dataclass(slots=True)
class Span:
    """Lines that will be one Step."""

    t_ns: int
    first: bool
    fell: bool = False  # it began with a number below the last, and nothing says why
    number: int | None = None
    lines: int = 0
    steps: int | None = 0
    last_steps: int | None = None
    sums: dict[str, int] = field(default_factory=dict)
    summed_lines: dict[str, int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    stamped: bool = False  # its times were printed, and are not when its lines came
    # Its lines with their steps, each with further lines about the same step; for as long as all
    # came at one instant and say themselves how long their step took.
    parts: list[tuple[Seen, int | None, list[Seen]]] | None = field(default_factory=list)

    def take(self, seen: Seen, steps: int | None) -> None:
        """A line, and the steps since the one before it."""
        self.stamped = seen.stamped
        has_own_time = bool(seen.own_s) and not seen.own_from_start and not seen.stamped
        if self.parts is not None and has_own_time and seen.t_ns == self.t_ns:
            self.parts.append((seen, steps, []))
        else:
            self.parts = None
        self.t_ns = seen.t_ns
        self.number = seen.number
        self.lines += 1
        self.steps = None if self.steps is None or steps is None else self.steps + steps
        self.last_steps = steps
        self.totals = {}
        self._note(seen)

    def complete(self, seen: Seen) -> None:
        """A further line about the step just seen: take what was not known yet."""
        if self.parts:
            self.parts[-1][2].append(seen)
        known = {f for f, lines in self.summed_lines.items() if lines >= self.lines}
        known |= set(self.totals)
        fresh = tuple(c for c in seen.counts if c.field not in known)
        fresh_line = Seen(
            seen.t_ns,
            counts=fresh,
            loss=seen.loss if seen.redrawn else _or(self.loss, seen.loss),
            learning_rate=_or(self.learning_rate, seen.learning_rate),
            grad_norm=_or(self.grad_norm, seen.grad_norm),
        )
        self._note(fresh_line)

    def stalled(self, edge: Edge) -> bool:
        """Whether the token totals stand still: printed rounded, they move once in many lines.

        A step of no tokens would be false, so such a span stays open until the total moves. A total
        of zero that stays zero is no total at all, and does not hold anything up.
        """
        if not self.totals:
            return False
        totals = {f: v for f, v in self.totals.items() if f != "samples" and v > 0}
        return bool(totals) and all(edge.totals.get(f) == v for f, v in totals.items())

    def own_ns(self) -> list[int]:
        """How long each of its lines took by itself; empty where one does not say."""
        return [
            round((seen.own_s or 0) * NS_PER_S) * max(steps or 1, 1)
            for seen, steps, _ in self.parts or ()
        ]

    def step_by_step(self, edge: Edge, end_ns: int) -> Iterator[Step]:
        """A Step for each of its lines, by their own times, the last of which ends then."""
        each_ns = self.own_ns()
        start_ns = end_ns - sum(each_ns)
        for (seen, steps, more), own_ns in zip(self.parts or (), each_ns, strict=True):
            span = Span(seen.t_ns, first=False)
            span.take(seen, steps)
            for further in more:
                span.complete(further)
            span.t_ns = start_ns + own_ns
            yield span.step(edge, start_ns=start_ns)
            edge = Edge(span.t_ns, span.number, {**edge.totals, **span.totals})
            start_ns = span.t_ns

    def step(self, edge: Edge, *, start_ns: int | None = None) -> Step:
        """The Step from the edge, or from `start_ns`, to the last line."""
        return Step(
            start_ns=edge.t_ns if start_ns is None else start_ns,
            end_ns=self.t_ns,
            index=self.number,
            steps=self.steps,
            loss=self.loss,
            learning_rate=self.learning_rate,
            grad_norm=self.grad_norm,
            tokens_computed=self._count("tokens_computed", edge),
            tokens_real=self._count("tokens_real", edge),
            tokens_loss=self._count("tokens_loss", edge),
            samples=self._count("samples", edge),
        )

    def _note(self, seen: Seen) -> None:
        for count in seen.counts:
            if count.mode == "total":
                self.totals[count.field] = count.value
                continue
            steps = 1 if count.mode == "line" or self.last_steps is None else self.last_steps
            self.sums[count.field] = self.sums.get(count.field, 0) + count.value * steps
            self.summed_lines[count.field] = self.summed_lines.get(count.field, 0) + 1
        self.loss = _or(seen.loss, self.loss)
        self.learning_rate = _or(seen.learning_rate, self.learning_rate)
        self.grad_norm = _or(seen.grad_norm, self.grad_norm)

    def _count(self, name: str, edge: Edge) -> int | None:
        """How much of this was done in the span, or None where some line of it did not say."""
        if name not in self.sums and name not in self.totals:
            return None
        total, before = self.totals.get(name), edge.totals.get(name)
        if total is not None and before is not None:
            return total - before if total > before else None
        if self.summed_lines.get(name) != self.lines or self.sums[name] > MAX_COUNT:
            return None
        return self.sums[name]


def _or(first: float | None, second: float | None) -> float | None:
    return second if first is None else first
