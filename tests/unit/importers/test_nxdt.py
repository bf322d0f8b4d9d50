"""NXDT's bars, NeMo's lines and the plain lines of nki-llama's calculator."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.importers.nxdt import NxdtImporter
from ergmeter.records import Record
from tests.unit.importers import programs
from tests.unit.importers.captured import marks, reported, steps
from tests.unit.importers.programs import S, from_file, live, nxdt

NXDT = NxdtImporter()
# The four lines that the calculator's guide gives.
GUIDE = ("step_time: 1.234", "throughput: 150.5", "seq/s: 150.5", "loss: 2.345")


def figures(records: list[Record]) -> list[tuple[str, float, str]]:
    return [(r.name, r.value, r.unit) for r in reported(records)]


def test_the_lines_of_the_guide_are_one_step_with_exact_figures() -> None:
    records = from_file(NXDT, *GUIDE)
    (step,) = steps(records)
    assert (step.index, step.steps, step.loss) == (1, 1, 2.345)
    assert step.end_ns - step.start_ns == 1_234_000_000
    assert figures(records) == [
        ("step_time", 1.234, "s"),
        ("throughput", 150.5, "sequences/s"),
        ("seq/s", 150.5, "sequences/s"),
    ]


def test_a_name_that_comes_again_begins_the_next_step() -> None:
    lines = [
        *("loss: 2.5", "step_time: 2.0", "noise in between", "tokens/sec: 4000"),
        *("loss: 2.25", "step_time: 1.5", "samples/sec: 3", "train_loss: 2.25"),
        *("loss: -1.2e-05", "step_time: 1e-1", "tokens/sec: 1.1e+3"),
    ]
    records = from_file(NXDT, *lines)
    assert [(s.index, s.loss, s.window.duration_s) for s in steps(records)] == [
        (1, 2.5, 2.0),
        (2, 2.25, 1.5),
        (3, -1.2e-5, 0.1),
    ]
    rates = [f for f in figures(records) if f[2] != "s"]
    assert rates == [
        ("tokens/sec", 4000, "tokens/s"),
        ("samples/sec", 3, "samples/s"),
        ("tokens/sec", 1100, "tokens/s"),
    ]


@pytest.mark.parametrize("prefix", [
    "[2025-06-10 01:46:{0:02d}.123] ",
    "2025-06-10 01:46:{0:02d}.000003: 837617 [INFO] ",
    "06/10/2025 01:46:{0:02d} - INFO - root - ",
    "\x1b[32mINFO\x1b[0m | ",
])  # fmt: skip
def test_plain_lines_are_read_behind_what_a_logger_puts_before_them(prefix: str) -> None:
    lines = [prefix.format(i) + line for i in range(3) for line in GUIDE]
    found = steps(from_file(NXDT, *lines))
    # The step times count, and not the stamps: nothing says how many steps lie between two.
    assert [(s.index, s.loss, s.window.duration_s) for s in found] == [
        (i, 2.345, 1.234) for i in (1, 2, 3)
    ]


def test_plain_lines_without_a_step_time_are_timed_by_their_stamps_and_not_counted() -> None:
    stamp = "[2025-06-10 01:46:{0:02d}.000] "
    lines = [stamp.format(i * 10) + x for i in range(3) for x in ("loss: 2.5", "throughput: 3.5")]
    found = steps(from_file(NXDT, *lines))
    assert [(s.index, s.steps, s.window.duration_s) for s in found] == [(None, None, 10)] * 2


def test_a_throughput_with_another_unit_is_no_rate_of_sequences() -> None:
    records = from_file(NXDT, "step_time: 500 ms", "throughput: 9000 tokens/s", "loss: nan")
    assert figures(records) == [("step_time_ms", 500, "ms"), ("tokens/s", 9000, "tokens/s")]
    (step,) = steps(records)
    assert math.isnan(step.loss or 0)
    assert step.window.duration_s == 0.5


@pytest.mark.parametrize("text", [
    "Average throughput: 150.5", "final loss: 2.1", "Validation: loss: 2.1", "eval loss: 2.1",
    "throughput improved", "compiling step_time", "Loading weights: please wait",
])  # fmt: skip
def test_summaries_evaluations_and_prose_are_no_plain_lines(text: str) -> None:
    assert not NXDT.recognises([text])
    # Between the lines of two steps, they are of neither.
    (first, second) = steps(from_file(NXDT, *GUIDE, text, *GUIDE))
    assert (first.loss, second.loss, second.index) == (2.345, 2.345, 2)


def test_a_bar_gives_the_figures_of_the_tutorial_exactly() -> None:
    line = nxdt(1, 179)
    assert line.startswith("Epoch 0:   5%|▍         | 1/62 [02:59<58:44,  0.02it/s, v_num=8-06, ")
    assert "global_step=1.000, consumed_samples=32.00, throughput=0.108," in line
    records = from_file(NXDT, line, nxdt(2, 300))
    assert figures(records)[:2] == [
        ("throughput", 0.108, "sequences/s"),
        ("throughput_peak", 0.0677, ""),
    ]
    (step,) = steps(records)
    assert (step.loss, step.learning_rate, step.grad_norm) == (6.93, 2.73e-5, 8.6)
    assert (step.index, step.steps, step.samples) == (2, 1, 32)
    assert (step.start_ns, step.end_ns) == (179 * S, 300 * S)
    assert marks(records, "assumed")[-1].endswith("progress bar's own, in whole seconds")


fields = st.permutations(
    [
        ("reduced_train_loss", "loss"), ("lr", "learning_rate"), ("global_step", "step"),
        ("throughput", "rate"), ("gradient_norm", "grad_norm"), ("parameter_norm", ""),
        ("v_num", ""),
    ]
)  # fmt: skip
numbers = st.floats(allow_nan=False) | st.sampled_from([math.nan, math.inf, -math.inf, -0.81])


@given(fields, numbers, numbers, numbers, st.sampled_from("▏▎▍▌▋▊▉█ "))
def test_a_bar_is_read_whatever_the_order_of_its_figures(
    order: list[tuple[str, str]], loss: float, rate: float, norm: float, cell: str
) -> None:
    values = {"loss": loss, "learning_rate": rate, "grad_norm": norm, "rate": 2.5}

    def bar(step: int, second: int) -> str:
        said = ", ".join(f"{name}={values.get(key, step)!r}" for name, key in order)
        return f"Epoch 0:  5%|{cell}  | {step}/62 [00:{second:02d}<58:44,  0.02it/s, {said}]"

    (step,) = steps(from_file(NXDT, bar(1, 10), bar(2, 30)))
    got = (step.loss, step.learning_rate, step.grad_norm)
    assert got == pytest.approx((loss, rate, norm), rel=0, abs=0, nan_ok=True)
    assert (step.index, step.window.duration_s) == (2, 20)


def test_a_bar_drawn_many_times_is_one_step() -> None:
    lines = [nxdt(n, 100 + 20 * n + k) for n in range(1, 6) for k in range(4)]
    found = steps(from_file(NXDT, *lines))
    assert [(s.index, s.window.duration_s, s.samples) for s in found] == [
        (n, 20, 32) for n in range(2, 6)
    ]
    assert len(reported(from_file(NXDT, *lines))) == len(reported(from_file(NXDT, *lines[::4])))


def test_totals_that_are_printed_to_three_digits_give_way_to_what_a_step_held_before() -> None:
    lines = [nxdt(n, 10 * n, batch=2048) for n in range(46, 60)]
    assert "consumed_samples=98304.0" in lines[2]
    assert "consumed_samples=1.02e+5" in lines[4]
    records = from_file(NXDT, *lines)
    assert {s.samples for s in steps(records)} == {2048}
    assert "samples are steps times 2048, the samples" in " ".join(marks(records, "assumed"))


def test_the_time_of_a_bar_that_begins_again_with_each_epoch_goes_on() -> None:
    lines = [nxdt(n, 30 * n, epoch=0) for n in (1, 2, 3)]
    lines += [nxdt(n, 30 * (n - 3), epoch=1) for n in (4, 5)]
    found = steps(from_file(NXDT, *lines))
    assert [(s.index, s.window.duration_s) for s in found] == [(2, 30), (3, 30), (4, 30), (5, 30)]


def test_without_a_global_step_the_bar_counts_on_from_epoch_to_epoch() -> None:
    lines = [re.sub(r"global_step=[^,]+, ", "", nxdt(n, 9, epoch=1)) for n in (1, 2)]
    assert [s.index for s in steps(live(NXDT, (1, lines[0]), (2, lines[1])))] == [62 + 2]


def test_a_step_number_that_falls_back_begins_another_run() -> None:
    lines = [nxdt(n, 100 + 20 * n) for n in range(1, 5)]
    records = from_file(NXDT, *lines, *lines)
    assert marks(records, "restarted") == ["the step number went from 4 back to 1"]
    assert [s.index for s in steps(records)] == [2, 3, 4, 2, 3, 4]
    assert {s.window.duration_s for s in steps(records)} == {20}


def test_of_nemos_older_bars_the_reduced_loss_counts() -> None:
    bar = (
        "Epoch 0:   1%|          | {0}/77225 [9:07:{1}<878:01:48, 41.36s/it, loss=3.1, v_num=, "
        "reduced_train_loss=3.090, global_step={0}.0, consumed_samples=1.63e+6]"
    )
    records = from_file(NXDT, bar.format(794, 10), bar.format(795, 51))
    (step,) = steps(records)
    assert (step.index, step.loss, step.samples) == (795, 3.09, None)
    assert step.window.duration_s == 41


def test_live_a_bar_is_timed_by_its_arrival() -> None:
    records = live(NXDT, (1, nxdt(1, 10)), (1.5, nxdt(1, 11)), (3.25, nxdt(2, 12)))
    assert [(s.index, s.window.duration_s, s.samples) for s in steps(records)] == [(2, 2.25, 32)]


def test_a_loops_own_lines_after_a_plain_one_lose_nothing() -> None:
    """One stray line must not cost a loop its tokens, or make each epoch another run."""
    lines = ["throughput: 150.5"]
    lines += [
        f"[10:00:{e * 9 + n:02d}] epoch={e} step={n} loss=2.5 tokens_per_step=64 throughput=3.5"
        for e in (0, 1)
        for n in range(9)
    ]
    records = from_file(NXDT, *lines)
    assert NXDT.recognises(lines[:1])
    assert sum(s.tokens_computed or 0 for s in steps(records)) == 17 * 64
    assert marks(records, "restarted") == []
    assert {(r.value, r.unit) for r in reported(records) if r.name == "throughput"} == {
        (150.5, "sequences/s"),
        (3.5, "sequences/s"),
    }


NEMO = (
    "Training epoch 0, iteration {0}/149 | lr: 3e-05 | consumed_samples: {1} | global_batch_size: "
    "32 | global_step: {0} | reduced_train_loss: 1.233 | train_step_timing in s: 0.25 | "
    "val_loss: 4.106"
)


def test_nemos_lines_are_timed_by_the_step_times_they_print() -> None:
    records = from_file(NXDT, *[NEMO.format(n, 32 * (n + 1)) for n in range(120, 124)])
    found = steps(records)
    assert [(s.index, s.samples, s.loss, s.learning_rate) for s in found] == [
        (n, 32, 1.233, 3e-5) for n in (121, 122, 123)
    ]
    assert {s.window.duration_s for s in found} == {0.25}


def test_lines_of_nxdt_are_its_own_and_a_loops_are_not() -> None:
    for text in (nxdt(1, 10), NEMO.format(1, 1), *GUIDE[:3]):
        assert NXDT.recognises([text]), text
    for text in ("loss: 2.345", "step=1 loss=2 samples/sec: 3", programs.TITAN_STARTS):
        assert not NXDT.recognises([text]), text


def test_a_plain_throughput_is_not_said_to_be_a_mean_over_ten_steps() -> None:
    lines = [f"step_time: 1.0\nthroughput: 2.0\nloss: {n}" for n in range(3)]
    plain = from_file(NXDT, *"\n".join(lines).split("\n"))
    assert "throughput read as sequences/s" in marks(plain, "assumed")
    assert not any("ten steps" in said for said in marks(plain, "assumed"))
    bars = from_file(NXDT, nxdt(1, 100), nxdt(2, 120))
    assert any("a mean over ten steps" in said for said in marks(bars, "assumed"))


def test_a_plain_line_is_handed_on_before_the_step_of_a_loop_that_came_after_it() -> None:
    texts = ["step=0 loss=0 tokens=0", "throughput: 24", "epoch=0 step=0 total_tokens=0",
             "step=1 loss=0 tokens=0", "[rank0]: step=1 batch_tokens=9"]  # fmt: skip
    records = live(NXDT, *zip([0, 0, 0, 1, 1], texts, strict=True))
    assert [(s.start_ns, s.end_ns) for s in steps(records)] == [(0, S)]
