"""What products are computed in, where weights in fp32 don't say: under autocast, and its like.

Only what is known is said. That no autocast is on where a model is called proves nothing: it may be
switched on inside.
"""

from __future__ import annotations

import sys
from typing import Any

_SHORT = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
_ACCELERATE = ("bf16", "fp16")  # with fp8 some products are, and some are not
# As Lightning and Fabric call it; "transformer-engine" is left out for the same reason.
_LIGHTNING = {
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "16-mixed": "fp16",
    "16-true": "fp16",
}


def of_call(module: Any, wrapped: Any) -> str | None:  # noqa: ANN401  torch modules
    """As a module is called now, and as whoever prepared it for its loop has set it up."""
    return _autocast(wrapped) or of_lightning(_fabric(module)) or _accelerate(wrapped)


def of_lightning(precision: object) -> str | None:
    """By the name that Lightning has for it."""
    return _LIGHTNING.get(str(precision))


def _autocast(module: Any) -> str | None:  # noqa: ANN401
    torch: Any = sys.modules["torch"]
    first = next(module.parameters(), None)
    if first is None:
        return None
    kind = first.device.type
    try:
        is_on = torch.is_autocast_enabled(kind)
        return _SHORT.get(str(torch.get_autocast_dtype(kind))) if is_on else None
    except (TypeError, RuntimeError, AttributeError):  # torch before 2.4; a device without it
        return None


def _fabric(module: Any) -> object:  # noqa: ANN401
    strategy = getattr(module, "_strategy", None)
    return getattr(getattr(strategy, "precision", None), "precision", None)


def _accelerate(module: Any) -> str | None:  # noqa: ANN401
    """Accelerate puts autocast into the forward of a model that it prepares."""
    state: Any = sys.modules.get("accelerate.state")
    if state is None or not hasattr(module, "_original_forward"):
        return None
    said = str(state.AcceleratorState._shared_state.get("_mixed_precision"))
    return said if said in _ACCELERATE else None
