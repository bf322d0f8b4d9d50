"""Latency, goodput and joules of requests, from spans whose figures are worked out by hand."""

from __future__ import annotations

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
    assert reason(run, "latency.tpot_median_s") == "1 of 4 steps have no tokens real"
    assert reason(run, "throughput.output_tokens_per_s") == "1 of 4 steps have no tokens real"
    assert reading(run, "latency.ttft_median_s").value == pytest.approx(1.0)


def test_spans_that_are_no_requests_are_not_paired(tmp_path: Path) -> None:
    # By hand: one prefill, then a span for each token. Their numbers mean nothing together.
    steps = [Step(0, S, 0, phase="prefill", tokens_real=9)]
    steps += [Step((n + 1) * S, (n + 2) * S, n, phase="decode", tokens_real=1) for n in range(5)]
    run = run_of(tmp_path / "run", steps=steps)
    assert "1 prefill and 5 decode spans do not pair off" in reason(run, "latency.tpot_median_s")
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


def test_goodput_without_limits_is_absent(tmp_path: Path) -> None:
    assert "--slo" in reason(run_of(tmp_path / "run", steps=THREE), "throughput.goodput_per_s")


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


def test_a_training_run_has_no_requests(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=[Step(0, S, 0, tokens_computed=9)])
    for key in ("latency.ttft_median_s", "throughput.requests_per_s", "latency.e2e_p95_s"):
        assert reason(run, key)
