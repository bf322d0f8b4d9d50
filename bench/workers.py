"""The tools under test, each in a process of its own, on GPUs whose true power is known.

In one process the threads of one instrument would run in the timings of
the other. Here each tool has a process, stays in it for the whole bench so that its start is not
counted, and works only when it is asked; the bench asks them in turns.

The GPUs are scripted: the library of tests/nvml stands in for NVIDIA's below the real binding. Its
counter takes as long to read as it is told to (an H200 takes 3 ms), but sleeps where a driver may
also compute, so CPU time inside a driver is not in any of these figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for tests.nvml, which is not installed

from tests.nvml.library import Gpu, Library, Script, build  # noqa: E402

__all__ = ["ROOT", "Gpu", "Machine", "Script", "Worker", "machine", "serve"]

T = TypeVar("T")


class Machine:
    """A folder with the scripted library and a `nvidia-smi` that only exists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._library: Library = build(folder)
        # CodeCarbon looks for NVIDIA GPUs only where this command works.
        command = folder / "bin" / "nvidia-smi"
        command.parent.mkdir()
        command.write_text("#!/bin/sh\nexit 0\n")
        command.chmod(0o755)

    def environment(self, script: Script) -> dict[str, str]:
        """The environment of a process that sees the scripted GPUs."""
        scripted = self._library.environment(script)
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        # A home of its own: no tool finds a configuration that this bench does not know of.
        return {**os.environ, **scripted, "PATH": path, "HOME": str(self.folder)}


@contextlib.contextmanager
def machine() -> Iterator[Machine]:
    """A machine for the time of a bench."""
    with tempfile.TemporaryDirectory(prefix="ergmeter-bench-") as folder:
        yield Machine(Path(folder))


class Worker:
    """A process that runs this bench's script as one tool and answers questions, a line each."""

    def __init__(self, script: str, tool: str, environment: Mapping[str, str]) -> None:
        self.tool = tool
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the worker
        self._process = subprocess.Popen(
            [sys.executable, script, "--worker", tool],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )

    def ask(self, **question: Any) -> Any:  # noqa: ANN401  whatever JSON can hold
        """Put a question and wait for the answer."""
        self.tell(**question)
        return self.answer()

    def tell(self, **question: Any) -> None:  # noqa: ANN401
        """Put a question without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:  # noqa: ANN401
        """Wait for the answer to the last question."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._said.seek(0)
            raise RuntimeError(f"{self.tool} has died; it said: {self._said.read()[-2000:]}")
        return json.loads(line)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()


def serve(tool: AbstractContextManager[T], answer: Callable[[T, dict[str, Any]], Any]) -> None:
    """In a worker: open the tool, then answer the questions on standard input until they end."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a tool prints must not be taken for an answer
    with tool as opened:
        print(json.dumps("ready"), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(opened, json.loads(line))), file=answers, flush=True)
