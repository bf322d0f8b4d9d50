"""The FLOPs of a jax step from its module: what is refused, and what is assumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[2] / "data" / "hlo"
jax_loop: Any = pytest.importorskip("ergmeter.integrations.jax", exc_type=ImportError)


class Lowered:
    """What `jit(step).lower(...)` hands over, with a module that jax made on four devices."""

    def __init__(self, name: str) -> None:
        self._path = DATA / f"{name}.hlo_module.pb"

    def compiler_ir(self, dialect: str) -> Lowered:
        assert dialect == "hlo"
        return self

    def as_serialized_hlo_module_proto(self) -> bytes:
        return self._path.read_bytes()


def test_a_sharded_step_counts_for_all_devices() -> None:
    (flops,), why = jax_loop._lowered_flops(Lowered("pjit.unopt"))
    assert (flops.model_per_step, why) == (2 * 64 * 32 * 16, "")


@pytest.mark.parametrize("name", ["shard_map.unopt", "shard_map_gspmd.unopt"])
def test_a_step_in_shard_map_is_refused_with_the_reason(name: str) -> None:
    found, why = jax_loop._lowered_flops(Lowered(name))
    assert found == ()
    assert why.startswith("products inside shard_map have one device's shapes")


def test_an_upper_bound_and_what_is_left_out_are_assumptions() -> None:
    (flops,), _ = jax_loop._lowered_flops(Lowered("cond_uneven.unopt"))
    assert "a conditional counts as its costliest branch: an upper bound" in flops.assumptions
    (flops,), _ = jax_loop._lowered_flops(Lowered("cholesky_native.unopt"))
    assert "not counted: cholesky, triangular-solve (no matrix products)" in flops.assumptions
