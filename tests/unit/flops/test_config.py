"""A configuration that can't be read says, in one line, which file and which field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ergmeter.errors import FormatError, NotMeasurable, UsageError
from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig, read_config, transformers_version
from ergmeter.flops.graph.graph import Attention
from ergmeter.flops.source import NOT_READ, known_families, model_graph

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 256,
}
WRONG: list[Any] = [None, "x", -1, 0, 1e30, 10**8, [], {}, [1], True]
PUBLISHED = Path(__file__).parents[2] / "data" / "configs"
CLIP = {"model_type": "clip_vision_model", "hidden_size": 48, "image_size": 28, "patch_size": 7}


def _line(fields: dict[str, Any]) -> str:
    with pytest.raises(FormatError) as caught:
        model_graph(ModelConfig(fields, where="models/x/config.json"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _defaults(family: str, **values: object) -> str:
    listed = ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items())
    return f"left out, so as transformers {transformers_version()} has it for {family}: {listed}"


@pytest.mark.parametrize(
    ("field", "default"),
    [
        ("hidden_size", 4096),
        ("num_hidden_layers", 32),
        ("num_attention_heads", 32),
        ("vocab_size", 32000),
        ("tie_word_embeddings", False),
    ],
)
def test_a_field_that_is_left_out_has_its_default_and_is_listed(field: str, default: int) -> None:
    full = {**LLAMA, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}
    assert model_graph(ModelConfig(full, where="x")).assumptions == ()
    without = {key: value for key, value in full.items() if key != field}
    graph = model_graph(ModelConfig(without, where="x"))
    assert graph.nodes == model_graph(ModelConfig({**full, field: default}, where="x")).nodes
    assert graph.assumptions == (_defaults("llama", **{field: default}),)


def test_published_models_that_leave_out_a_field_have_their_published_size() -> None:
    # SmolLM3-3B as published, less what equals its class's defaults: 3.075 B, tied.
    smollm3 = {"model_type": "smollm3"}
    assert model_graph(ModelConfig(smollm3, where="x")).params == 3_075_098_624
    # Queries, keys and values of GLM-4-9B have biases: 40 layers of (32 + 2 + 2) heads of 128.
    glm = {"model_type": "glm4", "num_hidden_layers": 40}
    plain = model_graph(ModelConfig({**glm, "attention_bias": False}, where="x"))
    assert model_graph(ModelConfig(glm, where="x")).params - plain.params == 40 * 36 * 128


def test_kimi_linear_as_it_is_published() -> None:
    """Kimi-Linear-48B-A3B: its linear layers in a part of their own, counted from 1."""
    full = [4, 8, 12, 16, 20, 24, 27]
    fields = {
        "model_type": "kimi_linear", "hidden_size": 2304, "num_hidden_layers": 27,
        "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 9216,
        "vocab_size": 163840, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256, "num_experts_per_token": 8,
        "num_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
        "linear_attn_config": {
            "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
            "full_attn_layers": full,
            "kda_layers": [number for number in range(1, 28) if number not in full],
        },
    }  # fmt: skip
    graph = model_graph(ModelConfig(fields, where="x"))
    buffers = 26 * 256  # of its routers: numbers in the files, and no parameters
    assert graph.params + buffers == 49_122_681_728  # as its model card has
    assert sum(isinstance(node.work, Attention) for node in graph) == 7
    assert graph.params_active / 1e9 == pytest.approx(3.4, abs=0.1)


def test_a_field_may_have_the_other_name_that_its_class_takes() -> None:
    t5 = {"model_type": "t5", "vocab_size": 100, "d_ff": 64, "d_kv": 8}
    names = {"d_model": 32, "num_heads": 4, "num_layers": 2}
    others = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    graphs = [model_graph(ModelConfig({**t5, **each}, where="x")) for each in (names, others)]
    assert graphs[0].nodes == graphs[1].nodes
    assert graphs[0].assumptions == graphs[1].assumptions


def test_a_field_that_is_misspelt_is_named_with_what_was_meant() -> None:
    meant = "hiden_size is not read; did you mean hidden_size?"
    fields = {"hiden_size" if name == "hidden_size" else name: LLAMA[name] for name in LLAMA}
    lines = model_graph(ModelConfig(fields, where="c.json")).assumptions
    assert f"c.json: {meant}" in lines
    nested = {"model_type": "llava", "text_config": fields, "vision_config": CLIP}
    lines = model_graph(ModelConfig(nested, where="v.json")).assumptions
    assert f"v.json: text_config: {meant}" in lines
    config = ModelConfig(fields, where="c.json", defaults={})
    with pytest.raises(FormatError, match="add it; did you write it as hiden_size"):
        model_graph(config)


def test_a_field_of_many_names_is_named_by_all_of_them() -> None:
    config = ModelConfig({"model_type": "gpt2", "n_head": 4}, where="x", defaults={})
    with pytest.raises(FormatError, match=r"the field n_embd \(or hidden_size\) is missing"):
        model_graph(config)


@pytest.mark.parametrize("value", ["12", [12], {"a": 1}, 12.5, True])
def test_a_size_that_is_no_whole_number_is_refused(value: object) -> None:
    said = _line({**LLAMA, "hidden_size": value})
    assert said == f"models/x/config.json: hidden_size must be a whole number; got {value!r}"


@pytest.mark.parametrize("value", [0, -64, 10**30, 1e30])
def test_a_size_that_no_model_has_is_refused(value: object) -> None:
    said = _line({**LLAMA, "intermediate_size": value})
    assert said.startswith("models/x/config.json: intermediate_size must be at least 1")


def test_a_whole_number_may_be_written_with_a_point() -> None:
    pointed = model_graph(ModelConfig({**LLAMA, "hidden_size": 64.0}, where="x"))
    assert pointed.params == model_graph(ModelConfig(LLAMA, where="x")).params


@pytest.mark.parametrize("value", ["false", 0, "no"])
def test_a_flag_is_true_or_false(value: object) -> None:
    said = _line({**LLAMA, "tie_word_embeddings": value})
    assert said == (
        f"models/x/config.json: tie_word_embeddings must be true or false; got {value!r}"
    )


def test_heads_that_do_not_divide_are_refused() -> None:
    assert "num_attention_heads 4 is no multiple" in _line({**LLAMA, "num_key_value_heads": 3})
    assert "hidden_size 65 is no multiple" in _line({**LLAMA, "hidden_size": 65})


def test_an_unknown_architecture_is_told_with_the_nearest_and_what_to_do() -> None:
    said = _line({**LLAMA, "model_type": "lama"})
    assert said.startswith("models/x/config.json: the architecture 'lama' is not known")
    assert "(is it llama?)" in said
    assert "put that in model_type (llama, " in said
    assert "pass its dimensions: hidden=" in said
    assert "--engine" not in said  # which not every command has


@pytest.mark.parametrize("kind", sorted(NOT_READ))
def test_a_family_that_is_not_read_says_why_and_what_to_do(kind: str) -> None:
    reason, instead = NOT_READ[kind]
    assert _line({**LLAMA, "model_type": kind}) == (
        f"models/x/config.json: {kind} can't be counted from its configuration: {reason}; {instead}"
    )
    mapping = pytest.importorskip("transformers.models.auto.configuration_auto")
    assert kind in mapping.CONFIG_MAPPING_NAMES
    assert kind not in known_families()


@pytest.mark.parametrize("kind", [None, ""])
def test_without_a_model_type_nothing_is_assumed(kind: object) -> None:
    fields = {**LLAMA, "model_type": kind}
    assert "the field model_type is missing; add it" in _line(fields)
    del fields["model_type"]
    assert "the field model_type is missing; add it" in _line(fields)


@pytest.mark.parametrize("kind", [["llama"], 3, {"a": 1}, True])
def test_a_model_type_is_a_word(kind: object) -> None:
    said = _line({**LLAMA, "model_type": kind})
    assert said == f"models/x/config.json: model_type must be a word; got {kind!r}"
    said = _line(_llava(text_config={**LLAMA, "model_type": kind}))
    assert said == f"models/x/config.json: text_config: model_type must be a word; got {kind!r}"


@pytest.mark.parametrize(
    ("field", "most"), [("num_hidden_layers", 10_000), ("num_local_experts", 1_000_000)]
)
def test_what_is_built_one_by_one_has_a_limit(field: str, most: int) -> None:
    mixtral = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    assert _line({**mixtral, field: 100_000_000}) == (
        f"models/x/config.json: {field} must be at least 1 and at most {most:,}; got 100000000"
    )


def test_a_wrong_value_is_quoted_in_part_where_it_is_long() -> None:
    said = _line({**LLAMA, "hidden_size": ["many"] * 1000})
    assert said.endswith("...")
    assert len(said) < 200


_GEMMA = {**LLAMA, "model_type": "gemma2", "head_dim": 16, "sliding_window": 32}
_QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 16, "num_hidden_layers": 4}
_MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LLAMA4 = {
    **LLAMA,
    "model_type": "llama4_text",
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 64,
}
_MPT = {"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 256}
_NEO = {
    "model_type": "gpt_neo",
    "hidden_size": 64,
    "num_heads": 4,
    "num_layers": 2,
    "vocab_size": 256,
}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {**_GEMMA, "layer_types": ["full_attention"]},
            "layer_types lists 1 layers, and the model has 2",
        ),
        (
            {**_GEMMA, "model_type": "gemma3_text", "layer_types": []},
            "layer_types lists 0 layers, and the model has 2",
        ),
        (
            {**_QWEN3, **_MIXTURE, "model_type": "qwen3_moe", "mlp_only_layers": 3},
            "mlp_only_layers must be a list of whole numbers from 0; got 3",
        ),
        (
            {**_QWEN3, **_MIXTURE, "model_type": "qwen3_moe", "mlp_only_layers": ["x"]},
            "mlp_only_layers must be a list of whole numbers from 0; got ['x']",
        ),
        (
            {**LLAMA, "model_type": "bamba", "attn_layer_indices": 9},
            "attn_layer_indices must be a list of whole numbers from 0; got 9",
        ),
        (
            {**_LLAMA4, "moe_layers": "all"},
            "moe_layers must be a list of whole numbers from 0; got 'all'",
        ),
        ({**_MPT, "attn_config": "alibi"}, "attn_config is missing or not an object"),
        (
            {**_MPT, "attn_config": {"alibi": "yes"}},
            "attn_config: alibi must be true or false; got 'yes'",
        ),
        (
            {**_MPT, "expansion_ratio": float("nan")},
            "expansion_ratio must be a number above 0; got nan",
        ),
        (
            {**_NEO, "attention_types": [[["global"], 10**9]]},
            "attention_types must be a list of pairs (a list of layer kinds, the times it repeats);"
            " got [[['global'], 1000000000]]",
        ),
        (
            {**LLAMA, "model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": "LG"},
            "sliding_window_pattern must be a whole number; got 'LG'",
        ),
    ],
)
def test_a_field_of_another_kind_is_one_line(fields: dict[str, Any], said: str) -> None:
    assert _line(fields) == f"models/x/config.json: {said}"


def _one_of_each_family() -> list[Path]:
    files = {json.loads(file.read_text())["model_type"]: file for file in PUBLISHED.glob("*.json")}
    return sorted(files.values())


@pytest.mark.parametrize("file", _one_of_each_family(), ids=lambda file: file.stem)
def test_no_value_of_any_field_is_a_traceback(file: Path) -> None:
    fields = json.loads(file.read_text())
    said = []
    for name in fields:
        for value in WRONG:
            try:
                model_graph(ModelConfig({**fields, name: value}, where=file.name))
            except (FormatError, UsageError, NotMeasurable) as error:
                said.append(str(error))
    assert said
    assert [line for line in said if not line.startswith(file.name) or "\n" in line] == []


# -- windows and further tokens --------------------------------------------------------------------


def _windows(fields: dict[str, Any]) -> list[int | None]:
    nodes = model_graph(ModelConfig(fields, where="x")).nodes
    return [node.work.window for node in nodes if isinstance(node.work, Attention)]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_upper_layers_of_qwen_have_the_window_that_is_switched_on(kind: str) -> None:
    fields = {**_QWEN3, "model_type": kind, "sliding_window": 32, "max_window_layers": 3}
    assert _windows(fields) == [None] * 4
    assert _windows({**fields, "use_sliding_window": False}) == [None] * 4
    fields["use_sliding_window"] = True
    assert _windows(fields) == [None, None, None, 32]
    listed = ["sliding_attention", "full_attention"] * 2
    assert _windows({**fields, "layer_types": listed}) == [32, None, 32, None]
    assert "layer_types lists 2 layers" in _line({**fields, "layer_types": listed[:2]})
    # As transformers has it: null is no window, and what is absent has its default.
    assert _windows({**fields, "sliding_window": None}) == [None] * 4
    del fields["sliding_window"]
    assert _windows(fields) == [None, None, None, 4096]
    del fields["max_window_layers"]
    assert _windows(fields) == [None] * 4


def test_qwens_mixtures_have_rules_of_their_own() -> None:
    fields = {**_QWEN3, **_MIXTURE, "use_sliding_window": True, "sliding_window": 32}
    fields |= {"max_window_layers": 3, "shared_expert_intermediate_size": 32}
    assert _windows({**fields, "model_type": "qwen3_moe"}) == [32] * 4
    assert _windows({**fields, "model_type": "qwen2_moe"}) == [32, None, 32, None]
    assert _windows({**fields, "model_type": "qwen3_moe", "use_sliding_window": False}) == (
        [None] * 4
    )


def test_layers_that_predict_further_are_not_counted_and_it_says_so() -> None:
    fields = json.loads((PUBLISHED / "deepseek-v3.json").read_text())
    fields["num_nextn_predict_layers"] = 1
    graph = model_graph(ModelConfig(fields, where="x"))
    assert graph.assumptions[0] == (
        "num_nextn_predict_layers = 1 is not counted: transformers does not build it;"
        " add mtp_num_layers = 1 to the configuration to count it"
    )
    counted = model_graph(ModelConfig({**fields, "mtp_num_layers": 1}, where="x"))
    assert counted.assumptions == (_defaults("deepseek_v3", attention_bias=False),)
    assert counted.params > graph.params
    del fields["num_nextn_predict_layers"]
    assert model_graph(ModelConfig(fields, where="x")).assumptions == counted.assumptions


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ('{"hidden_size": 1' + "0" * 9999 + "}", "is not JSON"),
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1, 2]", "is not a JSON object"),
        ('"llama"', "is not a JSON object"),
    ],
    ids=["cut off", "a number without end", "empty", "too deep", "a list", "a word"],
)
def test_a_file_that_holds_no_configuration_is_named(
    tmp_path: Path, text: str, reason: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match=reason) as caught:
        read_config(file)
    assert str(file) in str(caught.value)


def test_a_directory_is_read_by_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert model_graph(read_config(tmp_path)).layers == 2
    with pytest.raises(FormatError, match="no such file"):
        read_config(tmp_path / "missing")


def test_text_of_no_encoding_is_told(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(FormatError, match="can't be read as text"):
        read_config(file)


# -- nested configurations -------------------------------------------------------------------------


def _llava(**more: object) -> dict[str, Any]:
    text = {key: value for key, value in LLAMA.items() if key != "hidden_size"}
    return {"model_type": "llava", "text_config": text, "vision_config": CLIP, **more}


def test_a_part_that_is_missing_or_no_object_is_named() -> None:
    assert _line({"model_type": "llava", "text_config": LLAMA, "vision_config": None}) == (
        "models/x/config.json: vision_config is missing or not an object"
    )
    assert "text_config is missing or not an object" in _line(_llava(text_config=[1]))


def test_what_a_part_leaves_out_is_its_own_default_and_said_once() -> None:
    graph = model_graph(ModelConfig(_llava(), where="x"))
    assert graph.hidden == 4096
    (line,) = (line for line in graph.assumptions if " has it for llama: " in line)
    assert line.count("hidden_size = 4096") == 1


def test_a_wrong_value_in_a_part_is_named_with_the_part() -> None:
    said = _line(_llava(text_config={**LLAMA, "num_hidden_layers": "two"}))
    assert said.startswith("models/x/config.json: text_config: num_hidden_layers must be")


def test_a_null_in_a_part_is_a_decision_and_no_default() -> None:
    text = {**LLAMA, "model_type": "mistral", "sliding_window": None}
    graph = model_graph(ModelConfig(_llava(text_config=text), where="x"))
    assert not any("sliding_window" in line for line in graph.assumptions)
    del text["sliding_window"]
    graph = model_graph(ModelConfig(_llava(text_config=text), where="x"))
    (line,) = (line for line in graph.assumptions if " has it for mistral: " in line)
    assert "sliding_window = 4096" in line


def test_the_first_models_of_qwen_have_their_text_beside_their_vision() -> None:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "in_chans": 3}
    nested = {"model_type": "qwen2_vl", "text_config": LLAMA | {"model_type": "qwen2_vl_text"}}
    flat = {**LLAMA, "model_type": "qwen2_vl"}
    graphs = [
        model_graph(ModelConfig({**fields, "vision_config": vision}, where="x"))
        for fields in (nested, flat)
    ]
    assert graphs[0].nodes == graphs[1].nodes
    del flat["hidden_size"]
    graph = model_graph(ModelConfig({**flat, "vision_config": vision}, where="x"))
    assert graph.hidden == 8192  # of the class of its text


def test_a_tower_that_is_not_known_is_named() -> None:
    said = _line(_llava(vision_config={"model_type": "eva"}))
    assert "vision_config: the vision tower 'eva' is not known" in said
    assert "'falcon9'" in _line(_llava(text_config={"model_type": "falcon9"}))


def test_a_list_of_layers_is_a_list_of_whole_numbers() -> None:
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 4, "fullatt_block_indexes": "all"}
    fields = {**LLAMA, "model_type": "qwen2_5_vl", "vision_config": vision}
    assert "fullatt_block_indexes must be a list of whole numbers from 0; got 'all'" in _line(
        fields
    )


@pytest.mark.parametrize("pins", [[], 3, [[28]], [["a", "b"]], [[1, 1]]])
def test_tilings_that_are_none_are_refused(pins: object) -> None:
    said = _line(_llava(model_type="llava_next", image_grid_pinpoints=pins))
    assert said.startswith("models/x/config.json: image_grid_pinpoints")


def test_a_size_that_was_not_said_is_an_assumption() -> None:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4}
    config = ModelConfig({**LLAMA, "model_type": "qwen2_vl", "vision_config": vision}, where="x")
    unsaid, said = model_graph(config), model_graph(config, image_size=(280, 1000))
    assert unsaid.assumptions[0].startswith("no image size was given: an image is 448 x 448")
    # Each edge is rounded to whole tokens of 28 pixels.
    assert said.assumptions[0].startswith("an image is 280 x 1008 pixels, 1440 patches")
    assert said.facts["tokens_per_image"] == 10 * 36


def test_an_image_size_is_for_models_that_see_and_can_take_it() -> None:
    with pytest.raises(UsageError, match="takes no images"):
        model_graph(ModelConfig(LLAMA, where="x"), image_size=(224, 224))
    with pytest.raises(UsageError, match="every image is resized to 28 x 28"):
        model_graph(ModelConfig(_llava(), where="x"), image_size=(56, 56))


def test_a_text_model_takes_no_images() -> None:
    graph = model_graph(ModelConfig(LLAMA, where="x"))
    with pytest.raises(UsageError, match="a graph that has a vision tower"):
        Batch.of(1, 64, images=1, facts=graph.facts)


def test_families_are_listed_once_and_in_order() -> None:
    names = known_families()
    assert names == sorted(set(names))
    assert {"llama", "bert", "t5", "llava"} <= set(names)
