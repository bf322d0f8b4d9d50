"""Passes a command's output on (the relay) and turns it into records through the importers.

A line is cut at 64 KiB; bytes that are no text are replaced. Nothing here can stop the child's
output. If the relay left out some output, the partial lines around the gap are dropped.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn

from ergmeter.meter import Meter
from ergmeter.ports import Importer, Line
from ergmeter.records import Mark, Step
from ergmeter.units import NS_PER_S

# The relay passes the child's output on, in a process of its own. If the recorder itself read the
# child's pipe, killing the recorder would kill the child by SIGPIPE. The relay writes to the real
# output and reports to the recorder, if there is one, what went by and when. It never waits for
# the recorder.
#
# It is in the command's process group and ignores signals. A signal that reaches it was sent to
# the whole group, and so to the command; it reports that, and the recorder does not send it
# again. On a busy node the report may be late, so the recorder asks (`ASKED`), and the answer
# comes after whatever was received before.
#
# Where the real output is a terminal the child gets a pseudo-terminal for output only. Its input,
# session and process group stay the real ones, so Ctrl-C and Ctrl-Z need no help. With `--pty`
# its standard output always is one: most programs write to a terminal line by line, and to a pipe
# in blocks of 4 KiB.


# Monotonic ns, channel, length. Length 0 marks output that the relay left out.
FRAME = struct.Struct("<qBI")
SIGNALS = 255  # the channel on which the relay reports signals to the process group
FORWARDED = frozenset(
    {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
# A real-time signal, which is taken after all others that wait. 0: this system has none (macOS).
ASKED = int(getattr(signal, "SIGRTMIN", 0))
_STOPPING = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT}
_HANDLED = FORWARDED | ({ASKED} if ASKED else set())
_CHUNK = 65536
_WINDOW_SIZE = struct.pack("HHHH", 24, 80, 0, 0)  # rows, columns; where there is no terminal
# Bytes that the relay stores for a recorder that does not read. Further output is not reported.
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
    groups = [(1, 2)] if _same_file(1, 2) else [(1,), (2,)]
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
            terminal_fd = next((fd for fd in (channel.real_fds[0], 2, 0) if os.isatty(fd)), None)
            size = _WINDOW_SIZE
            if terminal_fd is not None:
                size = fcntl.ioctl(terminal_fd, termios.TIOCGWINSZ, b"\0" * 8)
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
            used_fds = (fd for c in channels for fd in (c.read_fd, c.real_fds[0]))
            _close_all_but(report_write, *used_fds)
            _relay(channels, report_write)
            status = 0
        finally:
            os._exit(status)
    os.close(report_write)
    return pid, report_read


def _same_file(fd: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(fd, other)
    except OSError:
        return False


def _is_closed(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return True
    return False


def _close_all_but(*keep_fds: int) -> None:
    """Close all other descriptors, so that the other ends of their pipes don't wait for us."""
    for name in os.listdir("/dev/fd"):  # noqa: PTH208  numbers, not paths
        if int(name) not in keep_fds:
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
    """Sends frames to the recorder without blocking a channel; drops them if it is gone."""

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
        """Call when a channel has ended."""
        with self._changed:
            self._channels -= 1
            self._changed.notify()

    def pump(self) -> None:
        """Send what the recorder could not take at once, until all channels have ended."""
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
    # The child has ended; or the reader of the real output has, and then the child's next write
    # fails, as it would without us.
    os.close(channel.read_fd)
    os.close(real_fd)
    report.done()


def _tell_signals(report: _Report) -> NoReturn:
    while True:
        number = signal.sigwait(_HANDLED)
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


MAX_LINE_BYTES = 65536
# How many lines before the first recognised one an importer gets to see.
_HEAD = 20
# Importers are somebody's code; the recorder does not wait longer than this for them to load.
_LOADING_S = 2.0
# An importer may wait for the next line to see where a step ends. If none comes, it hears of that.
_HEARTBEAT_S = 0.25
# What a command left in the pipe when it ended goes by a little later, by the relay's clock.
_RELAY_BEHIND_S = 1.0
UNRECOGNISED = "output_unrecognised"


class LineSplitter:
    """Cuts a stream of bytes into lines at \\n and \\r, each with the time its end was seen."""

    def __init__(self) -> None:
        self._partial = bytearray()
        self._t_ns = 0
        self._in_gap = False

    def feed(self, t_ns: int, data: bytes) -> Iterator[Line]:
        """Yield the lines that this data completes."""
        self._t_ns = t_ns
        pieces = data.replace(b"\r", b"\n").split(b"\n")
        for number, piece in enumerate(pieces):
            self._partial += piece[: max(0, MAX_LINE_BYTES - len(self._partial))]
            if number < len(pieces) - 1:
                yield from self.finish()

    def finish(self) -> Iterator[Line]:
        """Yield what is left as a line, of the time its last byte was seen."""
        if self._partial and not self._in_gap:
            yield Line(self._partial.decode("utf-8", errors="replace"), self._t_ns)
        self._partial.clear()
        self._in_gap = False

    def skip(self) -> None:
        """Drop the current line up to its end: output is missing here."""
        self._partial.clear()
        self._in_gap = True


class RelayedOutput:
    """What the relay reports: the lines of all channels, in the order in which they ended."""

    def __init__(self, report_fd: int) -> None:
        self._report_fd = report_fd
        self.read_ns = 0  # how far it has been read, by the relay's clock
        self.gaps = 0
        self.is_over = False  # the relay has ended
        self.group_signals_ns: dict[int, int] = {}  # when the relay last got a signal

    def lines(self) -> Iterator[Line]:
        """Yield the lines until the relay has ended, and an empty one while no output comes."""
        splitters: dict[int, LineSplitter] = {}
        for frame in self._frames():
            if frame is None:
                yield Line("", time.monotonic_ns())
                continue
            self.read_ns, channel, data = frame
            if channel == SIGNALS:
                self.group_signals_ns[data[0]] = self.read_ns
                continue
            splitter = splitters.setdefault(channel, LineSplitter())
            if data:
                yield from splitter.feed(self.read_ns, data)
            else:
                self.gaps += 1
                splitter.skip()
        self.is_over = True
        for splitter in splitters.values():
            yield from splitter.finish()

    def _frames(self) -> Iterator[tuple[int, int, bytes] | None]:
        """Yield the relay's frames; None every 0.25 s while there are none."""
        buffer = bytearray()
        with os.fdopen(self._report_fd, "rb", buffering=0) as report:
            while True:
                if not select.select([report], [], [], _HEARTBEAT_S)[0]:
                    yield None
                    continue
                data = report.read(1 << 16)
                if not data:
                    return
                buffer += data
                yield from _whole_frames(buffer)


def _whole_frames(buffer: bytearray) -> Iterator[tuple[int, int, bytes]]:
    """Yield the complete frames of the buffer and remove them from it."""
    start = 0
    while len(buffer) - start >= FRAME.size:
        t_ns, channel, length = FRAME.unpack_from(buffer, start)
        end = start + FRAME.size + length
        if end > len(buffer):
            break
        yield t_ns, channel, bytes(buffer[start + FRAME.size : end])
        start = end
    del buffer[:start]


class OutputReader:
    """The thread that reads from the relay and passes recognised records to the Meter."""

    def __init__(self, output: RelayedOutput, meter: Meter, *, tokens_are: str | None) -> None:
        self._output = output
        self._lines = output.lines()
        self._meter = meter
        self._options = {"tokens_are": tokens_are} if tokens_are else {}
        self._thread = threading.Thread(target=self._run, name="ergmeter-output", daemon=True)
        self._listening = threading.Event()
        self.steps = 0
        self.lines_read = 0
        self.recognised = False
        self.explained = False  # an importer has reported why there are no steps

    def start(self) -> None:
        """Start reading; return when the importers are loaded, or after 2 s."""
        self._thread.start()
        self._listening.wait(_LOADING_S)

    def finish(self, ended_ns: int, *, patience_s: float) -> None:
        """Read what was printed before the command ended.

        A background child that keeps the output open is not waited for. A reader that is behind,
        because output came too fast, is.
        """
        until_ns = ended_ns + round(_RELAY_BEHIND_S * NS_PER_S)
        while self._thread.is_alive():
            before_ns = self._output.read_ns
            self._thread.join(patience_s)
            if self._output.read_ns == before_ns or self._output.read_ns > until_ns:
                break
        if self._output.gaps:
            message = f"output came faster than it could be read; {self._output.gaps} gaps in it"
            self._meter.mark("rows_dropped", message)

    def _run(self) -> None:
        try:
            began = Line("", time.monotonic_ns())  # no step began before
            importer, head = self._recognised()
            if importer is None:
                return
            for record in importer.records(chain([began], head, self._lines)):
                self.steps += isinstance(record, Step)
                self.explained |= getattr(record, "name", "") == UNRECOGNISED
                self._meter.record(record)
        except Exception as error:  # noqa: BLE001  an importer may be anybody's; the run goes on
            message = f"reading the output stopped: {type(error).__name__}: {error}"
            self._meter.mark("importer_failed", message)
            deque(self._lines, maxlen=0)

    def _recognised(self) -> tuple[Importer | None, list[Line]]:
        """The importer whose format turned up first, and the lines it has not seen yet."""
        from ergmeter.importers.logfile import make_importers  # noqa: PLC0415  on our thread

        importers = [importer for importer in make_importers(self._options) if importer.is_live]
        self._listening.set()
        head: deque[Line] = deque(maxlen=_HEAD)
        for line in self._lines:
            if not line.text:
                continue
            self.lines_read += 1
            head.append(line)
            for importer in importers:
                if importer.recognises([line.text]):
                    self.recognised = True
                    return importer, list(head)
        return None, []


def unrecognised(reader: OutputReader, not_hooked: str, failed: str = "") -> Mark | None:
    """Return a mark with the reason why no step was seen; None if one was, or the reason is known.

    `not_hooked`: why the hook saw no steps. `failed`: how the program failed, if it did.
    """
    if reader.steps or reader.explained:
        return None
    if reader.recognised:
        message = "a printed step is timed from the line before it, and there was only one line"
        cure = "print one for every step, or use ergmeter.Meter in the loop"
    else:
        lines = "1 line" if reader.lines_read == 1 else f"{reader.lines_read} lines"
        what = f"{lines} of output, none" if reader.lines_read else "no output, so nothing"
        message = (
            f"{what} that ergmeter recognises (Hugging Face Trainer, Megatron, torchtitan"
            " and NXDT logs, or lines such as step=3 loss=2.1 tokens=4096)"
        )
        cure = "print such a line, or use ergmeter.Meter in the loop"
    inside = f"; and {not_hooked}" if not_hooked else ""
    text = f"no steps: {message}{inside}; {cure}"
    if failed:
        text = f"no steps: the program {failed} before one was seen; until then, {message}{inside}"
    return Mark(time.monotonic_ns(), UNRECOGNISED, text)
