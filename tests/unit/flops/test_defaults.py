"""What a configuration leaves out is what transformers puts there, family by family."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from ergmeter.errors import ErgmeterError
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.source import known_families, model_graph
from tests.unit.flops.family_cases import CASES, Case

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.frameworks]
MAPPING = transformers.models.auto.configuration_auto.CONFIG_MAPPING
SCRIPT = Path(__file__).parents[3] / "scripts" / "transformers_table.py"
EIGHT = {"num_hidden_layers": 8}
REMOTE = {"kimi_k2"}  # families that are not in transformers


def _script() -> Any:
    spec = util.spec_from_file_location("transformers_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_that_of_the_installed_transformers() -> None:
    script = _script()
    stored = json.loads(script.TABLE.read_text(encoding="utf-8"))
    if stored["version"] != transformers.__version__:
        pytest.skip(f"the table is of transformers {stored['version']}")
    assert script.table() == stored, "run scripts/transformers_table.py"


@lru_cache(maxsize=1)
def _made(kind: str) -> dict[str, Any]:
    changes = CASES.get(kind, Case()).changes or EIGHT
    made: dict[str, Any] = MAPPING[kind](**changes).to_dict()
    return made


def _fields(kind: str) -> dict[str, Any]:
    """A small configuration of the family, with every field that transformers writes."""
    return copy.deepcopy(_made(kind))


def _nodes(fields: dict[str, Any]) -> Any:
    return model_graph(ModelConfig(fields, where="config.json")).nodes


def _without(kind: str, path: tuple[str, ...]) -> dict[str, Any]:
    fields = _fields(kind)
    inner = fields
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return fields


def _read(kind: str) -> list[tuple[str, ...]]:
    """Fields that the family's reader looks at, and that the configuration has."""
    fields = _fields(kind)
    config = ModelConfig(fields, where=kind)
    model_graph(config)
    parts = [name for name in ("text_config", "vision_config") if fields.get(name)]
    paths: list[tuple[str, ...]] = [(name,) for name in fields if name in config.read]
    for part in parts:
        paths += [(part, name) for name in fields[part]]
    return [path for path in paths if path[-1] not in ("model_type", "architectures")]


NOT_GUESSED = {
    # transformers then builds four layers, however many num_hidden_layers says; we ask.
    ("nemotron_h", "layers_block_type"),
    # The class would tie the head, and Mistral Small 3.1, which leaves the field out, has two.
    ("mistral3", "tie_word_embeddings"),
}


@pytest.mark.parametrize("kind", sorted(set(known_families()) - REMOTE))
def test_a_field_that_is_left_out_is_what_transformers_puts_there(kind: str) -> None:
    compared = 0
    given = _fields(kind)
    of_given = _nodes(given)
    for path in _read(kind):
        if (kind, *path) in NOT_GUESSED:
            continue
        try:
            whole = MAPPING[kind](**_without(kind, path)).to_dict()
            theirs = of_given if whole == given else _nodes(whole)
        except Exception:  # noqa: BLE001  what transformers refuses has no default
            continue
        try:
            ours = _nodes(_without(kind, path))
        except ErgmeterError as error:
            pytest.fail(f"{'.'.join(path)}: {error}")
        assert ours == theirs, f"{'.'.join(path)} left out"
        compared += 1
    assert compared >= 5
