"""Rewrites a graph with low-rank adapters: the nodes that LoRA adds, the weights it freezes.

LoRA counted as full training is a third too much. Two thirds of everything is wrong too: attention
scores have no weights to freeze, and adapters are trained in full. In the graph the right count
follows from the rule for gradients, down to the layer below which no gradient goes. QLoRA is the
same graph: unpacking 4-bit weights is no model FLOPs.

transformers 5 stores experts as one tensor, which is no module, so PEFT adapts the tensor. It adds
the update to the weight and multiplies rows with the sum, where a module's adapter multiplies rows
with two small matrices. Model FLOPs are those of the small matrices in either case, so that an MFU
does not depend on the adapter's implementation. What PEFT's way costs beyond is hardware FLOPs.

LoRA: arXiv 2106.09685. DoRA, which adds a trained length to each output: arXiv 2402.09353.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ergmeter.errors import UsageError
from ergmeter.flops.graph.graph import Fold, Graph, Linear, Node, Trainable

# Weights that a LoRA target means, by PEFT's rules.
#
# A target means a module by the end of its name, and experts stored as one tensor are no module.
# PEFT 0.21 treats them in three ways, as read off real models of transformers 5:
#
#   target_parameters=["experts.down_proj"]   the tensor itself, any family
#   target_modules of some families           older names, such as gate_proj, mean the tensor
#                                             gate_up_proj, at twice the rank (two matrices in one),
#                                             and no longer a dense layer's gate_proj
#   target_modules of the others              modules alone; all-linear leaves experts out
#
# `targets=experts` is ours: both tensors, as target_parameters would have them.

ALL_LINEAR = "all-linear"
EXPERTS = "experts"

# Families whose old names PEFT translates, and what gate, up and down were called there.
_PLAIN = ("gate_proj", "up_proj", "down_proj")
_LETTERS = ("w1", "w3", "w2")
_TRANSLATED = {
    **dict.fromkeys(("mixtral", "minimax_m2"), _LETTERS),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe"), _PLAIN),
    **dict.fromkeys(("olmoe", "qwen3_moe", "qwen3_next"), _PLAIN),
}


def chosen_targets(
    graph: Graph, targets: tuple[str, ...]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """The nodes that get an adapter, each with how many times the rank it has; and notes.

    UsageError for a target that means no node of this model.
    """
    old = _TRANSLATED.get(graph.family) if _tensors(graph) else None
    ranks: dict[str, int] = {}
    if ALL_LINEAR in targets:
        wanted: Iterable[Node] = (node for node in _modules(graph) if node.part != "head")
        ranks.update((node.name, 1) for node in wanted if not old or _last(node) not in old)
    named = [target for target in targets if target != ALL_LINEAR]
    if old:
        every = (*old, "gate") if ALL_LINEAR in targets else ()
        ranks.update(_translated(graph, (*every, *named), old))
        named = [target for target in named if not _is_old(target, old)]
    for target in named:
        matches = _named(graph, target)
        if not matches:
            raise UsageError(_nothing(graph, target))
        ranks.update(dict.fromkeys(matches, 1))
    return ranks, tuple(_targets_text(graph, targets, ranks, is_translated=old is not None))


def _modules(graph: Graph) -> list[Node]:
    return [node for node, work in graph.linears() if work.is_module]


def _tensors(graph: Graph) -> list[Node]:
    """Experts that are held as one tensor."""
    return [node for node, work in graph.linears() if work.copies > 1 and not work.is_module]


def _routers(graph: Graph) -> list[Node]:
    linears = graph.linears()
    return [node for node, work in linears if node.part == "router" and not work.is_module]


def _last(node: Node) -> str:
    return node.name.rpartition(".")[2]


def _ends(name: str, target: str) -> bool:
    """PEFT's rule: the name, or its end after a dot."""
    return name == target or name.endswith(f".{target}")


def _is_old(target: str, old: tuple[str, ...]) -> bool:
    return any(_ends(target, name) for name in (*old, "gate")) and ".experts." not in f".{target}"


def _translated(graph: Graph, targets: tuple[str, ...], old: tuple[str, ...]) -> dict[str, int]:
    """Names of before as PEFT translates them: to the tensors of the experts, and the router."""
    gate, up, down = (any(_is_old(t, (name,)) and _ends(t, name) for t in targets) for name in old)
    if gate != up:
        here, other = (old[0], old[1]) if gate else (old[1], old[0])
        raise UsageError(
            f"{here!r} of the experts is one tensor with {other}, gate_up_proj, and PEFT adapts it"
            f" only as a whole: target both, or experts.gate_up_proj"
        )
    ranks: dict[str, int] = {}
    for node in _tensors(graph):
        if gate and _last(node) == "gate_up_proj":
            ranks[node.name] = 2
        if down and _last(node) == "down_proj":
            ranks[node.name] = 1
    if any(_ends(target, "gate") for target in targets):
        ranks.update((node.name, 1) for node in _routers(graph))
    return ranks


def _named(graph: Graph, target: str) -> list[str]:
    """Modules of this name or, where there are none, tensors."""
    matches = [node.name for node in _modules(graph) if _ends(node.name, target)]
    if matches:
        return matches
    tensors = _tensors(graph)
    if target == EXPERTS:
        return [node.name for node in tensors]
    matches = [node.name for node in tensors if _ends(node.name, target)]
    return matches or [
        node.name for node in _routers(graph) if _ends(f"{node.name}.weight", target)
    ]


def module_names(graph: Graph) -> list[str]:
    """Names that a target can have, in the model's order: modules, then tensors of experts."""
    names = dict.fromkeys(map(_last, _modules(graph)))
    tensors = dict.fromkeys(f"{EXPERTS}.{_last(node)}" for node in _tensors(graph))
    return [*names, *tensors]


def _nothing(graph: Graph, target: str) -> str:
    there = ", ".join(module_names(graph))
    if _tensors(graph) and target in (*_PLAIN, *_LETTERS):
        return (
            f"no module of this model is called {target!r}: its experts are held as one tensor each"
            f" for gate and up, and for down; target experts, or some of {there}"
        )
    return f"no module of this model is called {target!r}; it has {there}"


def _targets_text(
    graph: Graph, targets: tuple[str, ...], ranks: dict[str, int], *, is_translated: bool
) -> Iterable[str]:
    """Notes on experts that are left out, and on how experts are adapted."""
    tensors = [node for node in _tensors(graph) if node.name in ranks]
    passed = [node for node in _tensors(graph) if node.name not in ranks]
    if tensors:
        doubled = ", of twice the rank on gate_up_proj" if 2 in ranks.values() else ""
        yield (
            f"adapters on experts{doubled}: model FLOPs as two small matrices a row; hardware's,"
            " and memory, as PEFT 0.21 adds the update to the whole weight"
        )
    if passed and ALL_LINEAR in targets:
        params = sum(node.params for node in passed)
        yield (
            f"all-linear passes the experts by ({params:.3g} parameters held as tensors, no"
            " modules), as in PEFT 0.21; target experts beside it to adapt them"
        )
    if is_translated:
        yield from _dense(graph, targets, ranks)


def _dense(graph: Graph, targets: tuple[str, ...], ranks: dict[str, int]) -> Iterable[str]:
    """Feed-forward layers that a translated name no longer means."""
    asked = {target.rpartition(".")[2] for target in targets}
    if ALL_LINEAR in targets:
        asked.update(_PLAIN)
    left = {_last(node) for node in _modules(graph) if node.name not in ranks}
    dense = sorted(left & asked & set(_PLAIN))
    if dense:
        yield (
            f"{', '.join(dense)} of dense and shared feed-forward layers get no adapter: in this"
            " family PEFT 0.21 takes these names for the experts"
        )


# Adapters in the graph.

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
    ranks, notes = chosen_targets(graph, lora.targets)
    nodes: list[Node] = []
    for node in graph:
        times = ranks.get(node.name)
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
    changed = replace(graph, nodes=tuple(nodes), assumptions=(*graph.assumptions, *notes))
    return changed, lambda node: node.name in adapters


def _adapted(node: Node, work: Linear, lora: Lora, *, rank: int) -> list[Node]:
    """The node frozen, its two small matrices, and under its old name the sum of both."""
    base = replace(node, name=f"{node.name}.base_layer")
    down = Linear(work.inputs, rank, copies=work.copies, used=work.used)
    up = Linear(rank, work.outputs, copies=work.copies, used=work.used)
    like = replace(node, part="lora", role="", tied_to=None, work=None)
    first = replace(like, name=f"{node.name}.lora_A", params=down.params, work=down)
    second = replace(like, name=f"{node.name}.lora_B", of=(first.name,), params=up.params, work=up)
    length = work.outputs * work.copies if lora.is_dora else 0
    fold = None
    if not work.is_module:
        fold = Fold(work.inputs, work.outputs, rank, work.copies, work.used)
    both = replace(like, of=(base.name, second.name), params=length, work=fold)
    return [base, first, second, both]
