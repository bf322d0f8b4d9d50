"""What is said while an analysis goes on, for a console, a progress bar, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class AnalysisProgress:
    """So much of a long work is done."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class LogRead:
    """The log has been read; `metrics` is what the document has as `log_metrics`."""

    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ThroughputChosen:
    """Where the throughput is from, if not from the command line: the log, or nowhere."""

    seq_per_s: float
    is_from_log: bool
    said: str | None = None  # how the log's was obtained


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the figures are made from, as far as the document is known."""

    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Searching:
    """The compile cache is being searched."""

    directory: str


@dataclass(frozen=True, slots=True)
class FoundGraphs:
    """So many graphs will be counted."""

    count: int
    is_original: bool = False  # said as the original says it, whatever the number


@dataclass(frozen=True, slots=True)
class GraphCounted:
    """One more graph has been counted."""

    path: str


Event: TypeAlias = (
    AnalysisProgress | LogRead | ThroughputChosen | Inputs | Searching | FoundGraphs | GraphCounted
)
Watch: TypeAlias = Callable[[Event], None]
