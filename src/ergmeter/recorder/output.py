"""Reads what the relay saw go by, and turns it into records through the importers.

The trap: a line of 100 MB, or NUL bytes, or half a line at the end. A line is cut at 64 KiB and the
rest of it dropped; bytes that are no text are replaced; nothing here can stop the child's output.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

from ergmeter import registry
from ergmeter.ports import Line
from ergmeter.recorder.relay import FRAME
from ergmeter.records import Mark, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ergmeter.meter import Meter
    from ergmeter.ports import Importer

MAX_LINE_BYTES = 65536
# How many lines before the first recognised one an importer gets to see.
_HEAD = 20


class LineSplitter:
    """Cuts a stream of bytes into lines at \\n and \\r, each with the time its end was seen."""

    def __init__(self) -> None:
        self._partial = bytearray()

    def feed(self, t_ns: int, data: bytes) -> Iterator[Line]:
        """Yield the lines that this data completes."""
        pieces = data.replace(b"\r", b"\n").split(b"\n")
        for number, piece in enumerate(pieces):
            self._partial += piece[: max(0, MAX_LINE_BYTES - len(self._partial))]
            if number < len(pieces) - 1:
                yield from self.finish(t_ns)

    def finish(self, t_ns: int) -> Iterator[Line]:
        """Yield what is left as a line."""
        if self._partial:
            yield Line(self._partial.decode("utf-8", errors="replace"), t_ns)
            self._partial.clear()


def lines(report_fd: int) -> Iterator[Line]:
    """The lines of all channels in the order in which they ended, until the relay is done."""
    splitters: dict[int, LineSplitter] = {}
    with os.fdopen(report_fd, "rb", buffering=1 << 16) as report:
        while len(header := report.read(FRAME.size)) == FRAME.size:
            t_ns, channel, length = FRAME.unpack(header)
            data = report.read(length)
            yield from splitters.setdefault(channel, LineSplitter()).feed(t_ns, data)
    for splitter in splitters.values():
        yield from splitter.finish(time.monotonic_ns())


class OutputReader:
    """The thread that listens to the relay and tells the Meter what it recognised."""

    def __init__(self, report_fd: int, meter: Meter, *, tokens_are: str | None) -> None:
        self._lines = lines(report_fd)
        self._meter = meter
        self._options = {"tokens_are": tokens_are} if tokens_are else {}
        self._thread = threading.Thread(target=self._run, name="ergmeter-output", daemon=True)
        self.steps = 0
        self.seen = 0

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def finish(self, wait_s: float) -> None:
        """Wait until the relay is done, but not for a background child that holds it open."""
        self._thread.join(wait_s)

    def _run(self) -> None:
        try:
            importer, head = self._recognised()
            if importer is None:
                for _ in self._lines:
                    self.seen += 1
                return
            for record in importer.records(chain(head, self._lines)):
                self.steps += isinstance(record, Step)
                self._meter.record(record)
        except Exception as error:  # noqa: BLE001  an importer may be anybody's; the run goes on
            said = f"reading the output stopped: {type(error).__name__}: {error}"
            self._meter.mark("importer_failed", said)
            deque(self._lines, maxlen=0)

    def _recognised(self) -> tuple[Importer | None, list[Line]]:
        """The importer whose format turned up first, and the lines it has not seen yet."""
        importers: list[Importer] = [
            registry.load("importers", name)(**self._options)
            for name in sorted(registry.names("importers"))
        ]
        head: deque[Line] = deque(maxlen=_HEAD)
        for line in self._lines:
            self.seen += 1
            head.append(line)
            for importer in importers:
                if importer.recognises([line.text]):
                    return importer, list(head)
        return None, []


def unrecognised(reader: OutputReader) -> Mark | None:
    """What to tell a user whose program printed nothing that we could read."""
    if reader.steps:
        return None
    what = f"{reader.seen} lines of output, none" if reader.seen else "no output, so nothing"
    said = (
        f"no steps: {what} that ergmeter recognises (Hugging Face Trainer logs, or lines such as"
        " step=3 loss=2.1 tokens=4096); print such a line, or use ergmeter.Meter in the loop"
    )
    return Mark(time.monotonic_ns(), "output_unrecognised", said)
