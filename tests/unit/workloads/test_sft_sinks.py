"""Sinks of `erg train`, from the YAML and from the command line, read back with their libraries."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ergmeter.meter import sink_feed
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Reading
from ergmeter.runlog.reader import Run
from tests.models import models as kept_models
from tests.unit.sinks.readback import wandb_file

pytestmark = [
    pytest.mark.frameworks,
    # MLflow 3.17 uses what SQLAlchemy 2.1 will drop.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning"),
]

SINKS: list[Any] = ["tensorboard", {"wandb": {"project": "sft"}}, "mlflow:experiment=sft"]
OPTIONS = (
    "--sink",
    "tensorboard",
    "--sink",
    "wandb:project=sft",
    "--sink",
    "mlflow:experiment=sft",
)
STEPS = 6


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for both ways, made before the training: that takes MLflow seconds."""
    import mlflow

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setattr(sink_feed, "STOP_S", 120.0)  # for a slow machine
    yield
    if "wandb" in sys.modules:  # it reads its environment once for a process
        sys.modules["wandb"].teardown()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept_models(tmp_path_factory)


def configuration(models: Path, **train: Any) -> str:
    values = {
        "model": {"name": "builtin:tiny", "local_dir": str(models), "max_seq_len": 64},
        "tuning": {"lora": {"r": 4, "alpha": 8}},
        "train": {"batch_size": 2, "max_steps": STEPS, "logging_steps": 1, **train},
        "metrics": {"warmup_s": 0, "results_csv": "outputs/ledger.csv"},
    }
    Path("run.yaml").write_text(yaml.safe_dump(values))
    return "run.yaml"


@pytest.mark.parametrize("way", ["yaml", "command line"])
def test_figures_reach_tensorboard_wandb_and_mlflow(
    erg: Callable[..., tuple[int, str, str]], models: Path, database: Path, way: str
) -> None:
    """Of the run the same numbers that its summary has, and the loss of the last step."""
    import mlflow
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = configuration(models, **({"report_to": SINKS} if way == "yaml" else {}))
    code, out, err = erg(
        "train", "--config", path, "--out", "run", "--json", *(OPTIONS if way != "yaml" else ())
    )
    assert code == 0, err
    run = Run.open(Path("run"))
    assert [mark.detail for mark in run.marks if mark.name == "sink_failed"] == []
    rate = summarize(run).readings["throughput.tokens_per_s"]
    assert isinstance(rate, Reading)
    loss = run.steps()["loss"][-1]
    assert loss == pytest.approx(json.loads(out)["row"]["train_loss"])
    tag, of_window = "ergmeter-run/throughput.tokens_per_s", "ergmeter/training.loss"

    board = EventAccumulator("run/tensorboard")
    board.Reload()
    (point,) = board.Scalars(tag)
    assert (point.step, point.value) == (STEPS, pytest.approx(rate.value, rel=1e-6))
    assert board.Scalars(of_window)[-1].value == pytest.approx(loss, rel=1e-6)

    (file,) = Path().glob("wandb/offline-run-*/*.wandb")
    rows, summary = wandb_file(file)
    assert summary[tag] == rate.value
    assert rows[-1][of_window] == pytest.approx(loss)

    client = mlflow.MlflowClient(f"sqlite:///{database}")
    experiment = client.get_experiment_by_name("sft")
    assert experiment is not None
    newest = client.search_runs([experiment.experiment_id])[0]
    (value,) = client.get_metric_history(newest.info.run_id, tag)
    assert (value.step, value.value) == (STEPS, rate.value)
    assert client.get_metric_history(newest.info.run_id, of_window)[-1].value == pytest.approx(loss)


@pytest.mark.parametrize("way", ["yaml", "command line"])
def test_a_sink_there_is_not_is_one_line_with_the_closest(
    erg: Callable[..., tuple[int, str, str]], models: Path, way: str
) -> None:
    path = configuration(models, **({"report_to": "wanb"} if way == "yaml" else {}))
    code, out, err = erg("train", "--config", path, *(("--sink", "wanb") if way != "yaml" else ()))
    assert (code, out) == (2, "")
    assert "train.report_to has a bad entry: no sink 'wanb'; did you mean 'wandb'?" in err
    assert len(err.splitlines()) == 1
    assert not Path("run").exists()
