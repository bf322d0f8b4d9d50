"""The format of a run on disk: names, versions, Arrow schemas and headers.

    RUN/run.json                what ran; its format version
    RUN/<writer>/writer.json    who wrote here: host, process, clock pair, devices, settings
    RUN/<writer>/marks.jsonl    named instants, a line each
    RUN/<writer>/<table>[-<stream>]-00000.arrows    records, an Arrow IPC stream while written
    RUN/<writer>/<table>[-<stream>]-00000.parquet   the same, once the segment is full or closed

Each file has one writer and is only appended to, so nothing needs a lock. SQLite's locks are not
safe on NFS and Lustre, where run directories are.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.errors import FormatError
from ergmeter.records import COLUMN_KINDS, Device, Flops, Mark, of_type, result_from_json
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from ergmeter.runlog.reader import Run


FORMAT = "ergmeter-run"
VERSION = 1  # the first (ergmeter 0.1)

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


def run_paths(parent: Path) -> list[Path]:
    """The run directories directly under a directory, the newest last."""
    if not parent.is_dir():
        raise FormatError(
            f"no directory {parent}; `erg record` and `erg demo` make runs under runs/"
        )
    headers = (path for path in parent.glob(f"*/{RUN_FILE}") if path.parent.name[0] != ".")
    made = {}
    for header in headers:
        with suppress(OSError):
            made[header.parent] = header.stat().st_mtime
    return sorted(made, key=made.__getitem__)


def newest_run(parent: Path) -> Path:
    """The run that was made last."""
    paths = run_paths(parent)
    if not paths:
        raise FormatError(f"no run in {parent}; `erg record -- COMMAND` makes one")
    return paths[-1]


# Headers. They may come from a later version or from another program, so the needed fields are
# checked once, here. Errors name the path.


_DEVICE_FIELDS = {field.name for field in fields(Device)}


@dataclass(frozen=True)
class WriterLog:
    """One writer's directory: header and marks. `offset_ns` takes its clock to the run's."""

    directory: Path
    header: dict[str, Any]
    marks: tuple[Mark, ...]
    offset_ns: int = 0

    @property
    def closed(self) -> bool:
        """True if the writer has closed its share."""
        return any(mark.name == "closed" for mark in self.marks)

    @property
    def start_ns(self) -> int:
        """When the writer began, on the run's clock."""
        return int(self.header["clock"]["monotonic_ns"]) + self.offset_ns

    @property
    def clock_of(self) -> str:
        """The id of the host's monotonic clock, which all its processes share."""
        return str(self.header.get("boot_id") or self.header.get("host"))

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The devices this writer sampled."""
        # A later version may say more of a device than this one knows.
        return tuple(
            Device(**{name: value for name, value in device.items() if name in _DEVICE_FIELDS})
            for device in self.header["devices"]
        )


def on_one_clock(writers: Iterable[WriterLog]) -> Iterator[WriterLog]:
    """Yield the writers in the order in which they began, with offsets to the first one's clock."""
    zero_ns: dict[str, int] = {}
    for writer in sorted(writers, key=lambda writer: int(writer.header["clock"]["wall_ns"])):
        clock = writer.header["clock"]
        zero_ns.setdefault(writer.clock_of, int(clock["wall_ns"]) - int(clock["monotonic_ns"]))
        offset_ns = zero_ns[writer.clock_of] - next(iter(zero_ns.values()))
        yield replace(writer, offset_ns=offset_ns)


def training_of(writer: WriterLog) -> str | None:
    """The id of the writer's training, if it has one."""
    training = writer.header.get("training")
    return str(training["id"]) if isinstance(training, dict) and "id" in training else None


def run_header(path: Path) -> dict[str, Any]:
    """Read the header of a run directory. Raises FormatError if it is not a run's."""
    if path.name.endswith(PACKED) and path.is_file():
        raise FormatError(f"{path} is packed; `erg runs unpack {path}` makes a run of it")
    if not path.is_dir():
        what = "is a file, not a run directory" if path.exists() else "does not exist"
        raise FormatError(f"{path} {what}; `erg list` shows the runs there are")
    if not (path / RUN_FILE).exists():
        inside = sorted(p.parent.name for p in path.glob(f"*/{RUN_FILE}"))
        names = ", ".join(inside[:3]) + (", ..." if len(inside) > 3 else "")
        hint = f"; it holds {len(inside)} run{'s'[: len(inside) > 1]}: {names}" if inside else ""
        raise FormatError(f"{path} is not a run: it has no {RUN_FILE}{hint}")
    header = json_object(path / RUN_FILE)
    if header.get("format") != FORMAT:
        raise FormatError(
            f"{path / RUN_FILE}: not a run of ergmeter's (format {header.get('format')!r})"
        )
    version = header.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise FormatError(
            f"{path}: run format {version!r} is not one this ergmeter reads (up to {VERSION});"
            " upgrade ergmeter to open it"
        )
    return header


def writer_header(path: Path, damage: list[str]) -> dict[str, Any]:
    """The header of a writer's directory, checked, with its `Flops` and results of `erg analyze`.

    FLOPs and results that can't be read are left out, and named in `damage`.
    """
    header = json_object(path)
    try:
        clock = header["clock"]
        header["clock"] = {n: int(clock[n]) for n in ("monotonic_ns", "wall_ns")}
        if clock.get("error_s") is not None:
            header["clock"]["error_s"] = float(clock["error_s"])
        for name in ("settings", "unavailable"):
            header[name] = dict(header.get(name) or {})
        header["devices"] = list(header.get("devices") or [])
        for device in header["devices"]:
            if not {"id", "kind", "name", "probe"} <= device.keys():
                raise ValueError(f"a device without its name: {device}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: not a writer's header ({error})") from error
    header["flops"], unread = _flops_in(header.get("flops"))
    damage += [f"{path}: flops can't be read ({why})" for why in unread]
    if unread and not header["flops"]:
        header["no_flops"] = damage[-1]
    try:
        results = of_type(header.get("analysis") or {}, dict)
        header["analysis"] = {key: result_from_json(result) for key, result in results.items()}
    except TypeError as error:
        header["analysis"] = {}
        damage.append(f"{path}: analysis can't be read ({error})")
    return header


def _flops_in(stored: object) -> tuple[list[Flops], list[str]]:
    """FLOPs from JSON, and what is wrong with those that can't be read, with their convention."""
    flops, unread = [], []
    for each in stored if isinstance(stored, list) else [stored] * (stored is not None):
        try:
            flops.append(Flops.from_json(each))
        except TypeError as error:
            convention = each.get("convention") if isinstance(each, dict) else None
            unread.append(f"{convention}: {error}" if isinstance(convention, str) else str(error))
    return flops, unread


def json_object(path: Path, *, max_bytes: int = -1) -> dict[str, Any]:
    """The JSON object in a file, or in its first bytes. Raises FormatError if there is none."""
    try:
        with path.open("rb") as file:
            parsed = json.loads(file.read(max_bytes))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON ({error})") from error
    except OSError as error:
        raise FormatError(f"{path}: can't be read ({error.strerror})") from error
    if not isinstance(parsed, dict):
        raise FormatError(f"{path}: holds a {type(parsed).__name__}, not an object")
    return parsed


# Steps that were made but not recorded. A writer marks them; its last such mark holds the sum of
# all so far, so a lost mark loses no count.

DROPPED = "steps_dropped"
_DETAIL = re.compile(
    r"(?P<steps>\d+) steps \((?P<tokens>\d+|an unknown number of) tokens\)"
    r"(?: and (?P<spans>\d+) other spans)?"
    r" in (?P<lasted_s>\d+\.\d+) s were not recorded: (?P<why>.*)"
)
_NS_PER_MS = 1_000_000
_NO_END_NS = 2**63 - 1
_TOKENS = ("tokens_real", "tokens_computed")


@dataclass(frozen=True, slots=True)
class DroppedSteps:
    """Training steps, and spans of other phases, that are missing between two instants."""

    steps: int
    tokens: int | None  # None: not known of all of them
    spans: int  # of other phases: evaluation, data, requests
    start_ns: int
    end_ns: int
    why: str

    @classmethod
    def of(cls, columns: Mapping[str, Sequence[Any]], why: str) -> DroppedSteps:
        """Sum up dropped rows of steps, given as columns."""
        phases = columns["phase"]
        train = [number for number, phase in enumerate(phases) if phase == "train"]
        steps = sum(int(columns["steps"][number] or 1) for number in train)
        real, computed = (columns.get(name) or [None] * len(phases) for name in _TOKENS)
        each = [computed[n] if real[n] is None else real[n] for n in train]
        tokens = None if None in each else sum(each)
        start_ns, end_ns = min(columns["start_ns"]), max(columns["end_ns"])
        return cls(steps, tokens, len(phases) - len(train), int(start_ns), int(end_ns), why)

    def __add__(self, other: DroppedSteps) -> DroppedSteps:
        unknown = self.tokens is None or other.tokens is None
        return DroppedSteps(
            self.steps + other.steps,
            None if unknown else (self.tokens or 0) + (other.tokens or 0),
            self.spans + other.spans,
            min(self.start_ns, other.start_ns),
            max(self.end_ns, other.end_ns),
            self.why,
        )

    def __str__(self) -> str:
        if self.end_ns == _NO_END_NS:
            return self.why
        tokens = "an unknown number of" if self.tokens is None else self.tokens
        spans = f" and {self.spans} other spans" if self.spans else ""
        lasted_s = -(-(self.end_ns - self.start_ns) // _NS_PER_MS) / 1000  # or more, never less
        what = f"{self.steps} steps ({tokens} tokens){spans}"
        return f"{what} in {lasted_s:.3f} s were not recorded: {self.why}"

    @property
    def mark(self) -> Mark:
        """The mark for a run, at the end of the last step that is missing."""
        return Mark(self.end_ns, DROPPED, str(self))


def dropped_steps(run: Run) -> Iterator[DroppedSteps]:
    """What is missing in a run, one entry for each writer that dropped steps."""
    for writer in run.writers:
        details = [mark for mark in writer.marks if mark.name == DROPPED]
        if details:
            last = details[-1]
            yield _parsed(Mark(last.t_ns + writer.offset_ns, DROPPED, last.detail))


def _parsed(mark: Mark) -> DroppedSteps:
    """Parse a mark of dropped steps; those of version 0.1.0 have a number of rows and no time."""
    match = _DETAIL.fullmatch(mark.detail)
    if match is None:
        rows = re.match(r"(\d+) rows", mark.detail)
        return DroppedSteps(int(rows[1]) if rows else 0, None, 0, 0, _NO_END_NS, mark.detail)
    tokens = int(match["tokens"]) if match["tokens"].isdigit() else None
    start_ns = mark.t_ns - round(float(match["lasted_s"]) * NS_PER_S)
    spans = int(match["spans"] or 0)
    return DroppedSteps(int(match["steps"]), tokens, spans, start_ns, mark.t_ns, match["why"])
