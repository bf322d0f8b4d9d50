"""Whether the program uses a GPU: used, unused or unknown, by what the driver lists."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pynvml
import pytest

from ergmeter.probes import usage
from ergmeter.records import Mark
from tests.nvml.library import Fault, Gpu, Library, default_uuid
from tests.unit.probes.scripted import Open, states

STRANGER = (99_999_991, 10**9)  # no process of this machine
CONTEXT = 648e6  # what a CUDA context takes on an H200
FIRST, SECOND = default_uuid(0), default_uuid(1)


@pytest.fixture(autouse=True)
def at_each_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "PERIOD_S", 0.0)


@pytest.fixture(params=["container", "machine"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """In a container the driver's process numbers may be those outside of it."""
    monkeypatch.setattr(usage, "_is_first_namespace", lambda: request.param == "machine")
    return str(request.param)


def seen(opened: Open, *gpus: Gpu) -> dict[str, str]:
    probe = opened(*gpus, pid=os.getpid())
    found = states(probe.read())
    probe.close()
    return found


def test_a_gpu_with_a_process_of_the_run_is_used_and_another_is_not(
    opened: Open, place: str
) -> None:
    assert place
    both = seen(opened, Gpu(processes=[("self", 1)]), Gpu(processes=[STRANGER]))
    assert both == {FIRST: "used", SECOND: "unused"}


def test_a_graphics_context_is_use_too(opened: Open, place: str) -> None:
    assert place
    assert seen(opened, Gpu(graphics=["self"])) == {FIRST: "used"}


def test_without_any_context_a_gpu_is_unused_wherever_we_are(opened: Open, place: str) -> None:
    assert place
    assert seen(opened, Gpu(memory_bytes=4e6)) == {FIRST: "unused"}


@pytest.mark.parametrize(
    "gpu",
    [
        Gpu(processes=[STRANGER]),
        Gpu(graphics=[STRANGER[0]]),
    ],
    ids=["strange numbers", "strange numbers that draw"],
)
def test_in_a_container_a_list_without_us_proves_nothing(
    opened: Open, place: str, gpu: Gpu
) -> None:
    assert seen(opened, gpu) == {FIRST: "unknown" if place == "container" else "unused"}


@pytest.mark.parametrize(
    "gpu",
    [Gpu(memory_bytes=CONTEXT), Gpu(faults=[Fault("memory", pynvml.NVML_ERROR_UNKNOWN)])],
    ids=["memory in use", "no memory told"],
)
def test_an_empty_list_proves_nothing_where_somebody_may_have_a_context(
    opened: Open, place: str, gpu: Gpu
) -> None:
    assert place
    assert seen(opened, gpu) == {FIRST: "unknown"}
    both = seen(opened, gpu, Gpu(processes=[("self", 1)]))
    assert both == {FIRST: "unused", SECOND: "used"}


def test_a_driver_that_lists_no_processes_leaves_it_unknown(opened: Open, place: str) -> None:
    assert place
    silent = Gpu(faults=[Fault("processes", pynvml.NVML_ERROR_NOT_SUPPORTED)])
    found = seen(opened, silent, Gpu(processes=[("self", 1)]))
    assert found == {FIRST: "unknown", SECOND: "used"}


def test_one_look_that_failed_leaves_it_unknown_for_good(
    opened: Open, library: Library, place: str
) -> None:
    assert place
    fails = Fault("processes", pynvml.NVML_ERROR_UNKNOWN, from_s=1.0, until_s=2.0)
    probe = opened(Gpu(faults=[fails]), pid=os.getpid())
    found = []
    for at_s in (0.0, 0.5, 1.5, 3.0):
        library.stand_at(at_s)
        found.append(states(probe.read()))
    probe.close()
    assert found == [{FIRST: "unused"}, {}, {FIRST: "unknown"}, {}]


def test_a_context_that_comes_later_ends_the_certainty(
    opened: Open, library: Library, place: str
) -> None:
    probe = opened(Gpu(memory_bytes=[(0, 0), (1, 0), (1, CONTEXT), (2, CONTEXT), (2, 0)]))
    found = []
    for at_s in (0.0, 1.5, 3.0):
        library.stand_at(at_s)
        found.append(states(probe.read()))
    probe.close()
    assert place
    assert found == [{FIRST: "unused"}, {FIRST: "unknown"}, {}]


def test_the_last_reading_looks_once_more(
    opened: Open, library: Library, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "PERIOD_S", 60.0)
    probe = opened(Gpu(memory_bytes=[(0, 60e6), (1, 60e6), (1, 70e6)]))  # no sudden rise
    assert states(probe.read()) == {FIRST: "unused"}
    library.stand_at(2.0)
    assert states(probe.read()) == {}
    last = states(probe.read_last())
    probe.close()
    assert place
    assert last == {FIRST: "unknown"}


def test_numbers_that_prove_to_be_ours_settle_what_was_strange(place: str) -> None:
    watch = usage.UsageWatch(os.getpid(), {})
    use = usage.UseStates(watch)
    strange, empty = usage.GpuUsage({STRANGER[0]}, (), 0), usage.GpuUsage((), (), 0)
    early = {gpu: state for gpu, (state, _) in use.changes({"a": empty, "b": strange}, ()).items()}
    assert early == {"a": "unused", "b": "unknown" if place == "container" else "unused"}
    ours = usage.GpuUsage({os.getpid()}, (), 0)
    later = {gpu: state for gpu, (state, _) in use.changes({"a": ours, "b": strange}, ()).items()}
    assert later == {"a": "used"} | ({"b": "unused"} if place == "container" else {})


def test_behind_an_mps_server_nobody_can_be_told_apart(
    opened: Open, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server:
        name = psutil.Process.name
        monkeypatch.setattr(
            psutil.Process,
            "name",
            lambda self: "nvidia-cuda-mps-server" if self.pid == server.pid else name(self),
        )
        monkeypatch.setattr(usage.UsageWatch, "_tree", lambda self: {self._pid})
        found = seen(opened, Gpu(processes=[(server.pid, 1)]), Gpu(processes=[("self", 1)]))
        server.communicate(b"\n")
    assert found == {FIRST: "unknown", SECOND: "used"}


def test_a_context_that_ended_before_a_look_leaves_the_use_unknown(
    opened: Open, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes are asked for once a second; memory in use is read each time, and rose by 26 MB."""
    monkeypatch.setattr(usage, "PERIOD_S", 1000.0)
    probe = opened(Gpu(memory_bytes=[(0, 4e6), (1, 4e6), (1, 30e6)]), pid=os.getpid())
    assert states(probe.read()) == {FIRST: "unused"}
    library.stand_at(2.0)
    found = probe.read()
    probe.close()
    assert states(found) == {FIRST: "unknown"}
    (mark,) = [one for one in found if isinstance(one, Mark) and one.name == "device_unknown"]
    assert "its memory in use rose to 30 MB" in mark.detail


def test_a_context_that_is_alive_when_memory_rises_is_seen_at_once(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rise of memory the next look would come after 1000 s."""
    monkeypatch.setattr(usage, "PERIOD_S", 1000.0)
    watch = usage.UsageWatch(os.getpid(), {})
    lists: list[list[int]] = [[]]
    gpus = [("GPU-0", lambda: lists[0])]
    watch.changes(gpus)
    lists[0] = [os.getpid()]
    assert watch.changes(gpus) == ([], {})
    assert watch.changes(gpus, now=True) == (["GPU-0"], {})
