"""Where does an event of a streamed answer end? HTTP/1.1 bodies and server-sent events, from bytes.

The trap: one read is not one event. A packet may hold half an event or three; a line may end in CR,
LF or both, with the two in different packets. Both parsers take bytes as they come, keep what is
incomplete, and know nothing of sockets.

Sources: RFC 9112 (message framing), the HTML standard's section on server-sent events.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ergmeter.errors import FormatError

_HEAD_LIMIT_BYTES = 65_536
_NO_BODY = (204, 304)


@dataclass
class Response:
    """One HTTP response. `feed` gives the bytes of its body; `is_done` says that it was all."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    is_done: bool = False
    _buffer: bytes = b""
    _left: int | None = None  # bytes to come, of a chunk or of a body whose length is known
    _is_chunked: bool = False
    _in_trailer: bool = False

    @property
    def keeps_alive(self) -> bool:
        """Whether another request may follow on the same connection."""
        has_end = self._is_chunked or "content-length" in self.headers or self.status in _NO_BODY
        return self.is_done and has_end and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> bytes:
        """Take what came. FormatError if it is no HTTP."""
        self._buffer += data
        if not self.status and not self._read_head():
            return b""
        if self.is_done:
            return b""
        if self._is_chunked:
            return self._dechunked()
        taken, self._buffer = self._buffer[: self._left], self._buffer[len(self._buffer) :]
        if self._left is not None:
            self._left -= len(taken)
            self.is_done = self._left == 0
        return taken

    def closed(self) -> bool:
        """The connection has ended: whether the response has, too."""
        if self.status and not self._is_chunked and self._left is None:
            self.is_done = True
        return self.is_done

    def _read_head(self) -> bool:
        while True:
            head, end, rest = self._buffer.partition(b"\r\n\r\n")
            if not end:
                if len(self._buffer) > _HEAD_LIMIT_BYTES or not _may_be_http(self._buffer):
                    raise FormatError(f"no HTTP answer: it begins with {self._buffer[:40]!r}")
                return False
            self._buffer = rest
            lines = head.decode("latin-1").split("\r\n")
            words = lines[0].split(" ", 2)
            if not words[0].startswith("HTTP/1.") or len(words) < 2 or not _is_number(words[1]):
                raise FormatError(f"no HTTP answer: it begins with {lines[0][:40]!r}")
            status = int(words[1])
            if status >= 200:  # else an interim response, such as 100 Continue
                break
        self.status = status
        pairs = (line.partition(":") for line in lines[1:])
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length", "")
        if not self._is_chunked:
            self._left = 0 if status in _NO_BODY else int(length) if _is_number(length) else None
            self.is_done = self._left == 0
        return True

    def _dechunked(self) -> bytes:
        body = []
        while not self.is_done:
            if self._left:
                part = self._buffer[: self._left]
                self._buffer = self._buffer[len(part) :]
                self._left -= len(part)
                body.append(part)
                if self._left:
                    break
            line, end, rest = self._buffer.partition(b"\r\n")
            if not end:
                break
            self._buffer = rest
            self._chunk_line(line)
        return b"".join(body)

    def _chunk_line(self, line: bytes) -> None:
        """A chunk's length, the empty line after its data, or a line of the trailer."""
        if self._in_trailer:
            self.is_done = not line
        elif self._left == 0 and not line:
            self._left = None
        else:
            length = line.partition(b";")[0].strip()
            if not length or length.strip(b"0123456789abcdefABCDEF"):
                raise FormatError(f"no length of an HTTP chunk: {line[:40]!r}")
            self._left = int(length, 16)
            self._in_trailer = self._left == 0


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _may_be_http(start: bytes) -> bool:
    return b"HTTP/1.".startswith(start[:7])


@dataclass
class Events:
    """Server-sent events. `feed` gives the data of each event that is complete."""

    _buffer: bytes = b""
    _data: list[str] = field(default_factory=list)
    _after_return: bool = False
    _is_begun: bool = False

    def feed(self, data: bytes) -> list[str]:
        """Take what came of the body."""
        if not self._is_begun and data:
            self._is_begun = True
            data = data.removeprefix(b"\xef\xbb\xbf")  # a byte order mark is no part of it
        if self._after_return and data:  # the second half of a CR LF
            self._after_return = False
            data = data.removeprefix(b"\n")
        self._buffer += data
        # A CR at the very end ends its line now: a server that ends lines so may pause here.
        self._after_return = self._after_return or self._buffer.endswith(b"\r")
        text = self._buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._buffer = text.split(b"\n")
        found = []
        for line in lines:
            if line:
                self._field(line.decode("utf-8", "replace"))
            elif self._data:
                found.append("\n".join(self._data))
                self._data = []
        return found

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        if name == "data":  # a comment has no name; event, id and retry say nothing to us
            self._data.append(value.removeprefix(" "))
