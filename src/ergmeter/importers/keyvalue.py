"""What did a training loop of any make say about its steps?

Reads lines such as `step=10 loss=2.31 tokens=4096`, `iter 10: loss 2.3, time 12ms` and JSON. The
trap: a known program's lines look much the same, and say more to the importer that knows it. So
this one recognises a line only where no other does, and reads all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ergmeter.errors import UsageError
from ergmeter.importers.counts import TokensAre
from ergmeter.importers.dialect import Dialect, Kind
from ergmeter.importers.layouts import Layouts
from ergmeter.importers.logfile import Words
from ergmeter.importers.pairs import HINTS, Pair
from ergmeter.importers.reading import Reading
from ergmeter.importers.signatures import of_another
from ergmeter.ports import Line
from ergmeter.records import Record


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
        """Say whether a step line is among these. One line alone decides."""
        dialect = self.dialect()
        return any(
            dialect.wanted(text)
            and not of_another(text)
            and dialect.is_step(dialect.pairs(text), text)
            for text in reversed(head)
        )

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yield records as the lines come; at most a few lines are held back."""
        return Reading(self.dialect(), tokens_are=self._tokens_are).records(lines)

    def words(self, recognised: str) -> Words:  # noqa: ARG002
        """What to look for in a log after this line."""
        return Words(tuple(hint.encode() for hint in HINTS), folds_case=True)

    def dialect(self) -> Dialect:
        """How its lines are read."""
        return _AnyLoop()


class _AnyLoop(Dialect):
    def __init__(self) -> None:
        super().__init__()
        self._layouts = Layouts()

    def read(self, text: str) -> tuple[list[Pair], Kind]:
        """As any line is read, or as one like it was."""
        known = self._layouts.read(text)
        if known is not None:
            return known
        found, kind = super().read(text)
        self._layouts.learn(text, found, kind)
        return found, kind
