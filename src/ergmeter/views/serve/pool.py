"""Worker processes that read runs, so that a long read does not block the server.

Reading ten million samples takes seconds of Python, and threads would block all other pages. Short
and long runs have separate queues. A worker exits with its parent. If a worker dies, usually out of
memory, only its current request fails.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Literal

from ergmeter.errors import FormatError
from ergmeter.records import COLUMN_KINDS

LIBRARY = "<!--the charting library-->"  # placeholder in a report: the library has its own file
# Quick charts: from steps alone, or from one sample column.
SOON = frozenset({"phases", "steps", "loss", "power"})
# Imported by name when needed: a server that shows only the list does not need it.
LIVE = "ergmeter.views.serve.live"
Lane = Literal["short", "long"]
# Columns that have a line over time: those of samples that are numbers, and two of steps.
SERIES = (
    *(name for name, kind in COLUMN_KINDS["samples"].items() if kind in ("float", "count")),
    *("step_s", "loss"),
)


class Pool:
    """Calls functions of `responses` by name in workers, started with the first request."""

    def __init__(self, executor: Callable[[], Executor] | None = None) -> None:
        self._make = executor or _process
        self._lanes: dict[Lane, Executor] = {}

    async def ask(self, name: str, *arguments: object, lane: Lane = "short") -> bytes:
        """Call the named function of `responses`. Its own errors are raised here."""
        if lane not in self._lanes:
            self._lanes[lane] = self._make()
        executor = self._lanes[lane]
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(executor, _answer, name, *arguments)
        except BrokenProcessPool as error:
            if self._lanes.get(lane) is executor:
                del self._lanes[lane]
            raise FormatError("the process that read it died, most likely out of memory") from error

    def close(self) -> None:
        """Stop the workers, busy ones included."""
        lanes, self._lanes = self._lanes, {}
        for executor in lanes.values():
            processes = list((getattr(executor, "_processes", None) or {}).values())
            for process in processes:
                process.terminate()
            # Wait for the executor's thread too. At interpreter exit it would be
            # woken through a pipe that is being closed, which prints a traceback.
            executor.shutdown(wait=bool(processes), cancel_futures=True)


def _process() -> Executor:
    # Not forked: the server has threads, and a forked held lock would never be released.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_begin)


def _begin() -> None:
    """Set up a worker: ignore Ctrl-C, exit with the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_outlive_not, args=(parent.sentinel,), daemon=True).start()


def _outlive_not(parent: int) -> None:
    connection.wait([parent])
    os._exit(1)


def _answer(name: str, *arguments: object) -> bytes:
    # By name, so that the server itself never loads what the workers need.
    function = getattr(importlib.import_module("ergmeter.views.serve.responses"), name)
    try:
        answer: bytes = function(*arguments)
    except OSError as error:  # a file removed during the read
        raise FormatError(f"can't be read ({error.strerror or error})") from error
    return answer
