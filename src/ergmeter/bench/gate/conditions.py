"""Were NEW and REF measured alike? What differs besides the settings, where both sides tell it.

The trap: a slowdown that is the meter's. The Trainer's memory tracker collects garbage and empties
caches at each stage, rates of the whole training hold the slow first steps, and another card is
another card; none of that is among the settings by which cells are matched.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from ergmeter.bench.results.run_columns import FROM_RUN, TRAINER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ergmeter.bench.gate.pairing import CellPair, Paired, Side

_RATES = {
    FROM_RUN: "of the steps after the warm-up",
    TRAINER: "of the whole training, as transformers printed them",
}
_TRACKED = ("_mem_cpu", "_mem_gpu")  # in the names of what the Trainer's tracker tells
_SMI = ("nvidia-smi", "reference")


def conditions(found: Paired) -> list[str]:
    """A line for each difference, with the number of configurations that have it."""
    seen: Counter[str] = Counter()
    for pair in found.both:
        seen.update(differences(pair))
    cells = len(found.both)
    return [
        f"measured otherwise in {number} of {cells} cells: {line}"
        for line, number in seen.most_common()
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
    told: dict[str, set[str]] = {}
    for row in side.ok:
        for name, value in _conditions(row).items():
            told.setdefault(name, set()).update({value} if value else ())
    return told


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
