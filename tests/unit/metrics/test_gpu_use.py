"""A GPU that the run did not use is left out and named; one of which that is unknown is marked."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from ergmeter.errors import UsageError
from ergmeter.metrics.evidence.gpu_use import board_facts
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Device, Flops, Mark, Missing, Sample
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.runs import add_writer, even_steps, make_run, reading, reason, run_of

if TYPE_CHECKING:
    from pathlib import Path

S = 10**9
WATTS = {"GPU-a": 300.0, "GPU-b": 70.0}
GPUS = [
    Device(id_, "gpu", "NVIDIA H200", "nvml", {"power_field": "instant", "index": index})
    for index, id_ in enumerate(WATTS)
]
PACKAGE = Device("cpu:0", "cpu", "Test CPU", "rapl")
NOBODY = "no process of the run used it"
BOTH_J = 10 * (300 + 70)


def samples(*devices: Device) -> list[Sample]:
    """Energy counters, ten times a second, from 1 s before the first of ten steps to 1 s after."""
    return [
        Sample(t * S // 10, one.id, energy_j=1000 + WATTS.get(one.id, 40.0) * (t + 10) / 10)
        for one in devices
        for t in range(-10, 111)
    ]


def made(path: Path, *marks: Mark, devices: list[Device] | None = None, **more: Any) -> Run:
    devices = GPUS if devices is None else devices
    given = {"steps": even_steps(10, tokens_computed=100), "samples": samples(*devices), **more}
    return run_of(path, devices=devices, marks=marks, **given)


def used(id_: str) -> Mark:
    return Mark(0, "device_used", id_)


def unused(id_: str) -> Mark:
    return Mark(0, "device_unused", f"{id_} {NOBODY}")


def unknown(id_: str, why: str = "the driver did not always list the processes on it") -> Mark:
    return Mark(0, "device_unknown", f"{id_} {why}")


def test_an_unused_gpu_is_left_out_and_named(tmp_path: Path) -> None:
    run = made(tmp_path / "run", used("GPU-a"), unused("GPU-b"))
    found = reading(run, "energy.run_j")
    assert found.value == pytest.approx(3000)
    assert found.basis == "measured"
    assert "left out, not used by this run: NVIDIA H200 [GPU-b]" in found.note
    assert reading(run, "throughput.tokens_per_s_per_device").value == pytest.approx(100)
    assert "GPU-b" not in summarize(run).devices
    (note,) = [note for note in summarize(run).notes if "GPU-b" in note]
    assert note == (
        "not used by this run, so not in its energy, peak and device count:"
        " NVIDIA H200 [GPU-b] (--devices counts them)"
    )


def test_the_peak_is_that_of_the_gpus_that_were_used(tmp_path: Path) -> None:
    # A second of a dense H200 in bf16, by NVIDIA's data sheet.
    flops = Flops(989.5e12, "6N", "declared", tokens_per_step=100)
    header = {"flops": [asdict(flops)]}
    both = made(tmp_path / "both", used("GPU-a"), used("GPU-b"), header=header)
    one = made(tmp_path / "one", used("GPU-a"), unused("GPU-b"), header=header)
    whole, half = (reading(run, "utilization.mfu_frac", dtype="bf16").value for run in (one, both))
    assert whole == pytest.approx(1.0, rel=1e-3)
    assert half == pytest.approx(whole / 2)


def test_a_run_that_used_no_gpu_is_a_run_of_the_cpu(tmp_path: Path) -> None:
    run = made(tmp_path / "run", unused("GPU-a"), unused("GPU-b"), devices=[*GPUS, PACKAGE])
    found = reading(run, "energy.run_j")
    assert found.value == pytest.approx(10 * 40)
    assert "Test CPU" in found.note
    assert "left out, not used by this run: NVIDIA H200 [GPU-a], NVIDIA H200 [GPU-b]" in found.note
    said = "not used by this run"
    assert said in reason(run, "energy.accelerator_j")
    assert said in reason(run, "throughput.tokens_per_s_per_device")
    assert board_facts(run)["device"] == "Test CPU"


def test_without_another_sensor_it_has_no_energy_and_says_why(tmp_path: Path) -> None:
    run = made(tmp_path / "run", unused("GPU-a"), unused("GPU-b"))
    assert "NVIDIA H200 [GPU-b] not used by this run" in reason(run, "energy.run_j")
    assert "NVIDIA H200 [GPU-b] not used by this run" in reason(run, "energy.joules_per_token")


def test_an_unknown_gpu_counts_and_its_energy_is_derived(tmp_path: Path) -> None:
    run = made(tmp_path / "run", used("GPU-a"), unknown("GPU-b"))
    for key in ("energy.run_j", "energy.joules_per_token", "energy.train_j"):
        assert reading(run, key).basis == "derived"
    found = reading(run, "energy.run_j")
    assert found.value == pytest.approx(BOTH_J)
    assert "counted, but its use by this run is unknown: NVIDIA H200 [GPU-b]" in found.note
    (note,) = [note for note in summarize(run).notes if "GPU-b" in note]
    assert note.startswith(
        "whether this run used NVIDIA H200 [GPU-b] is unknown: the driver did not always list"
    )
    # What the board drew is measured, whoever used it.
    device = summarize(run).devices["GPU-b"]["energy.run_j"]
    assert device.basis == "measured"  # type: ignore[union-attr]


def test_what_is_marked_last_holds_but_use_is_for_good(tmp_path: Path) -> None:
    later = made(tmp_path / "later", used("GPU-a"), unknown("GPU-b"), unused("GPU-b"))
    assert reading(later, "energy.run_j").value == pytest.approx(3000)
    once = made(tmp_path / "once", unused("GPU-b"), used("GPU-b"), unknown("GPU-b"), used("GPU-a"))
    assert reading(once, "energy.run_j").value == pytest.approx(BOTH_J)
    assert reading(once, "energy.run_j").basis == "measured"


def test_what_one_writer_saw_in_use_is_used(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    steps = even_steps(10, tokens_computed=100)
    add_writer(path, steps=steps, samples=samples(*GPUS), devices=GPUS,
               marks=[used("GPU-a"), unused("GPU-b")])  # fmt: skip
    add_writer(path, devices=GPUS, marks=[used("GPU-b"), unused("GPU-a")])
    assert reading(Run.open(path), "energy.run_j").value == pytest.approx(BOTH_J)


def test_memory_of_a_framework_is_proof_of_use(tmp_path: Path) -> None:
    """In a container the driver does not know our process, but torch knows its GPU."""
    books = Device("torch:h:1:cuda:0", "allocator", "torch", "allocator", {"uuid": "GPU-a"})
    other = Device("torch:h:1:cuda:1", "allocator", "torch", "allocator", {"uuid": "GPU-b"})
    held = [Sample(t * S, books.id, reserved_bytes=10**9) for t in range(10)]
    run = made(
        tmp_path / "run",
        unknown("GPU-a"),
        unused("GPU-b"),
        devices=[*GPUS, books, other],
        samples=[*samples(*GPUS), *held],
    )
    found = reading(run, "energy.run_j")
    assert found.value == pytest.approx(3000)
    assert found.basis == "measured"


@pytest.mark.parametrize(
    ("devices", "joules"),
    [("0", 3000), ("1", 700), ("0,1", BOTH_J), ("GPU-b", 700), ("all", BOTH_J)],
)
def test_devices_overrides_what_was_seen(tmp_path: Path, devices: str, joules: float) -> None:
    run = made(tmp_path / "run", unknown("GPU-a"), unused("GPU-b"))
    found = reading(run, "energy.run_j", devices=devices)
    assert found.value == pytest.approx(joules)
    assert found.basis == "measured"


def test_no_device_or_one_there_is_not(tmp_path: Path) -> None:
    run = made(tmp_path / "run", used("GPU-a"))
    none = summarize(run, Settings(devices="none")).readings["energy.run_j"]
    assert isinstance(none, Missing)
    with pytest.raises(UsageError, match=r"--devices 7: no GPU '7'; there are: 0 \(GPU-a\)"):
        summarize(run, Settings(devices="7"))
    with pytest.raises(UsageError, match="devices are indices or UUIDs"):
        Settings(devices="0,")


def test_a_run_in_which_nobody_looked_counts_all_as_before(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    found = reading(run, "energy.run_j")
    assert found.value == pytest.approx(BOTH_J)
    assert found.basis == "measured"
    assert any("which of the 2 visible GPUs" in note for note in summarize(run).notes)
