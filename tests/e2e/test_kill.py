"""`kill -9` at any moment leaves a run that opens and says so, and harms nothing else.

What may be missing is the last second, by the training's own clock. On a machine that is busy with
other things a hand-over comes later through no fault of its own: by as much as the kernel says that
our threads were ready to run and had no core. So much is granted, and no more.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from ergmeter import Run, summarize
from ergmeter.runlog.reader import CUT_OFF
from tests.e2e.conftest import ERG, QUICK, TIMEOUT_S, environment, eventually, script

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.soak

SEED = 20261115
KILLS = 10
AT_ONCE = 5
STEPS = 300  # of 10 ms
LOST_S = 1.0  # what a kill may cost
EARLY_S = 0.1
TELLING = 1  # kills, at the least, before which there was something that must not be lost


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

    def before_ns(self, late_s: float) -> int:
        """Up to when nothing may be missing, where our threads were held up for so long."""
        return self.t_ns - round((LOST_S + late_s) * 1e9)

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


class Starvation:
    """How long threads of some processes were ready to run and had no core, from now on.

    The second number of schedstat (sched-stats.rst in the kernel's documentation). 0 where it does
    not tell.
    """

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._before_ns = self._waited_ns()

    def seconds(self) -> float:
        now_ns = self._waited_ns()
        return sum(ns - self._before_ns.get(thread, 0) for thread, ns in now_ns.items()) / 1e9

    def _waited_ns(self) -> dict[Path, int]:
        waited_ns = {}
        for pid in self._pids:
            for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with suppress(OSError):  # a thread that has just ended
                    waited_ns[path] = int(path.read_text().split()[1])
        return waited_ns


def relay_of(recorder: int, training: Path) -> list[int]:
    """The recorder's child that is not the training."""
    named = training.read_text() if training.exists() else ""
    with suppress(psutil.NoSuchProcess):
        return [c.pid for c in psutil.Process(recorder).children() if str(c.pid) != named]
    return []


def check_opens(killed: Killed, *statuses: str) -> Run | None:
    if not killed.run.exists():
        assert not killed.log, "steps were made, and there is no run"
        return None
    run = Run.open(killed.run)
    summary = summarize(run)
    assert summary.status in statuses, f"status {summary.status!r}"
    assert run.damage == [], run.damage
    return run


def check_steps(killed: Killed, run: Run, stream: str, *, before_ns: int) -> bool:
    """All steps up to this time are there, without a gap, and none is invented.

    But for the first lines of an output: when the first step began is not known. Says whether there
    were any that had to be there.
    """
    steps = run.steps(stream)
    due = [number for number, t_ns in killed.log.items() if t_ns < before_ns]
    last = int(np.max(steps["index"], initial=-1))
    is_telling = len(due) > (0 if stream == "" else 10)
    if is_telling:
        assert last >= max(due), f"recorded up to {last}, due up to {max(due)}"
    # A line is printed before it is logged, and a step ends before it is: one more is no invention.
    assert last <= max(killed.log, default=-1) + 1
    if last >= 0:
        first = int(steps["index"][0] - steps["steps"][0]) + 1
        # Lines that came in the relay's first read open the window together: under load, many.
        assert first == 0 or (stream != "" and first <= STEPS // 2), f"the first step is {first}"
        assert int(np.sum(steps["steps"])) == last + 1 - first
    return is_telling


@pytest.mark.timeout(600)
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


@pytest.mark.timeout(600)
def test_a_killed_recorder_leaves_its_run_and_the_training_unharmed(tmp_path: Path) -> None:
    telling: list[bool] = []

    def trial(directory: Path, delay_s: float) -> None:
        recorder = start_recording(directory)
        if delay_s > EARLY_S:
            eventually(lambda: list(directory.glob("run/[!.]*/samples-*")), "the first hand-over")
        starvation = Starvation(recorder.pid, *relay_of(recorder.pid, directory / "pid"))
        time.sleep(delay_s)
        late_s = starvation.seconds()
        killed = kill(directory, recorder.pid)
        recorder.wait(TIMEOUT_S)
        run = check_opens(killed, CUT_OFF)
        started = appears(directory / "pid")
        if run and run.writers:
            # What measures starts first, then the command; a hand-over later it is all there.
            before_ns = killed.before_ns(late_s) if hand_overs(run) >= 1 else 0
            telling.append(check_steps(killed, run, "output", before_ns=before_ns))
        if started:
            eventually(killed.ended, "the end of the training")
            assert len(killed.log) == STEPS
            eventually(lambda: len(killed.printed) == STEPS, "the training's output")
            check_opens(killed, CUT_OFF)

    each(trial, tmp_path, longest_s=2.0)
    assert sum(telling) >= TELLING, "hardly a recorder lived long enough to have lost anything"


@pytest.mark.timeout(600)
def test_a_killed_meter_loses_at_most_a_second(tmp_path: Path) -> None:
    telling: list[bool] = []

    def trial(directory: Path, delay_s: float) -> None:
        training = start(directory, *script("long_lived", directory, STEPS, "meter"))
        if delay_s > EARLY_S:
            eventually(lambda: Killed(directory, 0).log, "the first step")
        starvation = Starvation(training.pid)
        time.sleep(delay_s)
        late_s = starvation.seconds()
        killed = kill(directory, training.pid)
        training.wait(TIMEOUT_S)
        run = check_opens(killed, CUT_OFF)
        if run and run.writers:
            telling.append(check_steps(killed, run, "", before_ns=killed.before_ns(late_s)))

    each(trial, tmp_path, longest_s=1.8)
    assert sum(telling) >= TELLING, "hardly a training lived long enough to have lost anything"
