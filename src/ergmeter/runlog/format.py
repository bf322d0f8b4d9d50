"""What a run looks like on disk: names, versions and Arrow schemas. The specification in code.

    RUN/run.json                what ran; its format version
    RUN/<writer>/writer.json    who wrote here: host, process, clock pair, devices, settings
    RUN/<writer>/marks.jsonl    named instants, a line each
    RUN/<writer>/<table>[-<stream>]-00000.arrows    records, an Arrow IPC stream while written
    RUN/<writer>/<table>[-<stream>]-00000.parquet   the same, once the segment is full or closed

The trap: SQLite was the other choice, but run directories live on NFS and Lustre, where its locks
are not safe. Here each file has one writer and is only ever appended to, so nothing needs a lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.records import COLUMN_KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

FORMAT = "ergmeter-run"
VERSION = 1
HISTORY = {1: "first version (ergmeter 0.1)"}

RUN_FILE = "run.json"
WRITER_FILE = "writer.json"
MARKS_FILE = "marks.jsonl"
LIVE = ".arrows"
FULL = ".parquet"
PACKED = (".tar.gz", ".tgz", ".zip")  # a whole run as one file

# A segment is turned into Parquet when it is this long, which bounds both the live file's overhead
# (about 2 kB a second) and what one damaged file can cost.
SEGMENT_ROWS = 250_000
SEGMENT_AGE_S = 900.0
# Below this, importing the Parquet code costs more than it saves; the closed stream stays as it is.
SMALL_SEGMENT_BYTES = 256_000

# The environment names the run a process belongs to, so that a Meter under `erg record` joins it.
RUN_VARIABLE = "ERGMETER_RUN"


def segment_name(table: str, stream: str, number: int) -> str:
    """The file name of a segment, without its ending."""
    return "-".join(part for part in (table, stream, f"{number:05d}") if part)


def arrow_schema(table: str, columns: Iterable[str]) -> pa.Schema:
    """The Arrow schema of a table that holds just these columns, in the order of the catalogue."""
    import pyarrow as pa  # noqa: PLC0415  `import ergmeter` must not load it

    types: dict[str, Any] = {
        "time": pa.int64(),
        "count": pa.int64(),
        "float": pa.float64(),
        "text": pa.dictionary(pa.int16(), pa.string()),
    }
    wanted = set(columns)
    kinds = COLUMN_KINDS[table]
    return pa.schema(
        [pa.field(name, types[kind]) for name, kind in kinds.items() if name in wanted],
        metadata={"format": FORMAT, "version": str(VERSION), "table": table},
    )
