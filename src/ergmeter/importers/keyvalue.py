"""Reads step lines of any training loop.

For example `step=10 loss=2.31 tokens=4096`, `iter 10: loss 2.3, time 12ms` and JSON. It is asked
last: a line of a program that has its own importer is left to that one, which reads more of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ergmeter.errors import UsageError
from ergmeter.importers.engine.pairs import HINTS
from ergmeter.importers.engine.parsed_line import Mode
from ergmeter.importers.engine.reading import RecordReader, StepLineImporter
from ergmeter.ports import Line, LineHints
from ergmeter.records import Record


class KeyValueImporter(StepLineImporter):
    """Step lines of any training loop, live or from a log file.

    `tokens_are` overrules the reading of a bare `tokens=`: "step" (the tokens of one step), "line"
    (those since the line before) or "total" (a running total).
    """

    name = "keyvalue"
    looks_for = "lines such as `step=3 loss=2.1 tokens=4096`"
    order = 90
    options = ("tokens_are",)
    hints = LineHints(tuple(hint.encode() for hint in HINTS), folds_case=True)

    def __init__(self, *, tokens_are: Mode | None = None) -> None:
        if tokens_are not in (None, "step", "line", "total"):
            raise UsageError(f'tokens_are is "step", "line" or "total", not {tokens_are!r}')
        self._tokens_are = tokens_are

    def is_own(self, text: str) -> bool:
        """True if this is a step line."""
        dialect = self.dialect()
        return dialect.wanted(text) and dialect.read(text)[1] == "step"

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yield records as the lines come; at most a few lines are held back."""
        return RecordReader(self.step_lines(), tokens_are=self._tokens_are).records(lines)
