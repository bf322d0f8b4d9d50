"""The plugin protocols, on one page. A plugin is found by its entry point; see `registry`.

| kind     | entry-point group   | protocol here |
| probe    | ergmeter.probes     | Probe         |
| importer | ergmeter.importers  | Importer      |
| metric   | ergmeter.metrics    | list[Metric] of ergmeter.metrics.catalog |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ergmeter.records import Device, Mark, Record, Sample


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """What a probe is asked to watch. A probe takes what concerns it and ignores the rest."""

    pid: int  # the measured process; its children count too
    path: str  # a path on the file system whose free space matters
    environment: dict[str, str] = field(default_factory=dict)  # CUDA_VISIBLE_DEVICES and its kin
    options: dict[str, Any] = field(default_factory=dict)  # this probe's own, by name


@runtime_checkable
class Probe(Protocol):
    """Reads one kind of device. Constructed with a ProbeRequest; raises NotMeasurable, with the
    reason and the cure, where it can't work on this machine.

    `read` is called on the sampler's thread, every `period_s`. It returns samples, and a Mark for
    a device that was lost. An exception ends this probe and no other. A probe that leaves out what
    is costly on some readings also has `read_last`, called in its place for the very last one.
    """

    name: str
    period_s: float

    @property
    def devices(self) -> Sequence[Device]:
        """What it reads: known once it is constructed."""

    def read(self) -> Sequence[Sample | Mark]:
        """Take a reading of every device, now."""

    def close(self) -> None:
        """Let go of the library or file. Called once."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a program's output: when it was seen (None in a log file), and its text."""

    text: str
    t_ns: int | None = None


@runtime_checkable
class Importer(Protocol):
    """Turns lines of text, from a file or live, into records."""

    name: str

    def recognises(self, head: Sequence[str]) -> bool:
        """Say whether these first lines are in the format this importer reads."""

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yield records as the lines come. May hold a few lines back to see what they mean."""
