"""Scripted GPUs for the probes' tests, behind NVIDIA's own binding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest

from ergmeter.ports import ProbeRequest
from ergmeter.probes import nvml
from ergmeter.probes.nvml import NvmlProbe
from tests.nvml.library import Gpu, Library, Script
from tests.unit.probes.scripted import Open


@pytest.fixture
def machine(library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Script]]:
    """Play a script to this process; its clock stands at 0 s unless told otherwise."""
    library.load()
    library.shut_down()

    def play(*gpus: Gpu, **system: object) -> Script:
        script = Script(gpus, **{"stand_at_s": 0.0, "in_use": False, **system})  # type: ignore[arg-type]
        monkeypatch.setenv("SCRIPTED_NVML", str(library.written(script)))
        return script

    yield play
    library.shut_down()


@pytest.fixture
def opened(machine: Callable[..., Script], monkeypatch: pytest.MonkeyPatch) -> Open:
    # Here the script's clock stands still between readings: the counter is due at each of them.
    monkeypatch.setattr(nvml, "COUNTER_SHARE", math.inf)
    monkeypatch.setattr(nvml, "SLOW_PERIOD_S", 0.0)
    monkeypatch.setattr(nvml, "ACTIVITY_PERIOD_S", 0.0)
    monkeypatch.setattr(nvml, "ACTIVITY_SHARE", math.inf)
    monkeypatch.setattr(nvml, "SHORTEST_S", 0.0)

    def probe(
        *gpus: Gpu, environment: dict[str, str] | None = None, pid: int = 1, **system: object
    ) -> NvmlProbe:
        machine(*gpus, **system)
        return NvmlProbe(ProbeRequest(pid=pid, path="/", environment=environment or {}))

    return probe
