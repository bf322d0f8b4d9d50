"""What `NvmlProbe` does where a GPU does not answer everything, or not every time."""

from __future__ import annotations

import time

import pynvml
import pytest

from tests.nvml.library import Fault, Gpu, Library
from tests.unit.probes.scripted import STEP, Open, counters, gauges, joules, marks


def test_without_the_instant_field_the_draw_is_read_and_called_so(
    opened: Open, library: Library
) -> None:
    probe = opened(Gpu(power_w=STEP.power_w, no_instant=True))
    assert probe.devices[0].facts["power_field"] == "draw"
    library.stand_at(4.3)
    (sample,) = gauges(probe.read())
    assert sample.power_w == pytest.approx(0.7 * 80 + 0.3 * 600)
    assert sample.power_average_w is None


def test_an_error_that_passes_at_the_start_does_not_cost_the_better_power(opened: Open) -> None:
    once = [Fault(query, pynvml.NVML_ERROR_UNKNOWN, times=1) for query in ("instant", "energy")]
    facts = opened(Gpu(faults=once)).devices[0].facts
    assert (facts["power_field"], facts["has_energy_counter"]) == ("instant", True)


def test_a_field_the_driver_does_not_know_is_not_waited_for(opened: Open) -> None:
    unknown = Fault("instant", pynvml.NVML_ERROR_INVALID_ARGUMENT)
    probe = opened(Gpu(power_w=300, faults=[unknown]))
    assert probe.devices[0].facts["power_field"] == "draw"
    (sample,) = gauges(probe.read())
    assert sample.power_average_w == pytest.approx(300)  # its own field works


def test_the_meaning_of_power_does_not_change_during_a_run(opened: Open, library: Library) -> None:
    recovers = Fault("instant", pynvml.NVML_ERROR_UNKNOWN, until_s=1)
    probe = opened(Gpu(power_w=STEP.power_w, faults=[recovers]))
    library.stand_at(4.3)
    (sample,) = gauges(probe.read())
    assert probe.devices[0].facts["power_field"] == "draw"
    assert sample.power_w == pytest.approx(0.7 * 80 + 0.3 * 600)


def test_without_a_counter_there_is_no_energy_and_the_facts_say_so(opened: Open) -> None:
    probe = opened(Gpu(power_w=300, no_energy=True))
    assert probe.devices[0].facts["has_energy_counter"] is False
    records = probe.read()
    assert counters(records) == []
    assert gauges(records)[0].power_w == pytest.approx(300)


def test_without_power_the_counter_and_the_rest_are_still_read(opened: Open) -> None:
    probe = opened(Gpu(no_power=True, energy_start_j=1234.5, temperature_c=50))
    assert probe.devices[0].facts["power_field"] is None
    records = probe.read()
    (sample,) = gauges(records)
    assert (sample.power_w, sample.power_average_w) == (None, None)
    assert sample.temperature_c == 50
    assert joules(records) == [pytest.approx(1234.5)]


def test_what_is_not_supported_once_is_not_asked_again(opened: Open, library: Library) -> None:
    returns = Fault("clock", pynvml.NVML_ERROR_NOT_SUPPORTED, until_s=1)
    probe = opened(Gpu(faults=[returns]))
    assert gauges(probe.read())[0].clock_hz is None
    library.stand_at(2)
    assert gauges(probe.read())[0].clock_hz is None


def test_power_fields_that_are_not_supported_cost_no_call(opened: Open) -> None:
    probe = opened(Gpu(no_instant=True, cost_s={"fields": 0.3}))

    def is_quick() -> bool:
        before_s = time.monotonic()
        probe.read()
        return time.monotonic() - before_s < 0.3

    assert any(is_quick() for _ in range(5))  # one that asks is never


def test_an_error_that_passes_leaves_one_field_empty_for_one_reading(
    opened: Open, library: Library
) -> None:
    hiccups = [
        Fault("instant", pynvml.NVML_ERROR_UNKNOWN, 1, 2),
        Fault("energy", pynvml.NVML_ERROR_TIMEOUT, 3, 4),
        Fault("memory", pynvml.NVML_ERROR_UNKNOWN, 5, 6),
    ]
    probe = opened(Gpu(power_w=300, memory_bytes=7, temperature_c=41, faults=hiccups))
    empty = {}
    for t_s in range(7):
        library.stand_at(t_s)
        records = probe.read()
        (sample,) = gauges(records)
        assert sample.power_average_w == pytest.approx(300)
        assert sample.temperature_c == 41
        assert marks(records) == []
        found = {"power": sample.power_w, "memory": sample.memory_bytes, "energy": joules(records)}
        empty[t_s] = [name for name, value in found.items() if value in (None, [])]
    assert empty == {0: [], 1: ["power"], 2: [], 3: ["energy"], 4: [], 5: ["memory"], 6: []}


def test_a_driver_that_knows_throttling_by_its_old_name_is_asked_by_it(opened: Open) -> None:
    old = Fault("events", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    (sample,) = gauges(opened(Gpu(throttle=4, faults=[old])).read())
    assert sample.throttled == 4


def test_a_counter_that_stands_still_is_passed_on_as_it_reads(
    opened: Open, library: Library
) -> None:
    probe = opened(Gpu(power_w=200, energy_start_j=70, frozen_energy=True))
    library.stand_at(9)
    assert joules(probe.read()) == [pytest.approx(70)]


def test_a_counter_that_restarts_is_passed_on_as_it_reads(opened: Open, library: Library) -> None:
    probe = opened(Gpu(power_w=200, energy_start_j=5000, reset_at_s=3))
    library.stand_at(2)
    assert joules(probe.read()) == [pytest.approx(5400)]
    library.stand_at(4)
    assert joules(probe.read()) == [pytest.approx(200)]
