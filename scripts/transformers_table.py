"""Writes src/ergmeter/flops/transformers.json from the installed transformers.

What ergmeter needs to know of transformers without importing it: the default of each field that a
reader of configurations looks at, and the head of each class. Run it again after adding a family or
updating transformers: python scripts/transformers_table.py
"""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from ergmeter.flops.families.encoders import SEQ2SEQ
from ergmeter.flops.families.vision import TEXTS, TOWERS
from ergmeter.flops.source import known_families

FLOPS = Path(__file__).parents[1] / "src" / "ergmeter" / "flops"
TABLE = FLOPS / "transformers.json"

# The heads of heads.py, by the mappings of transformers whose classes have them. A class that is in
# several has the first of these.
HEADS = {
    "language": ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ",
                 "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
    "sequence classification": ("SEQUENCE_CLASSIFICATION",),
    "token classification": ("TOKEN_CLASSIFICATION",),
    "question answering": ("QUESTION_ANSWERING",),
    "image classification": ("IMAGE_CLASSIFICATION",),
    "pretraining": ("PRETRAINING",),
    "bare": ("",),
    "encoder": ("TEXT_ENCODING",),
}  # fmt: skip


def table() -> dict[str, Any]:
    """The whole table, as it stands in the file."""
    kinds = sorted({*known_families(), *TEXTS, *TOWERS} & set(CONFIG_MAPPING_NAMES))
    defaults: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        _add_defaults(defaults, kind, CONFIG_MAPPING[kind])
    return {
        "version": transformers.__version__,
        "defaults": dict(sorted(defaults.items())),
        "aliases": {kind: found for kind in kinds if (found := _aliases(CONFIG_MAPPING[kind]))},
        "heads": heads(set(kinds)),
    }


def heads(kinds: set[str]) -> dict[str, list[str]]:
    """The classes of these model types, by their head."""
    # The decoder of an encoder-decoder alone is another model.
    decoders = _mapped(kinds & set(SEQ2SEQ), "CAUSAL_LM")
    listed: dict[str, list[str]] = {"decoder": sorted(decoders)}
    taken: set[str] = set(decoders)
    for head, mappings in HEADS.items():
        classes = set().union(*(_mapped(kinds, name) for name in mappings))
        listed[head] = sorted(classes - taken)
        taken |= classes
    return listed


def _mapped(kinds: set[str], name: str) -> set[str]:
    mapping = f"MODEL_FOR_{name}_MAPPING_NAMES" if name else "MODEL_MAPPING_NAMES"
    found: set[str] = set()
    for kind, classes in getattr(modeling_auto, mapping).items():
        if kind in kinds:
            found.update([classes] if isinstance(classes, str) else classes)
    return found


def _add_defaults(defaults: dict[str, dict[str, Any]], kind: str, cls: Any) -> None:  # noqa: ANN401
    """The defaults as the class writes them, before it derives one field from another."""
    defaults[kind] = {}
    made = cls()
    for field in dataclasses.fields(cls):
        part = vars(made).get(field.name)
        if isinstance(part, transformers.PretrainedConfig):
            inner = part.model_type or f"{kind}.{field.name}"
            if inner not in defaults:
                _add_defaults(defaults, inner, type(part))
            # Of a part that is left out altogether some families have other values.
            usual = type(part)().to_dict()
            own = {
                name: value
                for name, value in _written(part.to_dict()).items()
                if usual.get(name) != value
                or (name not in defaults[inner] and not isinstance(value, list))
            }
            dropped = {
                name: None
                for name in defaults[inner]
                if vars(part).get(name) is None and name != "tie_word_embeddings"
            }
            defaults[kind][field.name] = {"model_type": inner, **own, **dropped}
    raw = {
        field.name: field.default
        if field.default is not dataclasses.MISSING
        else field.default_factory()
        for field in dataclasses.fields(cls)
        if (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
    }
    if "tie_word_embeddings" not in raw and hasattr(made, "tie_word_embeddings"):
        raw["tie_word_embeddings"] = made.tie_word_embeddings
    defaults[kind] = dict(sorted({**_written(raw), **defaults[kind]}.items()))


def _aliases(cls: Any) -> dict[str, list[str]]:  # noqa: ANN401
    """The other names of fields that some reader looks at."""
    found: dict[str, list[str]] = {}
    for other, name in cls.attribute_map.items():
        if name in READ:
            found.setdefault(name, []).append(other)
    return found


def _written(fields: dict[str, Any]) -> dict[str, Any]:
    """Those of the fields that some reader looks at."""
    found = {}
    for name, value in fields.items():
        plain = list(value) if isinstance(value, tuple) else value
        if name in READ and isinstance(plain, bool | int | float | str | list):
            found[name] = plain
    return found


def _literals() -> frozenset[str]:
    """Every word in the readers' source: the names of the fields they read, and more."""
    words: set[str] = set()
    for path in FLOPS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
    for what in ("encoder", "decoder"):  # encoders.py puts these together
        words |= {f"{what}_{rest}" for rest in ("attention_heads", "ffn_dim", "layers")}
    return frozenset(words - _OF_ALL)


_OF_ALL = {field.name for field in dataclasses.fields(transformers.PretrainedConfig)} | {
    "use_cache"
}
READ = _literals()


def text() -> str:
    """The file: one line for each family and each head."""
    found = table()
    blocks = [f' "version": {json.dumps(found["version"])}']
    for block in ("defaults", "aliases", "heads"):
        rows = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in found[block].items()]
        blocks.append(f' "{block}": {{\n' + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    TABLE.write_text(text(), encoding="utf-8")
