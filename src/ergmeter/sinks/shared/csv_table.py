"""A table on disk that many runs add rows to, for years, with the columns it was begun with.

The trap: a header that is written only where the file is new, and rows that are appended whatever
the header says. With one column more the values of the new rows stand under wrong names, and no
reader can tell. So the header is compared, names and order, before the first row.
"""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from ergmeter.errors import UsageError
from ergmeter.sinks.shared.appended_file import AppendedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


class CsvFile:
    """A CSV file with fixed columns. Safe to append to from several processes at once."""

    def __init__(self, path: str | Path, columns: Sequence[str]) -> None:
        twice = sorted({name for name in columns if list(columns).count(name) > 1})
        if not columns or twice:
            raise UsageError(f"a table has columns, each once; twice: {', '.join(twice) or 'none'}")
        self.columns = tuple(columns)
        self._file = AppendedFile(path)
        try:
            with self._file.locked():
                if self._file.size_bytes:
                    self._check_header()
                else:
                    self._file.append_line(_line(self.columns))
        except UsageError:
            self._file.close()
            raise

    def append(self, row: Mapping[str, object]) -> None:
        """Add a row. None, and a column that the row lacks, are empty cells."""
        unknown = [name for name in row if name not in self.columns]
        if unknown:
            raise UsageError(f"{self._file.path} has no column {', '.join(unknown)}")
        line = _line(_cell(row.get(name)) for name in self.columns)
        with self._file.locked():
            if not self._file.size_bytes:  # emptied by somebody since
                self._file.append_line(_line(self.columns))
            self._file.append_line(line)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _check_header(self) -> None:
        with self._file.path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            there = tuple(next(csv.reader(file), ()))
        if there != self.columns:
            raise UsageError(
                f"{self._file.path} has other columns: {_difference(there, self.columns)}; "
                "move it away or choose another path"
            )


def _difference(there: tuple[str, ...], wanted: tuple[str, ...]) -> str:
    lacking = [name for name in wanted if name not in there]
    extra = [name for name in there if name not in wanted]
    said = [f"it lacks {', '.join(lacking)}"] if lacking else []
    said += [f"it has {', '.join(extra)} besides"] if extra else []
    if not said:
        pairs = zip(there, wanted, strict=False)
        at, old, new = next(((i, a, b) for i, (a, b) in enumerate(pairs, 1) if a != b), (0, "", ""))
        order = f"column {at} is {old} where {new} belongs"
        said.append(order if at else f"a column stands twice among its {len(there)}")
    return " and ".join(said)


def _cell(value: object) -> object:
    """A float that is a whole number, without the .0: counts are counts."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _line(cells: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)  # it quotes what holds one of these
    return text.getvalue().removesuffix("\r\n")
