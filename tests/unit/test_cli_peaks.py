"""`erg peaks`: the list, one device, and what is answered to a name it does not know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ergmeter.cli.main import main

Answer = tuple[int, str, str]
Erg = Callable[..., Answer]


@pytest.fixture
def erg(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Erg:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ERGMETER_HARDWARE", raising=False)

    def call(*arguments: str) -> Answer:
        with pytest.raises(SystemExit) as ended:
            main(["peaks", *arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


def test_the_list_fits_eighty_columns_and_cuts_no_number(erg: Erg) -> None:
    code, out, _ = erg()
    assert code == 0
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    row = next(line for line in out.splitlines() if line.startswith("h100-pcie"))
    assert row.split() == [
        "h100-pcie",
        "51",
        "378",
        "756.5",
        "756.5",
        "1513",
        "none",
        "1513",
        "2000",
    ]


def test_the_list_can_be_narrowed(erg: Erg) -> None:
    code, out, _ = erg("--vendor", "AWS", "--dtype", "int8")
    rows = [line.split()[0] for line in out.splitlines() if line.startswith(("trn", "inf"))]
    assert (code, rows) == (0, ["trn1-core", "trn1-chip", "inf2-core", "inf2-chip"])
    assert "nvidia" not in out


def test_one_device_is_shown_with_its_source_and_names(erg: Erg) -> None:
    code, out, _ = erg("NVIDIA H100 PCIe")
    assert code == 0
    assert "bf16 756.5" in out
    assert "source       NVIDIA H100 datasheet" in out
    assert "driver says  NVIDIA H100 PCIe" in out
    assert "lacks        fp4" in out
    assert "confirmed    second document agrees on fp32" in out
    assert "confirmed    as commonly quoted, not checked" in erg("NVIDIA A10G")[1]


@pytest.mark.parametrize("name", ["rtx-4090", "gaudi3", "a16", "tpu-v3-core", "a100-pcie-80gb"])
def test_one_device_fits_eighty_columns_but_for_an_address(erg: Erg, name: str) -> None:
    _, out, _ = erg(name)
    long = [line.strip() for line in out.splitlines() if len(line) > 80]
    assert all(line.startswith("https://") and " " not in line for line in long)
    assert len(out.split("note")[1].split()) > 5  # and nothing is cut


def test_memory_is_shown_as_sold_and_as_the_driver_reports_it(erg: Erg) -> None:
    _, out, _ = erg("l4")
    assert "memory       24 GiB, nominal; its driver reports 23034 MiB: nvidia-smi with" in out
    assert json.loads(erg("l4", "--json")[1])["driver_memory_bytes"] == 23034 * 2**20
    assert "memory       32 GiB, nominal\n" in erg("tpu-v4")[1]


def test_json_is_in_base_units(erg: Erg) -> None:
    code, out, _ = erg("h200-nvl", "--json")
    spec = json.loads(out)
    assert code == 0
    assert spec["peak_flops_per_s"]["bf16"] == 835.5e12
    assert spec["bandwidth_bytes_per_s"] == 4.8e12
    _, out, _ = erg("--json", "--vendor", "intel")
    assert "gaudi2" in [row["key"] for row in json.loads(out)]


def test_an_unknown_device_is_one_line_and_exit_1(erg: Erg) -> None:
    code, out, err = erg("NVIDIA L41")
    assert (code, out) == (1, "")
    assert err.startswith("erg: no row of the hardware table is named 'NVIDIA L41'")
    assert "Did you mean" in err
    assert err.count("\n") == 1
    code, out, err = erg("4090")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.endswith("Did you mean rtx-4090 or rtx-4090-d?\n")


def test_a_name_of_several_is_answered_with_them(erg: Erg) -> None:
    code, _, err = erg("h100")
    assert code == 1
    assert "h100-sxm, h100-pcie, h100-nvl" in err


def test_a_type_that_a_device_lacks_is_exit_1_and_one_there_is_not_is_misuse(erg: Erg) -> None:
    code, _, err = erg("Tesla T4", "--dtype", "bf16")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(
        "erg: no bf16 peak: NVIDIA T4 has no bf16 units; pass the type it computes"
    )
    code, _, err = erg("NVIDIA B300 SXM6 AC", "--dtype", "int8")
    assert (code, err.startswith("erg: NVIDIA B300 (HGX) has no int8 rate")) == (1, True)
    assert "--peak" not in err  # there is no such option here
    assert erg("Tesla T4", "--dtype", "half")[0] == 2
    assert erg("--dtype", "half")[0] == 2
    code, _, err = erg("--vendor", "acme")
    assert (code, "no vendor 'acme'; the table has amd, apple, aws" in err) == (2, True)


def test_a_users_row_is_listed_and_says_that_it_replaces(
    erg: Erg, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        '[mine]\nname = "Mine"\naliases = ["NVIDIA H200"]\nsource = "me"\n'
        "peak_tflop_per_s = { bf16 = 700 }\n"
    )
    monkeypatch.setenv("ERGMETER_HARDWARE", str(path))
    assert "mine" in erg()[1]
    _, out, _ = erg("nvidia h200")
    assert "bf16 700" in out
    assert "in place of the built-in h200-sxm" in out
    path.write_text("[mine]\nname = 3\n")
    code, _, err = erg()
    assert (code, err) == (1, f"erg: {path}: [mine] name is 3; a text is needed\n")
