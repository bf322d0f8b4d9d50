"""On a real NVIDIA GPU: what calibrating says, beside torch's own timer and nvidia-smi.

Run with `./dev test -m device -s tests/device/test_calibrate.py`; it prints what it found.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ergmeter.hardware.calibration import save_calibration

pytestmark = pytest.mark.device


@pytest.fixture(scope="module")
def torch() -> Any:  # the module, which has no type
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("no CUDA device")
    return module


@pytest.fixture(scope="module")
def found(torch: Any) -> Any:  # a Calibration
    from rich.console import Console

    from ergmeter.views.calculate.machine import calibration_document
    from ergmeter.views.render import terminal
    from ergmeter.workloads import calibration

    result = calibration.run(calibration.targets("cuda")[0], tell=lambda *tick: print(tick[2]))
    terminal.show(calibration_document([result]), Console(width=140))
    print(json.dumps(result.as_json(), indent=1))
    print(f"took {result.took_s:.1f} s")
    return result


def smi(query: str) -> list[str]:
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [cell.strip() for cell in done.stdout.splitlines()[0].split(",")]


def timers_flops_per_s(torch: Any, shape: tuple[int, int, int], dtype: Any) -> float:
    """By torch.utils.benchmark, which is not ours, on the same shape and layout."""
    from torch.utils.benchmark import Timer

    rows, columns, depth = shape
    x = torch.randn(rows, depth, device="cuda", dtype=dtype)
    weights = torch.randn(columns, depth, device="cuda", dtype=dtype).t()
    timer = Timer("torch.mm(x, weights)", globals={"torch": torch, "x": x, "weights": weights})
    return 2.0 * rows * columns * depth / timer.blocked_autorange(min_run_time=1.0).median


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_held_rate_is_that_of_torchs_own_timer(torch: Any, found: Any, dtype: str) -> None:
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    rate = found.matmul[dtype]
    rows, columns, depth = (int(side) for side in rate.of.split("x"))
    beside = statistics.median(
        timers_flops_per_s(torch, (rows, columns, depth), kind) for _ in range(3)
    )
    print(dtype, rate.value / 1e12, "beside", beside / 1e12)
    assert rate.value == pytest.approx(beside, rel=0.1)


def test_rates_are_below_the_datasheet_and_a_burst_is_above_what_is_held(found: Any) -> None:
    from ergmeter.metrics.definitions.peaks import table_peak

    for dtype, rate in found.matmul.items():
        peak = table_peak(found.name, dtype).flops_per_s
        assert 0.3 < rate.value / peak < 1.02, dtype
        assert rate.low <= rate.median <= rate.high <= rate.burst
        assert rate.window_s >= 1.0


def test_every_type_that_the_device_has_is_there(torch: Any, found: Any) -> None:
    wanted = {"fp32", "tf32", "bf16", "fp16", "int8"}
    if torch.cuda.get_device_capability() >= (8, 9):
        wanted.add("fp8")
    assert wanted <= set(found.matmul), found.absent


def test_narrow_types_are_faster_than_wide_ones(found: Any) -> None:
    """As every datasheet since Ampere has it; tf32 not being on for fp32 shows here."""
    held = {dtype: rate.value for dtype, rate in found.matmul.items()}
    assert held["fp32"] < 0.7 * held["tf32"] < 0.7 * held["bf16"]
    if "fp8" in held:
        assert held["fp8"] > 1.2 * held["bf16"]


def test_memory_is_below_the_datasheet_and_above_half_of_it(found: Any) -> None:
    from ergmeter.hardware.table import lookup

    peak = lookup(found.name).bandwidth_bytes_per_s
    assert peak is not None
    for pattern, rate in found.bandwidth.items():
        assert 0.5 < rate.value / peak < 1.02, pattern


def test_idle_watts_are_what_nvidia_smi_shows(torch: Any, found: Any) -> None:
    import time

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    time.sleep(5)  # its draw is an average of the last second, and the card has just worked
    shown = statistics.median(float(smi("power.draw")[0]) for _ in range(5))
    print("idle", found.idle, "nvidia-smi", shown)
    assert found.idle.power_w == pytest.approx(shown, rel=0.15)
    assert found.idle.counter_w == pytest.approx(found.idle.power_w, rel=0.15)


def test_sensors_refresh_as_the_literature_has_it(found: Any) -> None:
    """20 ms on a V100, 100 ms on what came after (SC'24, "Part-time power measurements")."""
    assert set(found.refresh) == {"power", "energy"}, found.absent
    for one in found.refresh.values():
        assert 0.015 < one.period_s < 0.13
        assert one.resolution_s < one.period_s / 2


def test_no_setting_of_the_card_is_changed(torch: Any, found: Any) -> None:
    """The limit that it found is the one that is there now; precision is as torch begins with."""
    limit_w = float(smi("enforced.power.limit")[0])
    assert found.conditions["power_limit_w"] == pytest.approx(limit_w, abs=0.5)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_training_on_it_is_held_against_it(
    torch: Any, found: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ergmeter.metrics.summarize import summarize
    from ergmeter.records import Reading
    from ergmeter.runlog.reader import Run
    from ergmeter.workloads import demo_training

    monkeypatch.setenv("ERGMETER_CALIBRATION", str(tmp_path / "kept"))
    save_calibration(found)
    outcome = demo_training.run(
        5, device=torch.device("cuda"), out=tmp_path / "run", tell=lambda _: None
    )
    readings = summarize(Run.open(outcome.run)).readings
    of_achievable, mfu = (
        readings[f"utilization.{key}"] for key in ("mfu_of_achievable_frac", "mfu_frac")
    )
    assert isinstance(of_achievable, Reading), of_achievable
    assert isinstance(mfu, Reading), mfu
    print("MFU", mfu.value, "of the achievable", of_achievable.value, of_achievable.note)
    assert mfu.value < of_achievable.value < 1


def test_zeros_are_not_what_is_multiplied(torch: Any) -> None:
    """Under a power limit zeros are faster; here to be seen, held only to not being slower."""
    from ergmeter.workloads.calibration_trials import RepeatedWork, TrialDurations, sustained

    side = 8192
    pace = TrialDurations(warmup_s=1.0, window_s=1.0, block_s=0.05)
    rates = {}
    for name, make in (("normal", torch.randn), ("zeros", torch.zeros)):
        x = make(side, side, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(x)

        def work(x: Any = x, out: Any = out) -> object:
            return torch.mm(x, x.t(), out=out)

        task = RepeatedWork(work, 2.0 * side**3, "FLOP/s", name)
        rates[name] = sustained(task, torch.device("cuda"), pace, watch=None).value
    print({name: value / 1e12 for name, value in rates.items()})
    assert rates["zeros"] > 0.97 * rates["normal"]
