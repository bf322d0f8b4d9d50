"""A CPU's peak FLOP/s, derived as cores x SIMD lanes x FMA units x 2 x clock.

Under vector load on all cores a CPU runs below its nominal clock, and Linux reports neither that
clock nor the number of FMA units. So the peak is an assumption; its inputs are in its source and
note. If an input is unknown, there is no peak.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from pathlib import Path

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.hardware.table import DeviceSpec

# FMA units of a core. /proc/cpuinfo names the instruction set, not the number of units: two is
# right for the Xeons sold for training and for Zen; some CPUs have one.
_FMA_UNITS = 2
_AMX_FLOP_PER_CYCLE = {"amx_bf16": ("bf16", 1024), "amx_int8": ("int8", 2048)}
# Zen 2 to 4 (families 23 and 25) run a 512-bit instruction as two of 256 bits.
_HALF_WIDTH_AMD_FAMILIES = ("23", "25")
# Arm's technical reference manuals, by implementer and part: fp32 lanes and FMA units.
_ARM_CORES = {
    ("0x41", "0xd0c"): (4, 2),  # Neoverse N1
    ("0x41", "0xd40"): (8, 2),  # Neoverse V1
    ("0x41", "0xd49"): (4, 2),  # Neoverse N2
    ("0x41", "0xd4f"): (4, 4),  # Neoverse V2
}


def cpu_model() -> str:
    """Return the CPU's model name; the architecture if the system reports no name.

    `platform.processor()` is empty or only the architecture on most Linux systems, so /proc/cpuinfo
    is read first. On ARM it has no model name.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def cpu_peak(
    cores: int,
    *,
    clock_hz: float,
    fp32_lanes: int,
    fma_units: int,
    clock_is: str = "the clock that was given",
    matrix_flop_per_cycle: Mapping[str, int] | None = None,
    name: str = "CPU",
) -> DeviceSpec:
    """Return a device spec with the peaks of such a CPU: fp32, and its matrix unit's types."""
    if min(cores, clock_hz, fp32_lanes, fma_units) <= 0:
        raise UsageError("a CPU's peak needs cores, a clock, lanes and FMA units above 0")
    per_cycle = {"fp32": fp32_lanes * fma_units * 2, **(matrix_flop_per_cycle or {})}
    return DeviceSpec(
        key="cpu",
        name=name,
        vendor="cpu",
        driver_names=(),
        aliases=(),
        peak_flops_per_s={of: cores * flop * clock_hz for of, flop in per_cycle.items()},
        bandwidth_bytes_per_s=None,
        memory_bytes=None,
        tdp_w=None,
        source=f"derived: {cores} cores x {fp32_lanes} fp32 lanes x {fma_units} FMA units x 2 FLOP"
        f" x {clock_hz / 1e9:.2f} GHz{_matrix(matrix_flop_per_cycle or {})}",
        checked="",
        note=f"assumed: {clock_is}, on all cores at once under vector load; {fma_units} FMA units"
        " in a core",
        origin="derived",
        basis="assumed",
    )


def _matrix(flop_per_cycle: Mapping[str, int]) -> str:
    """Return the FLOPs per cycle of a core's matrix unit as text; empty without one."""
    each = ", ".join(f"{dtype} {flop} FLOP" for dtype, flop in flop_per_cycle.items())
    return f", its matrix unit {each} a cycle and core" if each else ""


def cpu_peak_of(cpuinfo: str, *, clock_hz: float | None = None) -> DeviceSpec:
    """Return the spec, with peaks, of the CPU that a text of /proc/cpuinfo describes.

    `clock_hz`: the highest clock by cpufreq; default: the highest current clock in the text. Raises
    NotMeasurable if the text lacks an input.
    """
    blocks = [
        dict(re.findall(r"^([^:\n]*?)\s*:\s*(.*)$", block, re.MULTILINE))
        for block in re.split(r"\n\s*\n", cpuinfo.strip())
    ]
    blocks = [block for block in blocks if "processor" in block]
    if not blocks:
        raise NotMeasurable("/proc/cpuinfo lists no processor")
    seen_hz = max((float(block.get("cpu MHz", 0)) * 1e6 for block in blocks), default=0.0)
    clock = clock_hz or seen_hz
    if not clock:
        raise NotMeasurable("the CPU's clock is not known")
    lanes, units = _vector_units(blocks[0])
    flags = blocks[0].get("flags", "").split()
    # Two hardware threads share the units of their core.
    cores = {(b.get("physical id"), b.get("core id", b["processor"])) for b in blocks}
    return cpu_peak(
        len(cores),
        clock_hz=clock,
        fp32_lanes=lanes,
        fma_units=units,
        clock_is=f"{clock / 1e9:.2f} GHz, {'the highest it allows' if clock_hz else 'as read now'}",
        matrix_flop_per_cycle=dict(of for flag, of in _AMX_FLOP_PER_CYCLE.items() if flag in flags),
        name=blocks[0].get("model name", "CPU"),
    )


def _vector_units(block: dict[str, str]) -> tuple[int, int]:
    """Return a core's fp32 lanes and FMA units, from its flags or its ARM part number."""
    flags = block.get("flags", "").split()
    if "avx512f" in flags:
        half = block.get("cpu family") in _HALF_WIDTH_AMD_FAMILIES
        return (8 if half and "AMD" in block.get("vendor_id", "") else 16), _FMA_UNITS
    if "avx2" in flags and "fma" in flags:
        return 8, _FMA_UNITS
    arm = _ARM_CORES.get((block.get("CPU implementer", ""), block.get("CPU part", "")))
    if arm is None:
        raise NotMeasurable(
            "/proc/cpuinfo does not show the CPU's vector width and number of FMA units"
        )
    return arm
