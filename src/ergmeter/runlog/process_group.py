"""What the processes of one group agree on, without waiting for each other.

The trap: the environment. Lightning sets a rank late and `spawn` sets none; two groups that are
spawned one after the other meet at the same address. So the group itself is asked, once there is
one: its processes share a store, whoever comes first leaves a word in it, and the others find it.
Nothing is imported to ask: a framework that is not loaded has no group.
"""

from __future__ import annotations

import os
import secrets
import sys
from typing import Any

from ergmeter.runlog.liveness import started_s


def in_group() -> bool:
    """Whether this process belongs to a group of its framework's."""
    return own_rank() is not None


def world_size() -> int:
    """How many processes train together with this one, itself included."""
    try:
        distributed = _distributed()
        if distributed is not None:
            return int(distributed.get_world_size())
        if _jax_client() is not None:
            return int(sys.modules["jax"].process_count())
    except (AttributeError, RuntimeError, ValueError):
        pass  # half imported, or the group was destroyed between two questions
    return 1


# What a launcher says of the size of what it launched, and what it says nowhere else: a shell in an
# allocation of 8 tasks is told of the 8 as well, and is alone.
_INTERACTIVE = "4294967290"  # the step of a shell in an allocation
_SIZES = (
    ("WORLD_SIZE",),
    ("SLURM_NTASKS", "SLURM_STEP_ID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
)


def told_size() -> int:
    """How many processes a launcher says it has started together with this one."""
    here = {name: value for name, value in os.environ.items() if value != _INTERACTIVE}
    said = [here[one[0]] for one in _SIZES if all(name in here for name in one)]
    return max((int(size) for size in said if size.isdecimal()), default=1)


def launched_size() -> int:
    """How many ranks torchrun or the like has started, which need not have met.

    Not the tasks of a scheduler, which may be trainings of their own; and not of a process that
    has no number on its node: WORLD_SIZE alone may be the machines of a job.
    """
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() and "LOCAL_RANK" in os.environ else 1


def told_task() -> int | None:
    """This process's number among those, where the launcher says it."""
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    said = (os.environ.get(name, "") for name in names)
    return next((int(one) for one in said if one.isdecimal()), None)


def own_rank() -> int | None:
    """This process's number in its group; None where there is no group, or no more."""
    try:
        distributed = _distributed()
        if distributed is not None:
            return int(distributed.get_rank())
        if _jax_client() is not None:
            return int(sys.modules["jax"].process_index())
    except (AttributeError, RuntimeError, ValueError):
        pass  # the group was destroyed between two questions
    return None


def agreed(name: str) -> str | None:
    """A word that all processes of this group are told and those of no other; None if alone."""
    if world_size() < 2:
        return None
    own = secrets.token_hex(6)
    try:
        distributed = _distributed()
        if distributed is not None:
            store = distributed.distributed_c10d._get_default_store()
            return bytes(store.compare_set(name, "", own)).decode()
        return _left_in_jax(_jax_client(), name, own)
    except (AttributeError, RuntimeError, ValueError, NotImplementedError):
        return _met_at(name)  # a store that can't compare, or a group that is gone already


def _left_in_jax(client: Any, name: str, own: str) -> str:  # noqa: ANN401  of its coordinator
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


def _met_at(name: str) -> str:
    """The next best: the address where a group met, or else whoever started its processes."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    said = [os.environ.get(one, "") for one in names]
    if any(said):
        return "|".join([*said, name])
    parent = os.getppid()
    return f"{parent}|{started_s(parent)}|{name}"
