"""The model a user means: a config.json, a model's directory or its name on the Hugging Face hub,
or a few dimensions typed in.

Nothing is fetched: a name is looked up where the hub's own tools keep what they have downloaded.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.errors import ErgmeterError, FormatError, UsageError
from ergmeter.flops.config import Config, MissingFieldError, read_config
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
    try:
        graph = model_graph(config, image_size=image_size)
    except FormatError as error:
        if config.where != _TYPED:
            raise
        raise UsageError(_wrong(config, error)) from error
    if further and not any(".mtp." in node.name for node in graph):
        raise UsageError(
            f"{config.where}: this family predicts no further tokens, as far as known;"
            " leave out --mtp"
        )
    return graph


def read_model(model: str) -> Config:
    """Its configuration."""
    if Path(model).exists():
        return read_config(model)
    if "=" in model:
        return Config(_dimensions(model), where=_TYPED)
    if _HUB_NAME.fullmatch(model):
        return _downloaded(model)
    return read_config(model)


_TYPED = "the dimensions given"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?<!\.json)")


def _downloaded(name: str) -> Config:
    """The configuration of a model on the hub, from the cache of what was downloaded of it."""
    folder = _hub_cache() / f"models--{name.replace('/', '--')}"
    revision = folder / "refs" / "main"
    try:
        found = folder / "snapshots" / revision.read_text("utf-8").strip() / "config.json"
    except OSError:
        found = None
    if found is None or not found.is_file():
        local = name.rpartition("/")[2]
        raise FormatError(
            f"{name}: no such file, and no config.json of it in the local cache; fetch it with"
            f" `hf download {name} config.json --local-dir {local}` and pass {local}"
        )
    return read_config(found)


def _hub_cache() -> Path:
    """Where huggingface_hub keeps what it downloads, by its own variables."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if given:
        return Path(given).expanduser()
    home = os.environ.get("HF_HOME")
    if home is None:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = f"{cache}/huggingface"
    return Path(home).expanduser() / "hub"


def _wrong(config: Config, error: FormatError) -> str:
    """What is wrong with typed dimensions, by the names they are typed under."""
    typed = {field: short for short, field in _SHORT.items()}
    if not isinstance(error, MissingFieldError):
        return re.sub(r"\w+", lambda word: typed.get(word[0], word[0]), str(error))
    wanted = [typed.get(name, name) for name in _missing(config, error)]
    example = ",".join(f"{name}=..." for name in wanted)
    verb = "is" if len(wanted) == 1 else "are"
    return f"{_TYPED}: {', '.join(wanted)} {verb} missing; add {example}"


def _missing(config: Config, first: MissingFieldError) -> list[str]:
    """Every field that is missing: the next one is found by putting something in place of one."""
    fields, names = config.fields, [first.names[0]]
    for _ in _SHORT:
        fields[names[-1]] = _PLACEHOLDER
        try:
            model_graph(Config(fields, where=_TYPED))
        except MissingFieldError as error:
            names.append(error.names[0])
        except ErgmeterError:  # what was put there fits nothing; the names before it are right
            break
        else:
            break
    return names


_PLACEHOLDER = 64


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
