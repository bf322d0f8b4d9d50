"""A look at a run that goes on: windows of whole steps, and no figures of a run that hangs."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from ergmeter.records import Step
from ergmeter.runlog.identity import writer_header
from ergmeter.runlog.reader import Run
from ergmeter.runlog.writer import Writer
from ergmeter.views.serve.live import LiveLook
from tests.runs import add_writer, even_steps, make_run

S = 10**9


def going(path: Path, *, ended_s_ago: float, step_s: float = 6.0) -> tuple[Path, Writer]:
    """A run of this process, with ten steps of 100 tokens a second of which the last has ended."""
    run = make_run(path)
    header = {**writer_header("meter"), "settings": {}, "unavailable": {}}
    end_ns = time.monotonic_ns() - round(ended_s_ago * S)
    each_ns = round(step_s * S)
    began_ns = end_ns - 10 * each_ns
    header["clock"] = {
        "monotonic_ns": began_ns,
        "wall_ns": time.time_ns() - time.monotonic_ns() + began_ns,
    }
    writer = Writer(run, header=header)
    tokens = round(step_s * 100)
    rows = [
        Step(began_ns + i * each_ns, began_ns + (i + 1) * each_ns, index=i, tokens_computed=tokens)
        for i in range(10)
    ]
    writer.write("steps", rows)
    return run, writer


def test_the_first_look_is_of_whole_steps(tmp_path: Path) -> None:
    """Ten seconds back is within a step of 6 s: it is taken from its start."""
    run, writer = going(tmp_path / "run", ended_s_ago=1.0)
    seen = LiveLook(str(run)).now()
    writer.close()
    assert seen["readings"]["throughput.tokens_per_s"]["value"] == pytest.approx(100.0)
    assert seen["window_s"] == pytest.approx(12.0)


def test_a_run_whose_steps_stopped_shows_since_when_and_no_figures(tmp_path: Path) -> None:
    run, writer = going(tmp_path / "run", ended_s_ago=1.0)
    look = LiveLook(str(run))
    assert look.now()["readings"]
    assert look._since_ns is not None
    look._since_ns -= 600 * S  # as if it had been ten minutes ago
    look._update = lambda run: None  # type: ignore[method-assign]
    seen = look.now()
    writer.close()
    assert seen["readings"] == {}
    assert seen["step"] == 10
    assert seen["marks"][-1]["name"] == "quiet"
    assert seen["marks"][-1]["detail"].startswith("last step 10 min")


def test_of_several_trainings_the_newest_is_looked_at(tmp_path: Path) -> None:
    run, writer = going(tmp_path / "run", ended_s_ago=1.0)
    writer.extend_header(training={"id": "B", "world": 1, "model": "Second"})
    clock = {"monotonic_ns": 0, "wall_ns": 1_000_000_000 * S}
    header = {"training": {"id": "A", "world": 1, "model": "First"}, "clock": clock}
    add_writer(run, steps=even_steps(5, tokens_computed=7), header=header)
    assert Run.open(run).trainings == ["A", "B"]
    seen = LiveLook(str(run)).now()
    writer.close()
    assert seen["title"] == "test, Second"
    assert seen["step"] == 10
    assert seen["readings"]["throughput.tokens_per_s"]["value"] == pytest.approx(100.0)


def test_a_training_that_begins_has_nothing_of_the_one_before(tmp_path: Path) -> None:
    run, writer = going(tmp_path / "run", ended_s_ago=1.0)
    writer.extend_header(training={"id": "A", "world": 1, "model": "First"})
    look = LiveLook(str(run))
    assert look.now()["step"] == 10
    header = {**writer_header("meter"), "settings": {}, "unavailable": {}}
    header["training"] = {"id": "B", "world": 1, "model": "Second"}
    second = Writer(run, header=header)
    seen = look.now()
    second.close()
    writer.close()
    assert seen["title"] == "test, Second"
    assert (seen["step"], seen["readings"]) == (None, {})


def test_another_run_under_the_same_path_has_nothing_of_the_one_before(tmp_path: Path) -> None:
    run, writer = going(tmp_path / "run", ended_s_ago=1.0)
    look = LiveLook(str(run))
    assert look.now()["step"] == 10
    writer.close()
    shutil.rmtree(run)
    make_run(run, "second")
    header = {**writer_header("meter"), "settings": {}, "unavailable": {}}
    second = Writer(run, header=header)
    seen = look.now()
    second.close()
    assert seen["title"] == "second"
    assert seen["state"] == "running"
    assert (seen["step"], seen["readings"]) == (None, {})


@pytest.mark.parametrize("said", ["{not json", '{"format": "ergmeter-run", "version": 99}'])
def test_a_run_that_can_not_be_read_is_not_gone(tmp_path: Path, said: str) -> None:
    run, writer = going(tmp_path / "run", ended_s_ago=1.0)
    look = LiveLook(str(run))
    assert look.now()["step"] == 10
    writer.close()
    (run / "run.json").write_text(said)
    seen = look.now()
    assert seen["state"] == "unreadable"
    assert str(run) in seen["why"]
    assert seen["step"] == 10  # what was last seen of it
    shutil.rmtree(run)
    assert look.now()["state"] == "gone"
