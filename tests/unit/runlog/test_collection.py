"""Tags and notes, and what a tidy-up may take."""

from __future__ import annotations

import json
import os
import shutil
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ergmeter.errors import FormatError, UsageError
from ergmeter.records import Mark
from ergmeter.runlog.format import run_paths
from ergmeter.runlog.manage import labels
from ergmeter.runlog.reader import CUT_OFF, Run
from tests.runs import add_writer, even_steps, make_run


def run_made(parent: Path, name: str, *, days_ago: float = 0.0, closed: bool = True) -> Path:
    path = make_run(parent / name)
    header = json.loads((path / "run.json").read_text())
    made = datetime.now(timezone.utc) - timedelta(days=days_ago)
    (path / "run.json").write_text(json.dumps({**header, "created": made.isoformat()}))
    add_writer(path, steps=even_steps(3, tokens_computed=10), closed=closed)
    return aged(path, made.timestamp())


def aged(run: Path, changed_s: float) -> Path:
    for path in run.rglob("*"):
        os.utime(path, (changed_s, changed_s))
    return run


def test_tags_are_added_once_and_taken_away(tmp_path: Path) -> None:
    run = run_made(tmp_path, "a")
    assert labels.labels_of(run) == labels.Labels()
    labels.tag(run, add=["base", "h200", "base"])
    assert labels.tag(run, add=["good"], remove=["h200"]).tags == ("base", "good")
    assert labels.labels_of(run).tags == ("base", "good")


def test_a_note_has_its_time_and_the_run_stays_as_it_was(tmp_path: Path) -> None:
    run = run_made(tmp_path, "a")
    before = (run / "run.json").read_bytes()
    labels.annotate(run, "the cooler was off")
    ((at, said),) = labels.annotate(run, "  and on ").notes[1:]
    assert said == "and on"
    assert abs(datetime.fromisoformat(at).timestamp() - time.time()) < 60
    assert (run / "run.json").read_bytes() == before


@pytest.mark.parametrize("bad", ["", "a b", "x" * 41, "<b>", "../up"])
def test_what_is_no_tag_is_refused(tmp_path: Path, bad: str) -> None:
    with pytest.raises(UsageError, match="can't be a tag"):
        labels.tag(run_made(tmp_path, "a"), add=[bad])


def test_labels_that_are_none_are_named(tmp_path: Path) -> None:
    run = run_made(tmp_path, "a")
    (run / "labels.json").write_text("[]")
    with pytest.raises(FormatError, match=r"labels\.json: holds a list, not an object"):
        labels.labels_of(run)


def test_of_a_wish_all_that_is_given_must_hold(tmp_path: Path) -> None:
    old, tagged, new = (
        run_made(tmp_path, name, days_ago=days) for name, days in (("o", 40), ("t", 40), ("n", 1))
    )
    for run in (tagged, new):
        labels.tag(run, add=["try"])
    names = [one.path.name for one in labels.chosen(tmp_path, older_s=30 * 86400.0)]
    assert sorted(names) == ["o", "t"]
    found = labels.chosen(tmp_path, older_s=30 * 86400.0, tags=("try",))
    assert [one.path for one in found] == [tagged]
    assert found[0].age_s == pytest.approx(40 * 86400.0, rel=0.01)
    size = labels.size_bytes(old)
    assert size == sum(p.stat().st_size for p in old.rglob("*") if p.is_file())
    assert labels.chosen(tmp_path, larger_bytes=10.0 * size) == []


def test_a_wish_for_nothing_is_refused(tmp_path: Path) -> None:
    run_made(tmp_path, "a")
    with pytest.raises(UsageError, match="which runs"):
        labels.chosen(tmp_path, newest=1)


def test_a_run_that_is_written_tagged_keep_linked_or_unreadable_stays(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    going = run_made(runs, "going", days_ago=9, closed=False)
    kept = run_made(runs, "kept", days_ago=9)
    labels.tag(kept, add=["keep"])
    broken = run_made(runs, "broken", days_ago=9)
    (broken / "run.json").write_text("{")
    (runs / "link").symlink_to(run_made(tmp_path, "elsewhere", days_ago=9))
    why = {one.path.name: one.reason for one in labels.chosen(runs, older_s=0.0)}
    assert why["going"].startswith("it may be being written")
    assert why["kept"] == "it is tagged keep"
    assert why["broken"].startswith("it can't be read")
    assert why["link"] == "it is a link"
    with pytest.raises(UsageError, match="being written"):
        labels.remove(going)
    assert going.exists()


def test_what_is_tagged_keep_stays_even_when_it_is_asked_for_by_that_tag(tmp_path: Path) -> None:
    labels.tag(run_made(tmp_path, "kept", days_ago=9), add=["keep"])
    (found,) = labels.chosen(tmp_path, tags=("keep",))
    assert found.reason == "it is tagged keep"


def test_a_run_of_which_one_rank_ended_and_another_goes_on_is_being_written(tmp_path: Path) -> None:
    run = run_made(tmp_path, "a", closed=False)  # by this process, which lives
    add_writer(run, marks=[Mark(1, "ended", "failed")])
    aged(run, time.time() - 9 * 86400.0)
    assert Run.open(run).status == "failed"
    assert labels.may_be_written(Run.open(run))
    with pytest.raises(UsageError, match="may be being written"):
        labels.remove(run)


@pytest.mark.parametrize(("silent_s", "may"), [(120.0, True), (7200.0, False)])
def test_a_writer_of_another_host_is_gone_after_an_hour_of_silence(
    tmp_path: Path, silent_s: float, may: bool
) -> None:
    run = make_run(tmp_path / "a")
    add_writer(run, steps=even_steps(3), closed=False, header={"boot_id": "another"})
    aged(run, time.time() - silent_s)
    assert Run.open(run).status == CUT_OFF
    assert labels.may_be_written(Run.open(run)) is may
    (found,) = labels.chosen(tmp_path, older_s=0.0)
    assert found.reason.startswith("it may be being written") is may


def test_a_run_is_as_old_as_its_last_record_and_a_label_is_none(tmp_path: Path) -> None:
    run = run_made(tmp_path, "a", days_ago=40)
    (marks,) = run.rglob("marks.jsonl")
    last_s = time.time() - 2 * 86400.0
    os.utime(marks, (last_s, last_s))
    labels.tag(run, add=["try"])
    (found,) = labels.chosen(tmp_path, tags=("try",))
    assert found.age_s == pytest.approx(2 * 86400.0, rel=0.01)
    assert found.reason == ""


@pytest.mark.parametrize("name", ["checkpoint-500/model.bin", "notes.txt", ".git/config"])
def test_a_run_with_files_of_somebody_elses_stays(tmp_path: Path, name: str) -> None:
    run = run_made(tmp_path, "a", days_ago=9)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text("x")
    aged(run, time.time() - 9 * 86400.0)
    (found,) = labels.chosen(tmp_path, older_s=0.0)
    assert found.reason == f"it holds files that are no part of a run ({name})"
    with pytest.raises(UsageError, match="no part of a run"):
        labels.remove(run)
    assert (run / name).exists()


def test_what_ergmeter_puts_beside_the_records_goes_with_the_run(tmp_path: Path) -> None:
    run = run_made(tmp_path, "a", days_ago=9)
    (run / "profile").mkdir()
    for name in ("figures.csv", "figures.jsonl", "requests.jsonl", "profile/rank0.json.gz"):
        (run / name).write_text("x")
    aged(run, time.time() - 9 * 86400.0)
    labels.remove(run)
    assert list(tmp_path.iterdir()) == []


def test_the_newest_stay_where_so_many_are_to(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b", "c")):
        run = run_made(tmp_path, name, days_ago=9)
        os.utime(run / "run.json", (1000.0 + number, 1000.0 + number))
    found = labels.chosen(tmp_path, older_s=0.0, newest=1)
    assert [one.path.name for one in found] == ["a", "b"]


def test_where_more_are_to_stay_than_there_are_none_goes(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        run_made(tmp_path, name, days_ago=9)
    assert labels.chosen(tmp_path, older_s=0.0, newest=5) == []


def test_a_run_that_could_be_removed_only_in_part_is_no_run_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_made(tmp_path, "a", days_ago=9)

    def refuse(path: Path) -> None:
        (path / "run.json").unlink()
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(FormatError) as caught:
        labels.remove(run)
    assert run_paths(tmp_path) == []
    (rest,) = tmp_path.iterdir()
    assert str(caught.value) == (
        f"partly removed; the rest is in {rest} ([Errno 13] Permission denied)"
    )


def test_a_run_that_was_tagged_keep_since_it_was_listed_stays(tmp_path: Path) -> None:
    run = run_made(tmp_path, "a", days_ago=9)
    (found,) = labels.chosen(tmp_path, older_s=0.0)
    assert found.reason == ""
    labels.tag(run, add=["keep"])
    with pytest.raises(UsageError, match="stays: it is tagged keep"):
        labels.remove(run)
    assert run_paths(tmp_path) == [run]


def test_a_run_of_which_a_directory_can_not_be_read_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_made(tmp_path, "a", days_ago=9)
    (run / "profile").mkdir()
    (run / "profile" / "of-somebody").write_text("x")
    aged(run, time.time() - 9 * 86400.0)
    listed = os.scandir

    def scandir(path: Any) -> Any:
        """As for a user who may not read that one: the tests may run as root, who may."""
        if Path(path).name == "profile":
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    (found,) = labels.chosen(tmp_path, older_s=86400.0)
    assert found.reason == "it holds a directory that can't be read (profile)"
    with pytest.raises(UsageError, match="can't be read"):
        labels.remove(run)
    assert run_paths(tmp_path) == [run]


@pytest.mark.parametrize(
    ("text", "s"), [("30d", 2_592_000.0), ("12 h", 43_200.0), ("2w", 1209600.0)]
)
def test_an_age_is_read(text: str, s: float) -> None:
    assert labels.age_parsed(text) == s


@pytest.mark.parametrize(("text", "size"), [("500MB", 5e8), ("1GiB", 2.0**30), ("2 gb", 2e9)])
def test_a_size_is_read(text: str, size: float) -> None:
    assert labels.size_parsed(text) == size


@pytest.mark.parametrize("bad", ["30", "d", "-3d", "3 months"])
def test_what_is_no_age_is_refused(bad: str) -> None:
    with pytest.raises(UsageError, match="an age is like"):
        labels.age_parsed(bad)
