"""Is this line one of a program that an importer of its own knows?

The importers may not know one another, and the one for any loop must leave these lines to theirs.
"""

from __future__ import annotations

# Plain substrings that no other program prints in a step line.
EFFICIENTLLM = "[EfficientLLM"
MEGATRON = "elapsed time per iteration (ms):"
NXDT = "reduced_train_loss"


def of_another(text: str) -> bool:
    """Whether an importer of its own reads this line."""
    if EFFICIENTLLM in text or MEGATRON in text or NXDT in text:
        return True
    return is_torchtitan(text)


def is_torchtitan(text: str) -> bool:
    """`step: 10  loss: 7.9  memory: 47.2GiB(59.7%)  tps: 5,123 ...`, in colours or not."""
    return "memory:" in text and "GiB(" in text and ("tps:" in text or "wps:" in text)
