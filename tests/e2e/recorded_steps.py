"""What a run was told of a training: its steps, rank by rank, and which training it was."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from ergmeter.records import PHASES
from ergmeter.runlog.reader import Run

if TYPE_CHECKING:
    from pathlib import Path


def steps(run: Path, *, rank: int = 0, phase: str = "train") -> dict[str, list[Any]]:
    """The columns of a rank's steps, in the order of time."""
    columns = Run.open(run).steps()
    rows = np.flatnonzero((columns["rank"] == rank) & (columns["phase"] == PHASES.index(phase)))
    rows = rows[np.argsort(columns["start_ns"][rows])]
    return {name: values[rows].tolist() for name, values in columns.items()}


def trainings(run: Path) -> list[dict[str, Any]]:
    """Who each process of the training said it was."""
    heads = [json.loads(path.read_text()) for path in sorted(run.glob("*/writer.json"))]
    return [head["training"] for head in heads if "training" in head]


def sums(values: list[int], size: int) -> list[int]:
    """Of each `size` values in turn, as micro-batches make a step."""
    return [sum(values[start : start + size]) for start in range(0, len(values), size)]
