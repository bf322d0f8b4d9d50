"""The demo's training: what it refuses, what it repeats, and that an interrupt keeps the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ergmeter.errors import UsageError
from ergmeter.metrics.summarize import summarize
from ergmeter.records import PHASES, Reading
from ergmeter.runlog.reader import FINISHED, Run
from ergmeter.workloads import demo_training
from ergmeter.workloads.demo_text import documents
from ergmeter.workloads.demo_training import DemoBatch, batch_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.frameworks

CPU = torch.device("cpu")


def value(run: Run, key: str) -> float:
    found = summarize(run).readings[key]
    assert isinstance(found, Reading), found
    return found.value


def test_auto_takes_what_is_there_and_a_name_takes_that() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    if not torch.backends.mps.is_available():
        assert demo_training.device_named("auto").type == expected
    assert demo_training.device_named("cpu") == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"torch .* has no cuda device here; it has .*cpu"):
        demo_training.device_named("cuda")


def test_the_same_seed_trains_the_same_model() -> None:
    def losses() -> list[float]:
        training = demo_training.DemoTraining(demo_training.SMALL, CPU)
        return [training.step(next(training.batches)) for _ in range(3)]

    first = losses()
    assert first == pytest.approx(losses(), rel=1e-5)
    assert first[0] == pytest.approx(5.55, abs=0.2)  # ln 256: it knew nothing
    assert first[2] < first[0]


def test_the_learning_rate_rises_for_ten_steps_and_then_stays() -> None:
    training = demo_training.DemoTraining(demo_training.SMALL, CPU)
    rates = []
    for _ in range(12):
        rates.append(training.schedule.get_last_lr()[0])
        training.optimizer.step()
        training.schedule.step()
    expected = [3e-3 * min(10, step) / 10 for step in range(1, 13)]
    assert rates == pytest.approx(expected)


def test_what_is_held_out_is_never_trained_on() -> None:
    training = demo_training.DemoTraining(demo_training.SMALL, CPU)
    seen = set()
    for _ in range(len(documents()) // demo_training.SMALL.documents):
        seen |= rows(next(training.batches))
    held_out = set().union(*(rows(batch) for batch in training.held_out))
    assert len(held_out) == 16
    assert len(seen) > 1_000
    assert not seen & held_out


def rows(batch: DemoBatch) -> set[bytes]:
    return {bytes(row.tolist()).rstrip(b"\0") for row in batch.inputs}


def test_evaluation_weighs_each_predicted_byte_the_same() -> None:
    training = demo_training.DemoTraining(demo_training.SMALL, CPU)
    whole = batch_of(documents()[: 4 * demo_training.SMALL.documents])
    with torch.no_grad():
        at_once = training._loss(whole).item()
    assert training.evaluate() == pytest.approx(at_once, rel=1e-5)


def test_a_run_has_its_steps_its_phases_and_its_held_out_losses(tmp_path: Path) -> None:
    for seconds in (2.0, 10.0, 40.0):  # longer where a busy machine makes a few steps in two
        ticks: list[demo_training.DemoProgress] = []
        out = tmp_path / f"run{seconds:.0f}"
        outcome = demo_training.run(seconds, device=CPU, out=out, tell=ticks.append)
        if len(ticks) >= 12:
            break
    run = Run.open(outcome.run)
    assert (outcome.interrupted, run.status) == (False, FINISHED)
    assert all(tick.elapsed_s < seconds for tick in ticks[:-1])  # the first past it is the last
    goal = run.writers[0].header["budget"]["steps"]  # so that erg watch and serve show progress
    assert ticks[-1].elapsed_s >= seconds or len(ticks) == goal
    assert 0.2 * goal < len(ticks) <= goal  # a busy machine is not always alike
    assert (run.steps()["phase"] == PHASES.index("train")).sum() == len(ticks)
    assert value(run, "time.eval_s") > 0
    assert value(run, "time.data_s") > 0
    reported = [(r.name, r.value) for r in run.reported()]
    assert reported == [("held_out_loss", loss) for loss in outcome.held_out]
    assert len(reported) == 2


def test_an_interrupt_keeps_what_was_measured_and_says_so_in_the_run(tmp_path: Path) -> None:
    def interrupt(tick: demo_training.DemoProgress) -> None:
        if tick.steps == 6:
            raise KeyboardInterrupt

    outcome = demo_training.run(3600, device=CPU, out=tmp_path / "run", tell=interrupt)
    run = Run.open(outcome.run)
    assert outcome.interrupted
    assert outcome.held_out == ()
    assert run.status.startswith("failed (KeyboardInterrupt")
    assert value(run, "steps.count") == 6 - demo_training.WARMUP_STEPS


def test_an_error_in_the_training_is_not_taken_for_an_interrupt(tmp_path: Path) -> None:
    def fail(_tick: demo_training.DemoProgress) -> None:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        demo_training.run(3600, device=CPU, out=tmp_path / "run", tell=fail)
    assert Run.open(tmp_path / "run").status == "failed (RuntimeError: out of luck)"


def test_too_little_device_memory_is_said_in_one_line_with_a_way_out(tmp_path: Path) -> None:
    def exhaust(_tick: demo_training.DemoProgress) -> None:
        raise torch.cuda.OutOfMemoryError("tried to allocate 2.00 GiB")

    with pytest.raises(UsageError, match=r"try --device cpu \(tried to allocate 2.00 GiB\)"):
        demo_training.run(3600, device=CPU, out=tmp_path / "run", tell=exhaust)
    assert Run.open(tmp_path / "run").status.startswith("failed (OutOfMemoryError")


@pytest.mark.device
def test_on_cuda_the_large_model_trains_and_the_device_is_measured(tmp_path: Path) -> None:
    outcome = demo_training.run(
        5.0, device=torch.device("cuda"), out=tmp_path / "run", tell=lambda _: None
    )
    run = Run.open(outcome.run)
    assert run.status == FINISHED
    assert outcome.held_out[-1] < 3.0
    weights_bytes = 4 * demo_training.LARGE.model.parameters  # and as much for each of three others
    assert value(run, "memory.allocator_peak_bytes") > 4 * weights_bytes
    assert value(run, "time.outside_steps_frac") < 0.5
