"""Cells on several nodes: real runners, members and torchruns, all on this machine.

What differs on two machines, their names and addresses, is told by what the first one lists.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

from ergmeter.atomic_write import write_json
from ergmeter.bench.execute import launching, node_worker, state
from ergmeter.bench.execute.launching import LaunchOptions, NodeOfCell
from ergmeter.bench.execute.process import Cancelled
from ergmeter.bench.launchers.local import LocalLauncher
from ergmeter.bench.plan.cells import Cell
from ergmeter.errors import UsageError
from tests.e2e.conftest import environment, quick

pytestmark = pytest.mark.cluster

WAIT_S = 90.0
Begin: TypeAlias = "Callable[..., Launch]"
# Every rank says who it is, then does what its number is told to.
PROGRAM = """
import os, sys, time
from pathlib import Path
rank = os.environ["RANK"]
who = f"rank {rank} of {os.environ['WORLD_SIZE']} node {os.environ['GROUP_RANK']}"
os.write(1, f"{who} pid {os.getpid()}\\n".encode())  # in one write: ranks share a pipe
todo = dict(part.split("=") for part in sys.argv[1].split(",")).get(rank, "end")
if todo == "raise":
    raise ValueError(f"batch {rank} is bad")
if todo == "lose":
    time.sleep(2)
    raise ConnectionResetError("by peer")
if todo == "cut":
    raise ConnectionResetError("by peer")
if todo in ("oom", "late"):
    time.sleep(2 if todo == "late" else 0)
    raise MemoryError("no room")
if todo == "sleep":
    time.sleep(600)
"""


def cell(todo: str, **more: Any) -> Cell:
    settings = {"todo": todo}
    command = ("{python}", "-c", PROGRAM, todo, "{run}")
    made = Cell(
        index=0, id="", scenario="s", settings=settings, num_gpus=more.pop("num_gpus", 1), repeat=1,
        command=command, **{"nodes": 2, "launch": "torchrun", **more},
    )  # fmt: skip
    return dataclasses.replace(made, id=made.digest(1))


class Launch:
    """A cell whose nodes are all here: a runner, and a member for each other node."""

    def __init__(self, folder: Path, one: Cell, *, token: str = "t1", spoilt: str = "") -> None:
        """`spoilt`: a file that can't be written."""
        self.folder = folder
        folder.mkdir(exist_ok=True)
        if spoilt:
            (folder / spoilt).mkdir()
        write_json(folder / state.CELL, one.to_json())
        self.processes = [
            subprocess.Popen(
                launching.runner_words(str(folder), number=number, nodes=one.nodes, token=token),
                env=environment(**quick()),
            )
            for number in reversed(range(one.nodes))
        ][::-1]

    def wait(self) -> None:
        for process in self.processes:
            assert process.wait(WAIT_S) in (0, -signal.SIGKILL)

    def status(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "status.json").read_text()))

    def said(self, node: int, name: str = "stdout") -> str:
        path = self.folder / f"{name}.node{node}"
        return path.read_text() if path.exists() else ""

    def at_work(self, *before: int) -> list[int]:
        """The processes of the two ranks, once both have said who they are; not those of an attempt
        before, whose output lies there until it is put aside."""

        def pids() -> list[int]:
            lines = [self.said(node).split() for node in (0, 1)]
            return [int(words[-1]) for words in lines if words[-2:-1] == ["pid"]]

        eventually(lambda: len(set(pids()) - {*before}) == 2)
        eventually(lambda: self.status()["child"] is not None)
        return pids()

    def left(self) -> list[int]:
        """Processes that were told to write here."""
        return [one.pid for one in psutil.process_iter(["cmdline", "status"])
                if one.info["status"] != psutil.STATUS_ZOMBIE
                and str(self.folder) in " ".join(one.info["cmdline"] or ())]  # fmt: skip

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for pid in self.left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """Launches in one directory; what they leave is gone afterwards."""
    made: list[Launch] = []

    def launch(one: Cell, **more: str) -> Launch:
        made.append(Launch(tmp_path / "exp_0", one, **more))
        return made[-1]

    yield launch
    for one in made:
        one.close()


def has_ended(pid: int) -> bool:
    """Also where nobody has asked for its exit code, as in a container without an init."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def eventually(condition: Any) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s, "waited in vain"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Two ranks on each of two nodes, which ended as they should."""
    launch = Launch(tmp_path_factory.mktemp("ended") / "exp_0", cell("0=end", num_gpus=2))
    launch.wait()
    yield launch
    launch.close()


def who(text: str) -> list[str]:
    """What ranks said they are."""
    return sorted(line.rpartition(" pid")[0] for line in text.splitlines())


NUMBERED = [
    ["rank 0 of 4 node 0", "rank 1 of 4 node 0"],
    ["rank 2 of 4 node 1", "rank 3 of 4 node 1"],
]


def test_ranks_of_two_nodes_are_one_training_numbered_by_node(ended: Launch) -> None:
    said = ended.status()
    assert (said["status"], said["exit_code"]) == ("ok", 0), ended.said(0, "stderr")
    assert [who(ended.said(node)) for node in (0, 1)] == NUMBERED
    (attempt,) = said["attempts"]
    assert attempt["hosts"] == [socket.gethostname()] * 2
    assert not (ended.folder / "stdout").exists()


def test_the_scripts_of_all_nodes_repeat_the_cell(ended: Launch) -> None:
    scripts = [ended.folder / f"command.node{node}.sh" for node in (0, 1)]
    assert "# node 1 of 2: " in scripts[1].read_text()
    by_hand = [subprocess.Popen(["sh", one], stdout=subprocess.PIPE, env=environment(**quick()))
               for one in scripts]  # fmt: skip
    said = [one.communicate(timeout=WAIT_S)[0].decode() for one in by_hand]
    assert [who(text) for text in said] == NUMBERED


def test_nodes_of_a_cell_that_has_ended_do_nothing(ended: Launch) -> None:
    """As when a job is requeued after its end."""
    before = (ended.folder / "status.json").read_bytes()
    again = Launch(ended.folder, cell("0=end", num_gpus=2), token="t2")
    again.wait()
    assert (ended.folder / "status.json").read_bytes() == before
    assert not (ended.folder / "attempt_1").exists()


def test_an_error_on_another_node_is_the_cells_and_ends_it_everywhere(launched: Begin) -> None:
    launch = launched(cell("0=sleep,1=raise"))
    launch.wait()
    said = launch.status()
    assert (said["status"], said["exit_code"]) == ("error", 1)
    assert said["reason"] == "ValueError: batch 1 is bad"
    assert "batch 1 is bad" in launch.said(1, "stderr")
    assert launch.left() == []


@pytest.mark.parametrize("todo", ["0=lose,1=oom", "0=late,1=cut"])
def test_the_cause_is_told_whichever_node_has_it(launched: Begin, todo: str) -> None:
    launch = launched(cell(todo))
    launch.wait()
    said = launch.status()
    assert (said["status"], said["reason"]) == ("oom", "MemoryError: no room")


def test_what_another_node_can_not_do_is_told_once_the_cell_has_begun(launched: Begin) -> None:
    """It can't write its output: the cell had begun, and what it said is judged and kept."""
    launch = launched(cell("0=sleep"), spoilt="command.node1.sh")
    launch.wait()
    said = launch.status()
    assert said["status"] == "error"
    assert said["reason"].startswith(
        f"it was cut short: node 1 ({socket.gethostname()}): [Errno 21]"
    )
    assert json.loads((launch.folder / state.RESULTS).read_text())["status"] == "error"
    assert launch.left() == []


@pytest.mark.parametrize("number", [0, 1])
def test_what_an_attempt_left_is_ended_whatever_number_the_node_had(
    tmp_path: Path, number: int
) -> None:
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (tmp_path / "exp_0").mkdir()
    known = dataclasses.asdict(state.Process.of(left.pid))
    write_json(tmp_path / "exp_0" / "started.node7.json", known)
    words = launching.runner_words(str(tmp_path / "exp_0"), number=number, nodes=2, token="t1")
    write_json(tmp_path / "exp_0" / state.CELL, cell("0=end").to_json())
    alone = subprocess.Popen(words)
    try:
        assert left.wait(WAIT_S) == -signal.SIGTERM
    finally:
        left.kill()
        alone.terminate()
        alone.wait(WAIT_S)


@pytest.mark.parametrize(
    ("node", "how", "reason"),
    [
        (0, signal.SIGUSR2, "it was ended by SIGUSR2"),
        (1, signal.SIGTERM, "it was ended by SIGTERM on node 1"),
    ],
)
def test_what_ends_one_node_cancels_the_cell_on_all(
    launched: Begin, node: int, how: signal.Signals, reason: str
) -> None:
    launch = launched(cell("0=sleep,1=sleep"))
    launch.at_work()
    launch.processes[node].send_signal(how)
    launch.wait()
    said = launch.status()
    assert said["status"] == "cancelled"
    assert said["reason"].startswith(reason)
    assert launch.left() == []


def test_whichever_node_is_lost_the_cell_runs_again_and_a_timeout_ends_all_nodes(
    launched: Begin,
) -> None:
    """Three launches of one cell: without its second node, without its first, and too long."""
    launch = launched(cell("0=sleep,1=sleep"))
    pids = launch.at_work()
    launch.processes[1].kill()
    launch.wait()
    said = launch.status()
    assert said["status"] == "cancelled"
    assert said["reason"].startswith("it was ended by the loss of node 1")
    # The member could end nothing. The next one on that machine does.
    assert psutil.pid_exists(pids[1])
    again = launched(cell("0=sleep,1=sleep"), token="t2")
    members = again.at_work(*pids)
    assert has_ended(pids[1])
    aside = sorted(one.name for one in (launch.folder / "attempt_1").iterdir())
    assert [name for name in aside if "std" in name] == [
        *("stderr.node0", "stderr.node1", "stdout.node0", "stdout.node1"),
    ]
    # Members end with the first node.
    again.processes[0].kill()
    again.wait()
    assert has_ended(members[1])
    assert again.status()["status"] == "running"  # as of any runner that was killed
    limited = launched(cell("0=sleep,1=sleep", timeout_s=6.0), token="t3")
    limited.wait()
    ends = [one["status"] for one in limited.status()["attempts"]]
    assert ends == ["cancelled", "cancelled", "timeout"]
    assert limited.status()["reason"] == "it was ended after 6 s, its limit"
    assert limited.left() == []


def test_the_nodes_meet_at_an_address_that_all_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first name leads nowhere, its second to another machine, its third to it."""
    with socket.create_server(("127.0.0.2", 0)) as another:
        listed = ["no-such-host.invalid", "127.0.0.2", "127.0.0.1"]
        monkeypatch.setattr(node_worker, "_own_addresses", lambda: listed)
        port = another.getsockname()[1]
        monkeypatch.setattr(
            node_worker, "_listening", lambda: socket.create_server(("127.0.0.1", port))
        )
        monkeypatch.setattr(node_worker, "_ANSWER_S", 1.0)
        first = node_worker.Rendezvous(tmp_path, token="t", nodes=2)
        found: list[Any] = []
        other = threading.Thread(
            target=lambda: found.append(
                node_worker.join_first_node(tmp_path, token="t", number=1, nodes=2)
            )
        )
        other.start()
        node = first.gathered(lambda: None)
        first.begin(node)
        other.join(WAIT_S)
        wire, told = found[0]
        assert (told.address, told.port, told.number) == ("127.0.0.1", node.port, 1)
        wire.close()
        first.close()


def test_who_does_not_come_cancels_the_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_worker, "MEET_S", 0.5)
    first = node_worker.Rendezvous(tmp_path, token="t", nodes=3)
    with pytest.raises(Cancelled, match="node 1, 2 of 3 did not reach the first"):
        first.gathered(lambda: None)
    # Nor is one of an earlier launch taken for it.
    with pytest.raises(Cancelled, match="the first node was not found"):
        node_worker.join_first_node(tmp_path, token="another", number=1, nodes=3)
    first.close()
    assert node_worker.join_first_node(tmp_path, token="t", number=1, nodes=3) is None


def test_strangers_are_not_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_worker, "MEET_S", 1.0)
    first = node_worker.Rendezvous(tmp_path, token="t", nodes=2)
    port = json.loads((tmp_path / node_worker.MEETING).read_text())["port"]
    with socket.create_connection(("127.0.0.1", port)) as one:
        one.sendall(b'{"node": 1, "secret": "guessed", "host": "x", "reached": []}\n')
        with pytest.raises(Cancelled):
            first.gathered(lambda: None)
    first.close()


def test_accelerate_is_told_of_all_machines(tmp_path: Path) -> None:
    """Run for real: its ranks say who they are. GPUs take no part in starting them."""
    one = cell("0=end", launch="accelerate", num_gpus=1)
    port = launching.free_port()
    nodes = [NodeOfCell(n, 2, "127.0.0.1", port, "t") for n in (0, 1)]
    words = [launching.start(one, tmp_path, has_gpus=True, node=node).words for node in nodes]
    started = [subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                env=environment(**quick())) for one in words]  # fmt: skip
    told = [process.communicate(timeout=WAIT_S) for process in started]
    for number, (out, err) in enumerate(told):
        assert f"rank {number} of 2 node {number}" in out.decode(), err.decode()
    configured = dataclasses.replace(one, launch_options=("--config_file", "fsdp.yaml"))
    words = [launching.start(configured, tmp_path, has_gpus=True, node=nodes[1]).words]
    assert "--multi_gpu" not in words[0]  # the file says how they train together
    assert {"--num_machines=2", "--machine_rank=1", "--num_processes=2"} <= set(words[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"launch": "plain"}, "needs launch: torchrun or accelerate; it has plain"),
        ({"command": ("python", "train.py")}, r"needs {run} in its command"),
    ],
)
def test_what_would_not_be_one_training_or_one_run_is_refused(
    change: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        launching.check_nodes(dataclasses.replace(cell("0=end"), **change))


def test_this_machine_alone_is_not_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match="needs 2 nodes, but the launcher `local` has one"):
        LocalLauncher(LaunchOptions()).check([cell("0=end")])


def test_the_script_has_the_devices_that_the_launcher_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    how = launching.start(cell("0=end", nodes=1), tmp_path, has_gpus=True)
    text = launching.script(how, where=tmp_path)
    assert "export CUDA_VISIBLE_DEVICES=3,5\n" in text
    assert f"cd {tmp_path}\n" in text
    assert sys.executable in text
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"
