"""What goes wrong in a Meter costs part of the record, and nothing of the training."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ergmeter import Flops, Meter, Run, UsageError
from ergmeter.meter import active_meters, handover
from ergmeter.meter.pending_steps import PendingSteps
from ergmeter.records import Mark
from ergmeter.runlog.format import RUN_VARIABLE, dropped_steps
from ergmeter.runlog.writer import Writer


def meter_in(path: Path, **options: Any) -> Meter:
    return Meter(path, probes=(), **options)


def marks_of(path: Path, name: str) -> list[str]:
    return [mark.detail for mark in Run.open(path).marks if mark.name == name]


class TestValues:
    """What a user hands over is taken if it can be, and refused with a mark if not."""

    def test_a_mark_of_anything(self, tmp_path: Path) -> None:
        with meter_in(tmp_path / "run") as meter:
            meter.mark("ckpt", Path("x"))  # type: ignore[arg-type]
            meter.mark(3, "y" * 5000)  # type: ignore[arg-type]
            meter.step_end(tokens=1)
        assert marks_of(tmp_path / "run", "ckpt") == ["x"]
        assert marks_of(tmp_path / "run", "3") == ["y" * 1000]
        assert marks_of(tmp_path / "run", "handover_failed") == []
        assert Run.open(tmp_path / "run").count("steps") == 1

    @pytest.mark.parametrize(
        "tokens", [2**70, -(2**70), float("inf"), float("nan"), 10**400, 1e30, "12", [1], b"1"]
    )
    def test_a_count_that_is_none(self, tmp_path: Path, tokens: Any) -> None:
        with meter_in(tmp_path / "run") as meter:
            meter.step_end(tokens=7)
            meter.step_end(tokens=tokens)
            meter.step_end(tokens=2**63 - 1)
        run = Run.open(tmp_path / "run")
        assert run.count("steps") == 3
        assert run.steps()["tokens_computed"][0] == 7
        assert np.isnan(run.steps()["tokens_computed"][1])
        assert len(marks_of(tmp_path / "run", "value_refused")) == 1
        assert marks_of(tmp_path / "run", "handover_failed") == []
        assert run.status == "finished"

    @pytest.mark.parametrize("loss", [10**400, "0.5", object()])
    def test_a_loss_that_is_none(self, tmp_path: Path, loss: Any) -> None:
        with meter_in(tmp_path / "run") as meter:
            meter.step_end(tokens=1, loss=loss)
            meter.step_end(tokens=1, loss=0.5)
        assert Run.open(tmp_path / "run").steps()["loss"][1] == 0.5
        assert len(marks_of(tmp_path / "run", "value_refused")) == 1


class TestHandOver:
    """The thread that writes outlives whatever happens in it."""

    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(handover, "HAND_OVER_S", 0.01)

    def test_a_failure_is_told_once_and_the_thread_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_columns = Writer.write_columns
        failures: list[str] = []

        def fails(self: Writer, table: str, *rest: Any, **options: Any) -> None:
            if table == "steps" and len(failures) < 2:
                failures.append(table)
                raise ZeroDivisionError("of all things")
            write_columns(self, table, *rest, **options)

        monkeypatch.setattr(Writer, "write_columns", fails)
        with meter_in(tmp_path / "run") as meter:
            for number in range(1, 3):
                meter.step_end(tokens=1)
                until(lambda n=number: len(failures) == n)
            meter.step_end(tokens=5)
        assert marks_of(tmp_path / "run", "handover_failed") == ["ZeroDivisionError: of all things"]
        run = Run.open(tmp_path / "run")
        assert run.steps()["tokens_computed"].tolist() == [5]
        assert run.status == "finished"
        # Those that were not written are counted.
        (dropped,) = dropped_steps(run)
        assert (dropped.steps, dropped.tokens) == (2, 2)
        assert dropped.why == "ZeroDivisionError: of all things"
        assert 0 <= meter._started_ns - dropped.start_ns < 1e6  # kept to a millisecond
        summary = meter.summary()
        assert summary.readings["steps.dropped"].value == 2  # type: ignore[union-attr]
        (said,) = [note for note in summary.notes if "2 steps (2 tokens)" in note]
        assert said == f"part of the record is missing: {dropped}"

    def test_steps_that_can_not_be_collected_are_counted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*_: Any) -> None:
            raise ZeroDivisionError("of all things")

        monkeypatch.setattr(handover, "HAND_OVER_S", 60)
        with meter_in(tmp_path / "run") as meter:
            meter.step_end(tokens=1)
            meter.summary()
            with monkeypatch.context() as broken:
                broken.setattr(PendingSteps, "_checked", fails)
                meter.step_end(tokens=1)
                meter.step_end(tokens=1)
                meter.summary()
            meter.step_end(tokens=1)
        run = Run.open(tmp_path / "run")
        (dropped,) = dropped_steps(run)
        assert (len(run.steps()["start_ns"]), dropped.steps, dropped.tokens) == (2, 2, None)
        assert dropped.why == "ZeroDivisionError: of all things"
        assert marks_of(tmp_path / "run", "handover_failed") == ["ZeroDivisionError: of all things"]

    def test_closing_never_raises(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError

        meter = meter_in(tmp_path / "run").start()
        for name in ("write", "write_columns", "close"):
            monkeypatch.setattr(Writer, name, fails)
        meter.step_end(tokens=1)
        meter.close()
        monkeypatch.undo()
        assert marks_of(tmp_path / "run", "handover_failed") == ["ZeroDivisionError: "]

    def test_a_mark_that_can_not_be_written_takes_no_other_with_it(self, tmp_path: Path) -> None:
        with meter_in(tmp_path / "run") as meter:
            meter.record(Mark(1, "bad", Path("x")))  # type: ignore[arg-type]
            meter.mark("good")
        assert marks_of(tmp_path / "run", "good") == [""]
        assert len(marks_of(tmp_path / "run", "handover_failed")) == 1

    def test_samples_are_written_before_the_steps_of_the_same_round(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(handover, "HAND_OVER_S", 60)
        tables = []
        write_columns = Writer.write_columns

        def noted(self: Writer, table: str, *rest: Any, **options: Any) -> None:
            tables.append(table)
            write_columns(self, table, *rest, **options)

        monkeypatch.setattr(Writer, "write_columns", noted)
        with meter_in(tmp_path / "run") as meter:
            meter.step_end(tokens=1)
            meter.summary()
            assert tables == ["samples", "steps"]

    def test_the_rank_outlives_the_process_group(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
            monkeypatch.delenv(name, raising=False)
        there = [True]
        distributed = SimpleNamespace(
            is_available=lambda: True, is_initialized=lambda: there[0], get_rank=lambda: 3
        )
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=distributed))
        with meter_in(tmp_path / "run") as meter:
            meter.step_end(tokens=1)
            meter.summary()
            there[0] = False
            meter.step_end(tokens=1)
        assert Run.open(tmp_path / "run").steps()["rank"].tolist() == [3, 3]


class TestStart:
    """A run that can't be written is no reason to fail for a training, unless it was asked for."""

    def test_a_named_run_that_is_gone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv(RUN_VARIABLE, str(tmp_path / "gone"))
        with Meter(probes=()) as meter:
            meter.step_end(tokens=1)
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1
        assert said[0].startswith("ergmeter: ")
        assert str(tmp_path / "gone") in said[0]
        assert said[0].endswith("; making a run of its own")
        assert Path("runs") in meter.path.parents
        assert Run.open(meter.path).count("steps") == 1

    def test_a_named_directory_that_is_no_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "other").mkdir()
        monkeypatch.setenv(RUN_VARIABLE, str(tmp_path / "other"))
        with Meter(probes=()) as meter:
            pass
        assert meter.path.parent == Path("runs")
        assert list((tmp_path / "other").iterdir()) == []
        assert "making a run of its own" in capsys.readouterr().err

    def test_a_directory_that_can_not_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        meter = meter_in(tmp_path / "file" / "run")
        with pytest.raises(UsageError, match=r"file/run can't be written \(.*: File exists\)"):
            meter.start()
        with pytest.raises(UsageError, match="no run yet"):
            _ = meter.path
        (tmp_path / "file").unlink()
        with meter:
            meter.step_end(tokens=1)
        assert Run.open(tmp_path / "file" / "run").count("steps") == 1

    def test_a_disk_that_takes_the_run_and_not_the_writer(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        meter = meter_in(tmp_path / "run")
        with monkeypatch.context() as full:
            full.setattr(Writer, "_header_text", refuses)
            with pytest.raises(UsageError, match="No space left"):
                meter.start()
        assert not (tmp_path / "run").exists()
        with meter:
            pass
        assert Run.open(tmp_path / "run").status == "finished"

    def test_the_flops_are_in_the_header(self, tmp_path: Path) -> None:
        flops = Flops(5e9, "6N", "declared", assumptions=("dense",))
        with meter_in(tmp_path / "run", flops=flops):
            pass
        (header,) = (tmp_path / "run").glob("*/writer.json")
        assert json.loads(header.read_text())["flops"] == [
            {
                "model_per_step": 5e9,
                "convention": "6N",
                "engine": "declared",
                "hardware_per_step": None,
                "hardware_per_padding": None,
                "tokens_per_step": None,
                "bytes_per_step": None,
                "assumptions": ["dense"],
                "samples_per_step": None,
                "other_work": None,
                "not_counted": [],
            }
        ]


class TestClose:
    """A run is closed once and for all, whoever forgets or interrupts it."""

    def test_a_meter_nobody_holds_is_held_until_its_close(self, tmp_path: Path) -> None:
        meter_in(tmp_path / "a").start()
        gc.collect()
        with pytest.raises(UsageError, match="another Meter is measuring"):
            meter_in(tmp_path / "b").start()
        active_meters._close_all()
        assert Run.open(tmp_path / "a").status == "finished"
        assert writing_threads() == 0
        assert active_meters.meters() == ()

    def test_many_meters_leave_one_hook_of_each_kind(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hooks: list[object] = []
        monkeypatch.setattr(active_meters, "_hooked", {"finalizer"})
        monkeypatch.setattr(atexit, "register", hooks.append)
        monkeypatch.setattr(os, "register_at_fork", lambda **kinds: hooks.extend(kinds.values()))
        for number in range(3):
            with meter_in(tmp_path / str(number)):
                pass
        assert len(hooks) == 4  # at the exit, before a fork, and after it on both sides

    def test_a_close_that_is_interrupted_is_finished_by_the_next(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        meter = meter_in(tmp_path / "run").start()
        meter.step_end(tokens=1)
        with monkeypatch.context() as interrupted:
            interrupted.setattr(threading.Thread, "join", interrupts)
            with pytest.raises(KeyboardInterrupt):
                meter.close("failed (interrupted)")
        meter.close()
        assert Run.open(tmp_path / "run").status == "failed (interrupted)"
        assert Run.open(tmp_path / "run").count("steps") == 1
        assert active_meters.meters() == ()
        with meter_in(tmp_path / "next"):
            pass

    def test_a_close_that_is_interrupted_while_it_reads(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        meter = meter_in(tmp_path / "run").start()
        with monkeypatch.context() as interrupted:
            interrupted.setattr("ergmeter.sampler.Sampler.stop", interrupts)
            with pytest.raises(KeyboardInterrupt):
                meter.close()
        assert Run.open(tmp_path / "run").status == "running"
        meter.close()
        assert Run.open(tmp_path / "run").status == "finished"

    @pytest.mark.parametrize("world", [1, 2])
    def test_a_disk_that_hangs_does_not_hang_the_end_of_the_program(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        world: int,
    ) -> None:
        monkeypatch.setattr(handover, "STOP_S", 0.2)
        asked, answers = threading.Event(), threading.Event()

        def hangs(*_: Any, **__: Any) -> None:
            asked.set()
            answers.wait(60)

        monkeypatch.setattr(Writer, "write_columns", hangs)
        meter = meter_in(tmp_path / "run").start()
        meter.step_end(tokens=1)
        assert asked.wait(60)  # a hand-over has begun, and hangs
        monkeypatch.setattr(handover, "world_size", lambda: world)  # known only now
        began_s = time.monotonic()
        meter.close()
        assert time.monotonic() - began_s < 30  # half of what it would have hung
        said = capsys.readouterr().err
        assert "the disk has not answered for" in said
        assert "the end of the run is missing, with 0 rows of steps" in said
        assert active_meters.meters() == ()
        answers.set()
        until(lambda: writing_threads() == 0)

    def test_a_disk_that_is_slow_is_not_called_one_that_hangs(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(handover, "STOP_S", 0.5)
        monkeypatch.setattr(handover, "WRITE_ROWS", 10)
        write_columns = Writer.write_columns

        def slow(self: Writer, table: str, *rest: Any, **options: Any) -> None:
            time.sleep(0.1)
            write_columns(self, table, *rest, **options)

        with meter_in(tmp_path / "run") as meter:
            monkeypatch.setattr(Writer, "write_columns", slow)
            for _ in range(100):  # ten writes, which take twice as long as a disk may hang
                meter.step_end(tokens=1)
        assert capsys.readouterr().err == ""
        run = Run.open(tmp_path / "run")
        assert (run.status, len(run.steps()["start_ns"])) == ("finished", 100)

    def test_steps_that_a_hanging_disk_has_not_got_are_counted_at_the_end(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(handover, "STOP_S", 0.2)
        monkeypatch.setattr(handover, "HAND_OVER_S", 0.01)
        asked, answers = threading.Event(), threading.Event()

        def hangs(*_: Any, **__: Any) -> None:
            asked.set()
            answers.wait(60)

        monkeypatch.setattr(Writer, "write_columns", hangs)
        meter = meter_in(tmp_path / "run").start()
        meter.step_end(tokens=1)
        assert asked.wait(60)
        for _ in range(30):
            meter.step_end(tokens=1)
        meter.close()
        assert "is missing, with 30 rows of steps" in capsys.readouterr().err
        answers.set()
        until(lambda: writing_threads() == 0)


class TestSpans:
    """A span belongs to the thread it was entered in, wherever it is left."""

    def test_a_span_that_is_left_in_another_thread(self, tmp_path: Path) -> None:
        with meter_in(tmp_path / "run") as meter:
            span = meter.step(tokens=1)
            span.__enter__()
            in_thread(lambda: span.__exit__(None, None, None))
            with meter.step(tokens=1):
                pass
        assert Run.open(tmp_path / "run").count("steps") == 2

    def test_a_span_left_elsewhere_does_not_close_the_one_there(self, tmp_path: Path) -> None:
        with meter_in(tmp_path / "run") as meter:
            span = meter.step(tokens=1)
            in_thread(span.__enter__)
            with meter.step(tokens=1):
                if span._thread != threading.get_ident():
                    span.__exit__(None, None, None)
                with pytest.raises(UsageError, match="inside an open train span"), meter.step():
                    pass


def in_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def writing_threads() -> int:
    return sum(thread.name == "ergmeter-write" for thread in threading.enumerate())


def until(condition: Any, patience_s: float = 60) -> None:
    end_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def interrupts(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def refuses(*_: Any) -> str:
    raise OSError(28, "No space left on device")
