"""What `AmdProbe` reads, through AMD's own binding, from a library whose answers are known."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ergmeter import doctor
from ergmeter.errors import NotMeasurable
from ergmeter.ports import Probe, ProbeRequest
from ergmeter.probes import amd
from ergmeter.probes.amd import AmdProbe
from ergmeter.probes.usage import PERIOD_S
from ergmeter.records import Mark, Sample
from tests.amd.library import (
    MI300X,
    RESOLUTION_UJ,
    Machine,
    build,
    default_serial,
    default_uuid,
)
from tests.runs import even_steps, reading, run_of

# What GPUs of older kinds lack: an MI210 has no current power and counts no residencies.
MI210 = {
    **{key: value for key, value in MI300X.items() if "thm" not in key},
    "name": "AMD Instinct MI210",
    "current": None,
    "average": 210,
    "ppt": None,
    "prochot": None,
}
MI250X = {**MI210, "name": "AMD Instinct MI250X", "average": 400}
SECOND_DIE = {**MI250X, "average": 0, "energy": 0}

Open = Callable[..., AmdProbe]


@pytest.fixture(scope="module")
def rocm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("rocm"))


@pytest.fixture
def machine(rocm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    file = tmp_path / "gpus.txt"
    monkeypatch.setenv("ROCM_HOME", str(rocm))
    monkeypatch.setenv("SCRIPTED_AMDSMI", str(file))
    monkeypatch.setattr(amd, "KFD", os.devnull)
    return Machine(file)


@pytest.fixture
def opened(machine: Machine) -> Iterator[Open]:
    probes: list[AmdProbe] = []

    def probe(*gpus: dict[str, Any], **environment: str) -> AmdProbe:
        machine.show(*gpus)
        probes.append(AmdProbe(ProbeRequest(os.getpid(), "/", environment)))
        return probes[-1]

    yield probe
    for one in probes:
        one.close()


def samples(records: Sequence[Sample | Mark]) -> list[Sample]:
    return [record for record in records if isinstance(record, Sample)]


def joules(probe: AmdProbe) -> list[float]:
    return [s.energy_j for s in samples(probe.read_last()) if s.energy_j is not None]


def steps(energy_j: float) -> int:
    return round(energy_j / (RESOLUTION_UJ * 1e-6))


def test_power_counter_and_gauges_come_in_base_units(opened: Open) -> None:
    probe = opened(MI300X)
    assert isinstance(probe, Probe)
    gauge, counter = samples(probe.read())
    assert (gauge.device, gauge.power_w) == (default_uuid(0), 600)
    assert gauge.memory_bytes == 100 * 2**30
    assert gauge.busy_frac == pytest.approx(0.97)
    assert gauge.clock_hz == 2.1e9
    assert gauge.temperature_c == 71
    # 65 359 477 124 steps of 15.3 uJ.
    assert counter.energy_j == pytest.approx(1e6, abs=0.1)
    assert counter == Sample(counter.t_ns, default_uuid(0), energy_j=counter.energy_j)


def test_the_device_says_what_it_is(opened: Open) -> None:
    (device,) = opened(MI300X).devices
    assert (device.id, device.kind, device.name) == (default_uuid(0), "gpu", MI300X["name"])
    assert device.facts["power_limit_w"] == pytest.approx(750)
    assert device.facts["memory_total_bytes"] == 192 * 2**30
    assert device.facts["pci_bus_id"] == "0000:05:00.0"
    assert (device.facts["power_field"], device.facts["has_energy_counter"]) == ("instant", True)


def test_between_its_full_readings_only_power_is_asked_for(opened: Open) -> None:
    probe = opened(MI300X)
    probe.read()
    (quick,) = samples(probe.read())
    assert quick == Sample(quick.t_ns, default_uuid(0), power_w=600)
    assert len(samples(probe.read_last())) == 2


def test_current_power_is_read_where_there_is_an_average_too(opened: Open) -> None:
    probe = opened({**MI300X, "average": 420})
    assert samples(probe.read())[0].power_w == 600


def test_an_average_is_read_where_there_is_no_current_power_and_named_so(opened: Open) -> None:
    probe = opened(MI210)
    gauge, _ = samples(probe.read())
    assert gauge.power_w == 210
    assert probe.devices[0].facts["power_field"] == "draw"


def test_what_a_gpu_lacks_is_absent_and_never_a_number(opened: Open) -> None:
    bare = {key: MI300X[key] for key in ("name", "bdf")}
    probe = opened({**bare, "used!": 2})  # the others read 65535, or all bits set
    assert samples(probe.read()) == []
    assert probe.devices[0].facts["power_field"] is None
    assert probe.devices[0].facts["has_energy_counter"] is False
    assert not {"power_limit_w", "memory_total_bytes"} & set(probe.devices[0].facts)


def test_a_counter_of_32_bits_that_wraps_goes_on_growing(machine: Machine, opened: Open) -> None:
    probe = opened({**MI300X, "energy": 2**32 - steps(100)})
    (before,) = joules(probe)
    machine.change(0, energy=steps(150))
    (after,) = joules(probe)
    machine.change(0, energy=steps(200))
    (later,) = joules(probe)
    assert after - before == pytest.approx(250, abs=0.01)
    assert later - after == pytest.approx(50, abs=0.01)


def test_a_counter_that_was_reset_is_not_taken_for_one_that_wrapped(
    machine: Machine, opened: Open
) -> None:
    probe = opened({**MI300X, "energy": steps(1000)})
    (before,) = joules(probe)
    machine.change(0, energy=steps(5))
    assert joules(probe) == [pytest.approx(5, abs=0.01)]
    assert before == pytest.approx(1000, abs=0.01)


@pytest.mark.parametrize(
    ("counts", "bits"),
    [
        ({}, 0),
        ({"ppt": 1001}, 0x4),
        ({"socket_thm": 11}, 0x20),
        ({"prochot": 3, "hbm_thm": 1}, 0x28),
    ],
)
def test_what_it_held_back_for_is_told_in_the_bits_of_nvml(
    machine: Machine, opened: Open, counts: dict[str, int], bits: int
) -> None:
    probe = opened(MI300X)
    assert samples(probe.read())[0].throttled is None
    machine.change(0, **counts)
    assert samples(probe.read_last())[0].throttled == bits


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({}, [0, 1, 2, 3]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "1"}, [3]),
        ({"ROCR_VISIBLE_DEVICES": "3,1"}, [3, 1]),
        ({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": f"GPU-{default_serial(2)}"}, [2]),
        ({"ROCR_VISIBLE_DEVICES": "1,9,2"}, [1]),
    ],
)
def test_the_gpus_are_those_that_hip_shows_to_the_program(
    opened: Open, environment: dict[str, str], seen: list[int]
) -> None:
    probe = opened(*({**MI300X, "current": 100 + i} for i in range(4)), **environment)
    powers = [s.power_w for s in samples(probe.read()) if s.power_w is not None]
    assert powers == [100 + index for index in seen]


def test_indices_count_in_the_order_of_hip_where_the_library_tells_it(opened: Open) -> None:
    gpus = [{**MI300X, "current": 100 + i, "hip": 2 - i} for i in range(3)]
    probe = opened(*gpus, HIP_VISIBLE_DEVICES="0")
    assert samples(probe.read())[0].power_w == 102
    assert "order_is_assumed" not in probe.devices[0].facts
    unsaid = opened(*(MI300X for _ in range(2)))
    assert unsaid.devices[0].facts["order_is_assumed"] is True


def test_a_list_that_hides_every_gpu_is_refused(opened: Open) -> None:
    with pytest.raises(NotMeasurable, match=r'HIP_VISIBLE_DEVICES="-1" hides every AMD GPU'):
        opened(MI300X, HIP_VISIBLE_DEVICES="-1")


def test_a_partition_of_a_gpu_is_refused_with_the_cure(opened: Open) -> None:
    with pytest.raises(NotMeasurable, match=r"split into partitions \(CPX\).*SPX"):
        opened({**MI300X, "partition": "CPX"})
    assert len(opened({**MI300X, "partition": "SPX"}).devices) == 1


def test_the_second_die_of_a_board_says_where_its_energy_is(opened: Open) -> None:
    first, second = opened(MI250X, SECOND_DIE).devices
    assert "energy_counted_in" not in first.facts
    assert second.facts["energy_counted_in"] == first.id


def test_the_second_die_says_so_in_whatever_order_the_program_has_them(opened: Open) -> None:
    second, first = opened(MI250X, SECOND_DIE, HIP_VISIBLE_DEVICES="1,0").devices
    assert (first.id, second.id) == (default_uuid(0), default_uuid(1))
    assert second.facts["energy_counted_in"] == first.id
    (alone,) = opened(MI250X, SECOND_DIE, HIP_VISIBLE_DEVICES="1").devices
    (why,) = alone.facts["absent"]
    assert "the board's first die, which is not shown to this program" in why


def test_whoever_computes_on_the_die_that_is_not_shown_is_company(
    machine: Machine, opened: Open
) -> None:
    """What an MI250X draws for both is in the readings of its first die."""
    dies = (MI250X, SECOND_DIE, {**MI250X, "bdf": "0000:35:00.0"}, SECOND_DIE)
    probe = opened(*dies, HIP_VISIBLE_DEVICES="0")
    (device,) = probe.devices
    assert f"with its second die {default_uuid(1)}" in device.facts["scope"]
    machine.change(0, pids=os.getpid())
    machine.change(1, pids=os.getppid())
    machine.change(3, pids=1)  # on another board
    used, shared = [r for r in probe.read() if isinstance(r, Mark)]
    assert (used.name, used.detail) == ("device_used", default_uuid(0))
    assert (shared.name, shared.detail.split()[0]) == ("device_shared", default_uuid(0))
    assert f"({os.getppid()})" in shared.detail
    assert "(1)" not in shared.detail
    both = opened(*dies, HIP_VISIBLE_DEVICES="0,1")
    assert "scope" not in both.devices[0].facts


def test_a_gpu_that_no_longer_answers_is_lost_once_and_the_others_go_on(
    machine: Machine, opened: Open
) -> None:
    probe = opened(MI300X, {**MI300X, "bdf": "0000:15:00.0"})
    probe.read()
    machine.change(1, **{"power!": 12})  # an I/O error
    records = [record for _ in range(amd.SILENT_READINGS + 1) for record in probe.read()]
    (mark,) = [r for r in records if isinstance(r, Mark)]
    assert mark.name == "device_lost"
    assert mark.detail.startswith(default_uuid(1))
    assert "I/O" in mark.detail
    assert {s.device for s in samples(probe.read_last())} == {default_uuid(0)}


def test_who_computes_on_a_gpu_is_seen(machine: Machine) -> None:
    machine.show({**MI300X, "pids": os.getpid()}, {**MI300X, "bdf": "0000:15:00.0"})
    probe = AmdProbe(ProbeRequest(os.getpid(), "/"))
    (mark,) = [r for r in probe.read() if isinstance(r, Mark)]
    assert (mark.name, mark.detail) == ("device_used", default_uuid(0))
    probe.close()


def test_gpus_on_which_nobody_is_recognised_are_unknown_at_the_end(
    machine: Machine, opened: Open
) -> None:
    """A container's process numbers, for example, are not the driver's."""
    probe = opened({**MI300X, "pids": 1})
    assert not [r for r in probe.read() if isinstance(r, Mark)]
    (mark,) = [r for r in probe.read_last() if isinstance(r, Mark)]
    assert (mark.name, mark.detail.split()[0]) == ("device_unknown", default_uuid(0))
    machine.change(0, pids=os.getpid())
    time.sleep(PERIOD_S)
    assert [r.name for r in probe.read_last() if isinstance(r, Mark)] == ["device_used"]


def test_the_energy_of_a_run_is_the_difference_of_the_counter(
    machine: Machine, opened: Open, tmp_path: Path
) -> None:
    """Two GPUs at 600 and 300 W by their counters; their power sensors say 500 W all along."""
    probe = opened(*({**MI300X, "bdf": f"0000:{bus}:00.0", "current": 500} for bus in ("05", "15")))
    records: list[Sample] = []
    for tenth in range(101):
        for index, watts in enumerate((600, 300)):
            machine.change(index, energy=steps(1e6 + watts * tenth / 10))
        now = [replace(s, t_ns=round(tenth * 1e8)) for s in samples(probe.read_last())]
        records += now
    run = run_of(
        tmp_path / "run",
        samples=records,
        devices=probe.devices,
        steps=even_steps(9, tokens_computed=100),
    )
    # One step of warm-up, then 8 s at 900 W.
    found = reading(run, "energy.run_j", warmup_steps=1)
    assert found.value == pytest.approx(8 * 900, rel=1e-3)
    assert found.basis == "measured"
    assert "2 x AMD Instinct MI300X OAM" in found.note
    per_token = reading(run, "energy.joules_per_token", warmup_steps=1)
    assert per_token.value == pytest.approx(9, rel=1e-3)


def test_a_frozen_counter_gives_way_to_power(opened: Open, tmp_path: Path) -> None:
    """As an MI100's was seen to stand still (ROCm/amdsmi#38)."""
    probe = opened(MI300X)
    records = [
        replace(s, t_ns=round(tenth * 1e8))
        for tenth in range(101)
        for s in samples(probe.read_last())
    ]
    run = run_of(tmp_path / "run", samples=records, devices=probe.devices, steps=even_steps(9))
    found = reading(run, "energy.run_j", warmup_steps=0)
    assert found.value == pytest.approx(9 * 600)
    assert found.basis == "derived"
    assert "stood still" in found.note


def test_a_machine_without_the_driver_is_refused_before_anything_is_loaded() -> None:
    code = """
import sys
import time
from ergmeter.errors import NotMeasurable
from ergmeter.ports import ProbeRequest
from ergmeter.probes.amd import AmdProbe
from ergmeter.probes.usage import PERIOD_S
try:
    AmdProbe(ProbeRequest(1, "/", options={"kfd": "/nowhere/kfd"}))
except NotMeasurable as error:
    print(error, "amdsmi" in sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "no AMD GPU to compute on here: /nowhere/kfd does not exist False\n"


def test_a_binding_without_its_library_is_refused_and_prints_nothing(tmp_path: Path) -> None:
    code = f"""
from ergmeter.errors import NotMeasurable
from ergmeter.ports import ProbeRequest
from ergmeter.probes.amd import AmdProbe
from ergmeter.probes.usage import PERIOD_S
try:
    AmdProbe(ProbeRequest(1, "/", options={{"kfd": {os.devnull!r}}}))
except NotMeasurable as error:
    print(error)
"""
    clean = {**os.environ, "ROCM_PATH": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean
    )
    assert said.stdout.startswith("the Python package amdsmi does not fit ROCm's library")
    assert said.stdout.count("\n") == 1
    assert "pip install /opt/rocm/share/amd_smi" in said.stdout


@pytest.mark.parametrize(
    ("code", "cure"),
    [(10, "groups render and video"), (34, "sudo modprobe amdgpu"), (18, "run `amd-smi list`")],
)
def test_a_library_that_does_not_start_is_refused_with_the_cure(
    machine: Machine, code: int, cure: str
) -> None:
    machine.show(MI300X, **{"init!": code})
    with pytest.raises(NotMeasurable, match=cure):
        AmdProbe(ProbeRequest(1, "/"))


def test_the_doctor_finds_it_and_tells_where_a_second_die_counts(machine: Machine) -> None:
    machine.show(MI250X, SECOND_DIE)
    (finding,) = doctor.examine(["amd"])
    assert finding.works
    assert {"power", "memory", "load", "clock"} <= set(finding.reads[default_uuid(0)])
    told = f"its power is in the readings of {default_uuid(0)}"
    assert any(told in warning for warning in finding.warnings)
