"""Pairs the configurations of NEW with those of REF, and lists what was measured differently.

Cells are paired by their settings and not by row position. Differences in measuring (device, memory
tracker, window of the rates) are reported, since a slowdown may be the meter's.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ergmeter.bench.plan.cells import configuration_name, naming_settings
from ergmeter.bench.results import FROM_RUN, TRAINER
from ergmeter.bench.tables import ARGUMENTS, COLUMNS, FAILED
from ergmeter.compare.entry import fact
from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.stats.ratio import mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pyarrow as pa

    Row: TypeAlias = Mapping[str, Any]
    _Key: TypeAlias = tuple[str, ...]
    _Sides: TypeAlias = tuple[list[Row], list[Row]]
    from collections.abc import Mapping

_LAST = ("scenario", "framework_config")  # what a row is called by where nothing else tells it
_SETTINGS = ("scenario", "num_gpus", "nodes", *ARGUMENTS)
_NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,2})?")
# Where it ran, and not what; and FMS's axis, which is the argument max_seq_length.
_NOT_TOLD = ("output_dir", "results_csv", "process_port", "max_seq_len")


def impossible_in(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """By column, why a value of one of these rows cannot be right."""
    reasons: dict[str, str] = {}
    for row in rows:
        reasons |= json.loads(row.get("impossible") or "{}")
    return reasons


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
        common = (
            column for column in columns if self.new.values(column) and self.ref.values(column)
        )
        return next(common, None)


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
    rows_by_key: dict[_Key, tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
    for number, rows in enumerate(sides):
        for row in rows:
            key = _key(row, columns)
            rows_by_key[(*key, _part(row, "scenario")) if key in split else key][number].append(row)
    if not any(a and b for a, b in rows_by_key.values()):
        raise UsageError(_none_shared(sides, columns))
    chosen = _choice(new_where, ref_where)
    names = _settings_text(rows_by_key.values(), by=by, without=without)
    pairs = [
        CellPair(_name((a or b)[0], names, chosen), Side(tuple(a)), Side(tuple(b)))
        for a, b in rows_by_key.values()
    ]
    return Paired((*columns, *(["scenario"] if split else [])), tuple(pairs), chosen)


def _key(row: Row, columns: Sequence[str]) -> _Key:
    return tuple(_part(row, name) for name in columns)


def _split(sides: _Sides, columns: Sequence[str]) -> set[_Key]:
    """The keys under which a side has several scenarios, where both sides name theirs."""
    if not all(_tells(rows, "scenario") for rows in sides):
        return set()
    keys: set[_Key] = set()
    for rows in sides:
        names: dict[_Key, set[str]] = defaultdict(set)
        for row in rows:
            names[_key(row, columns)].add(_part(row, "scenario"))
        keys |= {key for key, several in names.items() if len(several) > 1}
    return keys


def _check_told(name: str, sides: _Sides) -> None:
    for side, rows in zip(("NEW", "REF"), sides, strict=True):
        if not _tells(rows, name):
            reported = [setting for setting in _settings(rows) if _tells(rows, setting)]
            near = difflib.get_close_matches(name, reported, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(
                f"no column {name!r} in {side} to match by; {hint}there are {', '.join(reported)}"
            )


def _none_shared(sides: _Sides, columns: Sequence[str]) -> str:
    """The message if no configuration is on both sides: the columns that differ."""
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
    texts = sorted(value or "not told" for value in values)
    return ", ".join(texts[:3]) + (", ..." if len(texts) > 3 else "")


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
    conditions = {}
    for text in texts:
        name, is_told, value = text.partition("=")
        if not is_told:
            raise UsageError(f"no choice: {text!r}; write COLUMN=VALUE, as framework_config=none")
        conditions[name.strip()] = value.strip()
    return conditions


def _rows(table: pa.Table, chosen: Mapping[str, str], *, side: str) -> list[Row]:
    """The rows with all their settings as columns, but for those that were never to run."""
    rows: list[Row] = [
        _integers_restored(row) for row in table.to_pylist() if row["status"] != "skipped"
    ]
    unknown = [name for name in chosen if not any(name in row for row in rows)]
    if unknown:
        raise UsageError(f"no column {unknown[0]!r} to choose by; there are {', '.join(_SETTINGS)}")
    for name, value in chosen.items():
        matching = [row for row in rows if spelled(row.get(name)) == spelled(value)]
        if not matching:
            raise UsageError(
                f"no row of {side} has {name}={value}: {name} is"
                f" {_some({_part(row, name) for row in rows})} there"
            )
        rows = matching
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
    """All settings by which these rows may differ."""
    further = {name for row in rows for name in row} - set(COLUMNS)
    return (*_SETTINGS, *sorted(further))


def _tells(rows: Sequence[Row], name: str) -> bool:
    return any(row.get(name) not in (None, "") for row in rows)


def _settings_text(
    groups: Iterable[tuple[Sequence[Row], Sequence[Row]]],
    *,
    by: Sequence[str],
    without: Mapping[str, str],
) -> list[str]:
    """What configurations are called by: as in a report, or what they were asked to match by."""
    firsts = [(a or b)[0] for a, b in groups]
    if by:
        return list(by)
    differ = {
        name
        for name in _settings(firsts)
        if name not in without and len({_part(row, name) for row in firsts}) > 1
    }
    return naming_settings(differ, firsts)


def _name(row: Row, names: Sequence[str], chosen: str) -> str:
    """Name by the settings that vary, else by what was chosen, else by its scenario."""
    last = (configuration_name(row, [name]) for name in _LAST)
    return configuration_name(row, names) or chosen or next(filter(None, last), "(no settings)")


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


_RATES = {
    FROM_RUN: "of the steps after the warm-up",
    TRAINER: "of the whole training, as transformers printed them",
}
_TRACKED = ("_mem_cpu", "_mem_gpu")  # in the names of what the Trainer's tracker tells
_SMI = ("nvidia-smi", "reference")


def conditions(pairs: Paired) -> list[str]:
    """A line for each difference, with the number of configurations that have it."""
    counts: Counter[str] = Counter()
    for pair in pairs.both:
        counts.update(differences(pair))
    cells = len(pairs.both)
    return [
        f"measured otherwise in {number} of {cells} cells: {line}"
        for line, number in counts.most_common()
    ]


def differences(pair: CellPair) -> list[str]:
    """What differs in one configuration between the runs of NEW and of REF that ended well."""
    new, ref = _conditions_of(pair.new), _conditions_of(pair.ref)
    return [
        f"{name} {' and '.join(sorted(new[name]))} in NEW, {' and '.join(sorted(ref[name]))} in REF"
        for name in new
        if new[name] and ref[name] and new[name] != ref[name]
    ]


def _conditions_of(side: Side) -> dict[str, set[str]]:
    values_by_name: dict[str, set[str]] = {}
    for row in side.ok:
        for name, value in _conditions(row).items():
            values_by_name.setdefault(name, set()).update({value} if value else ())
    return values_by_name


def _conditions(row: Mapping[str, Any]) -> dict[str, str | None]:
    raw = json.loads(row["raw"] or "{}")
    is_tracked = any(part in name for name in raw for part in _TRACKED)
    is_ours = bool(row["id"])  # a published file does not say what was off
    return {
        "scenario": row["scenario"],
        "device": row["device"],
        "rates are": _RATES.get(row["rates_from"] or ""),
        "the Trainer's memory tracker was": "on" if is_tracked else "off" if is_ours else None,
        "nvidia-smi beside each cell was": (
            ("on" if row["memory_nvidia_from"] in _SMI else "off") if is_ours else None
        ),
    }
