"""Lines that are labelled as an evaluation's, among those of training; and a loss that is none."""

from __future__ import annotations

import pytest

from ergmeter.importers.engine.pairs import of_evaluation
from ergmeter.importers.keyvalue import KeyValueImporter
from ergmeter.records import Record
from tests.unit.importers.captured import marks, reported, steps
from tests.unit.importers.printed import S, from_file, live
from tests.unit.importers.trained import live as live_hf
from tests.unit.importers.trained import printed as printed_hf

LABELLED = [
    "eval step={} loss=9 tokens=100",
    "val step={} loss=9 tokens=100",
    "[eval] step={} loss=9 tokens=100",
    "eval/step={} loss=9 tokens=100",
    "valid: step={} loss=9 tokens=100",
    "Validation | step {} | loss 9 | tokens 100",
    "test iter {}: loss=9 tokens=100",
    "INFO:train:evaluating step={} loss=9 tokens=100",
    "\x1b[33meval\x1b[0m step={} loss=9 tokens=100",
    "step={} split=val loss=9 tokens=100",
    '{{"split": "test", "step": {}, "loss": 9, "tokens": 100}}',
    '{{"eval/step": {}, "loss": 9, "tokens": 100}}',
    "Evaluating:  10%|█ | {}/10 [00:01<00:09, 4.9it/s, loss=9, tokens=100]",
]


def evaluated(label: str, *, every: int = 1) -> list[Record]:
    """Ten steps of training, 1000 tokens in a second each; two seconds of evaluation; ten more."""
    log: list[tuple[float, str]] = []
    for part, start_s in ((0, 0.0), (10, 12.0)):
        said = f"train step={{}} loss=2 tokens={1000 * every}"
        log += [(start_s + n, said.format(part + n)) for n in range(every, 11, every)]
        log += [(start_s + 10 + i / 2, label.format(i)) for i in range(1, 5)]
    return live(*log, tokens_are="line")


@pytest.mark.parametrize("label", LABELLED)
def test_a_labelled_line_is_no_step_and_its_time_is_not_trainings(label: str) -> None:
    records = evaluated(label)
    found = steps(records)
    assert [(s.index, s.tokens_computed, s.loss) for s in found] == [
        (n, 1000, 2) for n in range(2, 21)
    ]
    assert {s.window.duration_s for s in found} == {1.0}
    assert [(s.start_ns, s.end_ns) for s in steps(records, "eval")] == [(10 * S, 12 * S)]
    assert 9 not in {r.value for r in reported(records) if r.name == "loss"}
    assert marks(records, "several_programs") == marks(records, "restarted") == []
    assert not KeyValueImporter().recognises([label.format(1)])


def test_where_not_every_step_is_printed_the_evaluation_stays_in_the_step_and_is_said() -> None:
    records = evaluated(LABELLED[0], every=5)
    assert [(s.steps, s.window.duration_s) for s in steps(records)] == [(5, 5), (5, 7), (5, 5)]
    assert steps(records, "eval") == []
    assert any("includes its time" in said for said in marks(records, "assumed"))


def test_an_evaluation_in_one_block_with_the_training_takes_no_step_away() -> None:
    lines = [f"step={n} batch_tokens=8" for n in range(1, 41)]
    lines[30:30] = ["eval step=1 loss=9 tokens=5"] * 3
    log = [(10 * (1 + i // 20), text) for i, text in enumerate(lines)]
    log.append((40, "step=41 batch_tokens=8"))  # what came last of all in a block has no time
    assert sum(s.steps or 0 for s in steps(live(*log))) == 21


def test_a_file_with_timestamps_has_the_time_of_its_evaluation_too() -> None:
    stamped = "2026-11-15 10:00:{:02d} {}"
    log = [stamped.format(i, f"step={i} loss=2 batch_tokens=8") for i in range(1, 4)]
    log += [stamped.format(9, "eval step=1 loss=9 tokens=100")]
    log += [stamped.format(10, "step=4 loss=2 batch_tokens=8")]
    records = from_file(*log)
    assert {s.window.duration_s for s in steps(records)} == {1.0}
    assert [s.window.duration_s for s in steps(records, "eval")] == [6.0]


@pytest.mark.parametrize(
    "text",
    [
        "train step=1 loss=2 tokens=64",
        "step=1 loss=2 val_loss=3 tokens=64",
        "step=1 train loss 2, val loss 3",
        "/home/test/run.py:33 step=1 loss=2",
        "my-test: step=1 loss=2",
        "after eval, train step=3 loss=2",
        "val loss: 2.5, train loss: 2.3, step=5",
        "step=3 loss=2.1 (train) 2.3 (val)",
        "validated config; latest step=3 loss=2",
    ],
)
def test_a_line_of_training_that_has_such_a_word_is_not_labelled(text: str) -> None:
    assert not of_evaluation(text)


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf", "NaN"])
def test_a_loss_that_is_no_number_is_said_once_with_its_first_step(loss: str) -> None:
    log = [(n, f"step={n} loss={2.5 if n < 4 else loss} batch_tokens=8") for n in range(1, 12)]
    (said,) = marks(live(*log), "value_refused")
    assert said == f"loss is not a number ({float(loss)}) from step 4 on"


def test_a_loss_that_is_a_number_again_is_said_so() -> None:
    log = [(n, f"step={n} loss={'nan' if n in (4, 5, 9) else 2.5}") for n in range(1, 12)]
    assert marks(live(*log), "value_refused") == [
        "loss is not a number (nan) from step 4 on",
        "loss is finite again from step 6 on; it was not from step 4 on",
    ]


def test_a_trainers_loss_that_is_no_number_is_said_too() -> None:
    nan = float("nan")
    log = [(i, printed_hf(i / 10, loss=nan if i > 3 else 2.5)) for i in range(1, 8)]
    said = marks(live_hf(*log), "value_refused")
    assert [one for one in said if "loss" in one] == [
        "loss is not a number (nan) from epoch 0.4 on"
    ]
