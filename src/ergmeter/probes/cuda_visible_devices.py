"""The GPUs and MIG instances that CUDA shows to a process.

NVML ignores CUDA_VISIBLE_DEVICES, so its index 0 may be a GPU that the process never uses.

A GPU in MIG mode is several devices, and never one by itself. An entry names an instance by its
UUID, or in the older form by its board's UUID and two numbers (MIG-GPU-<uuid>/<gpu instance>/
<compute instance>). If an entry names a whole board in MIG mode, CUDA uses one of its instances.
All of them are read then, and the processes on them show which one it is.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ergmeter.errors import NotMeasurable


@dataclass(frozen=True, slots=True)
class Instance:
    """A MIG instance: its UUID, NVML's indices of it, and its numbers on the board."""

    uuid: str
    gpu: int  # NVML's index of the board
    mig_index: int  # NVML's index of the instance there
    gpu_instance: int
    compute_instance: int


def visible(
    environment: Mapping[str, str],
    uuids: Sequence[str],
    instances: Mapping[int, Sequence[Instance]] | None = None,
) -> list[int | Instance]:
    """The devices that CUDA shows to a process: NVML indices of GPUs, and MIG instances.

    `instances` has the MIG instances of each GPU in MIG mode. As in CUDA, the list ends at the
    first entry that names no device, and a GPU that is named twice makes the whole list void.
    """
    if not uuids:
        raise NotMeasurable("the NVIDIA driver shows no GPU: see `nvidia-smi -L` and `lspci`")
    partitioned = instances or {}
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        chosen: list[int | Instance] = list(range(len(uuids)))
    else:
        chosen = _choose_listed(value, uuids, partitioned)
    devices = [part for entry in chosen for part in _parts(entry, partitioned)]
    if not devices:
        raise NotMeasurable(
            "every GPU that can be seen is in MIG mode and has no instance: make one with"
            " `nvidia-smi mig -cgi`, or turn MIG mode off"
        )
    return devices


def _choose_listed(
    value: str, uuids: Sequence[str], partitioned: Mapping[int, Sequence[Instance]]
) -> list[int | Instance]:
    chosen: list[int | Instance] = []
    for entry in value.split(","):
        named = _device_of_entry(entry.strip(), uuids, partitioned)
        if named is None:
            break
        chosen.append(named)
    if not chosen or len(set(chosen)) < len(chosen):
        raise NotMeasurable(
            f'CUDA_VISIBLE_DEVICES="{value}" hides every GPU: unset it, or name each GPU once '
            f"(there are 0 to {len(uuids) - 1})"
        )
    return chosen


def _device_of_entry(
    entry: str, uuids: Sequence[str], partitioned: Mapping[int, Sequence[Instance]]
) -> int | Instance | None:
    if entry.startswith("MIG-"):
        every = [instance for instances in partitioned.values() for instance in instances]
        return _only([instance for instance in every if _matches(instance, entry, uuids)])
    if entry.startswith("GPU-"):
        return _only([index for index, uuid in enumerate(uuids) if uuid.startswith(entry)])
    digits = re.match(r"\d+", entry)
    return int(digits[0]) if digits and int(digits[0]) < len(uuids) else None


def _matches(instance: Instance, entry: str, uuids: Sequence[str]) -> bool:
    """True if an entry is the start of an instance's UUID, or names its board and numbers."""
    older = re.fullmatch(r"MIG-(GPU-[^/]+)/(\d+)/(\d+)", entry)
    if older is None:
        return instance.uuid.startswith(entry)
    numbers = (instance.gpu_instance, instance.compute_instance)
    return uuids[instance.gpu].startswith(older[1]) and numbers == (int(older[2]), int(older[3]))


def _only(matches: Sequence[int] | Sequence[Instance]) -> int | Instance | None:
    return matches[0] if len(matches) == 1 else None


def _parts(
    device: int | Instance, partitioned: Mapping[int, Sequence[Instance]]
) -> Sequence[int | Instance]:
    return partitioned.get(device, [device]) if isinstance(device, int) else [device]


def is_order_assumed(environment: Mapping[str, str], names: set[str]) -> bool:
    """True if an index in CUDA_VISIBLE_DEVICES may count GPUs by speed, and not as NVML does."""
    if len(names) < 2 or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return False
    return re.search(r"(^|,)\s*\d", environment.get("CUDA_VISIBLE_DEVICES", "")) is not None


# -- CUDA's order of GPUs --------------------------------------------------------------------------
# NVML numbers GPUs along the PCI bus, CUDA by speed. On a machine with different GPUs, number 0 may
# be two different ones. CUDA is asked in a process of its own that has the program's environment
# and creates no context, so that it takes nothing from any GPU.

ANSWER_S = 5.0

_ASK = """
import ctypes, uuid
cuda = ctypes.CDLL("libcuda.so.1")
count, device, name = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
for index in range(count.value):
    assert cuda.cuDeviceGet(ctypes.byref(device), index) == 0
    assert cuda.cuDeviceGetUuid(ctypes.byref(name), device) == 0
    print("GPU-" + str(uuid.UUID(bytes=bytes(name))))
"""


def with_uuids(
    environment: Mapping[str, str], gpus: Sequence[tuple[str, str]], *, wait_s: float = ANSWER_S
) -> Mapping[str, str] | None:
    """The environment, with CUDA_VISIBLE_DEVICES as UUIDs if CUDA may count GPUs by speed. None if
    CUDA can't be asked then. `gpus`: UUID and name of every GPU here."""
    if not is_order_assumed(environment, {name for _, name in gpus}):
        return environment
    asked = cuda_uuids(environment, wait_s=wait_s)
    if not asked or not {uuid for uuid, _ in gpus}.issuperset(asked):
        return None
    return {**environment, "CUDA_VISIBLE_DEVICES": ",".join(asked)}


def cuda_uuids(environment: Mapping[str, str], *, wait_s: float = ANSWER_S) -> list[str]:
    """UUIDs of the GPUs that CUDA shows to a program with this environment; empty on failure."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _ASK],
            env=dict(environment), capture_output=True, text=True, timeout=wait_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []
