"""Bytes that hang on a parameter: what an optimizer keeps for it, and what quantising saves.

The trap: "Adam is 8 bytes a parameter". torch's AdamW keeps its two moments in the parameter's own
type, so 4 for a model in bf16; bitsandbytes' keeps them in 32 bits, or in 8 with a scale for each
256; with a master copy it is 12. A 4-bit weight is not half a byte either: its scales are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ergmeter.errors import UsageError
from ergmeter.flops.estimate.storage import KEPT
from ergmeter.flops.graph.graph import Linear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ergmeter.flops.estimate.storage import StoredType
    from ergmeter.flops.graph.graph import Node

_FP32 = 4
_BLOCK_8BIT = 256  # bitsandbytes' block of an 8-bit state, each with a scale in 32 bits
_LEAST_8BIT = 4096  # below this many numbers it keeps 32 bits (min_8bit_size)


# Temporaries of torch's AdamW (torch/optim/adam.py). foreach: the square roots of all second
# moments at once. A loop over tensors: a root and its quotient, one tensor at a time. Fused: none.
Scratch = Literal["none", "foreach", "loop"]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer keeps for one tensor of parameters."""

    name: str
    moments: Callable[[Node, float], float]  # (node, bytes of a number) -> bytes
    says: str
    is_paged: bool = False  # in unified memory, which leaves the device when it is short
    scratch: Scratch = "none"


def _moments(count: int) -> Callable[[Node, float], float]:
    return lambda node, size: count * node.params * size


def _in_32_bits(count: int) -> Callable[[Node, float], float]:
    return lambda node, _size: count * node.params * _FP32


def _in_8_bits(count: int) -> Callable[[Node, float], float]:
    def held(node: Node, _size: float) -> float:
        each = _FP32 if node.params < _LEAST_8BIT else 1 + _FP32 / _BLOCK_8BIT
        return count * node.params * each

    return held


def _factored(node: Node, _size: float) -> float:
    """A row and a column of the second moment for each matrix (arXiv 1804.04235), no first."""
    if isinstance(node.work, Linear):
        return (node.work.inputs + node.work.outputs) * node.work.copies * _FP32
    return node.params * _FP32 if node.role == "" else node.params**0.5 * 2 * _FP32


def _orthogonal(node: Node, size: float) -> float:
    """Momentum for matrices inside layers; AdamW's two moments for the rest."""
    is_matrix = isinstance(node.work, Linear) and node.role == ""
    return node.params * size * (1 if is_matrix else 2)


OPTIMIZERS = {
    each.name: each
    for each in (
        Optimizer(
            "adamw",
            _moments(2),
            "torch's AdamW as it is by default on CUDA (foreach): two moments in the parameter's"
            " type, and during the step a temporary as large as one of them",
            scratch="foreach",
        ),
        Optimizer(
            "adamw-fused",
            _moments(2),
            "torch's AdamW(fused=True), the default of transformers' Trainer: two moments in the"
            " parameter's type, no temporaries",
        ),
        Optimizer(
            "adamw-loop",
            _moments(2),
            "torch's AdamW(foreach=False): two moments in the parameter's type, and during the step"
            " two temporaries as large as the largest tensor",
            scratch="loop",
        ),
        Optimizer("adamw-32bit", _in_32_bits(2), "two moments in 32 bits"),
        Optimizer("adamw-8bit", _in_8_bits(2), "bitsandbytes: two moments in 8 bits"),
        Optimizer("paged-adamw", _in_32_bits(2), "bitsandbytes, paged: 32 bits", is_paged=True),
        Optimizer("paged-adamw-8bit", _in_8_bits(2), "bitsandbytes, paged: 8 bits", is_paged=True),
        Optimizer("lion", _moments(1), "one moment"),
        Optimizer("sgd", _moments(0), "nothing; weight decay would add a temporary"),
        Optimizer("sgd-momentum", _moments(1), "one moment"),
        Optimizer("adafactor", _factored, "a row and a column for each matrix, in 32 bits"),
        Optimizer("muon", _orthogonal, "one moment; two for embeddings, head and vectors"),
    )
}


def optimizer(name: str) -> Optimizer:
    """By name."""
    if name not in OPTIMIZERS:
        raise UsageError(f"no optimizer {name!r}; there are {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def state_bytes(name: str, node: Node, number: int, master: int) -> tuple[float, float]:
    """(device, host) bytes for a node's parameters; beside a master copy, moments are like it."""
    found = optimizer(name)
    copy = node.params * master if node.part != "lora" else 0
    held = found.moments(node, max(number, master))
    return (copy, held) if found.is_paged else (copy + held, 0)


def scratch_bytes(name: str, states: Iterable[float]) -> float:
    """Temporaries of an optimizer's step, from the bytes of one moment of each tensor."""
    scratch = optimizer(name).scratch
    if scratch == "foreach":
        return sum(states)
    return 2 * max(states, default=0.0) if scratch == "loop" else 0.0


QUANTISED = ("nf4", "nf4-double", "int8")  # as bitsandbytes keeps the matrices of a base


def stored_as(quantised: object) -> str | None:
    """What a config's `quantization_config` says its checkpoint is kept in, in a word or two."""
    if not isinstance(quantised, dict) or not quantised:
        return None
    for bits in ("4", "8"):
        if quantised.get(f"load_in_{bits}bit") or quantised.get(f"_load_in_{bits}bit"):
            return f"{quantised.get('quant_method') or 'bitsandbytes'}, {bits} bits"
    method = str(quantised.get("quant_method") or quantised.get("quant_algo") or "no method named")
    width = quantised.get("bits")
    return f"{method}, {width} bits" if isinstance(width, int) else method


def quantisation(name: str | None) -> StoredType | None:
    """By name."""
    if name is not None and name not in QUANTISED:
        raise UsageError(f"no quantisation {name!r}; there are {', '.join(QUANTISED)}")
    return KEPT[name] if name else None
