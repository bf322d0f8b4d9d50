"""Which lines of an output tell of a step, each step once?

What is common to a run that is made of a log and to a log read as a table: a line's figures by its
dialect, other ranks left out, and bars that are drawn again. The trap was two ways through a log
that did not agree on its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ergmeter.importers.bars import bar
from ergmeter.importers.dialect import Dialect
from ergmeter.importers.held import iteration_of, seen_in
from ergmeter.importers.numbering import Numbering
from ergmeter.importers.pairs import Pair
from ergmeter.importers.ranks import Ranks
from ergmeter.importers.seen import Seen
from ergmeter.importers.stamps import stamp_ns
from ergmeter.importers.times import FileClock
from ergmeter.ports import Line

_NO_TIME = "can't be how long a step took"
_NO_PACE = "can't be a pace"
_REFUSED = "{}={:g}{} {}: it is left out, and so are others like it"

_ITERATIONS = "a step's time is its line's iter time times {}, the iterations of a step by its line"

Kind = Literal["step", "again", "another rank", "evaluation", "other"]


@dataclass(slots=True)
class Told:
    """What a line told, and of what."""

    kind: Kind
    found: list[Pair]
    seen: Seen = field(default_factory=lambda: Seen(0))
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

    def read(self, line: Line) -> Told:
        """What this line tells."""
        found, kind = self._dialect.read(line.text)
        if kind != "step":
            return Told(kind, found)
        seen, counts, epoch = seen_in(found)
        if self._ranks.is_another(line.text, seen.number):
            return Told("another rank", found)
        if self._is_inside_a_step(found, seen.number):
            return Told("again", found)
        drawn = bar(line.text)
        seen.elapsed_s = drawn.elapsed_s if drawn else None
        if seen.iterations > 1:
            self._dialect.note(_ITERATIONS.format(seen.iterations))
        told = Told("step", found, seen, counts, drawn is not None, epoch=epoch)
        _refuse(told)
        if self._dialect.whole_numbers and seen.number is not None:
            self._judge(told, seen.number, line)
        return told

    def _is_inside_a_step(self, found: list[Pair], step: int | None) -> bool:
        """Whether a line counts an iteration that ends no step: litgpt's `iter 3 step 1`."""
        iteration = iteration_of(found)
        if iteration is None or step is None:
            return False
        last, self._counted = self._counted, (step, iteration)
        return step == last[0] and iteration > last[1]

    def _judge(self, told: Told, number: int, line: Line) -> None:
        last = self._numbering.last
        verdict = self._numbering.judge(number, line)
        if verdict == "again":
            told.kind = "again"
        elif verdict == "restart":
            told.restarted = f"the step number went from {last} back to {number}"


def _refuse(told: Told) -> None:
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


def _is_pace(pair: Pair) -> bool:
    if pair.means.kind != "rate" or "peak" in pair.printed:
        return False
    return "/s" in pair.means.unit or pair.means.name == "throughput"


def one_rank(rank: int | None, dialect: Dialect) -> str:
    """What is said where several ranks print."""
    said = f"of the step lines of several ranks, only those of rank {rank} are read"
    return said if dialect.counts_all_ranks else f"{said}: tokens are of one rank"


def step_lines(dialect: Dialect, lines: Iterable[Line]) -> Iterator[Told]:
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
