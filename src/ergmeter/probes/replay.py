"""What would a run on that GPU have recorded? Plays a recording of a real one, on any machine.

The trap: handing over what lies ahead. A sample is given once its moment has come, and dated on
this machine's clock; what a recording holds, and how its rows become samples, is in `recording`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.ports import ProbeRequest
from ergmeter.probes.recording import (
    PROBE,
    recorded_device,
    recorded_phases,
    recorded_samples,
    recorded_steps,
)
from ergmeter.records import Device, Mark, Sample

__all__ = [
    "ReplayProbe",
    "recorded_device",
    "recorded_phases",
    "recorded_samples",
    "recorded_steps",
]

PERIOD_S = 0.1


class ReplayProbe:
    """Plays a recording from the moment it is made; at speed 1, as fast as it was recorded.

    At another speed time shrinks and the values stay: joules no longer are watts times seconds.
    """

    name = PROBE

    def __init__(self, request: ProbeRequest) -> None:
        options = request.options
        if "path" not in options:
            raise NotMeasurable('no recording to replay: give the option {"path": its folder}')
        path = Path(options["path"])
        if not path.exists():
            raise NotMeasurable(f"no recording at {path}: give the folder of one as option path")
        self.period_s = float(options.get("period_s", PERIOD_S))
        self._speed = float(options.get("speed", 1.0))
        if not (math.isfinite(self._speed) and self._speed > 0):
            raise UsageError(f"a replay's speed must be a number above 0, not {self._speed:g}")
        device = recorded_device(path)
        facts = {**device.facts, "speed": self._speed}
        self.devices: Sequence[Device] = (replace(device, facts=facts),)
        self._samples = recorded_samples(path, hide=options.get("hide", ()))
        self._next = 0
        self._start_ns = time.monotonic_ns()

    def read(self) -> list[Sample | Mark]:
        """Give the samples that have come due since the last read; none when it is over."""
        reached_ns = (time.monotonic_ns() - self._start_ns) * self._speed
        due: list[Sample | Mark] = []
        while self._next < len(self._samples) and self._samples[self._next].t_ns <= reached_ns:
            sample = self._samples[self._next]
            offset_ns = round(sample.t_ns / self._speed)
            due.append(replace(sample, t_ns=self._start_ns + offset_ns))
            self._next += 1
        return due

    def close(self) -> None:
        """Let the recording go."""
        self._samples = []
