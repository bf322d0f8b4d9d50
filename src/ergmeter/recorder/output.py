"""Reads what the relay saw go by, and turns it into records through the importers.

The trap: a line of 100 MB, or NUL bytes, or half a line at the end. A line is cut at 64 KiB and the
rest of it dropped; bytes that are no text are replaced; nothing here can stop the child's output.
Where the relay had to leave something out, the halves on both sides of the gap are not one line.
"""

from __future__ import annotations

import inspect
import os
import select
import threading
import time
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

from ergmeter import registry
from ergmeter.ports import Line
from ergmeter.recorder.relay import FRAME, SIGNALS
from ergmeter.records import Mark, Step
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ergmeter.meter import Meter
    from ergmeter.ports import Importer

MAX_LINE_BYTES = 65536
# How many lines before the first recognised one an importer gets to see.
_HEAD = 20
# Importers are somebody's code; the recorder does not wait longer than this for them to load.
_LOADING_S = 2.0
# An importer may wait for the next line to see where a step ends. If none comes, it hears of that.
_HEARTBEAT_S = 0.25
# What a command left in the pipe when it ended goes by a little later, by the relay's clock.
_RELAY_BEHIND_S = 1.0
UNRECOGNISED = "output_unrecognised"


class LineSplitter:
    """Cuts a stream of bytes into lines at \\n and \\r, each with the time its end was seen."""

    def __init__(self) -> None:
        self._partial = bytearray()
        self._t_ns = 0
        self._in_gap = False

    def feed(self, t_ns: int, data: bytes) -> Iterator[Line]:
        """Yield the lines that this data completes."""
        self._t_ns = t_ns
        pieces = data.replace(b"\r", b"\n").split(b"\n")
        for number, piece in enumerate(pieces):
            self._partial += piece[: max(0, MAX_LINE_BYTES - len(self._partial))]
            if number < len(pieces) - 1:
                yield from self.finish()

    def finish(self) -> Iterator[Line]:
        """Yield what is left as a line, of the time its last byte was seen."""
        if self._partial and not self._in_gap:
            yield Line(self._partial.decode("utf-8", errors="replace"), self._t_ns)
        self._partial.clear()
        self._in_gap = False

    def skip(self) -> None:
        """Something is missing here: forget the line it is in."""
        self._partial.clear()
        self._in_gap = True


class RelayedOutput:
    """What the relay reports: the lines of all channels, in the order in which they ended."""

    def __init__(self, report_fd: int) -> None:
        self._report_fd = report_fd
        self.read_ns = 0  # how far it has been read, by the relay's clock
        self.gaps = 0
        self.is_over = False  # the relay has ended
        self.group_signals_ns: dict[int, int] = {}  # when the relay last got a signal

    def lines(self) -> Iterator[Line]:
        """The lines, until the relay is done."""
        splitters: dict[int, LineSplitter] = {}
        for frame in self._frames():
            if frame is None:
                yield Line("", time.monotonic_ns())
                continue
            self.read_ns, channel, data = frame
            if channel == SIGNALS:
                self.group_signals_ns[data[0]] = self.read_ns
                continue
            splitter = splitters.setdefault(channel, LineSplitter())
            if data:
                yield from splitter.feed(self.read_ns, data)
            else:
                self.gaps += 1
                splitter.skip()
        self.is_over = True
        for splitter in splitters.values():
            yield from splitter.finish()

    def _frames(self) -> Iterator[tuple[int, int, bytes] | None]:
        """The relay's frames; None now and then while it has nothing to say."""
        buffer = bytearray()
        with os.fdopen(self._report_fd, "rb", buffering=0) as report:
            while True:
                if not select.select([report], [], [], _HEARTBEAT_S)[0]:
                    yield None
                    continue
                data = report.read(1 << 16)
                if not data:
                    return
                buffer += data
                yield from _whole_frames(buffer)


def _whole_frames(buffer: bytearray) -> Iterator[tuple[int, int, bytes]]:
    """Take the frames that are whole out of the buffer."""
    start = 0
    while len(buffer) - start >= FRAME.size:
        t_ns, channel, length = FRAME.unpack_from(buffer, start)
        end = start + FRAME.size + length
        if end > len(buffer):
            break
        yield t_ns, channel, bytes(buffer[start + FRAME.size : end])
        start = end
    del buffer[:start]


class OutputReader:
    """The thread that listens to the relay and tells the Meter what it recognised."""

    def __init__(self, output: RelayedOutput, meter: Meter, *, tokens_are: str | None) -> None:
        self._output = output
        self._lines = output.lines()
        self._meter = meter
        self._options = {"tokens_are": tokens_are} if tokens_are else {}
        self._thread = threading.Thread(target=self._run, name="ergmeter-output", daemon=True)
        self._listening = threading.Event()
        self.steps = 0
        self.seen = 0
        self.recognised = False
        self.explained = False  # an importer has said itself why there are no steps

    def start(self) -> None:
        """Begin to listen. From here on, what the relay says is known within milliseconds."""
        self._thread.start()
        self._listening.wait(_LOADING_S)

    def finish(self, ended_ns: int, *, patience_s: float) -> None:
        """Read what was printed before the command ended.

        A background child may hold the output open, and is not waited for; but a reader that is
        behind, because the output came faster than it can be read, is.
        """
        until_ns = ended_ns + round(_RELAY_BEHIND_S * NS_PER_S)
        while self._thread.is_alive():
            before_ns = self._output.read_ns
            self._thread.join(patience_s)
            if self._output.read_ns == before_ns or self._output.read_ns > until_ns:
                break
        if self._output.gaps:
            said = f"output came faster than it could be read; {self._output.gaps} gaps in it"
            self._meter.mark("rows_dropped", said)

    def _run(self) -> None:
        try:
            began = Line("", time.monotonic_ns())  # no step began before
            importer, head = self._recognised()
            if importer is None:
                return
            for record in importer.records(chain([began], head, self._lines)):
                self.steps += isinstance(record, Step)
                self.explained |= getattr(record, "name", "") == UNRECOGNISED
                self._meter.record(record)
        except Exception as error:  # noqa: BLE001  an importer may be anybody's; the run goes on
            said = f"reading the output stopped: {type(error).__name__}: {error}"
            self._meter.mark("importer_failed", said)
            deque(self._lines, maxlen=0)

    def _recognised(self) -> tuple[Importer | None, list[Line]]:
        """The importer whose format turned up first, and the lines it has not seen yet."""
        every = [self._importer(name) for name in sorted(registry.names("importers"))]
        importers = [one for one in every if getattr(one, "is_live", True)]
        self._listening.set()
        head: deque[Line] = deque(maxlen=_HEAD)
        for line in self._lines:
            if not line.text:
                continue
            self.seen += 1
            head.append(line)
            for importer in importers:
                if importer.recognises([line.text]):
                    self.recognised = True
                    return importer, list(head)
        return None, []

    def _importer(self, name: str) -> Importer:
        """An importer, with those of the options that it takes."""
        make = registry.load("importers", name)
        takes = inspect.signature(make).parameters
        importer: Importer = make(**{n: v for n, v in self._options.items() if n in takes})
        return importer


def unrecognised(reader: OutputReader, not_hooked: str) -> Mark | None:
    """What to tell a user whose program neither printed nor did anything that we could see."""
    if reader.steps or reader.explained:
        return None
    if reader.recognised:
        said = "a printed step is timed from the line before it, and there were not two lines"
        cure = "print one for every step, or use ergmeter.Meter in the loop"
    else:
        lines = "1 line" if reader.seen == 1 else f"{reader.seen} lines"
        what = f"{lines} of output, none" if reader.seen else "no output, so nothing"
        said = (
            f"{what} that ergmeter recognises (Hugging Face Trainer, Megatron, torchtitan"
            " and NXDT logs, or lines such as step=3 loss=2.1 tokens=4096)"
        )
        cure = "print such a line, or use ergmeter.Meter in the loop"
    inside = f"; and {not_hooked}" if not_hooked else ""
    return Mark(time.monotonic_ns(), UNRECOGNISED, f"no steps: {said}{inside}; {cure}")
