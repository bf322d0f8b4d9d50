"""Which span of time does a printed line speak of, and what was done in it?

A line marks the end of the steps it speaks of; they began when the line before it came. Two traps
shaped this. Output comes in blocks: lines that arrive in one read share one time, and a span
between them would be empty, so they become one span of several steps. And a running total says
nothing on its own: the first one seen only opens the window, whatever came before it. A third:
numbers that begin again with each epoch look like a restart. They are none if anything says that
the training goes on (the epoch, a running total, an evaluation before them); else the pace tells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from statistics import median, median_low

from ergmeter.importers.seen import Seen
from ergmeter.importers.work import Edge, Span
from ergmeter.records import Mark, Step
from ergmeter.units import NS_PER_S

# A second line about the same step (`step=5 loss=..`, then `step=5 tokens=..`) still belongs to the
# first if it comes this soon; after that the span is handed on, so that a live view is not late.
GRACE_NS = 50_000_000

# A step number that falls is a restart after a gap longer than this, and longer than so many times
# the usual one; at the usual pace it is the next epoch's numbering.
_GAP_NS = NS_PER_S
_GAP_PERIODS = 5
_RECENT = 16

# No program formats and writes a line in less: a system call alone takes about this long. Lines
# that come faster were kept back and came at once, in more than one read, as from `cat`: their
# times say when they were flushed, not when steps ended.
_PRINTED_NS = 300
_TAIL_NS = 1_000_000  # what comes this soon after such lines is the rest of them

_AT_ONCE = (
    "no steps: {} step lines came at once, or in blocks that each begin again, so nothing tells "
    "how long a step took; let the program flush its output (PYTHONUNBUFFERED=1 for Python), or "
    "use ergmeter.Meter in the loop"
)
_FASTER = (
    "step lines came at once, faster than lines are printed ({} in one instant): they are left out"
)


class Spans:
    """Turns what lines say, in order, into Steps that follow one another and are never empty."""

    def __init__(self) -> None:
        self._edge: Edge | None = None
        self._open: Span | None = None
        self._periods_ns: deque[int] = deque(maxlen=_RECENT)
        self._strides: deque[int] = deque(maxlen=_RECENT)
        self._made = False  # a Step
        self._lines = 0  # of all spans so far
        self._took_ns = 0  # by them
        self._untimed = 0  # lines that came with the one before them, and are in no Step
        self._told = False  # of them

    def push(self, seen: Seen) -> Iterator[Step | Mark]:
        """Take the next line. Yields the span before it once that is known to be complete."""
        if self._open is not None and seen.number is not None and seen.number == self._open.number:
            self._open.complete(seen)
            return
        if self._open is not None and seen.t_ns != self._open.t_ns:
            yield from self._close()
        if self._edge is None:
            self._begin(seen)
        elif reason := self._restart(seen):
            yield from self._close()
            yield Mark(seen.t_ns, "restarted", reason)
            self._begin(seen)
        elif self._open is not None and self._open.fell and seen.t_ns == self._open.t_ns:
            yield self._began_again_at_once(self._open, seen)
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
        if not self._made and not self._told and self._untimed > 1:
            self._told = True
            said = _AT_ONCE.format(self._untimed + 1)
            yield Mark(self._last_t_ns, "output_unrecognised", said)
        self._edge = self._open = None

    def paused(self, t_ns: int) -> Iterator[Step | Mark]:
        """Something else ended now and began where the last span did: training resumes here."""
        yield from self._close()
        if self._open is None and self._edge is not None and t_ns > self._edge.t_ns:
            self._edge.t_ns = t_ns

    def resumes(self, seen: Seen) -> bool:
        """Whether all of an evaluation, and no training, lies between the last line and this one.

        So it is where every step has its line. Else some steps between two lines may lie before
        the evaluation, and without their time the others would be too fast.
        """
        between = seen.evaluated_ns is not None and (
            self._last_t_ns < seen.evaluated_ns < seen.t_ns and self._edge is not None
        )
        last, single = self._last_number, set(self._strides) <= {1}
        if not between or last is None or seen.number is None or not single:
            return False
        return seen.number == last + 1 or (bool(self._strides) and self._fell(seen))

    def evaluated(self, t_ns: int) -> Iterator[Step | Mark]:
        """An evaluation took the time from the last line until now."""
        start_ns = self._last_t_ns
        yield from self.paused(t_ns)
        if self._edge is not None and self._edge.t_ns == t_ns:
            yield Step(start_ns, t_ns, steps=None, phase="eval")

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

    @property
    def _totals(self) -> dict[str, int]:
        """The last of each running total: a line of a block may lack one."""
        before = self._edge.totals if self._edge else {}
        return {**before, **self._open.totals} if self._open else before

    def _restart(self, seen: Seen) -> str | None:
        reason = self._back(seen)
        if self._fell(seen) and (reason or (self._late(seen.t_ns) and not self._goes_on(seen))):
            return f"the step number went from {self._last_number} back to {seen.number}"
        return reason

    def _fell(self, seen: Seen) -> bool:
        last = self._last_number
        return last is not None and seen.number is not None and seen.number < last

    def _goes_on(self, seen: Seen) -> bool:
        """Whether something says that this is the training of the line before."""
        totals = self._totals
        return seen.goes_on or any(
            c.mode == "total" and c.value > totals.get(c.field, c.value) for c in seen.counts
        )

    def _late(self, t_ns: int) -> bool:
        """Whether more time went by than goes by between lines; so too where that is not known."""
        if not self._periods_ns:
            return t_ns > self._last_t_ns
        usual_ns = median(self._periods_ns)
        return t_ns - self._last_t_ns > max(_GAP_NS, _GAP_PERIODS * usual_ns)

    def _back(self, seen: Seen) -> str | None:
        if seen.t_ns < self._last_t_ns:
            return "the time went back"
        totals = self._totals if seen.counts else {}
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
            self._edge = Edge(seen.t_ns, seen.number, totals)
            return
        before = 0 if seen.own_from_start else None if seen.number is None else seen.number - 1
        self._edge = Edge(seen.t_ns - own_ns, before, dict.fromkeys(totals, 0))
        self._add(seen, first=True)

    def _add(self, seen: Seen, *, first: bool = False) -> None:
        edge = self._edge
        assert edge is not None
        if self._open is None and seen.t_ns == edge.t_ns:
            # It came in the same read as the line that opened the window: its work lies before.
            edge.number = seen.number
            edge.totals = {c.field: c.value for c in seen.counts if c.mode == "total"}
            self._untimed += 1
            return
        fell = self._fell(seen) and not self._goes_on(seen) and not seen.stamped
        steps = self._steps(seen)
        if seen.t_ns > self._last_t_ns:
            self._periods_ns.append(seen.t_ns - self._last_t_ns)
        span = self._open = self._open or Span(seen.t_ns, first, fell)
        if span.first and not first and not self._stretch(span, seen, steps):
            self._edge, self._open = Edge(seen.t_ns, seen.number, {}), None
            self._add(seen)
            return
        span.take(seen, steps)

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

    def _began_again_at_once(self, span: Span, seen: Seen) -> Mark:
        """Numbers that fell, and more in the same read: an older block, or another's.

        An epoch's end falls within a block, and hardly ever between two. So the block has no time.
        """
        totals = {c.field: c.value for c in seen.counts if c.mode == "total"}
        before = self._edge.number if self._edge else None
        self._edge, self._open = Edge(seen.t_ns, seen.number, totals), None
        self._untimed += span.lines + 1
        said = f"the step number went from {before} back to {span.number}, in lines of one instant"
        return Mark(seen.t_ns, "restarted", said)

    def _renumber(self, seen: Seen) -> Iterator[Step | Mark]:
        """A bar that begins again at 0: nothing was done since, and the next counts from here."""
        if self._open is not None and self._open.t_ns != seen.t_ns:
            yield from self._close()
        if self._open is not None:
            self._open.number = 0
        elif self._edge is not None:
            self._edge.number = 0

    def _stretch(self, span: Span, seen: Seen, steps: int | None) -> bool:
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

    def _close(self) -> Iterator[Step | Mark]:
        edge, span = self._edge, self._open
        if edge is None or span is None or span.stalled(edge):
            return
        # Only totals of the last line: an older one belongs to an older time.
        self._edge, self._open = Edge(span.t_ns, span.number, span.totals), None
        took_ns = span.t_ns - edge.t_ns
        self._lines += span.lines
        self._took_ns += took_ns
        # By all lines so far: after a pause of the machine one read may follow another at once.
        at_once = took_ns < span.lines * _PRINTED_NS and self._took_ns < self._lines * _PRINTED_NS
        if at_once or (edge.flushed and took_ns < _TAIL_NS):
            self._edge.flushed = True
            yield from self._leave_out(span)
            return
        self._made = True
        yield span.step(edge)

    def _leave_out(self, span: Span) -> Iterator[Mark]:
        self._untimed += span.lines
        if self._made and not self._told:
            self._told = True
            yield Mark(span.t_ns, "rows_dropped", _FASTER.format(span.lines))
