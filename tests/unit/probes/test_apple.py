"""What the Apple probe makes of `macmon pipe`.

The lines follow macmon's documented output (its readme, 2025 and 2026); a script prints them in the
tool's place. No Mac has been read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ergmeter.errors import NotMeasurable
from ergmeter.ports import Probe, ProbeRequest
from ergmeter.probes import apple, stream
from ergmeter.probes.apple import AppleProbe
from tests.runs import even_steps, reading, run_of
from tests.unit.probes.tools import gathered, is_running, tool

REPORT: dict[str, Any] = {
    "timestamp": "2026-02-24T20:38:15.427569+00:00",
    "temp": {"cpu_temp_avg": 43.7, "gpu_temp_avg": 36.9},
    "memory": {"ram_total": 25769803776, "ram_usage": 20985479168},
    "cpu_active_ratio": 0.092,
    "gpu_freq_mhz": 1398,
    "gpu_scaled_ratio": 0.4,
    "gpu_active_ratio": 0.9,
    "cpu_power": 4.5,
    "gpu_power": 20.0,
    "ane_power": 0.0,
    "all_power": 24.5,
    "sys_power": 38.0,
    "ram_power": 1.5,
    "gpu_ram_power": 0.2,
    "soc": {"mac_model": "Mac15,6", "chip_name": "Apple M3 Pro", "gpu_cores": 14},
}

Open = Callable[..., AppleProbe]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    probes: list[AppleProbe] = []

    def probe(*reports: dict[str, Any], ending: str = "", **options: Any) -> AppleProbe:
        lines = [json.dumps(report) for report in reports]
        options["tool"] = str(tool(tmp_path, "macmon", lines, ending=ending))
        probes.append(AppleProbe(ProbeRequest(1, "/", options=options)))
        return probes[-1]

    yield probe
    for one in probes:
        one.close()


def test_each_part_is_a_device_and_the_whole_machine_is_none_of_them(opened: Open) -> None:
    probe = opened(REPORT)
    as_asked: Probe = probe
    assert as_asked.name == "apple"
    assert [(device.kind, device.name) for device in probe.devices] == [
        ("gpu", "Apple M3 Pro"),  # the name that the table of peaks has
        ("cpu", "Apple M3 Pro CPU"),
        ("dram", "Apple M3 Pro memory"),
        ("module", "Apple M3 Pro, the whole machine"),
    ]
    assert probe.devices[0].facts["scope"] == "the GPU's rails, without memory"
    gpu, cpu, memory, machine = gathered(probe.read, 4)
    assert (gpu.power_w, cpu.power_w, memory.power_w, machine.power_w) == (20.0, 4.5, 1.5, 38.0)
    assert (gpu.busy_frac, gpu.clock_hz, gpu.temperature_c) == (0.9, 1398e6, 36.9)
    assert (cpu.busy_frac, cpu.clock_hz, cpu.temperature_c) == (0.092, None, 43.7)
    assert (memory.busy_frac, memory.temperature_c) == (None, None)


def test_the_tool_is_called_for_a_stream_at_the_period(opened: Open, tmp_path: Path) -> None:
    opened(REPORT, period_s=0.25)
    assert (tmp_path / "called_with").read_text() == "pipe --soc-info -i 250\n"


def test_a_reading_is_dated_to_the_middle_of_its_interval(opened: Open) -> None:
    short, long = (opened(REPORT, period_s=s) for s in (0.5, 60.0))
    came_first, came_second = (gathered(probe.read, 4)[0] for probe in (short, long))
    # The second line came after the first, and its middle lies 29.75 s further back.
    assert came_second.t_ns < came_first.t_ns


def test_what_a_mac_has_no_sensor_for_is_no_device(opened: Open) -> None:
    probe = opened({**REPORT, "ram_power": 0.0, "sys_power": 0.0})
    assert [device.kind for device in probe.devices] == ["gpu", "cpu"]


def test_an_older_macmon_has_power_and_no_share_of_time(opened: Open) -> None:
    older = {k: v for k, v in REPORT.items() if not k.startswith(("gpu_freq", "gpu_active"))}
    older["gpu_usage"] = [1398, 0.4]  # of the top frequency, which is no share of time
    gpu, *_ = gathered(opened(older).read, 4)
    assert (gpu.power_w, gpu.busy_frac) == (20.0, None)


def test_the_energy_of_a_run_is_the_gpus_integrated_and_called_an_average(
    opened: Open, tmp_path: Path
) -> None:
    probe = opened(*[REPORT] * 23, period_s=0.5)
    read = gathered(probe.read, 23 * 4)
    order = {device.id: i for i, device in enumerate(probe.devices)}
    assert len(read) == 23 * 4
    timed = [replace(s, t_ns=(n // 4) * 5 * 10**8) for n, s in enumerate(read)]
    assert [order[s.device] for s in timed[:4]] == [0, 1, 2, 3]
    run = run_of(tmp_path / "run", samples=timed, devices=probe.devices, steps=even_steps(10))
    found = reading(run, "energy.run_j", warmup_steps=0)
    assert found.value == pytest.approx(10 * 20)
    assert found.basis == "derived"
    assert "average" in found.note
    assert reading(run, "energy.cpu_j", warmup_steps=0).value == pytest.approx(45)
    assert reading(run, "energy.dram_j", warmup_steps=0).value == pytest.approx(15)


def test_a_tool_that_refuses_is_quoted(opened: Open) -> None:
    said = "error: unexpected argument '--soc-info' found"
    with pytest.raises(NotMeasurable, match=f"macmon ended with exit code 2: {said}"):
        opened(ending=f'echo "{said}" >&2; exit 2')


def test_a_tool_that_stays_silent_is_not_waited_for_for_ever(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apple, "FIRST_LINE_S", 0.2)
    with pytest.raises(NotMeasurable, match=r"macmon printed nothing in 0\.2 s"):
        opened()


def test_a_tool_that_runs_on_and_prints_no_more_is_not_waited_for_for_ever(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "STOP_S", 0.2)
    probe = opened(REPORT, ending="exec >&- sleep 60")
    gathered(probe.read, 4)
    with pytest.raises(NotMeasurable, match="macmon runs on and prints no more"):
        gathered(probe.read, 1)


def test_a_tool_whose_first_line_is_not_understood_is_ended(opened: Open, tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        opened({**REPORT, "soc": ["M3"]}, ending="while :; do sleep 0.1; done")
    assert not is_running(str(tmp_path / "macmon"))


@pytest.mark.skipif(sys.platform == "darwin", reason="this is a Mac")
def test_another_machine_is_refused_at_once() -> None:
    with pytest.raises(NotMeasurable, match=f"no Apple chip here: this is {sys.platform}"):
        AppleProbe(ProbeRequest(1, "/"))


def test_a_mac_without_the_tool_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotMeasurable, match="brew install macmon"):
        apple._tool("darwin")
