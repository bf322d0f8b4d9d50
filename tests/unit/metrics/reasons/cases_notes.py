"""Notes: what a summary adds to its figures, and the fact that gives rise to each."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from ergmeter.records import Device, Mark, Sample, Step
from ergmeter.runlog.format import DroppedSteps
from ergmeter.runlog.reader import Run
from tests.runs import GPU, add_writer, even_steps, make_run, run_of
from tests.unit.metrics.reasons.case import Case, noted
from tests.unit.metrics.reasons.making import S, noted_of_run
from tests.unit.metrics.test_gpu_use import GPUS, made, unknown, unused, used

STEPS = even_steps(20, tokens_computed=10)
NODE = Device("node:h", "node", "h", "node", {"disk_total_bytes": 10**12})
MISSING = "part of the record is missing: "


def of_mark(fact: str, name: str, detail: str, expected: str = "{}") -> Case:
    """A mark, by the words of whoever writes it, and the caution that it becomes."""
    marks = [Mark(5 * S, name, detail)]
    return noted(fact, expected.format(detail), steps=STEPS, marks=marks, devices=[GPU])


def early_rank(path: Path) -> Run:
    run = make_run(path)
    add_writer(run, steps=STEPS)
    add_writer(run, steps=[replace(one, rank=1) for one in STEPS[:10]])
    return Run.open(run)


def half_a_second(path: Path) -> Run:
    now_ns = time.monotonic_ns()  # of which the mark of its end is
    steps = [
        replace(one, start_ns=one.start_ns + now_ns, end_ns=one.end_ns + now_ns)
        for one in even_steps(5, seconds=0.1)
    ]
    clock = {"monotonic_ns": now_ns, "wall_ns": 1_800_000_000 * S}
    return run_of(path, steps=steps, header={"clock": clock})


def two_of_rank_0(path: Path) -> Run:
    run = make_run(path)
    for _ in range(2):
        add_writer(run, steps=STEPS)
    return Run.open(run)


def damaged(path: Path) -> Run:
    run = run_of(path, steps=STEPS)
    [steps] = path.glob("*/steps-*")
    steps.write_bytes(b"no table")
    return run


CASES = [
    of_mark(
        "nvidia-smi hung and its probe stopped",
        "probe_failed",
        "nvml: a reading took more than 10 s",
        "a probe stopped during the run: {}",
    ),
    of_mark(
        "another program was seen on the GPU",
        "device_shared",
        "GPU-0 process 77 (python)",
        "other programs computed on a GPU of this run: {}",
    ),
    of_mark(
        "a GPU fell off the bus",
        "device_lost",
        "GPU-0: NVML says GPU is lost",
        "a device was lost during the run: {}",
    ),
    of_mark(
        "somebody else took the hardware counters",
        "activity_failed",
        "GPU-0: NVML says In use by another client",
        "hardware counters could no longer be read: {}",
    ),
    of_mark(
        "the disk was full for a while",
        "rows_dropped",
        "the disk refused: [Errno 28] No space left on device",
        MISSING + "{}",
    ),
    of_mark(
        "the disk was too slow for the samples",
        "samples_dropped",
        "nvml: 120 samples dropped, as the disk was too slow",
        MISSING + "{}",
    ),
    of_mark(
        "a hand-over to the disk failed",
        "handover_failed",
        "OSError: input/output error",
        MISSING + "{}",
    ),
    of_mark(
        "steps waited for the disk and were merged",
        "steps_merged",
        "90000 steps were merged into rows of up to 2",
        "{}; totals and rates are exact, the time of a step is the mean of its row",
    ),
    of_mark(
        "a Trainer in a notebook was started a second time",
        "restarted",
        "the epoch went from 3 back to 0.1",
        "the output starts over: {}",
    ),
    of_mark(
        "a webhook refused an alert",
        "alert_failed",
        "command notify: 1",
        "an alert was not delivered: {}",
    ),
    of_mark(
        "a rule about the loss in a run without losses",
        "alert_unjudged",
        "loss nan: no step reports loss",
        "an alert was not judged: {}",
    ),
    of_mark(
        "the thread that judges alerts failed",
        "alarm_failed",
        "ZeroDivisionError: x",
        "alerts may be missing: {}",
    ),
    of_mark(
        "an alert ended the training",
        "stop_asked",
        "energy > 1 kJ: 1.2 kJ used",
        "the run was asked to stop: {}",
    ),
    of_mark(
        "a sink was not reachable",
        "sink_failed",
        "wandb: 3 updates were not sent",
        "a sink failed: {}",
    ),
    of_mark(
        "a sink was reachable again",
        "sink_recovered",
        "wandb: after 2 failures",
        "a sink recovered: {}",
    ),
    of_mark(
        "an integration raised",
        "integration_failed",
        "AttributeError: no `train`",
        "ergmeter stopped measuring inside the program: {}",
    ),
    noted(
        "one printed loss was NaN, and later ones were numbers",
        "loss is not a number (nan) from step 3 on",
        steps=[replace(one, loss=2.0) for one in STEPS],
        marks=[Mark(4 * S, "value_refused", "loss is not a number (nan) from step 3 on")],
        stream="output",
    ),
    noted(
        "the process was killed",
        "the run was cut off: its process was killed, or could no longer write",
        steps=STEPS,
        closed=False,
        header={"pid_started_s": 1.0},
    ),
    noted_of_run("a file of steps was overwritten", "damaged file left out: ", damaged),
    noted(
        "three steps could not be written",
        MISSING + "3 steps (21 tokens) in 3.000 s were not recorded: the disk refused: full",
        steps=STEPS,
        marks=[DroppedSteps(3, 21, 0, 4 * S, 7 * S, "the disk refused: full").mark],
    ),
    noted(
        "steps were profiled late in the run",
        "profiled steps, which are slower, are in the window: --window or --warmup-steps leaves",
        steps=STEPS,
        marks=[Mark(17 * S, "profile_unread")],
    ),
    noted(
        "meter.step and an integration recorded each step",
        "steps of one process overlap, as if each was recorded twice",
        steps=[*STEPS, *(replace(one, end_ns=one.end_ns - S // 10) for one in STEPS)],
    ),
    noted(
        "tokens per step were declared for a program that counts its own",
        "--tokens-per-step 4096 is not used: the program reports its own tokens",
        steps=STEPS,
        settings={"tokens_per_step": 4096},
    ),
    noted(
        "the first step compiled, and no warm-up was asked for",
        "the first step took 6 s, 6 times the median, and is counted; --warmup-steps 1",
        steps=[replace(STEPS[0], start_ns=-5 * S), *STEPS[1:]],
        settings={"warmup_steps": 0},
    ),
    noted(
        "every fifth step took three times as long",
        "noisy: step time's 95th percentile is 3.0 times its median",
        steps=[
            Step(t * S, (t + 1 + 2 * (n % 5 == 4)) * S, index=n)
            for n in range(40)
            for t in [n + 2 * (n // 5)]
        ],
    ),
    noted(
        "six steps",
        "fewer than ten steps or printed lines were timed: too few for an interval",
        steps=STEPS[:6],
    ),
    noted_of_run(
        "a run of half a second",
        "just 500 ms long: memory and CPU, read every 2 to 3 s, may be absent",
        half_a_second,
    ),
    noted_of_run(
        "two processes that each are rank 0",
        "2 processes at the same time are rank 0",
        two_of_rank_0,
    ),
    noted_of_run(
        "a rank ended after ten of twenty steps",
        "ranks made 10 to 20 steps: one began late or ended early",
        early_rank,
    ),
    noted_of_run(
        "no process of the run was on the second GPU",
        "not used by this run, so not in its energy, peak and device count: NVIDIA H200 [GPU-b]",
        lambda path: made(path, used("GPU-a"), unused("GPU-b")),
    ),
    noted_of_run(
        "the driver does not list the processes on the second GPU",
        "whether this run used NVIDIA H200 [GPU-b] is unknown: the driver did not always list",
        lambda path: made(path, used("GPU-a"), unknown("GPU-b")),
    ),
    noted_of_run(
        "a run of an older version, which did not look who is on a GPU",
        f"which of the {len(GPUS)} visible GPUs the program used could not be seen: all count",
        made,
    ),
    noted(
        "5 GB of 1 TB were left on the disk",
        "the disk was nearly full: 5.00 GB of 1000 GB were left",
        steps=STEPS,
        devices=[NODE],
        samples=[Sample(t * S, NODE.id, disk_free_bytes=5 * 10**9) for t in range(20)],
    ),
]
