"""Which model is meant: a file, a directory, a name on the hub, or dimensions typed in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ergmeter.errors import FormatError, UsageError
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
    with pytest.raises(FormatError) as caught:
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
    assert read_model(NAME).whole("vocab_size") == 9


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
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    with pytest.raises(FormatError, match="the field num_attention_heads is missing"):
        read_graph(str(path))
