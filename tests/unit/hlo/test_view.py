"""`erg hlo` over a compile cache: one line a module at 80 columns, and what its signs mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from ergmeter.cli.main import main
from tests.unit.neuron.graphs import config, one_dot, write

COMPILERS = ("neuronxcc-2.17.0.0+abcd1234", "neuronxcc-2.18.121.0+9e31e41a")
MODULES = ("MODULE_15329989265349737271+a65e371e", "MODULE_22229989265349737272+a65e371e")


@pytest.fixture
def cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "memo"))
    monkeypatch.setenv("COLUMNS", "80")
    for compiler in COMPILERS:
        large = one_dot(30_000, 32_000, 32_000, config(2_000_000_000_000))
        write(tmp_path / "cache" / compiler / MODULES[0], large)
        write(tmp_path / "cache" / compiler / MODULES[1], one_dot(3, 5, 7, config(None)))
    return tmp_path / "cache"


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        main(["hlo", *arguments])
    assert not ended.value.code
    return capsys.readouterr().out.splitlines()


def test_a_module_is_one_line_under_its_compiler(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = lines(capsys, str(cache))
    first = shown.index(next(line for line in shown if line.startswith(COMPILERS[0])))
    heads = [line.split()[0] for line in shown[first : first + 6]]
    assert heads == [f"{COMPILERS[0]}/", *MODULES, f"{COMPILERS[1]}/", *MODULES]
    # 2e12 of 2e12 + 30 x 32 x 32 x 1e9.
    assert shown[first + 1].split()[1:4] == ["32,720,000,000,000", "6.112", "%"]
    assert shown[first + 2].split()[1:5] == ["≥", "105", "0", "%*"]
    assert max(map(len, shown[first : first + 6])) <= 80
    assert shown[first + 7].startswith("≥ at least: something of it is not counted")
    assert shown[first + 8].startswith("* a lower bound: kernels")


def test_computations_of_several_modules_are_said_to_be_added_up(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "computations of the same name in 4 modules are added up"
    assert said in lines(capsys, str(cache), "--by", "computation")
    one = str(cache / COMPILERS[0] / MODULES[0])
    assert not any("added up" in line for line in lines(capsys, one, "--by", "computation"))


DATA = Path(__file__).parents[2] / "data" / "hlo"


def of(capsys: pytest.CaptureFixture[str], *names: str) -> list[str]:
    paths = [str(DATA / f"{name}.hlo_module.pb") for name in names]
    return lines(capsys, *paths)


def test_a_lower_bound_and_an_upper_one_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert "at least 1,800 MACs (3.6 kFLOP)" in of(capsys, "cholesky_native.unopt")
    assert "at most 1,024 MACs (2.048 kFLOP)" in of(capsys, "cond_uneven.unopt")
    both = of(capsys, "cholesky_native.unopt", "cond_uneven.unopt", "dot_mnk.unopt")
    rows = {line.split()[0].partition(".")[0]: line.split()[1:3] for line in both if ".pb" in line}
    assert rows["cholesky_native"] == ["≥", "1,800"]
    assert rows["cond_uneven"] == ["≤", "1,024"]
    assert rows["dot_mnk"][0] not in "≥≤≈"
    assert any(line.startswith("≥ at least: ") for line in both)
    assert any(line.startswith("≤ at most: the costliest branch") for line in both)
    assert any(line.startswith("about ") and "MACs" in line for line in both)


def test_what_is_no_product_is_named_below_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    shown = of(capsys, "cholesky_native.unopt")
    assert (
        "  !  not counted, as they are not matrix products: cholesky (1 call, 3.456 kFLOP by"
        " n^3/3), triangular-solve (1 call, 4.32 kFLOP by n^2 a right-hand side)"
    ) in shown
    shown = of(capsys, "fft_in_loop.unopt")
    assert "at least 0 MACs (0 FLOP)" in shown
    assert any("fft (7 calls, 8.96 kFLOP by 5 N log2 N" in line for line in shown)


def test_complex_products_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    shown = of(capsys, "dot_complex.unopt")
    assert any(line.split()[:2] == ["complex-dot", "960"] for line in shown)
    said = "  !  complex products are counted as 4 real MACs each (XLA's cost analysis: as 1)"
    assert said in shown


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dot_mnk.unopt", "the work of one device"),
        ("pjit.opt", "the work of one device, one of 4 that the module is partitioned over"),
        (
            "pjit.unopt",
            "the work of all 4 devices together: the module is annotated and not yet partitioned",
        ),
        (
            "shard_map.unopt",
            "products inside shard_map are the work of one device, those outside of all 4"
            " devices: the module is not yet partitioned",
        ),
    ],
)
def test_whose_work_it_is_stands_below_the_total(
    capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    assert said in of(capsys, name)
