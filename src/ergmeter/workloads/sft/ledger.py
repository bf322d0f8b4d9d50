"""The energy ledger: one row a training, in SFT-Play's columns, then columns of what actually ran.

The last columns are the interval, basis and note of each measured value.

`CsvFile` takes a lock, writes complete rows and compares the header. If a row can't be written (a
full disk, a file of other columns), it goes beside the ledger or is printed, with the reason. It is
never lost, and never an exception after hours of training.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ergmeter.compare.ledgers import TOKENS, WINDOW_TOKENS, measured_columns, part_columns
from ergmeter.errors import UsageError
from ergmeter.metrics.catalog import in_view
from ergmeter.metrics.evidence.gpu_use import board_facts
from ergmeter.metrics.evidence.window import UNBROKEN
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Missing, Reading, Summary
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from ergmeter.sinks.shared import appended_file

# Columns after SFT-Play's.
MORE = (
    *("window_s", "window_steps", "train_loss", "eval_loss", "mfu"),
    *("energy_low_J", "energy_high_J"),
    *("tuning", "bits", "lora_r", "lora_alpha", "lora_targets", "weights_dtype", "compute_dtype"),
    *("attention", "packing", "pad_to_multiple_of", "gradient_checkpointing", "lora_dropout"),
    *("lr", "lr_scheduler", "trainer", "evaluation", "checkpoints", "world_size", "parameters"),
    *("trainable_parameters", "kernels", "threads"),
    *("temperature_start_C", "temperature_end_C", "device"),
    *("driver", "power_limit_W", "torch", "transformers", "peft", "trl", "bitsandbytes", "unsloth"),
    *("git_commit", "data_sha256", "config", "status", "started", "run"),
)
ADDED = (WINDOW_TOKENS, "co2e_g", "energy_cost", "gpu_cost")
_FIRST = (*appended_file.LEDGER_COLUMNS, *MORE)  # of a ledger of version 0.1.0
_SECOND = (*_FIRST, *(name for name, (of, _) in part_columns().items() if of not in ADDED))
_EARLIER = (_FIRST, _SECOND)
COLUMNS = (*_SECOND, *ADDED, "currency", *(name for name in part_columns() if name not in _SECOND))


@dataclass(frozen=True)
class LedgerRow:
    """Where a row was written. `problem`: why it is not in the ledger."""

    path: Path | None
    problem: str = ""


def row(run: Run, facts: Mapping[str, Any]) -> dict[str, object]:
    """The ledger row of a finished training, from its run and its facts."""
    summary = summarize(run, Settings(window=UNBROKEN))
    cells = appended_file.ledger_row(summary.readings, steps=0, described={})
    for key, at in in_view("ledger").items():
        reading = None if at.group else summary.readings[key]  # a group: of the facts
        cells[at.label] = reading.value if isinstance(reading, Reading) else None
    for column, (name, part) in part_columns().items():
        key, _, scale = measured_columns()[name]
        reading = None if name in facts else summary.readings.get(key)
        end = getattr(reading, part) if isinstance(reading, Reading) else None
        cells[column] = end * scale if isinstance(end, float) else end
    energy = summary.readings["energy.run_j"]
    if isinstance(energy, Reading):
        cells["energy_low_J"], cells["energy_high_J"] = energy.low, energy.high
    cells |= {**board_facts(run), **facts}
    cells["notes"] = "; ".join(_notes(facts, summary))
    cells["run"] = str(run.path)
    return {name: cells.get(name) for name in COLUMNS}


def check(path: Path) -> None:
    """Raises UsageError if the ledger has other columns. Does not create the file."""
    if _columns(path) not in ((), COLUMNS, *_EARLIER):
        raise UsageError(
            f"metrics.results_csv: {path} has other columns, as ledgers of SFT-Play or of"
            " another version have; move it away or give another name (erg compare reads both)"
        )


def append_row(path: Path, cells: Mapping[str, object]) -> LedgerRow:
    """Appends the row to the ledger, else to a file beside it, else nowhere."""
    beside = path.with_name(f"{path.stem}-{Path(str(cells['run'])).name}.csv")
    problems: list[str] = []
    for file, name in ((path, path), (beside, beside.name)):
        try:
            _append(file, cells)
            return LedgerRow(file, "; ".join(problems))
        except (OSError, UsageError) as error:
            problems.append(f"{name}: {getattr(error, 'strerror', None) or error}")
    return LedgerRow(None, "; ".join(problems))


def as_text(cells: Mapping[str, object]) -> str:
    """The row as two lines of CSV, for printing."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerow(dict(cells))
    return text.getvalue()


def _append(path: Path, cells: Mapping[str, object]) -> None:
    columns = _columns(path)
    is_earlier = columns in _EARLIER  # with the window's tokens as `tokens_processed`
    file = appended_file.CsvFile(path, columns if is_earlier else COLUMNS)
    source = {name: name.replace(TOKENS, WINDOW_TOKENS) if is_earlier else name for name in columns}
    try:
        file.append({name: _cell(cells.get(source.get(name, name))) for name in file.columns})
    finally:
        file.close()


def _columns(path: Path) -> tuple[str, ...]:
    """The columns of a ledger; empty if the file is absent or empty."""
    return appended_file.header_of(path) if path.is_file() else ()


def _cell(value: object) -> object:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else value


def _notes(facts: Mapping[str, Any], summary: Summary) -> Iterator[str]:
    """LoRA's details, then why cells are empty, separated by semicolons."""
    if facts.get("lora_r") is not None:
        yield f"lora_r={facts['lora_r']}_alpha={facts['lora_alpha']}"
    yield from [str(facts["notes"])] if facts.get("notes") else []
    # One metric's reason stands for all of its kind.
    for key, at in in_view("ledger notes").items():
        name = at.label
        reading = summary.readings[key]
        if isinstance(reading, Reading) and reading.impossible:
            yield f"{name} is impossible: {reading.impossible.replace(';', ',')}"
        if isinstance(reading, Missing):
            reason = re.split(r" \(|: --", reading.reason)[0]  # all of it is in the run
            reason = reason.replace(";", ",")
            yield f"no {name}: {' '.join(reason.split())}"
