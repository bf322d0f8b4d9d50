"""`erg runs`, and the tags in `erg list`: what is printed, what is done, how misuse is answered."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ergmeter.metrics import summarize
from ergmeter.records import Summary
from ergmeter.runlog.format import run_paths
from ergmeter.runlog.reader import Run
from tests.runs import add_writer, even_steps, make_run

Erg = Callable[..., tuple[int, str, str]]
LONG_AGO_S = 1.7e9


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for number, name in enumerate(("2026-11-16-a-long-train-7f3a", "2026-11-16-other-01ab")):
        run = make_run(tmp_path / "runs" / name)
        add_writer(run, steps=even_steps(20, tokens_computed=12_345))
        for path in run.rglob("*"):
            os.utime(path, (LONG_AGO_S + number, LONG_AGO_S + number))
    return tmp_path / "runs"


def first(runs: Path) -> Path:
    return run_paths(runs)[0]


def test_a_tag_is_shown_by_list_in_80_columns_and_no_figure_gives_way(
    erg: Erg, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert erg("runs", "tag", first(runs), "baseline", "h200") == (0, "baseline h200\n", "")
    _, out, _ = erg("list", runs)
    lines = [line.rstrip() for line in out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert any(line.endswith("baseline, h200") for line in lines)
    assert sum("12,345" in line for line in lines) == 2
    _, out, _ = erg("list", runs, "--json")
    assert [one["tags"] for one in json.loads(out)] == [["baseline", "h200"], []]


def test_where_there_is_room_tags_have_a_column(erg: Erg, runs: Path) -> None:
    erg("runs", "tag", first(runs), "baseline")
    _, out, _ = erg("list", runs)
    head, row, other = (line.rstrip() for line in out.splitlines())
    assert head.endswith("tags")
    assert row.endswith("baseline")
    assert "baseline" not in other


def test_tags_and_notes_can_be_read_and_taken_away(erg: Erg, runs: Path) -> None:
    run = first(runs)
    assert erg("runs", "tag", run)[1] == "no tag\n"
    assert erg("runs", "note", run)[1] == "no note\n"
    erg("runs", "tag", run, "a", "b")
    assert erg("runs", "tag", run, "--remove", "a")[1] == "b\n"
    assert erg("runs", "note", run, "the", "cooler", "was", "off")[1].endswith(
        "  the cooler was off\n"
    )


def test_prune_shows_and_only_with_yes_removes(erg: Erg, runs: Path) -> None:
    erg("runs", "tag", first(runs), "try")
    code, out, _ = erg("runs", "prune", runs, "--tag", "try")
    assert code == 0
    assert out.splitlines()[-1].startswith("1 run, ")
    assert out.endswith("would go; --yes removes them\n")
    assert len(run_paths(runs)) == 2
    code, out, _ = erg("runs", "prune", runs, "--tag", "try", "--yes")
    assert code == 0
    assert [path.name for path in run_paths(runs)] == ["2026-11-16-other-01ab"]
    assert [p.name for p in runs.iterdir()] == ["2026-11-16-other-01ab"]


def test_a_run_that_went_in_part_is_said_to_have(
    erg: Erg, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    name = first(runs).name
    code, out, err = erg("runs", "prune", runs, "--older-than", "1h", "--keep-newest", "1", "--yes")
    assert (code, out) == (1, "0 runs, 0 B removed\n")
    assert err.startswith(f"erg: {name}: partly removed; the rest is in {runs}/.{name}.removed-")
    assert "stays" not in err
    assert len(err.splitlines()) == 1


def test_one_source_that_is_not_there_hides_nothing_of_the_others(
    erg: Erg, runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "none").mkdir()
    sources = (runs, tmp_path / "gone", tmp_path / "none", first(runs))
    code, out, err = erg("runs", "collect", *sources, tmp_path / "all")
    names = [path.name for path in run_paths(runs)]
    assert code == 1  # 2 where there is none but such, as for one that is mistyped
    assert out.splitlines() == [
        *(f"{name}: collected" for name in names),
        f"no run found in {tmp_path / 'none'}",
        f"{names[0]}: is here already, as {names[0]}",
    ]
    assert err == (
        f"erg: {tmp_path / 'gone'} is neither a directory here nor HOST:PATH on another machine\n"
    )
    assert [path.name for path in run_paths(tmp_path / "all")] == names


def test_a_run_that_goes_while_it_is_listed_is_not_missed(
    erg: Erg, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summarized = summarize.summarize
    gone = first(runs)

    def slow(run: Run) -> Summary:
        if run.path == gone:
            shutil.rmtree(run.path)
            raise FileNotFoundError(2, "No such file or directory", str(run.path))
        return summarized(run)

    monkeypatch.setattr(summarize, "summarize", slow)
    code, out, err = erg("list", runs)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["2026-11-16-other-01ab"]


def test_a_run_that_can_not_be_read_is_named_and_the_others_are_listed(
    erg: Erg, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summarized = summarize.summarize
    gone = first(runs)

    def refused(run: Run) -> Summary:
        if run.path == gone:
            raise PermissionError(13, "Permission denied", str(run.path))
        return summarized(run)

    monkeypatch.setattr(summarize, "summarize", refused)
    code, out, err = erg("list", runs)
    assert code == 1
    assert err == f"erg: [Errno 13] Permission denied: {str(gone)!r}\n"
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["2026-11-16-other-01ab"]


def test_a_run_that_goes_while_they_are_put_in_order_is_none(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [*runs.glob("*/run.json"), runs / "gone" / "run.json"]
    monkeypatch.setattr(Path, "glob", lambda _path, _pattern: iter(found))
    assert [path.name for path in run_paths(runs)] == [
        "2026-11-16-a-long-train-7f3a",
        "2026-11-16-other-01ab",
    ]


def test_what_is_not_there_to_be_unpacked_makes_no_directory(erg: Erg, tmp_path: Path) -> None:
    assert erg("runs", "unpack", tmp_path / "gone.zip", tmp_path / "runs")[0] == 2
    (tmp_path / "no.zip").write_text("no archive")
    assert erg("runs", "unpack", tmp_path / "no.zip", tmp_path / "runs")[0] == 1
    assert not (tmp_path / "runs").exists()


def test_without_an_action_the_help_is_shown_with_whole_summaries(erg: Erg) -> None:
    code, out, err = erg("runs")
    assert (code, err) == (0, "")
    assert out == erg("runs", "--help")[1]
    assert "Copy a run without host names, user names, paths, UUIDs" in out
    assert "..." not in out.partition("Commands:")[2]
    assert "…" not in out


def test_what_is_no_archive_is_told_in_one_line(erg: Erg, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# no archive")
    code, _, err = erg("runs", "unpack", tmp_path / "README.md", tmp_path / "runs")
    assert code == 1
    assert err.splitlines() == [
        f"erg: {tmp_path / 'README.md'}: not a packed run, or cut off (file could not be opened"
        " successfully)"
    ]


def test_a_directory_that_takes_nothing_is_told_once_and_not_for_each_run(
    erg: Erg, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shut = tmp_path / "shut"
    shut.mkdir()
    monkeypatch.setattr(os, "access", lambda path, *_, **__: Path(path) != shut)
    code, out, err = erg("runs", "collect", runs, shut / "all")
    assert (code, out) == (2, "")
    assert err == (
        f"erg: DIRECTORY {shut / 'all'}: the directory {shut} can't be written to; name another\n"
    )
    monkeypatch.chdir(shut)
    code, _, err = erg("record", "--", "true")
    assert code == 2
    assert err.startswith("erg: without --out DIR a run goes to runs: the directory ")
    assert len(err.splitlines()) == 1


def test_the_directory_one_is_in_can_be_packed(
    erg: Erg, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(first(runs))
    code, out, err = erg("runs", "pack", ".")
    assert (code, err) == (0, "")
    assert out.startswith(f"{first(runs)}.tar.gz  ")


def test_what_a_run_says_does_not_steer_the_terminal(erg: Erg, runs: Path) -> None:
    labels = {"tags": ["a\x1b[2J"], "notes": [{"at": "\x1b]0;x\x07", "text": "b\x1b[31m\nc"}]}
    (first(runs) / "labels.json").write_text(json.dumps(labels))
    assert erg("runs", "tag", first(runs))[1] == "a [2J\n"
    assert erg("runs", "note", first(runs))[1] == "]0;x  b [31m c\n"
    first(runs).rename(runs / "x\x1b[2J")
    for said in (
        erg("runs", "prune", runs, "--older-than", "1h"),
        erg("runs", "collect", runs, runs),
    ):
        assert "x [2J" in said[1]
        assert "\x1b" not in said[1] + said[2]


def test_packed_anonymised_and_collected_runs_can_be_reported(
    erg: Erg, runs: Path, tmp_path: Path
) -> None:
    run = first(runs)
    assert erg("runs", "pack", run, tmp_path / "one.zip")[0] == 0
    assert erg("runs", "unpack", tmp_path / "one.zip", tmp_path / "u")[1] == (
        f"{tmp_path / 'u' / run.name}\n"
    )
    assert erg("runs", "anonymise", run, tmp_path / "anon", "--name", "example")[0] == 0
    code, out, _ = erg("runs", "collect", runs, tmp_path / "u", tmp_path / "all")
    assert code == 0
    assert f"{run.name}: is here already, as {run.name}" in out
    for path in (tmp_path / "u" / run.name, tmp_path / "anon", tmp_path / "all" / run.name):
        code, out, _ = erg("report", path, "--metric", "throughput.tokens_per_s")
        assert code == 0
        assert "12345" in out.replace(",", "")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("tag", "{run}", "a b"), 2, "'a b' can't be a tag"),
        (("tag", "/nowhere", "a"), 1, "/nowhere does not exist"),
        (("note", "{run}", " "), 2, "the note is empty"),
        (("prune", "{runs}"), 2, "which runs? give --older-than"),
        (("prune", "{runs}", "--older-than", "30"), 2, "an age is like 30d"),
        (("prune", "{runs}", "--larger-than", "big"), 2, "a size is like 500MB"),
        (("pack", "{run}", "x.rar"), 2, "x.rar ends in none of .tar.gz"),
        (("unpack", "/nowhere.zip", "{runs}"), 2, "no file /nowhere.zip"),
        (("anonymise", "{run}", "{run}"), 2, "exists; choose another"),
        (("collect", "/nowhere", "{runs}"), 2, "is neither a directory here"),
        (("tga",), 2, "No such command 'tga'"),
    ],
)
def test_misuse_is_one_line(
    erg: Erg, runs: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    given = [word.format(run=first(runs), runs=runs) for word in arguments]
    found, _, err = erg("runs", *given)
    assert found == code
    assert said in err
    assert len(err.splitlines()) == 1
