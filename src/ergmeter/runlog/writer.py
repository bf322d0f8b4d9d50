"""Writes one process's share of a run, so that `kill -9` at any moment leaves it readable.

Each batch is one `write` of one complete Arrow message, so a reader sees all of it or none. A
process that dies loses only what was not handed over yet. On a full disk the file is cut back to
the last complete message, the rows are dropped and counted, and the next batch is tried again.
Training is not affected.

Dropped steps are marked with their number, tokens and time (`dropped`): when dropping begins, at
each doubling (a full disk has room for few marks), when it is over, and at the end.
"""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.atomic_write import read_json, replacing, write_text
from ergmeter.errors import UsageError
from ergmeter.records import COLUMN_KINDS, Device, Mark, Reported, Sample, Step
from ergmeter.runlog import format as fmt
from ergmeter.runlog.format import DroppedSteps
from ergmeter.runlog.process_group import is_alive

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa


# dataclasses.astuple copies deeply, at twenty times the cost.
_VALUES = {table: attrgetter(*kinds) for table, kinds in COLUMN_KINDS.items()}
# Without it Windows writes every byte 10 as two.
_BINARY = getattr(os, "O_BINARY", 0)


def create_run(path: Path, header: dict[str, Any]) -> Path:
    """Create a run directory atomically: it is either absent or readable."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path} exists and is not empty; choose another directory for the run")
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": fmt.FORMAT, "version": fmt.VERSION, **header}
    with replacing(path) as part:
        part.mkdir()
        (part / fmt.RUN_FILE).write_text(json.dumps(content, indent=1) + "\n")
    return path


def create_or_join(path: Path, header: dict[str, Any]) -> Path:
    """Create a run, or join the one that another rank of the same launch has just created.

    Two launches in a row can have the same group. A run without a live writer belongs to the
    earlier one and is not joined.
    """
    try:
        return create_run(path, header)
    except (UsageError, OSError):
        group = read_json(path / fmt.RUN_FILE).get("group")
        if header.get("group") is None or group != header["group"] or _is_over(path):
            raise
        return path


def _is_over(run: Path) -> bool:
    """True if the run has writers and none is alive."""
    writers = [path.parent for path in run.glob(f"*/{fmt.WRITER_FILE}")]
    return bool(writers) and not any(_goes_on(directory) for directory in writers)


def _goes_on(directory: Path) -> bool:
    try:
        header = json.loads((directory / fmt.WRITER_FILE).read_bytes())
        is_closed = b'"name": "closed"' in (directory / fmt.MARKS_FILE).read_bytes()
        return not is_closed and is_alive(directory, header)
    except (OSError, ValueError):
        return True  # it is being made just now


class _Segment:
    """One file of one table: an Arrow stream that is appended to by whole messages."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        import pyarrow as pa  # noqa: PLC0415  loaded when there is something to write

        self.path = path
        self.schema = schema
        self.rows = 0
        self.opened_s = time.monotonic()
        self._sink = io.BytesIO()  # collects a message, which is then written at once
        self._stream = pa.ipc.new_stream(self._sink, schema)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o644)
        self._size = 0

    def append(self, batch: pa.RecordBatch) -> None:
        self._stream.write_batch(batch)
        self._flush()
        self.rows += batch.num_rows

    @property
    def begun(self) -> bool:
        """True if the schema is on disk; without it the file can't be read."""
        return self._size > 0

    def discard(self) -> None:
        """Close and remove a file without any rows."""
        os.close(self._fd)
        self.path.unlink()

    def finish(self) -> None:
        """Write the end of the stream. Readers do not need it, so a full disk may refuse it."""
        self._stream.close()
        try:
            self._flush()
            os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def _flush(self) -> None:
        message = self._sink.getvalue()
        self._sink.seek(0)
        self._sink.truncate()
        written = 0
        try:
            while written < len(message):
                written += os.write(self._fd, message[written:])
        except OSError:
            os.ftruncate(self._fd, self._size)
            os.lseek(self._fd, self._size, os.SEEK_SET)
            raise
        self._size += written


def amend_header(directory: Path, **facts: Any) -> None:  # noqa: ANN401  anything that JSON holds
    """Add to the header of a writer whose process has ended. The header is replaced whole."""
    path = directory / fmt.WRITER_FILE
    header = {**json.loads(path.read_text()), **facts}
    write_text(path, json.dumps(header, indent=1) + "\n")


class Writer:
    """One writer's files in a run. Not safe for threads: the sampler's flush is its only caller."""

    def __init__(
        self, run: Path, *, header: dict[str, Any], devices: Sequence[Device] = ()
    ) -> None:
        self.id = str(header["writer"])
        self.directory = run / self.id
        self.dropped_rows = 0
        self.dropped_steps: DroppedSteps | None = None
        self._marked_steps: DroppedSteps | None = None  # the count in the last mark
        self.answered_s = time.monotonic()  # when the disk last finished something
        self._segments: dict[tuple[str, str], _Segment] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self._texts: dict[tuple[str, str], dict[str, list[str]]] = {}
        self._header: dict[str, Any] = {
            "unavailable": {},
            **header,
            "devices": [asdict(device) for device in devices],
        }
        staging = run / f".{self.id}"
        staging.mkdir()
        (staging / fmt.WRITER_FILE).write_text(self._header_text())
        staging.rename(self.directory)
        self._marks_fd = os.open(
            self.directory / fmt.MARKS_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _BINARY, 0o644
        )
        # Reserves the file's first block, so that a later mark of a full disk has room.
        self.mark(Mark(time.monotonic_ns(), "opened"))

    def extend_header(
        self,
        *,
        devices: Sequence[Device] = (),
        unavailable: Mapping[str, str] | None = None,
        **facts: Any,  # noqa: ANN401  anything that JSON holds
    ) -> None:
        """Add to the writer's header, which is rewritten whole."""
        self._header.update(facts)
        self._header["devices"] += [asdict(device) for device in devices]
        self._header["unavailable"] = {**self._header["unavailable"], **(unavailable or {})}
        try:
            write_text(self.directory / fmt.WRITER_FILE, self._header_text())
        except OSError as error:
            self._refused(1, error)

    def _header_text(self) -> str:
        return json.dumps(self._header, indent=1, default=str) + "\n"

    @staticmethod
    def prepare() -> None:
        """Import the modules that writing needs, ahead of the first write."""
        from ergmeter.runlog import arrays  # noqa: PLC0415, F401

    def mark(self, mark: Mark) -> bool:
        """Append a mark. False if the disk is full, and it is lost."""
        text = json.dumps({"t_ns": mark.t_ns, "name": mark.name, "detail": mark.detail}) + "\n"
        line = text.encode()
        try:
            written = os.write(self._marks_fd, line)
            if written < len(line):  # half a line would spoil the next one
                os.ftruncate(self._marks_fd, os.fstat(self._marks_fd).st_size - written)
        except OSError:
            written = 0
        self.dropped_rows += written < len(line)
        self.answered_s = time.monotonic()
        return written == len(line)

    def write(
        self, table: str, rows: Sequence[Sample | Step | Reported], *, stream: str = ""
    ) -> None:
        """Append rows to a table. Rows that the disk refuses are dropped and counted."""
        if not rows:
            return
        values = zip(*map(_VALUES[table], rows), strict=True)
        columns = dict(zip(COLUMN_KINDS[table], values, strict=True))
        self.write_columns(table, columns, stream=stream)

    def write_columns(
        self, table: str, columns: Mapping[str, Sequence[Any]], *, stream: str = ""
    ) -> None:
        """Append rows given as columns. All-None columns are left out of the file."""
        present = {n: c for n, c in columns.items() if c.count(None) < len(c)}
        rows = len(next(iter(columns.values())))
        try:
            segment = self._segment_for(table, stream, present)
            segment.append(self._batch(segment.schema, table, stream, columns))
            self.answered_s = time.monotonic()
        except OSError as error:
            self._refused(rows, error)
            if table == "steps":
                self.drop_steps(DroppedSteps.of(columns, f"the disk refused: {error}"))
            self._begin_again(table, stream)
            return
        if table == "steps":
            self._mark_dropped_steps()
        try:
            if self._is_full(segment):
                self._roll(table, stream)
        except OSError as error:
            self._refused(0, error)
            self._begin_again(table, stream)

    def drop_steps(self, dropped: DroppedSteps) -> None:
        """Count steps that will not be written, and mark them."""
        before, marked = self.dropped_steps, self._marked_steps
        self.dropped_steps = dropped if before is None else before + dropped
        if marked is None or _rows(self.dropped_steps) >= 2 * _rows(marked):
            self._mark_dropped_steps()

    def close(self) -> None:
        """Finish every file. Files are readable before this, too."""
        for table, stream in list(self._segments):
            try:
                self._roll(table, stream)
            except OSError as error:
                self._refused(0, error)
        if self.dropped_rows:
            self.mark(Mark(time.monotonic_ns(), "rows_dropped", f"{self.dropped_rows} rows in all"))
        self._mark_dropped_steps()
        os.close(self._marks_fd)

    def _mark_dropped_steps(self) -> None:
        dropped = self.dropped_steps
        if dropped is not None and dropped != self._marked_steps and self.mark(dropped.mark):
            self._marked_steps = dropped

    def _begin_again(self, table: str, stream: str) -> None:
        """Discard a file whose schema was refused, so that the next batch starts a new one."""
        segment = self._segments.get((table, stream))
        if segment is not None and not segment.begun:
            del self._segments[table, stream]
            segment.discard()

    def _refused(self, rows: int, error: OSError) -> None:
        if rows and not self.dropped_rows:
            self.mark(Mark(time.monotonic_ns(), "rows_dropped", f"the disk refused: {error}"))
        self.dropped_rows += rows

    def _is_full(self, segment: _Segment) -> bool:
        age_s = time.monotonic() - segment.opened_s
        return segment.rows >= fmt.SEGMENT_ROWS or age_s >= fmt.SEGMENT_AGE_S

    def _segment_for(
        self, table: str, stream: str, present: Mapping[str, Sequence[Any]]
    ) -> _Segment:
        """The open segment, or a new one if the rows have a new column or text."""
        segment = self._segments.get((table, stream))
        names = set(segment.schema.names) if segment else set()
        texts = self._texts.setdefault((table, stream), {})
        grown = False
        for name, values in present.items():
            if COLUMN_KINDS[table][name] == "text":
                vocabulary = texts.setdefault(name, [])
                fresh = sorted({v for v in values if v is not None} - set(vocabulary))
                vocabulary.extend(fresh)
                grown = grown or bool(fresh)
        if segment and not grown and names >= present.keys():
            return segment
        if segment:
            self._roll(table, stream)
        number = self._numbers.get((table, stream), -1) + 1
        path = self.directory / (fmt.segment_name(table, stream, number) + fmt.LIVE)
        segment = _Segment(path, fmt.arrow_schema(table, names | present.keys()))
        self._numbers[table, stream] = number
        self._segments[table, stream] = segment
        return segment

    def _batch(
        self, schema: pa.Schema, table: str, stream: str, columns: Mapping[str, Sequence[Any]]
    ) -> pa.RecordBatch:
        import pyarrow as pa  # noqa: PLC0415

        from ergmeter.runlog import arrays  # noqa: PLC0415

        # The vocabulary is the same in every batch, so that it is written once a segment.
        vocabularies = self._texts[table, stream]
        made = [
            arrays.texts(columns[field.name], vocabularies[field.name])
            if field.name in vocabularies
            else arrays.numbers(columns[field.name], field.type)
            for field in schema
        ]
        return pa.RecordBatch.from_arrays(made, schema=schema)

    def _roll(self, table: str, stream: str) -> None:
        segment = self._segments.pop((table, stream))
        segment.finish()
        self.answered_s = time.monotonic()
        if segment.path.stat().st_size > fmt.SMALL_SEGMENT_BYTES:
            to_parquet(segment.path)
            self.answered_s = time.monotonic()


def _rows(dropped: DroppedSteps) -> int:
    return dropped.steps + dropped.spans


def to_parquet(live: Path) -> Path:
    """Rewrite a finished stream as Parquet, then remove it. Killed between, both are whole."""
    full = live.with_suffix(fmt.FULL)
    with replacing(full) as part:
        _rewrite(live, part)
    live.unlink()
    return full


def _rewrite(live: Path, into: Path) -> None:
    """Rewrite a stream as Parquet, and unmap it on return: Windows can't remove a mapped file."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415  costs 0.2 s; most short runs never need it

    with pa.memory_map(str(live)) as source:
        table = pa.ipc.open_stream(source).read_all()
        pq.write_table(
            table,
            into,
            compression="zstd",
            row_group_size=fmt.SEGMENT_ROWS,
            write_page_checksum=True,
        )
