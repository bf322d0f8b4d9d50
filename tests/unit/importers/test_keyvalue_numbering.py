"""Step numbers that fall, leap or come in blocks: epochs, pauses and restarts of known truth."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.unit.importers.captured import marks, steps
from tests.unit.importers.printed import S, live


def test_lines_that_arrive_in_one_block_are_one_step_of_several() -> None:
    records = live(
        (1, "step=1 loss=9 batch_tokens=10"),
        (3, "step=2 loss=8 batch_tokens=20"),
        (3, "step=3 loss=7 batch_tokens=30"),
        (3, "step=4 loss=6 batch_tokens=40"),
        (4, "step=5 loss=5 batch_tokens=50"),
    )
    block, last = steps(records)
    assert (block.start_ns, block.end_ns) == (1 * S, 3 * S)
    assert (block.steps, block.tokens_computed, block.loss, block.index) == (3, 90, 6, 4)
    assert (last.steps, last.tokens_computed) == (1, 50)


def test_lines_that_arrive_with_the_one_that_opens_the_window_lie_before_it() -> None:
    records = live(*[(1, f"step={i} total_tokens={i * 10}") for i in (1, 2, 3)],
                   (2, "step=4 total_tokens=41"))  # fmt: skip
    (step,) = steps(records)
    assert (step.start_ns, step.steps, step.tokens_computed) == (1 * S, 1, 11)


def test_a_restart_opens_a_new_window() -> None:
    log = [(1, 500), (2, 501), (60, 1), (61, 2)]
    records = live(*[(t, f"step={n} batch_tokens=8") for t, n in log])
    assert [(s.start_ns // S, s.end_ns // S, s.index) for s in steps(records)] == [
        (1, 2, 501),
        (60, 61, 2),
    ]
    assert marks(records, "restarted") == ["the step number went from 501 back to 1"]


@pytest.mark.parametrize("per_epoch", [1, 2, 5, 30])
@pytest.mark.parametrize("first", [0, 1])
def test_numbers_that_begin_again_each_epoch_lose_no_step_and_no_time(
    per_epoch: int, first: int
) -> None:
    lines = [(e, n + first) for e in range(20) for n in range(per_epoch)]
    log = [(i / 10, f"epoch={e} step={n} tokens=100") for i, (e, n) in enumerate(lines)]
    records = live(*log)
    if per_epoch > 1:
        found = steps(records)
        assert sum(s.steps or 0 for s in found) == len(log) - 1
        assert sum(s.tokens_computed or 0 for s in found) == 100 * (len(log) - 1)
        assert sum(s.end_ns - s.start_ns for s in found) == (len(log) - 1) * S // 10
    assert marks(records, "restarted") == marks(records, "several_programs") == []


def test_a_line_every_ten_steps_covers_ten_at_the_turn_of_an_epoch_too() -> None:
    numbers = [10, 20, 30, 40, 10, 20, 30, 40, 10]
    records = live(*[(i, f"step={n} tokens_per_step=8") for i, n in enumerate(numbers)])
    assert [(s.steps, s.tokens_computed) for s in steps(records)] == [(10, 80)] * 8


def test_a_running_total_goes_on_over_the_turn_of_an_epoch() -> None:
    log = [(i, f"step={i % 4} total_tokens={i * 7 + 7}") for i in range(12)]
    assert [(s.steps, s.tokens_computed) for s in steps(live(*log))] == [(1, 7)] * 11


def test_a_bar_that_begins_again_at_zero_has_done_nothing_yet() -> None:
    drawn = "Epoch {}: 5%|4  | {}/3 [00:01<00:09, 9.9it/s, train_loss=2.3]"
    turns = [(e, n) for e in range(3) for n in range(4)]
    found = steps(live(*[(i / 4, drawn.format(e, n)) for i, (e, n) in enumerate(turns)]))
    assert sum(s.steps or 0 for s in found) == 9
    assert found[-1].end_ns - found[0].start_ns == 11 * S // 4


def test_a_total_that_goes_back_is_a_restart_too() -> None:
    log = [(1, 5, 500), (2, 6, 600), (3, 7, 100), (4, 8, 200)]
    records = live(*[(t, f"step={n} total_tokens={total}") for t, n, total in log])
    assert [s.tokens_computed for s in steps(records)] == [100, 100]


PAUSED = {
    "an epoch that rises": "epoch={e} step={n} batch_tokens=100",
    "a running total": "step={n} total_tokens={total}",
    "an evaluation's line": "step={n} batch_tokens=100",
}


@pytest.mark.parametrize("told", PAUSED)
@pytest.mark.parametrize("pause_s", [3, 600])
def test_an_evaluation_between_epochs_splits_no_training(told: str, pause_s: int) -> None:
    log, t, total = [], 0.0, 0
    for e in range(3):
        for n in range(1, 11):
            t, total = t + 0.25, total + 100
            log.append((t, PAUSED[told].format(e=e, n=n, total=total)))
        t += pause_s
        log += [(t, "val_loss=2.5")] if told == "an evaluation's line" else []
    records = live(*log)
    found = steps(records)
    assert sum(s.steps or 0 for s in found) == 29
    assert sum(s.tokens_computed or 0 for s in found) == 2900
    assert found[-1].end_ns - found[0].start_ns == round((29 * 0.25 + 2 * pause_s) * S)
    assert all(a.end_ns == b.start_ns for a, b in pairwise(found))
    assert marks(records, "restarted") == []
    assert any("evaluation" in said for said in marks(records, "assumed")) == (
        told == "an evaluation's line"
    )


def test_an_evaluation_in_the_middle_of_an_epoch_splits_nothing_either() -> None:
    log = [(i + (500 if i > 5 else 0), f"step={i} batch_tokens=8") for i in range(1, 11)]
    found = steps(live(*log))
    assert [s.steps for s in found] == [1] * 9
    assert found[4].window.duration_s == 501


def test_a_fall_after_a_pause_that_nothing_explains_is_a_restart_and_says_so() -> None:
    log = [(i, f"epoch=0 step={i} batch_tokens=8") for i in range(1, 6)]
    log += [(60 + i, f"epoch=0 step={i} batch_tokens=8") for i in range(1, 6)]
    records = live(*log)
    assert [s.index for s in steps(records)] == [2, 3, 4, 5] * 2
    assert marks(records, "restarted") == ["the step number went from 5 back to 1"]


def test_a_log_that_came_at_once_has_no_steps_and_says_why() -> None:
    records = live(*[(7, f"step={i} loss=2 batch_tokens=8") for i in range(1, 51)])
    assert steps(records) == []
    (said,) = marks(records, "output_unrecognised")
    assert "50 step lines came at once" in said


def test_a_log_that_came_at_once_in_several_reads_has_no_steps_either() -> None:
    log = [(7 + i // 500 * 3e-5, f"step={i} loss=2 batch_tokens=8") for i in range(1, 5000)]
    records = live(*log)
    assert steps(records) == []
    assert len(marks(records, "output_unrecognised")) == 1


def test_blocks_that_each_begin_again_may_be_of_several_programs_and_have_no_times() -> None:
    log = [(10 * block, f"step={n} batch_tokens=8") for block in (1, 2) for n in range(1, 31)]
    records = live(*log)
    assert steps(records) == []
    assert "blocks that each begin again" in marks(records, "output_unrecognised")[0]
    named = [(t, f"epoch={t} {text}") for t, text in [*log, (30, "step=31 batch_tokens=8")]]
    assert [(s.steps, s.tokens_computed) for s in steps(live(*named))] == [(30, 240), (1, 8)]


def test_lines_that_are_flushed_together_in_a_training_keep_every_step_and_all_the_time() -> None:
    # As after a pause of the machine: what was printed in it comes in several reads, one at once
    # after the other.
    log = [(float(i), f"step={i} batch_tokens=8") for i in range(1, 5)]
    log += [(5 + i // 500 * 3e-5, f"step={i} batch_tokens=8") for i in range(5, 5005)]
    log += [(6, "step=5005 batch_tokens=8")]
    records = live(*log)
    found = steps(records)
    assert sum(s.steps or 0 for s in found) == 5004
    assert sum(s.window.duration_s for s in found) == pytest.approx(5)
    assert not marks(records, "rows_dropped")


def test_blocks_of_one_program_keep_every_step_and_all_the_time() -> None:
    log = [(10 * (1 + i // 80), f"step={i + 1} batch_tokens=8") for i in range(401)]
    found = steps(live(*log))
    told = [(s.steps, s.tokens_computed, s.window.duration_s) for s in found]
    assert told == [*[(80, 640, 10)] * 4, (1, 8, 10)]


def test_epochs_that_end_inside_a_block_lose_nothing() -> None:
    log = [(10 * (1 + i // 80), f"step={i % 37 + 1} batch_tokens=8") for i in range(401)]
    records = live(*log)
    assert [(s.steps, s.tokens_computed) for s in steps(records)] == [*[(80, 640)] * 4, (1, 8)]
    assert marks(records, "several_programs") == marks(records, "restarted") == []
