"""A parsed line, its counts, and what each count covers: a step, a line or all since the start.

Only `spans`, which has the line before, turns counts into the tokens of a span.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from ergmeter.atomic_write import toml_beside
from ergmeter.records import Mark

if TYPE_CHECKING:
    from ergmeter.importers.engine.pairs import NamedNumber

# Losses that are not numbers. A column of floats does not distinguish a loss that was not printed
# from one that was `nan`.


class Losses:
    """Watches the losses of steps; marks once that they became nan or infinite, and recovered."""

    def __init__(self) -> None:
        self._since = ""  # where losses became nan or infinite
        self._marks = 0  # marks

    def watch(self, t_ns: int, loss: float | None, where: str) -> Iterator[Mark]:
        """Take the loss of the next line; `where` says which step or epoch that is."""
        if loss is None or self._marks > 1 or math.isfinite(loss) != bool(self._since):
            return
        self._marks += 1
        if self._since:
            message = f"loss is finite again from {where} on; it was not from {self._since} on"
        else:
            message, self._since = f"loss is not a number ({loss}) from {where} on", where
        yield Mark(t_ns, "value_refused", message)


Mode = Literal["step", "line", "total"]
STEP_FIGURES = ("loss", "learning_rate", "grad_norm")
LineKind = Literal["step", "again", "another rank", "evaluation", "other"]


@dataclass(slots=True)
class ParsedLine:
    """A parsed line of output: its kind and figures; for a step line also its step.

    Every importer turns lines into these, and these into Steps.
    """

    kind: LineKind
    pairs: list[NamedNumber] = field(default_factory=list)
    t_ns: int = 0  # when it came; in a file, when it was written
    is_timed: bool = False  # t_ns is known
    clock: str | None = None  # of a file: where t_ns is from
    stamp_ns: int | None = None  # its timestamp, where the clock is another
    number: int | None = None  # the step it ends
    steps: int | None = None  # since the line before
    epoch: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    counts: dict[str, int] = field(default_factory=dict)  # by printed name
    # By field of Step, once it is known what the counts cover.
    totals: dict[str, int] = field(default_factory=dict)
    amounts: dict[str, tuple[int, Mode]] = field(default_factory=dict)
    epoch_steps: int | None = None  # that an epoch has, where its number counts within one
    own_s: float | None = None  # how long its step took, where the line itself says
    since_start_s: float | None = None  # how long the training took, its totals from zero on
    iterations: int = 1  # of a step, where the line counts both and own_s was that of one
    elapsed_s: float | None = None  # since its progress bar began, by the bar itself
    is_bar: bool = False  # a progress bar: of one drawn again, the last loss counts
    number_done: bool = False  # its number counts the steps done since an epoch began, as a bar's
    goes_on: bool = False  # it is no restart though its number falls: the epoch rose, say
    evaluated_ns: int | None = None  # when the last line of an evaluation before it was seen
    restarted: str = ""  # why this line begins another run
    of_one_rank: bool = False  # other ranks print too, and each counts its own
    refused: dict[str, str] = field(default_factory=dict)  # messages about figures, by reason

    @property
    def figures(self) -> dict[str, float]:
        """The line's figures that are fields of Step, by name."""
        values = ((name, getattr(self, name)) for name in STEP_FIGURES)
        return {name: value for name, value in values if value is not None}

    @property
    def totals_from_zero(self) -> bool:
        """True if the running totals were zero before this line's work."""
        is_first = self.number in (0, 1) and all(self.totals.values())
        return self.since_start_s is not None or is_first

    def understand(self, modes: Mapping[str, Mode]) -> None:
        """Sort the counts into totals and amounts by what they cover; totals, being exact, win."""
        for name, value in self.counts.items():
            step_field, mode = COUNTS[name][0], modes[name]
            if mode == "total":
                self.totals.setdefault(step_field, value)
                self.amounts.pop(step_field, None)
            elif step_field not in self.totals:
                self.amounts.setdefault(step_field, (value, mode))

    def complete(self, further: ParsedLine) -> None:
        """Add what another line about the same step has and this line lacks."""
        for name, value in further.figures.items():
            if getattr(self, name) is None or (name == "loss" and further.is_bar):
                setattr(self, name, value)
        counted = {*self.totals, *self.amounts}
        self.totals |= {name: v for name, v in further.totals.items() if name not in counted}
        self.amounts |= {name: v for name, v in further.amounts.items() if name not in counted}

    def steps_since(self, last: int) -> int | None:
        """The number of steps since step `last`; None if the number fell for an unknown reason."""
        if self.number is None:
            return None
        if self.number > last:
            return self.number - last
        if self.epoch_steps is not None and self.epoch_steps >= last:
            return self.epoch_steps - last + self.number  # an epoch ended in between
        return None


# Counts: `tokens=4096` may be of this step, of this line or a running total. A total read as
# tokens per step makes throughput grow with the run. Many names are unambiguous; a bare `tokens=`
# is not. Then the first values decide, and a Mark says what was decided and how to overrule it.


HELD_LINES = 5  # enough to see a total grow; a live view waits no longer than this
_RESUMED_GROWTH = 256  # tokens in a step of a total that was resumed; lengths grow by less
_SHORTEST_EPOCH = 3  # lines: what falls again sooner is no total that begins again

NAMES = toml_beside(__file__, "names.toml")
# name -> (field of Step, what it counts over; None: the name does not say)
COUNTS: dict[str, tuple[str, Mode | None]] = {
    name: (row["of"], row.get("over")) for row in NAMES["counts"] for name in row["names"]
}


def decide_mode(
    numbers: Sequence[int | None], values: Sequence[int], *, final: bool
) -> Mode | None:
    """Decide from its first values what a count with an ambiguous name covers; None: too early.

    A total only grows, and by about what it started with: 2048, 4096, 6144. Batches that happen
    to grow for a few lines, 100, 120, 140, grow by less. A total seen from its middle on grows by
    less too, but by what its step number says, or by very little and evenly.
    """
    if any(later <= earlier for earlier, later in pairwise(values)):
        return "step"
    if not final and len(values) < 3:
        return None
    if len(values) < 2:
        return "step"
    growth = list(_growth_per_step(numbers, values))
    even = len(values) >= 3 and max(growth) - min(growth) <= 1e-9 * max(growth)
    by_line = (values[-1] - values[0]) / (len(values) - 1)
    comparable = by_line >= values[0] / 2 or _from_zero(numbers[0], values[0], growth)
    if even and comparable:
        return "total"
    if not final and len(values) < HELD_LINES:
        return None
    resumed = even and _RESUMED_GROWTH <= growth[0] <= values[0] / 1000
    return "total" if comparable or resumed else "step"


def _from_zero(number: int | None, value: int, growth: Sequence[float]) -> bool:
    """True if a total that grew at this rate from step 0 on would now be about `value`."""
    if number is None:
        return False
    expected = number * sum(growth) / len(growth)
    return value / 2 <= expected <= value * 2


class Total:
    """Checks a count that was decided to be a running total.

    A fall while the step number rises disproves that, unless the count falls to about what one line
    adds: then the total began again.
    """

    def __init__(self) -> None:
        self._value: int | None = None
        self._number: int | None = None
        self._added: deque[int] = deque(maxlen=16)
        self._since_fall: int | None = None  # lines

    def disproved(self, number: int | None, value: int) -> int | None:
        """Take the next value. Returns the value before it if this can't be a running total."""
        before, self._value = self._value, value
        last, self._number = self._number, number
        if before is None:
            return None
        if value >= before:
            self._added.extend([value - before] if value > before else [])
            self._since_fall = None if self._since_fall is None else self._since_fall + 1
            return None
        soon = self._since_fall is not None and self._since_fall < _SHORTEST_EPOCH
        self._since_fall = 0
        if number is None or last is None or number <= last:
            return None
        usual = sum(self._added) / len(self._added) if self._added else value
        return before if soon or value > 2 * usual else None


def _growth_per_step(numbers: Sequence[int | None], values: Sequence[int]) -> Iterator[float]:
    for i in range(1, len(values)):
        before, after = numbers[i - 1], numbers[i]
        steps = after - before if before is not None and after is not None else 1
        yield (values[i] - values[i - 1]) / max(1, steps)


def mode_note(name: str, mode: Mode, values: Sequence[int]) -> str:
    """The note on what a count was decided to cover, and what to do if that is wrong."""
    listed = ", ".join(str(value) for value in values)
    what = {
        "step": "the count of one step (times the steps a line covers)",
        "line": "the count since the line before",
        "total": "a running total",
    }[mode]
    others = [other for other in ("step", "line", "total") if other != mode]
    cure = f"; if it is not: --tokens-are {' or '.join(others)}" if "tok" in name else ""
    return f"{name}= read as {what}, from its first values {listed}{cure}"


def retracted_note(name: str, before: int, value: int) -> str:
    """The note that a count is not a running total after all."""
    return (
        f"{name}= fell from {before} to {value} while the steps went on, so it is no running "
        "total: from here on it is read as the count of one step; the counts of earlier lines are "
        "wrong; --tokens-are step reads all lines this way"
    )
