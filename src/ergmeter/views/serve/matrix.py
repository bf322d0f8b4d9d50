"""The cells of a bench by what tells them apart: one entry a configuration, for a matrix.

The trap: a choice of axes that nobody made. All settings that vary are told, and the page's reader
says which two; where more vary, several configurations stand in one place, each with its name.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from ergmeter.bench.matrix import FIGURES, LOWER, Configuration, configuration
from ergmeter.bench.naming import repeats_of
from ergmeter.bench.schema import ARGUMENTS
from ergmeter.views.bench_report import figure_in_words

if TYPE_CHECKING:
    import pyarrow as pa

_AXES = ("scenario", "num_gpus", "nodes", *ARGUMENTS)


def matrix(found: pa.Table) -> dict[str, Any]:
    """The settings that vary, the figures there are, and each configuration with both."""
    rows = found.drop_columns(["raw"]).to_pylist()
    axes = [name for name in _AXES if len({row[name] for row in rows}) > 1] or ["scenario"]
    groups: dict[object, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[repeats_of(row)].append(row)
    figures = {
        name: {"title": title, "is_lower_better": name in LOWER}
        for name, title in FIGURES.items()
        if any(row[name] is not None for row in rows)
    }
    cells = [_group(configuration(group, axes), tuple(figures)) for group in groups.values()]
    return {"axes": axes, "figures": figures, "groups": cells, "cells": len(rows)}


def _group(one: Configuration, figures: tuple[str, ...]) -> dict[str, Any]:
    return {
        "axes": dict(one.settings),
        "status": one.status,
        "is_ok": one.is_ok,
        "reason": one.reason,
        "figures": {name: _figure(one, name) for name in figures},
        "paths": list(one.paths),
    }


def _figure(one: Configuration, name: str) -> dict[str, Any] | None:
    """The mean of the repeats that came to an end, as `erg bench report` has it."""
    if name not in one.figures:
        return None
    value, runs = one.figures[name], one.runs[name]
    return {
        "value": value if math.isfinite(value) else None,
        "text": figure_in_words(one, name),
        "runs": runs,
        "impossible": one.impossible.get(name),
    }
