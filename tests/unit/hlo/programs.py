"""Programs whose modules are counted: each in one form with loops and in one without.

A program is a function of `Loops`, which gives it scan, fori, count and switch. In the form that
is examined these are jax's own; in the flat form they are Python's, so that the module has no loop
and no branch at all. An oracle must not share the fault: what a loop costs must not be
told by anyone's reading of loops, ours or XLA's, which counts a body once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax as typed_in_part
import numpy as np

jax: Any = typed_in_part
jnp, lax = jax.numpy, jax.lax
Mesh, NamedSharding, P = jax.sharding.Mesh, jax.sharding.NamedSharding, jax.sharding.PartitionSpec

Array = Any
Built = tuple[Callable[..., Any], tuple[Array, ...]]


class Loops:
    """jax's control flow."""

    def scan(self, body: Any, carry: Any, xs: Any, length: int, *, reverse: bool = False) -> Any:
        return lax.scan(body, carry, xs, length=length, reverse=reverse)

    def fori(self, start: int, stop: int, body: Any, carry: Any) -> Any:
        return lax.fori_loop(start, stop, body, carry)

    def count(self, start: int, stop: int, step: int, body: Any, carry: Any) -> Any:
        """A while loop that counts from start by step, up or down, until it has passed stop."""

        def goes_on(state: Any) -> Any:
            return state[0] < stop if step > 0 else state[0] > stop

        def turn(state: Any) -> Any:
            return state[0] + step, body(state[1])

        return lax.while_loop(goes_on, turn, (jnp.int32(start), carry))[1]

    def until(self, goes_on: Any, body: Any, carry: Any) -> Any:
        """A while loop that only the data ends."""
        return lax.while_loop(goes_on, body, carry)

    def switch(self, index: Any, branches: Sequence[Any], *values: Any, dearest: int) -> Any:
        return lax.switch(index, branches, *values)

    def map(self, body: Any, xs: Any) -> Any:
        return lax.map(body, xs)


class Flat(Loops):
    """The same work without a loop or a branch: bodies as often as they run, the dearest branch."""

    def scan(self, body: Any, carry: Any, xs: Any, length: int, *, reverse: bool = False) -> Any:
        turns = range(length)
        outs: list[Any] = [None] * length
        for turn in reversed(turns) if reverse else turns:
            x = jax.tree.map(lambda leaf, i=turn: leaf[i], xs)
            carry, outs[turn] = body(carry, x)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)

    def fori(self, start: int, stop: int, body: Any, carry: Any) -> Any:
        for turn in range(start, stop):
            carry = body(turn, carry)
        return carry

    def count(self, start: int, stop: int, step: int, body: Any, carry: Any) -> Any:
        for _ in range(start, stop, step):
            carry = body(carry)
        return carry

    def until(self, goes_on: Any, body: Any, carry: Any) -> Any:
        return body(carry)

    def switch(self, index: Any, branches: Sequence[Any], *values: Any, dearest: int) -> Any:
        return branches[dearest](*values)

    def map(self, body: Any, xs: Any) -> Any:
        return jnp.stack([body(x) for x in xs])


Builder = Callable[[Loops], Built]


@dataclass(frozen=True)
class Program:
    """How to build it, and what a counter must admit about it."""

    build: Builder
    unknown_loops: int = 0
    uneven_branches: int = 0


PROGRAMS: dict[str, Program] = {}


def program(*, unknown_loops: int = 0, uneven_branches: int = 0) -> Callable[[Builder], Builder]:
    def added(build: Builder) -> Builder:
        PROGRAMS[build.__name__] = Program(build, unknown_loops, uneven_branches)
        return build

    return added


def array(*shape: int, dtype: Any = jnp.float32, sharding: Any = None) -> Array:
    """An argument: its shape alone, since nothing here is executed."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def gradient(f: Callable[..., Any], count: int = 2) -> Callable[..., Any]:
    """The sum of f and its gradient. Both, because the flat form of a gradient alone need not run
    its last layer forward, where a scan must.
    """
    total = lambda *xs: jnp.sum(f(*xs).astype(jnp.float32))  # noqa: E731
    both: Callable[..., Any] = jax.value_and_grad(total, argnums=tuple(range(count)))
    return both


# Products of two arrays.


@program()
def matmul(_: Loops) -> Built:
    return jnp.matmul, (array(7, 5), array(5, 11))


@program()
def matmul_batched(_: Loops) -> Built:
    return jnp.matmul, (array(2, 3, 7, 5), array(2, 3, 5, 11))


@program()
def matmul_broadcast(_: Loops) -> Built:
    return jnp.matmul, (array(4, 7, 5), array(5, 11))


@program()
def matmul_half(_: Loops) -> Built:
    return jnp.matmul, (array(7, 5, dtype=jnp.bfloat16), array(5, 11, dtype=jnp.bfloat16))


@program()
def matmul_gradient(_: Loops) -> Built:
    return gradient(jnp.matmul), (array(7, 5), array(5, 11))


@program()
def vector_product(_: Loops) -> Built:
    return jnp.dot, (array(129), array(129))


@program()
def matrix_vector(_: Loops) -> Built:
    return jnp.dot, (array(17, 13), array(13))


@program()
def outer_product(_: Loops) -> Built:
    return partial(jnp.einsum, "i,j->ij"), (array(6), array(9))


@program()
def many_contracting(_: Loops) -> Built:
    return partial(jnp.einsum, "abcd,bdce->ae"), (array(2, 3, 5, 7), array(3, 7, 5, 4))


@program()
def many_batch(_: Loops) -> Built:
    return partial(jnp.einsum, "abcd,bade->abce"), (array(2, 3, 5, 7), array(3, 2, 7, 4))


@program()
def batch_in_the_middle(_: Loops) -> Built:
    numbers = (((3, 0), (0, 2)), ((1,), (1,)))
    return partial(lax.dot_general, dimension_numbers=numbers), (
        array(2, 3, 5, 7),
        array(7, 3, 2, 4),
    )


@program()
def contraction_of_ones(_: Loops) -> Built:
    return partial(jnp.einsum, "abc,cd->abd"), (array(3, 1, 1), array(1, 5))


@program()
def an_empty_product(_: Loops) -> Built:
    return jnp.matmul, (array(7, 0), array(0, 11))


@program()
def product_of_integers(_: Loops) -> Built:
    numbers = (((1,), (0,)), ((), ()))
    product = partial(lax.dot_general, dimension_numbers=numbers, preferred_element_type=jnp.int32)
    return product, (array(8, 16, dtype=jnp.int8), array(16, 4, dtype=jnp.int8))


@program()
def product_of_complex(_: Loops) -> Built:
    return jnp.matmul, (array(7, 5, dtype=jnp.complex64), array(5, 11, dtype=jnp.complex64))


@program()
def attention(_: Loops) -> Built:
    def f(q: Array, k: Array, v: Array) -> Array:
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)

    return gradient(f, 3), (array(2, 3, 8, 4),) * 3


@program()
def vmapped(_: Loops) -> Built:
    return jax.vmap(jax.vmap(jnp.dot, (0, None)), (None, 0)), (array(6, 5), array(4, 5, 3))


@program()
def hessian(_: Loops) -> Built:
    return jax.hessian(lambda x, w: jnp.sum(jnp.tanh(x @ w) ** 2)), (array(5), array(5, 4))


@program()
def forward_mode(_: Loops) -> Built:
    def f(x: Array, w: Array, dx: Array, dw: Array) -> Any:
        return jax.jvp(jnp.matmul, (x, w), (dx, dw))

    return f, (array(7, 5), array(5, 11)) * 2


@program()
def mlp_step(_: Loops) -> Built:
    def loss(weights: list[Array], x: Array) -> Array:
        for w in weights:
            x = jax.nn.gelu(x @ w)
        return jnp.sum(x**2)

    def step(a: Array, b: Array, c: Array, x: Array) -> Any:
        grads = jax.grad(loss)([a, b, c], x)
        return [w - 0.1 * g for w, g in zip([a, b, c], grads, strict=True)]

    return step, (array(8, 16), array(16, 16), array(16, 4), array(5, 8))


@program()
def quadratic_custom_gradient(_: Loops) -> Built:
    f = jax.custom_vjp(jnp.matmul)
    f.defvjp(lambda x, w: (f(x, w), (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    return gradient(f), (array(7, 5), array(5, 11))


@program()
def a_shared_function_called_five_times(_: Loops) -> Built:
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def f(x: Array, w: Array) -> Array:
        for _ in range(5):
            x = layer(x, w)
        return x

    return f, (array(3, 8), array(8, 8))


@program()
def shared_functions_in_shared_functions(_: Loops) -> Built:
    inner = jax.jit(lambda x, w: x @ w)
    outer = jax.jit(lambda x, w: jnp.tanh(inner(inner(x, w), w)))

    def f(x: Array, w: Array) -> Array:
        return outer(outer(outer(x, w), w), w) + inner(x, w)

    return gradient(f), (array(3, 8), array(8, 8))


@program()
def rematerialised(_: Loops) -> Built:
    layer = jax.checkpoint(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w))

    def f(x: Array, w: Array) -> Array:
        for _ in range(3):
            x = layer(x, w)
        return x

    return gradient(f), (array(3, 8), array(8, 8))


# Loops.


def layers(x: Array, w: Array) -> tuple[Array, None]:
    return jnp.tanh(x @ w), None


@program()
def scanned(loops: Loops) -> Built:
    return lambda x, ws: loops.scan(layers, x, ws, 6)[0], (array(3, 8), array(6, 8, 8))


@program()
def scanned_backwards(loops: Loops) -> Built:
    def f(x: Array, ws: Array) -> Array:
        return loops.scan(layers, x, ws, 6, reverse=True)[0]

    return f, (array(3, 8), array(6, 8, 8))


@program()
def scanned_gradient(loops: Loops) -> Built:
    def f(x: Array, ws: Array) -> Array:
        return loops.scan(layers, x, ws, 6)[0]

    return gradient(f), (array(3, 8), array(6, 8, 8))


@program()
def scanned_once(loops: Loops) -> Built:
    return lambda x, ws: loops.scan(layers, x, ws, 1)[0], (array(3, 8), array(1, 8, 8))


@program()
def scanned_rematerialised_gradient(loops: Loops) -> Built:
    def f(x: Array, ws: Array) -> Array:
        body = jax.checkpoint(lambda c, w: (jnp.tanh(jnp.tanh(c @ w) @ w), None))
        return loops.scan(body, x, ws, 5)[0]

    return gradient(f), (array(3, 8), array(5, 8, 8))


@program()
def nested_scans(loops: Loops) -> Built:
    def f(x: Array, w: Array) -> Array:
        def inner(c: Array, _: Any) -> Any:
            return jnp.tanh(c @ w), None

        def outer(c: Array, _: Any) -> Any:
            return loops.scan(inner, c @ w, None, 4)[0], None

        return loops.scan(outer, x, None, 3)[0]

    return f, (array(3, 8), array(8, 8))


@program()
def nested_scans_gradient(loops: Loops) -> Built:
    def f(x: Array, ws: Array) -> Array:
        def outer(c: Array, w: Array) -> Any:
            return loops.scan(lambda d, _: layers(d, w), c, None, 4)[0], None

        return loops.scan(outer, x, ws, 3)[0]

    return gradient(f), (array(3, 8), array(3, 8, 8))


@program()
def three_nested_scans(loops: Loops) -> Built:
    def f(x: Array, w: Array) -> Array:
        def a(c: Array, _: Any) -> Any:
            return c @ w, None

        def b(c: Array, _: Any) -> Any:
            return loops.scan(a, c, None, 2)[0], None

        def d(c: Array, _: Any) -> Any:
            return loops.scan(b, c, None, 3)[0], None

        return loops.scan(d, x, None, 5)[0]

    return f, (array(3, 4), array(4, 4))


@program()
def a_scan_of_a_shared_function(loops: Loops) -> Built:
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def f(x: Array, ws: Array) -> Array:
        def body(c: Array, w: Array) -> Any:
            return layer(layer(c, w), w), None

        return layer(loops.scan(body, x, ws, 4)[0], ws[0])

    return f, (array(3, 8), array(4, 8, 8))


@program()
def a_vmapped_scan(loops: Loops) -> Built:
    def f(x: Array, ws: Array) -> Array:
        return loops.scan(layers, x, ws, 6)[0]

    return jax.vmap(f, (0, None)), (array(5, 3, 8), array(6, 8, 8))


@program()
def mapped(loops: Loops) -> Built:
    return lambda x, w: loops.map(lambda row: row @ w, x), (array(9, 3, 8), array(8, 5))


@program()
def fori(loops: Loops) -> Built:
    def f(x: Array, w: Array) -> Array:
        return loops.fori(0, 7, lambda _, c: jnp.tanh(c @ w), x)

    return f, (array(3, 8), array(8, 8))


@program()
def fori_from_five(loops: Loops) -> Built:
    def f(x: Array, w: Array) -> Array:
        return loops.fori(5, 16, lambda i, c: jnp.tanh(c @ w) + i, x)

    return f, (array(3, 8), array(8, 8))


@program()
def fori_never(loops: Loops) -> Built:
    def f(x: Array, w: Array) -> Array:
        return loops.count(4, 4, 1, lambda c: jnp.tanh(c @ w), x)

    return f, (array(3, 8), array(8, 8))


@program()
def counting_by_threes(loops: Loops) -> Built:
    def f(x: Array, w: Array) -> Array:
        return loops.count(1, 12, 3, lambda c: jnp.tanh(c @ w), x)

    return f, (array(3, 8), array(8, 8))


@program()
def counting_down(loops: Loops) -> Built:
    def f(x: Array, w: Array) -> Array:
        return loops.count(9, 0, -1, lambda c: jnp.tanh(c @ w), x)

    return f, (array(3, 8), array(8, 8))


@program()
def counting_down_by_fours_past_zero(loops: Loops) -> Built:
    def f(x: Array, w: Array) -> Array:
        return loops.count(9, -7, -4, lambda c: jnp.tanh(c @ w), x)

    return f, (array(3, 8), array(8, 8))


@program(unknown_loops=1)
def until_the_data_says(loops: Loops) -> Built:
    def f(x: Array, w: Array) -> Array:
        return loops.until(lambda c: jnp.sum(c) < 100.0, lambda c: jnp.tanh(c @ w), x)

    return f, (array(3, 8), array(8, 8))


@program(unknown_loops=1)
def a_known_scan_in_an_unknown_loop(loops: Loops) -> Built:
    def f(x: Array, ws: Array) -> Array:
        def body(c: Array) -> Array:
            return loops.scan(layers, c, ws, 6)[0]

        return loops.until(lambda c: jnp.sum(c) < 100.0, body, x)

    return f, (array(3, 8), array(6, 8, 8))


@program(unknown_loops=1)
def an_unknown_loop_in_a_scan(loops: Loops) -> Built:
    def f(x: Array, ws: Array) -> Array:
        def body(c: Array, w: Array) -> Any:
            return loops.until(lambda d: jnp.sum(d) < 100.0, lambda d: d @ w, c), None

        return loops.scan(body, x, ws, 6)[0]

    return f, (array(3, 8), array(6, 8, 8))


@program(unknown_loops=1)
def a_bound_that_is_an_argument(loops: Loops) -> Built:
    def f(x: Array, w: Array, n: Array) -> Array:
        if isinstance(loops, Flat):
            return jnp.tanh(x @ w)
        return lax.fori_loop(0, n, lambda _, c: jnp.tanh(c @ w), x)

    return f, (array(3, 8), array(8, 8), array(dtype=jnp.int32))


@program()
def an_associative_scan(_: Loops) -> Built:
    return partial(lax.associative_scan, jnp.matmul), (array(9, 4, 4),)


# Branches. They hold products and nothing else, so that XLA's dearest branch is ours.


@program(uneven_branches=1)
def two_branches(loops: Loops) -> Built:
    def f(x: Array, w: Array, i: Array) -> Array:
        branches = [lambda a, b: a @ b, lambda a, b: a @ b @ b @ b]
        return loops.switch(i, branches, x, w, dearest=1)

    return f, (array(3, 8), array(8, 8), array(dtype=jnp.int32))


@program()
def even_branches(loops: Loops) -> Built:
    def f(x: Array, w: Array, i: Array) -> Array:
        branches = [lambda a, b: a @ b, lambda a, b: a @ b.T]
        return loops.switch(i, branches, x, w, dearest=0)

    return f, (array(3, 8), array(8, 8), array(dtype=jnp.int32))


@program(uneven_branches=1)
def four_branches_in_a_scan(loops: Loops) -> Built:
    def f(x: Array, w: Array, order: Array) -> Array:
        branches = [lambda a: a, lambda a: a @ w @ w, lambda a: a @ w, lambda a: a]

        def body(c: Array, i: Array) -> Any:
            return loops.switch(i, branches, c, dearest=1), None

        return loops.scan(body, x, order, 5)[0]

    return f, (array(3, 8), array(8, 8), array(5, dtype=jnp.int32))


@program(uneven_branches=1)
def a_scan_in_a_branch(loops: Loops) -> Built:
    def f(x: Array, w: Array, i: Array) -> Array:
        def long(a: Array) -> Array:
            return loops.scan(lambda c, _: (c @ w, None), a, None, 4)[0]

        return loops.switch(i, [long, lambda a: a], x, dearest=0)

    return f, (array(3, 8), array(8, 8), array(dtype=jnp.int32))


# Convolutions.


def convolution(lhs: tuple[int, ...], rhs: tuple[int, ...], **more: Any) -> Built:
    """Of arrays in the order batch, features, space; features out, features in, space."""
    more.setdefault("window_strides", (1,) * (len(lhs) - 2))
    more.setdefault("padding", "VALID")
    return partial(lax.conv_general_dilated, **more), (array(*lhs), array(*rhs))


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "conv_1d": ((2, 3, 17), (5, 3, 4), {}),
    "conv_1d_causal": ((2, 3, 17), (5, 3, 4), {"padding": [(3, 0)]}),
    "conv_2d_same": ((2, 3, 9, 8), (5, 3, 3, 3), {"padding": "SAME"}),
    "conv_2d_even_kernel_same": ((2, 3, 9, 8), (5, 3, 2, 4), {"padding": "SAME"}),
    "conv_2d_strided": ((2, 3, 9, 8), (5, 3, 3, 3), {"padding": "SAME", "window_strides": (2, 3)}),
    "conv_3d": ((1, 2, 6, 5, 7), (3, 2, 3, 2, 3), {"padding": "SAME"}),
    "conv_0d": ((4, 6), (5, 6), {"window_strides": (), "padding": []}),
    "conv_pointwise": ((2, 6, 5, 5), (4, 6, 1, 1), {}),
    "conv_whole_window": ((2, 3, 5, 5), (4, 3, 5, 5), {}),
    "conv_grouped": ((2, 8, 9, 9), (6, 4, 3, 3), {"feature_group_count": 2}),
    "conv_depthwise": ((2, 6, 9, 9), (6, 1, 3, 3), {"feature_group_count": 6}),
    "conv_depthwise_two_each": (
        (2, 6, 9, 9),
        (12, 1, 3, 3),
        {"feature_group_count": 6, "padding": "SAME"},
    ),
    "conv_kernel_dilated": ((2, 3, 15, 11), (5, 3, 3, 3), {"rhs_dilation": (2, 3)}),
    "conv_kernel_dilated_same": (
        (2, 3, 15, 11),
        (5, 3, 3, 3),
        {"rhs_dilation": (3, 2), "padding": "SAME"},
    ),
    "conv_transposed": (
        (2, 3, 5, 6),
        (4, 3, 3, 3),
        {"lhs_dilation": (2, 2), "padding": [(2, 2), (2, 2)]},
    ),
    "conv_both_dilated_strided_padded": (
        (2, 3, 7, 8),
        (4, 3, 3, 2),
        {
            "lhs_dilation": (2, 3),
            "rhs_dilation": (3, 2),
            "window_strides": (2, 3),
            "padding": [(4, 1), (0, 5)],
        },
    ),
    "conv_negative_padding": ((2, 3, 9, 9), (4, 3, 3, 3), {"padding": [(-1, -2), (2, -3)]}),
    "conv_negative_padding_dilated": (
        (2, 3, 9, 9),
        (4, 3, 2, 3),
        {"padding": [(-2, 3), (-1, -1)], "lhs_dilation": (2, 3), "rhs_dilation": (1, 2)},
    ),
    "conv_padding_wider_than_kernel": ((1, 2, 4, 4), (3, 2, 2, 2), {"padding": [(5, 4), (3, 6)]}),
    "conv_batch_groups": ((6, 3, 7, 7), (4, 3, 3, 3), {"batch_group_count": 2}),
    "conv_channels_last": (
        (2, 9, 8, 3),
        (3, 3, 3, 5),
        {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "padding": "SAME"},
    ),
    "conv_mixed_order": (
        (9, 2, 3, 8),
        (5, 3, 4, 3),
        {"dimension_numbers": ("HNCW", "OHWI", "CWNH"), "padding": [(1, 0), (2, 3)]},
    ),
    "conv_integers": ((2, 3, 9), (5, 3, 3), {}),
}

WITH_GRADIENT = (
    *("conv_2d_same", "conv_2d_strided", "conv_3d", "conv_grouped", "conv_depthwise"),
    *("conv_depthwise_two_each", "conv_kernel_dilated", "conv_transposed", "conv_1d_causal"),
    *("conv_both_dilated_strided_padded", "conv_negative_padding", "conv_batch_groups"),
)


def built(name: str, loops: Loops, *, backward: bool) -> Built:
    lhs, rhs, more = CONVOLUTIONS[name]
    function, arguments = convolution(lhs, rhs, **more)
    return gradient(function) if backward else function, arguments


PROGRAMS |= {name: Program(partial(built, name, backward=False)) for name in CONVOLUTIONS}
PROGRAMS |= {
    f"{name}_gradient": Program(partial(built, name, backward=True)) for name in WITH_GRADIENT
}


@program()
def a_scanned_convolution_gradient(loops: Loops) -> Built:
    def f(x: Array, ws: Array) -> Array:
        def body(c: Array, w: Array) -> Any:
            return lax.conv(jnp.tanh(c), w, (1, 1), "SAME"), None

        return loops.scan(body, x, ws, 3)[0]

    return gradient(f), (array(1, 2, 6, 6), array(3, 2, 2, 3, 3))


# Work that is no product, beside one that is.


@program()
def products_beside_other_work(_: Loops) -> Built:
    def f(x: Array, w: Array) -> Array:
        y = jnp.sort(jax.nn.softmax(x @ w), axis=1)
        y = y + jnp.fft.irfft(jnp.fft.rfft(y))
        return lax.reduce_window(y, 0.0, lax.add, (1, 3), (1, 1), "SAME").cumsum(1).argmax(1)

    return f, (array(6, 8), array(8, 16))


@program()
def other_work_alone(_: Loops) -> Built:
    return lambda x: jnp.sort(jax.nn.softmax(x)).cumsum(1), (array(6, 8),)


@program()
def a_triangular_solve(_: Loops) -> Built:
    def f(a: Array, b: Array) -> Array:
        return lax.linalg.triangular_solve(a, b, left_side=True, lower=True) @ b.T

    return f, (array(5, 5), array(5, 3))


# On four devices: what one of them does.


def mesh() -> Any:
    return Mesh(np.array(jax.devices()), ("d",))


@program()
def sharded_by_hand(loops: Loops) -> Built:
    if isinstance(loops, Flat):
        return jnp.matmul, (array(6, 2), array(2, 12))

    @partial(jax.shard_map, mesh=mesh(), in_specs=(P(None, "d"), P("d", None)), out_specs=P())
    def f(x: Array, w: Array) -> Array:
        return lax.psum(x @ w, "d")

    return f, (array(6, 8), array(8, 12))


@program()
def sharded_by_hand_in_a_scan(loops: Loops) -> Built:
    def body(c: Array, w: Array) -> Any:
        return jnp.tanh(c @ w), None

    if isinstance(loops, Flat):
        return lambda x, ws: loops.scan(body, x, ws, 3)[0], (array(2, 6), array(3, 6, 6))

    @partial(jax.shard_map, mesh=mesh(), in_specs=(P("d", None), P()), out_specs=P("d", None))
    def f(x: Array, ws: Array) -> Array:
        return loops.scan(body, x, ws, 3)[0]

    return f, (array(8, 6), array(3, 6, 6))


# Sharded by the compiler: the module handed to it has the work of all four, its own that of one.
DIVIDED_BY_THE_COMPILER = {"sharded_by_the_compiler": 4}


@program()
def sharded_by_the_compiler(loops: Loops) -> Built:
    sharding = None if isinstance(loops, Flat) else NamedSharding(mesh(), P("d", None))
    return jnp.matmul, (array(8, 6, sharding=sharding), array(6, 12))


# A ragged product stays one only on the way to a TPU; on a CPU it becomes a masked product of all
# groups. By hand: each of the 12 rows of 8 meets the 5 columns of its own group.


def ragged(x: Array, w: Array, sizes: Array) -> Array:
    return lax.ragged_dot(x, w, sizes)


def ragged_arguments() -> tuple[Array, ...]:
    return array(12, 8), array(3, 8, 5), array(3, dtype=jnp.int32)


RAGGED: dict[str, tuple[Callable[..., Any], int]] = {
    "ragged": (ragged, 12 * 8 * 5),
    "ragged_gradient": (gradient(ragged), 3 * 12 * 8 * 5),
}
