"""What does a line say that `nvidia-smi --query-gpu=... --format=csv` wrote?

The trap: a column known by its place, or a cell by its digits. Which columns there are is whatever
was asked for; units stand in the header, and in the cells unless `nounits` was given; `[N/A]` and
`[Not Supported]` are no readings and not 0. Between the rows may stand what the driver says, the
header once more (a loop of a shell's, a log that was appended to), and a last line that was cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
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
KEYS = ("uuid", "index", "pci.bus_id")  # what tells devices apart, the best first
_OTHERS = ("timestamp", "name", "driver_version", "clocks_event_reasons.active")
_KNOWN = {*UNITS, *KEYS, *_OTHERS}
_SCALES = {
    "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "W": 1.0, "mW": 1e-3,
    "%": 0.01, "MHz": 1e6, "C": 1.0,
}  # fmt: skip
_TITLE = re.compile(r"([a-z][a-z0-9_.]*)(?: \[([^\]]*)\])?")
_FIGURE = re.compile(r"(\d+(?:\.\d+)?)(?: *([A-Za-z%]+))?")


@dataclass(frozen=True, slots=True)
class Header:
    """The names of the columns, and the units that it gives them."""

    names: tuple[str, ...]
    units: Mapping[str, str]


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
        return float(found[1]) * _SCALES[unit] if unit in _SCALES else None

    @property
    def is_surely_whole(self) -> bool:
        """Whether nothing can be missing at its end: its last cell has its unit."""
        name, cell = list(self.cells.items())[-1]
        unit = self.units.get(name)
        return bool(unit) and cell.endswith(f" {unit}")


class CsvLog:
    """One pass over the lines of a log. `header` is the last one that came."""

    def __init__(self) -> None:
        self.header: Header | None = None
        self.first = ""  # of its lines, for a message
        self.skipped = 0  # lines that are no readings

    def rows(self, lines: Iterable[str]) -> Iterator[Row]:
        """The readings."""
        for line in lines:
            text = line.strip()
            if not text:
                continue
            self.first = self.first or text
            # No cell of the first column begins with a small letter, but its title does.
            found = header(text) if text[0].islower() else None
            if found is not None:
                self.header = found
                continue
            cells = _split(text)
            if self.header is None or len(cells) != len(self.header.names):
                self.skipped += 1
                continue
            yield Row(dict(zip(self.header.names, cells, strict=True)), self.header.units)


def header(line: str) -> Header | None:
    """The header that a line is, if it is one: names of columns, one at least of which we know."""
    titles = [_TITLE.fullmatch(cell) for cell in _split(line)]
    found = [(_ALIASES.get(one[1], one[1]), one[2] or "") for one in titles if one]
    if len(found) < len(titles) or not any(name in _KNOWN for name, _ in found):
        return None
    return Header(tuple(name for name, _ in found), dict(found))


def key_of(names: Iterable[str]) -> str | None:
    """The column that tells devices apart; None if there is none."""
    there = set(names)
    return next((name for name in KEYS if name in there), None)


def _split(line: str) -> list[str]:
    """The cells; nothing that nvidia-smi says of a GPU has a comma in it."""
    return [cell.strip() for cell in line.split(",")]
