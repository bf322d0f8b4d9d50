"""A file is replaced as a whole or not at all."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from ergmeter.atomic_write import cached_text, replacing, write_text


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_text(path, "old")
    write_text(path, "neü")
    assert path.read_text(encoding="utf-8") == "neü"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_a_reader_sees_the_old_file_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("old")
    with replacing(path) as part:
        part.write_text("half")
        assert path.read_text() == "old"
        part.write_text("all of it")
    assert path.read_text() == "all of it"


def test_a_failure_leaves_the_old_file_and_no_part_of_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as part:
            part.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        fail()
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_a_cached_text_is_made_once_and_again_if_others_could_have_written_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made: list[int] = []

    def make() -> str:
        made.append(1)
        return f"text {len(made)}"

    assert [cached_text("a.js", make) for _ in range(3)] == ["text 1"] * 3
    path = tmp_path / "cache" / "ergmeter" / "a.js"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o666)
    assert [cached_text("a.js", make) for _ in range(2)] == ["text 2"] * 2


def test_a_text_is_made_each_time_where_nothing_can_be_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [cached_text("a.js", lambda: "made") for _ in range(2)] == ["made"] * 2

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cached_text("a.js", lambda: "made") == "made"


def make_run(path: Path, *, fails: bool) -> None:
    with replacing(path) as part:
        part.mkdir()
        (part / "run.json").write_text("{}")
        assert not path.exists()
        if fails:
            raise ZeroDivisionError


def test_a_directory_appears_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        make_run(tmp_path / "run", fails=True)
    assert list(tmp_path.iterdir()) == []
    make_run(tmp_path / "run", fails=False)
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "run.json"]
