"""Modules that jax makes, against XLA's own prices.

XLA's cost analysis is the only other program that reads every part of a module, but it prices
elementwise work too and takes a loop's body once. Both are taken out exactly, without a tolerance:

- The module is priced twice, as it is and with each dot and convolution replaced by a bitcast, in
  XLA's own text. Twice the products' MACs is the difference (`zoo`).
- Each program exists in a flat form: Python's loops and not jax's, the dearest branch and no switch
  (`programs`). XLA's price of that is what the loops of the other form must come to.

So `macs_loop_once` is held against the price of the module itself, and `macs` against the price of
another module that has no loop. Nothing here reads a loop's bound but the reader under test.

What differs by rule, and is written out in `zoo` and `programs`: products that XLA's CPU compiler
replaced, work that its partitioner divided, ragged products, which XLA prices as dense, and complex
ones, which it prices as real.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.hlo.readers import READERS, count, flags

ROOT = Path(__file__).parents[3]
ADMITTED = ("unknown_loops", "uneven_branches")


pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("jax") is None, reason="jax 0.10 needs Python 3.11"
    ),
    pytest.mark.frameworks,
]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zoo")
    command = [sys.executable, "-m", "tests.unit.hlo.zoo", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_module_counts_as_xla_prices_it(zoo: Path) -> None:
    expected: dict[str, dict[str, int]] = json.loads((zoo / "expected.json").read_text())
    assert len(expected) > 150
    assert sum(row["macs"] != row["macs_loop_once"] for row in expected.values()) > 30
    for reader in READERS:
        counted = {}
        for name in expected:
            made = count(zoo / f"{name}.pb", reader)
            counted[name] = {
                "macs": made.macs,
                "macs_loop_once": made.macs_loop_once,
                **{flag: number for flag, number in flags(made).items() if flag in ADMITTED},
            }
        wrong = {
            name: f"{row}, not {expected[name]}"
            for name, row in counted.items()
            if row != expected[name]
        }
        assert not wrong, reader
