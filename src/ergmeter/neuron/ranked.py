"""Which graphs matter, where a cache holds hundreds?

The trap: a table cut off after so many rows, in the order of the directory. Graphs stand by what
they multiply, times their runs where those are known; what is below the cut is counted and summed,
so that the rows and the rest make the whole. A graph that can't be read has no place in that order:
those are apart, each with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    File = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RankedGraph:
    """One graph, and its share of all multiply-adds; None where there are none."""

    file: File
    macs_frac: float | None


@dataclass(frozen=True)
class Ranked:
    """The graphs with the most work, what the others come to, and those that can't be read."""

    graphs: tuple[RankedGraph, ...]
    rest: int
    rest_macs_frac: float | None
    failed: tuple[File, ...]


def ranked(files: Sequence[File], *, most: int) -> Ranked:
    """So many graphs at most, those with the most work first."""
    good = [file for file in files if file["status"] == "success"]
    good.sort(key=lambda file: (-_work(file), str(file["file_path"])))
    whole = sum(map(_work, good))
    rest = good[most:]
    return Ranked(
        tuple(RankedGraph(file, _work(file) / whole if whole else None) for file in good[:most]),
        len(rest),
        sum(map(_work, rest)) / whole if whole else None,
        tuple(file for file in files if file["status"] != "success"),
    )


def _work(file: File) -> int:
    """Multiply-adds, as often as the graph ran; once where that is not known."""
    runs = file.get("runs")
    return int(file["hlo_macs"]) * (1 if runs is None else int(runs))
