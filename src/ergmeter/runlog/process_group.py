"""Rank, world size and parallel layout of this process, and whether a run's writer is alive.

The environment is not enough: Lightning sets a rank late, `spawn` sets none, and two groups spawned
one after the other use the same address. So the process group itself is asked, once there is one.
Its processes agree on a word through their shared store, without waiting. Nothing is imported: a
framework that is not loaded has no group.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import psutil


def world_size() -> int:
    """How many processes train together with this one, itself included."""
    return _of_group("get_world_size", "process_count") or 1


# Variables with the number of processes that a launcher started. All of a group must be set: a
# shell in a SLURM allocation of 8 tasks has SLURM_NTASKS as well, but is alone.
_INTERACTIVE = "4294967290"  # the step of a shell in an allocation
_SIZES = (
    ("WORLD_SIZE",),
    ("SLURM_NTASKS", "SLURM_STEP_ID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
)


def launcher_world_size() -> int:
    """The number of processes that the launcher started together, by its environment."""
    here = {name: value for name, value in os.environ.items() if value != _INTERACTIVE}
    sizes = [here[names[0]] for names in _SIZES if all(name in here for name in names)]
    return max((int(size) for size in sizes if size.isdecimal()), default=1)


def launched_size() -> int:
    """The number of ranks that torchrun or the like has started, also before they connect.

    A scheduler's tasks do not count: they may be separate trainings. Nor does WORLD_SIZE without
    LOCAL_RANK: it may be the number of machines of a job.
    """
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() and "LOCAL_RANK" in os.environ else 1


def launcher_rank() -> int | None:
    """This process's rank by its launcher's environment; None without a launcher."""
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    values = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdecimal()), None)


def own_rank() -> int | None:
    """This process's rank in its process group; None if there is no group, or no longer."""
    return _of_group("get_rank", "process_index")


def _of_group(by_torch: str, by_jax: str) -> int | None:
    """Call a function of the process group, by its name in torch and in jax; None if it fails."""
    try:
        distributed = _distributed()
        if distributed is not None:
            return int(getattr(distributed, by_torch)())
        if _jax_client() is not None:
            return int(getattr(sys.modules["jax"], by_jax)())
    except (AttributeError, RuntimeError, ValueError):
        pass  # half imported, or the group was destroyed between two questions
    return None


def agreed_word(name: str) -> str | None:
    """Return a random word that only the processes of this group share; None if alone."""
    if world_size() < 2:
        return None
    own = secrets.token_hex(6)
    try:
        distributed = _distributed()
        if distributed is not None:
            store = distributed.distributed_c10d._get_default_store()
            return bytes(store.compare_set(name, "", own)).decode()
        return _agreed_in_jax(_jax_client(), name, own)
    except (AttributeError, RuntimeError, ValueError, NotImplementedError):
        return _launch_address(name)  # a store that can't compare, or a group that is gone already


def _agreed_in_jax(client: Any, name: str, own: str) -> str:  # noqa: ANN401  of its coordinator
    try:
        client.key_value_set(name, own)
    except RuntimeError:  # somebody was here before
        return str(client.key_value_try_get(name))
    return own


def _distributed() -> Any:  # noqa: ANN401  torch.distributed, with a group
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return distributed
    except (AttributeError, RuntimeError, ValueError):
        pass  # half imported
    return None


def _jax_client() -> Any:  # noqa: ANN401
    if "jax" not in sys.modules or "jax._src.distributed" not in sys.modules:
        return None
    return getattr(sys.modules["jax._src.distributed"].global_state, "client", None)


def _launch_address(name: str) -> str:
    """A substitute for an agreed word: the launch's address, or else the parent process."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    values = [os.environ.get(variable, "") for variable in names]
    if any(values):
        return "|".join([*values, name])
    parent = os.getppid()
    return f"{parent}|{started_s(parent)}|{name}"


# The layout of the training, read from the framework that made it. Megatron-LM and device meshes
# can number ranks in any order, so a command line does not tell. A position among only some of
# the ranks is not enough: a mesh over each pair, with DDP over the pairs, makes all pairs look
# alike. So a position counts where its sizes make up the world, or where meshes of its shape
# cover it. Otherwise the layout is unknown, with the reason.


# By what their functions are called; a world of 1 says nothing. NxD's cp has a name of its own, and
# its sizes are `get_.._size` where Megatron-LM's are `get_.._world_size`.
_MEGATRON = {
    "tp": ("tensor_model_parallel",),
    "cp": ("context_parallel", "context_model_parallel"),
    "pp": ("pipeline_model_parallel",),
    "dp": ("data_parallel",),
}
_SIZE_FUNCTIONS = ("world_size", "size")
_STATES = (
    "megatron.core.parallel_state",
    "neuronx_distributed.parallel_layers.parallel_state",
    "megatron.mpu",
)
_DEEPSPEED = {"tp": ("model_parallel",), "pp": ("pipe_parallel",), "dp": ("data_parallel",)}
# Usual names of a mesh's dimensions. The first match wins: a name with a word of data parallelism
# is data-parallel, and "model" is last, as in "pipeline_model_parallel".
_WORDS = {
    "dp": {"dp", "ddp", "fsdp", "hsdp", "data", "batch", "replica", "replicas", "replicate"},
    "pp": {"pp", "pipe", "pipeline"},
    "cp": {"cp", "sp", "context", "sequence"},
    "tp": {"tp", "tensor", "mp", "model"},
}

RankPosition = dict[str, tuple[int, int]]
"""By dimension: this rank's index along it, and its length."""


def framework_layout(model: object = None) -> dict[str, Any] | None:
    """This rank's position (`at`) and its source, or why it is unknown (`unknown`).

    None if no loaded framework uses more than data parallelism.
    """
    for whose, ask in (
        ("Megatron", _megatron),
        ("DeepSpeed", _deepspeed),
        ("Accelerate", _accelerate),
        ("DeviceMesh", lambda: _of_mesh(_mesh_of(model))),
    ):
        try:
            position = ask()
        except (AttributeError, AssertionError, KeyError, RuntimeError, TypeError, ValueError):
            continue  # not set up yet, or another version
        if position:
            return _in_world(position, whose)
    return None


def _in_world(position: RankPosition, whose: str) -> dict[str, Any]:
    """Return the position; or why it is unknown, if its sizes do not make up all ranks."""
    world, placed = world_size(), prod(size for _, size in position.values())
    if world < 2 or placed == world:
        return {"at": {name: list(where) for name, where in position.items()}, "from": whose}
    sizes = ", ".join(f"{name}={size}" for name, (_, size) in position.items())
    return {"unknown": f"{whose} places {placed} of the {world} ranks ({sizes})", "from": whose}


def _megatron() -> RankPosition:
    for name in _STATES:
        state = sys.modules.get(name)
        if state is not None and state.model_parallel_is_initialized():
            return _position_in(state, _MEGATRON)
    return {}


def _deepspeed() -> RankPosition:
    """The position by the `mpu` that DeepSpeed was given."""
    mpu = getattr(sys.modules.get("deepspeed.utils.groups"), "mpu", None)
    return _position_in(mpu, _MEGATRON) or _position_in(mpu, _DEEPSPEED) if mpu is not None else {}


def _position_in(state: Any, names: Mapping[str, tuple[str, ...]]) -> RankPosition:  # noqa: ANN401  a module or an object
    position: RankPosition = {}
    for dimension, called in names.items():
        for name in called:
            rank = getattr(state, f"get_{name}_rank", None)
            sizes = (getattr(state, f"get_{name}_{size}", None) for size in _SIZE_FUNCTIONS)
            size = next((function for function in sizes if function is not None), None)
            if rank is not None and size is not None:
                position[dimension] = (int(rank()), int(size()))
    return _if_model_parallel(position)


def _accelerate() -> RankPosition:
    state = sys.modules.get("accelerate.state")
    shared = state.AcceleratorState._shared_state if state is not None else {}
    return _of_mesh(shared.get("device_mesh"))


def _mesh_of(model: object) -> Any:  # noqa: ANN401  a DeviceMesh, or None
    """The root mesh, with all dimensions, that a model's parameters are distributed over."""
    if not hasattr(model, "parameters"):
        return None
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            root = getattr(mesh, "_get_root_mesh", lambda: None)()
            return root if root is not None else mesh
    return None


def _of_mesh(mesh: Any) -> RankPosition:  # noqa: ANN401
    """A mesh's dimensions by their usual names; unknown ones count as data-parallel."""
    names, at = getattr(mesh, "mesh_dim_names", None), mesh and mesh.get_coordinate()
    if not names or at is None:
        return {}
    position: RankPosition = {}
    for number, name in enumerate(names):
        dimension = dimension_of(str(name))
        index, size = position.get(dimension, (0, 1))
        length = int(mesh.size(number))
        position[dimension] = (index * length + int(at[number]), size * length)
    world = world_size()
    if _if_model_parallel(position) and world > 1 and "dp" not in position:
        copies = _mesh_copies(mesh.mesh.flatten().tolist(), world)
        if copies is not None:
            position["dp"] = copies
    return _if_model_parallel(position)


def _mesh_copies(ranks: Sequence[int], world: int) -> tuple[int, int] | None:
    """The index of this mesh among equal meshes that cover all ranks, and their number.

    None if such meshes can't cover them.
    """
    first = min(ranks)
    shape = [rank - first for rank in ranks]
    left = set(range(world))
    own, copies = -1, 0
    for start in range(world):
        if start not in left:
            continue
        covered = {start + step for step in shape}
        if not covered <= left:
            return None
        left -= covered
        own = copies if start == first else own
        copies += 1
    return None if own < 0 else (own, copies)


def dimension_of(name: str) -> str:
    """The dimension (dp, tp, pp ...) that a mesh's dimension name means; dp if unknown."""
    words = set(re.findall(r"[a-z]+", name.lower()))
    return next((ours for ours, theirs in _WORDS.items() if words & theirs), "dp")


def _if_model_parallel(position: RankPosition) -> RankPosition:
    """Return the position; empty if all ranks are data-parallel."""
    return position if any(n > 1 for name, (_, n) in position.items() if name != "dp") else {}


# Whether the process that writes a run is still alive. A writer hands over at least once a second,
# so files that have not changed for a while mean that it is gone or stuck. On the writer's own host
# the process is looked up as well; its start time tells it from a later one with its number.

# Twenty missed hand-overs: a file system that hides an append for longer than this (NFS caches
# attributes for up to 60 s, by default 3 to 30 s) makes a live run look cut off for that long.
STALE_S = 20.0


def boot_id() -> str | None:
    """The id of this boot of this machine; None where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def started_s(pid: int) -> float | None:
    """When a process started, by the system's clock; None if there is no such process."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def is_fresh(path: Path) -> bool:
    """True if a file has changed within the last `STALE_S` seconds."""
    try:
        return time.time() - path.stat().st_mtime <= STALE_S
    except FileNotFoundError:  # it was renamed just now, so its writer lives
        return True


def is_alive(directory: Path, header: dict[str, Any]) -> bool:
    """True if the writer of this directory is still running."""
    if not any(map(is_fresh, directory.iterdir())):
        return False
    if header.get("boot_id") != boot_id() or boot_id() is None:
        return True  # another host, or a container that can't say: the files are all we can see
    try:
        return same_process(int(header["pid"]), float(header["pid_started_s"])) is not None
    except (KeyError, TypeError, ValueError):
        return True


def same_process(pid: int, expected_s: float) -> psutil.Process | None:
    """Return the process with this PID, if it started at `expected_s` and still runs."""
    try:
        process = psutil.Process(pid)
        is_same = abs(process.create_time() - expected_s) < 1.0
        return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None
