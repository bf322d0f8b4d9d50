"""When `NvmlProbe` refuses to start, with which reason and cure, and what it lets go of."""

from __future__ import annotations

import os
import subprocess
import sys

import pynvml
import pytest

from ergmeter.errors import NotMeasurable
from tests.nvml.library import Gpu, Library
from tests.unit.probes.scripted import RAMP, Open


@pytest.mark.parametrize(
    ("error", "reason", "cure"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVML library .* no NVIDIA driver", "install it"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "installed but not loaded", "modprobe nvidia"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "no permission", "access to /dev/nvidia"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "differ in version", "reboot"),
        (pynvml.NVML_ERROR_IRQ_ISSUE, "NVML says Interrupt Request Issue", "run `nvidia-smi`"),
        (4321, "NVML says", "run `nvidia-smi`"),
    ],
)
def test_nvml_that_does_not_start_gives_reason_and_cure_on_one_line(
    opened: Open, error: int, reason: str, cure: str
) -> None:
    with pytest.raises(NotMeasurable, match=f"{reason}.*: .*{cure}") as refused:
        opened(RAMP, init_error=error)
    assert "\n" not in str(refused.value)


def test_a_driver_older_than_the_oldest_is_refused_with_its_version(opened: Open) -> None:
    with pytest.raises(NotMeasurable, match=r"418\.226\.00 is older than 450\.80\.02: update"):
        opened(RAMP, driver="418.226.00")


@pytest.mark.parametrize("driver", ["450.80.02", "450.80.2", "450.102.04", "580.65"])
def test_a_driver_as_old_as_the_oldest_or_newer_is_taken(opened: Open, driver: str) -> None:
    assert opened(RAMP, driver=driver).devices[0].facts["driver"] == driver


def test_a_driver_without_gpus_is_refused(opened: Open) -> None:
    with pytest.raises(NotMeasurable, match="shows no GPU: see"):
        opened()


def test_gpus_that_are_all_lost_before_the_start_are_refused(opened: Open) -> None:
    with pytest.raises(NotMeasurable, match=r"no GPU can be read \(index 0: .*GPU is lost\): see"):
        opened(Gpu(lost_at_s=-1))


def test_closing_lets_go_of_nvml_and_closing_twice_is_harmless(
    opened: Open, library: Library
) -> None:
    probe = opened(RAMP)
    probe.close()
    assert library.shut_down() == 0
    probe.close()


@pytest.mark.parametrize("value", ["-1", "MIG-5c21"])
def test_a_probe_that_refuses_does_not_keep_nvml_open(
    opened: Open, library: Library, value: str
) -> None:
    with pytest.raises(NotMeasurable):
        opened(RAMP, environment={"CUDA_VISIBLE_DEVICES": value})
    assert library.shut_down() == 0


OPEN = """
from ergmeter.ports import ProbeRequest
from ergmeter.probes.nvml import NvmlProbe
NvmlProbe(ProbeRequest(1, "/"))
"""


def test_without_the_library_the_reason_is_that_there_is_no_driver() -> None:
    clean = {k: v for k, v in os.environ.items() if k not in ("LD_LIBRARY_PATH", "SCRIPTED_NVML")}
    find = "import ctypes; ctypes.CDLL('libnvidia-ml.so.1')"
    if subprocess.run([sys.executable, "-c", find], env=clean, capture_output=True).returncode == 0:
        pytest.skip("this machine has an NVIDIA driver")
    run = subprocess.run([sys.executable, "-c", OPEN], env=clean, capture_output=True, text=True)
    assert "NotMeasurable: no NVML library (libnvidia-ml.so.1), so no NVIDIA driver" in run.stderr
