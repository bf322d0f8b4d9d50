"""Every row is read once: while it is written, once it is Parquet, and across both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from ergmeter.records import Sample, Step
from ergmeter.runlog import format as fmt
from ergmeter.runlog.follow import LATE_NS, Follower, NewRows
from ergmeter.runlog.identity import writer_header
from ergmeter.runlog.writer import Writer
from tests.runs import GPU, make_run

S = 10**9


@contextmanager
def writing(run: Path) -> Iterator[Writer]:
    header = {**writer_header("meter"), "settings": {}, "unavailable": {}}
    writer = Writer(run, header=header, devices=[GPU])
    yield writer
    writer.close()


def steps(first: int, count: int) -> list[Step]:
    return [Step(i * S, (i + 1) * S, index=i) for i in range(first, first + count)]


def numbers(look: NewRows) -> list[int]:
    return [n for part in look.parts for n in part.rows["index"].to_pylist()]


def test_a_look_brings_what_is_new_and_nothing_twice(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with writing(run) as writer, closing(Follower(run)) as follower:
        writer.write("steps", steps(0, 3))
        assert numbers(follower.look()) == [0, 1, 2]
        assert numbers(follower.look()) == []
        writer.write("steps", steps(3, 2))
        assert numbers(follower.look()) == [3, 4]


def test_a_segment_that_becomes_parquet_under_our_eyes_is_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fmt, "SMALL_SEGMENT_BYTES", 0)
    monkeypatch.setattr(fmt, "SEGMENT_ROWS", 4)
    run = make_run(tmp_path / "run")
    with writing(run) as writer, closing(Follower(run)) as follower:
        writer.write("steps", steps(0, 3))
        assert numbers(follower.look()) == [0, 1, 2]
        writer.write("steps", steps(3, 2))  # full: it is Parquet now
        assert [p.suffix for p in writer.directory.glob("steps*")] == [".parquet"]
        writer.write("steps", steps(5, 1))
        assert numbers(follower.look()) + numbers(follower.look()) == [3, 4, 5]


def test_who_comes_late_catches_up_segment_by_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fmt, "SMALL_SEGMENT_BYTES", 0)
    monkeypatch.setattr(fmt, "SEGMENT_ROWS", 5)
    run = make_run(tmp_path / "run")
    with writing(run) as writer:
        for first in range(0, 20, 5):
            writer.write("steps", steps(first, 5))
        with closing(Follower(run)) as follower:
            looks = [follower.look()]
            while looks[-1].is_behind:
                looks.append(follower.look())
    assert [numbers(look) for look in looks] == [[*range(i, i + 5)] for i in range(0, 20, 5)]
    # Nothing beyond what was read may be taken for complete while there is more.
    assert [look.until_ns for look in looks[:3]] == [
        min((i + 5) * S, (i + 5) * S - LATE_NS) for i in range(0, 15, 5)
    ]


def test_half_a_message_is_read_when_it_is_whole(tmp_path: Path) -> None:
    """As another host may see an append."""
    run = make_run(tmp_path / "run")
    with writing(run) as writer:
        writer.write("steps", steps(0, 3))
        (path,) = writer.directory.glob("steps*")
        one = path.stat().st_size
        writer.write("steps", steps(3, 2))
        whole = path.read_bytes()
    with closing(Follower(run)) as follower:
        os.truncate(path, one)
        assert numbers(follower.look()) == [0, 1, 2]
        path.write_bytes(whole[: one + 40])
        assert numbers(follower.look()) == []
        path.write_bytes(whole)
        assert numbers(follower.look()) == [3, 4]


def test_of_the_samples_just_the_wanted_columns_are_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with writing(run) as writer, closing(Follower(run, columns=["power_w"])) as follower:
        writer.write("samples", [Sample(S, GPU.id, power_w=1.0, clock_hz=2.0)], stream="nvml")
        (part,) = follower.look().parts
        assert part.rows.column_names == ["t_ns", "device", "power_w"]
        assert (part.table, part.stream) == ("samples", "nvml")


def test_one_writer_of_several_can_be_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with writing(run) as one, writing(run) as other, closing(Follower(run, only=one.id)) as mine:
        one.write("steps", steps(0, 1))
        other.write("steps", steps(7, 1))
        assert numbers(mine.look()) == [0]


def test_a_run_that_is_gone_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    follower = Follower(run)
    (run / fmt.RUN_FILE).unlink()
    run.rmdir()
    with pytest.raises(FileNotFoundError):
        follower.look()
