"""Prints a few metrics to the terminal: one line redrawn in place, or a block now and then.

It writes to standard error, so that a pipe has the program's output alone. On a terminal the line
is redrawn in place and the cursor returns to its start, so that the program's next output is where
it would have been. Where tqdm draws bars, a plain line is printed above them with `tqdm.write`. In
a file or pipe a line is printed now and then. A line too long for the terminal loses whole values,
since half a number would be a wrong number.

In the line, a value that is neither measured nor derived names its basis; the block names each.
"""

from __future__ import annotations

import os
import sys
from typing import Any, ClassVar

from ergmeter.errors import UsageError
from ergmeter.metrics.catalog import catalogue, in_view
from ergmeter.ports import SinkRequest, Update
from ergmeter.sinks.shared.updates import SelectingSink, SinkValue, choice, readable
from ergmeter.units import duration

_ERASE_TO_END = "\x1b[K"


class ConsoleSink(SelectingSink):
    """Prints a few metrics to standard error."""

    name = "console"
    options: ClassVar = {"metrics": (), "style": "line", "every_s": 60.0, "stream": "stderr"}

    def __init__(self, request: SinkRequest) -> None:
        super().__init__(request, metrics=tuple(in_view("console")))
        self._style = choice(self._options["style"], ("line", "block"), option="style")
        self._every_s = self._options["every_s"]
        self._stream = _stream(self._options["stream"])
        self._printed_s: float | None = None  # on the updates' clock
        self._is_drawn = False  # our line is at the cursor

    def write(self, update: Update) -> None:
        """Print or redraw if due."""
        figures = self._selection.figures(update)
        if self._style == "block":
            if self._is_due(update):
                self._print("\n".join(block(self._run, update, figures)), update)
        elif self._stream.isatty() and not update.is_final and not _bars():
            self._stream.write("\r" + self._line(update, figures) + _ERASE_TO_END + "\r")
            self._stream.flush()
            self._is_drawn = True
        elif self._is_due(update):
            self._print(self._line(update, figures), update)

    def close(self) -> None:
        """Erase the drawn line."""
        self._stream.write(self._erasure())
        self._stream.flush()

    def _is_due(self, update: Update) -> bool:
        last_s = self._printed_s
        return update.is_final or last_s is None or update.wall_s - last_s >= self._every_s

    def _print(self, text: str, update: Update) -> None:
        text = self._erasure() + text
        bars = _bars()
        if bars is None:
            self._stream.write(text + "\n")
        else:
            bars.write(text, file=self._stream)
        self._stream.flush()
        self._printed_s = update.wall_s

    def _erasure(self) -> str:
        """The characters that erase our line, if one is drawn."""
        was_drawn, self._is_drawn = self._is_drawn, False
        return "\r" + _ERASE_TO_END if was_drawn else ""

    def _line(self, update: Update, figures: list[SinkValue]) -> str:
        what = f"run {self._run}, {update.step} steps" if update.is_final else f"step {update.step}"
        return line(f"ergmeter {what}", figures, columns=_columns(self._stream))


def line(head: str, figures: list[SinkValue], *, columns: int | None) -> str:
    """Return as many metrics as fit in one line."""
    text = head
    for figure in figures:
        is_sure = figure.reading.basis in ("measured", "derived")
        basis = "" if is_sure else f" ({figure.reading.basis})"
        longer = f"{text} | {_labelled(figure)}{basis}"
        if columns is not None and len(longer) > columns:
            break
        text = longer
    return text


def block(run: str, update: Update, figures: list[SinkValue]) -> list[str]:
    """Return the metrics, one per line, with unit and basis."""
    took = duration(update.length_s)
    over = f"{took} of training" if update.is_final else f"the last {took}"
    rows = [(catalogue()[f.key].title, readable(f.reading), f.reading.basis) for f in figures]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    return [
        f"ergmeter: {run}, step {update.step}, over {over}",
        *(f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]}" for row in rows),
    ]


def _labelled(figure: SinkValue) -> str:
    """Return a value, with its title unless the unit implies it."""
    title = catalogue()[figure.key].title
    value = readable(figure.reading)
    return value if title == figure.reading.unit else f"{title} {value}"


def _stream(stream: Any) -> Any:  # noqa: ANN401  anything that can be written to
    if isinstance(stream, str):
        return getattr(sys, choice(stream, ("stderr", "stdout"), option="stream"))
    if not hasattr(stream, "write"):
        raise UsageError(f"stream must be stderr, stdout or a writable file; got {stream!r}")
    return stream


def _bars() -> Any:  # noqa: ANN401  tqdm's class, where one of its bars is alive in this process
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return tqdm if getattr(tqdm, "_instances", None) else None


def _columns(stream: Any) -> int | None:  # noqa: ANN401
    """Return a terminal's width minus its last column, where some terminals wrap; else None."""
    try:
        return os.get_terminal_size(stream.fileno()).columns - 1 if stream.isatty() else None
    except (OSError, ValueError):
        return None
