"""`DcgmProbe` against a stand-in for NVIDIA's tool that prints as the real one (DCGM 3.3) does."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ergmeter import sampler
from ergmeter.errors import NotMeasurable
from ergmeter.ports import ProbeRequest
from ergmeter.probes import cuda_visible_devices, dcgm
from ergmeter.probes.dcgm import DcgmProbe
from ergmeter.probes.stream import ToolStream
from ergmeter.records import Mark, Sample
from tests.nvml.library import default_uuid

# DCGM's number 0 is another GPU than NVML's: its discovery says which.
DISCOVERY = f"""\
2 GPUs found.
+--------+----------------------------------------------------------------------+
| GPU ID | Device Information                                                   |
+--------+----------------------------------------------------------------------+
| 0      | Name: NVIDIA A100-SXM4-80GB                                          |
|        | PCI Bus ID: 00000000:10:1C.0                                         |
|        | Device UUID: {default_uuid(7)}                |
+--------+----------------------------------------------------------------------+
| 1      | Name: NVIDIA A100-SXM4-80GB                                          |
|        | PCI Bus ID: 00000000:10:1D.0                                         |
|        | Device UUID: {default_uuid(3)}                |
+--------+----------------------------------------------------------------------+
0 NvSwitches found.
+-----------+
| Switch ID |
+-----------+
+-----------+
"""
HEADING = (
    "#Entity   GRACT        SMACT        SMOCC        TENSO        DRAMA        "
    "PCITX                PCIRX                NVLTX                NVLRX                \n"
    "ID                                                                             \n"
)
NOT_YET = "GPU {}     N/A          N/A          N/A          N/A          N/A          " + (
    "N/A                  " * 4 + "\n"
)
LINE = (
    "GPU {}     0.984        0.930        0.410        0.427        0.252        "
    "5242880              7340032              0                    N/A                  \n"
)

TOOL = """\
#!{python}
import sys, time
{before}
if sys.argv[1] == "discovery":
    print({discovery!r}, end="")
    sys.exit()
assert sys.argv[1] == "dmon", sys.argv
asked = dict(zip(sys.argv[2::2], sys.argv[3::2]))
assert asked["-e"] == "1001,1002,1003,1004,1005,1009,1010,1011,1012", asked
print({heading!r}, end="", flush=True)
for kind in ({not_yet!r}, {line!r}, {line!r}):
    for gpu in reversed(asked["-i"].split(",")):
        print(kind.format(gpu), end="", flush=True)
    time.sleep(float(asked["-d"]) / 1000)
{ending}
"""


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., DcgmProbe]]:
    probes = []

    def probe(
        *,
        discovery: str = DISCOVERY,
        before: str = "",
        ending: str = "time.sleep(60)",
        visible: str | None = None,
    ) -> DcgmProbe:
        tool = tmp_path / "dcgmi"
        tool.write_text(
            textwrap.dedent(TOOL).format(
                python=sys.executable, discovery=discovery, heading=HEADING, not_yet=NOT_YET,
                line=LINE, before=before, ending=ending,
            )
        )  # fmt: skip
        tool.chmod(0o755)
        environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        options = {"tool": str(tool), "period_s": 0.1}
        probes.append(DcgmProbe(ProbeRequest(1, "/", environment, options)))
        return probes[-1]

    yield probe
    for one in probes:
        one.close()


def read_for(probe: DcgmProbe, count: int) -> list[Sample]:
    """So many samples, or as many as come in a minute."""
    found: list[Sample | Mark] = []
    deadline_s = time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline_s:
        found += probe.read()
        time.sleep(0.02)
    return [record for record in found if isinstance(record, Sample)]


def test_the_gpus_are_those_of_the_discovery(opened: Callable[..., DcgmProbe]) -> None:
    devices = opened().devices
    assert [(d.id, d.kind, d.name) for d in devices] == [
        (default_uuid(7), "gpu", "NVIDIA A100-SXM4-80GB"),
        (default_uuid(3), "gpu", "NVIDIA A100-SXM4-80GB"),
    ]


# DCGM counts them the other way than the bus does.
BACKWARDS = """\
| 0      | Name: {0}                                                            |
|        | PCI Bus ID: 00000000:81:00.0                                         |
|        | Device UUID: GPU-far                                                 |
| 1      | Name: {1}                                                            |
|        | PCI Bus ID: 00000000:0A:00.0                                         |
|        | Device UUID: GPU-near                                                |
"""


def test_a_number_counts_along_the_bus_as_in_nvml_and_not_as_dcgm_does(
    opened: Callable[..., DcgmProbe],
) -> None:
    discovery = BACKWARDS.format("NVIDIA A100", "NVIDIA A100")
    assert [d.id for d in opened(discovery=discovery, visible="0").devices] == ["GPU-near"]
    probe = opened(discovery=discovery, visible="1")
    assert [(d.id, d.facts) for d in probe.devices] == [("GPU-far", {"dcgm_id": 0})]
    assert {sample.device for sample in read_for(probe, 2)} == {"GPU-far"}
    both = opened(discovery=discovery)
    assert [device.id for device in both.devices] == ["GPU-near", "GPU-far"]


def test_where_gpus_differ_a_number_is_what_cuda_says_it_is(
    opened: Callable[..., DcgmProbe], monkeypatch: pytest.MonkeyPatch
) -> None:
    discovery = BACKWARDS.format("NVIDIA H100", "NVIDIA T4")
    monkeypatch.setattr(cuda_visible_devices, "cuda_uuids", lambda *_, **__: ["GPU-far"])
    assert [d.id for d in opened(discovery=discovery, visible="0").devices] == ["GPU-far"]
    monkeypatch.setattr(cuda_visible_devices, "cuda_uuids", lambda *_, **__: [])
    (device,) = opened(discovery=discovery, visible="0").devices
    assert device.id == "GPU-near"
    assert device.facts["order_is_assumed"] is True


def test_all_of_its_answers_together_are_waited_for_less_than_a_probe_is(
    opened: Callable[..., DcgmProbe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens it has left by then, and nobody would end the tool."""
    waits_s: list[float] = []
    monkeypatch.setattr(ToolStream, "first", lambda _, wait_s: waits_s.append(wait_s))
    opened(before="time.sleep(sys.argv[1] == 'discovery')")
    assert waits_s[0] + 1 < dcgm.ANSWER_S < 2 * sampler.HANG_S


def test_a_line_becomes_a_sample_of_the_gpu_that_it_names(
    opened: Callable[..., DcgmProbe],
) -> None:
    samples = read_for(opened(), 4)
    assert [sample.device for sample in samples[:2]] == [default_uuid(3), default_uuid(7)]
    sample = samples[0]
    assert (sample.graphics_frac, sample.sm_frac, sample.occupancy_frac) == (0.984, 0.930, 0.410)
    assert (sample.tensor_frac, sample.dram_frac) == (0.427, 0.252)
    assert sample.pcie_sent_bytes_per_s == 5 * 2**20
    assert sample.pcie_received_bytes_per_s == 7 * 2**20
    assert sample.nvlink_sent_bytes_per_s == 0
    assert sample.nvlink_received_bytes_per_s is None  # N/A is no zero


def test_a_sample_is_of_the_time_since_the_line_before(opened: Callable[..., DcgmProbe]) -> None:
    samples = [s for s in read_for(opened(visible="1"), 2) if s.device == default_uuid(3)]
    first, second = samples
    assert second.activity_s is not None
    assert second.t_ns - second.activity_s * 1e9 == pytest.approx(first.t_ns, abs=2)


def test_only_the_gpus_a_program_sees_are_asked_for(opened: Callable[..., DcgmProbe]) -> None:
    probe = opened(visible=default_uuid(3))
    assert [device.id for device in probe.devices] == [default_uuid(3)]
    assert {sample.device for sample in read_for(probe, 2)} == {default_uuid(3)}


def test_a_tool_that_ends_is_said_to_have_ended(opened: Callable[..., DcgmProbe]) -> None:
    probe = opened(ending="sys.exit('Error: unable to establish a connection to the host engine')")
    read_for(probe, 4)
    with pytest.raises(NotMeasurable, match="exit code 1: Error: unable to establish"):
        read_for(probe, 99)


def test_no_tool_and_no_service_each_name_the_cure(opened: Callable[..., DcgmProbe]) -> None:
    with pytest.raises(NotMeasurable, match="install NVIDIA's DCGM"):
        DcgmProbe(ProbeRequest(1, "/", {}, {"tool": "/nowhere/dcgmi"}))
    with pytest.raises(NotMeasurable, match=r"Error: unable to connect.*start its service"):
        opened(discovery="Error: unable to connect to host engine\n")
