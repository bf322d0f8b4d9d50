"""Reads torch's caching allocator: bytes allocated and reserved by this process on each GPU.

torch returns 0 for a device it has not used, which is not a measurement. Listing GPUs through torch
initialises CUDA: a CPU program would get a context on a GPU, and forked children could not use
CUDA. So nothing is read before the program itself has initialised CUDA, and this module never
imports torch. The values are the allocator's own statistics: reading them does not synchronise the
device.

Every rank calls its device cuda:0 or similar, so host and process are part of the id. Reserved
bytes are the high-water mark, as allocated bytes are: between two readings the allocator may take
memory and return it. The free parts of blocks in use (split bytes) are what fragmentation costs.
The peaks are never reset here: they belong to the program.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

from ergmeter.errors import NotMeasurable
from ergmeter.ports import DeclaredProbe, ProbeRequest
from ergmeter.records import Device, Sample

NOT_IN_USE = "torch uses no GPU in this process; its CPU allocator has no statistics"


class AllocatorProbe(DeclaredProbe):
    """Reads torch's caching allocator for every CUDA device of this process."""

    name = "allocator"
    kinds = ("allocator",)
    reads = "inside"
    is_default = False  # a Meter inside a program asks for it
    usual_period_s = 0.5

    def __init__(self, request: ProbeRequest) -> None:
        torch = sys.modules.get("torch")
        if torch is None:
            raise NotMeasurable("torch is not loaded in this process; import it before the Meter")
        if not torch.cuda.is_initialized():
            raise NotMeasurable(NOT_IN_USE)
        self._cuda: Any = torch.cuda
        super().__init__(request)
        self.devices = tuple(self._device(index) for index in range(torch.cuda.device_count()))

    def _device(self, index: int) -> Device:
        facts = {"uuid": f"GPU-{getattr(self._cuda.get_device_properties(index), 'uuid', '')}"}
        name = f"torch allocator on {self._cuda.get_device_name(index)}"
        whose = f"torch:{platform.node()}:{os.getpid()}:cuda:{index}"
        return Device(whose, "allocator", name, self.name, facts)

    def read(self) -> Sequence[Sample]:
        """The statistics of every device that this process has used."""
        if not self._cuda.is_initialized():
            return []
        samples = []
        for index, device in enumerate(self.devices):
            books = self._cuda.memory_stats(index)
            if books.get("reserved_bytes.all.peak"):
                samples.append(
                    Sample(
                        time.monotonic_ns(),
                        device.id,
                        allocated_bytes=books["allocated_bytes.all.current"],
                        allocated_peak_bytes=books["allocated_bytes.all.peak"],
                        reserved_bytes=books["reserved_bytes.all.peak"],
                        split_bytes=books.get("inactive_split_bytes.all.peak"),
                    )
                )
        return samples
