"""Which of the GPUs that amdsmi lists can a process see?

The trap: two lists, one on top of the other. ROCR_VISIBLE_DEVICES chooses from what there is, by
index or by UUID; HIP_VISIBLE_DEVICES (or CUDA_VISIBLE_DEVICES, which HIP heeds too) then counts
from 0 in what the first one left. amdsmi heeds neither, and its order is HIP's only by its word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ergmeter.errors import NotMeasurable


def visible(environment: Mapping[str, str], gpus: Sequence[dict[str, Any]]) -> list[int]:
    """The amdsmi indices of the GPUs that HIP shows to a process, by the facts known of each.

    As the runtimes read a list: it ends at the first entry that names no GPU.
    """
    if not gpus:
        raise NotMeasurable("the AMD driver shows no GPU: see `amd-smi list`")
    shown = sorted(range(len(gpus)), key=lambda index: gpus[index].get("hip_index", index))
    if any("hip_index" not in gpu for gpu in gpus) and len(gpus) > 1:
        for gpu in gpus:
            gpu["order_is_assumed"] = True
    for names in (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")):
        variable = next((name for name in names if environment.get(name) is not None), None)
        if variable is not None:
            shown = _chosen(variable, environment[variable], shown, gpus)
    return shown


def _chosen(
    variable: str, value: str, shown: Sequence[int], gpus: Sequence[Mapping[str, Any]]
) -> list[int]:
    chosen: list[int] = []
    for entry in value.split(","):
        index = _named(entry.strip(), shown, gpus)
        if index is None or index in chosen:
            break
        chosen.append(index)
    if not chosen:
        raise NotMeasurable(
            f'{variable}="{value}" hides every AMD GPU: unset it, or name one of 0 to'
            f" {len(shown) - 1}"
        )
    return chosen


def _named(entry: str, shown: Sequence[int], gpus: Sequence[Mapping[str, Any]]) -> int | None:
    if entry.upper().startswith("GPU-"):
        wanted = entry[4:].lower()
        matches = [i for i in shown if str(gpus[i].get("serial", "")).lower() == f"0x{wanted}"]
        return matches[0] if len(matches) == 1 else None
    return shown[int(entry)] if entry.isdecimal() and int(entry) < len(shown) else None
