"""Files made to hurt: circles, bombs, depth, and what makes a careless reader quadratic.

Each is one to refuse (None) or has a count. `python -m tests.unit.hlo.crafted` tells what each
reader says, in a process with little memory.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from typing import Any

from tests.unit.hlo import wire
from tests.unit.hlo.handmade import chosen, entry_calling, kernel
from tests.unit.hlo.hostile import DATA, limit_memory, verdict
from tests.unit.hlo.readers import READERS
from tests.unit.hlo.wire import SQUARE, Loop, Module, config, field, product, unary, varint

D = wire.SQUARE_MACS
MANY = 4000
TIMES_AS_MUCH_A_BYTE = 90  # of the plain reader's, on a module without loops

CRAFTED: dict[str, Callable[[], tuple[bytes, int | None]]] = {}


def crafted(build: Callable[[], tuple[bytes, int | None]]) -> Any:
    CRAFTED[build.__name__] = build
    return build


@crafted
def nothing() -> tuple[bytes, int | None]:
    return b"", None


@crafted
def a_computation_that_calls_itself() -> tuple[bytes, int | None]:
    module = Module()
    turning = module.computation("turning")
    turning.add("call", SQUARE, [turning.parameter(SQUARE)], [turning])
    return module.encoded(entry_calling(module, ("call", turning))), None


@crafted
def an_entry_that_calls_itself() -> tuple[bytes, int | None]:
    module = Module()
    entry = module.computation("main")
    entry.add("fusion", SQUARE, [entry.parameter(SQUARE)], [entry])
    return module.encoded(entry), None


@crafted
def a_circle_of_three() -> tuple[bytes, int | None]:
    module = Module()
    ring = [module.computation(name) for name in "abc"]
    for here, there in zip(ring, [*ring[1:], ring[0]], strict=True):
        here.add("call", SQUARE, [here.parameter(SQUARE)], [there])
    return module.encoded(entry_calling(module, ("call", ring[0]))), None


@crafted
def a_loop_whose_body_holds_the_loop() -> tuple[bytes, int | None]:
    module = Module()
    inside = product(module)
    loop = Loop(module, inside, bound=3)
    entry = module.computation("main")
    loop.enter(entry, entry.parameter(SQUARE), start=0, bound=3)
    loop.enter(inside, inside.last, start=0, bound=3)
    return module.encoded(entry), None


@crafted
def a_circle_that_nobody_enters() -> tuple[bytes, int | None]:
    module = Module()
    turning = module.computation("turning")
    turning.add("call", SQUARE, [turning.parameter(SQUARE)], [turning])
    return module.encoded(entry_calling(module, ("call", product(module)))), D


@crafted
def a_value_that_is_its_own_operand() -> tuple[bytes, int | None]:
    # The loop's bound is a copy of itself.
    module = Module()
    loop = Loop(module, product(module), bound=None)
    entry = module.computation("main")
    value = entry.parameter(SQUARE)
    start = entry.constant(0)
    own = entry.add("copy", wire.INTEGER, [4242], identity=4242)
    state = entry.tuple(start, own, value)
    whole = [wire.INTEGER, wire.INTEGER, SQUARE]
    entry.part(entry.add("while", whole, [state], [loop.body, loop.condition]), 2)
    return module.encoded(entry), D


@crafted
def a_callee_that_is_not_there() -> tuple[bytes, int | None]:
    module = Module()
    absent = Module().computation("absent", identity=77)
    return module.encoded(entry_calling(module, ("call", absent))), None


@crafted
def an_operand_that_is_not_there() -> tuple[bytes, int | None]:
    module = Module()
    entry = module.computation("main")
    entry.parameter(SQUARE)
    sides = wire.integers(1, [1]) + wire.integers(2, [0])
    entry.add("dot", SQUARE, [99, 98], dot_dimension_numbers=sides)
    return module.encoded(entry), None


@crafted
def a_dot_without_operands() -> tuple[bytes, int | None]:
    module = Module()
    entry = module.computation("main")
    entry.add("dot", SQUARE, dot_dimension_numbers=wire.integers(1, [1]))
    return module.encoded(entry), None


def dot_contracting(axis: int, dims: tuple[int, ...] = SQUARE) -> bytes:
    module = Module()
    entry = module.computation("main")
    x = entry.parameter(dims)
    entry.add("dot", SQUARE, [x, x], dot_dimension_numbers=wire.integers(1, [axis]))
    return module.encoded(entry)


@crafted
def a_contraction_of_an_axis_that_is_not_there() -> tuple[bytes, int | None]:
    return dot_contracting(5), None


@crafted
def a_contraction_of_a_negative_axis() -> tuple[bytes, int | None]:
    return dot_contracting(-1), None


@crafted
def a_dimension_below_zero() -> tuple[bytes, int | None]:
    return dot_contracting(1, (4, -4)), None


@crafted
def two_computations_of_one_id() -> tuple[bytes, int | None]:
    module = Module()
    product(module, "a").id = 5
    entry = entry_calling(module, ("call", product(module, "b")))
    module.computations[1].id = 5
    return module.encoded(entry), None


@crafted
def two_instructions_of_one_id() -> tuple[bytes, int | None]:
    module = Module()
    entry = module.computation("main")
    entry.add("parameter", SQUARE, identity=9)
    entry.add("parameter", (4, 400), identity=9, parameter_number=1)
    entry.add("dot", SQUARE, [9, 9], dot_dimension_numbers=wire.integers(1, [1]))
    return module.encoded(entry), None


@crafted
def an_entry_that_is_not_there() -> tuple[bytes, int | None]:
    module = Module()
    product(module)
    other = Module().computation("elsewhere", identity=500)
    other.parameter(SQUARE)
    return module.encoded(other), None


@crafted
def a_shape_of_ten_thousand_tuples_in_one_another() -> tuple[bytes, int | None]:
    # protobuf refuses 100 levels; nothing of it is needed for the count.
    shape = wire.shape(SQUARE)
    for _ in range(10_000):
        shape = field(2, wire.TUPLE) + field(4, shape)
    module = Module()
    inner = product(module)
    entry = entry_calling(module, ("call", inner))
    odd = field(2, "tuple") + field(3, shape) + field(35, 1)
    return module.encoded(entry, field(3, field(5, 999) + field(2, odd))), D


@crafted
def groups_ten_thousand_deep() -> tuple[bytes, int | None]:
    whole = product_alone()
    return whole + varint(900 << 3 | 3) * 10_000 + varint(900 << 3 | 4) * 10_000, None


def product_alone() -> bytes:
    module = Module()
    return module.encoded(entry_calling(module, ("call", product(module))))


@crafted
def a_length_past_the_end() -> tuple[bytes, int | None]:
    return product_alone() + varint(900 << 3 | 2) + varint(2**40), None


@crafted
def a_length_that_wraps_around() -> tuple[bytes, int | None]:
    return product_alone() + varint(900 << 3 | 2) + varint(2**64 - 8) + bytes(64), None


@crafted
def a_number_of_eleven_bytes() -> tuple[bytes, int | None]:
    return product_alone() + varint(900 << 3) + b"\xff" * 10 + b"\x01", None


@crafted
def field_number_zero() -> tuple[bytes, int | None]:
    return product_alone() + b"\x00\x00", None


@crafted
def a_bomb_of_two_gigabytes_of_nothing() -> tuple[bytes, int | None]:
    return gzip.compress(bytes(16 << 20)) * 128, None


@crafted
def a_bomb_behind_a_whole_module() -> tuple[bytes, int | None]:
    return gzip.compress(product_alone()) + gzip.compress(bytes(16 << 20)) * 128, None


@crafted
def a_compressed_file_cut_short() -> tuple[bytes, int | None]:
    return gzip.compress(product_alone())[:-12], None


@crafted
def a_compressed_file_with_a_wrong_sum() -> tuple[bytes, int | None]:
    data = bytearray(gzip.compress(product_alone()))
    data[-6] ^= 1
    return bytes(data), None


@crafted
def a_bomb_in_a_bomb() -> tuple[bytes, int | None]:
    return gzip.compress(gzip.compress(bytes(16 << 20)) * 64), None


# Large and whole: what they cost a byte is held against a plain module.


@crafted
def many_calls_of_one_computation() -> tuple[bytes, int | None]:
    module = Module()
    return module.encoded(entry_calling(module, *[("call", product(module))] * MANY)), MANY * D


@crafted
def many_computations_in_a_row() -> tuple[bytes, int | None]:
    module = Module()
    inside = product(module)
    for depth in range(MANY):
        inside = unary(module, f"level_{depth}", "call", inside, 1)
    return module.encoded(entry_calling(module, ("call", inside))), D


@crafted
def many_levels_of_two_calls() -> tuple[bytes, int | None]:
    module = Module()
    inside = product(module)
    for depth in range(300):
        inside = unary(module, f"level_{depth}", "call", inside, 2)
    return module.encoded(entry_calling(module, ("call", inside))), 2**300 * D


@crafted
def many_loops_in_one_another() -> tuple[bytes, int | None]:
    module = Module()
    inside = product(module)
    for depth in range(300):
        loop = Loop(module, inside, bound=2)
        wrapper = module.computation(f"level_{depth}")
        loop.enter(wrapper, wrapper.parameter(SQUARE), start=0, bound=2)
        inside = wrapper
    return module.encoded(entry_calling(module, ("call", inside))), 2**300 * D


@crafted
def many_loops_one_after_another() -> tuple[bytes, int | None]:
    module = Module()
    loop = Loop(module, product(module), bound=3)
    entry = module.computation("main")
    value = entry.parameter(SQUARE)
    for _ in range(MANY):
        value = loop.enter(entry, value, start=0, bound=3)
    return module.encoded(entry), MANY * 3 * D


@crafted
def a_bound_through_many_copies() -> tuple[bytes, int | None]:
    module = Module()
    loop = Loop(module, product(module), bound=None)
    entry = module.computation("main")
    value = entry.parameter(SQUARE)
    bound = entry.constant(3)
    for _ in range(MANY):
        bound = entry.add("copy", wire.INTEGER, [bound])
    state = entry.tuple(entry.constant(0), bound, value)
    whole = [wire.INTEGER, wire.INTEGER, SQUARE]
    entry.part(entry.add("while", whole, [state], [loop.body, loop.condition]), 2)
    return module.encoded(entry), 3 * D


@crafted
def a_start_from_many_loops_before() -> tuple[bytes, int | None]:
    # Each loop hands its bound, unchanged, to the next.
    module = Module()
    loop = Loop(module, product(module), bound=None)
    entry = module.computation("main")
    value, bound = entry.parameter(SQUARE), entry.constant(3)
    whole = [wire.INTEGER, wire.INTEGER, SQUARE]
    for _ in range(400):
        state = entry.tuple(entry.constant(0), bound, value)
        done = entry.add("while", whole, [state], [loop.body, loop.condition])
        bound, value = entry.part(done, 1), entry.part(done, 2)
    return module.encoded(entry), 400 * 3 * D


@crafted
def many_bounds_that_are_copies_of_themselves() -> tuple[bytes, int | None]:
    module = Module()
    loop = Loop(module, product(module), bound=None)
    entry = module.computation("main")
    value = entry.parameter(SQUARE)
    whole = [wire.INTEGER, wire.INTEGER, SQUARE]
    for turn in range(20):
        one, other = 10**6 + 2 * turn, 10**6 + 2 * turn + 1
        entry.add("copy", wire.INTEGER, [other], identity=one)
        entry.add("copy", wire.INTEGER, [one], identity=other)
        state = entry.tuple(entry.constant(0), one, value)
        value = entry.part(entry.add("while", whole, [state], [loop.body, loop.condition]), 2)
    return module.encoded(entry), 20 * D


@crafted
def many_sums_of_sums() -> tuple[bytes, int | None]:
    # Each is twice the one before: a walk without a memory takes 2^300 steps. Too deep to follow:
    # the body once.
    module = Module()
    loop = Loop(module, product(module), bound=None)
    entry = module.computation("main")
    value = entry.parameter(SQUARE)
    total = entry.constant(0)
    for _ in range(300):
        total = entry.add("add", wire.INTEGER, [total, total])
    state = entry.tuple(entry.constant(-3), total, value)
    whole = [wire.INTEGER, wire.INTEGER, SQUARE]
    entry.part(entry.add("while", whole, [state], [loop.body, loop.condition]), 2)
    return module.encoded(entry), D


@crafted
def many_branches() -> tuple[bytes, int | None]:
    module = Module()
    entry = module.computation("main")
    chosen(entry, entry.parameter(SQUARE), *[product(module)] * MANY)
    return module.encoded(entry), D


@crafted
def many_kernels() -> tuple[bytes, int | None]:
    module = Module()
    entry = module.computation("main")
    value = entry.parameter(SQUARE)
    for macs in range(MANY):
        value = kernel(entry, value, config(func_name=f"k{macs}", mac_count=macs))
    return module.encoded(entry), sum(range(MANY))


@crafted
def a_million_operands() -> tuple[bytes, int | None]:
    module = Module()
    entry = module.computation("main")
    x = entry.parameter(SQUARE)
    entry.add("tuple", [SQUARE], [x] * 1_000_000)
    entry.dot(x, x)
    return module.encoded(entry), D


def window(*sizes: int) -> bytes:
    """A convolution of these window fields on vectors of a million."""
    module = Module()
    entry = module.computation("main")
    x, w = entry.parameter((1, 1, 10**6)), entry.parameter((1, 1, 10**6))
    axes = b"".join(field(n, axis) for n, axis in {3: 1, 8: 1, 10: 1}.items())
    axes += b"".join(wire.integers(n, [2]) for n in (6, 11, 12))
    encoded = b"".join(field(n, size) for n, size in enumerate(sizes, 1))
    numbers: dict[str, Any] = {"convolution_dimension_numbers": axes}
    entry.add("convolution", (1, 1, 1_000_001), [x, w], window=field(1, encoded), **numbers)
    return module.encoded(entry)


@crafted
def a_window_of_a_million_over_a_million() -> tuple[bytes, int | None]:
    # Half the kernel's length of padding on both sides: a trapezium, by Gauss.
    n, half = 10**6, 10**6 // 2
    return window(n, 1, half, half, 1, 1), n * (n + 1) - half * (half + 1)


def examined() -> dict[str, Any]:
    """For each file what each reader said, and how its cost compares with a plain module's."""
    plain = (DATA / "llama_mid_unrolled_fwd.unopt.hlo_module.pb").read_bytes()
    files = {name: build() for name, build in CRAFTED.items()}
    a_byte = max(cost(plain, "protobuf") for _ in range(3)) / len(plain)
    limit_memory()
    found = {}
    for name, (data, _) in files.items():
        row: dict[str, Any] = {}
        allowed_s = TIMES_AS_MUCH_A_BYTE * a_byte * max(len(data), len(plain))
        for reader in READERS:
            before = time.process_time()
            row[reader] = said(data, reader)
            took_s = time.process_time() - before
            if took_s > allowed_s:  # once more: it may have been the machine
                took_s = cost(data, reader)
            row[f"{reader}_share"] = took_s / allowed_s
        found[name] = row
    return found


def said(data: bytes, reader: str) -> str:
    try:
        given = verdict(data, reader)
    except Exception as error:  # noqa: BLE001  the point: nothing but FormatError
        return f"raised {error!r}"
    return given if isinstance(given, str) else f"{given['macs']}"


def cost(data: bytes, reader: str) -> float:
    before = time.process_time()
    said(data, reader)
    return time.process_time() - before


if __name__ == "__main__":
    print(json.dumps(examined()))
