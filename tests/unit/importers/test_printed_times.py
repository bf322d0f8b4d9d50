"""Step times and losses as programs print them: by a name, by a unit alone, first and last."""

from __future__ import annotations

import pytest

from ergmeter.importers.engine.pairs import is_step_line, pairs
from ergmeter.records import Reported
from tests.unit.importers.captured import marks, reported, steps
from tests.unit.importers.printed import S, from_file, live

# As these programs print them; figures are ours.
LITGPT = (
    "Epoch 1 | iter {} step {} | loss train: {:.3f}, val: n/a | iter time: 12.34 ms (step) "
    "remaining time: 0:00:12"
)
WORD_LM = (
    "| epoch {:3d} | {:5d}/ 2983 batches | lr 20.00 | ms/batch {:5.2f} | loss {:5.2f} | ppl 846.2"
)
LLM_C = "step {}: train loss {:f} (took {:f} ms)"
LLM_C_CUDA = (
    "step {:4d}/18865 | loss {:7.6f} (+nanz)| norm 15.1 (+nanz)| lr 2.57e-07 | {:.2f} ms | "
    "38.5% bf16 MFU | 1234 tok/s"
)
LLM_C_PY = "step {:4d}/50 | train loss {:.6f} | norm 1.2 | lr 3.00e-04 | ({:.2f} ms | 1234 tok/s)"


def own_s(text: str) -> float | None:
    times = [p.value * p.means.scale for p in pairs(text) if p.means.kind == "own_time"]
    assert len(times) <= 1, times
    return times[0] if times else None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (LLM_C.format(3, 4.2, 29.123), 0.029123),
        (LLM_C_CUDA.format(3, 4.2, 29.12), 0.02912),
        (LLM_C_PY.format(3, 4.2, 29.12), 0.02912),
        (LITGPT.format(4, 2, 6.032), 0.01234),
        (WORD_LM.format(1, 200, 12.34, 6.74), 0.01234),
        ("step 3 | loss: 4.2 | dt: 29.1ms | tok/sec: 1233", 0.0291),
        ("step 3 | loss: 4.2 | dt: 29.1 ms | tok/sec: 1233", 0.0291),
        ("iter 10: loss 3.1, time 45.2ms, mfu 3.1%", 0.0452),
        ("step=3 loss=2 iter_time=0.0291", 0.0291),
        ("step 3 loss 2.2 29.1 ms/step", 0.0291),
        ("step 3, loss 2.2, 0.291 s/it", 0.291),
        ("step 3 loss 2.2 time: 29.1 ms/step", 0.0291),
        ("step 3 loss 2.2 took 0.291 s", 0.291),
        ("step 3 loss 2.2 in 29.1ms", 0.0291),
        ("step 3 loss 2.2 (29.1 ms)", 0.0291),
        ("step 3 loss 2.2 duration=1.5s", 1.5),
        # What is no step's time.
        ("step 3 loss 2.2 saved in 3 s", None),
        ("step 3 loss 2.2 | sampling took 3 s", None),
        ("step 3 loss 2.2 data time: 3 ms", None),
        ("step 3 loss 2.2 remaining time: 12 s", None),
        ("step 3 loss 2.2 | fwd | 3 ms | 4 ms |", None),
        ("step 3 loss 2.2 s", None),
        (" 10%|█ | 3/10 [00:01<00:09, 4.9s/it, loss=2.1]", None),  # smoothed
    ],
)
def test_a_step_time_is_read_by_its_name_or_its_unit(text: str, seconds: float | None) -> None:
    assert own_s(text) == (None if seconds is None else pytest.approx(seconds))
    assert is_step_line(pairs(text), text)


def test_a_rate_without_a_name_is_reported_in_its_unit() -> None:
    records = live((1, LLM_C_PY.format(1, 4.2, 29.1)), (2, LLM_C_PY.format(2, 4.1, 29.1)))
    assert [(r.name, r.value, r.unit) for r in reported(records) if r.unit == "tokens/s"] == [
        ("tok/s", 1234, "tokens/s")
    ] * 2


@pytest.mark.parametrize("line", [LLM_C, LLM_C_CUDA, LLM_C_PY])
def test_a_log_of_lines_with_times_has_steps_of_these_times(line: str) -> None:
    each_ms = [380.0, 29.12, 29.5, 31.25]
    records = from_file(*(line.format(n, 5.0 - n, ms) for n, ms in enumerate(each_ms, start=1)))
    found = steps(records)
    assert [s.index for s in found] == [1, 2, 3, 4]
    assert [(s.end_ns - s.start_ns) / 1e6 for s in found] == pytest.approx(each_ms)
    assert [s.loss for s in found] == [4.0, 3.0, 2.0, 1.0]
    assert any("step times added up" in said for said in marks(records, "assumed"))


def test_litgpt_steps_of_several_iterations_take_as_long_as_all_of_them() -> None:
    records = from_file(*(LITGPT.format(4 * n, n, 6.032 - n) for n in range(1, 5)))
    found = steps(records)
    assert [s.index for s in found] == [1, 2, 3, 4]
    assert [s.loss for s in found] == [5.032, 4.032, 3.032, 2.032]
    assert [(s.end_ns - s.start_ns) / 1e6 for s in found] == pytest.approx([4 * 12.34] * 4)
    assert any("iter time times 4" in said for said in marks(records, "assumed"))


def test_litgpt_lines_of_iterations_inside_a_step_are_no_steps() -> None:
    """Its fine-tuning prints a line for each iteration, with the last step's number."""
    line = "Epoch 1 | iter {} step {} | loss train: {:.3f}, val: n/a | iter time: 12.34 ms{}"
    lines = [line.format(n, n // 2, 7 - n / 10, " (step)" * (n % 2 == 0)) for n in range(1, 9)]
    found = steps(from_file(*lines))
    assert [(s.index, s.loss) for s in found] == [(1, 6.8), (2, 6.6), (3, 6.4), (4, 6.2)]
    assert [(s.end_ns - s.start_ns) / 1e6 for s in found] == pytest.approx([2 * 12.34] * 4)
    timed = live(*((1 + n / 10, text) for n, text in enumerate(lines)))
    assert not marks(timed, "several_programs")
    assert [s.loss for s in steps(timed)][-3:] == [6.6, 6.4, 6.2]


def test_a_table_of_batches_has_its_losses_and_all_steps_of_an_epoch() -> None:
    log = [(epoch, n) for epoch in (1, 2) for n in range(200, 2983, 200)]
    lines = [WORD_LM.format(epoch, n, 10.0, 7 - i * 0.1) for i, (epoch, n) in enumerate(log)]
    found = steps(from_file(*lines))
    # From batch 2800 of the first epoch to batch 200 of the second are 183 and 200.
    assert [s.steps for s in found[1:]] == [200] * 13 + [383] + [200] * 13
    lasted_s = [(s.end_ns - s.start_ns) / S for s in found[1:]]
    assert lasted_s == pytest.approx([2.0] * 13 + [3.83] + [2.0] * 13)
    assert [s.loss for s in found] == pytest.approx([7 - i * 0.1 for i in range(28)])
    timed = live(*((10 + 2 * i, line) for i, line in enumerate(lines)))
    assert [s.steps for s in steps(timed)][:15] == [1] + [200] * 13 + [383]


def test_the_loss_of_the_first_line_is_reported_where_it_is_in_no_step() -> None:
    records = live((1, "step 0: train loss 4.25"), (2, "step 1: train loss 4.0"))
    assert [s.loss for s in steps(records)] == [4.0]
    assert [r for r in reported(records) if r.name == "loss"] == [Reported(S, "loss", 4.25, "")]


def test_the_last_loss_of_a_bar_drawn_again_is_its_steps() -> None:
    bar = "train: 100%|█| {}/10 [00:01<00:09, 4.9it/s, loss={}]"
    log = [(n, bar.format(n, 3.0 - n / 10)) for n in range(1, 11)]
    records = live(*log, (10.01, bar.format(10, 1.75)))
    assert steps(records)[-1].loss == 1.75
    late = live(*log, (10.5, ""), (11, bar.format(10, 1.75)))
    assert steps(late)[-1].loss == 2.0  # that step was handed on
    assert [r.value for r in reported(late) if r.name == "loss"][-1] == 1.75


def block(at_s: float, numbers: range, ms: float | None) -> list[tuple[float, str]]:
    took = "" if ms is None else f" (took {ms} ms)"
    return [(at_s, f"step {n}: train loss {n}{took}") for n in numbers]


def test_lines_of_one_instant_are_steps_of_their_own_times() -> None:
    # The line of step 5 did not fit: its step ended when the first block came.
    log = [*block(10.0, range(1, 5), 100), *block(10.4, range(5, 9), 100)]
    log += block(12.0, range(9, 11), 100)
    records = live((9.0, ""), *log)
    found = steps(records)
    assert [s.index for s in found] == list(range(1, 11))
    assert [s.end_ns / S for s in found] == pytest.approx(
        [9.6, 9.7, 9.8, 9.9, 10.0, 10.1, 10.2, 10.3, 10.4, 10.5]
    )
    assert all(s.end_ns - s.start_ns == S // 10 for s in found)
    (said,) = marks(records, "output_buffered")
    assert "10 of its step lines" not in said  # two are no block
    assert "8 of its step lines came at one instant with others, up to 4 together" in said
    assert "step times are those that the lines give" in said


def test_an_evaluation_between_blocks_is_in_no_step() -> None:
    log = [*block(10.0, range(1, 5), 100), *block(15.0, range(5, 9), 100)]
    found = steps(live((9.0, ""), *log))
    assert [s.end_ns / S for s in found[4:]] == pytest.approx([10.0, 10.1, 10.2, 10.3])
    assert all(s.end_ns - s.start_ns == S // 10 for s in found)


def test_printed_times_longer_than_the_program_ran_are_not_used() -> None:
    log = [*block(10.0, range(1, 5), 5000), *block(10.1, range(5, 9), 5000)]
    records = live((9.9, ""), *log)
    said = marks(records, "value_refused")
    assert "add up to 20 s, but the lines came within 0.1 s" in said[0]
    assert all(s.end_ns - s.start_ns <= S for s in steps(records))


def test_without_times_a_block_is_one_span_and_the_last_is_left_out() -> None:
    log = [line for n in range(5) for line in block(10.0 + n, range(10 * n, 10 * n + 10), None)]
    records = live((9.0, ""), *log, (20.0, ""))
    assert [(s.index, s.steps) for s in steps(records)] == [(19, 10), (29, 10), (39, 10)]
    (said,) = marks(records, "output_buffered")
    assert "up to 10 together; a step's time is the mean over its block" in said
    (dropped,) = marks(records, "rows_dropped")
    assert "10 step lines came last and together" in dropped


def test_two_blocks_without_times_are_no_steps() -> None:
    log = [*block(10.0, range(21), None), *block(13.0, range(21, 41), None)]
    records = live((9.0, ""), *log)
    assert steps(records) == []
    (said,) = marks(records, "output_unrecognised")
    assert "41 step lines came in two blocks" in said
    assert "`erg record --pty` or `stdbuf -oL`" in said


def test_a_fast_loop_whose_lines_are_read_together_is_not_said_to_be_buffered() -> None:
    log = [line for n in range(50) for line in block(10 + n * 1e-3, range(5 * n, 5 * n + 5), None)]
    records = live((9.0, ""), *log)
    assert sum(s.steps or 0 for s in steps(records)) == 245
    assert marks(records, "output_buffered") == marks(records, "rows_dropped") == []


def test_one_stall_of_the_machine_is_not_said_to_be_buffering() -> None:
    log = [(10 + n * 0.1, f"step {n}: train loss 2") for n in range(40)]
    log = [(13.0 if 20 <= n <= 30 else t, text) for n, (t, text) in enumerate(log)]
    records = live((9.0, ""), *log)
    assert sum(s.steps or 0 for s in steps(records)) == 39
    assert marks(records, "output_buffered") == []


def test_lines_from_a_file_are_never_said_to_be_buffered() -> None:
    records = from_file(*(f"2026-11-15 10:00:{n // 10:02d} step {n}: loss 2" for n in range(100)))
    assert marks(records, "output_buffered") == []
    assert sum(s.steps or 0 for s in steps(records)) == 90
