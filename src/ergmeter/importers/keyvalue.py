"""Reads step lines of any training loop.

For example `step=10 loss=2.31 tokens=4096`, `iter 10: loss 2.3, time 12ms` and JSON. It is asked
last: a line of a program that has its own importer is left to that one, which reads more of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from ergmeter.errors import UsageError
from ergmeter.importers.engine.pairs import HINTS, Field, NamedNumber, fields_of
from ergmeter.importers.engine.parsed_line import LineKind, Mode
from ergmeter.importers.engine.reading import RecordReader, StepLineImporter
from ergmeter.importers.engine.step_lines import Dialect
from ergmeter.ports import Line, LineHints
from ergmeter.records import Record

# A loop prints its steps in one format. A line that differs from one before only in its numbers has
# the same figures, which makes reading twice as fast.
_NUMBER = re.compile(r"(?<![\w.])([-+]?\d{1,15}(?:\.\d{0,15})?(?:[eE][-+]?\d{1,3})?)")
_MOST = 64  # formats, of which a loop has a few
_MAX_CHARS = 2000  # of a line with a format


class _AnyLoop(Dialect):
    def __init__(self) -> None:
        super().__init__()
        # By the text between numbers: each figure with the place of its number, and the kind.
        self._formats: dict[tuple[str, ...], tuple[list[tuple[int, Field]], LineKind]] = {}

    def read(self, text: str) -> tuple[list[NamedNumber], LineKind]:
        parts = _NUMBER.split(text)
        between = tuple(parts[::2])
        if between in self._formats:
            fields, kind = self._formats[between]
            pairs = [pair for place, field in fields if (pair := field.with_figure(parts[place]))]
            if len(pairs) == len(fields):
                return pairs, kind
        pairs, kind = super().read(text)
        if pairs and len(self._formats) < _MOST and len(text) <= _MAX_CHARS and "\x1b" not in text:
            places = dict(zip(accumulate(map(len, parts)), range(1, len(parts)), strict=False))
            fields = [(places.get(field.start, 0), field) for field in fields_of(text)]
            if all(_is_plain(field, parts, place) for place, field in fields):
                fields = [(place, field) for place, field in fields if field.pair]
                if pairs == [field.pair for _, field in fields]:  # a bar or JSON adds no others
                    self._formats[between] = fields, kind
        return pairs, kind


def _is_plain(field: Field, parts: list[str], place: int) -> bool:
    """Whether any number in its place would be read the same way. One as `1,024` would not."""
    if field.means is None:
        return True
    is_count = field.means.kind in ("step", "count", "epoch_steps")
    is_number = parts[place] == field.figure and parts[place + 1] != ","
    return is_number and (field.pair is not None or not is_count)


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
    dialect = _AnyLoop

    def __init__(self, *, tokens_are: Mode | None = None) -> None:
        if tokens_are not in (None, "step", "line", "total"):
            raise UsageError(f'tokens_are is "step", "line" or "total", not {tokens_are!r}')
        self._tokens_are = tokens_are

    def recognises(self, head: Sequence[str]) -> bool:
        """True if a step line is among these. One line is enough."""
        dialect = self.dialect()
        return any(
            dialect.wanted(text) and dialect.read(text)[1] == "step" for text in reversed(head)
        )

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yield records as the lines come; at most a few lines are held back."""
        return RecordReader(self.dialect(), tokens_are=self._tokens_are).records(lines)
