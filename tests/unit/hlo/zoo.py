"""Makes the modules of `programs` and has XLA price them: `python -m tests.unit.hlo.zoo FOLDER`.

A process of its own, because jax decides on its number of devices once, and a test process may not
be the first to use it. Writes NAME.plain.pb (as jax hands it to a compiler), NAME.optimised.pb (as
XLA's CPU compiler left it) and expected.json. Has XLA read the modules of `handmade` too, so that
what our own encoder makes is a module to others.

How XLA prices products alone: it parses the module, prints it as text, every dot and convolution
is replaced there by a bitcast, which is free, and it parses that again. The difference of the two
prices is twice the MACs of the products with each loop body taken once. XLA adds up in float32, so
a price of 2**24 or more could be rounded; no program here is that large, and this is checked.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.unit.hlo.handmade import MADE
from tests.unit.hlo.programs import (
    DIVIDED_BY_THE_COMPILER,
    PROGRAMS,
    RAGGED,
    Flat,
    Loops,
    Program,
    jax,
    ragged_arguments,
)

_hlo: Any = import_module("jaxlib._hlo")  # private, but nothing public prices a saved module
_jax: Any = import_module("jaxlib._jax")

EXACT_BELOW = 2**24
DEVICES = 4
# The passes over HLO are all run; only the machine code, which nobody executes, is poor.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Where XLA's CPU compiler replaced products, so that the module it left has others than the
# program. What it left is priced by itself; there is no loop in any of them.
CHANGED_BY_THE_COMPILER = {
    "vector_product": "a multiplication and a sum",
    "outer_product": "a multiplication",
    "contraction_of_ones": "a multiplication",
    "rematerialised": "what is computed again is the same expression, and is shared",
    "shared_functions_in_shared_functions": "one of the calls repeats another, and is shared",
    "conv_depthwise_gradient": "a grouped convolution becomes a dense one",
    "fori_never": "the loop is dropped",
}
# XLA prices a product of complex numbers as one of real ones; it is four of them.
REAL_PRODUCTS = {"product_of_complex": 4}
PRODUCT = re.compile(r"= (\S+) (?:dot|convolution)\((%[\w.-]+), [^\n]*")


def macs_once(serialised: bytes) -> int:
    """The MACs of a module's products by XLA's prices, each loop body once."""
    module = _hlo.HloModule.from_serialized_hlo_module_proto(serialised)
    text = module.to_string()
    without, products = PRODUCT.subn(r"= \1 bitcast(\2)", text)
    assert products == len(re.findall(r" (?:dot|convolution)\(", text))
    twice = price(module) - price(_hlo.hlo_module_from_text(without))
    assert twice % 2 == 0
    return twice // 2


def price(module: Any) -> int:
    flops: float = _jax.hlo_module_cost_analysis(jax.devices()[0].client, module).get("flops", 0.0)
    assert abs(flops) < EXACT_BELOW, f"{flops} may be rounded"
    assert flops == int(flops)
    return int(flops)


def plain(lowered: Any) -> bytes:
    made: bytes = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    return made


def optimised(lowered: Any) -> bytes:
    compiled = lowered.compile(compiler_options=QUICKLY)
    (module,) = compiled.runtime_executable().hlo_modules()
    made: bytes = module.as_serialized_hlo_module_proto()
    return made


def lowered(program: Program, loops: Loops) -> Any:
    function, arguments = program.build(loops)
    return jax.jit(function).lower(*arguments)


def flat_macs(program: Program, looped: Any) -> int:
    """The price without loops and branches, for which most programs need no other form."""
    if re.search(r" (while|conditional|call)\(", looped.compiler_ir("hlo").as_hlo_text()):
        return macs_once(plain(lowered(program, Flat())))
    return macs_once(plain(looped))


def make(folder: Path) -> None:
    expected = {}

    def add(name: str, serialised: bytes, program: Program, *, macs: int | None) -> None:
        (folder / f"{name}.pb").write_bytes(serialised)
        real = REAL_PRODUCTS.get(name.partition(".")[0], 1)
        once = macs_once(serialised) * real
        expected[name] = {
            "macs": once if macs is None else macs * real,
            "macs_loop_once": once,
            "unknown_loops": program.unknown_loops,
            "uneven_branches": program.uneven_branches,
        }

    for name, program in PROGRAMS.items():
        looped = lowered(program, Loops())
        macs = flat_macs(program, looped)
        add(f"{name}.plain", plain(looped), program, macs=macs)
        kept = macs // DIVIDED_BY_THE_COMPILER.get(name, 1)
        changed = name in CHANGED_BY_THE_COMPILER
        if name.startswith("conv_") and not name.endswith("_gradient"):
            continue  # a compiler leaves a lone convolution as it is
        add(f"{name}.optimised", optimised(looped), program, macs=None if changed else kept)
    for name, (function, macs) in RAGGED.items():
        traced = jax.jit(function).trace(*ragged_arguments())
        serialised = plain(traced.lower(lowering_platforms=("tpu",)))
        (folder / f"{name}.plain.pb").write_bytes(serialised)
        row = {"macs": macs, "macs_loop_once": macs, "unknown_loops": 0, "uneven_branches": 0}
        expected[f"{name}.plain"] = row
    for name, build in MADE.items():
        if (made := build()).xla_reads_it:
            assert macs_once(made.data) == made.once, name
    (folder / "expected.json").write_text(json.dumps(expected, indent=1))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)  # before anything makes an array
    make(Path(sys.argv[1]))
