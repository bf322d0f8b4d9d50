"""A run in one file is the same run again; what is none, or means harm, makes nothing."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ergmeter.errors import FormatError, UsageError
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Mark
from ergmeter.runlog.manage.pack import pack, unpack
from ergmeter.runlog.reader import CUT_OFF, Run
from tests.runs import add_writer, even_steps, make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = make_run(tmp_path / "runs" / "one")
    add_writer(path, steps=even_steps(20, tokens_computed=100))
    return path


def contents(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


@pytest.mark.parametrize("ending", [".tar.gz", ".tgz", ".zip"])
def test_packed_and_unpacked_it_is_the_same_run(run: Path, tmp_path: Path, ending: str) -> None:
    packed = pack(run, tmp_path / f"one{ending}")
    again = unpack(packed, tmp_path)
    assert again == tmp_path / "one"
    assert contents(again) == contents(run)
    assert summarize(Run.open(again)) == summarize(Run.open(run))
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_packed_run_opened_as_it_is_says_how_it_becomes_one(run: Path, tmp_path: Path) -> None:
    packed = pack(run, tmp_path / "one.tar.gz")
    with pytest.raises(FormatError) as caught:
        Run.open(packed)
    assert str(caught.value) == f"{packed} is packed; `erg runs unpack {packed}` makes a run of it"


def test_who_packed_it_is_not_in_it_nor_what_is_unfinished(run: Path, tmp_path: Path) -> None:
    (run / ".half").write_text("x")
    (run / "link").symlink_to("/etc/hostname")
    with tarfile.open(pack(run, tmp_path / "one.tar.gz")) as packed:
        members = packed.getmembers()
    assert {(m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0, "", "")}
    assert members[0].name == "one/run.json"
    assert not [m.name for m in members if "half" in m.name or "link" in m.name]


def test_a_run_that_was_cut_off_is_so_in_its_copy(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "cut")
    directory = add_writer(run, steps=even_steps(5), closed=False, header={"pid": 2**22 + 1})
    assert Run.open(run).status == CUT_OFF
    import os

    for path in [*directory.iterdir(), run / "run.json"]:
        os.utime(path, (1.8e9 - 1e6, 1.8e9 - 1e6))
    for ending in (".tar.gz", ".zip"):
        again = unpack(pack(run, tmp_path / f"cut{ending}"), tmp_path / ending[1:])
        assert Run.open(again).status == CUT_OFF


@pytest.fixture
def at() -> Iterator[Callable[[str], None]]:
    """Goes to another time zone, and home in the end."""
    with pytest.MonkeyPatch.context() as patch:

        def go(zone: str) -> None:
            patch.setenv("TZ", zone)
            time.tzset()

        yield go
    time.tzset()


@pytest.mark.parametrize("ending", [".tar.gz", ".zip"])
def test_a_time_is_the_same_in_another_time_zone(
    run: Path, tmp_path: Path, ending: str, at: Callable[[str], None]
) -> None:
    before = {path.name: path.stat().st_mtime for path in run.iterdir()}
    at("JST-9")
    packed = pack(run, tmp_path / f"one{ending}")
    at("UTC0")
    again = unpack(packed, tmp_path)
    after = {path.name: path.stat().st_mtime for path in again.iterdir() if path.is_file()}
    assert after == {name: pytest.approx(before[name], abs=1.0) for name in after}


@pytest.mark.skipif(shutil.which("unzip") is None, reason="no unzip here")
def test_another_program_reads_the_same_time(
    run: Path, tmp_path: Path, at: Callable[[str], None]
) -> None:
    at("JST-9")
    packed = pack(run, tmp_path / "one.zip")
    at("EST5")
    subprocess.run(["unzip", "-q", packed], cwd=tmp_path, check=True)
    assert contents(tmp_path / "one") == contents(run)
    found_s = (tmp_path / "one" / "run.json").stat().st_mtime
    assert found_s == pytest.approx((run / "run.json").stat().st_mtime, abs=1.0)


def test_nothing_that_is_unpacked_is_of_a_time_to_come(
    run: Path, tmp_path: Path, at: Callable[[str], None]
) -> None:
    """A zip of another program has the time of its maker's wall alone: nine hours from now."""
    at("JST-9")
    packed = tmp_path / "one.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for path in sorted(p for p in run.rglob("*") if p.is_file()):
            archive.write(path, str(Path("one") / path.relative_to(run)))
    at("UTC0")
    again = unpack(packed, tmp_path)
    assert all(path.stat().st_mtime <= time.time() for path in again.rglob("*"))


def test_a_run_that_is_written_is_not_packed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "going")
    add_writer(run, steps=even_steps(5), closed=False)
    with pytest.raises(UsageError, match="is being written"):
        pack(run, tmp_path / "going.zip")


def test_a_run_of_which_another_rank_goes_on_is_not_packed(run: Path, tmp_path: Path) -> None:
    add_writer(run, marks=[Mark(1, "ended", "failed")])
    add_writer(run, steps=even_steps(5), closed=False)
    with pytest.raises(UsageError, match="is being written"):
        pack(run, tmp_path / "going.zip")


@pytest.mark.parametrize("ending", [".tar.gz", ".zip"])
def test_the_directory_one_is_in_is_packed_under_its_name(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.chdir(run)
    packed = pack(Path(), tmp_path / f"one{ending}")
    assert unpack(packed, tmp_path) == tmp_path / "one"


@pytest.mark.parametrize("name", ["lr:1e-4", ".hidden", "a\\b"])
def test_what_could_not_be_unpacked_is_not_packed(run: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="rename it first"):
        pack(run.rename(run.with_name(name)), tmp_path / "one.zip")
    assert not (tmp_path / "one.zip").exists()


def test_nothing_is_overwritten(run: Path, tmp_path: Path) -> None:
    packed = pack(run, tmp_path / "one.zip")
    with pytest.raises(UsageError, match="exists"):
        pack(run, packed)
    with pytest.raises(UsageError, match="exists"):
        unpack(packed, run.parent)


def tarred(path: Path, *entries: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for entry in entries:
            archive.addfile(entry, io.BytesIO(b"x" * entry.size))
    return path


def entry(name: str, kind: bytes = tarfile.REGTYPE, size: int = 1) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.size = kind, size if kind == tarfile.REGTYPE else 0
    found.linkname = "/etc/passwd"
    return found


@pytest.mark.parametrize(
    "bad",
    [
        entry("../evil"),
        entry("one/../../evil"),
        entry("/tmp/evil-absolute"),
        entry("run.json"),
        entry("one/.hidden"),
        entry("one/link", tarfile.SYMTYPE),
        entry("one/hard", tarfile.LNKTYPE),
        entry("one/pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda one: one.name,
)
def test_an_archive_writes_only_plain_files_under_its_own_name(
    tmp_path: Path, bad: tarfile.TarInfo
) -> None:
    into = tmp_path / "deep" / "into"
    into.mkdir(parents=True)
    with pytest.raises(FormatError):
        unpack(tarred(tmp_path / "bad.tar.gz", entry("one/run.json"), bad), into)
    assert list(into.iterdir()) == []
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["into"]


def test_a_zip_is_held_to_the_same(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr("one/run.json", "{}")
        archive.writestr("../evil", "x")
    with pytest.raises(FormatError, match="can't be a file of a run"):
        unpack(tmp_path / "bad.zip", tmp_path / "into")
    assert not (tmp_path / "evil").exists()


def test_a_zip_that_states_a_smaller_size_is_refused(tmp_path: Path) -> None:
    packed = tmp_path / "bad.zip"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("one/run.json", " " * 100_000)
    content = bytearray(packed.read_bytes())
    for header, size_at in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        start = content.index(header) + size_at
        content[start : start + 4] = (10).to_bytes(4, "little")
    packed.write_bytes(content)
    with pytest.raises(FormatError, match="not a packed run"):
        unpack(packed, tmp_path / "into")


@pytest.mark.parametrize("keep", [10, 200])
def test_half_an_archive_makes_no_run(run: Path, tmp_path: Path, keep: int) -> None:
    packed = pack(run, tmp_path / "one.tar.gz")
    packed.write_bytes(packed.read_bytes()[:keep])
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(FormatError, match="not a packed run"):
        unpack(packed, into)
    assert list(into.iterdir()) == []


@pytest.mark.parametrize("changed_s", ["-1e30", "nan"])
def test_a_time_that_is_none_is_told_and_no_traceback(tmp_path: Path, changed_s: str) -> None:
    bad = entry("one/run.json")
    bad.pax_headers = {"mtime": changed_s}
    with pytest.raises(FormatError, match="not a packed run"):
        unpack(tarred(tmp_path / "bad.tar.gz", bad), tmp_path / "into")


@pytest.mark.parametrize(("at", "value"), [(8, 1), (10, 97)], ids=["encrypted", "unknown method"])
def test_a_zip_that_can_not_be_read_here_is_told(tmp_path: Path, at: int, value: int) -> None:
    packed = tmp_path / "bad.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("one/run.json", "{}")
    whole = bytearray(packed.read_bytes())
    central = whole.index(b"PK\x01\x02")
    whole[central + at] = whole[at - 2] = value  # the same field, in both headers
    packed.write_bytes(whole)
    with pytest.raises(FormatError, match="not a packed run"):
        unpack(packed, tmp_path / "into")


def test_an_lzma_stream_that_is_broken_is_told(run: Path, tmp_path: Path) -> None:
    packed = tmp_path / "one.tar.xz"
    with tarfile.open(packed, "w:xz") as archive:
        archive.add(run, "one")
    whole = bytearray(packed.read_bytes())
    whole[len(whole) // 2 : len(whole) // 2 + 40] = b"\xff" * 40
    packed.write_bytes(whole)
    with pytest.raises(FormatError, match="not a packed run"):
        unpack(packed, tmp_path / "into")
