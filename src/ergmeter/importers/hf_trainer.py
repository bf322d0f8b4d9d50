"""Reads what transformers' Trainer prints about its steps.

It prints dicts (`{'loss': '2.3', 'epoch': '0.1'}`) without a step number, and draws a bar that has
one. Since 5.0 the values are strings of four significant digits.

- `train_runtime` and the token total occur in step dicts too, so they do not mark the final dict.
- The evaluation's bar looks like the training's.
- Bar and dicts go to different streams and may come in the wrong order. A step number is used only
  where it agrees with the epochs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from ergmeter.atomic_write import toml_beside
from ergmeter.importers.engine.pairs import Meaning, NamedNumber, count, number
from ergmeter.importers.engine.parsed_line import STEP_FIGURES, Losses, ParsedLine
from ergmeter.importers.engine.progress_bar import BarSteps, bar
from ergmeter.importers.engine.reading import RecordReader, StepLineImporter, mixed_mark
from ergmeter.importers.engine.step_lines import Dialect, StepLines
from ergmeter.importers.engine.timestamps import BarClock, stamp_ns
from ergmeter.ports import Line, LineHints
from ergmeter.records import Mark, Record, Reported, Step
from ergmeter.units import NS_PER_S

# Dicts, as in `{'loss': '2.3', 'grad_norm': '1.5', 'learning_rate': '5e-05', 'epoch': '0.1'}`.
# They are never evaluated: the text comes from another program, may be cut off and holds `nan`.
# Only names and number texts are picked out.


_MAX_CHARS = 65_536
_ITEM = re.compile(r"'([^']{1,200})': ?(?:'([^']{0,60})'|([^,}']{1,60}))(?=[,}])")
TOTALS = {"num_input_tokens_seen": "tokens_computed", "num_tokens": "tokens_real"}


def items_of(text: str) -> dict[str, str]:
    """The names and number texts of a printed dict. Nothing is evaluated."""
    start = text.find("{'", 0, _MAX_CHARS)
    end = text.rfind("}", start, _MAX_CHARS) if start >= 0 else -1
    if end < 0:
        return {}  # no dict, or half of one
    return {m[1]: (m[2] or m[3] or "").strip() for m in _ITEM.finditer(text, start, end + 1)}


def kind_of(items: dict[str, str]) -> str | None:
    """The kind of a dict: "train" (steps), "eval", "final", or None if it is not a Trainer's."""
    if "step" in items or "epoch" not in items:
        return None
    if "train_loss" in items and "train_runtime" in items:
        return "final"
    if any(name.startswith("eval_") for name in items):
        return "eval" if any(name.endswith("_runtime") for name in items) else None
    return "train" if "loss" in items and "learning_rate" in items else None


def positive(text: str | None) -> float | None:
    """A time or a rate; None if it can't be one."""
    value = number(text) if text else None
    return value if value is not None and 0 < value < 1e9 else None


_TEXTS = toml_beside(__file__, "hf_trainer.toml")
_UNITS: dict[str, str] = _TEXTS["units"]
_ASSUMED: dict[str, str] = _TEXTS["assumed"]
_NO_BAR = (
    "steps are not counted: a Trainer's lines have no step number, and without a progress bar it "
    "is unknown; leave the bar on (disable_tqdm=False)"
)
_PARTS = 10_000  # of an epoch: its numbers are compared as whole ones
_TOKENS_PER_S = Meaning("rate", "train_tokens_per_second", unit="tokens/s")
_FRESH = 0.02  # the session's own rate times its runtime is the total, give or take two roundings


class HfTrainerImporter(StepLineImporter):
    """The dicts and the bar of transformers.Trainer and what derives from it (TRL, Unsloth)."""

    name = "hf_trainer"
    looks_for = "Hugging Face Trainer dicts, `{'loss': 2.3, ..., 'epoch': 0.1}`"
    hints = LineHints((b"{'", b"%|", b"it [", b"it/s", b"s/it"))

    def is_own(self, text: str) -> bool:
        """True if this line is a Trainer's dict."""
        return kind_of(items_of(text)) is not None

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yield records as the lines come. A dict waits for the bar that follows it."""
        return _TrainerReader(_TrainerLines()).records(lines)

    def step_lines(self) -> StepLines:
        """Return a reader of the step dicts, which adds their step numbers."""
        return _TrainerLines()


class _TrainerLines(StepLines):
    """The dicts of one output. A step dict waits for the bar that has its number."""

    def __init__(self) -> None:
        super().__init__(Dialect())
        self.is_twice = False  # a step dict was printed twice
        self.is_rounded = False  # token totals are printed to four digits
        self.bars = BarSteps()
        self.bar_ns: int | None = None  # the time of the last bar of a file, by itself
        self._bar_clock = BarClock()
        self._items: dict[str, str] = {}  # of the last step dict

    def all(self, lines: Iterable[Line]) -> Iterator[ParsedLine]:
        """Yield the step dicts, each with its step number if known."""
        for line in lines:
            yield from self.steps(line, items_of(line.text))
        yield from self.bars.flush()

    def steps(self, line: Line, items: dict[str, str]) -> Iterator[ParsedLine]:
        """Take a line and its dict's items; yield the step dicts whose number is now known."""
        if progress := bar(line.text):
            yield from self.bars.draw(progress)
            has_time = line.t_ns is None and progress.elapsed_s is not None
            if has_time and self.bars.is_own(progress):
                self.bar_ns = self._bar_clock.time(progress.elapsed_s or 0.0)
        if kind_of(items) != "train":
            return
        self.is_twice = items == self._items
        if self.is_twice:
            return
        self._items = items
        yield from self.bars.log(self._parsed(line, items))

    def _parsed(self, line: Line, items: dict[str, str]) -> ParsedLine:
        """A step dict with its time: a timestamp, the runtime it prints, or that of its bar."""
        parsed = ParsedLine("step")
        for name in (*STEP_FIGURES, "epoch"):
            setattr(parsed, name, number(items.get(name, "")))
        counts = {name: count(items.get(name, "")) for name in TOTALS}
        parsed.counts = {name: total for name, total in counts.items() if total is not None}
        parsed.totals = {TOTALS[name]: total for name, total in parsed.counts.items()}
        self.is_rounded |= any("e" in items[name] for name in parsed.counts)
        tokens_per_s = number(items.get(_TOKENS_PER_S.name, ""))
        if tokens_per_s is not None:
            parsed.pairs.append(NamedNumber(_TOKENS_PER_S, _TOKENS_PER_S.name, tokens_per_s))
        runtime_s = positive(items.get("train_runtime"))
        if runtime_s is not None and _is_fresh(runtime_s, items, parsed):
            parsed.since_start_s = runtime_s
        stamp = stamp_ns(line.text) if line.t_ns is None else line.t_ns
        runtime_ns = None if runtime_s is None else round(runtime_s * NS_PER_S)
        times = {"stamps": stamp, "train_runtime": runtime_ns, "bar": self.bar_ns}
        for clock, t_ns in times.items():
            if t_ns is not None:
                parsed.t_ns, parsed.is_timed = t_ns, True
                parsed.clock = clock if line.t_ns is None else None
                break
        return parsed


class _TrainerReader(RecordReader):
    """Turns dicts into records. A falling epoch begins another run: dicts have no step number."""

    def __init__(self, step_lines: _TrainerLines) -> None:
        super().__init__(step_lines)
        self._trainer = step_lines
        self._unnumbered = False  # a step dict had no number

    def _all(self, lines: Iterable[Line]) -> Iterator[Record]:
        for line in lines:
            items = items_of(line.text)
            yield from self._read_steps(self._trainer.steps(line, items))
            kind = kind_of(items)
            is_busy = self._trainer.bars.is_waiting or self._is_mixed
            if kind == "train" and self._trainer.is_twice:
                yield from self._tell("twice")
            elif kind in ("eval", "final"):
                yield from self._read_steps(self._trainer.bars.flush())
                yield from self._result(line, kind, items)
            elif not items and line.t_ns is not None and not is_busy:
                yield from self._spans.tick(line.t_ns)
        yield from self._read_steps(self._trainer.bars.flush())
        if not self._is_mixed:
            yield from self._spans.end()
            if self._unnumbered and self._trainer.bars.total is None:
                yield Mark(self._now_ns, "value_refused", _NO_BAR)

    def _read_steps(self, steps: Iterator[ParsedLine]) -> Iterator[Record]:
        for step in steps:
            if not self._is_mixed:
                yield from self._read_step(step)

    def _read_step(self, step: ParsedLine) -> Iterator[Record]:
        self._now_ns = step.t_ns if step.is_timed else self._now_ns
        yield from self._begin_again(step.epoch)
        if self._is_mixed:
            return
        if step.is_timed:
            self._unnumbered |= step.number is None
            yield from self._tell_assumed(step)
        yield from self._report((pair.printed, pair.value) for pair in step.pairs)
        if step.is_timed:
            yield from self._push_step(step)
        if not step.is_timed or not self._spans.pending:  # it is part of no Step
            yield from self._report(step.figures.items())

    def _push_step(self, step: ParsedLine) -> Iterator[Record]:
        if step.since_start_s and self._evaluated_ns is not None and not self._spans.opened:
            # Without an evaluation at its start (`eval_on_start`).
            since_s = (step.t_ns - self._evaluated_ns) / NS_PER_S
            step.since_start_s = min(step.since_start_s, since_s)
        where = f"epoch {step.epoch}" if step.number is None else f"step {step.number}"
        yield from self._losses.watch(step.t_ns, step.loss, where)
        for record in self._spans.push(step):
            yield record
            if isinstance(record, Mark) and record.name == "restarted":
                yield from self._tell_assumed(step)

    def _begin_again(self, epoch: float | None) -> Iterator[Record]:
        """A lower epoch than the last is of another training, or of the same after a restart."""
        last, self._epoch = self._epoch, epoch
        if epoch is None or not math.isfinite(epoch):
            return
        self._is_mixed = self._numbers.take(round(epoch * _PARTS))
        if self._is_mixed:
            recent = ", ".join(f"{parts / _PARTS:g}" for parts in list(self._numbers.recent)[-4:])
            yield mixed_mark(self._now_ns, f"epochs such as {recent}")
        elif last is not None and epoch < last:
            yield from self._spans.end()
            detail = f"the epoch went from {last:g} back to {epoch:g}"
            yield Mark(self._now_ns, "restarted", detail)
            self._losses = Losses()

    def _result(self, line: Line, kind: str, items: dict[str, str]) -> Iterator[Record]:
        """The dict of an evaluation, or the final dict of a training, which ends the training."""
        t_ns = stamp_ns(line.text) if line.t_ns is None else line.t_ns
        self._now_ns = self._now_ns if t_ns is None else t_ns
        if self._is_mixed:
            return
        values = ((name, number(text)) for name, text in items.items() if name != "epoch")
        yield from self._report(values)
        yield from self._evaluation(t_ns, items) if kind == "eval" else self._spans.end()

    def _evaluation(self, t_ns: int | None, items: dict[str, str]) -> Iterator[Record]:
        name = next(name for name in items if name.endswith("_runtime"))
        took_s = positive(items[name])
        if t_ns is None and self._trainer.bar_ns is not None and self._spans.opened:
            yield from self._tell("eval_inside")
        if t_ns is None or took_s is None:
            return
        if self._spans.opened and number(items["epoch"]) != self._epoch:
            yield from self._tell("eval_inside")
        else:
            yield from self._spans.paused(t_ns)
        self._evaluated_ns = t_ns
        start_ns = t_ns - round(took_s * NS_PER_S)
        loss = number(items.get(name.replace("_runtime", "_loss"), ""))
        if start_ns < t_ns:
            yield Step(start_ns, t_ns, steps=None, phase="eval", loss=loss)

    def _report(self, values: Iterable[tuple[str, float | None]]) -> Iterator[Record]:
        for name, value in values:
            if value is not None:
                yield Reported(self._now_ns, name, value, _unit(name))

    def _tell_assumed(self, step: ParsedLine) -> Iterator[Record]:
        rounded = ("rounded",) if step.totals and self._trainer.is_rounded else ()
        for what in (step.clock, *step.totals, *rounded):
            if what in _ASSUMED:
                yield from self._tell(what)

    def _tell(self, what: str) -> Iterator[Record]:
        return self._say(self._now_ns, _ASSUMED[what])


def _is_fresh(runtime_s: float, items: dict[str, str], parsed: ParsedLine) -> bool:
    """True if the token total began with this session, so that train_runtime is its duration."""
    rate = positive(items.get(_TOKENS_PER_S.name))
    total = parsed.totals.get("tokens_computed")
    if rate is None or total is None:
        return False
    return abs(runtime_s * rate - total) <= _FRESH * total


def _unit(name: str) -> str:
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
