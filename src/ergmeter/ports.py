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
    """What a probe should read. A probe ignores fields that do not concern it."""

    pid: int  # the measured process; its children count too
    path: str  # a path on the file system whose free space matters
    environment: dict[str, str] = field(default_factory=dict)  # CUDA_VISIBLE_DEVICES and the like
    options: dict[str, Any] = field(default_factory=dict)  # this probe's own, by name


@runtime_checkable
class Probe(Protocol):
    """Reads one kind of device.

    Constructed with a ProbeRequest. Raises NotMeasurable if it can't work on this machine.
    `read` is called on the sampler's thread, every `period_s`. It returns samples, and a Mark for
    a device that was lost. An exception ends only this probe. A probe whose `read` skips costly
    columns now and then also has `read_last`, which is called instead for the last reading.
    """

    name: str
    period_s: float

    @property
    def devices(self) -> Sequence[Device]:
        """The devices that the probe reads, known once it is constructed."""

    def read(self) -> Sequence[Sample | Mark]:
        """Take a reading of every device, now."""

    def close(self) -> None:
        """Release the library or file. Called once."""


class DeclaredProbe:
    """Facts about a probe before it is opened. A probe without this base is read on request."""

    name: str
    kinds: ClassVar[tuple[str, ...]]  # the values of `Device.kind` of its devices
    # What it reads: devices of the machine; a program from outside, or from inside its process; a
    # recording. `erg doctor` does not try the last two.
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
    """Byte strings: a line is decoded only if it contains one of them."""

    any_of: tuple[bytes, ...]
    folds_case: bool = False  # True: compare in lower case


@runtime_checkable
class Importer(Protocol):
    """Turns lines of text, from a file or live, into records.

    An importer is a subclass with a `name`, `recognises` and `records`; it may override the rest.
    It is constructed with those of its `options` that the user set.
    """

    name: str
    looks_for: str = ""  # what it recognises, as text for an error message
    order: int = 50  # importers are asked in this order, the most specific first
    is_live: bool = True  # False: it reads files that no measured program prints
    options: tuple[str, ...] = ()  # names of its keyword arguments
    hints: LineHints | None = None  # which lines to pass to it; None: all lines

    def recognises(self, head: Sequence[str]) -> bool:
        """True if these first lines of a log are in the importer's format."""

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yield records as lines arrive. May delay a record until later lines explain it."""

    def words(self, recognised: str) -> LineHints | None:  # noqa: ARG002
        """The line hints to use. `recognised`: a recognised line; "" before there is one."""
        return self.hints

    def advice(self, head: Sequence[str]) -> str:  # noqa: ARG002
        """Advice for the user if no line of a log was recognised. `head`: its first lines."""
        return ""

    def sampled_devices(self) -> Sequence[Device]:
        """The devices whose samples the importer has read."""
        return ()


class DeclaredSink:
    """Facts about a sink before it is opened. Options of a sink without this base are not checked.

    The sink's library is imported when the sink is opened, on the sink's own thread.
    """

    name: str
    options: ClassVar[Mapping[str, Any]]  # names and defaults; None: the sink chooses the value
    library: ClassVar[str] = ""  # the package it needs; the extra of the sink's name installs it


@dataclass(frozen=True, slots=True)
class SinkRequest:
    """What a sink is constructed with: the run, and the sink's options by name."""

    run: str  # the run directory
    name: str  # what the run is called
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Update:
    """All metrics over one window of a run, for every sink.

    `step`, for the x axis, is the number of optimizer steps done by the end of the window, steps
    before a resume included. Metrics that are `Missing` in the summary are not sent.
    """

    step: int
    wall_s: float  # the end of the window on the wall clock, as time.time() counts
    window: Window
    summary: Summary
    is_final: bool = False  # the summary is of the run's training window, and of the whole run
    window_s: float | None = None  # the window's length without cuts; None: nothing was cut
    window_kind: str = "training"
    unbroken: Mapping[str, Result] = field(default_factory=dict)  # without cuts, for a ledger row

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
