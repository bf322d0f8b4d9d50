"""What the console sink prints, on a terminal, beside a bar, and into a file."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import struct
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
import tqdm

from ergmeter.errors import UsageError
from ergmeter.records import Reading
from ergmeter.sinks.console import ConsoleSink
from tests.unit.sinks.updates import UPDATES, request, update, written

FIRST = (
    "ergmeter step 10 | 12,346 tokens/s | step time 331 ms | MFU 41.2 % (assumed)"
    " | mean power 310.2 W | energy per token 0.0251 J/token | device memory, peak 12.5 GB"
)
FINAL = (
    "ergmeter run llama sft, 30 steps | 11,111 tokens/s | step time 298 ms | MFU 37.1 % (assumed)"
    " | mean power 279.2 W | energy per token 0.02259 J/token | device memory, peak 11.25 GB"
)


@pytest.fixture
def terminal() -> Iterator[tuple[TextIO, int]]:
    """A terminal of 80 columns: its file, and the end that a person looks at."""
    eye, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(screen, "w") as file:
        yield file, eye
    os.close(eye)


def seen(eye: int) -> str:
    """All that has arrived: a terminal hands it on in pieces."""
    said = b""
    while select.select([eye], [], [], 0.1)[0]:
        said += os.read(eye, 65536)
    return said.decode()


def test_in_a_file_it_is_a_line_a_minute_and_one_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(ConsoleSink(request(tmp_path)), *UPDATES)  # 10 s apart
    said = capsys.readouterr()
    assert said.err.splitlines() == [FIRST, FINAL]
    assert said.out == ""


def test_every_s_is_the_time_between_lines(tmp_path: Path) -> None:
    file = io.StringIO()
    written(ConsoleSink(request(tmp_path, stream=file, every_s="15")), *UPDATES)
    starts = [line.split(" | ")[0] for line in file.getvalue().splitlines()]
    assert starts == ["ergmeter step 10", "ergmeter step 30", "ergmeter run llama sft, 30 steps"]


def test_a_block_has_units_and_basis(tmp_path: Path) -> None:
    file = io.StringIO()
    options = {"style": "block", "metrics": ["mfu", "tok_per_s"], "stream": file}
    written(ConsoleSink(request(tmp_path, **options)), UPDATES[0], UPDATES[3])
    assert file.getvalue() == (
        "ergmeter: llama sft, step 10, over the last 10 s\n"
        "  MFU                41.2 %  assumed\n"
        "  tokens/s  12,346 tokens/s  measured\n"
        "ergmeter: llama sft, step 30, over 40 s of training\n"
        "  MFU                37.1 %  assumed\n"
        "  tokens/s  11,111 tokens/s  measured\n"
    )


def test_on_a_terminal_the_line_is_drawn_again_and_loses_whole_figures(
    tmp_path: Path, terminal: tuple[TextIO, int]
) -> None:
    screen, eye = terminal
    sink = ConsoleSink(request(tmp_path, stream=screen))
    sink.write(UPDATES[0])
    # The next figure would end in column 90 of 80; half of it would be another number.
    first = FIRST[: FIRST.index(" | mean power")]
    assert seen(eye) == f"\r{first}\x1b[K\r"
    sink.write(UPDATES[1])
    assert seen(eye).startswith("\rergmeter step 20 | 13,580 tokens/s | ")
    sink.write(UPDATES[3])
    assert seen(eye) == f"\r\x1b[K{FINAL[: FINAL.index(' | MFU')]}\r\n"
    sink.close()


def test_a_drawn_line_is_taken_away_at_the_end(
    tmp_path: Path, terminal: tuple[TextIO, int]
) -> None:
    screen, eye = terminal
    sink = ConsoleSink(request(tmp_path, stream=screen))
    sink.write(UPDATES[0])
    seen(eye)
    sink.close()
    assert seen(eye) == "\r\x1b[K"


def test_beside_a_progress_bar_the_line_goes_above_it(
    tmp_path: Path, terminal: tuple[TextIO, int]
) -> None:
    screen, eye = terminal
    sink = ConsoleSink(request(tmp_path, stream=screen, metrics=["tok_per_s"]))
    with tqdm.tqdm(total=10, file=screen, mininterval=0):
        seen(eye)
        sink.write(UPDATES[0])
        sink.write(UPDATES[1])  # 10 s later: not yet
        said = seen(eye)
    assert said.count("ergmeter step") == 1
    cleared, rest = said.split("ergmeter step 10 | 12,346 tokens/s\r\n")
    assert cleared.startswith("\r ")  # the bar made room
    assert "0/10" in rest  # and is there again, below


def test_a_figure_that_a_program_reported_says_so(tmp_path: Path) -> None:
    file = io.StringIO()
    reported = update(
        5,
        utilization__mfu_frac=Reading(0.5, "frac", "reported"),
        training__loss=Reading(2.3125, "1", "measured"),
    )
    sink = ConsoleSink(request(tmp_path, stream=file, metrics="mfu training.loss"))
    written(sink, reported)
    assert file.getvalue() == "ergmeter step 5 | MFU 50 % (reported) | loss 2.312\n"


def test_a_stream_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="stream must be one of stderr, stdout; got 'stdot'"):
        ConsoleSink(request(tmp_path, stream="stdot"))
    with pytest.raises(UsageError, match="stream must be stderr, stdout or a writable file"):
        ConsoleSink(request(tmp_path, stream=5))
