"""What a name has as its peak: of one device, of several that agree, and of none."""

from __future__ import annotations

import pytest

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.definitions.peaks import NoPeak, Peak, declared_peak, device_peak, table_peak

A100 = "a100-sxm-40gb, a100-sxm-80gb, a100-pcie-40gb, a100-pcie-80gb"


def test_a_shared_name_has_the_peak_all_agree_on_and_names_them() -> None:
    peak = table_peak("A100", "bf16")
    assert (peak.device, peak.flops_per_s) == ("A100", 312e12)
    assert peak.source == (
        f"NVIDIA A100 datasheet, checked 2026-11-15; A100 is any of {A100}, which agree on it"
    )
    # Both of 80 GB have 312, and the bandwidths are 2039 and 1935 GB/s.
    assert table_peak("A100 80GB", "bf16").bandwidth_bytes_per_s is None
    # Both of 40 GB have 1555 GB/s.
    assert table_peak("A100 40GB", "bf16").bandwidth_bytes_per_s == 1555e9


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("H100", "'H100' is the name of several devices with different peaks; name one of"),
        ("4090", "no row of the hardware table is named '4090'"),
        ("b300", "NVIDIA B300 (HGX) has no int8 rate in the hardware table"),
    ],
)
def test_an_option_is_spoken_of_only_to_those_who_have_it(device: str, reason: str) -> None:
    with pytest.raises(NotMeasurable) as said:
        table_peak(device, "int8")
    assert str(said.value).startswith(f"unknown peak: {reason}")
    assert "--peak" not in str(said.value)
    found = device_peak(device, "int8")
    assert isinstance(found, NoPeak)
    assert found.reason.startswith(f"unknown peak: pass --peak ({reason}")


def test_a_type_without_units_is_not_an_unknown_peak() -> None:
    found = device_peak("a100", "fp8")
    assert isinstance(found, NoPeak)
    assert found.reason.startswith("no fp8 peak: NVIDIA A100 SXM4 40GB has no fp8 units")


def test_a_source_has_its_name_and_day_and_no_address() -> None:
    found = device_peak("tpu-v3-core", "bf16")
    assert isinstance(found, Peak)
    assert found.source == (
        "Google Cloud TPU v3 documentation; power: Jouppi et al., CACM 63(7), 2020, checked"
        " 2026-11-15"
    )


def test_beside_a_declared_peak_a_shared_name_has_the_bandwidth_all_agree_on() -> None:
    assert declared_peak(1e14, None, "me", device="a100-40gb").bandwidth_bytes_per_s == 1555e9
    assert declared_peak(1e14, None, "me", device="a100").bandwidth_bytes_per_s is None
    assert declared_peak(1e14, None, "me", device="nobody's").bandwidth_bytes_per_s is None
