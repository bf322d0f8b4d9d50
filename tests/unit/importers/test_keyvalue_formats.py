"""Lines as training programs print them: the right figures, or none."""

from __future__ import annotations

import math

import pytest

from ergmeter.importers.keyvalue import KeyValueImporter
from ergmeter.records import Reported
from tests.unit.importers.captured import marks, reported, steps
from tests.unit.importers.printed import S, from_file, live


def test_figures_in_a_sentence_are_not_reported() -> None:
    assert from_file("we saw loss 3 and tok/s 50 there") == []


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


NANOGPT_EVAL = "step {}: train loss 2.4000, val loss 2.5000"
NANOGPT = "iter {}: loss 2.31{}, time {:.2f}ms, mfu 12.34%"


def test_nanogpt_has_its_iterations_and_its_evaluation_is_no_step() -> None:
    log, t = [], 100.0
    for n in range(12):
        evaluates = n % 5 == 0
        t += 10 if evaluates else 0
        log += [(t, NANOGPT_EVAL.format(n))] if evaluates else []
        t += 0.125
        log.append((t, NANOGPT.format(n, n, 10_125 if evaluates else 125)))
    records = live(*log)
    found = steps(records)
    assert [s.index for s in found] == list(range(12))
    assert [s.window.duration_s for s in found] == [
        10.125 if n % 5 == 0 else 0.125 for n in range(12)
    ]
    assert [s.loss for s in found][:2] == [2.31, 2.311]
    assert "includes its time" in marks(records, "assumed")[0]
    assert not KeyValueImporter().recognises([NANOGPT_EVAL.format(5)])


TORCHTITAN = (
    "[titan] 2026-11-15 10:00:{0:02d},000 - root - INFO - \x1b[31mstep: {1:2}  \x1b[32mloss: "
    "{2:7.4f}  grad_norm:  1.2500  \x1b[33mmemory:  5.05GiB(6.32%)  \x1b[34mtps: 8,123  "
    "\x1b[36mtflops: 45.20  \x1b[35mmfu: 12.10%\x1b[39m"
)
MEGATRON = (
    " [2026-11-15 10:00:{0:02d}] iteration {1:8d}/{2:8d} | consumed samples: {3:12d} | elapsed "
    "time per iteration (ms): 512.3 | throughput per GPU (TFLOP/s/GPU): 210.5 | learning rate: "
    "1.000000E-04 | global batch size:    64 | lm loss: 2.100000E+00 | loss scale: 1.0 | grad "
    "norm: 1.250 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


@pytest.mark.parametrize("in_a_file", [True, False])
def test_torchtitan_has_steps_and_its_rates_are_only_reported(in_a_file: bool) -> None:
    texts = [TORCHTITAN.format(i, i * 10, 8 - i / 10) for i in range(1, 6)]
    records = from_file(*texts) if in_a_file else live(*enumerate(texts, 1))
    assert [
        (s.index, s.steps, s.loss, s.grad_norm, s.tokens_computed, s.window.duration_s)
        for s in steps(records)
    ] == [(i * 10, 10, 8 - i / 10, 1.25, None, 1) for i in range(2, 6)]
    rates = {(r.name, r.value, r.unit) for r in reported(records) if r.unit}
    assert rates == {("tps", 8123, "tokens/s"), ("tflops", 45.2, "TFLOP/s")}


@pytest.mark.parametrize("in_a_file", [True, False])
def test_megatron_has_iterations_and_samples(in_a_file: bool) -> None:
    texts = [MEGATRON.format(i * 5, i * 10, 5000, i * 640) for i in range(1, 5)]
    timed = [(i * 5.0, text) for i, text in enumerate(texts, 1)]
    records = from_file(*texts) if in_a_file else live(*timed)
    assert [
        (s.index, s.steps, s.samples, s.loss, s.learning_rate, s.grad_norm, s.window.duration_s)
        for s in steps(records)
    ] == [(i * 10, 10, 640, 2.1, 1e-4, 1.25, 5) for i in range(2, 5)]
    assert {s.tokens_computed for s in steps(records)} == {None}


COMPOSER = (
    "[batch={0}/500]:", "\t Train time/batch: {0}", "\t Train time/sample: {0}00",
    "\t Train time/token: {0}000", "\t Train time/total: 0.0123",
    "\t Train loss/train/total: 2.3{0}",
    "\t Train throughput/batches_per_sec: 0.5", "\t Train throughput/tokens_per_sec: 12345.5",
    "\t Train lr-DecoupledAdamW/group0: 0.0001",
)  # fmt: skip


def test_composer_is_not_read_yet_and_no_number_is_made_of_it() -> None:
    texts = [line.format(n) for n in range(1, 6) for line in COMPOSER]
    records = live(*enumerate(texts))
    assert not KeyValueImporter().recognises(texts)
    assert {(r.value, r.unit) for r in reported(records)} == {
        (0.5, "batches/s"), (12345.5, "tokens/s"),
    }  # fmt: skip
    assert len(reported(records)) == len(records)


@pytest.mark.parametrize(
    "line",
    [
        "Step {0} | loss:7.50 lr:2e-5 tokens_per_second_per_gpu:1234.5 peak_memory_active:5.0",
        "1|{0}|Loss: 7.50:  10%|█ | {0}/100 [00:01<00:09, 4.9it/s]",
        "train:  10%|█ | {0}/10 [00:01<00:09, 4.9it/s, loss=7.50]",
        "Epoch 1/5:  10%|█ | {0}/10 [00:01<00:09, 4.9it/s, loss=7.50]",
        "[step={0}/1000,epoch=0] loss=7.50",
    ],
    ids=["torchtune", "torchtune's bar", "tqdm", "tqdm of an epoch", "OLMo"],
)
def test_other_programs_have_their_steps(line: str) -> None:
    found = steps(live(*[(i, line.format(i)) for i in range(1, 6)]))
    assert [(s.index, s.steps, s.loss, s.tokens_computed) for s in found] == [
        (i, 1, 7.5, None) for i in range(2, 6)
    ]


@pytest.mark.parametrize(
    "line",
    [
        "Epochs:  10%|█ | {}/10 [00:01<00:09, 4.9s/it, loss=2.1]",
        "Epoch:  10%|█ | {}/10 [00:01<00:09, 4.9s/it, loss=2.1]",
        " 10%|█ | {}/10 [00:01<00:09, 4.9s/epoch, loss=2.1]",
        "Evaluating:  10%|█ | {}/10 [00:01<00:09, 4.9it/s, loss=2.1]",
        "Validation DataLoader 0:  10%|█ | {}/10 [00:01<00:09, 4.9it/s, val_loss=2.1]",
        "val:  10%|█ | {}/10 [00:01<00:09, 4.9it/s, loss=2.1]",
        "steps: {} loss: 2.3 iter time (s): 0.5 samples/sec: 12.3",
        "{}/500 [=>....] - ETA: 10s - loss: 2.3 - accuracy: 0.5",
        " validation loss at iteration {} | lm loss value: 2.1E+00 | lm loss PPL: 8.2E+00 |",
        "train:   1%|█  | {}.00/1.00k [00:10<10:00, 1.2it/s, loss=2.3]",
    ],
)
def test_what_is_not_plainly_a_training_step_makes_none(line: str) -> None:
    assert not KeyValueImporter().recognises([line.format(3)])
    assert steps(live(*[(i, line.format(i)) for i in range(1, 6)])) == []


def test_lightning_draws_over_its_line_and_validates_between_epochs() -> None:
    bar = "Epoch {}: {:3d}%|█  | {}/4 [00:01<00:09,  4.00it/s, v_num=0, train_loss={}.5]"
    val = "Validation DataLoader 0:  50%|█   | {}/2 [00:00<00:00, 50.0it/s]"
    log, t = [], 0.0
    for e in range(3):
        for n in range(5):
            t += 0.25 if n else 0
            log.append((t, bar.format(e, n * 25, n, n)))
        for n in range(3):
            t += 20
            log.append((t, val.format(n)))
    records = live(*log)
    found = steps(records)
    assert sum(s.steps or 0 for s in found) == 12
    assert found[-1].end_ns - found[0].start_ns == 123 * S
    assert marks(records, "restarted") == marks(records, "several_programs") == []


@pytest.mark.parametrize("loss", ["1,234.56", "2.5%"])
def test_batches_are_steps_also_where_their_loss_cant_be_read(loss: str) -> None:
    lines = [(n, f"| epoch 1 | {n}/2983 batches | lr 0.1 | loss {loss}") for n in range(1, 12)]
    assert len(steps(live(*lines))) == 10
