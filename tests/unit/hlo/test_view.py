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
    assert shown[first + 2].split()[1:4] == ["105+", "0", "%*"]
    assert max(map(len, shown[first : first + 6])) <= 80
    assert shown[first + 6].startswith("+ something of it is not counted")
    assert shown[first + 7].startswith("* a lower bound: kernels")


def test_computations_of_several_modules_are_said_to_be_added_up(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "computations of the same name in 4 modules are added up"
    assert said in lines(capsys, str(cache), "--by", "computation")
    one = str(cache / COMPILERS[0] / MODULES[0])
    assert not any("added up" in line for line in lines(capsys, one, "--by", "computation"))
