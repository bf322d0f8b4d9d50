"""How much of a GPU's memory is the program's own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ergmeter.probes import usage
from ergmeter.probes.usage import UsageWatch
from ergmeter.records import Sample
from tests.nvml.library import Gpu, default_uuid
from tests.unit.probes.scripted import Open

NOT_KNOWN = -1  # as a driver says it in a container


def own_bytes(opened: Open, *gpus: Gpu) -> dict[str, int]:
    probe = opened(*gpus, pid=os.getpid())
    samples = [record for record in probe.read() if isinstance(record, Sample)]
    probe.close()
    return {s.device: s.process_bytes for s in samples if s.process_bytes is not None}


def test_what_the_program_and_its_children_hold_is_theirs_and_no_more(opened: Open) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        ours: list[tuple[int | str, int]] = [("self", 3 * 10**9), (child.pid, 2 * 10**9)]
        gpus = Gpu(processes=[*ours, (1, 7 * 10**9)]), Gpu(processes=[(1, 10**9)]), Gpu()
        assert own_bytes(opened, *gpus) == {default_uuid(0): 5 * 10**9}
        child.communicate(b"\n")


def test_a_driver_that_does_not_know_gives_nothing_rather_than_a_part(opened: Open) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        partly = Gpu(processes=[("self", 10**9), (child.pid, NOT_KNOWN)])
        assert own_bytes(opened, partly, Gpu(processes=[("self", NOT_KNOWN)])) == {}
        child.communicate(b"\n")


def test_a_child_that_begins_later_is_found_when_it_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usage, "PERIOD_S", 0.0)
    watch = UsageWatch(os.getpid(), {})
    ours = {os.getpid(): 100}
    assert watch.changes([("gpu", lambda: ours)]) == (["gpu"], {})
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        later = {**ours, child.pid: 20}
        assert watch.changes([("gpu", lambda: later)]) == ([], {})  # and is nobody else
        assert watch.own_bytes({"gpu": later}) == {"gpu": 120}
        child.communicate(b"\n")
