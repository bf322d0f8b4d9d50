"""Finds the step lines of an output, each step once.

A line's figures are read by its dialect; lines of other ranks and redrawn bars are left out. Runs
made of a log and logs read as a table both use this, so that they agree on the steps.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Literal

from ergmeter.importers.engine.pairs import (
    EVALUATION_STEP,
    NamedNumber,
    is_evaluation_line,
    is_step_line,
    pairs,
    worth_reading,
)
from ergmeter.importers.engine.parsed_line import STEP_FIGURES, LineKind, ParsedLine
from ergmeter.importers.engine.progress_bar import bar
from ergmeter.importers.engine.timestamps import FileClock, epoch_ns, stamp_ns
from ergmeter.ports import Line


class Dialect:
    """How a program prints its steps; this base class reads any training loop.

    A subclass overrides what its program prints differently: which figures a line holds. Numbers,
    ranks, clocks and restarts are handled once, by `StepLines`, `reading` and `log`. An instance
    serves one pass over an output.
    """

    # Its numbers count the whole training: one that falls is a restart, one that comes again is a
    # bar drawn again or another rank's line, and no step.
    whole_numbers: bool = False
    # Its rates are means over this many steps, so those of the first steps include compilation.
    rate_steps: int = 1
    # Its counts are of the whole training, whichever rank prints them.
    counts_all_ranks: bool = False
    # It prints no step numbers, so its lines were counted: only the printed step times say how long
    # a step took.
    sums_step_times: bool = False

    def __init__(self) -> None:
        self.notes: list[str] = []  # assumptions, each reported once

    def joined(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Yields the lines, with those that make one step together joined."""
        return iter(lines)

    def wanted(self, text: str) -> bool:
        """False if a line can't be a step line: a quick check that skips most lines."""
        return worth_reading(text)

    def pairs(self, text: str) -> list[NamedNumber]:
        """The figures of a line."""
        return pairs(text)

    def is_step(self, pairs: list[NamedNumber], text: str) -> bool:
        """True if a line with these figures ends a step of training."""
        return is_step_line(pairs, text) and not of_hf_trainer(pairs, text)

    def is_evaluation(self, pairs: list[NamedNumber], text: str) -> bool:
        """True if all its figures are of an evaluation."""
        return is_evaluation_line(pairs, text)

    def read(self, text: str) -> tuple[list[NamedNumber], LineKind]:
        """The figures of a line, and its kind."""
        pairs = self.pairs(text)
        if self.is_evaluation(pairs, text):
            return pairs, "evaluation"
        return pairs, "step" if self.is_step(pairs, text) else "other"

    def note(self, message: str) -> None:
        """Notes an assumption, once."""
        if message not in self.notes:
            self.notes.append(message)


class NumberedLines(Dialect):
    """Lines of one program: each has the step of the whole training, whichever rank prints it."""

    whole_numbers = True
    counts_all_ranks = True

    def is_step(self, pairs: list[NamedNumber], text: str) -> bool:  # noqa: ARG002
        """True for every line with a step number."""
        return any(pair.means.kind == "step" for pair in pairs)

    def is_evaluation(self, pairs: list[NamedNumber], text: str) -> bool:  # noqa: ARG002
        """Always False: `wanted` lets no line of an evaluation through."""
        return False


def with_step(pairs: Iterable[NamedNumber | None]) -> list[NamedNumber]:
    """The figures that a line has, if the step's number is one of them; else none."""
    figures = [pair for pair in pairs if pair is not None]
    return figures if any(pair.means.kind == "step" for pair in figures) else []


def of_hf_trainer(pairs: list[NamedNumber], text: str) -> bool:
    """True for a dict of transformers' Trainer (epoch, no step), which has its own importer."""
    return "{'" in text and "'epoch'" in text and all(p.means.kind != "step" for p in pairs)


_LONGEST_STEP_S = 1e6  # eleven days; a longer "step time" is some other number


def is_result(pair: NamedNumber) -> bool:
    """True if a figure is an evaluation's result, not its progress."""
    if pair.means.kind == "eval":
        return not EVALUATION_STEP.fullmatch(pair.means.name)
    return pair.means.kind in ("loss", "count")


def parsed_step(pairs: list[NamedNumber]) -> ParsedLine:
    """The step line that these pairs make, without its time."""
    best: dict[str, NamedNumber] = {}
    parsed = ParsedLine("step", pairs)
    for pair in pairs:
        means = pair.means
        kind = means.kind
        if kind == "count":
            parsed.counts.setdefault(means.name, int(pair.value))
        elif kind not in best or means.rank < best[kind].means.rank:
            best[kind] = pair
    for name in (*STEP_FIGURES, "epoch"):
        if name in best:
            setattr(parsed, name, best[name].value)
    if "step" in best:
        parsed.number = int(best["step"].value)
    if "epoch_steps" in best:
        parsed.epoch_steps = int(best["epoch_steps"].value)
    if "own_time" in best:
        _take_own_time(parsed, best["own_time"])
    return parsed


def _take_own_time(parsed: ParsedLine, printed: NamedNumber) -> None:
    own_s = printed.value * printed.means.scale
    if printed.means.name.startswith("iter") and parsed.number:
        iteration = iteration_of(parsed.pairs)
        if iteration and iteration % parsed.number == 0:
            parsed.iterations = iteration // parsed.number
        own_s *= parsed.iterations
    parsed.own_s = own_s if 0 < own_s < _LONGEST_STEP_S else None


def iteration_of(pairs: list[NamedNumber]) -> int | None:
    """The iteration on a line that counts steps beside it: litgpt's `iter 8 step 2`."""
    counted = {p.means.name.startswith("iter"): p.value for p in pairs if p.means.kind == "step"}
    return int(counted[True]) if len(counted) == 2 else None


# Ranks. A rank names itself (`[rank1]:`, torchrun's `[default1]:`, mpirun's `[1,3]<stdout>:`,
# `rank=1`), or srun puts its number before the line (`3: step=..`). A number before a line may
# also be an epoch's. It is a rank's if two of them print the same step; until then every line is
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
    """The rank named in a line."""
    if "ank" not in text and "ANK" not in text and not text.startswith("[") and "[d" not in text:
        return None  # most lines skip the full search
    match = _NAMED.search(text)
    return int(match[1] or match[2] or match[3]) if match else None


def label_of(text: str) -> int | None:
    """The number before a line, which may be a rank's."""
    match = _LABEL.match(text)
    return int(match[1]) if match else None


class Ranks:
    """Keeps the lines of the first rank that prints a step."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self._label: int | None = None
        self.labelled = False  # numbers before lines are ranks
        self._recent: deque[tuple[int, int | None]] = deque(maxlen=_RECENT)

    def is_another(self, text: str, number: int | None) -> bool:
        """True if this step line is of another rank than the one that is read."""
        rank = rank_of(text)
        if rank is None:
            return self._is_labelled(text, number)
        self.rank = rank if self.rank is None else self.rank
        return rank != self.rank

    def _is_labelled(self, text: str, number: int | None) -> bool:
        label = label_of(text)
        if label is None:
            return False
        self._label = label if self._label is None else self._label
        if not self.labelled and number is not None and label != number:
            # Of two ranks that speak of one step, the first to speak of it is kept.
            firsts = [other for other, of in self._recent if of == number and other != label]
            self.labelled = bool(firsts)
            self.rank = self._label = firsts[0] if firsts else self._label
        self._recent.append((label, number))
        return self.labelled and label != self._label


# Numbering, for programs whose step numbers count the whole training. A bar is drawn many times
# for one step. Ranks that do not name themselves print each step in turn, sometimes out of order.
# A number below the last is another run, unless it is the number just before, is not the first of
# the run, and comes sooner than a next step would.


Verdict = Literal["next", "again", "restart"]


class Numbering:
    """Judges whether each step number of an output is the next step, a repetition or a restart."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._before: tuple[int, Line] | None = None  # the number before the last, and its line
        self._last: tuple[int, Line] | None = None

    @property
    def last(self) -> int | None:
        """The number of the last step."""
        return self._last[0] if self._last else None

    def judge(self, number: int, line: Line) -> Verdict:
        """Judge the next step number, which is printed in this line."""
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
        """True if a slow rank printed this line, which is of the step before the last."""
        if self._before is None or self._last is None or number == self._first:
            return False
        if number != self._before[0]:
            return False
        before_ns, last_ns, now_ns = map(_t_ns, (self._before[1], self._last[1], line))
        if before_ns is None or last_ns is None or now_ns is None:
            return True
        return now_ns - last_ns < max(last_ns - before_ns, 1)


def _t_ns(line: Line) -> int | None:
    return stamp_ns(line.text) if line.t_ns is None else line.t_ns


# Numbers of several programs in one output. Those of epochs fall to the same start each time. Those
# of programs that print in turn fall again and again, each time to a higher one: 5, 1005, 6, 1006.
# Those of programs that print in blocks, or of an evaluation that counts its own steps, go on where
# they stopped: 1 to 80, 1 to 80, 81 to 160.


_WATCHED = 8  # numbers in which three falls are found
_EVEN = 3  # numbers at one stride: where such a run stops, another may resume it
_LEAP = 2  # times the stride


class MixedNumbers:
    """Notices, by their step numbers, that lines are of several programs."""

    def __init__(self) -> None:
        self.recent: deque[int] = deque(maxlen=_WATCHED)
        self._stride = 0  # of the present run of numbers
        self._length = 1  # of that run; 0 if it is not even
        self._next_of_stopped: deque[int] = deque(maxlen=_WATCHED)

    def take(self, number: int) -> bool:
        """Takes the next number. True if it can't be of the same program as those before."""
        last = self.recent[-1] if self.recent else number
        stride = number - last
        if not self.recent or stride:
            self.recent.append(number)
        if not stride:
            return False
        if stride > 0 and self._length == 1:
            self._stride = stride
        if 0 < stride <= _LEAP * self._stride:
            self._length = self._length + 1 if stride == self._stride and self._length else 0
            return False
        is_even, self._length = self._length >= _EVEN, 1
        if is_even and number in self._next_of_stopped:
            return True
        if is_even and stride < 0:
            self._next_of_stopped.append(last + self._stride)
        falls = [later for earlier, later in pairwise(self.recent) if later < earlier][-3:]
        return len(falls) == 3 and falls[0] < falls[1] < falls[2]


_NO_TIME = "can't be how long a step took"
_NO_PACE = "can't be a pace"
_REFUSED = "{}={:g}{} {}: it is left out, and so are others like it"

_ITERATIONS = "a step's time is its line's iter time times {}, the iterations per step on that line"


class StepLines:
    """Reads the lines of one output in turn."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.clock = FileClock()
        self.ranks = Ranks()
        self._numbering = Numbering()
        self._counted = 0, 0  # step and iteration of the last line that counts both
        self._of_one_rank = False

    def all(self, lines: Iterable[Line]) -> Iterator[ParsedLine]:
        """The step lines of a log file one by one, each with its time by the log's own clock."""
        refused = set[str]()
        for line in self.dialect.joined(lines):
            parsed = self.read(line) if self.dialect.wanted(line.text) else None
            if parsed is None:
                continue
            if parsed.kind == "another rank":
                self.dialect.note(self.one_rank_note)
            if parsed.kind == "step":
                for why, message in parsed.refused.items():
                    if why not in refused:
                        refused.add(why)
                        self.dialect.note(message)
                yield parsed

    @property
    def one_rank_note(self) -> str:
        """The note that only one rank's step lines are read."""
        rank = self.ranks.rank
        message = f"of the step lines of several ranks, only those of rank {rank} are read"
        return message if self.dialect.counts_all_ranks else f"{message}: tokens are of one rank"

    def read(self, line: Line) -> ParsedLine:
        """Parses a line: its kind, figures, step and time."""
        pairs, kind = self.dialect.read(line.text)
        if kind != "step":
            return ParsedLine(kind, pairs)
        parsed = parsed_step(pairs)
        if self.ranks.is_another(line.text, parsed.number):
            parsed.kind = "another rank"
            self._of_one_rank = not self.dialect.counts_all_ranks
            return parsed
        if self._is_inside_a_step(pairs, parsed.number):
            parsed.kind = "again"
            return parsed
        if progress := bar(line.text):
            parsed.is_bar, parsed.elapsed_s = True, progress.elapsed_s
            named = (pair for pair in pairs if pair.means.kind == "step")
            parsed.number_done = all(pair.printed == "it" for pair in named)
        if parsed.iterations > 1:
            self.dialect.note(_ITERATIONS.format(parsed.iterations))
        parsed.of_one_rank = self._of_one_rank
        _refuse(parsed)
        if self.dialect.whole_numbers and parsed.number is not None:
            self._judge(parsed, parsed.number, line)
        if parsed.kind == "step":
            self._time(parsed, line)
        return parsed

    def _is_inside_a_step(self, pairs: list[NamedNumber], step: int | None) -> bool:
        """True if a line is of an iteration that ends no step: litgpt's `iter 3 step 1`."""
        iteration = iteration_of(pairs)
        if iteration is None or step is None:
            return False
        last, self._counted = self._counted, (step, iteration)
        return step == last[0] and iteration > last[1]

    def _judge(self, parsed: ParsedLine, number: int, line: Line) -> None:
        last = self._numbering.last
        verdict = self._numbering.judge(number, line)
        if verdict == "again":
            parsed.kind = "again"
        elif verdict == "restart":
            parsed.restarted = f"the step number went from {last} back to {number}"
            self.clock.begin_again()

    def _time(self, parsed: ParsedLine, line: Line) -> None:
        t_ns = line.t_ns
        if t_ns is None:
            stamps = (epoch_ns(p.value) for p in parsed.pairs if p.means.kind == "timestamp")
            printed_ns = next((stamp for stamp in stamps if stamp is not None), None)
            sums = self.dialect.sums_step_times
            t_ns = self.clock.time(line.text, parsed, printed_ns, sums_step_times=sums)
            parsed.clock = self.clock.kind
            parsed.stamp_ns = stamp_ns(line.text) if self.clock.leaves_stamps else None
        parsed.t_ns, parsed.is_timed = t_ns or 0, t_ns is not None


def _refuse(parsed: ParsedLine) -> None:
    """Removes a step time or a rate that is impossible, such as 0 or -1."""
    where = "" if parsed.number is None else f" of step {parsed.number}"
    is_refused = False
    for pair in parsed.pairs:
        why = ""
        if pair.means.kind == "own_time" and parsed.own_s is None:
            why = _NO_TIME
        elif pair.value <= 0 and _is_pace(pair):
            why, is_refused = _NO_PACE, True
        if why:
            parsed.refused.setdefault(why, _REFUSED.format(pair.printed, pair.value, where, why))
    if is_refused:
        parsed.pairs = [p for p in parsed.pairs if not (_is_pace(p) and p.value <= 0)]


def _is_pace(pair: NamedNumber) -> bool:
    if pair.means.kind != "rate" or "peak" in pair.printed:
        return False
    return "/s" in pair.means.unit or pair.means.name == "throughput"
