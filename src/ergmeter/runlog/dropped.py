"""Steps that were made but not recorded: how many, with how many tokens, when and why.

A writer marks them as `steps_dropped`. Its last such mark holds the sum of all so far, so a lost
mark loses no count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ergmeter.records import Mark
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ergmeter.runlog.reader import Run

NAME = "steps_dropped"
_DETAIL = re.compile(
    r"(?P<steps>\d+) steps \((?P<tokens>\d+|an unknown number of) tokens\)"
    r"(?: and (?P<spans>\d+) other spans)?"
    r" in (?P<lasted_s>\d+\.\d+) s were not recorded: (?P<why>.*)"
)
_NS_PER_MS = 1_000_000
_NO_END_NS = 2**63 - 1
_TOKENS = ("tokens_real", "tokens_computed")


@dataclass(frozen=True, slots=True)
class DroppedSteps:
    """Training steps, and spans of other phases, that are missing between two instants."""

    steps: int
    tokens: int | None  # None: not known of all of them
    spans: int  # of other phases: evaluation, data, requests
    start_ns: int
    end_ns: int
    why: str

    @classmethod
    def of(cls, columns: Mapping[str, Sequence[Any]], why: str) -> DroppedSteps:
        """Rows of steps, given as columns."""
        phases = columns["phase"]
        train = [number for number, phase in enumerate(phases) if phase == "train"]
        steps = sum(int(columns["steps"][number] or 1) for number in train)
        real, computed = (columns.get(name) or [None] * len(phases) for name in _TOKENS)
        each = [computed[n] if real[n] is None else real[n] for n in train]
        tokens = None if None in each else sum(each)
        start_ns, end_ns = min(columns["start_ns"]), max(columns["end_ns"])
        return cls(steps, tokens, len(phases) - len(train), int(start_ns), int(end_ns), why)

    def __add__(self, other: DroppedSteps) -> DroppedSteps:
        unknown = self.tokens is None or other.tokens is None
        return DroppedSteps(
            self.steps + other.steps,
            None if unknown else (self.tokens or 0) + (other.tokens or 0),
            self.spans + other.spans,
            min(self.start_ns, other.start_ns),
            max(self.end_ns, other.end_ns),
            self.why,
        )

    def __str__(self) -> str:
        if self.end_ns == _NO_END_NS:
            return self.why
        tokens = "an unknown number of" if self.tokens is None else self.tokens
        spans = f" and {self.spans} other spans" if self.spans else ""
        lasted_s = -(-(self.end_ns - self.start_ns) // _NS_PER_MS) / 1000  # or more, never less
        what = f"{self.steps} steps ({tokens} tokens){spans}"
        return f"{what} in {lasted_s:.3f} s were not recorded: {self.why}"

    @property
    def mark(self) -> Mark:
        """The mark for a run, at the end of the last step that is missing."""
        return Mark(self.end_ns, NAME, str(self))


def dropped_steps(run: Run) -> list[DroppedSteps]:
    """What is missing in a run, one entry for each writer that dropped steps."""
    dropped = []
    for writer in run.writers:
        details = [mark for mark in writer.marks if mark.name == NAME]
        if details:
            last = details[-1]
            dropped.append(_parsed(Mark(last.t_ns + writer.offset_ns, NAME, last.detail)))
    return dropped


def _parsed(mark: Mark) -> DroppedSteps:
    """What a mark holds. Version 0.1.0 wrote a number of rows and no time."""
    match = _DETAIL.fullmatch(mark.detail)
    if match is None:
        rows = re.match(r"(\d+) rows", mark.detail)
        return DroppedSteps(int(rows[1]) if rows else 0, None, 0, 0, _NO_END_NS, mark.detail)
    tokens = int(match["tokens"]) if match["tokens"].isdigit() else None
    start_ns = mark.t_ns - round(float(match["lasted_s"]) * NS_PER_S)
    spans = int(match["spans"] or 0)
    return DroppedSteps(int(match["steps"]), tokens, spans, start_ns, mark.t_ns, match["why"])
