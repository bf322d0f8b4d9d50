"""Low-rank adapters, as a rewriting of the graph: what LoRA adds, and what it leaves frozen.

The trap: LoRA billed as full training (a third too much), or at two thirds of everything (the
attention core has no weights to freeze; the adapters are trained in full). Put into the graph, the
right count follows from the rule for gradients alone, down to the layer below which nothing is
walked back through. QLoRA is the same graph: unpacking 4-bit weights is no model FLOPs.

The other trap: experts. transformers 5 holds them as one tensor, which is no module, so PEFT adapts
the tensor (`targets.py` says when). It adds the update to the weight and multiplies rows with the
sum, where a module's adapter multiplies rows with two small matrices. The model's FLOPs are those
of the small matrices in either case, so that an MFU does not depend on who wrote the adapter; what
PEFT's way costs beyond is in the hardware's.

LoRA: arXiv 2106.09685. DoRA, which adds a trained length to each output: arXiv 2402.09353.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ergmeter.errors import UsageError
from ergmeter.flops.graph.graph import Fold, Linear
from ergmeter.flops.graph.lora_targets import chosen

if TYPE_CHECKING:
    from ergmeter.flops.graph.graph import Graph, Node, Trainable

# What PEFT puts adapters on where nothing is asked for depends on the family; we ask.
_NO_TARGETS = "say which modules get adapters, as in r=16,targets=q_proj,v_proj"


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters of rank `r` on the modules whose names end in one of `targets`."""

    r: int
    targets: tuple[str, ...]
    is_dora: bool = False

    def __post_init__(self) -> None:
        if self.r < 1:
            raise UsageError(f"a LoRA rank must be a whole number of 1 or more; got {self.r!r}")
        if not self.targets:
            raise UsageError(f"LoRA has no targets; {_NO_TARGETS}")

    @classmethod
    def parse(cls, text: str) -> Lora:
        """From `r=16,targets=q_proj,v_proj` (or `targets=all-linear`), with `,dora` for DoRA."""
        r: int | None = None
        targets: list[str] = []
        is_dora = in_targets = False
        for word in (word.strip() for word in text.split(",")):
            name, equals, value = word.partition("=")
            if equals and name in ("r", "rank"):
                in_targets = False
                if not value.isdigit():
                    raise UsageError(f"the LoRA rank in {text!r} must be a number; got {value!r}")
                r = int(value)
            elif equals and name in ("targets", "target_modules", "target_parameters"):
                in_targets = True
                targets.append(value)
            elif word in ("dora", "use_dora=true"):
                is_dora = True
            elif in_targets and word and not equals:
                targets.append(word)
            else:
                raise UsageError(f"{word!r} in --lora {text!r} is not understood; {_NO_TARGETS}")
        if r is None:
            raise UsageError(f"--lora {text!r} has no rank; {_NO_TARGETS}")
        return cls(r, tuple(target for target in targets if target), is_dora)


def with_adapters(graph: Graph, lora: Lora) -> tuple[Graph, Trainable]:
    """The graph with its adapters, and which of its nodes are trained: the adapters."""
    found = chosen(graph, lora.targets)
    nodes: list[Node] = []
    for node in graph:
        times = found.ranks.get(node.name)
        if times is None or not isinstance(node.work, Linear):
            nodes.append(node)
        else:
            nodes.extend(_adapted(node, node.work, lora, rank=times * lora.r))
    folded = [node.name for node in nodes if isinstance(node.work, Fold)]
    if folded and lora.is_dora:
        raise UsageError(
            f"PEFT has no DoRA for weights that are no module, such as {folded[0]};"
            " leave out dora, or target modules alone"
        )
    adapters = {node.name for node in nodes if node.part == "lora" and node.params}
    said = (*graph.assumptions, *found.said)
    changed = replace(graph, nodes=tuple(nodes), assumptions=said)
    return changed, lambda node: node.name in adapters


def _adapted(node: Node, work: Linear, lora: Lora, *, rank: int) -> list[Node]:
    """The node frozen, its two small matrices, and under its old name the sum of both."""
    base = replace(node, name=f"{node.name}.base_layer")
    down = Linear(work.inputs, rank, copies=work.copies, used=work.used)
    up = Linear(rank, work.outputs, copies=work.copies, used=work.used)
    like = replace(node, part="lora", role="", tied_to=None, work=None)
    first = replace(like, name=f"{node.name}.lora_A", params=down.held, work=down)
    second = replace(like, name=f"{node.name}.lora_B", of=(first.name,), params=up.held, work=up)
    length = work.outputs * work.copies if lora.is_dora else 0
    fold = None
    if not work.is_module:
        fold = Fold(work.inputs, work.outputs, rank, work.copies, work.used)
    both = replace(like, of=(base.name, second.name), params=length, work=fold)
    return [base, first, second, both]
