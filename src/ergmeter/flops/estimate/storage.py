"""What a weight takes where it is kept: its bits, and its share of the scales beside them.

The trap: "4 bits". A scale is stored for each few weights, so nf4 takes 4.5 bits, or 4.127 with its
scales quantised as well, AWQ and GPTQ 4.16, mxfp4 4.25. And it is the matrices inside layers that
are quantised: head and tables mostly stay in 16 bits, which are two fifths of Qwen2.5-7B-AWQ.

Products may be in a third type: 4-bit weights are unpacked and multiplied in bf16.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ergmeter.errors import UsageError
from ergmeter.flops.graph.graph import Linear

if TYPE_CHECKING:
    from ergmeter.flops.graph.graph import Graph, Node

WIDE = 16  # bits from which on a type is for all of a model and not just for its matrices


@dataclass(frozen=True, slots=True)
class StoredType:
    """A type that numbers are kept in."""

    name: str
    bits: int
    scale_bits: int = 0  # of what is stored beside each group of weights: its scale and its zero
    group: int | None = None  # weights that share it; None: all those of an output

    def bits_in(self, work: Linear) -> float:
        """Bits of one weight of a matrix, scales included."""
        return self.bits + self.scale_bits / (self.group or work.inputs)

    def matrix_bytes(self, work: Linear, number_bytes: float) -> float:
        """Of a whole matrix, whose bias has so many bytes a number."""
        weights = work.inputs * work.outputs * work.copies
        return weights * self.bits_in(work) / 8 + (work.held - weights) * number_bytes

    @property
    def said(self) -> str:
        """In words, with the rule for its scales."""
        if not self.scale_bits:
            return f"{self.name}, {self.bits} bits"
        scales = f"{self.scale_bits} bits of scaling data for each"
        if self.group is None:
            return f"{self.name}, {self.bits} bits, and {scales} output"
        each = self.bits + self.scale_bits / self.group
        return f"{self.name}, {each:.4g} bits: {self.bits}, and {scales} {self.group} weights"


# bitsandbytes: a scale in 32 bits for each 64 weights, or one in 8 bits and for each 256 of those
# one in 32 (QLoRA, arXiv 2305.14314); int8 with one in 32 for each output (arXiv 2208.07339). AWQ
# and GPTQ: a scale in 16 bits and a zero as wide as a weight for each group, mostly of 128. The
# microscaling types: 8 bits for each 32 (OCP MX 1.0); NVIDIA's, for each 16.
KEPT = {
    each.name: each
    for each in (
        StoredType("fp32", 32),
        StoredType("bf16", 16),
        StoredType("fp16", 16),
        StoredType("fp8", 8),
        StoredType("int8", 8, 32),
        StoredType("nf4", 4, 32, 64),
        StoredType("nf4-double", 4, 8 * 256 + 32, 64 * 256),
        StoredType("int4", 4, 16 + 4, 128),
        StoredType("mxfp4", 4, 8, 32),
        StoredType("nvfp4", 4, 8, 16),
    )
}
# What a cache is kept in: the same without scales, of which it has one for a head or less.
CACHED = {
    name: replace(KEPT[name], scale_bits=0) for name in ("fp32", "bf16", "fp16", "fp8", "int8")
}
_LONG = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "fp4": "nvfp4"}


def kept_as(name: str, *, known: dict[str, StoredType] = KEPT) -> StoredType:
    """A type by its name, or by the one torch has for it."""
    short = _LONG.get(name.lower(), name.lower())
    if short not in known:
        raise UsageError(f"nothing is kept as {name!r} here; there are {', '.join(known)}")
    return known[short]


@dataclass(frozen=True, slots=True)
class Storage:
    """How a model's numbers are kept."""

    matrices: StoredType  # inside layers
    rest: StoredType  # head, embeddings, norms, biases, and matrices that are not converted
    cache: StoredType
    left_alone: tuple[str, ...] = ()  # modules whose matrices are like the rest, as patterns
    parts: tuple[str, ...] = ()  # of the model, whose matrices alone are quantised; none: all
    said: tuple[str, ...] = ()  # what is kept how, and who says so

    def held_bytes(self, node: Node) -> float:
        """Of what a node holds; of a matrix that is another's, of that."""
        work = node.work
        if not isinstance(work, Linear):
            return node.params * self.rest.bits / 8
        kept = self.matrices if self._is_quantised(node) else self.rest
        return kept.matrix_bytes(work, self.rest.bits / 8)

    def total_bytes(self, graph: Graph) -> float:
        """Of all weights, each once: a checkpoint's size."""
        return sum(self._own_bytes(node) for node in graph if node.params)

    def _own_bytes(self, node: Node) -> float:
        """Of what a node has to itself: of a tied head, its bias."""
        return node.params * self.rest.bits / 8 if node.tied_to else self.held_bytes(node)

    def _is_quantised(self, node: Node) -> bool:
        if self.matrices.bits >= WIDE:
            return True
        if (
            node.role
            or node.part in ("router", "lora")
            or (self.parts and node.part not in self.parts)
        ):
            return False
        return not any(_means(pattern, node.name) for pattern in self.left_alone)


def _means(pattern: str, name: str) -> bool:
    """Whether a name of modules that are not converted is one of this node, or of one around it."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error:
            return False
    words = ".*".join(re.escape(word) for word in pattern.split("*"))
    return re.search(rf"(^|\.){words}(\.|$)", name) is not None


def plain(name: str, *, said: str) -> Storage:
    """Everything in one type."""
    kept = kept_as(name)
    return Storage(kept, kept, kept, said=(f"weights and cache in {kept.said}: {said}",))


ASSUMED = plain("bf16", said="assumed, no type is given")
