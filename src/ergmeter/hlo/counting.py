"""How many multiply-accumulates does a module execute?

The trap: a sum over all computations. A loop's body runs many times, a function is called from
several places, of a conditional's branches one runs, and what nothing calls does not run at all.
For a scan over 32 layers that sum is a tenth of the truth.

Costs go up from the callees, each computation once; then executions go down from the entry. So
call graphs that would be exponential to walk are no trouble.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from ergmeter.hlo.calls import call_macs
from ergmeter.hlo.config import KERNEL_TARGETS, Kernel, kernel
from ergmeter.hlo.loops import CallSite, Loops
from ergmeter.hlo.module import (
    CUSTOM_CALL_TARGET,
    DOT_DIMENSIONS,
    SHAPE,
    Computation,
    Instruction,
    Module,
)
from ergmeter.hlo.products import (
    LIMIT,
    UNCOUNTED,
    convolution_macs,
    dot_macs,
    is_complex,
    nominal_flops,
    ragged_dot_macs,
)
from ergmeter.hlo.result import ModuleCount
from ergmeter.hlo.scope import SHARDING_CALLS, extent
from ergmeter.hlo.wire import Malformed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Edge(NamedTuple):
    """A computation that another one runs: how often, and how often if loops ran once."""

    callee: int
    times: int
    times_once: int


@dataclass(slots=True)
class _Node:
    """A computation with what its own instructions cost and what they call."""

    computation: Computation
    by_op: dict[str, int] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # targets of calls that may hold products
    uncounted: list[tuple[str, int]] = field(default_factory=list)  # opcode, FLOPs of the call
    shardings: set[str] = field(default_factory=set)  # targets of sharding annotations
    loops: list[Instruction] = field(default_factory=list)
    choices: list[Instruction] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)  # computations that run once a call site
    edges: list[_Edge] = field(default_factory=list)
    unknown_loops: list[str] = field(default_factory=list)
    uneven_branches: list[str] = field(default_factory=list)
    macs: int = 0  # with all that is below
    macs_once: int = 0
    opaque: int = 0  # calls of unknown cost, below as well
    kernel_calls: int = 0
    uncounted_flops: int = 0

    @property
    def callees(self) -> dict[int, None]:
        """Every computation that it names, in order and once."""
        special = (callee for call in (*self.loops, *self.choices) for callee in call.called_ids)
        return dict.fromkeys([*self.calls, *self.computation.applied, *special])

    @property
    def work(self) -> bool:
        """Whether running it more often would change a count."""
        return bool(self.macs or self.opaque or self.kernel_calls or self.uncounted_flops)

    @property
    def cost(self) -> tuple[int, int, int, int]:
        """By which branches are compared: MACs first."""
        return self.macs, self.opaque, self.kernel_calls, self.uncounted_flops

    @property
    def cost_once(self) -> tuple[int, int, int, int]:
        """The same if loops ran once."""
        return self.macs_once, self.opaque, self.kernel_calls, self.uncounted_flops

    @property
    def sites(self) -> Iterator[tuple[int, CallSite]]:
        """Each callee with where it is called; not those that are applied to elements."""
        calls = self.computation.calls
        for callee, index in zip(calls[::2], calls[1::2], strict=True):
            yield callee, CallSite(self.computation, self.computation.places.by_index(index), 0)
        for call in (*self.loops, *self.choices):
            for position, callee in enumerate(call.called_ids):
                yield callee, CallSite(self.computation, call.place, position)

    def add(self, op: str, macs: int) -> None:
        """Count MACs of its own."""
        self.by_op[op] = self.by_op.get(op, 0) + macs


class _Graph:
    """The computations that are reached: those with work as nodes, callees first."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.nodes: dict[int, _Node] = {}
        self.idle: set[int] = set()
        self._nothing = _Node(_entry(module))
        self._walk(self._nothing.computation)

    def node(self, member: int) -> _Node:
        """What a computation costs; nothing, if it is an idle one."""
        return self.nodes.get(member, self._nothing)

    @property
    def entry(self) -> _Node:
        """The last one, since callees come first."""
        return next(reversed(self.nodes.values()))

    def _walk(self, entry: Computation) -> None:
        under_way: dict[int, _Node] = {}
        stack = [self._entered(entry, under_way)]
        while stack:
            node, callees = stack[-1]
            callee = next(callees, None)
            if callee is None:
                stack.pop()
                one = node.computation.id
                self.nodes[one] = under_way.pop(one)
            elif callee in under_way:
                raise Malformed(f"the computation {node.computation.name} leads back to itself", 0)
            elif callee not in self.nodes:
                found = self.module.computations.find(callee)
                if found is None:
                    raise Malformed(f"{node.computation.name} calls {callee}, which is missing", 0)
                stack.append(self._entered(found, under_way))

    def _entered(
        self, computation: Computation, under_way: dict[int, _Node]
    ) -> tuple[_Node, Iterator[int]]:
        node = under_way[computation.id] = _node(self.module, computation)
        callees, idle = node.callees, self.module.computations.idle
        self.idle.update(callees.keys() & idle)
        return node, iter([callee for callee in callees if callee not in idle])


def count(module: Module) -> ModuleCount:
    """Count a module; Malformed where it makes no sense."""
    graph = _Graph(module)
    loops = Loops(module, _call_sites(graph.nodes))
    for node in graph.nodes.values():
        _link(node, graph, loops)
    return _result(graph, _runs(graph))


def _entry(module: Module) -> Computation:
    computations = module.computations
    found = computations.find(module.entry_id) or computations.named(module.entry_name)
    if found is None:
        raise Malformed(f"no entry computation {module.entry_id} {module.entry_name!r}", 0)
    return found


def _node(module: Module, computation: Computation) -> _Node:
    node = _Node(computation, calls=computation.calls[::2])
    if computation.dot_macs:
        node.add("dot", computation.dot_macs)
    for shapes, (number, index) in computation.dots.items():
        try:
            op = _complex("dot") if is_complex(shapes[0]) else "dot"
            node.add(op, number * dot_macs(*shapes))
        except Malformed as error:
            raise Malformed(f"a dot: {error.what}", computation.places.by_index(index)[0]) from None
    for index in computation.special:
        instruction = module.special(computation, index)
        try:
            _special(module, node, instruction)
        except Malformed as error:
            name = "a dot" if instruction.opcode == "dot" else instruction.name
            raise Malformed(f"{name}: {error.what}", instruction.offset) from None
    return node


def _special(module: Module, node: _Node, instruction: Instruction) -> None:
    opcode = instruction.opcode
    if opcode == "while":
        node.loops.append(instruction)
    elif opcode == "conditional":
        node.choices.append(instruction)
    elif opcode == "custom-call":
        _custom_call(module, node, instruction)
    elif opcode in UNCOUNTED:
        node.uncounted.append((opcode, nominal_flops(module, node.computation, instruction)))
    else:
        op = _complex(opcode) if is_complex(instruction.encoded(SHAPE)) else opcode
        node.add(op, _product(module, node.computation, instruction))


def _complex(opcode: str) -> str:
    """The name under which products of complex numbers are counted."""
    return f"complex-{opcode}"


def _product(module: Module, computation: Computation, found: Instruction) -> int:
    if found.opcode == "convolution":
        return convolution_macs(module, computation, found)
    if found.opcode == "ragged-dot":
        return ragged_dot_macs(module, computation, found)
    left = module.operand(computation, found, 0)
    return dot_macs(found.encoded(SHAPE), left.encoded(SHAPE), found.encoded(DOT_DIMENSIONS))


def _custom_call(module: Module, node: _Node, call: Instruction) -> None:
    target = call.text(CUSTOM_CALL_TARGET)
    if target in SHARDING_CALLS:
        node.shardings.add(target)
    if target in KERNEL_TARGETS:
        found = kernel(module, call)
        node.kernels.append(found)
        macs = found.macs_per_call
    else:
        macs = call_macs(module, node.computation, call)
        if not macs:
            node.calls += call.called_ids
        if macs is None:
            node.unknown.append(target)
    if macs:
        node.add(f"custom-call:{target}", macs)


def _call_sites(nodes: dict[int, _Node]) -> Callable[[int], list[CallSite]]:
    """Who calls a computation; found out when it is first asked, which is seldom."""
    found: dict[int, list[CallSite]] = {}

    def sites(callee: int) -> list[CallSite]:
        if not found:
            for node in nodes.values():
                for one, site in node.sites:
                    found.setdefault(one, []).append(site)
        return found.get(callee, [])

    return sites


def _link(node: _Node, graph: _Graph, loops: Loops) -> None:
    """Say how often a computation runs its callees, which are linked already, and what that is."""
    node.edges += [_Edge(callee, 1, 1) for callee in node.calls if callee not in graph.idle]
    for callee in node.computation.applied:
        if callee not in graph.idle:
            _link_applied(node, callee, graph)
    for loop in node.loops:
        _link_loop(node, loop, graph, loops.trip_count(node.computation, loop))
    for choice in node.choices:
        _link_choice(node, choice, graph)
    node.opaque = len(node.unknown) + sum(one.macs_per_call is None for one in node.kernels)
    node.kernel_calls = len(node.kernels)
    node.uncounted_flops = sum(flops for _, flops in node.uncounted)
    node.macs = node.macs_once = sum(node.by_op.values())
    for edge in node.edges:
        below = graph.node(edge.callee)
        node.macs = _bounded(node.macs + edge.times * below.macs)
        node.macs_once = _bounded(node.macs_once + edge.times_once * below.macs_once)
        node.opaque = _bounded(node.opaque + edge.times * below.opaque)
        node.kernel_calls = _bounded(node.kernel_calls + edge.times * below.kernel_calls)
        more = edge.times * below.uncounted_flops
        node.uncounted_flops = _bounded(node.uncounted_flops + more)


def _link_applied(node: _Node, callee: int, graph: _Graph) -> None:
    """What is applied to elements runs as often as there are; once is counted, and that is said."""
    node.edges.append(_Edge(callee, 1, 1))
    found = graph.node(callee)
    if found.work and found.computation.name not in node.unknown_loops:
        node.unknown_loops.append(found.computation.name)


def _link_loop(node: _Node, loop: Instruction, graph: _Graph, trips: int | None) -> None:
    """The body runs `trips` times, the condition once more."""
    if len(loop.called_ids) != 2:
        raise Malformed(f"{loop.name} is a loop without a body and a condition", loop.offset)
    body, condition = loop.called_ids
    if trips is None and (graph.node(body).work or graph.node(condition).work):
        node.unknown_loops.append(loop.name)
    node.edges.append(_Edge(body, 1 if trips is None else trips, 1))
    node.edges.append(_Edge(condition, 1 if trips is None else trips + 1, 1))


def _link_choice(node: _Node, choice: Instruction, graph: _Graph) -> None:
    """The costliest branch runs, as in XLA's analysis; branches that differ are named."""
    branches = {callee: graph.node(callee) for callee in choice.called_ids}
    if not branches:
        raise Malformed(f"{choice.name} is a conditional without branches", choice.offset)
    if len({branch.cost for branch in branches.values()}) > 1:
        node.uneven_branches.append(choice.name)
    dearest = max(branches, key=lambda one: branches[one].cost)
    node.edges.append(_Edge(dearest, 1, 0))
    dearest = max(branches, key=lambda one: branches[one].cost_once)
    node.edges.append(_Edge(dearest, 0, 1))


def _bounded(value: int) -> int:
    if value >= LIMIT:
        raise Malformed("loops and calls that multiply to a number beyond all measure", 0)
    return value


def _runs(graph: _Graph) -> dict[int, int]:
    """How often each computation with work is executed, from the entry down."""
    runs = dict.fromkeys(graph.nodes, 0)
    runs[graph.entry.computation.id] = 1
    for one in reversed(graph.nodes):
        for edge in graph.nodes[one].edges:
            if edge.callee in runs:
                runs[edge.callee] = _bounded(runs[edge.callee] + runs[one] * edge.times)
    return runs


def _result(graph: _Graph, runs: dict[int, int]) -> ModuleCount:
    by_op: Counter[str] = Counter()
    by_computation: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    kernels: Counter[Kernel] = Counter()
    uncounted_calls: Counter[str] = Counter()
    uncounted_flops: Counter[str] = Counter()
    shardings: set[str] = set()
    executed = [(node, runs[one]) for one, node in reversed(graph.nodes.items()) if runs[one]]
    for node, times in executed:
        for op, macs in node.by_op.items():
            by_op[op] += macs * times
            by_computation[node.computation.name] += macs * times
        for target in node.unknown:
            unknown[target] += times
        for found in node.kernels:
            kernels[found] += times
        for op, flops in node.uncounted:
            uncounted_calls[op] += times
            uncounted_flops[op] += flops * times
        shardings |= node.shardings
    module, entry = graph.module, graph.entry
    scope, devices = extent(module, entry.computation, shardings)
    every = module.computations
    return ModuleCount(
        name=module.name,
        macs=entry.macs,
        macs_loop_once=entry.macs_once,
        by_op={op: macs for op, macs in by_op.items() if macs},
        by_computation={name: macs for name, macs in by_computation.items() if macs},
        instructions=every.instructions,
        computations=len(every),
        unreachable=len(every) - len({*graph.nodes, *graph.idle}),
        kernels=tuple(replace(found, calls=times) for found, times in kernels.items()),
        unknown_loops=tuple(name for node, _ in executed for name in node.unknown_loops),
        uneven_branches=tuple(name for node, _ in executed for name in node.uneven_branches),
        unknown_calls=dict(unknown),
        uncounted_calls=dict(uncounted_calls),
        uncounted_flops=dict(uncounted_flops),
        scope=scope,
        devices=devices,
        literal_bytes=every.literal_bytes,
        reader=module.reader,
    )
