"""The model a user means: a config.json, a model's directory, or a few dimensions typed in."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.errors import UsageError
from ergmeter.flops.config import Config, read_config
from ergmeter.flops.models import model_graph

if TYPE_CHECKING:
    from ergmeter.flops.graph import Graph
    from ergmeter.flops.towers import ImageSize

# What people call a dimension, and what a config.json does.
_SHORT = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "window": "sliding_window",
    "experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
    "tied": "tie_word_embeddings",
    "type": "model_type",
}


def read_graph(
    model: str, *, image_size: ImageSize | None = None, further: int | None = None
) -> Graph:
    """The graph of a model, from a path or from `hidden=4096,layers=32,heads=32,...`.

    `further`: layers that predict the tokens after the next, where they are trained too.
    """
    config = read_model(model)
    if further is not None:
        config = Config(config.fields | {"mtp_num_layers": further}, where=config.where)
    graph = model_graph(config, image_size=image_size)
    if further and not any(".mtp." in node.name for node in graph):
        raise UsageError(
            f"{config.where}: this family predicts no further tokens, as far as known;"
            " leave out --mtp"
        )
    return graph


def read_model(model: str) -> Config:
    """Its configuration."""
    if "=" in model and not Path(model).exists():
        return Config(_dimensions(model), where="the dimensions given")
    return read_config(model)


def _dimensions(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"model_type": "llama"}
    for word in text.split(","):
        name, equals, value = (piece.strip() for piece in word.partition("="))
        if not equals or not name or not value:
            raise UsageError(f"{word!r} is no dimension; write hidden=4096,layers=32,heads=32,...")
        if name not in _SHORT and "_" not in name:
            near = get_close_matches(name, _SHORT, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(_SHORT)}"
            raise UsageError(f"no dimension {name!r}{hint} (or a field of a config.json)")
        fields[_SHORT.get(name, name)] = _value(value)
    return fields


def _value(text: str) -> Any:  # noqa: ANN401  a number, a truth or a word
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text.replace("_", ""))
        except ValueError:
            continue
    return text
