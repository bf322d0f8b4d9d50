"""What the rows say: dense, whole, in base units, and held against what makers publish."""

from __future__ import annotations

import re

import pytest

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.hardware.table import BUILT_IN, DeviceSpec, built_in_devices, lookup
from ergmeter.records import DTYPES

ROWS = built_in_devices()


def test_there_are_rows_for_every_family() -> None:
    assert len(ROWS) >= 160
    assert {spec.vendor for spec in ROWS} == {"nvidia", "amd", "google", "aws", "intel", "apple"}


@pytest.mark.parametrize("spec", ROWS, ids=lambda spec: spec.key)
def test_a_row_is_whole(spec: DeviceSpec) -> None:
    assert spec.source
    assert spec.note
    assert re.fullmatch(r"20[0-9]{2}-[0-9]{2}-[0-9]{2}", spec.checked)
    assert re.match(r"$|datasheet$|second document agrees on .* \(.*\)$", spec.confirmed)
    assert set(spec.peak_flops_per_s) <= set(DTYPES)
    assert spec.origin == BUILT_IN
    # A row may have no peak, if it says what to do about it.
    assert bool(spec.peak_flops_per_s) != ("pass a peak" in spec.note)
    if spec.vendor != "apple" and spec.peak_flops_per_s:
        assert spec.bandwidth_bytes_per_s


@pytest.mark.parametrize("key", ["h100-sxm", "h100-pcie", "h100-nvl", "h200-sxm", "h20-96gb"])
def test_figures_are_dense(key: str) -> None:
    spec = lookup(key)
    assert spec.peak("fp8") == pytest.approx(2 * spec.peak("bf16"), rel=1e-3)
    assert spec.peak("tf32") == pytest.approx(spec.peak("bf16") / 2, rel=1e-3)


def test_more_precise_is_never_faster() -> None:
    for spec in ROWS:
        rates = [spec.peak_flops_per_s.get(d) for d in ("fp32", "tf32", "bf16", "fp8", "fp4")]
        known = [rate for rate in rates if rate is not None]
        assert known == sorted(known), spec.key


# CUDA cores and boost clock in GHz, as NVIDIA's product pages give them.
GEFORCE = {
    "rtx-2080-ti": (4352, 1.545), "rtx-2080-super": (3072, 1.815), "rtx-2080": (2944, 1.71),
    "rtx-2070-super": (2560, 1.77), "rtx-2070": (2304, 1.62), "rtx-2060-super": (2176, 1.65),
    "rtx-2060-12gb": (2176, 1.65), "rtx-2060-6gb": (1920, 1.68), "rtx-3090-ti": (10752, 1.86),
    "rtx-3090": (10496, 1.695), "rtx-3080-ti": (10240, 1.665), "rtx-3080-12gb": (8960, 1.71),
    "rtx-3080-10gb": (8704, 1.71), "rtx-3070-ti": (6144, 1.77), "rtx-3070": (5888, 1.725),
    "rtx-3060-ti": (4864, 1.665), "rtx-3060": (3584, 1.777), "rtx-4090": (16384, 2.52),
    "rtx-4090-d": (14592, 2.52), "rtx-4080-super": (10240, 2.55), "rtx-4080": (9728, 2.505),
    "rtx-4070-ti-super": (8448, 2.61), "rtx-4070-ti": (7680, 2.61), "rtx-4070-super": (7168, 2.475),
    "rtx-4070": (5888, 2.475), "rtx-4060-ti": (4352, 2.535), "rtx-4060": (3072, 2.46),
    "rtx-5090": (21760, 2.407), "rtx-5080": (10752, 2.617), "rtx-5070-ti": (8960, 2.452),
    "rtx-5070": (6144, 2.512), "rtx-5060-ti": (4608, 2.572), "rtx-5060": (3840, 2.497),
}  # fmt: skip
# FLOP for each one of fp32, with FP32 accumulate, by the white papers of the architectures.
GEFORCE_RATIOS = {
    "rtx-20": {"fp16": 4, "int8": 16},
    "rtx-30": {"tf32": 1, "fp16": 2, "bf16": 2, "int8": 8},
    "rtx-40": {"tf32": 1, "fp16": 2, "bf16": 2, "fp8": 4, "int8": 8},
    "rtx-50": {"tf32": 1, "fp16": 2, "bf16": 2, "fp8": 4, "fp4": 16, "int8": 8},
}


@pytest.mark.parametrize("key", GEFORCE)
def test_a_geforces_peaks_are_its_cores_and_clock_at_the_half_rate_of_fp32_accumulate(
    key: str,
) -> None:
    cores, boost_ghz = GEFORCE[key]
    peaks = dict(lookup(key).peak_flops_per_s)
    fp32 = peaks.pop("fp32")
    assert fp32 == pytest.approx(cores * 2 * boost_ghz * 1e9, rel=2e-3)
    assert {dtype: round(peak / fp32, 2) for dtype, peak in peaks.items()} == GEFORCE_RATIOS[
        key[:6]
    ]


def test_every_geforce_of_the_table_is_among_them() -> None:
    assert {s.key for s in ROWS if re.match(r"rtx-[2345]0[0-9]0(?!.*ada)", s.key)} == set(GEFORCE)


@pytest.mark.parametrize(
    "key", [s.key for s in ROWS if re.match(r"rtx-(a[0-9]|.*-ada$|pro-)", s.key)]
)
def test_a_workstation_card_runs_fp32_accumulate_at_the_full_rate(key: str) -> None:
    spec = lookup(key)
    ratios = {"tf32": 2, "fp16": 4, "bf16": 4, "fp8": 8, "fp4": 16, "int8": 8}
    for dtype, peak in spec.peak_flops_per_s.items():
        assert peak / spec.peak("fp32") == pytest.approx(ratios.get(dtype, 1), rel=5e-3), dtype


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Tesla P100-PCIE-16GB", "int8"),
        ("Tesla V100-SXM2-16GB", "bf16"),
        ("Tesla T4", "bf16"),
        ("NVIDIA GeForce RTX 2080 Ti", "tf32"),
        ("NVIDIA A100-SXM4-80GB", "fp8"),
        ("NVIDIA L40S", "fp4"),
        ("NVIDIA H100 80GB HBM3", "fp4"),
        ("AMD Instinct MI250X", "fp8"),
        ("AMD Instinct MI300X", "fp4"),
        ("AMD Instinct MI355X", "tf32"),
        ("TPU v4", "fp8"),
        ("TPU v5", "fp8"),
        ("GAUDI2", "fp4"),
        ("max-1550", "fp8"),
        ("apple-m3", "fp8"),
    ],
)
def test_a_type_the_device_has_no_units_for_is_told_so(name: str, dtype: str) -> None:
    spec = lookup(name)
    with pytest.raises(NotMeasurable, match=rf"^no {dtype} peak: .* has no {dtype} units") as said:
        spec.peak(dtype)
    assert spec.name in str(said.value)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA B300 SXM6 AC", "int8"),
        ("NVIDIA GB10", "int8"),
        ("Tesla V100-SXM2-16GB", "int8"),
        ("AMD Instinct MI308X", "bf16"),
        ("NVIDIA A100-SXM-64GB", "bf16"),
        ("Apple M3", "fp32"),
    ],
)
def test_a_rate_that_nobody_publishes_is_unknown(name: str, dtype: str) -> None:
    with pytest.raises(NotMeasurable, match=rf"^[^:]+ has no {dtype} rate in the hardware"):
        lookup(name).peak(dtype)


def test_a_type_there_is_not_is_misuse() -> None:
    with pytest.raises(UsageError, match="no type 'bfloat16'; the table has fp32"):
        lookup("h100-sxm").peak("bfloat16")


@pytest.mark.parametrize(
    ("stem", "cores"),
    {"trn1": 2, "inf2": 2, "trn2": 8, "trn3": 8, "tpu-v2": 2, "tpu-v3": 2, "tpu-v7": 2}.items(),
)
def test_the_cores_of_a_chip_add_up_to_it(stem: str, cores: int) -> None:
    core, chip = lookup(f"{stem}-core"), lookup(f"{stem}-chip")
    assert chip.peak_flops_per_s
    for dtype, peak in chip.peak_flops_per_s.items():
        assert core.peak(dtype) * cores == pytest.approx(peak)


# Of the system, with sparsity, as NVIDIA prints it; fp4 of a Blackwell Ultra is dense.
@pytest.mark.parametrize(
    ("key", "gpus", "bf16_sparse_pflop_per_s", "fp4_dense_pflop_per_s"),
    [("b200", 8, 36, 72), ("gb200", 72, 360, 720), ("b300", 8, 36, 108), ("gb300", 72, 360, 1080)],
)
def test_a_blackwell_is_its_share_of_the_system(
    key: str, gpus: int, bf16_sparse_pflop_per_s: float, fp4_dense_pflop_per_s: float
) -> None:
    spec = lookup(key)
    assert spec.peak("bf16") * gpus == pytest.approx(bf16_sparse_pflop_per_s * 1e15 / 2)
    assert spec.peak("fp4") * gpus == pytest.approx(fp4_dense_pflop_per_s * 1e15)


def test_bandwidth_memory_and_power_are_in_base_units() -> None:
    spec = lookup("NVIDIA H200")
    assert spec.bandwidth_bytes_per_s == 4.8e12
    assert spec.memory_bytes == 141 * 2**30
    assert spec.tdp_w == 700


# Cards with ECC on GDDR when they ship: its check bits are a sixteenth of the memory.
ECC_IN_GDDR = {"p40", "t4", "a40", "a10", "a10g", "a16", "a2", "l4", "l20", "l40", "l40s"}


def test_a_driver_reports_a_sixteenth_less_where_ecc_is_in_gddr_and_nearly_all_elsewhere() -> None:
    reported = {spec.key: spec for spec in built_in_devices() if spec.driver_memory_bytes}
    assert set(reported) >= ECC_IN_GDDR
    for key, spec in reported.items():
        assert spec.memory_bytes is not None
        assert spec.driver_memory_bytes is not None
        assert "smi" in spec.driver_memory_source
        assert ("ECC on" in spec.driver_memory_source) == (key in ECC_IN_GDDR)
        held = 15 / 16 if key in ECC_IN_GDDR else 1
        # Beyond that a driver keeps half a percent at most for itself.
        assert 0.9945 * held <= spec.driver_memory_bytes / spec.memory_bytes <= held


def test_what_nvidia_smi_prints_of_common_cards() -> None:
    """nvidia-smi, as people paste it: modal-labs/modal-client pull request 2797 has seven."""
    printed = {"l4": 23034, "t4": 15360, "a10": 23028, "l40s": 46068, "h100-sxm": 81559}
    printed |= {"a100-sxm-80gb": 81920, "a100-sxm-40gb": 40960, "h200-sxm": 143771}
    found = {spec.key: spec.driver_memory_bytes for spec in built_in_devices()}
    assert {key: found[key] for key in printed} == {k: v * 2**20 for k, v in printed.items()}
