"""Which cells does a plan that is kept in a file have? One at a time.

The trap: a plan of 20 000 cells is 40 MB of JSON in one line, and several times that as objects.
Who looks at each cell once needs room for one. The text is read in pieces, and a cell is decoded
when it is there whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from ergmeter.bench.cells import VERSION, Cell
from ergmeter.errors import FormatError, UsageError

_PIECE = 1 << 18  # characters
_BLANK = " \t\r\n"


def cells(path: Path) -> Iterator[Cell]:
    """The cells of the plan at this path, in its order."""
    try:
        with path.open(encoding="utf-8") as file:
            for one in _members(_Text(file), path):
                yield Cell.from_json(one)
    except FileNotFoundError as error:
        raise FormatError(f"{path} is not there: no plan was made here") from error
    except NotADirectoryError as error:
        raise UsageError(
            f"{path.parent} is a file; name the directory of results that it is in"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path} is no plan: {type(error).__name__}: {error}") from error


def _members(text: _Text, path: Path) -> Iterator[dict[str, Any]]:
    """What is in the list `cells` of the object that the text is; the version stands before it."""
    text.take("{")
    key, version = text.value(), None
    while key != "cells":
        text.take(":")
        found = text.value()
        version = found if key == "version" else version
        text.take(",")
        key = text.value()
    if version != VERSION:
        raise FormatError(f"{path} is of version {version!r}; this ergmeter reads {VERSION}")
    text.take(":")
    text.take("[")
    while text.next() != "]":
        yield text.value()
        if text.next() == ",":
            text.take(",")
    text.take("]")


class _Text:
    """JSON that is read as far as it is needed."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self._decoder = json.JSONDecoder()

    def next(self) -> str:
        """The next character that is not blank; it stays."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _BLANK:
                    return self._text[self._at]
                self._at += 1
            if not self._read():
                raise ValueError("it ends too early")

    def take(self, wanted: str) -> None:
        if self.next() != wanted:
            raise ValueError(f"{wanted!r} was expected, not {self.next()!r}")
        self._at += 1

    def value(self) -> Any:  # noqa: ANN401  whatever JSON can hold
        """The next value, whole."""
        self.next()
        while True:
            try:
                found, end = self._decoder.raw_decode(self._text, self._at)
            except ValueError:
                if not self._read():
                    raise
                continue
            # A number at the very end may go on in the next piece.
            if end < len(self._text) or not self._read():
                self._at = end
                return found

    def _read(self) -> bool:
        """Take a piece more, and let go of what is behind. Whether there was one."""
        more = self._file.read(_PIECE)
        self._text = self._text[self._at :] + more
        self._at = 0
        return bool(more)
