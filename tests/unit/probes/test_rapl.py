"""What the RAPL probe promises, on a scripted powercap tree."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ergmeter import doctor
from ergmeter.errors import NotMeasurable
from ergmeter.ports import Probe, ProbeRequest
from ergmeter.probes import rapl
from ergmeter.probes.rapl import RaplProbe, absence
from ergmeter.records import Mark, Sample
from tests.runs import even_steps, reading, reason, run_of

RANGE_UJ = 262_143_328_850  # as a Xeon reports it
HOST = platform.node()


class Powercap:
    """A powercap class directory as the kernel lays it out: links into a device tree."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "class"
        self.devices = folder / "devices"
        self.root.mkdir()

    def zone(self, zone: str, name: str, energy_uj: int = 1) -> None:
        folder = self.devices / zone
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
        (folder / "energy_uj").write_text(f"{energy_uj}\n")
        (self.root / zone).symlink_to(folder)

    def count(self, zone: str, energy_uj: int) -> None:
        (self.devices / zone / "energy_uj").write_text(f"{energy_uj}\n")

    def request(self, **options: object) -> ProbeRequest:
        return ProbeRequest(pid=1, path="/", options={"root": str(self.root), **options})


@pytest.fixture
def powercap(tmp_path: Path) -> Powercap:
    return Powercap(tmp_path)


def joules(probe: RaplProbe) -> dict[str, float | None]:
    samples = [record for record in probe.read() if isinstance(record, Sample)]
    return {sample.device.removeprefix(f"rapl:{HOST}:"): sample.energy_j for sample in samples}


def test_each_socket_and_its_dram_is_one_device(powercap: Powercap) -> None:
    powercap.zone("intel-rapl:0", "package-0", 1_500_000)
    powercap.zone("intel-rapl:0:0", "dram", 250_000)
    powercap.zone("intel-rapl:1", "package-1", 3_000_000)
    powercap.zone("intel-rapl:1:0", "dram", 500_000)
    probe = RaplProbe(powercap.request())
    as_asked: Probe = probe

    assert as_asked.name == "rapl"
    assert [(device.id, device.kind) for device in probe.devices] == [
        (f"rapl:{HOST}:package-0", "cpu"),
        (f"rapl:{HOST}:package-0:dram", "dram"),
        (f"rapl:{HOST}:package-1", "cpu"),
        (f"rapl:{HOST}:package-1:dram", "dram"),
    ]
    assert joules(probe) == pytest.approx(
        {"package-0": 1.5, "package-0:dram": 0.25, "package-1": 3.0, "package-1:dram": 0.5}
    )


def test_a_wrapped_counter_goes_on_growing_by_what_was_drawn(powercap: Powercap) -> None:
    powercap.zone("intel-rapl:0", "package-0", RANGE_UJ - 2_000_000)
    probe = RaplProbe(powercap.request())
    before = joules(probe)["package-0"]
    powercap.count("intel-rapl:0", 5_000_000)
    wrapped = joules(probe)["package-0"]
    powercap.count("intel-rapl:0", 6_000_000)
    after = joules(probe)["package-0"]

    assert before is not None
    assert wrapped is not None
    assert after is not None
    assert wrapped - before == pytest.approx(7, abs=1e-6)
    assert after - wrapped == pytest.approx(1, abs=1e-6)


def test_a_counter_that_was_reset_is_lost_and_no_wrap_is_made_of_it(powercap: Powercap) -> None:
    powercap.zone("intel-rapl:0", "package-0", 100_000_000_000)
    powercap.zone("intel-rapl:1", "package-1", 1_000_000)
    probe = RaplProbe(powercap.request())
    powercap.count("intel-rapl:0", 2_000_000)  # a wrap would mean 162 kJ since just now
    mark, sample = probe.read()
    assert isinstance(mark, Mark)
    assert mark.name == "device_lost"
    assert mark.detail.endswith("its counter was reset, from 100000000000 to 2000000 uJ")
    assert isinstance(sample, Sample)
    assert sample.energy_j == 1.0


def test_the_energy_of_a_run_is_that_of_all_sockets_and_their_memory_over_a_wrap(
    powercap: Powercap, tmp_path: Path
) -> None:
    """Two sockets at 100 and 60 W, the first wraps after 5 s; DRAM at 10 W beside the first."""
    start_uj = {
        "intel-rapl:0": RANGE_UJ - 500_000_000,
        "intel-rapl:0:0": 7_000_000,
        "intel-rapl:1": 42_000_000,
    }
    watts = {"intel-rapl:0": 100, "intel-rapl:0:0": 10, "intel-rapl:1": 60}
    names = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "dram", "intel-rapl:1": "package-1"}
    for zone, name in names.items():
        powercap.zone(zone, name, start_uj[zone])
    probe = RaplProbe(powercap.request())
    samples = []
    for tenth in range(101):
        for zone in names:
            powercap.count(zone, (start_uj[zone] + watts[zone] * tenth * 100_000) % RANGE_UJ)
        read = [record for record in probe.read() if isinstance(record, Sample)]
        samples += [replace(sample, t_ns=tenth * 10**8) for sample in read]
    run = run_of(tmp_path / "run", samples=samples, devices=probe.devices, steps=even_steps(9))

    assert reading(run, "energy.cpu_j", warmup_steps=0).value == pytest.approx(9 * 160, rel=1e-4)
    assert reading(run, "energy.dram_j", warmup_steps=0).value == pytest.approx(9 * 10, rel=1e-4)
    total = reading(run, "energy.run_j", warmup_steps=0)
    assert total.value == pytest.approx(9 * 170, rel=1e-4)
    assert total.basis == "measured"


def test_a_socket_stuck_at_zero_makes_the_sum_absent_and_not_that_of_the_other(
    powercap: Powercap, tmp_path: Path
) -> None:
    powercap.zone("intel-rapl:0", "package-0", 1_000_000)
    powercap.zone("intel-rapl:1", "package-1", 0)
    probe = RaplProbe(powercap.request())
    samples = []
    for tenth in range(101):
        powercap.count("intel-rapl:0", 1_000_000 + tenth * 10_000_000)
        read = [record for record in probe.read() if isinstance(record, Sample)]
        samples += [replace(sample, t_ns=tenth * 10**8) for sample in read]
    run = run_of(tmp_path / "run", samples=samples, devices=probe.devices, steps=even_steps(9))

    why = reason(run, "energy.cpu_j", warmup_steps=0)
    assert f"rapl:{HOST}:package-1" in why
    assert "1 other device drew 900.0 J" in why


def test_zones_contained_in_another_are_left_out_with_the_reason(powercap: Powercap) -> None:
    powercap.zone("intel-rapl:0", "package-0")
    powercap.zone("intel-rapl:0:0", "core")
    powercap.zone("intel-rapl:0:1", "uncore")
    powercap.zone("intel-rapl:1", "psys")
    (device,) = RaplProbe(powercap.request()).devices

    assert device.id == f"rapl:{HOST}:package-0"
    assert device.facts["skipped_zones"] == {
        "intel-rapl:0:0": "core is contained in package-0",
        "intel-rapl:0:1": "uncore is contained in package-0",
        "intel-rapl:1": "psys contains the packages",
    }


def test_a_package_seen_through_msr_and_mmio_is_counted_once(powercap: Powercap) -> None:
    powercap.zone("intel-rapl-mmio:0", "package-0", 900_000_000)
    powercap.zone("intel-rapl:0", "package-0", 1_000_000)
    probe = RaplProbe(powercap.request())

    assert joules(probe) == pytest.approx({"package-0": 1.0})
    assert probe.devices[0].facts["skipped_zones"] == {
        "intel-rapl-mmio:0": "the same package-0 as intel-rapl:0"
    }


def test_a_counter_that_reads_zero_is_absent_not_zero_joules(powercap: Powercap) -> None:
    powercap.zone("intel-rapl:0", "package-0", 1_000_000)
    powercap.zone("intel-rapl:0:0", "dram", 0)
    assert joules(RaplProbe(powercap.request())) == pytest.approx({"package-0": 1.0})


def test_a_zone_lost_during_the_run_is_marked_once_and_the_others_go_on(
    powercap: Powercap,
) -> None:
    powercap.zone("intel-rapl:0", "package-0", 1_000_000)
    powercap.zone("intel-rapl:1", "package-1", 2_000_000)
    probe = RaplProbe(powercap.request())
    (powercap.devices / "intel-rapl:0" / "energy_uj").unlink()

    mark, sample = probe.read()
    assert isinstance(mark, Mark)
    assert mark.name == "device_lost"
    assert mark.detail.startswith(f"rapl:{HOST}:package-0: ")
    assert isinstance(sample, Sample)
    assert (sample.device, sample.energy_j) == (f"rapl:{HOST}:package-1", 2.0)
    (only,) = probe.read()
    assert isinstance(only, Sample)


def test_the_period_can_be_chosen(powercap: Powercap) -> None:
    powercap.zone("intel-rapl:0", "package-0")
    assert RaplProbe(powercap.request()).period_s == 0.1
    assert RaplProbe(powercap.request(period_s=0.5)).period_s == 0.5


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that others may enter: pytest keeps its own to their owner."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Give up root's rights for a while: no file mode can stop root."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_an_unreadable_counter_is_refused_with_a_command_that_really_helps(
    public_folder: Path,
) -> None:
    powercap = Powercap(public_folder)
    powercap.zone("intel-rapl:0", "package-0", 1_000_000)
    powercap.zone("intel-rapl:0:0", "dram", 1_000_000)
    for zone in ("intel-rapl:0", "intel-rapl:0:0"):
        (powercap.devices / zone / "energy_uj").chmod(0o400)

    with as_nobody(), pytest.raises(NotMeasurable) as refused:
        RaplProbe(powercap.request())
    refusal = str(refused.value)
    assert f"no permission to read {powercap.root}/intel-rapl:0/energy_uj" in refusal
    assert "CVE-2020-8694" in refusal
    cure = refusal.split("`")[1].removeprefix("sudo ")
    subprocess.run(cure, shell=True, check=True)
    with as_nobody():
        assert joules(RaplProbe(powercap.request())) == {"package-0": 1.0, "package-0:dram": 1.0}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_memory_alone_that_may_not_be_read_is_no_reason_to_leave_it_out_of_the_sum(
    public_folder: Path,
) -> None:
    powercap = Powercap(public_folder)
    powercap.zone("intel-rapl:0", "package-0", 1_000_000)
    powercap.zone("intel-rapl:0:0", "dram", 1_000_000)
    (powercap.devices / "intel-rapl:0:0" / "energy_uj").chmod(0o400)
    with as_nobody(), pytest.raises(NotMeasurable, match=r"no permission .*intel-rapl:0:0"):
        RaplProbe(powercap.request())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_the_doctor_and_the_summary_show_the_one_line_that_would_help(
    public_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    powercap = Powercap(public_folder)
    powercap.zone("intel-rapl:0", "package-0", 1_000_000)
    (powercap.devices / "intel-rapl:0" / "energy_uj").chmod(0o400)
    monkeypatch.setattr(rapl, "ROOT", str(powercap.root))
    with as_nobody():
        (finding,) = doctor.examine(["rapl"])
    cure = f"run `sudo chmod a+r {powercap.root}/intel-rapl*/energy_uj`"
    assert not finding.works
    assert cure in finding.reason
    run = run_of(tmp_path / "run", steps=even_steps(9), unavailable={"rapl": finding.reason})
    assert cure in reason(run, "energy.cpu_j", warmup_steps=0)


def test_a_tree_without_packages_is_refused_naming_what_is_there(powercap: Powercap) -> None:
    powercap.zone("intel-rapl:0", "package-0", 0)
    with pytest.raises(NotMeasurable, match=r"intel-rapl:0: package-0 reads 0: .*does not count"):
        RaplProbe(powercap.request())


def test_an_empty_tree_is_refused(powercap: Powercap) -> None:
    with pytest.raises(NotMeasurable, match=r"no intel-rapl zone.*measure on the host"):
        RaplProbe(powercap.request())


def test_no_powercap_at_all_is_explained_by_the_system(tmp_path: Path) -> None:
    missing = tmp_path / "powercap"
    with pytest.raises(NotMeasurable) as refused:
        RaplProbe(ProbeRequest(pid=1, path="/", options={"root": str(missing)}))
    assert str(refused.value) == absence(missing, sys.platform)
    assert "does not exist: a virtual machine" in absence(missing, "linux")
    assert absence(missing, "darwin").endswith("and this is darwin")
