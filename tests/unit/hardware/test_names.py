"""Which name finds which row: an alias, a near miss, a part of a name, a name of several."""

from __future__ import annotations

import pytest

from ergmeter.errors import NotMeasurable
from ergmeter.hardware.table import ambiguous_names, built_in_devices, lookup

T = 1e12
ROWS = built_in_devices()


@pytest.mark.parametrize(
    ("alias", "key", "peak_tflop_per_s"),
    [
        ("h100-sxm", "h100-sxm", 989.5),
        ("h100-pcie", "h100-pcie", 756.5),
        ("tpu-v5p", "tpu-v5p", 459),
        ("trn1-core", "trn1-core", 95),
        ("trn2-chip", "trn2-chip", 667),
        ("trn3-chip", "trn3-chip", 671),
        ("rtx 4090", "rtx-4090", 165.16),
        ("mi250x", "mi250x-gcd", 191.5),
    ],
)
def test_an_alias_finds_its_row(alias: str, key: str, peak_tflop_per_s: float) -> None:
    assert lookup(alias).key == key
    assert lookup(alias).peak("bf16") == pytest.approx(peak_tflop_per_s * T, rel=1e-3)


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("H100 SXM", "h100-sxm"),
        ("H100 SXM5", "h100-sxm"),
        ("H100 PCIe", "h100-pcie"),
        ("H100 NVL", "h100-nvl"),
        ("H200 SXM", "h200-sxm"),
        ("H200 NVL", "h200-nvl"),
        ("A100 80GB PCIe", "a100-pcie-80gb"),
        ("A100 SXM4 80GB", "a100-sxm-80gb"),
        ("L40S", "l40s"),
        ("RTX A6000", "rtx-a6000"),
        ("RTX 6000 Ada", "rtx-6000-ada"),
        ("GeForce RTX 4090", "rtx-4090"),
        ("DGX Spark", "gb10"),
        ("MI300X", "mi300x"),
        ("Instinct MI300X", "mi300x"),
        ("TPU v5e", "tpu-v5e"),
        ("TPU v5p", "tpu-v5p"),
        ("Trainium2", "trn2-chip"),  # what neuron-monitor calls the chip
        ("Trainium2 core", "trn2-core"),
        ("Gaudi 3", "gaudi3"),
    ],
)
def test_a_device_is_found_as_people_call_it(said: str, key: str) -> None:
    assert lookup(said).key == key


def test_case_and_runs_of_spaces_do_not_matter_and_nothing_else_is_forgiven() -> None:
    assert lookup("  nvidia h100   80gb HBM3 ").key == "h100-sxm"
    for name in ("NVIDIA-H100-80GB-HBM3", "H100 80GB HBM3", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        with pytest.raises(NotMeasurable, match="no row of the hardware table"):
            lookup(name)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("NVIDIA L40S", "NVIDIA L4"),
        ("NVIDIA L40S", "NVIDIA L40"),
        ("NVIDIA L2", "NVIDIA L20"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H200 NVL", "NVIDIA H200"),
        ("NVIDIA H20", "NVIDIA H200"),
        ("NVIDIA RTX A6000", "NVIDIA RTX 6000 Ada Generation"),
        ("NVIDIA RTX 4000 Ada Generation", "NVIDIA RTX 4000 SFF Ada Generation"),
        ("NVIDIA A10", "NVIDIA A10G"),
        ("NVIDIA A16", "NVIDIA A10"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090 D"),
        ("NVIDIA GeForce RTX 4070 Ti", "NVIDIA GeForce RTX 4070 Ti SUPER"),
        ("NVIDIA B200", "NVIDIA GB200"),
        ("NVIDIA GB10", "NVIDIA GB200"),
        ("AMD Instinct MI250X", "AMD Instinct MI250"),
        ("AMD Instinct MI300A", "AMD Instinct MI300X"),
        ("TPU v5", "TPU v5 lite"),
    ],
)
def test_near_names_are_told_apart(one: str, other: str) -> None:
    first, second = lookup(one), lookup(other)
    assert first.key != second.key
    assert first.peak("bf16") != second.peak("bf16")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"),
        ("NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e"),
        ("NVIDIA H200", "NVIDIA H100 80GB HBM3"),
    ],
)
def test_the_same_chip_with_other_memory_has_its_own_bandwidth(one: str, other: str) -> None:
    first, second = lookup(one), lookup(other)
    assert first.peak("bf16") == second.peak("bf16")
    assert first.bandwidth_bytes_per_s != second.bandwidth_bytes_per_s
    assert first.memory_bytes != second.memory_bytes


def test_an_mi250x_is_a_gcd_as_rocm_shows_it_half_of_the_module() -> None:
    # AMD's page has 383 TFLOP/s, 128 GB and 3.2 TB/s for the module of two.
    spec = lookup("AMD Instinct MI250X")
    assert spec.peak("bf16") == 383e12 / 2
    assert spec.memory_bytes == 64 * 2**30


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA L41", "Graphics Device", "a", ""]
)
def test_an_unknown_name_has_no_row_and_says_where_the_names_are(name: str) -> None:
    with pytest.raises(NotMeasurable, match=r"^no row .*; `erg peaks` lists them") as said:
        lookup(name)
    assert "\n" not in str(said.value)
    assert "--peak" not in str(said.value)  # not everybody who asks can pass one


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("4090", "rtx-4090 or rtx-4090-d"),
        ("rtx4090", "rtx-4090 or rtx-4090-d"),
        ("3080ti", "rtx-3080-ti"),  # however it is joined
        ("gb2", "gb200"),
        ("H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA L40SX", "l40s or l40"),  # in no name, like two
    ],
)
def test_a_part_of_a_name_is_asked_about_nearest_first_and_not_used(name: str, asked: str) -> None:
    with pytest.raises(NotMeasurable) as said:
        lookup(name)
    assert str(said.value).endswith(f". Did you mean {asked}?")


def test_no_more_than_five_are_asked_about_and_none_for_a_letter() -> None:
    with pytest.raises(NotMeasurable, match="Did you mean") as said:
        lookup("rtx")
    assert str(said.value).split("Did you mean ")[1].replace(" or ", ", ").count(",") == 4
    with pytest.raises(NotMeasurable) as said:
        lookup("a")
    assert "Did you mean" not in str(said.value)


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        ("h100", ["h100-sxm", "h100-pcie", "h100-nvl"]),
        ("a100", ["a100-sxm-40gb", "a100-sxm-80gb", "a100-pcie-40gb", "a100-pcie-80gb"]),
        ("AMD Instinct MI250X / MI250", ["mi250x-gcd", "mi250-gcd"]),
        ("NVIDIA GeForce RTX 3080", ["rtx-3080-10gb", "rtx-3080-12gb"]),
        ("trn1", ["trn1-core", "trn1-chip"]),
        ("trn2", ["trn2-core", "trn2-chip"]),
        ("A100 80GB", ["a100-sxm-80gb", "a100-pcie-80gb"]),
        ("NVIDIA H100", ["h100-sxm", "h100-pcie", "h100-nvl"]),
        ("NVIDIA GeForce RTX 2060", ["rtx-2060-6gb", "rtx-2060-12gb"]),
        ("AWS Trainium2", ["trn2-core", "trn2-chip"]),
        ("Trainium3", ["trn3-core", "trn3-chip"]),
        ("Apple M2 Max", ["apple-m2-max-30", "apple-m2-max-38"]),
        ("p100", ["p100-sxm2-16gb", "p100-pcie-16gb", "p100-pcie-12gb"]),
    ],
)
def test_a_name_of_several_devices_is_answered_with_them(name: str, candidates: list[str]) -> None:
    with pytest.raises(NotMeasurable, match="is the name of several devices") as said:
        lookup(name)
    assert str(said.value).endswith(f"name one of them: {', '.join(candidates)}")


def test_no_name_belongs_to_two_rows_or_is_also_ambiguous() -> None:
    owners: dict[str, set[str]] = {}
    for spec in ROWS:
        for name in {spec.key, spec.name, *spec.driver_names, *spec.aliases}:
            owners.setdefault(" ".join(name.split()).casefold(), set()).add(spec.key)
    assert {name: keys for name, keys in owners.items() if len(keys) > 1} == {}
    ambiguous = ambiguous_names()
    assert set(ambiguous).isdisjoint(owners)
    keys = {spec.key for spec in ROWS}
    assert all(len(among) > 1 and set(among) <= keys for among in ambiguous.values())
