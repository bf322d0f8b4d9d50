"""Which model is meant: a file, a directory, a name on the hub, or dimensions typed in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ergmeter.errors import FormatError, UsageError
from ergmeter.flops.graph.graph import Attention, Graph
from ergmeter.flops.source import read_graph, read_model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 160,
    "vocab_size": 256,
}
NAME = "meta-llama/Llama-3.1-8B"


def downloaded(cache: Path) -> None:
    """What huggingface_hub leaves behind: a reference, and a snapshot of that revision."""
    folder = cache / "models--meta-llama--Llama-3.1-8B"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0e9e39f")
    (folder / "snapshots" / "0e9e39f").mkdir(parents=True)
    (folder / "snapshots" / "0e9e39f" / "config.json").write_text(json.dumps(LLAMA))


@pytest.mark.parametrize(
    ("variable", "below"),
    [("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_a_name_on_the_hub_is_read_from_what_was_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, below: str
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    with pytest.raises(UsageError) as caught:
        read_model(NAME)
    assert f"hf download {NAME} config.json --local-dir Llama-3.1-8B" in str(caught.value)
    downloaded(tmp_path / below)
    config = read_model(NAME)
    assert config.fields == LLAMA
    assert "0e9e39f" in config.where  # the revision that was counted


def test_a_directory_of_that_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    downloaded(tmp_path / "cache")
    (tmp_path / NAME).mkdir(parents=True)
    with pytest.raises(FormatError, match=r"no config\.json in this directory"):
        read_model(NAME)
    (tmp_path / NAME / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 9}))
    assert read_model(NAME).integer("vocab_size") == 9


@pytest.mark.parametrize("path", ["models/config.json", "./models/x", "/models/x", "config.json"])
def test_a_path_is_no_name(path: str) -> None:
    with pytest.raises(FormatError, match="no such file; pass a model"):
        read_model(path)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "hidden=64,layers=2",
            "heads, ffn, vocab are missing; add heads=...,ffn=...,vocab=...",
        ),
        ("hidden=64,layers=2,heads=4,ffn=160", "vocab is missing; add vocab=..."),
        (
            "hidden=64,layers=2,heads=4,vocab=256,type=mixtral",
            "experts, ffn, top_k are missing; add experts=...,ffn=...,top_k=...",
        ),
        ("hidden=65,layers=2,heads=4,ffn=9,vocab=9", "hidden 65 is no multiple of heads 4"),
        ("hidden=0,layers=2,heads=4,ffn=9,vocab=9", "hidden must be at least 1"),
    ],
)
def test_typed_dimensions_are_answered_in_the_names_they_are_typed_in(
    typed: str, said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read_graph(typed)
    assert str(caught.value).startswith(f"the dimensions given: {said}")


def test_a_file_is_answered_in_the_names_it_has(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": "64"}))
    with pytest.raises(FormatError, match="hidden_size must be a whole number; got '64'"):
        read_graph(str(path))


# -- dimensions ------------------------------------------------------------------------------------

MISTRAL = "hidden=4096,layers=32,heads=32,kv_heads=8,ffn=14336,vocab=32000"
CONFIGS = Path(__file__).parents[2] / "data" / "configs"


def alike(typed: Graph, name: str) -> bool:
    """Whether it has the nodes of a published model, whatever else it is called."""
    return typed.nodes == read_graph(str(CONFIGS / f"{name}.json")).nodes


def test_experts_and_a_window_choose_the_family_that_has_them() -> None:
    mixtral = read_graph(f"{MISTRAL},experts=8,top_k=2")
    # arXiv 2401.04088: 47B parameters, 13B of them active.
    assert (mixtral.params, mixtral.params_active) == (46_702_792_704, 12_879_925_248)
    assert alike(mixtral, "mixtral-8x7b")
    assert alike(read_graph(f"{MISTRAL},num_local_experts=8,num_experts_per_tok=2"), "mixtral-8x7b")
    assert alike(read_graph(f"{MISTRAL},window=4096"), "mistral-7b-v0.1")
    assert alike(read_graph(f"{MISTRAL},sliding_window=4096"), "mistral-7b-v0.1")
    both = read_graph(f"{MISTRAL},experts=8,top_k=2,window=4096")
    windows = {node.work.window for node in both if isinstance(node.work, Attention)}
    assert (both.params, windows) == (mixtral.params, {4096})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("n_routed_experts=8", "n_routed_experts has no effect in the family llama; type=deepseek"),
        ("kv_lora_rank=512", "kv_lora_rank has no effect in the family llama; type=deepseek_v3"),
        ("qk_rope_head_dim=64", "qk_rope_head_dim has no effect in the family llama"),
        ("num_labels=3", "num_labels has no effect in the family llama"),
        ("experts_per_token=2", "experts_per_token has no effect in the family llama"),
        ("num_kv_heads=8", "num_kv_heads has no effect in the family llama; did you mean kv_heads"),
        ("type=llama,window=1024", "window has no effect in the family llama; type=mistral is"),
        ("type=llama,experts=8", "experts has no effect in the family llama; type=mixtral is one"),
        ("type=smollm3,window=16", "window has no effect in the family smollm3; add use_sliding_w"),
        ("type=olmo2,window=16", "window has no effect in the family olmo2; type=mistral is one"),
        ("type=qwen2,window=1024", "window has no effect in the family qwen2; add use_sliding_w"),
        ("gated=3", "gated must be true or false; got 3"),
        ("gated=false,window=1024", "gated=false can't be combined with experts or window"),
        ("type=qwen2,gated=false", "gated does not go with type=qwen2, which"),
        ("type=lama", "the architecture 'lama' is not known (is it llama?); leave type out"),
    ],
)
def test_a_dimension_without_an_effect_is_refused(more: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_graph(f"{MISTRAL},{more}")
    assert str(caught.value).startswith(f"the dimensions given: {said}")


def test_a_size_that_a_mixture_asks_for_is_taken_even_if_no_layer_is_dense() -> None:
    sizes = "num_experts=4,top_k=2,moe_intermediate_size=32"
    graph = read_graph(f"type=qwen3_moe,hidden=64,layers=2,heads=4,ffn=128,vocab=100,{sizes}")
    # Two tables; in a layer attention of 4 x 64^2, norms, a router of 4 and 4 experts of 3 x 32.
    layer = 4 * 64**2 + 2 * 64 + 2 * 16 + 4 * 64 + 4 * 3 * 32 * 64
    assert graph.params == 2 * 100 * 64 + 2 * layer + 64


def test_what_another_command_goes_by_has_an_effect() -> None:
    # Memory goes by an activation that is spelled out in Python, bytes by the type.
    assert read_graph(f"{MISTRAL},hidden_act=gelu_new").traits
    assert read_model(f"{MISTRAL},torch_dtype=float16").raw("torch_dtype") == "float16"


def test_a_file_may_have_fields_that_nobody_reads(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "num_local_experts": 8, "bos_token_id": 1}))
    assert read_graph(str(path)).params == read_graph(str(path.parent)).params


@pytest.mark.parametrize(
    "family", ["olmo3", "exaone4", "gemma2", "mistral", "smollm3,use_sliding_window=true"]
)
def test_a_window_that_a_family_has_is_taken(family: str) -> None:
    graph = read_graph(f"{MISTRAL},type={family},window=16")
    windows = {node.work.window for node in graph if isinstance(node.work, Attention)}
    assert 16 in windows


def test_a_default_that_is_no_size_is_taken_and_listed() -> None:
    graph = read_graph(f"type=smollm3,{MISTRAL}")
    assert any(node.role == "head" and node.tied_to for node in graph)
    assert "tie_word_embeddings = true" in graph.assumptions[0]
    with pytest.raises(UsageError, match="vocab is missing; add vocab="):
        read_graph(f"type=smollm3,{MISTRAL}".replace(",vocab=32000", ""))


def test_what_dimensions_leave_open_is_said() -> None:
    gpt3 = "hidden=12288,layers=96,heads=96,ffn=49152,vocab=50257"
    three, two = read_graph(gpt3), read_graph(f"{gpt3},gated=false")
    # 12 h^2 weights a layer (arXiv 2005.14165 has 174.6 B, tied and with positions), or 16 h^2.
    norms = 193 * 12288
    assert two.params == 96 * 12 * 12288**2 + 2 * 50257 * 12288 + norms == 175_183_663_104
    assert three.params == 96 * 16 * 12288**2 + 2 * 50257 * 12288 + norms
    assert three.assumptions == (
        "Llama-style layers: feed-forward with a gate (3 matrices), untied head, no biases;"
        " gated=false, tied=true or type=gpt2, type=qwen3, ... for others",
    )
    assert "feed-forward without a gate (2 matrices), untied head, no biases" in two.assumptions[0]
    tied = read_graph(f"{gpt3},tied=true,attention_bias=true").assumptions[0]
    assert "(3 matrices), tied head;" in tied
    assert "Mixtral-style" in read_graph(f"{gpt3},experts=8,top_k=2").assumptions[0]
    named = f"type=gpt2,{gpt3},n_positions=2048"
    (listed,) = read_graph(named).assumptions
    assert listed.endswith(" has it for gpt2: tie_word_embeddings = true")
    # 174.6 B, as published: with biases, positions and a tied head.
    assert read_graph(named).params == 174_604_259_328
    assert read_graph(named.replace("49152", "24576")).params < 120e9  # ffn is its n_inner
