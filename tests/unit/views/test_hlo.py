"""`erg hlo` on the terminal: what failed is named as the table names it, and shares are not rounded
to all or nothing."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from ergmeter.cli.main import main
from ergmeter.hlo import count_files
from ergmeter.neuron.compile_cache import GraphFile
from ergmeter.neuron.kernels import graph_result
from tests.unit.neuron.graphs import config, one_dot, write

DATA = Path(__file__).parents[2] / "data"


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
    assert any(line.startswith("  !! neuronxcc-2.2/MODULE_3+0: ") for line in lines)
    assert not any(line.startswith(str(cache)) for line in lines[1:])


def test_where_there_is_no_table_it_is_named_from_here(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(cache / "MODULE_3+0", b"no module at all")
    with pytest.raises(SystemExit) as ended:
        main(["hlo", str(cache)])
    assert ended.value.code == 1
    found = capsys.readouterr()
    assert found.err.startswith("erg: cache/MODULE_3+0/model.hlo_module.pb: ")
    assert (found.out, found.err.count("\n")) == ("", 1)


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


def test_a_graph_in_two_packings_counts_once_and_that_is_said(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(cache / "MODULE_1+0", one_dot(3, 5, 7))
    packed = gzip.compress(one_dot(3, 5, 7))
    write(cache / "MODULE_1+0", packed, name="model.hlo_module.pb.gz")
    text = "\n".join(shown(capsys, str(cache)))
    assert "105 MACs (" in text
    assert "left out: 1 file, the same graph under another name or packing" in text


def test_no_modules_are_told_by_the_names_that_erg_analyze_knows(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["hlo", str(cache)])
    assert ended.value.code == 2
    assert "names with hlo_module; each also as .gz" in capsys.readouterr().err
    write(cache, one_dot(3, 5, 7), name="hlo_module_0")  # inference, since SDK 2.27
    assert "105 MACs (210 FLOP)" in shown(capsys, str(cache))


def test_a_share_that_is_not_known_is_marked_as_erg_analyze_marks_it(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loops = DATA / "hlo" / "while_dynamic.opt.hlo_module.pb"
    write(cache / "MODULE_1+0", one_dot(3, 5, 7, config(None)))
    write(cache / "MODULE_2+0", one_dot(3, 5, 7))
    write(cache / "MODULE_3+0", loops.read_bytes())
    write(cache / "MODULE_4+0", one_dot(3, 5, 7, config(105), b"not base64"))
    lines = shown(capsys, str(cache))
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("MODULE_")}
    assert [rows[f"MODULE_{n}+0"][-3:-1] for n in (1, 2, 3, 4)] == [
        ["0", "%*"], ["0", "%"], ["0", "%~"], ["50", "%*"]
    ]  # fmt: skip
    text = "\n".join(lines)
    assert "not counted: 1 call of an NKI kernel that does not state its MACs" in text
    assert "not counted: 1 call of an NKI kernel whose configuration can't be read" in text
    files = [GraphFile(str(path), path.parent.name, None) for path in sorted(cache.rglob("*.pb"))]
    graphs = [
        graph_result(one, file)
        for one, file in zip(count_files([f.path for f in files]), files, strict=True)
    ]
    assert [graph.mark for graph in graphs] == ["*", "", "~", "*"]


def test_one_is_said_as_one(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(cache / "MODULE_1+0", one_dot(3, 5, 7, config(None)))
    text = "\n".join(shown(capsys, str(cache)))
    assert "not counted: 1 call of an NKI kernel that does not state its MACs" in text
    assert "(0 of 1 call states its MACs)" in text


def test_files_of_several_names_are_one_line_each_at_80_columns(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    compilers = ("neuronxcc-2.17.0.0+abcd1234", "neuronxcc-2.18.121.0+9e31e41a")
    module = "MODULE_15329989265349737271+a65e371e"
    for compiler in compilers:
        write(cache / compiler / module, one_dot(30_000, 32_000, 32_000, config(None)))
    write(cache / compilers[1] / module, one_dot(3, 5, 7), name="graph.hlo")
    lines = shown(capsys, str(cache))
    first = lines.index(next(line for line in lines if line.startswith(compilers[0])))
    assert [line.split()[0] for line in lines[first : first + 7]] == [
        f"{compilers[0]}/", f"{module}/", "model.hlo_module.pb",
        f"{compilers[1]}/", f"{module}/", "graph.hlo", "model.hlo_module.pb",
    ]  # fmt: skip
    assert max(map(len, lines[first : first + 7])) <= 80
