"""Which instances is a GPU in MIG mode divided into?

The trap: asking a board in MIG mode for what its instances do. Its memory is the sum over all of
them, its load is not told, and what it draws can't be divided among them. An instance has a handle
of its own, which knows its memory and its processes, and no sensor.
"""

from __future__ import annotations

import contextlib

import pynvml

from ergmeter.probes.nvidia.visible import Instance

# Why the board's figures are not an instance's.
NOT_ITS_OWN = (
    "a MIG instance has no sensor of its own, and what its board does can't be divided among its"
    " instances: measure on a GPU with MIG off"
)


def instances_of(index: int) -> list[Instance] | None:
    """The instances of a GPU that can be seen here; None of one that is not in MIG mode."""
    try:
        board = pynvml.nvmlDeviceGetHandleByIndex(index)
        current, _ = pynvml.nvmlDeviceGetMigMode(board)
        if current != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
        places = pynvml.nvmlDeviceGetMaxMigDeviceCount(board)
    except pynvml.NVMLError:  # a GPU without MIG, or a driver without
        return None
    found = []
    for place in range(places):
        with contextlib.suppress(pynvml.NVMLError):  # a place that is free, or not shown to us
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(board, place)
            found.append(
                Instance(
                    pynvml.nvmlDeviceGetUUID(handle),
                    gpu=index,
                    place=place,
                    gpu_instance=pynvml.nvmlDeviceGetGpuInstanceId(handle),
                    compute_instance=pynvml.nvmlDeviceGetComputeInstanceId(handle),
                )
            )
    return found
