"""What `NvmlProbe` reads, and when: power, counter and gauges of GPUs whose power is known.

The library's clock stands where a test puts it, so every expected value is worked out by hand.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from ergmeter import doctor
from ergmeter.ports import Probe, ProbeRequest
from ergmeter.probes import nvml
from ergmeter.probes.nvml import NvmlProbe
from ergmeter.records import Sample
from tests.nvml.library import Gpu, Library, Script, default_uuid
from tests.unit.probes.scripted import RAMP, STEP, Open, counters, gauges, joules

NS_PER_MS = 1_000_000


def test_it_is_a_probe_named_nvml_that_reads_ten_times_a_second(opened: Open) -> None:
    probe = opened(RAMP)
    assert isinstance(probe, Probe)
    assert (probe.name, probe.period_s) == ("nvml", 0.1)


def test_its_period_can_be_asked_for(machine: Callable[..., Script]) -> None:
    machine(RAMP)
    assert NvmlProbe(ProbeRequest(1, "/", options={"period_s": 0.5})).period_s == 0.5


def test_two_gpus_with_different_curves_are_read_each_at_its_own_power(
    opened: Open, library: Library
) -> None:
    probe = opened(RAMP, STEP)
    library.stand_at(2.5)
    first, second = gauges(probe.read())
    assert (first.device, second.device) == (default_uuid(0), default_uuid(1))
    assert first.power_w == pytest.approx(150)
    assert second.power_w == pytest.approx(80)
    library.stand_at(6.0)
    first, second = gauges(probe.read())
    assert first.power_w == pytest.approx(220)
    assert second.power_w == pytest.approx(600)


def test_the_counter_difference_is_the_integral_of_the_curve(
    opened: Open, library: Library
) -> None:
    probe = opened(RAMP, STEP)
    library.stand_at(2.0)
    start = joules(probe.read())
    library.stand_at(6.0)
    end = joules(probe.read())
    # The ramp: from 140 W to 220 W in 4 s. The step: 2 s at 80 W and 2 s at 600 W.
    assert end[0] - start[0] == pytest.approx((140 + 220) / 2 * 4)
    assert end[1] - start[1] == pytest.approx(2 * 80 + 2 * 600)


def test_power_average_is_the_sensors_own_second_and_power_is_not(
    opened: Open, library: Library
) -> None:
    probe = opened(STEP)
    library.stand_at(4.3)
    (sample,) = gauges(probe.read())
    assert sample.power_w == pytest.approx(600)
    assert sample.power_average_w == pytest.approx(0.7 * 80 + 0.3 * 600)


def test_a_value_is_the_one_of_the_last_refresh(opened: Open, library: Library) -> None:
    probe = opened(Gpu(power_w=RAMP.power_w, energy_start_j=40))
    library.stand_at(2.59)
    records = probe.read()
    assert gauges(records)[0].power_w == pytest.approx(150)  # as at 2.5 s
    assert joules(records) == [pytest.approx(40 + (100 + 150) / 2 * 2.5)]


def test_the_counter_has_a_sample_of_its_own_at_the_middle_of_its_reading(opened: Open) -> None:
    probe = opened(Gpu(energy_read_ms=60), RAMP)
    before_ns = time.monotonic_ns()
    records = probe.read()
    after_ns = time.monotonic_ns()
    slow = counters(records)[0]
    powers = gauges(records)
    assert slow == Sample(slow.t_ns, slow.device, energy_j=slow.energy_j)
    assert before_ns <= powers[0].t_ns < powers[1].t_ns
    # It took at least 60 ms, so its middle is 30 ms from both ends; no power waited for it.
    assert powers[1].t_ns + 30 * NS_PER_MS <= slow.t_ns <= after_ns - 30 * NS_PER_MS


def test_a_power_reading_that_took_long_is_dated_to_its_middle(opened: Open) -> None:
    probe = opened(Gpu(cost_s={"fields": 0.06}))
    before_ns = time.monotonic_ns()
    (sample,) = gauges(probe.read())
    assert sample.t_ns >= before_ns + 30 * NS_PER_MS
    assert sample.t_ns <= time.monotonic_ns() - 30 * NS_PER_MS


def test_the_gauges_come_in_base_units(opened: Open) -> None:
    gpu = Gpu(
        memory_bytes=12_345_678_901,
        busy_frac=0.87,
        clock_hz=1_755e6,
        temperature_c=64,
        throttle=0x24,
    )
    (sample,) = gauges(opened(gpu).read())
    assert sample.memory_bytes == 12_345_678_901
    assert sample.busy_frac == pytest.approx(0.87)
    assert sample.clock_hz == pytest.approx(1_755e6)
    assert sample.temperature_c == 64
    assert sample.throttled == 0x24


def test_a_counter_that_costs_cpu_time_is_read_less_often_but_always_at_the_last(
    machine: Callable[..., Script],
) -> None:
    machine(Gpu(power_w=100))
    probe = NvmlProbe(ProbeRequest(pid=1, path="/"))
    assert len(counters(probe.read())) == 1
    probe._counters_due_s = time.monotonic() + 60  # as after a reading that cost 0.6 s of CPU
    assert counters(probe.read()) == []
    assert len(gauges(probe.read())) == 1
    assert len(counters(probe.read_last())) == 1
    probe.close()


def test_the_doctor_finds_a_counter_that_is_too_costly_for_every_reading(
    machine: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "COUNTER_SHARE", 1e-12)  # once read, it is not due again
    machine(Gpu(power_w=300), stand_at_s=None)
    (finding,) = doctor.examine(["nvml"])
    (reads,) = finding.reads.values()
    assert {"energy", "power", "memory"} <= set(reads)
    assert finding.warnings == []


def test_what_changes_slowly_is_asked_for_less_often_but_always_at_the_last(
    machine: Callable[..., Script],
) -> None:
    machine(Gpu(power_w=100, memory_bytes=5e9, busy_frac=0.5))
    probe = NvmlProbe(ProbeRequest(pid=1, path="/"))
    (first,) = gauges(probe.read())
    assert (first.memory_bytes, first.busy_frac) == (5e9, 0.5)
    (second,) = gauges(probe.read())
    assert (second.power_w, second.memory_bytes, second.busy_frac) == (100, None, None)
    (last,) = gauges(probe.read_last())
    assert last.memory_bytes == 5e9
    probe.close()


OPEN_AND_READ = """
import time
from ergmeter.ports import ProbeRequest
from ergmeter.probes import nvml, usage
from ergmeter.probes.nvml import NvmlProbe
probe = NvmlProbe(ProbeRequest(1, "/"))
def energy():
    return next((r.t_ns, r.energy_j) for r in probe.read() if r.energy_j is not None)
t0, e0 = energy()
time.sleep(0.5)
t1, e1 = energy()
print(t0, t1, e0, e1)
"""


def test_another_process_sees_the_same_curve_on_the_same_clock(library: Library) -> None:
    epoch_ns = time.monotonic_ns() - 5_000_000_000
    gpu = Gpu(power_w=[(0, 100), (100, 1100)], refresh_ms=0)
    environment = library.environment(Script([gpu], epoch_ns=epoch_ns))
    run = subprocess.run(
        [sys.executable, "-c", OPEN_AND_READ],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    t0, t1, e0, e1 = map(float, run.stdout.split())
    start_s, end_s = (t0 - epoch_ns) / 1e9, (t1 - epoch_ns) / 1e9
    # The area under 100 W + 10 W/s; the clock and the counter are not read at the same moment, and
    # less so on a busy machine. Of another curve, or from when it was loaded on, it is two thirds.
    expected = 100 * (end_s - start_s) + 5 * (end_s**2 - start_s**2)
    assert e1 - e0 == pytest.approx(expected, rel=0.25)
    assert gpu.joules(start_s, end_s) == pytest.approx(expected)


READ_FOR_THREE_SECONDS = """
import time
from ergmeter.ports import ProbeRequest
from ergmeter.probes import nvml, usage
from ergmeter.probes.nvml import NvmlProbe
probe = NvmlProbe(ProbeRequest(1, "/"))
device = probe.devices[0]
mine = []
for _ in range(30):
    mine += [r for r in probe.read() if getattr(r, 'device', None) == device.id]
    time.sleep(probe.period_s)
# The counter is read as often as its cost allows, and always at the end.
mine += [r for r in probe.read_last() if getattr(r, 'device', None) == device.id]
probe.close()
power = [sample.power_w for sample in mine if sample.power_w is not None]
energy = [(sample.t_ns, sample.energy_j) for sample in mine if sample.energy_j is not None]
(t0, e0), (t1, e1) = energy[0], energy[-1]
print(sum(power) / len(power), (e1 - e0) / (t1 - t0) * 1e9, device.facts["power_limit_w"])
"""


@pytest.mark.device
def test_a_real_gpus_counter_and_power_agree() -> None:
    clean = {k: v for k, v in os.environ.items() if k != "SCRIPTED_NVML"}
    run = subprocess.run(
        [sys.executable, "-c", READ_FOR_THREE_SECONDS],
        env=clean,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    mean_w, counter_w, limit_w = map(float, run.stdout.split())
    assert 5 < mean_w < 1.2 * limit_w
    # At idle a counter and a sensor have been seen to differ by 1.7 times; a wrong unit is 1000.
    assert counter_w == pytest.approx(mean_w, rel=0.75)
