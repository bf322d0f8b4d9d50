"""Reads the model that a user names, and builds its graph.

A model is a config.json, a model's directory, a name on the Hugging Face hub, or a few dimensions
typed in. Nothing is fetched: a name is looked up in the hub's local cache.

A typed dimension that no family reads would change nothing: `experts=8` on a dense family gives the
dense model's count. So dimensions choose the family where it is not named, what they leave open is
listed as assumed, and a dimension without effect is refused.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ergmeter.errors import ErgmeterError, FormatError, UsageError, closest, suggestion
from ergmeter.flops.config import MissingFieldError, ModelConfig, defaults_of, read_config
from ergmeter.flops.estimate.saved_activations import traits
from ergmeter.flops.families import DECODERS
from ergmeter.flops.families.encoders import ENCODERS, SEQ2SEQ, encoder_graph, seq2seq_graph
from ergmeter.flops.families.vision import (
    IMAGES,
    LANGUAGE_ALONE,
    VISION,
    ImageSize,
    language_alone,
    vision_language_graph,
)
from ergmeter.flops.graph.graph import Graph
from ergmeter.flops.graph.heads import with_head
from ergmeter.flops.graph.layers import decoder_graph

# The graph of a configuration, of any family.


class UnknownArchitectureError(FormatError):
    """A `model_type` that no reader is for; `said` is that alone, without what to do."""

    def __init__(self, where: str, message: str, *, instead: str = "") -> None:
        self.said = message
        advice = instead or (
            "if its layers are like a known family's, put that in model_type"
            " (llama, qwen3, mixtral, gpt2, ...), or pass its dimensions:"
            " hidden=...,layers=...,heads=...,ffn=...,vocab=..."
        )
        super().__init__(f"{where}: {message}; {advice}")


_RUN = "`erg flops MODEL --engine counted` runs it, where transformers is installed"
_LIVE = "a Meter counts the live model as it runs: pass it as model="
# Families of transformers that people ask for and no reader is for: why, and what to do instead.
_NOT_READ_FOR = (
    ("its attention layers share one block's weights, each with adapters of its own", _RUN,
     ("zamba", "zamba2")),
    ("a learned index picks the keys that each query meets", _RUN,
     ("deepseek_v32", "deepseek_v4", "glm_moe_dsa")),
    ("its layers are of a kind that no reader is for", _RUN,
     ("rwkv", "xlstm", "reformer", "xlnet", "deberta")),
    ("some of its layers attend to images", _LIVE, ("mllama",)),
    ("it is several models that hear, think and speak", _LIVE, ("qwen2_5_omni", "qwen3_omni_moe")),
    ("it reads sound, at several rates", _LIVE,
     ("wav2vec2", "wav2vec2-bert", "wav2vec2-conformer", "hubert", "wavlm", "seamless_m4t")),
    ("it reads images, by other layers than a ViT's", _LIVE,
     ("resnet", "convnext", "convnextv2", "efficientnet", "mobilevit", "swin", "swinv2", "beit",
      "segformer", "timm_wrapper", "detr", "sam", "sam2", "blip", "blip-2")),
)  # fmt: skip
NOT_READ = {
    family: (reason, instead) for reason, instead, families in _NOT_READ_FOR for family in families
}


def model_graph(
    config: ModelConfig, *, image_size: ImageSize | None = None, architecture: str | None = None
) -> Graph:
    """The graph of the model that a configuration describes. FormatError for an unknown family.

    `architecture` is the model's class, which says what head it has: the first of the
    configuration's own `architectures`, if not given.

    `image_size`, height and width in pixels, is for vision towers that take an image as it is; one
    that resizes every image to the same size knows it itself.
    """
    kind = config.model_type
    if image_size is not None:
        _check_size(config, image_size)
    listed = config.names("architectures")
    name = architecture or (listed[0] if listed else None)
    if kind in DECODERS:
        graph = decoder_graph(DECODERS[kind](config))
    elif kind in ENCODERS:
        graph = encoder_graph(ENCODERS[kind](config))
    elif kind in SEQ2SEQ:
        graph = seq2seq_graph(SEQ2SEQ[kind](config))
    elif kind in VISION:
        graph = vision_language_graph(VISION[kind](config, image_size))
    elif kind in LANGUAGE_ALONE:
        graph = language_alone(config)
    elif kind in IMAGES:
        graph = IMAGES[kind](config, image_size, name or "")
    else:
        raise _unknown(config)
    if kind not in IMAGES:
        graph = with_head(graph, config, name)
    return replace(
        graph,
        assumptions=(*graph.assumptions, *config.assumptions),
        facts=graph.facts | _learned_positions(graph, config),
        traits=traits(config),
    )


def _learned_positions(graph: Graph, config: ModelConfig) -> dict[str, int]:
    """The longest sequence, where positions are looked up in a table."""
    if not any(node.role == "positions" and node.stream == "tokens" for node in graph):
        return {}
    names = ("n_positions", "max_position_embeddings", "max_target_positions", "max_seq_len")
    positions = config.maybe(*names)
    if positions is None:
        return {}
    return {"learned_positions": positions - _NEVER_USED if graph.family in _PADDED else positions}


# Their positions begin after that of padding, and the field counts the rows of the table.
_PADDED = ("roberta", "xlm-roberta", "camembert", "mpnet", "esm", "data2vec-text")
_NEVER_USED = 2


def known_families() -> list[str]:
    """Every `model_type` that can be read."""
    return sorted((*DECODERS, *ENCODERS, *SEQ2SEQ, *VISION, *IMAGES, *LANGUAGE_ALONE))


def _check_size(config: ModelConfig, image_size: ImageSize) -> None:
    if config.model_type not in (*VISION, *IMAGES):
        raise UsageError(f"{config.where}: this model sees no images; leave the image size out")
    if any(isinstance(length, bool) or length < 1 for length in image_size):
        raise UsageError(f"an image size is a height and a width in pixels; got {image_size!r}")


def _unknown(config: ModelConfig) -> FormatError:
    kind = config.model_type
    if not kind:
        return FormatError(
            f"{config.where}: the field model_type is missing; add it (llama, qwen3, ...)"
        )
    if kind in NOT_READ:
        reason, instead = NOT_READ[kind]
        return UnknownArchitectureError(
            config.where, f"{kind} can't be counted from its configuration: {reason}",
            instead=instead,
        )  # fmt: skip
    hint = suggestion(kind, known_families(), " (is it {}?)", cutoff=0.8)
    return UnknownArchitectureError(config.where, f"the architecture {kind!r} is not known{hint}")


# Finding and reading the configuration.

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
        raise UsageError(_dimension_error(config, error)) from error
    if further and not any(".mtp." in node.name for node in graph):
        raise UsageError(
            f"{config.where}: this family predicts no further tokens, as far as known;"
            " leave out --mtp"
        )
    return graph


def read_model(model: str) -> ModelConfig:
    """Its configuration."""
    if not Path(model).exists():
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
        path = folder / "snapshots" / revision.read_text("utf-8").strip() / "config.json"
    except OSError:
        path = None
    if path is None or not path.is_file():
        local = name.rpartition("/")[2]
        raise UsageError(
            f"{name}: no such file, and no config.json of it in the local cache; fetch it with"
            f" `hf download {name} config.json --local-dir {local}` and pass {local}"
        )
    return read_config(path)


def _hub_cache() -> Path:
    """The folder of huggingface_hub's downloads, by its own variables."""
    hub_cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if hub_cache:
        return Path(hub_cache).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME", f"{cache}/huggingface")).expanduser() / "hub"


def _dimension_error(config: ModelConfig, error: FormatError) -> str:
    """An error in typed dimensions, with the names they are typed under."""
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
    """The defaults of a family for fields that are no sizes: typed sizes must be complete."""
    return {
        name: value
        for name, value in defaults_of(str(kind)).items()
        if name in ("head_dim", "sliding_window_pattern") or isinstance(value, bool | str)
    }


_GATED = "gated"
# Families that call the inner size of the feed-forward otherwise.
_FEED_FORWARD = {
    **dict.fromkeys(("gpt2", "gptj", "gpt_bigcode"), "n_inner"),
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
    """Fields that dimensions leave open, and their assumed values."""
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
    """Refuse dimensions that this family does not read."""
    try:
        model_graph(config)
    except ErgmeterError:  # which is said where the graph is read
        return
    for name in config.fields:
        if name in _NO_SIZES or name in config.read or _is_of_code(config, name):
            continue
        typed = next((short for short, field in _SHORT.items() if field == name), name)
        family = config.model_type
        other = _FAMILIES_WITH.get(name)
        near = closest(typed, (*_SHORT, *config.read), cutoff=0.8)
        switch = _SWITCHES.get(name)
        if switch in config.read and switch not in config.fields:
            advice = f"add {switch}=true to switch it on"
        elif other and other != family:
            advice = f"type={other} is one that uses it"
        elif near and near != typed:
            advice = f"did you mean {near}?"
        else:
            advice = "leave it out, or name the family that has it with type="
        raise UsageError(f"{_TYPED}: {typed} has no effect in the family {family}; {advice}")


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
    """True if a field decides how the model's code is written, which memory goes by."""
    without = {field: value for field, value in config.fields.items() if field != name}
    return traits(ModelConfig(without, where=_TYPED)) != traits(config)


def _dimensions(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for word in text.split(","):
        name, equals, value = (piece.strip() for piece in word.partition("="))
        if not equals or not name or not value:
            raise UsageError(f"{word!r} is no dimension; write hidden=4096,layers=32,heads=32,...")
        if name not in (*_SHORT, _GATED) and "_" not in name:
            names = (*_SHORT, _GATED)
            hint = suggestion(name, names, "did you mean {}?") or f"there are {', '.join(names)}"
            raise UsageError(f"no dimension {name!r}; {hint} (or a field of a config.json)")
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
