"""Energy of phases, steps and idle devices: why joules are absent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.metrics.time_breakdown import time_breakdown
from ergmeter.records import Device, Reading, Sample, Step
from tests.runs import GPU, even_steps, run_of
from tests.unit.metrics.reasons.case import Case, absent
from tests.unit.metrics.reasons.making import S, lacks, readings_of_gpu
from tests.unit.metrics.test_idle import FACTS, calibrated, run_on
from tests.unit.metrics.test_inference import THREE

STEPS = even_steps(20, tokens_computed=1)
ALL = {"warmup_steps": 0}
BARE = Device("GPU-0", "gpu", "NVIDIA H200", "nvml", FACTS)
AMD = Device("ff-1", "gpu", "AMD Instinct MI300X", "amd", FACTS)


def of_gpu(samples: list[Sample], **more: Any) -> dict[str, Any]:
    return {"steps": STEPS, "devices": [GPU], "samples": samples, **more}


def idle_of(start_s: float, end_s: float) -> list[Step]:
    return [*STEPS, Step(round(start_s * S), round(end_s * S), phase="idle")]


def printed_parts(folder: Path) -> list[str]:
    contents = of_gpu(readings_of_gpu(-1, 21, power_w=100.0), stream="output")
    return [time_breakdown(evidence_of(run_of(folder / "run", **contents))).why_no_joules]


def note_of_net(folder: Path) -> list[str]:
    found = summarize(run_on(folder / "run", calibrated())).readings["energy.net_j"]
    assert isinstance(found, Reading)
    return [found.note]


CASES = [
    # -- curves --
    absent(
        "power readings from 5 s after the first step",
        "energy.run_j",
        "readings begin 5.00 s after the window does",
        settings=ALL,
        **of_gpu(readings_of_gpu(5, 21, power_w=100.0)),
    ),
    absent(
        "power readings until 5 s before the last step's end",
        "energy.run_j",
        "readings end 5.00 s before the window does",
        settings=ALL,
        **of_gpu(readings_of_gpu(-1, 15, power_w=100.0)),
    ),
    absent(
        "power readings that end before an evaluation, after which training went on",
        "energy.run_j",
        "readings end 10.00 s before the window does",
        settings=ALL,
        **of_gpu(
            readings_of_gpu(-1, 15, power_w=100.0),
            steps=[
                *STEPS,
                Step(20 * S, 22 * S, phase="eval"),
                *(Step((22 + n) * S, (23 + n) * S, 20 + n, tokens_computed=1) for n in range(3)),
            ],
        ),
    ),
    absent(
        "no power reading between 8 and 13 s",
        "energy.run_j",
        "no power reading for 5.0 s (limit 2 s)",
        settings=ALL,
        **of_gpu([*readings_of_gpu(-1, 8, power_w=100.0), *readings_of_gpu(13, 21, power_w=100.0)]),
    ),
    absent(
        "an energy counter that never moved",
        "energy.run_j",
        "the energy counter stood still at 5.0 J for 22.0 s",
        settings=ALL,
        **of_gpu([Sample(t * S, GPU.id, energy_j=5.0) for t in range(-1, 22)]),
    ),
    absent(
        "an energy counter that was read once",
        "energy.run_j",
        "the energy counter was read once: two readings are needed",
        settings=ALL,
        **of_gpu([Sample(S, GPU.id, energy_j=5.0)]),
    ),
    absent(
        "an energy counter that a driver reset",
        "energy.run_j",
        "the energy counter was reset from 1000.0 to 0.0 J",
        settings=ALL,
        **of_gpu(
            [Sample(t * S, GPU.id, energy_j=900 + 10.0 * t if t < 11 else 0) for t in range(22)]
        ),
    ),
    absent(
        "a sensor that reads 0 W",
        "energy.run_j",
        "power reads 0 W throughout: the sensor does not work",
        settings=ALL,
        **of_gpu(readings_of_gpu(-1, 21, power_w=0.0)),
    ),
    absent(
        "a sensor that was read once",
        "energy.run_j",
        "only one power reading",
        settings=ALL,
        **of_gpu(readings_of_gpu(5, 5.1, power_w=100.0)[:1]),
    ),
    absent(
        "a sensor that read infinite power once",
        "energy.run_j",
        "a power reading is not a number",
        settings=ALL,
        **of_gpu([*readings_of_gpu(-1, 20, power_w=9.0), Sample(21 * S, GPU.id, power_w=math.inf)]),
    ),
    # -- idle --
    lacks(
        "a GPU without a calibration in a run without an idle span",
        "energy.idle_w",
        "NVIDIA H200 [GPU-0]: the run has no idle span (`with meter.phase('idle')` for some"
        " seconds of the run measures it), and",
        lambda path: run_on(path, BARE),
    ),
    lacks(
        "a GPU of AMD without an idle span",
        "energy.idle_w",
        "`erg calibrate` measures idle power of NVIDIA GPUs only",
        lambda path: run_on(path, AMD),
    ),
    lacks(
        "a calibration of a GPU without a power sensor",
        "energy.idle_w",
        "the calibration of GPU-0 has no idle power: no power sensor that answers",
        lambda path: run_on(
            path, calibrated(idle=None, absent={"idle power": "no power sensor that answers"})
        ),
    ),
    lacks(
        "a calibration while another process was on the GPU",
        "energy.idle_w",
        "the calibration of GPU-0 has 121.5 W, not at rest: when calibrated, not alone: process 77",
        lambda path: run_on(path, calibrated(remarks=["not alone: process 77 was on the device"])),
    ),
    absent(
        "an idle span of a second",
        "energy.idle_w",
        "no idle span is longer than 1.5 s",
        **of_gpu(readings_of_gpu(-1, 21, power_w=100.0), steps=idle_of(20, 21)),
    ),
    absent(
        "an idle span after the last reading",
        "energy.idle_w",
        "the device's readings cover no idle span",
        **of_gpu(readings_of_gpu(-1, 21, power_w=100.0), steps=idle_of(25, 30)),
    ),
    lacks(
        "a run that drew less than the calibrated idle power",
        "energy.net_j",
        "the run drew 2 kJ, less than the 2.43 kJ that idle devices would have drawn (121.5 W,",
        lambda path: run_on(path, calibrated(), watts=100.0),
        **ALL,
    ),
    Case("a calibrated GPU: the note of its net energy", note_of_net, "idle 121.5 W (as calibrat"),
    # -- phases and steps --
    absent(
        "a training that saved no checkpoint",
        "energy.checkpoint_j",
        "no checkpoint span was recorded",
        **of_gpu(readings_of_gpu(-1, 21, power_w=100.0)),
    ),
    absent(
        "readings that begin after an evaluation",
        "energy.train_j",
        "Test GPU [GPU-0]: its readings do not cover 1 of 2 spans (eval, train)",
        **of_gpu(
            readings_of_gpu(-1, 21, power_w=100.0),
            steps=[Step(-9 * S, -5 * S, phase="eval"), *STEPS],
        ),
    ),
    absent(
        "a program that was recorded and printed no steps, outside of them",
        "energy.rest_j",
        "no span was recorded",
        devices=[GPU],
        samples=readings_of_gpu(-1, 21, power_w=100.0),
        stream="output",
    ),
    absent(
        "a recorded program that prints its steps, of the energy of training",
        "energy.train_j",
        "printed lines do not show when a phase began; a Meter does",
        **of_gpu(readings_of_gpu(-1, 21, power_w=100.0), stream="output"),
    ),
    Case(
        "a recorded program that prints its steps, of the parts of its energy",
        printed_parts,
        "printed lines do not show when a phase began; a Meter does",
    ),
    absent(
        "a recorded program that prints its steps, of the energy of each",
        "energy.step_median_j",
        "a printed line does not show when its step began; a Meter does",
        **of_gpu(readings_of_gpu(-1, 21, power_w=100.0), stream="output"),
    ),
    absent(
        "a program that was recorded and printed no steps, of the energy of each",
        "energy.step_median_j",
        "no steps were recorded",
        devices=[GPU],
        samples=readings_of_gpu(-1, 21, power_w=100.0),
        stream="output",
    ),
    absent(
        "requests, of the energy of each step",
        "energy.step_median_j",
        "no training steps: requests overlap, and differ in length",
        **of_gpu(readings_of_gpu(-1, 21, power_w=100.0), steps=THREE),
    ),
    absent(
        "steps that were merged ten by ten, of the energy of each",
        "energy.step_median_j",
        "a row holds several steps: a single step's energy is not known",
        **of_gpu(readings_of_gpu(-1, 21, power_w=100.0), steps=even_steps(20, steps=10)),
    ),
    absent(
        "readings that ended before the first step",
        "energy.step_median_j",
        "the devices' readings cover no step",
        **of_gpu(readings_of_gpu(-9, -5, power_w=100.0)),
    ),
]
