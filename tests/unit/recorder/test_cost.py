"""What the recorder says that it costs."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from ergmeter.recorder.record import RecordingCost

BUSY = """
import time
while time.process_time() < 0.4:
    pass
print(flush=True)
input()
"""


def test_the_relays_time_is_in_it_also_once_the_relay_is_gone() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=pipe, stdout=pipe) as relay:
        cost = RecordingCost(relay.pid)
        assert relay.stdout is not None
        relay.stdout.readline()
        # The kernel tells the time of another process in hundredths of a second.
        assert cost() - time.process_time() == pytest.approx(0.4, abs=0.1)
        relay.communicate(b"\n")
    before_s = time.process_time()
    assert before_s + 0.3 < cost() < time.process_time() + 0.6


def test_without_a_relay_it_is_this_process_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    before_s = time.process_time()
    assert before_s <= RecordingCost(gone.pid)() <= time.process_time()
