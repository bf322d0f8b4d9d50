"""What `NvmlProbe` says of a GPU that is lost, and what it does not take for one."""

from __future__ import annotations

import time
from collections.abc import Callable

import pynvml
import pytest

from ergmeter.errors import NotMeasurable
from ergmeter.ports import ProbeRequest
from ergmeter.probes import nvml
from ergmeter.probes.nvml import NvmlProbe
from ergmeter.records import Mark, Sample
from tests.nvml.library import Fault, Gpu, Library, Script, default_uuid
from tests.unit.probes.scripted import RAMP, Open, counters, gauges, indices, marks


def test_a_lost_gpu_gives_one_mark_and_the_other_goes_on(opened: Open, library: Library) -> None:
    probe = opened(RAMP, Gpu(power_w=500, lost_at_s=3))
    library.stand_at(2)
    assert marks(probe.read()) == []
    library.stand_at(4)
    records = probe.read()
    (mark,) = marks(records)
    assert mark.name == "device_lost"
    assert mark.detail == f"{default_uuid(1)} (NVIDIA H200, index 1): NVML says GPU is lost"
    assert {r.device for r in records if isinstance(r, Sample)} == {default_uuid(0)}
    assert gauges(records)[0].power_w == pytest.approx(180)
    library.stand_at(5)
    records = probe.read()
    assert marks(records) == []
    assert len(counters(records)) == 1


def test_a_gpu_that_is_lost_is_asked_nothing_more(opened: Open, library: Library) -> None:
    def is_quick() -> bool:
        library.stand_at(0)
        probe = opened(RAMP, Gpu(lost_at_s=3, cost_s={"energy": 0.3}))
        library.stand_at(4)
        before_s = time.monotonic()
        assert len(marks(probe.read())) == 1
        return time.monotonic() - before_s < 0.3

    assert any(is_quick() for _ in range(5))  # one that asks is never


def test_an_old_error_does_not_make_a_gpu_lost_later(opened: Open, library: Library) -> None:
    faults = [
        Fault("memory", pynvml.NVML_ERROR_UNKNOWN, 1, 2),
        Fault("all", pynvml.NVML_ERROR_NOT_SUPPORTED, 2),
    ]
    probe = opened(Gpu(faults=faults))
    for t_s in (1, 2):
        library.stand_at(t_s)
        assert marks(probe.read()) == []


def test_a_gpu_that_answers_nothing_is_lost_whatever_nvml_calls_it(
    opened: Open, library: Library
) -> None:
    probe = opened(RAMP, Gpu(no_energy=True, faults=[Fault("all", pynvml.NVML_ERROR_UNKNOWN, 3)]))
    library.stand_at(4)
    for _ in range(nvml.SILENT_READINGS - 1):
        assert marks(probe.read()) == []
    (mark,) = marks(probe.read())
    assert mark.detail.startswith(default_uuid(1))
    assert mark.detail.endswith("NVML says Unknown Error")
    assert marks(probe.read()) == []


def test_an_error_on_a_reading_of_power_alone_does_not_lose_the_gpu(
    machine: Callable[..., Script], library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "COUNTER_SHARE", 1e-12)  # the counter is not due again
    monkeypatch.setattr(nvml, "SLOW_PERIOD_S", 3600.0)
    machine(Gpu(power_w=300, faults=[Fault("fields", pynvml.NVML_ERROR_UNKNOWN, 1, 2)]))
    probe = NvmlProbe(ProbeRequest(pid=1, path="/"))
    probe.read()
    for _ in range(3):  # never as many in a row as it takes, but more of them altogether
        library.stand_at(1.5)
        for _ in range(nvml.SILENT_READINGS - 1):
            assert list(probe.read()) == []
        library.stand_at(2.5)
        (sample,) = probe.read()
        assert isinstance(sample, Sample)
        assert sample.power_w == pytest.approx(300)
    probe.close()


def test_a_gpu_that_supports_nothing_is_not_lost_and_gives_no_sample(
    opened: Open, library: Library
) -> None:
    probe = opened(Gpu(faults=[Fault("all", pynvml.NVML_ERROR_NOT_SUPPORTED, 1)]))
    library.stand_at(2)
    (said,) = probe.read()
    assert isinstance(said, Mark)
    assert said.name == "device_unknown"  # nobody can say who uses it
    assert list(probe.read()) == []


def test_when_no_gpu_is_left_the_loss_is_marked_and_then_the_probe_gives_up(
    opened: Open, library: Library
) -> None:
    probe = opened(Gpu(lost_at_s=1), Gpu(lost_at_s=1))
    library.stand_at(2)
    assert [mark.name for mark in marks(probe.read())] == ["device_lost", "device_lost"]
    with pytest.raises(NotMeasurable, match=rf"no GPU is left.*{default_uuid(1)}.*GPU is lost"):
        probe.read()


def test_a_gpu_lost_before_the_start_is_marked_and_the_other_is_read(opened: Open) -> None:
    probe = opened(Gpu(lost_at_s=-1), RAMP)
    assert indices(probe) == [1]
    records = probe.read()
    assert [mark.detail for mark in marks(records)] == ["index 0: NVML says GPU is lost"]
    assert gauges(records)[0].power_w == pytest.approx(100)
    assert marks(probe.read()) == []


def test_a_gpu_lost_while_it_is_opened_is_marked_with_what_nvml_said(opened: Open) -> None:
    probe = opened(RAMP, Gpu(faults=[Fault("energy", pynvml.NVML_ERROR_GPU_IS_LOST)]))
    (mark,) = marks(probe.read())
    assert mark.detail.endswith("index 1): NVML says GPU is lost")
