"""How many bytes a second does the memory move? By copying, by reading, and by a triad.

The trap: a cache. What fits in one is many times as fast, so what is gone through each time is at
least four times the last-level caches together: of what was there the last time, nothing is left
when it is needed again. (STREAM asks as much of each array, which takes three times the memory.)
Bytes are counted as STREAM counts them, https://www.cs.virginia.edu/stream/ref.html: those that the
program reads and writes. A CPU that first fetches the line it will write moves more than that, and
its copy and triad read lower for it.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from ergmeter.errors import NotMeasurable
from ergmeter.workloads.calibrate.sustained import RepeatedWork, sustained

if TYPE_CHECKING:
    from ergmeter.hardware.calibration import CalibratedRate
    from ergmeter.workloads.calibrate.sensors import Watch
    from ergmeter.workloads.calibrate.sustained import TrialDurations, Work

PATTERNS = ("copy", "read", "triad")
_CACHES = 4
_WANTED_BYTES = {"cpu": 384 << 20, "cuda": 6 << 30}
_LEAST_BYTES = 96 << 20  # below which launching it, and small caches unknown to us, would show
_FREE_SHARE = 4  # a quarter of what is free, so that nobody is pushed out
_FP32_BYTES = 4
_CPU_CACHES = Path("/sys/devices/system/cpu")


class MemoryStreams:
    """Memory of a device to go through, taken once for all patterns."""

    def __init__(self, device: torch.device, size_bytes: int | None = None) -> None:
        self._device = device
        self._size_bytes = size_bytes

    def bandwidth(
        self, pattern: str, pace: TrialDurations, *, watch: Watch | None = None
    ) -> CalibratedRate:
        """Bytes per second of one pattern, held for a window."""
        try:
            return sustained(
                self.task(pattern),
                self._device,
                warmup_s=pace.stream_warmup_s,
                window_s=pace.stream_window_s,
                block_s=pace.block_s,
                watch=watch,
            )
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise NotMeasurable(f"torch refuses: {reason}") from error

    def task(self, pattern: str) -> RepeatedWork:
        """One pass through all of the memory."""
        arrays = {"read": 1, "copy": 2, "triad": 3}[pattern]
        size = len(self._memory) // arrays
        a, b, c = (self._memory[i * size : (i + 1) * size] for i in (0, arrays // 2, arrays - 1))
        works: dict[str, Work] = {
            "read": a.sum,
            "copy": lambda: b.copy_(a),
            "triad": lambda: torch.add(a, c, alpha=3.0, out=b),
        }
        each_bytes = size * _FP32_BYTES
        of = f"{arrays}x{each_bytes / 2**20:.0f} MiB"
        return RepeatedWork(works[pattern], arrays * each_bytes, "B/s", of)

    @cached_property
    def _memory(self) -> torch.Tensor:
        """Normal numbers, the same block of them again and again: drawing each takes seconds."""
        size = (self._size_bytes or _size_bytes(self._device)) // _FP32_BYTES
        block = torch.randn(min(size, 1 << 20), device=self._device)
        return block.repeat(size // len(block))


def _size_bytes(device: torch.device) -> int:
    """How much to go through; NotMeasurable where there is too little to leave the caches."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        cache = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    else:
        free, cache = psutil.virtual_memory().available, last_level_bytes(_CPU_CACHES)
    least = max(_LEAST_BYTES, _CACHES * cache)
    size = min(max(_WANTED_BYTES[device.type], least), free // _FREE_SHARE)
    if size < least:
        raise NotMeasurable(
            f"{least / 2**20:.0f} MiB are needed to leave {cache / 2**20:.0f} MiB of cache behind,"
            f" and a quarter of what is free is {free / _FREE_SHARE / 2**20:.0f} MiB"
        )
    return size


def last_level_bytes(cpus: Path) -> int:
    """The last-level caches of all CPUs together, by sysfs; 0 where it does not say."""
    found: dict[tuple[int, str], int] = {}
    for cache in cpus.glob("cpu[0-9]*/cache/index*"):
        try:
            level = int((cache / "level").read_text())
            shared = (cache / "shared_cpu_list").read_text().strip()
            size = re.fullmatch(r"(\d+)([KM]?)", (cache / "size").read_text().strip())
        except (OSError, ValueError):
            continue
        if size:
            found[level, shared] = int(size[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[size[2]]
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last)
