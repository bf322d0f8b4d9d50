"""The plugin protocols, on one page. A plugin is found by its entry point; see `registry`.

| kind     | entry-point group   | protocol here |
| probe    | ergmeter.probes     | Probe         |
| importer | ergmeter.importers  | Importer      |
| sink     | ergmeter.sinks      | Sink          |
| metric   | ergmeter.metrics    | list[Metric] of ergmeter.metrics.catalog |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ergmeter.records import Device, Mark, Record, Result, Sample, Summary, Window


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


@dataclass(frozen=True, slots=True)
class SinkRequest:
    """What a sink is opened with: whose figures they are, and its own options by name."""

    run: str  # the run directory
    name: str  # what the run is called
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Update:
    """What a run came to lately, for every sink: all metrics over one window.

    `step` is the number of optimizer steps done by the end of the window, those before a resume
    included: the axis. What is `Missing` in the summary is not sent, and never sent as 0.
    """

    step: int
    wall_s: float  # the end of the window on the wall clock, as time.time() counts
    window: Window
    summary: Summary
    is_final: bool = False  # the summary is of the run's training window, and of the whole run
    window_s: float | None = None  # without what was cut out of it; None: all of it
    window_kind: str = "training"
    unbroken: Mapping[str, Result] = field(default_factory=dict)  # nothing cut, for a ledger's row

    @property
    def length_s(self) -> float:
        """The time that rates are over."""
        return self.window.duration_s if self.window_s is None else self.window_s


@runtime_checkable
class Sink(Protocol):
    """Takes figures to where people look at them. Constructed with a SinkRequest.

    Everything is called on a thread of the sink's own, the construction and its imports included,
    so it may block, and it may raise: an update that was refused is offered again later. Only
    UsageError (options that make no sense) and PluginError (what is missing, and what to install)
    end it for good.
    """

    name: str

    def write(self, update: Update) -> None:
        """Deliver one update."""

    def close(self) -> None:
        """Deliver what was held back and let go. Called once, after the final update."""
