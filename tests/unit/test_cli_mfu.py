"""`erg mfu`, and the device of a run named afterwards: values, and what bad input gets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs import add_writer, even_steps, make_run

SMALL = "hidden=64,layers=2,heads=4,kv_heads=4,ffn=160,vocab=256"
Answer = tuple[int, str, str]
Erg = Callable[..., Answer]


def whole(answer: Answer) -> dict[str, Any]:
    code, out, err = answer
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_mfu_of_a_published_row(erg: Erg, config: Path) -> None:
    # torchtitan: Llama 3.1 8B on 8 H100, 6667 tokens/s each, 39 %.
    found = whole(
        erg(
            "mfu",
            config,
            "--seq-len",
            8192,
            "--tokens-per-s",
            8 * 6667,
            "--num-devices",
            8,
            "--device",
            "NVIDIA H100 80GB HBM3",
            "--dtype",
            "bf16",
            "--convention",
            "torchtitan",
            "--json",
        )
    )
    mfu = found["readings"]["utilization.mfu_frac"]
    assert mfu["value"] == pytest.approx(0.3902, abs=0.0001)
    assert mfu["basis"] == "reported"
    assert set(mfu) == {"value", "unit", "basis", "low", "high", "note", "impossible"}
    assert mfu["impossible"] is None


def test_three_ways_to_say_how_quick_agree(erg: Erg, config: Path) -> None:
    common = ("mfu", config, "--seq-len", 1024, "--batch-size", 4, "--num-devices", 2,
              "--device", "h200-sxm", "--dtype", "bf16", "--json")  # fmt: skip
    values = [
        whole(erg(*common, *way))["readings"]["utilization.mfu_frac"]["value"]
        for way in (
            ("--tokens-per-s", 8192),
            ("--tokens-per-s-per-device", 4096),
            ("--step-time", 0.5),
        )
    ]
    assert values[0] == pytest.approx(values[1]) == pytest.approx(values[2])


def test_padding_is_neither_sped_up_nor_counted_as_work(erg: Erg, config: Path) -> None:
    common = ("mfu", config, "--seq-len", 2048, "--batch-size", 2, "--lengths", "1000,1000",
              "--device", "h100-sxm", "--dtype", "bf16", "--json")  # fmt: skip
    by_time, by_speed = (
        whole(erg(*common, *way))["readings"]
        for way in (("--step-time", 1), ("--tokens-per-s", 2000))
    )
    mfu, hfu = (by_time[f"utilization.{name}_frac"]["value"] for name in ("mfu", "hfu"))
    assert mfu == pytest.approx(by_speed["utilization.mfu_frac"]["value"])
    # Half the positions are padding, which goes through every matrix and meets nothing.
    weights = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    attention = 3 * 32 * 4 * 4096 * 2 * (1000 * 1001 // 2)
    once, padded = (6 * weights * rows + attention for rows in (2 * 1000, 2 * 2048))
    assert hfu / mfu == pytest.approx(padded / once)


def test_an_unknown_device_has_no_mfu_and_says_what_to_pass(erg: Erg, config: Path) -> None:
    common = ("mfu", config, "--seq-len", 1024, "--tokens-per-s", 9999, "--json")
    found = whole(erg(*common, "--device", "NVIDIA H299"))["readings"]["utilization.mfu_frac"]
    assert set(found) == {"missing"}
    assert "unknown peak: pass --peak" in found["missing"]
    given = whole(erg(*common, "--peak", "500T", "--peak-source", "its maker"))
    assert "its maker" in given["readings"]["utilization.mfu_frac"]["note"]


@pytest.mark.parametrize(
    ("device", "part"),
    [
        ("mi250x", "191.5 TFLOP/s dense bf16 for one of its two GCDs ("),
        ("max-1550-stack", "419.5 TFLOP/s dense bf16 for one of its two stacks ("),
        ("h100-sxm", "989.5 TFLOP/s dense bf16 ("),
    ],
)
def test_a_device_that_is_part_of_a_card_is_called_so(
    erg: Erg, config: Path, device: str, part: str
) -> None:
    common = ("mfu", config, "--seq-len", 64, "--tokens-per-s", 9, "--dtype", "bf16", "--json")
    found = whole(erg(*common, "--device", device))["readings"]
    assert part in found["utilization.mfu_frac"]["note"]
    assert part in found["utilization.hfu_frac"]["note"]


def test_a_type_nobody_gave_is_an_assumption(erg: Erg, config: Path) -> None:
    common = ("mfu", config, "--seq-len", 64, "--tokens-per-s", 9, "--device", "h200-sxm")
    found = whole(erg(*common, "--json"))["readings"]["utilization.mfu_frac"]
    assert found["basis"] == "assumed"
    code, out, _ = erg(*common)
    assert code == 0
    assert out.startswith("MFU ")


def test_hfu_is_assumed_unless_checkpointing_is_declared(erg: Erg, config: Path) -> None:
    common = ("mfu", config, "--seq-len", 64, "--tokens-per-s", 9, "--device", "h200-sxm",
              "--dtype", "bf16", "--json")  # fmt: skip
    bases = [
        whole(erg(*common, *more))["readings"]["utilization.hfu_frac"]["basis"]
        for more in ((), ("--checkpointing", "none"), ("--checkpointing", "full"))
    ]
    assert bases == ["assumed", "reported", "reported"]


def test_an_n_that_was_given_is_in_the_note_of_what_is_made_of_it(erg: Erg) -> None:
    # PaLM 540B: 238.3k tokens/s on 6144 TPU v4, 46.2 % (arXiv 2204.02311, table 3 and appendix B).
    palm = "hidden=18432,layers=118,heads=48,kv_heads=1,head_dim=256,ffn=73728,vocab=256000"
    common = ("mfu", palm, "--seq-len", 2048, "--tokens-per-s", 238300, "--num-devices", 6144,
              "--peak", "275T", "--params", "540.35e9", "--json")  # fmt: skip
    found, exact = (whole(erg(*common, "--convention", name)) for name in ("palm", "exact"))
    mfu = found["readings"]["utilization.mfu_frac"]
    assert mfu["value"] == pytest.approx(0.462, abs=0.0005)
    own = found["parameters"]  # with a head that is not tied
    assert f"palm with N = 540,350,000,000, in place of the model's own {own:,};" in mfu["note"]
    assert "N =" not in exact["readings"]["utilization.mfu_frac"]["note"]


def test_above_all_that_the_device_can_do_is_said_beside_the_figure(erg: Erg, config: Path) -> None:
    out = erg("mfu", config, "--seq-len", 64, "--tokens-per-s", 1e9, "--device", "h200-sxm")[1]
    (line,) = [line for line in out.splitlines() if line.startswith("MFU  ")]
    # 6 x 7.5 G weights and attention x 1e9 / 989.5e12.
    assert "4,5" in line
    assert "% (impossible)" in line
    slow = erg("mfu", SMALL, "--seq-len", 64, "--step-time", 1e6, "--device", "h200-sxm")[1]
    assert "MFU  4.6e-12 %" in slow


def test_four_bits_of_weights_with_products_in_bf16(erg: Erg, config: Path) -> None:
    common = ("mfu", config, "--phase", "decode", "--seq-len", 8192, "--tokens-per-s", 100,
              "--device", "h200-sxm", "--dtype", "bf16", "--json")  # fmt: skip
    wide, packed = (
        whole(erg(*common, *more))["readings"] for more in ((), ("--weights-dtype", "nf4"))
    )
    assert wide["utilization.mfu_frac"] == packed["utilization.mfu_frac"]
    layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    rest, cache = 128256 * 4096 + 65 * 4096, 8193 * 32 * 2 * 8 * 128
    moved = layers * 4.5 / 8 + 2 * rest + 2 * cache
    # An H200 reads 4.8 TB/s.
    assert packed["utilization.bandwidth_frac"]["value"] == pytest.approx(100 * moved / 4.8e12)
    assert wide["utilization.bandwidth_frac"]["value"] == pytest.approx(
        100 * 2 * (layers + rest + cache) / 4.8e12
    )


def test_a_bandwidth_is_as_good_as_what_is_known_of_the_weights(erg: Erg, config: Path) -> None:
    common = ("mfu", config, "--phase", "decode", "--seq-len", 64, "--tokens-per-s", 9,
              "--device", "h200-sxm", "--dtype", "bf16", "--json")  # fmt: skip
    found = whole(erg(*common))["readings"]["utilization.bandwidth_frac"]
    assert found["basis"] == "assumed"
    assert "weights in bf16, 16 bits (assumed, the config names no type)" in found["note"]
    config.write_text(json.dumps(json.loads(config.read_text()) | {"torch_dtype": "bfloat16"}))
    found = whole(erg(*common))["readings"]["utilization.bandwidth_frac"]
    assert found["basis"] == "reported"
    assert "weights in bf16, 16 bits (the config's torch_dtype)" in found["note"]


def rows(out: str) -> list[str]:
    """The titles that begin a line."""
    return [line.split("  ")[0] for line in out.splitlines() if re.match(r"\w.*  .+  \w+$", line)]


def test_only_rows_that_apply_are_printed_and_a_reason_once(erg: Erg, config: Path) -> None:
    common = ("mfu", config, "--seq-len", 64, "--tokens-per-s", 9)
    known = rows(erg(*common, "--device", "h200-sxm", "--dtype", "bf16")[1])
    assert known[-3:] == [
        *("MFU", "HFU"),
        "all work, of the peak",
    ]
    assert not any("bandwidth" in key or "bf16_peak" in key for key in known)
    unknown = erg(*common, "--device", "NVIDIA H299")[1]
    keys = "MFU, HFU, all work, of the peak"
    assert keys in " ".join(unknown.split())
    assert unknown.count("unknown peak") == 1


def test_a_declared_peak_is_of_no_type(erg: Erg, config: Path) -> None:
    out = erg("mfu", config, "--seq-len", 64, "--tokens-per-s", 9, "--peak", "500T")[1]
    assert "declared;" not in out
    assert "dense" not in out
    assert "of 500 TFLOP/s (given, source not stated)" in out


def test_a_device_without_units_of_a_type_is_held_against_its_bf16(erg: Erg, config: Path) -> None:
    common = ("mfu", config, "--seq-len", 64, "--tokens-per-s", 1000, "--json")
    found = whole(erg(*common, "--device", "a100", "--dtype", "fp8"))
    per_token = found["model_flops_per_token"]
    share = found["readings"]["utilization.mfu_bf16_peak_frac"]
    assert share["value"] == pytest.approx(per_token * 1000 / 312e12)
    assert "fp8" in found["readings"]["utilization.mfu_frac"]["missing"]


# -- of a run --------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Twenty steps of a second with 100 tokens each, on a device nobody saw."""
    path = tmp_path / "run"
    make_run(path)
    add_writer(path, steps=even_steps(20, tokens_computed=100))
    return path


def test_a_run_is_counted_by_the_same_options_as_a_step(erg: Erg, config: Path, run: Path) -> None:
    step = ("--seq-len", 2048, "--lengths", "1000,500", "--lora", "r=16,targets=q_proj")
    counted = whole(erg("flops", config, *step, "--json"))
    name = "compute.model_flops_per_token"
    found = whole(erg("report", run, "--model-config", config, *step, "--metric", name, "--json"))
    assert found["readings"][name]["value"] == counted["model_flops_per_token"]
    decode = ("--phase", "decode", "--context", 500, "--batch-size", 8)
    counted = whole(erg("flops", config, *decode, "--json"))
    found = whole(erg("report", run, "--model-config", config, *decode, "--metric", name, "--json"))
    assert found["readings"][name]["value"] == counted["model_flops_per_token"]


def test_the_device_of_a_run_can_be_named_when_it_is_over(
    erg: Erg, config: Path, run: Path
) -> None:
    common = ("report", run, "--model-config", config, "--seq-len", 64, "--metric", "mfu", "--json")
    readings = whole(erg(*common, "--device", "h200-sxm", "--dtype", "bf16"))["readings"]
    found = readings["utilization.mfu_frac"]
    per_token = whole(erg("flops", config, "--seq-len", 64, "--json"))["model_flops_per_token"]
    assert found["value"] == pytest.approx(100 * per_token / 989.5e12)
    assert "141GB, as named: NVIDIA H200 datasheet" in found["note"]
    untyped = whole(erg(*common, "--device", "h200-sxm"))["readings"]["utilization.mfu_frac"]
    assert "pass --dtype" in untyped["missing"]
    # A peak of one's own is the peak, and the device is then whose bandwidth it is.
    given = whole(erg(*common, "--device", "h200-sxm", "--dtype", "bf16", "--peak", "500T"))
    assert given["readings"]["utilization.mfu_frac"]["value"] == pytest.approx(
        100 * per_token / 500e12
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ("mfu", "{config}", "--seq-len", "8", "--tokens-per-s", "inf", "--device", "l4"),
            2,
            "got inf",
        ),
        (
            (
                "mfu",
                "{config}",
                "--seq-len",
                "8",
                "--tokens-per-s",
                "1",
                "--peak",
                "9T",
                "--dtype",
                "foo",
            ),
            2,
            "unknown dtype 'foo'",
        ),
        (("mfu", "{config}", "--seq-len", "8", "--device", "h200-sxm"), 2, "give one of"),
        (("mfu", "{config}", "--seq-len", "8", "--tokens-per-s", "1"), 2, "which device?"),
        (
            ("mfu", "{config}", "--seq-len", "8", "--tokens-per-s", "-1", "--device", "l4"),
            2,
            "above 0",
        ),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    erg: Erg, config: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    found, out, err = erg(*(word.format(config=config) for word in arguments))
    assert (found, out) == (code, "")
    assert said in err
    assert "Traceback" not in err
