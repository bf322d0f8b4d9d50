"""A CPU's peak, from its parts and from /proc/cpuinfo."""

from __future__ import annotations

import pytest

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.hardware.cpu import cpu_peak, cpu_peak_of


def test_a_cpus_peak_is_the_product_of_its_parts_and_is_assumed() -> None:
    spec = cpu_peak(32, clock_hz=2.5e9, fp32_lanes=16, fma_units=2)
    assert spec.peak("fp32") == 32 * 16 * 2 * 2 * 2.5e9
    assert spec.basis == "assumed"
    assert "32 cores x 16 fp32 lanes x 2 FMA units x 2 FLOP x 2.50 GHz" in spec.source
    with pytest.raises(NotMeasurable):
        spec.peak("bf16")
    with pytest.raises(UsageError):
        cpu_peak(0, clock_hz=2.5e9, fp32_lanes=16, fma_units=2)


def cpuinfo(*threads: tuple[int, int], vendor: str = "GenuineIntel", **more: str) -> str:
    """Hardware threads by their socket and core, as Linux lists them."""
    blocks = []
    for number, (socket, core) in enumerate(threads):
        fields = {"processor": number, "vendor_id": vendor, "cpu MHz": f"{2000 + number}.000"}
        fields |= {"physical id": socket, "core id": core, **more}
        blocks.append("\n".join(f"{name}\t: {value}" for name, value in fields.items()))
    return "\n\n".join(blocks) + "\n\n"


def test_two_threads_of_a_core_count_once_and_amx_has_its_own_rate() -> None:
    text = cpuinfo((0, 0), (0, 1), (0, 0), (0, 1), flags="fpu avx2 fma avx512f amx_bf16 amx_int8")
    spec = cpu_peak_of(text, clock_hz=3e9)
    assert spec.peak("fp32") == 2 * 16 * 2 * 2 * 3e9
    assert spec.peak("bf16") == 2 * 1024 * 3e9
    assert spec.peak("int8") == 2 * 2048 * 3e9
    assert "3.00 GHz, the highest it allows" in spec.note


def test_without_a_clock_the_one_of_the_moment_is_taken_and_named() -> None:
    spec = cpu_peak_of(cpuinfo((0, 0), (0, 1), flags="avx2 fma"))
    assert spec.peak("fp32") == 2 * 8 * 2 * 2 * 2.001e9
    assert "2.00 GHz, as read now" in spec.note


def test_zen_4_runs_512_bits_in_halves() -> None:
    zen4 = {"vendor": "AuthenticAMD", "flags": "avx2 fma avx512f"}
    assert cpu_peak_of(cpuinfo((0, 0), **zen4, **{"cpu family": "25"}), clock_hz=1e9).peak(
        "fp32"
    ) == pytest.approx(32e9)
    assert cpu_peak_of(cpuinfo((0, 0), **zen4, **{"cpu family": "26"}), clock_hz=1e9).peak(
        "fp32"
    ) == pytest.approx(64e9)


GRACE = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n\n"


def test_an_arm_core_is_known_by_its_part_or_not_at_all() -> None:
    assert cpu_peak_of(GRACE, clock_hz=3e9).peak("fp32") == 4 * 4 * 2 * 3e9
    with pytest.raises(NotMeasurable, match="clock is not known"):
        cpu_peak_of(GRACE)
    with pytest.raises(NotMeasurable, match="vector width"):
        cpu_peak_of(GRACE.replace("0xd4f", "0xfff"), clock_hz=3e9)


def test_a_cpu_that_says_nothing_has_no_peak() -> None:
    with pytest.raises(NotMeasurable, match="lists no processor"):
        cpu_peak_of("")
    with pytest.raises(NotMeasurable, match="vector width"):
        cpu_peak_of(cpuinfo((0, 0), flags="fpu sse2"))
