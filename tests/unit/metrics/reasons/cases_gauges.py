"""What devices and the host say: why busy time, memory, hours and counters are absent."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ergmeter.metrics.explain.flops import roofline
from ergmeter.records import Device, Flops, Mark, Sample, Step
from ergmeter.runlog.identity import run_header
from ergmeter.runlog.reader import Run
from ergmeter.runlog.writer import create_run
from tests.runs import GPU, add_writer, even_steps, make_run
from tests.unit.metrics.reasons.case import absent
from tests.unit.metrics.reasons.making import S, lacks, readings_of_gpu, refused
from tests.unit.metrics.test_gpu_use import made, unused
from tests.unit.metrics.test_memory import PROGRAM, TORCH
from tests.unit.metrics.test_trainings import training

STEPS = even_steps(10, tokens_computed=100)
H200 = Device("GPU-0", "gpu", "NVIDIA H200", "nvml")
H100 = Device("GPU-1", "gpu", "NVIDIA H100 80GB HBM3", "nvml")
MI300X = Device("ff-1", "gpu", "AMD Instinct MI300X", "amd")
FLOPS = {"flops": [asdict(Flops(1e12, "6N", "declared", tokens_per_step=100))]}
OWN = Device("ergmeter:1", "self", "ergmeter's own threads", "self")
PROFILE = {"steps": 2, "window_s": 1.0, "compute_s": 1.4, "communication_s": 0.0}


def counted(dram_frac: float, *ids: str) -> list[Sample]:
    """Hardware counters of these GPUs, once a second."""
    return [
        Sample(t * S, id_, dram_frac=dram_frac, activity_s=1.0) for id_ in ids for t in range(12)
    ]


def roof(dram_frac: float, *devices: Device, **more: Any) -> dict[str, Any]:
    samples = counted(dram_frac, *(one.id for one in devices))
    return {"steps": STEPS, "devices": devices, "samples": samples, "header": FLOPS, **more}


def imported(path: Path) -> Run:
    create_run(path, {**run_header("log", []), "imported": {"format": "log"}})
    add_writer(path, steps=STEPS, stream="output")
    return Run.open(path)


def side_by_side(path: Path) -> Run:
    run = make_run(path)
    for name in "AB":
        add_writer(run, steps=STEPS, devices=[GPU], header=training(name))
    return Run.open(run).training(1)


CASES = [
    # -- readings --
    absent(
        "a Meter in a program without torch",
        "memory.allocator_peak_bytes",
        "no allocator of a framework was sampled in this run",
        steps=STEPS,
    ),
    absent(
        "a program that ended before it was read",
        "memory.process_mean_bytes",
        "train.py was not read once in a run of",
        steps=STEPS,
        devices=[PROGRAM],
    ),
    absent(
        "a program that was read only when it had exited, which leaves CPU time and no memory",
        "memory.process_mean_bytes",
        "train.py [process:h:1]: no reading has memory_bytes",
        steps=STEPS,
        devices=[PROGRAM],
        samples=[Sample(S, PROGRAM.id, cpu_s=1.0)],
    ),
    absent(
        "a GPU that was read before the first step alone",
        "utilization.temperature_max_c",
        "no reading in the window",
        steps=[Step((20 + n) * S, (21 + n) * S, n) for n in range(10)],
        devices=[GPU],
        samples=readings_of_gpu(0, 10, temperature_c=40.0),
    ),
    absent(
        "hardware counters that were first read after a short run",
        "activity.sm_frac",
        "no reading in the window",
        steps=even_steps(10, seconds=0.1),
        devices=[GPU],
        samples=[Sample(2 * S, GPU.id, sm_frac=0.5, activity_s=0.5)],
    ),
    absent(
        "a program that was read once in a run of a second",
        "utilization.process_cores",
        "too few readings of train.py [process:h:1] in a window of 1 s: let the run last",
        steps=even_steps(10, seconds=0.1),
        devices=[PROGRAM],
        samples=[Sample(S // 2, PROGRAM.id, cpu_s=1.0)],
    ),
    absent(
        "a probe that started 5 s late",
        "utilization.busy_frac",
        "readings begin 5.0 s after the window does",
        steps=STEPS,
        devices=[GPU],
        samples=readings_of_gpu(5, 10, busy_frac=0.5),
    ),
    absent(
        "a probe that died after 5 s",
        "utilization.busy_frac",
        "readings end 5.0 s before the window does",
        steps=STEPS,
        devices=[GPU],
        samples=readings_of_gpu(0, 5, busy_frac=0.5),
    ),
    # -- memory --
    absent(
        "a GPU whose driver does not report its size",
        "memory.device_peak_frac",
        "Test GPU [GPU-0] does not say how much memory it has",
        steps=STEPS,
        devices=[GPU],
        samples=readings_of_gpu(0, 10, memory_bytes=10**9),
    ),
    absent(
        "a container in which NVML lists no process",
        "memory.device_program_peak_bytes",
        "NVML did not report what the program's own processes hold",
        steps=STEPS,
        devices=[GPU],
        samples=readings_of_gpu(0, 10, memory_bytes=10**9),
    ),
    absent(
        "a GPU of AMD, whose memory is not reported by process",
        "memory.device_program_peak_bytes",
        "only NVML reports memory by process: no GPU of this run is NVIDIA's",
        steps=STEPS,
        devices=[MI300X],
        samples=[Sample(S, MI300X.id, memory_bytes=10**9)],
    ),
    absent(
        "five readings of memory in the window",
        "memory.device_growth_bytes_per_h",
        "5 readings: a trend needs 10",
        steps=STEPS,
        devices=[GPU],
        samples=[Sample((2 * t + 1) * S, GPU.id, memory_bytes=10**9) for t in range(5)],
    ),
    absent(
        "a training that never evaluated has no memory of evaluation",
        "memory.device_eval_peak_bytes",
        "no eval span was recorded",
        steps=STEPS,
        devices=[GPU],
        samples=readings_of_gpu(0, 10, memory_bytes=10**9),
    ),
    absent(
        "a recorded program that printed no steps has no memory of training",
        "memory.device_train_peak_bytes",
        "no train span was recorded",
        stream="output",
        devices=[GPU],
        samples=readings_of_gpu(0, 10, memory_bytes=10**9),
    ),
    absent(
        "a recorded program that prints its steps has no memory of training",
        "memory.device_train_peak_bytes",
        "printed lines do not show when a phase began; a Meter does",
        steps=STEPS,
        stream="output",
        devices=[GPU],
        samples=readings_of_gpu(0, 10, memory_bytes=10**9),
    ),
    absent(
        "an allocator that was read between the steps",
        "memory.allocator_train_peak_bytes",
        "no reading was taken during training steps",
        steps=even_steps(5, seconds=0.1, gap_s=0.9),
        devices=[TORCH],
        samples=[
            Sample((2 * t + 1) * S // 2, TORCH.id, allocated_bytes=1, allocated_peak_bytes=1)
            for t in range(5)
        ],
    ),
    # -- the cost of measuring --
    lacks(
        "a log that was imported",
        "overhead.cpu_frac",
        "a log does not hold ergmeter's CPU time",
        imported,
    ),
    absent(
        "a run that began a moment ago",
        "overhead.cpu_frac",
        "ergmeter's CPU time is not recorded yet: it is written every few seconds",
        steps=STEPS[:1],
        devices=[OWN],
        closed=False,
    ),
    absent(
        "a writer that was killed at once",
        "overhead.cpu_frac",
        "the writer ended before ergmeter's CPU time was recorded",
        steps=STEPS[:1],
        devices=[OWN],
        closed=False,
        header={"pid_started_s": 1.0},
    ),
    # -- hours --
    absent(
        "a run on a CPU",
        "cost.gpu",
        "no accelerator was sampled in this run: --num-devices gives their number",
        steps=STEPS,
        settings={"price_per_gpu_hour": 2.0, "currency": "EUR"},
    ),
    lacks(
        "a run on a CPU beside two GPUs",
        "cost.gpu",
        "not used by this run): --num-devices gives their number",
        lambda path: made(path, unused("GPU-a"), unused("GPU-b")),
        price_per_gpu_hour=2.0,
        currency="EUR",
    ),
    lacks(
        "two trainings of one command at once",
        "cost.gpu",
        "another training of the same command ran at the same time: device hours are of both",
        side_by_side,
        price_per_gpu_hour=2.0,
        currency="EUR",
    ),
    # -- roofline --
    refused(
        "a roofline of a CPU",
        roofline,
        "no hardware counter of device memory traffic: no accelerator was sampled",
        steps=STEPS,
    ),
    refused(
        "an A100, which there is with two kinds of memory",
        roofline,
        "the memory bandwidth of a100 is not known: pass --device with an exact name",
        settings={"dtype": "bf16", "device": "a100"},
        **roof(0.5, H200),
    ),
    refused(
        "counters that stayed at 0",
        roofline,
        "the hardware counters read 0 bytes moved in device memory",
        settings={"dtype": "bf16"},
        **roof(0.0, H200),
    ),
    refused(
        "an H200 and an H100 in one run",
        roofline,
        "the devices differ (NVIDIA H100 80GB HBM3, NVIDIA H200), and each has its own roof",
        settings={"dtype": "bf16"},
        **roof(0.5, H200, H100),
    ),
    refused(
        "a GPU with FLOPs of an unknown type",
        roofline,
        "the data type of the matrix products is not known: pass --dtype",
        **roof(0.5, H200),
    ),
    # -- the profiler --
    absent(
        "nobody asked for a profile",
        "profile.compute_frac",
        "no steps were profiled: pass profile_steps=3 to an integration, or import a torch trace",
        steps=STEPS,
    ),
    absent(
        "a profile with 1.4 s of computation in 1 s",
        "profile.computation_s",
        "the share of profiled time is impossible: 140%",
        steps=STEPS,
        marks=[Mark(5 * S, "profiled", json.dumps(PROFILE))],
    ),
]
