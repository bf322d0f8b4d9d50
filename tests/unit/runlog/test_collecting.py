"""Runs come together once each, and no half of one is ever taken for a run."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ergmeter.errors import FormatError, UsageError
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Mark
from ergmeter.runlog.manage import collect as collecting
from ergmeter.runlog.manage import labels as collection
from ergmeter.runlog.manage.collect import collect, remote_path
from ergmeter.runlog.reader import Run
from tests.runs import add_writer, even_steps, make_run

LONG_AGO_S = 1.7e9


def aged(run: Path) -> Path:
    for path in run.rglob("*"):
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))
    return run


def run_in(parent: Path, name: str, steps: int = 10) -> Path:
    run = make_run(parent / name)
    add_writer(run, steps=even_steps(steps, tokens_computed=100))
    return aged(run)


def copied(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-rp", source, target], check=True)


def said(outcomes: list[collecting.CollectOutcome]) -> dict[str, str]:
    return {one.name: one.message for one in outcomes}


def test_runs_are_brought_once_by_their_id_whatever_they_are_called(tmp_path: Path) -> None:
    run_in(tmp_path / "a", "one")
    run_in(tmp_path / "a", "two")
    into = tmp_path / "all"
    assert said(collect(str(tmp_path / "a"), into)) == {"one": "collected", "two": "collected"}
    shutil.copytree(tmp_path / "a" / "one", tmp_path / "b" / "renamed")
    assert said(collect(str(tmp_path / "b"), into)) == {"renamed": "is here already, as one"}
    assert summarize(Run.open(into / "one")) == summarize(Run.open(tmp_path / "a" / "one"))


def test_two_runs_of_one_name_are_two(tmp_path: Path) -> None:
    run_in(tmp_path / "a", "one", steps=5)
    run_in(tmp_path / "b", "one", steps=7)
    into = tmp_path / "all"
    for source in ("a", "b"):
        collect(str(tmp_path / source), into)
    counts = {path.name: Run.open(path).count("steps") for path in into.iterdir()}
    assert counts == {"one": 5, "one-2": 7}


def test_a_run_that_is_written_is_left_for_the_next_time(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a" / "going")
    add_writer(run, steps=even_steps(5), closed=False)
    (outcome,) = collect(str(tmp_path / "a"), tmp_path / "all")
    assert "is being written" in outcome.message
    assert list((tmp_path / "all").iterdir()) == []


def test_a_copy_of_a_run_that_went_on_is_brought_up_to_date(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a" / "one")
    add_writer(run, steps=even_steps(5), closed=False, header={"pid": 2**22 + 1})
    into = tmp_path / "all"
    assert said(collect(str(tmp_path / "a"), into)) == {"one": "collected"}
    assert said(collect(str(tmp_path / "a"), into)) == {"one": "is here already, as one"}
    add_writer(run, steps=even_steps(3))
    assert said(collect(str(tmp_path / "a"), into)) == {"one": "brought up to date"}
    assert Run.open(into / "one").count("steps") == 8
    assert [p.name for p in into.iterdir()] == ["one"]


def test_what_was_said_of_a_copy_stays_when_it_is_brought_up_to_date(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a" / "one")
    add_writer(run, steps=even_steps(5), closed=False, header={"pid": 2**22 + 1})
    into = tmp_path / "all"
    collect(str(tmp_path / "a"), into)
    collection.tag(into / "one", add=["keep"])
    collection.annotate(into / "one", "of the copy")
    collection.tag(run, add=["there"])
    collection.annotate(run, "of the run")
    add_writer(run, steps=even_steps(3))
    assert said(collect(str(tmp_path / "a"), into)) == {"one": "brought up to date"}
    labels = collection.labels_of(into / "one")
    assert labels.tags == ("keep", "there")
    assert {text for _, text in labels.notes} == {"of the copy", "of the run"}


def test_files_that_were_put_into_a_copy_stay_when_it_is_brought_up_to_date(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a" / "one")
    add_writer(run, steps=even_steps(5), closed=False, header={"pid": 2**22 + 1})
    (run / "notes.txt").write_text("of the run")
    into = tmp_path / "all"
    collect(str(tmp_path / "a"), into)
    copy = into / "one"
    (copy / "plots").mkdir()
    (copy / "plots" / "power.svg").write_text("<svg/>")
    (copy / "report.html").write_text("a page")
    (copy / "notes.txt").write_text("changed in the copy")
    add_writer(run, steps=even_steps(3))
    (outcome,) = collect(str(tmp_path / "a"), into)
    assert outcome.message == (
        "brought up to date; files that were added to the copy are still there: report.html"
        " and 1 more"
    )
    assert (copy / "plots" / "power.svg").read_text() == "<svg/>"
    assert (copy / "report.html").read_text() == "a page"
    assert (copy / "notes.txt").read_text() == "of the run"
    assert Run.open(copy).count("steps") == 8
    assert [path.name for path in into.iterdir()] == ["one"]


def test_links_and_hidden_files_of_a_run_are_named_as_left(tmp_path: Path) -> None:
    run = run_in(tmp_path / "a", "one")
    (run / "last").symlink_to("/etc")
    (run / ".cache").mkdir()
    (run / ".cache" / "index").write_text("x")
    (run / "checkpoint.pt").write_text("weights")
    (run / f".{collection.LABELS_FILE}.1234").write_text("ours, unfinished")
    aged(run)
    (outcome,) = collect(str(tmp_path / "a"), tmp_path / "all")
    assert outcome.message == ("collected; links and hidden files were not copied: last and 1 more")
    assert (tmp_path / "all" / "one" / "checkpoint.pt").read_text() == "weights"


def test_a_run_of_which_another_rank_goes_on_is_left_for_the_next_time(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a" / "one")
    add_writer(run, steps=even_steps(5), closed=False)
    add_writer(run, marks=[Mark(1, "ended", "failed")])
    (outcome,) = collect(str(tmp_path / "a"), tmp_path / "all")
    assert "is being written" in outcome.message


def test_a_copy_that_breaks_off_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in(tmp_path / "a", "one")

    def half(source: Path, target: Path, **_options: object) -> None:
        copied(source, target)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", half)
    (outcome,) = collect(str(tmp_path / "a"), tmp_path / "all")
    assert "No space left" in outcome.message
    assert list((tmp_path / "all").iterdir()) == []


def test_a_copy_that_is_damaged_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in(tmp_path / "a", "one")

    def damaged(source: Path, target: Path, **_options: object) -> None:
        copied(source, target)
        (part,) = target.rglob("steps*")
        part.write_bytes(part.read_bytes()[:-40])

    monkeypatch.setattr(shutil, "copytree", damaged)
    (outcome,) = collect(str(tmp_path / "a"), tmp_path / "all")
    assert "the copy is incomplete" in outcome.message
    assert list((tmp_path / "all").iterdir()) == []


RSYNC = """#!{python}
import os, shutil, sys

*options, source, target = sys.argv
host, _, path = source.partition(":")
if host != "user@far":
    sys.exit("ssh: Could not resolve hostname")
folder = os.path.join({home!r}, path.removeprefix("~/"))
if not os.path.isdir(folder):
    sys.exit("a warning\\nrsync: change_dir failed: No such file or directory")


def is_left(folder, names):
    links = [n for n in names if "--no-links" in options and os.path.islink(f"{{folder}}/{{n}}")]
    return links + [n for n in names if "--exclude=.*" in options and n.startswith(".")]


shutil.copytree(folder, target, ignore=is_left, dirs_exist_ok=True)
"""


@pytest.fixture
def other_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs in the home of user@far, for an `rsync` that copies from there."""
    home, tools = tmp_path / "far", tmp_path / "tools"
    (home / "runs").mkdir(parents=True)
    tools.mkdir()
    tool = tools / "rsync"
    tool.write_text(RSYNC.format(python=sys.executable, home=str(home)))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tools))
    return home / "runs"


def test_runs_of_another_machine_are_fetched(other_machine: Path, tmp_path: Path) -> None:
    run_in(other_machine, "one")
    into = tmp_path / "all"
    assert said(collect("user@far:runs", into)) == {"one": "collected"}
    assert said(collect("user@far:~/runs/", into)) == {"one": "is here already, as one"}
    assert [p.name for p in into.iterdir()] == ["one"]
    assert summarize(Run.open(into / "one")) == summarize(Run.open(other_machine / "one"))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("runs/sft", "sft"),
        ("runs/sft/", "sft"),
        ("{runs}/sft/.", "sft"),
        ("runs/a run's", "a run's"),
        ("runs/.put-by", "put-by"),
    ],
)
def test_one_run_of_another_machine_has_its_name_here(
    other_machine: Path, tmp_path: Path, path: str, name: str
) -> None:
    run_in(other_machine, path.rstrip("/.").rsplit("/", 1)[-1])
    into = tmp_path / "all"
    assert said(collect(f"user@far:{path.format(runs=other_machine)}", into)) == {name: "collected"}
    assert [p.name for p in into.iterdir()] == [name]


def test_links_and_hidden_files_of_another_machine_do_not_come(
    other_machine: Path, tmp_path: Path
) -> None:
    run = run_in(other_machine, "one")
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("x")
    (run / "linked").symlink_to(secret)
    (run / "linked-file").symlink_to(secret / "key")
    (run / ".hidden").write_text("x")
    (run / "notes.txt").write_text("a file under two names")
    os.utime(run / "notes.txt", (LONG_AGO_S, LONG_AGO_S))
    os.link(run / "notes.txt", run / "notes-again.txt")
    assert said(collect("user@far:runs", tmp_path / "all")) == {"one": "collected"}
    copy = tmp_path / "all" / "one"
    there = {p.name for p in run.iterdir()} - {"linked", "linked-file", ".hidden"}
    assert {p.name for p in copy.iterdir()} == there
    assert (copy / "notes-again.txt").read_text() == "a file under two names"


def test_one_that_could_not_be_read_there_is_told(other_machine: Path, tmp_path: Path) -> None:
    run_in(other_machine, "one")
    with pytest.raises(FormatError, match="rsync could not fetch user@far:ruins: rsync: change_"):
        collect("user@far:ruins", tmp_path / "all")
    assert list((tmp_path / "all").iterdir()) == []


@pytest.mark.usefixtures("other_machine")
def test_without_rsync_the_message_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tools" / "rsync").unlink()
    with pytest.raises(UsageError, match="rsync is not installed here; mount the directory"):
        collect("user@far:runs", tmp_path / "all")


def test_the_directory_one_is_in_is_collected_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_in(tmp_path / "a", "sft"))
    assert said(collect(".", tmp_path / "all")) == {"sft": "collected"}
    assert [p.name for p in (tmp_path / "all").iterdir()] == ["sft"]


def test_a_hidden_run_that_is_asked_for_can_be_found_afterwards(tmp_path: Path) -> None:
    run = run_in(tmp_path / "a", ".put-by")
    assert said(collect(str(run), tmp_path / "all")) == {".put-by": "collected"}
    assert [p.name for p in (tmp_path / "all").iterdir()] == ["put-by"]


def test_what_was_written_while_it_was_fetched_is_not_taken_for_finished(
    other_machine: Path, tmp_path: Path
) -> None:
    run = run_in(other_machine, "one")
    (marks,) = run.rglob("marks.jsonl")
    os.utime(marks)  # its last mark came just now: its records may have been copied before
    (outcome,) = collect("user@far:runs", tmp_path / "all")
    assert "is being written" in outcome.message
    assert list((tmp_path / "all").iterdir()) == []


@pytest.mark.usefixtures("other_machine")
def test_a_machine_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="rsync could not fetch user@near:/x: ssh: Could not"):
        collect("user@near:/x", tmp_path / "all")
    assert list((tmp_path / "all").iterdir()) == []


def test_what_is_neither_a_directory_nor_a_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is neither a directory here"):
        collect(str(tmp_path / "nowhere"), tmp_path / "all")
    assert not (tmp_path / "all").exists()


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("user@host:/runs", "/runs"),
        ("host:runs/a:b", "runs/a:b"),
        ("me@[fe80::1%eth0]:runs", "runs"),
        ("-oProxyCommand=x:/y", None),
        ("-x:/y", None),
        ("/a", None),
    ],
)
def test_another_machine_is_known_by_its_colon(source: str, path: str | None) -> None:
    assert remote_path(source) == path


def test_a_file_that_has_no_place_any_more_is_not_lost(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a" / "one")
    add_writer(run, steps=even_steps(5), closed=False, header={"pid": 2**22 + 1})
    into = tmp_path / "all"
    collect(str(tmp_path / "a"), into)
    copy = into / "one"
    (copy / "plots").mkdir()
    (copy / "plots" / "p.svg").write_text("<svg/>")
    (copy / "report.html").write_text("a page")
    (run / "plots").write_text("a file by now")
    add_writer(run, steps=even_steps(3))
    (outcome,) = collect(str(tmp_path / "a"), into)
    assert outcome.message.startswith("left out: ")
    assert "plots" in outcome.message
    assert Run.open(copy).count("steps") == 5
    assert (copy / "plots" / "p.svg").read_text() == "<svg/>"
    assert (copy / "report.html").read_text() == "a page"
    assert [path.name for path in into.iterdir()] == ["one"]


def test_a_failure_while_files_are_kept_leaves_the_copy_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "a" / "one")
    add_writer(run, steps=even_steps(5), closed=False, header={"pid": 2**22 + 1})
    into = tmp_path / "all"
    collect(str(tmp_path / "a"), into)
    (into / "one" / "report.html").write_text("a page")
    add_writer(run, steps=even_steps(3))
    copied_to = shutil.copy2

    def full(source: str | Path, target: str | Path, **how: Any) -> object:
        if Path(source).name == "report.html":
            raise OSError(errno.ENOSPC, "No space left on device")
        return copied_to(source, target, **how)

    monkeypatch.setattr(shutil, "copy2", full)
    (outcome,) = collect(str(tmp_path / "a"), into)
    assert outcome.message.startswith("left out: ")
    assert Run.open(into / "one").count("steps") == 5
    assert (into / "one" / "report.html").read_text() == "a page"
    assert [path.name for path in into.iterdir()] == ["one"]
