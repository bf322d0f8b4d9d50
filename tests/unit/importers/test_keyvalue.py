"""What the key=value importer makes of a training loop's lines, as one would check it by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.errors import UsageError
from ergmeter.importers.counts import TokensAre
from ergmeter.importers.keyvalue import KeyValueImporter
from ergmeter.ports import Importer, Line
from ergmeter.records import Record, Reported, Step
from tests.unit.importers.captured import marks, reported, steps

S = 1_000_000_000


def live(*timed: tuple[float, str], tokens_are: TokensAre | None = None) -> list[Record]:
    lines = [Line(text, round(t_s * S)) for t_s, text in timed]
    return list(KeyValueImporter(tokens_are=tokens_are).records(lines))


def from_file(*texts: str) -> list[Record]:
    return list(KeyValueImporter().records([Line(text) for text in texts]))


def test_it_is_an_importer() -> None:
    assert isinstance(KeyValueImporter(), Importer)


def test_a_log_of_known_times_and_tokens_gives_exactly_those() -> None:
    times_ms = [0, 137, 300, 471, 1890, 2001]
    tokens = [1024, 1000, 512, 2048, 7, 900]
    log = [
        (ms / 1000, f"step={i} loss=2.5 tokens={n}")
        for i, (ms, n) in enumerate(zip(times_ms, tokens, strict=True))
    ]
    found = steps(live(*log))
    total = sum(step.tokens_computed or 0 for step in found)
    span_ns = found[-1].end_ns - found[0].start_ns
    assert [step.tokens_computed for step in found] == tokens[1:]
    assert Fraction(total * S, span_ns) == Fraction(sum(tokens[1:]) * 1000, 2001)


def test_the_first_line_only_opens_the_window_and_its_loss_is_reported() -> None:
    records = live((5, "step=7 loss=2.5 batch_tokens=64"), (6, "step=8 loss=2.0 batch_tokens=64"))
    assert [(s.start_ns, s.end_ns, s.index) for s in steps(records)] == [(5 * S, 6 * S, 8)]
    assert reported(records) == [Reported(5 * S, "loss", 2.5, "")]


@pytest.mark.parametrize(
    "said",
    ["step_time=0.25", "step_time_ms=250", "dt: 250ms", "elapsed_ms=250", "time/step=0.25",
     "time per step: 0.25"],
)  # fmt: skip
def test_a_step_that_gives_its_own_time_starts_that_long_before_its_first_line(said: str) -> None:
    (first, second) = steps(live((10, f"step=1 loss=2 {said}"), (12, f"step=2 loss=2 {said}")))
    assert (first.start_ns, first.end_ns) == (round(9.75 * S), 10 * S)
    assert (second.start_ns, second.end_ns) == (10 * S, 12 * S)  # seen times again


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


def test_a_total_is_told_from_tokens_per_step_by_its_values_and_the_guess_is_marked() -> None:
    total = live(*[(i, f"step={i} loss=1 tokens={i * 2048}") for i in range(1, 8)])
    each = live(*[(i, f"step={i} loss=1 tokens=2048") for i in range(1, 8)])
    assert (
        [s.tokens_computed for s in steps(total)]
        == [2048] * 6
        == [s.tokens_computed for s in steps(each)]
    )
    (said_total,), (said_each,) = marks(total, "assumed"), marks(each, "assumed")
    assert "tokens= read as a running total" in said_total
    assert "--tokens-are step or line" in said_total
    assert "tokens= read as the count of one step" in said_each


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1500, 3900, 4700, 6000, 7900], [2400, 800, 1300, 1900]),
        ([10_002_048, 10_004_096, 10_006_144], [2048, 2048]),
        ([1000, 1010, 1025, 1031, 1070], [1010, 1025, 1031, 1070]),
        ([1500, 900, 1800], [900, 1800]),
    ],
    ids=["uneven total", "resumed total", "lengths that happen to grow", "lengths"],
)
def test_bare_tokens_are_read_from_their_first_five_values(
    values: list[int], expected: list[int]
) -> None:
    log = [(i, f"step={i} loss=1 tokens={value}") for i, value in enumerate(values)]
    assert [s.tokens_computed for s in steps(live(*log))] == expected


@pytest.mark.parametrize(
    "values",
    [[100, 120, 140, 90, 130, 100], [480, 500, 510, 470, 490], [100, 120, 140, 160, 180, 90]],
)
def test_batches_that_happen_to_grow_at_first_are_no_total(values: list[int]) -> None:
    records = live(*[(i, f"step={i} loss=1 tokens={value}") for i, value in enumerate(values)])
    assert [s.tokens_computed for s in steps(records)] == values[1:]
    assert marks(records, "restarted") == []


def test_a_total_seen_from_its_middle_on_agrees_with_its_step_number() -> None:
    log = [(i, f"step={i} loss=1 tokens={i * 512}") for i in range(40, 46)]
    assert [s.tokens_computed for s in steps(live(*log))] == [512] * 5


def test_a_total_that_falls_while_the_steps_go_on_is_taken_back_and_said_so() -> None:
    values = [100, 180, 300, 410, 500, 350, 420, 210, 330]
    records = live(*[(i, f"step={i} loss=1 tokens={value}") for i, value in enumerate(values)])
    assert [s.tokens_computed for s in steps(records)] == [80, 120, 110, 90, 350, 420, 210, 330]
    _, said = marks(records, "assumed")
    assert "tokens= fell from 500 to 350" in said
    assert "lines before is wrong" in said
    assert marks(records, "restarted") == []


def test_a_bare_total_that_begins_again_each_epoch_stays_a_total() -> None:
    log = [(i, f"step={i} loss=1 tokens={100 * (i % 5 + 1)}") for i in range(15)]
    records = live(*log)
    assert {s.tokens_computed for s in steps(records)} == {100}
    assert len(marks(records, "restarted")) == 2


def test_a_bar_drawn_twice_is_no_evidence_against_a_total() -> None:
    drawn = "5%|4  | {0}/99 [00:01<00:09, 9.9it/s, loss=1, tokens={0}00]"
    log = [(i / 2, drawn.format(i // 2)) for i in range(2, 12)]
    assert [s.tokens_computed for s in steps(live(*log))] == [100] * 4


@pytest.mark.parametrize(
    ("tokens_are", "expected"), [("step", [200, 300]), ("line", [20, 30]), ("total", [10, 10])]
)
def test_the_caller_can_say_what_tokens_are(tokens_are: TokensAre, expected: list[int]) -> None:
    log = [(i, f"step={i * 10} loss=1 tokens={i * 10}") for i in (1, 2, 3)]
    records = live(*log, tokens_are=tokens_are)
    assert [s.tokens_computed for s in steps(records)] == expected
    assert marks(records, "assumed") == []


def test_an_unknown_meaning_of_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="'steps'"):
        KeyValueImporter(tokens_are="steps")  # type: ignore[arg-type]


def test_a_line_every_ten_steps_covers_ten_and_says_that_it_multiplied() -> None:
    records = live(*[(i, f"step={i * 10} loss=1 tokens_per_step=64") for i in range(4)])
    assert [(s.steps, s.tokens_computed) for s in steps(records)] == [(10, 640)] * 3
    assert len(marks(records, "assumed")) == 1
    assert "tokens_per_step= taken times the steps" in marks(records, "assumed")[0]


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


@pytest.mark.parametrize("gap_s", [0.001, 5])
@pytest.mark.parametrize(
    "numbers",
    [
        [n for i in range(30) for n in (i, 1000 + i)],
        [n for i in range(30) for n in (i, i)],
        [n for i in range(30) for n in [i] * 4],
        [n for i in range(30) for n in [i] * 8],
        [0, 1, 0, 2, 1, 3, 2, 4, 3, 5, 4, 6, 5, 7, 6, 8],
        [0, 0, 1, 0, 1, 0, 1, 2, 1, 2, 2, 3, 2, 3, 3, 4],
        [n for i in range(30) for n in (10 * i, 5000 + 10 * i)],
    ],
    ids=["from 1000", "two alike", "4 ranks", "8 ranks", "one behind", "uneven", "every ten"],
)
def test_lines_of_several_programs_are_said_to_be_so_and_make_no_step(
    numbers: list[int], gap_s: float
) -> None:
    log = [(i * gap_s, f"step={n} loss=2.5 tokens=64") for i, n in enumerate(numbers)]
    records = live(*log)
    (said,) = marks(records, "several_programs")
    assert "mixed in this output" in said
    fine = [s for s in steps(records) if s.steps == 1 and s.tokens_computed == 64]
    assert steps(records) == fine
    assert len(fine) <= (1 if gap_s > 1 else 0)


@pytest.mark.parametrize("other", [0, 1000])
def test_a_second_program_that_joins_later_adds_no_leap(other: int) -> None:
    alone = [(i / 10, i) for i in range(50)]
    mixed = [
        (5 + i / 10, n) for i, n in enumerate(m for k in range(9) for m in (other + k, 50 + k))
    ]
    log = [(t, f"step={n} batch_tokens=64") for t, n in (*alone, *mixed)]
    records = live(*log)
    assert len(marks(records, "several_programs")) == 1
    assert {(s.steps, s.tokens_computed) for s in steps(records)} == {(1, 64)}
    assert 49 <= len(steps(records)) <= 53
    assert str(other + 2) in marks(records, "several_programs")[0]


@pytest.mark.parametrize(
    "lines",
    [
        ["step={} loss=2", "step={} tokens=64"],
        ["step={} begins", "step={} loss=2 tokens=64", "step={} ends"],
        ["5%|4  | {}/99 [00:01<00:09, 9.9it/s, loss=3]", "5%|4 | {}/99 [00:01<00:09, loss=2]"],
    ],
    ids=["two lines a step", "begin and end", "a bar that is drawn, then given its loss"],
)
def test_several_lines_about_one_step_are_not_several_programs(lines: list[str]) -> None:
    texts = [line.format(n) for n in range(1, 31) for line in lines]
    records = live(*[(i / 100, text) for i, text in enumerate(texts)])
    assert marks(records, "several_programs") == []
    assert sum(s.steps or 0 for s in steps(records)) == 29


@pytest.mark.parametrize(
    "line",
    ["[rank{0}]: step={1} loss=2 batch_tokens=64", "step={1} rank={0} loss=2 batch_tokens=64",
     "[default{0}]:step={1} batch_tokens=64", '{{"rank": {0}, "step": {1}, "batch_tokens": 64}}'],
)  # fmt: skip
def test_of_lines_that_name_their_rank_those_of_the_first_are_read(line: str) -> None:
    log = [(n / 10 + r / 1000, line.format((r + 1) % 4, n)) for n in range(10) for r in range(4)]
    records = live(*log)
    found = steps(records)
    assert [(s.index, s.steps, s.tokens_computed) for s in found] == [
        (n, 1, 64) for n in range(1, 10)
    ]
    (said,) = marks(records, "assumed")
    assert "only those of rank 1 are read" in said
    assert marks(records, "several_programs") == []


def test_the_first_steps_wait_for_no_more_than_about_a_second() -> None:
    texts = ["step=1 batch_tokens=4", "step=2 batch_tokens=4", "", ""]
    lines = iter(
        [Line(text, round(t * S)) for t, text in zip((1, 1.1, 1.6, 2.2), texts, strict=True)]
    )
    assert isinstance(next(iter(KeyValueImporter().records(lines))), Step)


def test_a_total_that_goes_back_is_a_restart_too() -> None:
    log = [(1, 5, 500), (2, 6, 600), (3, 7, 100), (4, 8, 200)]
    records = live(*[(t, f"step={n} total_tokens={total}") for t, n, total in log])
    assert [s.tokens_computed for s in steps(records)] == [100, 100]


def test_a_second_line_about_a_step_adds_what_was_missing_and_no_step() -> None:
    records = live(
        (1, "step=1 loss=3 batch_tokens=10"),
        (2, "step=2 loss=2"),
        (2.01, "step=2 loss=9 batch_tokens=10"),
        (2.5, "step=2 eval_loss=4"),
        (3, "step=3 loss=1 batch_tokens=10"),
    )
    assert [(s.index, s.loss, s.tokens_computed) for s in steps(records)] == [
        (2, 2, 10),
        (3, 1, 10),
    ]
    assert Reported(round(2.5 * S), "eval_loss", 4.0, "") in records


def test_a_rounded_total_makes_no_step_of_no_tokens() -> None:
    totals = ["1.2M", "1.2M", "1.2M", "1.3M", "1.4M"]
    log = [(i, f"step={i} loss=1 total_tokens={total}") for i, total in enumerate(totals)]
    first, second = steps(live(*log))
    assert (first.start_ns, first.end_ns, first.steps) == (0, 3 * S, 3)
    assert first.tokens_computed == second.tokens_computed == 100_000


def test_a_first_line_with_its_own_time_and_a_total_is_a_step_only_at_the_start() -> None:
    (fresh,) = steps(live((5, "step=1 total_tokens=100 step_time=2")))
    assert (fresh.start_ns, fresh.tokens_computed) == (3 * S, 100)
    assert steps(live((5, "step=7 total_tokens=700 step_time=2"))) == []


def test_a_total_in_the_middle_of_a_block_is_not_taken_for_the_whole_block() -> None:
    log = [(1, "step=1 total_tokens=10"), (3, "step=2 total_tokens=20"), (3, "step=3 loss=1")]
    (block,) = steps(live(*log))
    assert (block.steps, block.tokens_computed) == (2, None)


def test_figures_in_a_sentence_are_not_reported() -> None:
    assert from_file("we saw loss 3 and tok/s 50 there") == []


def test_a_total_that_some_lines_lack_is_never_spread_over_the_wrong_time() -> None:
    log = [(1, "step=1 total_tokens=10"), (2, "step=2 loss=1"), (3, "step=3 total_tokens=30")]
    assert [s.tokens_computed for s in steps(live(*log))] == [None, None]


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("loss=nan", math.nan),
        ("loss=inf", math.inf),
        ("loss=-0.81", -0.81),
        ("loss=1.2e-05", 1.2e-5),
        ("loss: 1.1e+3", 1100.0),
        ("train_loss=2.5", 2.5),
        ("reduced_train_loss=6.930", 6.93),
    ],
)
def test_signs_exponents_and_nan_are_read_whole(text: str, loss: float) -> None:
    (step,) = steps(live((1, f"step=1 {text}"), (2, f"step=2 {text}, lr=2.73e-5")))
    assert step.loss == pytest.approx(loss, nan_ok=True)
    assert step.learning_rate == 2.73e-5


def test_train_loss_is_one_loss_and_not_also_a_loss() -> None:
    records = from_file("train_loss: 2.3")
    assert records == [Reported(0, "train_loss", 2.3, "")]


def test_padded_real_and_loss_tokens_are_three_counts() -> None:
    line = "step={} loss=1 tokens=4,096 real_tokens=3k loss_tokens=2000 batch_size=8"
    (first, second) = steps(live(*[(i, line.format(i)) for i in (1, 2, 3)]))
    assert first.tokens_computed == second.tokens_computed == 4096
    assert (first.tokens_real, first.tokens_loss, first.samples) == (3000, 2000, 8)


def test_rates_are_reported_each_in_its_unit_and_make_no_tokens() -> None:
    records = live(
        (1, "step=1 | loss 2 | tok/s 1.5k | samples/sec: 3 | seq/s: 4 | it/s=2 | tflops: 10"),
        (2, "step=2 | loss 2 | throughput: 150.5 | tokens_per_second=1,234.5 | mfu 2.1% | s/it: 3"),
    )
    assert [(r.name, r.value, r.unit) for r in reported(records) if r.name != "loss"] == [
        ("tok/s", 1500, "tokens/s"),
        ("samples/sec", 3, "samples/s"),
        ("seq/s", 4, "sequences/s"),
        ("it/s", 2, "steps/s"),
        ("tflops", 10, "TFLOP/s"),
        ("throughput", 150.5, ""),
        ("tokens_per_second", 1234.5, "tokens/s"),
        ("s/it", 3, "s/step"),
    ]
    (step,) = steps(records)
    assert step.tokens_computed is None


NXDT = (
    "Epoch 0:   5%|▍         | 3/62 [02:59<58:44,  0.02it/s, v_num=8-06, reduced_train_loss=6.930, "
    "chosen_rewards=-0.81, lr=2.73e-5, parameter_norm=1.95e+3, global_step={}.000, "
    "consumed_samples={}.00, throughput=0.108, throughput_peak=0.0677, gradient_norm=8.600]"
)


@pytest.mark.parametrize(
    ("line", "loss"),
    [
        ("step {0} | loss 2.31 | tok/s 1234", 2.31),
        ("iter {0}: loss 2.3, time 123.45ms, mfu 2.1%", 2.3),
        ("step {0}/100 loss: 2.5", 2.5),
        ("\x1b[32m[2026-11-15 10:00:00 INFO]\x1b[0m step: {0}\tloss: 2.5", 2.5),
        ('{{"step": {0}, "loss": 2.1, "done": true, "note": "step 99"}}', 2.1),
        ('{{"train": {{"loss": 2.1}}, "global_step": {0}}}', 2.1),
        ("{{'step': {0}, 'loss': 2.1, 'epoch': 0.1}}", 2.1),
        ("Epoch 0: 10%|█         | {0}/90 [00:01<00:09,  9.9it/s, v_num=0, train_loss=2.3]", 2.3),
        ("global step: {0}, train/loss: 2.5, tokens per step: 4096", 2.5),
    ],
)
def test_a_step_line_is_read_in_the_dress_it_comes_in(line: str, loss: float) -> None:
    step = steps(live((1, line.format(1)), (2, line.format(5))))[-1]
    assert (step.index, step.steps, step.loss) == (5, 4, loss)
    assert KeyValueImporter().recognises([line.format(1)])


def test_the_progress_bar_of_nxdt_gives_samples_by_its_running_total() -> None:
    (step,) = steps(
        live((1, NXDT.format(1, 32)), (1.5, NXDT.format(1, 32)), (4, NXDT.format(2, 64)))
    )
    assert (step.samples, step.loss, step.learning_rate, step.grad_norm) == (32, 6.93, 2.73e-5, 8.6)
    assert (step.start_ns, step.end_ns) == (1 * S, 4 * S)


PROSE = [
    "Note: step: do this",
    "Step 1: install 3 packages",
    "Step 1/12 : FROM python:3.11",
    "tokens per step: 2048",
    "  Total optimization steps = 20",
    "the loss is 3 times lower at step 5",
    "max step: 500",
    "Map:  10%|█         | 100/1000 [00:01<00:09, 99 examples/s]",
    "{'loss': '4.1', 'learning_rate': '5e-05', 'epoch': '0.08', 'num_input_tokens_seen': 216}",
    "{'train_runtime': '0.2', 'train_loss': '4.1', 'epoch': '1', 'num_input_tokens_seen': 21}",
    "eval step: 5",
    "",
]


@pytest.mark.parametrize("text", PROSE)
def test_prose_and_other_formats_are_not_recognised_and_make_no_step(text: str) -> None:
    assert not KeyValueImporter().recognises([text])
    assert steps(live((1, text), (2, text), (3, text.replace("5", "6")))) == []


def test_a_line_without_a_number_but_with_tokens_and_loss_is_a_step_of_unknown_count() -> None:
    (step,) = steps(live((1, "loss=2 batch_tokens=10"), (2, "loss=2 batch_tokens=10")))
    assert (step.steps, step.index, step.tokens_computed) == (None, None, 10)


def test_a_file_with_timestamps_has_their_times() -> None:
    records = from_file(
        "[2026-11-15 23:59:59,500 INFO] step=1 loss=2 batch_tokens=64",
        "[2026-11-16 00:00:01,750 INFO] step=2 loss=2 batch_tokens=64",
    )
    (step,) = steps(records)
    assert step.window.duration_s == 2.25
    assert marks(records, "assumed") == ["times are the log's own timestamps"]


def test_a_file_with_step_times_only_has_their_sum() -> None:
    log = (f"step={i} loss=2 batch_tokens=64 step_time_ms={ms}" for i, ms in [(1, 500), (2, 125)])
    records = from_file(*log)
    assert [(s.start_ns, s.end_ns) for s in steps(records)] == [(0, S // 2), (S // 2, 5 * S // 8)]
    assert "added up" in marks(records, "assumed")[0]


def test_a_file_without_any_time_gives_figures_and_no_steps() -> None:
    records = from_file("step=1 loss=2 tokens=64 tok/s=9", "step=2 loss=1 tokens=64 tok/s=8")
    assert [(r.name, r.value) for r in reported(records)] == [
        ("tok/s", 9), ("loss", 2), ("tok/s", 8), ("loss", 1),
    ]  # fmt: skip
    assert len(records) == 4


def test_a_step_is_handed_on_when_time_goes_on_without_another_step_line() -> None:
    def stream() -> list[Line]:
        return [Line("step=1 batch_tokens=4", 1 * S), Line("step=2 batch_tokens=4", 2 * S)]

    seen: list[Record] = []
    lines = iter([*stream(), Line("saving", 3 * S), Line("end of what was read", 4 * S)])
    reading = KeyValueImporter().records(line for line in lines)
    seen.append(next(reading))
    assert isinstance(seen[0], Step)
    assert next(lines).text == "end of what was read"


WORDS = [
    "step",
    "loss",
    "tokens",
    "total_tokens",
    "=",
    ": ",
    " ",
    "|",
    "1",
    "2048",
    "9" * 40,
    "1e999",
    "nan",
    "-5",
    "{",
    "}",
    "'",
    '"',
    ",",
    "\x00",
    "\x1b[A",
    "5%|",
    "/",
    " [",
    "µs",
    "k",
    "\u0661",
    "%",
    "step_time",
    "dt",
    "2026-11-15 10:00:00",
    "2026-99-99 10:00:00",
    "iter ",
]
texts = st.text(max_size=80) | st.lists(st.sampled_from(WORDS), max_size=14).map("".join)
times = st.none() | st.integers(0, 5).map(lambda t: t * 100_000_000)


@given(st.lists(st.tuples(texts, times), max_size=12), st.sampled_from([None, "step", "total"]))
def test_no_text_raises_and_no_window_is_empty(
    timed: list[tuple[str, int | None]], tokens_are: TokensAre | None
) -> None:
    importer = KeyValueImporter(tokens_are=tokens_are)
    importer.recognises([text for text, _ in timed])
    records = list(importer.records([Line(text, t_ns) for text, t_ns in timed]))
    for step in steps(records):
        assert step.window.duration_s > 0
        assert step.steps is None or step.steps > 0


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 3)), min_size=2, max_size=30),
    st.booleans(),
)
def test_tokens_and_time_of_all_steps_add_up_to_those_of_the_log(
    log: list[tuple[int, int]], total: bool
) -> None:
    lines, t_ns, seen = [], S, 0
    for i, (tokens, wait) in enumerate(log):
        t_ns += wait * S
        seen += tokens
        said = f"total_tokens={seen}" if total else f"batch_tokens={tokens}"
        lines.append(Line(f"step={i} loss=1 {said}", t_ns))
    opening = [i for i, line in enumerate(lines) if line.t_ns == lines[0].t_ns][-1]
    found = steps(list(KeyValueImporter().records(lines)))
    assert sum(s.tokens_computed or 0 for s in found) == sum(n for n, _ in log[opening + 1 :])
    assert sum(s.end_ns - s.start_ns for s in found) == t_ns - (lines[0].t_ns or 0)
    assert sum(s.steps or 0 for s in found) == len(log) - opening - 1


def test_a_line_of_any_length_and_junk_is_survived() -> None:
    junk = [
        "a" * 70_000,
        "step=" + "1" * 70_000,
        "{" * 70_000,
        "step=1 " * 9_000,
        "\x00\ufffd" * 99,
    ]
    records = list(KeyValueImporter().records([Line(text, i) for i, text in enumerate(junk)]))
    assert steps(records) == []
