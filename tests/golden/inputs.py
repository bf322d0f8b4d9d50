"""Makes the inputs of the cases: runs, logs, ledgers, benches, graphs and damaged files.

Everything is computed from constants or copied from `tests/data`. `MAKERS` has one function per
input; it is given the path to make.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.golden.ours import (
    DATA,
    FAMILIES,
    ROOT,
    Device,
    Flops,
    Mark,
    Reported,
    Sample,
    Step,
    add_writer,
    as_table,
    bench_repeats,
    calibrated,
    even_steps,
    gallery,
    make_run,
    neuron_graphs,
    write_table,
)

Maker = Callable[[Path], object]
MAKERS: dict[str, Maker] = {}
RUNNING = {"running"}  # inputs whose files were written a second ago
WALL_S = 1_770_080_400  # 2026-02-03 01:00 UTC: when made runs began
WRITTEN_S = 1_770_084_000  # an hour later: when all files were written
FRESH_S = 1_770_091_199  # a second before the frozen clock
S = 10**9
GB = 10**9
H200_PEAK = 989.5e12
GPUS = [
    Device(
        f"GPU-{n}",
        "gpu",
        "NVIDIA H200",
        "nvml",
        {
            "power_field": "instant",
            "index": n,
            "driver": "580.159",
            "memory_total_bytes": 140 * GB,
            "power_limit_w": 700.0,
        },
    )
    for n in range(4)
]
TORCH = Device(
    "torch:h:1:cuda:0",
    "allocator",
    "torch allocator on NVIDIA H200",
    "allocator",
    {"uuid": "GPU-0"},
)
PROCESS = Device("process:h:4242", "process", "python", "process")
NODE = Device("node:h", "node", "the node", "node", {"cpus": 16})


def set_times(path: Path, written_s: int) -> None:
    """Every file was written at this time, in the order of their names a millisecond apart."""
    for number, one in enumerate(sorted((path, *path.rglob("*")))):
        written_ns = written_s * S + number * S // 1000
        os.utime(one, ns=(written_ns, written_ns))


def made(name: str) -> Callable[[Maker], Maker]:
    """Registers the maker of an input."""

    def add(maker: Maker) -> Maker:
        MAKERS[name] = maker
        return maker

    return add


# -- runs -----------------------------------------------------------------------------------------


def new_run(path: Path, name: str = "", **header: Any) -> Path:
    """An empty run with fixed headers."""
    make_run(path)
    whole = json.loads((path / "run.json").read_text())
    digest = sha256(f"{path.parent.name}/{path.name}".encode()).hexdigest()
    minute, second = divmod(int(digest[:8], 16) % 3600, 60)  # no two were made at the same time
    fixed = {
        "id": digest[:16],
        "name": name or path.name,
        "created": f"2026-02-03T00:{minute:02d}:{second:02d}.000+00:00",
        "directory": "/home/somebody/project",
        "command": ["train.py", "--lr", "1e-4"],
    }
    (path / "run.json").write_text(json.dumps({**whole, **fixed, **header}, indent=1))
    return path


def write(
    run: Path, number: int = 0, *, ended_s: float | None = None, wall_s: float = WALL_S,
    host: str = "node-a", header: dict[str, Any] | None = None, marks: Iterable[Mark] = (),
    **contents: Any,
) -> Path:  # fmt: skip
    """One writer's share. `ended_s` is when it closed; None: it never did."""
    fixed = {
        "writer": f"{host}-{4242 + number}-0000000{number}",
        "host": host,
        "boot_id": "another-boot",
        "pid": 4242 + number,
        "pid_started_s": wall_s - 5.0,
        "clock": {"monotonic_ns": 0, "wall_ns": round(wall_s * S), "error_s": 0.001},
        "python": "3.12.3",
        "platform": "Linux-6.8",
        "versions": {"torch": "2.11.0", "numpy": "2.5.2"},
        **(header or {}),
    }
    directory = add_writer(run, header=fixed, closed=ended_s is not None, **contents)
    rows = [Mark(-S // 2, "opened"), *marks]
    rows += [] if ended_s is None else [Mark(round(ended_s * S), "closed")]
    lines = (json.dumps({"t_ns": m.t_ns, "name": m.name, "detail": m.detail}) for m in rows)
    (directory / "marks.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return directory


def gpu_samples(until_s: float, gpus: list[Device], *, watts: float = 500.0) -> list[Sample]:
    """Ten readings a second of each GPU, with power that moves by a tenth."""
    samples = []
    for number, gpu in enumerate(gpus):
        energy_j = 1e4
        for tick in range(-10, round(until_s * 10) + 10):
            power_w = watts + 10.0 * number + 0.1 * watts * math.sin(tick / 7)
            energy_j += power_w / 10
            samples.append(
                Sample(
                    tick * S // 10,
                    gpu.id,
                    power_w=round(power_w, 3),
                    energy_j=round(energy_j, 3),
                    memory_bytes=60 * GB + (tick % 50) * GB // 10,
                    busy_frac=0.97,
                    clock_hz=1.8e9 - 1e6 * (tick % 30),
                    temperature_c=50.0 + tick % 5,
                    throttled=4,
                )
            )
    return samples


def paced(lengths_s: Iterable[float], **fields: Any) -> list[Step]:
    """Steps of these lengths, one after the other."""
    steps, at_s = [], 0.0
    for index, length_s in enumerate(lengths_s):
        end_s = at_s + length_s
        loss = 4.0 / (1 + index / 20)
        steps.append(
            Step(round(at_s * S), round(end_s * S), index=index, **{"loss": loss, **fields})
        )
        at_s = end_s
    return steps


STEP_FLOPS = Flops(
    0.4 * H200_PEAK,
    "exact",
    "analytic",
    hardware_per_step=0.44 * H200_PEAK,
    hardware_per_padding=0.4 * H200_PEAK / 1000,
    tokens_per_step=1000,
    samples_per_step=8,
)


@made("plain")
def plain(path: Path) -> None:
    """One GPU, 60 even steps, FLOPs, grid, prices: nearly every metric has a value."""
    run = new_run(path)
    settings = {
        "warmup_steps": 5, "dtype": "bf16", "parameters": 8_030_261_248, "grid_g_per_kwh": 56.0,
        "grid_source": "operator 2025", "pue": 1.2, "pue_source": "building", "embodied_kg": 164.0,
        "embodied_source": "maker", "lifetime_h": 35_000.0, "price_per_gpu_hour": 3.5,
        "price_per_kwh": 0.25, "currency": "EUR", "market_g_per_kwh": 10.0,
    }  # fmt: skip
    lengths = [1.5, 1.2, *(1.0 + 0.01 * (n % 3) for n in range(58))]
    write(
        run,
        ended_s=64.0,
        steps=paced(lengths, tokens_computed=1000, tokens_real=900, tokens_loss=700, samples=8),
        samples=gpu_samples(64.0, GPUS[:1]),
        devices=GPUS[:1],
        marks=[Mark(0, "device_used", "GPU-0")],
        settings=settings,
        header={"flops": [asdict(STEP_FLOPS)], "total_steps": 60},
    )


@made("phases")
def phases(path: Path) -> None:
    """Evaluation and checkpoints between steps, loader waits, allocator and process readings."""
    run = new_run(path, "finetune with evaluation")
    steps, at_s = [], 0.0
    for index in range(40):
        steps.append(Step(round(at_s * S), round((at_s + 0.05) * S), index=index, phase="data"))
        start_s, at_s = at_s + 0.05, at_s + 0.55
        steps.append(
            Step(
                round(start_s * S), round(at_s * S), index=index, tokens_computed=2048,
                tokens_real=1500, samples=4, micro_steps=2, loss=3.0 - index / 40,
                learning_rate=1e-4 * (1 - index / 40), grad_norm=1.0 + 0.1 * (index % 4),
            )
        )  # fmt: skip
        if index % 10 == 9:
            steps.append(
                Step(
                    round(at_s * S), round((at_s + 2) * S), phase="eval", tokens_computed=4096,
                    samples=8, loss=3.1 - index / 40,
                )
            )  # fmt: skip
            steps.append(Step(round((at_s + 2) * S), round((at_s + 3) * S), phase="checkpoint"))
            at_s += 3.0
    ticks = range(-1, round(at_s) + 2)
    samples = gpu_samples(at_s + 1, GPUS[:1], watts=400.0)
    samples += [
        Sample(
            t * S, TORCH.id, allocated_bytes=20 * GB + t * GB // 10,
            allocated_peak_bytes=30 * GB + t * GB // 10, reserved_bytes=40 * GB, split_bytes=GB,
        )
        for t in ticks
    ]  # fmt: skip
    samples += [
        Sample(
            t * S,
            PROCESS.id,
            memory_bytes=3 * GB + 10**6 * t,
            memory_peak_bytes=4 * GB,
            cpu_s=1.5 * t + 2,
        )
        for t in ticks
    ]
    samples += [
        Sample(
            t * S, NODE.id, busy_frac=0.3, iowait_frac=0.01, disk_read_bytes=10**7 * (t + 2),
            disk_written_bytes=10**6 * (t + 2), disk_free_bytes=500 * GB - 10**8 * t,
            net_received_bytes=10**5 * (t + 2), net_sent_bytes=10**4 * (t + 2),
        )
        for t in ticks
    ]  # fmt: skip
    write(
        run,
        ended_s=at_s + 1,
        steps=steps,
        samples=samples,
        devices=[GPUS[0], TORCH, PROCESS, NODE],
        marks=[Mark(0, "device_used", "GPU-0")],
        settings={"warmup_steps": 2, "dtype": "bf16"},
        unavailable={"rapl": "no powercap here"},
        reported=[Reported(5 * S, "mfu", 0.41, "frac"), Reported(15 * S, "mfu", 0.43, "frac")],
        header={"workload": {"model": "Llama of 16 layers", "seq_len": 1024, "batch_size": 2}},
    )


@made("ranks")
def ranks(path: Path) -> None:
    """Four ranks on two hosts; rank 2 is slower than the others."""
    run = new_run(path, "four ranks")
    for rank in range(4):
        slow = 0.15 if rank == 2 else 0.0
        lengths = [0.8 + slow + 0.01 * ((n + rank) % 3) for n in range(50)]
        starts = [round(n * 1.0 * S) for n in range(50)]
        steps = [
            Step(
                start, start + round(length * S), index=n, tokens_computed=500, tokens_real=480,
                samples=2, rank=rank, loss=2.5 - n / 50,
            )
            for n, (start, length) in enumerate(zip(starts, lengths, strict=True))
        ]  # fmt: skip
        write(
            run,
            rank,
            host="node-a" if rank < 2 else "node-b",
            ended_s=51.0,
            steps=steps,
            samples=gpu_samples(51.0, [GPUS[rank]]),
            devices=[GPUS[rank]],
            marks=[Mark(0, "device_used", f"GPU-{rank}")],
            settings={"warmup_steps": 3, "dtype": "bf16", "layout": "tp=2"},
            header={"rank": rank, "training": {"id": "A", "world": 4}},
        )


@made("cutoff")
def cutoff(path: Path) -> None:
    """A run whose process ended without closing it."""
    run = new_run(path)
    steps = paced([0.5] * 30, tokens_computed=256)
    write(run, steps=steps, samples=gpu_samples(15.0, GPUS[:1]), devices=GPUS[:1])


@made("small")
def small(path: Path) -> None:
    """Few enough rows to read an export of all of them."""
    samples = gpu_samples(1.0, GPUS[:1])[::4]
    reported = [Reported(S, "mfu", 0.4, "frac")]
    write(
        new_run(path), ended_s=6.0, steps=paced([1.0] * 5, tokens_computed=64), samples=samples,
        devices=GPUS[:1], reported=reported, marks=[Mark(S, "warmup_end")],
    )  # fmt: skip


@made("failed")
def failed(path: Path) -> None:
    """A run whose program raised after 30 steps."""
    steps = paced([0.5] * 30, tokens_computed=256)
    write(
        new_run(path), ended_s=16.0, steps=steps, samples=gpu_samples(15.0, GPUS[:1]),
        devices=GPUS[:1], marks=[Mark(15 * S, "ended", "exit code 1")],
    )  # fmt: skip


@made("torn")
def torn(path: Path) -> None:
    """A run of which one file ends in the middle of a record."""
    cutoff(path)
    (file,) = path.glob("*/samples-nvml*")
    file.write_bytes(file.read_bytes()[:-400])


@made("running")
def running(path: Path) -> None:
    """A run that is written right now."""
    run = new_run(path)
    began_s = FRESH_S - 31
    steps = paced([1.0] * 30, tokens_computed=256)
    header = {"total_steps": 100}
    write(
        run, wall_s=began_s, steps=steps, samples=gpu_samples(30.0, GPUS[:1]), devices=GPUS[:1],
        header=header,
    )  # fmt: skip


@made("empty")
def empty(path: Path) -> None:
    """A run without a step."""
    write(new_run(path), ended_s=3.0)


@made("cpu")
def cpu(path: Path) -> None:
    """No accelerator and no tokens."""
    samples = [Sample(t * S, PROCESS.id, memory_bytes=GB, cpu_s=0.9 * t + 1) for t in range(-1, 32)]
    write(
        new_run(path), ended_s=31.0, steps=even_steps(30), samples=samples, devices=[PROCESS],
        unavailable={"nvml": "no NVML library (libnvidia-ml.so.1), so no NVIDIA driver"},
    )  # fmt: skip


@made("impossible")
def impossible(path: Path) -> None:
    """An MFU of several times the peak."""
    flops = Flops(9.0 * H200_PEAK, "exact", "analytic", tokens_per_step=1000)
    write(
        new_run(path), ended_s=41.0, steps=paced([1.0] * 40, tokens_computed=1000),
        samples=gpu_samples(41.0, GPUS[:1]), devices=GPUS[:1],
        marks=[Mark(0, "device_used", "GPU-0")], settings={"dtype": "bf16"},
        header={"flops": [asdict(flops)]},
    )  # fmt: skip


@made("calibrated")
def a_calibrated_run(path: Path) -> None:
    """Counters of a GPU with a calibration: every rung of `erg explain`."""
    device = calibrated("GPU-0")
    peak_hz = H200_PEAK / (132 * 4096)
    samples = [
        Sample(
            tick * S // 10, device.id, power_w=500.0, energy_j=1e4 + 50.0 * tick, activity_s=0.1,
            graphics_frac=0.9, sm_frac=0.8, tensor_frac=0.5, dram_frac=0.3, throttled=0x4,
            clock_hz=0.9 * peak_hz,
        )
        for tick in range(-10, 450)
    ]  # fmt: skip
    lengths = [1.4 if n % 10 == 5 else 1.0 for n in range(40)]
    write(
        new_run(path), ended_s=45.0, steps=paced(lengths, tokens_computed=1000, tokens_real=950),
        samples=samples, devices=[device], marks=[Mark(0, "device_used", device.id)],
        settings={"dtype": "bf16"}, header={"flops": [asdict(STEP_FLOPS)]},
    )  # fmt: skip


@made("alarmed")
def alarmed(path: Path) -> None:
    """A loss that is no number, throttling, and a pace that falls by half."""
    steps = [
        Step(
            s.start_ns, s.end_ns, index=s.index, tokens_computed=1000,
            loss=math.nan if s.index == 70 else 2.0,
        )
        for s in paced([1.0] * 60 + [2.0] * 30)
    ]  # fmt: skip
    samples = [
        Sample(
            k * S // 2, gpu.id, power_w=650.0, memory_bytes=70 * GB, temperature_c=61.0,
            throttled=0x20 if 40 <= k < 60 else 4,
        )
        for k in range(244)
        for gpu in GPUS[:2]
    ]  # fmt: skip
    told = json.dumps({"rule": "loss nan", "kind": "nan"})
    write(
        new_run(path, "a-training-with-a-rather-long-name-of-its-own"), ended_s=121.0,
        steps=steps, samples=samples, devices=GPUS[:2], marks=[Mark(71 * S, "alert", told)],
        header={"total_steps": 1000, "alerts": ["loss nan", "tokens_per_s < -20%"]},
    )  # fmt: skip


def _requests(count: int) -> tuple[list[Step], list[Reported]]:
    steps: list[Step] = []
    reported: list[Reported] = []
    for n in range(count):
        start_s = 0.5 * n
        first_s, last_s = start_s + 0.1 + 0.002 * n, start_s + 1.6 + 0.01 * (n % 7)
        at = [round(t * S) for t in (start_s, first_s, last_s)]
        steps.append(Step(at[0], at[1], n, phase="prefill", tokens_real=100 + n, samples=1))
        steps.append(
            Step(at[1], at[2], n, phase="decode", tokens_real=20 + n % 5, samples=0, micro_steps=20)
        )
        reported.append(Reported(at[2], "request_answered", last_s - start_s, "s"))
        reported += [
            Reported(round((first_s + 0.07 * k) * S), "itl", 0.07 + 0.001 * (k % 4), "s")
            for k in range(1, 20)
        ]
    reported.append(Reported(20 * S, "request_failed: HTTP 500", 0.2, "s"))
    return steps, reported


@made("served")
def served(path: Path) -> None:
    """What `erg load` writes: 120 requests and one that failed."""
    steps, reported = _requests(120)
    marks = [
        Mark(0, "server", "m at http://h"),
        Mark(0, "slo", "ttft=0.3,tpot=0.1"),
        Mark(0, "load_client", "cpu_frac=0.1,lag_p99_s=0.001"),
    ]
    write(
        new_run(path), ended_s=63.0, steps=steps, reported=reported, marks=marks,
        samples=gpu_samples(63.0, GPUS[:1]), devices=GPUS[:1],
    )  # fmt: skip


@made("trainings")
def trainings(path: Path) -> None:
    """Two trainings that one command ran."""
    run = new_run(path)
    for number, name in enumerate("AB"):
        told = {"id": name, "world": 1, "model": f"Model{name}"}
        clock = {"monotonic_ns": number, "wall_ns": WALL_S * S + number}
        write(
            run, number, ended_s=31.0, header={"training": told, "clock": clock},
            steps=paced([1.0 - number / 2] * 30, tokens_computed=100 - 50 * number),
        )  # fmt: skip


@made("jobs")
def jobs(path: Path) -> None:
    """A job of three runs, stopped and resumed, and a run of a scheduler's job."""
    parts = (("a", 0, range(100)), ("b", 166, range(80, 140)), ("c", 232, range(140, 150)))
    for name, began_s, numbers in (*parts, ("d", 500, range(20))):
        run = new_run(path / name, "train", job={"SLURM_JOB_ID": "17"})
        life_s = 5 + len(numbers) + 1
        steps = [
            Step((5 + i) * S, (6 + i) * S, index=index, tokens_computed=10)
            for i, index in enumerate(numbers)
        ]
        write(
            run, wall_s=WALL_S + began_s, ended_s=life_s, steps=steps,
            samples=gpu_samples(life_s, GPUS[:1], watts=100.0), devices=GPUS[:1],
            settings={} if name == "d" else {"job": "pretrain"},
        )  # fmt: skip


@made("runs")
def several_runs(path: Path) -> None:
    """A directory of runs of all kinds, one of them damaged, one tagged and annotated."""
    for name in ("plain", "phases", "ranks", "cutoff", "empty", "served", "trainings"):
        MAKERS[name](path / name)
    (path / "broken").mkdir()
    (path / "broken" / "run.json").write_text("{not json")


@made("repeats")
def repeated(path: Path) -> None:
    """Two settings, three repeats each, for comparisons."""
    for name, length_s, watts in (("base", 1.0, 500.0), ("fast", 0.8, 550.0)):
        for seed in (1, 2, 3):
            run = new_run(path / f"{name}-{seed}", f"{name}-{seed}")
            lengths = [length_s + 0.004 * seed + 0.002 * (n % 3) for n in range(60)]
            write(
                run, ended_s=60 * length_s + 3,
                steps=paced(lengths, tokens_computed=1000, tokens_real=900, samples=8),
                samples=gpu_samples(60 * length_s + 2, GPUS[:1], watts=watts), devices=GPUS[:1],
                marks=[Mark(0, "device_used", "GPU-0")],
                settings={"warmup_steps": 3, "dtype": "bf16"},
                header={
                    "flops": [asdict(STEP_FLOPS)],
                    "workload": {"model": "m", "seq_len": 512, "backend": name, "seed": seed},
                },
            )  # fmt: skip


@made("alike")
def alike(path: Path) -> None:
    """Two groups whose repeats scatter by more than the groups differ."""
    for name, shift_s in (("left", 0.0), ("right", 0.005)):
        for seed, scatter_s in ((1, 0.03), (2, -0.02), (3, 0.01), (4, -0.03)):
            lengths = [1.0 + shift_s + scatter_s * (-1 if name == "right" else 1)] * 40
            write(
                new_run(path / f"{name}-{seed}"), ended_s=43.0,
                steps=paced(lengths, tokens_computed=1000, samples=8),
                samples=gpu_samples(42.0, GPUS[:1]), devices=GPUS[:1],
                marks=[Mark(0, "device_used", "GPU-0")],
                header={"workload": {"model": "m", "backend": name, "seed": 10 * shift_s + seed}},
            )  # fmt: skip


for _training in ("train-1b", "stalls", "lora-1b", "tiny-20m"):

    @made(_training)
    def _recorded(path: Path, name: str = _training) -> None:
        """A training of the H200 recording."""
        scripts = gallery()
        scripts.made_run(name, scripts.TRAININGS[name], path.parent)


for _archive, _names in {
    "demo": ("demo",),
    "record": ("rec",),
    "mfu_full": ("full",),
    "mfu_lora": ("lora",),
    "finetune": ("finetune-1b",),
    "bench": ("ladder", "bursts-1s"),
    "edges": ("run0", "run1"),
    "nanogpt": ("gpt2-eager", "nano-char"),
}.items():
    for _name in _names:

        @made(_name)
        def _unpacked(path: Path, archive: str = _archive) -> None:
            """A run as ergmeter wrote it on an H200."""
            with tarfile.open(DATA / "h200_run" / f"{archive}.tar.gz") as packed:
                packed.extractall(path.parent / ".unpacked", filter="data")
            (path.parent / ".unpacked" / path.name).rename(path)


# -- damaged runs ---------------------------------------------------------------------------------


@made("damaged")
def damaged(path: Path) -> None:
    """Runs that can't be read, each in its own way."""
    for name in ("no-json", "other-format", "later-version", "no-writers", "writer", "noise"):
        plain(path / name)
    (path / "no-json" / "run.json").write_text("{not json")
    header = json.loads((path / "other-format" / "run.json").read_text())
    other, later = {**header, "format": "something"}, {**header, "version": 99}
    (path / "other-format" / "run.json").write_text(json.dumps(other))
    (path / "later-version" / "run.json").write_text(json.dumps(later))
    for name in ("no-writers", "writer", "noise"):
        (writer,) = (one for one in (path / name).iterdir() if one.is_dir())
        if name == "no-writers":
            shutil.rmtree(writer)
        elif name == "writer":
            (writer / "writer.json").write_text("[]")
        else:
            (file,) = writer.glob("steps*")
            file.write_bytes(b"\xff\xd8\xff\xe0" * 200)
    (path / "not-a-run").mkdir()
    (path / "text.txt").write_text("hello\n")


# -- logs -----------------------------------------------------------------------------------------


# Filled with the step, its loss, and hours, minutes and seconds.
PATTERNS = {
    "dictionary": "{{'step': {0}, 'loss': {1:.3f}, 'epoch': 0.1, 'num_tokens': 64}}",
    "json_lines": '{{"step": {0}, "loss": {1:.3f}, "tokens_per_second": 1234, "lr": 1e-4}}',
    "bars": "Epoch 0: 10%|█  | {0}/90 [{3:02d}:{4:02d}<00:09, 1.0it/s, v_num=0, loss={1:.3f}]",
    "stamped": "[{2:02d}:{3:02d}:{4:02d}] step={0} loss={1:.3f}",
    "slashes": "2026/02/03 10:{3:02d}:{4:02d} step {0}/100 loss: {1:.3f} tok/s 1234",
    "months": "Feb  3 10:{3:02d}:{4:02d} step {0} | loss {1:.3f} | grad norm 1.5 | tokens 64",
    "ranks": "[rank0]: step={0} loss={1:.3f} tokens=64\n[rank1]: step={0} loss={1:.3f} tokens=64",
    "programs": "step={0} loss={1:.3f} tokens=64\nstep=1{0:03d} loss=2.5 tokens=64",
    "keras": "{0}/50 [=>....] - ETA: 10s - loss: {1:.3f} - accuracy: 0.5",
    "timed": "steps: {0} loss: {1:.3f} iter time (s): 0.5 samples/sec: 12.3",
    "evaluated": "step={0} loss={1:.3f} time=0.5s\nstep={0} eval_loss={1:.3f}",
}


@made("logs")
def logs(path: Path) -> None:
    """A log of each importer, and logs that are none."""
    path.mkdir()
    for file in sorted((DATA / "logs").glob("*.log")):
        shutil.copy(file, path / file.name)
    for file in sorted((DATA / "logs").glob("hf_*.json")):
        chunks = json.loads(file.read_text(encoding="utf-8"))["chunks"]
        (path / f"{file.stem}.log").write_text("".join(chunk for _, _, chunk in chunks))
    lines = [
        f"step={n} loss={3 - n / 50:.3f} tokens={64 * n} time={0.5 * n:.2f}" for n in range(50)
    ]
    for name, pattern in PATTERNS.items():
        texts = (pattern.format(n, 3 - n / 50, n // 3600, n // 60, n % 60) for n in range(1, 50))
        (path / f"{name}.log").write_text("".join(f"{text}\n" for text in texts))
    (path / "keyvalue.log").write_text("starting\n" + "\n".join(lines) + "\n")
    (path / "keyvalue.log.gz").write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))
    twice = [*lines[:30], *lines[:40]]
    (path / "twice.log").write_text("\n".join(twice) + "\n")
    (path / "prose.log").write_text("Loading weights: please wait\n" * 5)
    (path / "empty.log").write_text("")
    (path / "picture.log").write_bytes(b"\xff\xd8\xff\xe0\x00\x10JFIF" * 100)
    (path / "nvidia_smi.csv").write_text("\n".join(_smi()) + "\n")
    (path / "one_device.csv").write_text(
        "timestamp, power.draw [W], memory.used [MiB]\n"
        + "".join(f"2026/02/03 10:00:{t:02d}.000, {200 + t}.00 W, 1000 MiB\n" for t in range(30))
    )
    (path / "trace.json").write_text(json.dumps(_trace(), indent=1))


def key_value_lines(count: int) -> list[str]:
    """Lines as a plain loop prints them."""
    return [
        f"step={n} loss={3 - n / 50:.3f} tokens={64 * n} time={0.5 * n:.2f}" for n in range(count)
    ]


def _smi() -> list[str]:
    head = (
        "timestamp, name, index, uuid, power.draw [W], memory.used [MiB], memory.total [MiB],"
        " utilization.gpu [%], temperature.gpu, clocks.current.sm [MHz],"
        " clocks_throttle_reasons.active, fan.speed [%]"
    )
    rows = [
        f"2026/02/03 10:00:{t:02d}.00{n}, NVIDIA H100 80GB HBM3, {n}, GPU-0a1b2c3d-{n},"
        f" {100 + 5 * t + 50 * n}.00 W, {1000 + t} MiB, 81559 MiB, {50 + n} %, 41, 1980 MHz,"
        " 0x0000000000000004, 12 %"
        for t in range(40)
        for n in (0, 1)
    ]
    return [head, *rows]


def _trace() -> dict[str, Any]:
    def event(cat: str, name: str, start_us: float, end_us: float) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": start_us, "dur": end_us - start_us}

    events = [
        event("user_annotation", "ProfilerStep#7", -500, -400),
        event("user_annotation", "ProfilerStep#8", -400, -100),
        event("kernel", "sm90_xmma_gemm_bf16", 0, 10),
        event("kernel", "elementwise", 5, 20),
        event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 15, 20),
        event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 40, 50),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 45, 65),
        event("gpu_memset", "Memset (Device)", 60, 62),
        event("kernel", "sm90_xmma_gemm_bf16", 70, 80),
        event("cpu_op", "aten::mm", -450, -440),
    ]
    return {"schemaVersion": 1, "traceEvents": events, "traceName": ""}


# -- ledgers --------------------------------------------------------------------------------------

SFT_PLAY = (
    "model,dataset,backend,optimizer,batch_size,grad_accum,seq_len,steps,precision,seed,notes,"
    "wall_s,warmup_s,tokens_processed,tok_per_s,energy_J,avg_power_W,peak_power_W,J_per_token,"
    "E10k_J,vram_peak_MB,vram_avg_MB"
)


@made("ledgers")
def ledgers(path: Path) -> None:
    """Energy ledgers: ours, SFT-Play's, and damaged ones."""
    path.mkdir()
    for name in ("first", "again"):
        shutil.copy(DATA / "h200_backends" / f"{name}.csv", path / f"{name}.csv")
    rows = [
        f"m,sft,{backend},paged_adamw_8bit,2,4,1024,100,fp16,{seed},lora_r=32_alpha=32,120.0,60.0,"
        f"{240_000 + 1000 * seed},{rate + 10 * seed}.0,{12_000 + 100 * seed}.0,200.0,220.0,0.05,"
        "500.0,10000.0,9000.0"
        for backend, rate in (("bnb", 4000), ("unsloth", 4400))
        for seed in (1, 2, 3)
    ]
    (path / "sft_play.csv").write_text("\n".join([SFT_PLAY, *rows]) + "\n")
    bad = rows[0].replace("240000", "many").replace("241000", "many")
    (path / "half.csv").write_text("\n".join([SFT_PLAY, rows[1], bad, "1,2,3"]) + "\n")
    (path / "header.csv").write_text(SFT_PLAY + "\n")
    (path / "other.csv").write_text("a,b\n1,2\n")


# -- models ---------------------------------------------------------------------------------------


CONFIGS = (
    "llama-3.1-8b", "llama-2-7b", "mixtral-8x7b", "deepseek-v3", "gpt2-xl", "gemma-2-9b",
    "jamba-v0.1", "mamba-2.8b", "qwen3-30b-a3b", "gpt-oss-20b", "phi-3-mini", "falcon-7b",
    "llama-4-scout-text", "qwen3-next-80b-a3b", "bamba-9b", "olmoe-1b-7b", "gemma-3-27b-text",
    "mamba2-2.7b", "pythia-12b", "command-r-35b", "kimi-k2", "smollm3-3b", "starcoder2-7b",
    "mpt-7b", "deepseek-v2-lite",
)  # fmt: skip


@made("configs")
def configs(path: Path) -> None:
    """The config.json of published models, and some that are wrong."""
    path.mkdir()
    for name in CONFIGS:
        shutil.copy(DATA / "configs" / f"{name}.json", path / f"{name}.json")
    whole = json.loads((path / "llama-3.1-8b.json").read_text())
    wrong: dict[str, dict[str, Any]] = {
        "bad-heads": {"num_attention_heads": -4},
        "no-layers": {"num_hidden_layers": None},
    }
    for name, changes in wrong.items():
        (path / f"{name}.json").write_text(json.dumps({**whole, **changes}))
    (path / "not-json.json").write_text("{")
    (path / "a-list.json").write_text("[1]")


@made("families")
def families(path: Path) -> None:
    """A small config.json of each family of models; absent fields have the family's defaults."""
    path.mkdir()
    for name, case in FAMILIES.items():
        config = {"model_type": case.family or name, **case.changes}
        (path / f"{name}.json").write_text(json.dumps(config))


# -- benches --------------------------------------------------------------------------------------

_CELLS: tuple[tuple[str, int, int, float | None, str, str], ...] = (
    ("none", 4, 1, 100.0, "ok", ""),
    ("none", 4, 2, 180.0, "ok", ""),
    ("none", 8, 1, 120.0, "ok", ""),
    ("none", 8, 2, None, "oom", "CUDA out of memory"),
    ("foak", 4, 1, 130.0, "ok", ""),
    ("foak", 4, 2, None, "error", "exit code 1: ValueError: no such file"),
    ("foak", 8, 1, None, "timeout", "no end after 600 s"),
    ("foak", 8, 2, None, "skipped", "4-bit weights are trained on one GPU here"),
)


def _bench(path: Path, factor: float) -> None:
    index = 0
    cells = []
    for repeat in (1, 2, 3):
        for framework, batch, gpus, rate, status, why in _CELLS:
            if repeat > 1 and rate is None:
                continue
            cells.append(_cell(path, index, framework, batch, gpus, repeat, status, why))
            if rate is not None:
                scaled = rate * factor * (1 + 0.004 * (repeat - 2))
                _cell_results(path / f"exp_{index}", scaled, gpus)
            index += 1
    waiting = _cell(path, index, "none", 4, 1, 4, "pending", "")
    cells.append({**waiting, "id": "waits"})
    (path / f"exp_{index}" / "cell.json").write_text(json.dumps(cells[-1]))
    (path / f"exp_{index}" / "status.json").unlink()
    plan = {"version": 1, "source": "scenarios.yaml", "settings": {}, "cells": cells}
    (path / "plan.json").write_text(json.dumps(plan))


def _cell(
    path: Path, index: int, framework: str, batch: int, gpus: int, repeat: int, status: str,
    why: str,
) -> dict[str, Any]:  # fmt: skip
    folder = path / f"exp_{index}"
    folder.mkdir(parents=True)
    settings = {
        "framework_config": framework, "effective_batch_size": batch, "max_seq_len": 512,
        "num_gpus": gpus, "model_name_or_path": "builtin:tiny",
    }  # fmt: skip
    cell: dict[str, Any] = {
        "index": index, "id": f"{framework}-{batch}-{gpus}-{repeat}", "scenario": "small",
        "settings": settings, "num_gpus": gpus, "repeat": repeat, "command": ["x"],
    }  # fmt: skip
    (folder / "cell.json").write_text(json.dumps(cell))
    state = {"status": status, "reason": why, "attempts": [{}]}
    (folder / "status.json").write_text(json.dumps(state))
    return cell


def _cell_results(folder: Path, rate: float, gpus: int) -> None:
    told = {
        "train_loss": 1.5 + rate / 1e5, "train_runtime": 100.0,
        "train_samples_per_second": rate / 10, "train_steps_per_second": 1.0,
        "train_tokens_per_second": rate, "before_init_mem_gpu": 4_747_206_656,
        "init_mem_gpu_alloc_delta": 0, "init_mem_gpu_peaked_delta": 0,
        "train_mem_gpu_alloc_delta": 126_487_040, "train_mem_gpu_peaked_delta": 11_016_635_392,
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(told))
    smi = [f"2026/02/03 10:00:0{t}.000, NVIDIA H200, 0, {1000 + 100 * t} MiB" for t in range(5)]
    head = "timestamp, name, index, memory.used [MiB]"
    (folder / "gpu_memory_logs.csv").write_text("\n".join([head, *smi]) + "\n")
    if gpus > 1:
        return
    run = new_run(folder / "run")
    steps = paced([2.0 * 100 / rate] * 30, tokens_computed=1000, tokens_real=600, samples=8)
    write(
        run, ended_s=61.0, steps=steps, samples=gpu_samples(30.0, GPUS[:1]), devices=GPUS[:1],
        settings={"warmup_steps": 2}, marks=[Mark(0, "device_used", "GPU-0")],
    )  # fmt: skip


@made("bench-ref")
def bench_ref(path: Path) -> None:
    """Eight configurations, three repeats of those that work."""
    _bench(path, 1.0)


@made("bench-new")
def bench_new(path: Path) -> None:
    """The same a twelfth slower."""
    _bench(path, 0.92)


@made("tables")
def tables(path: Path) -> None:
    """Results as tables: a cell that stays, one that is slower, one run once, and others."""
    path.mkdir()
    sides = {
        "ref": {"same": [1000.0, 1004.0, 996.0], "slower": [1000.0, 1004.0, 996.0], "once": [1e3]},
        "new": {"same": [1001.0, 1003.0, 997.0], "slower": [900.0, 904.0, 896.0], "once": [990.0]},
    }
    for name, groups in sides.items():
        rows = [
            one
            for group, values in groups.items()
            for one in bench_repeats(group, "real_tokens_per_s", values, loss=1.5)
        ]
        tokens, samples = (850.0, 13.0) if name == "new" else (1000.0, 10.0)
        rows += bench_repeats("packed", "computed_tokens_per_s", [tokens], samples_per_s=samples)
        rows += bench_repeats("gone", "real_tokens_per_s", [1.0]) if name == "ref" else []
        write_table(as_table(rows), path / f"{name}.parquet")
        write_table(as_table(rows), path / f"{name}.csv")
    (path / "damaged.parquet").write_bytes(b"PAR1" + b"\x00" * 50)
    (path / "fms.csv").write_text(
        "epoch,fp16,framework_config,learning_rate,lora_alpha,lora_dropout,"
        "mem_nvidia_mem_reserved,model_name_or_path,num_gpus,peft_method,"
        "per_device_train_batch_size,r,torch_dtype,train_loss,train_runtime,"
        "train_samples_per_second,train_steps_per_second,train_tokens_per_second\n"
        "0.1,,none,2e-5,,,36000.0,org/small,1,,4,,bfloat16,0.85,400.0,1.0,0.25,4100.0\n"
        "0.1,,none,2e-5,,,29000.0,org/small,2,,2,,bfloat16,0.86,220.0,1.8,0.45,3700.0\n"
        "0.1,True,foak,2e-4,16,0.0,11000.0,org/small,1,lora,4,16,float16,0.95,300.0,1.3,0.33,"
        "5400.0\n"
        ",,none,2e-5,,,,org/large,1,,8,,bfloat16,,,,,\n"
    )


SCENARIOS = """
scenarios:
    -   name: full
        framework_config:
            -
            - quick-kernels
        arguments:
            learning_rate: 2e-5
            model_name_or_path:
                - 'org/small'
                - 'org/large'
            torch_dtype: bfloat16
            weight_decay: 0.5
    -   name: adapters
        framework_config:
            - four-bit
        arguments:
            fp16: True
            learning_rate: 2e-4
            peft_method: lora
            r: 16
            target_modules: ["q_proj", "k_proj"]
            model_name_or_path: ['org/small']
            max_steps: null
    -   name: mixture
        slow: True
        arguments:
            packing: False
            gradient_accumulation_steps: 16
            model_name_or_path: ['org/experts']
"""
CONTENTS = """
framework_configs:
    - shortname: quick-kernels
      plugins: [kernels]
      filename: quick-kernels-sample.yaml
    - shortname: four-bit
      plugins: [four]
      filename: four-bit-sample.yaml
"""
TEMPLATE = """
command: run --x {x} --gpus {num_gpus}
repeats: 2
timeout: 30m
scenarios:
  - name: mine
    arguments: {}
    axes: {x: [1, 2, 3], num_gpus: [1, 2]}
    environment: {LEVEL: "{x}"}
    exclude:
      - {x: 3, num_gpus: 2}
    constraints:
      - require: not (x == 2 and num_gpus > 1)
        reason: two does not fit on two
"""


@made("fms")
def fms(path: Path) -> None:
    """Files of scenarios: FMS's, the repository's, one with a template, and wrong ones."""
    path.mkdir()
    (path / "scenarios.yaml").write_text(SCENARIOS)
    (path / "CONTENTS.yaml").write_text(CONTENTS)
    (path / "defaults.yaml").write_text("num_train_epochs: 1\nmax_steps: 100\nweight_decay: 0.01\n")
    (path / "own").mkdir()
    (path / "own" / "template.yaml").write_text(TEMPLATE)
    for name in ("scenarios.yaml", "defaults.yaml"):
        (path / "ours").mkdir(exist_ok=True)
        shutil.copy(ROOT / "scenarios" / name, path / "ours" / name)
    for name, old, new in (
        ("key", "repeats:", "repeat:"),
        ("axis", "{x: [1, 2, 3]", "{y: [1, 2, 3]"),
        ("yaml", "scenarios:", "scenarios: ["),
        ("constraint", "not (x == 2", "not (z == 2"),
    ):
        (path / "own" / f"bad-{name}.yaml").write_text(TEMPLATE.replace(old, new))


# -- Neuron and HLO -------------------------------------------------------------------------------

COMPILER = "neuronxcc-2.18.121.0+9e31e41a"
FIRST, SECOND = "MODULE_15329989265349737271+a65e371e", "MODULE_77+00000000"


def _bar(step: int, elapsed_s: int, rate: float) -> str:
    minutes, seconds = divmod(elapsed_s, 60)
    return (
        f"Epoch 0:  {step}%|▍    | {step}/99 [{minutes:02d}:{seconds:02d}<58:44, v_num=8,"
        f" reduced_train_loss={7 - step / 10:.3f}, lr=2.73e-5, gradient_norm=8.600,"
        f" global_step={step}.000, consumed_samples={64 * step}.0, throughput={rate},"
        " throughput_peak=2.0]"
    )


@made("neuron")
def neuron(path: Path) -> None:
    """A Trainium training: YAML, config.json, log and compile cache."""
    g = neuron_graphs
    called = g.Computation(2, "body", 10)
    called.dot(called.parameter(2, 4), called.parameter(4, 6), 2, 6)
    main = g.Computation(1)
    main.dot(main.parameter(3, 5), main.parameter(5, 7), 3, 7)
    main.call(2)
    main.call(2)
    cache = path / "cache" / COMPILER
    g.write(cache / FIRST, g.one_dot(3, 5, 7, g.config(1000), g.config(0, name="rms_norm")))
    g.write(cache / SECOND, g.module(main, called))
    g.write(cache / SECOND, g.one_dot(9, 9, 9), name="wrapped_neff.hlo")
    g.write(cache / "MODULE_99+00000000", b"no module at all")
    lines = [f"Using a cached neff at {Path('cache') / COMPILER / FIRST}/model.neff"]
    lines += [_bar(step, 600 + 32 * step, 0.5 if step == 1 else 2.0) for step in range(1, 21)]
    (path / "train.log").write_text("\r".join(lines) + "\n")
    (path / "runs.txt").write_text(f"{FIRST} 1234\n{SECOND} 10\n")
    (path / "bad.yaml").write_text("a: [")
    shutil.copy(DATA / "configs" / "llama-3.1-8b.json", path / "config.json")
    for name in ("llama3_8b_sft", "llama3_8b_lora"):
        shutil.copy(DATA / "neuron" / f"{name}.yaml", path / f"{name}.yaml")


@made("hlo")
def hlo(path: Path) -> None:
    """Compiled modules, small enough to be counted in no time, and files that are none."""
    path.mkdir()
    for file in sorted((DATA / "hlo").glob("*.pb")):
        if file.stat().st_size < 40_000:
            shutil.copy(file, path / file.name)
    small = (path / "dot_mnk.opt.hlo_module.pb").read_bytes()
    (path / "packed.hlo_module.pb.gz").write_bytes(gzip.compress(small, mtime=0))
    (path / "damaged.hlo_module.pb").write_bytes(b"\xff" * 64)
    (path / "cut.hlo_module.pb").write_bytes(small[: len(small) // 2])
