"""Nothing of who and where is left in any file, and every figure is as it was."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ergmeter.errors import FormatError, UsageError
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Device, Mark, Missing, Result, Sample, Step
from ergmeter.runlog import format as fmt
from ergmeter.runlog.manage import anonymise as module
from ergmeter.runlog.manage import labels
from ergmeter.runlog.manage.anonymise import SecretWords, anonymise
from ergmeter.runlog.reader import CUT_OFF, Run
from tests.runs import add_writer, even_steps, make_run

S = 10**9
UUID = "5b1c7a52-93d1-4d2e-8f3a-0c9d1e2f3a4b"
BOOT = "75b0f286-6915-47c1-b4d3-fcc928f4ead6"
HOST = "atlas17.hpc.example.org"
GPU = Device(
    f"GPU-{UUID}", "gpu", "NVIDIA H200", "nvml",
    {"power_field": "instant", "serial": "1654923001234", "pci_bus_id": "00000000:3B:00.0"},
)  # fmt: skip
NODE = Device(f"node:{HOST}", "node", HOST, "node", {"host": HOST, "disk_path": "/home/mallory/x"})
SECRETS = (
    *(UUID, BOOT, HOST, "atlas17", "hpc.example.org", "mallory", "/home/", "secret-project"),
    *("1654923001234", "3B:00.0", "10.1.2.3", "mallory@example.org", "424242", "hush"),
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with names everywhere a name can be, one of its tables as Parquet."""
    monkeypatch.setattr(fmt, "SMALL_SEGMENT_BYTES", 3000)
    path = make_run(tmp_path / "run", "train")
    header = json.loads((path / "run.json").read_text())
    header |= {
        "command": ["python", "/home/mallory/secret-project/train.py", "--data=secret-project"],
        "directory": "/home/mallory/secret-project",
        "job": {"SLURM_JOB_ID": "424242"},
    }
    (path / "run.json").write_text(json.dumps(header))
    samples = [
        *(Sample(k * S // 10, GPU.id, power_w=250.0, memory_bytes=10**9) for k in range(600)),
        *(Sample(k * S, NODE.id, busy_frac=0.5) for k in range(60)),
    ]
    marks = [
        Mark(
            S, "sink_failed", "csv: /home/mallory/figures.csv: no space; mail mallory@example.org"
        ),
        Mark(2 * S, "note", f"GPU-{UUID} on {HOST} (10.1.2.3) by mallory"),
    ]
    add_writer(
        path,
        steps=even_steps(50, tokens_computed=100, loss=2.0),
        samples=samples,
        devices=[GPU, NODE],
        marks=marks,
        settings={"note": "hush", "warmup_steps": 2},
        unavailable={"rapl": "/sys/class/powercap does not exist", "x": "no /home/mallory/lib.so"},
        header={"writer": f"{HOST}-415-56bc", "host": HOST, "boot_id": BOOT},
    )
    labels.annotate(path, "hush")
    (path / "figures.csv").write_text("mallory")
    assert list(path.rglob("*.parquet"))
    return path


def numbers(found: Result) -> object:
    if isinstance(found, Missing):
        return "missing"
    return found.value, found.low, found.high, found.unit, found.basis


def test_every_figure_is_as_it_was(run: Path, tmp_path: Path) -> None:
    copy = anonymise(run, tmp_path / "copy")
    before, after = summarize(Run.open(run)), summarize(Run.open(copy))
    assert {k: numbers(r) for k, r in after.readings.items()} == {
        k: numbers(r) for k, r in before.readings.items()
    }
    assert numbers(after.readings["energy.joules_per_token"])[0] == pytest.approx(2.5)  # type: ignore[index]
    assert [{k: numbers(r) for k, r in one.items()} for one in after.devices.values()] == [
        {k: numbers(r) for k, r in one.items()} for one in before.devices.values()
    ]
    assert after.status == before.status == "finished"


def everything_in(run: Path) -> str:
    """All bytes of all files and their names; of tables also what is compressed in them."""
    said = []
    for path in sorted(run.rglob("*")):
        said.append(str(path.relative_to(run)))
        if path.is_file():
            said.append(path.read_bytes().decode("latin-1"))
        if path.suffix == ".parquet":
            file = pq.ParquetFile(path)
            said += [str(file.metadata), str(file.schema_arrow), str(file.read().to_pylist())]
        elif path.suffix == ".arrows":
            table = pa.ipc.open_stream(path.read_bytes()).read_all()
            said += [str(table.schema), str(table.to_pylist())]
    return "\n".join(said)


def test_no_name_is_left_in_any_file(run: Path, tmp_path: Path) -> None:
    before = everything_in(run)
    assert [one for one in SECRETS if one not in before] == []  # the test can fail
    after = everything_in(anonymise(run, tmp_path / "copy"))
    assert [one for one in SECRETS if one in after] == []


def test_what_was_one_thing_is_still_one(run: Path, tmp_path: Path) -> None:
    copy = Run.open(anonymise(run, tmp_path / "copy", name="example"))
    (gpu,) = [d for d in copy.devices.values() if d.kind == "gpu"]
    assert gpu.name == "NVIDIA H200"
    assert set(copy.series("power_w")) == {gpu.id}
    assert copy.name == "example"
    assert copy.unavailable["rapl"] == "/sys/class/powercap does not exist"
    (mark,) = [m for m in copy.marks if m.name == "note"]
    assert gpu.id in mark.detail


def test_a_device_that_goes_by_a_path_is_the_same_in_header_and_table(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    disk = Device("/data/of alice", "module", "x", "other")
    add_writer(run, devices=[disk], samples=[Sample(S, disk.id, power_w=5.0)])
    copy = Run.open(anonymise(run, tmp_path / "copy"))
    assert list(copy.devices) == list(copy.series("power_w")) == ["path"]


def test_a_host_whose_name_is_in_other_words_leaves_those_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    gpu = Device("GPU-0", "gpu", "Test", "nvml", {"driver": "nvml 1"})
    add_writer(
        run,
        devices=[gpu],
        header={"host": "vm", "writer": "vm-1-ab"},
        samples=[Sample(S, "GPU-0", power_w=1.0)],
        marks=[Mark(S, "x", "nvml on vm: failed")],
    )
    copy = Run.open(anonymise(run, tmp_path / "copy"))
    assert copy.devices["GPU-0"].probe == "nvml"
    assert [m.detail for m in copy.marks if m.name == "x"] == ["nvml on host-1: failed"]


def test_a_run_that_was_cut_off_is_so_in_its_copy(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    directory = add_writer(run, steps=even_steps(9), closed=False, header={"pid": 2**22 + 1})
    (part,) = directory.glob("steps*")
    os.truncate(part, part.stat().st_size - 7)
    for path in [*directory.iterdir(), run / "run.json"]:
        os.utime(path, (1.7e9, 1.7e9))
    assert Run.open(anonymise(run, tmp_path / "copy")).status == CUT_OFF


def test_what_could_not_be_made_anonymous_does_not_appear(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_renamed", lambda chunk, _words: chunk)
    with pytest.raises(FormatError, match="still holds"):
        anonymise(run, tmp_path / "copy")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_a_run_that_is_written_is_not_copied(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_writer(run, steps=[Step(0, S)], closed=False)
    with pytest.raises(UsageError, match="is being written"):
        anonymise(run, tmp_path / "copy")


def test_words_of_ours_stay_where_a_host_or_a_directory_is_called_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    header = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**header, "directory": "/scratch/train/x"}))
    add_writer(
        run,
        steps=[*even_steps(5, tokens_computed=100), Step(6 * S, 7 * S, phase="eval")],
        samples=[Sample(k * S // 10, GPU.id, power_w=250.0) for k in range(60)],
        devices=[GPU],
        marks=[Mark(S, "x", "lost GPU at /home/eval/y")],
        header={"host": "gpu", "writer": "gpu-1-ab"},
    )
    copy = anonymise(run, tmp_path / "copy")
    before, after = summarize(Run.open(run)), summarize(Run.open(copy))
    assert numbers(after.readings["steps.count"])[0] == 5.0  # type: ignore[index]
    assert {k: numbers(r) for k, r in after.readings.items()} == {
        k: numbers(r) for k, r in before.readings.items()
    }
    ((device,),) = [list(Run.open(copy).devices.values())]
    assert (device.kind, device.name) == ("gpu", "NVIDIA H200")
    assert [p.name for p in copy.iterdir() if p.is_dir()] == ["host-1-1-ab"]


def test_a_host_called_as_a_chip_does_not_rename_the_chip(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_writer(run, devices=[GPU], header={"host": "h200", "writer": "h200-1-ab"})
    copy = Run.open(anonymise(run, tmp_path / "copy"))
    assert [d.name for d in copy.devices.values()] == ["NVIDIA H200"]


def test_a_copy_with_other_rows_does_not_appear(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = module._write_table

    def half(source: Path, target: Path, words: SecretWords) -> None:
        if not source.name.startswith("steps"):
            write(source, target, words)

    monkeypatch.setattr(module, "_write_table", half)
    with pytest.raises(FormatError, match="the rows of its copy differ"):
        anonymise(run, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("see https://wandb.example.org/mallory/x?y=1 now", "see address now"),
        ("s3://secret-bucket/key missing", "address missing"),
        ("from fe80::1ff:fe23:4567:890a at 12:34:56", "from address at 12:34:56"),
        ("2001:0db8:0000:0000:0000:ff00:0042:8329", "address"),
        ("::1 refused", "address refused"),
        ("10.0.0.5, not 255.1.20.199", "address, not address"),
        ("nvml 13.580.159.04", "nvml 13.580.159.04"),  # a version: a byte is 255 at most
        ("card aa:bb:cc:0D:ee:ff", "card address"),
        ("ip-10-0-0-5.ec2.internal is down", "address is down"),
        ("ATLAS17 is down", "host-1 is down"),
        ("c10::Error in std::vector", "c10::Error in std::vector"),
        ("torch 2.9.1, 3 of 8; tokens/s", "torch 2.9.1, 3 of 8; tokens/s"),
        ("from bob@srv:/data/x", "from address:path"),
        ("ab+c.d@example.org, see.http://x.y/z", "address, address"),
    ],
)
def test_addresses_of_every_kind_are_replaced(tmp_path: Path, said: str, left: str) -> None:
    assert marked(tmp_path, said) == left


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("no /sys/class/powercap/intel-rapl:0 here", "no /sys/class/powercap/intel-rapl:0 here"),
        ("access to /dev/nvidia*, or /dev/kfd", "access to /dev/nvidia*, or /dev/kfd"),
        ("/proc/cpuinfo names none", "/proc/cpuinfo names none"),
        ("/dev/shm/alice-secret/ckpt.pt: full", "path: full"),
        ("/proc/1/cwd/alice: gone", "path: gone"),
        ("/sys/fs/cgroup/user.slice/alice", "path"),
        ("/dev/nvidia-caps-of-alice.txt", "path"),
        ("lost /home/bob/My Project/acme merger.txt, twice", "lost path, twice"),
        ("lost /home/bob/My Big Project/acme", "lost path"),
        ("/data/a,clientname/x is full (97 %)", "path is full (97 %)"),
        ("/data/Acme, Inc/x: full", "path: full"),
        ("/data/bob's stuff/x: full", "path: full"),
        ("No such file: '/data/bob's Acme (new): x; y' (2)", "No such file: 'path' (2)"),
        ('"/a/The Acme" or "/b/Their Acme"', '"path" or "path"'),
        ("(see /data/x/train.py:12)", "(see path)"),
        ("it was /data/x. Then 5 tokens fell", "it was path. Then 5 tokens fell"),
        (r"on \\srv\alice\My Data\x: full", "on path: full"),
        (r"C:\Users\acme\x.csv: full", "path: full"),
        ("D:/acme/x.csv: full", "path: full"),
        ("~carol/x and ~5 GB", "path and ~5 GB"),
        ("12/16 tokens/s, and/or 3 / 4", "12/16 tokens/s, and/or 3 / 4"),
    ],
)
def test_a_path_is_replaced_to_its_end_and_what_all_have_is_not(
    tmp_path: Path, said: str, left: str
) -> None:
    assert marked(tmp_path, said) == left


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("/data/The Acme merger: part two", "path"),
        ("./Acme x", "path"),
        (r"\\srv\alice share", "path"),
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
    ],
)
def test_a_value_that_begins_with_a_path_is_one_as_a_whole(
    tmp_path: Path, given: str, left: str
) -> None:
    run = make_run(tmp_path / "run")
    told = {"model": given, "git_commit": "0123456789ab+", "data_sha256": "00ff" * 4}
    add_writer(run, header={"workload": told})
    copy = Run.open(anonymise(run, tmp_path / "copy"))
    assert copy.workload == {**told, "model": left}


@pytest.mark.parametrize(
    ("directory", "user"),
    [("/home/jürgen/x", "jürgen"), (r"C:\Users\bob\x", "bob"), ("/Users/李雷/x", "李雷")],
)
def test_a_user_is_known_by_any_home(tmp_path: Path, directory: str, user: str) -> None:
    run = make_run(tmp_path / "run")
    header = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**header, "directory": directory}))
    add_writer(run, marks=[Mark(S, "x", f"asked by {user}.")])
    marks = Run.open(anonymise(run, tmp_path / "copy")).marks
    assert [m.detail for m in marks if m.name == "x"] == ["asked by user-1."]


def test_a_name_is_found_in_json_that_writes_its_letters_as_numbers(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"asked by": "Jürgen"}))
    assert "ü" not in (tmp_path / "run.json").read_text()
    found = list(module.leaks(tmp_path, {"jürgen": "user-1"}))
    assert found == ["run.json still holds 'Jürgen'"]


def marked(tmp_path: Path, said: str) -> str:
    """What becomes of a mark, on a host `atlas17` that another mark names."""
    run = make_run(tmp_path / "run")
    add_writer(
        run,
        marks=[Mark(S, "x", said), Mark(2 * S, "on atlas17", "y")],
        header={"host": "atlas17", "writer": "atlas17-1-ab"},
    )
    marks = Run.open(anonymise(run, tmp_path / "copy")).marks
    assert [m.name for m in marks if m.detail == "y"] == ["on host-1"]
    (found,) = (m.detail for m in marks if m.name == "x")
    return found
