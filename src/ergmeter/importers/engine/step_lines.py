"""Which lines of an output tell of a step, each step once?

What is common to a run that is made of a log and to a log read as a table: a line's figures by its
dialect, other ranks left out, and bars that are drawn again. The trap was two ways through a log
that did not agree on its steps.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ergmeter.importers.engine.dialect import Dialect
from ergmeter.importers.engine.pairs import NamedNumber
from ergmeter.importers.engine.pending_step import iteration_of, seen_in
from ergmeter.importers.engine.progress_bar import bar
from ergmeter.importers.engine.step_line import StepLine
from ergmeter.importers.engine.timestamps import FileClock, stamp_ns
from ergmeter.ports import Line

# -- ranks -----------------------------------------------------------------------------------------
# Whose line is this, where the ranks of one training print into one output?
#
# A rank names itself (`[rank1]:`, torchrun's `[default1]:`, mpirun's `[1,3]<stdout>:`, `rank=1`),
# or srun put its number before the line (`3: step=..`). The trap: a number before a line may as
# well be an epoch's. It is a rank's if two of them speak of the same step; until then every line is
# read.


_NAMED = re.compile(
    r"\[(?:rank|default) ?(\d{1,6})\]"
    r"|(?<![\w/.\-])(?:global_|local_)?rank[\"']?\s?[=:]\s?(\d{1,6})\b"
    r"|^\[\d{1,6},(\d{1,6})\]<std(?:out|err)>",
    re.IGNORECASE,
)
_LABEL = re.compile(r"\s{0,6}(\d{1,5}): ")
_RECENT = 8  # steps: ranks are hardly ever further apart


def rank_of(text: str) -> int | None:
    """The rank a line says it is of."""
    if "ank" not in text and "ANK" not in text and not text.startswith("[") and "[d" not in text:
        return None  # what most lines are spared: the full look
    match = _NAMED.search(text)
    return int(match[1] or match[2] or match[3]) if match else None


def label_of(text: str) -> int | None:
    """The number before a line, which may be a rank's."""
    match = _LABEL.match(text)
    return int(match[1]) if match else None


class Ranks:
    """Keeps the lines of the first rank that prints a step."""

    def __init__(self) -> None:
        self.kept: int | None = None
        self._label: int | None = None
        self.labelled = False  # numbers before lines are ranks
        self._recent: deque[tuple[int, int | None]] = deque(maxlen=_RECENT)

    def is_another(self, text: str, number: int | None) -> bool:
        """Whether this step line is of another rank than those that are kept."""
        rank = rank_of(text)
        if rank is None:
            return self._is_labelled(text, number)
        self.kept = rank if self.kept is None else self.kept
        return rank != self.kept

    def _is_labelled(self, text: str, number: int | None) -> bool:
        label = label_of(text)
        if label is None:
            return False
        self._label = label if self._label is None else self._label
        if not self.labelled and number is not None and label != number:
            # Of two ranks that speak of one step, the first to speak of it is kept.
            firsts = [other for other, of in self._recent if of == number and other != label]
            self.labelled = bool(firsts)
            self.kept = self._label = firsts[0] if firsts else self._label
        self._recent.append((label, number))
        return self.labelled and label != self._label


# -- numbering -------------------------------------------------------------------------------------
# Is this the next step, the same one again, or another run?
#
# For programs whose step numbers count the whole training. A bar is drawn many times for one step,
# and ranks that do not name themselves print each step in turn, now and then out of order. The
# trap: taking such a line for a restart, or a restart for such a line. A number below the last is
# another run, unless it is the one just before, not the first of the run, and comes sooner than a
# next step.


Verdict = Literal["next", "again", "restart"]


class Numbering:
    """Judges the numbers of one output as they come."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._before: tuple[int, Line] | None = None  # the number before the last, and its line
        self._last: tuple[int, Line] | None = None

    @property
    def last(self) -> int | None:
        """The number of the last step."""
        return self._last[0] if self._last else None

    def judge(self, number: int, line: Line) -> Verdict:
        """Take the next number, and the line it stands in."""
        if self._last is None:
            self._first, self._last = number, (number, line)
            return "next"
        if number == self._last[0] or self._is_late(number, line):
            return "again"
        if number > self._last[0]:
            self._before, self._last = self._last, (number, line)
            return "next"
        self._first, self._before, self._last = number, None, (number, line)
        return "restart"

    def _is_late(self, number: int, line: Line) -> bool:
        """Whether this is the line of a rank that was slow to print the step before."""
        if self._before is None or self._last is None or number == self._first:
            return False
        if number != self._before[0]:
            return False
        times = [_t_ns(one) for one in (self._before[1], self._last[1], line)]
        before_ns, last_ns, now_ns = times
        if before_ns is None or last_ns is None or now_ns is None:
            return True
        return now_ns - last_ns < max(last_ns - before_ns, 1)


def _t_ns(line: Line) -> int | None:
    return stamp_ns(line.text) if line.t_ns is None else line.t_ns


# -- steplines -------------------------------------------------------------------------------------


_NO_TIME = "can't be how long a step took"
_NO_PACE = "can't be a pace"
_REFUSED = "{}={:g}{} {}: it is left out, and so are others like it"

_ITERATIONS = "a step's time is its line's iter time times {}, the iterations of a step by its line"

Kind = Literal["step", "again", "another rank", "evaluation", "other"]


@dataclass(slots=True)
class ParsedLine:
    """What a line told, and of what."""

    kind: Kind
    found: list[NamedNumber]
    seen: StepLine = field(default_factory=lambda: StepLine(0))
    counts: dict[str, int] = field(default_factory=dict)  # by printed name
    drawn: bool = False  # it is a progress bar
    restarted: str = ""  # why this line begins another run
    epoch: float | None = None
    t_ns: int | None = None  # when it was written, where that is known
    clock: str | None = None  # and by which clock
    stamp_ns: int | None = None  # its timestamp, where the clock is another
    of_one_rank: bool = False  # other ranks print too, and each counts its own
    refused: dict[str, str] = field(default_factory=dict)  # by why: what is said of a figure


class StepLines:
    """Reads the lines of one output in turn."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._ranks = Ranks()
        self._numbering = Numbering()
        self._counted = 0, 0  # step and iteration of the last line that counts both

    @property
    def rank(self) -> int | None:
        """The rank whose lines are kept, where there are several."""
        return self._ranks.kept

    @property
    def has_labels(self) -> bool:
        """Whether the numbers before its lines were found to be ranks."""
        return self._ranks.labelled

    def read(self, line: Line) -> ParsedLine:
        """What this line tells."""
        found, kind = self._dialect.read(line.text)
        if kind != "step":
            return ParsedLine(kind, found)
        seen, counts, epoch = seen_in(found)
        if self._ranks.is_another(line.text, seen.number):
            return ParsedLine("another rank", found)
        if self._is_inside_a_step(found, seen.number):
            return ParsedLine("again", found)
        drawn = bar(line.text)
        seen.elapsed_s = drawn.elapsed_s if drawn else None
        if seen.iterations > 1:
            self._dialect.note(_ITERATIONS.format(seen.iterations))
        told = ParsedLine("step", found, seen, counts, drawn is not None, epoch=epoch)
        _refuse(told)
        if self._dialect.whole_numbers and seen.number is not None:
            self._judge(told, seen.number, line)
        return told

    def _is_inside_a_step(self, found: list[NamedNumber], step: int | None) -> bool:
        """Whether a line counts an iteration that ends no step: litgpt's `iter 3 step 1`."""
        iteration = iteration_of(found)
        if iteration is None or step is None:
            return False
        last, self._counted = self._counted, (step, iteration)
        return step == last[0] and iteration > last[1]

    def _judge(self, told: ParsedLine, number: int, line: Line) -> None:
        last = self._numbering.last
        verdict = self._numbering.judge(number, line)
        if verdict == "again":
            told.kind = "again"
        elif verdict == "restart":
            told.restarted = f"the step number went from {last} back to {number}"


def _refuse(told: ParsedLine) -> None:
    """Leave out a step time or a rate that is none, as 0 or -1."""
    where = "" if told.seen.number is None else f" of step {told.seen.number}"
    is_refused = False
    for pair in told.found:
        why = ""
        if pair.means.kind == "own_time" and told.seen.own_s is None:
            why = _NO_TIME
        elif pair.value <= 0 and _is_pace(pair):
            why, is_refused = _NO_PACE, True
        if why:
            told.refused.setdefault(why, _REFUSED.format(pair.printed, pair.value, where, why))
    if is_refused:
        told.found = [p for p in told.found if not (_is_pace(p) and p.value <= 0)]


def _is_pace(pair: NamedNumber) -> bool:
    if pair.means.kind != "rate" or "peak" in pair.printed:
        return False
    return "/s" in pair.means.unit or pair.means.name == "throughput"


def one_rank(rank: int | None, dialect: Dialect) -> str:
    """What is said where several ranks print."""
    said = f"of the step lines of several ranks, only those of rank {rank} are read"
    return said if dialect.counts_all_ranks else f"{said}: tokens are of one rank"


def step_lines(dialect: Dialect, lines: Iterable[Line]) -> Iterator[ParsedLine]:
    """The step lines of a log file one by one, each with its time by the log's own clock."""
    reader, clock = StepLines(dialect), FileClock()
    of_one_rank, refused = False, set[str]()
    for line in dialect.joined(lines):
        if not dialect.wanted(line.text):
            continue
        told = reader.read(line)
        if told.kind == "another rank":
            of_one_rank = not dialect.counts_all_ranks
            dialect.note(one_rank(reader.rank, dialect))
        if told.kind != "step":
            continue
        told.of_one_rank = of_one_rank
        for why, said in told.refused.items():
            if why not in refused:
                refused.add(why)
                dialect.note(said)
        if told.restarted:
            clock.begin_again()
        sums = dialect.sums_step_times
        told.t_ns = clock.time(line.text, told.seen, sums_step_times=sums)
        told.clock = clock.kind
        told.stamp_ns = stamp_ns(line.text) if clock.leaves_stamps else None
        yield told
