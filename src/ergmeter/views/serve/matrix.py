"""The cells of a bench by what tells them apart: one entry a configuration, for a matrix.

The trap: a failed cell that looks like a slow one. A configuration has its figures or the words for
what became of it, never a zero; and configurations are not averaged with each other: where more
than two settings vary, several stand in one place of the matrix, each with its name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from ergmeter.bench.overview import of_repeats
from ergmeter.bench.schema import ARGUMENTS
from ergmeter.units import duration, scaled, significant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

_AXES = ("scenario", "num_gpus", "nodes", *ARGUMENTS)
FIGURES = {
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_device": "tokens/s per device",
    "samples_per_s": "samples/s",
    "joules_per_token": "J/token",
    "mfu_frac": "MFU",
    "memory_nvidia_peak_bytes": "device memory, peak",
    "memory_process_peak_bytes": "host memory, peak",
    "runtime_s": "time",
    "loss": "loss",
}
_LOWER = (
    *("joules_per_token", "memory_nvidia_peak_bytes", "memory_process_peak_bytes"),
    *("runtime_s", "loss"),
)


def matrix(found: pa.Table) -> dict[str, Any]:
    """The settings that vary, the figures there are, and each configuration with both."""
    rows = found.drop_columns(["raw"]).to_pylist()
    axes = [name for name in _AXES if len({row[name] for row in rows}) > 1] or ["scenario"]
    groups: dict[object, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["group"] or row["index"]].append(row)
    figures = {
        name: {"title": title, "is_lower_better": name in _LOWER}
        for name, title in FIGURES.items()
        if any(row[name] is not None for row in rows)
    }
    cells = [_group(group, axes, tuple(figures)) for group in groups.values()]
    return {"axes": axes, "figures": figures, "groups": cells, "cells": len(rows)}


def _group(
    rows: Sequence[Mapping[str, Any]], axes: Sequence[str], figures: Sequence[str]
) -> dict[str, Any]:
    ok = [row for row in rows if row["status"] == "ok"]
    counts = Counter(str(row["status"]) for row in rows)
    status = (
        "ok"
        if len(ok) == len(rows)
        else ", ".join(f"{n} {s}" if len(rows) > 1 else s for s, n in counts.most_common())
    )
    reasons = [str(row["reason"]) for row in rows if row["status"] != "ok" and row["reason"]]
    return {
        "axes": {name: rows[0][name] for name in axes},
        "status": status,
        "is_ok": bool(ok),
        "reason": reasons[0] if reasons else "",
        "repeats": len(rows),
        "figures": {name: _figure(ok, name) for name in figures},
        "paths": [str(row["path"]) for row in rows],
    }


def _figure(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any] | None:
    """The mean of the repeats that came to an end, as `erg bench report` has it."""
    mean = of_repeats(rows, name)
    if mean is None:
        return None
    # As in `erg bench report`: padding is in it, since nobody told the real tokens.
    is_padded = name.startswith("tokens_") and any(r["tokens_counted"] == "computed" for r in rows)
    return {"value": mean, "text": _words(name, mean) + "*" * is_padded}


def _words(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return scaled(value, "B")
    if name.endswith("_frac"):
        return f"{significant(value * 100, 3)} %"
    return duration(value) if name == "runtime_s" else significant(value)
