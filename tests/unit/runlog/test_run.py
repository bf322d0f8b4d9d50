"""What the run on disk promises: append-only, readable at any moment and by anyone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ergmeter.errors import FormatError, UsageError
from ergmeter.records import PHASES, Device, Mark, Reported, Sample, Step
from ergmeter.runlog import format as fmt
from ergmeter.runlog import writer as writer_module
from ergmeter.runlog.identity import new_run_path, redacted, writer_header
from ergmeter.runlog.reader import Run
from ergmeter.runlog.writer import Writer, create_run, to_parquet
from tests.runs import GPU, add_writer, even_steps, make_run, reading, reason, run_of

S = 10**9


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    steps = [
        Step(0, S, index=0, phase="train", tokens_computed=512, loss=2.5, rank=3),
        Step(S, 3 * S, index=1, phase="eval", samples=8, learning_rate=1e-5, rank=3),
    ]
    samples = [
        Sample(5, "GPU-0", power_w=300.25, energy_j=12345.678),
        Sample(7, "GPU-0", throttled=4),
    ]
    run = run_of(
        tmp_path / "run",
        steps=steps,
        samples=samples,
        devices=[GPU],
        marks=[Mark(9, "warmup_end", "now")],
        reported=[Reported(3, "mfu", 0.4, "frac")],
    )
    found = run.steps()
    assert found["end_ns"].tolist() == [S, 3 * S]
    assert [PHASES[int(code)] for code in found["phase"]] == ["train", "eval"]
    assert found["tokens_computed"][0] == 512
    assert np.isnan(found["tokens_computed"][1])
    assert found["rank"].tolist() == [3, 3]
    energy = run.series("energy_j")["GPU-0"]
    assert (energy.t_ns.tolist(), energy.values.tolist()) == ([5], [12345.678])
    assert run.series("throttled")["GPU-0"].values.tolist() == [4]
    assert run.series("temperature_c") == {}
    assert Mark(9, "warmup_end", "now") in run.marks
    assert run.reported() == [Reported(3, "mfu", 0.4, "frac")]
    assert run.devices["GPU-0"] == GPU


def test_a_run_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    writer = Writer(path, header=_header())
    for count in (1, 2, 3):
        writer.write("steps", even_steps(10))
        assert len(Run.open(path).steps()["start_ns"]) == 10 * count
    assert Run.open(path).status == "running"
    writer.close()


def _header() -> dict[str, object]:
    return {**writer_header("meter"), "settings": {}}


def test_a_header_is_replaced_whole_and_no_byte_is_translated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows a file is text unless told otherwise, and `rename` refuses an existing name."""
    binary, opened = 1 << 40, []  # a flag that this system does not have

    header = _header()

    def open_told(path: Path, flags: int, mode: int = 0o777) -> int:
        opened.append(flags & binary)
        return os_open(path, flags & ~binary, mode)

    os_open = os.open
    monkeypatch.setattr(writer_module, "_BINARY", binary)
    monkeypatch.setattr(os, "open", open_told)
    monkeypatch.setattr(Path, "rename", _as_on_windows)
    writer = Writer(make_run(tmp_path / "run"), header=header)
    writer.extend_header(devices=[GPU])
    writer.write("steps", even_steps(1))
    writer.close()
    assert writer.dropped_rows == 0
    assert opened == [binary, binary]
    assert list(Run.open(tmp_path / "run").devices) == [GPU.id]


def _as_on_windows(path: Path, target: Path) -> Path:
    if target.exists():
        raise FileExistsError(target)
    return path.replace(target)


def test_pandas_and_polars_read_the_live_file_without_our_code(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    writer = Writer(path, header=_header(), devices=[GPU])
    for t in range(3):
        writer.write("samples", [Sample(t, "GPU-0", power_w=100.0 + t)], stream="nvml")
    live = writer.directory / "samples-nvml-00000.arrows"
    with live.open("rb") as file:
        by_polars = pl.read_ipc_stream(file)
    assert by_polars["power_w"].to_list() == [100.0, 101.0, 102.0]
    assert by_polars["device"].cast(pl.String).to_list() == ["GPU-0"] * 3
    by_pandas = pa.ipc.open_stream(live.read_bytes()).read_pandas()
    assert by_pandas["power_w"].tolist() == [100.0, 101.0, 102.0]
    writer.close()
    marks = pd.read_json(writer.directory / fmt.MARKS_FILE, lines=True)
    assert marks.empty or "name" in marks


def test_a_full_segment_becomes_parquet_that_anyone_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fmt, "SEGMENT_ROWS", 100)
    monkeypatch.setattr(fmt, "SMALL_SEGMENT_BYTES", 0)
    path = make_run(tmp_path / "run")
    writer = Writer(path, header=_header())
    for start in range(0, 250, 50):
        writer.write(
            "steps", [Step(i, i + 1, index=i, loss=i / 2) for i in range(start, start + 50)]
        )
    files = sorted(p.name for p in writer.directory.iterdir() if p.name.startswith("steps"))
    assert files == ["steps-00000.parquet", "steps-00001.parquet", "steps-00002.arrows"]
    assert Run.open(path).steps()["index"].tolist() == list(range(250))
    first = pd.read_parquet(writer.directory / "steps-00000.parquet")
    assert first["loss"].tolist() == [i / 2 for i in range(100)]
    writer.close()
    assert Run.open(path).steps()["index"].tolist() == list(range(250))


def test_killed_between_parquet_and_stream_nothing_counts_twice(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    directory = add_writer(path, steps=even_steps(10))
    live = directory / "steps-00000.arrows"
    kept = live.read_bytes()
    to_parquet(live)
    live.write_bytes(kept)
    assert Run.open(path).count("steps") == 10


@settings(max_examples=60)
@given(cut=st.floats(0, 1))
def test_a_stream_cut_anywhere_keeps_its_whole_batches(
    tmp_path_factory: pytest.TempPathFactory, cut: float
) -> None:
    path = make_run(tmp_path_factory.mktemp("cut") / "run")
    writer = Writer(path, header=_header())
    for batch in range(5):
        writer.write("steps", [Step(batch * 10 + i, batch * 10 + i + 1) for i in range(10)])
    live = writer.directory / "steps-00000.arrows"
    whole = live.read_bytes()
    live.write_bytes(whole[: int(cut * len(whole))])
    run = Run.open(path)
    rows = run.count("steps")
    assert rows % 10 == 0
    assert run.steps()["start_ns"].tolist() == list(range(rows))
    assert not run.damage
    writer.close()


def test_a_cut_in_the_last_message_is_told(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    writer = Writer(path, header=_header())
    writer.write("steps", even_steps(10))
    writer.write("steps", even_steps(10))
    live = writer.directory / "steps-00000.arrows"
    live.write_bytes(live.read_bytes()[:-5])
    run = Run.open(path)
    assert run.count("steps") == 10
    assert "cut off after 10 rows" in run.torn[0]
    assert not run.damage


def test_a_foreign_file_is_named_and_the_rest_is_used(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    directory = add_writer(path, steps=even_steps(10))
    (directory / "samples-nvml-00000.arrows").write_bytes(b"\xff\xd8\xff\xe0 JFIF not ours" * 50)
    (directory / "samples-rapl-00000.parquet").write_bytes(b"PAR1 hello")
    run = Run.open(path)
    assert run.series("power_w") == {}
    assert run.count("steps") == 10
    assert len(run.damage) == 2
    assert "not a samples file" in run.damage[0]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("", "not JSON"),
        ('{"format": "ergm', "not JSON"),
        ("[1, 2]", "holds a list"),
        ('{"format": "other"}', "not a run of ergmeter's"),
        ('{"format": "ergmeter-run", "version": 99}', "upgrade ergmeter"),
        ('{"format": "ergmeter-run", "version": "x"}', "upgrade ergmeter"),
    ],
)
def test_a_header_that_is_not_ours_is_one_clear_error(
    tmp_path: Path, header: str, reason: str
) -> None:
    (tmp_path / fmt.RUN_FILE).write_text(header)
    with pytest.raises(FormatError, match=reason):
        Run.open(tmp_path)


def test_a_directory_that_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"it has no run\.json"):
        Run.open(tmp_path)
    with pytest.raises(FormatError, match="does not exist"):
        Run.open(tmp_path / "nothing")


def test_an_existing_directory_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        create_run(tmp_path, {})
    empty = tmp_path / "empty"
    empty.mkdir()
    assert create_run(empty, {}) == empty


def test_a_new_column_or_device_opens_a_new_segment(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    writer = Writer(path, header=_header(), devices=[GPU, Device("GPU-1", "gpu", "b", "nvml")])
    writer.write("samples", [Sample(1, "GPU-0", power_w=5.0)], stream="nvml")
    writer.write("samples", [Sample(2, "GPU-1", power_w=6.0)], stream="nvml")
    writer.write("samples", [Sample(3, "GPU-1", temperature_c=50.0)], stream="nvml")
    writer.close()
    run = Run.open(path)
    assert {d: s.values.tolist() for d, s in run.series("power_w").items()} == {
        "GPU-0": [5.0],
        "GPU-1": [6.0],
    }
    assert run.series("temperature_c")["GPU-1"].values.tolist() == [50.0]


def test_a_writer_that_died_is_cut_off_and_never_running(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    code = (
        "import sys; from pathlib import Path; from ergmeter.runlog.identity import writer_header;"
        "from ergmeter.runlog.writer import Writer; import os;"
        "Writer(Path(sys.argv[1]), header=writer_header('meter')); os._exit(9)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60)
    assert ended.returncode == 9
    assert len(Run.open(path).writers) == 1
    assert Run.open(path).status == "cut off"


def test_a_run_is_running_before_its_first_writer_is_there(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    assert Run.open(path).status == "running"
    long_ago = time.time() - 3600  # it was killed there
    os.utime(path / "run.json", (long_ago, long_ago))
    assert Run.open(path).status == "cut off"


def test_another_process_with_the_same_number_is_not_the_writer(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    add_writer(path, steps=even_steps(3), header={"pid_started_s": time.time() - 9e5}, closed=False)
    assert Run.open(path).status == "cut off"


def test_a_run_on_another_host_is_judged_by_its_files(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    directory = add_writer(path, steps=even_steps(3), header={"boot_id": "elsewhere"}, closed=False)
    assert Run.open(path).status == "running"
    long_ago = time.time() - 3600
    for file in directory.iterdir():
        os.utime(file, (long_ago, long_ago))
    assert Run.open(path).status == "cut off"


@pytest.mark.parametrize(
    ("given_words", "kept"),
    [
        (["train.py", "--api-key", "abc"], ["train.py", "--api-key", "***"]),
        (["train.py", "--hf_token=abc"], ["train.py", "--hf_token=***"]),
        (["train.py", "--tokens", "512"], ["train.py", "--tokens", "512"]),
    ],
)
def test_keys_on_the_command_line_are_not_stored(given_words: list[str], kept: list[str]) -> None:
    assert list(redacted(given_words)) == kept


def test_the_header_names_its_format_and_version(tmp_path: Path) -> None:
    header = json.loads((make_run(tmp_path / "run") / fmt.RUN_FILE).read_text())
    assert (header["format"], header["version"]) == ("ergmeter-run", fmt.VERSION)


def test_what_the_recorder_was_told_holds_against_the_code_inside(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    add_writer(path, settings={"warmup_steps": 5, "pue": 1.2})
    add_writer(path, settings={"warmup_s": 2.0}, stream="output")
    assert Run.open(path).settings == {"warmup_s": 2.0, "pue": 1.2}


def test_a_device_that_two_probes_read_has_the_facts_of_both(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    by_dcgm = Device(GPU.id, "gpu", "GPU", "dcgm", {"power_field": "draw", "counters": "dcgm"})
    add_writer(run, devices=[GPU, by_dcgm])
    (found,) = Run.open(run).devices.values()
    assert found.name == "Test GPU"
    assert found.facts == {"power_field": "instant", "counters": "dcgm"}


def test_a_column_of_one_number_is_kept_as_one_however_many_files_it_is_in(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank in range(2):
        rows = even_steps(6_000, seconds=0.001, tokens_computed=7, rank=rank)
        add_writer(run, steps=rows)
    found = Run.open(run).steps()
    assert found["tokens_computed"].strides == (0,)
    assert found["tokens_computed"].sum() == 12_000 * 7
    assert sorted(found["rank"].tolist()) == [0] * 6_000 + [1] * 6_000
    assert np.isnan(found["loss"]).all()


def test_a_run_of_no_name_in_particular_gets_a_directory_that_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four digits are soon drawn twice by somebody who makes a hundred runs a day."""
    drawn = iter(["aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr("ergmeter.runlog.identity.secrets.token_hex", lambda _: next(drawn))
    first = new_run_path("train", tmp_path)
    first.mkdir()
    assert new_run_path("train", tmp_path).name == first.name.replace("aaaa", "bbbb")


def test_steps_that_the_disk_refuses_are_told_of_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that is killed later has no end to tell of it at."""
    run = make_run(tmp_path / "run")
    writer = Writer(run, header={**writer_header("meter"), "settings": {}}, devices=[])
    writer.write("steps", even_steps(10, tokens_computed=7))

    def refuses(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(writer_module._Segment, "append", refuses)
        writer.write("steps", even_steps(5, tokens_computed=7))
    said = "5 steps (35 tokens) in 5.000 s were not recorded: the disk refused"
    assert said in reason(Run.open(run), "tokens.total")


def test_rows_that_are_there_are_not_lost_where_their_file_can_not_be_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    writer = Writer(run, header={**writer_header("meter"), "settings": {}}, devices=[])

    def refuses(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fmt, "SEGMENT_ROWS", 10)
    monkeypatch.setattr(Writer, "_roll", refuses)
    writer.write("steps", even_steps(10, tokens_computed=7))
    assert reading(Run.open(run), "tokens.total").value == 70


def test_columns_of_a_large_run_are_those_of_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read one by one and share how the rows were split, by gauges and by counters."""
    ids = ("GPU-0", "GPU-1")
    gauges = [Sample(10 * i + n, id_, power_w=100.0 * n + i, busy_frac=i / 100)
              for i in range(50) for n, id_ in enumerate(ids)]  # fmt: skip
    counters = [Sample(10 * i + 5, ids[0], energy_j=7.0 * i) for i in range(50)]
    run = make_run(tmp_path / "run")
    add_writer(run, samples=sorted(gauges + counters, key=lambda one: one.t_ns))
    columns = ("power_w", "energy_j", "busy_frac")
    small = {name: Run.open(run).series(name) for name in columns}
    monkeypatch.setattr("ergmeter.runlog.reader._SMALL_ROWS", 0)
    opened = Run.open(run)
    large = {name: opened.series(name) for name in columns}
    assert list(large["power_w"]) == list(ids)
    assert large["power_w"]["GPU-1"].values.tolist() == [100.0 + i for i in range(50)]
    assert large["busy_frac"]["GPU-1"].t_ns is large["power_w"]["GPU-1"].t_ns
    assert list(large["energy_j"]) == ["GPU-0"]
    for name in columns:
        for id_, series in large[name].items():
            assert series.t_ns.tolist() == small[name][id_].t_ns.tolist()
            assert series.values.tolist() == small[name][id_].values.tolist()
