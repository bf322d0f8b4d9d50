"""The command, called in this process, and a model for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from ergmeter.cli.main import main
from tests.nvml.library import Library, build

# A busy machine is no fault, so there is no deadline; and the same examples are drawn each time, so
# that a change is judged by what it changed.
settings.register_profile("ours", deadline=None, derandomize=True)
settings.load_profile("ours")

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


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """A scripted NVML. One for all: a process loads no second library of that name."""
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def erg(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """`erg(*arguments)`: the exit code, what was printed, and what was printed as an error."""
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The config.json of Llama 3 8B."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return path
