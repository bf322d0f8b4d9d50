"""Runs a command and measures it, without changing what the command does.

The command's output, its exit code and the signals meant for it pass through unchanged. A failure
in measuring does not affect it: even if the recorder is killed, the command runs to its end.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import psutil

from ergmeter.errors import ErgmeterError, FormatError, NotMeasurable, UsageError
from ergmeter.flops.counted import remote
from ergmeter.meter import Around, Meter
from ergmeter.probes.process import ProcessProbe, high_water_bytes
from ergmeter.recorder import hook
from ergmeter.recorder.output import (
    ASKED,
    FORWARDED,
    Channel,
    OutputReader,
    RelayedOutput,
    copy_window_size,
    open_channels,
    start_relay,
    unrecognised,
)
from ergmeter.runlog import format as fmt
from ergmeter.runlog.identity import new_run_path, run_header
from ergmeter.runlog.process_group import launcher_rank, launcher_world_size
from ergmeter.runlog.writer import amend_header, create_run
from ergmeter.units import NS_PER_S

# Peak memory of one process of the command. `ru_maxrss` begins before the command does: until it
# executes the program, the child has the recorder's own memory, and Linux counts that. So the
# number is used only where it exceeds the recorder's own peak by then. It is the largest of the
# command and of the descendants that were waited for.
#
# A smaller command's peak is read from its high-water mark while it lives. The process probe
# reads that every two seconds, which may be too late for a short command. So a thread reads it
# whenever a fiftieth of the command's life has gone by, until the probe is as frequent.


_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024  # getrusage(2) of each system
_FIRST_S = 0.02
_AGAIN_FRAC = 0.02


class MemoryPeak:
    """The command's peak memory, which the process probe reads when it stops."""

    def __init__(self) -> None:
        self._ours_bytes = 0
        self._mark_bytes = 0
        self._bytes: int | None = None
        self._ended = threading.Event()

    def started(self, pid: int) -> None:
        """Call right after the command started: note our own memory and watch the command's."""
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT_BYTES
        # Our ru_maxrss may include our parent's memory in the same way; the mark does not.
        mark = high_water_bytes("self")
        self._ours_bytes = mark or own
        if mark is not None:
            threading.Thread(
                target=self._watch, args=(pid,), name="ergmeter-peak", daemon=True
            ).start()

    def ended(self, usage: resource.struct_rusage) -> None:
        """Call when the command has ended, with the resource usage that wait4 returned."""
        self._ended.set()
        peak_bytes = usage.ru_maxrss * _UNIT_BYTES
        self._bytes = peak_bytes if peak_bytes > self._ours_bytes else self._mark_bytes or None

    def __call__(self) -> int | None:
        """Return the peak in bytes; None before the command has ended, or if it is unknown."""
        return self._bytes

    def _watch(self, pid: int) -> None:
        began_s = time.monotonic()
        wait_s = _FIRST_S
        while not self._ended.wait(wait_s) and wait_s < ProcessProbe.usual_period_s:
            marks = [high_water_bytes(member) or 0 for member in _tree(pid)]
            self._mark_bytes = max(self._mark_bytes, *marks)
            wait_s = max(_FIRST_S, _AGAIN_FRAC * (time.monotonic() - began_s))


def _tree(pid: int) -> list[int]:
    """PIDs of a process and its descendants, without listing all processes of the machine."""
    pids = [pid]
    for parent in pids:
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        except OSError:  # gone, or a kernel that has no such file
            continue
        pids += map(int, children.split())
    return pids


# Cost of recording: all CPU time of the recorder and of its relay. Counting only the threads of the
# Meter, as inside a program, would leave out the cost of reading much output.


class RecordingCost:
    """The CPU seconds of this process and of the relay, so far."""

    def __init__(self, relay_pid: int) -> None:
        self._relay_s = 0.0
        self._relay: psutil.Process | None = None
        with suppress(psutil.Error):
            self._relay = psutil.Process(relay_pid)

    def __call__(self) -> float:
        """Return the CPU seconds now. For a relay that has ended, the last reading counts."""
        if self._relay is not None:
            with suppress(psutil.Error):
                times = self._relay.cpu_times()
                self._relay_s = times.user + times.system
        return time.process_time() + self._relay_s


# FLOPs of the program's steps are counted in a separate process, also after the program's end. The
# program leaves a request in the run directory and looks for the answer. The recorder starts the
# counting process, so that the program gets no child it does not know of, and a killed program
# still has its FLOPs counted. One request is counted at a time, and the ranks of one training share
# the answer.
_LOOK_S = 0.25
_AT_THE_END_S = 60.0  # the longest wait for the count after the command has ended


class FlopCounts:
    """Looks in a thread for a run's requests to count FLOPs, and starts the counting."""

    def __init__(self, run: Path) -> None:
        self._folder = run / remote.FOLDER
        self._running: Path | None = None
        self._is_urgent = False  # the command is over
        self._counted: dict[str, Path] = {}  # by what was counted
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="ergmeter-count", daemon=True)
        self._thread.start()

    def finish(self, meter: Meter) -> None:
        """Call when the command has ended: finish pending counts and remove the requests.

        The FLOPs of each training go into the header of the process that requested them.
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
        """Start the next pending count if none is running. Returns True while one is running."""
        running = self._running
        with suppress(OSError, ValueError):
            if running is not None and running.exists() and remote.result(running) is None:
                return True
        self._running = None  # done, or removed by a program that has ended
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
    """Write the FLOPs of a request into the header of the writer that requested them.

    A program that has read the answer itself has removed its request.
    """
    writer = request.parents[1] / remote.writer_of(request)
    header = fmt.writer_header(writer / fmt.WRITER_FILE, [])
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


_WAITED = FORWARDED | {signal.SIGCHLD, signal.SIGWINCH}
# The relay starts with these blocked: ASKED would kill it before it has set its own mask.
_BLOCKED = _WAITED | ({ASKED} if ASKED else set())
_FROM_KERNEL = 128  # si_code SI_KERNEL: the terminal sent it, to the child as well
# A signal sent to the process group reaches the child directly, and the relay. The relay has this
# long to receive it, and then to report it when asked; if it has not, we forward the signal.
_GROUP_GRACE_S = 0.05
_ANSWER_S = 2.0
_OUTPUT_WAIT_S = 2.0
_SHELLS = ("sh", "bash", "dash", "zsh")
_MODULE_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "uv")  # they take -m MODULE as well
_LAUNCHER_MODULES = (  # the words after them are what they start
    *("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"),
    *("deepspeed.launcher.runner", "torch.utils.bottleneck", "cProfile", "pdb"),
)


@dataclass(frozen=True)
class Recording:
    """The result of a recorded command."""

    exit_code: int
    run: Path


@dataclass(frozen=True)
class RecordRequest:
    """What to run and how to measure it."""

    command: Sequence[str]
    out: Path | None = None
    name: str | None = None
    meter: Mapping[str, Any] = field(default_factory=dict)  # options, as `Meter` takes them
    probe_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tokens_are: str | None = None
    keep_buffering: bool = False
    pty: bool = False  # a pseudo-terminal for its standard output
    hook: bool = True  # load the hook into the command's Python programs


def record(request: RecordRequest) -> Recording:
    """Run the command to its end and measure it. Raises UsageError if it can't be started."""
    program = shutil.which(request.command[0])
    if program is None:
        raise UsageError(f"no such command: {request.command[0]!r} is not an executable on PATH")
    name = request.name or run_name(request.command)
    peak = MemoryPeak()
    options = {**request.probe_options, "process": {"peak_bytes": peak}}
    meter = Meter(name=name, probe_options=options, **request.meter)
    run, environment = new_run(request, name)

    channels = open_channels(pty=request.pty)
    copy_window_size(channels)
    # If our parent ignores SIGCHLD, the kernel reaps our children and drops their exit status. So
    # we reset it to its default, which the command then inherits.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Blocked from here on and taken one by one below; the child starts with none blocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    relay_pid, report_fd = start_relay(channels)
    output = RelayedOutput(report_fd)
    # Where a launcher starts a recorder for each rank, each measures its own command alone.
    own = {name: value for name, value in environment.items() if name != "LOCAL_WORLD_SIZE"}
    meter.plan = replace(meter.plan, around=Around(run, own, RecordingCost(relay_pid)))
    reader = OutputReader(output, meter, tokens_are=request.tokens_are)
    measured = _started(meter)
    reader.start()
    # Only now: a command that is quick has readings before its first step and after its last.
    try:
        pid = _spawn(program, request.command, environment, channels)
    except OSError as error:
        meter.close()
        shutil.rmtree(run)
        raise UsageError(f"{program} can't be started: {error.strerror}") from error
    peak.started(pid)
    is_over = threading.Event()  # then its PID may be another process's
    meter.on_stop = partial(_ask_to_stop, pid, is_over)
    if meter.should_stop:  # requested before the command was started
        meter.on_stop()
    meter.watch(pid)
    counts = FlopCounts(run)
    status, usage = _wait(pid, channels, output, relay_pid=relay_pid)
    ended_ns = time.monotonic_ns()
    is_over.set()
    peak.ended(usage)
    code = os.waitstatus_to_exitcode(status)
    reader.finish(time.monotonic_ns(), patience_s=_OUTPUT_WAIT_S)
    if measured and not reader.steps and not has_steps(run):
        why = hook.why_no_steps(run) if request.hook else ""
        failed = _ended(code).replace("killed", "was killed") if code else ""
        if (nothing := unrecognised(reader, why, failed)) is not None:
            meter.record(nothing)
    shutil.rmtree(run / hook.FOLDER, ignore_errors=True)
    counts.finish(meter)
    meter.close(_ended(code), ended_ns=ended_ns)
    while late := signal.sigpending() & _WAITED:
        signal.sigwait(late)  # meant for a command that has ended
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
    with suppress(ChildProcessError):
        os.waitpid(relay_pid, os.WNOHANG)
    return Recording(code if code >= 0 else 128 - code, run)


def new_run(request: RecordRequest, name: str) -> tuple[Path, dict[str, str]]:
    """The run's directory, and the environment in which the command finds it."""
    path = _of_this_task(request.out) or new_run_path(name)
    run = create_run(path.absolute(), run_header(name, request.command))
    environment = _environment(run, request)
    if request.hook:
        environment |= hook.environment(environment)
        (run / hook.FOLDER).mkdir()
    return run, environment


def _ask_to_stop(pid: int, is_over: threading.Event) -> None:
    """Ask the command to end, as a scheduler would. Called on another thread."""
    if not is_over.is_set():
        sys.stderr.write("erg: asking the command to stop (SIGTERM)\n")
        _send(pid, signal.SIGTERM)


def _of_this_task(out: Path | None) -> Path | None:
    """Return the directory of this task's run in `srun erg record --out DIR`: DIR, DIR-1, DIR-2...

    Each task records its own run: if a task were refused DIR, the training would fail. A single run
    needs `erg record -- srun ...`.
    """
    size, task = launcher_world_size(), launcher_rank()
    if size < 2 or task is None:
        return out
    if task == 0:
        sys.stderr.write(
            f"erg: each of {size} tasks is recorded in a run of its own; for one run of all, put"
            " the launcher inside: erg record -- srun ...\n"
        )
    return out.with_name(f"{out.name}-{task}") if out is not None and task else out


def _started(meter: Meter) -> bool:
    """Start the Meter; False if that fails. The command is run anyway."""
    try:
        meter.start()
    except (OSError, ErgmeterError) as error:
        sys.stderr.write(f"erg: the command runs, but is not measured: {error}\n")
        return False
    return True


def has_steps(run: Path) -> bool:
    """True if a Meter inside the command has joined the run and records steps."""
    return any(run.glob("*/steps-[0-9]*"))


def run_name(command: Sequence[str]) -> str:
    """Name a run by its script or module, skipping launchers and options; else by its program.

    `python -m pkg.train` and `torchrun -m pkg.train` give pkg.train; `python -m
    torch.distributed.run train.py` gives train.
    """
    return _script_or_module(command) or Path(command[0]).stem


def _script_or_module(command: Sequence[str]) -> str | None:
    takes_module = is_python = is_shell = False  # `-m` and `-c` mean other things to numactl
    words = iter(command)
    for word in words:
        base = Path(word).name
        if is_shell and word in ("-c", "-lc"):
            return _script_or_module(next(words, "").split())
        if takes_module and (module := _module_in(word, words)):
            if module not in _LAUNCHER_MODULES:
                return module
            is_python = False
        elif is_python and word.startswith("-"):
            if word in ("-W", "-X"):
                next(words, "")
            elif word == "-" or (word[1] != "-" and word.endswith("c")):
                return None  # a program from standard input or from the command line
        elif is_python or word.endswith((".py", ".sh")):
            return base.removesuffix(".py").removesuffix(".sh")
        elif _is_python(base) or base in _MODULE_LAUNCHERS:
            takes_module, is_python = True, _is_python(base)
        is_shell = is_shell or base in _SHELLS
    return None


def _is_python(program: str) -> bool:
    return re.fullmatch(r"(?:python|pypy)[\d.]*t?", program) is not None


def _module_in(word: str, words: Iterator[str]) -> str:
    """The module of `-m MODULE`, `-um MODULE`, `-mMODULE` or `--module MODULE`; "" if none."""
    if word == "--module" or re.fullmatch(r"-[bBdEiIOPqsSuvx]*m", word):
        return next(words, "")
    return word[2:] if word.startswith("-m") and len(word) > 2 else ""


def _environment(run: Path, request: RecordRequest) -> dict[str, str]:
    """Return our environment with the `ERGMETER_*` variables that the command needs.

    Python writes 8 kB at a time into a pipe: a hundred steps would arrive at once. So the hook
    makes it flush each line; without the hook, PYTHONUNBUFFERED does.
    """
    environment = dict(os.environ)
    environment[fmt.RUN_VARIABLE] = str(run)
    if not request.keep_buffering and request.hook:
        environment[hook.FLUSH_LINES] = "1"
    elif not request.keep_buffering:
        environment.setdefault("PYTHONUNBUFFERED", "1")
    return environment


def _spawn(
    program: str, command: Sequence[str], environment: dict[str, str], channels: list[Channel]
) -> int:
    actions = [
        (os.POSIX_SPAWN_DUP2, channel.child_fd, fd)
        for channel in channels
        for fd in channel.real_fds
    ]
    pid = os.posix_spawn(
        program,
        list(command),
        environment,
        file_actions=actions,
        setsigmask=(),
        setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),  # which Python ignores, and the command may not
    )
    for channel in channels:
        os.close(channel.child_fd)
        os.close(channel.read_fd)
    return pid


def _wait(
    pid: int, channels: list[Channel], output: RelayedOutput, *, relay_pid: int
) -> tuple[int, resource.struct_rusage]:
    """Wait for the child, forwarding signals. Returns its wait status and its resource usage."""
    handled_ns: dict[int, int] = {}
    while True:
        number, from_terminal = _next_signal()
        if number == signal.SIGWINCH:
            # The terminal may have signalled the child before the size was set: signal it again.
            copy_window_size(channels)
            _send(pid, number)
        elif number != signal.SIGCHLD:
            time.sleep(_GROUP_GRACE_S)
            _await_signal_reports(relay_pid, output)
            if (ended := _reap(pid)) is not None:
                return ended
            in_group = output.group_signals_ns.get(number, 0) > handled_ns.get(number, 0)
            if not from_terminal and not in_group:
                _send(pid, number)
            handled_ns[number] = time.monotonic_ns()
        if (ended := _reap(pid)) is not None:
            return ended


def _await_signal_reports(relay_pid: int, output: RelayedOutput) -> None:
    """Wait until the relay has reported its signals: it answers `ASKED` after all of them."""
    if not ASKED:
        return
    asked_ns = time.monotonic_ns()
    _send(relay_pid, ASKED)
    while output.group_signals_ns.get(ASKED, 0) < asked_ns and not output.is_over:
        if time.monotonic_ns() - asked_ns > _ANSWER_S * NS_PER_S:
            return
        time.sleep(0.001)


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _next_signal() -> tuple[int, bool]:
    if hasattr(signal, "sigwaitinfo"):
        information = signal.sigwaitinfo(_WAITED)
        return information.si_signo, information.si_code == _FROM_KERNEL
    return signal.sigwait(_WAITED), False  # macOS


def _reap(pid: int) -> tuple[int, resource.struct_rusage] | None:
    reaped, status, usage = os.wait4(pid, os.WNOHANG)
    return (status, usage) if reaped == pid else None


def _ended(code: int) -> str:
    if code == 0:
        return "finished"
    if code > 0:
        return f"failed (exit code {code})"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {-code}"
