"""MFU of a run, and of figures somebody printed: by hand, and what can not be said."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.metrics.definitions.compute import (
    ALL_WORK,
    BANDWIDTH,
    FLOPS_PER_S,
    FLOPS_PER_TOKEN,
    HFU,
    MFU,
    MFU_BF16,
    NotApplicable,
    TokenRate,
    compute_results,
)
from ergmeter.metrics.definitions.peaks import Peak, declared_peak, device_peak, table_peak
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Device, Flops, Missing, Reading, Sample, WorkPart
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from ergmeter.units import percent
from tests.runs import add_writer, even_steps, make_run

S = 10**9
H200 = Device("GPU-1", "gpu", "NVIDIA H200", "nvml")
# 2 TFLOP for a step of 100 tokens, 20 GFLOP a token.
EXACT = Flops(2e12, "exact", "analytic", hardware_per_step=2.5e12, tokens_per_step=100)
PALM = Flops(3e12, "palm", "analytic", hardware_per_step=4e12, tokens_per_step=100)
RATE = TokenRate(1000.0, 2, "measured", "over 10 steps in 1 s", low=900.0, high=1100.0)
PEAK = Peak("Card", "bf16", 100e12, "its datasheet", "reported", bf16_flops_per_s=100e12)


def reading(found: dict[str, Any], key: str) -> Reading:
    assert isinstance(found[key], Reading), found[key]
    return found[key]  # type: ignore[no-any-return]


def run_with(
    path: Path, *devices: Device, flops: list[Flops] | None = None, **settings: Any
) -> Run:
    """Twenty steps of a second with 100 tokens each."""
    make_run(path)
    header: dict[str, Any] = {"flops": [asdict(one) for one in flops]} if flops else {}
    samples = [Sample(t * S, device.id, busy_frac=1.0) for device in devices for t in range(21)]
    add_writer(
        path,
        steps=even_steps(20, tokens_computed=100),
        samples=samples,
        devices=devices,
        settings=settings,
        header=header,
    )
    return Run.open(path)


def test_mfu_is_flops_of_a_token_times_tokens_over_devices_times_peak() -> None:
    found = compute_results([EXACT, PALM], RATE, PEAK)
    # 20 GFLOP x 1000 tokens/s / 2 devices = 10 TFLOP/s, of 100.
    assert reading(found, FLOPS_PER_S).value == pytest.approx(10e12)
    mfu = reading(found, MFU)
    assert [mfu.value, mfu.low, mfu.high] == pytest.approx([0.1, 0.09, 0.11])
    assert mfu.basis == "reported"  # as good as the peak, which the maker states
    assert "exact; other conventions 15.0 % (palm); of 100" in mfu.note
    assert "of 100 TFLOP/s dense bf16 (its datasheet)" in mfu.note
    assert "2 devices; over 10 steps in 1 s" in mfu.note


def test_hfu_has_what_is_computed_again_and_mfu_never() -> None:
    found = compute_results([EXACT], RATE, PEAK)
    assert reading(found, HFU).value == pytest.approx(0.125)
    once = compute_results([replace(EXACT, hardware_per_step=2e12)], RATE, PEAK)
    assert reading(once, HFU).value == reading(once, MFU).value
    assert "nothing is computed twice" not in reading(once, HFU).note  # nobody looked for others
    looked = compute_results([replace(EXACT, hardware_per_step=2e12, other_work=())], RATE, PEAK)
    assert "nothing is computed twice" in reading(looked, HFU).note


def test_all_work_sums_every_part_and_is_a_bound_where_one_is_not_counted() -> None:
    """EXACT is 2e12 of the model and 2.5e12 with recomputation; a teacher adds 1e12."""
    teacher = WorkPart("other models", 1e12, "Teacher")
    whole = compute_results([replace(EXACT, other_work=(teacher,))], RATE, PEAK)
    assert reading(whole, ALL_WORK).value == pytest.approx(0.1 * 3.5 / 2)
    assert "lower bound" not in reading(whole, ALL_WORK).note
    assert reading(whole, HFU).value == pytest.approx(0.125)  # the trained model's, as before
    unknown = replace(EXACT, other_work=(WorkPart("generation", None, "a cache"),))
    bound = reading(compute_results([unknown], RATE, PEAK), ALL_WORK)
    assert bound.value == pytest.approx(0.125)
    assert "lower bound" in bound.note
    assert "generation (a cache)" in bound.note


def test_products_that_were_not_counted_make_mfu_a_lower_bound_by_name() -> None:
    found = compute_results([replace(EXACT, not_counted=("FusedHead x 1",))], RATE, PEAK)
    for key in (MFU, HFU, ALL_WORK):
        note = reading(found, key).note
        assert note.startswith("a lower bound")
        assert "FusedHead x 1" in note


def test_flops_of_images_go_by_samples() -> None:
    """6e12 FLOPs a step of 4 images; 10 images/s on 2 devices of 100 TFLOP/s."""
    images = Flops(6e12, "counted", "counted", 6e12, samples_per_step=4, other_work=())
    rate = TokenRate(10.0, 2, "measured", "over 10 steps", unit="sample")
    found = compute_results([images], rate, PEAK)
    assert reading(found, MFU).value == pytest.approx(6e12 / 4 * 10 / 2 / 1e14)
    missing = found[FLOPS_PER_TOKEN]
    assert isinstance(missing, Missing)
    assert "reads no tokens" in missing.reason
    unknown = compute_results([replace(EXACT, hardware_per_step=None)], RATE, PEAK)
    assert isinstance(unknown[HFU], Missing)


def test_a_run_of_images_is_not_told_to_count_tokens(tmp_path: Path) -> None:
    images = Flops(6e12, "counted", "counted", 6e12, samples_per_step=4, other_work=())
    path = tmp_path / "run"
    make_run(path)
    add_writer(path, steps=even_steps(10, samples=4), header={"flops": [asdict(images)]})
    found = summarize(Run.open(path)).readings["throughput.tokens_per_s"]
    assert isinstance(found, Missing)
    assert found.reason.startswith("the model is called without token ids")


def test_hfu_has_what_is_spent_on_padding_by_the_tokens_of_the_steps(tmp_path: Path) -> None:
    # Of 100 positions 80 hold a token: 0.25 more for each, at 4 GFLOP beside a token's 20 + 5.
    padded = replace(EXACT, hardware_per_padding=4e9)
    path = tmp_path / "run"
    make_run(path)
    add_writer(
        path,
        steps=even_steps(20, tokens_computed=100, tokens_real=80),
        settings={"peak_flops_per_s": 100e12, "dtype": "bf16"},
        header={"flops": [asdict(padded)]},
    )
    found = summarize(Run.open(path)).readings
    mfu, hfu = reading(found, MFU), reading(found, HFU)
    assert mfu.value == pytest.approx(80 * 20e9 / 100e12, rel=1e-6)
    assert hfu.value == pytest.approx(80 * (25e9 + 0.25 * 4e9) / 100e12, rel=1e-6)
    assert "on padding, 1.300 times the model's" in hfu.note


def test_a_count_of_something_else_does_not_widen_the_spread() -> None:
    experts = replace(PALM, model_per_step=40e12, convention="hf-6nd")
    note = reading(compute_results([EXACT, PALM, experts], RATE, PEAK), MFU).note
    assert (
        "other conventions 15.0 % (palm); more than a factor of 2 away: 200.0 % (hf-6nd);" in note
    )


def test_a_spread_of_little_shows_its_digits() -> None:
    others = [replace(PALM, model_per_step=share * 2e12, convention=f"{share}") for share in (1, 2)]
    slow = replace(RATE, tokens_per_s=0.01)  # 1e-6 of what the other tests have, and they 10 %
    note = reading(compute_results([EXACT, *others], slow, PEAK), MFU).note
    assert "other conventions 0.0001 % (1) to 0.0002 % (2)" in note
    assert [percent(share) for share in (0.5, 0.0004, 0, 137386.14)] == [
        *("50.0 %", "0.04 %", "0.0 %", "13,738,614 %"),
    ]


def test_hfu_is_as_good_as_what_is_known_of_recomputation() -> None:
    said = "no recomputation of activations; if there is, pass --checkpointing"
    once = replace(EXACT, hardware_per_step=2e12)
    assumed = reading(compute_results([replace(once, assumptions=(said,))], RATE, PEAK), HFU)
    assert assumed.basis == "assumed"
    assert "pass --checkpointing" in assumed.note
    known = reading(compute_results([once], RATE, PEAK), HFU)
    assert known.basis == "reported"
    assert "by what the options or the model itself say" in known.note
    padded = reading(compute_results([replace(EXACT, assumptions=(said,))], RATE, PEAK), HFU)
    assert padded.basis == "assumed"
    assert "1.250 times the model's; no recomputation, as assumed" in padded.note


def test_an_n_that_was_given_stands_beside_what_is_made_of_it() -> None:
    given = replace(PALM, assumptions=("given: N = 540, in place of the model's own 8",))
    note = reading(compute_results([given, EXACT], RATE, PEAK), MFU).note
    assert note.startswith("palm with N = 540, in place of the model's own 8;")


def test_bandwidth_is_what_had_to_be_moved_of_what_memory_can() -> None:
    decode = replace(EXACT, bytes_per_step=100 * 3e9)
    peak = replace(PEAK, bandwidth_bytes_per_s=4e12)
    # 3 GB a token x 1000 tokens/s / 2 devices = 1.5 TB/s, of 4.
    assert reading(compute_results([decode], RATE, peak), BANDWIDTH).value == pytest.approx(0.375)
    assert isinstance(compute_results([decode], RATE, PEAK)[BANDWIDTH], Missing)
    training = compute_results([EXACT], RATE, peak)[BANDWIDTH]
    assert isinstance(training, Missing)
    assert "--phase decode" in training.reason


def test_above_one_is_shown_and_explained() -> None:
    found = reading(
        compute_results([EXACT], replace(RATE, devices=1), replace(PEAK, flops_per_s=1e12)), MFU
    )
    assert found.value == pytest.approx(20)
    assert found.impossible.startswith("above 100 %: an input is wrong, likely the number of dev")
    assert found.note.startswith("exact")


def test_products_in_fp8_are_held_against_both_peaks() -> None:
    peak = replace(PEAK, dtype="fp8", flops_per_s=200e12)
    found = compute_results([EXACT], RATE, peak)
    assert reading(found, MFU).value == pytest.approx(0.05)
    both = reading(found, MFU_BF16)
    assert both.value == pytest.approx(0.1)
    quick = compute_results([EXACT], replace(RATE, tokens_per_s=2e4, low=None, high=None), peak)
    assert reading(quick, MFU_BF16).value == pytest.approx(2)
    assert "an input is wrong" not in reading(quick, MFU_BF16).note
    assert "products in fp8, compared with the bf16 peak" in both.note
    assert isinstance(compute_results([EXACT], RATE, PEAK)[MFU_BF16], NotApplicable)


def test_a_type_a_device_has_no_unit_for_is_held_against_bf16_and_against_nothing_else() -> None:
    # An A100 multiplies no fp8: 10 TFLOP/s are 10 / 312 of what it can do in bf16.
    decode = replace(EXACT, bytes_per_step=100 * 3e9)
    found = compute_results([decode], RATE, device_peak("a100-sxm-80gb", "fp8"))
    assert reading(found, MFU_BF16).value == pytest.approx(10 / 312)
    # 3 GB a token x 1000 tokens/s / 2 devices, of 2.039 TB/s.
    assert reading(found, BANDWIDTH).value == pytest.approx(1.5 / 2.039)
    absent = found[MFU]
    assert isinstance(absent, Missing)
    assert "--weights-dtype fp8" in absent.reason
    assert found[HFU] == absent
    unknown = compute_results([EXACT], RATE, device_peak("NVIDIA H299", "fp8"))
    assert unknown[MFU_BF16] == unknown[MFU]
    wide = compute_results([EXACT], RATE, device_peak("NVIDIA H299", "bf16"))
    assert isinstance(wide[MFU_BF16], NotApplicable)


def test_what_devices_of_one_name_differ_in_is_not_taken_from_the_first_of_them() -> None:
    # Every A100 has 312 TFLOP/s; the memory of 40 GB has 1.555 TB/s, that of 80 GB up to 2.039.
    peak = table_peak("a100", "bf16")
    assert peak.flops_per_s == peak.bf16_flops_per_s == 312e12
    assert peak.bandwidth_bytes_per_s is None
    assert table_peak("a100-sxm-40gb", "bf16").bandwidth_bytes_per_s == 1.555e12


def test_a_declared_peak_is_of_no_type_unless_one_is_said() -> None:
    found = compute_results([EXACT], RATE, declared_peak(100e12, None, "its maker"))
    assert "of 100 TFLOP/s (its maker)" in reading(found, MFU).note
    assert found[MFU_BF16] == NotApplicable(
        "the dtype of the matmuls was not given: only fp8, fp4 and int8 have a second peak;"
        f" see {MFU}"
    )


def test_without_a_peak_there_are_flops_per_second_and_no_mfu() -> None:
    found = compute_results([EXACT], RATE, Missing("unknown peak: pass --peak"))
    assert reading(found, FLOPS_PER_S).value == pytest.approx(10e12)
    assert found[MFU] == found[HFU] == Missing("unknown peak: pass --peak")


def test_a_run_gets_its_peak_from_the_name_its_driver_says(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", H200, flops=[EXACT], dtype="bf16")
    found = summarize(run).readings
    # 20 steps in 20 s: 100 tokens/s x 20 GFLOP = 2 TFLOP/s, of the H200's 989.5.
    assert reading(found, MFU).value == pytest.approx(2 / 989.5)
    assert reading(found, MFU).basis == "reported"
    assert "NVIDIA H200 datasheet" in reading(found, MFU).note


@pytest.mark.parametrize(
    ("devices", "settings", "said"),
    [
        ([replace(H200, name="NVIDIA H299")], {"dtype": "bf16"}, "unknown peak: pass --peak"),
        ([H200], {}, "pass --dtype"),
        ([H200, replace(H200, id="GPU-2", name="NVIDIA L4")], {"dtype": "bf16"}, "no common peak"),
        ([H200], {"dtype": "fp4"}, "NVIDIA H200 SXM5 141GB has no fp4"),
        ([], {"dtype": "bf16"}, "no GPU and no host was sampled"),
    ],
)
def test_what_can_not_be_known_is_absent_with_its_reason(
    tmp_path: Path, devices: list[Device], settings: dict[str, Any], said: str
) -> None:
    run = run_with(tmp_path / "run", *devices, flops=[EXACT], **settings)
    found = summarize(run)
    mfu = found.readings[MFU]
    assert isinstance(mfu, Missing)
    assert said in mfu.reason
    assert any(note.startswith("no MFU: ") for note in found.notes)


def test_why_a_model_could_not_be_counted_is_kept(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    add_writer(tmp_path / "run", steps=even_steps(5), header={"no_flops": "a Thing has none"})
    found = summarize(Run.open(tmp_path / "run")).readings[MFU]
    assert found == Missing("a Thing has none")


def test_flops_and_a_peak_can_be_given_to_a_run_that_is_over(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", H200)
    settings = Settings(peak_flops_per_s=1e12, peak_source="a test", num_devices=4)
    found = summarize(run, settings, flops=[EXACT]).readings
    assert reading(found, MFU).value == pytest.approx(0.5)
    assert "(a test)" in reading(found, MFU).note


def test_a_cpu_is_held_against_what_its_parts_could_do(tmp_path: Path) -> None:
    facts = {"cpu_peak_flops_per_s": {"fp32": 4e12}, "cpu_peak_source": "derived: 2 cores"}
    node = Device("node:a", "node", "a", "node", facts)
    run = run_with(tmp_path / "run", node, flops=[EXACT])
    mfu = reading(summarize(run).readings, MFU)
    assert mfu.value == pytest.approx(0.5)
    assert mfu.basis == "assumed"
    assert "derived: 2 cores" in mfu.note


def test_a_name_of_several_devices_has_a_peak_if_they_agree() -> None:
    assert table_peak("a100", "bf16").flops_per_s == 312e12
    with pytest.raises(NotMeasurable, match="h100-sxm, h100-pcie, h100-nvl"):
        table_peak("h100", "bf16")
    with pytest.raises(UsageError, match="unknown dtype 'bf17'"):
        table_peak("a100", "bf17")


def test_a_peak_without_a_source_is_an_assumption() -> None:
    assert declared_peak(1e12, "bf16", None).basis == "assumed"
    assert declared_peak(1e12, "bf16", "the datasheet").basis == "reported"
    assert table_peak("h200-sxm", "bf16", is_dtype_assumed=True).basis == "assumed"
