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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ergmeter.importers.engine.pairs import Meaning, NamedNumber, count, number
from ergmeter.importers.engine.progress_bar import Bar, BarSteps, bar
from ergmeter.importers.engine.spans import StepSpans
from ergmeter.importers.engine.step_line import Count, Losses, StepLine
from ergmeter.importers.engine.step_lines import ParsedLine
from ergmeter.importers.engine.streams import SEVERAL, StepStreams, Waiting
from ergmeter.importers.engine.timestamps import BarClock, stamp_ns
from ergmeter.importers.logfile import LineHints
from ergmeter.ports import Line
from ergmeter.records import Mark, Record, Reported, Step
from ergmeter.units import NS_PER_S

# Dicts, as in `{'loss': '2.3', 'grad_norm': '1.5', 'learning_rate': '5e-05', 'epoch': '0.1'}`.
# They are never evaluated: the text comes from another program, may be cut off and holds `nan`.
# Only names and number texts are picked out.


_MAX_CHARS = 65_536
_ITEM = re.compile(r"'([^']{1,200})': ?(?:'([^']{0,60})'|([^,}']{1,60}))(?=[,}])")
TOTALS = {"num_input_tokens_seen": "tokens_computed", "num_tokens": "tokens_real"}
# Figures of a step dict that become fields of Step.
FIGURES = ("loss", "learning_rate", "grad_norm")


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


def dict_rows(lines: Iterable[Line]) -> Iterator[ParsedLine]:
    """The step dicts one by one, with the step that the bar beside each one gives it."""
    progress: BarSteps[ParsedLine] = BarSteps()
    bars = BarClock()
    bar_ns: int | None = None
    last: dict[str, str] = {}
    for line in lines:
        bar_seen = bar(line.text)
        if bar_seen is not None:
            yield from _numbered(progress.draw(bar_seen))
            if progress.is_own(bar_seen) and bar_seen.elapsed_s is not None:
                bar_ns = bars.time(bar_seen.elapsed_s)
        items = items_of(line.text)
        if kind_of(items) == "train" and items != last:
            last = items
            row = _parsed(items, line, bar_ns)
            yield from _numbered(progress.log(row, number(items.get("epoch", ""))))
    yield from _numbered(progress.flush())


def _parsed(items: dict[str, str], line: Line, bar_ns: int | None) -> ParsedLine:
    """A step dict as the tables have it."""
    loss, rate, norm = (number(items.get(name, "")) for name in FIGURES)
    parsed = ParsedLine("step", [], StepLine(0, None, (), loss, rate, norm))
    parsed.counts = {name: v for name in TOTALS if (v := count(items.get(name, ""))) is not None}
    parsed.epoch = number(items.get("epoch", ""))
    tokens = number(items.get("train_tokens_per_second", ""))
    if tokens is not None:
        means = Meaning("rate", "train_tokens_per_second", unit="tokens/s")
        parsed.pairs.append(NamedNumber(means, means.name, tokens))
    stamp = line.t_ns if line.t_ns is not None else stamp_ns(line.text)
    runtime_s = positive(items.get("train_runtime"))
    if stamp is not None:
        parsed.written_ns, parsed.clock = stamp, "stamps"
    elif runtime_s is not None:
        parsed.written_ns, parsed.clock = round(runtime_s * NS_PER_S), "train_runtime"
    elif bar_ns is not None:
        parsed.written_ns, parsed.clock = bar_ns, "bar"
    return parsed


def _numbered(logs: Iterator[tuple[ParsedLine, int | None]]) -> Iterator[ParsedLine]:
    for parsed, n in logs:
        parsed.step_line.number = n
        yield parsed


# Several Trainers in one output. A dict names no program; its epoch and token total only grow, so
# both are watched like step numbers (`streams`). They are printed rounded to two decimals or four
# digits and may stand still for many logs. A repeated value means a second Trainer only where
# steps between values are much coarser than the rounding.


_PARTS = 10_000  # of an epoch: places are whole numbers
_COARSE = 3  # times the rounding
_DECIMALS = 0.01  # transformers before 5.0 rounds epochs to this,
_DIGITS = 1e-3  # and since to four significant digits


@dataclass(slots=True, eq=False)
class Due:
    """An action that waits until there is known to be only one Trainer."""

    t_ns: int
    act: Callable[[], Iterator[Record]]
    number: int | None = None  # how far the Trainer is
    epoch: float | None = None
    is_bar: bool = False
    says: frozenset[str] = frozenset()
    figures: tuple[str, ...] = ()


class Trainers:
    """Passes on what a Trainer printed, in order, until there are found to be several."""

    def __init__(self) -> None:
        self._waiting: Waiting[Due] = Waiting()
        self._bars = StepStreams()
        self._last: int | None = None
        self._coarse = False  # the last two places were further apart than rounding explains
        self._epochs: list[float] = []
        self._untold = True

    @property
    def mixed(self) -> bool:
        """True if there are several Trainers."""
        return self._waiting.streams.mixed or self._bars.mixed

    @property
    def holds(self) -> bool:
        """True if an action waits."""
        return bool(self._waiting)

    def log(self, due: Due, epoch: float | None, total: int | None) -> Iterator[Due]:
        """A step dict was printed. Yields what need wait no longer."""
        if epoch is not None and math.isfinite(epoch):
            self._epochs = [*self._epochs[-3:], epoch]
            due.number = self._position(epoch, total)
        return self.take(due)

    def draw(self, bar: Bar, t_ns: int) -> Iterator[Due]:
        """The training's bar was drawn. One bar never goes back; two do, in turn."""
        if not bar.described and not bar.nested:
            self._bars.mixes(Due(t_ns, lambda: iter(()), number=bar.n, is_bar=True))
        return self.tick(t_ns)

    def take(self, due: Due) -> Iterator[Due]:
        """Takes something else that was printed, and keeps its order."""
        if not self.mixed:
            yield from self._waiting.take(due)

    def tick(self, t_ns: int) -> Iterator[Due]:
        """Time went on."""
        if not self.mixed:
            yield from self._waiting.tick(t_ns)

    def finish(self) -> Iterator[Due]:
        """Nothing more will come."""
        if not self.mixed:
            yield from self._waiting.finish()

    def several(self, t_ns: int) -> Iterator[Mark]:
        """Yields a mark, once, that there are several Trainers."""
        if self._untold:
            self._untold = False
            epochs = ", ".join(f"{epoch:g}" for epoch in self._epochs)
            message = SEVERAL.format(f"epochs such as {epochs}")
            yield Mark(t_ns, "several_programs", message)

    def _position(self, epoch: float, total: int | None) -> int | None:
        """The progress of a dict; None where it stands still, as rounded values do."""
        exact, rounding = epoch * _PARTS, _PARTS * max(_DECIMALS, _DIGITS * abs(epoch))
        if total:
            exact, rounding = total, max(1, _DIGITS * total)
        last, step = self._last, round(exact)
        if last is not None and step == last:
            return step if self._coarse else None
        self._coarse = last is not None and abs(step - last) > _COARSE * rounding
        self._last = step
        return step


_UNITS = {
    "runtime": "s",
    "samples_per_second": "samples/s",
    "steps_per_second": "steps/s",
    "tokens_per_second": "tokens/s",
    "num_input_tokens_seen": "tokens",
    "num_tokens": "tokens",
    "total_flos": "FLOP",
}
_ASSUMED = {
    "tokens_computed": "num_input_tokens_seen read as tokens computed, padding included; with "
    'include_num_input_tokens_seen="non_padding" it is the real tokens, and the log can\'t tell',
    "tokens_real": "num_tokens read as TRL's running total of real tokens",
    "rounded": "the token total is printed to four significant digits: a single step's tokens are "
    "rounded, their sum is not",
    "clock": "the log has no timestamps: times are train_runtime as printed, to four digits",
    "bar": "the log has no timestamps: times are its progress bar's own, in whole seconds",
    "twice": "dicts were printed twice, by two callbacks or log handlers: each counts once",
    "eval_inside": "an evaluation ran between two logged training steps: the training span around "
    "it includes its time",
}
_NO_BAR = (
    "steps are not counted: a Trainer's lines name no step, and it drew no progress bar, which "
    "does; leave the bar on (disable_tqdm=False)"
)
_FRESH = 0.02  # the session's own rate times its runtime is the total, give or take two roundings


class HfTrainerImporter:
    """The dicts and the bar of transformers.Trainer and what derives from it (TRL, Unsloth)."""

    name = "hf_trainer"
    looks_for = "Hugging Face Trainer dicts, `{'loss': 2.3, ..., 'epoch': 0.1}`"

    def recognises(self, head: Sequence[str]) -> bool:
        """True if one of these lines is a Trainer's dict. One line is enough."""
        return any(kind_of(items_of(text)) is not None for text in reversed(head))

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yield records as the lines come. A dict waits for the bar that follows it."""
        return _Reading().records(lines)

    def words(self, recognised: str) -> LineHints:  # noqa: ARG002
        """Byte strings of which each wanted line holds one."""
        return LineHints((b"{'", b"%|", b"it [", b"it/s", b"s/it"))

    def parsed_lines(self, lines: Iterable[Line]) -> Iterator[ParsedLine]:
        """The step dicts one by one, each with its step."""
        return dict_rows(lines)


@dataclass(slots=True)
class _Dict:
    """A step dict that waits for its number."""

    step_line: StepLine
    epoch: float | None
    items: dict[str, str]
    assumes: tuple[str, ...] = ()  # what has to be said of it


class _Reading:
    """One pass over one output."""

    def __init__(self) -> None:
        self._spans = StepSpans()
        self._progress: BarSteps[_Dict] = BarSteps()
        self._waiting = 0  # dicts that wait for their bar
        self._trainers = Trainers()
        self._losses = Losses()
        self._items: dict[str, str] = {}  # of the last step dict
        self._epoch: float | None = None  # of the last step dict
        self._evaluated_ns: int | None = None  # the end of the last evaluation
        self._now_ns = 0
        self._unnumbered = False  # a step dict had no number
        self._bars = BarClock()
        self._bar_ns: int | None = None  # the time of the last bar of a file, by itself
        self._noted: set[str] = set()

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        for line in lines:
            if progress := bar(line.text):
                yield from self._draw(line, progress)
            if items := items_of(line.text):
                yield from self._printed(line, items)
            elif line.t_ns is not None:
                yield from self._judged(self._trainers.tick(line.t_ns))
                if not self._waiting and not self._trainers.holds:
                    yield from self._spans.tick(line.t_ns)
        yield from self._release(self._progress.flush())
        yield from self._judged(self._trainers.finish())
        if not self._trainers.mixed:
            yield from self._spans.end()
            if self._unnumbered and self._progress.total is None:
                yield Mark(self._now_ns, "value_refused", _NO_BAR)

    def _draw(self, line: Line, progress: Bar) -> Iterator[Record]:
        yield from self._release(self._progress.draw(progress))
        if progress.total == self._progress.total:
            yield from self._judged(self._trainers.draw(progress, line.t_ns or 0))
        has_time = line.t_ns is None and progress.elapsed_s is not None
        if has_time and self._progress.is_own(progress):
            self._bar_ns = self._bars.time(progress.elapsed_s or 0.0)

    def _judged(self, due: Iterator[Due]) -> Iterator[Record]:
        """Runs the actions that need wait no longer, unless there are several Trainers."""
        for line in due:
            yield from line.act()
        if self._trainers.mixed:
            yield from self._trainers.several(self._now_ns)

    def _printed(self, line: Line, items: dict[str, str]) -> Iterator[Record]:
        kind = kind_of(items)
        if kind is None:
            return
        t_ns = line.t_ns if line.t_ns is not None else stamp_ns(line.text)
        if kind == "train":
            if items == self._items:
                yield from self._tell("twice")
            else:
                self._items = items
                yield from self._step(t_ns, items)
            return
        yield from self._release(self._progress.flush())
        self._now_ns = self._now_ns if t_ns is None else t_ns
        act = partial(self._result, kind, t_ns, items)
        yield from self._judged(self._trainers.take(Due(self._now_ns, act)))

    def _step(self, t_ns: int | None, items: dict[str, str]) -> Iterator[Record]:
        runtime_s = positive(items.get("train_runtime"))
        epoch, assumes = number(items.get("epoch", "")), []
        if t_ns is None and runtime_s is not None:
            t_ns = round(runtime_s * NS_PER_S)
            assumes.append("clock")
        elif t_ns is None and self._bar_ns is not None:
            t_ns = self._bar_ns
            assumes.append("bar")
        self._now_ns = self._now_ns if t_ns is None else t_ns
        counts = tuple(_totals(items))
        if t_ns is None:
            due = Due(self._now_ns, partial(self._untimed, items, epoch))
            total = next((count.value for count in counts), None)
            yield from self._judged(self._trainers.log(due, epoch, total))
            return
        assumes += [total.field for total in counts]
        if any("e" in items[name] for name in TOTALS if name in items):
            assumes.append("rounded")
        loss, rate, norm = (number(items.get(name, "")) for name in FIGURES)
        step_line = StepLine(t_ns, None, counts, loss, rate, norm)
        if _fresh(items, counts):
            step_line.own_s = runtime_s
            step_line.own_from_start = step_line.totals_from_zero = True
        self._waiting += 1
        waits = _Dict(step_line, epoch, items, tuple(assumes))
        yield from self._release(self._progress.log(waits, epoch))

    def _since_evaluation(self, t_ns: int, runtime_s: float | None) -> float | None:
        """The runtime without an evaluation at its start (`eval_on_start`)."""
        if runtime_s is None or self._evaluated_ns is None or self._spans.opened:
            return runtime_s
        return min(runtime_s, (t_ns - self._evaluated_ns) / NS_PER_S)

    def _release(self, numbered: Iterator[tuple[_Dict, int | None]]) -> Iterator[Record]:
        """Hand on dicts that have waited, with the step number the bar gave them."""
        for waited, n in numbered:
            self._waiting -= 1
            waited.step_line.number = n
            self._unnumbered |= n is None
            due = Due(waited.step_line.t_ns, partial(self._push, waited))
            total = next((count.value for count in waited.step_line.counts), None)
            yield from self._judged(self._trainers.log(due, waited.epoch, total))

    def _push(self, waited: _Dict) -> Iterator[Record]:
        step_line = waited.step_line
        step_line.own_s = self._since_evaluation(step_line.t_ns, step_line.own_s)
        yield from self._begin_again(step_line.t_ns, waited.epoch)
        for what in waited.assumes:
            yield from self._tell(what)
        self._now_ns = step_line.t_ns
        yield from self._reported(waited.items, "train_tokens_per_second")
        where = f"epoch {waited.epoch}" if step_line.number is None else f"step {step_line.number}"
        yield from self._losses.watch(step_line.t_ns, step_line.loss, where)
        for record in self._spans.push(step_line):
            yield record
            if isinstance(record, Mark) and record.name == "restarted":
                self._noted.clear()
                for what in waited.assumes:
                    yield from self._tell(what)
        if not self._spans.pending:  # it opened a window, and is part of no Step
            yield from self._reported(waited.items, *FIGURES)

    def _untimed(self, items: dict[str, str], epoch: float | None) -> Iterator[Record]:
        """A step dict without a time."""
        yield from self._begin_again(self._now_ns, epoch)
        yield from self._reported(items, "train_tokens_per_second", *FIGURES)

    def _begin_again(self, t_ns: int, epoch: float | None) -> Iterator[Record]:
        """A lower epoch than the last is of another training, or of the same after a restart."""
        last, self._epoch = self._epoch, epoch
        if epoch is None or last is None or epoch >= last:
            return
        yield from self._spans.end()
        yield Mark(t_ns, "restarted", f"the epoch went from {last:g} back to {epoch:g}")
        self._losses = Losses()
        self._noted.clear()

    def _result(self, kind: str, t_ns: int | None, items: dict[str, str]) -> Iterator[Record]:
        """The dict of an evaluation, or the final one of a training, which ends there."""
        yield from self._reported(items, *(name for name in items if name != "epoch"))
        yield from self._evaluation(t_ns, items) if kind == "eval" else self._spans.end()

    def _evaluation(self, t_ns: int | None, items: dict[str, str]) -> Iterator[Record]:
        name = next(name for name in items if name.endswith("_runtime"))
        took_s = positive(items[name])
        if t_ns is None and self._bar_ns is not None and self._spans.opened:
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

    def _reported(self, items: dict[str, str], *names: str) -> Iterator[Record]:
        for name in names:
            value = number(items.get(name, ""))
            if value is not None:
                yield Reported(self._now_ns, name, value, _unit(name))

    def _tell(self, what: str) -> Iterator[Record]:
        if what not in self._noted:
            self._noted.add(what)
            yield Mark(self._now_ns, "assumed", _ASSUMED[what])


def _totals(items: dict[str, str]) -> Iterator[Count]:
    for name, field in TOTALS.items():
        value = count(items.get(name, ""))
        if value is not None:
            yield Count(field, value, "total")


def _fresh(items: dict[str, str], counts: tuple[Count, ...]) -> bool:
    """Whether the token total began with this session, so that train_runtime is its time."""
    runtime_s = positive(items.get("train_runtime"))
    rate = positive(items.get("train_tokens_per_second"))
    total = next((c.value for c in counts if c.field == "tokens_computed"), None)
    if runtime_s is None or rate is None or total is None:
        return False
    return abs(runtime_s * rate - total) <= _FRESH * total


def _unit(name: str) -> str:
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
