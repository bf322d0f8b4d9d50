"""Which weights of a model a LoRA target means, by PEFT's rules.

The trap: experts. A target means a module by the end of its name, and experts held as one tensor
are none. PEFT 0.21 has three ways with them, as read off real models of transformers 5:

  target_parameters=["experts.down_proj"]   the tensor itself, any family
  target_modules of some families           names of before, such as gate_proj, stand for the
                                            tensor gate_up_proj, at twice the rank (two matrices in
                                            one), and no longer for a dense layer's gate_proj
  target_modules of the others              modules alone; all-linear passes the experts by

`targets=experts` is ours: both tensors, as target_parameters would have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.errors import UsageError
from ergmeter.flops.graph.graph import Linear

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ergmeter.flops.graph.graph import Graph, Node

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


@dataclass(frozen=True, slots=True)
class ChosenTargets:
    """The nodes that get an adapter, each with how many times the rank it has; what to say."""

    ranks: dict[str, int]
    said: tuple[str, ...] = ()


def chosen(graph: Graph, targets: tuple[str, ...]) -> ChosenTargets:
    """What the targets mean in this model. UsageError for one that means nothing."""
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
        found = _named(graph, target)
        if not found:
            raise UsageError(_nothing(graph, target))
        ranks.update(dict.fromkeys(found, 1))
    return ChosenTargets(
        ranks, tuple(_targets_text(graph, targets, ranks, is_translated=old is not None))
    )


def _modules(graph: Graph) -> list[Node]:
    return [node for node in graph if isinstance(node.work, Linear) and node.work.is_module]


def _tensors(graph: Graph) -> list[Node]:
    """Experts that are held as one tensor."""
    return [
        node
        for node in graph
        if isinstance(node.work, Linear) and node.work.copies > 1 and not node.work.is_module
    ]


def _routers(graph: Graph) -> list[Node]:
    return [
        node
        for node in graph
        if node.part == "router" and isinstance(node.work, Linear) and not node.work.is_module
    ]


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
    found = [node.name for node in _modules(graph) if _ends(node.name, target)]
    if found:
        return found
    tensors = _tensors(graph)
    if target == EXPERTS:
        return [node.name for node in tensors]
    found = [node.name for node in tensors if _ends(node.name, target)]
    return found or [node.name for node in _routers(graph) if _ends(f"{node.name}.weight", target)]


def module_names(graph: Graph) -> list[str]:
    """What a target can be called, in the order of the model: modules, then tensors of experts."""
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
    """What was passed by, and how experts are adapted."""
    tensors = [node for node in _tensors(graph) if node.name in ranks]
    passed = [node for node in _tensors(graph) if node.name not in ranks]
    if tensors:
        doubled = ", of twice the rank on gate_up_proj" if 2 in ranks.values() else ""
        yield (
            f"adapters on experts{doubled}: model FLOPs as two small matrices a row; hardware's,"
            " and memory, as PEFT 0.21 adds the update to the whole weight"
        )
    if passed and ALL_LINEAR in targets:
        held = sum(node.params for node in passed)
        yield (
            f"all-linear passes the experts by ({held:.3g} parameters held as tensors, no modules),"
            " as in PEFT 0.21; target experts beside it to adapt them"
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
