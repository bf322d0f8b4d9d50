"""Makes runs from a log, so that every metric and view works on it.

A restart in the log ends one run and begins the next, each in its own directory. A log's times
count from 1970 or from the log's beginning. On the run's clock, the first of them is the moment of
the import; the header stores its wall-clock time.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from ergmeter import registry
from ergmeter.errors import FormatError
from ergmeter.importers.logfile import STDIN, ChosenImporter, LogFile, Progress, choose_importer
from ergmeter.records import Device, Flops, Mark, Record, Reported, Sample, Step
from ergmeter.runlog.identity import new_run_path, run_header, writer_header
from ergmeter.runlog.reader import IMPORTED
from ergmeter.runlog.settings import Settings
from ergmeter.runlog.writer import Writer, create_run

_STREAM = "output"  # the stream of records from a program's output
_BATCH_ROWS = 10_000
_BEFORE_FIRST = 1000  # records that wait for the first step, to know when the run began
_WALL_NS = 10**17  # a time above this, in 1973, counts from 1970
# dataclasses.replace takes as long as all else that is done here to a record.
_BESIDE_TIMES = attrgetter(*(column.name for column in fields(Step)[2:]))
_BESIDE_TIME = attrgetter(*(column.name for column in fields(Sample)[1:]))
_WHY_NO_STEPS = ("output_unrecognised", "several_programs")
_UNTIMED = (
    "no steps: nothing in the log says how long a step took (a timestamp, a printed step time, or a"
    " progress bar with its time); its figures are in the table of reported metrics"
)


@dataclass(frozen=True)
class ImportRequest:
    """Which log to read, and how."""

    log: str | Path
    out: Path | None = None
    name: str | None = None
    format: str | None = None
    settings: Settings = field(default_factory=Settings)
    flops: tuple[Flops, ...] = ()
    tokens_are: str | None = None
    one_device: bool = False  # a log of nvidia-smi that names no device is of one


@dataclass
class ImportedRun:
    """A run that was made from a log: its path, its steps and notes on how it was read."""

    began: str = ""  # why it is another run than the one before
    path: Path = Path()
    steps: int = 0  # spans that were timed
    first_step: int | None = None
    last_step: int | None = None
    notes: list[str] = field(default_factory=list)
    why_no_steps: str = ""  # or why there are no more of them
    readings: int = 0  # samples of devices


@dataclass(frozen=True)
class Imported:
    """The runs made from a log, and how the log was read."""

    log: LogFile
    choice: ChosenImporter
    runs: tuple[ImportedRun, ...]


def import_log(request: ImportRequest, *, progress: Progress | None = None) -> Imported:
    """Make a run from a log, or several if it holds several. Raises FormatError without any step.

    If it fails, the runs that were already made are removed."""
    log = LogFile(request.log, progress=progress)
    options: dict[str, Any] = {"one_device": True} if request.one_device else {}
    if request.tokens_are:
        options["tokens_are"] = request.tokens_are
    hint = "" if request.format else "--format NAME chooses a reader"
    choice = choose_importer(log, format=request.format, options=options, hint=hint)
    with ExitStack() as undo:
        runs = _make_runs(request, choice, log, undo)
        undo.pop_all()
    return Imported(log, choice, tuple(runs))


def _make_runs(
    request: ImportRequest, choice: ChosenImporter, log: LogFile, undo: ExitStack
) -> list[ImportedRun]:
    """Make the runs of a log, and add to `undo` the functions that remove them."""
    runs: list[ImportedRun] = []
    sink = _Sink(request, choice.importer.name, number=1)
    undo.callback(sink.discard)
    for record in choice.importer.records(choice.lines):
        if isinstance(record, Mark) and record.name == "restarted" and sink.has_records:
            runs.append(sink.close(choice.importer.sampled_devices()))
            sink = _Sink(request, choice.importer.name, number=len(runs) + 1, began=record.detail)
            undo.callback(sink.discard)
            continue
        sink.take(record)
    if log.is_cut_off:
        sink.take(Mark(0, "rows_dropped", "the compressed log is truncated"))
    if sink.has_records:
        runs.append(sink.close(choice.importer.sampled_devices()))
    if not runs:
        cut = ", and the compressed log is truncated" if log.is_cut_off else ""
        why = f": {sink.run.why_no_steps}" if sink.run.why_no_steps else ""
        raise FormatError(
            f"{log.path}: recognised as {choice.importer.name}, but it holds no step{cut}{why}"
        )
    return runs


class _Sink:
    """Writes the records of one run. The directory is made when its first time is known."""

    def __init__(
        self, request: ImportRequest, format_name: str, *, number: int, began: str = ""
    ) -> None:
        self._request = request
        self.run = ImportedRun(began)
        self._format = format_name
        self._number = number
        self._early: list[Record] = []
        self._writer: Writer | None = None
        self._shift_ns = 0
        self._opened_ns = self._last_ns = 0
        self._batches: dict[str, list[Any]] = {"steps": [], "reported": [], "samples": []}
        self._devices: set[str] = set()  # ids of those with readings

    @property
    def has_records(self) -> bool:
        """True if there is a record to write."""
        return self._writer is not None or any(not isinstance(r, Mark) for r in self._early)

    def take(self, record: Record) -> None:
        if isinstance(record, Mark) and record.name in _WHY_NO_STEPS:
            self.run.why_no_steps = record.detail
        if self._writer is None:
            self._early.append(record)
            if isinstance(record, Step | Sample) or len(self._early) >= _BEFORE_FIRST:
                self._open()
            return
        self._write(record)

    def close(self, devices: Iterable[Device]) -> ImportedRun:
        """End the run. `devices`: all devices of the log; those with readings here are stored."""
        writer = self._writer or self._open()
        if not self.run.steps:
            self.take(Mark(0, "output_unrecognised", self.run.why_no_steps or _UNTIMED))
        for table in self._batches:
            self._flush(table)
        if self._devices:
            writer.extend_header(devices=[d for d in devices if d.id in self._devices])
        writer.mark(Mark(self._last_ns, "ended", IMPORTED))
        writer.mark(Mark(self._last_ns, "closed"))
        writer.close()
        self.run.why_no_steps = "" if self.run.steps else self.run.why_no_steps
        return self.run

    def discard(self) -> None:
        """Remove what was written, if anything was."""
        if self.run.path != Path():
            shutil.rmtree(self.run.path, ignore_errors=True)

    def _open(self) -> Writer:
        """Create the run, dated by the first time in the log, and write the waiting records."""
        times = [r.start_ns if isinstance(r, Step) else r.t_ns for r in self._early]
        began_ns = min((t_ns for t_ns in times if t_ns > 0), default=0)
        path = self._path()
        header = run_header(self._name, ["erg", "import", str(self._request.log)])
        imported = {"log": str(self._request.log), "format": self._format, "run": self._number}
        create_run(path.absolute(), {**header, "imported": imported})
        self.run.path = path
        writer = _writer_header(self._request)
        self._opened_ns = self._last_ns = time.monotonic_ns()
        wall_ns = began_ns if began_ns > _WALL_NS else time.time_ns()
        writer["clock"] = {"monotonic_ns": self._opened_ns, "wall_ns": wall_ns}
        self._shift_ns = self._opened_ns - began_ns
        self._writer = Writer(path, header=writer)
        early, self._early = self._early, []
        for record in early:
            self._write(record)
        return self._writer

    @property
    def _name(self) -> str:
        if self._request.name:
            return self._request.name
        log = str(self._request.log)
        return "stdin" if log == STDIN else Path(log).name.removesuffix(".gz").removesuffix(".log")

    def _path(self) -> Path:
        path = self._request.out or new_run_path(self._name)
        if self._number > 1 and self._request.out is not None:
            return path.with_name(f"{path.name}-{self._number}")
        return path

    def _write(self, record: Record) -> None:
        assert self._writer is not None
        if isinstance(record, Step):
            start_ns, end_ns = record.start_ns + self._shift_ns, record.end_ns + self._shift_ns
            self._last_ns = max(self._last_ns, end_ns)
            self._count(record)
            self._put("steps", Step(start_ns, end_ns, *_BESIDE_TIMES(record)))
        elif isinstance(record, Reported):
            t_ns = self._shifted(record.t_ns)
            self._put("reported", Reported(t_ns, record.name, record.value, record.unit))
        elif isinstance(record, Sample):
            self.run.readings += 1
            self._devices.add(record.device)
            self._put("samples", Sample(self._shifted(record.t_ns), *_BESIDE_TIME(record)))
        elif isinstance(record, Mark):
            self._writer.mark(replace(record, t_ns=self._shifted(record.t_ns)))
            self.run.notes.append(record.detail)

    def _shifted(self, t_ns: int) -> int:
        """Return a log's time on the run's clock, at least the run's beginning."""
        shifted_ns = max(t_ns + self._shift_ns, self._opened_ns)
        self._last_ns = max(self._last_ns, shifted_ns)
        return shifted_ns

    def _count(self, step: Step) -> None:
        if step.phase != "train":
            return
        run = self.run
        run.steps += 1
        if step.index is not None:
            run.first_step = step.index if run.first_step is None else run.first_step
            run.last_step = step.index

    def _put(self, table: str, row: Record) -> None:
        self._batches[table].append(row)
        if len(self._batches[table]) > _BATCH_ROWS:
            self._flush(table)

    def _flush(self, table: str) -> None:
        assert self._writer is not None
        batch = self._batches[table]
        if batch:
            self._writer.write(table, batch, stream="" if table == "samples" else _STREAM)
            batch.clear()


def _writer_header(request: ImportRequest) -> dict[str, Any]:
    """Make the writer's header; the machine that wrote the log is unknown."""
    header = writer_header("import")
    header["host"] = "an unknown host"
    header["settings"] = request.settings.as_json()
    header["unavailable"] = dict.fromkeys(
        registry.names("probes"), "a log has no readings of devices"
    )
    if request.flops:
        header["flops"] = [asdict(flops) for flops in request.flops]
    return header
