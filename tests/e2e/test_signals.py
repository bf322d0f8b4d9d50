"""Signals reach the recorded command, each of them once, and its exit code comes back."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.e2e.conftest import ERG, PYTHON, QUICK, TIMEOUT_S, eventually, script

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import Lab

RECORD = (ERG, "record", *QUICK, "--out", "run", "--")


def noted(lab: Lab) -> list[str]:
    path = lab.path / "signals"
    return path.read_text().split() if path.exists() else []


def start_ready(lab: Lab, end_at: str, code: int = 7) -> subprocess.Popen[bytes]:
    command = script("signals", "signals", end_at, code)
    recorder = lab.start_recording(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    eventually(lambda: noted(lab) == ["ready"], "the command's handlers")
    return recorder


def start_listening(lab: Lab, end_at: str) -> subprocess.Popen[bytes]:
    """Ready, and the recorder has sent a first signal on: it is past its own start."""
    recorder = start_ready(lab, end_at)
    recorder.send_signal(signal.SIGUSR2)
    eventually(lambda: noted(lab) == ["ready", "SIGUSR2"], "the first signal")
    return recorder


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_signal_to_the_recorder_reaches_the_command_once(lab: Lab, name: str) -> None:
    recorder = start_ready(lab, name)
    recorder.send_signal(signal.Signals[name])
    out, err = recorder.communicate(timeout=TIMEOUT_S)
    assert noted(lab) == ["ready", name]
    assert (recorder.returncode, out, err) == (7, b"ready\nsaved\n", b"")
    assert lab.report()["status"] == "failed (exit code 7)"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1"])
def test_a_command_that_dies_of_a_signal_gives_the_shells_exit_code(lab: Lab, name: str) -> None:
    recorder = lab.start_recording("sh", "-c", "touch ready; exec sleep 60")
    eventually((lab.path / "ready").exists, "the command")
    recorder.send_signal(signal.Signals[name])
    assert recorder.wait(TIMEOUT_S) == 128 + signal.Signals[name]
    assert lab.report()["status"] == f"killed by {name}"


def test_a_signal_sent_before_the_recorder_measures_reaches_the_command_too(lab: Lab) -> None:
    recorder = lab.start_recording("sleep", "60")
    eventually((lab.path / "run").exists, "the run")
    recorder.send_signal(signal.SIGTERM)
    # At most in the instant between making the run and starting the command it is the recorder's.
    assert recorder.wait(TIMEOUT_S) in (143, -signal.SIGTERM)
    os.utime(lab.path / "run" / "run.json", (1, 1))  # a writer that is not there does not come
    assert lab.report()["status"] in ("killed by SIGTERM", "cut off")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_to_the_whole_group_is_not_sent_a_second_time(lab: Lab, name: str) -> None:
    recorder = start_listening(lab, name)
    os.killpg(recorder.pid, signal.Signals[name])
    out, err = recorder.communicate(timeout=TIMEOUT_S)
    assert noted(lab) == ["ready", "SIGUSR2", name]
    assert (recorder.returncode, out, err) == (7, b"ready\nsaved\n", b"")
    assert lab.report()["status"] == "failed (exit code 7)"


def test_a_command_that_died_with_the_whole_group_is_reported_as_it_died(lab: Lab) -> None:
    recorder = lab.start_recording("sh", "-c", "touch ready; exec sleep 60")
    eventually((lab.path / "ready").exists, "the command")
    os.killpg(recorder.pid, signal.SIGTERM)
    assert recorder.wait(TIMEOUT_S) == 143
    assert lab.report()["status"] == "killed by SIGTERM"


def test_signals_to_the_group_and_to_the_recorder_are_told_apart(lab: Lab) -> None:
    recorder = start_listening(lab, "SIGTERM")
    for count in range(2, 8):
        if count % 2:
            os.killpg(recorder.pid, signal.SIGUSR1)
        else:
            recorder.send_signal(signal.SIGUSR1)
        eventually(lambda: len(noted(lab)) > count, f"signal {count}")  # noqa: B023
        time_for_a_second_one(lab.path)
    recorder.send_signal(signal.SIGTERM)
    recorder.communicate(timeout=TIMEOUT_S)
    assert noted(lab) == ["ready", "SIGUSR2", *["SIGUSR1"] * 6, "SIGTERM"]


def test_a_relay_that_is_held_up_is_heard_before_a_signal_is_sent_again(lab: Lab) -> None:
    """As on a busy node: it has got the group's signal, and no core to say so."""
    recorder = start_listening(lab, "SIGTERM")
    own = psutil.Process(recorder.pid)
    (relay,) = [one for one in own.children() if one.cmdline() == own.cmdline()]  # it is a fork
    relay.suspend()
    os.killpg(recorder.pid, signal.SIGUSR1)
    eventually(lambda: noted(lab)[2:], "the command's own")
    time_for_a_second_one(lab.path)
    relay.resume()
    time_for_a_second_one(lab.path)
    recorder.send_signal(signal.SIGTERM)
    recorder.communicate(timeout=TIMEOUT_S)
    assert noted(lab) == ["ready", "SIGUSR2", "SIGUSR1", "SIGTERM"]


def time_for_a_second_one(path: Path) -> None:
    """Three times what the recorder waits before it sends a signal on."""
    subprocess.run(["sleep", "0.15"], cwd=path, check=True)


def test_control_c_on_a_terminal_interrupts_the_command_once(lab: Lab) -> None:
    terminal = lab.terminal(*RECORD, *script("signals", "signals", "SIGINT", 5))
    terminal.read_until(b"ready\r\n")
    terminal.type(b"\x03")
    shown = terminal.read_all()
    assert terminal.process.wait(TIMEOUT_S) == 5
    assert noted(lab) == ["ready", "SIGINT"]
    assert shown == b"ready\r\n^Csaved\r\n"
    assert lab.report()["status"] == "failed (exit code 5)"


def test_a_command_killed_by_control_c_is_reported_as_that(lab: Lab) -> None:
    terminal = lab.terminal(*RECORD, "sh", "-c", "echo ready; exec sleep 60")
    terminal.read_until(b"ready\r\n")
    terminal.type(b"\x03")
    assert terminal.process.wait(TIMEOUT_S) == 130
    assert lab.report()["status"] == "killed by SIGINT"


def test_an_impatient_second_control_c_changes_nothing(lab: Lab) -> None:
    terminal = lab.terminal(*RECORD, *script("signals", "signals", "SIGINT", 5, 2))
    terminal.read_until(b"ready\r\n")
    terminal.type(b"\x03")
    eventually(lambda: noted(lab) == ["ready", "SIGINT"], "the first one")
    terminal.type(b"\x03")
    shown = terminal.read_all()
    assert shown == b"ready\r\n^C^Csaved\r\n"
    assert terminal.process.wait(TIMEOUT_S) == 5
    assert lab.report()["status"] == "failed (exit code 5)"


def test_a_signal_the_command_was_started_to_ignore_stays_ignored(lab: Lab) -> None:
    finishes = "sh -c 'echo ready; while [ ! -e go ]; do sleep 0.05; done'"
    recorder = lab.start(
        "sh", "-c", f"trap '' HUP; exec {' '.join(RECORD)} {finishes}", stdout=subprocess.PIPE
    )
    assert recorder.stdout is not None
    assert recorder.stdout.readline() == b"ready\n"
    os.killpg(recorder.pid, signal.SIGHUP)
    time_for_a_second_one(lab.path)
    (lab.path / "go").touch()
    assert recorder.wait(TIMEOUT_S) == 0
    assert lab.report()["status"] == "finished"


def test_a_training_that_is_interrupted_has_the_exit_code_of_an_interrupt(lab: Lab) -> None:
    """Python forgets it where a string is executed at the end, as modules of ours do."""
    lines = (
        "import torch",
        "model = torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "for _ in range(5): model(torch.ones(1, 2)).sum().backward(); optimizer.step()",
        "raise KeyboardInterrupt",
    )
    assert lab.record(PYTHON, "-c", "\n".join(lines)).returncode == 130
    assert lab.report()["status"] == "killed by SIGINT"
