"""Opens a run: one that is finished, being written, cut off by `kill -9`, or damaged.

Whatever can be read is read. A file that ends in half a message was cut off there by a killed
writer. A file that is not what its name says is listed in `damage`, and the rest of the run is
used. Ranks are merged here. Times of several hosts are put on one clock by each host's (monotonic,
wall) pair, and a device that two writers sampled is one device.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ergmeter.errors import FormatError, UsageError
from ergmeter.records import COLUMN_KINDS, Device, Displayed, Flops, Mark, Reported, Result, Window
from ergmeter.registry import library
from ergmeter.runlog import format as fmt
from ergmeter.runlog.format import WriterLog, on_one_clock, run_header, training_of, writer_header
from ergmeter.runlog.process_group import is_alive, is_fresh
from ergmeter.runlog.segments import (
    FEW_STEPS,
    Segment,
    Series,
    Splits,
    columns_in,
    for_export,
    joined,
    joined_steps,
    segments,
    step_columns,
)
from ergmeter.runlog.settings import WARMUP
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ergmeter.records import FloatArray, TimeArray

_AROUND_NS = 2 * NS_PER_S
_CLOCK_SET_S = 60.0
_SMALL_ROWS = 1_000_000

RUNNING = "running"
CUT_OFF = "cut off"
FINISHED = "finished"
IMPORTED = "imported"  # from a log, whole


@dataclass
class Run(Displayed):
    """A run directory, opened for reading. Columns are loaded when they are asked for."""

    path: Path
    header: dict[str, Any]
    writers: list[WriterLog]
    damage: list[str] = field(default_factory=list)  # files that are not what they claim to be
    torn: list[str] = field(default_factory=list)  # files that end half way: a killed writer's
    between: Window | None = None  # limits steps and samples to this window
    beside: tuple[WriterLog, ...] = ()  # of one training: the writers of the run's other trainings
    _splits: Splits = field(
        default_factory=lambda: Splits(Path()), init=False, repr=False, compare=False
    )

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Open a run directory. Raises FormatError if there is no readable run at this path."""
        path = Path(path)
        run = cls(path, run_header(path), [])
        for directory in sorted(p.parent for p in path.glob(f"*/{fmt.WRITER_FILE}")):
            if not directory.name.startswith("."):
                run._add_writer(directory)
        run.writers = list(on_one_clock(run.writers))
        return run

    def part(self, window: Window) -> Run:
        """The same run, with only the steps that ended in this window and the samples around it.

        Earlier files are not opened, so a part of a long run costs as much as a short run. Live
        views follow a run this way.
        """
        return replace(self, between=window)

    @cached_property
    def trainings(self) -> list[str]:
        """The ids of the trainings in this run, in the order they began.

        Ranks of one training share its id. Two trainings of one command, in parallel or one after
        the other, have two ids and are never merged as ranks.
        """
        trainings = (training_of(writer) for writer in self.writers)
        return list(dict.fromkeys(training for training in trainings if training is not None))

    def training(self, number: int) -> Run:
        """One training by its number, from 1, with the samples that all trainings share."""
        if not 1 <= number <= len(self.trainings):
            there = f"{self.path} (there are: 1 to {len(self.trainings)})"
            if not self.trainings:
                there = f"{self.path}: it has no numbered trainings; leave the number out"
            raise UsageError(f"no training {number} in {there}")
        chosen = self.trainings[number - 1]
        writers = [w for w in self.writers if training_of(w) in (None, chosen)]
        others = tuple(w for w in self.writers if training_of(w) not in (None, chosen))
        return replace(self, writers=writers, beside=others)

    @property
    def name(self) -> str:
        """The run's name; for one of several trainings, with the name of its model."""
        name = str(self.header.get("name") or self.path.name)
        if not self.beside:
            return name
        header = next(w.header for w in self.writers if training_of(w) is not None)
        model = str(header["training"].get("model") or "")
        return f"{name}, {model or 'one of its trainings'}"

    @cached_property
    def devices(self) -> dict[str, Device]:
        """Every sampled device once, with the facts of all probes that read it.

        Where two probes disagree on a fact, the first one's value is used.
        """
        devices: dict[str, Device] = {}
        for device in (device for writer in self.writers for device in writer.devices):
            before = devices.get(device.id, device)
            devices[device.id] = replace(before, facts={**device.facts, **before.facts})
        return devices

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The declared settings; options of `erg record` override those of a Meter inside."""
        merged: dict[str, Any] = {}
        for writer in sorted(self.writers, key=lambda w: w.header.get("source") != "meter"):
            declared = {n: v for n, v in writer.header["settings"].items() if v is not None}
            if not declared.keys().isdisjoint(WARMUP):  # one rule for the warm-up, whichever it is
                merged = {n: v for n, v in merged.items() if n not in WARMUP}
            merged.update(declared)
        return merged

    @cached_property
    def flops(self) -> tuple[Flops, ...]:
        """The FLOPs of a step under each convention, the chosen one first; empty if unknown."""
        writers = sorted(self.writers, key=lambda w: w.header.get("source") != "meter")
        return next((tuple(w.header["flops"]) for w in writers if w.header["flops"]), ())

    @cached_property
    def no_flops(self) -> str:
        """Why a requested FLOP count is missing; "" if none is."""
        return self._first("no_flops")

    @cached_property
    def no_speed(self) -> str:
        """Why the speed of the steps does not count; "" if it does."""
        return self._first("no_speed")

    def _first(self, name: str) -> str:
        return next((str(w.header[name]) for w in self.writers if w.header.get(name)), "")

    @cached_property
    def workload(self) -> dict[str, Any]:
        """The facts of the training that the program declared (`Meter.workload`)."""
        return self._merged("workload")

    @cached_property
    def analysis(self) -> dict[str, Result]:
        """The results of `erg analyze` that are stored in the run, by metric; empty if none are."""
        return self._merged("analysis")

    @cached_property
    def unavailable(self) -> dict[str, str]:
        """Which probes could not work here, and why."""
        return self._merged("unavailable")

    def _merged(self, name: str) -> dict[str, Any]:
        """An object of all writers' headers as one; a later writer's entries override earlier."""
        headers = (writer.header.get(name) for writer in self.writers)
        objects = (header for header in headers if isinstance(header, dict))
        return {key: value for part in objects for key, value in part.items()}

    @cached_property
    def marks(self) -> list[Mark]:
        """The marks of all writers, in order of time."""
        shifted = (
            Mark(mark.t_ns + writer.offset_ns, mark.name, mark.detail)
            for writer in self.writers
            for mark in writer.marks
        )
        return sorted(shifted, key=lambda mark: mark.t_ns)

    @property
    def status(self) -> str:
        """finished, running, cut off, or how the measured program ended ("exit code 1")."""
        ends = [mark.detail for mark in self.marks if mark.name == "ended"]
        if ends:
            return ends[-1]
        if is_written(self):
            return RUNNING
        if self.writers and all(writer.closed for writer in self.writers):
            return FINISHED
        return CUT_OFF

    @property
    def start_ns(self) -> int:
        """When the first writer began, on the run's clock."""
        return min((writer.start_ns for writer in self.writers), default=0)

    def steps(self, stream: str = "") -> dict[str, FloatArray | TimeArray]:
        """The steps of all writers as columns. Absent numbers are NaN; `phase` is an index into
        `phases`; `writer` an index into `writers`. Rows of a writer are in the order of writing."""
        return self._steps(range(len(self.writers)), stream)

    def steps_by(self, number: int, stream: str = "") -> dict[str, FloatArray | TimeArray]:
        """The steps of one writer. A constant column is stored as one number."""
        return self._steps([number], stream, few=0)

    def _steps(
        self, numbers: Iterable[int], stream: str, *, few: int = FEW_STEPS
    ) -> dict[str, FloatArray | TimeArray]:
        parts = [
            step_columns(segment, self.writers[number].offset_ns, number)
            for number in numbers
            for segment in self._segments(self.writers[number], "steps")
            if segment.stream == stream
        ]
        return joined_steps(parts, few=few)

    def not_numbers(
        self, column: str, numbers: Iterable[int], stream: str = ""
    ) -> dict[str, FloatArray | TimeArray]:
        """The steps of some writers whose value in a column is NaN or infinite.

        In the columns of `steps` a recorded NaN can't be distinguished from an absent value.
        """
        parts = [
            step_columns(broken, self.writers[number].offset_ns, number)
            for number in numbers
            for segment in self._segments(self.writers[number], "steps", column)
            if segment.stream == stream and (broken := segment.not_numbers(column)).rows
        ]
        return joined_steps(parts)

    def series(self, column: str) -> dict[str, Series]:
        """A column of the samples by device. Devices without a value in it are left out."""
        parts: dict[str, list[Series]] = {}
        for number in range(len(self.writers)):
            for device, part in self.said_by(number, column)[column].items():
                parts.setdefault(device, []).append(part)
        return {device: joined(pieces) for device, pieces in parts.items()}

    def said_by(
        self, number: int, column: str, *, alone: bool = False
    ) -> dict[str, dict[str, Series]]:
        """A column of one writer's samples, by column and device.

        Unless `alone`, other columns of the same files come with it if those files are small:
        opening a file and splitting its rows by device costs most.
        """
        writer = self.writers[number]
        segments = list(self._segments(writer, "samples", column))
        if not segments:
            return {column: {}}
        names = {column}
        splits_cache = Splits(writer.directory)
        if sum(segment.rows for segment in segments) > _SMALL_ROWS:
            if self._splits.directory != writer.directory:  # cached for one writer at a time
                self._splits = splits_cache
            splits_cache = self._splits
        elif not alone:
            names = {name for segment in segments for name in segment.names} - {"t_ns", "device"}
            # A column that another stream also has would be incomplete here.
            own_paths = [segment.path for segment in segments]
            names -= columns_in(writer.directory, but=own_paths, damage=self.damage) - {column}
        parts: dict[str, dict[str, list[Series]]] = {column: {}}
        for segment in segments:
            own = [name for name in segment.names if name in names]
            splits = splits_cache.by_file.setdefault(segment.path, [])
            columns = segment.columns_by_device(own, shift_ns=writer.offset_ns, splits=splits)
            for name, device, t_ns, values in columns:
                parts.setdefault(name, {}).setdefault(device, []).append(Series(t_ns, values))
        return {
            name: {
                device: joined(pieces, splits_cache.times) for device, pieces in by_device.items()
            }
            for name, by_device in parts.items()
        }

    def has_said(self, number: int) -> set[str]:
        """The columns in a writer's files of samples."""
        return columns_in(self.writers[number].directory, damage=self.damage)

    def reported(self) -> list[Reported]:
        """The metrics that programs reported about themselves, in order of time."""
        return self._reported

    @cached_property
    def printed(self) -> list[Reported]:
        """Reported metrics that were read from an output or a log, in order of time."""
        readers = ("recorder", "import")
        return self._reported_by([w for w in self.writers if w.header.get("source") in readers])

    @cached_property
    def _reported(self) -> list[Reported]:
        return self._reported_by(self.writers)

    def _reported_by(self, writers: list[WriterLog]) -> list[Reported]:
        records: list[Reported] = []
        for writer in writers:
            for segment in self._segments(writer, "reported"):
                table = segment.table()
                columns = (table[name].to_pylist() for name in COLUMN_KINDS["reported"])
                rows = zip(*columns, strict=True)
                records += [Reported(t_ns + writer.offset_ns, *rest) for t_ns, *rest in rows]
        return sorted(records, key=lambda reported: reported.t_ns)

    def to_arrow(self, of: str = "steps") -> pa.Table:
        """A table over all writers, with columns of the writer and the wall clock.

        `of`: steps, samples, reported or marks. docs/run-format.md lists the columns.
        """
        if of not in COLUMN_KINDS:
            raise UsageError(f"no table {of!r}; there are {', '.join(COLUMN_KINDS)}")
        if of == "marks":
            return self._marks_table()
        parts = [
            for_export(segment, writer, self.wall_zero_ns)
            for writer in self.writers
            for segment in self._segments(writer, of)
        ]
        return pa.concat_tables(parts, promote_options="default") if parts else pa.table({})

    def to_pandas(self, of: str = "steps") -> Any:  # noqa: ANN401  a pandas.DataFrame
        """The table of `to_arrow` as a pandas DataFrame."""
        library("pandas", "to_pandas", "pandas")
        return self.to_arrow(of).to_pandas()

    def to_polars(self, of: str = "steps") -> Any:  # noqa: ANN401  a polars.DataFrame
        """The table of `to_arrow` as a polars DataFrame."""
        return library("polars", "to_polars", "polars").from_arrow(self.to_arrow(of))

    def count(self, table: str) -> int:
        """The number of readable rows of a table."""
        return sum(s.rows for writer in self.writers for s in self._segments(writer, table))

    @property
    def wall_zero_ns(self) -> int:
        """The wall clock when the run's monotonic clock was zero."""
        if not self.writers:
            return 0
        clock = self.writers[0].header["clock"]
        return int(clock["wall_ns"]) - int(clock["monotonic_ns"])

    def _marks_table(self) -> pa.Table:
        rows = [{"t_ns": m.t_ns, "name": m.name, "detail": m.detail} for m in self.marks]
        wall_ns = [m.t_ns + self.wall_zero_ns for m in self.marks]
        times = pa.array(wall_ns, pa.timestamp("ns", "UTC"))
        return pa.Table.from_pylist(rows).append_column("time", times) if rows else pa.table({})

    def verified(self) -> list[str]:
        """Reads every file; returns a line for each damaged or incomplete one."""
        for writer in self.writers:
            for table in COLUMN_KINDS:
                for _ in self._segments(writer, table):
                    pass
        return self.damage

    def _segments(
        self, writer: WriterLog, table: str, column: str | None = None
    ) -> Iterator[Segment]:
        """The segments of a table; with `column`, only those that have it."""
        # A killed writer leaves half a message behind; one that closed does not.
        torn = self.damage if writer.closed else self.torn
        find = partial(
            segments, writer.directory, table, damage=self.damage, torn=torn, column=column
        )
        if self.between is None:
            yield from find()
            return
        # Power at the edges is interpolated from a sample before and one after the window.
        around_ns = 0 if table == "steps" else _AROUND_NS
        start_ns = self.between.start_ns - around_ns - writer.offset_ns
        end_ns = self.between.end_ns + around_ns - writer.offset_ns
        clock = writer.header["clock"]
        began_s = (clock["wall_ns"] + start_ns - clock["monotonic_ns"]) / NS_PER_S
        # A wall clock that was set back recently must not hide newer files.
        for segment in find(since_s=began_s - _CLOCK_SET_S):
            column = "end_ns" if table == "steps" else "t_ns"
            part = segment.between(column, start_ns, end_ns)
            if part.rows:
                yield part

    def _add_writer(self, directory: Path) -> None:
        try:
            header = writer_header(directory / fmt.WRITER_FILE, self.damage)
        except FormatError as error:
            self.damage.append(str(error))
        else:
            self.writers.append(WriterLog(directory, header, tuple(self._read_marks(directory))))

    def _read_marks(self, directory: Path) -> Iterator[Mark]:
        path = directory / fmt.MARKS_FILE
        if not path.exists():
            return
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                fields = json.loads(line)
                yield Mark(int(fields["t_ns"]), str(fields["name"]), str(fields["detail"]))
            except (ValueError, KeyError, TypeError):
                message = f"{path}: line {number} is not a mark"
                (self.torn if number == len(lines) else self.damage).append(message)


def is_written(run: Run) -> bool:
    """True if a writer that has not closed its share is alive, or the first one is yet to come."""
    if not run.writers:
        return is_fresh(run.path / fmt.RUN_FILE)
    return any(is_alive(w.directory, w.header) for w in run.writers if not w.closed)
