"""The energy ledger: one row a training, in SFT-Play's columns, then what really ran.

Two traps. A row that is glued to half of another, or stands under another's header: `csvfile` holds
a lock, writes whole rows and compares the header. And a full disk or a file of other columns that
costs the measurement: a row that can't go where it belongs goes beside it, or is printed, with the
reason; it is never lost and never an exception after hours of training.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.errors import UsageError
from ergmeter.metrics.evidence.gpu_use import board_facts
from ergmeter.metrics.evidence.window import UNBROKEN
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Missing, Reading
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from ergmeter.sinks.shared import ledger
from ergmeter.sinks.shared.csv_table import CsvFile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ergmeter.records import Summary

# What stands behind SFT-Play's columns.
MORE = (
    *(
        "window_s",
        "window_steps",
        "train_loss",
        "eval_loss",
        "mfu",
        "energy_low_J",
        "energy_high_J",
    ),
    *("tuning", "bits", "lora_r", "lora_alpha", "lora_targets", "weights_dtype", "compute_dtype"),
    *("attention", "packing", "pad_to_multiple_of", "gradient_checkpointing", "lora_dropout"),
    *("lr", "lr_scheduler", "trainer", "evaluation", "checkpoints", "world_size", "parameters"),
    *(
        "trainable_parameters",
        "kernels",
        "threads",
        "temperature_start_C",
        "temperature_end_C",
        "device",
    ),
    *("driver", "power_limit_W", "torch", "transformers", "peft", "trl", "bitsandbytes", "unsloth"),
    *("git_commit", "data_sha256", "config", "status", "started", "run"),
)
COLUMNS = (*ledger.COLUMNS, *MORE)
_FIGURES = {
    "window_s": "time.window_s",
    "window_steps": "steps.count",
    "mfu": "utilization.mfu_frac",
}
# Whose absence is told in the notes, by the metric whose reason stands for all of its kind.
_REASONS = {
    "tok_per_s": "throughput.tokens_per_s",
    "energy_J": "energy.run_j",
    "vram_peak_MB": "memory.device_peak_bytes",
    "mfu": "utilization.mfu_frac",
}


@dataclass(frozen=True)
class LedgerRow:
    """Where a row went; `problem` says why not into the ledger."""

    path: Path | None
    problem: str = ""


def row(run: Run, facts: Mapping[str, Any]) -> dict[str, object]:
    """The row of a training that has ended, by what its run says and what it was."""
    summary = summarize(run, Settings(window=UNBROKEN))
    cells = ledger.row(summary.readings, steps=0, described={})
    for name, key in _FIGURES.items():
        found = summary.readings[key]
        cells[name] = found.value if isinstance(found, Reading) else None
    energy = summary.readings["energy.run_j"]
    if isinstance(energy, Reading):
        cells["energy_low_J"], cells["energy_high_J"] = energy.low, energy.high
    cells |= {**board_facts(run), **facts}
    cells["notes"] = _notes(facts, summary)
    cells["run"] = str(run.path)
    return {name: cells.get(name) for name in COLUMNS}


def check(path: Path) -> None:
    """Refuse a file of other columns before hours of training. One that isn't there is not made."""
    if path.is_file() and path.stat().st_size:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            there = tuple(next(csv.reader(file), ()))
        if there != COLUMNS:
            raise UsageError(
                f"metrics.results_csv: {path} has other columns, as ledgers of SFT-Play or of"
                " another version have; move it away or give another name (erg compare reads both)"
            )


def written(path: Path, cells: Mapping[str, object]) -> LedgerRow:
    """Append the row; where that can't be, to a file beside it; where not even that, nowhere."""
    try:
        _append(path, cells)
        return LedgerRow(path)
    except (OSError, UsageError) as error:
        problem = getattr(error, "strerror", None) or str(error)
    beside = path.with_name(f"{path.stem}-{Path(str(cells['run'])).name}.csv")
    try:
        _append(beside, cells)
        return LedgerRow(beside, f"{path}: {problem}")
    except (OSError, UsageError) as error:
        also = getattr(error, "strerror", None) or str(error)
        return LedgerRow(None, f"{path}: {problem}; {beside.name}: {also}")


def as_text(cells: Mapping[str, object]) -> str:
    """The row as two lines of CSV, for where no file takes it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerow(dict(cells))
    return text.getvalue()


def _append(path: Path, cells: Mapping[str, object]) -> None:
    file = CsvFile(path, COLUMNS)
    try:
        file.append({name: _cell(value) for name, value in cells.items()})
    finally:
        file.close()


def _cell(value: object) -> object:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else value


def _notes(facts: Mapping[str, Any], summary: Summary) -> str:
    """LoRA's details, then why cells are empty, separated by semicolons."""
    said = []
    if facts.get("lora_r") is not None:
        said.append(f"lora_r={facts['lora_r']}_alpha={facts['lora_alpha']}")
    said += [str(facts["notes"])] if facts.get("notes") else []
    for name, key in _REASONS.items():
        found = summary.readings[key]
        if isinstance(found, Reading) and found.impossible:
            said.append(f"{name} is impossible: {found.impossible.replace(';', ',')}")
        if isinstance(found, Missing):
            reason = found.reason.partition(" (")[0].replace(";", ",")  # all of it is in the run
            said.append(f"no {name}: {' '.join(reason.split())}")
    return "; ".join(said)
