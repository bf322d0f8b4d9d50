"""Earlier outputs of `erg analyze` side by side, on the terminal."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from ergmeter.neuron.compare import METRICS
from ergmeter.units import significant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from ergmeter.neuron.compare import Comparison, Group, Spread

_TITLES = {
    "mfu_percent": "MFU %",
    "throughput_seq_per_sec": "seq/s",
    "overall_nki_ratio": "NKI ratio",
    "training_score": "score",
}


def parts(found: Comparison) -> Iterator[RenderableType]:
    """The outputs, then a line of means for each group of repeats."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("output", overflow="fold")
    paths = [output.path for group in found.groups for output in group.outputs]
    shared = len(os.path.commonpath([str(Path(path).absolute().parent) for path in paths]))
    for name in METRICS:
        title = _TITLES[name]
        if name == "mfu_percent" and found.convention:
            title = f"{title} ({found.convention})"
        table.add_column(title, justify="right", no_wrap=True)
    for group in found.groups:
        for output in group.outputs:
            values = (output.value(name, convention=found.convention) for name in METRICS)
            name = min(output.path, str(Path(output.path).absolute())[shared:].lstrip("/"), key=len)
            table.add_row(name, *("-" if v is None else significant(v, 5) for v in values))
        if len(group.outputs) > 1:
            spreads = [group.spreads.get(name) for name in METRICS]
            many = len(group.outputs)
            means = (_mean(spread, of=many) for spread in spreads)
            table.add_row(f"mean of {many}", *means, style="bold")
            table.add_row("± standard deviation", *map(_deviation, spreads))
    yield table
    for before, group in zip(found.groups, found.groups[1:], strict=False):
        yield Text(_change(before, group))
    for note in found.notes:
        yield Text(note, style="dim")


def _mean(spread: Spread | None, *, of: int) -> str:
    if spread is None:
        return "-"
    some = f" (of {spread.count})" if spread.count < of else ""
    return f"{significant(spread.mean, 5)}{some}"


def _deviation(spread: Spread | None) -> str:
    if spread is None or spread.deviation is None:
        return "-"
    return significant(spread.deviation, 2)


def _change(before: Group, after: Group) -> str:
    """What was changed from one group to the next, and what it did."""
    inputs = "; ".join(f"{name} {old} → {new}" for name, (old, new) in after.changed.items())
    inputs = inputs or "nothing that is known of the inputs changed"
    effects = []
    for name in METRICS:
        old, new = before.spreads.get(name), after.spreads.get(name)
        if old is None or new is None or not old.mean:
            continue
        percent = round(100 * (new.mean / old.mean - 1), 1) + 0.0  # no -0.0
        change = f"{_TITLES[name]} {percent:+.1f} %"
        apart = (old.deviation or 0.0) + (new.deviation or 0.0)
        if apart and abs(new.mean - old.mean) <= apart:
            change += " (within the spread of the repeats)"
        effects.append(change)
    return f"{inputs}: {', '.join(effects) or 'nothing to compare'}"
