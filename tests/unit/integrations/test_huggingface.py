"""What can be said of the callback before a Trainer calls it. Trainings are in tests/e2e."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ergmeter import Meter
from ergmeter.errors import UsageError
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

transformers = pytest.importorskip("transformers")
huggingface = pytest.importorskip("ergmeter.integrations.huggingface")

STATE = {"global_step": 0, "logging_steps": 1}
ARGUMENTS = {"logging_strategy": "steps", "bf16": True, "fp16": False}


def begun(path: Path, **options: Any) -> Run:
    """The run of a training that began and ended, as a loop without a Trainer tells it."""
    callback = huggingface.ErgmeterCallback(path, probes=[], **options)
    arguments = SimpleNamespace(**ARGUMENTS)
    state = SimpleNamespace(**STATE)
    callback.on_train_begin(arguments, state, None, model=None)
    callback.on_step_begin(arguments, state, None)
    callback.on_step_end(arguments, state, None)
    callback.on_train_end(arguments, state, None)
    assert callback.path == path
    assert callback.summary().readings["steps.count"].value == 1
    return Run.open(path)


def test_a_wrong_option_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(UsageError, match="no setting 'warmup_step'"):
        huggingface.ErgmeterCallback(warmup_step=3)
    with pytest.raises(UsageError, match="not both"):
        huggingface.ErgmeterCallback("run", meter=Meter())


def test_without_a_training_there_is_no_run_to_name() -> None:
    with pytest.raises(UsageError, match="no training has begun"):
        _ = huggingface.ErgmeterCallback().path


def test_products_are_in_what_the_arguments_say_unless_the_user_says_otherwise(
    tmp_path: Path,
) -> None:
    assert begun(tmp_path / "said").settings["dtype"] == "bf16"
    assert begun(tmp_path / "given", dtype="fp8").settings["dtype"] == "fp8"
    declared = Settings(dtype="fp16", pue=1.5)
    assert begun(tmp_path / "settings", settings=declared).settings["dtype"] == "fp16"


def test_a_loop_that_is_no_trainer_has_steps_and_the_reason_why_no_tokens(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    (mark,) = [mark for mark in run.marks if mark.name == "tokens_not_counted"]
    assert "isn't found" in mark.detail
    assert run.status == "finished"
