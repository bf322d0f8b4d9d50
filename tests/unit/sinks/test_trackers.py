"""Trackers beside the script's own use of them: joined, never disturbed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ergmeter.errors import PluginError, UsageError
from ergmeter.sinks.tensorboard import TensorBoardSink
from tests.unit.sinks.readback import mlflow_run_points, sink_of, trackio_points, wandb_file
from tests.unit.sinks.test_every_sink import sent
from tests.unit.sinks.updates import UPDATES, on_a_thread, request, written

# MLflow 3.17 uses what SQLAlchemy 2.1 will drop.
mlflow_warns = pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")


def quiet_run(**options: Any) -> Any:
    """A script's own W&B run."""
    import wandb

    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    return wandb.init(project="theirs", settings=settings, **options)


def test_wandb_figures_go_with_the_scripts_rows_and_its_steps_stay_its_own(
    tmp_path: Path,
) -> None:
    run = quiet_run()
    sink = sink_of("wandb", tmp_path)
    run.log({"loss": 3.0}, step=100)
    on_a_thread(lambda: sink.write(UPDATES[0]))
    run.log({"eval": 2.0}, step=100)  # the same step again: lost, had we moved the counter
    run.log({"loss": 1.0}, step=101)
    on_a_thread(lambda: written(sink, UPDATES[1], UPDATES[3]))
    assert run.step == 101
    run.log({"loss": 0.5}, step=102)  # the sink is closed, the run is not
    run.finish()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows, summary = wandb_file(path)
    theirs = [(r["_step"], r.get("loss"), r.get("eval"), r.get("ergmeter/step")) for r in rows]
    assert theirs == [(100, 3.0, 2.0, 10), (101, 1.0, None, 20), (102, 0.5, None, None)]
    assert rows[0]["ergmeter/energy.mean_w"] == 310.25
    assert rows[0]["ergmeter/wall_s"] == UPDATES[0].wall_s
    assert summary["ergmeter-run/energy.mean_w"] == 310.25 * 0.9


def test_wandbs_global_run_is_not_ours_and_nothing_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import wandb

    sink = sink_of("wandb", tmp_path)
    on_a_thread(lambda: sink.write(UPDATES[0]))
    assert wandb.run is None
    run = quiet_run()  # a script that begins late has its own run all the same
    assert run.project == "theirs"
    run.finish()
    on_a_thread(sink.close)
    assert capfd.readouterr() == ("", "")


def test_a_wandb_run_that_the_script_has_finished_ends_the_sink_with_the_cure(
    tmp_path: Path,
) -> None:
    run = quiet_run()
    sink = sink_of("wandb", tmp_path)
    on_a_thread(lambda: sink.write(UPDATES[0]))
    run.finish()
    with pytest.raises(PluginError, match=r"close the Meter before wandb.finish\(\)"):
        on_a_thread(lambda: sink.write(UPDATES[3]))


@mlflow_warns
def test_mlflow_figures_go_to_the_run_of_the_scripts_thread_which_stays_open(
    tmp_path: Path,
) -> None:
    import mlflow

    sink = sink_of("mlflow", tmp_path)  # before the script begins its run, as a Meter often is
    with mlflow.start_run(run_name="theirs") as run:
        on_a_thread(lambda: written(sink, *UPDATES))
        active = mlflow.active_run()
        assert active is not None
        assert active.info.run_id == run.info.run_id
        assert mlflow.get_run(run.info.run_id).info.status == "RUNNING"
        mlflow.log_metric("loss", 1.0, step=3)
    assert mlflow_run_points(run.info.run_id) == sent("mlflow")


@mlflow_warns
def test_a_folder_that_mlflow_no_longer_writes_to_is_refused_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(UsageError, match=r"use tracking_uri='sqlite:///mlflow\.db'"):
        sink_of("mlflow", tmp_path, tracking_uri=f"file:{tmp_path}")


def test_an_update_that_is_offered_again_is_one_row_of_trackio(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    points = trackio_points(tmp_path, [UPDATES[0], UPDATES[0], UPDATES[3]])
    assert points.keys() == {("window", 10), ("run", 30)}
    assert capfd.readouterr() == ("", "")


def test_a_project_name_that_trackio_reserves_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="registry-"):
        sink_of("trackio", tmp_path, project="registry-mine")


def test_tensorboard_files_of_two_runs_in_one_folder_are_two(tmp_path: Path) -> None:
    for _ in range(2):
        written(TensorBoardSink(request(tmp_path, path=tmp_path / "all")), UPDATES[0])
    assert len(list((tmp_path / "all").glob("events.out.tfevents.*"))) == 2


def test_tensorboard_needs_neither_torch_nor_tensorflow() -> None:
    import subprocess

    code = "import sys, ergmeter.sinks.tensorboard; print({'torch', 'tensorflow'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"
