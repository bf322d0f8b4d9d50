"""Counts the multiply-accumulates (MACs) that an HLO module executes, from a file or from bytes.

A sum over all computations would be wrong: a loop's body runs many times, a function is called from
several places, only one branch of a conditional runs, and unreachable computations never run. For a
scan over 32 layers that sum is a tenth of the truth.

Costs are added up from callees to callers, each computation once. Then the numbers of executions
are passed down from the entry. So even call graphs with exponentially many paths take linear time.
"""

from __future__ import annotations

import io
import mmap
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ergmeter.errors import FormatError
from ergmeter.hlo import proto
from ergmeter.hlo.calls import KERNEL_TARGETS, Kernel, call_macs, kernel
from ergmeter.hlo.loops import CallSite, Loops
from ergmeter.hlo.module import Computation, Instruction, Module
from ergmeter.hlo.products import (
    LIMIT,
    UNCOUNTED,
    convolution_macs,
    dot_macs,
    is_complex,
    nominal_flops,
    ragged_dot_macs,
)
from ergmeter.hlo.reading import read
from ergmeter.hlo.result import SHARDING_CALLS, ModuleCount, work_scope
from ergmeter.hlo.wire import Buffer, Malformed, Unparsed
from ergmeter.units import listed_by


class _Edge(NamedTuple):
    """A callee of a computation, and how often it runs per run of the caller."""

    callee: int
    times: int
    times_once: int  # if loops ran once


class _Cost(NamedTuple):
    """The cost of one run of a computation; its order decides which branch costs most."""

    macs: int
    opaque: int  # calls of unknown cost
    kernel_calls: int
    uncounted_flops: int

    def plus(self, times: int, below: _Cost) -> _Cost:
        """Return this cost plus that of a callee that runs `times` times."""
        if below is _NO_COST:  # most callees
            return self
        return _Cost(*(_bounded(a + times * b) for a, b in zip(self, below, strict=True)))


_NO_COST = _Cost(0, 0, 0, 0)


@dataclass(slots=True)
class _Node:
    """A computation with the cost of its own instructions, and its callees."""

    computation: Computation
    by_op: dict[str, int] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # targets of calls that may hold products
    uncounted: list[tuple[str, int]] = field(default_factory=list)  # opcode, FLOPs of the call
    shardings: set[str] = field(default_factory=set)  # targets of sharding annotations
    loops: list[Instruction] = field(default_factory=list)
    choices: list[Instruction] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)  # computations that run once per call site
    edges: list[_Edge] = field(default_factory=list)
    unknown_loops: list[str] = field(default_factory=list)
    uneven_branches: list[str] = field(default_factory=list)
    cost: _Cost = _NO_COST  # with the cost of its callees
    macs_once: int = 0

    @property
    def callees(self) -> dict[int, None]:
        """The ids of all computations that it calls, in order, each once."""
        special = (callee for call in (*self.loops, *self.choices) for callee in call.called_ids)
        return dict.fromkeys([*self.calls, *self.computation.applied, *special])

    @property
    def works(self) -> bool:
        """True if it has any cost, so that the number of its runs matters."""
        return any(self.cost)

    @property
    def cost_once(self) -> _Cost:
        """The cost if loops ran once."""
        return self.cost._replace(macs=self.macs_once)

    @property
    def sites(self) -> Iterator[tuple[int, CallSite]]:
        """Each callee with its call site; functions applied to elements are left out."""
        calls = self.computation.calls
        for callee, index in zip(calls[::2], calls[1::2], strict=True):
            yield callee, CallSite(self.computation, self.computation.places.by_index(index), 0)
        for call in (*self.loops, *self.choices):
            for position, callee in enumerate(call.called_ids):
                yield callee, CallSite(self.computation, call.extent, position)

    def add(self, op: str, macs: int) -> None:
        """Add MACs of one of its own instructions."""
        self.by_op[op] = self.by_op.get(op, 0) + macs


class _Graph:
    """The reachable computations: those with products or calls are nodes, callees first."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.nodes: dict[int, _Node] = {}
        self.idle: set[int] = set()
        self._nothing = _Node(_entry(module))
        self._walk(self._nothing.computation)

    def node(self, member: int) -> _Node:
        """Return the node of a computation; an empty node if it neither multiplies nor calls."""
        return self.nodes.get(member, self._nothing)

    @property
    def entry(self) -> _Node:
        """The entry's node: the last one, since callees come first."""
        return next(reversed(self.nodes.values()))

    def _walk(self, entry: Computation) -> None:
        under_way: dict[int, _Node] = {}
        stack = [self._entered(entry, under_way)]
        while stack:
            node, callees = stack[-1]
            callee = next(callees, None)
            if callee is None:
                stack.pop()
                number = node.computation.id
                self.nodes[number] = under_way.pop(number)
            elif callee in under_way:
                raise Malformed(f"the computation {node.computation.name} calls itself", 0)
            elif callee not in self.nodes:
                computation = self.module.computations.find(callee)
                if computation is None:
                    raise Malformed(f"{node.computation.name} calls {callee}, which is missing", 0)
                stack.append(self._entered(computation, under_way))

    def _entered(
        self, computation: Computation, under_way: dict[int, _Node]
    ) -> tuple[_Node, Iterator[int]]:
        node = under_way[computation.id] = _node(self.module, computation)
        callees, idle = node.callees, self.module.computations.idle
        self.idle.update(callees.keys() & idle)
        return node, iter([callee for callee in callees if callee not in idle])


def count(module: Module) -> ModuleCount:
    """Count the MACs of a module. Raises Malformed if it is inconsistent."""
    graph = _Graph(module)
    loops = Loops(module, _call_sites(graph.nodes))
    for node in graph.nodes.values():
        _link(node, graph, loops)
    return _result(graph, _runs(graph))


def _entry(module: Module) -> Computation:
    computations = module.computations
    entry = computations.find(module.entry_id) or computations.named(module.entry_name)
    if entry is None:
        raise Malformed(f"no entry computation {module.entry_id} {module.entry_name!r}", 0)
    return entry


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
        instruction = module.instruction(computation.places.by_index(index))
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
        op = _complex(opcode) if is_complex(instruction.encoded(proto.SHAPE)) else opcode
        node.add(op, _product(module, node.computation, instruction))


def _complex(opcode: str) -> str:
    """Return the name in the result for an opcode's products of complex numbers."""
    return f"complex-{opcode}"


def _product(module: Module, computation: Computation, instruction: Instruction) -> int:
    if instruction.opcode == "convolution":
        return convolution_macs(module, computation, instruction)
    if instruction.opcode == "ragged-dot":
        return ragged_dot_macs(module, computation, instruction)
    left = module.operand(computation, instruction, 0).encoded(proto.SHAPE)
    numbers = instruction.encoded(proto.DOT_DIMENSIONS)
    return dot_macs(instruction.encoded(proto.SHAPE), left, numbers)


def _custom_call(module: Module, node: _Node, call: Instruction) -> None:
    target = call.text(proto.CUSTOM_CALL_TARGET)
    if target in SHARDING_CALLS:
        node.shardings.add(target)
    if target in KERNEL_TARGETS:
        nki = kernel(module, call)
        node.kernels.append(nki)
        macs = nki.macs_per_call
    else:
        macs = call_macs(module, node.computation, call)
        if not macs:
            node.calls += call.called_ids
        if macs is None:
            node.unknown.append(target)
    if macs:
        node.add(f"custom-call:{target}", macs)


def _call_sites(nodes: dict[int, _Node]) -> Callable[[int], list[CallSite]]:
    """Return a function from a computation's id to its call sites, collected at first use."""
    by_callee: dict[int, list[CallSite]] = {}

    def sites(callee: int) -> list[CallSite]:
        if not by_callee:
            by_callee.update(listed_by(site for node in nodes.values() for site in node.sites))
        return by_callee.get(callee, [])

    return sites


def _link(node: _Node, graph: _Graph, loops: Loops) -> None:
    """Set how often a computation runs its callees, and its cost including theirs."""
    node.edges += [_Edge(callee, 1, 1) for callee in node.calls if callee not in graph.idle]
    for callee in node.computation.applied:
        if callee not in graph.idle:
            _link_applied(node, callee, graph)
    for loop in node.loops:
        _link_loop(node, loop, graph, loops.trip_count(node.computation, loop))
    for choice in node.choices:
        _link_choice(node, choice, graph)
    opaque = len(node.unknown) + sum(nki.macs_per_call is None for nki in node.kernels)
    flops = sum(flops for _, flops in node.uncounted)
    node.macs_once = sum(node.by_op.values())
    node.cost = _Cost(node.macs_once, opaque, len(node.kernels), flops)
    for edge in node.edges:
        below = graph.node(edge.callee)
        node.cost = node.cost.plus(edge.times, below.cost)
        node.macs_once = _bounded(node.macs_once + edge.times_once * below.macs_once)


def _link_applied(node: _Node, callee: int, graph: _Graph) -> None:
    """Count a function that is applied to elements once; list it as a loop of unknown length."""
    node.edges.append(_Edge(callee, 1, 1))
    applied = graph.node(callee)
    if applied.works and applied.computation.name not in node.unknown_loops:
        node.unknown_loops.append(applied.computation.name)


def _link_loop(node: _Node, loop: Instruction, graph: _Graph, trips: int | None) -> None:
    """Add a loop's edges: the body runs `trips` times, the condition once more."""
    if len(loop.called_ids) != 2:
        raise Malformed(f"the loop {loop.name} must have a body and a condition", loop.offset)
    body, condition = loop.called_ids
    if trips is None and (graph.node(body).works or graph.node(condition).works):
        node.unknown_loops.append(loop.name)
    node.edges.append(_Edge(body, 1 if trips is None else trips, 1))
    node.edges.append(_Edge(condition, 1 if trips is None else trips + 1, 1))


def _link_choice(node: _Node, choice: Instruction, graph: _Graph) -> None:
    """Count a conditional's costliest branch, as XLA does; list it if the branches differ."""
    branches = {callee: graph.node(callee) for callee in choice.called_ids}
    if not branches:
        raise Malformed(f"{choice.name} is a conditional without branches", choice.offset)
    if len({branch.cost for branch in branches.values()}) > 1:
        node.uneven_branches.append(choice.name)
    dearest = max(branches, key=lambda branch: branches[branch].cost)
    node.edges.append(_Edge(dearest, 1, 0))
    dearest = max(branches, key=lambda branch: branches[branch].cost_once)
    node.edges.append(_Edge(dearest, 0, 1))


def _bounded(value: int) -> int:
    if value >= LIMIT:
        raise Malformed("nested loops and calls execute more operations than can be real", 0)
    return value


def _runs(graph: _Graph) -> dict[int, int]:
    """Return how often each computation with a node is executed in one run of the module."""
    runs = dict.fromkeys(graph.nodes, 0)
    runs[graph.entry.computation.id] = 1
    for number in reversed(graph.nodes):
        for edge in graph.nodes[number].edges:
            if edge.callee in runs:
                runs[edge.callee] = _bounded(runs[edge.callee] + runs[number] * edge.times)
    return runs


def _result(graph: _Graph, runs: dict[int, int]) -> ModuleCount:
    by_op: Counter[str] = Counter()
    by_computation: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    kernels: Counter[Kernel] = Counter()
    uncounted_calls: Counter[str] = Counter()
    uncounted_flops: Counter[str] = Counter()
    shardings: set[str] = set()
    executed = [
        (node, runs[number]) for number, node in reversed(graph.nodes.items()) if runs[number]
    ]
    for node, times in executed:
        for op, macs in node.by_op.items():
            by_op[op] += macs * times
            by_computation[node.computation.name] += macs * times
        for target in node.unknown:
            unknown[target] += times
        for nki in node.kernels:
            kernels[nki] += times
        for op, flops in node.uncounted:
            uncounted_calls[op] += times
            uncounted_flops[op] += flops * times
        shardings |= node.shardings
    module, entry = graph.module, graph.entry
    scope, devices = work_scope(module, entry.computation, shardings)
    every = module.computations
    return ModuleCount(
        name=module.name,
        macs=entry.cost.macs,
        macs_loop_once=entry.macs_once,
        by_op={op: macs for op, macs in by_op.items() if macs},
        by_computation={name: macs for name, macs in by_computation.items() if macs},
        instructions=every.instructions,
        computations=len(every),
        unreachable=len(every) - len({*graph.nodes, *graph.idle}),
        kernels=tuple(replace(nki, calls=times) for nki, times in kernels.items()),
        unknown_loops=tuple(name for node, _ in executed for name in node.unknown_loops),
        uneven_branches=tuple(name for node, _ in executed for name in node.uneven_branches),
        unknown_calls=dict(unknown),
        uncounted_calls=dict(uncounted_calls),
        uncounted_flops=dict(uncounted_flops),
        scope=scope,
        devices=devices,
        reader=module.reader,
    )


# A file is memory-mapped, so skipped parts are never loaded. A gzip file is unpacked up to a limit:
# a few kilobytes can unpack to any size.


MAX_UNPACKED_BYTES = 512 << 20
_PART_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"
_FOREIGN = (
    (b"HloModule ", "HLO text; dump the module as a proto instead (--xla_dump_hlo_as_proto)"),
    (b"\x7fELF", "an ELF binary, not an HLO module"),
    (b"PK\x03\x04", "a zip archive, not an HLO module"),
    (b"{", "JSON, not an HLO module"),
)


def _foreign_format(data: Buffer) -> str | None:
    """Return the format of a file that is not a module, if its first bytes show it."""
    head = data[:64].lstrip()
    return next((what for magic, what in _FOREIGN if head.startswith(magic)), None)


def _mapped(file: BinaryIO, name: str) -> mmap.mmap:
    """Return a file's content, unpacked if it is gzip."""
    head = file.read(2)
    if not head:
        raise FormatError(f"{name}: empty (byte 0)")
    if head == _GZIP:
        return _unpacked(file, name)
    # ACCESS_COPY: the compiled reader needs a buffer that counts as writable. Nothing writes.
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _unpacked(file: BinaryIO, name: str) -> mmap.mmap:
    """Unpack gzip into memory of the exact size, which a first pass measures."""
    size = sum(map(len, _parts(file, name)))
    if not size:
        raise FormatError(f"{name}: empty once unpacked (byte 0)")
    data = mmap.mmap(-1, size)
    for part in _parts(file, name):
        data.write(part)
    return data


def _parts(file: BinaryIO, name: str) -> Iterator[bytes]:
    import gzip  # noqa: PLC0415  seldom needed, and as long to load as a file takes to count

    size = 0
    file.seek(0)
    try:
        with gzip.GzipFile(fileobj=file) as packed:
            while part := packed.read(_PART_BYTES):
                size += len(part)
                if size > MAX_UNPACKED_BYTES:
                    limit = f"more than {MAX_UNPACKED_BYTES >> 20} MiB"
                    raise FormatError(f"{name}: unpacks to {limit}; unpack it yourself (gunzip)")
                yield part
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FormatError(f"{name}: damaged gzip: {error} (byte {size} unpacked)") from None


def count_file(path: str | Path, *, reader: str | None = None) -> ModuleCount:
    """Count the MACs of the module in a file: HloModuleProto or HloProto, or either in gzip."""
    with Path(path).open("rb") as file, _mapped(file, str(path)) as data:
        return _counted(data, str(path), reader)


def count_bytes(data: bytes, name: str = "", *, reader: str | None = None) -> ModuleCount:
    """Count the MACs of a module in memory; `name` is for error messages."""
    name = name or "HLO module"
    if data[:2] != _GZIP:
        return _counted(data, name, reader)
    with _unpacked(io.BytesIO(data), name) as unpacked:
        return _counted(unpacked, name, reader)


def _counted(data: Buffer, name: str, reader: str | None) -> ModuleCount:
    if not data:
        raise FormatError(f"{name}: empty (byte 0)")
    try:
        try:
            return count(read(data, reader=reader))
        except Unparsed:
            return count(read(data, reader="protobuf"))
    except Malformed as error:
        text = _foreign_format(data) or f"damaged or not an HLO module: {error.what}"
        raise FormatError(f"{name}: {text} (byte {error.offset})") from None
