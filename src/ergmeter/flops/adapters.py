"""Low-rank adapters, as a rewriting of the graph: what LoRA adds, and what it leaves frozen.

The trap: LoRA billed as full training (a third too much), or at two thirds of everything (the
attention core has no weights to freeze; the adapters are trained in full). Put into the graph, the
right count follows from the rule for gradients alone, down to the layer below which nothing is
walked back through. QLoRA is the same graph: unpacking 4-bit weights is no model FLOPs.

LoRA: arXiv 2106.09685. DoRA, which adds a trained length to each output: arXiv 2402.09353.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ergmeter.errors import UsageError
from ergmeter.flops.graph import Linear

if TYPE_CHECKING:
    from ergmeter.flops.graph import Graph, Node, Trainable

ALL_LINEAR = "all-linear"
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
            elif equals and name in ("targets", "target_modules"):
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
    nodes: list[Node] = []
    missed = set(lora.targets)
    for node in graph:
        target = _target(node, lora)
        if target is None or not isinstance(node.work, Linear):
            nodes.append(node)
        else:
            missed.discard(target)
            nodes.extend(_adapted(node, node.work, lora))
    if missed:
        raise UsageError(
            f"no module of this model is called {', '.join(sorted(missed))!r};"
            f" it has {', '.join(module_names(graph))}"
        )
    adapters = {node.name for node in nodes if node.part == "lora" and node.params}
    return graph.with_nodes(tuple(nodes)), lambda node: node.name in adapters


def module_names(graph: Graph) -> list[str]:
    """The last names of the modules that can have an adapter, in the order of the model."""
    names = (node.name.rpartition(".")[2] for node in graph if _can_have_adapter(node))
    return list(dict.fromkeys(names))


def _can_have_adapter(node: Node) -> bool:
    return isinstance(node.work, Linear) and node.work.is_module


def _target(node: Node, lora: Lora) -> str | None:
    """Which of the targets means this node; PEFT's rule: the name, or its end after a dot."""
    if not _can_have_adapter(node):
        return None
    for target in lora.targets:
        if target == ALL_LINEAR:
            if node.part != "head":
                return target
        elif node.name == target or node.name.endswith(f".{target}"):
            return target
    return None


def _adapted(node: Node, work: Linear, lora: Lora) -> list[Node]:
    """The node frozen, its two small matrices, and under its old name the sum of both."""
    base = replace(node, name=f"{node.name}.base_layer")
    down = Linear(work.inputs, lora.r, copies=work.copies, used=work.used)
    up = Linear(lora.r, work.outputs, copies=work.copies, used=work.used)
    like = replace(node, part="lora", role="", tied_to=None, work=None)
    first = replace(like, name=f"{node.name}.lora_A", params=down.held, work=down)
    second = replace(like, name=f"{node.name}.lora_B", of=(first.name,), params=up.held, work=up)
    length = work.outputs * work.copies if lora.is_dora else 0
    both = replace(like, of=(base.name, second.name), params=length)
    return [base, first, second, both]
