"""How many devices did a run hold, and for how long? What is paid and worn by the hour.

The trap: the devices that were seen for those that were held. A Meter on one of several nodes reads
its own, and a CPU has no rental by the GPU-hour; so a count is what was read of every rank or what
somebody declares, and never 1 for want of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.gauges import ACCELERATORS
from ergmeter.metrics.unseen import need_devices
from ergmeter.units import duration

if TYPE_CHECKING:
    from ergmeter.metrics.evidence import Evidence
    from ergmeter.metrics.window import TrainingWindow
    from ergmeter.records import Window

_S_PER_H = 3600.0


@dataclass(frozen=True, slots=True)
class Held:
    """Device-hours, and in words how many devices for how long."""

    hours: float
    said: str


def device_hours(evidence: Evidence, window: Window | TrainingWindow) -> Held:
    """The devices of a run times the length of a window."""
    devices, how = _devices(evidence)
    said = f"{devices} devices ({how})" if devices > 1 else f"1 device ({how})"
    return Held(devices * window.duration_s / _S_PER_H, f"{said} x {duration(window.duration_s)}")


def _devices(evidence: Evidence) -> tuple[int, str]:
    if evidence.has_company:
        raise NotMeasurable(
            "another training of the same command ran at the same time: device hours are of both;"
            " measure each in a command of its own"
        )
    declared = evidence.settings.num_devices
    if declared is not None:
        return declared, "as given"
    gpus = evidence.devices("gpu")
    if not gpus:
        why = evidence.why_no_device("accelerator", *ACCELERATORS)
        raise NotMeasurable(f"{why}: --num-devices gives their number")
    need_devices(evidence)
    return len(gpus), "seen in use"
