"""The training steps of a recorded GPU, beside its samples."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

from ergmeter.records import Step


def recorded_steps(folder: Path) -> list[tuple[str, Step]]:
    """Every training step, with the name of its phase of the recording."""
    (file,) = folder.glob("*_steps.csv.gz")
    with gzip.open(file, "rt", encoding="utf-8", newline="") as text:
        return [(row["phase"], _step(row)) for row in csv.DictReader(text)]


def _step(row: dict[str, str]) -> Step:
    return Step(
        int(row["start_ns"]),
        int(row["end_ns"]),
        index=int(row["step"]),
        tokens_computed=int(row["tokens"]),
        samples=int(row["samples"]),
        loss=float(row["loss"]) if row["loss"] else None,
    )
