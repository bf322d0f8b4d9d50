"""Files that several processes append to in complete pieces; CSV tables; the energy ledger.

Two processes that start together may both write the header; a piece written in two calls may be
split by another process's; a full disk leaves half a piece. So a piece is one `write` at the file's
end, under a lock, and an incomplete one is removed again.

`flock` and not `lockf`, whose locks belong to the process: two threads would not exclude each
other. On NFS the kernel maps one to the other.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ergmeter.errors import UsageError
from ergmeter.metrics.catalog import ledger_aliases
from ergmeter.records import Reading, Result

# -- the energy ledger: SFT-Play's columns ---------------------------------------------------------
# The values come from the catalogue, which has SFT-Play's names and units as aliases. All are over
# one window: from the end of the declared warm-up to the last step, evaluation and checkpoints
# included (window kind `unbroken`), as in the original. The user supplies what is not measured
# (model, dataset, ...). A missing value is an empty cell.

LEDGER_DESCRIBED = (
    *("model", "dataset", "backend", "optimizer", "batch_size", "grad_accum", "seq_len"),
    *("steps", "precision", "seed", "notes"),
)
LEDGER_MEASURED = (
    *("wall_s", "warmup_s", "tokens_processed", "tok_per_s", "energy_J", "avg_power_W"),
    *("peak_power_W", "J_per_token", "E10k_J", "vram_peak_MB", "vram_avg_MB"),
)
LEDGER_COLUMNS = (*LEDGER_DESCRIBED, *LEDGER_MEASURED)


def ledger_columns(described: Mapping[str, object]) -> tuple[str, ...]:
    """Return SFT-Play's columns in their order, then the user's other columns."""
    return (*LEDGER_COLUMNS, *(name for name in described if name not in LEDGER_COLUMNS))


def ledger_row(
    readings: Mapping[str, Result], *, steps: int, described: Mapping[str, object]
) -> dict[str, object]:
    """Return a run's ledger row: its steps, its measured values and the user's description."""
    cells: dict[str, object] = {"steps": steps}
    for metric, alias in ledger_aliases():
        reading = readings.get(metric.key)
        if isinstance(reading, Reading):
            cells[alias.name] = reading.value * alias.scale
    return {**cells, **described}


# -- appending -------------------------------------------------------------------------------------


class AppendedFile:
    """An open file, read from its start and written at its end."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o666)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the file against other processes while in the context."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    @property
    def size_bytes(self) -> int:
        """The file's current size."""
        return os.fstat(self._descriptor).st_size

    def append(self, piece: bytes) -> None:
        """Write all of `piece`, or nothing. Call under the lock."""
        before_bytes = self.size_bytes
        written_bytes = os.write(self._descriptor, piece)
        if written_bytes != len(piece):
            os.ftruncate(self._descriptor, before_bytes)
            raise OSError(errno.ENOSPC, "no space for a whole row", str(self.path))

    def append_line(self, line: str) -> None:
        """Write a line, after a line break if the last writer left an incomplete line."""
        size_bytes = self.size_bytes
        is_cut = size_bytes and os.pread(self._descriptor, 1, size_bytes - 1) != b"\n"
        self.append(("\n" if is_cut else "").encode() + line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


# -- CSV tables ------------------------------------------------------------------------------------
# Many runs add rows to one table, over years. Appending under another header would put values under
# wrong names. So the header is compared, names and order, before the first row.


class CsvFile:
    """A CSV file with fixed columns. Safe to append to from several processes at once."""

    def __init__(self, path: str | Path, columns: Sequence[str]) -> None:
        twice = sorted({name for name in columns if list(columns).count(name) > 1})
        if not columns or twice:
            raise UsageError(f"columns must be distinct; duplicates: {', '.join(twice) or 'none'}")
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
        """Add a row. None and missing columns become empty cells."""
        unknown = [name for name in row if name not in self.columns]
        if unknown:
            raise UsageError(f"{self._file.path} has no column {', '.join(unknown)}")
        line = _line(integral(row.get(name)) for name in self.columns)
        with self._file.locked():
            if not self._file.size_bytes:  # another program emptied the file
                self._file.append_line(_line(self.columns))
            self._file.append_line(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _check_header(self) -> None:
        there = header_of(self._file.path)
        if there != self.columns:
            raise UsageError(
                f"{self._file.path} has other columns: {_difference(there, self.columns)}; "
                "move it away or choose another path"
            )


def header_of(path: Path) -> tuple[str, ...]:
    """Return the column names of a CSV file; none if it is empty."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        return tuple(next(csv.reader(file), ()))


def _difference(there: tuple[str, ...], wanted: tuple[str, ...]) -> str:
    lacking = [name for name in wanted if name not in there]
    extra = [name for name in there if name not in wanted]
    differences = [f"it lacks {', '.join(lacking)}"] if lacking else []
    differences += [f"it has {', '.join(extra)} besides"] if extra else []
    if not differences:
        pairs = zip(there, wanted, strict=False)
        at, old, new = next(((i, a, b) for i, (a, b) in enumerate(pairs, 1) if a != b), (0, "", ""))
        order = f"column {at} is {old} where {new} belongs"
        differences.append(order if at else f"one of its {len(there)} columns occurs twice")
    return " and ".join(differences)


def integral(value: object) -> object:
    """Return an integral float as an int, so that it is written without .0."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _line(cells: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)  # cells with a line break are quoted
    return text.getvalue().removesuffix("\r\n")
