"""Damaged runs and hostile output: one clear line, the right exit code, the rest of the run."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from ergmeter import Run
from ergmeter.cli.main import main
from tests.e2e.conftest import ERG, TIMEOUT_S, Lab, environment, eventually, script

if TYPE_CHECKING:
    from collections.abc import Callable

FEW, MANY = 400, 30_000
JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00\xff\xdb" * 40


def made(directory: Path, steps: int) -> Path:
    command = script("many_steps", directory / "made", steps)
    subprocess.run(command, check=True, env=environment(), timeout=TIMEOUT_S)
    return directory / "made"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose files are streams."""
    return made(tmp_path_factory.mktemp("small"), FEW)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose steps are in Parquet."""
    return made(tmp_path_factory.mktemp("large"), MANY)


@pytest.fixture
def run(small: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(small, tmp_path / "run")
    return tmp_path / "run"


def file(run: Path, pattern: str) -> Path:
    (found,) = run.glob(f"*/{pattern}")
    return found


class Reported:
    """What `erg report --json` said of a run."""

    def __init__(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["report", str(run), "--json", "--window", "unbroken"])
        self.code = ended.value.code
        printed = capsys.readouterr()
        self.errors = printed.err.splitlines()
        self.document: dict[str, Any] = json.loads(printed.out) if printed.out else {}

    @property
    def steps(self) -> int:
        return int(self.document["readings"]["steps.count"].get("value", 0))


def test_the_runs_to_be_damaged_are_whole(
    small: Path, large: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run, steps in ((small, FEW), (large, MANY)):
        reported = Reported(run, capsys)
        assert (reported.code, reported.errors, reported.steps) == (0, [], steps)
        assert reported.document["status"] == "finished"
    assert file(small, "steps-*.arrows").exists()
    assert file(large, "steps-*.parquet").exists()


@pytest.mark.parametrize("ended", [True, False], ids=["of a run that ended", "of a killed one"])
@pytest.mark.parametrize("pattern", ["steps-*.arrows", "samples-self-*.arrows"])
def test_a_stream_cut_anywhere_gives_what_came_before(
    run: Path, capsys: pytest.CaptureFixture[str], pattern: str, *, ended: bool
) -> None:
    """Who is killed leaves half a message. Who came to an end does not: that is damage."""
    path = file(run, pattern)
    marks = file(run, "marks.jsonl")
    if not ended:
        lines = [line for line in marks.read_text().splitlines() if '"closed"' not in line]
        marks.write_text("\n".join(lines) + "\n")
    whole = path.read_bytes()
    chance = random.Random(11)
    # The schema is in the first few hundred bytes.
    cuts = {0, 1, 4, 7, 8, 9, 100, 400, len(whole) - 1, len(whole) - 8}
    cuts |= {chance.randrange(len(whole)) for _ in range(40)}
    last, told = -1, 0
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        reported = Reported(run, capsys)
        assert reported.code == len(reported.errors), f"cut at {cut}: {reported.errors}"
        assert all(ended and str(path) in line for line in reported.errors), f"cut at {cut}"
        told += reported.code
        if pattern.startswith("steps"):
            assert last <= reported.steps <= FEW, f"cut at {cut}"
            last = reported.steps
        else:
            assert reported.steps == FEW, f"cut at {cut}"
    assert told > 40 if ended else told == 0  # but where a message happens to end


@pytest.mark.parametrize("damage", [JPEG, b"\0" * 5000, b"ARROW1\0\0", b"{}"], ids=repr)
def test_a_foreign_stream_is_named_and_the_rest_is_reported(
    run: Path, capsys: pytest.CaptureFixture[str], damage: bytes
) -> None:
    path = file(run, "samples-process-*.arrows")
    path.write_bytes(damage)
    reported = Reported(run, capsys)
    assert reported.steps == FEW
    assert reported.code in (0, 1)
    told = [*reported.errors, *reported.document["torn_files"], *reported.document["damaged_files"]]
    assert any(str(path) in line for line in told)
    assert len(reported.errors) == len(reported.document["damaged_files"]) == reported.code


@pytest.mark.parametrize("cut", [JPEG, b"", b"PAR1", None], ids=["foreign", "empty", "tiny", "cut"])
def test_a_damaged_parquet_file_is_named_and_the_rest_is_reported(
    large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], cut: bytes | None
) -> None:
    shutil.copytree(large, tmp_path / "run")
    path = file(tmp_path / "run", "steps-*.parquet")
    path.write_bytes(path.read_bytes()[:-5000] if cut is None else cut)
    reported = Reported(tmp_path / "run", capsys)
    assert reported.code == 1
    assert len(reported.errors) == 1
    assert str(path) in reported.errors[0]
    assert "value" in reported.document["readings"]["time.run_s"]


def test_parquet_damaged_in_the_middle_is_not_believed(
    large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(large, tmp_path / "run")
    path = file(tmp_path / "run", "steps-*.parquet")
    data = bytearray(path.read_bytes())
    data[100:20_000] = JPEG[:1] * 19_900
    path.write_bytes(data)
    reported = Reported(tmp_path / "run", capsys)
    assert reported.code == 1
    assert len(reported.errors) == 1
    assert str(path) in reported.errors[0]


def _future(header: bytes) -> bytes:
    return header.replace(b'"version": 1', b'"version": 7')


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_future, "upgrade ergmeter"),
        (lambda _: b"", "not JSON"),
        (lambda _: b"not json", "not JSON"),
        (lambda _: b"[1, 2]", "list"),
        (lambda _: b"null", "NoneType"),
        (lambda _: JPEG, "not JSON"),
        (lambda h: h[: len(h) // 2], "not JSON"),
        (lambda h: h.replace(b"ergmeter-run", b"other"), "other"),
        (lambda h: h.replace(b'"version": 1', b'"version": "1"'), "'1'"),
    ],
    ids=["future", "empty", "text", "list", "null", "jpeg", "half", "other", "text version"],
)
def test_a_run_file_that_is_none_is_an_error_of_one_line(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[bytes], bytes],
    said: str,
) -> None:
    header = run / "run.json"
    header.write_bytes(change(header.read_bytes()))
    reported = Reported(run, capsys)
    assert reported.code == 1
    assert len(reported.errors) == 1
    assert said in reported.errors[0]
    assert str(run) in reported.errors[0]


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"[]", b"{}", JPEG, b'{"clock": 5}', b'{"clock": {"monotonic_ns": "a", "wall_ns": 1}}',
        b'{"clock": {"monotonic_ns": null, "wall_ns": null}}',
    ],
    ids=["empty", "list", "no clock", "jpeg", "clock a number", "clock a text", "clock null"],
)  # fmt: skip
def test_a_damaged_writer_file_is_named(
    run: Path, capsys: pytest.CaptureFixture[str], damage: bytes
) -> None:
    path = file(run, "writer.json")
    path.write_bytes(damage)
    reported = Reported(run, capsys)
    assert reported.code == 1
    assert len(reported.errors) == 1
    assert str(path) in reported.errors[0]


@pytest.mark.parametrize(
    "change",
    [
        {"devices": 5},
        {"devices": [{"id": "a"}]},
        {"devices": [{"id": "a", "kind": "gpu", "name": "n", "probe": "p", "new": 1}]},
        {"settings": [1]},
        {"settings": {"pue": "much"}},
        {"settings": {"from_the_future": 1}},
        {"unavailable": 3},
        {"pid": "x", "pid_started_s": None},
        {"boot_id": 4, "host": None},
    ],
    ids=str,
)
def test_a_writer_file_with_a_strange_entry_does_not_hide_the_run(
    run: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    path = file(run, "writer.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    reported = Reported(run, capsys)
    assert reported.code in (0, 1, 2)
    assert len(reported.errors) == (1 if reported.code else 0)


def test_a_missing_writer_file_costs_that_writer(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file(run, "writer.json").unlink()
    os.utime(run / "run.json", (1, 1))  # or its first writer may be yet to come
    reported = Reported(run, capsys)
    assert reported.code in (0, 1)
    assert len(reported.errors) == reported.code
    assert reported.steps == 0
    assert reported.document["status"] == "cut off"


def test_the_other_writers_of_a_run_with_a_damaged_one_are_reported(
    run: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(file(small, "writer.json").parent, run / "other")
    (run / "other" / "writer.json").write_bytes(b"")
    reported = Reported(run, capsys)
    assert (reported.code, len(reported.errors), reported.steps) == (1, 1, FEW)


def test_torn_and_foreign_marks_do_not_hide_the_others(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(run, "marks.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    garbage = [b"\xff\xfe garbage\n", b"[]\n", b"7\n", b'{"t_ns": null, "name": 1, "detail": 2}\n']
    path.write_bytes(b"".join([lines[0], *garbage, *lines[1:], b'{"t_ns": 1']))
    reported = Reported(run, capsys)
    assert reported.code == 1
    assert len(reported.errors) == len(garbage)
    assert all(str(path) in line for line in reported.errors)
    assert reported.document["torn_files"] == [f"{path}: line {len(lines) + 5} is not a mark"]
    assert reported.steps == FEW
    assert reported.document["status"] == "finished"


def test_a_last_mark_that_was_cut_off_is_a_killed_writers(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(run, "marks.jsonl")
    path.write_bytes(path.read_bytes()[:-9])
    reported = Reported(run, capsys)
    assert (reported.code, reported.steps) == (0, FEW)
    assert reported.document["status"] == "cut off"


def test_what_is_no_run_is_an_error_of_one_line(lab: Lab) -> None:
    (lab.path / "empty").mkdir()
    (lab.path / "file").write_bytes(JPEG)
    for path in ("empty", "file", "missing", "file/below", "."):
        done = lab.run(ERG, "report", path)
        assert (done.returncode, done.stdout) == (1, b""), path
        assert done.stderr.startswith(b"erg: ")
        assert len(done.stderr.splitlines()) == 1


def test_no_runs_at_all_is_an_error_of_one_line(lab: Lab) -> None:
    done = lab.run(ERG, "report")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1)


@pytest.mark.parametrize("arguments", [["--nosuch"], ["run", "--warmup-steps", "x"], ["a", "b"]])
def test_misuse_is_an_error_of_one_line(lab: Lab, arguments: list[str]) -> None:
    done = lab.run(ERG, "report", *arguments)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, b"", 1)


class Peak:
    """The most memory that each process of a recording had, but for the recorded command."""

    def __init__(self, pid: int) -> None:
        self.bytes: dict[int, int] = {}
        self._recorder = psutil.Process(pid)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def finish(self) -> int:
        self._done.set()
        self._thread.join()
        return max(self.bytes.values())

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            try:
                own = self._recorder.cmdline()
                for process in [self._recorder, *self._recorder.children()]:
                    if process.cmdline() == own:  # the relay is a fork
                        rss = process.memory_info().rss
                        self.bytes[process.pid] = max(rss, self.bytes.get(process.pid, 0))
            except psutil.Error:
                continue


def digest(stream: IO[bytes] | None) -> str:
    assert stream is not None
    found = hashlib.sha256()
    while data := stream.read(1 << 20):
        found.update(data)
    return found.hexdigest()


def test_nul_bytes_and_a_line_of_100_mb_pass_through_in_bounded_memory(lab: Lab) -> None:
    command = script("hostile", 100)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as without:
        expected = digest(without.stdout)
    recorder = lab.start_recording(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    peak = Peak(recorder.pid)
    assert digest(recorder.stdout) == expected
    _, err = recorder.communicate(timeout=TIMEOUT_S)
    assert (recorder.returncode, err) == (0, b"")
    assert peak.finish() < 250e6
    report = lab.report()
    # Ten before it, the first of which opens the window, and ten after it.
    assert report["readings"]["tokens.total"]["value"] == 19 * 16
    assert report["readings"]["steps.count"]["value"] == 19


def test_output_a_stopped_recorder_could_not_take_is_told_of_and_not_made_up(lab: Lab) -> None:
    command = script("burst")
    recorder = lab.start_recording(*command, stdout=subprocess.PIPE)
    eventually(lambda: read_up_to(lab) > 0, "the first steps")
    recorder.send_signal(signal.SIGSTOP)
    (lab.path / "stopped").touch()
    printed: list[str] = []
    reader = threading.Thread(target=lambda: printed.append(digest(recorder.stdout)))
    reader.start()
    eventually((lab.path / "printed").exists, "the output, which does not wait for the recorder")
    recorder.send_signal(signal.SIGCONT)
    # So that the relay has something to send after the gap, the recorder gets time to catch up.
    eventually(lambda: read_up_to(lab) > 1000, "the recorder reading again")
    (lab.path / "go").touch()
    assert recorder.wait(TIMEOUT_S) == 0
    reader.join(TIMEOUT_S)
    assert printed == [digest(lab.start(*command, stdout=subprocess.PIPE).stdout)]
    report = lab.report()
    assert [note for note in report["notes"] if "output came faster" in note]
    assert report["readings"]["tokens.per_step"]["value"] == 8
    assert read_up_to(lab) == 300_019


def read_up_to(lab: Lab) -> int:
    if not (lab.path / "run").exists():
        return -1
    return int(np.max(Run.open(lab.path / "run").steps("output")["index"], initial=-1))
