"""Findings of `erg check`, and checks that could not be made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ergmeter.records import Device, Flops, Mark, Sample, Step, WorkPart
from ergmeter.runlog.reader import Run
from tests.runs import GPU, add_writer, even_steps, make_run, run_of
from tests.unit.metrics.reasons.case import Case
from tests.unit.metrics.reasons.making import Maker, checks
from tests.unit.metrics.test_checks import CAPPED, HOT, made, read
from tests.unit.metrics.test_explain_made import COUNTERS, STEP
from tests.unit.metrics.test_explain_made import made as counted
from tests.unit.metrics.test_stragglers import run_of as ranks_of

S = 10**9


def gpu(**values: Any) -> Maker:
    """Ten seconds of even steps on a GPU, of which some readings are functions of the time."""
    return lambda path: made(path, **values)


def in_a_row(lasts_s: Iterable[float], **fields: Any) -> list[Step]:
    """Steps that took so long, one after the other."""
    edges = [0]
    for one in lasts_s:
        edges.append(edges[-1] + round(one * S))
    each = fields.pop("each", 1)
    return [
        Step(start, end, index=number * (each or 1), steps=each, tokens_computed=10, **fields)
        for number, (start, end) in enumerate(pairwise(edges))
    ]


def steps(*lasts_s: float, **fields: Any) -> Maker:
    return lambda path: made(path, in_a_row(lasts_s, **fields))


def beside_others(path: Path) -> Run:
    """A stall on a machine of two cores that are both busy, half a core of it by the program."""
    node = Device("node:h", "node", "h", "node", {"cores": 2})
    program = Device("process:h:1", "process", "train.py", "process")
    samples = [
        sample
        for t in range(14)
        for sample in (
            Sample(t * S, node.id, busy_frac=1.0),
            Sample(t * S, program.id, cpu_s=0.5 * t),
        )
    ]
    return run_of(path, steps=in_a_row(STALL), samples=samples, devices=[node, program])


def printed(*lasts_s: float, **fields: Any) -> Maker:
    """Steps that were seen in the program's output."""
    rows = in_a_row(lasts_s, **fields)
    return lambda path: run_of(path, steps=rows, stream="output")


def ranks(*rows: list[Step], is_killed: bool = False, **header: Any) -> Maker:
    """A writer for each of these lists."""
    header |= {"pid_started_s": 1.0} if is_killed else {}  # another process has its number now

    def make(path: Path) -> Run:
        run = make_run(path)
        for own in rows:
            add_writer(run, steps=own, header=header, closed=not is_killed)
        return Run.open(run)

    return make


def tensor_cores(
    flops: Flops = STEP, count: int = 40, rows: list[Step] | None = None, **values: Any
) -> Maker:
    """Steps of 250 ms at 40 % of the peak, tensor cores active as COUNTERS or `values` say."""
    rows = rows or even_steps(count, seconds=0.25, tokens_computed=100)
    return lambda path: counted(path, rows, flops=flops, **{**COUNTERS, **values})


def with_a_silent_gpu(path: Path) -> Run:
    silent = replace(GPU, id="GPU-1")
    hot = read(12.0, throttled=HOT, clock_hz=1e9)
    rows = even_steps(12, tokens_computed=1)
    return run_of(path, steps=rows, samples=hot, devices=[GPU, silent])


def waiting(path: Path) -> Run:
    """Waits for data and steps of 250 ms each, in turn."""
    rows = [
        Step(t_ns, t_ns + S // 4, phase=phase, tokens_computed=tokens)
        for n in range(40)
        for t_ns, phase, tokens in (
            (n * S // 2, "data", None),
            (n * S // 2 + S // 4, "train", 1),
        )
    ]
    return made(path, rows)


def compiled_first(count: int) -> list[Step]:
    """A step of 60 s, then even ones."""
    rows = even_steps(count, seconds=0.25, tokens_computed=100)
    late = [
        replace(row, start_ns=row.start_ns + 60 * S, end_ns=row.end_ns + 60 * S) for row in rows
    ]
    return [replace(rows[0], end_ns=late[0].start_ns), *late]


STALL = [*[0.25] * 30, 2.0, *[0.25] * 9]
SLOW = [*[1.5] * 5, *[0.25] * 35]


def third_of(flops: Flops) -> Flops:
    third = flops.model_per_step / 3, (flops.hardware_per_step or 0) / 3
    return replace(flops, model_per_step=third[0], hardware_per_step=third[1])


CASES: list[Case] = [
    # -- the verdict
    checks(
        "a run without a GPU",
        "not known: 8 of 17 checks could not be made, throttling among them",
        lambda path: run_of(path, steps=even_steps(40, tokens_computed=10)),
    ),
    checks(
        "a quiet run whose FLOPs are unknown",
        "fit to be compared (16 of 17 checks made)",
        gpu(),
    ),
    checks(
        "two steps and no sensors",
        "not fit to be compared (6 of 17 checks made)",
        lambda path: run_of(path, steps=even_steps(2, tokens_computed=10)),
    ),
    # -- the record
    checks(
        "samples were dropped because the disk was full",
        "part of the record is missing: rows dropped: 12 samples: metrics that need it are absent,"
        " or cover only what is left",
        gpu(marks=[Mark(S, "rows_dropped", "12 samples")]),
    ),
    checks(
        "steps were merged because there were many",
        "2 steps a row: totals and rates are exact; a step's time is the mean over its row",
        gpu(marks=[Mark(S, "steps_merged", "2 steps a row")]),
    ),
    checks(
        "a command printed and recorded nothing",
        "no steps were seen: only the whole run can be compared: its time, energy and memory",
        lambda path: run_of(path, samples=read(10.0), devices=[GPU]),
    ),
    checks(
        "a command that made no step has no stalls",
        "stalls: no steps were seen",
        lambda path: run_of(path, samples=read(10.0), devices=[GPU]),
    ),
    checks(
        "a run that only evaluated",
        "no training steps, only eval: only the whole run can be compared",
        lambda path: run_of(path, steps=even_steps(5, phase="eval")),
    ),
    checks(
        "the program was killed",
        "the run was cut off: the window ends with the last records that were written",
        ranks(even_steps(40, tokens_computed=10), is_killed=True),
    ),
    checks(
        "one of two ranks recorded no steps",
        "1 of the 2 ranks recorded no steps (1): tokens are of the other ranks only: metrics per"
        " device or per joule are absent",
        ranks(even_steps(40, tokens_computed=10, rank=0), world=2, rank=0),
    ),
    checks(
        "one of two ranks recorded no steps, and the tokens of a step were declared",
        "tokens are those declared, not counted on every rank",
        ranks(even_steps(40, tokens_computed=10, rank=0), world=2, rank=0),
        tokens_per_step=20,
    ),
    # -- other programs
    checks(
        "the GPU was read and its processes were not",
        "company: the processes on the GPU could not be identified",
        lambda path: run_of(
            path, steps=even_steps(40, seconds=0.25), samples=read(10.0), devices=[GPU]
        ),
    ),
    checks(
        "a shell computed on the GPU of the run",
        "another program computed on a GPU of this run: GPU-0 bash (7): time, memory and energy are"
        " not this run's alone",
        gpu(marks=[Mark(S, "device_shared", f"{GPU.id} bash (7)")]),
    ),
    # -- the window
    checks(
        "40 steps in 2 s",
        "the window is 2 s long, with 40 steps: too little to separate speed from chance: measure"
        " 5 s or more",
        steps(*[0.05] * 40),
    ),
    checks(
        "8 steps in 16 s",
        "8 steps in 16 s: too little to separate speed from chance: measure 10 steps or more",
        steps(*[2.0] * 8),
    ),
    checks(
        "8 printed lines of ten steps each in 16 s",
        "8 printed lines in 16 s: too little to separate speed from chance: measure 10 printed",
        printed(*[2.0] * 8, each=10),
    ),
    checks(
        "4 steps in 1 s",
        "the window is 1 s long, with 4 steps: too little to separate speed from chance: measure"
        " 5 s and 10 steps or more",
        steps(*[0.25] * 4),
    ),
    checks(
        "8 steps are too few to find a stall among them",
        "stalls: 8 steps: too few to tell a stall from the rest",
        steps(*[2.0] * 8),
    ),
    checks(
        "8 rows of ten steps each",
        "warm_up: 8 rows: too few to tell a slow beginning from the rest",
        steps(*[2.0] * 8, each=10),
    ),
    checks(
        "three of five slow steps were declared as warm-up",
        "the first 2 counted steps are up to 6.0 times as slow as the median: they cost 21.3 %"
        " of the time: --warmup-steps 5 leaves them out",
        steps(*SLOW),
        warmup_steps=3,
    ),
    checks(
        "the window was chosen by its steps, and begins in a slow beginning",
        "--window 5:40 leaves them out",
        steps(*SLOW),
        window="3:40",
    ),
    checks(
        "the whole run was chosen, so that its warm-up is in it",
        "warm_up: a whole run includes its warm-up",
        steps(*SLOW),
        window="whole",
    ),
    checks(
        "the whole run was chosen, which has no interval",
        "noise: no interval over a whole run: it includes start-up and pauses",
        steps(*[0.25] * 40),
        window="whole",
    ),
    checks(
        "8 steps have no interval",
        "noise: 8 steps: too few for an interval, which needs 10",
        steps(*[2.0] * 8),
    ),
    checks(
        "steps whose time grows from 0.1 s to 0.4 s",
        "steps per second are known to ± 17 %: differences below 17 % may be chance: measure",
        steps(*[0.1 + 0.0075 * number for number in range(40)]),
    ),
    # -- stalls and pauses
    checks(
        "one of 40 steps took 2 s, the others 250 ms",
        "1 of 40 steps took twice the median or more, up to 1.75 s beyond it: 14.9 % of the time:"
        " find what delays these steps",
        steps(*STALL),
    ),
    checks(
        "one of 40 steps took 2 s while other programs kept 1.5 of 2 cores busy",
        "14.9 % of the time: other programs kept 1.5 of 2 cores busy, which may have stopped the"
        " steps: measure on a quiet machine",
        beside_others,
    ),
    checks(
        "one of 40 printed steps took 2 s, the others 250 ms",
        "stalls: 1 of 40 steps took twice the median or more, up to 1.75 s beyond it",
        printed(*STALL),
    ),
    checks(
        "a printed line does not say how many steps it stands for",
        "stalls: printed lines do not state how many steps they cover",
        printed(*[0.25] * 40, each=None),
    ),
    checks(
        "rows of two steps follow rows of one",
        "stalls: rows cover different numbers of steps",
        lambda path: made(
            path,
            [replace(one, steps=1 + (one.index or 0) // 20) for one in in_a_row([0.25] * 40)],
        ),
    ),
    checks(
        "requests were answered",
        "stalls: requests differ in length: a long one is not a stall",
        lambda path: made(path, even_steps(40, phase="decode", tokens_real=10)),
    ),
    checks(
        "the loop waits 250 ms for data before each step",
        "of the window (9.75 s, 39 times): it is part of the window: compare runs that spend as"
        " much on it",
        waiting,
    ),
    checks(
        "one of six ranks comes 200 ms late to each step",
        "20.0 % of each step: look at its data loading, its host and its GPU",
        lambda path: ranks_of(path, *[(0.02, 1.0)] * 5, (0.22, 1.0)),
    ),
    # -- devices
    checks(
        "the GPU was not read for 3 s of 10",
        "Test GPU was not read for 3 s: its power is unknown for 30.0 % of the window, its energy"
        " at best a total",
        lambda path: made(
            path, samples=[one for one in read(10.0) if not 4 * S < one.t_ns < 7 * S]
        ),
    ),
    checks(
        "the GPU was too hot in half of the readings",
        "Test GPU: throttled by heat in 50 % of the readings: it is slower than the same chip when"
        " cooled; clock 1900 MHz (median)",
        gpu(throttled=lambda t: HOT if t > 5 else 0),
    ),
    checks(
        "the power supply of the GPU asked for a slowdown",
        "Test GPU: throttled by a hardware slowdown in 100 % of the readings: it is slower than the"
        " same chip with enough power and cooling",
        gpu(throttled=0x80),
    ),
    checks(
        "the GPU was at its power limit",
        "Test GPU: at its power limit in 100 % of the readings: the limit sets the speed: compare"
        " at the same limit",
        gpu(throttled=CAPPED),
    ),
    checks(
        "the clock fell from 1980 to 1500 MHz",
        "Test GPU: the clock moved between 1500 and 1980 MHz: the speed varies with it, by up to"
        " 24 %",
        gpu(clock_hz=lambda t: 1.98e9 if t < 5 else 1.5e9),
    ),
    checks(
        "the GPU warmed by 10 degrees",
        "Test GPU: warmed from 40 to 50 °C in the window: a warm chip draws more and clocks lower:"
        " leave the warming out with --warmup-s",
        gpu(temperature_c=lambda t: 40 + max(0.0, t)),
    ),
    checks(
        "the GPU waited for the host four fifths of the time",
        "Test GPU: busy 20 % of the time: the rest of the program sets the speed: the run says"
        " little about the device",
        gpu(busy_frac=0.2),
    ),
    checks(
        "the power of the GPU reads 500 W while its counter grows by 400 W",
        "Test GPU: integrated power is 25 % more than its counter says: a sensor is off, or power"
        " was read too seldom; the reported energy is the counter's",
        gpu(energy_j=lambda t: 1e4 + 400.0 * t),
    ),
    checks(
        "the memory of the GPU grows by 200 MB a second",
        "Test GPU: memory only grows, by 1.5 GB in the window: a longer run may run out of memory",
        gpu(memory_bytes=lambda t: 10**10 + round(2e8 * t)),
    ),
    checks(
        "a program loaded a model and made no step",
        "memory: no training steps were seen, and memory always grows at start-up",
        lambda path: run_of(path, samples=read(10.0), devices=[GPU]),
    ),
    checks(
        "one of two GPUs was never read",
        "Test GPU [GPU-1]: no reading has",
        with_a_silent_gpu,
    ),
    # -- the FLOP count
    checks(
        "the tensor cores were active 50 % of the time and a third of the FLOPs was counted",
        "the tensor cores did 3.21 times (3.21 to 3.21) the counted FLOPs: 45.0 % of the peak by"
        " hardware counters, 14.0 % counted: MFU may be too low: products were not counted",
        tensor_cores(third_of(STEP)),
    ),
    checks(
        "the tensor cores were active 30 % of the time and 42 % of the peak was counted",
        "27.0 % of the peak by hardware counters, 42.0 % counted: MFU is too high: check the model,"
        " its tokens, the peak and the number of devices",
        tensor_cores(tensor_frac=0.3),
    ),
    checks(
        "hardware counters over 2 s",
        "flop_count: the window is 2 s: counters over less than 5 s are too coarse to check the"
        " FLOP count",
        tensor_cores(count=8),
    ),
    checks(
        "a third of the FLOPs was counted, and no other model was called",
        "14.0 % counted: MFU is too low: products were not counted, such as a head inside the loss",
        tensor_cores(replace(third_of(STEP), other_work=())),
    ),
    checks(
        "a third of the FLOPs was counted, and generation could not be",
        "14.0 % counted: work beside the trained model was not counted: generation",
        tensor_cores(replace(third_of(STEP), other_work=(WorkPart("generation", None),))),
    ),
    checks(
        "a compile step of 60 s in the window",
        "flop_count: the counted FLOPs may be anything from 0 % of the peak up, as steps differ too"
        " much in length: too uncertain to be checked",
        tensor_cores(rows=compiled_first(40)),
        warmup_steps=0,
    ),
    checks(
        "matmuls that do not use the tensor cores",
        "flop_count: tensor cores were active 1.0 % of the time, too little to check the FLOP"
        " count: matmuls may run outside them",
        tensor_cores(tensor_frac=0.01),
    ),
    checks(
        "three times the FLOPs that the GPU can do were counted",
        "flop_count: the counted FLOPs are impossible: above 100 %",
        tensor_cores(replace(STEP, model_per_step=3e15, hardware_per_step=3e15)),
    ),
    checks(
        "the tensor cores were read every 4 s for a part of it",
        "flop_count: the counters of NVIDIA H200 cover",
        tensor_cores(tensor_frac=lambda t: 0.5 if round(10 * t) % 3 == 0 else None),
    ),
]
