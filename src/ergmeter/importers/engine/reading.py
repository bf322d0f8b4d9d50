"""What do the step lines of an output come to, as records?

The trap: the figures a program prints about itself (tokens/s, MFU) are easy to take over and may be
averages of rates, or start with the compile. They go out as Reported; a Step is made only of
counted tokens and of the times at which lines were seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ergmeter.importers.engine.counts import (
    COUNTS,
    HELD_LINES,
    TokensAre,
    Total,
    decided,
    explained,
    taken_back,
)
from ergmeter.importers.engine.dialect import Dialect
from ergmeter.importers.engine.pairs import NamedNumber
from ergmeter.importers.engine.pending_step import STEP_FIGURES, PendingStep, counts_of, is_result
from ergmeter.importers.engine.spans import StepSpans
from ergmeter.importers.engine.step_line import Losses, Mode
from ergmeter.importers.engine.step_lines import ParsedLine, StepLines, one_rank
from ergmeter.importers.engine.streams import SEVERAL, TWICE, Waiting
from ergmeter.importers.engine.timestamps import FileClock, stamp_ns
from ergmeter.ports import Line
from ergmeter.records import STEP_LOSS, Mark, Record, Reported

_EVALUATED = "an evaluation was printed between two step lines: the step after it includes its time"


_BESIDE_STEP = ("rate", "eval", "own_time")  # figures that become no field of a Step


class OutputReader:
    """One pass over one output."""

    def __init__(self, dialect: Dialect, *, tokens_are: TokensAre | None = None) -> None:
        self._dialect = dialect
        self._step_lines = StepLines(dialect)
        self._modes: dict[str, Mode] = {name: m for name, (_, m) in COUNTS.items() if m}
        self._told = set(self._modes)
        self._understood: dict[str, str] = {}  # by name: what its counts were taken for
        if tokens_are is not None:
            unclear = (n for n, (field, m) in COUNTS.items() if m is None and field != "samples")
            self._modes |= dict.fromkeys(unclear, tokens_are)
        self._totals: dict[str, Total] = {}  # those that were decided by their values
        self._waiting: Waiting[PendingStep] = Waiting()
        self._held: list[PendingStep] = []
        self._spans = StepSpans()
        self._clock = FileClock()
        self._now_ns = 0  # where no line has given a time yet, Reported carries this
        self._number: int | None = None
        self._epoch: float | None = None  # of the last step line that names one
        self._evaluated = False  # an evaluation was printed since the last step line
        self._evaluated_ns: int | None = None  # the last of its lines that was labelled so
        self._losses = Losses()
        self._said: set[str] = set()

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yield records as the lines come; at most a few lines are held back."""
        for record in self._all(lines):
            yield record
            if isinstance(record, Mark) and record.name == "restarted":
                yield from self._say_again(record.t_ns)

    def _all(self, lines: Iterable[Line]) -> Iterator[Record]:
        for number, line in enumerate(self._dialect.joined(lines)):
            if number == 0 and not line.text and line.t_ns is not None:
                self._spans.began(line.t_ns)
            if line.t_ns is not None:
                yield from self._tick(line.t_ns)
            if not self._dialect.wanted(line.text):
                continue
            told = self._step_lines.read(line)
            yield from self._step(line, told) if told.kind == "step" else self._beside(line, told)
        yield from self._finish()

    def _say_again(self, t_ns: int) -> Iterator[Record]:
        """What is assumed of a further run too; what its own lines call for comes with them."""
        self._said.clear()
        self._dialect.notes.clear()
        self._told = {name for name, (_, mode) in COUNTS.items() if mode}
        yield from self._clock.told_again(t_ns)
        for said in self._understood.values():
            yield Mark(t_ns, "assumed", said)

    def _finish(self) -> Iterator[Record]:
        for held in self._waiting.finish():
            self._held.append(held)
            yield from self._release(final=False)
        yield from self._release(final=True)
        yield from self._say_twice(self._now_ns)
        if not self._waiting.streams.mixed:
            yield from self._spans.end()

    def _begin_again(self, t_ns: int, reason: str) -> Iterator[Record]:
        """Another run begins in the same output: what was learnt of the one before is over."""
        yield from self._finish()
        yield Mark(t_ns, "restarted", reason)
        self._waiting, self._spans, self._losses = Waiting(), StepSpans(), Losses()
        self._number = self._epoch = self._evaluated_ns = None
        self._evaluated = False
        self._clock.begin_again()

    def _tick(self, t_ns: int) -> Iterator[Record]:
        for held in self._waiting.tick(t_ns):
            self._held.append(held)
            yield from self._release(final=False)
        if not self._held and not self._waiting and not self._waiting.streams.mixed:
            yield from self._spans.tick(t_ns)

    def _beside(self, line: Line, told: ParsedLine) -> Iterator[Record]:
        """A line that is no step."""
        yield from self._say_noted(line)
        if told.kind == "evaluation":
            yield from self._evaluation(line, told.found)
        elif told.kind == "another rank":
            said = one_rank(self._step_lines.rank, self._dialect)
            yield from self._say(self._now_ns if line.t_ns is None else line.t_ns, said)
        elif told.kind == "other":
            self._evaluated |= any(pair.means.kind == "eval" for pair in told.found)
            self._now_ns = self._now_ns if line.t_ns is None else line.t_ns
            stated = [pair for pair in told.found if not pair.spaced]  # and not prose
            yield from self._reported(stated, *_BESIDE_STEP)
            yield from self._reported(stated, *STEP_FIGURES)

    def _step(self, line: Line, told: ParsedLine) -> Iterator[Record]:
        found, seen = told.found, told.seen
        t_ns = line.t_ns
        if t_ns is None:
            sums = self._dialect.sums_step_times
            t_ns = self._clock.time(line.text, seen, sums_step_times=sums)
        if told.restarted:
            yield from self._begin_again(self._now_ns if t_ns is None else t_ns, told.restarted)
        if self._dialect.notes:
            yield from self._say_noted(line)
        if line.t_ns is None and self._clock.is_untold:
            yield from self._clock.told(t_ns)
        self._now_ns = self._now_ns if t_ns is None else t_ns
        if told.refused:
            yield from self._refuse(told.refused)
        yield from self._reported(found, *_BESIDE_STEP)
        if t_ns is None:
            yield from self._reported(found, *STEP_FIGURES)
            return
        if self._waiting.streams.mixed:
            return
        seen.t_ns, seen.stamped = t_ns, line.t_ns is None
        yield from self._take(
            PendingStep(seen, told.counts, found, told.drawn, line.text, told.epoch)
        )

    def _evaluation(self, line: Line, found: list[NamedNumber]) -> Iterator[Record]:
        """A line that is labelled as an evaluation's: no step, and its loss is not training's."""
        self._evaluated = True
        if any(is_result(pair) for pair in found):  # and not what is about to be evaluated
            self._evaluated_ns = stamp_ns(line.text) if line.t_ns is None else line.t_ns
        self._now_ns = self._now_ns if line.t_ns is None else line.t_ns
        found = [pair for pair in found if not pair.spaced]
        yield from self._reported(found, "eval")
        for pair in found:
            if pair.means.kind == "loss":
                yield Reported(self._now_ns, "eval_loss", pair.value, "")

    def _take(self, line: PendingStep) -> Iterator[Record]:
        line.seen.redrawn = line.drawn
        if line.drawn:
            named = (p for p in line.found if p.means.kind == "step")
            line.seen.number_done = all(p.printed == "it" for p in named)
        epoch, before = line.epoch, self._epoch
        rose = epoch is not None and before is not None and epoch > before
        line.seen.goes_on = rose or self._evaluated
        line.seen.evaluated_ns, self._evaluated_ns = self._evaluated_ns, None
        if self._evaluated and self._waiting.streams.began and line.seen.evaluated_ns is None:
            yield from self._say(line.t_ns, _EVALUATED)
        self._epoch, self._evaluated = before if epoch is None else epoch, False
        # Of the lines before: only the next step tells a rank's line from one that came twice.
        if self._waiting.twice:
            yield from self._say_twice(line.t_ns)
        for held in self._waiting.take(line):
            self._held.append(held)
            yield from self._release(final=False)
        if self._waiting.streams.mixed:
            self._held.clear()
            told = SEVERAL.format(self._waiting.streams.numbers)
            yield Mark(line.t_ns, "several_programs", told)

    def _refuse(self, refused: dict[str, str]) -> Iterator[Record]:
        """Say of figures that can't be true that they are left out, of each kind once."""
        for why, said in refused.items():
            if why not in self._said:
                self._said.add(why)
                yield Mark(self._now_ns, "value_refused", said)

    def _say_twice(self, t_ns: int) -> Iterator[Record]:
        if self._waiting.twice and not self._step_lines.has_labels:
            yield from self._say(t_ns, TWICE)

    def _say_noted(self, line: Line) -> Iterator[Record]:
        for said in self._dialect.notes:
            yield from self._say(self._now_ns if line.t_ns is None else line.t_ns, said)

    def _say(self, t_ns: int, what: str) -> Iterator[Record]:
        if what not in self._said:
            self._said.add(what)
            yield Mark(t_ns, "assumed", what)

    def _reported(self, found: list[NamedNumber], *kinds: str) -> Iterator[Record]:
        for pair in found:
            if pair.means.kind in kinds:
                yield Reported(self._now_ns, pair.printed, pair.value, pair.means.unit)

    def _release(self, *, final: bool) -> Iterator[Record]:
        """Hand on the held lines whose counts are understood."""
        while self._held:
            first = self._held[0]
            if not self._modes.keys() >= first.counts.keys():
                for name in first.counts:
                    if name not in self._modes:
                        yield from self._decide(name, final=final)
                if not self._modes.keys() >= first.counts.keys():
                    return
            del self._held[0]
            yield from self._push(first)

    def _decide(self, name: str, *, final: bool) -> Iterator[Record]:
        numbers: list[int | None] = []
        values: list[int] = []
        for held in self._held:
            number = held.seen.number
            if numbers and number is not None and number == numbers[-1]:
                continue  # a bar drawn again: no evidence
            if numbers and number is not None and number < (numbers[-1] or 0):
                final = True  # a restart: what comes after it says nothing about before
                break
            if name in held.counts:
                numbers.append(number)
                values.append(held.counts[name])
        final = final or len(self._held) >= HELD_LINES
        mode = decided(numbers, values, final=final)
        if mode is not None:
            self._modes[name] = mode
            if mode == "total":
                self._totals[name] = Total()
            told = self._understood[name] = explained(name, mode, values)
            yield Mark(self._held[0].seen.t_ns, "assumed", told)

    def _push(self, held: PendingStep) -> Iterator[Record]:
        seen = held.seen
        if self._totals:
            yield from self._disprove(held)
        seen.counts = counts_of(held.counts, self._modes)
        totals = (count.value for count in seen.counts if count.mode == "total")
        seen.totals_from_zero = seen.number in (0, 1) and all(totals)
        last, self._number = self._number, seen.number
        if held.counts and last is not None and seen.number is not None and seen.number - last > 1:
            yield from self._tell_multiplied(held)
        if self._losses.is_news(seen.loss):
            where = "a line without a step" if seen.number is None else f"step {seen.number}"
            yield from self._losses.watch(seen.t_ns, seen.loss, where)
        if seen.evaluated_ns is not None:
            if self._spans.resumes(seen):
                yield from self._spans.evaluated(seen.evaluated_ns)
            elif self._spans.opened:
                yield from self._say(seen.t_ns, _EVALUATED)
        yield from self._spans.push(seen)
        if not self._spans.pending:  # it opened a window, and is part of no Step
            self._now_ns = seen.t_ns
            if seen.loss is not None:
                yield Reported(seen.t_ns, STEP_LOSS, seen.loss, "")
            yield from self._reported(held.found, "learning_rate", "grad_norm")

    def _disprove(self, held: PendingStep) -> Iterator[Record]:
        """A total that falls while the steps go on was none."""
        for name, value in held.counts.items():
            total = self._totals.get(name)
            before = total.disproved(held.number, value) if total else None
            if before is not None:
                del self._totals[name]
                self._modes[name] = "step"
                told = self._understood[name] = taken_back(name, before, value)
                yield Mark(held.t_ns, "assumed", told)

    def _tell_multiplied(self, held: PendingStep) -> Iterator[Record]:
        """A name that means one step, on a line that covers several: say what is made of it."""
        totals = {COUNTS[n][0] for n in held.counts if self._modes[n] == "total"}
        for name in held.counts:
            is_used = COUNTS[name][0] not in totals
            if is_used and self._modes[name] == "step" and name in self._told:
                self._told.discard(name)
                told = f"{name}= taken times the steps a line covers, as if all had that many"
                yield Mark(held.seen.t_ns, "assumed", told)
