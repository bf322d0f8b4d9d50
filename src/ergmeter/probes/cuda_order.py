"""Which GPUs does CUDA show to a program, by UUID? Asked of CUDA itself, where NVML can't know.

The trap: NVML numbers GPUs along the PCI bus and CUDA from the fastest, by a rule of its own. On a
machine with different GPUs, number 0 may be two GPUs. CUDA is asked in a process of its own that
has the program's environment and makes no context, so that nothing is taken from any GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

from ergmeter.probes.visible import is_order_assumed

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


def named(
    environment: Mapping[str, str], gpus: Sequence[tuple[str, str]], *, wait_s: float = ANSWER_S
) -> Mapping[str, str] | None:
    """The environment with the GPUs of its list by UUID, where CUDA may count otherwise than along
    the bus; None where it may and can't be asked. `gpus` has UUID and name of every GPU here."""
    if not is_order_assumed(environment, {name for _, name in gpus}):
        return environment
    asked = cuda_uuids(environment, wait_s=wait_s)
    if not asked or not {uuid for uuid, _ in gpus}.issuperset(asked):
        return None
    return {**environment, "CUDA_VISIBLE_DEVICES": ",".join(asked)}


def cuda_uuids(environment: Mapping[str, str], *, wait_s: float = ANSWER_S) -> list[str]:
    """The GPUs that a program with this environment sees, in its order; none if CUDA can't say."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _ASK],
            env=dict(environment), capture_output=True, text=True, timeout=wait_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []
