"""GPUs whose power is known, and what to look for in the records that are read from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ergmeter.probes.nvml import NvmlProbe
from ergmeter.records import Mark, Sample
from tests.nvml.library import Gpu

Open = Callable[..., NvmlProbe]

# 100 W at 0 s, rising 20 W each second to 300 W at 10 s, level from there.
RAMP = Gpu(power_w=[(0, 100), (10, 300)])
# 80 W until 4 s, then 600 W at once.
STEP = Gpu(power_w=[(0, 80), (4, 80), (4, 600)])


def gauges(records: Sequence[Sample | Mark]) -> list[Sample]:
    return [r for r in records if isinstance(r, Sample) and r.energy_j is None]


def counters(records: Sequence[Sample | Mark]) -> list[Sample]:
    return [r for r in records if isinstance(r, Sample) and r.energy_j is not None]


def joules(records: Sequence[Sample | Mark]) -> list[float]:
    return [sample.energy_j for sample in counters(records) if sample.energy_j is not None]


def marks(records: Sequence[Sample | Mark]) -> list[Mark]:
    """The marks, without those of GPUs that are not in use or of which that is unknown."""
    found = [r for r in records if isinstance(r, Mark)]
    return [mark for mark in found if mark.name not in ("device_unused", "device_unknown")]


def states(records: Sequence[Sample | Mark]) -> dict[str, str]:
    """Whether the program uses each GPU, as far as that was marked now."""
    found = [r for r in records if isinstance(r, Mark)]
    names = [f"device_{state}" for state in ("used", "unused", "unknown")]
    return {m.detail.partition(" ")[0]: m.name.partition("_")[2] for m in found if m.name in names}


def indices(probe: NvmlProbe) -> list[int]:
    return [device.facts["index"] for device in probe.devices]
