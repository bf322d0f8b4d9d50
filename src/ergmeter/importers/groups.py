"""Which plain lines are one step, and of which rank?

A name that comes again begins the next step. Three traps. Ranks that print into one output print
each name in turn: taken as one, half of a step is counted as a step, so each rank has its own
group. srun's `0: ` before a line may as well be an epoch's number: it is a rank's if one comes
again after another. And a rate alone is a step of a log that has nothing else, but a summary or a
stray line in one that has steps: so rates wait until it is known which.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ergmeter.importers.ranks import label_of, rank_of
from ergmeter.ports import Line

GROUP = "\x1f"  # between the first line of a group and its fields; no program prints it
_RATES = 64  # groups that have only rates: so many make them what the log has
_LABELLED = 1024  # lines: no job has so many ranks that its first would not have come again


class Groups:
    """Makes the plain lines of a step one."""

    def __init__(self) -> None:
        self.rates_are_steps = False  # the log has nothing but rates
        self.has_counted = False  # steps were numbered as they came
        self._open: dict[int | None, tuple[Line, dict[str, str]]] = {}
        self._numbers: dict[int | None, int] = {}
        self._rates: list[Line] = []  # that wait
        self._has_steps = False
        self._labels_are_ranks: bool | None = None
        self._labels: list[int] = []  # before lines, one after the other
        self._labelled: list[tuple[Line, list[tuple[str, str]]]] = []  # that wait

    def __bool__(self) -> bool:
        return bool(self._open or self._labelled or self._rates)

    def take(self, line: Line, said: list[tuple[str, str]]) -> Iterator[Line]:
        """The next plain line, and what it says. Yields the groups that are complete."""
        label = None if line.t_ns is not None else label_of(line.text)
        if self._labels_are_ranks is not None or (label is None and not self._labelled):
            yield from self._add(line, said)
            return
        self._labelled.append((line, said))
        if label is not None and label not in self._labels[-1:]:
            if label in self._labels:
                yield from self._decide(are_ranks=True)
                return
            self._labels.append(label)
        if len(self._labelled) >= _LABELLED:
            yield from self._decide(are_ranks=False)

    def end(self, *, before_a_step: bool = False) -> Iterator[Line]:
        """Yield what is open: the log is over, or a step comes that is none of these."""
        yield from self._decide(are_ranks=self._labels_are_ranks or False)
        for whose in list(self._open):
            yield from self._close(whose)
        self._has_steps |= before_a_step
        self.rates_are_steps |= not self._has_steps
        yield from self._let_go()

    def drop(self) -> None:
        """What looked like steps was configuration."""
        self._open.clear()
        self._labelled.clear()
        self._rates.clear()

    def _decide(self, *, are_ranks: bool) -> Iterator[Line]:
        if self._labels_are_ranks is None and self._labelled:
            self._labels_are_ranks = are_ranks
        waiting, self._labelled = self._labelled, []
        for line, said in waiting:
            yield from self._add(line, said)

    def _add(self, line: Line, said: list[tuple[str, str]]) -> Iterator[Line]:
        whose = rank_of(line.text)
        if whose is None and self._labels_are_ranks and (label := label_of(line.text)) is not None:
            whose, line = label, replace(line, text=f"[rank{label}]: {line.text}")
        opened = self._open.get(whose)
        if opened is not None and any(name in opened[1] for name, _ in said):
            yield from self._close(whose)
            opened = None
        if opened is None:
            opened = self._open[whose] = line, {}
        opened[1].update(said)

    def _close(self, whose: int | None) -> Iterator[Line]:
        """A group as one line. It waits if it has nothing but rates, and may be no step."""
        first, group = self._open.pop(whose)
        is_timed = any(name.startswith("step_time") for name in group)
        is_numbered = "step" in group or "global_step" in group
        has_loss = "loss" in group or "train_loss" in group
        if is_timed and not is_numbered and first.t_ns is None:
            self.has_counted = True
            number = self._numbers[whose] = self._numbers.get(whose, 0) + 1
            group = {"step": str(number), **group}
        fields = " | ".join(f"{name}={figure}" for name, figure in group.items())
        line = replace(first, text=f"{first.text}{GROUP}{fields}")
        has_rate = any(name == "throughput" or "/" in name for name in group)
        if is_timed or is_numbered or (has_loss and has_rate):
            self._has_steps = True
        elif has_rate and not has_loss and first.t_ns is None and not self._has_steps:
            self._rates.append(line)
            self.rates_are_steps |= len(self._rates) >= _RATES
            if not self.rates_are_steps:
                return
            yield from self._let_go()
            return
        yield from self._let_go()
        yield line

    def _let_go(self) -> Iterator[Line]:
        waiting, self._rates = self._rates, []
        yield from waiting


def said_in(text: str) -> Iterator[tuple[str, str]]:
    """The names and figures of a group that was made one line."""
    for part in text.rpartition(GROUP)[2].split(" | "):
        name, _, figure = part.partition("=")
        yield name, figure
