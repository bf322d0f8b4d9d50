"""Logs metrics to MLflow: into the script's active run where it has one, else into a new one.

`mlflow.active_run()` belongs to the calling thread: on a sink's thread it is always None, and
metrics would go to a second run. So the active runs of all threads are looked up. Nothing here
changes what is active: the client writes to a run by its id.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, ClassVar

from ergmeter.errors import UsageError
from ergmeter.sinks.shared.updates import TRACKER, SelectingSink

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from ergmeter.ports import SinkRequest, Update

EXPERIMENT = "ergmeter"
_BATCH = 1000  # the most metrics that a server accepts in one request


class MlflowSink(SelectingSink):
    """Logs each update as a batch of metrics."""

    name = "mlflow"
    library = "mlflow"
    options: ClassVar = {
        **TRACKER,
        "tracking_uri": None,
        "experiment": None,
        "run_id": None,
        "run_name": None,
    }

    def __init__(self, request: SinkRequest) -> None:
        super().__init__(
            request,
            experiment=os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT),
            run_id=os.environ.get("MLFLOW_RUN_ID"),
            run_name=request.name,
        )
        # Without this, creating a database logs many lines to standard error.
        for noisy in ("mlflow.store.db", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        self._client = _client(self._options["tracking_uri"])
        self._run_id: str | None = self._options["run_id"]
        self._is_ours = False
        self._is_complete = False

    def write(self, update: Update) -> None:
        """Log one update."""
        from mlflow.entities import Metric

        if self._run_id is None:  # not earlier: scripts begin their run after their Meter
            self._run_id = self._active() or self._begun()
        t_ms = round(update.wall_s * 1000)
        tagged = self._tagged(update).items()
        metrics = [Metric(tag, value, t_ms, update.step) for tag, value in tagged]
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _BATCH])
        if update.is_final:
            self._client.set_tag(self._run_id, self._names.window, update.window_kind)
        self._is_complete = update.is_final

    def close(self) -> None:
        """End the MLflow run, if the sink created it."""
        if self._is_ours and self._run_id is not None:
            status = "FINISHED" if self._is_complete else "KILLED"
            self._client.set_terminated(self._run_id, status=status)

    def _active(self) -> str | None:
        import mlflow
        from mlflow.tracking import fluent

        # A private function, the only way to another thread's run; older versions had one stack.
        latest = getattr(fluent, "_get_latest_active_run", mlflow.active_run)
        run = latest()
        return None if run is None else str(run.info.run_id)

    def _begun(self) -> str:
        name = self._options["experiment"]
        experiment = self._client.get_experiment_by_name(name)
        where = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run = self._client.create_run(where, run_name=self._options["run_name"])
        self._is_ours = True
        return str(run.info.run_id)


def _client(tracking_uri: str | None) -> MlflowClient:
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    try:
        return MlflowClient(tracking_uri)
    except MlflowException as error:
        if "FILE_STORE" in str(error):  # MLflow 3 refuses a folder unless a variable allows it
            uri = tracking_uri or mlflow.get_tracking_uri()
            raise UsageError(
                f"MLflow no longer writes to the folder {uri}; "
                "use tracking_uri='sqlite:///mlflow.db', or set MLFLOW_ALLOW_FILE_STORE=true"
            ) from error
        raise
