"""`erg flops`, `erg mfu` and `erg conventions`: values, and what bad input is answered with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TYPED = "hidden=4096,layers=32,heads=32,kv_heads=8,ffn=14336,vocab=128256"
BERT = (
    "type=bert,hidden=64,layers=2,heads=4,ffn=256,vocab=100,max_position_embeddings=64,"
    "type_vocab_size=2"
)
SMALL = "hidden=64,layers=2,heads=4,kv_heads=2,ffn=160,vocab=256"
Answer = tuple[int, str, str]
Erg = Callable[..., Answer]


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


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("flops", "{config}"), 2, "--seq-len"),
        (("flops", "{config}", "--seq-len", "0"), 2, "0 is not in the range"),
        (("flops", "nowhere.json", "--seq-len", "8"), 1, "nowhere.json: no such file"),
        (("flops", "hidden=64,lairs=2", "--seq-len", "8"), 2, "did you mean layers?"),
        (("flops", "hidden=64,layers=2", "--seq-len", "8"), 2, "heads, ffn, vocab are missing"),
        (("flops", TYPED + ",type=lama", "--seq-len", "8"), 2, "'lama' is not known"),
        (("flops", TYPED.replace("4096", "-1"), "--seq-len", "8"), 2, "hidden must be at least 1"),
        (("flops", "acme/Llama-9B", "--seq-len", "8"), 2, "hf download acme/Llama-9B config.json"),
        (("flops", "{config}", "--seq-len", "8", "--weights-dtype", "nf4"), 2, "out of training"),
        (("report", "x", "--lengths", "8"), 2, "pass --model-config"),
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
        (("flops", "{config}", "--seq-len", "8", "--lengths", "a,b"), 2, "whole numbers"),
        (("conventions", "palmm"), 2, "no convention 'palmm'"),
        (("flops", f"{TYPED},experts=8", "--seq-len", "8"), 2, "top_k is missing"),
        (("flops", f"{TYPED},kv_lora_rank=8", "--seq-len", "8"), 2, "has no effect"),
        (("flops", BERT, "--phase", "decode", "--seq-len", "8"), 2, "has no decoding step"),
        (
            ("flops", "{config}", "--phase", "decode", "--seq-len", "8", "--params", "9"),
            2,
            "no formula with N applies to this step",
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
    assert len(err.strip().splitlines()) <= 4  # click's usage lines and the error


def test_a_convention_is_explained_by_name(erg: Erg) -> None:
    code, out, _ = erg("conventions", "palm")
    assert code == 0
    assert "6 N + 12 LHQT" in out
    assert "2204.02311" in out
    assert erg("conventions")[1].count("\n  source ") >= 15


def test_conventions_fit_the_terminal(erg: Erg, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        out = erg("conventions")[1]
        assert columns - 25 < max(map(len, out.splitlines())) <= columns


def test_conventions_as_json(erg: Erg) -> None:
    found = json.loads(erg("conventions", "--json")[1])
    assert len(found) >= 15
    (one,) = json.loads(erg("conventions", "palm", "--json")[1])
    assert one["formula_per_token"] == "6 N + 12 LHQT"
    assert one["letters"]["T"] == "tokens of a sequence"


def test_what_a_formula_says_nothing_of_is_listed_and_not_compared(erg: Erg, config: Path) -> None:
    common = ("flops", config, "--seq-len", 64)
    found = whole(erg(*common, "--json"))
    assert "megatron-2021" not in found["conventions"]
    assert "13 h^2" in found["not_defined"]["megatron-2021"]
    out = erg(*common)[1]
    assert "not defined here: megatron-2021: it is for layers of 12 h^2 weights" in out
    assert "N parameters, M weights that are multiplied, L layers" in out
    lora = erg(*common, "--lora", "r=16,targets=q_proj")[1]
    assert "not defined here: palm, megatron, " in lora
    assert "some are frozen" in lora


def test_weights_and_products_have_types_of_their_own(erg: Erg, config: Path) -> None:
    common = ("flops", config, "--phase", "decode", "--seq-len", 64, "--json")
    plain, short, longer, packed = (
        whole(erg(*common, *more))
        for more in (
            (),
            ("--weights-dtype", "bf16"),
            ("--weights-dtype", "bfloat16"),
            ("--weights-dtype", "nf4", "--cache-dtype", "fp8"),
        )
    )
    assert plain["bytes_moved"] == short["bytes_moved"] == longer["bytes_moved"]
    assert "assumed, the config names no type" in plain["kept"]["as"][0]
    layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    rest = 128256 * 4096 + 65 * 4096
    assert packed["bytes_moved"]["weights"] == layers * 4.5 / 8 + 2 * rest
    assert packed["bytes_moved"]["cache_read"] == plain["bytes_moved"]["cache_read"] / 2
    assert packed["model_flops"] == plain["model_flops"]
    for option in ("--weights-dtype", "--cache-dtype"):
        code, _, err = erg(*common, option, "banana")
        assert code == 2
        assert "no type 'banana' for stored numbers" in err


def test_a_prompt_takes_the_head_once(erg: Erg, config: Path) -> None:
    common = ("flops", config, "--seq-len", 512, "--batch-size", 3, "--json")
    train, prefill = whole(erg(*common)), whole(erg(*common, "--phase", "prefill"))
    assert prefill["parts"]["head"]["forward"] == 2 * 4096 * 128256 * 3
    for part in ("mlp", "attention scores"):
        assert prefill["parts"][part]["forward"] == train["parts"][part]["forward"]
    assert any("last token of each prompt" in line for line in prefill["assumptions"])
    # One that reads and does not write has its head everywhere.
    found = whole(erg("flops", BERT, "--seq-len", 32, "--phase", "prefill", "--json"))
    assert found["parts"]["head"]["forward"] == 32 * 2 * (64 * 64 + 64 * 100)


def test_what_a_config_says_wrongly_is_a_failure_and_no_misuse(erg: Erg, config: Path) -> None:
    fields = json.loads(config.read_text())
    prefill = ("flops", config, "--seq-len", 8, "--phase", "prefill")
    for more, said in (
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method 'aqlm' is not known"),
        ({"model_type": "foo"}, "the architecture 'foo' is not known; if its layers are like"),
        ({"hidden_size": 4095}, "no multiple"),
    ):
        config.write_text(json.dumps(fields | more))
        code, _, err = erg(*prefill)
        assert code == 1
        assert said in err
        assert "--engine" not in err


def test_the_other_engine_is_offered_where_it_knows_the_architecture(
    erg: Erg, config: Path
) -> None:
    pytest.importorskip("transformers")
    config.write_text(json.dumps({"model_type": "xglm"}))
    code, _, err = erg("flops", config, "--seq-len", 8)
    assert (code, "or run it: --engine counted" in err) == (1, True)
    code, _, err = erg("mfu", config, "--seq-len", 8, "--step-time", 1, "--device", "l4")
    assert (code, "--engine" in err) == (1, False)


def test_a_class_without_a_language_head_has_no_decoding_step(erg: Erg, config: Path) -> None:
    fields = json.loads(config.read_text())
    for name in ("LlamaForSequenceClassification", "LlamaModel"):
        config.write_text(json.dumps(fields | {"architectures": [name]}))
        code, _, err = erg("flops", config, "--phase", "decode", "--seq-len", 64)
        assert code == 2
        assert "has no head of a causal language model" in err
        assert erg("flops", config, "--phase", "prefill", "--seq-len", 64)[0] == 0


def test_labels_that_the_config_does_not_number_are_assumed(erg: Erg, config: Path) -> None:
    fields = json.loads(config.read_text()) | {"architectures": ["LlamaForSequenceClassification"]}
    for more, labels, is_assumed in (
        ({}, 2, True),
        ({"num_labels": 2}, 2, False),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3, False),
    ):
        config.write_text(json.dumps(fields | more))
        found = whole(erg("flops", config, "--seq-len", 8, "--json"))
        assert found["parts"]["head"]["forward"] == 2 * 4096 * labels * 8
        assert any("num_labels = 2" in line for line in found["assumptions"]) == is_assumed


@pytest.mark.parametrize(
    ("model", "limit"),
    [
        (BERT, 64),
        (BERT.replace("=bert", "=roberta"), 62),  # whose positions begin at 2
        ("type=gpt2,hidden=64,layers=2,heads=4,vocab=100,n_positions=64", 64),
        ("type=opt,hidden=64,layers=2,heads=4,ffn=256,vocab=100,max_position_embeddings=64", 64),
        (SMALL, None),
    ],
)
def test_a_length_beyond_learned_positions_is_noted(
    erg: Erg, model: str, limit: int | None
) -> None:
    def noted(length: int) -> list[str]:
        found = whole(erg("flops", model, "--seq-len", length, "--json"))
        return [line for line in found["assumptions"] if "can't run" in line]

    if limit is None:
        assert noted(10_000) == []
        return
    assert noted(limit) == []
    (line,) = noted(limit + 1)
    assert f"learned positions has {limit}, so this model can't run {limit + 1} tokens" in line


def test_an_n_that_was_given_is_said_and_is_not_the_models(erg: Erg, config: Path) -> None:
    common = ("flops", config, "--seq-len", 2048, "--params", "540.35e9")
    found = whole(erg(*common, "--json"))
    assert found["parameters"] == 8_030_261_248
    assert found["N_given"] == {
        "value": 540_350_000_000,
        "used_by": ["palm", "torchtitan", "mosaicml", "nanogpt", "hf-6nd", "6nd"],
    }
    plain = whole(erg(*common[:-2], "--json"))
    assert "N_given" not in plain
    for name, flops in found["conventions"].items():
        is_same = flops == plain["conventions"][name]
        assert is_same == (name not in found["N_given"]["used_by"])
    assert found["conventions"]["6nd"]["model_flops_per_token"] == 6 * 540.35e9
    out = erg(*common)[1]
    assert "8.03 B parameters" in out
    assert "given: N = 540.4 B parameters, in palm, torchtitan, mosaicml, nanogpt" in out


def test_recomputation_that_nobody_spoke_of_is_assumed_away(erg: Erg, config: Path) -> None:
    def assumed(*options: object) -> bool:
        found = whole(erg("flops", config, "--seq-len", 64, *options, "--json"))
        return any("no recomputation" in line for line in found["assumptions"])

    assert assumed()
    assert not assumed("--checkpointing", "none")
    assert not assumed("--checkpointing", "full")
    assert not assumed("--phase", "prefill")


def test_what_is_little_beside_the_rest_keeps_its_digits(erg: Erg) -> None:
    wide = "hidden=4096,layers=32,heads=32,ffn=14336,vocab=128000,experts=2,top_k=1"
    out = erg("flops", wide, "--seq-len", 4096, "--batch-size", 64)[1]
    row = next(line for line in out.splitlines() if line.strip().startswith("router"))
    # 2 x 4096 x 2 x 32 layers x 64 x 4096 tokens, in a table of PFLOP.
    assert "PFLOP a step" in out
    assert row.split()[1:3] == ["137.4", "GFLOP"]
    assert "e-0" not in out


def test_padding_is_no_token_of_the_columns(erg: Erg) -> None:
    padded = erg("flops", SMALL, "--seq-len", 64, "--lengths", "10,20")[1]
    assert padded.count("FLOP a real token") == 2
    assert "real token" not in erg("flops", SMALL, "--seq-len", 64, "--lengths", "14,50")[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--batch-size", 2), "a training step (forward and backward): 2 sequences of 64 tokens"),
        (("--checkpointing", "full"), "(forward and backward, full checkpointing): 1 sequence of"),
        (("--lengths", "10,20"), "2 documents, 30 tokens in all, in 1 sequence of 64 tokens"),
        (("--phase", "prefill", "--context", 9), "of 64 tokens, after 9 cached"),
        (("--phase", "decode"), "a decoding step: 1 sequence, one new token after 64 cached"),
    ],
)
def test_the_first_line_says_what_the_step_is(
    erg: Erg, options: tuple[object, ...], said: str
) -> None:
    assert said in erg("flops", SMALL, "--seq-len", 64, *options)[1].splitlines()[0]


def test_images_are_counted_where_there_are_some_and_missed_where_there_are_none(
    erg: Erg, tmp_path: Path
) -> None:
    text = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 160,
        "vocab_size": 256,
    }
    tower = {
        "model_type": "clip_vision_model",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 7,
        "projection_dim": 48,
    }
    path = tmp_path / "llava.json"
    path.write_text(
        json.dumps({"model_type": "llava", "text_config": text, "vision_config": tower})
    )
    common = ("flops", path, "--seq-len", 64, "--batch-size", 2)
    assert "no images, so the vision parts are not counted; pass --images" in erg(*common)[1]
    out = erg(*common, "--images", 3)[1]
    assert "128 in all, 3 images in them" in out.splitlines()[0]
    assert "no images" not in out


def test_eighty_columns_are_enough(erg: Erg, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = erg("flops", config, "--seq-len", 8192, "--checkpointing", "full")[1]
    assert max(map(len, out.splitlines())) <= 80
    assert "6 (M + Vh) + 12 LHQT + 18 LHT" in out  # in one piece


# -- counted ---------------------------------------------------------------------------------------

COUNTED = ("flops", SMALL, "--seq-len", 32, "--engine", "counted")
# 6 a weight that is multiplied, and attention over the whole rectangle of 32 x 32.
QKV, OUTPUT, MLP, HEAD = 64 * 64 + 2 * 64 * 32, 64 * 64, 3 * 64 * 160, 64 * 256
CORE = 4 * 64 * 32 * 32  # forward, of a layer


def test_the_counted_engine_runs_the_model_and_agrees(erg: Erg) -> None:
    found = whole(erg(*COUNTED, "--json"))
    weights = 2 * (QKV + OUTPUT + MLP) + HEAD
    assert found["model_flops"] == 32 * 6 * weights + 2 * 3 * CORE
    assert "agree" in found["analytic"]
    code, out, _ = erg(*COUNTED)
    assert code == 0
    assert "model.layers.0 to 1, each" in out  # which cost the same
    assert "aten::mm" in out


@pytest.mark.parametrize("more", ["gated=false", "experts=4,top_k=2", "window=8"])
def test_the_counted_engine_builds_what_dimensions_choose(erg: Erg, more: str) -> None:
    model = f"hidden=64,layers=2,heads=4,ffn=160,vocab=256,{more}"
    common = ("flops", model, "--seq-len", 32, "--json")
    analytic, counted = whole(erg(*common)), whole(erg(*common, "--engine", "counted"))
    assert counted["parameters"] == analytic["parameters"]
    assert counted["exact_model_flops"] == analytic["model_flops"]
    assert "agree" in counted["analytic"]


def test_the_counted_engine_freezes_what_it_is_told_to(erg: Erg) -> None:
    found = whole(erg(*COUNTED, "--freeze", "mlp", "--json"))
    weights = 6 * (2 * (QKV + OUTPUT) + HEAD) + 4 * 2 * MLP
    assert found["model_flops"] == 32 * weights + 2 * 3 * CORE
    assert "agree" in found["analytic"]
    out = erg(*COUNTED, "--freeze", "layers.0.mlp")[1]
    assert "each" not in out
    # By role: the head has a name of its own in transformers.
    found = whole(erg(*COUNTED, "--freeze", "head", "--json"))
    assert found["model_flops"] == 32 * (6 * 2 * (QKV + OUTPUT + MLP) + 4 * HEAD) + 6 * CORE


def test_the_counted_engine_has_pefts_adapters(erg: Erg) -> None:
    pytest.importorskip("peft")
    found = whole(erg(*COUNTED, "--lora", "r=4,targets=q_proj,v_proj", "--json"))
    assert found["parameters"] - whole(erg(*COUNTED, "--json"))["parameters"] == 2 * 4 * (
        64 + 64 + 64 + 32
    )
    assert "agree" in found["analytic"]


def test_the_counted_engine_runs_documents_one_by_one(erg: Erg) -> None:
    found = whole(erg(*COUNTED, "--batch-size", 2, "--lengths", "8,8,30", "--json"))
    weights = 2 * (QKV + OUTPUT + MLP) + HEAD
    pairs = 2 * 8**2 + 30**2
    assert found["model_flops"] == 46 * 6 * weights + 2 * 12 * 64 * pairs
    assert "agree" in found["analytic"]
    assert any("one by one" in line for line in found["assumptions"])


def test_both_engines_lead_to_one_exact_figure_of_a_prompt(erg: Erg) -> None:
    common = ("flops", SMALL, "--seq-len", 32, "--batch-size", 3, "--phase", "prefill", "--json")
    analytic, counted = whole(erg(*common)), whole(erg(*common, "--engine", "counted"))
    layers = 2 * 2 * (QKV + OUTPUT + MLP) * 3 * 32
    # What was run has the head at every position and every pair of the rectangle.
    assert counted["model_flops"] == layers + 2 * HEAD * 3 * 32 + 2 * 3 * CORE
    exact = layers + 2 * HEAD * 3 + 2 * 3 * 4 * 64 * (32 * 33 // 2)
    assert counted["exact_model_flops"] == analytic["model_flops"] == exact
    assert "of what was run, analytic and counted FLOPs agree to 1e-06" in counted["analytic"]
    assert "and the head on the last token alone, is" in counted["analytic"]
    train = whole(erg(*COUNTED, "--json"))
    assert train["exact_model_flops"] == whole(erg(*COUNTED[:-2], "--json"))["model_flops"]
    assert "last token" not in train["analytic"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--phase", "decode"), "continues from a cache that it does not have"),
        (("--checkpointing", "selective"), "checkpoints whole layers"),
        (("--images", 1), "--images is not for the counted engine: it runs text"),
        (("--params", 7), "--params is not for the counted engine"),
        (("--convention", "palm"), "--convention is for formulas"),
        (("--lora", "r=4,targets=banana"), "'banana'"),
        (("--freeze", "banana"), "'banana'"),
    ],
)
def test_what_the_counted_engine_can_not_do_it_says(
    erg: Erg, options: tuple[object, ...], said: str
) -> None:
    code, out, err = erg(*COUNTED, *options)
    assert (code, out) == (2, "")
    assert said in err
