"""The model a user means: a config.json, a model's directory or its name on the Hugging Face hub,
or a few dimensions typed in.

Nothing is fetched: a name is looked up where the hub's own tools keep what they have downloaded.

The trap of dimensions: one that nobody reads. `experts=8` on a dense family changes nothing, and
the figure of the dense model looks like an answer. So the dimensions choose the family where it is
not named, what they leave open is listed as assumed, and one without an effect is refused.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.errors import ErgmeterError, FormatError, UsageError
from ergmeter.flops.config import MissingFieldError, ModelConfig, defaults_of, read_config
from ergmeter.flops.graph.activation_traits import traits
from ergmeter.flops.models import UnknownArchitectureError, model_graph

if TYPE_CHECKING:
    from ergmeter.flops.graph.graph import Graph
    from ergmeter.flops.graph.vision_towers import ImageSize

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
        config = config.having("mtp_num_layers", further)
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


def read_model(model: str) -> ModelConfig:
    """Its configuration."""
    if Path(model).exists():
        return read_config(model)
    if "=" in model:
        return _typed(model)
    if _HUB_NAME.fullmatch(model):
        return _downloaded(model)
    return read_config(model)


_TYPED = "the dimensions given"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?<!\.json)")


def _downloaded(name: str) -> ModelConfig:
    """The configuration of a model on the hub, from the cache of what was downloaded of it."""
    folder = _hub_cache() / f"models--{name.replace('/', '--')}"
    revision = folder / "refs" / "main"
    try:
        found = folder / "snapshots" / revision.read_text("utf-8").strip() / "config.json"
    except OSError:
        found = None
    if found is None or not found.is_file():
        local = name.rpartition("/")[2]
        raise UsageError(
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


def _wrong(config: ModelConfig, error: FormatError) -> str:
    """What is wrong with typed dimensions, by the names they are typed under."""
    typed = {field: short for short, field in _SHORT.items()}
    if isinstance(error, UnknownArchitectureError):
        return (
            f"{_TYPED}: {error.said}; leave type out for Llama's layers, or take a family that is"
            " alike (qwen3, mixtral, gpt2, ...)"
        )
    if not isinstance(error, MissingFieldError):
        return re.sub(r"\w+", lambda word: typed.get(word[0], word[0]), str(error))
    wanted = [typed.get(name, name) for name in _missing(config, error)]
    example = ",".join(f"{name}=..." for name in wanted)
    verb = "is" if len(wanted) == 1 else "are"
    return f"{_TYPED}: {', '.join(wanted)} {verb} missing; add {example}"


def _missing(config: ModelConfig, first: MissingFieldError) -> list[str]:
    """Every field that is missing: the next one is found by putting something in place of one."""
    fields, names = config.fields, [first.names[0]]
    for _ in _SHORT:
        fields[names[-1]] = _PLACEHOLDER
        try:
            model_graph(ModelConfig(fields, where=_TYPED, defaults=_not_sizes(config.model_type)))
        except MissingFieldError as error:
            names.append(error.names[0])
        except ErgmeterError:  # what was put there fits nothing; the names before it are right
            break
        else:
            break
    return names


_PLACEHOLDER = 64


def _typed(text: str) -> ModelConfig:
    """The configuration that dimensions make, in the family they are of."""
    fields = _dimensions(text)
    gated = fields.pop(_GATED, None)
    if gated is not None and not isinstance(gated, bool):
        raise UsageError(f"{_TYPED}: gated must be true or false; got {gated!r}")
    assumed = []
    defaults: dict[str, Any] = {}
    if "model_type" not in fields:
        fields["model_type"] = _family(fields, gated=gated)
        if "num_attention_heads" in fields:  # of Mistral's class in transformers the default is 8
            fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
        assumed.append(_style(fields, gated=gated))
    elif gated is not None:
        raise UsageError(
            f"{_TYPED}: type={fields['model_type']} has a feed-forward of its own; leave out gated"
        )
    else:
        defaults = _not_sizes(fields["model_type"])
    other = _FEED_FORWARD.get(fields["model_type"])
    if other and "intermediate_size" in fields:
        fields[other] = fields.pop("intermediate_size")
    config = ModelConfig(fields, where=_TYPED, defaults=defaults, assumed=assumed)
    _check_used(config)
    return config


def _not_sizes(kind: object) -> dict[str, Any]:
    """The defaults of a family for what is no size: whoever types sizes has to type them all."""
    return {
        name: value
        for name, value in defaults_of(str(kind)).items()
        if name in ("head_dim", "sliding_window_pattern") or isinstance(value, bool | str)
    }


_GATED = "gated"
# Families that call the inner size of the feed-forward otherwise.
_FEED_FORWARD = {
    "gpt2": "n_inner",
    "gptj": "n_inner",
    "gpt_bigcode": "n_inner",
    "opt": "ffn_dim",
    "falcon": "ffn_hidden_size",
}
_MIXTURE = ("num_local_experts", "num_experts_per_tok")


def _family(fields: dict[str, Any], *, gated: bool | None) -> str:
    """The family that has what the dimensions name, where they do not name the family."""
    is_mixture = any(name in fields for name in _MIXTURE)
    has_window = "sliding_window" in fields
    if gated is False and (is_mixture or has_window):
        raise UsageError(
            f"{_TYPED}: gated=false goes with neither experts nor window: name the family with"
            " type= (starcoder2 has a window and no gate)"
        )
    if gated is False:
        return "arcee"  # Llama with a feed-forward of two matrices
    return "mixtral" if is_mixture else "mistral" if has_window else "llama"


def _style(fields: dict[str, Any], *, gated: bool | None) -> str:
    """What dimensions leave open, and how it was taken."""
    kind = fields["model_type"]
    feed = "experts" if kind == "mixtral" else "feed-forward"
    gate = "without a gate (2 matrices)" if gated is False else "with a gate (3 matrices)"
    head = "tied" if fields.get("tie_word_embeddings") else "untied"
    biases = "" if any("bias" in name for name in fields) else ", no biases"
    others = "gated=false, tied=true or " if kind == "llama" else ""
    return (
        f"{'Mixtral' if kind == 'mixtral' else 'Llama'}-style layers: {feed} {gate}, {head}"
        f" head{biases}; {others}type=gpt2, type=qwen3, ... for others"
    )


def _check_used(config: ModelConfig) -> None:
    """Refuse dimensions that change nothing in this family."""
    try:
        model_graph(config)
    except ErgmeterError:  # which is said where the graph is read
        return
    for name in config.fields:
        if name in _NO_SIZES or _has_effect(config, name):
            continue
        typed = next((short for short, field in _SHORT.items() if field == name), name)
        family = config.model_type
        other = _FAMILIES_WITH.get(name)
        near = get_close_matches(typed, (*_SHORT, *config.read), n=1, cutoff=0.8)
        switch = _SWITCHES.get(name)
        if switch in config.read and switch not in config.fields:
            advice = f"add {switch}=true to switch it on"
        elif other and other != family:
            advice = f"type={other} is one that uses it"
        elif near and near[0] != typed:
            advice = f"did you mean {near[0]}?"
        else:
            advice = "leave it out, or name the family that has it with type="
        raise UsageError(f"{_TYPED}: {typed} has no effect in the family {family}; {advice}")


def _has_effect(config: ModelConfig, name: str) -> bool:
    """Whether the model is another one where this field has another value."""
    if _is_of_code(config, name):
        return True
    value = config.fields[name]
    if name not in config.read:
        return False
    if not isinstance(value, int):
        return True
    other = not value if isinstance(value, bool) else 2 * value + 1
    try:
        changed = model_graph(config.having(name, other))
    except ErgmeterError:  # it can't have that value, so it matters
        return True
    return changed.nodes != model_graph(config.having(name, value)).nodes


_SWITCHES = {"sliding_window": "use_sliding_window"}
# Of the weights' storage, or the name of the family itself.
_NO_SIZES = ("model_type", "torch_dtype")
_FAMILIES_WITH = {
    "sliding_window": "mistral",
    **dict.fromkeys(_MIXTURE, "mixtral"),
    **dict.fromkeys(("num_experts", "moe_intermediate_size"), "qwen3_moe"),
    **dict.fromkeys(
        ("n_routed_experts", "n_shared_experts", "kv_lora_rank", "q_lora_rank",
         "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        "deepseek_v3",
    ),
}  # fmt: skip


def _is_of_code(config: ModelConfig, name: str) -> bool:
    """Whether a field decides how the model's code is written, which memory goes by."""
    without = {field: value for field, value in config.fields.items() if field != name}
    return traits(ModelConfig(without, where=_TYPED)) != traits(config)


def _dimensions(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for word in text.split(","):
        name, equals, value = (piece.strip() for piece in word.partition("="))
        if not equals or not name or not value:
            raise UsageError(f"{word!r} is no dimension; write hidden=4096,layers=32,heads=32,...")
        if name not in (*_SHORT, _GATED) and "_" not in name:
            known = (*_SHORT, _GATED)
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
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
