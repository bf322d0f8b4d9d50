"""Reads energy ledgers, ours and the original SFT-Play's: one row a run, with or without `steps`.

A row that does not fit the header is left out and reported with its line; the others are read.

The original divides the tokens of the whole run by the time after the warm-up, and the energy after
the warm-up by the tokens of the whole run. A run of 120 s with 60 s of warm-up then reads twice as
fast and uses half the energy. Here the rate is all tokens over all of the time. The energy of the
warm-up is unknown, so J/token is a range: from none to peak power throughout. Its value assumes the
mean power of the rest. 0 J means a sensor that did not work. Columns in MB are in MiB.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_args

from ergmeter.compare.entry import Entry, SourceEntries, fact, facts_of, why_left_out
from ergmeter.errors import FormatError
from ergmeter.metrics.catalog import catalogue, checked, every_metric, in_view, ledger_aliases
from ergmeter.metrics.definitions.carbon_and_cost import UNIT
from ergmeter.metrics.evidence.window import UNBROKEN
from ergmeter.records import Basis, Missing, Reading, Result

REMARK = (
    "a row of the original SFT-Play: its rate is all tokens over the time after warm-up; compared"
    " here: tokens over wall time"
)
ASSUMED = frozenset({"energy.joules_per_token"})
_NEAR = 1e-6


def is_original(row: Mapping[str, float]) -> bool:
    """True if a row is the original SFT-Play's: its rate is tokens / (wall time - warm-up).

    SFT-Play's files do not name it, but its floats are not rounded, so the equation holds exactly.
    """
    tokens, rate = row.get("tokens_processed"), row.get("tok_per_s")
    wall_s, warmup_s = row.get("wall_s"), row.get("warmup_s")
    if tokens is None or rate is None or wall_s is None or warmup_s is None:
        return False
    after_s = max(1e-9, wall_s - warmup_s)
    return abs(rate * after_s - tokens) <= _NEAR * max(tokens, 1.0)


def original_readings(row: Mapping[str, float]) -> dict[str, Result]:
    """The metrics of a row of the original, by key of the catalogue."""
    wall_s, tokens = row["wall_s"], row["tokens_processed"]
    readings: dict[str, Result] = {}
    if wall_s > 0:
        readings["time.run_s"] = Reading(wall_s, "s", "reported")
        readings["time.window_s"] = Reading(wall_s, "s", "reported", note="all of the run")
    if tokens > 0 and wall_s > 0:
        note = f"tokens over wall time; the row says {row['tok_per_s']:g}"
        rate: Result = Reading(tokens / wall_s, "tokens/s", "derived", note=note)
    elif tokens > 0:
        rate = Missing("the row has no wall time above 0 s")
    else:
        why = "the row counts 0 tokens, as the original did for cpt, seq2seq and loader workers"
        rate = Missing(why)
    readings["throughput.tokens_per_s"] = rate
    readings["energy.joules_per_token"] = _joules_per_token(row)
    for column, key in (
        ("vram_peak_MB", "memory.device_peak_bytes"),
        ("vram_avg_MB", "memory.device_mean_bytes"),
    ):
        if row.get(column):
            readings[key] = Reading(row[column] * 2**20, "B", "reported", note="its MB were MiB")
    for column, key in (("avg_power_W", "energy.mean_w"), ("peak_power_W", "energy.peak_w")):
        if row.get(column):
            readings[key] = Reading(row[column], "W", "reported", note="after the warm-up")
    return readings


def _joules_per_token(row: Mapping[str, float]) -> Result:
    energy_j, tokens = row.get("energy_J") or 0.0, row["tokens_processed"]
    wall_s, warmup_s = row["wall_s"], row["warmup_s"]
    if wall_s <= warmup_s:
        return Missing("the run is shorter than its warm-up: no energy was measured")
    if energy_j <= 0:
        return Missing("the row has 0 J, which the original wrote where its sensor did not work")
    if tokens <= 0:
        return Missing("the row counts 0 tokens")
    peak_w = row.get("peak_power_W") or 0.0
    mean_w = energy_j / (wall_s - warmup_s)
    return Reading(
        mean_w * wall_s / tokens,
        "J/token",
        "assumed",
        low=energy_j / tokens,
        high=(energy_j + max(peak_w, mean_w) * warmup_s) / tokens,
        note="energy of the warm-up was not measured: taken as none to peak power throughout",
    )


# Columns that only our ledgers have: with them, a row's metrics are all of one window.
_OURS = ("window_s", "status")
_BASES: dict[str, Basis] = {basis: basis for basis in get_args(Basis)}
_ADAPTER = re.compile(r"lora_r=(\d+)_alpha=(\d+)")
# Tokens of the whole training; of the window, in ledgers of ours without `window_tokens`.
TOKENS, WINDOW_TOKENS = "tokens_processed", "window_tokens"
_NEEDED = ("tok_per_s", TOKENS, "wall_s")
_HEADER_BYTES = 2**16  # the longest first line of a ledger


@dataclass(frozen=True, slots=True)
class _Row:
    lines: tuple[int, int]
    cells: list[str]
    problem: str = ""


@cache
def measured_columns() -> dict[str, tuple[str, str, float]]:
    """Key, unit and scale of each measured column, from the catalogue's SFT-Play aliases."""
    columns = {
        alias.name: (metric.key, metric.unit, alias.scale) for metric, alias in ledger_aliases()
    }
    further = {at.label: every_metric()[key] for key, at in in_view("ledger").items()}
    return {**columns, **{name: (m.key, m.unit, 1.0) for name, m in further.items()}}


@cache
def part_columns() -> dict[str, tuple[str, str]]:
    """The columns X_low, X_high, X_basis and X_note of each measured column X: X and the part."""
    parts = ("low", "high", "basis", "note")
    return {f"{name}_{part}": (name, part) for name in measured_columns() for part in parts}


def is_ledger(path: Path) -> bool:
    """True if a file begins like a ledger. Reads only its beginning, and nothing of a pipe."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            begins = file.read(_HEADER_BYTES)
        return set(_NEEDED) <= set(_header(_decoded(begins, path), path))
    except (OSError, FormatError):
        return False


def read_ledger(path: Path, *, argument: str) -> SourceEntries:
    """The rows of a ledger. FormatError if the file is not a ledger."""
    text = _decoded(path.read_bytes(), path)
    header = _header(text, path)
    lacking = [name for name in _NEEDED if name not in header]
    if lacking:
        raise FormatError(
            f"{path} is not an energy ledger: its first line has no column {', '.join(lacking)}"
        )
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise FormatError(f"{path}: a column occurs twice in the first line: {', '.join(twice)}")
    entries, left_out = [], []
    lines: dict[tuple[str, ...], int] = {}
    for row in _rows(text):
        source = f"{path} line {row.lines[0]}"
        problem = row.problem or _misfit(row, header)
        if not problem and tuple(row.cells) in lines:
            problem = f"the same row as line {lines[tuple(row.cells)]}"
        if problem:
            left_out.append(f"{source}: {problem}")
            continue
        lines[tuple(row.cells)] = row.lines[0]
        cells = dict(zip(header, row.cells, strict=True))
        try:
            entries.append(_entry(cells, source=source, argument=argument, at=path))
        except FormatError as error:
            left_out.append(f"{source}: {error}")
    return SourceEntries(tuple(entries), tuple(left_out))


def _decoded(data: bytes, path: Path) -> str:
    if b"\0" in data[:4096]:
        raise FormatError(f"{path} is not a text table: it has zero bytes")
    return data.decode("utf-8-sig", errors="replace")


def _header(text: str, path: Path) -> list[str]:
    first = next(_parsed(text), None)
    if first is None or first.problem:
        raise FormatError(f"{path}: {'the file is empty' if first is None else first.problem}")
    return [name.strip() for name in first.cells]


def _rows(text: str) -> Iterator[_Row]:
    rows = _parsed(text)
    header = next(rows)
    for row in rows:
        says_something = row.problem or any(cell.strip() for cell in row.cells)
        # Concatenated files repeat the header.
        if says_something and row.cells != header.cells:
            yield row


def _parsed(text: str) -> Iterator[_Row]:
    """The rows of a CSV; an unclosed quote costs its own line, not all the rest."""
    lines = text.splitlines(keepends=True)
    at, width = 0, None
    while at < len(lines):
        reader = csv.reader(lines[number] for number in range(at, len(lines)))
        try:
            cells, problem = next(reader, []), ""
        except csv.Error as error:
            cells, problem = [], f"not a CSV row ({error})"
        used = max(1, reader.line_num)
        width = len(cells) if width is None else width
        if used > 1 and (problem or len(cells) != width):
            used, problem = 1, "a quotation mark is not closed"
        yield _Row((at + 1, at + used), cells, problem)
        at += used


def _misfit(row: _Row, header: list[str]) -> str:
    if len(row.cells) == len(header):
        return ""
    hint = ""
    if len(row.cells) == len(header) + 1 and "steps" not in header:
        hint = " (a row with `steps` in a table begun without it?)"
    return f"{len(row.cells)} cells where the first line has {len(header)}{hint}"


def _entry(cells: Mapping[str, str], *, source: str, argument: str, at: Path) -> Entry:
    if WINDOW_TOKENS not in cells and any(name in cells for name in _OURS):
        cells = {name.replace(TOKENS, WINDOW_TOKENS): cell for name, cell in cells.items()}
    numbers = dict(_numbers(cells))
    measured = {*measured_columns(), *part_columns()} - {"warmup_s"}
    facts = facts_of({name: value for name, value in cells.items() if name not in measured})
    adapter = _ADAPTER.match(facts.get("notes", ""))
    if adapter:  # the original wrote the LoRA settings into its notes
        facts = {"lora_r": adapter[1], "lora_alpha": adapter[2]} | facts
    facts = {"window": UNBROKEN} | facts  # the default of a row without the field
    run = _run(facts.get("run"), at)
    why = why_left_out(facts.get("status"))
    if why:
        ended = "running" if facts["status"] == "running" else "error"
        return Entry(source, argument, facts, {}, run, kind="ledger", status=ended, reason=why)
    if any(name in cells for name in _OURS) or not is_original(numbers):
        figures = _figures(numbers, cells, facts)
        return Entry(source, argument, facts, figures, run, kind="ledger")
    readings = original_readings(numbers)
    return Entry(source, argument, facts, readings, run, (REMARK,), ASSUMED, kind="ledger")


def _run(name: str | None, ledger: Path) -> Path | None:
    """The run's directory, relative to the working directory or to the ledger."""
    if name is None:
        return None
    near = [Path(name), ledger.parent / name]
    return next((path for path in near if path.is_dir()), None)


def _numbers(cells: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    ends = (name for name, (_, part) in part_columns().items() if part in ("low", "high"))
    for name in (*measured_columns(), *ends, "energy_low_J", "energy_high_J", "steps"):
        text = fact(cells.get(name))
        if text is None:
            continue
        try:
            number = float(text)
        except ValueError:
            raise FormatError(f"{name} is not a number: {cells[name][:40]!r}") from None
        if not math.isfinite(number):
            raise FormatError(f"{name} is not finite: {cells[name]!r}")
        yield name, number


def _figures(
    numbers: Mapping[str, float], cells: Mapping[str, str], facts: Mapping[str, str]
) -> dict[str, Result]:
    readings: dict[str, Result] = {}
    notes = _notes(facts.get("notes", ""))
    why = "the ledger's cell is empty" + (f" (notes of its row: {notes})" if notes else "")
    for name, (key, unit, scale) in measured_columns().items():
        if name in numbers:
            low, high = (numbers.get(f"{name}_{end}") for end in ("low", "high"))
            basis = _BASES.get(cells.get(f"{name}_basis", ""), "reported")
            value = Reading(
                numbers[name] / scale,
                facts.get("currency", UNIT) if unit == "currency" else unit,
                basis,
                None if low is None else low / scale,
                None if high is None else high / scale,
                cells.get(f"{name}_note", ""),
            )
            readings[key] = checked(key, value) if key in catalogue() else value
        else:
            readings[key] = Missing(why)
    wall_s, steps = numbers.get("wall_s"), numbers.get("steps")
    window_s = numbers.get("window_s")
    if steps and wall_s and window_s and "window_steps" not in numbers:
        about = steps * min(1.0, window_s / wall_s)
        note = "the run's steps times the window's share of its time"
        readings["steps.count"] = Reading(about, "steps", "derived", note=note)
    return readings | ({} if "J_per_token_low" in numbers else _bounded(numbers))


def _bounded(numbers: Mapping[str, float]) -> dict[str, Result]:
    """J/token with an interval, from the energy's interval in rows of earlier versions."""
    energy, value = numbers.get("energy_J"), numbers.get("J_per_token")
    low, high = numbers.get("energy_low_J"), numbers.get("energy_high_J")
    if not energy or value is None or low is None or high is None:
        return {}
    ends = (value * low / energy, value * high / energy)
    return {"energy.joules_per_token": Reading(value, "J/token", "reported", *ends)}


def _notes(notes: str) -> str:
    """The notes without the LoRA settings."""
    parts = (part.strip() for part in notes.split(";"))
    return "; ".join(part for part in parts if part and not part.startswith("lora_"))
