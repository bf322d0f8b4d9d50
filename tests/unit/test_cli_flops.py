"""`erg flops`, `erg mfu` and `erg conventions`: values, and what bad input is answered with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ergmeter.cli.main import main

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
TYPED = "hidden=4096,layers=32,heads=32,kv_heads=8,ffn=14336,vocab=128256"
Answer = tuple[int, str, str]
Erg = Callable[..., Answer]


@pytest.fixture
def erg(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Erg:
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: object) -> Answer:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return path


def whole(answer: Answer) -> dict[str, Any]:
    code, out, err = answer
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_flops_by_part_adds_up(erg: Erg, config: Path) -> None:
    found = whole(erg("flops", config, "--seq-len", 8192, "--batch-size", 2, "--json"))
    assert found["tokens"] == 2 * 8192
    assert found["parameters"] == 8_030_261_248
    parts = found["parts"]
    assert sum(part["model"] for part in parts.values()) == pytest.approx(found["model_flops"])
    # The head by hand: 6 x 4096 x 128256 x tokens.
    assert parts["head"]["model"] == 6 * 4096 * 128256 * 2 * 8192
    assert parts["mlp"]["forward"] == 2 * 3 * 4096 * 14336 * 32 * 2 * 8192
    assert found["conventions"]["megatron"]["model_flops_per_token"] / 1e9 == pytest.approx(
        51.47, abs=0.005
    )


def test_dimensions_can_be_typed_in_and_a_directory_given(erg: Erg, config: Path) -> None:
    by_file, by_directory, by_hand = (
        whole(erg("flops", model, "--seq-len", 512, "--json"))["model_flops"]
        for model in (config, config.parent, TYPED)
    )
    assert by_file == by_directory == by_hand


def test_the_tables_name_the_parts_and_the_conventions(erg: Erg, config: Path) -> None:
    code, out, _ = erg("flops", config, "--seq-len", 8192)
    assert code == 0
    for shown in ("attention qkv", "attention scores", "mlp", "head", "51.47", "palm",
                  "+18.6 %", "8.03 B parameters"):  # fmt: skip
        assert shown in out


def test_a_decoding_step_has_bytes_to_move(erg: Erg, config: Path) -> None:
    found = whole(
        erg("flops", config, "--phase", "decode", "--seq-len", 8192, "--batch-size", 8, "--json")
    )
    moved = found["bytes_moved"]
    # 16 bits a weight, the input table left out; a cache of 8 heads x 128 x 2 in 32 layers.
    assert moved["weights"] == 2 * (8_030_261_248 - 128256 * 4096)
    assert moved["cache_read"] == 2 * 8 * 8192 * 32 * 2 * 8 * 128
    assert found["model_flops"] == pytest.approx(
        8 * (2 * (8_030_261_248 - 128256 * 4096 - 65 * 4096) + 32 * 4 * 32 * 128 * 8193)
    )


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
    assert set(mfu) == {"value", "unit", "basis", "low", "high", "note"}


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
    # Half the positions are padding, which is computed: 2 x 1000 of 2 x 2048, attention more.
    assert 2.04 < hfu / mfu < 2.1


def test_an_unknown_device_has_no_mfu_and_says_what_to_pass(erg: Erg, config: Path) -> None:
    common = ("mfu", config, "--seq-len", 1024, "--tokens-per-s", 9999, "--json")
    found = whole(erg(*common, "--device", "NVIDIA H299"))["readings"]["utilization.mfu_frac"]
    assert set(found) == {"missing"}
    assert "unknown peak: pass --peak" in found["missing"]
    given = whole(erg(*common, "--peak", "500T", "--peak-source", "its maker"))
    assert "its maker" in given["readings"]["utilization.mfu_frac"]["note"]


def test_a_type_nobody_gave_is_an_assumption(erg: Erg, config: Path) -> None:
    common = ("mfu", config, "--seq-len", 64, "--tokens-per-s", 9, "--device", "h200-sxm")
    found = whole(erg(*common, "--json"))["readings"]["utilization.mfu_frac"]
    assert found["basis"] == "assumed"
    code, out, _ = erg(*common)
    assert code == 0
    assert "utilization.mfu_frac" in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("flops", "{config}"), 2, "--seq-len"),
        (("flops", "{config}", "--seq-len", "0"), 2, "0 is not in the range"),
        (("flops", "nowhere.json", "--seq-len", "8"), 1, "nowhere.json: no such file"),
        (("flops", "hidden=64,lairs=2", "--seq-len", "8"), 2, "did you mean layers?"),
        (("flops", "hidden=64,layers=2", "--seq-len", "8"), 1, "num_attention_heads"),
        (("flops", TYPED + ",type=lama", "--seq-len", "8"), 1, "'lama' is not known"),
        (("flops", TYPED.replace("4096", "-1"), "--seq-len", "8"), 1, "hidden_size"),
        (("flops", "{config}", "--seq-len", "8", "--convention", "plam"), 2, "no convention"),
        (("flops", "{config}", "--seq-len", "8", "--lora", "r=4,targets=xx"), 2, "called 'xx'"),
        (("flops", "{config}", "--seq-len", "8", "--freeze", "towers"), 2, "can't be frozen"),
        (("flops", "{config}", "--seq-len", "8", "--lengths", "9"), 2, "do not fit"),
        (("flops", "{config}", "--seq-len", "8", "--lengths", ""), 2, "whole numbers"),
        (("flops", "{config}", "--seq-len", "8", "--freeze", ""), 2, "can't be frozen"),
        (("flops", "{config}", "--seq-len", "8", "--freeze", "layers.99"), 2, "can't be frozen"),
        (
            ("flops", "{config}", "--seq-len", "8", "--freeze", "model", "--freeze", "lm_head"),
            2,
            "nothing is trained",
        ),
        (("flops", "{config}", "--seq-len", "8", "--context", "5"), 2, "training has none"),
        (("flops", "{config}", "--seq-len", "8", "--images", "1"), 2, "sees no images"),
        (("flops", "{config}", "--seq-len", "8", "--mtp", "1"), 2, "leave out --mtp"),
        (("flops", "{config}", "--seq-len", "8", "--source-len", "1"), 2, "no encoder"),
        (("flops", "{config}", "--seq-len", "8", "--params", "nan"), 2, "above 0; got nan"),
        (
            (
                "flops",
                "{config}",
                "--seq-len",
                "8",
                "--phase",
                "prefill",
                "--checkpointing",
                "full",
            ),
            2,
            "for training",
        ),
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
            "no type 'foo'",
        ),
        (("flops", "{config}", "--seq-len", "8", "--lengths", "a,b"), 2, "whole numbers"),
        (("mfu", "{config}", "--seq-len", "8", "--device", "h200-sxm"), 2, "give one of"),
        (("mfu", "{config}", "--seq-len", "8", "--tokens-per-s", "1"), 2, "which device?"),
        (
            ("mfu", "{config}", "--seq-len", "8", "--tokens-per-s", "-1", "--device", "l4"),
            2,
            "above 0",
        ),
        (("conventions", "palmm"), 2, "no convention 'palmm'"),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    erg: Erg, config: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    found, out, err = erg(*(word.format(config=config) for word in arguments))
    assert (found, out) == (code, "")
    assert said in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 4  # click's usage lines and the error


def test_a_convention_is_explained_by_name(erg: Erg) -> None:
    code, out, _ = erg("conventions", "palm")
    assert code == 0
    assert "6 N + 12 L H Q T" in out
    assert "2204.02311" in out
    assert erg("conventions")[1].count("source:") >= 15


def test_the_counted_engine_runs_the_model_and_agrees(erg: Erg) -> None:
    small = "hidden=64,layers=2,heads=4,kv_heads=2,ffn=160,vocab=256"
    found = whole(erg("flops", small, "--seq-len", 32, "--engine", "counted", "--json"))
    # 6 a weight that is multiplied, and attention over the whole rectangle of 32 x 32.
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160) + 64 * 256
    assert found["model_flops"] == 32 * 6 * weights + 2 * 12 * 64 * 32 * 32
    assert "agree" in found["analytic"]
    code, out, _ = erg("flops", small, "--seq-len", 32, "--engine", "counted")
    assert code == 0
    assert "model.layers.0" in out
    assert "aten::mm" in out
    code, _, err = erg("flops", small, "--seq-len", 32, "--engine", "counted", "--freeze", "mlp")
    assert code == 2
    assert "--freeze" in err


def test_types_have_the_names_torch_has_for_them(erg: Erg, config: Path) -> None:
    common = ("flops", config, "--phase", "decode", "--seq-len", 64, "--json")
    short, longer = (
        whole(erg(*common, "--dtype", name))["bytes_moved"] for name in ("bf16", "bfloat16")
    )
    assert short == longer
    code, _, err = erg(*common, "--dtype", "banana")
    assert code == 2
    assert "no type 'banana'" in err
