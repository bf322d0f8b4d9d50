"""A Meter and the processes that are forked from its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from ergmeter import Run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

CHILD = """
    import os, sys, time, multiprocessing
    from ergmeter import Budget, Meter, UsageError
    out = sys.argv[1]

    def in_child(work):
        pid = os.fork()
        if pid == 0:
            try:
                work()
            except BaseException as error:
                print(type(error).__name__, error, file=sys.stderr, flush=True)
                os._exit(1)
            sys.stderr.flush()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def run_program(path: Path, body: str) -> Run:
    program = textwrap.dedent(CHILD) + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return Run.open(path)


def steps_by_writer(run: Run) -> list[int]:
    return sorted(int((run.steps()["writer"] == n).sum()) for n in range(len(run.writers)))


def test_a_child_that_asks_for_a_summary_writes_nothing_of_its_parents(tmp_path: Path) -> None:
    run = run_program(
        tmp_path / "run",
        """
        def ask():
            assert meter.summary().status == "running"
            try:
                meter.progress()
            except UsageError as error:
                assert "not measuring" in str(error)
            else:
                raise AssertionError("the child measures nothing")

        with Meter(out, probes=(), budget=Budget(steps=10)) as meter:
            for _ in range(5):
                meter.step_end(tokens=1)
            meter.mark("before")
            in_child(ask)
            meter.step_end(tokens=1)
        """,
    )
    assert steps_by_writer(run) == [6]
    assert [mark.name for mark in run.marks].count("before") == 1
    assert (run.status, run.damage) == ("finished", [])


def test_a_child_that_marks_has_its_own_share(tmp_path: Path) -> None:
    run = run_program(
        tmp_path / "run",
        """
        def mark():
            meter.mark("in_child")
            meter.close()

        with Meter(out, probes=()) as meter:
            meter.step_end(tokens=1)
            in_child(mark)
        """,
    )
    assert len(run.writers) == 2
    marked = [w for w in run.writers if any(mark.name == "in_child" for mark in w.marks)]
    assert len(marked) == 1
    assert marked[0].header["pid"] != run.writers[0].header["pid"] or marked[0] is run.writers[0]
    assert all(writer.closed for writer in run.writers)


def test_a_childs_progress_is_its_own(tmp_path: Path) -> None:
    run = run_program(
        tmp_path / "run",
        """
        def step():
            meter.step_end(tokens=1)
            assert meter.progress().done == 1
            meter.close()

        with Meter(out, probes=(), budget=Budget(steps=10)) as meter:
            for _ in range(5):
                meter.step_end(tokens=1)
            in_child(step)
            assert meter.progress().done == 5
        """,
    )
    assert steps_by_writer(run) == [1, 5]


def test_a_childs_first_step_does_not_begin_with_its_parent(tmp_path: Path) -> None:
    run = run_program(
        tmp_path / "run",
        """
        def step():
            meter.step_end(tokens=1)
            meter.close()

        with Meter(out, probes=()) as meter:
            time.sleep(0.05)
            with open(out + ".slept", "w") as file:
                print(time.monotonic_ns(), file=file)
            in_child(step)
        """,
    )
    slept_ns = int((tmp_path / "run.slept").read_text())
    assert run.steps()["start_ns"][0] >= slept_ns


def test_a_child_whose_run_is_gone_goes_on(tmp_path: Path) -> None:
    program = textwrap.dedent(CHILD) + textwrap.dedent("""
        import shutil
        def step():
            for _ in range(3):
                meter.step_end(tokens=1)
            meter.mark("x")
            meter.close()
        meter = Meter(out, probes=()).start()
        shutil.move(out, out + "-away")
        in_child(step)
        shutil.move(out + "-away", out)
        meter.close()
    """)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1
    assert "can't be written by a forked process" in done.stderr


@pytest.mark.parametrize("leaves", ["by multiprocessing", "by its end"])
def test_a_meter_made_before_the_fork_and_started_in_the_child_is_closed(
    tmp_path: Path, leaves: str
) -> None:
    run = run_program(
        tmp_path / "run",
        f"""
        meter = Meter(out, probes=())

        def work():
            meter.start()
            meter.step_end(tokens=1)

        if {leaves!r} == "by multiprocessing":
            child = multiprocessing.get_context("fork").Process(target=work)
            child.start()
            child.join()
            assert child.exitcode == 0
        elif (pid := os.fork()) == 0:
            work()
        else:
            os.waitpid(pid, 0)
        """,
    )
    assert (run.status, run.count("steps")) == ("finished", 1)


def test_a_fork_waits_for_what_a_thread_of_ours_imports(tmp_path: Path) -> None:
    """Or the child could never import it: the parent's thread holds its lock, in the child too."""
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(0.5); ready = True")
    run_program(
        tmp_path / "run",
        f"""
        import importlib, signal, threading
        sys.path.insert(0, {str(tmp_path)!r})

        def use():
            signal.alarm(20)
            assert importlib.import_module("slow_to_import").ready

        with Meter(out, probes=[]):
            ours = threading.Thread(
                target=importlib.import_module, args=("slow_to_import",), name="ergmeter-test"
            )
            ours.start()
            time.sleep(0.1)
            in_child(use)
            ours.join()
        """,
    )
