"""What the hardware counters of a GPU say through NVML's GPM, and why they say nothing."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import pynvml
import pytest

from ergmeter.ports import ProbeRequest
from ergmeter.probes import nvml
from ergmeter.probes.nvml import NvmlProbe
from ergmeter.records import ACTIVITY, Mark, Sample
from tests.nvml.library import Fault, Gpu, Library, Script, default_uuid
from tests.unit.probes.scripted import Open, marks

MIB = 1024 * 1024


def activity(records: Sequence[Sample | Mark]) -> list[Sample]:
    return [r for r in records if isinstance(r, Sample) and r.activity_s is not None]


def test_a_reading_is_the_mean_since_the_one_before(opened: Open, library: Library) -> None:
    """The tensor cores work at 20 % up to 4 s and at 80 % from then on."""
    gpu = Gpu(activity={"tensor": [(0, 20), (4, 20), (4, 80)], "sm": 90.0})
    probe = opened(gpu)  # takes the first sample, at 0 s
    library.stand_at(2)
    (first,) = activity(probe.read())
    assert first.tensor_frac == pytest.approx(0.20)
    library.stand_at(5)  # two seconds at 20 and one at 80
    (second,) = activity(probe.read())
    assert second.tensor_frac == pytest.approx((2 * 0.2 + 0.8) / 3)
    assert second.sm_frac == pytest.approx(0.9)
    assert second.device == default_uuid(0)
    probe.close()


def test_a_reading_says_how_long_it_is_the_mean_of(opened: Open, library: Library) -> None:
    probe = opened(Gpu(activity={"sm": 50.0}))
    spans = []
    for stand_at_s in (1, 2, 3):
        library.stand_at(stand_at_s)
        spans += activity(probe.read())
    # Here the probe's own clock runs, and the script's stands: one span ends where the next begins.
    for before, after in pairwise(spans):
        assert after.activity_s is not None
        assert after.t_ns - after.activity_s * 1e9 == pytest.approx(before.t_ns, abs=1)
    assert len(spans) == 3
    probe.close()


def test_shares_are_fractions_and_rates_are_bytes(opened: Open, library: Library) -> None:
    """Each of NVML's figures is another, so that none can stand in another's place."""
    said: dict[str, float] = {
        "graphics": 99, "sm": 93, "occupancy": 41, "tensor": 42, "hmma": 40, "imma": 2, "dfma": 1,
        "dram": 37, "pcie_tx": 5, "pcie_rx": 7, "nvlink_tx": 300, "nvlink_rx": 200,
    }  # fmt: skip
    probe = opened(Gpu(activity=dict(said)))
    library.stand_at(1)
    (sample,) = activity(probe.read())
    assert {name: getattr(sample, name) for name in ACTIVITY} == {
        "graphics_frac": pytest.approx(0.99),
        "sm_frac": pytest.approx(0.93),
        "occupancy_frac": pytest.approx(0.41),
        "tensor_frac": pytest.approx(0.42),
        "tensor_half_frac": pytest.approx(0.40),
        "tensor_int_frac": pytest.approx(0.02),
        "tensor_double_frac": pytest.approx(0.01),
        "dram_frac": pytest.approx(0.37),
        "pcie_sent_bytes_per_s": pytest.approx(5 * MIB),
        "pcie_received_bytes_per_s": pytest.approx(7 * MIB),
        "nvlink_sent_bytes_per_s": pytest.approx(300 * MIB),
        "nvlink_received_bytes_per_s": pytest.approx(200 * MIB),
    }
    probe.close()


def test_a_counter_that_the_gpu_lacks_is_left_out_and_not_zero(
    opened: Open, library: Library
) -> None:
    probe = opened(Gpu(activity={"sm": 50.0}))
    library.stand_at(1)
    (sample,) = activity(probe.read())
    assert (sample.sm_frac, sample.nvlink_sent_bytes_per_s, sample.tensor_frac) == (0.5, None, None)
    probe.close()


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        (Gpu(architecture=pynvml.NVML_DEVICE_ARCH_AMPERE), "Hopper and newer"),
        (Gpu(faults=[Fault("gpm", pynvml.NVML_ERROR_NO_PERMISSION)]), "no permission .*root"),
        (Gpu(faults=[Fault("gpm", pynvml.NVML_ERROR_IN_USE)]), "NVML says"),
    ],
    ids=["older", "not allowed", "somebody else has them"],
)
def test_a_gpu_without_counters_says_why(opened: Open, gpu: Gpu, reason: str) -> None:
    (device,) = opened(gpu).devices
    ((why, columns),) = device.facts["absent"].items()
    assert re.search(reason, why)
    assert columns == list(ACTIVITY)
    # What else it says, it says.
    assert device.facts["power_field"] == "instant"


def test_an_error_on_the_way_makes_the_next_reading_longer_and_loses_nothing(
    opened: Open, library: Library
) -> None:
    fails = Fault("gpm", pynvml.NVML_ERROR_UNKNOWN, 2, 3)
    probe = opened(Gpu(activity={"sm": [(0, 10), (2, 10), (2, 70)]}, faults=[fails]))
    library.stand_at(1)
    assert len(activity(probe.read())) == 1
    library.stand_at(2)
    assert activity(probe.read()) == []
    library.stand_at(3)
    (sample,) = activity(probe.read())
    assert sample.sm_frac == pytest.approx((0.1 + 0.7) / 2)  # from 1 s to 3 s
    probe.close()


def test_counters_that_somebody_takes_away_are_given_up_with_a_mark(
    opened: Open, library: Library
) -> None:
    probe = opened(
        Gpu(activity={"sm": 10.0}, faults=[Fault("gpm", pynvml.NVML_ERROR_IN_USE, from_s=1)])
    )
    library.stand_at(2)
    said = [mark for _ in range(5) for mark in marks(probe.read())]
    assert [mark.name for mark in said] == ["activity_failed"]
    assert said[0].detail.startswith(f"{default_uuid(0)}: NVML says")
    probe.close()


def test_they_are_read_as_often_as_they_may_cost_and_always_at_the_last(
    machine: Callable[..., Script], library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "ACTIVITY_SHARE", 1e-12)  # once read, not due again
    monkeypatch.setattr(nvml, "MOST_APART_FRAC", math.inf)
    monkeypatch.setattr(nvml, "SHORTEST_S", 0.0)
    machine(Gpu(activity={"sm": 10.0}))
    probe = NvmlProbe(ProbeRequest(pid=1, path="/"))
    library.stand_at(1)
    assert len(activity(probe.read())) == 1
    library.stand_at(2)
    assert activity(probe.read()) == []
    library.stand_at(3)
    assert len(activity(probe.read_last())) == 1
    probe.close()


def test_a_short_run_has_readings_however_dear_they_are(
    machine: Callable[..., Script], library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A twentieth of the run so far apart: the run is young, so the next one is due at once."""
    monkeypatch.setattr(nvml, "ACTIVITY_SHARE", 1e-12)
    monkeypatch.setattr(nvml, "ACTIVITY_PERIOD_S", 0.0)
    monkeypatch.setattr(nvml, "SHORTEST_S", 0.0)
    machine(Gpu(activity={"sm": 10.0}))
    probe = NvmlProbe(ProbeRequest(pid=1, path="/"))
    opened_s = time.monotonic()
    library.stand_at(1)
    assert len(activity(probe.read())) == 1
    time.sleep(0.11 * (time.monotonic() - opened_s) + 0.05)
    library.stand_at(2)
    assert len(activity(probe.read())) == 1
    probe.close()


def test_two_readings_right_after_each_other_are_one(
    machine: Callable[..., Script], library: Library
) -> None:
    machine(Gpu(activity={"sm": 10.0}))
    probe = NvmlProbe(ProbeRequest(pid=1, path="/"))
    library.stand_at(1)
    assert activity(probe.read()) == []  # the first sample was taken a moment ago, at the opening
    probe.close()
