"""`erg watch` on a real terminal, of a training that goes on, ends, is killed or vanishes."""

from __future__ import annotations

import os
import re
import signal
from subprocess import PIPE
from typing import TYPE_CHECKING

import pytest

from ergmeter import Run
from tests.e2e.conftest import ERG, TIMEOUT_S, environment, eventually, script

if TYPE_CHECKING:
    import subprocess

    from tests.e2e.conftest import Lab, Terminal

pytestmark = pytest.mark.soak

FOREVER = 1_000_000
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
ON_SCREEN, OFF_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


def started(lab: Lab) -> subprocess.Popen[bytes]:
    """A training that has made some steps, and makes more until it is told to stop: however long
    the watcher takes to start, there is something to watch."""
    training = lab.start(*script("watched", "runs/one", FOREVER))
    eventually(lambda: _steps(lab) >= 20, "the first steps on disk")
    return training


def _steps(lab: Lab) -> int:
    path = lab.path / "runs" / "one"  # and not what is made under another name, to become it
    return Run.open(path).count("steps") if (path / "run.json").exists() else 0


def stop(lab: Lab) -> None:
    (lab.path / "runs" / "one.stop").touch()


def watched(lab: Lab, *options: object, columns: int = 100) -> Terminal:
    arguments = (ERG, "watch", "--interval", "0.3", *options)
    return lab.terminal(*arguments, rows=40, columns=columns)


def test_a_training_is_shown_until_it_ends_and_then_its_card(lab: Lab) -> None:
    training = started(lab)
    terminal = watched(lab)
    terminal.read_until(b"running")
    terminal.read_until(b" of 1,000,000")
    stop(lab)
    shown = terminal.read_all()
    assert terminal.process.wait(TIMEOUT_S) == 0
    assert training.wait(TIMEOUT_S) == 0
    assert shown.index(ON_SCREEN) < shown.index(b"running") < shown.index(OFF_SCREEN)
    card = shown[shown.index(OFF_SCREEN) :]
    assert b"finished" in card
    assert b"tokens/s" in card


@pytest.mark.parametrize("keys", [b"q", b"\x03"])
def test_a_key_ends_it_and_leaves_training_and_terminal_as_they_were(lab: Lab, keys: bytes) -> None:
    training = started(lab)
    terminal = watched(lab, "runs/one")
    terminal.read_until(b"running")
    terminal.type(keys)
    shown = terminal.read_all()
    assert terminal.process.wait(TIMEOUT_S) == 0
    assert OFF_SCREEN in shown
    assert b"Traceback" not in shown
    assert training.poll() is None


def test_a_killed_writer_is_shown_as_cut_off(lab: Lab) -> None:
    training = started(lab)
    terminal = watched(lab, "runs")
    terminal.read_until(b"running")
    os.killpg(training.pid, signal.SIGKILL)
    training.wait(TIMEOUT_S)
    terminal.read_until(b"cut off")
    shown = terminal.read_all()
    assert terminal.process.wait(TIMEOUT_S) == 0
    assert b"its writer is gone" in shown


def test_a_run_that_vanishes_is_told_in_a_line(lab: Lab) -> None:
    started(lab)  # and goes on: one that was killed before would be cut off, if that is seen first
    terminal = watched(lab, "runs/one")
    terminal.read_until(b"running")
    (lab.path / "runs" / "one").rename(lab.path / "away")
    shown = terminal.read_all()
    after = shown[shown.rindex(OFF_SCREEN) :]
    assert b"is gone: its directory was moved or removed" in after
    assert b"Traceback" not in shown
    assert terminal.process.wait(TIMEOUT_S) == 1


def test_a_signal_that_ends_it_leaves_the_terminal_as_it_was(lab: Lab) -> None:
    started(lab)
    terminal = watched(lab)
    terminal.read_until(b"running")
    terminal.process.terminate()
    shown = terminal.read_all()
    assert OFF_SCREEN in shown
    assert terminal.process.wait(TIMEOUT_S) == 143


def test_into_a_pipe_there_are_lines(lab: Lab) -> None:
    started(lab)
    watching = lab.start(
        ERG, "watch", "--interval", "0.5", "runs/one", stdout=PIPE, env=environment(**UNBUFFERED)
    )
    assert watching.stdout
    first = watching.stdout.readline()
    stop(lab)
    rest, _ = watching.communicate(timeout=TIMEOUT_S)
    assert watching.returncode == 0
    assert b"\x1b" not in first + rest
    assert b" of 1,000,000 | " in first
    assert b"to go" in first
    assert b"over\n" in rest


def test_alerts_of_a_recorded_command_come_from_the_steps_inside_it(lab: Lab) -> None:
    command = script("watched", "-", 200, 60)
    done = lab.record(
        *command, options=("--probe", "process", "--quiet", "--alert", "loss nan")
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr == b"ergmeter: alert: loss nan: loss nan at step 60\n"
    told = [m.detail for m in Run.open(lab.path / "run").marks if m.name == "alert"]
    assert told == ["loss nan: loss nan at step 60"]
    again = lab.run(ERG, "watch", "--once", "run")
    assert b"! loss nan: loss nan at step 60\n" in again.stdout  # and not: seen only now


def test_a_plain_loop_is_stopped_by_the_loss_that_it_prints(lab: Lab) -> None:
    """The hook sees its steps, which tell no loss."""
    rules = ("--alert", "loss nan", "--alert", "grad_norm nan", "--stop-on", "nan")
    done = lab.record(*script("hook_lost", 60), options=("--probe", "process", "--quiet", *rules))
    assert done.returncode == 128 + signal.SIGTERM
    said = done.stderr.decode().splitlines()
    assert "ergmeter: alert: loss nan: loss nan at step 60, as printed" in said
    assert sum("'grad_norm nan' is not judged" in line for line in said) == 1
    run = Run.open(lab.path / "run")
    assert len(run.steps("")["start_ns"]) > 0  # but for what was not handed over when it was ended
    assert [m.detail for m in run.marks if m.name == "stop_asked"] == [
        "loss nan: loss nan at step 60, as printed"
    ]
    again = lab.run(ERG, "watch", "--once", "run")
    assert b"! loss nan: loss nan at step 60, as printed\n" in again.stdout


def test_a_recorded_command_is_stopped_by_its_budget(lab: Lab) -> None:
    options = ("--probe", "process", "--quiet", "--budget", "2 s", "--stop-on", "budget")
    done = lab.record(*script("watched", "-", FOREVER), options=options)
    assert done.returncode == 128 + signal.SIGTERM
    assert b"erg: asking the command to stop (SIGTERM)" in done.stderr
    run = Run.open(lab.path / "run")
    assert run.status == "killed by SIGTERM"
    (asked,) = [m.detail for m in run.marks if m.name == "stop_asked"]
    # More than 2 where nobody looked in time.
    assert re.fullmatch(r"time > 2 s: [\d.]+ s used", asked), asked


def test_a_command_that_heeds_the_signal_ends_as_it_likes(lab: Lab) -> None:
    shell = "trap 'echo saved; exit 7' TERM; while :; do sleep 0.1; done"
    options = ("--probe", "process", "--quiet", "--budget", "3 s", "--stop-on", "budget")
    done = lab.record("bash", "-c", shell, options=options)
    assert done.returncode == 7
    assert done.stdout == b"saved\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--alert", "tokens_per_sec < -20%"), b"did you mean 'tokens_per_s < -20%'"),
        (("--stop-on", "budget"), b"stop on 'budget' has no effect"),
        (("--budget", "50 EUR"), b"needs a price: --price-per-gpu-hour or --price-per-kwh"),
        (("--budget", "2 kw"), b"no unit 'kw'; did you mean kWh?"),
        (("--budget", "8"), b"--budget '8': no unit '' ('2 kWh'"),
    ],
)
def test_a_wrong_rule_starts_nothing(lab: Lab, options: tuple[str, ...], said: bytes) -> None:
    done = lab.record("touch", "started", options=(*options, "--quiet"))
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (lab.path / "started").exists()
    assert lab.runs() == []
