"""Tokens, samples, steps, losses and ranks: why a count is absent."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ergmeter.compare.run_curves import RunProgress
from ergmeter.metrics.definitions.tokens import steps_made
from ergmeter.metrics.live.totals import RunningTotals
from ergmeter.records import Flops, Mark, Missing, Reported, Step
from ergmeter.runlog.format import DroppedSteps
from tests.runs import even_steps, run_of
from tests.unit.metrics import test_missing_ranks
from tests.unit.metrics.reasons.case import Case, absent
from tests.unit.metrics.reasons.making import S, lacks, raised, refused
from tests.unit.metrics.test_inference import THREE
from tests.unit.metrics.test_parallel_layout import run_of_ranks, told
from tests.unit.metrics.test_running_totals import Growing

BARE = even_steps(10)
COMPUTED = even_steps(10, tokens_computed=5)
PRINTED: dict[str, Any] = {"steps": BARE, "stream": "output"}
INTEGRATION = {"training": {"id": "A", "world": 1, "model": "GPT2LMHeadModel"}}
DROPPED = DroppedSteps(3, 21, 0, 4 * S, 7 * S, "the disk refused: full").mark
SHARED = "ranks share their batches (tensor parallel, ...)"
EVALUATION = [Step(n * S, (n + 1) * S, phase="eval") for n in range(3)]


def tokens_so_far(folder: Path) -> list[str]:
    growing = Growing(folder / "run")
    found = RunningTotals(growing.writer.id).totals(growing.add(BARE)).tokens
    assert isinstance(found, Missing)
    return [found.reason]


def other_writer(folder: Path) -> list[str]:
    run = run_of(folder / "run", steps=BARE)
    return raised(lambda: RunningTotals("0123").totals(run))


IMAGES = Flops(1e9, "counted", "counted", samples_per_step=8)

CASES = [
    # -- not counted --
    absent(
        "a loop by hand that passes no tokens",
        "throughput.tokens_per_s",
        "the steps have no count of tokens: pass tokens= to meter.step, or give --tokens-per-step",
        steps=BARE,
    ),
    absent(
        "a printed loop without tokens",
        "throughput.tokens_per_s",
        "the output prints no tokens: print tokens=.., set include_num_input_tokens_seen",
        **PRINTED,
    ),
    absent(
        "Lightning with tensor parallelism",
        "throughput.tokens_per_s",
        f"the integration did not count tokens: {SHARED}, or give --tokens-per-step",
        steps=BARE,
        marks=[Mark(0, "tokens_not_counted", SHARED)],
        header=INTEGRATION,
    ),
    absent(
        "an integration in a training on images",
        "throughput.real_tokens_per_s",
        "the integration could not count real tokens from the model's inputs",
        steps=even_steps(10, samples=4),
        header=INTEGRATION,
    ),
    absent(
        "a loop by hand that passes computed tokens alone",
        "tokens.padding_frac",
        "the steps have no count of real tokens: pass tokens_real= to meter.step",
        steps=COMPUTED,
    ),
    absent(
        "a loop by hand that passes real tokens alone",
        "throughput.computed_tokens_per_s",
        "the steps have no count of computed tokens: pass tokens= to meter.step",
        steps=even_steps(10, tokens_real=5),
    ),
    absent(
        "a printed loop, which does not say which tokens bear a loss",
        "throughput.loss_tokens_per_s",
        "the output prints no loss-bearing tokens; a Meter counts them",
        steps=COMPUTED,
        stream="output",
    ),
    absent(
        "a loop by hand that passes no samples",
        "throughput.samples_per_s",
        "the steps have no count of samples: pass samples= to meter.step, or give"
        " --samples-per-step",
        steps=BARE,
    ),
    absent(
        "one of ten steps has no tokens",
        "throughput.tokens_per_s",
        "1 of 10 steps have no count of computed tokens",
        steps=[*COMPUTED[:9], BARE[9]],
    ),
    absent(
        "parameters were not declared",
        "throughput.tokens_per_parameter_per_s",
        "the number of parameters was not declared: --parameters, or Meter(parameters=...)",
        steps=COMPUTED,
    ),
    absent(
        "a training that called no `generate`",
        "tokens.generated",
        "no call of `generate` was seen in the window",
        steps=COMPUTED,
    ),
    # -- printed lines --
    absent(
        "a Trainer's dicts without its progress bar",
        "steps.count",
        "the output does not state how many steps a printed line covers; leave a Trainer's",
        steps=even_steps(10, steps=None),
        stream="output",
    ),
    absent(
        "one of ten printed lines does not say its step",
        "steps.count",
        "1 of 10 printed lines do not state how many steps they cover",
        steps=[*BARE[:9], replace(BARE[9], steps=None)],
        stream="output",
    ),
    absent(
        "printed lines, of which some may be missing",
        "steps.dropped",
        "printed lines do not show whether steps are missing; a Meter does",
        **PRINTED,
    ),
    absent(
        "a program that was recorded and printed no steps",
        "steps.dropped",
        "no steps were recorded",
        stream="output",
        marks=[Mark(9 * S, "ended", "finished")],
    ),
    # -- not all of it --
    absent(
        "three steps of the window were not written",
        "tokens.total",
        "part of the record is missing: 3 steps (21 tokens) in 3.000 s",
        steps=COMPUTED,
        marks=[DROPPED],
    ),
    absent(
        "three steps of the run were not written",
        "time.eval_s",
        "part of the record is missing: 3 steps (21 tokens) in 3.000 s",
        steps=[*COMPUTED, *EVALUATION],
        marks=[DROPPED],
    ),
    absent(
        "a run of evaluation and a checkpoint",
        "steps.count",
        "no training steps: the run has only eval and checkpoint spans",
        steps=[*EVALUATION, Step(5 * S, 6 * S, phase="checkpoint")],
    ),
    refused(
        "a run of requests",
        steps_made,
        "no training steps: the run has only prefill and decode spans",
        steps=THREE,
    ),
    refused(
        "a run of requests, on an axis of steps",
        lambda evidence: RunProgress(evidence).at("step", evidence.work["end_ns"]),
        "an inference run has requests and no steps",
        steps=THREE,
    ),
    Case(
        "a program that asks for its tokens so far and passes none",
        tokens_so_far,
        "the steps have no count of tokens",
    ),
    Case("totals of a writer of another run", other_writer, "has no writer 0123"),
    # -- ranks --
    lacks(
        "a Meter in one of four ranks",
        "energy.joules_per_token",
        "3 of the 4 ranks recorded no steps (1, 2, 3): the tokens of all ranks are unknown; use a"
        " Meter in each rank",
        lambda path: test_missing_ranks.run_of(path, (0,)),
    ),
    lacks(
        "a Meter in one of four ranks on two nodes, which share their tokens",
        "energy.joules_per_token",
        "2 GPUs sampled for 4 ranks, 3 of which recorded no steps: their GPUs may be on other",
        lambda path: test_missing_ranks.run_of(path, (0,), gpus=2),
        layout="tp=4",
    ),
    lacks(
        "a declared layout that does not divide the ranks",
        "tokens.total",
        "tp=3: 3 does not divide the 4 ranks",
        lambda path: run_of_ranks(path, 100, 100, 100, 100),
        layout="tp=3",
    ),
    lacks(
        "a framework that places two of four ranks",
        "tokens.total",
        "the framework places 2 of the 4 ranks (tp=2): which ranks share tokens is unknown;"
        " pass --layout tp=2,...",
        lambda path: run_of_ranks(
            path, *[100] * 4, headers={rank: told(tp=(rank % 2, 2)) for rank in range(4)}
        ),
    ),
    # -- what the training says --
    absent(
        "a loop by hand that sets no loss",
        "training.loss",
        "no step has a loss: set step.loss, print loss=.., or use an integration (a Trainer logs",
        steps=BARE,
    ),
    absent(
        "a model of images, whose samples were counted",
        "throughput.tokens_per_s",
        "the model is called without token ids: throughput.samples_per_s has its rate",
        steps=[replace(one, samples=8) for one in BARE],
        header={"flops": [asdict(IMAGES)]},
    ),
    absent(
        "a program that prints its rate, and no tokens",
        "throughput.whole_run_tokens_per_s",
        "printed rates are of steps, not of the whole run",
        steps=BARE,
        reported=[Reported(n * S, "tok/s", 512.0, "tokens/s") for n in range(10)],
    ),
    absent(
        "every step began and ended at one instant",
        "throughput.steps_per_s",
        "the steps have no duration: all began and ended at one instant",
        steps=[Step(0, 0, index=n) for n in range(12)],
    ),
    absent(
        "a loop by hand that sets no learning rate",
        "training.learning_rate",
        "no step has a learning rate: set step.learning_rate, use an integration, or print lr=..",
        steps=BARE,
    ),
    absent(
        "a loop by hand that sets no gradient norm",
        "training.grad_norm",
        "no step has a grad norm: set step.grad_norm, use an integration, or print grad_norm=..",
        steps=BARE,
    ),
    absent(
        "the loss is NaN from step 5 on",
        "training.loss",
        "diverged: loss is not a number (nan) from step 5 on; the last number was 2 at step 4",
        steps=[replace(one, loss=2.0 if n < 5 else math.nan) for n, one in enumerate(BARE)],
    ),
    absent(
        "every loss is NaN",
        "training.loss",
        "diverged: loss is not a number (nan) from step 0 on; no step of the window before it has",
        steps=[replace(one, loss=math.nan) for one in BARE],
    ),
]
