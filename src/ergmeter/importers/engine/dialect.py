"""How does one kind of program print its steps?

Here stands what holds for a loop of any make; a program that is known says in a subclass what it
prints differently. The trap: a parser for each program, each with faults of its own in numbers,
ranks, clocks and restarts. A dialect only says which figures a line holds; all else is done once,
in `steplines`, `reading` and `log`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from ergmeter.importers.engine.pairs import (
    NamedNumber,
    is_evaluation_line,
    is_step_line,
    pairs,
    worth_reading,
)
from ergmeter.ports import Line

# -- signatures ------------------------------------------------------------------------------------
# Is this line one of a program that an importer of its own knows?
#
# The importers may not know one another, and the one for any loop must leave these lines to theirs.


# Plain substrings that no other program prints in a step line.
EFFICIENTLLM = "[EfficientLLM"
MEGATRON = "elapsed time per iteration (ms):"
NXDT = "reduced_train_loss"


def of_another(text: str) -> bool:
    """Whether an importer of its own reads this line."""
    if EFFICIENTLLM in text or MEGATRON in text or NXDT in text:
        return True
    return is_torchtitan(text)


def is_torchtitan(text: str) -> bool:
    """`step: 10  loss: 7.9  memory: 47.2GiB(59.7%)  tps: 5,123 ...`, in colours or not."""
    return "memory:" in text and "GiB(" in text and ("tps:" in text or "wps:" in text)


# -- dialect ---------------------------------------------------------------------------------------


Kind = Literal["step", "evaluation", "other"]


class Dialect:
    """Step lines of a loop of any make. Made anew for each pass over an output."""

    # Its numbers count the whole training: one that falls is a restart, one that comes again is a
    # bar drawn again or another rank's line, and no step.
    whole_numbers: bool = False
    # Its own rates are means over this many steps, so those of the first steps hold the compile.
    rate_steps: int = 1
    # Its counts are of the whole training, whichever rank prints them.
    counts_all_ranks: bool = False
    # Its step lines were counted, and how many steps lie between two is not known: stamps say when
    # they were, and only the printed step times how long a step took.
    sums_step_times: bool = False

    def __init__(self) -> None:
        self.notes: list[str] = []  # what was assumed, to be told once each

    def joined(self, lines: Iterable[Line]) -> Iterator[Line]:
        """The lines, with those that only together tell of a step made one."""
        return iter(lines)

    def wanted(self, text: str) -> bool:
        """A quick look that spares most lines the full one."""
        return worth_reading(text)

    def pairs(self, text: str) -> list[NamedNumber]:
        """The figures of a line."""
        return pairs(text)

    def is_step(self, found: list[NamedNumber], text: str) -> bool:
        """Whether a line with these figures ends a step of training."""
        return is_step_line(found, text) and not of_hf_trainer(found, text)

    def is_evaluation(self, found: list[NamedNumber], text: str) -> bool:
        """Whether all that it says is about an evaluation."""
        return is_evaluation_line(found, text)

    def read(self, text: str) -> tuple[list[NamedNumber], Kind]:
        """The figures of a line, and what it tells of."""
        found = self.pairs(text)
        if self.is_evaluation(found, text):
            return found, "evaluation"
        return found, "step" if self.is_step(found, text) else "other"

    def note(self, said: str) -> None:
        """Say what was assumed, once."""
        if said not in self.notes:
            self.notes.append(said)


def of_hf_trainer(found: list[NamedNumber], text: str) -> bool:
    """A dict with an epoch and no step is transformers' own; another importer reads it better."""
    return "{'" in text and "'epoch'" in text and all(p.means.kind != "step" for p in found)
