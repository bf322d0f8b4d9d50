"""What the Trainer importer makes of output that real Trainers wrote, beside their own counts."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from ergmeter.importers.hf_trainer import HfTrainerImporter
from ergmeter.importers.keyvalue import KeyValueImporter
from ergmeter.ports import Importer, Line
from ergmeter.records import Mark, Record, Reported
from tests.unit.importers.captured import Capture, Delivery, capture, marks, reported, steps
from tests.unit.importers.trained import BAR, S, live, printed

both = pytest.mark.parametrize("delivery", ["prompt", "ended"])


def read(source: Capture, delivery: Delivery = "prompt") -> list[Record]:
    return list(HfTrainerImporter().records(source.lines(delivery)))


def test_it_is_an_importer() -> None:
    assert isinstance(HfTrainerImporter(), Importer)


@both
@pytest.mark.parametrize(
    ("name", "every"),
    [("hf_pipe_bar_all_1_eval", 1), ("hf_pty_bar_all_1", 1), ("hf_pty_bar_all_5_eval", 5)],
)
def test_each_step_has_the_tokens_the_program_fed_in_it(
    name: str, every: int, delivery: Delivery
) -> None:
    source = capture(name)
    found = steps(read(source, delivery))
    assert [s.index for s in found] == list(range(every, 21, every))
    assert [s.steps for s in found] == [every] * len(found)
    assert [s.tokens_computed for s in found] == [
        source.computed(last - every + 1, last) for last in range(every, 21, every)
    ]


@both
def test_without_a_bar_the_steps_are_not_counted_and_the_tokens_still_are(
    delivery: Delivery,
) -> None:
    source = capture("hf_pipe_nobar_nonpad_1")
    records = read(source, delivery)
    found = steps(records)
    assert len(found) == 20
    (said,) = marks(records, "value_refused")
    assert "leave the bar on (disable_tqdm=False)" in said
    assert {s.steps for s in found} == {None}
    assert sum(s.tokens_computed or 0 for s in found) == source.real()
    assert all(a.end_ns == b.start_ns for a, b in pairwise(found))


def test_output_that_came_in_one_block_at_the_end_is_one_span_of_the_printed_runtime() -> None:
    source = capture("hf_pipe_buffered_all_5")
    (step,) = steps(read(source))
    assert step.tokens_computed == source.computed(1, 30)
    assert step.window.duration_s == pytest.approx(0.2526)  # train_runtime of the last step dict


@both
def test_without_a_token_count_the_steps_are_those_of_the_bar(delivery: Delivery) -> None:
    found = steps(read(capture("hf_pipe_bar_no_5"), delivery))
    assert [(s.index, s.steps, s.tokens_computed) for s in found] == [
        (n, 5, None) for n in (10, 15, 20, 25, 30)
    ]


def test_an_evaluation_is_a_span_of_its_own_that_no_training_step_overlaps() -> None:
    records = read(capture("hf_pipe_bar_all_1_eval"))
    evaluations = steps(records, "eval")
    assert [round(s.window.duration_s, 6) for s in evaluations] == [0.0048, 0.0042]
    assert [s.loss for s in evaluations] == [4.161, 4.161]
    spans = sorted(s.window for s in [*evaluations, *steps(records)])
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(spans))
    assert {"eval_loss", "eval_runtime"} <= {r.name for r in reported(records)}


def test_the_final_dict_is_reported_and_makes_no_step() -> None:
    source = capture("hf_pty_bar_all_1")
    records = read(source)
    last_ns = steps(records)[-1].end_ns
    final = [(r.name, r.value, r.unit) for r in reported(records) if r.t_ns > last_ns]
    assert [(name, unit) for name, _, unit in final] == [
        ("train_runtime", "s"),
        ("train_samples_per_second", "samples/s"),
        ("train_steps_per_second", "steps/s"),
        ("train_loss", ""),
        ("num_input_tokens_seen", "tokens"),
    ]
    assert final[-1][1] == source.computed(1, 20)


def test_what_the_token_total_may_count_is_said_once() -> None:
    (said,) = marks(read(capture("hf_pty_bar_all_1")), "assumed")
    assert "padding included" in said


def test_the_captures_are_recognised_by_this_importer_and_not_by_keyvalue() -> None:
    for name in ("hf_pipe_bar_all_1_eval", "hf_pty_bar_all_5_eval", "hf_pipe_bar_no_5"):
        head = [line.text for line in capture(name).lines("prompt")]
        assert HfTrainerImporter().recognises(head)
        assert not KeyValueImporter().recognises(head)


@pytest.mark.parametrize(
    "text",
    [
        "{'step': 3, 'loss': 2.1, 'learning_rate': 1e-4, 'epoch': 0.1}",
        "{'loss': 2.1}",
        "{'loss': 2.1, 'learning_rate': 1e-4, 'epo",
        '{"loss": 2.1, "learning_rate": 1e-4, "epoch": 0.1}',
        "  5%|▌         | 1/20 [00:00<00:00, 20.02it/s]",
        "config = {'learning_rate': 1e-4, 'epoch': 3}",
        "",
    ],
)
def test_other_dicts_half_dicts_and_bars_alone_are_not_recognised(text: str) -> None:
    assert not HfTrainerImporter().recognises([text])


def test_values_may_be_numbers_strings_nan_or_inf() -> None:
    line = "{'loss': nan, 'grad_norm': inf, 'learning_rate': '5e-05', 'epoch': 0.2}"
    (step,) = steps(live((1, printed(0.1)), (2, line)))
    assert step.loss is not None
    assert math.isnan(step.loss)
    assert (step.grad_norm, step.learning_rate) == (math.inf, 5e-5)


def test_the_first_dict_opens_the_window_unless_it_gives_the_runtime_of_its_tokens() -> None:
    more = {"num_input_tokens_seen": 800, "train_runtime": 4.0, "train_tokens_per_second": 200.0}
    (told,) = steps(live((10, printed(0.1, **more))))
    assert (told.start_ns, told.end_ns, told.tokens_computed) == (6 * S, 10 * S, 800)
    assert steps(live((10, printed(0.1, num_input_tokens_seen=800)))) == []
    resumed = more | {"num_input_tokens_seen": 90_800}  # most of them before this session
    assert steps(live((10, printed(0.5, **resumed)))) == []


def test_an_evaluation_at_the_start_is_not_in_the_first_training_span() -> None:
    evaluation = "{'eval_loss': 2.0, 'eval_runtime': 3.0, 'epoch': 0}"
    more = {"num_input_tokens_seen": 800, "train_runtime": 4.0, "train_tokens_per_second": 200.0}
    (step,) = steps(live((9.5, evaluation), (10, printed(0.1, **more))))
    assert (step.start_ns, step.end_ns, step.tokens_computed) == (round(9.5 * S), 10 * S, 800)


def test_num_tokens_of_trl_is_real_tokens_and_its_rounding_is_said() -> None:
    log = [(1, "1.229e+04"), (2, "1.229e+04"), (3, "1.23e+04"), (4, "1.232e+04")]
    records = live(*[(t, printed(t / 10, num_tokens=total)) for t, total in log])
    assert [(s.start_ns // S, s.end_ns // S, s.tokens_real) for s in steps(records)] == [
        (1, 3, 10),
        (3, 4, 20),
    ]
    assert any("four significant digits" in said for said in marks(records, "assumed"))


def logs_and_bars(*drawn: str, per_log: float = 0.1) -> list[Record]:
    """One dict a second, each with what was drawn after it."""
    timed = [
        (i + 1, text)
        for i, bar in enumerate(drawn)
        for text in (printed(round((i + 1) * per_log, 4)), BAR.format(bar))
    ]
    return live(*timed)


def test_a_bar_that_contradicts_the_epochs_is_not_believed_and_they_tell_the_step() -> None:
    records = logs_and_bars("10/200", "20/200", "55/200", "40/200", "50/200")
    assert [s.steps for s in steps(records)] == [10, 10, 10, 10]


def test_a_first_bar_that_belongs_to_the_next_log_is_not_believed() -> None:
    records = logs_and_bars("20/200", "30/200", "40/200", "50/200")
    assert sum(s.steps or 0 for s in steps(records)) <= 40


def test_an_old_bar_seen_first_is_found_out_by_the_second() -> None:
    records = logs_and_bars("3/200", "10/200", "15/200", per_log=0.5)
    assert [(s.index, s.steps) for s in steps(records)] == [(10, 5), (15, 5)]


def test_the_bar_of_an_evaluation_is_not_the_trainings_though_it_is_longer() -> None:
    nested = BAR.format("7/900") + "\x1b[A"
    timed = [(i, text) for i in (1, 2, 3) for text in (
        printed(i / 10), nested, "Map: " + BAR.format("8/999"), BAR.format(f"{i * 10}/200"),
    )]  # fmt: skip
    assert [s.index for s in steps(live(*timed))] == [20, 30]


def test_an_evaluation_between_two_logs_is_left_in_the_training_span_and_said() -> None:
    evaluation = "{'eval_loss': 2.0, 'eval_runtime': 0.5, 'epoch': 0.15}"
    records = live((1, printed(0.1)), (2, evaluation), (3, printed(0.2)))
    (step,) = steps(records)
    assert (step.start_ns, step.end_ns) == (1 * S, 3 * S)
    assert any("evaluation" in said for said in marks(records, "assumed"))


def test_a_second_training_opens_a_window_of_its_own() -> None:
    final = "{'train_runtime': 9.0, 'train_loss': 2.0, 'epoch': 0.2}"
    records = live((1, printed(0.1)), (2, printed(0.2)), (3, final), (50, printed(0.3)),
                   (51, printed(0.4)))  # fmt: skip
    assert [(s.start_ns // S, s.end_ns // S) for s in steps(records)] == [(1, 2), (50, 51)]


def test_a_file_has_the_time_of_the_runtimes_printed_in_it_or_none() -> None:
    source = capture("hf_pipe_nobar_nonpad_1")
    timeless = [Line(line.text) for line in source.lines("prompt")]
    records = list(HfTrainerImporter().records(timeless))
    assert sum(s.tokens_computed or 0 for s in steps(records)) == source.real()
    assert steps(records)[-1].end_ns == round(0.1513 * S)
    without = list(HfTrainerImporter().records([Line(printed(0.1)), Line(printed(0.2))]))
    figures = [("loss", 2.5), ("learning_rate", 5e-05), ("grad_norm", 1.5)]
    assert without == [Reported(0, name, value, "") for name, value in figures * 2]


def test_an_epoch_that_falls_is_another_training_and_what_is_assumed_is_said_of_it_too() -> None:
    first = [(i, printed(i / 10, num_input_tokens_seen=i * 64)) for i in range(1, 11)]
    again = [(90 + i, printed(i / 10, num_input_tokens_seen=i * 64)) for i in range(6, 11)]
    records = live(*first, *again)
    assert marks(records, "restarted") == ["the epoch went from 1 back to 0.6"]
    names = [record.name for record in records if isinstance(record, Mark)]
    assert names == ["assumed", "restarted", "assumed", "value_refused"]
    assert [s.end_ns // S for s in steps(records)] == [*range(2, 11), *range(97, 101)]


def test_a_file_without_times_has_its_trainings_told_apart_too() -> None:
    texts = [printed(i / 10) for i in (1, 2, 3, 1, 2, 3)]
    records = list(HfTrainerImporter().records([Line(text) for text in texts]))
    assert marks(records, "restarted") == ["the epoch went from 0.3 back to 0.1"]
    place = next(i for i, r in enumerate(records) if isinstance(r, Mark))
    assert place == 3 * 3  # after three figures of each of three dicts
