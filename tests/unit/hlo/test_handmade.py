"""Modules made field by field: control flow, encodings, windows and kernels, with counts by hand.

What a loop does is told by running it, in Python; what a window meets, by trying every pair.
"""

from __future__ import annotations

import itertools
import operator
import random
from typing import Any

import pytest

from tests.unit.hlo import handmade, wire
from tests.unit.hlo.handmade import KERNELS, MADE, D
from tests.unit.hlo.readers import READERS, count, flags, same
from tests.unit.hlo.wire import Module, config, looped


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("reader", READERS)
def test_a_module_made_by_hand_gives_its_macs(reader: str, name: str) -> None:
    made = MADE[name]()
    counted = count(made.data, reader)
    assert (counted.macs, counted.macs_loop_once) == (made.macs, made.once)
    assert flags(counted) == dict.fromkeys(flags(counted), 0) | made.flags
    assert sum(counted.by_op.values()) == counted.macs


# Loops.

HOLDS = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


def turns(start: int, bound: int, step: int, direction: str, *, swapped: bool) -> int | None:
    """How often the loop turns, by running it; None if it passes the range of its counter."""
    done, at = 0, start
    while HOLDS[direction](*((bound, at) if swapped else (at, bound))):
        at, done = at + step, done + 1
        if not -(2**31) <= at < 2**31 or done > 100:
            return None
    return done


LOOPS = [
    dict(zip(("start", "bound", "step", "direction", "swapped", "carried"), row, strict=True))
    for row in itertools.product(
        (-3, 0, 7), (-8, 0, 10), (1, 3, -1, -4, 0), HOLDS, (False, True), (False, True)
    )
]


@pytest.mark.parametrize("reader", READERS)
def test_a_counting_loop_turns_as_often_as_it_does_when_run(reader: str) -> None:
    wrong = []
    for loop in random.Random(reader).sample(LOOPS, 240):
        counted = count(looped(2, **loop), reader)
        expected = turns(**{name: value for name, value in loop.items() if name != "carried"})
        known = (2 * D, 1) if expected is None else (expected * 2 * D, 0)
        if (counted.macs, len(counted.unknown_loops), counted.macs_loop_once) != (*known, 2 * D):
            wrong.append(f"{loop}: {counted.macs / 2 / D}, not {expected}")
    assert not wrong


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ({"start": 0, "bound": 12, "step": 2, "stepping": "subtract"}, None),
        ({"start": 12, "bound": 0, "step": 2, "stepping": "subtract", "direction": "GT"}, 6),
        ({"start": 1, "bound": 12, "step": 2, "stepping": "multiply"}, None),
        ({"start": None, "bound": 12}, None),
        ({"start": 0, "bound": None, "carried": True}, None),
        ({"start": 0, "bound": 2**31 - 1}, 2**31 - 1),
        ({"start": -(2**31), "bound": 2**31 - 1}, 2**32 - 1),
        # Counts past the largest s32 and begins again below: it never ends.
        ({"start": 0, "bound": 2**31 - 1, "direction": "LE"}, None),
    ],
)
@pytest.mark.parametrize("reader", READERS)
def test_a_loop_is_known_only_if_its_counter_is(
    reader: str, loop: dict[str, Any], expected: int | None
) -> None:
    counted = count(looped(**loop), reader)
    known = (D, 1) if expected is None else (expected * D, 0)
    assert (counted.macs, len(counted.unknown_loops)) == known


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (b'{"known_trip_count":{"n":"7"}}', 7),
        (b'{"known_trip_count":{"n":7}}', 7),
        (b'{"known_trip_count":{"n":"0"}}', 0),
        (b'{"known_trip_count":{"n":"-7"}}', None),
        (b'{"known_trip_count":{"n":"seven"}}', None),
        (b'{"known_trip_count":{"n":true}}', None),
        (b'{"known_trip_count":{"n":1.5}}', None),
        (b'{"known_trip_count":{}}', None),
        (b'{"known_trip_count":7}', None),
        (b'["known_trip_count"]', None),
        (b'{"known_trip_count":{"n":"7"', None),
        (b"\xff\xfe", None),
    ],
)
@pytest.mark.parametrize("reader", READERS)
def test_a_compilers_own_trip_count_is_taken_if_it_is_one(
    reader: str, written: bytes, expected: int | None
) -> None:
    data = looped(start=None, bound=3, more={"backend_config": written})
    counted = count(data, reader)
    known = (D, 1) if expected is None else (expected * D, 0)
    assert (counted.macs, len(counted.unknown_loops)) == known


@pytest.mark.parametrize("stepped", ["swapped with the bound", "made from the bound"])
@pytest.mark.parametrize("reader", READERS)
def test_a_counter_that_the_body_takes_from_elsewhere_is_no_counter(
    reader: str, stepped: str
) -> None:
    # It looks like counting. In truth both loops end after a turn: 6 < 1 and 7 < 6 do not hold.
    module = Module()
    loop = wire.Loop(module, wire.product(module))
    if stepped == "swapped with the bound":
        loop.body.tuple(loop.bound, loop.stepped, loop.value)
    else:
        more = loop.body.add("add", wire.INTEGER, [loop.bound, loop.body.constant(1)])
        loop.body.tuple(more, loop.bound, loop.value)
    entry = module.computation("main")
    loop.enter(entry, entry.parameter(wire.SQUARE), start=0, bound=6)
    counted = count(module.encoded(entry), reader)
    assert (counted.macs, len(counted.unknown_loops)) == (D, 1)


# Windows: one axis of a convolution, every pair of kernel and output position tried.


def meetings(
    source: int, kernel: int, result: int, stride: int, low: int, dilation: int, holes: int
) -> int:
    dilated = (source - 1) * holes + 1 if source else 0
    found = 0
    for k, o in itertools.product(range(kernel), range(result)):
        place = o * stride - low + k * dilation
        found += 0 <= place < dilated and place % holes == 0
    return found


def windowed(
    source: int, kernel: int, stride: int, low: int, high: int, dilation: int, holes: int
) -> tuple[bytes, int]:
    """A module of one convolution, batch 2, 3 features to 5; and the length of its result."""
    dilated = (source - 1) * holes + 1 if source else 0
    spread = (kernel - 1) * dilation + 1
    result = max(0, (dilated + low + high - spread) // stride + 1)
    module = Module()
    entry = module.computation("main")
    x, w = entry.parameter((2, 3, source)), entry.parameter((5, 3, kernel))
    window = windowing(kernel, stride, low, high, dilation, holes)
    entry.add("convolution", (2, 5, result), [x, w], **window)
    return module.encoded(entry), result


def windowing(*sizes: int) -> dict[str, Any]:
    """The fields of a convolution along one axis: size, stride, both paddings, both dilations.

    Batch, features, space of input and output; output and input features, space of the kernel.
    """
    numbers = {3: 1, 4: 0, 7: 0, 8: 1, 9: 0, 10: 1}
    axes = b"".join(wire.field(n, axis) for n, axis in numbers.items() if axis)
    axes += b"".join(wire.integers(n, [2]) for n in (6, 11, 12))
    window = b"".join(wire.field(n, size) for n, size in enumerate(sizes, 1))
    return {
        "window": wire.field(1, window),
        "convolution_dimension_numbers": axes,
        "feature_group_count": 1,
        "batch_group_count": 1,
    }


@pytest.mark.parametrize("reader", READERS)
def test_a_window_meets_what_trying_every_pair_finds(reader: str) -> None:
    dice = random.Random(5)
    wrong = []
    for _ in range(600):
        window = (
            *(dice.randint(0, 12), dice.randint(1, 7), dice.randint(1, 5)),
            *(dice.randint(-6, 9), dice.randint(-6, 9), dice.randint(1, 4), dice.randint(1, 5)),
        )
        source, kernel, stride, low, _high, dilation, holes = window
        data, result = windowed(*window)
        expected = 2 * 3 * 5 * meetings(source, kernel, result, stride, low, dilation, holes)
        if (counted := count(data, reader).macs) != expected:
            wrong.append(f"{window}: {counted}, not {expected}")
    assert not wrong


# Kernels.


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("reader", READERS)
def test_a_kernel_says_its_macs_or_that_they_are_not_known(reader: str, name: str) -> None:
    given, state, macs = KERNELS[name]
    made = count(handmade.with_kernel(given), reader)
    (kernel,) = made.kernels
    assert (kernel.target, kernel.state, kernel.calls) == (handmade.NKI, state, 1)
    assert kernel.macs_per_call == macs
    assert (made.macs, made.nki_macs) == (D + (macs or 0), macs or 0)


@pytest.mark.parametrize("name", ["known", "a_true_zero", "key_absent", "not_base64"])
@pytest.mark.parametrize("reader", READERS)
def test_a_kernels_calls_are_those_of_the_loops_and_calls_around_it(reader: str, name: str) -> None:
    given, state, macs = KERNELS[name]
    made = count(handmade.nested_kernel(given), reader)
    (kernel,) = made.kernels
    assert (kernel.state, kernel.calls, kernel.macs_per_call) == (state, 5 * 2, macs)
    assert made.macs == made.nki_macs == 10 * (macs or 0)


@pytest.mark.parametrize("reader", READERS)
def test_a_configuration_may_stand_in_the_modules_payloads(reader: str) -> None:
    first, second = config(**handmade.FULL, mac_count=5), config(**handmade.FULL, mac_count=7)
    for index, macs in ((0, 5), (1, 7)):
        (kernel,) = count(handmade.payload_module(index, first, second), reader).kernels
        assert (kernel.state, kernel.macs_per_call) == ("known", macs)
    for index in (2, -1, 2**40):
        (kernel,) = count(handmade.payload_module(index, first, second), reader).kernels
        assert (kernel.state, kernel.macs_per_call) == ("unreadable", None)


@pytest.mark.parametrize("reader", READERS)
def test_a_configuration_may_stand_in_the_instruction_as_a_payload(reader: str) -> None:
    given = config(**handmade.FULL, mac_count=5)
    data = handmade.with_kernel(b"", backend_config_payload=wire.field(1, given))
    (kernel,) = count(data, reader).kernels
    assert (kernel.state, kernel.macs_per_call) == ("known", 5)


@pytest.mark.parametrize("reader", READERS)
def test_kernels_of_one_name_that_do_not_cost_the_same_are_told_apart(reader: str) -> None:
    module = Module()
    entry = module.computation("main")
    value = entry.parameter(wire.SQUARE)
    for macs in (5, 7, 5):
        value = handmade.kernel(entry, value, config(**handmade.FULL, mac_count=macs))
    made = count(module.encoded(entry), reader)
    assert {(k.macs_per_call, k.calls) for k in made.kernels} == {(5, 2), (7, 1)}
    assert made.nki_macs == 17


# Library calls, as XLA's GPU and CPU compilers leave them: 7x5 by 5x11 in every form is 385.

SCRATCH: wire.Shape = (wire.PRED, (1024,))
CONTRACTING = b'{"gemm_backend_config":{"dot_dimension_numbers":{%s}}}'
AXIS_0 = CONTRACTING % b'"lhs_contracting_dimensions":["0"],"rhs_contracting_dimensions":["0"]'
AXIS_1 = CONTRACTING % b'"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]'
LIBRARY_PRODUCTS: dict[str, tuple[str, list[Any], Any, bytes, int]] = {
    "gemm": ("__cublas$gemm", [(7, 5), (5, 11)], [(7, 11), SCRATCH], AXIS_1, 385),
    "transposed": ("__cublas$gemm", [(5, 7), (5, 11)], [(7, 11), SCRATCH], AXIS_0, 385),
    "square": ("__cublas$gemm", [(6, 6), (6, 6)], [(6, 6), SCRATCH], AXIS_0, 216),
    "no_scratch": ("__cublas$gemm", [(7, 5), (5, 11)], (7, 11), AXIS_1, 385),
    "with_a_bias": ("__cublas$lt$matmul", [(7, 5), (5, 11), (11,)], [(7, 11)], AXIS_1, 385),
    "eighths": ("__cublas$lt$matmul$f8", [(7, 5), (5, 11)], [(7, 11), SCRATCH], AXIS_1, 385),
    "no_configuration": ("__cublas$gemm", [(7, 5), (5, 11)], [(7, 11), SCRATCH], b"", 385),
    "batch": ("__cublas$gemm", [(3, 7, 5), (3, 5, 11)], [(3, 7, 11)], b"", 3 * 385),
    "onednn": ("__onednn$matmul", [(7, 5), (5, 11)], (7, 11), b"", 385),
    "onednn_rows": ("__onednn$matmul", [(2, 7, 5), (5, 11)], (2, 7, 11), b"", 2 * 385),
    "integers": ("AwsNeuronIntMatmult", [(7, 5), (5, 11)], (7, 11), b"", 385),
}


@pytest.mark.parametrize("name", LIBRARY_PRODUCTS)
@pytest.mark.parametrize("reader", READERS)
def test_a_librarys_product_counts_as_the_dot_it_was(reader: str, name: str) -> None:
    target, operands, result, given, macs = LIBRARY_PRODUCTS[name]
    module = Module()
    entry = module.computation("main")
    values = [entry.parameter(of) for of in operands]
    entry.add("custom-call", result, values, custom_call_target=target, backend_config=given)
    made = count(module.encoded(entry), reader)
    assert made.by_op == {f"custom-call:{target}": macs}
    assert not made.unknown_calls


# source, kernel, result: which of them are the operands, and which the call makes.
LIBRARY_CONVOLUTIONS = {
    "__cudnn$convForward": (0, 1, 2),
    "__cudnn$convBiasActivationForward": (0, 1, 2),
    "__cudnn$convBackwardInput": (2, 1, 0),
    "__cudnn$convBackwardFilter": (0, 2, 1),
}


@pytest.mark.parametrize("target", LIBRARY_CONVOLUTIONS)
@pytest.mark.parametrize("reader", READERS)
def test_a_librarys_convolution_counts_as_the_forward_one(reader: str, target: str) -> None:
    # 2 x 3 features x 9, padded by 1 on both sides, to 5 features by a kernel of 3: 25 pairs meet.
    shapes = ((2, 3, 9), (5, 3, 3), (2, 5, 9))
    left, right, result = (shapes[role] for role in LIBRARY_CONVOLUTIONS[target])
    module = Module()
    entry = module.computation("main")
    entry.add(
        "custom-call",
        [result, SCRATCH],
        [entry.parameter(left), entry.parameter(right)],
        custom_call_target=target,
        **windowing(3, 1, 1, 1, 1, 1),
    )
    made = count(module.encoded(entry), reader)
    assert made.by_op == {f"custom-call:{target}": 2 * 3 * 5 * 25}


@pytest.mark.parametrize("target", ["AwsNeuronIntMatmult", "AwsNeuronCollectiveMatmul", "my_call"])
@pytest.mark.parametrize("reader", READERS)
def test_a_call_whose_work_nobody_knows_is_said_to_be_unknown(reader: str, target: str) -> None:
    module = Module()
    entry = module.computation("main")
    entry.add("custom-call", wire.SQUARE, [entry.parameter(wire.SQUARE)], custom_call_target=target)
    made = count(module.encoded(entry), reader)
    assert made.macs == 0
    assert made.unknown_calls == {target: 1}


@pytest.mark.parametrize("target", ["AwsNeuronRmsNorm", "Sharding", "AwsNeuronSoftmax", "TopK"])
@pytest.mark.parametrize("reader", READERS)
def test_a_call_that_multiplies_no_matrices_is_not_unknown(reader: str, target: str) -> None:
    module = Module()
    entry = module.computation("main")
    entry.add("custom-call", wire.SQUARE, [entry.parameter(wire.SQUARE)], custom_call_target=target)
    made = count(module.encoded(entry), reader)
    assert (made.macs, made.unknown_calls) == (0, {})


# Readers among themselves, and the file as a whole.


@pytest.mark.parametrize("name", MADE)
def test_both_readers_give_one_count(name: str) -> None:
    data = MADE[name]().data
    compiled, protobuf = (same(count(data, reader)) for reader in READERS)
    assert compiled == protobuf
