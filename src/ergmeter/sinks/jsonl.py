"""Writes JSON lines: one object per update.

Each value has its unit, basis, bounds and note; a missing one has its reason.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

from ergmeter.ports import SinkRequest, Update
from ergmeter.records import Reading
from ergmeter.sinks.shared.appended_file import AppendedFile
from ergmeter.sinks.shared.updates import SelectingSink

FILE = "figures.jsonl"


class JsonLinesSink(SelectingSink):
    """Appends a line for each update."""

    name = "jsonl"
    options: ClassVar = {"metrics": None, "devices": True, "path": None}

    def __init__(self, request: SinkRequest) -> None:
        super().__init__(request)
        self._file = AppendedFile(self._options["path"] or Path(request.run) / FILE)

    def write(self, update: Update) -> None:
        """Append one line."""
        line = json.dumps(self._record(update), ensure_ascii=False, allow_nan=False)
        with self._file.locked():
            self._file.append_line(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _record(self, update: Update) -> dict[str, object]:
        figures: dict[str, object] = {}
        devices: dict[str, dict[str, object]] = {}
        for figure in self._selection.figures(update):
            target = figures if figure.device is None else devices.setdefault(figure.device, {})
            target[figure.key] = _reading_json(figure.reading)
        return {
            "run": self._run,
            "scope": "run" if update.is_final else "window",
            "step": update.step,
            "wall_s": update.wall_s,
            "window_s": update.length_s,
            "window_kind": update.window_kind,
            "status": update.summary.status,
            "figures": figures,
            "devices": devices,
            "missing": self._selection.missing(update),
            "notes": list(update.summary.notes),
        }


def _reading_json(reading: Reading) -> dict[str, object]:
    """Return the fields of a reading, without empty texts and non-finite bounds."""
    return {
        name: value if isinstance(value, str) else float(value)
        for name, value in asdict(reading).items()
        if value not in (None, "") and (isinstance(value, str) or math.isfinite(value))
    }
