"""Turns the step lines of an output into records.

A program's own figures (tokens/s, MFU) may be averages of rates or include the compile, so they
become Reported. A Step is made only of counted tokens and of the times at which lines came.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ergmeter.importers.engine.pairs import NamedNumber
from ergmeter.importers.engine.spans import StepSpans
from ergmeter.importers.engine.step_line import (
    COUNTS,
    HELD_LINES,
    Losses,
    Mode,
    TokensAre,
    Total,
    decide_mode,
    mode_note,
    retracted_note,
)
from ergmeter.importers.engine.step_lines import (
    STEP_FIGURES,
    Dialect,
    ParsedLine,
    StepLines,
    counts_of,
    is_result,
    one_rank_note,
)
from ergmeter.importers.engine.streams import SEVERAL, TWICE, Waiting
from ergmeter.importers.engine.timestamps import FileClock, stamp_ns
from ergmeter.ports import Line
from ergmeter.records import STEP_LOSS, Mark, Record, Reported

_EVALUATED = "an evaluation was printed between two step lines: the step after it includes its time"


_BESIDE_STEP = ("rate", "eval", "own_time")  # figures that become no field of a Step


class RecordReader:
    """One pass over one output."""

    def __init__(self, dialect: Dialect, *, tokens_are: TokensAre | None = None) -> None:
        self._dialect = dialect
        self._step_lines = StepLines(dialect)
        self._modes: dict[str, Mode] = {name: m for name, (_, m) in COUNTS.items() if m}
        self._unexplained = set(self._modes)
        self._understood: dict[str, str] = {}  # by name: what its counts were taken for
        if tokens_are is not None:
            unclear = (n for n, (field, m) in COUNTS.items() if m is None and field != "samples")
            self._modes |= dict.fromkeys(unclear, tokens_are)
        self._totals: dict[str, Total] = {}  # those that were decided by their values
        self._waiting: Waiting[ParsedLine] = Waiting()
        self._pending: list[ParsedLine] = []
        self._spans = StepSpans()
        self._clock = FileClock()
        self._now_ns = 0  # where no line has given a time yet, Reported carries this
        self._number: int | None = None
        self._epoch: float | None = None  # of the last step line that names one
        self._evaluated = False  # an evaluation was printed since the last step line
        self._evaluated_ns: int | None = None  # the last of its lines that was labelled so
        self._losses = Losses()
        self._noted: set[str] = set()

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
            parsed = self._step_lines.read(line)
            yield from (
                self._step(line, parsed) if parsed.kind == "step" else self._beside(line, parsed)
            )
        yield from self._finish()

    def _say_again(self, t_ns: int) -> Iterator[Record]:
        """Yields the marks about assumptions again, for a further run."""
        self._noted.clear()
        self._dialect.notes.clear()
        self._unexplained = {name for name, (_, mode) in COUNTS.items() if mode}
        yield from self._clock.assumed_again(t_ns)
        for message in self._understood.values():
            yield Mark(t_ns, "assumed", message)

    def _finish(self) -> Iterator[Record]:
        for pending in self._waiting.finish():
            self._pending.append(pending)
            yield from self._release(final=False)
        yield from self._release(final=True)
        yield from self._say_twice(self._now_ns)
        if not self._waiting.streams.mixed:
            yield from self._spans.end()

    def _begin_again(self, t_ns: int, reason: str) -> Iterator[Record]:
        """Begins another run in the same output and forgets the one before."""
        yield from self._finish()
        yield Mark(t_ns, "restarted", reason)
        self._waiting, self._spans, self._losses = Waiting(), StepSpans(), Losses()
        self._number = self._epoch = self._evaluated_ns = None
        self._evaluated = False
        self._clock.begin_again()

    def _tick(self, t_ns: int) -> Iterator[Record]:
        for pending in self._waiting.tick(t_ns):
            self._pending.append(pending)
            yield from self._release(final=False)
        if not self._pending and not self._waiting and not self._waiting.streams.mixed:
            yield from self._spans.tick(t_ns)

    def _beside(self, line: Line, parsed: ParsedLine) -> Iterator[Record]:
        """A line that is no step."""
        yield from self._say_noted(line)
        if parsed.kind == "evaluation":
            yield from self._evaluation(line, parsed.pairs)
        elif parsed.kind == "another rank":
            message = one_rank_note(self._step_lines.rank, self._dialect)
            yield from self._say(self._now_ns if line.t_ns is None else line.t_ns, message)
        elif parsed.kind == "other":
            self._evaluated |= any(pair.means.kind == "eval" for pair in parsed.pairs)
            self._now_ns = self._now_ns if line.t_ns is None else line.t_ns
            stated = [pair for pair in parsed.pairs if not pair.spaced]  # and not prose
            yield from self._reported(stated, *_BESIDE_STEP)
            yield from self._reported(stated, *STEP_FIGURES)

    def _step(self, line: Line, parsed: ParsedLine) -> Iterator[Record]:
        pairs, step_line = parsed.pairs, parsed.step_line
        t_ns = line.t_ns
        if t_ns is None:
            sums = self._dialect.sums_step_times
            t_ns = self._clock.time(line.text, step_line, sums_step_times=sums)
        if parsed.restarted:
            yield from self._begin_again(self._now_ns if t_ns is None else t_ns, parsed.restarted)
        if self._dialect.notes:
            yield from self._say_noted(line)
        if line.t_ns is None and self._clock.is_untold:
            yield from self._clock.assumed(t_ns)
        self._now_ns = self._now_ns if t_ns is None else t_ns
        if parsed.refused:
            yield from self._refuse(parsed.refused)
        yield from self._reported(pairs, *_BESIDE_STEP)
        if t_ns is None:
            yield from self._reported(pairs, *STEP_FIGURES)
            return
        if self._waiting.streams.mixed:
            return
        step_line.t_ns, step_line.stamped = t_ns, line.t_ns is None
        parsed.text = line.text
        yield from self._take(parsed)

    def _evaluation(self, line: Line, pairs: list[NamedNumber]) -> Iterator[Record]:
        """A line that is labelled as an evaluation's: no step, and its loss is not training's."""
        self._evaluated = True
        if any(is_result(pair) for pair in pairs):  # and not what is about to be evaluated
            self._evaluated_ns = stamp_ns(line.text) if line.t_ns is None else line.t_ns
        self._now_ns = self._now_ns if line.t_ns is None else line.t_ns
        pairs = [pair for pair in pairs if not pair.spaced]
        yield from self._reported(pairs, "eval")
        for pair in pairs:
            if pair.means.kind == "loss":
                yield Reported(self._now_ns, "eval_loss", pair.value, "")

    def _take(self, line: ParsedLine) -> Iterator[Record]:
        line.step_line.redrawn = line.is_bar
        if line.is_bar:
            named = (p for p in line.pairs if p.means.kind == "step")
            line.step_line.number_done = all(p.printed == "it" for p in named)
        epoch, before = line.epoch, self._epoch
        rose = epoch is not None and before is not None and epoch > before
        line.step_line.goes_on = rose or self._evaluated
        line.step_line.evaluated_ns, self._evaluated_ns = self._evaluated_ns, None
        if self._evaluated and self._waiting.streams.began and line.step_line.evaluated_ns is None:
            yield from self._say(line.t_ns, _EVALUATED)
        self._epoch, self._evaluated = before if epoch is None else epoch, False
        # Of the lines before: only the next step tells a rank's line from one that came twice.
        if self._waiting.twice:
            yield from self._say_twice(line.t_ns)
        for pending in self._waiting.take(line):
            self._pending.append(pending)
            yield from self._release(final=False)
        if self._waiting.streams.mixed:
            self._pending.clear()
            message = SEVERAL.format(self._waiting.streams.numbers)
            yield Mark(line.t_ns, "several_programs", message)

    def _refuse(self, refused: dict[str, str]) -> Iterator[Record]:
        """Yields a mark for figures that are left out as impossible, once for each kind."""
        for why, message in refused.items():
            if why not in self._noted:
                self._noted.add(why)
                yield Mark(self._now_ns, "value_refused", message)

    def _say_twice(self, t_ns: int) -> Iterator[Record]:
        if self._waiting.twice and not self._step_lines.has_labels:
            yield from self._say(t_ns, TWICE)

    def _say_noted(self, line: Line) -> Iterator[Record]:
        for message in self._dialect.notes:
            yield from self._say(self._now_ns if line.t_ns is None else line.t_ns, message)

    def _say(self, t_ns: int, what: str) -> Iterator[Record]:
        if what not in self._noted:
            self._noted.add(what)
            yield Mark(t_ns, "assumed", what)

    def _reported(self, pairs: list[NamedNumber], *kinds: str) -> Iterator[Record]:
        for pair in pairs:
            if pair.means.kind in kinds:
                yield Reported(self._now_ns, pair.printed, pair.value, pair.means.unit)

    def _release(self, *, final: bool) -> Iterator[Record]:
        """Passes on the pending lines whose counts are understood."""
        while self._pending:
            first = self._pending[0]
            if not self._modes.keys() >= first.counts.keys():
                for name in first.counts:
                    if name not in self._modes:
                        yield from self._decide(name, final=final)
                if not self._modes.keys() >= first.counts.keys():
                    return
            del self._pending[0]
            yield from self._push(first)

    def _decide(self, name: str, *, final: bool) -> Iterator[Record]:
        numbers: list[int | None] = []
        values: list[int] = []
        for pending in self._pending:
            number = pending.step_line.number
            if numbers and number is not None and number == numbers[-1]:
                continue  # a bar drawn again: no evidence
            if numbers and number is not None and number < (numbers[-1] or 0):
                final = True  # a restart: what comes after it says nothing about before
                break
            if name in pending.counts:
                numbers.append(number)
                values.append(pending.counts[name])
        final = final or len(self._pending) >= HELD_LINES
        mode = decide_mode(numbers, values, final=final)
        if mode is not None:
            self._modes[name] = mode
            if mode == "total":
                self._totals[name] = Total()
            message = self._understood[name] = mode_note(name, mode, values)
            yield Mark(self._pending[0].step_line.t_ns, "assumed", message)

    def _push(self, pending: ParsedLine) -> Iterator[Record]:
        step_line = pending.step_line
        if self._totals:
            yield from self._disprove(pending)
        step_line.counts = counts_of(pending.counts, self._modes)
        totals = (count.value for count in step_line.counts if count.mode == "total")
        step_line.totals_from_zero = step_line.number in (0, 1) and all(totals)
        last, self._number = self._number, step_line.number
        if (
            pending.counts
            and last is not None
            and step_line.number is not None
            and step_line.number - last > 1
        ):
            yield from self._tell_multiplied(pending)
        if self._losses.is_news(step_line.loss):
            where = (
                "a line without a step" if step_line.number is None else f"step {step_line.number}"
            )
            yield from self._losses.watch(step_line.t_ns, step_line.loss, where)
        if step_line.evaluated_ns is not None:
            if self._spans.resumes(step_line):
                yield from self._spans.evaluated(step_line.evaluated_ns)
            elif self._spans.opened:
                yield from self._say(step_line.t_ns, _EVALUATED)
        yield from self._spans.push(step_line)
        if not self._spans.pending:  # it opened a window, and is part of no Step
            self._now_ns = step_line.t_ns
            if step_line.loss is not None:
                yield Reported(step_line.t_ns, STEP_LOSS, step_line.loss, "")
            yield from self._reported(pending.pairs, "learning_rate", "grad_norm")

    def _disprove(self, pending: ParsedLine) -> Iterator[Record]:
        """Retracts a total that falls while the steps go on."""
        for name, value in pending.counts.items():
            total = self._totals.get(name)
            before = total.disproved(pending.number, value) if total else None
            if before is not None:
                del self._totals[name]
                self._modes[name] = "step"
                message = self._understood[name] = retracted_note(name, before, value)
                yield Mark(pending.t_ns, "assumed", message)

    def _tell_multiplied(self, pending: ParsedLine) -> Iterator[Record]:
        """Yields a mark for a count of one step on a line that covers several."""
        totals = {COUNTS[n][0] for n in pending.counts if self._modes[n] == "total"}
        for name in pending.counts:
            is_used = COUNTS[name][0] not in totals
            if is_used and self._modes[name] == "step" and name in self._unexplained:
                self._unexplained.discard(name)
                message = f"{name}= taken times the steps a line covers, as if all had that many"
                yield Mark(pending.step_line.t_ns, "assumed", message)
