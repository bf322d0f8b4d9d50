"""Turns the step lines of an output into records.

A program's own figures (tokens/s, MFU) may be averages of rates or include compilation, so they
become Reported. A Step is made only of counted tokens and of the times at which lines came.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ergmeter.importers.engine.pairs import NamedNumber
from ergmeter.importers.engine.parsed_line import (
    COUNTS,
    HELD_LINES,
    STEP_FIGURES,
    Losses,
    Mode,
    ParsedLine,
    Total,
    decide_mode,
    mode_note,
    retracted_note,
)
from ergmeter.importers.engine.spans import StepSpans
from ergmeter.importers.engine.step_lines import Dialect, MixedNumbers, StepLines, is_result
from ergmeter.importers.engine.timestamps import stamp_ns
from ergmeter.ports import Importer, Line
from ergmeter.records import STEP_LOSS, Mark, Record, Reported
from ergmeter.units import NS_PER_S

_EVALUATED = "an evaluation was printed between two step lines: the step after it includes its time"
_SEVERAL = (
    "step lines of several programs, ranks or loops are mixed in this output ({}): "
    "ergmeter can't tell their steps apart; record them one by one, or use ergmeter.Meter in each"
)
_AGAIN = (
    "step lines came again with the same step number and figures: each step counts once; if they "
    "are of several ranks, the tokens are those of one"
)
_BESIDE_STEP = ("rate", "eval", "own_time")  # figures that become no field of a Step
_FIRST_LINES = 8  # wait, since a wrong Step can't be taken back,
_FIRST_WAIT_NS = NS_PER_S  # but no longer than this


def mixed_mark(t_ns: int, numbers: str) -> Mark:
    """The mark that an output mixes the lines of several programs."""
    return Mark(t_ns, "several_programs", _SEVERAL.format(numbers))


class StepLineImporter(Importer):
    """An importer of step lines: they become records, or columns by `read_log`."""

    dialect: type[Dialect] = Dialect  # how its lines are read

    def is_own(self, text: str) -> bool:
        """True if this line is in the importer's format; one such line is enough."""
        raise NotImplementedError

    def recognises(self, head: Sequence[str]) -> bool:
        """True if one of these lines is in the importer's format."""
        return any(map(self.is_own, head))

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yield records as the lines come; at most a few lines are held back."""
        return RecordReader(self.step_lines()).records(lines)

    def step_lines(self) -> StepLines:
        """Return a reader of step lines in this importer's dialect."""
        return StepLines(self.dialect())


class RecordReader:
    """Turns the lines of one output into records, in one pass."""

    def __init__(self, step_lines: StepLines, *, tokens_are: Mode | None = None) -> None:
        self._step_lines = step_lines
        self._dialect = step_lines.dialect
        self._modes: dict[str, Mode] = {name: m for name, (_, m) in COUNTS.items() if m}
        self._understood: dict[str, str] = {}  # by count's name: the note on what it was taken for
        if tokens_are is not None:
            unclear = (n for n, (field, m) in COUNTS.items() if m is None and field != "samples")
            self._modes |= dict.fromkeys(unclear, tokens_are)
        self._totals: dict[str, Total] = {}  # those that were decided by their values
        self._now_ns = 0  # where no line has given a time yet, Reported carries this
        self._noted: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        """Reset the state for a new run."""
        self._spans, self._losses, self._numbers = StepSpans(), Losses(), MixedNumbers()
        self._is_mixed = False
        self._pending: list[ParsedLine] = []
        self._lines = 0  # step lines
        self._first_ns = 0  # when the first of them came
        self._number: int | None = None
        self._epoch: float | None = None  # of the last step line that names one
        self._names: set[frozenset[str]] = set()  # of the figures on lines of the last step
        self._came_again = False  # a line of the last step, with the same names
        self._evaluated = False  # an evaluation was printed since the last step line
        self._evaluated_ns: int | None = None  # the last of its lines that was labelled so

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
            if self._dialect.wanted(line.text):
                parsed = self._step_lines.read(line)
                read = self._step if parsed.kind == "step" else self._beside
                yield from read(line, parsed)
        yield from self._finish()

    def _say_again(self, t_ns: int) -> Iterator[Record]:
        """Yields the marks about assumptions again, for a further run."""
        self._noted.clear()
        self._dialect.notes.clear()
        yield from self._step_lines.clock.assumed_again(t_ns)
        for message in self._understood.values():
            yield Mark(t_ns, "assumed", message)

    def _finish(self) -> Iterator[Record]:
        yield from self._release(final=True)
        yield from self._say_again_lines(self._now_ns)
        if not self._is_mixed:
            yield from self._spans.end()

    def _tick(self, t_ns: int) -> Iterator[Record]:
        if self._pending and t_ns >= self._first_ns + _FIRST_WAIT_NS:
            yield from self._release(final=False)
        if not self._pending and not self._is_mixed:
            yield from self._spans.tick(t_ns)

    def _beside(self, line: Line, parsed: ParsedLine) -> Iterator[Record]:
        """Yield the records of a line that is not a step line."""
        t_ns = self._now_ns if line.t_ns is None else line.t_ns
        yield from self._say(t_ns, *self._dialect.notes)
        stated = [pair for pair in parsed.pairs if not pair.spaced]  # and not prose
        if parsed.kind == "evaluation":
            # Its loss is not training's.
            self._evaluated = True
            if any(is_result(pair) for pair in parsed.pairs):  # not what is about to be evaluated
                self._evaluated_ns = stamp_ns(line.text) if line.t_ns is None else line.t_ns
            self._now_ns = t_ns
            yield from self._reported(stated, "eval")
            for pair in stated:
                if pair.means.kind == "loss":
                    yield Reported(t_ns, "eval_loss", pair.value, "")
        elif parsed.kind == "another rank":
            yield from self._say(t_ns, self._step_lines.one_rank_note)
        elif parsed.kind == "other":
            self._evaluated |= any(pair.means.kind == "eval" for pair in parsed.pairs)
            self._now_ns = t_ns
            yield from self._reported(stated, *_BESIDE_STEP)
            yield from self._reported(stated, *STEP_FIGURES)

    def _step(self, line: Line, parsed: ParsedLine) -> Iterator[Record]:
        t_ns = parsed.t_ns if parsed.is_timed else self._now_ns
        if parsed.restarted:
            yield from self._finish()
            yield Mark(t_ns, "restarted", parsed.restarted)
            self._begin()
        yield from self._say(self._now_ns if line.t_ns is None else t_ns, *self._dialect.notes)
        if line.t_ns is None and self._step_lines.clock.is_untold and parsed.is_timed:
            yield from self._step_lines.clock.assumed_again(t_ns)
        self._now_ns = t_ns
        for why, message in parsed.refused.items():
            if why not in self._noted:
                self._noted.add(why)
                yield Mark(t_ns, "value_refused", message)
        yield from self._reported(parsed.pairs, *_BESIDE_STEP)
        if not parsed.is_timed:
            yield from self._reported(parsed.pairs, *STEP_FIGURES)
        elif not self._is_mixed:
            yield from self._take(parsed)

    def _take(self, line: ParsedLine) -> Iterator[Record]:
        epoch, before = line.epoch, self._epoch
        rose = epoch is not None and before is not None and epoch > before
        line.goes_on = rose or self._evaluated
        line.evaluated_ns, self._evaluated_ns = self._evaluated_ns, None
        if self._evaluated and self._lines and line.evaluated_ns is None:
            yield from self._say(line.t_ns, _EVALUATED)
        self._epoch, self._evaluated = before if epoch is None else epoch, False
        self._first_ns = self._first_ns if self._lines else line.t_ns
        self._lines += 1
        yield from self._compare_with_last(line, rose=rose)
        if self._is_mixed:
            self._pending.clear()
            recent = ", ".join(str(number) for number in list(self._numbers.recent)[-4:])
            yield mixed_mark(line.t_ns, f"numbers such as {recent}")
            return
        self._pending.append(line)
        if self._lines >= _FIRST_LINES or line.t_ns >= self._first_ns + _FIRST_WAIT_NS:
            yield from self._release(final=False)

    def _compare_with_last(self, line: ParsedLine, *, rose: bool) -> Iterator[Record]:
        """Check the step number against those before: is it a repetition, or another program's?"""
        last, self._number = self._number, line.number
        names = frozenset(p.means.name for p in line.pairs if p.means.kind not in ("step", "epoch"))
        if line.number is None or line.is_bar:
            return
        if line.number != last or rose:
            # Only the next step tells a rank's line from one that came again.
            yield from self._say_again_lines(line.t_ns)
            self._names.clear()
        self._came_again |= bool(names) and names in self._names
        self._names.add(names)
        if line.goes_on:
            self._numbers = MixedNumbers()
        self._is_mixed = self._numbers.take(line.number)

    def _say_again_lines(self, t_ns: int) -> Iterator[Record]:
        if self._came_again and not self._step_lines.ranks.labelled:
            yield from self._say(t_ns, _AGAIN)

    def _say(self, t_ns: int, *messages: str) -> Iterator[Record]:
        for message in messages:
            if message not in self._noted:
                self._noted.add(message)
                yield Mark(t_ns, "assumed", message)

    def _reported(self, pairs: list[NamedNumber], *kinds: str) -> Iterator[Record]:
        for pair in pairs:
            if pair.means.kind in kinds:
                yield Reported(self._now_ns, pair.printed, pair.value, pair.means.unit)

    def _release(self, *, final: bool) -> Iterator[Record]:
        """Passes on the pending lines whose counts are understood."""
        while self._pending:
            first = self._pending[0]
            for name in [name for name in first.counts if name not in self._modes]:
                yield from self._decide(name, final=final)
            if not self._modes.keys() >= first.counts.keys():
                return
            del self._pending[0]
            yield from self._push(first)

    def _decide(self, name: str, *, final: bool) -> Iterator[Record]:
        numbers: list[int | None] = []
        values: list[int] = []
        for pending in self._pending:
            number = pending.number
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
            yield Mark(self._pending[0].t_ns, "assumed", message)

    def _push(self, line: ParsedLine) -> Iterator[Record]:
        yield from self._disprove(line)
        line.understand(self._modes)
        yield from self._tell_multiplied(line)
        where = "a line without a step" if line.number is None else f"step {line.number}"
        yield from self._losses.watch(line.t_ns, line.loss, where)
        if line.evaluated_ns is not None:
            if self._spans.resumes(line):
                yield from self._spans.evaluated(line.evaluated_ns)
            elif self._spans.opened:
                yield from self._say(line.t_ns, _EVALUATED)
        yield from self._spans.push(line)
        if not self._spans.pending:  # it opened a window, and is part of no Step
            self._now_ns = line.t_ns
            if line.loss is not None:
                yield Reported(line.t_ns, STEP_LOSS, line.loss, "")
            yield from self._reported(line.pairs, "learning_rate", "grad_norm")

    def _disprove(self, line: ParsedLine) -> Iterator[Record]:
        """Take a count for one step's if it passed for a running total and falls as steps go on."""
        for name, value in line.counts.items():
            total = self._totals.get(name)
            before = total.disproved(line.number, value) if total else None
            if before is not None:
                del self._totals[name]
                self._modes[name] = "step"
                message = self._understood[name] = retracted_note(name, before, value)
                yield Mark(line.t_ns, "assumed", message)

    def _tell_multiplied(self, line: ParsedLine) -> Iterator[Record]:
        """Yields a mark for a count of one step on a line that covers several."""
        last = self._spans.last_number
        if last is None or line.number is None or line.number - last <= 1:
            return
        for name in line.counts:
            step_field, mode = COUNTS[name]
            if mode == "step" and step_field not in line.totals:
                message = f"{name}= multiplied by the steps of a line, as if all had that many"
                yield from self._say(line.t_ns, message)
