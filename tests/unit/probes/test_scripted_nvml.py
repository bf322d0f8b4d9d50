"""The library that plays the GPUs in these tests: that it keeps to its script."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time

import pynvml
import pytest

from tests.nvml.library import Gpu, Library
from tests.unit.probes.scripted import Open, joules


def test_the_scripts_counter_runs_through_the_epoch(opened: Open, library: Library) -> None:
    probe = opened(Gpu(power_w=[(0, 200), (1, 400)], energy_start_j=1000))
    library.stand_at(-2)
    assert joules(probe.read()) == [pytest.approx(1000 - 2 * 200)]
    library.stand_at(1)
    assert joules(probe.read()) == [pytest.approx(1000 + 300)]


def test_a_script_with_a_mistake_is_refused_with_its_line(
    library: Library, tmp_path_factory: pytest.TempPathFactory
) -> None:
    script = tmp_path_factory.mktemp("script") / "wrong.txt"
    script.write_text("gpu\ncurve power 0 100 1\n")
    code = f"import ctypes; print(ctypes.CDLL({str(library.path)!r}).nvmlInit_v2())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SCRIPTED_NVML": str(script)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == [str(pynvml.NVML_ERROR_UNKNOWN)]
    assert "line 2: not understood" in run.stderr


def test_a_hanging_power_query_blocks_for_as_long_as_the_script_says(
    opened: Open, library: Library
) -> None:
    probe = opened(Gpu(hang_s=(1.0, 0.2)))
    library.stand_at(1.1)
    before_s = time.monotonic()
    probe.read()
    assert time.monotonic() - before_s >= 0.09


def test_every_symbol_the_peers_need_is_there(library: Library) -> None:
    needed = """nvmlInitWithFlags nvmlShutdown nvmlErrorString nvmlDeviceGetCount_v2
        nvmlDeviceGetHandleByIndex_v2 nvmlDeviceGetHandleByUUID nvmlDeviceGetHandleByPciBusId_v2
        nvmlDeviceGetName nvmlDeviceGetUUID nvmlDeviceGetPciInfo_v3 nvmlDeviceGetArchitecture
        nvmlDeviceGetBrand nvmlDeviceGetPowerUsage nvmlDeviceGetTotalEnergyConsumption
        nvmlDeviceGetFieldValues nvmlDeviceGetPowerManagementLimit nvmlDeviceGetC2cModeInfoV
        nvmlDeviceGetPowerManagementDefaultLimit nvmlDeviceGetPowerManagementLimitConstraints
        nvmlDeviceGetEnforcedPowerLimit nvmlDeviceGetPersistenceMode nvmlDeviceGetMemoryInfo
        nvmlDeviceGetMemoryInfo_v2 nvmlDeviceGetUtilizationRates nvmlDeviceGetTemperature
        nvmlDeviceGetTemperatureV nvmlDeviceGetClockInfo nvmlDeviceGetComputeMode
        nvmlDeviceGetComputeRunningProcesses_v3 nvmlDeviceGetGraphicsRunningProcesses_v3"""
    loaded = ctypes.CDLL(str(library.path))
    assert [name for name in needed.split() if not hasattr(loaded, name)] == []
