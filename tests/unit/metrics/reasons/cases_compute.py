"""Reasons for absent MFU, HFU, bandwidth and shares of what a calibration measured."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ergmeter.metrics.definitions.achievable import (
    ACHIEVABLE,
    BANDWIDTH_OF_ACHIEVABLE,
    OF_ACHIEVABLE,
)
from ergmeter.metrics.definitions.compute import (
    BANDWIDTH,
    FLOPS_PER_S,
    FLOPS_PER_TOKEN,
    HFU,
    MFU,
    MFU_BF16,
)
from ergmeter.metrics.live.recent_window import remaining
from ergmeter.records import Device, Flops
from ergmeter.runlog.reader import Run
from tests.runs import even_steps, run_of
from tests.unit.metrics.reasons.case import Case
from tests.unit.metrics.reasons.making import Maker, lacks, refuses
from tests.unit.metrics.test_achievable import calibrated, run_on
from tests.unit.metrics.test_compute import EXACT, H200, run_with

L4 = replace(H200, id="GPU-2", name="NVIDIA L4")
A100 = replace(H200, name="a100")
NODE = Device("node:a", "node", "a", "node", {"cpu_model": "Test CPU"})
DECODE = replace(EXACT, bytes_per_step=3e11)
PADDED = replace(EXACT, hardware_per_padding=None)
IMAGES = Flops(2e12, "counted", "counted", samples_per_step=8)
PEAK: dict[str, Any] = {"peak_flops_per_s": 1e15, "dtype": "fp8"}


def on(*devices: Device, flops: Flops | None = EXACT, **settings: Any) -> Maker:
    """Twenty steps of 100 tokens on these devices."""
    return lambda path: run_with(path, *devices, flops=[flops] if flops else None, **settings)


def with_calibration(*devices: Device, **settings: Any) -> Maker:
    """The same on devices with a calibration, at a share of the peak that is possible."""
    flops = settings.pop("flops", replace(DECODE, model_per_step=2e13))
    return lambda path: run_on(path, *devices, flops=flops, **settings)


def of(flops: Flops, **fields: Any) -> Maker:
    """Twenty steps with these fields, on one GPU."""

    def make(path: Path) -> Run:
        return run_of(
            path,
            steps=even_steps(20, **fields),
            devices=[H200],
            settings={"dtype": "bf16"},
            header={"flops": [asdict(flops)]},
        )

    return make


def with_budget(**budget: float) -> Maker:
    header = {"budget": budget} if budget else {}
    return lambda path: run_of(path, steps=even_steps(10, tokens_computed=1), header=header)


CASES: list[Case] = [
    # -- FLOPs of a step
    lacks(
        "nothing says what model is trained",
        MFU,
        "the FLOPs of a step are unknown: erg record --model-config",
        on(H200, flops=None, dtype="bf16"),
    ),
    lacks(
        "the model that was counted has no matmul",
        MFU,
        "the FLOP count of a step is 0: no matmul was counted in it",
        of(replace(EXACT, model_per_step=0.0, hardware_per_step=0.0), tokens_computed=100),
    ),
    lacks(
        "a model of images trains on steps that count 0 samples",
        FLOPS_PER_S,
        "this run has 0 samples per second, so no FLOP/s",
        of(IMAGES, samples=0),
    ),
    lacks(
        "a model of images has samples and no tokens",
        FLOPS_PER_TOKEN,
        "the model reads no tokens: compute.model_flops_per_step has its FLOPs",
        of(IMAGES, samples=8),
    ),
    lacks(
        "FLOPs were passed as Flops(...) without tokens_per_step",
        MFU,
        "the FLOPs of a step were given without its tokens: pass tokens_per_step in Flops(...)",
        on(H200, flops=replace(EXACT, tokens_per_step=None), dtype="bf16"),
    ),
    # -- HFU
    lacks(
        "FLOPs were passed as Flops(...) without hardware_per_step",
        HFU,
        "recomputation is unknown: the FLOP count has no hardware_per_step",
        on(H200, flops=replace(EXACT, hardware_per_step=None), dtype="bf16"),
    ),
    lacks(
        "20 of 100 positions are padding, and the count has no cost of one",
        HFU,
        "20.0 % of the positions are padding, and the FLOP count has no cost of one",
        of(PADDED, tokens_computed=100, tokens_real=80),
    ),
    # -- the peak
    lacks(
        "nothing says which dtype the matmuls of a GPU are in",
        MFU,
        "the dtype of the matmuls is unknown, and rates differ by dtype: pass --dtype",
        on(H200),
    ),
    lacks(
        "a run used an H200 and an L4",
        MFU,
        "different GPUs (NVIDIA H200, NVIDIA L4) have no common peak: pass --peak",
        on(H200, L4, dtype="bf16"),
    ),
    lacks(
        "neither a GPU nor the host was sampled",
        MFU,
        "unknown peak: pass --peak or --device (no GPU and no host was sampled in this run)",
        on(),
    ),
    lacks(
        "the host was sampled without an fp8 peak",
        MFU,
        "unknown peak: pass --peak (the CPU's fp8 peak was not recorded)",
        on(NODE, dtype="fp8"),
    ),
    lacks(
        "the peak was declared for fp8 alone",
        MFU_BF16,
        f"the bf16 peak of NVIDIA H200 SXM5 141GB is unknown; {MFU} is against its fp8 peak",
        on(H200, **PEAK),
    ),
    lacks(
        "the matmuls are in bf16",
        MFU_BF16,
        f"the matmuls are in bf16: only fp8, fp4 and int8 have a second peak; see {MFU}",
        on(H200, dtype="bf16"),
    ),
    lacks(
        "a peak was declared without a dtype",
        MFU_BF16,
        "the dtype of the matmuls was not given: only fp8, fp4 and int8 have a second peak; see"
        f" {MFU}",
        on(H200, peak_flops_per_s=1e15),
    ),
    # -- bandwidth
    lacks(
        "a training step was counted",
        BANDWIDTH,
        "the bytes that a step moves are counted for inference only",
        on(H200, dtype="bf16"),
    ),
    lacks(
        "decoding ran on an a100, which is the name of several with different memory",
        BANDWIDTH,
        "the memory bandwidth of a100 is unknown: if `erg peaks` lists it, pass its exact name",
        on(A100, flops=DECODE, dtype="bf16"),
    ),
    # -- against a calibration
    lacks(
        "one of two GPUs was never calibrated",
        OF_ACHIEVABLE,
        "NVIDIA H200 [GPU-1] had no calibration when this was recorded: run `erg calibrate` on its"
        " machine, then record again",
        with_calibration(calibrated("GPU-0"), H200),
    ),
    lacks(
        "the calibration has bf16 and the run computes in fp16",
        OF_ACHIEVABLE,
        "the calibration of NVIDIA H200 has no matmul fp16: it has bf16",
        with_calibration(calibrated("GPU-0"), dtype="fp16"),
    ),
    lacks(
        "the calibration was interrupted before fp16",
        OF_ACHIEVABLE,
        "the calibration of NVIDIA H200 has no matmul fp16: it was interrupted before that",
        with_calibration(calibrated("GPU-0", interrupted=True), dtype="fp16"),
    ),
    lacks(
        "a calibrated GPU computes in a dtype that nothing names",
        ACHIEVABLE,
        "the dtype of the matmuls is unknown",
        with_calibration(calibrated("GPU-0"), dtype=None),
    ),
    lacks(
        "no device was sampled whose calibration could be used",
        ACHIEVABLE,
        "no GPU and no host was sampled in this run, so there is no calibration",
        with_calibration(),
    ),
    lacks(
        "a training step was counted, and the GPU has a calibration",
        BANDWIDTH_OF_ACHIEVABLE,
        "the bytes that a step moves are counted for inference only",
        with_calibration(calibrated("GPU-0"), flops=EXACT),
    ),
    # -- progress
    refuses(
        "the run has no budget",
        "no total step or token count: pass Meter(budget=Budget(steps=N)) or Budget(tokens=N)",
        with_budget(),
        remaining,
    ),
    refuses(
        "the budget is 1e18 FLOPs, and the model is unknown",
        "the budget is in FLOPs, and the FLOPs of a step are unknown",
        with_budget(FLOPs=1e18),
        remaining,
    ),
]
