"""Which GPUs `NvmlProbe` reads, what it says of them, and which of them the program uses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from ergmeter.errors import NotMeasurable
from ergmeter.probes import usage
from tests.nvml.library import Fault, Gpu, default_uuid
from tests.unit.probes.scripted import Open, gauges, indices, marks


def test_the_facts_say_what_the_device_is(opened: Open) -> None:
    gpu = Gpu(compute_mode=pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, power_limit_w=650)
    (device,) = opened(gpu, driver="535.104.05", nvml="12.535.104.05").devices
    assert (device.id, device.kind, device.name) == (default_uuid(0), "gpu", "NVIDIA H200")
    assert device.probe == "nvml"
    assert device.facts == {
        "index": 0,
        "pci_bus_id": "00000000:1B:00.0",
        "driver": "535.104.05",
        "nvml": "12.535.104.05",
        "power_limit_w": pytest.approx(650),
        "compute_mode": "exclusive_process",
        "memory_total_bytes": 150_754_820_096,
        "persistence": True,
        "power_field": "instant",
        "has_energy_counter": True,
    }


def test_a_fact_whose_query_fails_is_left_out(opened: Open) -> None:
    (device,) = opened(Gpu(faults=[Fault("limit", pynvml.NVML_ERROR_NO_PERMISSION)])).devices
    assert "power_limit_w" not in device.facts
    assert device.facts["compute_mode"] == "default"


FOUR = [Gpu(), Gpu(), Gpu(), Gpu()]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("0", [0]),
        ("1,0", [1, 0]),
        (" 2 , 3", [2, 3]),
        ("2,7,1", [2]),
        ("1,-1,0", [1]),
        ("3,x", [3]),
        (default_uuid(2), [2]),
        (f"{default_uuid(3)},{default_uuid(1)}", [3, 1]),
        ("GPU-00000001", [1]),
        ("GPU-00000002,GPU-0000000,GPU-00000001", [2]),
    ],
    ids=[
        "unset shows all",
        "one",
        "its order is kept",
        "spaces",
        "ends at an index that does not exist",
        "ends at a negative one",
        "ends at what is no name",
        "uuid",
        "uuids",
        "start of a uuid",
        "ends at a start that fits several",
    ],
)
def test_the_gpus_are_those_cuda_visible_devices_shows(
    opened: Open, value: str | None, expected: list[int]
) -> None:
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    probe = opened(*FOUR, environment=environment)
    assert indices(probe) == expected
    assert [device.id for device in probe.devices] == [default_uuid(i) for i in expected]
    assert "order_is_assumed" not in probe.devices[0].facts
    assert [sample.device for sample in gauges(probe.read())] == [default_uuid(i) for i in expected]


@pytest.mark.parametrize("value", ["", "-1", "none", "4", "1,1", "GPU-ffff"])
def test_a_list_that_hides_every_gpu_is_named_as_the_reason(opened: Open, value: str) -> None:
    with pytest.raises(
        NotMeasurable, match=f'CUDA_VISIBLE_DEVICES="{value}" hides every GPU: .*0 to 3'
    ):
        opened(*FOUR, environment={"CUDA_VISIBLE_DEVICES": value})


@pytest.mark.parametrize(
    ("environment", "is_assumed"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1"}, True),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, False),
        ({"CUDA_VISIBLE_DEVICES": default_uuid(1)}, False),
        ({}, False),
    ],
    ids=["by number", "by number in PCI order", "by uuid", "all"],
)
def test_the_facts_admit_that_numbers_on_a_mixed_machine_may_mean_others(
    opened: Open, environment: dict[str, str], is_assumed: bool
) -> None:
    probe = opened(Gpu(name="NVIDIA A10"), Gpu(), environment=environment)
    assert ("order_is_assumed" in probe.devices[0].facts) is is_assumed


# A CUDA that numbers the GPUs in the order of SCRIPTED_CUDA, and shows those that are asked for.
CUDA = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static char order[8][64];
static int shown[8], count;
int cuInit(unsigned flags) {
    (void)flags;
    int known = 0;
    for (char *one = strtok(strdup(getenv("SCRIPTED_CUDA")), ","); one; one = strtok(NULL, ","))
        snprintf(order[known++], 64, "%s", one);
    char *asked = strdup(getenv("CUDA_VISIBLE_DEVICES"));
    for (char *one = strtok(asked, ","); one; one = strtok(NULL, ",")) shown[count++] = atoi(one);
    return 0;
}
int cuDeviceGetCount(int *result) { return *result = count, 0; }
int cuDeviceGet(int *device, int index) { return *device = shown[index], 0; }
int cuDeviceGetUuid(unsigned char *uuid, int device) {
    int place = 0;
    for (char *c = order[device] + strlen("GPU-"); *c && place < 16; c += *c == '-')
        sscanf(c, "%2hhx", &uuid[place++]), c += 2;
    return 0;
}
"""


def test_on_a_mixed_machine_cuda_itself_says_which_gpus_its_numbers_mean(
    opened: Open, tmp_path: Path
) -> None:
    """To CUDA the H200 is number 0; along the PCI bus it is the last."""
    source = tmp_path / "cuda.c"
    source.write_text(CUDA)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    environment = {
        "LD_LIBRARY_PATH": str(tmp_path),
        "SCRIPTED_CUDA": ",".join(default_uuid(index) for index in (2, 0, 1)),
        "CUDA_VISIBLE_DEVICES": "0,2",
    }
    slow, fast = Gpu(name="NVIDIA A10"), Gpu()
    probe = opened(slow, slow, fast, environment=environment)
    assert indices(probe) == [2, 1]
    assert "order_is_assumed" not in probe.devices[0].facts
    probe.close()


def test_a_gpu_the_program_computes_on_is_marked_once(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "PERIOD_S", 0.0)
    strangers = [(99_999_991, 10**9)]
    probe = opened(
        Gpu(processes=strangers), Gpu(processes=[*strangers, ("self", 2 * 10**9)]), pid=os.getpid()
    )
    assert [mark.detail for mark in marks(probe.read())] == [default_uuid(1)]
    assert marks(probe.read()) == []
    probe.close()


def test_a_child_of_the_program_computes_for_it(opened: Open) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        probe = opened(Gpu(processes=[(child.pid, 1)]), pid=os.getpid())
        (mark,) = marks(probe.read())
        assert (mark.name, mark.detail) == ("device_used", default_uuid(0))
        probe.close()
        child.communicate(b"\n")


# A launcher and two ranks; each waits until its standard input, which they share, is closed.
TWO_RANKS = """
import subprocess, sys
wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
ranks = [subprocess.Popen(wait) for _ in range(2)]
print(*(rank.pid for rank in ranks), flush=True)
for rank in ranks:
    rank.wait()
"""


@pytest.mark.parametrize(
    ("said", "seen"),
    [({"LOCAL_WORLD_SIZE": "2"}, [0, 1]), ({"LOCAL_WORLD_SIZE": "1"}, [0]), ({}, [0])],
    ids=["two ranks here", "one rank here", "no launcher"],
)
def test_the_rank_that_reads_for_all_sees_the_gpus_of_the_others_in_use(
    opened: Open, said: dict[str, str], seen: list[int]
) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", TWO_RANKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with launcher:
        assert launcher.stdout is not None
        first, second = map(int, launcher.stdout.readline().split())
        stranger = os.getpid()
        gpus = [Gpu(processes=[(pid, 10**9)]) for pid in (first, second, stranger)]
        probe = opened(*gpus, pid=first, environment=said)
        used = [mark.detail for mark in marks(probe.read()) if mark.name == "device_used"]
        probe.close()
        launcher.communicate()
    assert used == [default_uuid(index) for index in seen]
