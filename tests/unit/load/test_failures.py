"""`erg load` against a server that fails, held against that server's own log."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import failing_server
from tests.scripted_server import HEAD, HangUpError, Script, chunked, event, plain, serving

pytestmark = pytest.mark.soak

Erg = Callable[..., tuple[int, str, str]]
REQUESTS = 20
TIMEOUT_S = 0.9
LIMIT_S = 0.3  # between an answer and a slow one
PACES = {"1 at a time": ("--concurrency", 1), "4 at a time": ("--concurrency", 4),
         "20/s": ("--rate", 20)}  # fmt: skip
FAILURES = ("silence", "stall", "error", "refuse")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def plan_of(share: float) -> list[str]:
    """Failures of each kind in turn, spread over the requests; of the others every sixth slow."""
    plan = ["answer"] * REQUESTS
    wanted = round(share * REQUESTS)
    for n in range(wanted):
        plan[n * REQUESTS // wanted] = FAILURES[n % len(FAILURES)]
    answers = [n for n, kind in enumerate(plan) if kind == "answer"]
    for n in answers[::6]:
        plan[n] = "slow"
    return plan


@contextmanager
def failing(plan: list[str], log: Path) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, failing_server.__file__, str(log), json.dumps(plan)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.communicate()


def loaded(erg: Erg, url: str, *more: object, code: int) -> dict[str, Any]:
    """The JSON of `erg load` with a prompt for each request."""
    lines = [json.dumps({"prompt": f"request {n}"}) for n in range(REQUESTS)]
    Path("prompts.jsonl").write_text("\n".join(lines))
    found, out, err = erg("load", url, "--model", "m", "--prompts", "prompts.jsonl", "--warmup", 0,
                          "--timeout", TIMEOUT_S, *more, "--no-energy", "--json")  # fmt: skip
    assert found == code, err
    whole: dict[str, Any] = json.loads(out)
    return whole


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_rates_and_goodput_are_those_of_the_servers_own_log(
    erg: Erg, tmp_path: Path, share: float, pace: str
) -> None:
    log = tmp_path / "server.jsonl"
    with failing(plan_of(share), log) as url:
        whole = loaded(erg, url, *PACES[pace], "--requests", REQUESTS, "--slo", f"e2e={LIMIT_S}",
                       code=1 if share else 0)  # fmt: skip
        while len(theirs := json_lines(log)) < REQUESTS:
            time.sleep(0.01)  # its last line may come after the client's end
    (level,) = whole["levels"]

    kinds = Counter(line["kind"] for line in theirs)
    answered = [line for line in theirs if line["kind"] in ("answer", "slow")]
    failed = REQUESTS - len(answered)
    assert failed == round(share * REQUESTS)
    assert (level["offered"], level["answered"], level["failed"]) == (
        REQUESTS, len(answered), failed)  # fmt: skip
    ours = Counter(entry["kind"] for entry in level["failures"] for _ in range(entry["count"]))
    assert ours["timeout"] == kinds["silence"] + kinds["stall"]
    assert ours["HTTP 500"] == kinds["error"]
    assert ours["connection lost"] + ours["no answer"] == kinds["refuse"]

    # Both clocks are the machine's monotonic one; the two processes look at it at different times.
    own = {line["number"]: line for line in json_lines(Path(level["run"], "requests.jsonl"))}
    apart_s = [
        abs(line[theirs_at] - own[line["number"]][ours_at]) / 1e9
        for line in theirs
        for theirs_at, ours_at in (("received_ns", "due_ns"), ("settled_ns", "end_ns"))
    ]
    first_ns = min(line["received_ns"] for line in theirs)
    last_ns = max(line["settled_ns"] for line in theirs)
    window_s = (last_ns - first_ns) / 1e9
    resolution = 2 * max(apart_s) / window_s
    assert resolution < 0.3

    def ours_of(key: str) -> float:
        value: float = level["readings"][key]["value"]
        return value

    def equal(key: str, expected: float) -> None:
        assert ours_of(key) == pytest.approx(expected, rel=resolution), key

    good = sum(line["settled_ns"] - line["received_ns"] < LIMIT_S * 1e9 for line in answered)
    assert good == kinds["answer"]
    equal("time.window_s", window_s)
    equal("throughput.requests_per_s", len(answered) / window_s)
    equal("throughput.failed_requests_per_s", failed / window_s)
    equal("throughput.goodput_per_s", good / window_s)
    equal("throughput.output_tokens_per_s", len(answered) * failing_server.TOKENS / window_s)
    busy_s = sum(line["settled_ns"] - line["received_ns"] for line in theirs) / 1e9
    assert ours_of("requests.in_flight_mean") == pytest.approx(
        busy_s / window_s, rel=resolution + sum(apart_s) / busy_s
    )
    offering_s = (max(line["received_ns"] for line in theirs) - first_ns) / 1e9
    assert ours_of("throughput.offered_requests_per_s") == pytest.approx(
        (REQUESTS - 1) / offering_s, rel=2 * max(apart_s) / offering_s
    )
    assert ours_of("requests.slo_attainment_frac") == pytest.approx(good / REQUESTS)
    assert ours_of("requests.failed_frac") == pytest.approx(share)
    # Of 20 requests the median is the 10.5th: of 14 answers it is one, of 8 it is not.
    assert ("missing" in level["readings"]["latency.e2e_median_s"]) is (share == 0.6)


@pytest.mark.parametrize("pace", ["1 at a time", "20/s"])
def test_a_server_that_dies_is_refused_connections_in_the_window(
    erg: Erg, tmp_path: Path, pace: str
) -> None:
    plan = ["answer"] * 5 + ["die"] * (REQUESTS - 5)
    with failing(plan, tmp_path / "log") as url:
        whole = loaded(erg, url, *PACES[pace], "--requests", REQUESTS, code=1)
    (level,) = whole["levels"]
    assert (level["answered"], level["failed"]) == (5, REQUESTS - 5)
    kinds = {entry["kind"] for entry in level["failures"]}
    assert "no connection" in kinds
    lines = json_lines(Path(level["run"], "requests.jsonl"))
    assert all(line["end_ns"] >= line["due_ns"] for line in lines)  # none fails before it is due
    first_ns = min(line["due_ns"] for line in lines)
    window_s = (max(line["end_ns"] for line in lines) - first_ns) / 1e9
    rate = level["readings"]["throughput.requests_per_s"]
    assert rate["value"] == pytest.approx(5 / window_s)
    last_answer_s = (max(x["end_ns"] for x in lines if "failure" not in x) - first_ns) / 1e9
    assert window_s > last_answer_s


def failing_every(every: int, failure: Callable[[Callable[[bytes], None]], None]) -> Any:
    """A script under which, after the client's three trials, every n-th request fails."""
    good = Script(ttft_s=0.0, tpot_s=0.001)

    def script(number: int, body: dict[str, Any], send: Callable[[bytes], None]) -> None:
        if number >= 3 and (number - 2) % every == 0:
            failure(send)
        else:
            good(number, body, send)

    return script


def short(erg: Erg, url: str, *more: object) -> tuple[int, str, str]:
    return erg("load", url, "--model", "m", "--warmup", 0, "--output-tokens", 5, "--no-energy",
               *more)  # fmt: skip


def streamed(payload: object) -> Callable[[Callable[[bytes], None]], None]:
    return lambda send: send(HEAD + chunked(event(payload)) + chunked(b""))


def cut_short(send: Callable[[bytes], None]) -> None:
    whole = event({"choices": [{"delta": {"content": "word"}}]})
    send(HEAD + chunked(whole) + chunked(whole[: len(whole) // 2]))
    raise HangUpError


@pytest.mark.parametrize(
    ("failure", "kind", "example"),
    [
        (streamed({"choices": ["x"]}), "malformed answer", "a choice is not a JSON object"),
        (streamed({"choices": {"delta": "x"}}), "malformed answer", "`choices` is not a list"),
        (streamed([{"choices": []}]), "malformed answer", "an event is not a JSON object"),
        (streamed('{"choices": ['), "malformed answer", "an event is not JSON"),
        (
            streamed({"choices": [], "usage": ["5"]}),
            "malformed answer",
            "`usage` is not a JSON object",
        ),
        (streamed({"choices": [{"delta": ["x"]}]}), "cut off", "without [DONE]"),
        (cut_short, "cut off", "the stream ended after 1 chunks"),
    ],
)
def test_an_answer_of_the_wrong_shape_is_a_reason_and_no_traceback(
    erg: Erg, caplog: pytest.LogCaptureFixture, failure: Any, kind: str, example: str
) -> None:
    with serving(failing_every(3, failure)) as server:
        code, out, err = short(erg, server.url, "--requests", 6, "--json")
    assert code == 1
    assert err == (
        "erg: 1 at a time: 2 of 6 requests failed (33.3 %), more than --max-error-rate 5%\n"
    )
    assert not caplog.records  # asyncio reports what a protocol raises there
    (level,) = json.loads(out)["levels"]
    (entry,) = level["failures"]
    assert (entry["kind"], entry["count"]) == (kind, 2)
    assert example in entry["example"]
    assert level["answered"] == 4


@pytest.mark.parametrize(
    ("limit", "code"), [(None, 1), ("10%", 0), ("0.1", 0), ("5%", 1), ("0%", 1), ("100%", 0)]
)
def test_the_exit_code_is_1_above_the_error_rate(erg: Erg, limit: str | None, code: int) -> None:
    """One of 12 fails: 8.3 %."""
    refused = failing_every(10, lambda send: send(plain("500 Oops", "oops")))
    more = () if limit is None else ("--max-error-rate", limit)
    with serving(refused) as server:
        found, out, err = short(erg, server.url, "--requests", 12, *more)
    assert found == code
    assert "1 x HTTP 500: oops" in out
    assert ("1 of 12 requests failed (8.33 %)" in err) is (code == 1)


@pytest.mark.parametrize("limit", ["5", "-1%", "much", "101%"])
def test_an_error_rate_that_is_no_share_is_a_mistake_of_use(erg: Erg, limit: str) -> None:
    code, _, err = erg("load", "http://h", "--model", "m", "--max-error-rate", limit)
    assert code == 2
    assert "--max-error-rate takes" in err


def test_a_server_that_wants_max_completion_tokens_gets_it(erg: Erg) -> None:
    """As OpenAI's reasoning models do, which know no ignore_eos either."""
    good = Script()

    def strict(number: int, body: dict[str, Any], send: Callable[[bytes], None]) -> None:
        if "max_tokens" in body:
            send(plain("400 Bad Request", '{"error": {"message": "Use max_completion_tokens"}}'))
        elif "ignore_eos" in body:
            send(plain("400 Bad Request", '{"error": {"message": "Unrecognized: ignore_eos"}}'))
        else:
            good(number, body, send)

    with serving(strict) as server:
        code, out, err = short(erg, server.url, "--requests", 2, "--json")
        assert code == 0, err
        assert server.bodies[-1]["max_completion_tokens"] == 5
        assert "max_tokens" not in server.bodies[-1]
    whole = json.loads(out)
    assert whole["length_field"] == "max_completion_tokens"
    assert whole["options"] == {"stream_options": {"include_usage": True}}
    with serving(good) as server:
        body = '{"max_completion_tokens": 7}'
        code, _, err = short(erg, server.url, "--requests", 1, "--body", body)
        assert code == 0, err
        assert server.bodies[-1]["max_completion_tokens"] == 7
        assert "max_tokens" not in server.bodies[-1]
    with serving(good) as server:
        short(erg, server.url, "--requests", 1)
        assert server.bodies[-1]["max_tokens"] == 5
        assert "max_completion_tokens" not in server.bodies[-1]


def test_a_refusal_of_everything_is_told_in_the_words_for_the_usual_field(erg: Erg) -> None:
    def never(_number: int, body: dict[str, Any], send: Callable[[bytes], None]) -> None:
        send(plain("422 No", f"fields {'max_tokens' in body}"))

    with serving(never) as server:
        code, _, err = short(erg, server.url)
        assert len(server.bodies) == 8
    assert code == 1
    assert "HTTP 422 (fields True)" in err


def test_answers_without_usage_or_with_a_usage_of_nothing_are_remarked_on(erg: Erg) -> None:
    def sometimes(tokens: int | None) -> Any:
        def script(number: int, body: dict[str, Any], send: Callable[[bytes], None]) -> None:
            if number < 3 or number % 3:
                Script()(number, body, send)
                return
            word = event({"choices": [{"delta": {"content": "word "}}]})
            end: dict[str, Any] = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
            if tokens is not None:
                end["usage"] = {"prompt_tokens": 2, "completion_tokens": tokens}
            send(HEAD + chunked(word) + chunked(word) + chunked(event(end)) + chunked(b""))

        return script

    for tokens, remark in (
        (None, "no usage (token counts) with 4 of 12 answers"),
        (0, "usage of 0 tokens for visible text with 4 of 12 answers"),
    ):
        with serving(sometimes(tokens)) as server:
            code, out, err = short(erg, server.url, "--requests", 12, "--json")
        assert code == 0, err
        whole = json.loads(out)
        assert any(remark in one for one in whole["remarks"]), whole["remarks"]
        readings = whole["levels"][0]["readings"]
        for key in ("latency.tpot_median_s", "throughput.output_tokens_per_s"):
            assert readings[key]["missing"] == (
                "the server sent no token count (usage) above 0 for 4 of 12 answers"
            )
        assert "value" in readings["latency.ttft_median_s"]
        assert "value" in readings["latency.itl_median_s"]


def test_a_server_that_counts_nothing_for_its_text_has_its_chunks_counted(erg: Erg) -> None:
    def zero(number: int, body: dict[str, Any], send: Callable[[bytes], None]) -> None:
        word = chunked(event({"choices": [{"delta": {"content": "word "}}]}))
        end = {"choices": [{"delta": {}, "finish_reason": "stop"}],
               "usage": {"prompt_tokens": 2, "completion_tokens": 0}}  # fmt: skip
        send(HEAD + word * 3 + chunked(event(end)) + chunked(b""))

    with serving(zero) as server:
        code, out, err = short(erg, server.url, "--requests", 4, "--json")
    assert code == 0, err
    whole = json.loads(out)
    assert whole["tokens_from"] == "chunks"
    assert whole["levels"][0]["readings"]["requests.generated_tokens"]["value"] == 3
    assert any("usage of 0 tokens for visible text with 4 of 4" in one for one in whole["remarks"])


def test_the_table_shows_the_rate_that_was_really_offered(erg: Erg) -> None:
    with serving(Script(ttft_s=0.0, tpot_s=0.001)) as server:
        code, out, _ = short(erg, server.url, "--rate", 50, "--requests", 15, "--out", "run")
    assert code == 0
    lines = json_lines(Path("run", "requests.jsonl"))
    offering_s = (max(x["due_ns"] for x in lines) - min(x["due_ns"] for x in lines)) / 1e9
    (line,) = (line for line in out.splitlines() if line.startswith("50/s: offered "))
    assert float(line.split()[2]) == pytest.approx(14 / offering_s, rel=0.01)
    assert "(15 offered in" in line
