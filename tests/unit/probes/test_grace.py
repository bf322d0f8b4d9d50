"""What the Grace probe promises, on a scripted tree of ACPI power meters."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest

from ergmeter.errors import NotMeasurable
from ergmeter.ports import Probe, ProbeRequest
from ergmeter.probes.grace import GraceProbe
from ergmeter.records import Mark, Sample
from tests.runs import GPU, even_steps, reading, run_of

HOST = platform.node()
# As a GH200 lists them, each a device of its own.
GH200 = {
    "Module Power Socket 0": 620_000_000,
    "Grace Power Socket 0": 150_000_000,
    "CPU Power Socket 0": 90_000_000,
    "SysIO Power Socket 0": 25_000_000,
}


class Meters:
    """A hwmon class directory as the kernel lays it out: links into a device tree."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "class"
        self.devices = folder / "devices"
        self.root.mkdir()

    def add(self, label: str, power_uw: int, interval_ms: int | None = 50) -> Path:
        device = self.devices / label.replace(" ", "-")
        hwmon = device / "hwmon" / f"hwmon{len(list(self.root.iterdir()))}"
        hwmon.mkdir(parents=True)
        (hwmon / "device").symlink_to(device)
        (self.root / hwmon.name).symlink_to(hwmon)
        (device / "power1_oem_info").write_text(f"{label}\n")
        (device / "power1_average").write_text(f"{power_uw}\n")
        if interval_ms is not None:
            (device / "power1_average_interval").write_text(f"{interval_ms}\n")
        return device / "power1_average"

    def probe(self) -> GraceProbe:
        return GraceProbe(ProbeRequest(1, "/", options={"root": str(self.root)}))


@pytest.fixture
def meters(tmp_path: Path) -> Meters:
    return Meters(tmp_path)


def test_the_module_is_a_kind_of_its_own_and_the_socket_is_a_cpu(meters: Meters) -> None:
    for label, power_uw in GH200.items():
        meters.add(label, power_uw)
    probe = meters.probe()
    as_asked: Probe = probe
    assert as_asked.name == "grace"
    assert {d.id.removeprefix(f"grace:{HOST}:"): d.kind for d in probe.devices} == {
        "Module Power Socket 0": "module",
        "Grace Power Socket 0": "cpu",
    }
    powers = {r.device: r.power_w for r in probe.read() if isinstance(r, Sample)}
    assert powers == pytest.approx(
        {f"grace:{HOST}:Module Power Socket 0": 620, f"grace:{HOST}:Grace Power Socket 0": 150}
    )
    assert probe.devices[0].facts["left_out"] == {
        "CPU Power Socket 0": "part of Grace Power Socket 0",
        "SysIO Power Socket 0": "part of Grace Power Socket 0",
    }


def test_the_energy_of_a_run_has_the_gpu_once_and_no_module(meters: Meters, tmp_path: Path) -> None:
    """A GPU at 400 W in a module at 620 W, whose CPU draws 150 W: each figure is its own."""
    for label, power_uw in GH200.items():
        meters.add(label, power_uw)
    probe = meters.probe()
    gpu = replace(GPU, facts={"power_field": "instant"})
    samples = [
        replace(sample, t_ns=tenth * 10**8)
        for tenth in range(101)
        for sample in (*probe.read(), Sample(0, gpu.id, power_w=400))
        if isinstance(sample, Sample)
    ]
    run = run_of(
        tmp_path / "run", samples=samples, devices=[gpu, *probe.devices], steps=even_steps(9)
    )
    assert reading(run, "energy.run_j", warmup_steps=0).value == pytest.approx(9 * 400)
    assert reading(run, "energy.accelerator_j", warmup_steps=0).value == pytest.approx(9 * 400)
    assert reading(run, "energy.cpu_j", warmup_steps=0).value == pytest.approx(9 * 150)


def test_a_meter_that_is_reached_on_two_ways_is_one(meters: Meters) -> None:
    average = meters.add("Grace Power Socket 0", 100_000_000)
    for file in list(average.parent.glob("power1_*")):
        (meters.root / "hwmon0" / file.name).write_text(file.read_text())
    assert len(meters.probe().devices) == 1


def test_sockets_are_told_apart(meters: Meters) -> None:
    meters.add("Grace Power Socket 0", 100_000_000)
    meters.add("Grace Power Socket 1", 200_000_000)
    probe = meters.probe()
    assert [r.power_w for r in probe.read() if isinstance(r, Sample)] == pytest.approx([100, 200])


def test_the_rails_stand_for_a_socket_that_has_no_meter_of_its_own(meters: Meters) -> None:
    meters.add("CPU Power Socket 0", 90_000_000)
    (device,) = meters.probe().devices
    assert (device.kind, device.facts["scope"]) == ("cpu", "cpu")
    assert "rails alone" in device.name


@pytest.mark.parametrize(
    ("interval_ms", "averaging_s", "field"),
    [(50, 0.05, "instant"), (1000, 1.0, "draw"), (None, None, "draw")],
)
def test_a_long_average_is_not_called_instant(
    meters: Meters, interval_ms: int | None, averaging_s: float | None, field: str
) -> None:
    meters.add("Grace Power Socket 0", 1, interval_ms)
    (device,) = meters.probe().devices
    assert device.facts["averaging_s"] == averaging_s
    assert device.facts["power_field"] == field


def test_a_meter_that_goes_is_marked_once_and_the_others_go_on(meters: Meters) -> None:
    gone = meters.add("Module Power Socket 0", 620_000_000)
    meters.add("Grace Power Socket 0", 150_000_000)
    probe = meters.probe()
    gone.unlink()
    mark, sample = probe.read()
    assert isinstance(mark, Mark)
    assert mark.detail.startswith(f"grace:{HOST}:Module Power Socket 0: ")
    assert isinstance(sample, Sample)
    assert probe.read()[0].t_ns > sample.t_ns
    assert len(probe.read()) == 1


def test_meters_of_other_makers_are_none_of_ours(meters: Meters) -> None:
    meters.add("Intel Node Manager", 300_000_000)
    with pytest.raises(NotMeasurable, match="modprobe acpi_power_meter"):
        meters.probe()


def test_another_machine_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(NotMeasurable, match="no NVIDIA Grace CPU here: this machine is x86_64"):
        GraceProbe(ProbeRequest(1, "/"))
