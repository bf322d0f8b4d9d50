"""Writes rows to trackio's local SQLite file, which `trackio show` draws.

`trackio.init` prints three lines, starts threads that read the GPU, and stamps each row with the
time it was sent. Its log importers write to the same storage with given times, and so does this.
Nothing goes to a Space: `trackio sync` does that.
"""

from __future__ import annotations

import uuid
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from trackio.sqlite_storage import SQLiteStorage

from ergmeter.errors import UsageError
from ergmeter.sinks.shared.options import options_of
from ergmeter.sinks.shared.updates import Names, Selection

if TYPE_CHECKING:
    from ergmeter.ports import SinkRequest, Update

PROJECT = "ergmeter"


class TrackioSink:
    """Adds a row for each update."""

    name = "trackio"

    def __init__(self, request: SinkRequest) -> None:
        options = options_of(
            request,
            sink=self.name,
            project=PROJECT,
            run_name=request.name,
        )
        self._names = Names(options["prefix"])
        self._selection = Selection(options["metrics"], devices=options["devices"])
        self._project = options["project"]
        self._run_name = options["run_name"]
        self._id = uuid.uuid4().hex
        try:
            SQLiteStorage.validate_project_name(self._project)
        except ValueError as error:
            raise UsageError(str(error)) from error

    def write(self, update: Update) -> None:
        """Add one row; its id prevents a second one when it is sent again."""
        tagged = self._names.tagged(self._selection.figures(update), is_final=update.is_final)
        row = {self._names.window: update.window_kind, **tagged} if update.is_final else tagged
        scope = "run" if update.is_final else "window"
        SQLiteStorage.bulk_log(
            self._project,
            self._run_name,
            [row],
            steps=[update.step],
            timestamps=[datetime.fromtimestamp(update.wall_s, timezone.utc).isoformat()],
            log_ids=[f"{self._id}-{scope}-{update.window.end_ns}"],
        )

    def close(self) -> None:
        """Every row is in the file already."""
