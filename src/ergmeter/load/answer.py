"""Parses the answer to one request: its tokens, its chunks and their times.

Chunks are not tokens. A chunk of a stream may hold no token (the role), one, or several
(speculative decoding, a tokenizer that waits for a complete character). Tokens are the server's own
`usage`; chunks are counted beside them, under their own name.

Times are `time.monotonic_ns()`, taken when bytes come in. The first token is the first chunk with
text (or reasoning, or a tool call), the last token the last such chunk. `usage` and `[DONE]` after
it are not part of a latency; the request is settled when it is over.

Anything that is not the protocol's JSON is a `malformed answer`, never an exception.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from httptools import HttpParserError, HttpResponseParser

from ergmeter.errors import FormatError

# One read is not one event: a packet may hold half an event or three, and CR and LF may be in
# different packets. Both parsers take bytes as they come and use no sockets. httptools has the
# framing of HTTP (llhttp, compiled: 0.2 us a chunk where h11 takes 8). The source of server-sent
# events is the HTML standard.

_HEAD_LIMIT_BYTES = 65_536
_SHOWN_BYTES = 40  # of an answer that is not HTTP


class Response:
    """One HTTP response. `feed` returns the bytes of its body; `is_done`: it is complete."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_done = False
        self.keeps_alive = False  # another request may follow on the same connection
        self._head = b""
        self._body: list[bytes] = []
        self._parser = HttpResponseParser(self)

    def feed(self, data: bytes) -> bytes:
        """Parse received bytes; return those of the body. FormatError if they are not HTTP."""
        if self.is_done:
            return b""
        if not self.status:
            self._head += data
        try:
            self._parser.feed_data(data)
            if not self.status and len(self._head) > _HEAD_LIMIT_BYTES:
                raise HttpParserError("the header does not end")
        except HttpParserError as error:
            if not self.status:
                start = self._head[:_SHOWN_BYTES]
                raise FormatError(f"not an HTTP answer: begins with {start!r} ({error})") from error
            if not self.is_done:
                raise FormatError(f"the body of the answer is not HTTP: {error}") from error
        body, self._body = self._body, []
        return b"".join(body)

    def closed(self) -> bool:
        """Note that the connection has ended; return whether the response is complete."""
        has_end = "content-length" in self.headers or "transfer-encoding" in self.headers
        self.is_done = self.is_done or (self.status > 0 and not has_end)
        return self.is_done

    # -- called by the parser ---------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header that is complete."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """All headers have been received. Drop those of an interim answer such as 100 Continue."""
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
        else:
            self.headers = {}

    def on_body(self, body: bytes) -> None:
        """Store a part of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """The whole answer has been received; an interim one such as 100 Continue is ignored."""
        self.is_done = self.status > 0
        self.keeps_alive = self.is_done and self._parser.should_keep_alive()


@dataclass
class Events:
    """A parser of server-sent events. `feed` returns the data of each complete event."""

    _buffer: bytes = b""
    _data: list[str] = field(default_factory=list)
    _after_return: bool = False
    _is_begun: bool = False

    def feed(self, data: bytes) -> list[str]:
        """Parse received bytes of the body; return the data of the events that they complete."""
        if not self._is_begun and data:
            self._is_begun = True
            data = data.removeprefix(b"\xef\xbb\xbf")  # a byte order mark is not data
        if self._after_return and data:  # the second half of a CR LF
            self._after_return = False
            data = data.removeprefix(b"\n")
        self._buffer += data
        # A CR at the very end ends the line now: a server with CR line ends may pause here.
        self._after_return = self._after_return or self._buffer.endswith(b"\r")
        text = self._buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._buffer = text.split(b"\n")
        events = []
        for line in lines:
            if line:
                self._field(line.decode("utf-8", "replace"))
            elif self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        if name == "data":  # a comment has no name; event, id and retry are not used
            self._data.append(value.removeprefix(" "))


MALFORMED = "malformed answer"
_ERROR_CHARACTERS = 200
_BODY_BYTES = 4000  # of an error's body
_MANY_TOKENS = 2**31  # of one answer: a larger count is an error
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call", "text")


@dataclass
class Answer:
    """A request and its answer, until it is settled: answered completely, or failed."""

    number: int
    due_ns: int = 0  # when the schedule wanted it sent; when it was sent, in a closed loop
    sent_ns: int = 0
    connect_s: float = 0.0  # 0 on a connection that was open already
    chunks_ns: list[int] = field(default_factory=list)  # times of chunks with text
    end_ns: int = 0  # when it was settled; 0 until then
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str = ""
    failure: str = ""  # the kind: HTTP 429, timeout, ...; empty if there was none
    detail: str = ""
    response: Response = field(default_factory=Response)
    _events: Events = field(default_factory=Events)
    _body: bytes = b""
    _is_over: bool = False

    @property
    def offered_ns(self) -> int:
        """The scheduled time, else when the request was sent; 0 if neither."""
        return self.due_ns or self.sent_ns

    @property
    def usage_tokens(self) -> int | None:
        """Tokens generated, by the server's count; None if it sent none, or 0 for visible text."""
        return None if self.generated_tokens == 0 and self.chunks_ns else self.generated_tokens

    @property
    def first_ns(self) -> int:
        """When the first token was received."""
        return self.chunks_ns[0]

    @property
    def last_ns(self) -> int:
        """When the last token was received."""
        return self.chunks_ns[-1]

    def received(self, data: bytes, t_ns: int) -> bool:
        """Parse bytes received at this time. True if the answer is now complete or has failed."""
        try:
            body = self.response.feed(data)
            if self.response.status == 200 and self._is_stream():
                for event in self._events.feed(body):
                    self._event(event, t_ns)
            elif self.response.status:
                self._body = (self._body + body)[:_BODY_BYTES]
        except FormatError as error:
            self.fail(MALFORMED, str(error))
        if self.response.is_done and not self.failure:
            self._finished()
        return bool(self.failure) or self.response.is_done

    def closed(self) -> None:
        """Settle the answer: the server has closed the connection."""
        if self.failure:
            return
        if self.response.closed():
            self._finished()
        elif self.response.status:
            self.fail("cut off", f"the stream ended after {len(self.chunks_ns)} chunks with text")
        else:
            self.fail("no answer", "the server closed the connection without an answer")

    def fail(self, kind: str, detail: str) -> None:
        """Store the first failure; later ones are ignored."""
        if not self.failure:
            self.failure = kind
            self.detail = " ".join(detail.split())[:_ERROR_CHARACTERS]

    def _is_stream(self) -> bool:
        return "text/event-stream" in self.response.headers.get("content-type", "").lower()

    def _event(self, event: str, t_ns: int) -> None:
        if event.strip() == "[DONE]":
            self._is_over = True
            return
        chunk = _object(event)
        if chunk.get("error"):
            self.fail("error in the stream", _message(chunk))
            return
        self._usage(chunk.get("usage"))
        choices = chunk.get("choices") or []
        if not isinstance(choices, list):
            raise FormatError(f"`choices` is not a list: {event[:60]!r}")
        for choice in choices:
            if not isinstance(choice, dict):
                raise FormatError(f"a choice is not a JSON object: {event[:60]!r}")
            if _has_text(choice):
                self.chunks_ns.append(t_ns)
            if choice.get("finish_reason"):
                self.finish_reason = str(choice["finish_reason"])

    def _usage(self, usage: Any) -> None:  # noqa: ANN401  whatever the server sent
        if usage is None:
            return
        if not isinstance(usage, dict):
            raise FormatError(f"`usage` is not a JSON object: {usage!r:.60}")
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        # Some servers send usage with every chunk; the last one counts the whole answer.
        self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
        self.generated_tokens = _count(usage.get("completion_tokens"), self.generated_tokens)
        self.cached_tokens = _count(cached, self.cached_tokens)

    def _finished(self) -> None:
        status = self.response.status
        if status != 200:
            self.fail(f"HTTP {status}", _message(_parsed(self._body)) or "no message")
        elif not self._is_stream():
            kind = self.response.headers.get("content-type", "no content type")
            self.fail("no stream", f"the server answered with {kind}, not with text/event-stream")
        elif not (self._is_over or self.finish_reason):
            came = f"{len(self.chunks_ns)} chunks with text"
            self.fail(
                "cut off", f"the stream ended without [DONE] or a finish_reason, after {came}"
            )
        elif not self.chunks_ns:
            self.fail("empty", "the answer has no text, so there is no first token to time")


def _object(event: str) -> dict[str, Any]:
    try:
        chunk = json.loads(event)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"an event is not JSON: {event[:60]!r}") from error
    if not isinstance(chunk, dict):
        raise FormatError(f"an event is not a JSON object: {event[:60]!r}")
    return chunk


def _count(value: object, before: int | None) -> int | None:
    """Return the token count, or `before` if there is none. FormatError if it is not a count."""
    if value is None:
        return before
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MANY_TOKENS:
        raise FormatError(f"`usage` has a token count of {value!r:.60}")
    return value


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta", choice)
    return isinstance(delta, dict) and any(delta.get(name) for name in _TEXTS)


def _parsed(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        text = body.decode("utf-8", "replace")
        return "a page of HTML" if text.lstrip().startswith("<") else text


def _message(error: object) -> str:
    """Return the message in an error, in any of the forms that servers use."""
    names = ("error", "message", "detail")
    while isinstance(error, dict) and (name := next(filter(error.get, names), None)):
        error = error[name]
    try:
        return error if isinstance(error, str) else json.dumps(error)
    except RecursionError:
        return "an error without a message"
