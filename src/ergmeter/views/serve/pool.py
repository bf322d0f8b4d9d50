"""Where runs are read: in processes beside the server, so that a long one holds nobody up.

The trap: threads. Reading ten million samples takes seconds of Python, during which no other page
would move. And one queue: a short run would wait for a long one, so each kind has a lane. A worker
goes with its parent, however that ended, and one that died (out of memory, as a rule) costs the
question it was asked and no more.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import signal
import threading
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import TYPE_CHECKING, Literal

from ergmeter.errors import ErgmeterError, FormatError

if TYPE_CHECKING:
    from collections.abc import Callable

LIBRARY = "<!--the charting library-->"  # stands for it in a report: it has a file of its own
# Charts that are there soon: of steps alone, and of one column of the samples.
SOON = frozenset({"phases", "steps", "loss", "power"})
# Loaded when it is needed, by name: a server that shows a list needs none of it.
LIVE = "ergmeter.views.serve.live"
Lane = Literal["short", "long"]


class Pool:
    """Does what `work` can do, by name. Starts its workers when the first question comes."""

    def __init__(self, executor: Callable[[], Executor] | None = None) -> None:
        self._make = executor or _process
        self._lanes: dict[Lane, Executor] = {}

    async def ask(self, name: str, *arguments: object, lane: Lane = "short") -> bytes:
        """What the function of this name in `work` says. Its own errors come back as they are."""
        if lane not in self._lanes:
            self._lanes[lane] = self._make()
        executor = self._lanes[lane]
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(executor, _answer, name, *arguments)
        except BrokenProcessPool as error:
            if self._lanes.get(lane) is executor:
                del self._lanes[lane]
            raise FormatError("reading it ended the reader: out of memory, most likely") from error

    def close(self) -> None:
        """End the workers, also those that are at it."""
        lanes, self._lanes = self._lanes, {}
        for executor in lanes.values():
            processes = list((getattr(executor, "_processes", None) or {}).values())
            for process in processes:
                process.terminate()
            # Until the thread that minds them is gone too: at the interpreter's end it would be
            # woken through a pipe that it is just closing, which is a traceback.
            executor.shutdown(wait=bool(processes), cancel_futures=True)


def _process() -> Executor:
    # Not forked: the server has threads, and a fork of one that holds a lock waits for ever.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_begin)


def _begin() -> None:
    """In a worker: leave Ctrl-C to the server, and go when it goes."""
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
        found: bytes = function(*arguments)
    except OSError as error:  # a file that went while it was read
        raise FormatError(f"can't be read ({error.strerror or error})") from error
    except ErgmeterError:
        raise
    return found
