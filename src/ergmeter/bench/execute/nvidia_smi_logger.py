"""Runs `nvidia-smi` beside a cell, to log the memory of the cell's GPUs.

The log's first reading is from before the cell: the memory in use by others. The process ends with
the cell; if the runner is killed, the kernel ends it. Logging is switched on for a results
directory, in a file there, because cells run in separate processes.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pynvml

from ergmeter.atomic_write import write_json
from ergmeter.bench.execute.launching import nvml_list
from ergmeter.bench.execute.state import SMI_LOG, SMI_NOTE
from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.probes import cuda_visible_devices

PROGRAM = "nvidia-smi"
ASKED = "nvidia_smi.json"  # in the results directory
KEYWORDS = ("timestamp", "name", "index", "memory.used")  # FMS's, as is its interval
INTERVAL_S = 1.0
_NEEDED = ("index", "memory.used")
_KEYWORD = re.compile(r"[a-z][a-z0-9_.]*")
# Without persistence mode the driver is loaded first, which takes seconds a device.
_FIRST_S = 30.0
_END_S = 5.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Query:
    """What nvidia-smi logs, and how often. `index` and `memory.used` are always added."""

    keywords: tuple[str, ...] = KEYWORDS
    interval_s: float = INTERVAL_S

    def __post_init__(self) -> None:
        for word in self.keywords:
            if not _KEYWORD.fullmatch(word):
                raise UsageError(
                    f"{PROGRAM} has no keyword {word!r}; `{PROGRAM} --help-query-gpu` lists them"
                )
        if not 0.001 <= self.interval_s <= 86400:
            raise UsageError(
                f"the interval of {PROGRAM} is 0.001 to 86400 s; got {self.interval_s}"
            )

    def command(self, program: str, *, gpus: str) -> list[str]:
        """Return nvidia-smi's command line. `gpus`: indices or UUIDs with commas; "" means all."""
        words = dict.fromkeys((*self.keywords, *_NEEDED))
        loop = f"--loop-ms={round(self.interval_s * 1000)}"
        if self.interval_s == round(self.interval_s):
            loop = f"--loop={round(self.interval_s)}"
        which = [f"--id={gpus}"] if gpus else []
        return [program, f"--query-gpu={','.join(words)}", "--format=csv", *which, loop]


def parsed(keywords: str) -> tuple[str, ...]:
    """Split query keywords at commas and spaces."""
    return tuple(keywords.replace(",", " ").split())


def ask(out: Path, query: Query | None) -> None:
    """Switch logging on for all cells of a results directory; off if `query` is None."""
    write_json(out / ASKED, None if query is None else asdict(query))


def asked(out: Path) -> Query | None:
    """Read the query set by `ask`; None if logging is off. NotMeasurable if it is damaged."""
    path = out / ASKED
    try:
        query = json.loads(path.read_bytes() if path.exists() else b"null")
        return None if query is None else Query(tuple(query["keywords"]), query["interval_s"])
    except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
        raise NotMeasurable(f"{path} is damaged ({error!r}): give --memory again") from error


def lack(path: str | None = None) -> str:
    """Why nvidia-smi can't log on this machine; empty if it can."""
    if shutil.which(PROGRAM, path=path) is None:
        return f"{PROGRAM} is not on this machine's PATH"
    return ""


def devices(environment: Mapping[str, str], gpus: Sequence[tuple[str, str]]) -> str:
    """Return a cell's visible GPUs as nvidia-smi's --id takes them; "" for all.

    nvidia-smi numbers GPUs by bus; if CUDA numbers them otherwise, they are named by UUID. `gpus`:
    UUID and name of each GPU here. Raises NotMeasurable if there is none, or they are ambiguous.
    """
    cuda_visible = environment.get("CUDA_VISIBLE_DEVICES")
    if cuda_visible is not None and cuda_visible.strip() in ("", "-1"):
        raise NotMeasurable("CUDA_VISIBLE_DEVICES shows the cell no GPU")
    named = cuda_visible_devices.with_uuids(environment, gpus)
    if named is None:
        raise NotMeasurable(
            f"CUDA may number the GPUs here differently from {PROGRAM}, and its order is unknown;"
            " set CUDA_DEVICE_ORDER=PCI_BUS_ID, so that both agree"
        )
    return named.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")


def _all_gpus() -> list[tuple[str, str]]:
    """UUID and name of every GPU here; empty without NVML."""

    def all_gpus() -> list[tuple[str, str]]:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [(pynvml.nvmlDeviceGetUUID(h), pynvml.nvmlDeviceGetName(h)) for h in handles]

    return nvml_list(all_gpus)


@contextmanager
def logged(cell: Path, *, environment: Mapping[str, str], suffix: str = "") -> Iterator[None]:
    """Log the memory of a cell's GPUs, from before the cell to its end, if logging is on.

    `environment`: the cell's, for PATH and CUDA_VISIBLE_DEVICES. `suffix`: of this node's files. A
    problem is printed and stored in the cell's directory; the cell runs without the log.
    """
    log = _Log(cell, suffix)
    try:
        log.begin(environment)
        yield
    finally:
        log.end()


def _named(name: str, suffix: str) -> str:
    stem, dot, ending = name.partition(".")
    return f"{stem}{suffix}{dot}{ending}"


class _Log:
    """Owns the nvidia-smi process that logs beside one cell."""

    def __init__(self, cell: Path, suffix: str) -> None:
        self._cell, self._suffix = cell, suffix
        self._name = cell.name + suffix
        self._log = cell / _named(SMI_LOG, suffix)
        self._process: subprocess.Popen[bytes] | None = None
        self._command: list[str] = []
        self._problem = ""

    def begin(self, environment: Mapping[str, str]) -> None:
        """Start nvidia-smi and wait for its first reading: the memory in use before the cell."""
        program = shutil.which(PROGRAM, path=environment.get("PATH"))
        try:
            query = asked(self._cell.parent)
            if query is None:
                return
            if program is None:
                raise NotMeasurable(lack(environment.get("PATH")))
            there = _all_gpus()
            gpus = devices(environment, there)
            self._command = query.command(program, gpus=gpus)
            with self._log.open("wb") as out:
                try:
                    self._process = subprocess.Popen(
                        self._command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=out,
                        stderr=subprocess.STDOUT, start_new_session=True,
                        preexec_fn=ends_with_parent(),
                    )  # fmt: skip
                except OSError as error:
                    raise NotMeasurable(f"{PROGRAM} could not be started: {error}") from error
            visible = [gpu for gpu in gpus.split(",") if gpu] or there
            self._await_first(self._process, 1 + len(visible))
            self._keep()
        except NotMeasurable as error:
            self._say(str(error))
            self.end()

    def end(self) -> None:
        """End the process; note it as a problem if it had ended before."""
        process = self._process
        if process is None:
            return
        code = process.poll()
        if code is not None and not self._problem:
            self._say(
                f"{PROGRAM} ended with exit code {code} before the cell did, so its log may lack"
                " the peak"
            )
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
                break
        self._process = None

    def _await_first(self, process: subprocess.Popen[bytes], lines: int) -> None:
        """Wait until the log has its header and a line for each device, at least one."""
        until_s = time.monotonic() + _FIRST_S
        while time.monotonic() < until_s:
            content = self._log.read_bytes()
            if content.count(b"\n") >= max(2, lines) and b"memory.used" in content:
                return
            if process.poll() is not None:
                words = content.decode("utf-8", errors="replace").split("\n")[0].strip()
                raise NotMeasurable(f"{PROGRAM} ended at once: {words or process.returncode}")
            time.sleep(0.02)
        raise NotMeasurable(f"{PROGRAM} gave no reading within {_FIRST_S:.0f} s")

    def _say(self, problem: str) -> None:
        self._problem = problem
        sys.stderr.write(f"{self._name}: no log of {PROGRAM}: {problem}; the cell still runs\n")
        self._keep()

    def _keep(self) -> None:
        with suppress(OSError):
            note = {"command": shlex.join(self._command), "problem": self._problem}
            write_json(self._cell / _named(SMI_NOTE, self._suffix), note)


def ends_with_parent() -> Callable[[], None] | None:
    """Return a `preexec_fn` that has the kernel send the child a SIGTERM when this process ends.

    None on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        return None
    # Looked up here: between fork and exec nothing may be loaded.
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it went between the fork and the call
            os._exit(1)

    return ask_kernel
