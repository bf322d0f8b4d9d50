"""What does a line say that `nvidia-smi --query-gpu=... --format=csv` wrote?

The trap: a column known by its place, or a cell by its digits. Which columns there are is whatever
was asked for; units stand in the header, and in the cells unless `nounits` was given; `[N/A]` and
`[Not Supported]` are no readings and not 0, nor is a number that is past all bounds. Between the
rows may stand what the driver says, the header once more (a loop of a shell's, a log that was
appended to, perhaps with other columns), and a last line that was cut. Programs that pass a log on
put cells in quotation marks, or a comma at the end of each line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

# Names that stand in a header, by what may be asked for them as well.
_ALIASES = {
    "gpu_name": "name", "gpu_uuid": "uuid", "gpu_bus_id": "pci.bus_id",
    "clocks.sm": "clocks.current.sm",
    "clocks_throttle_reasons.active": "clocks_event_reasons.active",
}  # fmt: skip
# What is read of a log, and the unit of a cell where neither it nor the header names one.
UNITS = {
    "power.draw": "W", "power.draw.instant": "W", "power.draw.average": "W",
    "enforced.power.limit": "W", "power.limit": "W", "memory.used": "MiB", "memory.total": "MiB",
    "utilization.gpu": "%", "clocks.current.sm": "MHz", "temperature.gpu": "C",
}  # fmt: skip
KEYS = ("uuid", "index", "pci.bus_id", "serial")  # what tells devices apart, the best first
_OTHERS = ("timestamp", "name", "driver_version", "clocks_event_reasons.active")
_KNOWN = {*UNITS, *KEYS, *_OTHERS}
_SCALES = {
    "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "W": 1.0, "mW": 1e-3,
    "%": 0.01, "MHz": 1e6, "C": 1.0,
}  # fmt: skip
# As one of them stands in every header, and in no row: quicker to look for than to take apart.
_TITLES = {
    name + unit for name in (*_KNOWN, *_ALIASES) for unit in ("", *(f" [{one}]" for one in _SCALES))
}
_TITLE = re.compile(r"[a-z][A-Za-z0-9_.]*(?: \[[^\]]*\])?")
_FIGURE = re.compile(r"(\d+(?:\.\d+)?)(?: *([A-Za-z%]+))?")
_AROUND = ' \t\n\r\f\v"'
_MOST = 2.0**63  # what is as large is damage, and no column of a run holds it


@dataclass(frozen=True, slots=True)
class Header:
    """The names of the columns, and the units that it gives them."""

    names: tuple[str, ...]
    units: Mapping[str, str]
    is_its_own: bool  # every title may be nvidia-smi's


@dataclass(frozen=True, slots=True)
class Row:
    """One reading of one device."""

    cells: Mapping[str, str]  # by name, as they stand there
    units: Mapping[str, str]

    def figure(self, name: str) -> float | None:
        """A cell in bytes, watts, hertz or as a share; None where there is no reading."""
        found = _FIGURE.fullmatch(self.cells.get(name, ""))
        if found is None:
            return None
        unit = found[2] or self.units.get(name) or UNITS[name]
        value = float(found[1]) * _SCALES[unit] if unit in _SCALES else _MOST
        return value if value < _MOST else None

    @property
    def is_surely_whole(self) -> bool:
        """Whether nothing can be missing at its end: its last cell has its unit."""
        name, cell = list(self.cells.items())[-1]
        unit = self.units.get(name)
        return bool(unit) and cell.endswith(f" {unit}")


class CsvLog:
    """One pass over the lines of a log. `header` is the last one that came, `names` are the columns
    of all that did."""

    def __init__(self) -> None:
        self.header: Header | None = None
        self.names: set[str] = set()
        self.lines = 0
        self.readings = 0
        self.first = ""  # of its lines, for a message
        self.skipped = 0  # lines that are no readings
        self.why_skipped = ""  # the first of them below a header

    def rows(self, lines: Iterable[str]) -> Iterator[Row]:
        """The readings."""
        for self.lines, line in enumerate(lines, start=1):
            text = line.strip()
            if not text:
                continue
            self.first = self.first or text
            cells = _split(text)
            found = None if _TITLES.isdisjoint(cells) else _header(cells)
            if found is not None:
                self.header = found
                self.names.update(found.names)
                continue
            if self.header is None or not self._fits(cells, self.header):
                self.skipped += 1
                continue
            self.readings += 1
            yield Row(dict(zip(self.header.names, cells, strict=True)), self.header.units)

    def _fits(self, cells: list[str], header: Header) -> bool:
        """Whether a line has a cell for each column, but for a comma at its end."""
        if len(cells) == len(header.names) + 1 and not cells[-1]:
            cells.pop()
        if len(cells) == len(header.names):
            return True
        count = len(header.names)
        self.why_skipped = self.why_skipped or (
            f"line {self.lines} has {len(cells)} cell{'s'[: len(cells) != 1]}, its header {count}"
        )
        return False


def header(line: str) -> Header | None:
    """The header that a line is, if it is one: a column that we know among names of columns, or a
    figure's among any titles."""
    return _header(_split(line))


def _header(cells: Sequence[str]) -> Header | None:
    cells = cells if cells[-1] else cells[:-1]
    titles = [cell.partition(" [") for cell in cells]
    found = [(_ALIASES.get(name, name), unit.removesuffix("]")) for name, _, unit in titles]
    names = tuple(name for name, _ in found)
    if _KNOWN.isdisjoint(names):
        return None
    is_its_own = all(_TITLE.fullmatch(cell) for cell in cells)
    if not is_its_own and UNITS.keys().isdisjoint(names):
        return None
    return Header(names, dict(found), is_its_own)


def key_of(names: Iterable[str]) -> str | None:
    """The column that tells devices apart; None if there is none."""
    there = set(names)
    return next((name for name in KEYS if name in there), None)


def _split(line: str) -> list[str]:
    """The cells; nothing that nvidia-smi says of a GPU has a comma in it."""
    return [cell.strip(_AROUND) for cell in line.split(",")]
