"""Which of the GPUs that NVML lists can a process see?

The trap: NVML ignores CUDA_VISIBLE_DEVICES, so index 0 there may be a GPU this process never uses.

A GPU in MIG mode is several devices, and never one by itself. An entry names an instance by its own
UUID, or in the older way by that of its board and two numbers (MIG-GPU-<uuid>/<gpu instance>/
<compute instance>). Where a whole board in MIG mode is named, CUDA takes one instance of it: all
are read, and the processes on them tell which.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ergmeter.errors import NotMeasurable


@dataclass(frozen=True, slots=True)
class Instance:
    """A MIG instance: its UUID, where NVML lists it, and its numbers on the board."""

    uuid: str
    gpu: int  # NVML's index of the board
    place: int  # NVML's index of the instance there
    gpu_instance: int
    compute_instance: int


def visible(
    environment: Mapping[str, str],
    uuids: Sequence[str],
    instances: Mapping[int, Sequence[Instance]] | None = None,
) -> list[int | Instance]:
    """What CUDA shows to a process with this environment: NVML indices of GPUs, and MIG instances.

    `instances` has those of each GPU that is in MIG mode. As CUDA reads the list: it ends at the
    first entry that names nothing, and one GPU named twice makes the whole list void.
    """
    if not uuids:
        raise NotMeasurable("the NVIDIA driver shows no GPU: see `nvidia-smi -L` and `lspci`")
    partitioned = instances or {}
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        chosen: list[int | Instance] = list(range(len(uuids)))
    else:
        chosen = _listed(value, uuids, partitioned)
    found = [part for one in chosen for part in _parts(one, partitioned)]
    if not found:
        raise NotMeasurable(
            "every GPU that can be seen is in MIG mode and has no instance: make one with"
            " `nvidia-smi mig -cgi`, or turn MIG mode off"
        )
    return found


def _listed(
    value: str, uuids: Sequence[str], partitioned: Mapping[int, Sequence[Instance]]
) -> list[int | Instance]:
    chosen: list[int | Instance] = []
    for entry in value.split(","):
        named = _named(entry.strip(), uuids, partitioned)
        if named is None:
            break
        chosen.append(named)
    if not chosen or len(set(chosen)) < len(chosen):
        raise NotMeasurable(
            f'CUDA_VISIBLE_DEVICES="{value}" hides every GPU: unset it, or name each GPU once '
            f"(there are 0 to {len(uuids) - 1})"
        )
    return chosen


def _named(
    entry: str, uuids: Sequence[str], partitioned: Mapping[int, Sequence[Instance]]
) -> int | Instance | None:
    if entry.startswith("MIG-"):
        every = [one for instances in partitioned.values() for one in instances]
        return _only([one for one in every if _is_called(one, entry, uuids)])
    if entry.startswith("GPU-"):
        return _only([index for index, uuid in enumerate(uuids) if uuid.startswith(entry)])
    digits = re.match(r"\d+", entry)
    return int(digits[0]) if digits and int(digits[0]) < len(uuids) else None


def _is_called(one: Instance, entry: str, uuids: Sequence[str]) -> bool:
    """Whether an entry is an instance's UUID or the start of it, or its place on its board."""
    older = re.fullmatch(r"MIG-(GPU-[^/]+)/(\d+)/(\d+)", entry)
    if older is None:
        return one.uuid.startswith(entry)
    numbers = (int(older[2]), int(older[3]))
    return uuids[one.gpu].startswith(older[1]) and numbers == (
        one.gpu_instance,
        one.compute_instance,
    )


def _only(found: Sequence[int] | Sequence[Instance]) -> int | Instance | None:
    return found[0] if len(found) == 1 else None


def _parts(
    one: int | Instance, partitioned: Mapping[int, Sequence[Instance]]
) -> Sequence[int | Instance]:
    return partitioned.get(one, [one]) if isinstance(one, int) else [one]


def is_order_assumed(environment: Mapping[str, str], names: set[str]) -> bool:
    """Whether CUDA may number these GPUs otherwise than NVML does, the fastest first."""
    if len(names) < 2 or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return False
    return re.search(r"(^|,)\s*\d", environment.get("CUDA_VISIBLE_DEVICES", "")) is not None
