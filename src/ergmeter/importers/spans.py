"""Which span of time does a printed line speak of, and what was done in it?

A line marks the end of the steps it speaks of; they began when the line before it came. Two traps
shaped this. Output comes in blocks: lines that arrive in one read share one time, and a span
between them would be empty, so they become one span of several steps. And a running total says
nothing on its own: the first one seen only opens the window, whatever came before it. A third:
numbers that begin again with each epoch look like a restart; only the pace tells them apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median, median_low

from ergmeter.importers.seen import Seen
from ergmeter.records import Mark, Step
from ergmeter.units import NS_PER_S

MAX_COUNT = 2**53  # more tokens than any run has; a bigger number is noise, and no column holds it

# A second line about the same step (`step=5 loss=..`, then `step=5 tokens=..`) still belongs to the
# first if it comes this soon; after that the span is handed on, so that a live view is not late.
GRACE_NS = 50_000_000

# A step number that falls is a restart after a gap longer than this, and longer than so many times
# the usual one; at the usual pace it is the next epoch's numbering.
_GAP_NS = NS_PER_S
_GAP_PERIODS = 5
_RECENT = 16


@dataclass(slots=True)
class _Edge:
    """The end of the last span: where the next one starts."""

    t_ns: int
    number: int | None
    totals: dict[str, int]


@dataclass(slots=True)
class _Span:
    """Lines that will be one Step."""

    t_ns: int
    first: bool
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


class Spans:
    """Turns what lines say, in order, into Steps that follow one another and are never empty."""

    def __init__(self) -> None:
        self._edge: _Edge | None = None
        self._open: _Span | None = None
        self._periods_ns: deque[int] = deque(maxlen=_RECENT)
        self._strides: deque[int] = deque(maxlen=_RECENT)

    def push(self, seen: Seen) -> Iterator[Step | Mark]:
        """Take the next line. Yields the span before it once that is known to be complete."""
        if self._open is not None and seen.number is not None and seen.number == self._open.number:
            self._complete(self._open, seen)
            return
        if self._open is not None and seen.t_ns != self._open.t_ns:
            yield from self._close()
        if self._edge is None:
            self._begin(seen)
        elif reason := self._restart(seen):
            yield from self._close()
            yield Mark(seen.t_ns, "restarted", reason)
            self._begin(seen)
        elif seen.number == 0 and seen.number_done and self._fell(seen):
            yield from self._renumber(seen)
        elif seen.number is None or seen.number != self._last_number:
            self._add(seen)

    def tick(self, t_ns: int) -> Iterator[Step | Mark]:
        """Time went on: a span that has waited long enough is complete."""
        if self._open is not None and t_ns > self._open.t_ns + GRACE_NS:
            yield from self._close()

    def end(self) -> Iterator[Step | Mark]:
        """The training is over: yield what is open. The next line opens a new window."""
        yield from self._close()
        self._edge = self._open = None

    def paused(self, t_ns: int) -> Iterator[Step | Mark]:
        """Something else ended now and began where the last span did: training resumes here."""
        yield from self._close()
        if self._open is None and self._edge is not None and t_ns > self._edge.t_ns:
            self._edge.t_ns = t_ns

    @property
    def opened(self) -> bool:
        """Whether a line has been seen: the next one can be given a start."""
        return self._edge is not None

    @property
    def pending(self) -> bool:
        """Whether a Step is under way."""
        return self._open is not None

    @property
    def _last_number(self) -> int | None:
        if self._open is not None:
            return self._open.number
        return self._edge.number if self._edge else None

    @property
    def _last_t_ns(self) -> int:
        if self._open is not None:
            return self._open.t_ns
        return self._edge.t_ns if self._edge else -(1 << 63)

    def _restart(self, seen: Seen) -> str | None:
        reason = self._back(seen)
        if self._fell(seen) and (reason or self._late(seen.t_ns)):
            return f"the step number went from {self._last_number} back to {seen.number}"
        return reason

    def _fell(self, seen: Seen) -> bool:
        last = self._last_number
        return last is not None and seen.number is not None and seen.number < last

    def _late(self, t_ns: int) -> bool:
        """Whether more time went by than goes by between lines; so too where that is not known."""
        if not self._periods_ns:
            return t_ns > self._last_t_ns
        usual_ns = median(self._periods_ns)
        return t_ns - self._last_t_ns > max(_GAP_NS, _GAP_PERIODS * usual_ns)

    def _back(self, seen: Seen) -> str | None:
        edge = self._edge
        if seen.t_ns < self._last_t_ns:
            return "the time went back"
        totals = self._open.totals if self._open else edge.totals if edge else {}
        for count in seen.counts:
            before = totals.get(count.field)
            if count.mode == "total" and before is not None and count.value < before:
                return f"a running total went from {before} back to {count.value}"
        return None

    def _begin(self, seen: Seen) -> None:
        """Open a window. A line that gives its own time is a span already."""
        totals = {count.field: count.value for count in seen.counts if count.mode == "total"}
        own_ns = round((seen.own_s or 0) * NS_PER_S)
        known = seen.totals_from_zero or not totals
        # Its own time can't reach back over a span that is already accounted for.
        free = self._edge is None or seen.t_ns - own_ns >= self._last_t_ns
        self._open = None
        if own_ns <= 0 or not known or not free:
            self._edge = _Edge(seen.t_ns, seen.number, totals)
            return
        before = 0 if seen.own_from_start else None if seen.number is None else seen.number - 1
        self._edge = _Edge(seen.t_ns - own_ns, before, dict.fromkeys(totals, 0))
        self._add(seen, first=True)

    def _add(self, seen: Seen, *, first: bool = False) -> None:
        edge = self._edge
        assert edge is not None
        if self._open is None and seen.t_ns == edge.t_ns:
            # It came in the same read as the line that opened the window: its work lies before.
            edge.number = seen.number
            edge.totals = {c.field: c.value for c in seen.counts if c.mode == "total"}
            return
        steps = self._steps(seen)
        if seen.t_ns > self._last_t_ns:
            self._periods_ns.append(seen.t_ns - self._last_t_ns)
        span = self._open = self._open or _Span(seen.t_ns, first)
        if span.first and not first and not self._stretch(span, seen, steps):
            self._edge, self._open = _Edge(seen.t_ns, seen.number, {}), None
            self._add(seen)
            return
        span.t_ns = seen.t_ns
        span.number = seen.number
        span.lines += 1
        span.steps = None if span.steps is None or steps is None else span.steps + steps
        span.last_steps = steps
        span.totals = {}
        self._note(span, seen)

    def _steps(self, seen: Seen) -> int | None:
        """The steps since the last line; at the turn of an epoch, as many as between two others."""
        last = self._last_number
        if seen.number is None or last is None:
            return None
        if seen.number > last:
            self._strides.append(seen.number - last)
            return seen.number - last
        if seen.number_done:
            return seen.number
        return median_low(self._strides) if self._strides else 1

    def _renumber(self, seen: Seen) -> Iterator[Step | Mark]:
        """A bar that begins again at 0: nothing was done since, and the next counts from here."""
        if self._open is not None and self._open.t_ns != seen.t_ns:
            yield from self._close()
        if self._open is not None:
            self._open.number = 0
        elif self._edge is not None:
            self._edge.number = 0

    def _stretch(self, span: _Span, seen: Seen, steps: int | None) -> bool:
        """Let a first span, whose start is known from its own time, take in a later line."""
        edge = self._edge
        if edge is None or not seen.own_s or seen.own_s <= 0:
            return False
        own_ns = round(seen.own_s * NS_PER_S)
        if seen.own_from_start:
            edge.t_ns = span.t_ns - own_ns
        else:
            edge.t_ns -= own_ns * (steps or 1)
        return True

    def _complete(self, span: _Span, seen: Seen) -> None:
        """A further line about the step just seen: take what was not known yet."""
        known = {f for f, lines in span.summed_lines.items() if lines >= span.lines}
        known |= set(span.totals)
        fresh = tuple(c for c in seen.counts if c.field not in known)
        fresh_line = Seen(
            seen.t_ns,
            counts=fresh,
            loss=_or(span.loss, seen.loss),
            learning_rate=_or(span.learning_rate, seen.learning_rate),
            grad_norm=_or(span.grad_norm, seen.grad_norm),
        )
        self._note(span, fresh_line)

    def _note(self, span: _Span, seen: Seen) -> None:
        for count in seen.counts:
            if count.mode == "total":
                span.totals[count.field] = count.value
                continue
            steps = 1 if count.mode == "line" or span.last_steps is None else span.last_steps
            span.sums[count.field] = span.sums.get(count.field, 0) + count.value * steps
            span.summed_lines[count.field] = span.summed_lines.get(count.field, 0) + 1
        span.loss = _or(seen.loss, span.loss)
        span.learning_rate = _or(seen.learning_rate, span.learning_rate)
        span.grad_norm = _or(seen.grad_norm, span.grad_norm)

    def _close(self) -> Iterator[Step | Mark]:
        edge, span = self._edge, self._open
        if edge is None or span is None or _stalled(edge, span):
            return
        yield Step(
            start_ns=edge.t_ns,
            end_ns=span.t_ns,
            index=span.number,
            steps=span.steps,
            loss=span.loss,
            learning_rate=span.learning_rate,
            grad_norm=span.grad_norm,
            tokens_computed=_count("tokens_computed", edge, span),
            tokens_real=_count("tokens_real", edge, span),
            tokens_loss=_count("tokens_loss", edge, span),
            samples=_count("samples", edge, span),
        )
        # Only totals of the last line: an older one belongs to an older time.
        self._edge, self._open = _Edge(span.t_ns, span.number, span.totals), None


def _or(first: float | None, second: float | None) -> float | None:
    return second if first is None else first


def _stalled(edge: _Edge, span: _Span) -> bool:
    """Whether the token totals stand still: printed rounded, they move once in many lines.

    A step of no tokens would be false, so such a span stays open until the total moves. A total
    of zero that stays zero is no total at all, and does not hold anything up.
    """
    totals = {f: v for f, v in span.totals.items() if f != "samples" and v > 0}
    return bool(totals) and all(edge.totals.get(f) == v for f, v in totals.items())


def _count(name: str, edge: _Edge, span: _Span) -> int | None:
    """How much of this was done in the span, or None where some line of it did not say."""
    total, before = span.totals.get(name), edge.totals.get(name)
    if total is not None and before is not None:
        return total - before or None
    if span.summed_lines.get(name) != span.lines or span.sums[name] > MAX_COUNT:
        return None
    return span.sums[name]
