"""Which training a process belongs to: asked of the framework, once it knows.

The trap: two ranks that both call themselves 0 are counted twice, and two trainings side by side in
one command are taken for ranks of one. So who trains with whom is asked when the first batch has
come and the processes have met (`meeting`).
"""

from __future__ import annotations

import itertools
import secrets
from typing import Any, cast

from ergmeter.flops.counted.unsharded import sizes, unsharded_parameters
from ergmeter.runlog.process_group import agreed_word, framework_layout, world_size

__all__ = ["training_identity", "world_size"]

_trainings = itertools.count()
_in_group = itertools.count()  # apart: a rank that has trained alone before is no other's number


def training_identity(model: object = None) -> dict[str, Any]:
    """What tells this training from others in the same run; ranks of one training agree on it."""
    world = world_size()
    word = agreed_word(f"ergmeter/training/{next(_in_group)}") if world > 1 else None
    return {
        "id": word or secrets.token_hex(6),
        "world": world,
        "number": next(_trainings),
        **({} if model is None else {"model": _class_name(model)}),
        **_model_sizes(model),
        **({"layout": told} if (told := framework_layout(model)) else {}),
    }


def _class_name(model: object) -> str:
    """The class of a model, and not of what compiles it or spreads it over devices."""
    if hasattr(model, "named_modules"):
        from ergmeter.flops.counted.meta_model import unwrapped  # noqa: PLC0415  torch is loaded then

        model = unwrapped(cast("Any", model))
    return type(model).__name__


def _model_sizes(model: object) -> dict[str, int]:
    """Parameters of the whole model, not of this rank's part of it."""
    if not hasattr(model, "named_modules"):
        return {}
    found = sizes(unsharded_parameters(model))
    return {} if found is None else {"parameters": found[0], "parameters_trained": found[1]}
