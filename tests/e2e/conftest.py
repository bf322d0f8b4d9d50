"""The `erg` command against real processes: how the tests start them, watch them and end them."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import io
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ERG = str(Path(sys.executable).with_name("erg"))
PYTHON = sys.executable
SCRIPTS = Path(__file__).with_name("scripts")
QUICK = ("--probe", "process", "--quiet")  # one cheap probe, and no card
# No test waits for this long unless something hangs.
TIMEOUT_S = 200.0


def needs(*modules: str) -> None:
    """Skip where one is not installed. They are looked for and not loaded: a process under test
    will do that."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"no {name} here", allow_module_level=True)


def script(name: str, *arguments: object) -> list[str]:
    """The command line of one of the little programs."""
    return [PYTHON, str(SCRIPTS / f"{name}.py"), *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    """Ours, without what would change how a program under test prints or which run it joins."""
    left_out = {"PYTHONUNBUFFERED", "ERGMETER_RUN", "RANK", "COLUMNS", "LINES", "NO_COLOR"}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def quick(*left_out: str) -> dict[str, str]:
    """Variables of a process that loads torch, with which it begins and ends sooner; packages that
    it does not use may be left out. See scripts/quick/sitecustomize.py."""
    path = [str(SCRIPTS / "quick"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "LEFT_OUT": " ".join(left_out)}


def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until something holds that will hold soon."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            pytest.fail(f"waited {TIMEOUT_S:.0f} s in vain: {what}")
        time.sleep(0.005)


def _default_signals() -> None:
    """As a shell starts a program, also where the tests run under nohup or in the background."""
    for one in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(one, signal.SIG_DFL)


def erg(*words: object) -> tuple[object, str, str]:
    """`erg` in this process, for what is not about processes: its exit code, what it printed, and
    what it said of errors. What it loads, and the charting library of its pages, it has once."""
    from ergmeter.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with pytest.raises(SystemExit) as ended, redirect_stdout(out), redirect_stderr(err):
        main([str(word) for word in words])
    return ended.value.code or 0, out.getvalue(), err.getvalue()


def reported(run: Path, *options: str) -> dict[str, Any]:
    """`erg report --json`, in this process: one of its own takes longer than what is asked."""
    # All steps that were recorded: which are warm-up depends on how busy this machine is.
    code, said, _ = erg("report", "--json", "--window", "unbroken", *options, run)
    assert code == 0
    found: dict[str, Any] = json.loads(said)
    return found


class Terminal:
    """A terminal, the program on it, and what the program wrote to it."""

    def __init__(self, arguments: list[str], *, cwd: Path, rows: int, columns: int) -> None:
        self._master, slave = pty.openpty()
        self.resize(rows, columns)
        self.shown = b""
        self.process = subprocess.Popen(
            script("on_terminal", *arguments),
            cwd=cwd,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(TERM="xterm-256color"),
            start_new_session=True,
            preexec_fn=_default_signals,
        )
        os.close(slave)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def read_until(self, wanted: bytes) -> None:
        eventually(lambda: wanted in self.shown or not self._read(), f"{wanted!r} on the terminal")
        assert wanted in self.shown, f"the terminal closed after {self.shown!r}"

    def read_all(self) -> bytes:
        """Everything, until nobody holds the terminal any more."""
        eventually(lambda: not self._read(), "the end of the terminal")
        return self.shown

    def close(self) -> None:
        """Hang up."""
        if self._master >= 0:
            os.close(self._master)
            self._master = -1

    def _read(self) -> bool:
        if not select.select([self._master], [], [], 0.05)[0]:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False
        self.shown += data
        return bool(data)


class Lab:
    """A directory, and the processes that were started in it."""

    def __init__(self, path: Path, **variables: str) -> None:
        """`variables`: what processes have in their environment beside ours, if nothing is said."""
        self.path = path
        self.variables = variables
        self._processes: list[subprocess.Popen[bytes]] = []
        self._terminals: list[Terminal] = []

    def start(self, *arguments: object, **options: Any) -> subprocess.Popen[bytes]:
        """Start a program in a process group of its own."""
        process = subprocess.Popen(
            [str(argument) for argument in arguments],
            cwd=self.path,
            start_new_session=True,
            preexec_fn=_default_signals,
            **{"env": environment(**self.variables), "stdin": subprocess.DEVNULL, **options},
        )
        self._processes.append(process)
        return process

    def run(
        self, *arguments: object, stdin: bytes = b"", timeout_s: float = TIMEOUT_S, **options: Any
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a program to its end and until its output is closed."""
        pipe = subprocess.PIPE
        process = self.start(
            *arguments, **{"stdin": pipe, "stdout": pipe, "stderr": pipe, **options}
        )
        out, err = process.communicate(stdin, timeout=timeout_s)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def record(
        self, *command: object, out: str = "run", options: tuple[str, ...] = QUICK, **more: Any
    ) -> subprocess.CompletedProcess[bytes]:
        """`erg record` of a command, to its end."""
        return self.run(ERG, "record", *options, "--out", out, "--", *command, **more)

    def start_recording(
        self, *command: object, out: str = "run", **options: Any
    ) -> subprocess.Popen[bytes]:
        return self.start(ERG, "record", *QUICK, "--out", out, "--", *command, **options)

    def report(self, out: str = "run") -> dict[str, Any]:
        return reported(self.path / out)

    def terminal(self, *arguments: object, rows: int = 24, columns: int = 80) -> Terminal:
        words = [str(argument) for argument in arguments]
        terminal = Terminal(words, cwd=self.path, rows=rows, columns=columns)
        self._terminals.append(terminal)
        self._processes.append(terminal.process)
        return terminal

    def runs(self) -> list[Path]:
        """Every run anywhere below, also one whose making was not completed."""
        return [header.parent for header in self.path.rglob("run.json")]

    def close(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()
        for terminal in self._terminals:
            terminal.close()


class Program(NamedTuple):
    """One that a warm process becomes: see scripts/warm.py."""

    words: Sequence[object]  # a script and its arguments
    cwd: Path
    imports: Sequence[str] = ()
    ranks: int = 0


def warmed(*programs: Program, **more: str) -> list[subprocess.CompletedProcess[str]]:
    """Programs one after the other, forked from one process that has loaded what they import.
    `more`: what their environment has beside ours."""
    plan: list[dict[str, Any]] = [
        {**one._asdict(), "words": [str(word) for word in one.words], "cwd": str(one.cwd)}
        for one in programs
    ]
    done = subprocess.run(
        script("warm", json.dumps(plan)), env=environment(**more), capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    return [
        subprocess.CompletedProcess(one["words"], each["code"], each["out"], each["err"])
        for one, each in zip(plan, printed, strict=True)
    ]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A fresh directory; whatever was started in it is gone afterwards."""
    lab = Lab(tmp_path)
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from tests.e2e.pages import chromium  # which wants playwright

    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def tabs(browser: Any) -> Iterator[Any]:
    """A window of the browser, for tabs of tests that want nothing of each other's; its own tab
    keeps it open, since a window takes longer to make than a tab."""
    made = browser.new_context()
    made.new_page()
    yield made
    made.close()


@pytest.fixture(scope="module")
def window(browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    """A window for the module's `pages`."""
    from tests.e2e.pages import Window

    made = Window(browser, pages)
    yield made
    made.close()


@pytest.fixture
def opened(window: Any) -> Any:
    """`opened(name)`: one of the module's `pages`, opened anew; the one before is gone."""
    return window.open


@pytest.fixture
def shown(window: Any) -> Any:
    """`shown(name)`: one of the module's `pages`, which others look at too: change nothing."""
    return window.show
