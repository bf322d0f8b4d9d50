"""Which figures of a report are not there, in which cells, and why?

The trap: a dash that nobody explains. Each cell's row has its reasons; cells that lack the same for
the same reason are one line, though their times and counts differ in it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# What a report shows, by its columns: the figure is there if one of them is.
_FIGURES = {
    "tokens/s": ("tokens_per_s",),
    "/device": ("tokens_per_s_per_device",),
    "samples/s": ("samples_per_s",),
    "loss": ("loss",),
    "memory": (
        *("memory_process_peak_bytes", "memory_hf_peak_bytes", "memory_allocator_peak_bytes"),
        *("memory_nvidia_peak_bytes", "memory_nvidia_mean_bytes"),
    ),
    "time": ("runtime_s",),
}
_NUMBERS = re.compile(r"[\d.]+")
_MOST = 8  # cells that are named


class Absences:
    """What the cells that ended well do not tell, gathered a row at a time."""

    def __init__(self) -> None:
        self._cells = 0
        self._found: dict[tuple[tuple[str, ...], str], tuple[str, list[int]]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """One more cell. Of one that failed, its failure is the reason."""
        if row["status"] != "ok":
            return
        self._cells += 1
        reasons = json.loads(row["missing"] or "{}")
        lacking: dict[str, list[str]] = {}
        for name, columns in _FIGURES.items():
            if all(row[column] is None for column in columns):
                why = reasons.get(columns[0]) or "nothing told it"
                lacking.setdefault(why, []).append(name)
        for why, names in lacking.items():
            key = tuple(names), _NUMBERS.sub("#", why)
            self._found.setdefault(key, (why, []))[1].append(row["index"])

    @property
    def lines(self) -> list[str]:
        """One for each kind of lack."""
        return [
            f"no {', '.join(names)} in {self._named(cells)}: {why}"
            for (names, _), (why, cells) in self._found.items()
        ]

    def _named(self, cells: list[int]) -> str:
        if len(cells) == self._cells > 1:
            return f"all {len(cells)} cells that are ok"
        shown = ", ".join(str(cell) for cell in cells[:_MOST])
        more = f" and {len(cells) - _MOST} more" if len(cells) > _MOST else ""
        return f"cell{'s' * (len(cells) > 1)} {shown}{more}"
