"""Logs of any size and state: what is read of them, and in how much memory."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.errors import FormatError
from ergmeter.importers import logfile
from ergmeter.importers.logfile import MAX_LINE_BYTES, LogFile
from ergmeter.ports import LineHints


def texts(path: Path, *words: bytes, folds_case: bool = False) -> list[str]:
    log = LogFile(path)
    log.words = LineHints(words, folds_case=folds_case) if words else None
    return [line.text for line in log.lines()]


pieces = st.lists(
    st.sampled_from([b"loss=2", b"LOSS", b"x", b"\n", b"\r", b"\0", b"step", b"\xff"])
)


@given(pieces, st.integers(1, 7), st.booleans())
def test_lines_are_those_of_a_plain_reading_that_hold_a_word(
    parts: list[bytes], block: int, folds_case: bool
) -> None:
    data = b"".join(parts)
    lines = data.replace(b"\0", b"").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    wanted = [line for line in lines if any(w in (line.lower() if folds_case else line)
                                            for w in (b"loss", b"step"))]  # fmt: skip
    log = LogFile("unused")
    with mock.patch.object(logfile, "_BLOCK_BYTES", block):
        cut = list(log._blocks(io.BytesIO(data)))
    assert b"".join(cut).split(b"\n") == lines
    words = LineHints((b"loss", b"step"), folds_case=folds_case)
    found = [
        line
        for whole in logfile._whole_lines(iter(cut))
        for line, end in logfile._with_words(whole, words)
        if whole[end : end + 1] == b"\n"
    ]
    assert found == wanted


def test_a_line_of_many_megabytes_is_cut_and_the_next_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "long.log"
    log.write_bytes(b"step=1\n" + b"a" * 9_000_000 + b"step=2\nstep=3\n" + b"step=4 " * 900_000)
    found = texts(log, b"step")
    assert [text[:6] for text in found] == ["step=1", "step=3", "step=4"]
    assert max(len(text) for text in found) == MAX_LINE_BYTES
    assert len(texts(log)) == 4


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """Of lines, of one line without an end, and of zeros, as a log that was cut holds."""

    def peak_bytes(part: bytes, times: int) -> int:
        path = tmp_path / "big.log"
        path.write_bytes(part * times)
        log = LogFile(path)
        log.words = LineHints((b"loss",))
        tracemalloc.start()
        try:
            for line in log.lines():
                del line
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    lines = b"a line of a log\n" * 60_000 + b"loss=2.5\n"
    for part in (lines, b"a" * 1_000_000, b"\0" * 1_000_000):
        assert peak_bytes(part, 24) < peak_bytes(part, 6) + 2_000_000


def test_zeros_before_a_line_are_no_part_of_it(tmp_path: Path) -> None:
    log = tmp_path / "cut.log"
    log.write_bytes(b"\0" * 3_000_000 + b"step=1\nste\0p=2\n")
    assert texts(log) == ["step=1", "step=2"]


def test_a_packed_log_is_read_member_after_member(tmp_path: Path) -> None:
    log = tmp_path / "log.gz"
    log.write_bytes(gzip.compress(b"step=1\nst") + gzip.compress(b"ep=2\n") + b"\0" * 512)
    assert texts(log) == ["step=1", "step=2"]


def test_a_packed_log_that_ends_half_way_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    noise = os.urandom(300_000).hex().encode()
    whole = gzip.compress(b"step=1\n" + noise + b"\nstep=2\n")
    (tmp_path / "log.gz").write_bytes(whole[: len(whole) // 2])
    log = LogFile(tmp_path / "log.gz")
    found = list(log.lines())
    assert found[0].text == "step=1"
    assert "step=2" not in [line.text for line in found]
    assert log.is_cut_off


def test_packed_data_that_is_damaged_is_said_in_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log.gz"
    log.write_bytes(b"\x1f\x8b\x08\x00" + b"x" * 100)
    with pytest.raises(FormatError, match=r"log\.gz: damaged gzip data"):
        texts(log)


def test_a_log_of_windows_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes("step=1 ▍\r\nstep=2\r\n".encode("utf-16"))
    assert [text for text in texts(log) if text] == ["step=1 ▍", "step=2"]


def test_standard_input_is_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    piped = SimpleNamespace(buffer=io.BytesIO(b"step=1\nstep=2"))
    monkeypatch.setattr("sys.stdin", piped)
    assert [line.text for line in LogFile("-").lines()] == ["step=1", "step=2"]


def test_progress_hears_of_every_byte(tmp_path: Path) -> None:
    log = tmp_path / "big.log"
    log.write_bytes(b"step=1\n" * 500_000)
    heard: list[int] = []
    assert sum(1 for _ in LogFile(log, progress=heard.append).lines()) == 500_000
    assert heard == sorted(heard)
    assert heard[-1] == 3_500_000


def test_a_log_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="No such file"):
        texts(tmp_path / "none.log")
    with pytest.raises(FormatError, match="directory"):
        texts(tmp_path)


@pytest.mark.parametrize("size", [3, 4, 5, 1 << 20])
def test_an_end_of_line_of_two_bytes_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("ergmeter.importers.logfile._BLOCK_BYTES", size)
    path = tmp_path / "a.log"
    path.write_bytes(codecs.BOM_UTF8 + b"ab\r\ncd\r\nef\rgh\r\n\r\n")
    log = LogFile(path)
    assert [line.text for line in log.lines()] == ["ab", "cd", "ef", "gh", ""]
    assert log.line_count == 5
