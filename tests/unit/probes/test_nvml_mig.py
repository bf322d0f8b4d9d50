"""MIG instances and vGPUs: what is theirs is read, what is their board's is not called theirs."""

from __future__ import annotations

import os

import pynvml
import pytest

from ergmeter.errors import NotMeasurable
from ergmeter.records import ACTIVITY, Sample
from tests.nvml.library import Gpu, Library, Mig, default_uuid
from tests.unit.probes.scripted import Open, gauges, marks

FIRST = "MIG-7d1c0000-0000-5000-8000-000000000001"
SECOND = "MIG-7d1c0000-0000-5000-8000-000000000002"
OTHER = "MIG-9a2f0000-0000-5000-8000-000000000003"

# A whole GPU, one that is divided in two, and one with an instance whose second number is 10.
MACHINE = [
    Gpu(power_w=100, memory_bytes=1e9),
    Gpu(
        power_w=400,
        clock_hz=1_500e6,
        instances=[Mig(1, 0, FIRST, memory_bytes=2e9), Mig(2, 0, SECOND, memory_bytes=3e9)],
    ),
    Gpu(power_w=700, instances=[Mig(1, 10, OTHER, memory_bytes=4e9)]),
]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, {default_uuid(0): 1e9, FIRST: 2e9, SECOND: 3e9, OTHER: 4e9}),
        (SECOND, {SECOND: 3e9}),
        ("MIG-9a2f", {OTHER: 4e9}),
        (f"MIG-{default_uuid(1)}/2/0", {SECOND: 3e9}),
        (f"MIG-{default_uuid(2)}/1/10", {OTHER: 4e9}),
        (f"{OTHER},0", {OTHER: 4e9, default_uuid(0): 1e9}),
        ("1", {FIRST: 2e9, SECOND: 3e9}),
        (f"0,MIG-{default_uuid(1)}/3/0,{SECOND}", {default_uuid(0): 1e9}),
        ("0,MIG-7d1c,1", {default_uuid(0): 1e9}),
    ],
    ids=[
        "unset: a divided GPU is its instances",
        "uuid",
        "start of a uuid",
        "by board and numbers",
        "numbers are not compared by how they begin",
        "its order is kept, with a whole GPU",
        "a divided GPU by its index: any of its instances",
        "ends at an instance that does not exist",
        "ends at a start that fits several",
    ],
)
def test_the_instances_are_those_cuda_visible_devices_shows(
    opened: Open, value: str | None, expected: dict[str, float]
) -> None:
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    probe = opened(*MACHINE, environment=environment)
    read = gauges(probe.read())
    assert {sample.device: sample.memory_bytes for sample in read} == expected
    assert [device.id for device in probe.devices] == list(expected)
    probe.close()


@pytest.mark.parametrize("value", ["MIG-ffff", f"MIG-{default_uuid(2)}/1/1", f"{FIRST},{FIRST}"])
def test_a_list_without_an_instance_hides_everything(opened: Open, value: str) -> None:
    with pytest.raises(NotMeasurable, match="hides every GPU"):
        opened(*MACHINE, environment={"CUDA_VISIBLE_DEVICES": value})


@pytest.mark.parametrize("power_w", [None, 400.0], ids=["refused", "answered all the same"])
def test_what_the_board_draws_is_not_its_instances(
    opened: Open, library: Library, power_w: float | None
) -> None:
    instance = Mig(1, 0, FIRST, memory_bytes=2e9, power_w=power_w)
    board = Gpu(power_w=400, clock_hz=1_500e6, instances=[instance])
    probe = opened(board, environment={"CUDA_VISIBLE_DEVICES": FIRST})
    library.stand_at(1)
    (sample,) = (record for record in probe.read() if isinstance(record, Sample))
    (device,) = probe.devices
    # Its memory, and what is the same for all of its board.
    assert sample == Sample(
        sample.t_ns, FIRST, memory_bytes=2 * 10**9, clock_hz=1_500e6, temperature_c=35, throttled=0
    )
    ((why, columns),) = device.facts["absent"].items()
    assert "can't be divided among its instances" in why
    assert {"power_w", "energy_j", "busy_frac", *ACTIVITY} <= set(columns)
    assert device.facts["power_field"] is None
    assert device.facts["has_energy_counter"] is False
    assert "power_limit_w" not in device.facts
    probe.close()


def test_the_facts_say_where_an_instance_is(opened: Open) -> None:
    (device,) = opened(*MACHINE, environment={"CUDA_VISIBLE_DEVICES": SECOND}).devices
    assert (device.id, device.kind, device.name) == (SECOND, "gpu", "NVIDIA H200 MIG 1g.18gb")
    facts = device.facts
    assert facts["mig_instance"] == {"gpu": 2, "compute": 0}
    assert (facts["index"], facts["board"]) == (1, default_uuid(1))
    assert facts["memory_total_bytes"] == 18_790_481_920


def test_an_instance_is_not_lost_for_saying_little(opened: Open) -> None:
    probe = opened(*MACHINE, environment={"CUDA_VISIBLE_DEVICES": FIRST})
    for _ in range(20):
        assert marks(probe.read()) == []
    probe.close()


def test_of_a_divided_gpu_the_instance_with_the_program_on_it_is_marked(opened: Open) -> None:
    ours, theirs = ("self", 5 * 10**8), (99_999_991, 10**9)
    board = Gpu(
        instances=[Mig(1, 0, FIRST, processes=[theirs]), Mig(2, 0, SECOND, processes=[ours])]
    )
    probe = opened(board, pid=os.getpid(), environment={"CUDA_VISIBLE_DEVICES": "0"})
    records = probe.read()
    assert [(mark.name, mark.detail) for mark in marks(records)] == [("device_used", SECOND)]
    held = [r for r in records if isinstance(r, Sample) and r.process_bytes is not None]
    assert [(sample.device, sample.process_bytes) for sample in held] == [(SECOND, 5 * 10**8)]
    probe.close()


def test_a_vgpu_has_memory_and_load_and_no_power(opened: Open) -> None:
    gpu = Gpu(
        power_w=300, memory_bytes=6e9, busy_frac=0.5,
        virtualization=pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU,
    )  # fmt: skip
    probe = opened(gpu)
    (sample,) = (record for record in probe.read() if isinstance(record, Sample))
    assert (sample.memory_bytes, sample.busy_frac) == (6 * 10**9, 0.5)
    assert (sample.power_w, sample.power_average_w, sample.energy_j) == (None, None, None)
    ((why, columns),) = probe.devices[0].facts["absent"].items()
    assert "vGPU" in why
    assert columns == ["power_w", "power_average_w", "energy_j"]
    probe.close()
