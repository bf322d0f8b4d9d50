"""What `AllocatorProbe` promises, on a torch whose books are known (tests/device: real)."""

from __future__ import annotations

import os
import platform
import sys
from types import SimpleNamespace

import pytest

from ergmeter.errors import NotMeasurable
from ergmeter.ports import ProbeRequest
from ergmeter.probes.allocator import AllocatorProbe

BOOKS = {
    "allocated_bytes.all.current": 1,
    "allocated_bytes.all.peak": 20,
    "reserved_bytes.all.current": 300,
    "reserved_bytes.all.peak": 4000,
    "inactive_split_bytes.all.current": 50_000,
    "inactive_split_bytes.all.peak": 600_000,
}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two devices, of which this process has touched the second."""
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        get_device_name=lambda index: "NVIDIA H200",
        get_device_properties=lambda index: SimpleNamespace(uuid=f"uuid-{index}"),
        memory_stats=lambda index: BOOKS if index else dict.fromkeys(BOOKS, 0),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return cuda


def test_the_high_water_marks_are_told_of_a_device_that_was_touched(cuda: SimpleNamespace) -> None:
    probe = AllocatorProbe(ProbeRequest(os.getpid(), "/"))
    (sample,) = probe.read()
    assert sample.device == probe.devices[1].id
    assert (sample.allocated_bytes, sample.allocated_peak_bytes) == (1, 20)
    assert sample.reserved_bytes == 4000
    assert sample.split_bytes == 600_000


def test_the_ranks_of_a_run_have_an_allocator_each(cuda: SimpleNamespace) -> None:
    devices = AllocatorProbe(ProbeRequest(os.getpid(), "/")).devices
    ours = f"torch:{platform.node()}:{os.getpid()}"
    assert [device.id for device in devices] == [f"{ours}:cuda:0", f"{ours}:cuda:1"]
    assert devices[1].facts == {"uuid": "GPU-uuid-1"}


def test_nothing_is_said_before_torch_has_begun(cuda: SimpleNamespace) -> None:
    asked: list[str] = []
    cuda.is_initialized = lambda: False
    for name in ("is_available", "device_count", "get_device_name", "get_device_properties"):
        setattr(cuda, name, lambda *_, name=name: asked.append(name))
    with pytest.raises(NotMeasurable, match="uses no GPU"):
        AllocatorProbe(ProbeRequest(os.getpid(), "/"))
    assert not asked  # each of these would initialise CUDA


def test_a_program_without_torch_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(NotMeasurable, match="torch is not loaded"):
        AllocatorProbe(ProbeRequest(os.getpid(), "/"))
