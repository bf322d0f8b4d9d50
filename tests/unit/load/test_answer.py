"""Bytes of a streamed answer, cut anywhere, are the same events."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ergmeter.errors import FormatError
from ergmeter.load.answer import Answer, Events, Response
from tests.scripted_server import HEAD, chunked, event, plain, text_chunk


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


# What the HTML standard says of each is written beside it.
STREAM = (
    b"\xef\xbb\xbf"  # a byte order mark at the very start is left out
    b": a comment\n"  # a line that begins with a colon is left out
    b"data: one\n\n"
    b"data:two\n\n"  # just one blank after the colon is left out, and there may be none
    b"data:  three\n\n"
    b"event: message\nid: 7\nretry: 10\ndata: four\n\n"
    b"data: five\ndata: and more\n\n"  # lines of one event are joined by a line feed
    b"\n\n"  # an event without data is none
    b": ping\n\n"
    b"data: caf\xc3\xa9\n\n"
    b"data\n\n"  # a field without a colon is an empty line of data
    b"data: [DONE]\n\n"
    b"data: never ended"
)
EVENTS = ["one", "two", " three", "four", "five\nand more", "café", "", "[DONE]"]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
@given(places=st.lists(st.integers(0, 1000), max_size=12))
def test_events_are_the_same_however_the_bytes_come(ending: bytes, places: list[int]) -> None:
    parser = Events()
    stream = STREAM.replace(b"\n", ending)
    found = [one for part in cut(stream, places) for one in parser.feed(part)]
    assert found == EVENTS


def test_an_event_is_given_as_soon_as_its_last_byte_is_there() -> None:
    parser = Events()
    assert parser.feed(b"data: a\r\n\r") == ["a"]  # the line feed may come with the next event
    assert parser.feed(b"\ndata: b\r\n\r\n") == ["b"]


BODY = b"data: one\n\ndata: two\n\n"
RESPONSES = {
    "chunked": HEAD + chunked(BODY[:5]) + chunked(BODY[5:]) + b"0\r\n\r\n",
    "chunk extensions and a trailer": HEAD
    + b"B;name=value\r\n" + BODY[:11] + b"\r\nb\r\n" + BODY[11:] + b"\r\n0\r\nX-Sum: 5\r\n\r\n",
    "a known length": b"HTTP/1.1 200 OK\r\ncontent-length: 22\r\n\r\n" + BODY,
    "an interim answer first": b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + chunked(BODY)
    + b"0\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("kind", RESPONSES)
@given(places=st.lists(st.integers(0, 1000), max_size=8))
def test_a_body_is_the_same_however_it_is_framed_and_cut(kind: str, places: list[int]) -> None:
    response = Response()
    parts = cut(RESPONSES[kind], places)
    assert b"".join(response.feed(part) for part in parts) == BODY
    assert response.status == 200
    assert response.is_done
    assert response.keeps_alive


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    response = Response()
    assert response.feed(b"HTTP/1.1 200 OK\r\n\r\n" + BODY) == BODY
    assert not response.is_done
    assert response.closed()
    assert not response.keeps_alive


def test_a_chunked_body_that_stops_in_the_middle_is_not_whole() -> None:
    response = Response()
    response.feed(HEAD + chunked(BODY))
    assert not response.closed()


@pytest.mark.parametrize(
    "garbage", [b"SSH-2.0-OpenSSH_9.6\r\n", b"\x16\x03\x01\x02\x00", b"HTTP/2 200\r\n\r\n"]
)
def test_what_is_no_http_is_refused_by_its_first_bytes(garbage: bytes) -> None:
    with pytest.raises(FormatError, match="not an HTTP answer: begins with"):
        Response().feed(garbage)


def test_a_length_of_a_chunk_that_is_no_number_is_refused() -> None:
    with pytest.raises(FormatError, match="not HTTP: Invalid character in chunk size"):
        Response().feed(HEAD + b"xyz\r\n")


def answered(*events: object, end: bytes = b"0\r\n\r\n") -> Answer:
    """An answer whose events came at 1, 2, 3, ... seconds."""
    answer = Answer(0)
    answer.received(HEAD, 0)
    for second, payload in enumerate(events, 1):
        answer.received(chunked(event(payload)), second * 10**9)
    if answer.received(end, 10**12):
        return answer
    answer.closed()
    return answer


STOP = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


def test_the_first_token_is_the_first_chunk_with_text_and_the_last_the_last() -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}
    answer = answered(
        role, text_chunk("a b"), text_chunk(" c"), text_chunk("d"), STOP, usage, "[DONE]"
    )
    assert not answer.failure
    assert answer.first_ns == 2 * 10**9
    assert answer.last_ns == 4 * 10**9
    assert answer.chunks_ns == [2 * 10**9, 3 * 10**9, 4 * 10**9]
    assert (answer.prompt_tokens, answer.generated_tokens) == (9, 4)  # not the 3 chunks


@pytest.mark.parametrize(
    "choice",
    [
        {"text": "word"},
        {"delta": {"reasoning_content": "hm"}},
        {"delta": {"tool_calls": [{"function": {"name": "f"}}]}},
    ],
)
def test_text_reasoning_and_tool_calls_are_tokens(choice: dict[str, object]) -> None:
    assert answered({"choices": [choice]}, "[DONE]").first_ns == 10**9


def test_usage_that_comes_with_every_chunk_counts_once() -> None:
    def so_far(tokens: int) -> dict[str, int]:
        return {"prompt_tokens": 5, "completion_tokens": tokens}

    chunks = [text_chunk("a", usage=so_far(1)), text_chunk("b", usage=so_far(2))]
    assert answered(*chunks, STOP, "[DONE]").generated_tokens == 2


@pytest.mark.parametrize(
    ("events", "end", "failure", "detail"),
    [
        ([text_chunk("a")], b"", "cut off", "the stream ended after 1 chunks"),
        ([text_chunk("a")], b"0\r\n\r\n", "cut off", r"without \[DONE\] or a finish_reason"),
        ([text_chunk("a"), "<html>"], b"", "malformed answer", "not JSON: '<html>'"),
        (["[1]"], b"", "malformed answer", "not a JSON object"),
        ([{"choices": ["x"]}], b"", "malformed answer", "a choice is not a JSON object"),
        ([{"choices": {"delta": {}}}], b"", "malformed answer", "`choices` is not a list"),
        ([{"usage": [5]}], b"", "malformed answer", r"`usage` is not a JSON object: \[5\]"),
        ([{"usage": {"completion_tokens": "5"}}], b"", "malformed answer", "token count of '5'"),
        ([{"usage": {"completion_tokens": -1}}], b"", "malformed answer", "token count of -1"),
        (["[" * 100_000], b"", "malformed answer", "not JSON"),
        ([{"error": {"message": "out of blocks"}}], b"", "error in the stream", "out of blocks"),
        ([STOP, "[DONE]"], b"0\r\n\r\n", "empty", "no first token"),
    ],
)
def test_half_an_answer_is_a_failure_with_its_reason(
    events: list[object], end: bytes, failure: str, detail: str
) -> None:
    answer = answered(*events, end=end)
    assert answer.failure == failure
    assert re.search(detail, answer.detail)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"error": {"message": "slow down", "code": 429}}', "slow down"),  # OpenAI, vLLM
        ('{"detail": "slow down"}', "slow down"),  # FastAPI
        ('{"object": "error", "message": "slow down"}', "slow down"),  # older vLLM
        ("slow\n down", "slow down"),
        ("<!DOCTYPE html><html>...", "a page of HTML"),  # a proxy
    ],
)
def test_a_refusal_is_told_in_the_servers_words(body: str, said: str) -> None:
    answer = Answer(0)
    assert answer.received(plain("429 Too Many Requests", body), 1)
    assert (answer.failure, answer.detail) == ("HTTP 429", said)


def test_an_answer_in_one_piece_is_no_stream() -> None:
    answer = Answer(0)
    answer.received(plain("200 OK", json.dumps({"choices": [{"message": {"content": "a"}}]})), 1)
    assert answer.failure == "no stream"
    assert "application/json" in answer.detail


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["choices", "delta", "content", "usage", "error", "message", "finish_reason",
             "completion_tokens", "prompt_tokens_details", "tool_calls"]
        ),
        inner,
        max_size=3,
    ),
)  # fmt: skip


@settings(max_examples=300)
@given(payload=JSON)
def test_no_json_breaks_the_client(payload: object) -> None:
    answer = answered(payload, "[DONE]")
    assert answer.failure or answer.chunks_ns
    refused = Answer(0)
    refused.received(plain("500 Oops", json.dumps(payload)), 1)
    assert refused.failure == "HTTP 500"


@pytest.mark.parametrize("length", ["\u00b2", "9" * 5000, "5, 6", "-1"])
def test_a_length_of_a_body_that_is_no_number_is_refused(length: str) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\nbody".encode("latin-1")
    with pytest.raises(FormatError, match=r"not an HTTP answer: .*Content-Length"):
        Response().feed(head)


def test_a_head_that_does_not_end_is_refused() -> None:
    with pytest.raises(FormatError, match="the header does not end"):
        Response().feed(b"HTTP/1.1 200 OK\r\n" + b"X-Header: value\r\n" * 5000)


@settings(max_examples=200)
@given(noise=st.binary(max_size=200), places=st.lists(st.integers(0, 200), max_size=5))
def test_no_bytes_break_the_client(noise: bytes, places: list[int]) -> None:
    answer = Answer(0)
    for part in cut(HEAD + noise, places):
        if answer.received(part, 1):
            break
    answer.closed()
    assert answer.failure
