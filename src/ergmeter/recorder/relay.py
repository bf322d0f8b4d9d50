"""Passes the child's output on, in a process of its own, so that nobody's death loses a line.

The trap: a recorder that reads the child's pipe is part of the training. Kill the recorder, and the
child dies of SIGPIPE at its next print. So the pipe is read by a small process that does nothing
else: it writes to the real output, and tells the recorder, if there still is one, what went by and
when. If the recorder is gone or slow it is not waited for.

It is in the process group of the command and lets signals pass by. One that reaches it was sent to
the whole group, and so to the command as well; it says so, and the recorder does not send it again.
On a busy node it may come to that late: so the recorder asks it (`ASKED`), and the answer stands
behind whatever it has got before.

Where the real output is a terminal the child gets a terminal: a pseudo-terminal for output only.
Its input, its session and its process group stay the real ones, so Ctrl-C and Ctrl-Z need no help.
On request (`--pty`) its standard output is one in any case: most programs write to a terminal line
by line, and to a pipe in blocks of 4 KiB.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

# Monotonic ns, channel, length. Of length 0: here the relay left out something that went by.
FRAME = struct.Struct("<qBI")
SIGNALS = 255  # the channel on which the relay says which signals were sent to the whole group
FORWARDED = frozenset(
    {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
# A real-time signal, which is taken after all others that wait. 0: this system has none (macOS).
ASKED = int(getattr(signal, "SIGRTMIN", 0))
_STOPPING = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT}
_TOLD = FORWARDED | ({ASKED} if ASKED else set())
_CHUNK = 65536
_WINDOW_SIZE = struct.pack("HHHH", 24, 80, 0, 0)  # rows, columns; where there is no terminal
# What the relay keeps for a recorder that does not read. What comes after that is left out.
_MAX_PENDING = 16 << 20


@dataclass(frozen=True)
class Channel:
    """One way out of the child: what the child writes to, what the relay reads, where it goes."""

    child_fd: int
    read_fd: int
    real_fds: tuple[int, ...]  # the child's file descriptors that it stands for: 1, 2 or both
    terminal: str | None = None  # the child's pseudo-terminal, where the real output is one


def open_channels(*, pty: bool = False) -> list[Channel]:
    """A channel for standard output and one for standard error; one for both if they are one.

    `pty`: standard output is a pseudo-terminal, whatever the real one is.
    """
    together = _same_file(1, 2)
    groups = [(1, 2)] if together else [(1,), (2,)]
    channels = []
    for group in groups:
        if _is_closed(group[0]):
            continue
        is_terminal = os.isatty(group[0]) or (pty and 1 in group)
        read_fd, child_fd = _terminal() if is_terminal else os.pipe()
        name = os.ttyname(child_fd) if is_terminal else None
        channels.append(Channel(child_fd, read_fd, group, name))
    return channels


def copy_window_size(channels: list[Channel]) -> None:
    """Make the child's terminals as large as the real one."""
    import fcntl  # noqa: PLC0415  POSIX only, like the relay
    import termios  # noqa: PLC0415

    for channel in channels:
        if channel.terminal is None:
            continue
        with suppress(OSError):
            # With --pty the real output may be a file, and the terminal another descriptor's.
            shown = next((fd for fd in (channel.real_fds[0], 2, 0) if os.isatty(fd)), None)
            size = _WINDOW_SIZE
            if shown is not None:
                size = fcntl.ioctl(shown, termios.TIOCGWINSZ, b"\0" * 8)
            # Opened for this and no longer: a descriptor that we kept would keep the child from
            # being told when the real terminal is gone, or the relay when the child is.
            fd = os.open(channel.terminal, os.O_RDWR | os.O_NOCTTY)
            try:
                fcntl.ioctl(fd, termios.TIOCSWINSZ, size)
            finally:
                os.close(fd)


def start_relay(channels: list[Channel]) -> tuple[int, int]:
    """Fork the relay. Returns its pid and the descriptor on which it reports."""
    report_read, report_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _close_all_but(
                report_write, *(fd for c in channels for fd in (c.read_fd, c.real_fds[0]))
            )
            _relay(channels, report_write)
            status = 0
        finally:
            os._exit(status)
    os.close(report_write)
    return pid, report_read


def _same_file(one: int, other: int) -> bool:
    try:
        a, b = os.fstat(one), os.fstat(other)
    except OSError:
        return False
    return (a.st_dev, a.st_ino, a.st_rdev) == (b.st_dev, b.st_ino, b.st_rdev)


def _is_closed(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return True
    return False


def _close_all_but(*kept: int) -> None:
    """Let go of what a pipe's other end may be waiting for: standard input, and whatever else."""
    for name in os.listdir("/dev/fd"):  # noqa: PTH208  numbers, not paths
        if int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))


def _terminal() -> tuple[int, int]:
    import pty  # noqa: PLC0415
    import termios  # noqa: PLC0415

    master, slave = pty.openpty()
    # The real terminal turns \n into \r\n; if this one did too, the bytes would not be the child's.
    attributes = termios.tcgetattr(slave)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    return master, slave


class _Report:
    """The way to the recorder: never blocks a channel, and forgets when nobody listens."""

    def __init__(self, fd: int, channels: int) -> None:
        self._fd = fd
        self._channels = channels
        self._pending = bytearray()
        self._lost: set[int] = set()
        self._listened_to = True
        self._changed = threading.Condition()
        os.set_blocking(fd, False)

    def send(self, t_ns: int, channel: int, data: bytes) -> None:
        with self._changed:
            if not self._listened_to:
                return
            if len(self._pending) + len(data) > _MAX_PENDING:
                self._lost.add(channel)
                return
            if channel in self._lost:
                self._lost.discard(channel)
                self._pending += FRAME.pack(t_ns, channel, 0)
            self._pending += FRAME.pack(t_ns, channel, len(data)) + data
            self._push()
            if self._pending:
                self._changed.notify()

    def done(self) -> None:
        """A channel will send no more."""
        with self._changed:
            self._channels -= 1
            self._changed.notify()

    def pump(self) -> None:
        """Send on what the recorder did not take at once, until all channels are done."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while True:
            with self._changed:
                while self._channels and not self._pending:
                    self._changed.wait()
                if not self._pending:
                    return
            poll.poll()
            with self._changed:
                self._push()

    def _push(self) -> None:
        try:
            while self._pending:
                del self._pending[: os.write(self._fd, self._pending)]
        except BlockingIOError:
            pass
        except OSError:
            self._listened_to = False
            self._pending.clear()


def _relay(channels: list[Channel], report_fd: int) -> None:
    # Not ignored but blocked, so that they can be waited for; what stops a job stops us as well.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _STOPPING)
    report = _Report(report_fd, len(channels))
    threading.Thread(target=_tell_signals, args=(report,), daemon=True).start()
    # A thread each: a reader that does not take the one output does not hold up the other.
    threads = [
        threading.Thread(target=_pass_on, args=(number, channel, report))
        for number, channel in enumerate(channels)
    ]
    for thread in threads:
        thread.start()
    report.pump()
    for thread in threads:
        thread.join()


def _pass_on(number: int, channel: Channel, report: _Report) -> None:
    real_fd = channel.real_fds[0]
    while data := _read(channel.read_fd):
        t_ns = time.monotonic_ns()
        if not _write_all(real_fd, data):
            break
        report.send(t_ns, number, data)
    # The child is done; or whoever reads the real output is, and the child is told as it would have
    # been without us: by a write that fails.
    os.close(channel.read_fd)
    os.close(real_fd)
    report.done()


def _tell_signals(report: _Report) -> NoReturn:
    while True:
        number = signal.sigwait(_TOLD)
        report.send(time.monotonic_ns(), SIGNALS, bytes([number]))


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _CHUNK)
    except OSError as error:  # a pseudo-terminal nobody holds open any more
        if error.errno == errno.EIO:
            return b""
        raise


def _write_all(fd: int, data: bytes) -> bool:
    try:
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                time.sleep(0.005)  # somebody made our output non-blocking
    except OSError:
        return False
    return True
