"""Which training a process belongs to: asked of the framework, once it knows.

The trap: the environment when the interpreter starts. Lightning sets a rank late, `spawn` sets
none, and two ranks that both call themselves 0 are counted twice; two trainings side by side in one
command are taken for ranks of one. So ranks are asked of torch.distributed or jax when the first
batch has come, and who shares a group with whom is told by the address that the group met at.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
from typing import Any

from ergmeter.runlog.liveness import started_s

_trainings = itertools.count()


def world_size() -> int:
    """How many processes train together with this one, itself included."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_world_size())
    except (AttributeError, RuntimeError, ValueError):
        pass  # half imported, or the group was destroyed between two questions
    jax = sys.modules.get("jax")
    if jax is not None and "jax._src.distributed" in sys.modules:
        state = sys.modules["jax._src.distributed"].global_state
        if getattr(state, "client", None) is not None:
            return int(jax.process_count())
    return 1


def training_identity(model: object = None) -> dict[str, Any]:
    """What tells this training from others in the same run; ranks of one training agree on it."""
    number = next(_trainings)
    world = world_size()
    own = f"{os.getpid()}|{started_s(os.getpid())}"
    met = _met_at() if world > 1 else own
    whole = hashlib.sha256(f"{world}|{met}|{number}".encode()).hexdigest()[:12]
    return {"id": whole, "world": world, "number": number, "model": type(model).__name__}


def _met_at() -> str:
    """What the processes of a group have in common and those of another do not."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    said = [os.environ.get(name, "") for name in names]
    if any(said):
        return "|".join(said)
    parent = os.getppid()  # whoever spawned the ranks
    return f"{parent}|{started_s(parent)}"
