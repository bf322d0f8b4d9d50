"""What the process probe promises: on real process trees, and on scripted kernel files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from ergmeter.errors import NotMeasurable
from ergmeter.ports import Probe, ProbeRequest
from ergmeter.probes.process import CpuLedger, ProcessProbe, Usage

MIB = 1 << 20

PRELUDE = """
import os, resource, signal, sys, time

def burn(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

def say(*words):
    print(*words, flush=True)

def hear():
    sys.stdin.readline()

def used():
    return sum(sum(resource.getrusage(who)[:2]) for who in
               (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

def child(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid
"""


class Program:
    """A program under measurement that we talk to line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def hears(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def running(body: str) -> Iterator[Program]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", PRELUDE + textwrap.dedent(body)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield Program(process)
        finally:
            process.kill()


def probe_of(pid: int, **options: object) -> ProcessProbe:
    return ProcessProbe(ProbeRequest(pid=pid, path="/", options=options))


def cpu_s(probe: ProcessProbe) -> float:
    (sample,) = probe.read()
    assert sample.cpu_s is not None
    return sample.cpu_s


def memory_bytes(probe: ProcessProbe) -> int:
    (sample,) = probe.read()
    assert sample.memory_bytes is not None
    return sample.memory_bytes


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# The kernel counts in ticks of 10 ms for each of the four times of each process; to start and end
# one costs some more, above all where caches are cold. A child left out or counted twice is 0.4.
TICKS_S = 0.15


def test_a_childs_cpu_time_counts_while_it_runs_and_once_after_it_was_waited_for() -> None:
    body = """
    pid = child(lambda: (burn(0.4), say("child worked"), hear(), burn(0.2)))
    os.waitpid(pid, 0)
    say(used())
    hear()
    """
    with running(body) as program:
        assert program.says() == "child worked"
        probe = probe_of(program.pid)
        assert 0.35 < cpu_s(probe) < 0.75
        program.hears()
        truth_s = float(program.says())
        assert cpu_s(probe) == pytest.approx(truth_s, abs=TICKS_S)
        assert cpu_s(probe) == pytest.approx(truth_s, abs=TICKS_S)


def test_a_child_that_lived_between_two_reads_is_counted() -> None:
    body = """
    say("ready")
    hear()
    os.waitpid(child(lambda: burn(0.4)), 0)
    say("done")
    hear()
    """
    with running(body) as program:
        program.says()
        probe = probe_of(program.pid)
        before_s = cpu_s(probe)
        program.hears()
        program.says()
        assert cpu_s(probe) - before_s == pytest.approx(0.4, abs=TICKS_S)


def test_a_child_nobody_waits_for_keeps_what_it_used_when_it_is_gone() -> None:
    body = """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    child(lambda: (burn(0.4), say("child worked"), hear()))
    time.sleep(60)
    """
    with running(body) as program:
        program.says()
        probe = probe_of(program.pid)
        before_s = cpu_s(probe)
        children = psutil.Process(program.pid).children()
        program.hears()
        eventually(lambda: not children[0].is_running())
        assert before_s > 0.35
        assert cpu_s(probe) == pytest.approx(before_s, abs=TICKS_S)


def test_a_grandchild_whose_parent_died_still_belongs_to_the_program() -> None:
    body = """
    def middle():
        child(lambda: (say(os.getpid()), hear(), burn(0.4), say("worked"), hear()))
        hear()
    os.waitpid(child(middle), 0)
    time.sleep(60)
    """
    with running(body) as program:
        grandchild = int(program.says())
        probe = probe_of(program.pid)
        before_s = cpu_s(probe)
        middle = psutil.Process(grandchild).ppid()
        os.kill(middle, signal.SIGKILL)
        eventually(lambda: psutil.Process(grandchild).ppid() != middle)
        probe._look_again_s = 0.0  # the tree is looked up afresh
        assert cpu_s(probe) - before_s < 0.2
        program.hears()
        assert program.says() == "worked"
        assert cpu_s(probe) - before_s == pytest.approx(0.4, abs=TICKS_S)
        os.kill(grandchild, signal.SIGKILL)
        eventually(lambda: not psutil.pid_exists(grandchild))
        assert cpu_s(probe) - before_s == pytest.approx(0.4, abs=TICKS_S)


def test_memory_is_the_resident_size_of_the_whole_tree() -> None:
    body = """
    def hold():
        block = os.urandom(64 << 20)
        say("large")
        hear()
    say("small")
    hear()
    os.waitpid(child(hold), 0)
    """
    with running(body) as program:
        program.says()
        probe = probe_of(program.pid, period_s=0.1)
        small = memory_bytes(probe)
        assert small == psutil.Process(program.pid).memory_info().rss
        program.hears()
        program.says()
        probe._look_again_s = 0.0  # as after the time that a look at all processes may cost
        assert 64 * MIB < memory_bytes(probe) - small < 64 * MIB + 2 * small


def test_the_mark_is_of_the_process_that_held_most_at_any_time_between_two_reads() -> None:
    body = """
    def hold(size):
        block = b"x" * size
        del block
        say("held")
        hear()
    say("ready")
    hear()
    child(lambda: hold(200 << 20))
    hold(300 << 20)
    """
    with running(body) as program:
        program.says()
        probe = probe_of(program.pid)
        (before,) = probe.read()
        program.hears()
        assert [program.says(), program.says()] == ["held", "held"]
        probe._look_again_s = 0.0
        (after,) = probe.read()
        assert before.memory_peak_bytes is not None
        assert before.memory_peak_bytes < 100 * MIB
        assert after.memory_bytes is not None
        assert after.memory_bytes < 100 * MIB
        assert after.memory_peak_bytes is not None
        assert 300 * MIB < after.memory_peak_bytes < 400 * MIB


def test_what_the_kernel_says_at_the_end_is_the_last_sample() -> None:
    said: list[int] = []
    with running("say('ready'); hear()") as program:
        program.says()
        probe = probe_of(program.pid, peak_bytes=lambda: said[0] if said else None)
        (only,) = probe.read_last()
        assert only.cpu_s is not None
        program.hears()
        program.process.wait()
        assert probe.read_last() == []
        said.append(123 * MIB)
        (last,) = probe.read_last()
        assert (last.memory_peak_bytes, last.memory_bytes, last.cpu_s) == (123 * MIB, None, None)


def test_a_program_that_exited_has_its_final_cpu_time_and_no_memory_then_nothing() -> None:
    with running("say('ready'); hear(); burn(0.3)") as program:
        program.says()
        probe = probe_of(program.pid)
        before_s = cpu_s(probe)
        program.hears()
        eventually(lambda: psutil.Process(program.pid).status() == psutil.STATUS_ZOMBIE)
        (last,) = probe.read()
        assert last.memory_bytes is None
        assert last.cpu_s == pytest.approx(before_s + 0.3, abs=TICKS_S)
        program.process.wait()
        assert probe.read() == []
        assert probe.read() == []


def test_the_device_names_the_program() -> None:
    with running("say('ready'); hear()") as program:
        program.says()
        probe: Probe = probe_of(program.pid)
        (device,) = probe.devices
        assert device.id == f"process:{os.uname().nodename}:{program.pid}"
        assert device.kind == "process"
        assert device.name.startswith("python")
        assert device.facts == {"pid": program.pid}
        assert probe.period_s == 2.0


def test_a_process_that_does_not_exist_is_refused() -> None:
    with running("") as program:
        program.process.wait()
        with pytest.raises(NotMeasurable, match=f"process {program.pid} cannot be watched"):
            probe_of(program.pid)


def usage(parent: int, own_s: float, waited_s: float = 0.0, started_s: float = 0.0) -> Usage:
    return Usage(parent, started_s, own_s, waited_s)


def test_ledger_credits_a_child_waited_for_between_the_reads_of_parent_and_child_once() -> None:
    ledger = CpuLedger()
    assert ledger.enter({1: usage(0, 10), 2: usage(1, 5)}) == 15
    assert ledger.enter({1: usage(0, 10)}) == 15
    assert ledger.enter({1: usage(0, 10, waited_s=6)}) == 16


def test_ledger_credits_a_whole_branch_that_ended_once() -> None:
    ledger = CpuLedger()
    ledger.enter({1: usage(0, 1), 2: usage(1, 2), 3: usage(2, 4)})
    assert ledger.enter({1: usage(0, 1, waited_s=6.5)}) == 7.5


def test_ledger_does_not_hold_an_ignored_child_against_one_waited_for_later() -> None:
    ledger = CpuLedger()
    ledger.enter({1: usage(0, 1), 2: usage(1, 5)})
    ledger.enter({1: usage(0, 1)})
    ledger.enter({1: usage(0, 1)})
    assert ledger.enter({1: usage(0, 1, waited_s=3)}) == 9


def test_ledger_takes_a_reused_pid_for_a_new_process() -> None:
    ledger = CpuLedger()
    ledger.enter({1: usage(0, 1), 2: usage(1, 5, started_s=100)})
    assert ledger.enter({1: usage(0, 1, waited_s=5), 2: usage(1, 2, started_s=200)}) == 8
