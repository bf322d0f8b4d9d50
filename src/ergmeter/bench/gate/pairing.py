"""Which cells of NEW and of REF are of one configuration?

The trap: rows matched by position, or by a list of names that one file lacks. Cells are matched by
the id of their configuration; where none is shared (a published file has no ids, a command has
changed), by all arguments that both sides tell. Two scenarios may run the same thing: then their
names tell them apart, and only then, since a scenario may be renamed. What has no partner is told,
never dropped.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ergmeter.bench.plan import cell_names
from ergmeter.bench.results.schema import ARGUMENTS, COLUMNS, FAILED
from ergmeter.compare.entry import fact
from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.stats.ratio import mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pyarrow as pa

    Row: TypeAlias = Mapping[str, Any]
    _Key: TypeAlias = tuple[str, ...]
    _Sides: TypeAlias = tuple[list[Row], list[Row]]

_LAST = ("scenario", "framework_config")  # what a row is called by where nothing else tells it
_SETTINGS = ("scenario", "num_gpus", "nodes", *ARGUMENTS)
_NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,2})?")
# Where it ran, and not what; and FMS's axis, which is the argument max_seq_length.
_NOT_TOLD = ("output_dir", "results_csv", "process_port", "max_seq_len")


def impossible_in(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """By column, why a value of one of these rows cannot be right."""
    found: dict[str, str] = {}
    for row in rows:
        found |= json.loads(row.get("impossible") or "{}")
    return found


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
        """A figure of each repeat that has it; none of them if one is impossible."""
        if column in impossible_in(self.ok):
            return []
        return [row[column] for row in self.ok if row[column] is not None]

    def mean(self, column: str) -> float | None:
        """The mean that comparisons are made of: geometric."""
        try:
            return mean(self.values(column)).value
        except NotMeasurable:
            return None


@dataclass(frozen=True, slots=True)
class CellPair:
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
    pairs: tuple[CellPair, ...]
    chosen: str = ""  # which rows of each side, where not all were asked for

    @property
    def both(self) -> tuple[CellPair, ...]:
        """What is on both sides."""
        return tuple(pair for pair in self.pairs if pair.new.rows and pair.ref.rows)

    @property
    def only_new(self) -> tuple[CellPair, ...]:
        """What is just in NEW."""
        return tuple(pair for pair in self.pairs if not pair.ref.rows)

    @property
    def only_ref(self) -> tuple[CellPair, ...]:
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
    new_where, ref_where = new_where or {}, ref_where or {}
    sides = _rows(new, new_where, side="NEW"), _rows(ref, ref_where, side="REF")
    without = {**new_where, **ref_where}
    for name in by:
        _check_told(name, sides)
    columns = tuple(by) or _columns(*sides, without=without)
    split = _split(sides, columns) if not by and "scenario" not in without else set()
    found: dict[_Key, tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
    for number, rows in enumerate(sides):
        for row in rows:
            key = _key(row, columns)
            found[(*key, _part(row, "scenario")) if key in split else key][number].append(row)
    if not any(a and b for a, b in found.values()):
        raise UsageError(_none_shared(sides, columns))
    chosen = _choice(new_where, ref_where)
    shown = _settings_text(found.values(), by=by, without=without)
    pairs = [
        CellPair(_name((a or b)[0], shown, chosen), Side(tuple(a)), Side(tuple(b)))
        for a, b in found.values()
    ]
    return Paired((*columns, *(["scenario"] if split else [])), tuple(pairs), chosen)


def _key(row: Row, columns: Sequence[str]) -> _Key:
    return tuple(_part(row, name) for name in columns)


def _split(sides: _Sides, columns: Sequence[str]) -> set[_Key]:
    """The keys under which a side has several scenarios, where both sides name theirs."""
    if not all(_tells(rows, "scenario") for rows in sides):
        return set()
    found: set[_Key] = set()
    for rows in sides:
        names: dict[_Key, set[str]] = defaultdict(set)
        for row in rows:
            names[_key(row, columns)].add(_part(row, "scenario"))
        found |= {key for key, several in names.items() if len(several) > 1}
    return found


def _check_told(name: str, sides: _Sides) -> None:
    for side, rows in zip(("NEW", "REF"), sides, strict=True):
        if not _tells(rows, name):
            told = [one for one in _settings(rows) if _tells(rows, one)]
            near = difflib.get_close_matches(name, told, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(
                f"no column {name!r} in {side} to match by; {hint}there are {', '.join(told)}"
            )


def _none_shared(sides: _Sides, columns: Sequence[str]) -> str:
    """What to say where no configuration is on both sides: which columns keep them apart."""
    apart = {}
    for name in columns:
        new, ref = ({_part(row, name) for row in rows} for rows in sides)
        if not new & ref:
            apart[name] = f"{name} is {_some(new)} in NEW and {_some(ref)} in REF"
    left = [name for name in columns if name not in apart]
    why = "; ".join(apart.values()) or f"by {', '.join(columns) or 'nothing that both tell'}"
    way = f"--by {','.join(left)}" if apart and left else "--by COLUMNS"
    return (
        f"no cell of NEW ({len(sides[0])} rows) is in REF ({len(sides[1])} rows): {why};"
        f" {way} matches by other columns"
    )


def _some(values: set[str]) -> str:
    told = sorted(value or "not told" for value in values)
    return ", ".join(told[:3]) + (", ..." if len(told) > 3 else "")


def _part(row: Mapping[str, Any], name: str) -> str:
    # An id may look like a number: 4e5678901234 is no infinity.
    return str(row["group"]) if name == "group" else spelled(row.get(name))


def spelled(value: object) -> str:
    """One spelling: 2.00E-05 and 2e-5 are one rate, 1 and 1.0 one number, True and true one."""
    text = fact(value) or ("nan" if isinstance(value, str) and value.lower() == "nan" else "")
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


def _rows(found: pa.Table, chosen: Mapping[str, str], *, side: str) -> list[Row]:
    """The rows with all their settings as columns, but for those that were never to run."""
    rows: list[Row] = [
        _integers_restored(row) for row in found.to_pylist() if row["status"] != "skipped"
    ]
    unknown = [name for name in chosen if not any(name in row for row in rows)]
    if unknown:
        raise UsageError(f"no column {unknown[0]!r} to choose by; there are {', '.join(_SETTINGS)}")
    for name, value in chosen.items():
        kept = [row for row in rows if spelled(row.get(name)) == spelled(value)]
        if not kept:
            raise UsageError(
                f"no row of {side} has {name}={value}: {name} is"
                f" {_some({_part(row, name) for row in rows})} there"
            )
        rows = kept
    return rows


def _integers_restored(row: dict[str, Any]) -> dict[str, Any]:
    settings = json.loads(row["settings"] or "{}")
    return row | {n: v for n, v in settings.items() if n not in row and n not in _NOT_TOLD}


def _columns(
    new: Sequence[Row], ref: Sequence[Row], *, without: Mapping[str, str]
) -> tuple[str, ...]:
    groups = [{row["group"] for row in rows if row["group"]} for rows in (new, ref)]
    if not without and groups[0] & groups[1]:
        return ("group",)
    return tuple(
        name
        for name in _settings([*new, *ref])
        if name != "scenario" and name not in without and _tells(new, name) and _tells(ref, name)
    )


def _settings(rows: Sequence[Row]) -> tuple[str, ...]:
    """All that these rows may be told apart by."""
    further = {name for row in rows for name in row} - set(COLUMNS)
    return (*_SETTINGS, *sorted(further))


def _tells(rows: Sequence[Row], name: str) -> bool:
    return any(row.get(name) not in (None, "") for row in rows)


def _settings_text(
    found: Iterable[tuple[Sequence[Row], Sequence[Row]]],
    *,
    by: Sequence[str],
    without: Mapping[str, str],
) -> list[str]:
    """What configurations are called by: as in a report, or what they were asked to match by."""
    firsts = [(a or b)[0] for a, b in found]
    if by:
        return list(by)
    differ = {
        name
        for name in _settings(firsts)
        if name not in without and len({_part(row, name) for row in firsts}) > 1
    }
    return cell_names.telling(differ, firsts)


def _name(row: Row, shown: Sequence[str], chosen: str) -> str:
    """By what tells it from others; where nothing does, by what was chosen, or its scenario."""
    last = (cell_names.name(row, [name]) for name in _LAST)
    return cell_names.name(row, shown) or chosen or next(filter(None, last), "(no settings)")


def _choice(new: Mapping[str, str], ref: Mapping[str, str]) -> str:
    """In words which rows were asked for: "mode a against b"."""
    parts = []
    for name in dict.fromkeys((*new, *ref)):
        if name in new and name in ref:
            same = new[name] == ref[name]
            parts.append(f"{name} {new[name]}" + ("" if same else f" against {ref[name]}"))
        else:
            side, value = ("NEW", new[name]) if name in new else ("REF", ref[name])
            parts.append(f"{name} {value} of {side}")
    return ", ".join(parts)
