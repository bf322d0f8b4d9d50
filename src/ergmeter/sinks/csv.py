"""Writes a CSV file: one row per update, one row per run, or the row of an energy ledger.

The columns are the keys of all metrics, or of the chosen ones, whether they have a value or not.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from ergmeter.errors import UsageError
from ergmeter.ports import SinkRequest, Update
from ergmeter.sinks.shared.appended_file import LEDGER_MEASURED, CsvFile, ledger_columns, ledger_row
from ergmeter.sinks.shared.updates import SelectingSink, choice

FILE = "figures.csv"
# scope: the figures are of a window, or of the run; window: its kind
_SCOPE = ("run", "scope", "step", "wall_s", "window")


class CsvSink(SelectingSink):
    """Appends rows to a CSV file."""

    name = "csv"
    options: ClassVar = {
        "metrics": None,
        "path": None,
        "rows": "updates",
        "ledger": False,
        "columns": None,
    }

    def __init__(self, request: SinkRequest) -> None:
        super().__init__(request)
        options = self._options
        self._own = dict(options["columns"] or {})
        self._is_ledger = options["ledger"]
        rows = choice(options["rows"], ("updates", "final"), option="rows")
        self._only_final = rows == "final" or self._is_ledger
        path = options["path"] or Path(request.run) / FILE
        self._file = CsvFile(path, self._columns(has_metrics=options["metrics"] is not None))

    def write(self, update: Update) -> None:
        """Append one row."""
        if self._only_final and not update.is_final:
            return
        if self._is_ledger:
            own = {**update.summary.readings, **update.unbroken}
            self._file.append(ledger_row(own, steps=update.step, described=self._own))
            return
        scope = "run" if update.is_final else "window"
        cells = (self._run, scope, update.step, update.wall_s, update.window_kind)
        figures = self._selection.figures(update)
        values = {
            figure.key: f"{figure.value!r}{figure.reading.mark}"
            if figure.reading.impossible
            else figure.value
            for figure in figures
        }
        self._file.append({**dict(zip(_SCOPE, cells, strict=True)), **values, **self._own})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _columns(self, *, has_metrics: bool) -> tuple[str, ...]:
        if self._is_ledger and has_metrics:
            raise UsageError("a ledger has fixed columns (SFT-Play's); omit metrics= or ledger=")
        measured = LEDGER_MEASURED if self._is_ledger else (*_SCOPE, *self._selection.columns())
        taken = [name for name in self._own if name in measured]
        if taken:
            raise UsageError(f"columns= has columns that are measured; remove: {', '.join(taken)}")
        return ledger_columns(self._own) if self._is_ledger else (*measured, *self._own)
