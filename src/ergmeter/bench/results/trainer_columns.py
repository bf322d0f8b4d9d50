"""What goes into a row of results from what transformers' Trainer counted?

The trap: two rates side by side of which one is per device and the other is not. The Trainer's
tokens per second are one process's and count padding, its samples per second are of all processes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ergmeter.bench.results.run_columns import TRAINER

if TYPE_CHECKING:
    from collections.abc import Mapping


def fms_figures(results: Mapping[str, Any], num_gpus: int | None) -> dict[str, Any]:
    """What transformers' Trainer printed at the end, as our columns.

    Its train_tokens_per_second counts padding and is one process's; its train_samples_per_second
    is of all processes together.
    """
    per_device = number(results.get("train_tokens_per_second"))
    whole = per_device * num_gpus if per_device is not None and num_gpus else None
    row: dict[str, Any] = {
        "loss": number(results.get("train_loss")),
        "eval_loss": number(results.get("eval_loss")),
        "epoch": number(results.get("epoch")),
        "runtime_s": number(results.get("train_runtime")),
        "samples_per_s": number(results.get("train_samples_per_second")),
        "steps_per_s": number(results.get("train_steps_per_second")),
        "computed_tokens_per_s_per_device": per_device,
        "computed_tokens_per_s": whole,
    }
    row["rates_from"] = TRAINER if row["runtime_s"] is not None else None
    return row


def chosen(row: dict[str, Any], missing: Mapping[str, str]) -> dict[str, Any]:
    """The row with its headline rate: of real tokens where they were counted."""
    kind = "real" if row.get("real_tokens_per_s") is not None else "computed"
    row["tokens_per_s"] = row.get(f"{kind}_tokens_per_s")
    row["tokens_per_s_per_device"] = row.get(f"{kind}_tokens_per_s_per_device")
    row["tokens_counted"] = kind if row["tokens_per_s"] is not None else None
    missing = {**_of_tokens(missing), **missing}
    reasons = {name: why for name, why in missing.items() if row.get(name) is None}
    row["missing"] = json.dumps(reasons, sort_keys=True)
    return row


def _of_tokens(missing: Mapping[str, str]) -> dict[str, str]:
    """Why there is no headline rate: for want of what it is chosen from."""
    found = {}
    for ending in ("", "_per_device"):
        for kind in ("real", "computed"):
            why = missing.get(f"{kind}_tokens_per_s{ending}") or missing.get(f"{kind}_tokens_per_s")
            if why:
                found[f"tokens_per_s{ending}"] = why  # computed ones are what there is at the least
    return found


def number(value: object) -> float | None:
    """A number from JSON or text; None where there is none. nan and inf are numbers here."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(str(value))
    except ValueError:
        return None
