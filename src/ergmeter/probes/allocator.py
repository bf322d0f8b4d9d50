"""What does this program's own allocator hold on the device? Asked of torch, if it is there.

Two pitfalls. torch answers 0 for a device it has not touched, which is no measurement. And asking
torch which GPUs there are initialises CUDA: a program on the CPU would get a context on a GPU, and
one that forks could not use a GPU in its children. So nothing is asked before the program itself
has initialised CUDA, and torch is never imported for it. The metrics are the allocator's own books:
reading them does not synchronise the device.

Every rank calls its device cuda:0 or thereabouts, so the host and the process are part of the id.
What is reserved is told as its high-water mark, like what is allocated: between two readings the
allocator may take memory and give it back. So are the free parts of blocks that are in use, which
nobody else can have: of what is reserved and not allocated, they are what fragmentation costs. The
marks are never reset here: they are the program's own.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from typing import TYPE_CHECKING, Any

from ergmeter.errors import NotMeasurable
from ergmeter.records import Device, Sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.ports import ProbeRequest


NOT_IN_USE = "torch uses no GPU in this process; its CPU allocator keeps no books"


class AllocatorProbe:
    """Reads torch's caching allocator for every CUDA device of this process."""

    name = "allocator"

    def __init__(self, request: ProbeRequest) -> None:
        torch = sys.modules.get("torch")
        if torch is None:
            raise NotMeasurable("torch is not loaded in this process; import it before the Meter")
        if not torch.cuda.is_initialized():
            raise NotMeasurable(NOT_IN_USE)
        self._cuda: Any = torch.cuda
        self.period_s = float(request.options.get("period_s", 0.5))
        self.devices = tuple(self._device(index) for index in range(torch.cuda.device_count()))

    def _device(self, index: int) -> Device:
        facts = {"uuid": f"GPU-{getattr(self._cuda.get_device_properties(index), 'uuid', '')}"}
        name = f"torch allocator on {self._cuda.get_device_name(index)}"
        whose = f"torch:{platform.node()}:{os.getpid()}:cuda:{index}"
        return Device(whose, "allocator", name, self.name, facts)

    def read(self) -> Sequence[Sample]:
        """The books of every device that this process has put something on."""
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

    def close(self) -> None:
        """Nothing is held."""
