"""Modules for what jax does not make, with their counts by hand.

D is the product of two 4x4 matrices: 64 multiplications.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.unit.hlo import wire
from tests.unit.hlo.wire import INTEGER, SQUARE, Computation, Loop, Module, config, product, unary

D = wire.SQUARE_MACS
NKI = "AwsNeuronCustomNativeKernel"


@dataclass(frozen=True)
class Made:
    """A module and its counts."""

    data: bytes
    macs: int
    once: int
    flags: dict[str, int] = field(default_factory=dict)
    xla_reads_it: bool = True  # some break a rule that only XLA has, or are priced otherwise


MADE: dict[str, Callable[[], Made]] = {}


def made(build: Callable[[], Made]) -> Callable[[], Made]:
    MADE[build.__name__] = build
    return build


def entry_calling(module: Module, *called: tuple[str, Computation]) -> Computation:
    """An entry of one 4x4 parameter that goes through the called ones in turn."""
    entry = module.computation("main")
    value = entry.parameter(SQUARE)
    for opcode, computation in called:
        value = entry.add(opcode, SQUARE, [value], [computation])
    return entry


def chosen(into: Computation, value: int, *branches: Computation) -> int:
    index = into.add("bitcast", INTEGER, [value])
    return into.add("conditional", SQUARE, [index, *[value] * len(branches)], branches)


@made
def a_fusion_shared_by_three_call_sites() -> Made:
    module = Module()
    fused = product(module, dots=2)
    entry = entry_calling(module, *[("fusion", fused)] * 3)
    return Made(module.encoded(entry), 3 * 2 * D, 3 * 2 * D)


@made
def a_callee_that_stands_after_its_caller() -> Made:
    module = Module()
    entry = module.computation("main")
    late = product(module, dots=3)
    value = entry.parameter(SQUARE)
    entry.add("call", SQUARE, [entry.add("call", SQUARE, [value], [late])], [late])
    return Made(module.encoded(entry), 2 * 3 * D, 2 * 3 * D, xla_reads_it=False)


@made
def calls_in_a_conditional_in_a_loop() -> Made:
    module = Module()
    cheap, dear = product(module, "cheap"), unary(module, "dear", "call", product(module), 2)
    choice = module.computation("choice")
    chosen(choice, choice.parameter(SQUARE), cheap, dear)
    loop = Loop(module, choice, bound=4)
    entry = module.computation("main")
    loop.enter(entry, entry.parameter(SQUARE), start=0, bound=4)
    return Made(module.encoded(entry), 4 * 2 * D, 2 * D, {"uneven_branches": 1})


@made
def branches_that_are_even() -> Made:
    module = Module()
    branches = [product(module, name, dots=2) for name in "abc"]
    entry = module.computation("main")
    chosen(entry, entry.parameter(SQUARE), *branches)
    return Made(module.encoded(entry), 2 * D, 2 * D)


@made
def a_branch_that_is_dearest_only_by_its_loop() -> Made:
    module = Module()
    loop = Loop(module, product(module), bound=10)
    long = module.computation("long")
    loop.enter(long, long.parameter(SQUARE), start=0, bound=10)
    wide = product(module, "wide", dots=3)
    entry = module.computation("main")
    chosen(entry, entry.parameter(SQUARE), long, wide)
    # Each loop once, the wide branch is the dearer one. XLA weighs the loop's counting too.
    flags = {"uneven_branches": 1}
    return Made(module.encoded(entry), 10 * D, 3 * D, flags, xla_reads_it=False)


@made
def a_product_in_a_loops_condition() -> Made:
    # The condition is asked once more than the body runs.
    module = Module()
    loop = Loop(module, product(module, dots=2), bound=4)
    asked = loop.condition
    compare = asked.last
    value = asked.part(asked.id * 1000 + 3, 2)
    asked.dot(value, value)
    asked.last = compare
    entry = module.computation("main")
    loop.enter(entry, entry.parameter(SQUARE), start=0, bound=4)
    return Made(module.encoded(entry), 4 * 2 * D + 5 * D, 3 * D)


def loop_in_a_function(*bounds: int) -> bytes:
    """A function of (bound, value) with a loop, called with each of these bounds."""
    module = Module()
    loop = Loop(module, product(module))
    function = module.computation("function")
    bound, value = function.parameter(INTEGER), function.parameter(SQUARE)
    state = function.tuple(function.constant(0), bound, value)
    shape = [INTEGER, INTEGER, SQUARE]
    function.part(function.add("while", shape, [state], [loop.body, loop.condition]), 2)
    entry = module.computation("main")
    value = entry.parameter(SQUARE)
    for given in bounds:
        value = entry.add("call", SQUARE, [entry.constant(given), value], [function])
    return module.encoded(entry)


@made
def a_loop_whose_bound_all_callers_agree_on() -> Made:
    return Made(loop_in_a_function(4, 4), 2 * 4 * D, 2 * D)


@made
def a_loop_whose_bound_callers_do_not_agree_on() -> Made:
    return Made(loop_in_a_function(3, 5), 2 * D, 2 * D, {"unknown_loops": 1})


@made
def a_computation_nobody_calls() -> Made:
    module = Module()
    product(module, "lonely", dots=5)
    entry = entry_calling(module, ("call", product(module)))
    return Made(module.encoded(entry), D, D, {"unreachable": 1})


@made
def a_pair_that_only_call_each_other() -> Made:
    module = Module()
    inner = product(module, "inner", dots=5)
    unary(module, "outer", "call", inner, 2)
    entry = entry_calling(module, ("call", product(module)))
    return Made(module.encoded(entry), D, D, {"unreachable": 2})


@made
def instruction_ids_that_repeat_in_each_computation() -> Made:
    module = Module()
    inner, entry = module.computation("inner"), module.computation("main")
    for computation, dims in ((inner, (3, 5)), (entry, (7, 11))):
        computation.parameters = [dims, dims[::-1]]
        computation.add("parameter", dims, identity=1)
        computation.add("parameter", dims[::-1], identity=2, parameter_number=1)
    sides = wire.integers(1, [1]) + wire.integers(2, [0])
    inner.add("dot", (3, 3), [1, 2], identity=3, dot_dimension_numbers=sides)
    entry.add("dot", (7, 7), [1, 2], identity=3, dot_dimension_numbers=sides)
    entry.add("call", (3, 3), [1, 2], [inner], identity=4)
    macs = 3 * 3 * 5 + 7 * 7 * 11
    return Made(module.encoded(entry), macs, macs, xla_reads_it=False)


@made
def ids_of_64_bits() -> Made:
    module = Module()
    inner = module.computation("inner", identity=2**31 + 9)
    x = inner.parameter(SQUARE)
    inner.add("dot", SQUARE, [x, x], identity=(2**31 + 9) << 31 | 1, dot_dimension_numbers=SIDES)
    entry = entry_calling(module, ("call", inner))
    return Made(module.encoded(entry), D, D, xla_reads_it=False)


SIDES = wire.integers(1, [1]) + wire.integers(2, [0])


@made
def an_entry_known_only_by_its_name() -> Made:
    module = Module()
    product(module, "lonely", dots=5)
    entry = entry_calling(module, ("call", product(module, dots=2)))
    whole, last = module.encoded(entry), wire.field(6, entry.id)
    assert whole.endswith(last)
    return Made(whole.removesuffix(last), 2 * D, 2 * D, {"unreachable": 1}, xla_reads_it=False)


@made
def integers_that_are_not_packed() -> Made:
    module = Module(packed=False)
    entry = entry_calling(module, ("call", product(module, dots=2)), ("call", product(module, "b")))
    return Made(module.encoded(entry), 3 * D, 3 * D)


@made
def a_module_in_an_hlo_proto() -> Made:
    whole = a_fusion_shared_by_three_call_sites()
    return Made(wire.field(1, whole.data), whole.macs, whole.once, xla_reads_it=False)


@made
def a_module_in_an_hlo_proto_with_its_buffers() -> Made:
    whole = a_fusion_shared_by_three_call_sites()
    data = wire.field(1, whole.data) + wire.field(3, wire.field(1, b"x" * 300))
    return Made(data, whole.macs, whole.once, xla_reads_it=False)


@made
def a_compressed_module() -> Made:
    whole = a_fusion_shared_by_three_call_sites()
    return Made(gzip.compress(whole.data), whole.macs, whole.once, xla_reads_it=False)


@made
def a_compressed_hlo_proto() -> Made:
    whole = a_fusion_shared_by_three_call_sites()
    data = gzip.compress(wire.field(1, whole.data))
    return Made(data, whole.macs, whole.once, xla_reads_it=False)


@made
def a_module_compressed_in_two_parts() -> Made:
    whole = a_fusion_shared_by_three_call_sites()
    data = gzip.compress(whole.data[:50]) + gzip.compress(whole.data[50:])
    return Made(data, whole.macs, whole.once, xla_reads_it=False)


@made
def fields_nobody_knows_yet() -> Made:
    module = Module()
    entry = entry_calling(module, ("call", product(module)))
    strange = wire.field(900, b"x" * 200) + wire.field(901, 2**63) + wire.varint(902 << 3 | 5)
    strange += b"\0\0\0\0" + wire.varint(903 << 3 | 1) + b"\0" * 8
    return Made(strange + module.encoded(entry, strange), D, D)


@made
def a_product_whose_result_nobody_uses() -> Made:
    # XLA prices it, and what is in a compiled program runs.
    module = Module()
    entry = module.computation("main")
    x = entry.parameter(SQUARE)
    entry.dot(x, x)
    entry.add("negate", SQUARE, [x])
    return Made(module.encoded(entry), D, D)


@made
def dimensions_whose_product_passes_64_bits() -> Made:
    module = Module()
    entry = module.computation("main")
    n = 2**31 - 1
    entry.dot(entry.parameter((n, n)), entry.parameter((n, n)))
    return Made(module.encoded(entry), n**3, n**3, xla_reads_it=False)


@made
def loops_in_loops_past_64_bits() -> Made:
    module = Module()
    inside = product(module)
    macs = D
    for depth in range(3):
        turns = 2**31 - 1
        loop = Loop(module, inside, bound=turns)
        wrapper = module.computation(f"level_{depth}")
        loop.enter(wrapper, wrapper.parameter(SQUARE), start=0, bound=turns)
        inside, macs = wrapper, macs * turns
    entry = entry_calling(module, ("call", inside))
    return Made(module.encoded(entry), macs, D)


@made
def thirty_levels_of_two_calls() -> Made:
    module = Module()
    inside = product(module)
    for depth in range(30):
        inside = unary(module, f"level_{depth}", "call", inside, 2)
    entry = entry_calling(module, ("call", inside))
    return Made(module.encoded(entry), 2**30 * D, 2**30 * D, xla_reads_it=False)


@made
def two_thousand_levels_of_one_call() -> Made:
    module = Module()
    inside = product(module)
    for depth in range(2000):
        inside = unary(module, f"level_{depth}", "call", inside, 1)
    entry = entry_calling(module, ("call", inside))
    return Made(module.encoded(entry), D, D, xla_reads_it=False)


@made
def an_asynchronous_call() -> Made:
    # All three instructions name the computation, which runs once.
    module = Module()
    fused = product(module, dots=2)
    entry = module.computation("main")
    state = [[SQUARE], SQUARE, INTEGER]
    begun = entry.add("async-start", state, [entry.parameter(SQUARE)], [fused])
    entry.add("async-done", SQUARE, [entry.add("async-update", state, [begun], [fused])], [fused])
    return Made(module.encoded(entry), 2 * D, 2 * D, xla_reads_it=False)


@made
def a_literal_of_two_megabytes() -> Made:
    module = Module()
    entry = module.computation("main")
    x = entry.parameter(SQUARE)
    dims = (512, 1024)
    literal = wire.field(1, wire.shape(dims)) + wire.field(8, bytes(4 * 512 * 1024))
    entry.add("constant", dims, literal=literal)
    entry.dot(x, x)
    return Made(module.encoded(entry), D, D)


# NKI kernels. A state is told by the configuration alone.

FULL = {"func_name": "flash", "kernel_version": 1, "grid": [], "has_collectives": False}


def kernel(into: Computation, value: int, given: bytes, **more: bytes) -> int:
    fields: dict[str, Any] = {"custom_call_target": NKI, **more}
    if given:
        fields["backend_config"] = given
    return into.add("custom-call", SQUARE, [value], **fields)


def with_kernel(given: bytes, *, extra: bytes = b"", **more: bytes) -> bytes:
    """A product and a kernel."""
    module = Module()
    entry = module.computation("main")
    x = entry.parameter(SQUARE)
    kernel(entry, entry.dot(x, x), given, **more)
    return module.encoded(entry, extra)


def payload_module(index: int, *payloads: bytes) -> bytes:
    reference = wire.field(2, index)
    extra = b"".join(wire.field(22, payload) for payload in payloads)
    return with_kernel(b"", extra=extra, backend_config_payload=reference)


def nested_kernel(given: bytes) -> bytes:
    """A kernel called by 2 calls in the dearer branch of a conditional in a loop of 5."""
    module = Module()
    leaf = module.computation("leaf")
    kernel(leaf, leaf.parameter(SQUARE), given)
    idle, twice = product(module, "idle", dots=0), unary(module, "twice", "call", leaf, 2)
    choice = module.computation("choice")
    chosen(choice, choice.parameter(SQUARE), idle, twice)
    loop = Loop(module, choice, bound=5)
    entry = module.computation("main")
    loop.enter(entry, entry.parameter(SQUARE), start=0, bound=5)
    return module.encoded(entry)


# configuration -> (state, MACs a call)
KERNELS: dict[str, tuple[bytes, str, int | None]] = {
    "known": (config(**FULL, mac_count=1000), "known", 1000),
    "a_true_zero": (config(**FULL, mac_count=0), "known", 0),
    "a_whole_float": (config(**FULL, mac_count=1000.0), "known", 1000),
    "larger_than_64_bits": (config(**FULL, mac_count=2**70), "known", 2**70),
    "key_absent": (config(**FULL), "absent", None),
    "null": (config(**FULL, mac_count=None), "unreadable", None),
    "digits": (config(**FULL, mac_count="1000"), "known", 1000),
    "a_word": (config(**FULL, mac_count="many"), "unreadable", None),
    "negative": (config(**FULL, mac_count=-5), "unreadable", None),
    "half_a_mac": (config(**FULL, mac_count=0.5), "unreadable", None),
    "a_truth": (config(**FULL, mac_count=True), "unreadable", None),
    "infinite": (config(**FULL, mac_count=float("inf")), "unreadable", None),
    "not_a_number": (config(**FULL, mac_count=float("nan")), "unreadable", None),
    "a_list": (config(**FULL, mac_count=[1000]), "unreadable", None),
    "no_configuration": (b"", "unreadable", None),
    "not_base64": (b"<truncated>", "unreadable", None),
    "not_json": (b"bm90IGpzb24=", "unreadable", None),
    "json_but_no_object": (b"WzEsMl0=", "unreadable", None),
    "json_cut_short": (config(**FULL, mac_count=1000)[:-8], "unreadable", None),
    "not_text": (b"/////w==", "unreadable", None),
    "deeply_nested": (b"W1tb" * 50_000, "unreadable", None),
}
