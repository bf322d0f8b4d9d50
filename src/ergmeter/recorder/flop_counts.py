"""Counts the FLOPs of a recorded program's steps, in a separate process, also after its end.

The program leaves a request in the run directory and looks for the answer. The recorder starts the
counting process, so that the program gets no child it does not know of, and a killed program still
has its FLOPs counted. One request is counted at a time, and the ranks of one training share the
answer.
"""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from subprocess import SubprocessError
from typing import TYPE_CHECKING, Any

from ergmeter.errors import FormatError, NotMeasurable
from ergmeter.flops.counted import remote
from ergmeter.runlog import format as fmt
from ergmeter.runlog.writer import amend_header

if TYPE_CHECKING:
    from pathlib import Path

    from ergmeter.meter import Meter

_LOOK_S = 0.25
_AT_THE_END_S = 60.0  # that a command's end waits for the count of its steps, at most


class FlopCounts:
    """The requests of one run."""

    def __init__(self, run: Path) -> None:
        self._folder = run / remote.FOLDER
        self._running: Path | None = None
        self._is_urgent = False  # the command is over
        self._counted: dict[str, Path] = {}  # by what was counted
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="ergmeter-count", daemon=True)

    def start(self) -> None:
        """Look for requests from now on."""
        self._thread.start()

    def finish(self, meter: Meter) -> None:
        """The command has ended: write what it did not live to see, and take the requests away.

        The FLOPs of each training go into the header of the process that asked for them.
        """
        self._stopping.set()
        self._thread.join()
        give_up_s = time.monotonic() + _AT_THE_END_S
        with suppress(OSError, ValueError):
            if self._running is not None and remote.result(self._running) is None:
                remote.hurry(self._running)
        self._is_urgent = True
        while self._look() and time.monotonic() < give_up_s:
            time.sleep(_LOOK_S / 5)
        if self._running is not None:
            remote.stop(self._running)
        for request in () if meter.plan.flops else self._requests():
            with suppress(OSError, ValueError, FormatError):
                _write(request)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _loop(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            self._look()

    def _requests(self) -> list[Path]:
        try:
            return sorted(p for p in self._folder.iterdir() if not p.name.startswith("."))
        except OSError:
            return []

    def _look(self) -> bool:
        """Begin what can begin. Returns whether there is anything left to wait for."""
        running = self._running
        with suppress(OSError, ValueError):
            if running is not None and running.exists() and remote.result(running) is None:
                return True
        self._running = None  # done, or taken away by a program that has ended
        for request in filter(remote.is_pending, self._requests()):
            try:
                key = remote.digest(request)
                if key in self._counted and (self._counted[key] / remote.RESULT).exists():
                    (request / remote.STARTED).touch()
                    shutil.copy(self._counted[key] / remote.RESULT, request / remote.RESULT)
                    continue
            except OSError:  # it is being taken away
                continue
            self._counted[key] = self._running = request
            try:
                remote.start(request, is_urgent=self._is_urgent)
            except (OSError, ValueError, SubprocessError) as error:
                remote.fail(request, error)
            return True
        return False


def _write(request: Path) -> None:
    """Put the FLOPs of a request into the header of the writer that asked.

    A program that had the answer itself has taken its request away.
    """
    writer = request.parents[1] / remote.writer_of(request)
    header = fmt.writer_header(writer / fmt.WRITER_FILE)
    counts = remote.result(request)
    if counts is None:
        return
    record = remote.record_of(request)
    counted: dict[str, Any] = {"flops": [], "no_flops": ""}
    try:
        flops = remote.step_flops(record, counts, remote.lengths_of(request))
        counted["flops"] = [asdict(work) for work in flops]
    except NotMeasurable as error:
        counted["no_flops"] = str(error)
    model_facts = {"parameters": record.parameters, "dtype": record.dtype}
    declared = {name: value for name, value in header["settings"].items() if value is not None}
    amend_header(writer, **counted, settings={**model_facts, **declared})
