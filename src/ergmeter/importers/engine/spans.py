"""Turns step lines into Steps: the time each line covers, and the work done in it.

A line marks the end of its steps; they began when the line before it came. Three cases are special:

- Lines that arrive in one read share one time. They become one span of several steps, or a Step
  each where the lines print how long their steps took.
- The first running total only opens the window: the work before it is unknown.
- Step numbers that begin again with each epoch are no restart if the epoch, a running total or an
  evaluation shows that the training goes on. Otherwise the time since the last line decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from statistics import median, median_low
from typing import Any

from ergmeter.importers.engine.parsed_line import Mode, ParsedLine
from ergmeter.records import Mark, Step
from ergmeter.units import NS_PER_S

# Work between two lines, or in a block of them. A count that one line of a block lacks is unknown
# for the block. A running total is known if the line before the block and the block's last line
# have it.


MAX_COUNT = 2**53  # more tokens than any run has; a bigger number is noise, and no column holds it


@dataclass(slots=True)
class Edge:
    """The end of the last span: where the next one starts."""

    t_ns: int
    number: int | None
    totals: dict[str, int]
    flushed: bool = False  # its lines came faster than lines can be printed
    came_ns: int | None = None  # when its lines came, where their own times say when they ended


@dataclass(slots=True)
class Span:
    """Lines that will be one Step, in order."""

    lines: list[ParsedLine]
    first: bool = False  # it opened the window: its start is known by its printed time alone
    fell: bool = False  # it began with a number below the last, and nothing says why
    count: int = 1  # of its lines

    @property
    def last(self) -> ParsedLine:
        """The line at which it ends."""
        return self.lines[-1]

    @property
    def figures(self) -> dict[str, Any]:
        """The last loss, learning rate and gradient norm, and the number of steps."""
        figures: dict[str, Any] = {}
        for line in self.lines:
            figures |= line.figures
        each = [line.steps for line in self.lines]
        return {**figures, "steps": None if None in each else sum(n or 0 for n in each)}

    def add(self, line: ParsedLine) -> None:
        """Add the next line. Lines that arrived earlier are merged into one, so few are stored."""
        if line.t_ns != self.last.t_ns:
            sums = {name: self._sum(name) for name in self.last.amounts}
            amounts: dict[str, tuple[int, Mode]]
            amounts = {name: (n, "line") for name, n in sums.items() if n is not None}
            self.lines = [replace(self.last, totals={}, amounts=amounts, **self.figures)]
        self.lines.append(line)
        self.count += 1

    def stalled(self, edge: Edge) -> bool:
        """True if the token totals did not grow: rounded totals grow once in many lines.

        A step of no tokens would be wrong, so such a span stays open until a total grows. A total
        that stays zero is ignored.
        """
        totals = {f: v for f, v in self.last.totals.items() if f != "samples" and v > 0}
        return bool(totals) and all(edge.totals.get(f) == v for f, v in totals.items())

    def own_ns(self) -> list[int]:
        """Each line's printed duration; empty unless all lines have one and came at one instant."""
        came_ns = self.lines[0].t_ns
        if any(not line.own_s or line.clock or line.t_ns != came_ns for line in self.lines):
            return []
        return [
            round((line.own_s or 0) * NS_PER_S) * max(line.steps or 1, 1) for line in self.lines
        ]

    def step_by_step(self, edge: Edge, end_ns: int) -> Iterator[Step]:
        """Yield a Step for each line, as long as its printed time; the last ends at `end_ns`."""
        each_ns = self.own_ns()
        edge = Edge(end_ns - sum(each_ns), edge.number, edge.totals)
        for line, own_ns in zip(self.lines, each_ns, strict=True):
            line.t_ns = edge.t_ns + own_ns
            yield Span([line]).step(edge)
            edge = Edge(line.t_ns, line.number, {**edge.totals, **line.totals})

    def step(self, edge: Edge) -> Step:
        """Return the Step from the edge to the span's last line."""
        last = self.last
        fields = self.figures
        for name in (*last.amounts, *last.totals):
            total, before = last.totals.get(name), edge.totals.get(name)
            if total is None or before is None:
                fields[name] = self._sum(name)
            else:
                fields[name] = total - before if total > before else None
        return Step(edge.t_ns, last.t_ns, index=last.number, **fields)

    def _sum(self, name: str) -> int | None:
        """The sum of a count over all lines, or None if one of them lacks it."""
        total = 0
        for line in self.lines:
            if name not in line.amounts:
                return None
            value, mode = line.amounts[name]
            total += value if mode == "line" or line.steps is None else value * line.steps
        return total if total <= MAX_COUNT else None


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

# Lines that are further apart than this, on average, and yet came at one instant were held back in
# a buffer. In a faster loop, several are printed between two looks at the output.
_HELD_BACK_NS = 1_000_000
_BLOCK_LINES = 3
_MOSTLY = 0.5  # of all lines came so: the output is block-buffered

_CURE = (
    "to see each step when it ends, run the program under `erg record --pty` or `stdbuf -oL`, or "
    "let it flush its output"
)
_NO_STEPS = (
    "no steps: {} step lines came {}, so nothing tells how long a step took; "
    f"{_CURE}; or use ergmeter.Meter in the loop"
)
_AT_ONCE = "at once, or in blocks that each begin again"
_TWO_BLOCKS = "in two blocks, the second when the program ended"
_IN_BLOCKS = (
    "the program's output is block-buffered: {} of its step lines came at one instant with others, "
    f"up to {{}} together; {{}}; {_CURE}"
)
_OWN_TIMES = "step times are those that the lines give"
_BLOCK_MEANS = "a step's time is the mean over its block"
_LAST_BLOCK = (
    "{} step lines came last and together: when their steps ended is not known, and they are "
    "left out"
)
_TOO_LONG = (
    "the step times on {} lines add up to {:.3g} s, but the lines came within {:.3g} s: the "
    "printed times are not used"
)
_FASTER = (
    "step lines came at once, faster than lines are printed ({} in one instant): they are left out"
)


class StepSpans:
    """Turns step lines, in order, into consecutive Steps that are never empty."""

    def __init__(self) -> None:
        self._edge: Edge | None = None
        self._open: Span | None = None
        self._periods_ns: deque[int] = deque(maxlen=_RECENT)
        self._strides: deque[int] = deque(maxlen=_RECENT)
        self._made = False  # a Step
        self._lines = 0  # of all spans so far
        self._took_ns = 0  # by them
        self._block_lines = self._largest = 0  # lines that were held back, and came at one instant
        self._has_own_times = False  # lines of one instant are Steps of the times that they give
        self._noted: set[str] = set()
        self._since_ns: int | None = None  # no step began before
        self._untimed = 0  # lines that came with the one before them, and are in no Step
        self._no_steps_noted = False  # of them

    def began(self, t_ns: int) -> None:
        """Set when the program started: no step starts earlier."""
        self._since_ns = t_ns

    def push(self, line: ParsedLine) -> Iterator[Step | Mark]:
        """Take the next line; yield the Step before it if this line shows that it is complete."""
        span = self._open
        if span is not None and line.number is not None and line.number == span.last.number:
            span.last.complete(line)
            return
        if span is not None and line.t_ns != span.last.t_ns:
            yield from self._close()
        if self._edge is None:
            self._begin(line)
        elif reason := self._restart(line):
            yield from self._close()
            yield Mark(line.t_ns, "restarted", reason)
            self._begin(line)
        elif self._open is not None and self._open.fell and line.t_ns == self._last_t_ns:
            yield self._began_again_at_once(self._open, line)
        elif line.number == 0 and line.number_done and self._fell(line):
            yield from self._renumber(line)
        elif line.number is None or line.number != self.last_number:
            self._add(line)

    def tick(self, t_ns: int) -> Iterator[Step | Mark]:
        """Close the open span if no line came for a while, until `t_ns`.

        A block of lines that may be the program's last, flushed at its end, waits for the next.
        """
        span = self._open
        is_waiting = span is not None and t_ns > span.last.t_ns + GRACE_NS
        if span is not None and is_waiting and not self._may_be_last_block(span):
            yield from self._close()

    def end(self) -> Iterator[Step | Mark]:
        """The training is over: yield what is open. The next line opens a new window."""
        if self._open is not None and self._may_be_last_block(self._open):
            yield from self._leave_out_last(self._open)
        yield from self._close()
        if self._made and self._comes_in_blocks():
            times = _OWN_TIMES if self._has_own_times else _BLOCK_MEANS
            message = _IN_BLOCKS.format(self._block_lines + self._untimed, self._largest, times)
            yield from self._say(self._last_t_ns, "output_buffered", message)
        if not self._made and not self._no_steps_noted and self._untimed > 1:
            self._no_steps_noted = True
            how = _TWO_BLOCKS if self._largest else _AT_ONCE
            message = _NO_STEPS.format(self._untimed + 1, how)
            yield Mark(self._last_t_ns, "output_unrecognised", message)
        self._edge = self._open = None

    def paused(self, t_ns: int) -> Iterator[Step | Mark]:
        """Leave the time from the last span to `t_ns` out of training: something else ran then."""
        yield from self._close()
        if self._open is None and self._edge is not None and t_ns > self._edge.t_ns:
            self._edge.t_ns = t_ns

    def resumes(self, line: ParsedLine) -> bool:
        """True if only an evaluation, and no training, lies between the last line and this one.

        That needs a line for every step. Else some steps may lie before the evaluation, and without
        their time the others would seem too fast.
        """
        between = line.evaluated_ns is not None and (
            self._last_t_ns < line.evaluated_ns < line.t_ns and self._edge is not None
        )
        last, single = self.last_number, set(self._strides) <= {1}
        if not between or last is None or line.number is None or not single:
            return False
        return line.number == last + 1 or (bool(self._strides) and self._fell(line))

    def evaluated(self, t_ns: int) -> Iterator[Step | Mark]:
        """Yield the time from the last line until `t_ns` as an evaluation."""
        start_ns = self._last_t_ns
        yield from self.paused(t_ns)
        if self._edge is not None and self._edge.t_ns == t_ns:
            yield Step(start_ns, t_ns, steps=None, phase="eval")

    @property
    def opened(self) -> bool:
        """True after the first line: the next step has a start."""
        return self._edge is not None

    @property
    def pending(self) -> bool:
        """True if lines wait to become a Step."""
        return self._open is not None

    @property
    def last_number(self) -> int | None:
        """The step number of the last line."""
        if self._open is not None:
            return self._open.last.number
        return self._edge.number if self._edge else None

    @property
    def _last_t_ns(self) -> int:
        if self._open is not None:
            return self._open.last.t_ns
        return self._edge.t_ns if self._edge else -(1 << 63)

    @property
    def _totals(self) -> dict[str, int]:
        """The latest value of each running total: a single line may lack one."""
        before = self._edge.totals if self._edge else {}
        return {**before, **self._open.last.totals} if self._open else before

    def _restart(self, line: ParsedLine) -> str | None:
        reason = self._back(line)
        if self._fell(line) and (reason or (self._late(line.t_ns) and not self._goes_on(line))):
            return f"the step number went from {self.last_number} back to {line.number}"
        return reason

    def _fell(self, line: ParsedLine) -> bool:
        last = self.last_number
        return last is not None and line.number is not None and line.number < last

    def _goes_on(self, line: ParsedLine) -> bool:
        """True if this line continues the training of the line before."""
        totals = self._totals
        return line.goes_on or any(v > totals.get(name, v) for name, v in line.totals.items())

    def _late(self, t_ns: int) -> bool:
        """True if the time since the last line is longer than usual, or unknown."""
        if not self._periods_ns:
            return t_ns > self._last_t_ns
        return t_ns - self._last_t_ns > max(_GAP_NS, _GAP_PERIODS * median(self._periods_ns))

    def _back(self, line: ParsedLine) -> str | None:
        if line.t_ns < self._last_t_ns:
            return "the time went back"
        totals = self._totals if line.totals else {}
        for name, total in line.totals.items():
            if total < totals.get(name, total):
                return f"a running total went from {totals[name]} back to {total}"
        return None

    def _begin(self, line: ParsedLine) -> None:
        """Start a window of steps. A line that prints its own duration is its first span."""
        own_ns = round((line.since_start_s or line.own_s or 0) * NS_PER_S)
        complete = line.totals_from_zero or not line.totals
        # Its own time can't reach back over a span that is already accounted for.
        free = self._edge is None or line.t_ns - own_ns >= self._last_t_ns
        free &= self._since_ns is None or line.t_ns - own_ns >= self._since_ns
        self._open = None
        if own_ns <= 0 or not complete or not free:
            self._edge = Edge(line.t_ns, line.number, line.totals)
            return
        before = 0 if line.since_start_s else None if line.number is None else line.number - 1
        self._edge = Edge(line.t_ns - own_ns, before, dict.fromkeys(line.totals, 0))
        line.steps = self._steps(line)
        self._open = Span([line], first=True)

    def _add(self, line: ParsedLine) -> None:
        edge, span = self._edge, self._open
        assert edge is not None
        if span is None and line.t_ns == edge.t_ns:
            # It came in the same read as the line that opened the window: its work lies before.
            edge.number = line.number
            edge.totals = line.totals
            self._untimed += 1
            return
        fell = self._fell(line) and not self._goes_on(line) and line.clock is None
        line.steps = self._steps(line)
        if line.t_ns > self._last_t_ns:
            self._periods_ns.append(line.t_ns - self._last_t_ns)
        if span is None:
            self._open = Span([line], fell=fell)
        elif not span.first or self._stretch(edge, span, line):
            span.add(line)
        else:
            self._edge, self._open = Edge(line.t_ns, line.number, line.totals), None
            self._untimed += 1

    def _steps(self, line: ParsedLine) -> int | None:
        """The steps since the last line; at the turn of an epoch, as many as between two others."""
        last = self.last_number
        if line.number is None or last is None:
            return None
        steps = line.steps_since(last)
        if steps is not None:
            if line.number > last:
                self._strides.append(steps)
            return steps
        if line.number_done:
            return line.number
        return median_low(self._strides) if self._strides else 1

    def _began_again_at_once(self, span: Span, line: ParsedLine) -> Mark:
        """Drop a block of lines that began with a lower step number, and return a restart mark.

        It is an older block or another training's: an epoch rarely ends exactly between two blocks.
        """
        before = self._edge.number if self._edge else None
        self._edge, self._open = Edge(line.t_ns, line.number, line.totals), None
        self._untimed += span.count + 1
        number = span.last.number
        message = f"the step number went from {before} back to {number}, in lines of one instant"
        return Mark(line.t_ns, "restarted", message)

    def _renumber(self, line: ParsedLine) -> Iterator[Step | Mark]:
        """A progress bar that restarts at 0 with no step done in between: count from 0 again."""
        if self._open is not None and self._last_t_ns != line.t_ns:
            yield from self._close()
        if self._open is not None:
            self._open.last.number = 0
        elif self._edge is not None:
            self._edge.number = 0

    def _stretch(self, edge: Edge, span: Span, line: ParsedLine) -> bool:
        """Move a first span's start so that it can include this line; False if that is unknown."""
        if line.since_start_s:
            edge.t_ns = span.last.t_ns - round(line.since_start_s * NS_PER_S)
        elif line.own_s:
            edge.t_ns -= round(line.own_s * NS_PER_S) * (line.steps or 1)
        return bool(line.since_start_s or line.own_s)

    def _close(self) -> Iterator[Step | Mark]:
        edge, span = self._edge, self._open
        if edge is None or span is None or span.stalled(edge):
            return
        own_ns = span.own_ns() if span.count > 1 else []
        if own_ns and (yield from self._lay_out(edge, span, own_ns)):
            return
        last = span.last
        # Only totals of the last line: an older one belongs to an older time.
        self._edge, self._open = Edge(last.t_ns, last.number, last.totals), None
        took_ns = last.t_ns - edge.t_ns
        self._count(span, took_ns)
        # By all lines so far: after a pause of the machine one read may follow another at once.
        at_once = took_ns < span.count * _PRINTED_NS and self._took_ns < self._lines * _PRINTED_NS
        if at_once or (edge.flushed and took_ns < _TAIL_NS):
            self._edge.flushed = True
            yield from self._leave_out(span)
            return
        self._made = True
        yield span.step(edge)

    def _leave_out(self, span: Span) -> Iterator[Mark]:
        self._untimed += span.count
        if self._made and not self._no_steps_noted:
            self._no_steps_noted = True
            yield Mark(span.last.t_ns, "rows_dropped", _FASTER.format(span.count))

    def _lay_out(
        self, edge: Edge, span: Span, own_ns: list[int]
    ) -> Generator[Step | Mark, None, bool]:
        """Yield a Step for each line of a block, by printed times; return False if they don't fit.

        A full buffer is written out when the next line is printed. So the step of the next block's
        first line ended when this block came.
        """
        last, came_ns = span.last, span.last.t_ns
        total_ns, slack_ns, since_ns = sum(own_ns), own_ns[-1], edge.t_ns
        if span.first:
            since_ns = came_ns - total_ns if self._since_ns is None else self._since_ns
            slack_ns = 0
            end_ns = max(came_ns - own_ns[-1], since_ns + total_ns)
        else:
            end_ns = max(edge.t_ns + own_ns[0], edge.came_ns or 0) + total_ns - own_ns[0]
        if total_ns > came_ns - since_ns + slack_ns:
            came_s = (came_ns - since_ns) / NS_PER_S
            message = _TOO_LONG.format(span.count, total_ns / NS_PER_S, came_s)
            yield from self._say(came_ns, "value_refused", message)
            if span.first:  # nothing else says when they began
                self._edge, self._open = Edge(came_ns, last.number, last.totals), None
                self._untimed += span.count - 1
            return span.first
        self._count(span, total_ns)
        self._made = self._has_own_times = True
        yield from span.step_by_step(edge, end_ns)
        self._edge = Edge(end_ns, last.number, last.totals, came_ns=came_ns)
        self._open = None
        return True

    def _count(self, span: Span, took_ns: int) -> None:
        self._lines += span.count
        self._took_ns += took_ns
        if _are_held_back(span, took_ns):
            self._block_lines += span.count
            self._largest = max(self._largest, span.count)

    def _comes_in_blocks(self, more: int = 0) -> bool:
        """True if most lines, with `more`, were buffered and came together with others."""
        blocks, lines = self._block_lines + more, self._lines + more
        return blocks > 0 and blocks + self._untimed >= _MOSTLY * (lines + self._untimed)

    def _may_be_last_block(self, span: Span) -> bool:
        """True if a span is likely a buffered block, of lines without printed times."""
        edge = None if span.first else self._edge
        is_block = edge is not None and _are_held_back(span, span.last.t_ns - edge.t_ns)
        came_before = self._block_lines > 0 or self._untimed >= _BLOCK_LINES - 1
        is_likely = is_block and came_before and self._comes_in_blocks(span.count)
        return is_likely and not span.own_ns()

    def _leave_out_last(self, span: Span) -> Iterator[Mark]:
        """Drop the last block: the program may have ended long after the last of these steps."""
        self._untimed += span.count
        self._largest = max(self._largest, span.count)
        self._open = None
        if self._made:
            yield Mark(span.last.t_ns, "rows_dropped", _LAST_BLOCK.format(span.count))

    def _say(self, t_ns: int, name: str, message: str) -> Iterator[Mark]:
        if name not in self._noted:
            self._noted.add(name)
            yield Mark(t_ns, name, message)


def _are_held_back(span: Span, took_ns: int) -> bool:
    is_block = span.count >= _BLOCK_LINES and span.last.clock is None
    return is_block and took_ns > span.count * _HELD_BACK_NS
