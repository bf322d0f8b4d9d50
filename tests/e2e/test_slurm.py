"""Ranks that a real SLURM starts: a controller and two nodes of their own, on this machine.

`./dev test` installs Debian's packages (slurm-wlm, munge) where it can; without them, or without
the rights to be a node, these tests say what is missing.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ergmeter.runlog.reader import Run
from tests.e2e.conftest import ERG, PYTHON, TIMEOUT_S, environment, eventually
from tests.e2e.test_scripted_gpus import Measured
from tests.nvml.library import Gpu, Library, Script, build
from tests.ports import free_port

pytestmark = pytest.mark.cluster

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "sbatch")
TASKS = 2
NODES = ("node1", "node2")
STEPS = 40
TOKENS = 100
# Each rank says when it is done; the program does not know that it is measured but by its Meter.
PROGRAM = f"""
import sys, time
from ergmeter import Meter
with Meter(*sys.argv[1:2], probes=["nvml", "process"]) as meter:
    for _ in range({STEPS}):
        with meter.step(tokens={TOKENS}):
            time.sleep(0.05)
"""
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs={cpus} State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


class Cluster:
    """A controller and two nodes, for as long as the tests take."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        for name in ("munge", "state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir(mode=0o755)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname().split(".")[0], folder=folder, cpus=os.cpu_count(),
                controller=free_port(), first=free_port(), second=free_port(),
            )
        )  # fmt: skip
        own = [f"--{what}-file={folder}/munge/{what}" for what in ("key", "log", "pid", "seed")]
        self._begin("munged", "--foreground", "--force", f"--socket={folder}/munge/socket", *own)
        eventually((folder / "munge" / "socket").exists, "munged has no socket")
        self._begin("slurmctld", "-D")
        for node in NODES:  # Debian builds it with --enable-multiple-slurmd
            self._begin("slurmd", "-D", "-N", node)

    def _begin(self, *command: str) -> None:
        name = command[-1] if command[-1] in NODES else command[0]
        log = (self._folder / f"{name}.out").open("wb")
        process = subprocess.Popen(
            command, env=environment(**self.environment), stdout=log, stderr=log
        )
        self._stack.callback(log.close)
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)

    def is_idle(self) -> bool:
        asked = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=environment(**self.environment),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return asked.stdout.strip() == "idle"

    def said(self) -> str:
        """What the daemons have to say."""
        logs = [*self._folder.glob("*.log"), *self._folder.glob("*.out")]
        return "\n".join(log.read_text(errors="replace")[-1500:] for log in logs)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: apt-get install slurm-wlm munge")
    if os.getuid():
        pytest.skip("a node of SLURM is root's")
    folder = tmp_path_factory.mktemp("slurm")
    with ExitStack() as stack:
        made = Cluster(folder, stack)
        deadline_s = time.monotonic() + TIMEOUT_S
        while not made.is_idle():
            assert time.monotonic() < deadline_s, made.said()
            time.sleep(0.1)
        yield made


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return build(tmp_path_factory.mktemp("nvml"))


GPUS = (Gpu(200.0), Gpu(400.0))


def launched(cluster: Cluster, folder: Path, *command: str, **more: str) -> str:
    done = subprocess.run(
        ["srun", "--nodes=1", f"--ntasks={TASKS}", "--overcommit", *command],
        env=environment(**cluster.environment, **more), cwd=folder,
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{cluster.said()}"
    return done.stdout


@pytest.mark.parametrize("where", [["run"], []], ids=["a folder that is named", "none"])
def test_the_tasks_of_a_step_write_one_run(
    cluster: Cluster, library: Library, tmp_path: Path, where: list[str]
) -> None:
    epoch_ns = time.monotonic_ns()
    told = library.environment(Script(GPUS, epoch_ns=epoch_ns))
    launched(cluster, tmp_path, PYTHON, "-c", PROGRAM, *where, **told)
    (path,) = [one.parent for one in tmp_path.rglob("run.json")]
    run = Run.open(path)
    assert len(run.writers) == TASKS
    steps = run.steps()
    assert [int((steps["rank"] == rank).sum()) for rank in range(TASKS)] == [STEPS] * TASKS
    measured = Measured(path, epoch_ns)
    assert measured.value("tokens.total") == TASKS * STEPS * TOKENS
    assert measured.value("steps.count") == STEPS
    start_s, end_s = (
        (int(edge) - epoch_ns) / 1e9 for edge in (steps["start_ns"].min(), steps["end_ns"].max())
    )
    assert measured.holds("energy.run_j", sum(gpu.joules(start_s, end_s) for gpu in GPUS))
    assert "SLURM_JOB_ID" in run.header["job"]


def test_a_recorder_around_srun_has_all_tasks_in_one_run(cluster: Cluster, tmp_path: Path) -> None:
    recorded = subprocess.run(
        [ERG, "record", "--quiet", "--probe", "process", "--out", "run", "--",
         "srun", "--nodes=1", f"--ntasks={TASKS}", "--overcommit", PYTHON, "-c", PROGRAM],
        env=environment(**cluster.environment), cwd=tmp_path,
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert recorded.returncode == 0, recorded.stderr
    steps = Run.open(tmp_path / "run").steps()
    assert [int((steps["rank"] == rank).sum()) for rank in range(TASKS)] == [STEPS] * TASKS


def test_recorders_in_the_tasks_do_not_take_the_training_with_them(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Both are given the same directory."""
    command = [ERG, "record", "--quiet", "--probe", "process", "--out", "run", "--"]
    launched(cluster, tmp_path, *command, PYTHON, "-c", PROGRAM)
    for task, name in enumerate(("run", "run-1")):
        steps = Run.open(tmp_path / name).steps()
        assert steps["rank"].tolist() == [task] * STEPS
