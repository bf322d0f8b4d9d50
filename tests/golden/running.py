"""Runs a case in this process, in a folder of its own, with clocks and names that stand still.

Frozen: the wall clock, the monotonic clock in nanoseconds, random ids, the host's name, the
platform, the time zone and every environment variable. `datetime.now` can't be frozen, so today's
date is replaced in the output.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import re
import secrets
import shutil
import socket
import sys
import time
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from tests.golden import inputs, ours, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOW_S = 1_770_091_200  # 2026-02-03 04:00 UTC
_MONOTONIC_NS = 10**15


@dataclass(frozen=True)
class Case:
    """Commands that run one after the other in a folder with copies of `needs`.

    `shows` are the files to print afterwards, as globs. `call` returns text itself, for what is
    no command. `standard_input` goes to every command.
    """

    name: str
    commands: tuple[tuple[str, ...], ...] = ()
    needs: tuple[str, ...] = ()
    shows: tuple[str, ...] = ()
    columns: int = 120
    environment: dict[str, str] = field(default_factory=dict)
    standard_input: str = ""
    call: Callable[[Path], str] | None = None


class Runner:
    """Runs cases below one folder. An input is made once and copied for each case."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._inputs = self._folder / "inputs"
        self._inputs.mkdir(parents=True)

    def run(self, case: Case) -> str:
        """Everything the case printed and wrote, as text."""
        for name in case.needs:
            self._make(name)
        folder = self._folder / "case"
        folder.mkdir()
        try:
            for name in case.needs:
                self._copy(name, folder)
            days = {_today()}
            with _frozen(folder, case):
                parts = [_printed(command, case.standard_input) for command in case.commands]
                if case.call is not None:
                    parts.append(case.call(folder))
                parts += _files(folder, case.shows)
            return self._normal("".join(parts), folder, days | {_today()})
        finally:
            shutil.rmtree(folder)

    def _make(self, name: str) -> None:
        path = self._inputs / name
        if path.exists():
            return
        staging = self._folder / "making"
        staging.mkdir()
        with _frozen(staging, Case(name)):
            inputs.MAKERS[name](staging / Path(name).name)
        path.parent.mkdir(parents=True, exist_ok=True)
        (staging / Path(name).name).rename(path)
        shutil.rmtree(staging)
        inputs.set_times(path, inputs.FRESH_S if name in inputs.RUNNING else inputs.WRITTEN_S)

    def _copy(self, name: str, folder: Path) -> None:
        source, target = self._inputs / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy2(source, target)
        # copytree copies a directory's times before it is filled.
        inputs.set_times(target, inputs.FRESH_S if name in inputs.RUNNING else inputs.WRITTEN_S)

    def _normal(self, output: str, folder: Path, days: set[str]) -> str:
        paths = {
            str(folder): "<FOLDER>",
            str(self._folder): "<TEMP>",
            str(ours.ROOT): "<REPOSITORY>",
            sys.prefix: "<PYTHON>",
        }
        day = "|".join(map(re.escape, days))
        version = re.escape(ours.ergmeter.__version__)
        patterns = [
            (rf"(?:{day})T\d\d:\d\d:\d\d(?:\.\d+)?(?:\+00:00|Z)?", "<NOW>"),
            (rf"(?:{day})(?=-)", "<TODAY>"),  # of a run's directory
            (rf"\b{HOST}-\d+-(?=[0-9a-f]{{8}}\b)", f"{HOST}-PID-"),  # of a writer's directory
            (rf'("ergmeter": "|"version": "|version |ergmeter ){version}\b', r"\1<VERSION>"),
        ]
        return text.replaced(output, paths, patterns)


HOST = "goldenhost"


def _today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


@contextmanager
def _frozen(folder: Path, case: Case) -> Iterator[None]:
    """A world in which nothing moves. The same name gives the same random ids."""
    count = 0

    def token(size: int | None = None) -> str:
        nonlocal count
        count += 1
        return hashlib.sha256(f"{case.name}/{count}".encode()).hexdigest()[: 2 * (size or 32)]

    home = folder / ".home"
    fixed = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "TMPDIR": str(folder.parent),
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "COLUMNS": str(case.columns),
        "LINES": "50",
        "ERGMETER_COMPILED": "0",
        **case.environment,
    }
    before, place = dict(os.environ), Path.cwd()
    with ExitStack() as stack:
        for thing, name, value in (
            (time, "time", lambda: float(NOW_S)),
            (time, "time_ns", lambda: NOW_S * 10**9),
            (time, "monotonic_ns", lambda: _MONOTONIC_NS),
            (secrets, "token_hex", token),
            (socket, "gethostname", lambda: HOST),
            (socket, "getfqdn", lambda *_: HOST),
            (platform, "platform", lambda *_, **__: "Linux-golden"),
            (platform, "python_version", lambda: "3.99.0"),
        ):
            stack.enter_context(mock.patch.object(thing, name, value))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            os.environ.clear()
            os.environ.update(fixed)
            time.tzset()
            os.chdir(folder)
            yield
        finally:
            os.chdir(place)
            os.environ.clear()
            os.environ.update(before)
            time.tzset()


def _printed(command: tuple[str, ...], standard_input: str) -> str:
    """One command: its words, its exit code, its output and its errors."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in "oe"]
    given = io.TextIOWrapper(io.BytesIO(standard_input.encode()), encoding="utf-8")
    with (
        mock.patch.object(sys, "stdout", streams[0]),
        mock.patch.object(sys, "stderr", streams[1]),
        mock.patch.object(sys, "stdin", given),
        mock.patch.object(sys, "argv", list(command)),
    ):
        code: object = "no exit"
        try:
            ours.program(command[0])()
        except SystemExit as ended:
            code = ended.code or 0
        except Exception as error:  # noqa: BLE001  a crash is an output, too
            code = f"with {type(error).__name__}: {error}"
    out, err = (_content(stream) for stream in streams)
    parts = [f"$ {' '.join(map(_quoted, command))}\n", f"[exit {code}]\n"]
    parts += [f"--- stdout\n{_lines(out)}"] if out else []
    parts += [f"--- stderr\n{_lines(err)}"] if err else []
    return "".join(parts)


def _content(stream: io.TextIOWrapper) -> str:
    stream.flush()
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode("utf-8", errors="backslashreplace")


def _quoted(word: str) -> str:
    return word if word and not re.search(r"[\s'\"]", word) else repr(word)


def _lines(output: str) -> str:
    return output if output.endswith("\n") else f"{output}\n[no line end]\n"


def _files(folder: Path, globs: tuple[str, ...]) -> list[str]:
    """The files that a case left, by name."""
    found = sorted({path for glob in globs for path in folder.glob(glob) if path.is_file()})
    return [
        f"--- file {path.relative_to(folder)}\n{_lines(text.file_text(path))}" for path in found
    ]
