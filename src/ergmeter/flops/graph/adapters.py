"""Rewrites a graph with low-rank adapters: adds LoRA's matrices and freezes the other weights.

Counting LoRA as full training overestimates its FLOPs by half. Counting 2/3 of full training is
wrong too: attention scores have no weights to freeze, and adapters are fully trained. In the graph
the right count follows from the rule for gradients (`graph.gradients`). QLoRA has the same graph:
unpacking 4-bit weights is not counted as model FLOPs.

transformers 5 stores experts as one tensor, not as modules, so PEFT adapts the tensor: it adds the
update to the weight and multiplies rows with the sum. A module's adapter multiplies rows with two
small matrices. Model FLOPs are those of the small matrices in both cases, so MFU does not depend on
the implementation. The additional cost of PEFT's way counts as hardware FLOPs only.

LoRA: arXiv 2106.09685. DoRA, which adds a trained magnitude per output: arXiv 2402.09353.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ergmeter.errors import UsageError
from ergmeter.flops.graph.graph import Fold, Graph, Linear, Node, Trainable

# Weights that a LoRA target selects, by PEFT's rules.
#
# A target selects modules by the end of their names. Experts stored as one tensor are not a module.
# PEFT 0.21 treats them in three ways, observed on real models of transformers 5:
#
#   target_parameters=["experts.down_proj"]   the tensor itself, any family
#   target_modules of some families           older names, such as gate_proj, select the tensor
#                                             gate_up_proj, at twice the rank (two matrices in one),
#                                             and no longer a dense layer's gate_proj
#   target_modules of the others              modules only; all-linear leaves experts out
#
# `targets=experts` is ours: both tensors, as with target_parameters.

ALL_LINEAR = "all-linear"
EXPERTS = "experts"

# Families whose old names PEFT translates, and their old names of gate, up and down.
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
    """Return the nodes that get an adapter, with a multiplier of the rank for each; and notes.

    Raises UsageError for a target that selects nothing in this model.
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
    """Return the nodes of experts that are stored as one tensor."""
    return [node for node, work in graph.linears() if work.copies > 1 and not work.is_module]


def _routers(graph: Graph) -> list[Node]:
    linears = graph.linears()
    return [node for node, work in linears if node.part == "router" and not work.is_module]


def _last(node: Node) -> str:
    return node.name.rpartition(".")[2]


def _ends(name: str, target: str) -> bool:
    """PEFT's rule: True if the name is the target or ends in a dot and the target."""
    return name == target or name.endswith(f".{target}")


def _is_old(target: str, old: tuple[str, ...]) -> bool:
    return any(_ends(target, name) for name in (*old, "gate")) and ".experts." not in f".{target}"


def _translated(graph: Graph, targets: tuple[str, ...], old: tuple[str, ...]) -> dict[str, int]:
    """Return the expert tensors and routers that old target names select, with rank multipliers."""
    gate, up, down = (any(_is_old(t, (name,)) and _ends(t, name) for t in targets) for name in old)
    if gate != up:
        here, other = (old[0], old[1]) if gate else (old[1], old[0])
        raise UsageError(
            f"{here!r} and {other!r} of the experts are one tensor, gate_up_proj, and PEFT adapts"
            f" it only as a whole: target both, or experts.gate_up_proj"
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
    """Return the modules that a target selects or, if there are none, the expert tensors."""
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
    """Return the names that a target can have: modules in model order, then expert tensors."""
    names = dict.fromkeys(map(_last, _modules(graph)))
    tensors = dict.fromkeys(f"{EXPERTS}.{_last(node)}" for node in _tensors(graph))
    return [*names, *tensors]


def _nothing(graph: Graph, target: str) -> str:
    there = ", ".join(module_names(graph))
    if _tensors(graph) and target in (*_PLAIN, *_LETTERS):
        return (
            f"no module of this model is called {target!r}: its experts are stored as two tensors,"
            f" gate_up_proj and down_proj; target experts, or some of {there}"
        )
    return f"no module of this model is called {target!r}; it has {there}"


def _targets_text(
    graph: Graph, targets: tuple[str, ...], ranks: dict[str, int], *, is_translated: bool
) -> Iterable[str]:
    """Yield notes on experts that get no adapter, and on how experts are adapted."""
    tensors = [node for node in _tensors(graph) if node.name in ranks]
    passed = [node for node in _tensors(graph) if node.name not in ranks]
    if tensors:
        doubled = ", of twice the rank on gate_up_proj" if 2 in ranks.values() else ""
        yield (
            f"adapters on experts{doubled}: model FLOPs count two small matrices a row; hardware"
            " FLOPs and memory count PEFT 0.21, which adds the update to the whole weight"
        )
    if passed and ALL_LINEAR in targets:
        params = sum(node.params for node in passed)
        yield (
            f"all-linear leaves out the experts ({params:.3g} parameters stored as tensors, not"
            " modules), as in PEFT 0.21; add the target experts to adapt them"
        )
    if is_translated:
        yield from _dense(graph, targets, ranks)


def _dense(graph: Graph, targets: tuple[str, ...], ranks: dict[str, int]) -> Iterable[str]:
    """Yield a note on feed-forward layers that a translated name does not select."""
    asked = {target.rpartition(".")[2] for target in targets}
    if ALL_LINEAR in targets:
        asked.update(_PLAIN)
    left = {_last(node) for node in _modules(graph) if node.name not in ranks}
    dense = sorted(left & asked & set(_PLAIN))
    if dense:
        yield (
            f"{', '.join(dense)} of dense and shared feed-forward layers get no adapter: in this"
            " family PEFT 0.21 applies these names to the experts"
        )


# Adapters in the graph.

# PEFT's default targets depend on the family, so a target is required here.
_NO_TARGETS = "name the modules that get adapters, as in r=16,targets=q_proj,v_proj"


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
        """Parse `r=16,targets=q_proj,v_proj` (or `targets=all-linear`), with `,dora` for DoRA."""
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
            raise UsageError(f"--lora {text!r} has no rank; add it, as in r=16,targets=q_proj")
        return cls(r, tuple(target for target in targets if target), is_dora)


def with_adapters(graph: Graph, lora: Lora) -> tuple[Graph, Trainable]:
    """Return the graph with adapters, and a function that is True for the adapters' nodes."""
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
            f"PEFT has no DoRA for weights that are not a module, such as {folded[0]};"
            " leave out dora, or target modules only"
        )
    adapters = {node.name for node in nodes if node.part == "lora" and node.params}
    changed = replace(graph, nodes=tuple(nodes), assumptions=(*graph.assumptions, *notes))
    return changed, lambda node: node.name in adapters


def _adapted(node: Node, work: Linear, lora: Lora, *, rank: int) -> list[Node]:
    """Return four nodes: the frozen weight, the two adapter matrices and, as `node`, the sum."""
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
