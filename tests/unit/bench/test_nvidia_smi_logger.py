"""A process of `nvidia-smi` beside a cell: a scripted one on the PATH, and real runners."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ergmeter.bench import results
from ergmeter.bench.execute import nvidia_smi_logger, state
from ergmeter.bench.plan.cells import Cell
from ergmeter.bench.tables import BYTES_PER_MIB
from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.records import Sample
from tests.runs import GPU, add_writer, even_steps, make_run

WAIT_S = 60.0
GB = 10**9
# As the real one prints: a header with units, a line a device, and its refusal of a keyword. What
# devices hold is in a file, so that a cell can take and give back.
SCRIPT = """#!{python}
import os, sys, time
here = os.environ["SCRIPTED_SMI"]
given = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[1:])
open(os.path.join(here, "pid"), "w").write(str(os.getpid()))
open(os.path.join(here, "words"), "w").write(" ".join(sys.argv[1:]))
units = {{"memory.used": " [MiB]", "power.draw": " [W]", "utilization.gpu": " [%]"}}
known = ("timestamp", "name", "index", "uuid", *units)
names = given["query-gpu"].split(",")
for name in names:
    if name not in known:
        print(f'Field "{{name}}" is not a valid field to query.\\n')
        sys.exit(2)
pause_s = float(given["loop"]) if "loop" in given else int(given["loop-ms"]) / 1000
slow_s = 0.7 if os.path.exists(os.path.join(here, "slow")) else 0.0  # of the first reading
print(", ".join(name + units.get(name, "") for name in names), flush=True)
while not os.path.exists(os.path.join(here, "dies")):
    held = [line.split() for line in open(os.path.join(here, "held"))]
    for index, used in held:
        if "id" in given and index not in given["id"].split(","):
            continue
        stamp = time.strftime("%Y/%m/%d %H:%M:%S.000")
        cells = {{"timestamp": stamp, "name": "NVIDIA A100-SXM4-80GB",
                 "index": index, "uuid": "GPU-" + index, "memory.used": used + " MiB",
                 "power.draw": "61.05 W", "utilization.gpu": "7 %"}}
        time.sleep(slow_s)
        print(", ".join(cells[name] for name in names), flush=True)
    slow_s = 0.0
    time.sleep(pause_s)
sys.exit(3)
"""
# Takes 1000 MiB of the first and 400 of the second, until that has been read, and gives it back.
TAKES = """
import os, pathlib, sys, time
here, log = pathlib.Path(os.environ["SCRIPTED_SMI"]), pathlib.Path(sys.argv[2])
before = log.read_text() if log.exists() else "no log"
(here / "before").write_text(before)
part = here / "part"
part.write_text("0 1004\\n1 504\\n")
part.replace(here / "held")
while log.exists() and "504 MiB" not in log.read_text():
    time.sleep(0.01)
"""
SLEEPS = "import time; time.sleep(600)"


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that says what the devices hold: 4 MiB and 104 MiB at first."""
    here, programs = tmp_path / "scripted", tmp_path / "bin"
    for folder in (here, programs):
        folder.mkdir()
    (here / "held").write_text("0 4\n1 104\n")
    (programs / "nvidia-smi").write_text(SCRIPT.format(python=sys.executable))
    (programs / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SCRIPTED_SMI", str(here))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield here
    process = pid_of(here)
    if process is not None:
        process.kill()


def pid_of(scripted: Path) -> psutil.Process | None:
    """The scripted nvidia-smi, if it runs."""
    try:
        process = psutil.Process(int((scripted / "pid").read_text()))
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None
    return process if process.status() != psutil.STATUS_ZOMBIE else None


def eventually(condition: Callable[[], object], what: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s, f"waited in vain: {what}"
        time.sleep(0.01)


def made(tmp_path: Path, code: str, query: nvidia_smi_logger.Query | None, **more: Any) -> Path:
    """The directory of a cell that has not run."""
    directory = tmp_path / "results" / "exp_0"
    directory.mkdir(parents=True)
    words = ("{python}", "-c", code, "{run}", "{out}/" + state.SMI_LOG)
    cell = Cell(0, "id0", "s", {}, num_gpus=2, repeat=1, command=words, **more)
    (directory / state.CELL).write_text(json.dumps(cell.to_json()))
    if query is not None:
        nvidia_smi_logger.ask(directory.parent, query)
    return directory


def runner(directory: Path) -> subprocess.Popen[bytes]:
    with (directory / "runner.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ergmeter.bench.execute.runner", str(directory)],
            stdout=log,
            stderr=log,
        )


def ran(tmp_path: Path, code: str, query: nvidia_smi_logger.Query | None, **more: Any) -> Path:
    directory = made(tmp_path, code, query, **more)
    assert runner(directory).wait(WAIT_S) == 0
    return directory


OFTEN = nvidia_smi_logger.Query(interval_s=0.02)


def test_each_device_counts_from_what_it_held_before_the_cell(
    tmp_path: Path, scripted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scripted / "slow").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    directory = ran(tmp_path, TAKES, OFTEN)
    row = results.collect(directory)
    assert row["status"] == "ok", row["reason"]
    # 1004 - 4 and 504 - 104; FMS's figure is their mean.
    assert [one / BYTES_PER_MIB for one in row["memory_nvidia_devices_bytes"]] == [1000, 400]
    assert [one / BYTES_PER_MIB for one in row["memory_nvidia_first_bytes"]] == [4, 104]
    assert row["memory_nvidia_mean_bytes"] / BYTES_PER_MIB == 700
    assert row["memory_nvidia_peak_bytes"] / BYTES_PER_MIB == 1000
    assert (row["memory_nvidia_ids"], row["memory_nvidia_from"]) == ("0 1", "nvidia-smi")
    header, *readings = (scripted / "before").read_text().splitlines()
    assert header == "timestamp, name, index, memory.used [MiB]"
    assert len(readings) >= 2, "the cell began before each device was read"
    assert pid_of(scripted) is None


def test_asked_for_plainly_it_is_the_command_that_fms_starts(
    tmp_path: Path, scripted: Path
) -> None:
    ran(tmp_path, "print()", nvidia_smi_logger.Query())
    said = (scripted / "words").read_text()
    assert said == "--query-gpu=timestamp,name,index,memory.used --format=csv --loop=1"


def test_any_keywords_and_any_interval_are_logged(tmp_path: Path, scripted: Path) -> None:
    query = nvidia_smi_logger.Query(
        nvidia_smi_logger.parsed("uuid, power.draw utilization.gpu"), 0.25
    )
    directory = ran(tmp_path, "print()", query)
    words = (scripted / "words").read_text().split()
    assert words[0] == "--query-gpu=uuid,power.draw,utilization.gpu,index,memory.used"
    assert words[-1] == "--loop-ms=250"
    assert "61.05 W" in (directory / state.SMI_LOG).read_text()
    assert results.collect(directory)["memory_nvidia_ids"] == "GPU-0 GPU-1"


def test_only_the_cells_own_devices_are_logged(
    tmp_path: Path, scripted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    directory = ran(tmp_path, TAKES, OFTEN)
    row = results.collect(directory)
    assert row["memory_nvidia_ids"] == "1"
    assert row["memory_nvidia_devices_bytes"] == [400 * BYTES_PER_MIB]
    assert "--id=1" in (scripted / "words").read_text().split()


def test_where_it_is_not_asked_for_there_is_no_log(tmp_path: Path, scripted: Path) -> None:
    directory = ran(tmp_path, "print()", None)
    assert not list(directory.glob("gpu_memory_logs*"))
    assert not (scripted / "pid").exists()


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(
    "text", ['{"keywords": ["ind', "[]", "{}", '{"keywords": ["a b"], "interval_s": 1}']
)
def test_a_damaged_request_is_named_and_the_cell_runs(tmp_path: Path, text: str) -> None:
    directory = made(tmp_path, "print()", None)
    request = directory.parent / nvidia_smi_logger.ASKED
    request.write_text(text)
    assert runner(directory).wait(WAIT_S) == 0
    row = results.collect(directory)
    assert row["status"] == "ok"
    why = json.loads(row["missing"])["memory_nvidia_peak_bytes"]
    assert why.startswith(f"{request} is damaged (")
    assert why.endswith("): give --memory again")
    assert why in (directory / "runner.log").read_text()


@pytest.mark.parametrize(
    ("code", "limit_s", "status"),
    [("raise SystemExit(1)", None, "error"), (SLEEPS, 1.0, "timeout")],
)
def test_it_ends_with_a_cell_that_fails_or_is_late(
    tmp_path: Path, scripted: Path, code: str, limit_s: float | None, status: str
) -> None:
    directory = ran(tmp_path, code, OFTEN, timeout_s=limit_s)
    assert state.read(directory).status == status
    assert (scripted / "pid").exists()
    assert pid_of(scripted) is None


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGKILL], ids=["cancelled", "its runner killed"]
)
def test_it_does_not_outlive_the_runner(
    tmp_path: Path, scripted: Path, number: signal.Signals
) -> None:
    directory = made(tmp_path, SLEEPS, OFTEN)
    process = runner(directory)
    eventually(lambda: state.read(directory).child, "the cell has begun")
    child = state.read(directory).child
    assert child is not None
    assert pid_of(scripted) is not None
    process.send_signal(number)
    process.wait(WAIT_S)
    eventually(lambda: pid_of(scripted) is None, "nvidia-smi is gone")
    if number == signal.SIGKILL:  # the cell's own process is the next runner's to end
        os.killpg(child.pid, signal.SIGKILL)


def test_a_signal_while_its_first_reading_is_awaited_ends_it(
    tmp_path: Path, scripted: Path
) -> None:
    (scripted / "held").write_text("")  # it will never read anything
    directory = made(tmp_path, SLEEPS, OFTEN)
    process = runner(directory)
    eventually(lambda: pid_of(scripted), "nvidia-smi has begun")
    process.terminate()
    process.wait(WAIT_S)
    eventually(lambda: pid_of(scripted) is None, "nvidia-smi is gone")
    assert state.read(directory).status == "cancelled"


def test_without_it_the_cell_runs_and_its_columns_say_why_they_are_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    directory = ran(tmp_path, "print()", nvidia_smi_logger.Query())
    row = results.collect(directory)
    why = "nvidia-smi is not on this machine's PATH"
    assert row["status"] == "ok"
    assert row.get("memory_nvidia_mean_bytes") is None
    missing = json.loads(row["missing"])
    columns = ("mean_bytes", "peak_bytes", "devices_bytes", "first_bytes", "ids")
    assert {missing[f"memory_nvidia_{name}"] for name in columns} == {why}
    said = (directory / "runner.log").read_text().splitlines()
    assert said == [f"exp_0: no log of nvidia-smi: {why}; the cell still runs"]


@pytest.mark.usefixtures("scripted")
def test_a_keyword_that_it_does_not_know_is_the_reason(tmp_path: Path) -> None:
    directory = ran(tmp_path, "print()", nvidia_smi_logger.Query(("memory.usd",)))
    row = results.collect(directory)
    assert row["status"] == "ok"
    why = json.loads(row["missing"])["memory_nvidia_mean_bytes"]
    assert why == 'nvidia-smi ended at once: Field "memory.usd" is not a valid field to query.'


def test_a_log_that_breaks_off_is_not_taken_for_the_cells_peak(
    tmp_path: Path, scripted: Path
) -> None:
    code = f"""
import pathlib, psutil, time
here = pathlib.Path({str(scripted)!r})
reading = psutil.Process(int((here / "pid").read_text()))
(here / "dies").touch()
try:
    while reading.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
except psutil.NoSuchProcess:
    pass
"""
    directory = ran(tmp_path, code, OFTEN)
    row = results.collect(directory)
    why = json.loads(row["missing"])["memory_nvidia_peak_bytes"]
    assert why.startswith("nvidia-smi ended with exit code 3 before the cell did")
    assert row.get("memory_nvidia_peak_bytes") is None


def test_nvml_stands_in_for_a_log_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    directory = ran(tmp_path, "print()", nvidia_smi_logger.Query())
    held = [
        Sample(n * 10**9, GPU.id, memory_bytes=of) for n, of in enumerate((5 * GB, 9 * GB, 7 * GB))
    ]
    run = make_run(directory / "run")
    add_writer(run, devices=[GPU], samples=held, steps=even_steps(3))
    row = results.collect(directory)
    assert row["memory_nvidia_devices_bytes"] == [4 * GB]
    assert row["memory_nvidia_first_bytes"] == [5 * GB]
    assert row["memory_nvidia_from"] == "nvml"
    assert "nvidia-smi is not on this" in row["memory_nvidia_note"]


@pytest.mark.usefixtures("scripted")
def test_a_log_goes_before_what_a_probe_in_the_cell_read(tmp_path: Path) -> None:
    directory = ran(tmp_path, TAKES, OFTEN)
    held = [Sample(n * 10**9, GPU.id, memory_bytes=9 * GB) for n in range(3)]
    add_writer(make_run(directory / "run"), devices=[GPU], samples=held, steps=even_steps(3))
    row = results.collect(directory)
    assert row["memory_nvidia_from"] == "nvidia-smi"
    assert row["memory_nvidia_devices_bytes"] == [1000 * BYTES_PER_MIB, 400 * BYTES_PER_MIB]


def test_logs_of_several_nodes_are_told_apart(tmp_path: Path) -> None:
    directory = made(tmp_path, "print()", None, nodes=2)
    (directory / state.STATUS).write_text(json.dumps({"status": "ok", "attempts": [{}]}))
    for node, most in enumerate((3, 6)):
        text = f"index, memory.used [MiB]\n0, 1 MiB\n0, {most} MiB\n"
        (directory / f"gpu_memory_logs.node{node}.csv").write_text(text)
    row = results.collect(directory)
    assert row["memory_nvidia_ids"] == "node0/0 node1/0"
    assert row["memory_nvidia_devices_bytes"] == [2 * BYTES_PER_MIB, 5 * BYTES_PER_MIB]
    (directory / "gpu_memory_logs.node1.json").write_text(json.dumps({"problem": "it is gone"}))
    assert json.loads(results.collect(directory)["missing"])["memory_nvidia_ids"] == "it is gone"


def test_a_node_without_a_log_leaves_no_peak_of_the_others(tmp_path: Path) -> None:
    directory = made(tmp_path, "print()", None, nodes=2)
    (directory / state.STATUS).write_text(json.dumps({"status": "ok", "attempts": [{}]}))
    text = "index, memory.used [MiB]\n0, 1 MiB\n0, 3 MiB\n"
    (directory / "gpu_memory_logs.node0.csv").write_text(text)
    row = results.collect(directory)
    assert row.get("memory_nvidia_peak_bytes") is None
    why = json.loads(row["missing"])["memory_nvidia_peak_bytes"]
    assert why == "1 of 2 nodes left a log of nvidia-smi, so the peak may be on a node without one"
    # The log of the other comes late: the row that was kept is made anew.
    (directory / "gpu_memory_logs.node1.csv").write_text(text)
    assert results.collect(directory)["memory_nvidia_peak_bytes"] == 2 * BYTES_PER_MIB


def test_a_cell_that_is_shown_all_devices_waits_for_a_reading_of_each(
    tmp_path: Path, scripted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scripted / "slow").touch()  # 0.7 s between the lines of the first reading
    monkeypatch.setattr(
        nvidia_smi_logger, "_all_gpus", lambda: [("GPU-0", "A100"), ("GPU-1", "A100")]
    )
    directory = made(tmp_path, "print()", OFTEN)
    around = {name: one for name, one in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    with nvidia_smi_logger.logged(directory, environment=around):
        said = (directory / state.SMI_LOG).read_text()
    # On a busy machine a second reading may be there already.
    assert {line.split(", ")[2] for line in said.splitlines()[1:]} == {"0", "1"}, said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"keywords": ("memory.used; rm",)}, "nvidia-smi has no keyword"),
        ({"interval_s": 0.0}, "0.001 to 86400 s; got 0"),
    ],
)
def test_what_it_can_not_be_asked_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        nvidia_smi_logger.Query(**given)


ALIKE = [("GPU-a", "A100"), ("GPU-b", "A100")]
DIFFERENT = [("GPU-a", "T4"), ("GPU-b", "A100")]


@pytest.mark.parametrize(
    ("variables", "gpus", "named"),
    [
        ({}, ALIKE, ""),
        ({"CUDA_VISIBLE_DEVICES": "1, 0"}, ALIKE, "1,0"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b"}, DIFFERENT, "GPU-b"),
        ({"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, DIFFERENT, "0"),
    ],
)
def test_devices_are_named_so_that_both_mean_the_same(
    variables: dict[str, str], gpus: list[tuple[str, str]], named: str
) -> None:
    assert nvidia_smi_logger.devices(variables, gpus) == named


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        # Number 0 is the T4 on the bus and the A100 to CUDA, which knows neither of these two.
        ({"CUDA_VISIBLE_DEVICES": "0"}, "CUDA may number the GPUs here differently"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "shows the cell no GPU"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "shows the cell no GPU"),
    ],
)
def test_where_it_is_not_known_which_devices_a_cell_has_none_is_logged(
    variables: dict[str, str], why: str
) -> None:
    with pytest.raises(NotMeasurable, match=why):
        nvidia_smi_logger.devices(variables, DIFFERENT)
