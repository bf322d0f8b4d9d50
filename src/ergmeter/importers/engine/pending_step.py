"""What does one step line hold, before its counts are understood?

The trap: a line has several names for one thing, `loss` and `train_loss`, a total of tokens and the
tokens of the step. One is taken of each: the name that tells most, and the total, which is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from ergmeter.importers.engine.counts import COUNTS
from ergmeter.importers.engine.names import EVALUATION_STEP
from ergmeter.importers.engine.pairs import NamedNumber
from ergmeter.importers.engine.step_line import Count, Mode, StepLine
from ergmeter.importers.engine.timestamps import epoch_ns

STEP_FIGURES = ("loss", "learning_rate", "grad_norm")
_LONGEST_STEP_S = 1e6  # eleven days; a longer "step time" is some other number


@dataclass(slots=True)
class PendingStep:
    """A step line that waits until its counts are understood."""

    seen: StepLine
    counts: dict[str, int]
    found: list[NamedNumber]
    drawn: bool = False
    text: str = ""
    epoch: float | None = None  # that it names

    @property
    def t_ns(self) -> int:
        """When it was seen."""
        return self.seen.t_ns

    @property
    def number(self) -> int | None:
        """The step it names."""
        return self.seen.number

    @property
    def says(self) -> frozenset[str]:
        """Its names. Of a line with nothing but a number, its words: `step=5 begins`, `ends`."""
        names = frozenset(p.means.name for p in self.found)
        return names if len(names) > 1 else names | {self.text}

    @property
    def figures(self) -> tuple[str, ...]:
        """All that it says beside its number, names and values."""
        apart = ("step", "epoch", "timestamp")
        return tuple(f"{p.means.name}={p.value}" for p in self.found if p.means.kind not in apart)


def counts_of(named: dict[str, int], modes: dict[str, Mode]) -> tuple[Count, ...]:
    """One count for each field. A total is exact over any span, so it goes first."""
    best: dict[str, Count] = {}
    for name, value in named.items():
        field, mode = COUNTS[name][0], modes[name]
        if field not in best or (mode == "total" and best[field].mode != "total"):
            best[field] = Count(field, value, mode)
    return tuple(best.values())


def is_result(pair: NamedNumber) -> bool:
    """Whether a figure of an evaluation tells what came of it, not only how far it is."""
    kind = pair.means.kind
    return kind in ("loss", "count") or (
        kind == "eval" and not EVALUATION_STEP.fullmatch(pair.means.name)
    )


def stamp_in(found: list[NamedNumber]) -> int | None:
    """The time that a line gives under a name such as `timestamp`."""
    stamps = (epoch_ns(pair.value) for pair in found if pair.means.kind == "timestamp")
    return next((t_ns for t_ns in stamps if t_ns is not None), None)


def seen_in(found: list[NamedNumber]) -> tuple[StepLine, dict[str, int], float | None]:
    """What a line says about training, its time apart, its counts by name, and its epoch."""
    best: dict[str, NamedNumber] = {}
    counts: dict[str, int] = {}
    for pair in found:
        means = pair.means
        kind = means.kind
        if kind == "count":
            counts.setdefault(means.name, int(pair.value))
        elif kind not in best or means.rank < best[kind].means.rank:
            best[kind] = pair
    seen = StepLine(0)
    for name in STEP_FIGURES:
        if name in best:
            setattr(seen, name, best[name].value)
    if "step" in best:
        seen.number = int(best["step"].value)
    if "epoch_steps" in best:
        seen.epoch_steps = int(best["epoch_steps"].value)
    if "own_time" in best:
        _take_own_time(seen, best["own_time"], found)
    if "timestamp" in best:
        seen.stamp_ns = stamp_in(found)
    return seen, counts, best["epoch"].value if "epoch" in best else None


def _take_own_time(seen: StepLine, printed: NamedNumber, found: list[NamedNumber]) -> None:
    own_s = printed.value * printed.means.scale
    if printed.means.name.startswith("iter") and seen.number:
        seen.iterations = _iterations(found, seen.number)
        own_s *= seen.iterations
    seen.own_s = own_s if 0 < own_s < _LONGEST_STEP_S else None


def iteration_of(found: list[NamedNumber]) -> int | None:
    """The iteration on a line that counts steps beside it: litgpt's `iter 8 step 2`."""
    counted = {p.means.name.startswith("iter"): p.value for p in found if p.means.kind == "step"}
    return int(counted[True]) if len(counted) == 2 else None


def _iterations(found: list[NamedNumber], step: int) -> int:
    """How many iterations a step has, by a line that counts both."""
    iteration = iteration_of(found)
    return iteration // step if iteration and iteration % step == 0 else 1
