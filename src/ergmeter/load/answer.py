"""What did one request get, and when?

The trap: counting chunks and calling them tokens. A chunk of a stream may hold no token (the role),
one, or several (speculative decoding, a tokenizer that waits for a whole character). Tokens here
are the server's own `usage`; chunks are counted beside them, under their own name.

Times are of `time.monotonic_ns()`, taken when bytes come in. The first token is the first chunk
that has text in it (or reasoning, or a tool call); the last token is the last such chunk. What
follows it, `usage` and `[DONE]`, is not part of a latency; the request is settled when it is over.

A server may send anything. Whatever is not the JSON that the protocol asks for is a failure of its
own kind, `malformed answer`, and never an exception.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ergmeter.errors import FormatError
from ergmeter.load.wire import Events, Response
from ergmeter.units import NS_PER_S

MALFORMED = "malformed answer"
_ERROR_CHARACTERS = 200
_BODY_BYTES = 4000  # of an error's body
_MANY_TOKENS = 2**31  # of one answer: more is no count
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call", "text")


@dataclass
class Answer:
    """One request, from when it was offered to when it is settled: answered whole, or failed."""

    number: int
    due_ns: int = 0  # when the schedule wanted it sent; when it was sent, in a closed loop
    sent_ns: int = 0
    connect_s: float = 0.0  # 0 on a connection that was open already
    chunks_ns: list[int] = field(default_factory=list)  # of those with text
    end_ns: int = 0  # when it was settled; 0 until then
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str = ""
    failure: str = ""  # the kind: HTTP 429, timeout, ...; empty if all went well
    detail: str = ""
    response: Response = field(default_factory=Response)
    _events: Events = field(default_factory=Events)
    _body: bytes = b""
    _is_over: bool = False

    @property
    def offered_ns(self) -> int:
        """When the server was to get it; 0 if it was neither scheduled nor sent yet."""
        return self.due_ns or self.sent_ns

    @property
    def usage_tokens(self) -> int | None:
        """Tokens generated, by the server's count; None if it sent none, or 0 for visible text."""
        return None if self.generated_tokens == 0 and self.chunks_ns else self.generated_tokens

    @property
    def first_ns(self) -> int:
        """When the first token came."""
        return self.chunks_ns[0]

    @property
    def last_ns(self) -> int:
        """When the last token came."""
        return self.chunks_ns[-1]

    @property
    def gaps_s(self) -> list[float]:
        """From each chunk with text to the next."""
        return [(later - earlier) / NS_PER_S for earlier, later in pairwise(self.chunks_ns)]

    def received(self, data: bytes, t_ns: int) -> bool:
        """Take bytes that came in at this time. Whether the answer is complete or has failed."""
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
        """The server has closed the connection."""
        if self.failure:
            return
        if self.response.closed():
            self._finished()
        elif self.response.status:
            self.fail("cut off", f"the stream ended after {len(self.chunks_ns)} chunks with text")
        else:
            self.fail("no answer", "the server closed the connection without an answer")

    def fail(self, kind: str, detail: str) -> None:
        """Note the first thing that went wrong."""
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
            raise FormatError(f"choices that are no list: {event[:60]!r}")
        for choice in choices:
            if not isinstance(choice, dict):
                raise FormatError(f"a choice that is no object: {event[:60]!r}")
            if _has_text(choice):
                self.chunks_ns.append(t_ns)
            if choice.get("finish_reason"):
                self.finish_reason = str(choice["finish_reason"])

    def _usage(self, usage: Any) -> None:  # noqa: ANN401  whatever the server sent
        if usage is None:
            return
        if not isinstance(usage, dict):
            raise FormatError(f"a usage that is no object: {usage!r:.60}")
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        # Some servers send it with every chunk; the last is of the whole answer.
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
        raise FormatError(f"an event that is no JSON: {event[:60]!r}") from error
    if not isinstance(chunk, dict):
        raise FormatError(f"an event that is no object: {event[:60]!r}")
    return chunk


def _count(value: object, before: int | None) -> int | None:
    """A number of tokens; what was known before where there is none."""
    if value is None:
        return before
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MANY_TOKENS:
        raise FormatError(f"a usage that is no number of tokens: {value!r:.60}")
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
    """The message in an error, in any of the forms that servers give it."""
    names = ("error", "message", "detail")
    while isinstance(error, dict) and (name := next(filter(error.get, names), None)):
        error = error[name]
    try:
        return error if isinstance(error, str) else json.dumps(error)
    except RecursionError:
        return "an error without a message"
