"""What the Neuron probe makes of neuron-monitor's stream and of the driver's sysfs.

The reports in tests/data/neuron_monitor follow the format that AWS documents (neuron-monitor user
guide, Neuron 2.29; sysfs user guide); their values are made up. A script prints them in the tool's
place. No Neuron chip has been read.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ergmeter import doctor
from ergmeter.errors import NotMeasurable
from ergmeter.ports import Probe, ProbeRequest
from ergmeter.probes import neuron
from ergmeter.probes.neuron import NeuronProbe, power_shares, uses
from ergmeter.records import Mark, Sample
from tests.runs import even_steps, reason, run_of
from tests.unit.probes.tools import gathered, is_running, tool

REPORTS = (Path(__file__).parents[2] / "data" / "neuron_monitor" / "trn2.jsonl").read_text()
LINES = REPORTS.splitlines()
OTHER_PARTS = 16_777_216 + 176_285_056 + 1_048_576  # of a core's memory, in every report

Open = Callable[..., NeuronProbe]


class Driver:
    """The driver's sysfs tree for two chips."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for chip, serial in enumerate(("a1b2c3", "0x0")):
            (root / f"neuron{chip}" / "info").mkdir(parents=True)
            (root / f"neuron{chip}" / "info" / "serial_number").write_text(f"{serial}\n")
            (root / f"neuron{chip}" / "stats" / "power").mkdir(parents=True)
        self.power(0, "POWER_STATUS_NO_DATA,0,0.00,0.00,0.00")

    def power(self, chip: int, line: str) -> None:
        (self.root / f"neuron{chip}" / neuron.POWER_FILE).write_text(f"{line}\n")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    root = tmp_path / "neuron_device"
    monkeypatch.setattr(neuron, "ROOT", str(root))
    return Driver(root)


@pytest.fixture
def opened(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    probes: list[NeuronProbe] = []
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def probe(
        lines: list[str] = LINES,
        environment: dict[str, str] | None = None,
        ending: str = "",
        **options: Any,
    ) -> NeuronProbe:
        tool(tmp_path, "neuron-monitor", lines, ending=ending)
        request = ProbeRequest(os.getpid(), "/", environment or {}, options)
        probes.append(NeuronProbe(request))
        return probes[-1]

    yield probe
    for one in probes:
        one.close()


def samples(records: list[Sample | Mark]) -> list[Sample]:
    return [record for record in records if isinstance(record, Sample)]


def test_load_and_memory_of_each_chip_come_from_its_cores(opened: Open) -> None:
    probe = opened()
    as_asked: Probe = probe
    assert as_asked.name == "neuron"
    read = samples(gathered(probe.read, 6))
    by_report = [read[i : i + 2] for i in range(0, 6, 2)]
    # No program, then one on the first chip's four cores, then one on cores 0, 1 and 5.
    assert [[s.busy_frac for s in pair] for pair in by_report] == [
        [0.0, 0.0],
        [pytest.approx((0.4201 + 0.4202 + 0.4197 + 0.42) / 4), 0.0],
        [pytest.approx((0.8 + 0.6) / 4), pytest.approx(1.0 / 4)],
    ]
    assert [[s.memory_bytes for s in pair] for pair in by_report] == [
        [None, None],
        [4 * (193_986_816 + 20_971_520 + OTHER_PARTS), None],
        [2 * (1_000_000_000 + OTHER_PARTS), 750_000_000 + OTHER_PARTS],
    ]
    assert all(s.power_w is None and s.energy_j is None for s in read)


def test_a_chip_is_known_by_its_serial_number_or_else_by_its_place(opened: Open) -> None:
    first, second = opened().devices
    assert (first.id, first.kind, first.name) == ("neuron:a1b2c3", "gpu", "trainium2")
    assert second.id == f"neuron:{platform.node()}:1"
    assert first.facts["memory_total_bytes"] == 103_079_215_104
    assert first.facts["cores"] == 4
    assert first.facts["instance_type"] == "trn2.3xlarge"


def test_the_tool_is_asked_for_no_more_than_is_read(opened: Open, tmp_path: Path) -> None:
    opened(period_s=2.5)
    config = json.loads((tmp_path / "config").read_text())
    assert config["period"] == "2.5s"
    (runtimes,) = config["neuron_runtimes"]
    assert [group["type"] for group in runtimes["metrics"]] == [
        "neuroncore_counters",
        "memory_used",
    ]


def test_a_power_share_is_a_mark_once_a_minute_and_no_watts(opened: Open, driver: Driver) -> None:
    probe = opened()
    assert not [r for r in probe.read() if isinstance(r, Mark)]
    driver.power(0, "POWER_STATUS_VALID,1731628800,0.86,25.00,18.86")
    (mark,) = [r for r in probe.read() if isinstance(r, Mark)]
    assert (mark.name, mark.detail) == (
        "power_share",
        "neuron:a1b2c3 0.1886 (from 0.0086 to 0.2500) over a minute",
    )
    assert not [r for r in probe.read() if isinstance(r, Mark)]
    driver.power(0, "POWER_STATUS_VALID,1731628860,1.00,30.00,20.00")
    assert len([r for r in probe.read() if isinstance(r, Mark)]) == 1


def test_a_power_file_that_a_driver_has_moved_is_found(opened: Open, driver: Driver) -> None:
    usual = driver.root / "neuron0" / neuron.POWER_FILE
    usual.unlink()
    moved = driver.root / "neuron0" / "device" / "power" / "utilization"
    moved.parent.mkdir(parents=True)
    moved.write_text("POWER_STATUS_VALID,1731628800,0.86,25.00,18.86\n")
    (mark,) = [r for r in opened().read() if isinstance(r, Mark)]
    assert mark.name == "power_share"


def test_a_declared_maximum_gives_an_estimate_apart_from_power(
    opened: Open, driver: Driver
) -> None:
    driver.power(0, "POWER_STATUS_VALID,1731628800,0.86,25.00,18.86")
    probe = opened(max_power_w=500)
    first, second = samples(gathered(probe.read, 3))[:2]
    assert first.power_average_w == pytest.approx(0.1886 * 500)
    assert (first.power_w, first.energy_j) == (None, None)
    assert second.power_average_w is None
    assert probe.devices[0].facts["max_power_w"] == 500


def test_a_power_file_that_is_empty_costs_the_share_and_no_more(
    opened: Open, driver: Driver
) -> None:
    driver.power(0, "POWER_STATUS_VALID,1731628800,0.86,25.00,18.86")
    probe = opened(max_power_w=500)
    gathered(probe.read, 3)
    driver.power(0, "")
    assert all(getattr(sample, "power_w", None) is None for sample in probe.read())
    assert probe._estimate_w(0) is None  # that minute is over


@pytest.mark.parametrize(
    ("line", "shares"),
    [
        ("POWER_STATUS_VALID,1731628800,0.86,25.00,18.86", (0.0086, 0.25, 0.1886)),
        ("POWER_STATUS_NO_DATA,0,0.00,0.00,0.00", None),
        ("POWER_STATUS_INVALID,1731628800,0.00,0.00,0.00", None),
        ("", None),
        ("POWER_STATUS_VALID", None),
        ("POWER_STATUS_VALID,1731628800,0.86,25.00,", None),
        ("POWER_STATUS_VALID,1731628800,0.86,25.00,nan", None),
    ],
)
def test_shares_are_read_as_the_driver_writes_them(
    line: str, shares: tuple[float, float, float] | None
) -> None:
    assert power_shares(line) == (shares and pytest.approx(shares))


@pytest.mark.parametrize(
    ("cores", "chips"), [("0-3", [0]), ("2,5", [0, 1]), ("4-7", [1]), ("0-7", [0, 1]), ("", [0, 1])]
)
def test_only_chips_whose_cores_the_program_may_use_are_devices(
    opened: Open, cores: str, chips: list[int]
) -> None:
    probe = opened(environment={"NEURON_RT_VISIBLE_CORES": cores})
    assert [device.facts["index"] for device in probe.devices] == chips


@pytest.mark.parametrize(
    ("cores", "said"), [("8-11", "names no core"), ("a", "is no list of cores")]
)
def test_a_list_of_cores_that_makes_no_sense_is_refused(
    opened: Open, tmp_path: Path, cores: str, said: str
) -> None:
    with pytest.raises(NotMeasurable, match=said):
        opened(environment={"NEURON_RT_VISIBLE_CORES": cores})
    assert not is_running(str(tmp_path / "neuron-monitor"))


def test_the_chips_that_the_program_uses_are_seen(opened: Open) -> None:
    report = json.loads(LINES[1])
    report["neuron_runtime_data"][0]["pid"] = os.getpid()
    probe = opened([json.dumps(report)])
    records = gathered(probe.read, 3)
    (mark,) = [record for record in records if isinstance(record, Mark)]
    assert (mark.name, mark.detail) == ("device_used", "neuron:a1b2c3")


def test_two_programs_on_one_chip_add_up() -> None:
    one, other = json.loads(LINES[1]), json.loads(LINES[2])
    other["neuron_runtime_data"][0]["pid"] = 4712
    both = {"neuron_runtime_data": one["neuron_runtime_data"] + other["neuron_runtime_data"]}
    chip = uses(both, cores_per_chip=4)[0]
    assert chip.busy_frac == pytest.approx(0.42 + 0.35, abs=1e-4)
    assert chip.pids == {4711, 4712}


def test_a_run_has_its_load_and_says_why_it_has_no_energy(opened: Open, tmp_path: Path) -> None:
    probe = opened()
    read = samples(gathered(probe.read, 6))
    run = run_of(tmp_path / "run", samples=read, devices=probe.devices, steps=even_steps(3))
    why = reason(run, "energy.run_j")
    assert "neuron:a1b2c3" in why
    assert "a share of a maximum that AWS does not publish" in why


def test_the_doctor_reads_it_and_says_what_its_power_is(opened: Open) -> None:
    opened().close()  # which puts the tool on PATH
    (finding,) = doctor.examine(["neuron"])
    assert finding.works
    assert "load" in finding.reads["neuron:a1b2c3"]
    assert "power" not in finding.reads["neuron:a1b2c3"]
    assert any("a share of a maximum that AWS does not publish" in w for w in finding.warnings)


def test_the_tool_is_ended_with_the_probe(opened: Open, tmp_path: Path) -> None:
    probe = opened(ending="while :; do sleep 0.1; done")
    path = str(tmp_path / "neuron-monitor")
    assert is_running(path)
    probe.close()
    assert not is_running(path)


def test_a_tool_that_ends_is_told_with_its_last_words(opened: Open) -> None:
    probe = opened(ending="echo driver went away >&2; exit 3")
    with pytest.raises(NotMeasurable, match="ended with exit code 3: driver went away"):
        gathered(probe.read, 99)


def test_a_tool_that_sees_no_chip_is_refused_with_its_reason(opened: Open) -> None:
    hardware = {"neuron_device_count": 0, "error": "Neuron Driver not running"}
    with pytest.raises(NotMeasurable, match=r"sees no Neuron chip \(Neuron Driver not running\)"):
        opened([json.dumps({"neuron_hardware_info": hardware})])


def test_what_is_no_report_is_refused(opened: Open) -> None:
    with pytest.raises(NotMeasurable, match="printed no JSON object: 'usage: neuron-monitor'"):
        opened(["usage: neuron-monitor"])


def test_a_machine_without_the_driver_is_refused(tmp_path: Path) -> None:
    options = {"root": str(tmp_path / "nothing")}
    with pytest.raises(NotMeasurable, match=r"no AWS Neuron chip here: .*nothing does not exist"):
        NeuronProbe(ProbeRequest(1, "/", options=options))


def test_a_missing_tool_is_named_with_the_package_that_has_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(driver.root))
    with pytest.raises(NotMeasurable, match="install aws-neuronx-tools"):
        NeuronProbe(ProbeRequest(1, "/"))
