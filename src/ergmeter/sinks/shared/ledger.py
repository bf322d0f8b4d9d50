"""The energy ledger: one row a run, in SFT-Play's columns, so that its tables go on.

The trap of the original: what the run was asked to do stands beside what it did, all tokens over
some of the time. Here what was measured comes from the catalogue, which knows SFT-Play's names and
units as aliases, and is over one window: from the end of the declared warm-up to the last step,
evaluation and checkpoints included (the window's kind `unbroken`), as those columns always were.
What nobody measured (model, dataset, ...) is said by the user. A missing figure is an empty cell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.metrics.catalog import catalogue
from ergmeter.records import Reading

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ergmeter.records import Result

SYSTEM = "SFT-Play"
DESCRIBED = (
    *("model", "dataset", "backend", "optimizer", "batch_size", "grad_accum", "seq_len"),
    *("steps", "precision", "seed", "notes"),
)
MEASURED = (
    *("wall_s", "warmup_s", "tokens_processed", "tok_per_s", "energy_J", "avg_power_W"),
    *("peak_power_W", "J_per_token", "E10k_J", "vram_peak_MB", "vram_avg_MB"),
)
COLUMNS = (*DESCRIBED, *MEASURED)


def columns(described: Mapping[str, object]) -> tuple[str, ...]:
    """SFT-Play's columns in its order, then those of the user's that it does not have."""
    return (*COLUMNS, *(name for name in described if name not in COLUMNS))


def row(
    readings: Mapping[str, Result], *, steps: int, described: Mapping[str, object]
) -> dict[str, object]:
    """A run's row: its steps, what was measured, and what the user says of it."""
    cells: dict[str, object] = {"steps": steps}
    for metric in catalogue().values():
        for alias in metric.aliases:
            found = readings.get(metric.key)
            if alias.system == SYSTEM and isinstance(found, Reading):
                cells[alias.name] = found.value * alias.scale
    return {**cells, **described}
