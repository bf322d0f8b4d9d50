"""On a real NVIDIA GPU: what measuring costs a step, how right short bursts are, and the ladder.

A GPU warms up. It draws more and clocks lower by the minute, so that whichever way
is measured second looks slower; and one that rests, while a way is made ready, is cooler. So ways
take turns in short blocks, each begins after the same rest with some untimed steps and is held
against the bare ones on both sides of it, and the interval is over those pairs. Bare blocks in the
place of a way are the first row: what the bench makes of nothing at all.

Bursts: products for so long, then a pause of random length, over and over. Their joules by
ergmeter, each by itself, are added up and held against the hardware's counter over the whole
sequence, less what it draws in the pauses at rest. Losses: with a Meter and without, by kernels
that give the same bits each time.

    python bench/device.py --out FOLDER [--only overhead,bursts,ladder,losses] [--zeus]
"""

from __future__ import annotations

import atexit
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tables
from ergmeter import Meter, Reading
from ergmeter.metrics.definitions.energy_breakdown import energy_of
from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.runlog.reader import Run

NS = 1e9
SIZES = {"340 ms": 22, "20 ms": 2}  # layers of a Llama that is 2048 wide
BATCH = {"340 ms": (8, 2048), "20 ms": (4, 2048)}
BLOCK_S = {"340 ms": 3.5, "20 ms": 1.5}
PAUSE_S = 2.0  # before each block: a Meter takes a second of it to begin
BURSTS = ((0.05, 50), (0.2, 40), (1.0, 14), (10.0, 3))
REST_S = 3.0
WATCHERS = 20
# Each reads the events of a run, as a page does.
WATCHING = """
import sys, threading, urllib.request
def read():
    for line in urllib.request.urlopen(sys.argv[1]):
        pass
readers = [threading.Thread(target=read) for _ in range(int(sys.argv[2]))]
[one.start() for one in readers]
"""
Loop = Callable[[int], float]


class Training:
    """A Llama in bf16 on random tokens, as plain as can be; no step waits for the device."""

    def __init__(self, size: str, *, deterministic: bool = False) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        torch.use_deterministic_algorithms(deterministic)
        self.rows, self.length = BATCH[size]
        config = LlamaConfig(
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=SIZES[size],
            num_attention_heads=32,
            max_position_embeddings=4096,
        )
        made: Any = LlamaForCausalLM(config)
        self.model = made.to("cuda", torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        shape = (self.rows, self.length)
        self.ids = torch.randint(0, 32000, shape, device="cuda")
        self.tokens = self.rows * self.length

    def step(self) -> torch.Tensor:
        """One optimizer step, asked for and not waited for."""
        loss: torch.Tensor = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


# -- what measuring costs --------------------------------------------------------------------------


@contextmanager
def bare(training: Training, _out: Path) -> Iterator[Loop]:
    """Nothing."""

    def loop(steps: int) -> float:
        return timed(lambda: [training.step() for _ in range(steps)])

    yield loop


@contextmanager
def metered(training: Training, out: Path) -> Iterator[Loop]:
    """Everything on: all probes, hardware counters, the device's clock, FLOPs of the model."""
    with Meter(out, model=training.model, seq_len=training.length, dtype="bf16") as meter:

        def loop(steps: int) -> float:
            def run() -> None:
                for _ in range(steps):
                    with meter.step(tokens=training.tokens):
                        training.step()

            return timed(run)

        yield loop


@contextmanager
def watched(training: Training, out: Path) -> Iterator[Loop]:
    """The same with `erg serve` beside it and some who watch the run: processes of their own."""
    address = served(out.parent)
    with metered(training, out) as loop:
        events = f"{address}api/run/{listed(address, out.name)}/events"
        watching = subprocess.Popen([sys.executable, "-c", WATCHING, events, str(WATCHERS)])
        try:
            yield loop
        finally:
            watching.kill()
            watching.wait()


def listed(address: str, name: str) -> str:
    """The id of a run, once the server has seen it."""
    while True:
        runs = json.load(urllib.request.urlopen(f"{address}api/runs"))["runs"]
        found = [one["id"] for one in runs if one["name"] == name]
        if found:
            return str(found[0])
        time.sleep(0.05)


@cache
def served(folder: Path) -> str:
    """The address of a server of these runs, for all turns."""
    server = subprocess.Popen(
        [sys.executable, "-m", "ergmeter", "serve", str(folder)], stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.terminate)
    assert server.stdout is not None
    return server.stdout.readline().split()[-1]


@contextmanager
def zeus(training: Training, _out: Path) -> Iterator[Loop]:
    """As its documentation measures a step."""
    from zeus.monitor import ZeusMonitor

    monitor = ZeusMonitor(gpu_indices=[0], approx_instant_energy=False)

    def loop(steps: int) -> float:
        def run() -> None:
            for _ in range(steps):
                monitor.begin_window("step")
                training.step()
                monitor.end_window("step")

        return timed(run)

    yield loop


@contextmanager
def smi(training: Training, _out: Path) -> Iterator[Loop]:
    """nvidia-smi in a loop of its own, ten times a second."""
    asked = "power.draw.instant,utilization.gpu,memory.used,temperature.gpu,clocks.sm"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv", "-lms", "100"]
    with bare(training, _out) as loop:
        polling = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(0.5)
        try:
            yield loop
        finally:
            polling.kill()
            polling.wait()


@contextmanager
def profiler(training: Training, _out: Path) -> Iterator[Loop]:
    """A profiled forward pass beside each step, as profiler-based MFU monitors do."""
    from torch.profiler import ProfilerActivity, profile

    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]

    def loop(steps: int) -> float:
        def run() -> None:
            for _ in range(steps):
                training.step()
                with profile(activities=both, with_flops=True), torch.no_grad():
                    training.model(input_ids=training.ids)

        return timed(run)

    yield loop


WAYS = {
    "nothing, as a way": bare,
    "ergmeter, all of it": metered,
    f"the same, {WATCHERS} watch it in erg serve": watched,
    "Zeus, a window each step": zeus,
    "nvidia-smi -lms 100 beside it": smi,
    "a profiled forward each step": profiler,
}


def timed(work: Callable[[], object]) -> float:
    """Seconds until the device has done it."""
    torch.cuda.synchronize()
    before = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - before


def overhead(out: Path, rounds: int, *, sizes: Sequence[str], with_zeus: bool) -> dict[str, Any]:
    """What each way adds to a step."""
    numbers: dict[str, Any] = {}
    for size in sizes:
        training = Training(size)
        with bare(training, out) as alone:
            alone(20)
            one_s = alone(10) / 10
        steps = max(2, round(BLOCK_S[size] / one_s))
        rows = []
        for name, way in WAYS.items():
            if way is zeus and not with_zeus:
                continue
            turns = {metered: rounds, watched: rounds, bare: rounds // 2, profiler: 3}.get(
                way, max(3, rounds // 4)
            )
            ratios = paired(training, way, steps, turns, out / f"{size[:-3]}ms-{way.__name__}")
            numbers[f"{size}, {name}"] = {"bare_s": one_s, "ratios": ratios}
            middle = statistics.median(ratios)
            low, high = tables.median_interval(ratios)
            added, least, most = (f"{100 * (one - 1):+.3f}" for one in (middle, low, high))
            added_ms = f"{1e3 * one_s * (middle - 1):+.3f}"
            rows.append((name, f"{1e3 * one_s:.1f}", added, f"{least} to {most}", added_ms, turns))
        header = ("measured by", "bare step ms", "added %", "95 % interval", "added ms", "pairs")
        tables.show(f"What measuring adds to a step of {size}", header, rows, note=where())
        del training
        torch.cuda.empty_cache()
    return numbers


def paired(
    training: Training,
    way: Any,  # noqa: ANN401  one of WAYS
    steps: int,
    turns: int,
    out: Path,
) -> list[float]:
    """Of each turn: the block that is measured, to the mean of the bare ones around it."""
    warm = max(2, steps // 5)  # untimed
    ended_s = time.monotonic()

    def block(way: Any, out: Path) -> float:  # noqa: ANN401
        nonlocal ended_s
        with way(training, out) as loop:
            time.sleep(max(0.0, ended_s + PAUSE_S - time.monotonic()))
            loop(warm)
            took_s: float = loop(steps)
            ended_s = time.monotonic()
        return took_s

    before = block(bare, out)
    ratios = []
    for turn in range(turns):
        between = block(way, Path(f"{out}-{turn}"))
        after = block(bare, out)
        ratios.append(between / ((before + after) / 2))
        before = after
    return ratios


# -- short bursts ----------------------------------------------------------------------------------


def bursts(out: Path) -> dict[str, Any]:
    """Each length of burst in a run of its own."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def counter() -> tuple[int, float]:
        """At its next refresh, so that it need not be interpolated."""
        first = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        while (now := pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) == first:
            pass
        return time.monotonic_ns(), now / 1e3

    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def burst(seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for _ in range(4):
                torch.mm(matrix, matrix)
            torch.cuda.synchronize()

    burst(2.0)
    dice = random.Random(0)
    rows, numbers = [], {}
    for seconds, times in BURSTS:
        time.sleep(2)
        path = out / f"bursts-{seconds:g}s"
        with Meter(path, probes=["nvml"]) as meter:
            began = counter()
            for _ in range(times):
                time.sleep(dice.uniform(0.5, 0.9))
                with meter.step(tokens=1):
                    burst(seconds)
            time.sleep(dice.uniform(0.5, 0.9))
            ended = counter()
            with meter.phase("idle"):  # as warm as in the pauses
                time.sleep(REST_S)
            later = counter()
        rest_w = (later[1] - ended[1]) / ((later[0] - ended[0]) / NS)
        found = judged(path, began, ended, rest_w)
        numbers[f"{seconds:g} s"] = {**found, "began": began, "ended": ended}
        rows.append((
            f"{1e3 * found['burst_s']:.0f} ms", times, f"{rest_w:.1f}", f"{found['idle_w']:.1f}",
            f"{found['truth_j']:.1f}", f"{found['ours_j']:.1f}",
            f"{100 * (found['ours_j'] / found['truth_j'] - 1):+.2f}",
            f"{100 * found['spread']:.1f}", f"{100 * found['off']:.0f}",
        ))  # fmt: skip
    header = (
        "burst", "times", "idle W", "ours", "counter, less idle J", "ours, each added up J",
        "off by %", "spread of one %", "its own interval, half %",
    )  # fmt: skip
    tables.show("Bursts, each by itself", header, rows, note=where())
    return numbers


def judged(
    path: Path, began: tuple[int, float], ended: tuple[int, float], rest_w: float
) -> dict[str, float]:
    """What ergmeter says of each burst of a run, against the counter over all of them."""
    run = Run.open(path)
    evidence = evidence_of(run)
    steps = evidence.all_steps
    train = steps.where(steps["phase"] == 0)
    start_ns, end_ns = train.columns["start_ns"], train.columns["end_ns"]
    each = energy_of(evidence, start_ns, end_ns)
    idle = summarize(run).readings["energy.idle_w"]
    assert isinstance(idle, Reading), idle
    busy_s = float((end_ns - start_ns).sum()) / NS
    whole_s = (ended[0] - began[0]) / NS
    truth_j = ended[1] - began[1] - rest_w * (whole_s - busy_s)
    return {
        "burst_s": busy_s / len(train),
        "rest_w": rest_w,
        "idle_w": idle.value,
        "truth_j": truth_j,
        "ours_j": float(each.joules.sum()),
        "spread": float(np.std(each.joules) / np.mean(each.joules)),
        "off": float(np.median((each.high_j - each.low_j) / 2 / each.joules)),
    }


# -- the ladder, and losses ------------------------------------------------------------------------

LADDER = (
    "utilization.busy_frac", "activity.sm_frac", "activity.tensor_frac", "activity.dram_frac",
    "utilization.mfu_frac", "utilization.hfu_frac", "throughput.tokens_per_s",
    "time.step_median_s", "energy.joules_per_token", "energy.step_median_j", "energy.mean_w",
)  # fmt: skip


def ladder(out: Path) -> dict[str, Any]:
    """What each rung says of one training."""
    training = Training("340 ms")
    path = out / "ladder"
    with Meter(
        path, model=training.model, seq_len=training.length, dtype="bf16", warmup_steps=10
    ) as meter:
        for _ in range(60):
            with meter.step(tokens=training.tokens):
                training.step()
    found = summarize(Run.open(path)).readings
    rows: list[tuple[object, ...]] = []
    numbers = {}
    for key in LADDER:
        one = found[key]
        if isinstance(one, Reading):
            numbers[key] = one.value
            rows.append((key, f"{one.value:.4g}", one.unit, one.basis, one.note[:90]))
        else:
            rows.append((key, "-", "", "", one.reason[:90]))
    tables.show("One training, rung by rung", ("metric", "value", "unit", "basis", "note"), rows)
    return numbers


def losses(out: Path) -> dict[str, Any]:
    """The same bits with a Meter and without."""

    def trained(meter: Meter | None) -> list[str]:
        training = Training("20 ms", deterministic=True)
        found = []
        for _ in range(30):
            if meter is None:
                found.append(training.step())
            else:
                with meter.step(tokens=training.tokens):
                    found.append(training.step())
        return [float(one).hex() for one in found]

    without = trained(None)
    with Meter(out / "losses") as meter:
        within = trained(meter)
    torch.use_deterministic_algorithms(False)
    same = sum(one == other for one, other in zip(without, within, strict=True))
    rows = [(len(without), same, without[-1], within[-1])]
    header = ("losses", "the same to the last bit", "the last without", "the last with")
    tables.show("Losses with deterministic kernels", header, rows)
    return {"without": without, "within": within}


def where() -> str:
    """The device, for a table's foot."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {tables.machine()}"


def main() -> None:
    """Print the tables."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    options = tables.parser(__doc__)
    options.add_argument("--out", type=Path, required=True, help="where the runs are left")
    options.add_argument("--only", default="losses,ladder,bursts,overhead")
    options.add_argument("--step", choices=[*SIZES], help="one size of step; else both")
    options.add_argument("--zeus", action="store_true", help="beside Zeus, which is installed")
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "losses": lambda: losses(given.out),
        "ladder": lambda: ladder(given.out),
        "bursts": lambda: bursts(given.out),
        "overhead": lambda: overhead(
            given.out,
            given.rounds or 24,
            sizes=[given.step] if given.step else [*SIZES],
            with_zeus=given.zeus,
        ),
    }
    for name in given.only.split(","):
        (given.out / f"{name}.json").write_text(json.dumps(parts[name](), indent=1) + "\n")


if __name__ == "__main__":
    main()
