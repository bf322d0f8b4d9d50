"""The plugin protocols, on one page. A plugin is found by its entry point; see `registry`.

| kind     | entry-point group   | protocol here |
| probe    | ergmeter.probes     | Probe, DeclaredProbe |
| importer | ergmeter.importers  | Importer      |
| sink     | ergmeter.sinks      | Sink, DeclaredSink   |
| metric   | ergmeter.metrics    | list[Metric] of ergmeter.metrics.catalog |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from ergmeter.records import Device, Mark, Record, Result, Sample, Summary, Window


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """What a probe is to read. A probe ignores what does not concern it."""

    pid: int  # the measured process; its children count too
    path: str  # a path on the file system whose free space matters
    environment: dict[str, str] = field(default_factory=dict)  # CUDA_VISIBLE_DEVICES and its kin
    options: dict[str, Any] = field(default_factory=dict)  # this probe's own, by name


@runtime_checkable
class Probe(Protocol):
    """Reads one kind of device.

    Constructed with a ProbeRequest. Raises NotMeasurable if it can't work on this machine.
    `read` is called on the sampler's thread, every `period_s`. It returns samples, and a Mark for
    a device that was lost. An exception ends this probe and no other. A probe that leaves out what
    is costly on some readings also has `read_last`, called in its place for the very last one.
    """

    name: str
    period_s: float

    @property
    def devices(self) -> Sequence[Device]:
        """The devices it reads, known once it is constructed."""

    def read(self) -> Sequence[Sample | Mark]:
        """Take a reading of every device, now."""

    def close(self) -> None:
        """Release the library or file. Called once."""


class DeclaredProbe:
    """What is known of a probe before it is opened. A probe that inherits nothing is on request."""

    name: str
    kinds: ClassVar[tuple[str, ...]]  # of its devices, as `Device.kind` has them
    # What it reads: devices of the machine; a program from outside, or from inside its process; a
    # recording. The last two are not what `erg doctor` looks for.
    reads: ClassVar[Literal["machine", "program", "inside", "recording"]] = "machine"
    is_default: ClassVar[bool] = True  # opened unless the user names others
    has_interval: ClassVar[bool] = False  # `erg record --interval` sets how often it is read
    usual_period_s: ClassVar[float]

    def __init__(self, request: ProbeRequest) -> None:
        self.period_s = float(request.options.get("period_s", self.usual_period_s))

    def close(self) -> None:
        """Release what was opened; most probes open nothing."""

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the probe if the block fails: for a constructor that has opened something."""
        with ExitStack() as undo:
            undo.callback(self.close)
            yield
            undo.pop_all()


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a program's output: its text, and when it was read (None in a log file)."""

    text: str
    t_ns: int | None = None


@dataclass(frozen=True, slots=True)
class LineHints:
    """Byte strings of which a line must hold one to be decoded."""

    any_of: tuple[bytes, ...]
    folds_case: bool = False  # they are in lower case, the log in any


@runtime_checkable
class Importer(Protocol):
    """Turns lines of text, from a file or live, into records.

    An importer is a subclass: it has a `name`, `recognises` and `records`, and overrides what else
    it has to declare. It is constructed with those of its `options` that the user gave.
    """

    name: str
    looks_for: str = ""  # in words, for a message that nothing was recognised
    order: int = 50  # importers are asked in this order, the most specific first
    is_live: bool = True  # False: it reads files that no measured program prints
    options: tuple[str, ...] = ()  # names of its keyword arguments
    hints: LineHints | None = None  # of the lines that it wants; None: any line

    def recognises(self, head: Sequence[str]) -> bool:
        """True if these first lines are in the format this importer reads."""

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yield records as the lines come. May hold a few lines back to see what they mean."""

    def words(self, recognised: str) -> LineHints | None:  # noqa: ARG002
        """The hints before ("") or after a line was recognised, where they differ."""
        return self.hints

    def advice(self, head: Sequence[str]) -> str:  # noqa: ARG002
        """A hint for a log with this beginning in which nothing was recognised."""
        return ""

    def sampled_devices(self) -> Sequence[Device]:
        """The devices that it has read samples of."""
        return ()


class DeclaredSink:
    """What is known of a sink before it is opened. A sink that inherits nothing has no checks.

    The library that it sends to is imported when the sink is opened, on the sink's own thread.
    """

    name: str
    options: ClassVar[Mapping[str, Any]]  # with their defaults; None: the sink determines it itself
    library: ClassVar[str] = ""  # to be installed, by the extra of the sink's name


@dataclass(frozen=True, slots=True)
class SinkRequest:
    """What a sink is opened with: the run, and its own options by name."""

    run: str  # the run directory
    name: str  # what the run is called
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Update:
    """All metrics over one window of a run, for every sink.

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
        """The time that rates are computed over."""
        return self.window.duration_s if self.window_s is None else self.window_s


@runtime_checkable
class Sink(Protocol):
    """Sends metrics to another system. Constructed with a SinkRequest.

    All calls, construction and imports included, run on the sink's own thread, so a sink may block.
    It may also raise: a refused update is offered again later. Only UsageError (invalid options)
    and PluginError (missing requirements) end it for good.
    """

    name: str

    def write(self, update: Update) -> None:
        """Deliver one update."""

    def close(self) -> None:
        """Deliver what is buffered and close. Called once, after the final update."""
