"""`erg bench` on two nodes of a real SLURM and of a real Ray, all of them on this machine.

The same plan gives the same cells and the same table wherever it runs; whatever is done to jobs,
drivers and nodes, no cell is lost and none runs twice.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from ergmeter.atomic_write import write_json
from ergmeter.runlog.reader import Run
from tests.e2e.conftest import PYTHON, TIMEOUT_S, Lab, environment, erg, eventually, quick
from tests.e2e.test_slurm import Cluster, cluster  # noqa: F401  a fixture
from tests.models import models as kept_models

pytestmark = pytest.mark.cluster

RAY = Path(__file__).parents[2] / ".older" / "ray"
BENCH = (PYTHON, "-m", "ergmeter", "bench")
TRAININGS_S = 280.0
SLURM = ("--launcher", "slurm", "--launcher-option", "gpus_per_node=0")
# Says that it began, and ends when it may, so that a test can catch it at work.
PROGRAM = """
import sys, time
from pathlib import Path
number = sys.argv[1]
with Path(f"began-{number}").open("a") as file:
    file.write("x")
while not Path("go").exists() and not Path(f"go-{number}").exists():
    time.sleep(0.02)
print("loss=1.5")
"""
# On two nodes: one rank fails, and the others would wait for it for ever.
FAILING = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("a bad batch")
time.sleep(600)
"""
STEPS, BATCH = 3, 4
# What transformers and pyarrow load where they find it, and nothing here uses.
LEFT_OUT = ("bitsandbytes", "datasets", "pandas", "scipy", "sklearn")
CELLS = (1, 2)  # by their `n`: one can run while one waits


def scenarios(lab: Lab, *each: dict[str, Any]) -> str:
    (lab.path / "scenarios.yaml").write_text(yaml.safe_dump({"scenarios": list(each)}))
    return "scenarios.yaml"


def waits(lab: Lab, **more: Any) -> dict[str, Any]:
    """Cells that wait for a sign each."""
    (lab.path / "program.py").write_text(PROGRAM)
    return {
        "name": "waits",
        "command": "{python} program.py {n} {run}",
        "axes": {"n": list(CELLS)},
        "arguments": {"steps": 1},
        "environment": {"STEPS": "{steps}"},
        **more,
    }


def waiting(lab: Lab) -> str:
    return scenarios(lab, waits(lab))


ON_TWO_NODES: dict[str, Any] = {"axes": {"n": [1], "nodes": [2]}, "launch": "torchrun"}


def fails(lab: Lab) -> dict[str, Any]:
    """A cell on two nodes that fails on the second."""
    (lab.path / "failing.py").write_text(FAILING)
    return {"name": "failing", "command": "{python} failing.py {run}", "launch": "torchrun",
            "axes": {"num_gpus": [1], "nodes": [2]}, "arguments": {}}  # fmt: skip


def trains(nodes: int, models: Path) -> dict[str, Any]:
    """A training on so many nodes."""
    return {
        "name": "tiny",
        "axes": {"num_gpus": [1], "nodes": [nodes], "effective_batch_size": [BATCH],
                 "max_seq_len": [64], "packing": [False]},
        "arguments": {
            "model_name_or_path": "builtin:tiny", "model.local_dir": str(models),
            "max_steps": STEPS, "learning_rate": 1e-3, "logging_steps": 1,
        },
        "warmup": "0s",
    }  # fmt: skip


def run(lab: Lab, *options: object, plan: str = "") -> tuple[object, ...]:
    plan = plan or waiting(lab)
    return (*BENCH, "run", plan, "--out", "results", "--cool-down", "0", *options)


def folder_of(lab: Lab, n: int) -> Path:
    """Of the cell with that number; before there is one, of none."""
    paths = lab.path.glob("results/exp_*/cell.json")
    found = (p.parent for p in paths if json.loads(p.read_text())["settings"]["n"] == n)
    return next(found, lab.path / "none")


def status(lab: Lab, n: int) -> dict[str, Any]:
    path = folder_of(lab, n) / "status.json"
    return dict(json.loads(path.read_text())) if path.exists() else {"status": "pending"}


def statuses(lab: Lab) -> dict[int, str]:
    return {n: status(lab, n)["status"] for n in CELLS}


def began(lab: Lab) -> dict[int, int]:
    """How often each cell was started."""
    paths = {n: lab.path / f"began-{n}" for n in CELLS}
    return {n: len(path.read_text()) if path.exists() else 0 for n, path in paths.items()}


def table(lab: Lab) -> pa.Table:
    with pytest.MonkeyPatch.context() as here:
        here.chdir(lab.path)
        code, _, said = erg("bench", "report", "results", "--export", "all.parquet")
    assert code == 0, said
    return pq.read_table(lab.path / "all.parquet")


def what_is_the_same(lab: Lab) -> tuple[Any, ...]:
    """Of a bench, what its launcher has no part in: cells, their ends, and the table's schema."""
    found = table(lab)
    cells = found.select(["index", "id", "scenario", "num_gpus", "nodes", "status", "settings"])
    return found.schema.names, found.schema.types, cells.to_pylist()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """What is the same of the `waiting` plan, by the launcher `local`."""
    lab = Lab(tmp_path_factory.mktemp("here"), **quick(*LEFT_OUT))
    (lab.path / "go").touch()
    done = lab.run(*run(lab))
    assert done.returncode == 0, done.stderr.decode()
    found = what_is_the_same(lab)
    lab.close()
    return found


def train_steps(lab: Lab, row: dict[str, Any]) -> tuple[Run, list[dict[str, Any]]]:
    """The run of a cell, and its steps."""
    run = Run.open(lab.path / row["path"] / "run")
    return run, [one for one in run.to_arrow().to_pylist() if one["phase"] == "train"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept_models(tmp_path_factory)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, models: Path) -> list[int]:
    """The tokens of each step of the training on one node, by the launcher `local`."""
    lab = Lab(tmp_path_factory.mktemp("alone"), **quick(*LEFT_OUT))
    plan = scenarios(lab, trains(1, models))
    done = lab.run(*run(lab, plan=plan), timeout_s=TRAININGS_S)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    (row,) = table(lab).to_pylist()
    whole, steps = train_steps(lab, row)
    assert whole.workload["world_size"] == 1
    lab.close()
    return [one["tokens_real"] for one in steps]


def check_one_ended_and_one_failed(lab: Lab) -> dict[str, Any]:
    """Two cells on two nodes: the row of the first, which ended well. The other did not."""
    well, failed = table(lab).to_pylist()
    assert well["status"] == "ok", well["reason"]
    assert (well["nodes"], well["num_gpus"]) == (2, 1)
    folder = lab.path / well["path"]
    for node in (0, 1):
        assert (folder / f"stdout.node{node}").exists()
        assert f"--node-rank={node}" in (folder / f"command.node{node}.sh").read_text()
    said = json.loads((folder / "status.json").read_text())
    assert len(said["attempts"][0]["hosts"]) == 2
    assert (failed["status"], failed["reason"]) == ("error", "ValueError: a bad batch")
    stderr = (lab.path / failed["path"] / "stderr.node1").read_text()
    assert "ValueError: a bad batch" in stderr
    return dict(well)


class Bench:
    """A bench on the cluster, and what its administrator can do to it."""

    def __init__(self, lab: Lab, cluster: Cluster) -> None:  # noqa: F811
        self.lab = lab
        self.variables = environment(**cluster.environment, **quick(*LEFT_OUT))

    def start(self, *options: object) -> subprocess.Popen[bytes]:
        command = run(self.lab, *SLURM, "--jobs", "1", *options)
        return self.lab.start(*command, env=self.variables, stderr=subprocess.PIPE)

    def asked(self, *words: str) -> str:
        done = subprocess.run(
            words, env=self.variables, capture_output=True, text=True, timeout=TIMEOUT_S,
            check=False,
        )  # fmt: skip
        return done.stdout

    def jobs(self) -> dict[int, str]:
        """By the cell's `n`: its job, as it is written down."""
        paths = {n: folder_of(self.lab, n) / "job" for n in CELLS}
        return {n: path.read_text() for n, path in paths.items() if path.exists()}

    def queue(self) -> list[str]:
        return self.asked("squeue", "-h", "-r", "-o", "%i").split()

    def first(self) -> int:
        """The cell that runs, once one does."""
        eventually(lambda: "running" in statuses(self.lab).values(), "a cell runs")
        (n,) = (n for n, word in statuses(self.lab).items() if word == "running")
        eventually(lambda: began(self.lab)[n], "its program")
        eventually(lambda: status(self.lab, n).get("child"), "its process")
        return n

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Have requeued jobs begin meanwhile: they wait for two minutes by themselves.

        A job told so while it still ends forgets it. One that begins within a second of its end is
        dropped ("Job credential revoked"), so each is told once it has been in the queue for two.
        """
        since_s: dict[str, float] = {}

        def hurried() -> object:
            for job in self.asked("squeue", "-h", "-r", "-t", "PD", "-o", "%i").split():
                if time.monotonic() - since_s.setdefault(job, time.monotonic()) > 2.0:
                    self.asked("scontrol", "update", f"JobId={job}", "StartTime=now")
            time.sleep(0.3)
            return condition()

        eventually(hurried, what)

    def finish(self, driver: subprocess.Popen[bytes]) -> None:
        """Let all cells end, and their driver."""
        (self.lab.path / "go").touch()
        self.until(lambda: driver.poll() is not None, "the driver's end")
        assert driver.returncode == 0, driver.stderr and driver.stderr.read().decode()
        assert statuses(self.lab) == dict.fromkeys(CELLS, "ok")


@pytest.fixture
def bench(lab: Lab, cluster: Cluster) -> Iterator[Bench]:  # noqa: F811
    pytest.importorskip("submitit")
    made = Bench(lab, cluster)
    yield made
    made.asked("scancel", *made.queue())
    eventually(lambda: not made.queue(), "an empty queue")


def test_slurm_gives_what_this_machine_gives(bench: Bench, here: tuple[Any, ...]) -> None:
    (bench.lab.path / "go").touch()
    bench.finish(bench.start())
    assert what_is_the_same(bench.lab) == here


@pytest.mark.parametrize(
    "how",
    [("scontrol", "requeue"), ("scancel", "--signal=USR2")],
    ids=["requeued", "told to checkpoint, as before a preemption"],
)
def test_a_job_that_is_requeued_runs_its_cell_again(bench: Bench, how: tuple[str, ...]) -> None:
    driver = bench.start()
    n = bench.first()
    job = bench.jobs()[n]
    asking = bench.lab.start(*how, job, env=bench.variables)
    eventually(lambda: status(bench.lab, n)["status"] == "cancelled", "the job is ended")
    asking.kill()  # scancel sends a signal again while a job is being requeued
    bench.finish(driver)
    assert bench.jobs()[n] == job
    assert [one["status"] for one in status(bench.lab, n)["attempts"]] == ["cancelled", "ok"]
    assert (folder_of(bench.lab, n) / "attempt_1" / "stdout").exists()
    assert sorted(began(bench.lab).values()) == [1, 2]


def test_a_cell_that_outlasts_its_job_is_not_run_again_and_says_so(bench: Bench) -> None:
    """The signal is what SLURM sends then; in a job as short as that, submitit takes it for it."""
    driver = bench.start("--launcher-option", "timeout_min=5")
    n = bench.first()
    bench.asked("scancel", "--signal=USR2", bench.jobs()[n])
    eventually(lambda: "time was up" in status(bench.lab, n).get("reason", ""), "its end is told")
    (bench.lab.path / "go").touch()
    bench.until(lambda: driver.poll() is not None, "the driver's end")
    assert driver.returncode == 1
    assert statuses(bench.lab) == {**dict.fromkeys(CELLS, "ok"), n: "cancelled"}
    assert status(bench.lab, n)["reason"].startswith("its job's time was up; give")
    assert began(bench.lab) == dict.fromkeys(CELLS, 1)
    assert all((folder_of(bench.lab, n) / "runner.log").exists() for n in CELLS)


def test_a_requeued_job_on_two_nodes_runs_its_cell_again_on_both(bench: Bench) -> None:
    plan = scenarios(bench.lab, waits(bench.lab, **ON_TWO_NODES))
    driver = bench.lab.start(*run(bench.lab, *SLURM, plan=plan), env=bench.variables)
    eventually(lambda: began(bench.lab)[1] == 2, "both ranks")
    bench.asked("scontrol", "requeue", bench.jobs()[1])
    eventually(lambda: status(bench.lab, 1)["status"] == "cancelled", "the job is ended")
    (bench.lab.path / "go").touch()
    bench.until(lambda: driver.poll() is not None, "the driver's end")
    assert driver.returncode == 0, status(bench.lab, 1)
    assert [one["status"] for one in status(bench.lab, 1)["attempts"]] == ["cancelled", "ok"]
    assert began(bench.lab)[1] == 4
    aside = folder_of(bench.lab, 1) / "attempt_1"
    assert [(aside / f"stdout.node{node}").exists() for node in (0, 1)] == [True, True]


def test_a_job_that_was_cancelled_by_hand_and_requeued_is_taken_over(bench: Bench) -> None:
    driver = bench.start()
    n = bench.first()
    before = bench.jobs()
    driver.kill()  # which would have the cell run again once it sees the end of the job
    driver.wait(TIMEOUT_S)
    bench.asked("scancel", before[n])
    eventually(lambda: status(bench.lab, n)["status"] == "cancelled", "the job is ended")
    eventually(lambda: before[n] not in bench.queue(), "it has left the queue")
    bench.asked("scontrol", "requeue", before[n])
    assert before[n] in bench.queue()
    bench.finish(bench.start("--resume"))
    assert bench.jobs() == before
    assert [one["status"] for one in status(bench.lab, n)["attempts"]] == ["cancelled", "ok"]
    assert began(bench.lab)[n] == 2


def test_jobs_of_a_killed_driver_are_taken_over_whether_they_run_or_wait(bench: Bench) -> None:
    driver = bench.start()
    n = bench.first()
    before = bench.jobs()
    driver.kill()
    driver.wait(TIMEOUT_S)
    # One was submitted, and the driver killed before it had written down the job's id.
    waits = next(one for one in before if one != n)
    name = bench.asked("squeue", "-h", "-r", "-o", "%i %j").split()
    named = dict(zip(name[::2], name[1::2], strict=True))[before[waits]]
    place = before[waits].partition("_")[2]
    (folder_of(bench.lab, waits) / "job").write_text(f"{named} {place}")
    second = bench.start("--resume")
    driven_by = bench.lab.path / "results" / "driver.json"
    eventually(lambda: json.loads(driven_by.read_text())["pid"] == second.pid, "it takes over")
    time.sleep(3.0)  # it would have submitted them by now
    assert sorted(bench.queue()) == sorted(before.values())
    bench.finish(second)
    assert began(bench.lab) == dict.fromkeys(CELLS, 1)


def test_ctrl_c_cancels_the_jobs_also_those_of_an_earlier_driver(bench: Bench) -> None:
    driver = bench.start()
    n = bench.first()
    said = status(bench.lab, n)
    child = said["child"]["pid"]
    driver.kill()
    driver.wait(TIMEOUT_S)
    # As if its node were another machine: its runner can't be ended from here but by its job.
    far = {**said, "worker": {**said["worker"], "host": "far"}, "child": None}
    write_json(folder_of(bench.lab, n) / "status.json", far)
    second = bench.start("--resume")
    driven_by = bench.lab.path / "results" / "driver.json"
    eventually(lambda: json.loads(driven_by.read_text())["pid"] == second.pid, "it takes over")
    time.sleep(2.0)
    second.send_signal(signal.SIGINT)
    assert second.wait(TIMEOUT_S) == 130
    assert bench.queue() == []
    assert has_ended(child)
    assert statuses(bench.lab) == {**dict.fromkeys(CELLS, "pending"), n: "cancelled"}
    bench.finish(bench.start("--resume"))
    assert began(bench.lab) == {**dict.fromkeys(CELLS, 1), n: 2}


@pytest.mark.timeout(600)
def test_slurm_trains_on_two_nodes(bench: Bench, alone: list[int], models: Path) -> None:
    """They are one training, one run and one row."""
    lab = bench.lab
    plan = scenarios(lab, trains(2, models), fails(lab))
    command = run(lab, *SLURM, "--jobs", "1", plan=plan)
    done = lab.run(*command, env=bench.variables, timeout_s=TRAININGS_S)
    assert done.returncode == 1, done.stdout.decode() + done.stderr.decode()
    two = check_one_ended_and_one_failed(lab)
    assert two["per_device_train_batch_size"] == "2"
    assert two["real_tokens_per_s_per_device"] is None  # no accelerator
    whole, together = train_steps(lab, two)
    assert whole.workload["world_size"] == 2
    tokens = [[s["tokens_real"] for s in together if s["rank"] == rank] for rank in (0, 1)]
    assert [len(one) for one in tokens] == [STEPS] * 2
    # The same samples in every step, whoever has them: so the same tokens, each counted once.
    assert [sum(step) for step in zip(*tokens, strict=True)] == alone
    assert two["real_tokens_per_s"] > 0


class RayCluster:
    """Two nodes of Ray with a processor each."""

    def __init__(self, lab: Lab, folder: str) -> None:
        self._lab = lab
        # Ray asks amdsmi for GPUs, which without AMD's library fails in a way it does not expect.
        (lab.path / "modules").mkdir()
        (lab.path / "modules" / "amdsmi.py").write_text("raise ImportError('left out')")
        known = quick("pandas")
        more = [str(lab.path / "modules"), str(RAY), known["PYTHONPATH"]]
        known["PYTHONPATH"] = os.pathsep.join(more)
        self.variables = environment(**known, RAY_USAGE_STATS_ENABLED="0")
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        self.options = ("--launcher", "ray", "--launcher-option", f"address=127.0.0.1:{self.port}")
        self._nodes: list[subprocess.Popen[bytes]] = []
        head = (f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={folder}")
        self._begin("--head", *head)
        eventually(self._answers, "Ray's head")
        self.add_nodes(1)

    def add_nodes(self, number: int, *options: str) -> None:
        """One after the other: a node gives up if Ray does not know of it within 30 s."""
        for _ in range(number):
            self._begin(f"--address=127.0.0.1:{self.port}", *options)
            self._await_nodes(len(self._nodes))

    def close(self) -> None:
        for node in reversed(self._nodes):
            node.terminate()
            node.wait(TIMEOUT_S)

    def _begin(self, *options: str) -> None:
        begin = (PYTHON, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1",
                 "--include-log-monitor=false", *options)  # fmt: skip
        with (self._lab.path / "ray.log").open("ab") as said:
            told = {"env": self.variables, "stdout": said, "stderr": said}
            self._nodes.append(self._lab.start(*begin, **told))

    def _answers(self) -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0

    def _await_nodes(self, number: int) -> None:
        """Until Ray knows of so many: asked by one process, since each takes seconds to begin."""
        code = (
            f"import ray, time; ray.init('127.0.0.1:{self.port}', log_to_driver=False)\n"
            f"while sum(node['Alive'] for node in ray.nodes()) < {number}: time.sleep(0.1)"
        )
        done = self._lab.run(PYTHON, "-c", code, env=self.variables)
        assert done.returncode == 0, done.stderr.decode()


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    if not RAY.is_dir():
        pytest.skip("no Ray here: ./dev test puts it into .older/ray")
    lab = Lab(tmp_path_factory.mktemp("ray"))
    # Unix sockets are in its folder, and their names may be of 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        try:
            made = RayCluster(lab, folder)
            yield made
            made.close()
        finally:
            lab.close()


def has_ended(pid: int) -> bool:
    """Also where nobody has asked for its exit code, as in a container without an init."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def at_work_on_ray(lab: Lab, times: int) -> int:
    """The cell that runs, once it has begun that often."""
    eventually(lambda: times in began(lab).values(), "a cell runs")
    (n,) = (n for n, often in began(lab).items() if often == times)
    eventually(lambda: status(lab, n).get("child"), "its process")
    return n


@pytest.mark.timeout(600)
def test_ray_gives_what_this_machine_gives_whatever_ends_a_cell(
    lab: Lab, ray: RayCluster, here: tuple[Any, ...]
) -> None:
    """First Ctrl-C of the driver, then the loss of all processes on a node."""
    driver = lab.start(*run(lab, *ray.options), env=ray.variables)
    n = at_work_on_ray(lab, 1)
    child = status(lab, n)["child"]["pid"]
    driver.send_signal(signal.SIGINT)
    assert driver.wait(TIMEOUT_S) == 130
    assert statuses(lab) == {**dict.fromkeys(CELLS, "pending"), n: "cancelled"}
    assert has_ended(child)
    second = lab.start(*run(lab, *ray.options, "--resume"), env=ray.variables)
    at_work_on_ray(lab, 2)
    runner = psutil.Process(status(lab, n)["worker"]["pid"])
    for pid in (runner.ppid(), runner.pid, status(lab, n)["child"]["pid"]):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: began(lab)[n] == 3, "it is started again")
    (lab.path / "go").touch()
    assert second.wait(TIMEOUT_S) == 0
    attempts = [one["status"] for one in status(lab, n)["attempts"]]
    assert attempts == ["cancelled", "cancelled", "ok"]
    assert began(lab) == {**dict.fromkeys(CELLS, 1), n: 3}
    assert what_is_the_same(lab) == here


@pytest.mark.timeout(600)
def test_a_killed_driver_on_ray_leaves_no_training_that_nobody_owns(
    lab: Lab, ray: RayCluster
) -> None:
    """Ray kills the runner with its worker, and takes the node for free."""
    driver = lab.start(*run(lab, *ray.options), env=ray.variables)
    n = at_work_on_ray(lab, 1)
    child = status(lab, n)["child"]["pid"]
    assert (folder_of(lab, n) / "runner.log").exists()
    driver.kill()
    driver.wait(TIMEOUT_S)
    eventually(lambda: has_ended(child), "its cell is ended")
    (lab.path / "go").touch()
    second = lab.start(*run(lab, *ray.options, "--resume"), env=ray.variables)
    assert second.wait(TIMEOUT_S) == 0
    assert statuses(lab) == dict.fromkeys(CELLS, "ok")
    assert began(lab) == {**dict.fromkeys(CELLS, 1), n: 2}


@pytest.mark.timeout(600)
def test_ray_runs_cells_on_two_nodes(lab: Lab, ray: RayCluster) -> None:
    """That such a cell can be a training is shown with SLURM: from here on it is the same."""
    plan = scenarios(lab, waits(lab, **ON_TWO_NODES), fails(lab))
    (lab.path / "go").touch()
    done = lab.run(*run(lab, *ray.options, "--jobs", "1", plan=plan), env=ray.variables)
    assert done.returncode == 1, done.stdout.decode() + done.stderr.decode()
    check_one_ended_and_one_failed(lab)
    assert began(lab)[1] == 2


@pytest.mark.timeout(600)
def test_ray_gives_cells_on_two_nodes_their_gpus(lab: Lab, ray: RayCluster) -> None:
    """Of nodes that say they have some: who gets which is all that Ray knows of them.

    The last test here: with them a cell asks for GPUs, and one on a processor for none.
    """
    plan = scenarios(lab, waits(lab, **ON_TWO_NODES))
    (lab.path / "go").touch()
    ray.add_nodes(2, "--num-gpus=1")
    done = lab.run(*run(lab, *ray.options, plan=plan), env=ray.variables)
    assert done.returncode == 0, done.stderr.decode()
    assert began(lab)[1] == 2
    script = (folder_of(lab, 1) / "command.node1.sh").read_text()
    assert "export CUDA_VISIBLE_DEVICES=0\n" in script
