"""Where the peak went, on recordings of a real H200 of which it is known what happened."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ergmeter.importers.importing import ImportRequest, import_log
from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.explain.device import device_activity
from ergmeter.metrics.explain.flops import peak_text
from ergmeter.metrics.explain.waterfall import Explanation, explain
from ergmeter.metrics.summarize import evidence_of
from ergmeter.records import Flops, Missing, Reading
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.runs import run_of
from tests.unit.metrics.test_h200 import PHASES, by_the_counter, replayed
from tests.unit.metrics.test_h200_run import unpacked

LOGS = Path(__file__).parents[2] / "data" / "logs"


def explained(run: Run, *, flops: tuple[Flops, ...] = (), **settings: object) -> Explanation:
    declared = Settings.declared(None, {"dtype": "bf16", **settings})
    return explain(evidence_of(run, declared, flops=flops))


def shares(found: Explanation) -> dict[str, float]:
    return {one.key: one.share_frac for one in found.blocks}


def said(found: Explanation, key: str) -> str:
    (block,) = [one for one in found.blocks if one.key == key]
    return "; ".join(f"{fact.key}: {fact.said}" for fact in block.facts)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Flops, ...]:
    """The FLOPs of the recorded model, as they were counted when it was trained in full."""
    return unpacked("mfu_full", tmp_path_factory.mktemp("full_flops")).flops


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Flops, ...]:
    """The same with adapters."""
    return unpacked("mfu_lora", tmp_path_factory.mktemp("lora_flops")).flops


@pytest.fixture(scope="module")
def phase_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """`phase_run(phase)`: a run of one phase, made once."""
    folder = tmp_path_factory.mktemp("phases")
    return cache(lambda phase: replayed(folder / phase, phase))


@pytest.mark.parametrize(
    ("note", "of"),
    [
        (
            "exact; of 989.5 TFLOP/s dense bf16 (a sheet); 1 device",
            "989.5 TFLOP/s dense bf16 (a sheet)",
        ),
        (
            "exact; of 1 GFLOP/s (2 x 3 (a); assumed: b); 1 device",
            "1 GFLOP/s (2 x 3 (a); assumed: b)",
        ),
        ("exact; of 1 GFLOP/s; 1 device", "1 GFLOP/s"),
        ("exact", ""),
    ],
)
def test_what_100_percent_is_comes_whole_out_of_the_note(note: str, of: str) -> None:
    assert peak_text(note) == of


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("is_counted", [False, True])
def test_blocks_and_what_was_achieved_add_up_to_the_peak_and_to_the_joules_of_the_window(
    phase_run: Callable[[str], Run], full: tuple[Flops, ...], phase: str, is_counted: bool
) -> None:
    flops = full if is_counted and "tiny" not in phase else ()
    found = explained(phase_run(phase), flops=flops, warmup_steps=2)
    assert found.achieved is not None
    whole = [*found.blocks, found.achieved]
    assert sum(one.share_frac for one in whole) == pytest.approx(1.0, abs=1e-12)
    assert isinstance(found.energy, Reading)
    joules = [one.joules for one in whole if one.joules is not None]
    assert len(joules) == len(whole)
    assert sum(joules) == pytest.approx(found.energy.value, rel=1e-9)
    assert min(joules) >= 0
    keys = {fact.key for one in whole for fact in one.facts}
    assert keys <= catalogue().keys()
    assert all(one.facts for one in whole)


def test_stalls_are_as_long_as_the_program_slept(phase_run: Callable[[str], Run]) -> None:
    """It slept for half a second after every fifth step, six times in 12.4 s."""
    found = explained(phase_run("full_bf16_1b_stalls"))
    window_s = 12.4015
    assert shares(found)["stalls"] * window_s == pytest.approx(6 * 0.5, rel=0.01)
    assert "6 of 31 steps" in said(found, "stalls")
    (best, *_) = found.changes
    assert best.block == "stalls"
    assert best.gain_frac == pytest.approx(1 / (1 - 3.0 / window_s) - 1, rel=0.02)


def test_the_largest_gains_are_worth_trying_and_a_bound_counts_half(tmp_path: Path) -> None:
    """Of a fine-tuning: padding 62 %, kernels that do not multiply less than 100 %; idle time, all
    of which can go, 12 %. Checkpoints and evaluation are not in its window."""
    found = explained(unpacked("finetune", tmp_path))
    assert [(one.block, one.is_bound) for one in found.changes] == [
        ("padding", False),
        ("not_multiplying", True),
        ("idle_in_steps", False),
    ]
    (idle,) = [one for one in found.blocks if one.key == "idle_in_steps"]
    assert found.changes[2].gain_frac == pytest.approx(1 / (1 - idle.share_frac) - 1)


def test_the_joules_of_stalls_lie_between_idle_power_and_what_the_raw_counter_says(
    phase_run: Callable[[str], Run],
) -> None:
    """An H200 with a context draws 121 W at rest. Its counter, read between refreshes, lags by some
    50 ms, and so puts part of the step before each sleep into the sleep."""
    run = phase_run("full_bf16_1b_stalls")
    found = explained(run, warmup_steps=2)
    steps = run.steps()
    ends, starts = steps["end_ns"][2:-1], steps["start_ns"][3:]
    slept = (starts - ends) > 0.4e9
    assert slept.sum() == 6
    spans = zip(ends[slept].tolist(), starts[slept].tolist(), strict=True)
    by_counter_j = sum(by_the_counter(*span) for span in spans)
    (stalls,) = [one for one in found.blocks if one.key == "stalls"]
    assert stalls.joules_basis == "measured"
    assert stalls.joules is not None
    assert 121 * 6 * 0.5 < stalls.joules < by_counter_j


def test_a_small_model_is_launch_bound_and_a_large_one_is_not(
    phase_run: Callable[[str], Run], full: tuple[Flops, ...]
) -> None:
    tiny = explained(phase_run("tiny_20ms"), warmup_steps=2)
    (idle,) = [one for one in tiny.blocks if one.key == "idle_in_steps"]
    assert idle.title.startswith("launch-bound")
    # 13.8 % of the time with a kernel, 3.7 % between steps: what is left is the host's.
    assert idle.share_frac == pytest.approx(1 - 0.1383 - 0.0374, abs=0.001)
    assert any(one.startswith("launch-bound") for one in tiny.remarks)
    assert "CUDA graphs" in tiny.changes[0].advice
    large = explained(phase_run("full_bf16_1b"), flops=full, warmup_steps=2)
    assert not any("launch-bound" in one for one in large.remarks)
    assert shares(large)["idle_in_steps"] < 0.01


def test_lora_says_why_mfu_falls_though_tokens_per_second_do_not(
    phase_run: Callable[[str], Run], full: tuple[Flops, ...], lora: tuple[Flops, ...]
) -> None:
    """52 561 tokens/s against 53 972, and an MFU of 25.0 % against 36.9 %."""
    before = explained(phase_run("full_bf16_1b"), flops=full, warmup_steps=2)
    after = explained(phase_run("lora_bf16_1b"), flops=lora, warmup_steps=2)
    assert before.achieved is not None
    assert after.achieved is not None
    assert before.achieved.share_frac == pytest.approx(53_972 * 6.7604e9 / 989.5e12, rel=1e-3)
    assert after.achieved.share_frac == pytest.approx(52_561 * 4.7080e9 / 989.5e12, rel=1e-3)
    (why,) = [one for one in after.remarks if one.startswith("frozen weights")]
    assert "4.708 GFLOP instead of 6.76 GFLOP (69.6 %" in why
    assert f"would read {52_561 * 6.7602e9 / 989.5e12:.1%}".replace("%", " %") in why
    assert "no loss" in why
    assert not any(one.startswith("frozen") for one in before.remarks)
    # The hardware agrees: its tensor cores worked 0.68 times as long, in cycles per second.
    assert "tensor cores 26.3 %" in why
    pipes = 0.26255 * 1.9642 / (0.42017 * 1.8032)
    assert pipes == pytest.approx(0.696, abs=0.02)


def test_the_clock_is_held_against_the_one_of_the_datasheets_peak(
    phase_run: Callable[[str], Run], full: tuple[Flops, ...], lora: tuple[Flops, ...]
) -> None:
    """132 multiprocessors x 4096 FLOP a cycle reach 989.5 TFLOP/s at 1830 MHz."""
    slow = explained(phase_run("full_bf16_1b"), flops=full, warmup_steps=2)
    assert shares(slow)["clock"] == pytest.approx(0.9913 * (1 - 1803.4 / 1830.1), abs=5e-4)
    assert "at the power limit in 100 % of readings" in said(slow, "clock")
    fast = explained(phase_run("lora_bf16_1b"), flops=lora, warmup_steps=2)
    assert shares(fast)["clock"] == pytest.approx(0.99196 * (1 - 1964.1 / 1830.1), abs=5e-4)
    (gain,) = [one for one in fast.blocks if one.key == "clock"]
    assert gain.joules == 0


@pytest.mark.parametrize(
    ("device", "mhz"),
    [
        ("a100-sxm-80gb", 1410),  # its white paper: boost clock
        ("a100-pcie-40gb", 1410),
        ("h100-sxm", 1830),  # the H100's: boost clock for tensor cores
        ("h100-pcie", 1620),
        ("h200-sxm", 1830),
    ],
)
def test_the_clock_of_a_peak_is_the_one_that_the_maker_states(
    phase_run: Callable[[str], Run], device: str, mhz: int
) -> None:
    run = phase_run("tiny_20ms")
    seen = device_activity(evidence_of(run, Settings(device=device, dtype="bf16")), None)
    assert seen.peak_clock_hz == pytest.approx(mhz * 1e6, rel=1e-3)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("b200", "B200"),
        ("gb200", "GB200"),
        ("l40s", "L40S"),
        ("rtx-4090", "RTX 4090"),
        ("h200-nvl", "H200 NVL"),
        ("h100-nvl", "H100 NVL"),
        ("gh200-480gb", "GH200"),
        ("v100-sxm2-16gb", "V100"),
    ],
)
def test_a_card_whose_clock_nobody_states_has_no_clock_step_and_the_reason_is_told(
    phase_run: Callable[[str], Run], full: tuple[Flops, ...], device: str, name: str
) -> None:
    run = phase_run("full_bf16_1b")
    found = explained(run, flops=full, warmup_steps=2, device=device)
    assert "clock" not in shares(found)
    assert found.missing["peak_clock_hz"].startswith("no source for the clock of the peak of ")
    assert name in found.missing["peak_clock_hz"]


def test_what_the_kernels_did_is_read_off_the_counters(
    phase_run: Callable[[str], Run], full: tuple[Flops, ...]
) -> None:
    found = explained(phase_run("full_bf16_1b"), flops=full, warmup_steps=2)
    clock = 1803.4 / 1830.1
    assert shares(found)["empty_sms"] == pytest.approx((0.99134 - 0.93063) * clock, abs=1e-3)
    assert shares(found)["not_multiplying"] == pytest.approx((0.93063 - 0.42017) * clock, abs=1e-3)
    assert shares(found)["uncounted"] == pytest.approx(0.42017 * clock - 0.36874, abs=1e-3)


def test_without_hardware_counters_the_kernels_are_one_block(tmp_path: Path) -> None:
    found = explained(unpacked("mfu_full", tmp_path))
    assert set(shares(found)) == {"gaps", "clock", "kernels"}
    assert "no reading has tensor_frac" in found.missing["tensor_frac"]
    assert any("hardware counters" in one for one in found.record_next)
    assert "calibration" in found.missing["matmul_ceiling"]


def test_of_a_log_there_is_the_printed_mfu_and_what_to_record_next_time(tmp_path: Path) -> None:
    import_log(ImportRequest(LOGS / "torchtitan.log", out=tmp_path / "run"))
    found = explained(Run.open(tmp_path / "run"))
    assert found.achieved is not None
    assert found.achieved.basis == "reported"
    assert found.achieved.share_frac == pytest.approx(0.343, abs=0.002)
    assert list(shares(found)) == ["kernels"]
    assert isinstance(found.energy, Missing)
    assert "several steps" in found.missing["stalls"]
    assert "erg record" in found.record_next[0]


def test_of_a_run_without_steps_and_devices_nothing_is_told_and_that_is_said(
    tmp_path: Path,
) -> None:
    found = explained(run_of(tmp_path / "run"))
    assert found.achieved is None
    assert found.blocks == ()
    assert "no training steps" in found.missing["steps"]
    assert "meter.step" in found.record_next[0]


def test_of_printed_steps_with_readings_the_device_is_explained(tmp_path: Path) -> None:
    """A hundred products of 8192^3 a step, at the power limit: 1438 MHz, 95.5 % busy."""
    found = explained(unpacked("record", tmp_path))
    assert shares(found)["clock"] == pytest.approx(0.955 * (1 - 1438 / 1830.1), abs=0.002)
    assert found.changes[0].block == "clock"
    assert "when steps begin" in found.record_next[0]
