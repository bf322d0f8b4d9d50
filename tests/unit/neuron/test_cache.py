"""Which files of a compile cache are graphs, and which of them are meant."""

from __future__ import annotations

import gzip
import os
from datetime import datetime
from pathlib import Path

import pytest

from ergmeter.errors import FormatError, UsageError
from ergmeter.neuron.compile_cache import (
    Choice,
    find_graphs,
    graph_file,
    modules_named_in,
    parse_time,
    read_graph_runs,
    runs_of,
)
from tests.unit.neuron.graphs import write

OLD, NEW = "neuronxcc-2.16.372.0+4a9b2326", "neuronxcc-2.18.121.0+9e31e41a"
FIRST, SECOND = "MODULE_15329989265349737271+a65e371e", "MODULE_1d2e3f4a5b6c7d8e9f00+ffff0000"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    for compiler, module in ((OLD, FIRST), (NEW, FIRST), (NEW, SECOND)):
        folder = tmp_path / compiler / module
        write(folder, b"", name="model.hlo_module.pb")
        for other in ("model.neff", "model.done", "compile_flags.json", "model.hlo_module.pb.lock"):
            write(folder, b"", name=other)
    write(tmp_path / NEW / SECOND, b"", name="wrapped_neff.hlo")
    return tmp_path


def chosen(cache: Path, choice: Choice) -> list[tuple[str | None, str | None]]:
    return [(file.compiler, file.module) for file in find_graphs(str(cache), choice).chosen]


def test_graphs_are_found_under_every_name_the_sdk_gave_them(tmp_path: Path) -> None:
    names = (
        "model.hlo_module.pb", "model.hlo_module.pb.gz", "model.hlo.pb", "graph.hlo",
        f"model.{FIRST}.hlo_module.pb", "hlo_module_0",
    )  # fmt: skip
    for number, name in enumerate(names):
        write(tmp_path / str(number), b"", name=name)
    found = find_graphs(str(tmp_path), Choice())
    assert sorted(Path(file.path).name for file in found.chosen) == sorted(names)


def test_a_stub_is_left_out_and_said(cache: Path) -> None:
    found = find_graphs(str(cache), Choice())
    assert len(found.chosen) == 3
    assert found.left_out == {"wrapped_neff.hlo, a stub around a compiled graph": 1}


def test_a_graph_under_several_names_and_packings_is_one(tmp_path: Path) -> None:
    names = ("model.hlo.pb", "model.hlo_module.pb", "model.hlo_module.pb.gz", "model.hlo.gz")
    for folder in (FIRST, SECOND):
        for name in names:
            write(tmp_path / folder, b"", name=name)
    write(tmp_path / SECOND, b"", name="other.hlo.pb.gz")
    write(tmp_path / SECOND, b"", name="other.hlo.pb")
    found = find_graphs(str(tmp_path), Choice())
    kept = [str(Path(file.path).relative_to(tmp_path)) for file in found.chosen]
    assert kept == [
        f"{FIRST}/model.hlo_module.pb", f"{SECOND}/model.hlo_module.pb", f"{SECOND}/other.hlo.pb"
    ]  # fmt: skip
    why = "the same graph under another name or packing, in the same directory"
    assert found.left_out == {why: 3 + 3 + 1}


def test_a_path_says_its_module_and_compiler() -> None:
    file = graph_file(f"/cache/{NEW}/{FIRST}/model.hlo_module.pb")
    assert (file.compiler, file.module) == (NEW, FIRST)
    assert graph_file("graph.hlo").module is None


@pytest.mark.parametrize("version", [NEW, "2.18.121.0", "2.18.121.0+9e31e41a"])
def test_a_compiler_is_chosen_by_any_form_of_its_version(cache: Path, version: str) -> None:
    assert chosen(cache, Choice(compilers=(version,))) == [(NEW, FIRST), (NEW, SECOND)]


@pytest.mark.parametrize("module", [FIRST, "15329989265349737271", "MODULE_15329989265349737271"])
def test_a_module_is_chosen_by_any_form_of_its_name(cache: Path, module: str) -> None:
    assert chosen(cache, Choice(modules=(module,))) == [(OLD, FIRST), (NEW, FIRST)]


def test_a_choice_that_leaves_nothing_says_what_there_is_to_choose(cache: Path) -> None:
    with pytest.raises(UsageError, match="3 of another module than MODULE_1; compilers") as refused:
        find_graphs(str(cache), Choice(modules=("MODULE_1",)))
    assert all(name in str(refused.value) for name in (OLD, NEW, FIRST, SECOND))


def test_a_part_of_the_cache_or_one_file_may_be_given(cache: Path) -> None:
    assert chosen(cache / NEW / FIRST, Choice()) == [(NEW, FIRST)]
    assert chosen(cache / NEW / FIRST / "model.hlo_module.pb", Choice()) == [(NEW, FIRST)]


def test_graphs_are_chosen_by_when_they_were_written(cache: Path) -> None:
    for path in cache.rglob("*.pb"):
        at = datetime(2025, 6, 1 if OLD in str(path) else 10, 12)
        os.utime(path, (at.timestamp(), at.timestamp()))
    since, until = parse_time("2025-06-10", option="-"), parse_time("2025-06-09 12:00", option="-")
    assert chosen(cache, Choice(since=since)) == [(NEW, FIRST), (NEW, SECOND)]
    assert chosen(cache, Choice(until=until)) == [(OLD, FIRST)]
    found = find_graphs(str(cache), Choice(until=until))
    assert sum(found.left_out.values()) == 3
    with pytest.raises(UsageError, match="--since takes a time as 2025-06-10"):
        parse_time("yesterday", option="--since")


def test_modules_are_found_in_a_log_also_across_its_pieces(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"{'x' * 50}\nUsing a cached neff at /c/{NEW}/{SECOND}/model.neff. Exiting\n")
    for size in (64, 1 << 20):
        monkeypatch.setattr("ergmeter.importers.logfile._BLOCK_BYTES", size)
        assert modules_named_in(str(log)) == {SECOND}
    (tmp_path / "train.log.gz").write_bytes(gzip.compress(log.read_bytes()))
    assert modules_named_in(str(tmp_path / "train.log.gz")) == {SECOND}
    log.write_text(f"ends with {SECOND}")
    assert modules_named_in(str(log)) == {SECOND}
    assert chosen(cache, Choice(named_in_log=modules_named_in(str(log)))) == [(NEW, SECOND)]


@pytest.mark.parametrize(
    "text",
    [
        f"{FIRST} 12\nMODULE_2,3\n",
        f"# runs\n{FIRST}, 12\nMODULE_2 3",
    ],
)
def test_runs_are_read_from_lines(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runs"
    path.write_text(text)
    runs = read_graph_runs(str(path))
    assert runs_of(FIRST, runs) == 12
    assert runs_of("MODULE_2+abcdef01", runs) == 3
    assert runs_of("MODULE_9+abcdef01", runs) == 0


@pytest.mark.parametrize("text", ["MODULE_1 often", "MODULE_1", '{"MODULE_1": -1}', "{", ""])
def test_runs_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runs"
    path.write_text(text)
    with pytest.raises(FormatError, match="--graph-runs"):
        read_graph_runs(str(path))
