"""Many files: in order, each with its count or its own error, by one process or two, remembered."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path

import pytest

from ergmeter.errors import FormatError, UsageError
from ergmeter.hlo import FileCount, count_file, count_files
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


def plain(found: FileCount) -> tuple[object, ...]:
    return found.path, found.size_bytes, found.count and same(found.count), found.error


@pytest.mark.parametrize("processes", [1, 2, None])
def test_each_file_has_its_count_or_its_error_in_the_order_given(
    mixed: list[Path], processes: int | None
) -> None:
    done: list[Path] = []
    results = list(
        count_files(
            mixed, processes=processes, memo=False, progress=lambda one: done.append(one.path)
        )
    )
    assert [one.path for one in results] == mixed
    assert sorted(done) == sorted(mixed)
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


def test_two_processes_say_what_one_says(mixed: list[Path]) -> None:
    one, two = (list(count_files(mixed, processes=n, memo=False)) for n in (1, 2))
    assert list(map(plain, one)) == list(map(plain, two))


def test_a_count_of_more_than_64_bits_survives_the_way_between_processes(tmp_path: Path) -> None:
    paths = []
    for number in range(2):
        made = MADE["loops_in_loops_past_64_bits"]()
        paths.append(tmp_path / f"{number}.pb")
        paths[-1].write_bytes(made.data)
    for memo in (False, True, True):
        for found in count_files(paths, processes=2, memo=memo):
            assert found.count
            assert found.count.macs == made.macs > 2**64


def test_an_error_names_the_file_and_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "cut.hlo_module.pb"
    path.write_bytes(SMALL[0].read_bytes()[:-40])
    with pytest.raises(FormatError, match=r"cut\.hlo_module\.pb: .*\(byte \d+\)"):
        count_file(path)


def test_no_processes_make_no_sense() -> None:
    with pytest.raises(UsageError, match="0"):
        list(count_files(SMALL, processes=0))


# The memo.


def test_what_was_counted_is_remembered(tmp_path: Path) -> None:
    memo = tmp_path / "memo"
    first = list(count_files(SMALL, memo=memo))
    again = list(count_files(SMALL, memo=memo))
    assert not any(one.from_memo for one in first)
    assert all(one.from_memo for one in again)
    assert list(map(plain, first)) == list(map(plain, again))


def test_a_memo_holds_kernels_and_what_is_not_known_too(tmp_path: Path) -> None:
    names = ("nki_no_mac_key", "nki_torchxla_wrapped_3calls", "while_dynamic.unopt")
    paths = [DATA / f"{name}.hlo_module.pb" for name in names]
    first, again = (list(count_files(paths, memo=tmp_path / "memo")) for _ in range(2))
    assert list(map(plain, first)) == list(map(plain, again))
    assert [one.from_memo for one in again] == [True] * 3


def test_a_file_that_changed_is_counted_again(tmp_path: Path) -> None:
    path = tmp_path / "model.hlo_module.pb"
    memo = tmp_path / "memo"

    def counted() -> FileCount:
        (found,) = count_files([path], memo=memo)
        return found

    shutil.copyfile(SMALL[0], path)
    before = counted()
    assert counted().from_memo
    # Another module of the same length; only the time tells.
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\x12\x03dot", b"\x12\x03add"))  # the opcode
    os.utime(path, ns=(1, 1))
    after = counted()
    assert not after.from_memo
    assert before.count
    assert after.count
    assert (before.count.macs > 0, after.count.macs) == (True, 0)


def test_a_file_that_grew_is_counted_again_even_if_its_time_did_not_change(tmp_path: Path) -> None:
    path, memo = tmp_path / "model.hlo_module.pb", tmp_path / "memo"
    for name, macs in (("a_fusion_shared_by_three_call_sites", 6 * D), ("ids_of_64_bits", D)):
        path.write_bytes(MADE[name]().data)
        os.utime(path, ns=(1, 1))
        (found,) = count_files([path], memo=memo)
        assert found.count
        assert found.count.macs == macs


def test_damage_is_not_remembered(tmp_path: Path) -> None:
    path, memo = tmp_path / "model.hlo_module.pb", tmp_path / "memo"
    whole = SMALL[0].read_bytes()
    path.write_bytes(whole[:100])
    for _ in range(2):
        (found,) = count_files([path], memo=memo)
        assert found.error
        assert not found.from_memo
    path.write_bytes(whole)
    (found,) = count_files([path], memo=memo)
    assert found.count


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"key":1,"count":{}}', b"\xff"])
def test_a_damaged_memo_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    memo = tmp_path / "memo"
    list(count_files(SMALL[:1], memo=memo))
    kept = [file for file in memo.rglob("*") if file.is_file()]
    assert kept
    for file in kept:
        file.write_bytes(content)
    (found,) = count_files(SMALL[:1], memo=memo)
    assert not found.from_memo
    assert found.count
    assert found.count.macs == count_file(SMALL[0]).macs


def test_a_memo_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    memo = tmp_path / "memo"
    memo.write_text("a file where a directory should be")
    (found,) = count_files(SMALL[:1], memo=memo)
    assert found.count
    assert found.count.macs == count_file(SMALL[0]).macs


# Files of unusual names and kinds.


@pytest.mark.parametrize("name", ["a b.pb", "two\nlines.pb", "ümläut.pb", os.fsdecode(b"\xff.pb")])
def test_any_name_will_do(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    made = MADE["a_fusion_shared_by_three_call_sites"]()
    path.write_bytes(made.data)
    for processes in (1, 2):
        for found in count_files([path, path], processes=processes, memo=tmp_path / "memo"):
            assert found.path == path
            assert found.count
            assert found.count.macs == 6 * D


def test_what_is_no_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    found, whole = count_files([tmp_path, SMALL[0]], memo=False)
    assert found.error
    assert whole.count


def test_a_reader_that_is_gone_is_refused_with_what_to_pass() -> None:
    with pytest.raises(UsageError, match=r"no HLO reader 'plain': pass compiled or protobuf"):
        count_file(SMALL[0], reader="plain")
