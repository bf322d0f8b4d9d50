"""Writes rows to trackio's local SQLite file, which `trackio show` draws.

`trackio.init` prints three lines, starts threads that read the GPU, and stamps each row with the
time it was sent. So this sink writes to the storage directly, as trackio's log importers do.
Nothing goes to a Space: `trackio sync` does that.
"""

from __future__ import annotations

import uuid
from datetime import datetime, timezone
from typing import Any, ClassVar

from ergmeter.errors import UsageError
from ergmeter.ports import SinkRequest, Update
from ergmeter.sinks.shared.updates import TRACKER, SelectingSink

PROJECT = "ergmeter"


class TrackioSink(SelectingSink):
    """Adds a row for each update."""

    name = "trackio"
    library = "trackio"
    options: ClassVar = {**TRACKER, "project": PROJECT, "run_name": None}

    def __init__(self, request: SinkRequest) -> None:
        super().__init__(request, run_name=request.name)
        from trackio.sqlite_storage import SQLiteStorage

        self._storage: Any = SQLiteStorage
        self._id = uuid.uuid4().hex
        try:
            self._storage.validate_project_name(self._options["project"])
        except ValueError as error:
            raise UsageError(str(error)) from error

    def write(self, update: Update) -> None:
        """Add one row; its id prevents a duplicate if the update is sent again."""
        tagged = self._tagged(update)
        row = {self._names.window: update.window_kind, **tagged} if update.is_final else tagged
        scope = "run" if update.is_final else "window"
        self._storage.bulk_log(
            self._options["project"],
            self._options["run_name"],
            [row],
            steps=[update.step],
            timestamps=[datetime.fromtimestamp(update.wall_s, timezone.utc).isoformat()],
            log_ids=[f"{self._id}-{scope}-{update.window.end_ns}"],
        )
