"""Reasons for absent energy, power, carbon and cost, and for power curves that are not drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ergmeter.records import Device, Mark, Sample
from ergmeter.runlog.reader import Run
from tests.runs import GPU, add_writer, even_steps, make_run, run_of
from tests.unit.metrics.reasons.case import Case, absent
from tests.unit.metrics.reasons.making import checks, lacks
from tests.unit.metrics.test_carbon import samples
from tests.unit.metrics.test_checks import made, read
from tests.unit.metrics.test_gpu_use import GPUS, PACKAGE, unused
from tests.unit.metrics.test_gpu_use import made as on_two_gpus
from tests.unit.metrics.test_peak_power import short_run
from tests.unit.metrics.test_run_curves import OTHER, why
from tests.unit.metrics.test_trainings import SAMPLES, training

S = 10**9
ON_A_GPU: dict[str, Any] = {
    "steps": even_steps(10, tokens_computed=250),
    "samples": samples(GPU, 360, 10),
    "devices": [GPU],
}
AVERAGED = replace(GPU, facts={"power_field": "draw"})


def two_at_once(path: Path) -> Run:
    run = make_run(path)
    add_writer(run, samples=SAMPLES, devices=[GPU])
    for name in ("A", "B"):
        add_writer(run, steps=even_steps(10, tokens_computed=1), header=training(name))
    return Run.open(run).training(1)


def no_curve(fact: str, expected: str, samples: list[Sample], *devices: Device) -> Case:
    """A run of ten seconds without a power curve in `erg compare`."""

    def texts(folder: Path) -> list[str]:
        run = run_of(
            folder / "run", steps=even_steps(10), samples=samples, devices=devices or [GPU]
        )
        return [why(run, "power_w")]

    return Case(fact, texts, expected)


CASES: list[Case] = [
    # -- whose energy it is
    absent(
        "the machine has neither a GPU driver nor readable RAPL counters",
        "energy.run_j",
        "no energy sensor (nvml: no driver; rapl: not readable); a GPU with its driver, or readable"
        " RAPL counters, would provide it (see `erg doctor`)",
        steps=even_steps(10),
        unavailable={"nvml": "no driver", "rapl": "not readable"},
    ),
    lacks(
        "the program computed on the CPU beside two unused GPUs, and RAPL is not readable",
        "energy.run_j",
        "not used by this run); readable RAPL counters would provide it (see `erg doctor`)",
        lambda path: on_two_gpus(path, unused("GPU-a"), unused("GPU-b"), devices=GPUS),
    ),
    absent(
        "another program computed on the GPU",
        "energy.run_j",
        "other programs computed on GPU-0 too (see the mark device_shared): the energy of the board"
        " can't be split between them",
        **ON_A_GPU,
        marks=[Mark(0, "device_used", GPU.id), Mark(S, "device_shared", f"{GPU.id} bash (7)")],
    ),
    lacks(
        "two trainings of one command ran at the same time on one GPU",
        "energy.run_j",
        "another training of the same command ran at the same time: the energy of the devices can't"
        " be split between them; measure each in its own command",
        two_at_once,
    ),
    # -- sensors
    absent(
        "the GPU was read for its load alone",
        "energy.run_j",
        "Test GPU [GPU-0]: no energy counter was read; no power reading",
        **{**ON_A_GPU, "samples": [Sample(t * S, GPU.id, busy_frac=1.0) for t in range(11)]},
    ),
    absent(
        "the GPU has an energy counter and no power",
        "energy.peak_w",
        "Test GPU [GPU-0] gives no power reading",
        **{**ON_A_GPU, "samples": [Sample(t * S, GPU.id, energy_j=9.0 * t) for t in range(11)]},
    ),
    absent(
        "the power of the GPU was read before the first step and after the last",
        "energy.peak_w",
        "no power reading of Test GPU [GPU-0] in the window",
        **{
            **ON_A_GPU,
            "samples": [Sample(t * S, GPU.id, power_w=100.0) for t in (-2, -1, 11, 12)],
        },
    ),
    lacks(
        "five power readings of 200 W, and a counter that rose by 500 W",
        "energy.peak_w",
        "200 W is the highest of 5 readings, and 500 W the mean: the readings missed the peak, or a"
        " sensor is off",
        lambda path: short_run(path, counted_w=500.0, read_w=200.0),
    ),
    checks(
        "the power of the GPU is a moving average of a second",
        "counter: Test GPU: its power readings are 1 s averages, too coarse to check its energy",
        lambda path: run_of(path, **{**ON_A_GPU, "devices": [AVERAGED]}),
    ),
    checks(
        "power and energy counter of the GPU were read for two seconds",
        "counter: Test GPU: energy counter and power were read together for only 1.9 s; the"
        " check needs 4",
        lambda path: made(path, samples=read(12.0)[:21]),
    ),
    absent(
        "the counter of the CPU package was lost, and there is no GPU",
        "energy.accelerator_j",
        "no accelerator (nvml: no driver)",
        steps=even_steps(10),
        samples=[Sample(0, PACKAGE.id, energy_j=1.0)],
        devices=[PACKAGE],
        marks=[Mark(S, "device_lost", f"{PACKAGE.id}: Permission denied")],
        unavailable={"nvml": "no driver"},
    ),
    absent(
        "the counter of the CPU package could no longer be read",
        "energy.cpu_j",
        "Test CPU [cpu:0]: cpu:0: Permission denied; the energy counter",
        steps=even_steps(10),
        samples=[Sample(0, PACKAGE.id, energy_j=1.0)],
        devices=[PACKAGE],
        marks=[
            Mark(S, "device_lost", f"{PACKAGE.id}: Permission denied"),
            Mark(S, "device_lost", f"{PACKAGE.id}:dram: No such file"),
        ],
    ),
    # -- factors that only the user has
    absent(
        "no grid was named",
        "carbon.co2e_g",
        "no grid intensity was given: --grid NAME (`erg grid` lists countries and regions)",
        **ON_A_GPU,
    ),
    absent(
        "a grid was named and no contract",
        "carbon.market_co2e_g",
        "no market-based intensity was given: --market-g-per-kwh with --market-source",
        settings={"grid_g_per_kwh": 500.0},
        **ON_A_GPU,
    ),
    absent(
        "the embodied carbon of the GPU was not declared",
        "carbon.embodied_g",
        "no embodied carbon of a device was given: --embodied-kg with --embodied-source",
        settings={"lifetime_h": 35040.0},
        **ON_A_GPU,
    ),
    absent(
        "the embodied carbon of the GPU was declared without its lifetime",
        "carbon.embodied_g",
        "no lifetime of a device was given, over which its embodied carbon is spread: --lifetime-h",
        settings={"embodied_kg": 150.0},
        **ON_A_GPU,
    ),
    absent(
        "a GPU-hour has a price and a kilowatt-hour has none",
        "cost.energy",
        "no price of electricity was given: --price-per-kwh with --currency",
        settings={"price_per_gpu_hour": 2.5},
        **ON_A_GPU,
    ),
    absent(
        "a kilowatt-hour has a price and a GPU-hour has none",
        "cost.gpu",
        "no price of a device was given: --price-per-gpu-hour with --currency",
        settings={"price_per_kwh": 0.3},
        **ON_A_GPU,
    ),
    # -- power curves
    no_curve(
        "the GPU was read after the last step alone",
        "no reading between the start of the first step and the end of the last",
        [Sample(t * S, GPU.id, power_w=100.0) for t in (11, 12)],
    ),
    no_curve(
        "the GPU gave neither power nor energy",
        "no power of Test GPU [GPU-0]: no power reading, and no two readings of its energy counter",
        [Sample(t * S, GPU.id, busy_frac=1.0) for t in range(11)],
    ),
    no_curve(
        "the counter of one of two GPUs only fell",
        "no power of Test GPU [GPU-1]: its energy counter never grew",
        [
            *(Sample(t * S, GPU.id, energy_j=70.0 * t) for t in range(11)),
            *(Sample(t * S, OTHER.id, energy_j=50.0 - t) for t in range(11)),
        ],
        GPU,
        OTHER,
    ),
]
