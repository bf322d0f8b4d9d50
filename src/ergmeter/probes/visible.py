"""Which of the GPUs that NVML lists can a process see?

The trap: NVML ignores CUDA_VISIBLE_DEVICES, so index 0 there may be a GPU this process never uses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ergmeter.errors import NotMeasurable


def visible(environment: Mapping[str, str], uuids: Sequence[str]) -> Sequence[int]:
    """The NVML indices of the GPUs that CUDA shows to a process with this environment.

    As CUDA reads the list: it ends at the first entry that names no GPU, and one GPU named twice
    makes the whole list void.
    """
    if not uuids:
        raise NotMeasurable("the NVIDIA driver shows no GPU: see `nvidia-smi -L` and `lspci`")
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return range(len(uuids))
    chosen: list[int] = []
    for entry in value.split(","):
        index = _named(entry.strip(), uuids)
        if index is None:
            break
        chosen.append(index)
    if not chosen or len(set(chosen)) < len(chosen):
        raise NotMeasurable(
            f'CUDA_VISIBLE_DEVICES="{value}" hides every GPU: unset it, or name each GPU once '
            f"(there are 0 to {len(uuids) - 1})"
        )
    return chosen


def _named(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.startswith("MIG"):
        raise NotMeasurable(
            f"CUDA_VISIBLE_DEVICES names a MIG instance ({entry}), and the energy of a GPU can't "
            "be attributed to one of its instances: measure on a GPU with MIG off"
        )
    if entry.startswith("GPU-"):
        matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    digits = re.match(r"\d+", entry)
    return int(digits[0]) if digits and int(digits[0]) < len(uuids) else None


def is_order_assumed(environment: Mapping[str, str], names: set[str]) -> bool:
    """Whether CUDA may number these GPUs otherwise than NVML does, the fastest first."""
    if len(names) < 2 or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return False
    return re.search(r"(^|,)\s*\d", environment.get("CUDA_VISIBLE_DEVICES", "")) is not None
