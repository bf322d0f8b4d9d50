"""`erg hlo` on the terminal: what failed is named as the table names it, and shares are not rounded
to all or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ergmeter.cli.main import main
from tests.unit.neuron.graphs import config, one_dot, write


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "memo"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    with pytest.raises(SystemExit):
        main(["hlo", *arguments])
    return capsys.readouterr().out.splitlines()


def test_a_file_that_fails_is_named_as_the_table_names_the_others(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("MODULE_1+0", "MODULE_2+0"):
        write(cache / "neuronxcc-2.1" / module, one_dot(3, 5, 7))
    write(cache / "neuronxcc-2.2" / "MODULE_3+0", b"no module at all")
    lines = shown(capsys, str(cache))
    assert lines[0].strip() == f"{cache}, each model.hlo_module.pb"
    assert any(line.startswith("neuronxcc-2.2/MODULE_3+0: ") for line in lines)
    assert not any(line.startswith(str(cache)) for line in lines[1:])


def test_where_there_is_no_table_it_is_named_from_here(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(cache / "MODULE_3+0", b"no module at all")
    (line,) = shown(capsys, str(cache))
    assert line.startswith("cache/MODULE_3+0/model.hlo_module.pb: ")


def test_a_share_that_is_not_everything_does_not_read_as_100(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 105 multiply-adds of 3 x 5 x 7 beside a kernel of 3,499,895: 0.003 % and 99.997 %.
    write(cache / "MODULE_1+0", one_dot(3, 5, 7, config(3_499_895)))
    write(cache / "MODULE_2+0", one_dot(3, 5, 7))
    text = "\n".join(shown(capsys, str(cache)))
    assert "99.997 %" in text
    assert "100 %" not in text
    text = "\n".join(shown(capsys, str(cache / "MODULE_1+0" / "model.hlo_module.pb")))
    assert "99.997 %" in text
    assert "0.003 %" in text


def test_one_is_said_as_one(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(cache / "MODULE_1+0", one_dot(3, 5, 7, config(None)))
    text = "\n".join(shown(capsys, str(cache)))
    assert "not counted: 1 call of an NKI kernel that does not state its MACs" in text
    assert "(0 of 1 call states its MACs)" in text
