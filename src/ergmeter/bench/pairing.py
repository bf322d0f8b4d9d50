"""Which cells of NEW and of REF are of one configuration?

The trap: rows matched by position, or by a list of names that one file lacks. Cells are matched by
the id of their configuration; where none is shared (a published file has no ids, a command has
changed), by all arguments that both sides tell. What has no partner is told, never dropped.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ergmeter.bench.schema import ARGUMENTS, COLUMNS, FAILED
from ergmeter.errors import UsageError
from ergmeter.metrics.entries import fact

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

_SETTINGS = ("scenario", "num_gpus", "nodes", *ARGUMENTS)
_NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,2})?")
# Where it ran, and not what; and FMS's axis, which is the argument max_seq_length.
_NOT_TOLD = ("output_dir", "results_csv", "process_port", "max_seq_len")


@dataclass(frozen=True, slots=True)
class Side:
    """All repeats of one configuration in one table."""

    rows: tuple[Mapping[str, Any], ...] = ()

    @property
    def ok(self) -> tuple[Mapping[str, Any], ...]:
        """The repeats that trained to the end, in order of their numbers."""
        return tuple(row for row in self.rows if row["status"] == "ok")

    @property
    def failed(self) -> tuple[Mapping[str, Any], ...]:
        """Those that did not."""
        return tuple(row for row in self.rows if row["status"] in FAILED)

    @property
    def broken(self) -> tuple[str, ...]:
        """What was stated of those that trained to the end and did not hold.

        One that failed may not have come as far as what was stated of it.
        """
        return tuple(dict.fromkeys(row["claims_broken"] for row in self.ok if row["claims_broken"]))

    def values(self, column: str) -> list[float]:
        """A figure of each repeat that has it."""
        return [row[column] for row in self.ok if row[column] is not None]

    def mean(self, column: str) -> float | None:
        """Its plain mean."""
        found = self.values(column)
        return sum(found) / len(found) if found else None


@dataclass(frozen=True, slots=True)
class Pair:
    """One configuration on both sides; one of them may be empty."""

    name: str
    new: Side = field(default_factory=Side)
    ref: Side = field(default_factory=Side)

    def column(self, columns: Sequence[str]) -> str | None:
        """The first of these columns that both sides have a figure in."""
        found = (one for one in columns if self.new.values(one) and self.ref.values(one))
        return next(found, None)


@dataclass(frozen=True, slots=True)
class Paired:
    """All configurations of both tables, and what they were matched by."""

    by: tuple[str, ...]
    pairs: tuple[Pair, ...]

    @property
    def both(self) -> tuple[Pair, ...]:
        """What is on both sides."""
        return tuple(pair for pair in self.pairs if pair.new.rows and pair.ref.rows)

    @property
    def only_new(self) -> tuple[Pair, ...]:
        """What is just in NEW."""
        return tuple(pair for pair in self.pairs if not pair.ref.rows)

    @property
    def only_ref(self) -> tuple[Pair, ...]:
        """What is just in REF: missing in NEW."""
        return tuple(pair for pair in self.pairs if not pair.new.rows)


def paired(
    new: pa.Table,
    ref: pa.Table,
    *,
    by: Sequence[str] = (),
    new_where: Mapping[str, str] | None = None,
    ref_where: Mapping[str, str] | None = None,
) -> Paired:
    """Match two tables. A column that is chosen with `where` on a side is not matched by."""
    sides = _rows(new, new_where or {}), _rows(ref, ref_where or {})
    chosen = {**(new_where or {}), **(ref_where or {})}
    columns = tuple(by) or _columns(*sides, without=chosen)
    shown = _telling(sides, columns)
    found: dict[tuple[str, ...], tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for number, rows in enumerate(sides):
        for row in rows:
            found[tuple(_part(row, name) for name in columns)][number].append(row)
    pairs = [
        Pair(_name((a or b)[0], shown), Side(tuple(a)), Side(tuple(b))) for a, b in found.values()
    ]
    if not any(pair.new.rows and pair.ref.rows for pair in pairs):
        raise UsageError(
            f"no cell of NEW ({len(sides[0])} rows) is in REF ({len(sides[1])} rows) by"
            f" {', '.join(columns)}; name the columns to match by with --by"
        )
    return Paired(columns, tuple(pairs))


def _part(row: Mapping[str, Any], name: str) -> str:
    # An id may look like a number: 4e5678901234 is no infinity.
    return str(row["group"]) if name == "group" else spelled(row.get(name))


def spelled(value: object) -> str:
    """One spelling: 2.00E-05 and 2e-5 are one rate, 1 and 1.0 one number, True and true one."""
    text = fact(value) or ""
    if not _NUMBER.fullmatch(text):
        return text
    return f"{float(text):.15g}"


def where(texts: Sequence[str]) -> dict[str, str]:
    """What to choose a side's rows by, as it is written: framework_config=none."""
    found = {}
    for text in texts:
        name, is_told, value = text.partition("=")
        if not is_told:
            raise UsageError(f"no choice: {text!r}; write COLUMN=VALUE, as framework_config=none")
        found[name.strip()] = value.strip()
    return found


def _rows(found: pa.Table, chosen: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """The rows with all their settings as columns, but for those that were never to run."""
    rows = [_whole(row) for row in found.to_pylist() if row["status"] != "skipped"]
    unknown = [name for name in chosen if not any(name in row for row in rows)]
    if unknown:
        raise UsageError(f"no column {unknown[0]!r} to choose by; there are {', '.join(_SETTINGS)}")
    return [
        row
        for row in rows
        if all(spelled(row.get(name)) == spelled(value) for name, value in chosen.items())
    ]


def _whole(row: dict[str, Any]) -> dict[str, Any]:
    settings = json.loads(row["settings"] or "{}")
    return row | {n: v for n, v in settings.items() if n not in row and n not in _NOT_TOLD}


def _columns(
    new: Sequence[Mapping[str, Any]],
    ref: Sequence[Mapping[str, Any]],
    *,
    without: Mapping[str, str],
) -> tuple[str, ...]:
    groups = [{row["group"] for row in rows if row["group"]} for rows in (new, ref)]
    if not without and groups[0] & groups[1]:
        return ("group",)
    further = {name for rows in (new, ref) for row in rows for name in row} - set(COLUMNS)
    return tuple(
        name
        for name in (*_SETTINGS, *sorted(further))
        if name not in without and _tells(new, name) and _tells(ref, name)
    )


def _tells(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(row.get(name) not in (None, "") for row in rows)


def _telling(
    sides: tuple[Sequence[Mapping[str, Any]], ...], columns: Sequence[str]
) -> tuple[str, ...]:
    """What a configuration is called by: the settings that tell some from others."""
    rows = [row for side in sides for row in side]
    further = sorted({name for row in rows for name in row} - set(COLUMNS))
    names = (*_SETTINGS, *further) if tuple(columns) == ("group",) else columns
    telling = [name for name in names if len({spelled(row.get(name)) for row in rows}) > 1]
    return tuple(telling) or ("framework_config",)


_SHORT = {
    "model_name_or_path": "",
    "framework_config": "",
    "scenario": "",
    "peft_method": "",
    "torch_dtype": "",
    "num_gpus": "gpus",
    "per_device_train_batch_size": "batch",
    "effective_batch_size": "global batch",
    "gradient_accumulation_steps": "accumulation",
    "learning_rate": "lr",
}


def _name(row: Mapping[str, Any], shown: Sequence[str]) -> str:
    parts = []
    for name in shown:
        value = spelled(row.get(name))
        if value:
            short = _SHORT.get(name, name)
            parts.append(f"{short} {value}" if short else value)
    return ", ".join(parts) or "(no settings)"
