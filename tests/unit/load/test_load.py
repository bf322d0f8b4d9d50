"""`erg load` against a server whose times are known: real sockets, real runs."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from ergmeter.load.answer import Answer
from ergmeter.load.client import Connection
from ergmeter.runlog.reader import Run
from tests.ports import free_port
from tests.scripted_server import (
    HEAD,
    HangUpError,
    Script,
    chunked,
    event,
    plain,
    serving,
    text_chunk,
)  # fmt: skip

Erg = Callable[..., tuple[int, str, str]]
QUICK = ("--model", "m", "--prompt-tokens", 4, "--output-tokens", 5)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def loaded(erg: Erg, url: str, *more: object, code: int = 0) -> dict[str, Any]:
    """What `erg load --json` says."""
    found, out, err = erg("load", url, *QUICK, *more, "--json")
    assert found == code, err
    whole: dict[str, Any] = json.loads(out)
    return whole


def value(level: dict[str, Any], key: str) -> float:
    found: float = level["readings"][key]["value"]
    return found


def requests_of(level: dict[str, Any]) -> list[dict[str, Any]]:
    text = Path(level["run"], "requests.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@dataclass
class Witness(Script):
    """A script that notes when it was asked and when it began to send each token, on the client's
    clock: no token has come before that."""

    seen: list[list[float]] = field(default_factory=list)

    def __call__(self, number: int, body: dict[str, Any], send: Callable[[bytes], None]) -> None:
        times = [time.monotonic()]

        def noted(data: bytes) -> None:
            if b'"word ' in data:
                times.append(time.monotonic())
            send(data)

        super().__call__(number, body, noted)
        self.seen.append(times)


def test_latencies_are_those_of_the_servers_schedule(erg: Erg) -> None:
    script = Witness(ttft_s=0.1, tpot_s=0.02, tokens=12)
    with serving(script) as server:
        whole = loaded(erg, server.url, "--concurrency", 4, "--requests", 20, "--warmup", 0)
    (level,) = whole["levels"]
    assert level["answered"] == 20
    # No answer is quicker than the server's schedule, nor than the server saw it go. How much
    # slower is the machine's affair: up to five times is granted, and a wrong unit or the time of a
    # whole queue is more.
    ttft_s, whole_s = (value(level, f"latency.{name}_median_s") for name in ("ttft", "e2e"))
    counted = script.seen[-20:]
    assert 0.1 <= median(times[1] - times[0] for times in counted) <= ttft_s < 0.5
    sent_s = median(times[-1] - times[0] for times in counted)
    assert 0.1 + 11 * 0.02 <= sent_s <= whole_s < 5 * (0.1 + 11 * 0.02)
    # And of what the client noted it is exactly this.
    lines = requests_of(level)
    each_s = [[(line[at] - line["sent_ns"]) / 1e9 for at in ("first_ns", "last_ns")]
              for line in lines]  # fmt: skip
    assert ttft_s == pytest.approx(median(first for first, _ in each_s))
    assert whole_s == pytest.approx(median(last for _, last in each_s))
    gap_s = median((last - first) / 11 for first, last in each_s)
    assert value(level, "latency.tpot_median_s") == pytest.approx(gap_s)
    assert gap_s / 3 < value(level, "latency.itl_median_s") < 3 * gap_s


def test_tokens_are_the_servers_own_and_not_the_chunks(erg: Erg) -> None:
    with serving(Script(tokens=9, tokens_per_chunk=3, prompt_tokens=7)) as server:
        whole = loaded(erg, server.url, "--requests", 4, "--warmup", 0)
    (level,) = whole["levels"]
    assert whole["tokens_from"] == "usage"
    assert value(level, "requests.generated_tokens") == 9
    assert value(level, "requests.prompt_tokens") == 7
    per_s = value(level, "throughput.requests_per_s")
    assert value(level, "throughput.samples_per_s") == pytest.approx(per_s)
    assert value(level, "throughput.output_tokens_per_s") == pytest.approx(9 * per_s)
    assert value(level, "throughput.tokens_per_s") == pytest.approx((9 + 7) * per_s)
    assert "3 tokens a chunk" in level["readings"]["latency.itl_median_s"]["note"]
    # Three chunks of 3 tokens: 8 gaps, whatever they came in.
    took_s = [(line["last_ns"] - line["first_ns"]) / 1e9 for line in requests_of(level)]
    assert value(level, "latency.tpot_median_s") == pytest.approx(median(took_s) / 8)


def test_a_server_without_usage_has_its_chunks_counted_under_that_name(erg: Erg) -> None:
    with serving(Script(tokens=6, sends_usage=False)) as server:
        whole = loaded(erg, server.url, "--requests", 4)
    (level,) = whole["levels"]
    assert whole["tokens_from"] == "chunks"
    assert level["readings"]["throughput.output_tokens_per_s"]["basis"] == "assumed"
    assert "missing" in level["readings"]["throughput.generated_tokens_per_s"]
    assert any("no usage" in remark for remark in whole["remarks"])


def test_a_closed_loop_has_so_many_under_way_and_never_more(erg: Erg) -> None:
    with serving(Script(ttft_s=0.03)) as server:
        whole = loaded(erg, server.url, "--concurrency", "1,3,8", "--requests", 24, "--out", "runs")
        assert 3 < server.most_under_way <= 8  # less where a thread of the server's comes late
    assert [level["most_in_flight"] for level in whole["levels"]] == [1, 3, 8]
    assert [level["run"] for level in whole["levels"]] == ["runs/c1", "runs/c3", "runs/c8"]
    for level, at_once in zip(whole["levels"], (1, 3, 8), strict=True):
        assert value(level, "requests.count") == 24
        assert at_once / 2 < value(level, "requests.in_flight_mean") <= at_once


def one_at_a_time(work_s: float) -> Script:
    """A server that takes requests one after the other, whoever waits."""
    import threading

    lock = threading.Lock()

    class Queue(Script):
        def __call__(
            self, number: int, body: dict[str, Any], send: Callable[[bytes], None]
        ) -> None:
            with lock:
                super().__call__(number, body, send)

    return Queue(ttft_s=work_s, tpot_s=0.0, tokens=2)


def test_an_open_loop_counts_the_wait_that_a_closed_loop_leaves_out(erg: Erg) -> None:
    """50 ms of work each, asked for every 25 ms: the n-th waits for those before it."""
    with serving(one_at_a_time(0.05)) as server:
        closed = loaded(erg, server.url, "--requests", 20, "--warmup", 0)
        opened = loaded(erg, server.url, "--rate", 40, "--requests", 20, "--warmup", 0)
    closed_s = value(closed["levels"][0], "latency.e2e_median_s")
    open_s = value(opened["levels"][0], "latency.e2e_median_s")
    assert closed_s >= 0.05
    # Half way through, about 10 x (50 - 25) ms have piled up; arrivals are random, so roughly.
    assert open_s > 3 * closed_s
    assert "from the scheduled time of sending" in opened["levels"][0]["clock"]
    assert opened["levels"][0]["most_in_flight"] > 3


def test_an_open_loop_sends_on_schedule_however_many_are_under_way(erg: Erg) -> None:
    with serving(Script(ttft_s=0.5, tokens=1)) as server:
        whole = loaded(erg, server.url, "--rate", 60, "--duration", 0.5, "--warmup", 0)
        asked = len(server.bodies) - 3  # less the first requests, which are in no run
    (level,) = whole["levels"]
    lines = requests_of(level)
    assert len(lines) == asked == level["answered"]
    late_s = [(line["sent_ns"] - line["due_ns"]) / 1e9 for line in lines]
    assert min(late_s) > -0.001
    assert median(late_s) < 0.25  # who waits for an answer is late by 0.5 s
    assert level["most_in_flight"] > asked / 2  # nobody had been answered when most were sent


def fails(kinds: dict[int, Callable[[Callable[[bytes], None]], None]], *, calm: int = 3) -> Any:
    """A script under which, after the first requests, some fail by their number modulo 6."""
    good = Script()

    def script(number: int, body: dict[str, Any], send: Callable[[bytes], None]) -> None:
        kind = kinds.get((number - calm) % 6) if number >= calm else None
        if kind is None:
            good(number, body, send)
        else:
            kind(send)

    return script


def hang_up(send: Callable[[bytes], None]) -> None:
    send(HEAD + chunked(event(text_chunk("word "))))
    raise HangUpError


def garbage(send: Callable[[bytes], None]) -> None:
    send(HEAD + chunked(event("<html>")) + chunked(b""))


def stall(send: Callable[[bytes], None]) -> None:
    send(HEAD + chunked(event(text_chunk("word "))))
    time.sleep(3.0)
    raise HangUpError


def test_failures_are_counted_listed_and_left_out_of_the_figures(erg: Erg) -> None:
    kinds: dict[int, Callable[[Callable[[bytes], None]], None]] = {
        0: lambda send: send(plain("429 Too Many Requests", '{"error": {"message": "slow down"}}')),
        1: lambda send: send(plain("500 Internal Server Error", "oops")),
        2: hang_up,
        3: garbage,
        4: stall,
    }
    with serving(fails(kinds)) as server:
        more = ("--requests", 12, "--warmup", 0, "--timeout", 1)
        whole = loaded(erg, server.url, *more, code=1)
    (level,) = whole["levels"]
    assert level["answered"] == 2
    assert level["failed"] == 10
    found = {entry["kind"]: (entry["count"], entry["example"]) for entry in level["failures"]}
    assert found == {
        "HTTP 429": (2, "slow down"),
        "HTTP 500": (2, "oops"),
        "cut off": (2, "the stream ended after 1 chunks with text"),
        "malformed answer": (2, "an event is not JSON: '<html>'"),
        "timeout": (2, "nothing received for 1 s"),
    }
    assert value(level, "requests.failed") == 10
    assert value(level, "requests.count") == 2
    assert value(level, "requests.generated_tokens") == 5
    lines = requests_of(level)
    assert sum("failure" in line for line in lines) == 10
    _, out, _ = erg("report", level["run"], "--metric", "requests.failed")
    assert "10" in out
    assert "HTTP 429 (2)" in out


def test_a_level_without_an_answer_ends_with_1_and_one_line(erg: Erg) -> None:
    kinds = {n: lambda send: send(plain("503 Service Unavailable", "busy")) for n in range(6)}
    with serving(fails(kinds)) as server:
        code, _, err = erg("load", server.url, *QUICK, "--requests", 3, "--warmup", 0)
    assert code == 1
    assert err == "erg: 1 at a time: no request was answered: HTTP 503 (busy)\n"


def test_no_server_is_one_line_and_no_run(erg: Erg, tmp_path: Path) -> None:
    port = free_port()
    code, out, err = erg("load", f"http://127.0.0.1:{port}", *QUICK)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert f"no server at http://127.0.0.1:{port}/v1/chat/completions" in err
    assert not list(tmp_path.rglob("run.json"))


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        ("401 Unauthorized", "no key", "OPENAI_API_KEY"),
        ("404 Not Found", '{"error": {"message": "no model m"}}', "no model m); is 'm' what"),
        ("422 Unprocessable", '{"detail": "bad field"}', "HTTP 422 (bad field)"),
    ],
)
def test_a_server_that_refuses_the_first_request_is_told_with_the_cure(
    erg: Erg, tmp_path: Path, status: str, body: str, said: str
) -> None:
    with serving(lambda _n, _body, send: send(plain(status, body))) as server:
        code, out, err = erg("load", server.url, *QUICK)
    assert (code, out) == (1, "")
    assert said in err
    assert err.count("\n") == 1
    assert not list(tmp_path.rglob("run.json"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ftp://host",), "not a server's URL"),
        (("http://host:port",), "is not a URL"),
        (("http://h", "--concurrency", "2", "--rate", "1"), "give one"),
        (("http://h", "--requests", "2", "--duration", "1"), "give one"),
        (("http://h", "--concurrency", "two"), "numbers with commas"),
        (("http://h", "--concurrency", "0"), "above 0"),
        (("http://h", "--rate", "inf"), "above 0"),
        (("http://h", "--slo", "ttft"), "--slo takes"),
        (("http://h", "--slo", "p99=1"), "--slo takes limits of ttft, tpot, e2e"),
        (("http://h", "--header", "nocolon"), "'NAME: VALUE'"),
        (("http://h", "--body", "[1]"), "a JSON object"),
    ],
)
def test_a_mistake_of_use_ends_with_2_and_one_line(
    erg: Erg, arguments: tuple[object, ...], said: str
) -> None:
    code, out, err = erg("load", *arguments, "--model", "m")
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_options_that_a_server_refuses_are_taken_back_before_the_run(erg: Erg) -> None:
    """As `transformers serve` does with ignore_eos, and old servers with stream_options."""
    good = Script()

    def strict(number: int, body: dict[str, Any], send: Callable[[bytes], None]) -> None:
        if "ignore_eos" in body or "stream_options" in body:
            send(plain("422 Unprocessable", '{"detail": "Unexpected fields"}'))
        else:
            good(number, body, send)

    with serving(strict) as server:
        whole = loaded(erg, server.url, "--requests", 3)
        assert whole["options"] == {}
        assert whole["levels"][0]["failed"] == 0
    with serving(good) as server:
        whole = loaded(erg, server.url, "--requests", 3)
        assert server.bodies[-1]["stream_options"] == {"include_usage": True}
        assert server.bodies[-1]["ignore_eos"] is True
        assert server.bodies[-1]["max_tokens"] == 5


def test_prompts_are_made_as_long_as_asked_by_the_servers_own_count(erg: Erg) -> None:
    """A tokenizer that takes 3 tokens for 2 words, and a template that adds 7."""

    def counting(number: int, body: dict[str, Any], send: Callable[[bytes], None]) -> None:
        words = len(body["messages"][0]["content"].split())
        Script(prompt_tokens=7 + words * 3 // 2)(number, body, send)

    with serving(counting) as server:
        whole = loaded(erg, server.url, "--requests", 3, "--prompt-tokens", 200)
    assert value(whole["levels"][0], "requests.prompt_tokens") == pytest.approx(200, abs=2)


def test_completions_headers_and_keys_go_out_and_stay_out_of_the_run(
    erg: Erg, monkeypatch: pytest.MonkeyPatch
) -> None:
    def completions(number: int, body: dict[str, Any], send: Callable[[bytes], None]) -> None:
        chunk = {"choices": [{"text": " word", "finish_reason": None}]}
        send(HEAD + chunked(event(chunk)) + chunked(event(chunk)))
        Script().finish(send)

    monkeypatch.setenv("MY_KEY", "sk-12345")
    monkeypatch.setenv("TEAM", "blue-67890")
    more = ["--endpoint", "completions", "--api-key-env", "MY_KEY", "--header", "X-Team: $TEAM",
            "--header", "X-Plain: plain-abc", "--body", '{"temperature": 0}']  # fmt: skip
    with serving(completions) as server:
        arguments = ["load", server.url, *map(str, QUICK), *more, "--requests", "2", "--json"]
        monkeypatch.setattr(sys, "argv", ["erg", *arguments])
        code, out, err = erg(*arguments)
        assert code == 0, err
        assert server.headers[-1].startswith("POST /v1/completions HTTP/1.1\r\n")
        for line in ("Authorization: Bearer sk-12345", "X-Team: blue-67890", "X-Plain: plain-abc"):
            assert line in server.headers[-1]
        assert isinstance(server.bodies[-1]["prompt"], str)
        assert server.bodies[-1]["temperature"] == 0
    run = Path(json.loads(out)["levels"][0]["run"])
    kept = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    for secret in (b"sk-12345", b"blue-67890", b"plain-abc"):
        assert secret not in kept


def test_energy_is_read_only_where_the_server_is(erg: Erg) -> None:
    with serving(Script()) as server:
        here = loaded(erg, server.url, "--requests", 2)
        away = loaded(erg, server.url, "--requests", 2, "--no-energy")
    runs = [Run.open(Path(whole["levels"][0]["run"])) for whole in (here, away)]
    read_away = {device.probe for device in runs[1].devices.values()}
    assert "--no-energy" not in runs[0].unavailable.get("nvml", "")
    assert "--no-energy" in runs[1].unavailable["nvml"]
    assert not read_away & {"nvml", "rapl", "node"}
    missing = away["levels"][0]["readings"]["energy.joules_per_generated_token"]["missing"]
    assert "not read, --no-energy was given" in missing


def test_the_table_shows_each_level_its_failures_and_where_to_look(erg: Erg) -> None:
    kinds = {0: lambda send: send(plain("429 Too Many Requests", "slow down"))}
    more = (
        "--requests",
        12,
        "--warmup",
        0,
        "--slo",
        "ttft=5",
        "--concurrency",
        "1,2",
        "--out",
        "r",
    )
    with serving(fails(kinds)) as server:
        code, out, _ = erg("load", server.url, *QUICK, *more)
    assert code == 1  # 17 % failed
    assert "1 at a time" in out
    assert "2 x HTTP 429: slow down" in out
    assert re.search(r"1 at a time: failed [\d.]+ requests/s \(2 failed\)", out)
    assert "(10 of 12 requests offered within ttft 5 s)" in out
    assert "1 at a time: SLO attainment 83.3 %" in out
    assert out.endswith("erg report r/c1\nerg report r/c2\n")


def test_prompts_of_a_file_that_are_asked_twice_are_remarked_on(erg: Erg, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('"one"\n{"prompt": "two", "max_tokens": 3}\n')
    with serving(Script()) as server:
        whole = loaded(erg, server.url, "--prompts", file, "--requests", 4, "--warmup", 0)
        asked = [body["messages"][0]["content"] for body in server.bodies]
    assert asked == ["one", "one", "two", "one", "two"]  # the first is in no run
    assert any("2 prompts were sent more than once" in remark for remark in whole["remarks"])


def test_the_clients_own_cost_is_told(erg: Erg) -> None:
    with serving(Script()) as server:
        whole = loaded(erg, server.url, "--requests", 10, "--concurrency", 4)
    (level,) = whole["levels"]
    assert 0 < level["client_cpu_frac"] < 1
    assert value(level, "overhead.client_cpu_frac") == pytest.approx(
        level["client_cpu_frac"], rel=1e-3
    )


def test_a_connection_that_the_server_closed_ahead_of_time_is_a_failure_and_no_crash() -> None:
    answer = Answer(0, due_ns=1)
    asyncio.run(Connection().send(b"", answer, timeout_s=1))
    assert answer.failure == "connection lost"
    assert answer.due_ns == 1
