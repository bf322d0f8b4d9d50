"""Runs a monitoring tool and collects the lines it prints, for probes that read one.

A read from a pipe blocks until the tool prints, and a tool whose pipe is full blocks too. So a
thread takes each line with its time, and a probe takes what has come so far. The tool runs in its
own session, so that Ctrl-C reaches only the measured program. If this process is killed, the tool
ends at its next line, which it cannot write.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ergmeter.errors import NotMeasurable
from ergmeter.ports import Line

MAX_WAITING = 1000  # lines; the oldest are dropped
STOP_S = 1.0


def json_object(line: Line, tool: str) -> Mapping[str, Any]:
    """The JSON object that a tool printed. NotMeasurable if the line is not one."""
    try:
        report = json.loads(line.text)
    except ValueError:
        report = None
    if not isinstance(report, dict):
        raise NotMeasurable(f"{tool} printed no JSON object: {line.text.strip()[:80]!r}")
    return report


class ToolStream:
    """Owns a running tool and the thread that reads its lines."""

    def __init__(self, tool: str, command: Sequence[str]) -> None:
        self._tool = tool
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed with the tool
        try:
            self._process = subprocess.Popen(
                [*command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise NotMeasurable(f"{self._tool} does not start: {error}") from None
        self._lines: deque[Line] = deque(maxlen=MAX_WAITING)
        self._came = threading.Event()
        self._thread = threading.Thread(
            target=self._take, name=f"ergmeter-{self._tool}", daemon=True
        )
        self._thread.start()

    def first(self, wait_s: float) -> Line:
        """The tool's first line, which `new_lines` returns too. NotMeasurable if none comes."""
        self._came.wait(wait_s)
        if self._lines:
            return self._lines[0]
        if self._thread.is_alive():
            raise NotMeasurable(f"{self._tool} printed nothing in {wait_s:g} s: try it by hand")
        raise NotMeasurable(self._ending())

    def new_lines(self) -> list[Line]:
        """The lines since the last call. NotMeasurable once there can be no more."""
        is_over = not self._thread.is_alive()
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        if is_over and not lines:
            raise NotMeasurable(self._ending())
        return lines

    def close(self) -> None:
        """End the tool."""
        with contextlib.suppress(OSError):
            self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(STOP_S)
        if not self._thread.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()

    def _take(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            self._lines.append(Line(text, time.monotonic_ns()))
            self._came.set()
        self._came.set()

    def _ending(self) -> str:
        try:
            ended = f"ended with exit code {self._process.wait(STOP_S)}"
        except subprocess.TimeoutExpired:
            ended = "runs on and prints no more"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"{self._tool} {ended}" + (f": {lines[-1]}" if lines else "")
