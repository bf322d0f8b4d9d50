"""A user's own rows: found, first, and faulty ones named by their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from ergmeter.errors import FormatError, NotMeasurable, UsageError
from ergmeter.hardware.table import lookup

T = 1e12
OWN = """
[acme-9000]
name = "ACME 9000"
driver_names = ["ACME Accelerator 9000"]
peak_tflop_per_s = { bf16 = 400, fp8 = 800.5 }
source = "ACME 9000 datasheet"
"""


def own_rows(path: Path, text: str = OWN) -> Path:
    path.write_text(text)
    return path


def test_a_users_row_is_found_and_says_where_it_is_from(tmp_path: Path) -> None:
    path = own_rows(tmp_path / "own.toml")
    spec = lookup("acme accelerator 9000", extra=path)
    assert (spec.peak("bf16"), spec.peak("fp8")) == (400 * T, 800.5 * T)
    assert (spec.origin, spec.note) == (str(path), f"row of {path}")
    assert spec.memory_bytes is None


def test_a_users_file_is_found_by_its_place_and_by_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / ".config" / "ergmeter"
    place.mkdir(parents=True)
    own_rows(place / "hardware.toml")
    assert lookup("acme-9000").peak("bf16") == 400 * T
    other = own_rows(tmp_path / "other.toml", OWN.replace("bf16 = 400", "bf16 = 500"))
    monkeypatch.setenv("ERGMETER_HARDWARE", str(other))
    assert lookup("acme-9000").peak("bf16") == 500 * T
    monkeypatch.setenv("ERGMETER_HARDWARE", str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match=r"ERGMETER_HARDWARE is .*none.toml"):
        lookup("acme-9000")


@pytest.mark.parametrize(
    "text",
    [
        OWN.replace("ACME Accelerator 9000", "NVIDIA H200"),
        OWN.replace("acme-9000", "h200-sxm"),
    ],
    ids=["by driver name", "by key"],
)
def test_a_users_row_wins_over_the_built_in_one_and_says_so(tmp_path: Path, text: str) -> None:
    spec = lookup("NVIDIA H200", extra=own_rows(tmp_path / "own.toml", text))
    assert spec.peak("bf16") == 400 * T
    assert "in place of the built-in h200-sxm" in spec.note
    assert lookup("NVIDIA H200").peak("bf16") == 989.5 * T


def test_a_users_row_can_settle_a_name_of_several(tmp_path: Path) -> None:
    path = own_rows(tmp_path / "own.toml", OWN.replace("acme-9000", "h100"))
    assert lookup("h100", extra=path).peak("bf16") == 400 * T


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("bf16 = 400", "bf16 = -4"), r"\[acme-9000\] peak_tflop_per_s.bf16 is -4; a number above"),
        (("bf16 = 400", "bf16 = '400'"), r"peak_tflop_per_s.bf16 is '400'; a number is needed"),
        (("bf16 = 400", "bf16 = nan"), r"peak_tflop_per_s.bf16 is nan; a number above 0"),
        (("bf16 = 400", "bf16 = 400e12"), r"bf16 is 400000000000000.0 TFLOP/s; no device"),
        (("bf16 = 400", "bfloat16 = 400"), r"peak_tflop_per_s has no type 'bfloat16'; it may"),
        (("name =", "nam ="), r"\[acme-9000\] has no field 'nam'; it may have name, vendor"),
        (('name = "ACME 9000"', ""), r"\[acme-9000\] name is missing; a row needs"),
        (('source = "ACME 9000 datasheet"', ""), r"\[acme-9000\] source is missing"),
        (('"ACME 9000 datasheet"', '""'), r"source is empty; a text is needed"),
        (('["ACME Accelerator 9000"]', '"ACME"'), r"driver_names is 'ACME'; a list of texts"),
        (('["ACME Accelerator 9000"]', "[9000]"), r"driver_names is \[9000\]; a list of texts"),
        (("[acme-9000]", "checked = 3\n[acme-9000]"), r"checked = 3 is outside a row"),
        (("[acme-9000]", "[acme-9000"), r"is not TOML: "),
        (("source =", "lacks = ['fp3']\nsource ="), r"lacks has no type 'fp3'; it may have fp32"),
        (("source =", "lacks = ['fp8']\nsource ="), r"lacks names 'fp8', which has a peak"),
    ],
)
def test_a_fault_in_a_users_file_is_one_line_with_its_place(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    path = own_rows(tmp_path / "own.toml", OWN.replace(*change))
    with pytest.raises(FormatError, match=said) as error:
        lookup("NVIDIA H200", extra=path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_a_name_in_two_rows_of_a_file_is_a_fault(tmp_path: Path) -> None:
    path = own_rows(tmp_path / "own.toml", OWN + OWN.replace("[acme-9000]", "[acme-9001]"))
    with pytest.raises(FormatError, match=r"\[acme-9001\] and \[acme-9000\] both claim 'acme"):
        lookup("NVIDIA H200", extra=path)


def test_a_users_row_may_say_what_its_driver_reports(tmp_path: Path) -> None:
    path = own_rows(tmp_path / "own.toml", OWN + "driver_memory_mib = 61440\n")
    spec = lookup("acme-9000", extra=path)
    assert spec.memory_there == (60 * 2**30, "by ACME 9000 datasheet")
    path = own_rows(tmp_path / "own.toml", OWN + "driver_memory_mib = 0\n")
    with pytest.raises(FormatError, match="driver_memory_mib is 0; a number above 0 is needed"):
        lookup("acme-9000", extra=path)


def test_a_users_row_may_say_what_the_device_lacks(tmp_path: Path) -> None:
    path = own_rows(tmp_path / "own.toml", OWN + 'lacks = ["fp4"]\n')
    with pytest.raises(NotMeasurable, match="no fp4 peak: ACME 9000 has no fp4 units"):
        lookup("acme-9000", extra=path).peak("fp4")
    with pytest.raises(NotMeasurable, match=r"^ACME 9000 has no int8 rate"):
        lookup("acme-9000", extra=path).peak("int8")
