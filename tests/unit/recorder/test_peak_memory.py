"""The kernel's word on a command's memory is taken where it can't be the recorder's own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

import pytest

from ergmeter.probes.process import high_water_bytes
from ergmeter.recorder.record import MemoryPeak

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the units of Linux")
MIB = 1 << 20


def usage(peak_bytes: int) -> resource.struct_rusage:
    return resource.struct_rusage((0.0, 0.0, peak_bytes // 1024, *[0] * 13))


def test_a_command_larger_than_the_recorder_has_its_peak() -> None:
    peak = MemoryPeak()
    with subprocess.Popen(["sleep", "60"]) as command:
        peak.started(command.pid)
        assert peak() is None
        large = (high_water_bytes("self") or 0) + 100 * MIB
        peak.ended(usage(large))
        command.kill()
    assert peak() == large


def test_what_the_command_may_have_inherited_from_us_is_not_its_peak() -> None:
    """As the kernel has it for a small program that was started from this process."""
    peak = MemoryPeak()
    ours = high_water_bytes("self") or 0
    pid = os.posix_spawn("/bin/sleep", ["sleep", "0.2"], {})
    peak.started(pid)
    _, _, said = os.wait4(pid, 0)
    assert said.ru_maxrss * 1024 > ours / 2  # for a program of two thousand kB
    peak.ended(said)
    assert (peak() or 0) < 10 * MIB


HOLD = """
import sys
block = b"x" * (30 << 20)
del block
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("words", [[], ["sh", "-c", '"$@"; true', "sh"]], ids=["own", "a child's"])
def test_a_small_command_has_the_highest_mark_that_was_seen_of_it(words: list[str]) -> None:
    peak = MemoryPeak()
    python = [*words, sys.executable, "-I", "-S", "-c", HOLD]
    pipe = subprocess.PIPE
    with subprocess.Popen(python, stdin=pipe, stdout=pipe) as command:
        peak.started(command.pid)
        assert command.stdout is not None
        assert command.stdout.readline() == b"held\n"
        deadline_s = time.monotonic() + 60
        while peak._mark_bytes < 30 * MIB:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        command.communicate(b"")
    peak.ended(usage(0))
    assert 30 * MIB <= (peak() or 0) < 60 * MIB
