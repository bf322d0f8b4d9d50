"""Logs metrics to Weights & Biases: into the script's run of this process, else into a new one.

Every `log` advances W&B's one step counter, and a script that then logs at a smaller step has its
data ignored. So in a script's run nothing is committed: our values go with the script's next row
(of two updates between rows, the later). Their axis is `ergmeter/step`, not W&B's.

A new run does not become `wandb.run`, captures no output and prints nothing. The environment
decides whether it goes to a server (WANDB_MODE).
"""

from __future__ import annotations

import importlib
import os
from typing import Any, ClassVar

from ergmeter.errors import PluginError
from ergmeter.ports import SinkRequest, Update
from ergmeter.sinks.shared.updates import TRACKER, SelectingSink

PROJECT = "ergmeter"


class WandbSink(SelectingSink):
    """Logs each update; the run's final values go to its summary."""

    name = "wandb"
    library = "wandb"
    options: ClassVar = {**TRACKER, "project": None, "run_name": None}

    def __init__(self, request: SinkRequest) -> None:
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        super().__init__(request, project=project, run_name=request.name)
        self._wandb: Any = importlib.import_module("wandb")
        self._wandb_run: Any = None  # until the first update: scripts begin theirs after the Meter
        self._is_ours = False
        self._is_complete = False

    def write(self, update: Update) -> None:
        """Log one update."""
        if self._wandb_run is None:
            self._open()
        tagged = self._tagged(update)
        try:
            if update.is_final:
                self._wandb_run.summary.update({self._names.window: update.window_kind, **tagged})
                self._is_complete = True
            else:
                self._log(update, tagged)
        except self._wandb.errors.UsageError as error:
            raise PluginError(
                f"the W&B run was finished before ergmeter's last metrics were logged ({error}); "
                "close the Meter before wandb.finish()"
            ) from error

    def close(self) -> None:
        """Finish the W&B run, if the sink created it."""
        if self._is_ours:
            self._wandb_run.finish(exit_code=0 if self._is_complete else 1)

    def _open(self) -> None:
        wandb = self._wandb
        run: Any = wandb.run
        if run is None:
            settings = wandb.Settings(
                reinit="create_new", silent=True, console="off", x_disable_stats=True
            )
            project, name = self._options["project"], self._options["run_name"]
            run = wandb.init(project=project, name=name, settings=settings)
            self._is_ours = True
            # Else a later `wandb.init` in a script would return this run (reinit's default), with
            # our project and name. Undocumented; `finish` does the same.
            wandb.setup().remove_active_run(run)
        run.define_metric(self._names.tag("*"), step_metric=self._names.tag("step"))
        self._wandb_run = run

    def _log(self, update: Update, tagged: dict[str, float]) -> None:
        row: dict[str, float] = {
            self._names.tag("step"): update.step,
            self._names.tag("wall_s"): update.wall_s,
            **tagged,
        }
        if self._is_ours:
            row["_timestamp"] = update.wall_s
        self._wandb_run.log(row, commit=self._is_ours)
