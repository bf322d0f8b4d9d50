"""When a training ends early: the time of all steps by the first ones, a signal by its grace. The
clock is the test's; the signals are real."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ergmeter import signals
from ergmeter.workloads.sft import progress
from ergmeter.workloads.sft.progress import TrainingWatch

pytestmark = pytest.mark.frameworks

ARGUMENTS = SimpleNamespace(world_size=1, logging_steps=10)
LONG_S = 60.0  # to wait for a thread, on the slowest machine
FINISHING = "[train] finishing this step and saving; a second signal ends it at once\n"


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "monotonic", clock)
    return clock


class Trained:
    """A training of so many steps, of which the test says how long they take."""

    def __init__(self, watch: TrainingWatch, clock: Clock, steps: int) -> None:
        self._watch, self._clock = watch, clock
        self.state = SimpleNamespace(
            global_step=0, max_steps=steps, is_world_process_zero=True, log_history=[]
        )
        self.control = SimpleNamespace(should_training_stop=False)

    def begin_step(self) -> None:
        self._watch.on_step_begin(ARGUMENTS, self.state, self.control)

    def steps(self, *durations_s: float) -> bool:
        """Make steps; whether the training is asked to stop after the last."""
        for duration_s in durations_s:
            self.begin_step()
            self._clock.now_s += duration_s
            self._watch.on_pre_optimizer_step(ARGUMENTS, self.state, self.control)
            self.state.global_step += 1
            self._watch.on_step_end(ARGUMENTS, self.state, self.control)
        return bool(self.control.should_training_stop)


@pytest.mark.parametrize(
    ("series", "durations_s", "reason"),
    [
        ((1, 0.0), (37, 40, 41), "6 h 10 min, by 37 s a step (the shortest of the first 3) x 600"),
        ((1, 0.0), (35, 60, 60), ""),  # 5 h 50 min
        ((1, 0.0), (300, 290, 3), ""),  # two shapes of batches to be compiled for
        ((5, 0.0), (8, 8, 8), "6 h 40 min, by 8 s a step"),
        ((5, 0.0), (7, 8, 8), ""),
        ((5, 3600.0), (7, 8, 8), "6 h 50 min, by 7 s a step"),
    ],
)
def test_the_shortest_of_three_steps_is_taken_for_all(
    clock: Clock, series: tuple[int, float], durations_s: tuple[float, ...], reason: str
) -> None:
    watch = TrainingWatch(series=series)
    trained = Trained(watch, clock, 600)
    assert not trained.steps(*durations_s[:2])
    assert trained.steps(durations_s[2]) == bool(reason)
    assert reason in watch.reason
    assert bool(watch.reason) == bool(reason)
    if series[0] > 1 and reason:
        assert " x 600 steps x 5 trainings; take fewer steps (train.max_steps)" in watch.reason


def test_anyway_is_a_warning(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    watch = TrainingWatch(anyway=True)
    assert not Trained(watch, clock, 600).steps(100, 100, 100)
    assert watch.reason == ""
    warning = "[train] Warning: the whole training would take more than 6 h: 16 h 40 min, by"
    assert capsys.readouterr().err.startswith(warning)


@pytest.mark.parametrize(
    ("done_s", "elapsed_s", "grace_s", "waits"),
    [
        ((100.0, 100.0), 10.0, 50.0, False),  # 90 s are left
        ((100.0, 100.0), 60.0, 50.0, True),
        ((100.0,), 500.0, 50.0, True),  # longer than any before
        ((), 10.0, 50.0, True),
        ((1.0,), 0.5, 0.0, False),
        ((), 0.5, 0.0, False),
    ],
)
def test_a_signal_waits_for_the_step_as_long_as_the_grace(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    done_s: tuple[float, ...],
    elapsed_s: float,
    grace_s: float,
    waits: bool,
) -> None:
    watch = TrainingWatch(grace_s=grace_s)
    trained = Trained(watch, clock, 100)
    trained.steps(*done_s)
    trained.begin_step()
    clock.now_s += elapsed_s
    process = Process(monkeypatch)
    with signals.handled(watch.on_signal), watch.watches(process.end_now):
        os.kill(os.getpid(), signal.SIGTERM)
        _eventually(lambda: watch.by == signal.SIGTERM)
        message = FINISHING if waits else "[train] ending this step\n"
        assert capsys.readouterr().err == message
        if waits:
            assert not process.ended.is_set()  # the clock does not move by itself
            clock.now_s += grace_s
        assert process.ended.wait(LONG_S)
        assert process.may_save
        process.may_end.set()


class Process:
    """In place of this process's end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_save: bool | None = None
        self.ended, self.may_end = threading.Event(), threading.Event()
        monkeypatch.setattr(os, "_exit", lambda _code: None)

    def end_now(self, may_save: bool) -> int:
        self.may_save = may_save
        self.ended.set()
        self.may_end.wait(LONG_S)
        return 1


def test_a_signal_at_the_very_end_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    for _ in range(20):
        watch = TrainingWatch()
        with signals.handled(watch.on_signal), watch.watches(process.end_now):
            watch.ends()
            os.kill(os.getpid(), signal.SIGTERM)
        assert watch.by == signal.SIGTERM
    assert not process.ended.is_set()


def test_an_optimizer_that_fails_is_no_reason_to_end_what_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal came within its step; it left the weights locked."""
    monkeypatch.setattr(progress, "_OPTIMIZER_S", 0.3)
    process, watch = Process(monkeypatch), TrainingWatch(grace_s=0.0)
    with signals.handled(watch.on_signal), watch.watches(process.end_now):
        watch.on_pre_optimizer_step(ARGUMENTS, None, None)
        os.kill(os.getpid(), signal.SIGTERM)
        _eventually(lambda: watch.by == signal.SIGTERM)
        time.sleep(0.1)  # it waits for the optimizer
        watch.ends()
        assert not process.ended.wait(1.0)
        process.may_end.set()


def test_no_weights_are_saved_once_the_process_ends(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer ends its step later than it was waited for."""
    monkeypatch.setattr(progress, "_OPTIMIZER_S", 0.1)
    process, watch = Process(monkeypatch), TrainingWatch(grace_s=0.0)
    trained = Trained(watch, clock, 100)
    saving = threading.Event()

    def end() -> None:
        watch.ends()
        saving.set()

    with signals.handled(watch.on_signal), watch.watches(process.end_now):
        trained.begin_step()
        watch.on_pre_optimizer_step(ARGUMENTS, None, None)
        os.kill(os.getpid(), signal.SIGTERM)
        assert process.ended.wait(LONG_S)
        assert process.may_save is False
        watch.on_step_end(ARGUMENTS, trained.state, trained.control)
        threading.Thread(target=end, daemon=True).start()
        assert not saving.wait(0.5)
        process.may_end.set()


def test_a_series_that_took_long_leaves_a_first_step_its_warm_up(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LOOK_S", 0.01)
    process, watch = Process(monkeypatch), TrainingWatch(series=(2, 7 * 3600.0))
    trained = Trained(watch, clock, 3)
    with watch.watches(process.end_now):
        trained.begin_step()
        clock.now_s += progress.WARM_UP_S - 1
        assert not process.ended.wait(0.3)
        clock.now_s += 2
        assert process.ended.wait(LONG_S)
        process.may_end.set()


def test_a_rank_that_another_stops_says_so(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "any_rank", lambda _is_asked, _device: True)
    watch, arguments = TrainingWatch(), SimpleNamespace(world_size=2, logging_steps=1, device=None)
    trained = Trained(watch, clock, 100)
    trained.begin_step()
    watch.on_step_end(arguments, trained.state, trained.control)
    assert trained.control.should_training_stop
    assert watch.reason == "another rank stopped"


def _eventually(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_signal_before_the_training_ends_the_process() -> None:
    watch: Any = TrainingWatch()
    with signals.handled(watch.on_signal), pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
