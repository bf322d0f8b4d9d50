"""Reads step lines of any training loop.

For example `step=10 loss=2.31 tokens=4096`, `iter 10: loss 2.3, time 12ms` and JSON. A line that
another importer recognises is left to that importer, which reads more of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ergmeter.errors import UsageError
from ergmeter.importers.engine.pairs import HINTS, Field, Meaning, NamedNumber, fields_of, figure_of
from ergmeter.importers.engine.reading import RecordReader
from ergmeter.importers.engine.step_line import TokensAre
from ergmeter.importers.engine.step_lines import Dialect, Kind, of_another
from ergmeter.importers.logfile import LineHints
from ergmeter.ports import Line
from ergmeter.records import Record

# Line layouts. A loop prints its steps in one format, so most lines of a long log differ only in
# their figures and are read by one match. Only plain figures may vary: `1,024` is one number,
# `12,024` may be two, and a digit in a name belongs to the name. A line that no layout matches is
# read in full.


_MOST = 8  # layouts: a loop has a few, and lines that are never twice alike are not worth more
_MAX_CHARS = 2000
_PLAIN = r"[0-9]{1,15}(?:\.[0-9]{0,15})?(?:[eE][-+]?[0-9]{1,3})?"
_IS_PLAIN = re.compile(_PLAIN)
_INTEGER = r"[0-9]{1,15}"
_IS_WHOLE = re.compile(_INTEGER)
_WORDS = re.compile(r"([^\W\d]\w*)|([0-9]+)|(.)", re.DOTALL)


class _Value(NamedTuple):
    means: Meaning
    printed: str
    read: Callable[[str], float]
    spaced: bool


class _Layout(NamedTuple):
    pattern: re.Pattern[str]
    values: tuple[_Value, ...]
    kind: Kind


class Layouts:
    """The line layouts of one output."""

    def __init__(self) -> None:
        self._known: list[_Layout] = []

    def read(self, text: str) -> tuple[list[NamedNumber], Kind] | None:
        """The pairs of a line and its kind, if an earlier line had the same layout."""
        for pattern, values, kind in self._known:
            if match := pattern.fullmatch(text):
                figures = zip(values, match.groups(), strict=True)
                return [
                    NamedNumber(m, n, read(f), spaced) for (m, n, read, spaced), f in figures
                ], kind
        return None

    def learn(self, text: str, numbers: list[NamedNumber], kind: Kind) -> None:
        """Stores the layout of a line that was read in full, if it is unambiguous."""
        if len(self._known) >= _MOST or not numbers or len(text) > _MAX_CHARS or "\x1b" in text:
            return
        fields = list(fields_of(text))
        if all(_is_plain(field, text) for field in fields):
            readable = [field for field in fields if field.value is not None]
            values = tuple(_value(field) for field in readable)
            figures = zip(values, readable, strict=True)
            pairs = [
                NamedNumber(v.means, v.printed, v.read(f.figure), v.spaced) for v, f in figures
            ]
            if pairs == numbers:  # else a bar gave a number too, or JSON has others
                self._known.append(_Layout(re.compile(_pattern(text, fields)), values, kind))


def _is_plain(field: Field, text: str) -> bool:
    """True if any other figure there would be read the same way."""
    end = field.start + len(field.figure)
    if text[end : end + 1] == "," and text[end + 1 : end + 2].isdigit():
        return False
    if any(letter.isdigit() for letter in field.printed):
        return False
    if _is_whole(field):
        return _IS_WHOLE.fullmatch(field.figure) is not None and field.suffix == ""
    return _IS_PLAIN.fullmatch(field.figure) is not None


def _is_whole(field: Field) -> bool:
    return field.means is not None and field.means.kind in ("step", "count")


def _value(field: Field) -> _Value:
    assert field.means is not None
    read: Callable[[str], float] = int if _is_whole(field) else float
    if field.suffix:
        read = partial(_with_suffix, means=field.means, suffix=field.suffix)
    return _Value(field.means, field.printed, read, field.spaced)


def _with_suffix(figure: str, *, means: Meaning, suffix: str) -> float:
    value = figure_of(means, figure, suffix)
    assert value is not None  # with that suffix one figure was read, and so is another
    return value


def _pattern(text: str, fields: list[Field]) -> str:
    parts, end = [], 0
    for field in fields:
        parts.append(_literal(text[end : field.start]))
        figure = _INTEGER if _is_whole(field) else _PLAIN
        parts.append(figure if field.value is None else f"({figure})")
        end = field.start + len(field.figure)
    return "".join(parts) + _literal(text[end:])


def _literal(text: str) -> str:
    """A pattern for this text with any other digits, but for those in words."""
    return "".join(
        f"[0-9]{{{len(digits)}}}" if digits else re.escape(word or other)
        for word, digits, other in _WORDS.findall(text)
    )


class KeyValueImporter:
    """Step lines of any training loop, live or from a log file.

    `tokens_are` overrules the reading of a bare `tokens=`: "step" (the tokens of one step), "line"
    (those since the line before) or "total" (a running total).
    """

    name = "keyvalue"
    looks_for = "lines such as `step=3 loss=2.1 tokens=4096`"

    def __init__(self, *, tokens_are: TokensAre | None = None) -> None:
        if tokens_are not in (None, "step", "line", "total"):
            raise UsageError(f'tokens_are is "step", "line" or "total", not {tokens_are!r}')
        self._tokens_are = tokens_are

    def recognises(self, head: Sequence[str]) -> bool:
        """True if a step line is among these. One line is enough."""
        dialect = self.dialect()
        return any(
            dialect.wanted(text)
            and not of_another(text)
            and dialect.is_step(dialect.pairs(text), text)
            for text in reversed(head)
        )

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yield records as the lines come; at most a few lines are held back."""
        return RecordReader(self.dialect(), tokens_are=self._tokens_are).records(lines)

    def words(self, recognised: str) -> LineHints:  # noqa: ARG002
        """Byte strings of which each wanted line holds one."""
        return LineHints(tuple(hint.encode() for hint in HINTS), folds_case=True)

    def dialect(self) -> Dialect:
        """How its lines are read."""
        return _AnyLoop()


class _AnyLoop(Dialect):
    def __init__(self) -> None:
        super().__init__()
        self._layouts = Layouts()

    def read(self, text: str) -> tuple[list[NamedNumber], Kind]:
        """Reads a line by a stored layout, else in full."""
        learnt = self._layouts.read(text)
        if learnt is not None:
            return learnt
        pairs, kind = super().read(text)
        self._layouts.learn(text, pairs, kind)
        return pairs, kind
