"""Who reads a device for all ranks of a node, and who does once that one no longer can."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ergmeter import Meter
from ergmeter.meter import handover
from ergmeter.meter.run_plan import DeviceClaim, _Duty
from ergmeter.runlog.reader import Run
from ergmeter.sampler import Opened
from tests.unit.probes.tools import is_running, tool

LINE = '{"gpu_power": 1.0, "cpu_power": 1.0}'
LONG = [LINE] * 3000  # a minute of them


@pytest.fixture(autouse=True)
def _of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both in this process: a claim is on a socket's name, whoever holds it."""
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, value in {**group, "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(handover, "HAND_OVER_S", 0.05)


def rank(tmp_path: Path, name: str, lines: list[str], **script: Any) -> Meter:
    """A rank that would read macmon, or what stands for it."""
    folder = tmp_path / name
    folder.mkdir()
    path = tool(folder, "macmon", lines, **script)
    options = {"apple": {"tool": str(path), "period_s": 0.05}}
    return Meter(tmp_path / "run", probes=["apple"], probe_options=options)


def marks(tmp_path: Path, name: str) -> list[str]:
    return [mark.detail for mark in Run.open(tmp_path / "run").marks if mark.name == name]


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.parametrize("ending", ["exit 3", "echo garbage; while :; do sleep 0.1; done"])
def test_a_rank_whose_probe_fails_lets_another_read(tmp_path: Path, ending: str) -> None:
    tools = {"first": [LINE] * 10, "second": LONG}
    shares = []
    for name, lines in tools.items():
        own = {"ending": ending} if name == "first" else {}
        shares.append(rank(tmp_path, name, lines, **own).plan.begun())
        shares[-1].start()
    until(lambda: bool(marks(tmp_path, "took_over")))
    until(lambda: is_running(str(tmp_path / "second" / "macmon")))
    for share in shares:
        share.stop(None)
    until(lambda: not any(is_running(str(tmp_path / name / "macmon")) for name in tools))
    assert len(marks(tmp_path, "probe_failed")) == 1
    assert marks(tmp_path, "took_over") == ["apple"]


def taken_by(duty: _Duty) -> Opened:
    opened = duty.taken()
    assert opened is not None
    return opened


def test_a_rank_that_can_not_open_what_falls_to_it_leaves_it_to_the_next(tmp_path: Path) -> None:
    first, second, third = (
        _Duty(rank(tmp_path, name, LONG).plan, "apple", word=str(tmp_path)) for name in "abc"
    )
    read = taken_by(first)
    assert [probe.name for probe in read.probes] == ["apple"]
    for duty in (second, third):
        assert duty.taken() is None
    (tmp_path / "b" / "macmon").unlink()
    first.release()
    assert "apple" in taken_by(second).unavailable
    instead = taken_by(third)
    assert [probe.name for probe in instead.probes] == ["apple"]
    for probe in (*read.probes, *instead.probes):
        probe.close()
    third.release()


def test_a_rank_that_ends_takes_nothing_over(tmp_path: Path) -> None:
    """Both end at once: the second would hold a claim, and run a tool, that nobody reads."""
    first, second = (
        _Duty(rank(tmp_path, name, LONG).plan, "apple", word=str(tmp_path)) for name in "ab"
    )
    (probe,) = taken_by(first).probes
    second.taken()
    second.release()
    first.release()
    probe.close()
    assert second.taken() is None
    third = _Duty(rank(tmp_path, "c", LONG).plan, "apple", word=str(tmp_path))
    (probe,) = taken_by(third).probes  # nobody holds the claim
    probe.close()
    third.release()


def test_an_end_that_comes_while_a_probe_is_opened_leaves_neither_tool_nor_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    duty = _Duty(rank(tmp_path, "a", LONG).plan, "apple", word=str(tmp_path))
    taken = DeviceClaim.take

    def ends_meanwhile(claim: DeviceClaim) -> bool:
        thread = threading.Thread(target=duty.release)
        thread.start()
        thread.join()
        return taken(claim)

    monkeypatch.setattr(DeviceClaim, "take", ends_meanwhile)
    assert duty.taken() is None
    monkeypatch.undo()
    assert not is_running(str(tmp_path / "a" / "macmon"))
    other = _Duty(rank(tmp_path, "b", LONG).plan, "apple", word=str(tmp_path))
    (probe,) = taken_by(other).probes
    probe.close()
    other.release()
