"""Modules whose MACs are known: by hand, by a model's formula, by XLA's price of a convolution.

The formulas were held against torch's FlopCounterMode on the same model. The l8b module is the
forward pass of Llama 3 8B at 4096 tokens, in a scan.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.hlo.readers import READERS, count, flags

DATA = Path(__file__).parents[2] / "data" / "hlo"
EXPECTED: dict[str, dict[str, Any]] = json.loads((DATA / "expected.json").read_text())


def test_every_module_at_hand_has_an_expectation() -> None:
    assert {file.name for file in DATA.glob("*.pb")} == set(EXPECTED)


@pytest.mark.parametrize("reader", READERS)
def test_a_known_module_gives_its_macs(reader: str) -> None:
    counts = {name: count(DATA / name, reader) for name in EXPECTED}
    assert {name: made.macs - made.nki_macs for name, made in counts.items()} == {
        name: expected["macs"] for name, expected in EXPECTED.items()
    }
    assert {name: flags(made)["unknown_loops"] for name, made in counts.items()} == {
        name: expected.get("unknown_loops", 0) for name, expected in EXPECTED.items()
    }


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_product_is_listed_with_its_calls_and_flops(reader: str) -> None:
    for name, expected in EXPECTED.items():
        made = count(DATA / name, reader)
        listed = {
            op: [made.uncounted_calls[op], made.uncounted_flops[op]] for op in made.uncounted_calls
        }
        assert listed == expected.get("uncounted", {}), name


@pytest.mark.parametrize("reader", READERS)
def test_a_count_tells_how_it_is_bounded_and_whose_work_it_is(reader: str) -> None:
    for name, expected in EXPECTED.items():
        made = count(DATA / name, reader)
        assert made.bound == expected.get("bound", ""), name
        assert made.scope == expected.get("scope", "one device"), name
        assert made.devices == expected.get("devices"), name


def test_both_readers_give_the_same_count_of_every_module() -> None:
    for name in EXPECTED:
        compiled, protobuf = (count(DATA / name, reader) for reader in READERS)
        assert compiled == protobuf, name


def test_products_of_complex_numbers_have_a_name_of_their_own() -> None:
    # XLA's cost analysis counts 2 x 6 x 10 x 4 = 480 FLOPs; BLAS counts 8 mnk.
    made = count(DATA / "dot_complex.unopt.hlo_module.pb", "compiled")
    assert made.by_op == {"complex-dot": 4 * 6 * 10 * 4}
    assert made.flops == 8 * 6 * 10 * 4


@pytest.mark.parametrize("reader", READERS)
def test_a_known_kernel_gives_its_state_and_its_macs(reader: str) -> None:
    for name, expected in EXPECTED.items():
        made = count(DATA / name, reader)
        if "kernel" not in expected:
            assert not made.kernels, name
            assert made.nki_macs == 0, name
            continue
        (kernel,) = made.kernels
        wanted = expected["kernel"]
        assert (kernel.state, kernel.calls, kernel.macs_per_call) == (
            wanted["state"],
            wanted["calls"],
            wanted["macs_per_call"],
        ), name
        assert made.nki_macs == wanted["calls"] * (wanted["macs_per_call"] or 0), name


def test_a_step_of_llama_8b_is_three_times_its_forward_pass() -> None:
    # 32 layers of (4096^2 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336) weights for 4096 tokens, the
    # scores and their use, and 128256 words.
    tokens, width, feed, words = 4096, 4096, 14336, 128256
    layer = tokens * (2 * width * width + 2 * width * 1024 + 3 * width * feed)
    scores = 2 * tokens * tokens * width
    forward = 32 * (layer + scores) + tokens * width * words
    assert count(DATA / "llama_l8b_scan_fwd.unopt.hlo_module.pb", "protobuf").macs == forward
