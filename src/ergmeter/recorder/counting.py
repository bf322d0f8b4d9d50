"""Has the FLOPs of a recorded program's steps counted, beside it and after its end.

The program leaves a request in the run directory and looks for the answer; who starts the counting
process is the recorder, so that the program has no child that it does not know of, and so that one
which was killed has its FLOPs all the same. One is counted at a time, and ranks of one training
share their answer.
"""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.flops import remote
from ergmeter.flops.step_work import step_flops

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
        """The command has ended: write what it did not live to see, and take the requests away."""
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
        for request in self._requests():
            with suppress(OSError, ValueError):
                if _write(request, meter):
                    break
        shutil.rmtree(self._folder, ignore_errors=True)

    def _loop(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            with suppress(OSError, ValueError):  # a request that is being taken away
                self._look()

    def _requests(self) -> list[Path]:
        try:
            return sorted(p for p in self._folder.iterdir() if not p.name.startswith("."))
        except OSError:
            return []

    def _look(self) -> bool:
        """Begin what can begin. Returns whether there is anything left to wait for."""
        running = self._running
        if running is not None and running.exists() and remote.result(running) is None:
            return True
        self._running = None  # done, or taken away by a program that has ended
        for request in self._requests():
            if not remote.is_pending(request):
                continue
            key = remote.digest(request)
            if key in self._counted and (self._counted[key] / remote.RESULT).exists():
                (request / remote.STARTED).touch()
                shutil.copy(self._counted[key] / remote.RESULT, request / remote.RESULT)
                continue
            self._counted[key] = self._running = request
            remote.start(request, is_urgent=self._is_urgent)
            return True
        return False


def _write(request: Path, meter: Meter) -> bool:
    """Whether this request's FLOPs are the run's now."""
    counts = remote.result(request)
    if counts is None or meter.plan.flops or meter._handover is None:
        return False
    record = remote.record_of(request)
    try:
        flops = step_flops(record, counts)
    except NotMeasurable as error:
        meter.plan = replace(meter.plan, no_flops=str(error))
        meter._handover.describe(**meter.plan.facts())
        return False
    meter.plan = replace(meter.plan, flops=flops, no_flops="")
    meter._handover.describe(**meter.plan.facts())
    return True
