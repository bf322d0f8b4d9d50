"""One Trainer, one after another, or several at a time: whose dicts are these?"""

from __future__ import annotations

import pytest

from ergmeter.importers.hf_trainer import HfTrainerImporter
from ergmeter.records import Record
from tests.unit.importers.captured import marks, steps
from tests.unit.importers.trained import BAR, S, live, printed

FINAL = "{'train_runtime': 9.0, 'train_loss': 2.0, 'epoch': 1.0}"


def merged(*outputs: list[tuple[float, str]]) -> list[Record]:
    """What is made of several outputs in one, in the order of their times."""
    return live(*sorted((line for lines in outputs for line in lines), key=lambda line: line[0]))


def trainer(
    *, start_s: float = 0, per_log: float = 0.1, tokens: int | None = None, logs: int = 20
) -> list[tuple[float, str]]:
    """A log every two seconds."""
    made = []
    for i in range(1, logs + 1):
        more: dict[str, object] = {} if tokens is None else {"num_input_tokens_seen": i * tokens}
        more |= {"loss": round(3 - i / 100 - (start_s > 0) / 1000, 4)}
        made.append((start_s + 2 * i, printed(round(i * per_log, 4), **more)))
    return made


@pytest.mark.parametrize("behind_s", [0.001, 0.7])
@pytest.mark.parametrize("tokens", [None, 640])
@pytest.mark.parametrize("pace", [0.07, 0.9])
def test_two_trainers_at_a_time_are_said_to_be_so_and_make_no_further_step(
    behind_s: float, tokens: int | None, pace: float
) -> None:
    other = trainer(start_s=behind_s, per_log=pace, tokens=tokens)
    records = merged(trainer(tokens=tokens), other)
    (said,) = marks(records, "several_programs")
    assert "mixed in this output (epochs such as" in said
    assert len(steps(records)) <= 4


def test_a_trainer_that_joins_later_ends_the_steps() -> None:
    records = merged(trainer(tokens=640, logs=60), trainer(start_s=61, tokens=512))
    assert len(marks(records, "several_programs")) == 1
    found = steps(records)
    assert {(s.tokens_computed, s.window.duration_s) for s in found[:29]} == {(640, 2.0)}
    assert 29 <= len(found) <= 33


@pytest.mark.parametrize("digits", [2, 3])
def test_an_epoch_that_is_rounded_stands_still_and_is_one_trainers(digits: int) -> None:
    log = [(i, printed(round(i * 0.003, digits), loss=i)) for i in range(1, 100)]
    records = live(*log)
    assert marks(records, "several_programs") == []
    assert len(steps(records)) == 98


@pytest.mark.parametrize("logs", [2, 3, 10])
@pytest.mark.parametrize("final", [True, False])
def test_trainers_one_after_the_other_have_a_window_each(logs: int, final: bool) -> None:
    log: list[tuple[float, str]] = []
    for trial in range(6):
        for i in range(1, logs + 1):
            t, n = trial * 100 + i, i * 10
            more = {"num_input_tokens_seen": i * 640, "loss": trial + i / 100}
            log.append((t, printed(round(i / logs, 4), **more)))
            log.append((t + 0.01, BAR.format(f"{n}/{10 * logs}")))
        log += [(trial * 100 + logs + 1, FINAL)] if final else []
        log.append((trial * 100 + 90, BAR.format(f"0/{10 * logs}")))
    records = live(*log)
    assert marks(records, "several_programs") == []
    found = steps(records)
    assert [s.tokens_computed for s in found] == [640] * (logs - 1) * 6
    assert {s.window.duration_s for s in found} == {1.0}
    assert {s.start_ns // (100 * S) for s in found} == set(range(6))


def test_a_trainer_that_is_resumed_from_a_checkpoint_opens_a_new_window() -> None:
    before = [(i, printed(i / 10, num_input_tokens_seen=i * 64)) for i in range(1, 9)]
    after = [(60 + i, printed(i / 10, num_input_tokens_seen=i * 64)) for i in range(5, 15)]
    records = live(*before, *after)
    assert marks(records, "several_programs") == []
    assert [s.tokens_computed for s in steps(records)] == [64] * (7 + 9)
    assert max(s.window.duration_s for s in steps(records)) == 1


def test_dicts_that_are_printed_twice_count_once_and_that_is_said() -> None:
    once = trainer(tokens=640)
    twice = [(t + gap, text) for t, text in once for gap in (0, 0.002)]
    records = live(*twice)
    assert steps(records) == steps(live(*once))
    assert sum("twice" in said for said in marks(records, "assumed")) == 1
    assert marks(records, "several_programs") == []


def test_an_evaluation_of_minutes_splits_no_training_and_is_in_no_step_of_it() -> None:
    evaluation = "{'eval_loss': 2.0, 'eval_runtime': 300.0, 'epoch': 1.0}"
    before = [(i, printed(i / 10, num_input_tokens_seen=i * 64)) for i in range(1, 11)]
    after = [
        (310 + i, printed(1 + i / 10, num_input_tokens_seen=640 + i * 64)) for i in range(1, 11)
    ]
    records = live(*before, (310, evaluation), *after)
    found = steps(records)
    assert [s.tokens_computed for s in found] == [64] * 19
    assert {s.window.duration_s for s in found} == {1.0}
    assert [s.window.duration_s for s in steps(records, "eval")] == [300.0]
    assert marks(records, "restarted") == []


AXOLOTL = (
    "{{'loss': 1.2{0}, 'grad_norm': 0.5, 'learning_rate': 2e-05, 'memory/max_active (GiB)': 10.1, "
    "'ppl': 3.35, 'tokens/total': {0}00, 'tokens_per_second_per_gpu': 1234.5, 'epoch': {1}}}"
)


def test_axolotl_prints_more_in_its_dicts_and_none_of_it_is_taken_for_tokens() -> None:
    records = live(*[(i, AXOLOTL.format(i, i / 10)) for i in range(1, 8)])
    assert HfTrainerImporter().recognises([AXOLOTL.format(1, 0.1)])
    assert [(s.loss, s.tokens_computed) for s in steps(records)] == [
        (float(f"1.2{i}"), None) for i in range(2, 8)
    ]
