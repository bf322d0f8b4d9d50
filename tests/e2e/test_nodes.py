"""Ranks on one node and on two, with four GPUs whose true power is known.

The nodes are real to a program: two network namespaces with a wire between them, each with a host
name, a boot id and a monotonic clock of its own. What is on the GPUs is scripted, each with a curve
of its own, so that one that is left out, counted twice or read at the wrong time is seen.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ergmeter.runlog.reader import Run
from tests.e2e.clocks import bounds_s
from tests.e2e.conftest import (
    PYTHON,
    SCRIPTS,
    TIMEOUT_S,
    Program,
    environment,
    reported,
    script,
    warmed,
)
from tests.nvml.library import Gpu, Library, Script, build, default_uuid

pytestmark = pytest.mark.cluster

STEPS, TOKENS = 60, 100
USED = [("self", 10**9)]
GPUS = (
    Gpu([(0.0, 100.0), (4.0, 500.0), (8.0, 200.0)], processes=USED, uuid=default_uuid(0)),
    Gpu(250.0, processes=USED, uuid=default_uuid(1)),
    Gpu([(0.0, 600.0), (6.0, 60.0)], processes=USED, uuid=default_uuid(2)),
    Gpu(80.0, processes=USED, uuid=default_uuid(3)),
)
IDLE = tuple(replace(gpu, processes=()) for gpu in GPUS)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return build(tmp_path_factory.mktemp("nvml"))


def program(run: Path, truth: Path, *flags: str) -> list[str]:
    return [str(SCRIPTS / "rank.py"), str(run), str(STEPS), str(TOKENS), str(truth), *flags]


def launched(nodes: int, node: int, address: str, folder: Path, words: list[str]) -> list[str]:
    """Two ranks of a node, which torchrun's agent forks."""
    plan = {
        "words": words, "cwd": str(folder), "imports": ["torch"], "ranks": 2,
        "nodes": [nodes, node, address],
    }  # fmt: skip
    return script("warm", json.dumps([plan]))


def report(run: Path, *options: str) -> dict[str, Any]:
    return reported(run, *options)


def value(run: Path, key: str, *options: str) -> float:
    found = report(run, *options)["readings"][key]
    assert "value" in found, found
    return float(found["value"])


def holds(found: dict[str, Any], key: str, least: float, most: float) -> None:
    """The figure's interval reaches into these bounds, the figure lies there but for its interval,
    and the interval says enough: a GPU too many or too few is outside of it."""
    one = found["readings"][key]
    assert "value" in one, one
    assert one["low"] <= most, f"{one} is above {most}"
    assert one["high"] >= least, f"{one} is below {least}"
    assert one["high"] < 2 * one["low"], f"{one} says nothing of {least} to {most}"
    off = max(0.01 * least, (one["high"] - one["low"]) / 2)
    assert least - off <= one["value"] <= most + off, f"{one} is not {least} to {most}"


class Truth:
    """What the ranks did, by their own word, in seconds since the epoch of the script."""

    def __init__(self, folder: Path, epochs_ns: Sequence[int]) -> None:
        """`epochs_ns`: of each rank, on its own clock."""
        self._ranks = []
        for rank, epoch_ns in enumerate(epochs_ns):
            said = json.loads((folder / f"{rank}.json").read_text())
            times_ns = {name: (said[f"{name}_ns"]) for name in ("outside", "inside")}
            self._ranks.append(
                {f"{n}_s": [(t - epoch_ns) / 1e9 for t in both] for n, both in times_ns.items()}
            )
        self.least_s, self.most_s = bounds_s(self._ranks)

    def joules(self, gpus: Sequence[Gpu], *, of: float = 1.0) -> tuple[float, float]:
        """At least, and at most; divided by `of`."""
        found = []
        for name in ("inside_s", "outside_s"):
            start_s = min(one[name][0] for one in self._ranks)
            end_s = max(one[name][1] for one in self._ranks)
            found.append(sum(gpu.joules(start_s, end_s) for gpu in gpus) / of)
        return found[0], found[1]


def test_two_ranks_of_torchrun_count_their_gpus_once_and_their_tokens_by_layout(
    library: Library, tmp_path: Path
) -> None:
    """Two of four GPUs are in use; four micro-batches of 100 tokens make a step."""
    run, epoch_ns = tmp_path / "run", time.monotonic_ns()
    gpus = [*GPUS[:2], *IDLE[2:]]
    (done,) = warmed(
        Program([*program(run, tmp_path, "torch", "micro=4")], tmp_path, ("torch",), ranks=2),
        **library.environment(Script(gpus, epoch_ns=epoch_ns)),
    )
    assert done.returncode == 0, done.stderr
    truth = Truth(tmp_path, [epoch_ns] * 2)
    found = report(run)
    holds(found, "energy.run_j", *truth.joules(gpus[:2]))
    a_step = 2 * 4 * TOKENS
    assert found["readings"]["tokens.total"]["value"] == STEPS * a_step
    holds(found, "energy.joules_per_token", *truth.joules(gpus[:2], of=STEPS * a_step))
    assert found["readings"]["steps.count"]["value"] == STEPS
    rate = found["readings"]["throughput.tokens_per_s"]["value"]
    assert STEPS * a_step / truth.most_s <= rate <= STEPS * a_step / truth.least_s
    each = found["readings"]["throughput.tokens_per_s_per_device"]["value"]
    assert each == pytest.approx(rate / 2)
    for layout, factor in (("dp=2", 1.0), ("tp=2", 0.5), ("pp=2", 0.5), ("cp=2", 1.0)):
        assert value(run, "tokens.total", "--layout", layout) == STEPS * a_step * factor
    shared = report(run, "--layout", "tp=2")
    holds(shared, "energy.joules_per_token", *truth.joules(gpus[:2], of=STEPS * a_step / 2))
    assert (
        "does not divide the 2 ranks"
        in (report(run, "--layout", "tp=3")["readings"]["tokens.total"]["missing"])
    )
    opened = Run.open(run)
    readers = [w for w in opened.writers if any(d.kind == "gpu" for d in w.devices)]
    assert len(opened.writers) == 2
    assert len(readers) == 1


def started(
    library: Library, script: Script, arguments: list[str], *, rank: int, world: int, **more: str
) -> subprocess.Popen[bytes]:
    """A rank without a launcher of its own: the environment tells it, as any launcher does."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return subprocess.Popen(
        [PYTHON, *arguments],
        env={
            **environment(**library.environment(script), **more),
            **{name: str(number) for name, number in told.items()},
        },
        stderr=subprocess.PIPE,
    )


def ended(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    codes = []
    for one in ranks:
        _, errors = one.communicate(timeout=TIMEOUT_S)
        assert one.returncode in (0, -signal.SIGKILL), errors.decode()
        codes.append(one.returncode)
    return codes


@pytest.mark.parametrize("first", [0, 1])
def test_the_rank_that_reads_the_devices_is_killed_and_another_goes_on(
    library: Library, tmp_path: Path, first: int
) -> None:
    """Whichever was first reads for both, and kills itself after 1.5 of 3 s."""
    run, epoch_ns = tmp_path / "run", time.monotonic_ns()
    script = Script(GPUS, epoch_ns=epoch_ns)
    arguments = program(run, tmp_path, "pair", f"die={first}")
    reader = started(library, script, arguments, rank=first, world=2)
    deadline_s = time.monotonic() + TIMEOUT_S
    while not list(run.glob("*/writer.json")) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    other = started(library, script, arguments, rank=1 - first, world=2)
    assert ended([reader, other]) == [-signal.SIGKILL, 0]
    opened = Run.open(run)
    took_over = [mark for mark in opened.marks if mark.name == "took_over"]
    assert [mark.detail for mark in took_over] == ["nvml"]
    steps = opened.steps()
    start_s, end_s = ((int(edge) - epoch_ns) / 1e9 for edge in
                      (steps["start_ns"].min(), steps["end_ns"].max()))  # fmt: skip
    found = report(run)
    assert end_s - start_s > STEPS * 0.05
    truth_j = sum(gpu.joules(start_s, end_s) for gpu in GPUS)
    holds(found, "energy.run_j", truth_j, truth_j)
    done = [int((steps["rank"] == rank).sum()) for rank in (first, 1 - first)]
    assert done[1] == STEPS
    assert 0 < done[0] <= STEPS // 2  # what it had not handed over is lost with it
    assert found["readings"]["tokens.total"]["value"] == sum(done) * TOKENS
    assert found["readings"]["steps.count"]["value"] == STEPS
    assert value(run, "tokens.total", "--layout", "tp=2") == STEPS * TOKENS
    assert any("one began late or ended early" in note for note in found["notes"])


def test_ranks_that_see_one_gpu_each_read_their_own(library: Library, tmp_path: Path) -> None:
    """As SLURM does it with --gpus-per-task: no rank can read for another."""
    run, epoch_ns = tmp_path / "run", time.monotonic_ns()
    script = Script(GPUS, epoch_ns=epoch_ns)
    arguments = program(run, tmp_path, "pair")
    ranks = [
        started(library, script, arguments, rank=rank, world=2, CUDA_VISIBLE_DEVICES=str(rank + 1))
        for rank in (0, 1)
    ]
    assert ended(ranks) == [0, 0]
    holds(report(run), "energy.run_j", *Truth(tmp_path, [epoch_ns] * 2).joules(GPUS[1:3]))


def test_a_layout_that_the_ranks_can_not_have_is_refused_before_anything_is_measured(
    library: Library, tmp_path: Path
) -> None:
    arguments = program(tmp_path / "run", tmp_path, "layout=tp=3")
    rank = started(library, Script(GPUS), arguments, rank=0, world=4)
    _, errors = rank.communicate(timeout=TIMEOUT_S)
    assert rank.returncode == 1
    assert errors.decode().strip().endswith("3 does not divide the 4 ranks of this training")
    assert not (tmp_path / "run").exists()


# -- two nodes -------------------------------------------------------------------------------------

AHEAD_S = {"a": 1_000, "b": 400_000}
NAMESPACES = ["unshare", *(["--map-root-user"] if os.getuid() else []), "--net", "--mount"]


class Nodes:
    """Two nodes with two GPUs each: 0 and 1 on the first, 2 and 3 on the second."""

    def __init__(self, library: Library, folder: Path) -> None:
        self._library = library
        self._folder = folder
        zero_ns = time.monotonic_ns()
        self.epochs_ns = {name: zero_ns + ahead * 10**9 for name, ahead in AHEAD_S.items()}
        for number, (name, ahead_s) in enumerate(AHEAD_S.items()):
            (folder / f"{name}.clock").write_text(str(ahead_s))
            (folder / f"{name}.boot").write_text(f"{number}1111111-2222-4333-8444-555555555555\n")

    def run(self, *commands: str) -> None:
        for name, command, gpus in zip("ab", commands, (GPUS[:2], GPUS[2:]), strict=True):
            script = Script(gpus, epoch_ns=self.epochs_ns[name])
            told = self._library.environment(script)
            lines = [f"export {n}={shlex.quote(v)}" for n, v in told.items()]
            text = "\n".join([*lines, f"cd {self._folder}", command, ""])
            (self._folder / f"{name}.sh").write_text(text)
        done = subprocess.run(
            [*NAMESPACES, "sh", str(SCRIPTS / "two_nodes.sh"), str(self._folder)],
            env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def truth(self) -> Truth:
        return Truth(self._folder, [self.epochs_ns[name] for name in "aabb"])


@pytest.fixture
def nodes(library: Library, tmp_path: Path) -> Nodes:
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in "ab":
        (empty / f"{name}.sh").write_text("true\n")
        (empty / f"{name}.clock").write_text("1000")
        (empty / f"{name}.boot").write_text("x\n")
    command = [*NAMESPACES, "sh", str(SCRIPTS / "two_nodes.sh"), str(empty)]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no `unshare` here, so no nodes of their own")
    if tried.returncode:
        pytest.skip(f"the system gives us no namespaces: {tried.stderr.strip().splitlines()[-1:]}")
    return Nodes(library, tmp_path)


def test_four_ranks_on_two_nodes_are_one_run_with_the_energy_of_four_gpus(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Two agents of torchrun find each other over the wire; ranks 0 and 1 share a model, as do 2
    and 3."""
    run = tmp_path / "run"
    arguments = program(run, tmp_path, "torch", "layout=tp=2")
    commands = (
        launched(2, node, "10.99.0.1:29672", tmp_path, arguments) for node in range(len(AHEAD_S))
    )
    nodes.run(*(f"GLOO_SOCKET_IFNAME=wire-{'ab'[n]} {shlex.join(c)}"
                for n, c in enumerate(commands)))  # fmt: skip
    opened = Run.open(run)
    assert {writer.header["host"] for writer in opened.writers} == {"node-a", "node-b"}
    assert len({writer.header["boot_id"] for writer in opened.writers}) == 2
    readers = [w for w in opened.writers if any(d.kind == "gpu" for d in w.devices)]
    assert sorted(len([d for d in w.devices if d.kind == "gpu"]) for w in readers) == [2, 2]
    truth, found = nodes.truth(), report(run)
    holds(found, "energy.run_j", *truth.joules(GPUS))
    assert found["readings"]["tokens.total"]["value"] == 2 * STEPS * TOKENS
    rate, tokens = found["readings"]["throughput.tokens_per_s"]["value"], 2 * STEPS * TOKENS
    # Two nodes' clocks are put beside each other to a millisecond or so.
    assert tokens / (truth.most_s + 0.05) <= rate <= tokens / (truth.least_s - 0.05)
    holds(found, "energy.joules_per_token", *truth.joules(GPUS, of=tokens))
    for layout, groups in (("dp=4", 4), ("pp=2", 2), ("tp=2,pp=2", 1)):
        assert value(run, "tokens.total", "--layout", layout) == groups * STEPS * TOKENS
