"""Latency, goodput and joules of requests, from spans whose figures are worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ergmeter.records import Mark, Reported, Sample, Step
from tests.runs import GPU, reading, reason, run_of

S = 10**9


def request(
    number: int, start: float, first: float, last: float, *, prompt: int | None, out: int | None,
    chunks: int = 1,
) -> list[Step]:  # fmt: skip
    at = [round(t * S) for t in (start, first, last)]
    return [
        Step(at[0], at[1], number, phase="prefill", tokens_real=prompt, samples=1),
        Step(at[1], at[2], number, phase="decode", tokens_real=out, samples=0, micro_steps=chunks),
    ]


# Two at a time: TTFT 1, 2, 1 s; decode 4, 5, 4 s of 5, 11, 3 tokens, so TPOT 1, 0.5, 2 s.
THREE = [
    *request(0, 0, 1, 5, prompt=10, out=5, chunks=5),
    *request(1, 0, 2, 7, prompt=20, out=11, chunks=6),
    *request(2, 5, 6, 10, prompt=30, out=3, chunks=3),
]


def test_ttft_tpot_and_end_to_end_of_three_requests(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=THREE)
    assert reading(run, "latency.ttft_median_s").value == pytest.approx(1.0)
    assert reading(run, "latency.tpot_median_s").value == pytest.approx(1.0)
    assert reading(run, "latency.e2e_median_s").value == pytest.approx(5.0)
    assert reading(run, "requests.prompt_tokens").value == pytest.approx(20)
    assert reading(run, "requests.generated_tokens").value == pytest.approx(19 / 3)
    assert "of 3 requests" in reading(run, "latency.ttft_median_s").note


def test_rates_are_over_the_window_of_all_requests_and_count_overlap_once(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=THREE)
    assert reading(run, "throughput.requests_per_s").value == pytest.approx(3 / 10)
    assert reading(run, "throughput.output_tokens_per_s").value == pytest.approx(19 / 10)
    assert reading(run, "throughput.tokens_per_s").value == pytest.approx((60 + 19) / 10)
    assert reading(run, "throughput.samples_per_s").value == pytest.approx(3 / 10)
    # Decoding went on from 1 to 7 and from 6 to 10: 9 s, not the 13 s of the three spans.
    assert reading(run, "throughput.generated_tokens_per_s").value == pytest.approx(19 / 9)
    # 5 + 7 + 5 s under way in 10 s.
    assert reading(run, "requests.in_flight_mean").value == pytest.approx(1.7)


def test_the_warm_ups_requests_are_left_out_of_everything(tmp_path: Path) -> None:
    slow = request(9, -60, -30, -1, prompt=1000, out=1000)
    steps = [
        Step(s.start_ns + 100 * S, s.end_ns + 100 * S, s.index, phase=s.phase,
             tokens_real=s.tokens_real, samples=s.samples, micro_steps=s.micro_steps)
        for s in (*slow, *THREE)
    ]  # fmt: skip
    marks = [Mark(round(99.5 * S), "warmup_end")]
    gaps = [Reported(90 * S, "itl", 29.0, "s"), Reported(103 * S, "itl", 0.5, "s")]
    run = run_of(tmp_path / "run", steps=steps, marks=marks, reported=gaps)
    assert reading(run, "requests.count").value == 3
    assert reading(run, "latency.e2e_median_s").value == pytest.approx(5.0)
    assert reading(run, "latency.itl_median_s").value == pytest.approx(0.5)


def many(count: int) -> list[Step]:
    """TTFT 1, 2, 3, ... ms, one after the other."""
    return [
        step
        for n in range(count)
        for step in request(n, n, n + (n + 1) / 1000, n + 0.5, prompt=1, out=2)
    ]


@pytest.mark.parametrize(
    ("requests", "p95", "p99"),
    [
        (19, "19 requests: a 95th percentile needs 20", "a 99th percentile needs 100"),
        (99, 0.0941, "99 requests: a 99th percentile needs 100"),
        (101, 0.096, 0.100),  # between neighbours: 95 and 99 of 100 gaps on from 1 ms
    ],
)
def test_a_percentile_needs_enough_requests(
    tmp_path: Path, requests: int, p95: float | str, p99: float | str
) -> None:
    run = run_of(tmp_path / "run", steps=many(requests))
    for key, expected in (("p95", p95), ("p99", p99)):
        if isinstance(expected, str):
            assert expected in reason(run, f"latency.ttft_{key}_s")
        else:
            assert reading(run, f"latency.ttft_{key}_s").value == pytest.approx(expected)
    assert reading(run, "latency.ttft_median_s").value == pytest.approx((requests + 1) / 2 / 1000)


def test_a_request_of_one_token_has_no_tpot_and_the_note_says_so(tmp_path: Path) -> None:
    steps = [*THREE, *request(3, 8, 10, 10, prompt=5, out=1)]
    found = reading(run_of(tmp_path / "run", steps=steps), "latency.tpot_median_s")
    assert found.value == pytest.approx(1.0)
    assert "of 3 requests, without 1 of a single token" in found.note
    alone = run_of(tmp_path / "alone", steps=request(0, 0, 1, 1, prompt=5, out=1))
    assert reason(alone, "latency.tpot_median_s") == "no request generated a second token"


def test_without_usage_chunks_stand_for_tokens_as_an_assumption(tmp_path: Path) -> None:
    steps = request(0, 0, 1, 5, prompt=None, out=None, chunks=5)
    marks = [Mark(0, "assumed", "the server sends no usage: a chunk with text stands for a token")]
    run = run_of(tmp_path / "run", steps=steps, marks=marks)
    for key, value in (("latency.tpot_median_s", 1.0), ("throughput.output_tokens_per_s", 1.0)):
        found = reading(run, key)
        assert found.value == pytest.approx(value)
        assert found.basis == "assumed"
        assert "a chunk with text stands for a token" in found.note
    # Nothing else takes them for tokens.
    assert "no token count" in reason(run, "throughput.generated_tokens_per_s")
    assert "no token count" in reason(run, "throughput.tokens_per_s")


def test_counts_of_some_requests_are_not_filled_up_with_chunks_of_others(tmp_path: Path) -> None:
    steps = [*THREE, *request(3, 8, 9, 10, prompt=5, out=None, chunks=4)]
    marks = [Mark(0, "assumed", "whatever")]
    run = run_of(tmp_path / "run", steps=steps, marks=marks)
    assert reason(run, "latency.tpot_median_s") == "1 of 4 answers have no token count"
    assert reason(run, "throughput.output_tokens_per_s") == "1 of 4 answers have no token count"
    assert reading(run, "latency.ttft_median_s").value == pytest.approx(1.0)


def test_spans_that_are_no_requests_are_not_paired(tmp_path: Path) -> None:
    # By hand: one prefill, then a span for each token. Their numbers mean nothing together.
    steps = [Step(0, S, 0, phase="prefill", tokens_real=9)]
    steps += [Step((n + 1) * S, (n + 2) * S, n, phase="decode", tokens_real=1) for n in range(5)]
    run = run_of(tmp_path / "run", steps=steps)
    assert "1 prefill and 5 decode spans are not pairs" in reason(run, "latency.tpot_median_s")
    assert reading(run, "latency.ttft_median_s").value == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ("ttft=1", 2),
        ("tpot=1", 2),
        ("ttft=1,tpot=1", 1),
        ("e2e=4.9", 0),
        ("ttft=9,tpot=9,e2e=9", 3),
    ],
)
def test_goodput_counts_the_requests_within_every_limit(
    tmp_path: Path, limits: str, good: int
) -> None:
    run = run_of(tmp_path / "run", steps=THREE, marks=[Mark(0, "slo", limits)])
    found = reading(run, "throughput.goodput_per_s")
    assert found.value == pytest.approx(good / 10)
    assert f"{good} of 3 requests" in found.note


def watched(path: Path, **more: Any) -> Any:
    """100 W all along, by the driver's counter."""
    samples = [Sample(t * S, GPU.id, power_w=100.0, energy_j=100.0 * t) for t in range(-2, 13)]
    samples = [s for s in samples if s.t_ns >= 0]
    return run_of(path, steps=THREE, samples=samples, devices=[GPU], **more)


def test_joules_are_all_of_the_windows_over_what_was_generated_in_it(tmp_path: Path) -> None:
    run = watched(tmp_path / "run")
    whole = reading(run, "energy.run_j").value
    assert whole == pytest.approx(1000, rel=0.02)
    assert reading(run, "energy.joules_per_generated_token").value == pytest.approx(whole / 19)
    assert reading(run, "energy.joules_per_request").value == pytest.approx(whole / 3)


def test_failed_requests_are_counted_with_their_reasons(tmp_path: Path) -> None:
    marks = [Mark(0, "requests_failed", "3: HTTP 429 (2), timeout (1)")]
    found = reading(run_of(tmp_path / "run", steps=THREE, marks=marks), "requests.failed")
    assert (found.value, found.note) == (3, "HTTP 429 (2), timeout (1)")


# -- failures -------------------------------------------------------------------------------------

LOAD = [Mark(0, "server", "m at http://h"), Mark(0, "slo", "ttft=1"),
        Mark(0, "load_client", "cpu_frac=0.1,lag_p99_s=0.001")]  # fmt: skip


def settled(kind: str, start: float, end: float) -> Reported:
    return Reported(round(end * S), f"request_{kind}", end - start, "s")


ANSWERED = [settled("answered", *times) for times in ((0, 5), (0, 7), (5, 10))]  # THREE's


def test_twenty_answers_and_ten_time_outs_are_over_the_time_of_all_thirty(tmp_path: Path) -> None:
    """Two at a time: 20 answers in 0.434 s, then 10 time-outs of 2 s. It was 46.1 a second."""
    each_s = 0.434 / 10
    steps, rows = [], []
    for n in range(20):
        start = n // 2 * each_s
        steps += request(n, start, start + 0.01, start + each_s, prompt=5, out=5)
        rows.append(settled("answered", start, start + each_s))
    pause_s = (10.85 - 0.434 - 5 * 2) / 4
    for n in range(10):
        start = 0.434 + n // 2 * (2 + pause_s)
        rows.append(settled("failed: timeout", start, start + 2))
    run = run_of(tmp_path / "run", steps=steps, reported=rows, marks=LOAD)
    assert reading(run, "time.window_s").value == pytest.approx(10.85)
    assert reading(run, "throughput.requests_per_s").value == pytest.approx(20 / 10.85)
    assert reading(run, "throughput.failed_requests_per_s").value == pytest.approx(10 / 10.85)
    assert reading(run, "throughput.goodput_per_s").value == pytest.approx(20 / 10.85)
    assert reading(run, "throughput.goodput_per_s").note.startswith("20 of 30 requests offered")
    assert reading(run, "requests.slo_attainment_frac").value == pytest.approx(2 / 3)
    assert reading(run, "throughput.output_tokens_per_s").value == pytest.approx(100 / 10.85)
    assert reading(run, "throughput.tokens_per_s").value == pytest.approx(200 / 10.85)
    assert reading(run, "requests.failed_frac").value == pytest.approx(1 / 3)
    assert reading(run, "requests.failed").note == "timeout (10)"
    assert reading(run, "requests.drain_s").value == pytest.approx(2)
    # 20 x 0.0434 s and 10 x 2 s under way.
    in_flight = reading(run, "requests.in_flight_mean").value
    assert in_flight == pytest.approx((20 * each_s + 20) / 10.85)
    # The answered ones were all alike, so the interval must still hold the whole window's rate.
    tokens = reading(run, "throughput.tokens_per_s")
    assert tokens.low is None or tokens.low <= tokens.value <= (tokens.high or 0)
    # Were the failed ones the slowest: the median is the 15.5th of 30, the 95th the 28.55th.
    assert reading(run, "latency.ttft_median_s").value == pytest.approx(0.01)
    assert "20 answered, 10 failed), 33.3 %" in reading(run, "latency.ttft_median_s").note
    for kind in ("ttft", "tpot", "e2e"):
        why = reason(run, f"latency.{kind}_p95_s")
        assert why == (
            "10 of 30 requests have no latency (20 answered, 10 failed): if they were the slowest,"
            " the 95th percentile would fall among them"
        )


@pytest.mark.parametrize(
    ("failed", "highest"),
    [
        # Of 21 answers of 1 to 21 ms the median is 11 ms; with failures it is the (20 + n) / 2-th.
        (0, None),
        (4, "13 ms"),
        (20, "21 ms"),  # the 21st of 41: the last that was answered
        (21, "withheld"),
    ],
)
def test_a_percentile_is_withheld_where_failures_could_move_it_beyond_the_answers(
    tmp_path: Path, failed: int, highest: str | None
) -> None:
    rows = [settled("answered", n, n + 0.5) for n in range(21)]
    rows += [settled("failed: HTTP 500", n + 0.6, n + 0.7) for n in range(failed)]
    run = run_of(tmp_path / "run", steps=many(21), reported=rows, marks=LOAD)
    if highest == "withheld":
        assert "the median would fall among them" in reason(run, "latency.ttft_median_s")
        return
    found = reading(run, "latency.ttft_median_s")
    assert found.value == pytest.approx(0.011)
    assert found.note.endswith("to the first token") is (highest is None)
    assert highest is None or f"were they the slowest, it would be {highest}" in found.note


def test_gaps_of_failed_requests_count_as_many_as_an_answer_has(tmp_path: Path) -> None:
    """Two answers of 10 gaps each, 1 to 20 ms; two failed ones would have 20 more, the slowest."""
    steps = [*request(0, 0, 1, 5, prompt=1, out=11, chunks=11),
             *request(1, 5, 6, 10, prompt=1, out=11, chunks=11)]  # fmt: skip
    gaps = [Reported(round((1 + n / 10) * S), "itl", (n + 1) / 1e3, "s") for n in range(20)]
    answers = [settled("answered", 0, 5), settled("answered", 5, 10)]
    one = [settled("failed: timeout", 0, 9)]
    run = run_of(tmp_path / "one", steps=steps, reported=[*gaps, *answers, *one], marks=LOAD)
    found = reading(run, "latency.itl_median_s")
    assert found.value == pytest.approx(0.0105)
    assert "were they the slowest, it would be 15.5 ms" in found.note  # the 15.5th of 30
    run = run_of(tmp_path / "two", steps=steps, reported=[*gaps, *answers, *one, *one], marks=LOAD)
    assert "would fall among them" in reason(run, "latency.itl_median_s")  # the 20.5th of 40


def test_a_load_of_which_every_request_failed_has_rates_of_zero(tmp_path: Path) -> None:
    rows = [settled("failed: HTTP 503", n, n + 0.5) for n in range(4)]
    run = run_of(tmp_path / "run", reported=rows, marks=LOAD)
    rate = reading(run, "throughput.requests_per_s")
    assert (rate.value, rate.basis) == (0, "measured")
    assert reading(run, "throughput.failed_requests_per_s").value == pytest.approx(4 / 3.5)
    assert reading(run, "throughput.goodput_per_s").value == 0
    assert reading(run, "requests.slo_attainment_frac").value == 0
    assert reading(run, "throughput.offered_requests_per_s").value == pytest.approx(1)
    for key in ("latency.ttft_median_s", "throughput.tokens_per_s", "latency.tpot_p95_s"):
        assert reason(run, key) == "no request was answered"


def test_requests_in_flight_at_the_end_are_offered_and_not_settled(tmp_path: Path) -> None:
    rows = [*ANSWERED, settled("unsettled", 9, 14), settled("unsettled", 11, 14)]
    run = run_of(tmp_path / "run", steps=THREE, reported=rows, marks=LOAD)
    assert reading(run, "requests.offered").value == 5
    assert reading(run, "requests.offered").note == "3 answered, 0 failed, 2 in flight at the end"
    assert reading(run, "requests.failed").value == 0
    # The window ends with the last one settled.
    assert reading(run, "throughput.requests_per_s").value == pytest.approx(3 / 10)
    assert reading(run, "requests.slo_attainment_frac").value == pytest.approx(2 / 5)
    assert "2 requests in flight when the load was interrupted" in reason(run, "requests.drain_s")
    # 5 + 7 + 5 s, and 1 s of the fourth that lies in the window.
    assert reading(run, "requests.in_flight_mean").value == pytest.approx(1.8)


def test_a_load_that_was_cut_off_does_not_say_how_many_were_in_flight(tmp_path: Path) -> None:
    rows = [*ANSWERED, settled("failed: timeout", 2, 12)]
    run = run_of(tmp_path / "run", steps=THREE, reported=rows, marks=LOAD[:2], closed=False)
    assert reading(run, "throughput.requests_per_s").value == pytest.approx(3 / 12)
    assert reading(run, "requests.failed").note == "timeout (1)"
    assert "requests in flight are recorded when a load ends" in reason(
        run, "requests.slo_attainment_frac"
    )


def test_failures_of_the_warm_up_are_left_out(tmp_path: Path) -> None:
    early = [settled("failed: HTTP 500", -3, -2.5), settled("failed: HTTP 500", -2, -1)]
    rows = [replace(one, t_ns=one.t_ns + 100 * S)
            for one in (*early, *ANSWERED, settled("failed: timeout", 1, 12))]  # fmt: skip
    steps = [replace(s, start_ns=s.start_ns + 100 * S, end_ns=s.end_ns + 100 * S) for s in THREE]
    marks = [*LOAD, Mark(round(99.5 * S), "warmup_end")]
    run = run_of(tmp_path / "run", steps=steps, reported=rows, marks=marks)
    assert reading(run, "requests.failed").value == 1
    found = reading(run, "throughput.requests_per_s")
    assert found.value == pytest.approx(3 / 12)
    assert "4 requests offered (3 answered, 1 failed) in 12 s, after 2 requests" in found.note


def test_joules_of_failed_requests_are_carried_by_the_tokens_of_whole_answers(
    tmp_path: Path,
) -> None:
    rows = [*ANSWERED, settled("failed: timeout", 2, 12)]
    run = watched(tmp_path / "run", reported=rows, marks=LOAD)
    joules = reading(run, "energy.run_j").value
    assert joules == pytest.approx(1200, rel=0.02)  # 100 W for 12 s, not for 10
    found = reading(run, "energy.joules_per_generated_token")
    assert found.value == pytest.approx(joules / 19)
    assert "that of 1 without a whole answer included" in found.note


def test_an_older_run_with_failures_has_no_rates(tmp_path: Path) -> None:
    """It does not hold when they failed."""
    marks = [*LOAD, Mark(0, "requests_failed", "3: HTTP 429 (2), timeout (1)")]
    run = run_of(tmp_path / "run", steps=THREE, marks=marks)
    for key in ("throughput.requests_per_s", "throughput.goodput_per_s", "throughput.tokens_per_s"):
        assert "3 requests failed, and an older `erg load` did not record" in reason(run, key)
    none = [*LOAD, Mark(0, "requests_failed", "0")]
    calm = run_of(tmp_path / "calm", steps=THREE, marks=none)
    assert reading(calm, "throughput.requests_per_s").value == pytest.approx(3 / 10)


def test_usage_that_some_answers_lack_is_the_reason_and_no_training_step(tmp_path: Path) -> None:
    steps = [*THREE, *request(3, 8, 9, 10, prompt=None, out=None, chunks=4)]
    rows = [*ANSWERED, settled("answered", 8, 10)]
    run = run_of(tmp_path / "run", steps=steps, reported=rows, marks=LOAD)
    for key in ("latency.tpot_median_s", "throughput.output_tokens_per_s",
                "throughput.tokens_per_s", "energy.joules_per_generated_token"):  # fmt: skip
        assert reason(run, key).startswith(
            "the server sent no token count (usage) above 0 for 1 of 4 answers"
        )
    assert reading(run, "throughput.requests_per_s").value == pytest.approx(4 / 10)
    assert reading(run, "latency.e2e_median_s").value == pytest.approx(5)
