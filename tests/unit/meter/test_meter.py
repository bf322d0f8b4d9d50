"""What Meter promises to a training loop."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ergmeter import Budget, Flops, Meter, Reading, Run, UsageError
from ergmeter.meter import Around
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.live.recent_window import remaining
from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.records import PHASES, WorkPart
from ergmeter.runlog.format import RUN_VARIABLE
from ergmeter.runlog.settings import Settings
from tests.runs import make_run


def meter_in(path: Path, **options: object) -> Meter:
    return Meter(path, probes=(), **options)  # type: ignore[arg-type]


def steps_of(path: Path) -> dict[str, np.ndarray]:
    return Run.open(path).steps()


@pytest.mark.parametrize(
    ("probes", "words"),
    [(["nvlm"], "no probe 'nvlm'; did you mean 'nvml'?"), ("nvml", r"give probes=\['nvml'\]")],
)
def test_a_probe_there_is_not_is_refused_at_once(probes: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Meter(probes=probes)  # type: ignore[arg-type]


def test_a_launcher_says_how_many_there_are_where_they_have_not_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with meter_in(tmp_path / "run") as meter:
        meter.step_end(tokens=1)
    (writer,) = Run.open(tmp_path / "run").writers
    assert writer.header["world"] == 2


def test_steps_are_recorded_with_what_the_loop_says(tmp_path: Path) -> None:
    with meter_in(tmp_path / "run") as meter:
        for number in range(5):
            with meter.step(tokens=100, samples=4, tokens_real=80, tokens_loss=70) as step:
                step.loss = 1.0 / (number + 1)
                step.learning_rate = 1e-3
                step.grad_norm = 2.0
    steps = steps_of(tmp_path / "run")
    assert steps["index"].tolist() == [0, 1, 2, 3, 4]
    assert steps["tokens_computed"].tolist() == [100] * 5
    assert steps["tokens_real"].tolist() == [80] * 5
    assert steps["tokens_loss"].tolist() == [70] * 5
    assert steps["samples"].tolist() == [4] * 5
    assert steps["loss"].tolist() == [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
    assert steps["micro_steps"].tolist() == [1] * 5
    assert (steps["end_ns"] > steps["start_ns"]).all()
    assert Run.open(tmp_path / "run").status == "finished"


def test_a_sleeping_loop_takes_the_time_it_sleeps(tmp_path: Path) -> None:
    """Longer than from the middle of its first step to that of its last, and no longer than all."""
    amids = []
    with meter_in(tmp_path / "run") as meter:
        began = time.monotonic()
        for number in range(40):
            with meter.step(tokens=512):
                amids.append(time.monotonic())
                time.sleep(0.05 if number % 10 == 9 else 0.005)
        most_s, least_s = time.monotonic() - began, amids[-1] - amids[0]
    readings = meter.summary().readings
    rate, step_s = (readings[k] for k in ("throughput.tokens_per_s", "time.step_s"))
    assert isinstance(rate, Reading)
    assert isinstance(step_s, Reading)
    assert 40 * 512 / most_s <= rate.value <= 40 * 512 / least_s
    assert step_s.value == pytest.approx(512 / rate.value)


def test_step_end_measures_from_the_end_of_the_last_step(tmp_path: Path) -> None:
    with meter_in(tmp_path / "run") as meter:
        for _ in range(10):
            time.sleep(0.01)
            meter.step_end(tokens=7, loss=0.5)
    steps = steps_of(tmp_path / "run")
    assert (steps["start_ns"][1:] == steps["end_ns"][:-1]).all()
    assert steps["tokens_computed"].sum() == 70


def test_step_begin_leaves_out_what_came_before(tmp_path: Path) -> None:
    with meter_in(tmp_path / "run") as meter:
        time.sleep(0.05)
        slept_ns = time.monotonic_ns()
        meter.step_begin()
        meter.step_end(tokens=1)
    assert steps_of(tmp_path / "run")["start_ns"][0] >= slept_ns


def test_evaluation_between_step_ends_is_not_part_of_the_next_step(tmp_path: Path) -> None:
    with meter_in(tmp_path / "run") as meter:
        meter.step_end(tokens=1)
        before_s = time.monotonic()
        with meter.phase("eval"):
            within_s = time.monotonic()
            time.sleep(0.1)
            within_s = time.monotonic() - within_s
        in_all_s = time.monotonic() - before_s
        meter.step_end(tokens=1)
    steps = steps_of(tmp_path / "run")
    phases = [PHASES[int(code)] for code in steps["phase"]]
    assert phases == ["train", "eval", "train"]
    assert steps["start_ns"][2] >= steps["end_ns"][1]
    found = meter.summary().readings["time.eval_s"]
    assert isinstance(found, Reading)
    assert within_s <= found.value <= in_all_s


def test_micro_steps_of_gradient_accumulation_are_one_step(tmp_path: Path) -> None:
    with meter_in(tmp_path / "run") as meter:
        for _ in range(3):
            with meter.step() as step:
                for _ in range(4):
                    step.micro_step(tokens=10, samples=2, tokens_real=8)
    steps = steps_of(tmp_path / "run")
    assert steps["micro_steps"].tolist() == [4] * 3
    assert steps["tokens_computed"].tolist() == [40] * 3
    assert steps["tokens_real"].tolist() == [32] * 3
    assert steps["samples"].tolist() == [8] * 3


def test_a_step_that_raises_is_not_counted_and_leaves_a_mark(tmp_path: Path) -> None:
    with meter_in(tmp_path / "run") as meter:
        with meter.step(tokens=1):
            pass
        with pytest.raises(ZeroDivisionError), meter.step(tokens=1):
            raise ZeroDivisionError
        with meter.step(tokens=1):
            pass
    run = Run.open(tmp_path / "run")
    assert run.count("steps") == 2
    assert [m.detail for m in run.marks if m.name == "step_failed"] == ["train: ZeroDivisionError"]


def test_a_program_that_fails_leaves_a_closed_run_that_says_so(tmp_path: Path) -> None:
    def fails() -> None:
        with meter_in(tmp_path / "run") as meter:
            meter.step_end(tokens=1)
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError):
        fails()
    run = Run.open(tmp_path / "run")
    assert run.status == "failed (RuntimeError: out of luck)"
    assert run.count("steps") == 1


BOTH_WARMUPS = {"warmup_steps": 1, "warmup_s": 1.0}


class TestMisuse:
    """Nested and re-entrant use is refused with a sentence, not measured wrongly."""

    def test_a_step_in_a_step(self, tmp_path: Path) -> None:
        with (
            meter_in(tmp_path / "run") as meter,
            meter.step(),
            pytest.raises(UsageError, match="inside an open train span"),
            meter.step(),
        ):
            pass

    def test_a_phase_in_a_step(self, tmp_path: Path) -> None:
        with (
            meter_in(tmp_path / "run") as meter,
            meter.step(),
            pytest.raises(UsageError, match="eval span was opened inside"),
            meter.phase("eval"),
        ):
            pass

    def test_step_end_in_a_step(self, tmp_path: Path) -> None:
        with (
            meter_in(tmp_path / "run") as meter,
            meter.step(),
            pytest.raises(UsageError, match="ends by itself"),
        ):
            meter.step_end()

    def test_a_meter_twice(self, tmp_path: Path) -> None:
        with meter_in(tmp_path / "run") as meter, pytest.raises(UsageError, match="already"):
            meter.start()

    def test_a_meter_in_a_meter(self, tmp_path: Path) -> None:
        with (
            meter_in(tmp_path / "a"),
            pytest.raises(UsageError, match="another Meter is measuring"),
            meter_in(tmp_path / "b"),
        ):
            pass
        with meter_in(tmp_path / "c"):
            pass

    def test_a_step_before_the_start_and_after_the_end(self, tmp_path: Path) -> None:
        meter = meter_in(tmp_path / "run")
        with pytest.raises(UsageError, match="not been started"):
            meter.step_end()
        meter.start()
        meter.close()
        with pytest.raises(UsageError, match="closed"), meter.step():
            pass

    def test_an_unknown_setting_and_phase(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no setting 'warmup_step'"):
            Meter(tmp_path / "run", warmup_step=3)
        with (
            meter_in(tmp_path / "run") as meter,
            pytest.raises(UsageError, match="unknown phase 'trian'"),
        ):
            meter.phase("trian")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "settings",
        [{"warmup_steps": -1}, {"pue": 0.5}, {"warmup": "yes"}, {"parameters": 0}, BOTH_WARMUPS],
    )  # fmt: skip
    def test_settings_that_make_no_sense(self, settings: dict[str, object]) -> None:
        with pytest.raises(UsageError):
            Meter(**settings)  # type: ignore[arg-type]


def test_threads_each_have_their_own_steps(tmp_path: Path) -> None:
    with meter_in(tmp_path / "run") as meter:

        def work() -> None:
            for _ in range(200):
                with meter.step(tokens=3):
                    pass

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    steps = steps_of(tmp_path / "run")
    assert len(steps["index"]) == 1600
    assert sorted(steps["index"].tolist()) == list(range(1600))
    assert steps["tokens_computed"].sum() == 4800


def _forked_child(meter: Meter) -> None:
    for _ in range(10):
        with meter.step(tokens=5):
            time.sleep(0.001)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_that_steps_writes_its_own_share(tmp_path: Path) -> None:
    with meter_in(tmp_path / "run") as meter:
        for _ in range(3):
            meter.step_end(tokens=5)
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=_forked_child, args=(meter,)) for _ in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        assert [child.exitcode for child in children] == [0, 0]
        meter.step_end(tokens=5)
    run = Run.open(tmp_path / "run")
    per_writer = [int((run.steps()["writer"] == n).sum()) for n in range(len(run.writers))]
    assert sorted(per_writer) == [4, 10, 10]
    assert run.status == "finished"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_that_does_not_step_leaves_no_trace(tmp_path: Path) -> None:
    with meter_in(tmp_path / "run") as meter:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.01,))
        child.start()
        child.join()
        meter.step_end(tokens=1)
    run = Run.open(tmp_path / "run")
    assert len(run.writers) == 1
    assert run.count("steps") == 1


def test_a_program_that_forgets_to_close_is_closed_at_its_exit(tmp_path: Path) -> None:
    program = f"""
        from ergmeter import Meter
        meter = Meter({str(tmp_path / "run")!r}, probes=()).start()
        for _ in range(10):
            meter.step_end(tokens=2)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)
    run = Run.open(tmp_path / "run")
    assert (run.status, run.count("steps")) == ("finished", 10)


def test_a_budget_tells_progress_and_when_the_rest_is_done(tmp_path: Path) -> None:
    with meter_in(tmp_path / "run", budget=Budget(tokens=1000)) as meter:
        assert meter.progress().eta_s is None
        for _ in range(5):
            with meter.step(tokens=50):
                time.sleep(0.01)
        progress = meter.progress()
        assert (progress.done, progress.total, progress.unit) == (250, 1000, "tokens")
        assert progress.done_frac == 0.25
    steps = steps_of(tmp_path / "run")
    elapsed_s = (steps["end_ns"][-1] - steps["start_ns"][0]) / 1e9
    assert progress.eta_s == pytest.approx(3 * elapsed_s)


def test_a_budget_in_steps_and_in_flops(tmp_path: Path) -> None:
    with meter_in(tmp_path / "a", budget=Budget(steps=4)) as meter:
        meter.step_end()
        assert meter.progress().done_frac == 0.25
    flops = Flops(model_per_step=5e9, convention="6N", engine="declared")
    with meter_in(tmp_path / "b", budget=Budget(flops=2e10), flops=flops) as meter:
        meter.step_end()
        meter.step_end()
        assert meter.progress().done_frac == 0.5
    with pytest.raises(UsageError, match="at most one of steps, tokens and flops"):
        Budget(steps=3, tokens=5)


def test_a_budget_is_this_ranks_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with meter_in(tmp_path / "run", budget=Budget(tokens=1000)) as meter:
        meter.step_end(tokens=250)
        assert meter.progress().done == 250


def test_progress_counts_the_real_tokens_of_each_step_that_tells_them_as_the_views_do(
    tmp_path: Path,
) -> None:
    with meter_in(tmp_path / "run", budget=Budget(tokens=1000)) as meter:
        meter.step_end(tokens=100, tokens_real=60)
        meter.step_end(tokens=100)
        assert meter.progress().done == 60 + 100
    assert remaining(evidence_of(Run.open(tmp_path / "run"))).done == 60 + 100


def test_each_writer_has_a_device_of_its_own_for_its_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two Meters of one process, one after the other: not even their pids differ."""
    with meter_in(tmp_path / "run") as first:
        first.step_end()
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path / "run"))
    with Meter(probes=()) as second:
        second.step_end()
    run = Run.open(tmp_path / "run")
    writers = {writer.header["writer"] for writer in run.writers}
    assert len(writers) == 2
    assert {d.id for d in run.devices.values() if d.kind == "self"} == {
        f"ergmeter:{writer}" for writer in writers
    }
    spent_s = {device: float(series.values[-1]) for device, series in run.series("cpu_s").items()}
    found = second.summary()
    total, life_s = found.readings["overhead.cpu_frac"], Evidence(run, Settings()).watched
    assert isinstance(total, Reading)
    assert total.value == pytest.approx(sum(spent_s.values()) / life_s.duration_s)
    assert min(spent_s.values()) > 0


def test_what_measures_from_outside_says_what_it_costs(tmp_path: Path) -> None:
    spent_s = iter((0.5, 2.5))
    around = Around(make_run(tmp_path / "run"), {}, lambda: next(spent_s, 4.0))
    with Meter(probes=(), around=around) as meter:
        meter._handover.flush()  # type: ignore[union-attr]
    run = Run.open(tmp_path / "run")
    (own,) = run.series("cpu_s").values()
    assert own.values.tolist() == [0.5, 2.5]
    (device,) = run.devices.values()
    assert (device.kind, device.facts) == ("self", {"counted": "processes"})


def test_a_meter_under_a_recorder_joins_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with meter_in(tmp_path / "run") as outer:
        outer.step_end(tokens=1)
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path / "run"))
    with Meter(warmup_steps=2) as inner:
        inner.step_end(tokens=1)
    assert inner.path == tmp_path / "run"
    run = Run.open(tmp_path / "run")
    assert len(run.writers) == 2
    assert run.settings["warmup_steps"] == 2


def test_a_number_that_would_synchronise_a_device_is_refused_and_told(tmp_path: Path) -> None:
    class OnDevice:
        class device:  # noqa: N801
            type = "cuda"

        def __float__(self) -> float:
            raise AssertionError("this would have made the device wait")

    with meter_in(tmp_path / "run") as meter:
        meter.step_end(tokens=1, loss=OnDevice())  # type: ignore[arg-type]
        meter.step_end(tokens=1, loss=np.float32(0.5))
    run = Run.open(tmp_path / "run")
    assert np.isnan(run.steps()["loss"][0])
    assert run.steps()["loss"][1] == 0.5
    assert [m.name for m in run.marks].count("value_refused") == 1


def test_numbers_of_numpy_and_none_are_taken_as_they_are(tmp_path: Path) -> None:
    with meter_in(tmp_path / "run") as meter:
        with meter.step(tokens=np.int64(12)):
            pass
        with meter.step():
            pass
    tokens = steps_of(tmp_path / "run")["tokens_computed"]
    assert tokens[0] == 12
    assert np.isnan(tokens[1])


def test_the_run_can_be_summarised_while_it_goes_on(tmp_path: Path) -> None:
    with meter_in(tmp_path / "run") as meter:
        for _ in range(10):
            with meter.step(tokens=10):
                time.sleep(0.002)
        found = meter.summary()
        assert found.status == "running"
        assert isinstance(found.readings["throughput.tokens_per_s"], Reading)


def test_the_process_itself_is_measured(tmp_path: Path) -> None:
    with Meter(tmp_path / "run", probes=["process"]) as meter:
        ballast = bytearray(50_000_000)
        for _ in range(10):
            with meter.step(tokens=1):
                time.sleep(0.01)
        del ballast
    found = summarize(Run.open(tmp_path / "run")).readings["memory.process_peak_bytes"]
    assert isinstance(found, Reading)
    assert found.value > 50_000_000


def test_a_meter_nobody_holds_any_more_does_not_block_the_next(tmp_path: Path) -> None:
    meter = meter_in(tmp_path / "a").start()
    meter.close()
    del meter
    gc.collect()
    with meter_in(tmp_path / "b"):
        assert os.getpid()


LOADED_BESIDE = """
import sys, threading, time
class Seen:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread():
            print(name)
sys.meta_path.insert(0, Seen())
from ergmeter import Meter
with Meter("run", probes=("process",)) as meter:
    for _ in range(12):
        with meter.step(tokens=1):
            time.sleep(0.1)
print("done")
"""


def test_no_thread_of_ours_loads_libraries_while_steps_are_made(tmp_path: Path) -> None:
    """An import holds the GIL for up to 100 ms, and the loop would stall."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED_BESIDE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    *loaded, last = done.stdout.splitlines()
    assert last == "done"
    assert [name for name in loaded if not name.startswith("ergmeter.probes")] == []


def test_a_step_that_was_not_entered_is_no_step(tmp_path: Path) -> None:
    with Meter(tmp_path / "run", probes=[]) as meter:
        step = meter.step()
        with pytest.raises(AttributeError):
            step.__exit__(None, None, None)
    assert not Run.open(tmp_path / "run").count("steps")


@pytest.mark.parametrize("tokens", [8 * 1024 / 2, np.float64(4096), np.int64(4096)], ids=repr)
def test_counts_of_given_flops_may_be_whole_floats(tmp_path: Path, tokens: Any) -> None:
    flops = Flops(np.float64(6e9), "mine", "by hand", tokens_per_step=tokens)
    with Meter(tmp_path / "run", flops=flops, probes=[]) as meter, meter.step(tokens=4096):
        pass
    run = Run.open(tmp_path / "run")
    assert (run.damage, run.flops) == ([], (Flops(6e9, "mine", "by hand", tokens_per_step=4096),))
    assert type(run.flops[0].tokens_per_step) is int


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("tokens_per_step", value) for value in (4096.5, True, math.inf)),
        *(("bytes_per_step", value) for value in (math.nan, "1e9")),
        ("other_work", (WorkPart("generation", math.inf),)),
    ],
)
def test_flops_that_a_run_could_not_hold_are_refused_at_once(
    tmp_path: Path, field: str, value: Any
) -> None:
    flops = replace(Flops(6e9, "mine", "by hand"), **{field: value})
    for given in (flops, [Flops(6e9, "mine", "by hand"), flops]):
        with pytest.raises(UsageError, match=r"^flops= can't be stored: \w+ is .* \(amounts are"):
            Meter(tmp_path / "run", flops=given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", [1e15, [{"model": 6e9}], "6nd"])
def test_what_is_no_flops_is_named(tmp_path: Path, given: Any) -> None:
    seen = given if isinstance(given, float) else given[0]
    with pytest.raises(UsageError, match=r"^flops= takes Flops\(\.\.\.\), one or several") as said:
        Meter(tmp_path / "run", flops=given)
    assert str(said.value).endswith(f"; got {seen!r}")
