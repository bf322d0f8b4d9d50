"""A table that many programs add to: no row lost, torn, or under another column's name."""

from __future__ import annotations

import csv
import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ergmeter.errors import UsageError
from ergmeter.sinks.shared.appended_file import CsvFile

APPENDS = """
import sys
from ergmeter.sinks.shared.appended_file import CsvFile
path, who, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
sys.stdin.readline()  # both start at once
file = CsvFile(path, ["who", "index", "text"])
for index in range(count):
    file.append({"who": who, "index": index, "text": f"{who}{index}, " * 40})
"""

FILLS_DISK = """
import resource, signal, sys
from ergmeter.sinks.shared.appended_file import CsvFile
file = CsvFile(sys.argv[1], ["a", "b"])
file.append({"a": 1, "b": 2})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a full disk, for this process
resource.setrlimit(resource.RLIMIT_FSIZE, (12, resource.RLIM_INFINITY))
try:
    file.append({"a": 333, "b": 444})
except OSError as error:
    print(error.strerror)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
file.append({"a": 5, "b": 6})
"""


def rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_two_processes_that_append_together_lose_and_tear_no_row(tmp_path: Path) -> None:
    path, count = tmp_path / "new" / "table.csv", 500
    started = [
        subprocess.Popen(
            [sys.executable, "-c", APPENDS, str(path), who, str(count)],
            stdin=subprocess.PIPE,
            text=True,
        )
        for who in "xy"
    ]
    for process in started:
        process.communicate("go\n", timeout=60)
        assert process.returncode == 0
    header, *rows = rows_of(path)
    assert header == ["who", "index", "text"]
    for who in "xy":
        mine = [row for row in rows if row[0] == who]
        assert mine == [[who, str(i), f"{who}{i}, " * 40] for i in range(count)]
    assert len(rows) == 2 * count


def test_who_starts_second_waits_for_the_first_ones_header(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    with path.open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second = threading.Thread(target=lambda: CsvFile(path, ["a", "b"]).append({"a": 3, "b": 4}))
        second.start()
        second.join(0.3)
        assert second.is_alive()
        first.write("a,b\n1,2\n")
    second.join()
    assert path.read_text() == "a,b\n1,2\n3,4\n"


def test_the_rows_of_a_second_run_follow_under_one_header(tmp_path: Path) -> None:
    for number in (1, 2):
        file = CsvFile(tmp_path / "t.csv", ["a", "b"])
        file.append({"b": None, "a": number})
        file.close()
    assert (tmp_path / "t.csv").read_text() == "a,b\n1,\n2,\n"


def test_cells_keep_commas_quotes_and_line_ends(tmp_path: Path) -> None:
    file = CsvFile(tmp_path / "t.csv", ["a", "b"])
    file.append({"a": 'lora, "r=8"', "b": "two\nlines\r"})
    assert rows_of(tmp_path / "t.csv")[1] == ['lora, "r=8"', "two\nlines\r"]


def test_numbers_are_written_in_full_and_counts_as_counts(tmp_path: Path) -> None:
    file = CsvFile(tmp_path / "t.csv", ["a", "b", "c"])
    file.append({"a": 40960.0, "b": 0.1 + 0.2, "c": 1e300})
    assert rows_of(tmp_path / "t.csv")[1] == ["40960", "0.30000000000000004", "1e+300"]


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("a,b,c", "it has c besides"),
        ("a", "it lacks b"),
        ("a,x", "it lacks b and it has x besides"),
        ("b,a", "column 1 is b where a belongs"),
        ("a,b,b", "one of its 3 columns occurs twice"),
    ],
)
def test_a_file_with_other_columns_is_refused_and_left_alone(
    header: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{header}\n1,2\n")
    with pytest.raises(UsageError, match=f"{says}; move it away or choose another path"):
        CsvFile(path, ["a", "b"])
    assert path.read_text() == f"{header}\n1,2\n"


def test_a_file_of_a_spreadsheet_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbfa,b\r\n1,2\r\n")
    CsvFile(path, ["a", "b"]).append({"a": 3, "b": 4})
    assert path.read_bytes() == b"\xef\xbb\xbfa,b\r\n1,2\r\n3,4\n"


@pytest.mark.parametrize("cut", ["a,b\n1,2\n3", "a,b"])
def test_a_line_that_was_cut_off_does_not_swallow_the_next_row(cut: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(cut)
    CsvFile(path, ["a", "b"]).append({"a": 5, "b": 6})
    assert path.read_text() == f"{cut}\n5,6\n"


def test_a_file_that_somebody_emptied_gets_its_header_again(tmp_path: Path) -> None:
    file = CsvFile(tmp_path / "t.csv", ["a", "b"])
    (tmp_path / "t.csv").write_text("")
    file.append({"a": 1, "b": 2})
    assert (tmp_path / "t.csv").read_text() == "a,b\n1,2\n"


def test_a_full_disk_leaves_no_half_row(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    done = subprocess.run(
        [sys.executable, "-c", FILLS_DISK, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "no space for a whole row\n"
    assert path.read_text() == "a,b\n1,2\n5,6\n"


def test_a_row_with_an_unknown_column_is_refused(tmp_path: Path) -> None:
    file = CsvFile(tmp_path / "t.csv", ["a"])
    with pytest.raises(UsageError, match="has no column b"):
        file.append({"a": 1, "b": 2})
    with pytest.raises(UsageError, match="duplicates: a"):
        CsvFile(tmp_path / "u.csv", ["a", "a"])
