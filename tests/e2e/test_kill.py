"""`kill -9` at any moment leaves a run that opens and says so, and harms nothing else."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ergmeter import Run, summarize
from ergmeter.runlog.reader import CUT_OFF
from tests.e2e.conftest import ERG, QUICK, TIMEOUT_S, environment, eventually, script

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SEED = 20261115
KILLS = 50
AT_ONCE = 5
STEPS = 300  # of 10 ms
LOST_S = 1.0  # what a kill may cost
EARLY_S = 0.1


@dataclass
class Killed:
    """One training, and the moment at which something of it was killed."""

    directory: Path
    t_ns: int

    @property
    def run(self) -> Path:
        return self.directory / "run"

    @property
    def log(self) -> dict[int, int]:
        """When each step ended, by the training's own clock."""
        path = self.directory / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        return {int(number): int(t_ns) for number, t_ns in map(str.split, lines)}

    @property
    def printed(self) -> list[str]:
        return (self.directory / "out").read_text().splitlines()

    def ended(self) -> bool:
        return (self.directory / "end").exists()


def delays_s(longest_s: float) -> list[float]:
    """Random moments, a fifth of them within the first 100 ms."""
    chance = random.Random(SEED)
    early = [chance.uniform(0, EARLY_S) for _ in range(KILLS // 5)]
    return early + [chance.uniform(EARLY_S, longest_s) for _ in range(KILLS - len(early))]


def each(trial: Callable[[Path, float], None], tmp_path: Path, longest_s: float) -> None:
    """Run the trial at every moment, several at once, and tell which moments it failed at."""
    moments = delays_s(longest_s)
    failures: list[str] = []

    def one(number: int) -> None:
        directory = tmp_path / str(number)
        directory.mkdir()
        try:
            trial(directory, moments[number])
        except AssertionError as error:
            failures.append(f"seed {SEED}, kill {number} after {moments[number]:.3f} s: {error}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, range(KILLS)))
    assert not failures, "\n".join([f"{len(failures)} of {KILLS} failed", *failures])


def start(directory: Path, *command: str) -> subprocess.Popen[bytes]:
    with (directory / "out").open("wb") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )


def start_recording(directory: Path) -> subprocess.Popen[bytes]:
    training = script("long_lived", directory, STEPS, "print")
    return start(directory, ERG, "record", *QUICK, "--out", str(directory / "run"), "--", *training)


def kill(directory: Path, pid: int) -> Killed:
    t_ns = time.monotonic_ns()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return Killed(directory, t_ns)


def check_opens(killed: Killed, *statuses: str) -> Run | None:
    if not killed.run.exists():
        assert not killed.log, "steps were made, and there is no run"
        return None
    run = Run.open(killed.run)
    summary = summarize(run)
    assert summary.status in statuses, f"status {summary.status!r}"
    assert run.damage == [], run.damage
    return run


def check_steps(killed: Killed, run: Run, stream: str, *, before_ns: int) -> None:
    """All steps up to this time are there, without a gap, and none is invented.

    But for the first lines of an output: when the first step began is not known.
    """
    steps = run.steps(stream)
    due = [number for number, t_ns in killed.log.items() if t_ns < before_ns]
    last = int(np.max(steps["index"], initial=-1))
    if len(due) > 10 or stream == "":
        assert last >= max(due, default=-1), f"recorded up to {last}, due up to {max(due)}"
    # A line is printed before it is logged, and a step ends before it is: one more is no invention.
    assert last <= max(killed.log, default=-1) + 1
    if last >= 0:
        first = int(steps["index"][0] - steps["steps"][0]) + 1
        # Lines that came in the relay's first read open the window together: under load, many.
        assert first == 0 or (stream != "" and first <= STEPS // 2), f"the first step is {first}"
        assert int(np.sum(steps["steps"])) == last + 1 - first


@pytest.mark.timeout(200)
def test_a_killed_training_loses_no_printed_step(tmp_path: Path) -> None:
    def trial(directory: Path, delay_s: float) -> None:
        recorder = start_recording(directory)
        eventually((directory / "pid").exists, "the training")
        time.sleep(delay_s)
        killed = kill(directory, int((directory / "pid").read_text()))
        assert recorder.wait(TIMEOUT_S) == 137
        run = check_opens(killed, "killed by SIGKILL")
        assert run is not None
        check_steps(killed, run, "output", before_ns=killed.t_ns)
        assert len(killed.printed) >= len(killed.log)

    each(trial, tmp_path, longest_s=1.5)


def appears(path: Path) -> bool:
    """Whether a command that may have been started just before the kill gets to say so."""
    deadline_s = time.monotonic() + 4.0
    while not path.exists() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return path.exists()


def hand_overs(run: Run) -> int:
    return max((len(series.t_ns) for series in run.series("cpu_s").values()), default=0)


@pytest.mark.timeout(200)
def test_a_killed_recorder_leaves_its_run_and_the_training_unharmed(tmp_path: Path) -> None:
    in_full_swing: list[float] = []

    def trial(directory: Path, delay_s: float) -> None:
        recorder = start_recording(directory)
        if delay_s > EARLY_S:
            eventually(lambda: list(directory.glob("run/*/samples-*")), "the first hand-over")
        time.sleep(delay_s)
        killed = kill(directory, recorder.pid)
        recorder.wait(TIMEOUT_S)
        run = check_opens(killed, CUT_OFF)
        started = appears(directory / "pid")
        if run and run.writers:
            # What measures starts first, then the command; a hand-over later it is all there.
            before_ns = 0
            if hand_overs(run) >= 1:
                before_ns = killed.t_ns - int(LOST_S * 1e9)
                in_full_swing.append(delay_s)
            check_steps(killed, run, "output", before_ns=before_ns)
        if started:
            eventually(killed.ended, "the end of the training")
            assert len(killed.log) == STEPS
            eventually(lambda: len(killed.printed) == STEPS, "the training's output")
            check_opens(killed, CUT_OFF)

    each(trial, tmp_path, longest_s=1.2)
    assert len(in_full_swing) >= 5, "hardly a recorder lived long enough to have lost anything"


@pytest.mark.timeout(200)
def test_a_killed_meter_loses_at_most_a_second(tmp_path: Path) -> None:
    def trial(directory: Path, delay_s: float) -> None:
        training = start(directory, *script("long_lived", directory, STEPS, "meter"))
        time.sleep(delay_s)
        killed = kill(directory, training.pid)
        training.wait(TIMEOUT_S)
        run = check_opens(killed, CUT_OFF)
        if run and run.writers:
            before_ns = killed.t_ns - int(LOST_S * 1e9)
            check_steps(killed, run, "", before_ns=before_ns)

    each(trial, tmp_path, longest_s=1.8)
