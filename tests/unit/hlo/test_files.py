"""Many files: in order, each with its count or its own error."""

from __future__ import annotations

import gzip
import os
import signal
import sys
from pathlib import Path

import pytest

from ergmeter.errors import FormatError, UsageError
from ergmeter.hlo import count_file, count_files, files
from tests.unit.hlo.handmade import MADE, D
from tests.unit.hlo.readers import same

DATA = Path(__file__).parents[2] / "data" / "hlo"
SMALL = sorted(DATA.glob("dot_*.pb"))


@pytest.fixture
def mixed(tmp_path: Path) -> list[Path]:
    """Whole files with a damaged, an empty, a compressed and an absent one among them."""
    (tmp_path / "damaged.pb").write_bytes(SMALL[0].read_bytes()[:200])
    (tmp_path / "empty.pb").touch()
    (tmp_path / "packed.pb.gz").write_bytes(gzip.compress(SMALL[1].read_bytes()))
    odd = [tmp_path / name for name in ("damaged.pb", "empty.pb", "packed.pb.gz", "absent.pb")]
    return [*SMALL[:3], *odd, *SMALL[3:]]


def test_each_file_has_its_count_or_its_error_in_the_order_given(mixed: list[Path]) -> None:
    results = list(count_files(mixed))
    assert [one.path for one in results] == mixed
    for one in results:
        if one.path in SMALL:
            assert one.error is None
            assert one.count
            assert same(one.count) == same(count_file(one.path))
            assert one.size_bytes == one.path.stat().st_size
    by_name = {one.path.name: one for one in results}
    packed = by_name["packed.pb.gz"].count
    assert packed
    assert packed.macs == count_file(SMALL[1]).macs
    for name in ("damaged.pb", "empty.pb", "absent.pb"):
        assert by_name[name].count is None
        assert by_name[name].error
    assert "byte" in str(by_name["damaged.pb"].error)


def without_compiled_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERGMETER_COMPILED", "0")
    monkeypatch.setattr(files, "_MANY_BYTES", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_many_megabytes_are_counted_by_several_processes_with_the_same_results(
    mixed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = list(count_files(mixed))
    without_compiled_reader(monkeypatch)
    monkeypatch.setattr(files, "_counted", refused_here)
    together = list(count_files(mixed))
    assert [one.path for one in together] == mixed
    for one, other in zip(together, alone, strict=True):
        assert (one.error is None, one.size_bytes) == (other.error is None, other.size_bytes)
        assert not one.count or (other.count and same(one.count) == same(other.count))


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_files_of_a_killed_process_are_counted_here(
    mixed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [one.error for one in count_files(mixed)]
    without_compiled_reader(monkeypatch)
    monkeypatch.setattr(files, "_counted", killed_elsewhere)
    assert [one.error for one in count_files(mixed)] == alone


HERE, counted = os.getpid(), files._counted


def refused_here(path: Path) -> files.FileCount:
    assert os.getpid() != HERE
    return counted(path)


def killed_elsewhere(path: Path) -> files.FileCount:
    if os.getpid() != HERE:
        os.kill(os.getpid(), signal.SIGKILL)
    return counted(path)


def test_an_error_names_the_file_and_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "cut.hlo_module.pb"
    path.write_bytes(SMALL[0].read_bytes()[:-40])
    with pytest.raises(FormatError, match=r"cut\.hlo_module\.pb: .*\(byte \d+\)"):
        count_file(path)


# Files of unusual names and kinds.


@pytest.mark.parametrize("name", ["a b.pb", "two\nlines.pb", "ümläut.pb", os.fsdecode(b"\xff.pb")])
def test_any_name_will_do(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    made = MADE["a_fusion_shared_by_three_call_sites"]()
    path.write_bytes(made.data)
    (found,) = count_files([path])
    assert found.path == path
    assert found.count
    assert found.count.macs == 6 * D


def test_what_is_no_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    found, whole = count_files([tmp_path, SMALL[0]])
    assert found.error
    assert whole.count


def test_a_reader_that_is_gone_is_refused_with_what_to_pass() -> None:
    with pytest.raises(UsageError, match=r"no HLO reader 'plain': pass compiled or protobuf"):
        count_file(SMALL[0], reader="plain")
