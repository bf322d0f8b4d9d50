"""The page docs/hardware.md: it is the table, and each row ends with who says so and since when."""

from __future__ import annotations

from pathlib import Path

from ergmeter.hardware.table import built_in_devices
from ergmeter.views.calculate import reference as view

ROOT = Path(__file__).parents[3]


def test_the_hardware_page_is_what_the_table_says() -> None:
    assert (ROOT / "docs" / "hardware.md").read_text() == view.hardware_page(), "run ./dev docs"


def cells(key: str) -> list[str]:
    line = next(
        line for line in view.hardware_page().splitlines() if line.startswith(f"| `{key}` |")
    )
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_a_type_without_units_and_one_without_a_rate_look_different() -> None:
    # device, name, fp32, tf32, fp16, bf16, fp8, fp4, int8
    assert cells("a100-sxm-80gb")[2:9] == ["19.5", "156", "312", "312", "none", "none", "624"]
    assert cells("b300")[7:9] == ["13500", "-"]


def test_a_row_ends_with_its_source_what_it_was_held_against_and_the_day() -> None:
    assert cells("a40")[-1] == "NVIDIA A40 datasheet; datasheet; 2026-11-15"
    assert cells("a10g")[-1] == "NVIDIA A10G datasheet; as commonly quoted, not checked; 2026-11-15"
    for spec in built_in_devices():
        assert cells(spec.key)[-1].endswith(f"; {spec.checked}"), spec.key
